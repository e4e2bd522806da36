# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Weights that the loss does not depend on, which are frozen on several processes."""

import logging

import pytest
import torch
from accelerate import Accelerator
from test_masked_lm import ARCHITECTURES, tiny_model

from d3pm_hf import Denoiser, TextDenoiser
from d3pm_hf.training.run_network import freeze_unused, unused_names


UNUSED = {"esm": ("contact_head",), "longformer": ("_global", "pooler"), "big_bird": ("pooler",)}
TOKENS = torch.tensor([[2, 5, 9, 4, 7, 3]])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_unused_weights_of_masked_language_models(architecture):
    denoiser = TextDenoiser(tiny_model(architecture)).train()
    expected = [
        name for name, _ in denoiser.named_parameters() if any(p in name for p in UNUSED.get(architecture, ()))
    ]
    assert unused_names(denoiser, TOKENS, {}) == expected


class Branches(Denoiser):
    """A denoiser with weights of every kind, dropout, and a buffer that each call in training mode changes."""

    def __init__(self):
        super().__init__()
        self.table, self.dropout = torch.nn.Embedding(32, 32), torch.nn.Dropout(0.5)
        self.norm = torch.nn.BatchNorm1d(6)
        self.always, self.training_only, self.evaluation_only, self.null, self.chosen, self.never = (
            torch.nn.Parameter(torch.ones(32)) for _ in range(6)
        )
        self.chosen.requires_grad_(False)

    def forward(self, x_t, timestep, class_labels, attention_mask):
        logits = (
            self.norm(self.dropout(self.table(x_t))) * self.always * attention_mask[..., None] + class_labels[:, None]
        )
        return logits * (self.training_only if self.training else self.evaluation_only)

    def drop_condition(self, condition, rows):
        return {"class_labels": torch.where(rows[:, None], self.null, condition["class_labels"])}


@pytest.mark.parametrize("is_dropped", [False, True])
def test_nothing_else_changes(monkeypatch, caplog, fresh_accelerator, is_dropped):
    """Weights of one mode are used. What the user has frozen is not reported. Random numbers and buffers stay."""
    accelerator = Accelerator(cpu=True)
    batch = {"x_0": TOKENS, "condition": {"class_labels": torch.ones(1, 32)}, "attention_mask": TOKENS > 2}
    denoiser = Branches().train()
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    monkeypatch.setattr("d3pm_hf.training.distributed.broadcast_object_list", lambda objects: objects)
    state, buffers = torch.get_rng_state(), [buffer.clone() for buffer in denoiser.buffers()]
    with caplog.at_level(logging.WARNING):
        frozen = freeze_unused(accelerator, denoiser, batch, is_dropped)
    names = ["never"] if is_dropped else ["null", "never"]
    assert [id(parameter) for parameter in frozen] == [id(denoiser.get_parameter(name)) for name in names]
    assert not any(denoiser.get_parameter(name).requires_grad for name in (*names, "chosen"))
    assert denoiser.always.requires_grad and denoiser.training_only.requires_grad and denoiser.training
    assert f"which are not trained: {', '.join(names)}" in caplog.text
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, denoiser.buffers(), buffers))
    assert all(parameter.grad is None for parameter in denoiser.parameters())


def test_one_process_freezes_nothing(fresh_accelerator):
    """It reads no example either."""
    assert freeze_unused(Accelerator(cpu=True), Branches(), {}, False) == []
