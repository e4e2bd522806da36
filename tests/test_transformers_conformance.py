# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The checks of transformers' `ModelTesterMixin` and `ConfigTester` for `D3PMTextModel`; docs/conformance.md lists them."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from d3pm_hf import (
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextModel,
    D3PMTextPipeline,
    character_tokenizer,
    create_text_model,
)


K, B, N = 28, 3, 10
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKBONES = pytest.mark.parametrize("backbone", ["bert", "t5"])
VARIANTS = pytest.mark.parametrize(
    ("backbone", "is_decoder"),
    [("bert", False), ("bert", True), ("t5", False), ("t5", True)],
    ids=["bert", "bert-causal", "t5", "t5-causal"],
)


def make(backbone, is_decoder=False, **overrides):
    torch.manual_seed(0)
    return create_text_model("tiny", K, backbone=backbone, is_decoder=is_decoder, **overrides).eval()


def make_trained(backbone, is_decoder=False, **overrides):
    """A model none of whose weights has the value of an initialization."""
    model = make(backbone, is_decoder, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(0, K, (B, N), generator=generator), "timestep": torch.tensor([3, 90, 700])}


def logits(model, **kwargs):
    with torch.no_grad():
        return model(**{**inputs(), **kwargs}).logits


# Initialization


@pytest.fixture
def seeded_initialization(monkeypatch):
    """Seeds the initialization of every module, so that two of them agree whatever their order."""
    initialize = PreTrainedModel._initialize_weights

    def seeded(self, module, is_custom_code=False):
        torch.manual_seed(42)
        initialize(self, module, is_custom_code)

    monkeypatch.setattr(PreTrainedModel, "_initialize_weights", seeded)


@VARIANTS
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_can_init_all_missing_weights(backbone, is_decoder, tied, seeded_initialization):
    """Weights that a checkpoint lacks get the values of a fresh model."""
    fresh = make(backbone, is_decoder, tie_word_embeddings=tied)
    loaded = D3PMTextModel.from_pretrained(None, config=fresh.config, state_dict={})
    tensors = loaded.state_dict()
    assert tensors.keys() == fresh.state_dict().keys()
    for name, value in fresh.state_dict().items():
        assert torch.equal(tensors[name], value), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_t5_starts_with_its_neighbors(dtype):
    """The bias of head h at distance d is -d 2^(-4h/(H-1)), for the distances that have a bucket of their own."""
    model = D3PMTextModel._from_config(make("t5", num_attention_heads=4).config, dtype=dtype)
    attention = model.backbone.encoder.block[0].layer[0].SelfAttention
    bias = attention.compute_bias(8, 8)[0].double()  # [H, 8, 8]
    positions = torch.arange(8, dtype=torch.float64)
    distances = (positions[:, None] - positions).abs()
    slopes = 2.0 ** (-4 * torch.arange(4, dtype=torch.float64) / 3)
    expected = -distances * slopes[:, None, None]
    torch.testing.assert_close(bias, expected.to(dtype).double(), rtol=torch.finfo(dtype).eps, atol=0)


# Files


@BACKBONES
@pytest.mark.parametrize("saved", DTYPES, ids=str)
def test_weights_of_any_dtype(backbone, saved, tmp_path):
    """What is loaded, in any dtype, is what the file holds."""
    model = make_trained(backbone)
    reference = logits(model)
    model.to(saved).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for dtype in (None, *DTYPES):
        loaded = D3PMTextModel.from_pretrained(tmp_path, **({} if dtype is None else {"dtype": dtype}))
        dtype = saved if dtype is None else dtype
        assert loaded.dtype == dtype
        parameters = dict(loaded.named_parameters())
        for name, value in tensors.items():
            # T5 keeps the second layer of its MLPs in float32: in float16 it would overflow.
            kept = backbone == "t5" and dtype == torch.float16 and ".wo." in name
            assert torch.equal(parameters.pop(name), value.to(torch.float32 if kept else dtype)), name
        assert parameters.keys() <= set(loaded.all_tied_weights_keys)
        error = (logits(loaded).float() - reference).abs().max() / reference.abs().max()
        assert error < 8 * max(torch.finfo(dtype).eps, torch.finfo(saved).eps), (dtype, error)


@BACKBONES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pipelines_of_any_dtype(backbone, dtype, tmp_path):
    model = make_trained(backbone)
    pipeline = D3PMTextPipeline(model, D3PMScheduler(K, num_train_timesteps=4), character_tokenizer(), N)
    pipeline.save_pretrained(tmp_path / "float32")
    loaded = D3PMPipeline.from_pretrained(tmp_path / "float32", dtype=dtype)
    loaded.save_pretrained(tmp_path / "dtype")
    again = D3PMPipeline.from_pretrained(tmp_path / "dtype", dtype=dtype)
    for other in (loaded, again):
        assert other.dtype == dtype
        for name, value in model.state_dict().items():
            torch.testing.assert_close(
                other.text_model.state_dict()[name].float(), value, rtol=torch.finfo(dtype).eps, atol=1e-7
            )
        other.set_progress_bar_config(disable=True)
        assert len(other(batch_size=2, num_inference_steps=4, generator=torch.Generator().manual_seed(0)).texts) == 2
