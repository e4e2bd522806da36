# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What a training step and a sampling step ask of a device: waits of the host, copies and kernels.

The host runs ahead of a GPU only as long as nothing is read back from it. The numbers here may fall; a change that makes one grow
fails, and has to say why.
"""

from pathlib import Path

import pytest
import torch
from away import AWAY, Away, counting, without_float64

from d3pm_hf import D3PMScheduler
from d3pm_hf.data import DataCollatorForD3PM
from d3pm_hf.samplers import ancestral, confidence, positions_first, predictor_corrector, remasking
from d3pm_hf.training import D3PMTrainingArguments
from d3pm_hf.training.objective import diffusion_loss
from d3pm_hf.training.step_batches import IndexedExamples, RunCollator
from d3pm_hf.utils import kept_logits


B, N, K, T = 8, 16, 28, 50
FAMILIES = {
    "absorbing": {},
    "uniform": {"transition": "uniform"},
    "absorbing_uniform": {"transition": "absorbing_uniform"},
    "stationary": {"transition": "stationary", "stationary_probs": torch.arange(1.0, K + 1) / (K * (K + 1) / 2)},
    "gaussian": {"transition": "gaussian"},
    "autoregressive": {"transition": "autoregressive", "num_train_timesteps": N},
}
# Waits, copies from the host and kernels of x_t and of the loss with its gradient, beside the batch itself. The copy is that of the
# noise. A family of matrices waits once, to know whether a row has to be computed again because a product has underflowed.
TRAINING = {
    "absorbing": (0, 1, 55),
    "uniform": (0, 1, 194),
    "absorbing_uniform": (0, 1, 196),
    "stationary": (0, 1, 195),
    "gaussian": (1, 1, 101),
    "autoregressive": (0, 1, 87),
}
# The same for one step of sampling; the copy is that of the uniforms of a generator on the CPU. Uniform states are drawn by three
# kernels in place of a search, which is slower, and one more.
SAMPLING = {
    "absorbing": (0, 1, 57),
    "uniform": (0, 1, 67),
    "absorbing_uniform": (0, 1, 68),
    "stationary": (0, 1, 66),
    "gaussian": (0, 1, 36),
    "autoregressive": (0, 1, 84),
}


@pytest.fixture(autouse=True)
def device():
    with Away():
        yield AWAY


def create(name):
    options = {"num_train_timesteps": T, "beta_schedule": "cosine", **FAMILIES[name]}
    scheduler = D3PMScheduler(K, **options)
    logits = torch.randn(B, N, K, generator=torch.Generator().manual_seed(0))
    return scheduler, logits.to(AWAY)


def training_batch(scheduler):
    """A batch as the loader gives it, on the device."""
    data = torch.randint(0, K - 1, (B, N), generator=torch.Generator().manual_seed(0))
    examples = IndexedExamples({(i, i): data[i] for i in range(B)})
    batch = RunCollator(DataCollatorForD3PM(), K, ())([examples[i, i, i * len(scheduler) // B] for i in range(B)])
    return {name: value.to(AWAY) if torch.is_tensor(value) else value for name, value in batch.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_training_step(name):
    scheduler, logits = create(name)
    arguments, batch = D3PMTrainingArguments(), training_batch(scheduler)
    logits.requires_grad_()
    for _ in range(2):  # the first step fills the caches
        with counting() as counts:
            loss, *_ = diffusion_loss(scheduler, lambda x_t, timesteps: logits, batch, arguments)
            loss.backward()
    waits, copies, kernels = TRAINING[name]
    assert (counts.waits, counts.copies) == (waits, copies) and counts.kernels <= kernels


@pytest.mark.parametrize("name", FAMILIES)
def test_a_device_without_float64(name):
    """It waits no more than others, in a training step and in a step of sampling."""
    with without_float64():
        scheduler, logits = create(name)
        batch, logits = training_batch(scheduler), logits.requires_grad_()
        for _ in range(2):  # the first step fills the caches
            with counting() as counts:
                loss, *_ = diffusion_loss(scheduler, lambda x_t, timesteps: logits, batch, D3PMTrainingArguments())
                loss.backward()
        assert (counts.waits, counts.copies) == TRAINING[name][:2]
        assert waits_per_step(name, ancestral) == 0


def asked(logits):
    """A denoiser that can be asked for some elements."""

    def denoiser(x_t, timesteps, logits_to_keep=None):
        rows = logits[: len(x_t)]
        return rows if logits_to_keep is None else rows.flatten(0, -2).index_select(0, logits_to_keep)

    return denoiser


def test_logits_of_some_elements(monkeypatch):
    """The host waits once for the number of masks in a training step, and not at all in a step of sampling, where it knows it."""
    monkeypatch.setattr(kept_logits, "FEW_STATES", 0)
    scheduler, logits = create("absorbing")
    batch, logits = training_batch(scheduler), logits.requires_grad_()
    for _ in range(2):  # the first step fills the caches
        with counting() as counts:
            loss, *_ = diffusion_loss(scheduler, asked(logits), batch, D3PMTrainingArguments(loss="vb"))
            loss.backward()
    assert (counts.waits, counts.copies) == (1, 1)
    for sampler in (confidence, positions_first):
        waits = []
        for num_steps in (6, 3, 6):
            x_t = scheduler.sample_prior((B, N), device=AWAY)
            with counting() as counts:
                sampler(scheduler, asked(logits.detach()), x_t, scheduler.spaced_timesteps(6)[:num_steps])
            waits.append(counts.waits)
        assert waits[2] == waits[1]


def test_the_weights_of_a_law_of_timesteps():
    scheduler, logits = create("absorbing")
    arguments = D3PMTrainingArguments(timestep_sampling="logit_normal")
    for _ in range(2):
        with counting() as counts:
            diffusion_loss(scheduler, lambda x_t, timesteps: logits, training_batch(scheduler), arguments)
    assert counts.waits == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sampling_step(name):
    scheduler, logits = create(name)
    results = []
    for num_steps in (6, 3, 6):  # the first call fills the caches
        x_t = scheduler.sample_prior((B, N), device=AWAY)
        timesteps = scheduler.spaced_timesteps(6)[:num_steps]
        with counting() as counts:
            ancestral(scheduler, lambda x_t, t: logits, x_t, timesteps, generator=torch.Generator().manual_seed(0))
        results.append(counts)
    _, few, many = results
    per_step = [(getattr(many, key) - getattr(few, key)) / 3 for key in ("waits", "copies", "kernels")]
    waits, copies, kernels = SAMPLING[name]
    assert per_step[:2] == [waits, copies] and per_step[2] <= kernels
    assert few.waits == 1  # whether an output was not finite is asked once per call


@pytest.mark.parametrize("name", ["absorbing", "uniform", "absorbing_uniform"])
@pytest.mark.parametrize("corrector", ["forward_backward", "gibbs"])
def test_a_corrector(name, corrector):
    assert waits_per_step(name, predictor_corrector, corrector=corrector) == 0


@pytest.mark.parametrize("sampler", [confidence, remasking])
def test_a_step_of_a_heuristic(sampler):
    assert waits_per_step("absorbing", sampler) == 0


def waits_per_step(name, sampler, **options):
    (scheduler, logits), waits = create(name), []
    for num_steps in (6, 3, 6):  # the first call fills the caches
        x_t = scheduler.sample_prior((B, N), device=AWAY)
        with counting() as counts:
            sampler(scheduler, lambda x_t, t: logits, x_t, scheduler.spaced_timesteps(6)[:num_steps], **options)
        waits.append(counts.waits)
    return waits[2] - waits[1]


@pytest.mark.parametrize(
    "value, message", [(torch.nan, "NaN or infinity"), (torch.inf, "NaN or infinity"), (-torch.inf, "are -inf")]
)
def test_outputs_are_checked_at_the_end(value, message):
    """On a device a step does not look at the logits; the sampler does, once, and names the timestep."""
    scheduler, logits = create("absorbing")
    broken = logits.clone()
    broken[2, 3, :-1] = value  # the mask, which is never data, leaves no state possible

    def denoiser(x_t, t):
        return broken if t.cpu() == 24 else logits

    x_t = scheduler.sample_prior((B, N), device=AWAY)
    with pytest.raises(ValueError, match=f"{message} at timestep 24"):
        ancestral(scheduler, denoiser, x_t, [49, 24, 10])


def test_what_counts():
    """Each way to make the host wait is seen, and what does not wait is not."""
    x, index = torch.zeros(3, device=AWAY), torch.zeros((), dtype=torch.long, device=AWAY)
    waits = [
        lambda: x.sum().item(),
        lambda: bool(x.any()),
        lambda: x[index],
        lambda: x.nonzero(),
        lambda: x[x > 0],
        lambda: x.cpu(),
    ]
    waits += [lambda: int(index), lambda: x.masked_select(x > 0), lambda: x.unique()]
    for wait in waits:
        with counting() as counts:
            wait()
        assert counts.waits >= 1
    free = [lambda: x[0], lambda: x[1:], lambda: x[index[None]], lambda: x.masked_fill(x > 0, 1), lambda: x + 1.0]
    for one in free:
        with counting() as counts:
            one()
        assert counts.waits == counts.copies == 0
    with counting() as counts:
        torch.tensor([1.0, 2.0], device=AWAY)
        torch.ones(3).to(AWAY)
    assert counts.copies == 2


def test_the_table_of_the_docs():
    """docs/source/en/speed.md states these numbers."""
    text = (Path(__file__).parents[1] / "docs/source/en/speed.md").read_text(encoding="utf-8")
    for name in FAMILIES:
        row = " | ".join(map(str, [name, *TRAINING[name], *SAMPLING[name]]))
        assert f"| {row} |" in text, row
