# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checkpoints that version one wrote load, and do what they did.

fixtures/version_one holds a text checkpoint (absorbing, characters) and an image checkpoint (Gaussian, whose schedule
and unigram frequencies are in transition.safetensors), both written by the code of commit eeb4130. What version one
computed from them is in expected.safetensors. These files are not written again.
"""

from pathlib import Path

import pytest
import torch
from comparison import assert_same_draws
from safetensors.torch import load_file

from d3pm_hf import D3PMImagePipeline, D3PMPipeline, D3PMTextPipeline


FOLDER = Path(__file__).parent / "fixtures" / "version_one"
PIPELINES = {"text": D3PMTextPipeline, "image": D3PMImagePipeline}


def network_output(pipeline, kind):
    """The network's output for one fixed x_t at timestep 4."""
    timestep = torch.tensor([4])
    with torch.no_grad():
        if kind == "text":
            tokens = torch.arange(12)[None] * 5 % 28
            return pipeline.text_model(tokens, timestep=timestep, return_dict=False)[0]
        pixels = torch.arange(16).reshape(1, 1, 4, 4) % 8
        return pipeline.unet(pixels / 3.5 - 1, timestep, return_dict=False)[0]


def samples(pipeline, kind):
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    output = pipeline(
        batch_size=4, num_inference_steps=5, generator=generator, sampler="ancestral", output_type="latent"
    )
    return output.sequences if kind == "text" else output.images


def assert_as_recorded(pipeline, kind):
    expected = load_file(FOLDER / "expected.safetensors")
    assert type(pipeline) is PIPELINES[kind]
    torch.testing.assert_close(network_output(pipeline, kind), expected[f"{kind}/output"], rtol=1e-5, atol=1e-5)
    matrices = torch.stack([pipeline.scheduler.transition.matrix(0, n) for n in (1, 5, 10)])
    torch.testing.assert_close(matrices[..., :8, :8], expected[f"{kind}/matrix"], rtol=1e-10, atol=1e-10)
    assert_same_draws(samples(pipeline, kind).to(torch.uint8), expected[f"{kind}/samples"])


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_checkpoint_of_version_one_loads_and_samples_as_before(kind):
    assert_as_recorded(D3PMPipeline.from_pretrained(FOLDER / kind), kind)


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_checkpoint_of_version_one_survives_being_saved_and_loaded(kind, tmp_path):
    D3PMPipeline.from_pretrained(FOLDER / kind).save_pretrained(tmp_path)
    assert_as_recorded(D3PMPipeline.from_pretrained(tmp_path), kind)


def test_the_tokenizer_of_version_one_reads_and_writes_characters():
    pipeline = D3PMPipeline.from_pretrained(FOLDER / "text")
    pipeline.set_progress_bar_config(disable=True)
    texts = pipeline("the quick [MASK][MASK]", generator=torch.Generator().manual_seed(0)).texts
    assert len(texts) == 1 and texts[0].startswith("the quick ") and len(texts[0]) == 12
