# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The diffusion transformer: the numbers of the authors' networks, what its logits depend on, and its files."""

import copy
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from d3pm_hf import (
    D3PMDiT,
    D3PMDiTConfig,
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    TextDenoiser,
    character_tokenizer,
    create_text_model,
)
from d3pm_hf.models.modeling_d3pm_dit import noise_level
from d3pm_hf.training import D3PMTrainingArguments, train


# Random weights, inputs and outputs of the networks of MDLM (those of Duo are the same) and SEDD.
PEERS = Path(__file__).parent / "fixtures" / "peers.safetensors"
K, N = 28, 10


def peers() -> dict[str, torch.Tensor]:
    return load_file(PEERS)


def make_peer(**overrides) -> D3PMDiT:
    """The network of the fixture."""
    with safe_open(PEERS, "pt") as file:
        sizes = {name: int(value) for name, value in file.metadata().items()}
    config = D3PMDiTConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        num_hidden_layers=sizes["n_blocks"],
        num_attention_heads=sizes["n_heads"],
        intermediate_size=4 * sizes["hidden_size"],
        cond_size=sizes["cond_dim"],
        **overrides,
    )
    model = D3PMDiT(config).eval()
    weights = {name.removeprefix("weights/"): value for name, value in peers().items() if "weights/" in name}
    weights["vocab_embed.weight"] = weights.pop("vocab_embed.embedding")
    del weights["rotary_emb.inv_freq"]
    model.load_state_dict(weights)
    return model


