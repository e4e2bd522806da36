# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The text denoiser: what its logits depend on, its files, and the sizes of the paper."""

import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, BertModel, T5EncoderModel

from d3pm_hf import D3PMTextConfig, D3PMTextModel, create_text_model


K, N = 28, 10
BACKBONES = pytest.mark.parametrize("backbone", ["bert", "t5"])


def make(backbone="bert", **overrides):
    torch.manual_seed(0)
    return create_text_model("tiny", K, backbone=backbone, **overrides).eval()


def tokens(seed=0):
    return torch.randint(0, K, (2, N), generator=torch.Generator().manual_seed(seed))


def depends_on(model, x, position):
    """Which positions' logits change with the token at `position`."""
    other = x.clone()
    other[:, position] = (other[:, position] + 1) % K
    change = model(other, torch.tensor([3, 9])).logits - model(x, torch.tensor([3, 9])).logits
    return (change.abs().amax((0, 2)) > 0).tolist()


@BACKBONES
def test_logits_by_hand(backbone):
    """The backbone reads words plus an MLP of the sinusoids of the timestep; above it is BERT's head, tied to the words."""
    model, x, t = make(backbone).double(), tokens(), torch.tensor([3, 700])
    angles = t[:, None] * 10000.0 ** (-torch.arange(16, dtype=torch.float64) / 16)  # [B, 16]
    first, second = model.timestep_embedding.linear_1, model.timestep_embedding.linear_2
    sinusoids = torch.cat([angles.cos(), angles.sin()], -1)
    words = model.get_input_embeddings().weight
    embeds = words[x] + second(torch.nn.functional.silu(first(sinusoids)))[:, None]
    hidden = model.transform.dense(model.backbone(inputs_embeds=embeds).last_hidden_state)
    hidden = torch.nn.functional.layer_norm(torch.nn.functional.gelu(hidden), (32,), eps=1e-12)
    expected = hidden @ words.T / (math.sqrt(32) if backbone == "t5" else 1)
    # diffusers computes the sinusoids in float32.
    torch.testing.assert_close(model(x, t).logits, expected, atol=1e-4, rtol=1e-4)


@BACKBONES
def test_reads_both_sides(backbone):
    model = make(backbone)
    assert all(depends_on(model, tokens(), 4)) and model.is_causal is False


@BACKBONES
def test_autoregressive_reads_what_came_before(backbone):
    model = make(backbone, is_decoder=True)
    assert model.is_causal is True
    for position in (0, 4, N - 1):
        assert depends_on(model, tokens(), position) == [i > position for i in range(N)]


@BACKBONES
def test_autoregressive_ignores_padding(backbone):
    model, x = make(backbone, is_decoder=True), tokens()
    visible = torch.ones(2, N).index_fill(1, torch.tensor([2]), 0)
    other = x.clone()
    other[:, 1] = (other[:, 1] + 1) % K  # read at position 2, one to the right
    torch.testing.assert_close(
        model(x, 3, attention_mask=visible).logits[:, 3:], model(other, 3, attention_mask=visible).logits[:, 3:]
    )


@BACKBONES
def test_each_sample_has_its_timestep(backbone):
    model, x = make(backbone), tokens()
    both = model(x, torch.tensor([5, 700])).logits
    torch.testing.assert_close(both[:1], model(x[:1], torch.tensor([5])).logits)
    torch.testing.assert_close(both[1:], model(x[1:], 700).logits)
    assert (both[0] - model(x, torch.tensor([6, 6])).logits[0]).abs().max() > 1e-5
    with pytest.raises(ValueError, match="pass `timestep`"):
        model(x)


def test_without_timestep_conditioning():
    model = make(timestep_conditioning=False)
    assert not any("timestep" in name for name, _ in model.named_parameters())
    assert torch.equal(model(tokens()).logits, model(tokens(), 5).logits)


@BACKBONES
@pytest.mark.parametrize("tied", [True, False])
def test_files(backbone, tied, tmp_path):
    model = make(backbone, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = sum(file.get_slice(name).get_shape()[-2:] == [K, 32] for name in file.keys())
    assert stored == (1 if tied else 2)
    for loader in (D3PMTextModel, AutoModel, AutoModelForMaskedLM):
        again = loader.from_pretrained(tmp_path)
        assert type(again) is D3PMTextModel
        torch.testing.assert_close(again(tokens(), 7).logits, model(tokens(), 7).logits)
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == model.config.to_diff_dict()


@BACKBONES
def test_every_parameter_learns(backbone):
    """Token 0 too: with BERT's default padding token its embedding would stay zero."""
    model = make(backbone).train()
    x = torch.arange(K)[None]
    torch.nn.functional.cross_entropy(model(x, 3).logits[0], x[0].flip(0)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0 or "token_type" in name, name
    assert (model.get_input_embeddings().weight.grad.abs().sum(-1) > 0).all()
    assert (model.get_input_embeddings().weight.abs().sum(-1) > 0).all()


def test_fresh_logits_are_moderate():
    """At the paper's width neither backbone starts with opinions: the cross-entropy is near log K."""
    for backbone in ("bert", "t5"):
        torch.manual_seed(0)
        model = create_text_model("paper", K, backbone=backbone, num_hidden_layers=1).eval()
        log_p = model(tokens(), 3).logits.log_softmax(-1)
        assert abs(-log_p.mean().item() - math.log(K)) < 0.8, backbone


@pytest.mark.parametrize(("backbone", "millions"), [("bert", 87.2), ("t5", 86.7)])
def test_size_of_the_paper(backbone, millions):
    with torch.device("meta"):
        model = create_text_model("paper", K, backbone=backbone)
    assert isinstance(model.backbone, BertModel if backbone == "bert" else T5EncoderModel)
    assert round(model.num_parameters() / 1e6, 1) == millions
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (12, 12)
    assert (config.hidden_size, config.intermediate_size) == (768, 3072)


def test_bad_configurations():
    with pytest.raises(StrictDataclassClassValidationError, match="backbone is 'gpt': it must be one of bert, t5"):
        D3PMTextConfig(backbone="gpt")
    with pytest.raises(StrictDataclassClassValidationError, match="it must be one of distance, offset"):
        D3PMTextConfig(position_bias_init="random")
    with pytest.raises(ValueError, match="preset is 'huge': it must be one of tiny, paper"):
        create_text_model("huge", K)
    with pytest.raises(ValueError, match="the sequence has 65 tokens, and this network has 64 positions"):
        make()(torch.zeros(1, 65, dtype=torch.long), 3)
    make("t5")(torch.zeros(1, 65, dtype=torch.long), 3)
