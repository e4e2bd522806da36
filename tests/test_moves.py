# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Networks that move between devices keep their tied weights, also where a move makes new parameters, as on XLA."""

import pytest
import torch
from safetensors.torch import load_file
from training_run import Sentences, make_pipeline, run

from d3pm_hf import D3PMPipeline
from d3pm_hf.data import DataCollatorForD3PM
from d3pm_hf.training.step_batches import IndexedExamples, RunCollator
from d3pm_hf.utils.modules import copy_module, move_module, tied_names


NUM_PARAMETERS = 45  # of the text model; the output layer is the word embeddings


@pytest.fixture
def new_parameters():
    """`Module.to` makes a new parameter for each name of a parameter, as it does when a network is moved to XLA."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def is_tied(network):
    return network.lm_head.weight is network.get_input_embeddings().weight


def test_a_plain_move_to_such_a_device_unties(new_parameters):
    network = make_pipeline().text_model
    assert is_tied(network) and len(list(network.parameters())) == NUM_PARAMETERS
    network.to("cpu")
    assert not is_tied(network) and len(list(network.parameters())) == NUM_PARAMETERS + 1


def test_tied_weights_survive_a_move(new_parameters):
    pipeline = make_pipeline()
    before, groups = list(pipeline.denoiser.parameters()), tied_names(pipeline.denoiser)
    assert sorted(map(len, groups)) == [2]
    move_module(pipeline.denoiser, "cpu")
    after = list(pipeline.denoiser.parameters())
    assert is_tied(pipeline.text_model) and tied_names(pipeline.denoiser) == groups
    assert len(after) == NUM_PARAMETERS and not any(a is b for a, b in zip(after, before))
    pipeline.to("cpu")
    assert is_tied(pipeline.text_model) and not any(a is b for a, b in zip(pipeline.denoiser.parameters(), after))


def test_a_copy_on_the_cpu_has_memory_of_its_own():
    network = make_pipeline().text_model.eval()
    network.backbone.embeddings.position_embeddings.weight.requires_grad_(False)
    copied, x_t = copy_module(network), torch.arange(16)[None]
    assert is_tied(copied) and not copied.training and len(list(copied.parameters())) == NUM_PARAMETERS
    assert not copied.backbone.embeddings.position_embeddings.weight.requires_grad
    torch.testing.assert_close(copied(x_t, 3).logits, network(x_t, 3).logits)
    tensors = {id(v) for v in (*network.parameters(), *network.buffers())}
    assert not tensors & {id(v) for v in (*copied.parameters(), *copied.buffers())}


@pytest.mark.usefixtures("fresh_accelerator")
def test_training_after_such_a_move(tmp_path, new_parameters):
    """The optimizer has the parameters of the network, the output layer is trained, and what is saved is what was evaluated."""
    settings = {"max_train_steps": 10, "validation_steps": 5, "checkpointing_steps": 5, "num_samples": 0}
    trained = run(output_dir=str(tmp_path / "new"), **settings)
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    plain = run(output_dir=str(tmp_path / "plain"), **settings)
    assert (tmp_path / "new/log.jsonl").read_text() == (tmp_path / "plain/log.jsonl").read_text()
    assert is_tied(trained.text_model)
    state = torch.load(tmp_path / "new/checkpoint-10/optimizer.bin")
    assert len(state["state"]) == NUM_PARAMETERS
    saved = D3PMPipeline.from_pretrained(tmp_path / "new")
    x_t = torch.stack([Sentences(4)[i] for i in range(4)])
    expected = plain.text_model(x_t, 3).logits
    for pipeline in (trained, saved):
        torch.testing.assert_close(pipeline.text_model(x_t, 3).logits, expected, rtol=1e-6, atol=1e-6)
    weights = [load_file(tmp_path / name / "checkpoint-10/model.safetensors") for name in ("new", "plain")]
    assert weights[0].keys() == weights[1].keys()
    torch.testing.assert_close(*(torch.cat([w[key].flatten() for key in w]) for w in weights), rtol=0, atol=0)


def test_the_seeds_of_a_batch_stay_on_the_host():
    """A generator needs its seed as a number: one that was moved to a device would be read back at each step."""
    examples = IndexedExamples(Sentences())
    batch = RunCollator(DataCollatorForD3PM(), 28, ())(
        [examples[index, 2**62 + index, 9 * index] for index in range(3)]
    )
    assert batch["seed"] == [2**62, 2**62 + 1, 2**62 + 2]
    assert batch["x_0"].shape == (3, 16) and batch["timestep"].tolist() == [0, 9, 18]