def make(**overrides) -> D3PMDiT:
    """A tiny network none of whose weights is zero."""
    torch.manual_seed(0)
    model = create_text_model("tiny", K, backbone="dit", **overrides).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens(seed=0):
    return torch.randint(0, K, (2, N), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_numbers_of_the_authors(attention):
    """Logits of MDLM, and the log-scores of SEDD: less log(exp(sigma) - 1) and log(K - 1), and 0 for the input token."""
    data, model = peers(), make_peer(attn_implementation=attention)
    x, sigma = data["input_ids"], data["sigma"]
    with torch.no_grad():
        logits = model(x, sigma).logits
    assert_close(logits, data["mdlm"], atol=1e-5, rtol=0)
    scores = logits - sigma.expm1().log()[:, None, None] - torch.tensor(logits.shape[-1] - 1.0).log()
    assert_close(scores.scatter(-1, x[..., None], 0.0), data["sedd"], atol=1e-5, rtol=0)


def test_reads_sigma_for_the_timestep():
    """With `num_train_timesteps`, t is read as sigma = -log(1 - 0.999 (t + 1) / T)."""
    data, timestep = peers(), torch.tensor([0, 499, 999])
    sigma = -torch.log(1 - 0.999 * (timestep.double() + 1) / 1000)
    assert_close(noise_level(timestep, 1000).double(), sigma, rtol=0, atol=1e-6)
    plain, levels = make_peer(), make_peer(num_train_timesteps=1000)
    x = data["input_ids"]
    assert_close(levels(x, timestep).logits, plain(x, sigma.float()).logits, atol=1e-5, rtol=1e-5)


def test_reads_zero_without_timestep_conditioning():
    """The authors' networks read sigma = 0 without time conditioning."""
    x = peers()["input_ids"]
    expected = make_peer()(x, 0.0).logits
    model = make_peer(timestep_conditioning=False)
    assert_close(model(x).logits, expected)
    assert_close(model(x, torch.tensor([5, 6, 7])).logits, expected)
    assert not TextDenoiser(model).reads_timestep


def test_reads_its_class():
    """UDLM adds silu of the class embedding to silu of the embedding of sigma."""
    model, x, t = make(num_class_embeds=4), tokens(), torch.tensor([3, 70])
    labels = torch.tensor([1, 3])
    without = make()
    without.load_state_dict({name: value for name, value in model.state_dict().items() if "cond_map" not in name})
    inputs = []
    for network in (model, without):
        network.blocks[0].adaLN_modulation.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(x, t, class_labels=labels)
    without(x, t)
    assert_close(inputs[0] - inputs[1], F.silu(model.cond_map.weight[labels]))
    with pytest.raises(ValueError, match="pass `class_labels`"):
        model(x, t)
    with pytest.raises(ValueError, match="no class embedding"):
        without(x, t, class_labels=labels)


def test_reads_both_sides():
    model, x = make(), tokens()
    for position in (0, 4, N - 1):
        other = x.clone()
        other[:, position] = (other[:, position] + 1) % K
        assert ((model(other, 3).logits - model(x, 3).logits).abs().amax(-1) > 0).all()


def test_positions_are_relative():
    """A text behind padding has the logits that it has without."""
    model, x = make(), tokens()
    shifted = F.pad(x, (3, 0))
    visible = F.pad(torch.ones(2, N), (3, 0))
    assert_close(model(shifted, 3, attention_mask=visible).logits[:, 3:], model(x, 3).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_ignores_masked_positions(attention):
    model, x = make(attn_implementation=attention), tokens()
    visible = torch.ones(2, N).index_fill(1, torch.tensor([2, 8]), 0)
    other = x.clone()
    other[:, [2, 8]] = 5
    kept = visible[0].bool()
    a, b = (model(tensor, 3, attention_mask=visible).logits[:, kept] for tensor in (x, other))
    assert_close(a, b)


def test_outputs_and_labels():
    model, x = make(attn_implementation="eager"), tokens()
    output = model(x, 3, labels=tokens(1), output_hidden_states=True, output_attentions=True)
    assert_close(output.loss, F.cross_entropy(output.logits.flatten(0, 1), tokens(1).flatten()))
    assert len(output.hidden_states) == 3 and output.attentions[0].shape == (2, 2, N, N)
    embeds = model.get_input_embeddings()(x)
    assert_close(model(inputs_embeds=embeds, timestep=3).logits, output.logits)
    assert_close(model(x, 3, return_dict=False)[0], output.logits)


def test_keeps_some_logits():
    """The output layer reads the rows of some elements only, and hands them to `apply_head` with itself."""
    denoiser, x = TextDenoiser(make()), tokens()
    everything = denoiser(x, 3)
    keep = torch.tensor([1, 4, 17])
    assert_close(denoiser(x, 3, logits_to_keep=keep), everything.flatten(0, 1)[keep])
    rows, layer = denoiser(x, 3, logits_to_keep=keep, apply_head=lambda rows, layer: (rows, layer))
    assert layer is denoiser.network.get_output_embeddings()
    assert_close(layer(rows), everything.flatten(0, 1)[keep])


def test_gradient_checkpointing_has_the_same_gradients():
    gradients = []
    for is_checkpointed in (False, True):
        model = make().train()
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        model(tokens(), 3, labels=tokens(1)).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 30
    for name, value in gradients[0].items():
        assert_close(gradients[1][name], value)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_autocast(attention):
    """Mixed precision has the logits of float32 but for the rounding of bfloat16, and gradients for all weights."""
    model, x = make(attn_implementation=attention), tokens()
    visible = torch.ones(2, N).index_fill(1, torch.tensor([2]), 0)
    for mask in (None, visible):
        expected = model(x, 3, attention_mask=mask).logits
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x, 3, attention_mask=mask, labels=tokens(1))
        assert_close(output.logits.float(), expected, atol=0.05, rtol=0.05)
        model.zero_grad()
        output.loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_torch_export():
    model, arguments = make(), {"input_ids": tokens(), "timestep": torch.tensor([3, 9])}
    program = torch.export.export(model, args=(), kwargs=arguments)
    other = {"input_ids": tokens(1), "timestep": torch.tensor([700, 1])}
    assert_close(program.module()(**other).logits, model(**other).logits)


def test_begins_with_equal_logits():
    """Gates and output layer begin with zeros: all tokens are equally likely, and every weight can be trained from there."""
    model = create_text_model("tiny", K, backbone="dit")
    assert isinstance(model, D3PMDiT) and model(tokens(), 3).logits.eq(0).all()
    with torch.device("meta"):
        empty = D3PMDiT(copy.deepcopy(model.config))
    empty.to_empty(device="cpu").init_weights()
    assert empty(tokens(), 3).logits.eq(0).all() and not list(empty.named_buffers())


def test_loads_through_the_auto_classes(tmp_path):
    model = make(num_train_timesteps=50)
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), D3PMDiTConfig)
    for auto_class in (AutoModel, AutoModelForMaskedLM):
        loaded = auto_class.from_pretrained(tmp_path)
        assert isinstance(loaded, D3PMDiT) and loaded.config.num_train_timesteps == 50
        assert_close(loaded(tokens(), 3).logits, model(tokens(), 3).logits)
    half = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half(tokens(), 3).logits.dtype == torch.bfloat16


@torch.no_grad()
def test_hidden_states_are_kept_only_if_asked_for():
    """The output of a block takes no memory once the next one has read it."""
    model, outputs, is_kept = make(num_hidden_layers=3), [], []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(weakref.ref(output[0])))
    model.blocks[-1].register_forward_hook(lambda *_: is_kept.append(outputs[-3]() is not None))
    assert model(tokens(), 3).hidden_states is None
    assert len(model(tokens(), 3, output_hidden_states=True).hidden_states) == 4
    assert is_kept == [False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 30}, "must be a multiple of 2 \\* num_attention_heads"),
        ({"num_train_timesteps": 0}, "num_train_timesteps is 0: it must be an integer of at least 1"),
        ({"num_class_embeds": 0}, "num_class_embeds is 0: it must be an integer of at least 1"),
        ({"tie_word_embeddings": True}, "leave it False"),
    ],
)
def test_wrong_configurations(arguments, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        D3PMDiTConfig(**{"hidden_size": 32, "num_attention_heads": 2, **arguments})


def test_preset_takes_the_arguments_of_other_backbones():
    """A training script chooses the backbone by one word."""
    others = {"max_position_embeddings": 64, "position_bias_init": "distance", "attention_probs_dropout_prob": 0.1}
    model = create_text_model("tiny", K, backbone="dit", is_decoder=False, hidden_dropout_prob=0.1, **others)
    assert model.config.hidden_dropout_prob == 0.1 and not set(others) & set(model.config.to_dict())
    with pytest.raises(ValueError, match="backbone is 'dit', which has no causal attention"):
        create_text_model("tiny", K, backbone="dit", is_decoder=True)


def test_wrong_inputs():
    model, x = make(), tokens()
    with pytest.raises(ValueError, match="pass either `input_ids` or `inputs_embeds`"):
        model(timestep=3)
    with pytest.raises(ValueError, match="conditioned on the timestep"):
        model(x)
    with pytest.raises(ValueError, match="`attention_mask` has shape"):
        model(x, 3, attention_mask=torch.ones(2, N + 1))


def test_refuses_a_process_with_another_number_of_timesteps():
    network = make(num_train_timesteps=50)
    with pytest.raises(ValueError, match="num_train_timesteps=50, and the scheduler has 100"):
        D3PMTextPipeline(network, D3PMScheduler(K, 100), character_tokenizer())


def test_trains_in_a_pipeline(tmp_path):
    """A pipeline with a `D3PMDiT` trains, is saved and loaded, and samples."""
    network = create_text_model("tiny", K, backbone="dit")
    pipeline = D3PMTextPipeline(network, D3PMScheduler(K, 20), character_tokenizer(), sequence_length=8)
    rows = torch.arange(20)[:, None].expand(
        20, 8
    )  # one letter, eight times: relative positions cannot count from the left
    arguments = D3PMTrainingArguments(
        output_dir=str(tmp_path),
        max_train_steps=150,
        train_batch_size=16,
        learning_rate=1e-2,
        lr_warmup_steps=1,
        validation_steps=0,
    )
    train(arguments, pipeline, rows)
    loaded = D3PMPipeline.from_pretrained(tmp_path)
    assert isinstance(loaded.text_model, D3PMDiT)
    sequences = loaded(batch_size=8, generator=torch.Generator().manual_seed(0), output_type="latent").sequences
    assert (sequences == sequences[:, :1]).float().mean() > 0.9
