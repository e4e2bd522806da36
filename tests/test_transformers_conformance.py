# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The checks of transformers' `ModelTesterMixin` and `ConfigTester` for `D3PMTextModel`; docs/source/en/conformance.md lists them."""

import copy
import inspect
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForMaskedLM, PreTrainedModel, pipeline
from transformers.modeling_layers import GradientCheckpointingLayer

from d3pm_hf import (
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextConfig,
    D3PMTextModel,
    D3PMTextPipeline,
    character_tokenizer,
    create_text_model,
)


K, B, N, D, LAYERS, HEADS = 28, 3, 10, 32, 2, 2
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


def run(model, **kwargs):
    with torch.no_grad():
        return model(**{**inputs(), **kwargs})


def logits(model, **kwargs):
    return run(model, **kwargs).logits


def gradients(model, **kwargs):
    """The gradient of the loss of `labels`, for each parameter."""
    model.zero_grad()
    model(**inputs(), labels=inputs(1)["input_ids"], **kwargs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


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
    """The bias of head h at distance d is -d' 2^(-4h/(H-1)), with d' the shortest distance in the bucket of d.

    T5 has a bucket for each distance below 8, and 8 that grow geometrically to 128.
    """
    bucket = [d if d < 8 else min(8 + int(8 * math.log(d / 8) / math.log(16) + 1e-9), 15) for d in range(200)]
    nearest = torch.tensor([bucket.index(b) for b in bucket], dtype=torch.float64)
    slopes = 2.0 ** (-4 * torch.arange(4, dtype=torch.float64) / 3)
    model = D3PMTextModel._from_config(make("t5", num_attention_heads=4).config, dtype=dtype)
    bias = model.backbone.encoder.block[0].layer[0].SelfAttention.compute_bias(200, 200)[0].double()  # [H, 200, 200]
    positions = torch.arange(200)
    expected = -nearest[(positions[:, None] - positions).abs()] * slopes[:, None, None]
    assert_close(bias, expected.to(dtype).double(), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("num_heads", [1, 2, 8])
def test_t5_starts_with_offsets(num_heads, is_decoder):
    """Each head but the wide ones has the least bias at an offset of its own; positions beyond it decay by 2 down to -8."""
    sizes = {"num_attention_heads": num_heads, "position_bias_init": "offset", "is_decoder": is_decoder}
    attention = make("t5", **sizes).backbone.encoder.block[0].layer[0].SelfAttention
    bias = attention.compute_bias(15, 15)[0, :, 7]  # [H, 15], the position in the middle
    offsets = torch.arange(-7.0, 8)  # T5 has a bucket for each of them
    own = (
        [0, -1, -2, -3, -4, -5, -6][: num_heads - 1] if is_decoder else [-1, 1, -2, 2, -3, 3][: max(0, num_heads - 2)]
    )
    for head, offset in enumerate(own):
        assert_close(bias[head], (-2 * (offsets - offset).abs()).clamp(min=-8))
    wide = -offsets.abs() / 4
    if is_decoder or num_heads == 1:
        assert_close(bias[len(own) :], wide[None])
    else:
        assert_close(bias[-2:], torch.stack([wide - 4 * (offsets >= 0), wide - 4 * (offsets <= 0)]))


@VARIANTS
def test_init_weights_can_init_buffers(backbone, is_decoder):
    """A model that was built without memory runs once it has some: nothing but parameters and buffers is missing."""
    model = make(backbone, is_decoder)
    with torch.device("meta"):
        empty = D3PMTextModel(copy.deepcopy(model.config)).eval()
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    empty.to_empty(device="cpu").init_weights()
    buffers = dict(empty.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, value in model.named_buffers():
        assert torch.equal(buffers[name], value), name
    empty.load_state_dict(model.state_dict())
    assert_close(logits(empty), logits(model))


@VARIANTS
def test_initialization_is_not_repeated(backbone, is_decoder):
    model = make_trained(backbone, is_decoder)
    before = copy.deepcopy(model.state_dict())
    model.init_weights()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


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
    original = D3PMTextPipeline(model, D3PMScheduler(K, num_train_timesteps=4), character_tokenizer(), N)
    original.save_pretrained(tmp_path / "float32")
    loaded = D3PMPipeline.from_pretrained(tmp_path / "float32", dtype=dtype)
    loaded.save_pretrained(tmp_path / "dtype")
    again = D3PMPipeline.from_pretrained(tmp_path / "dtype", dtype=dtype)
    for other in (loaded, again):
        assert other.dtype == dtype
        for name, value in model.state_dict().items():
            assert_close(other.text_model.state_dict()[name].float(), value, rtol=torch.finfo(dtype).eps, atol=1e-7)
        other.set_progress_bar_config(disable=True)
        assert len(other(batch_size=2, num_inference_steps=4, generator=torch.Generator().manual_seed(0)).texts) == 2


@BACKBONES
def test_names_of_dtypes(backbone, tmp_path):
    make(backbone).to(torch.bfloat16).save_pretrained(tmp_path)
    for argument in ({"dtype": "bfloat16"}, {"dtype": "auto"}, {"torch_dtype": torch.bfloat16}, {}):
        assert D3PMTextModel.from_pretrained(tmp_path, **argument).dtype == torch.bfloat16
    assert D3PMTextModel.from_pretrained(tmp_path, dtype="float32").dtype == torch.float32


@VARIANTS
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_save_and_load(backbone, is_decoder, tied, tmp_path):
    """Twice, since a loaded configuration has more entries; no tensor is missing, moved or untied."""
    model = make_trained(backbone, is_decoder, tie_word_embeddings=tied, timestep_conditioning=is_decoder)
    expected = logits(model)
    for folder in (tmp_path / "once", tmp_path / "twice"):
        model.save_pretrained(folder)
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        model, report = D3PMTextModel.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        assert all(parameter.is_contiguous() for parameter in model.parameters())
        assert_close(logits(model), expected)
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
        if backbone == "t5":
            assert model.backbone.encoder.embed_tokens.weight is model.backbone.shared.weight


@VARIANTS
def test_without_a_file(backbone, is_decoder):
    model = make_trained(backbone, is_decoder)
    state = model.state_dict()
    loaded = D3PMTextModel.from_pretrained(None, config=model.config, state_dict=state)
    assert loaded.state_dict().keys() == state.keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]), name


@VARIANTS
def test_missing_tensors_are_reported(backbone, is_decoder, tmp_path):
    model = make(backbone, is_decoder)
    model.save_pretrained(tmp_path)
    save_file({"other": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, report = D3PMTextModel.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == set(model.state_dict()) and report["unexpected_keys"] == {"other"}
    # A backbone alone lacks the head and the timestep embedding.
    _, report = D3PMTextModel.from_pretrained(
        None, config=model.config, state_dict=model.backbone.state_dict(), output_loading_info=True
    )
    extra = {name for name, _ in model.named_parameters() if not name.startswith("backbone.")}
    assert report["missing_keys"] == extra and not report["unexpected_keys"]


@BACKBONES
def test_other_vocabulary(backbone, tmp_path):
    """Tensors of another shape are refused; on request they are initialized, and the others loaded."""
    model = make_trained(backbone)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        D3PMTextModel.from_pretrained(tmp_path, vocab_size=12)
    other = D3PMTextModel.from_pretrained(tmp_path, vocab_size=12, ignore_mismatched_sizes=True)
    assert other.get_input_embeddings().weight.shape == other.lm_head.weight.shape == (12, D)
    for name, value in other.state_dict().items():
        if len(value) != 12:
            assert torch.equal(value, model.state_dict()[name]), name


@BACKBONES
def test_offload_to_disk(backbone, tmp_path):
    model = make_trained(backbone)
    model.save_pretrained(tmp_path / "model")
    places = {name: "disk" if name in ("backbone", "lm_head") else "cpu" for name, _ in model.named_children()}
    loaded = D3PMTextModel.from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload")
    assert {parameter.device.type for parameter in loaded.backbone.parameters()} == {"meta"}
    assert_close(logits(loaded), logits(model))


def test_not_on_the_meta_device(tmp_path):
    make("t5").save_pretrained(tmp_path)
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta device context manager"):
        D3PMTextModel.from_pretrained(tmp_path)


# Inputs


@VARIANTS
def test_forward_arguments(backbone, is_decoder):
    model = make(backbone, is_decoder)
    assert list(inspect.signature(D3PMTextModel.forward).parameters)[1] == model.main_input_name
    with pytest.raises(TypeError, match="unexpected keyword argument 'head_mask'"):
        model(**inputs(), head_mask=torch.ones(LAYERS, HEADS))
    with pytest.raises(ValueError, match="pass either `input_ids` or `inputs_embeds`"):
        model(timestep=3)
    with pytest.raises(ValueError, match="pass either `input_ids` or `inputs_embeds`"):
        model(**inputs(), inputs_embeds=torch.zeros(B, N, D))
    for name in ("attention_mask", "labels"):
        with pytest.raises(
            ValueError, match=rf"`{name}` has shape \[10, 3\]: it must have that of the input, \[3, 10\]"
        ):
            model(**inputs(), **{name: torch.ones(N, B, dtype=torch.long)})
    with pytest.raises(ValueError, match="`timestep` has 2 entries for 3 samples"):
        model(inputs()["input_ids"], torch.tensor([3, 4]))


@VARIANTS
def test_inputs_embeds_matches_input_ids(backbone, is_decoder):
    model = make(backbone, is_decoder)
    mask = torch.ones(B, N).index_fill(1, torch.tensor([0, 7]), 0)
    embeds = model.get_input_embeddings()(inputs()["input_ids"])
    for arguments in ({}, {"attention_mask": mask}):
        assert_close(logits(model, input_ids=None, inputs_embeds=embeds, **arguments), logits(model, **arguments))


@VARIANTS
def test_batching_equivalence(backbone, is_decoder):
    model = make_trained(backbone, is_decoder)
    both = run(model, output_hidden_states=True)
    for i in range(B):
        arguments = {name: value[i : i + 1] for name, value in inputs().items()}
        alone = run(model, output_hidden_states=True, **arguments)
        assert_close(both.logits[i : i + 1], alone.logits, atol=1e-5, rtol=1e-5)
        for a, b in zip(both.hidden_states, alone.hidden_states):
            assert_close(a[i : i + 1], b, atol=1e-5, rtol=1e-5)


@VARIANTS
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding(backbone, is_decoder, attention):
    """A padded sequence has the logits of the sequence alone, whatever the padding holds."""
    model = make_trained(backbone, is_decoder)
    model.set_attn_implementation(attention)
    tokens, timestep = inputs()["input_ids"][:1], 5
    # Absolute positions move with padding on the left.
    for side in ("right", "left") if backbone == "t5" else ("right",):
        real = slice(0, 6) if side == "right" else slice(4, N)
        mask = torch.zeros(1, N).index_fill(1, torch.arange(N)[real], 1)
        alone = logits(model, input_ids=tokens[:, real], timestep=timestep)
        for padding in (0, 13):
            padded = tokens.where(mask.bool(), padding)
            result = logits(model, input_ids=padded, timestep=timestep, attention_mask=mask)[:, real]
            assert_close(result, alone, atol=1e-5, rtol=1e-5, msg=lambda text: f"{side}: {text}")


@VARIANTS
def test_padding_in_autocast(backbone, is_decoder):
    """Positions that see nothing, on the left of a causal model, do not make others NaN."""
    model = make_trained(backbone, is_decoder)
    mask = torch.ones(B, N, dtype=torch.long)
    mask[1, :4] = 0
    expected = logits(model, attention_mask=mask)[mask.bool()]
    for dtype in (torch.bfloat16, torch.float16):
        for attention in ("eager", "sdpa"):
            model.set_attn_implementation(attention)
            with torch.autocast("cpu", dtype):
                result = logits(model, attention_mask=mask)[mask.bool()].float()
            assert (result - expected).abs().max() / expected.abs().max() < 16 * torch.finfo(dtype).eps


@VARIANTS
def test_hidden_positions_are_not_read(backbone, is_decoder):
    model, tokens = make_trained(backbone, is_decoder), inputs()["input_ids"]
    mask = torch.ones(B, N).index_fill(1, torch.tensor([2]), 0)
    other = tokens.index_copy(1, torch.tensor([2]), (tokens[:, 2:3] + 1) % K)
    a, b = (logits(model, input_ids=ids, attention_mask=mask)[:, mask[0].bool()] for ids in (tokens, other))
    assert_close(a, b)


# Outputs


@VARIANTS
def test_outputs_equivalence(backbone, is_decoder):
    """A tuple holds what the output holds, in the order loss, logits, hidden states, attentions."""
    model = make(backbone, is_decoder, attn_implementation="eager")
    labels = inputs(1)["input_ids"]
    requests = [{}, {"labels": labels}, {"output_hidden_states": True}, {"output_attentions": True}]
    requests.append({name: value for request in requests for name, value in request.items()})
    for request in requests:
        output, values = run(model, **request), run(model, **request, return_dict=False)
        names = ["loss"] * ("labels" in request) + ["logits"]
        names += [name for name in ("hidden_states", "attentions") if f"output_{name}" in request]
        assert list(output.keys()) == names and isinstance(values, tuple)
        assert_close(values, output.to_tuple())
    model.config.return_dict = False
    assert_close(run(model), (logits(model, return_dict=True),))


@VARIANTS
def test_hidden_states_and_attentions(backbone, is_decoder):
    """They are those of the backbone, by argument or by configuration, and the logits follow from the last one."""
    model = make_trained(backbone, is_decoder, attn_implementation="eager")
    mask = torch.ones(B, N).index_fill(1, torch.tensor([7, 8, 9]), 0)
    output = run(model, attention_mask=mask, output_hidden_states=True, output_attentions=True)
    assert [tuple(state.shape) for state in output.hidden_states] == [(B, N, D)] * (LAYERS + 1)
    scale = D**-0.5 if backbone == "t5" else 1
    assert_close(model.lm_head(model.transform(output.hidden_states[-1]) * scale), output.logits)
    assert len(output.attentions) == LAYERS
    visible = mask.bool()[:, None, None].expand(B, HEADS, N, N)
    visible = visible.tril() if is_decoder else visible
    for attention in output.attentions:
        assert_close(attention.sum(-1), torch.ones(B, HEADS, N))
        assert (attention[~visible] == 0).all() and (attention[visible] > 0).all()
    model.config.output_hidden_states = model.config.output_attentions = True
    by_configuration = run(model, attention_mask=mask)
    assert_close(by_configuration.to_tuple(), output.to_tuple())
    assert run(model, output_hidden_states=False, output_attentions=False).to_tuple()[1:] == ()


def test_attentions_of_sdpa():
    """As in transformers' models, fused attention returns no probabilities, with a warning."""
    for backbone in ("bert", "t5"):
        assert run(make(backbone), output_attentions=True).attentions == ()


@VARIANTS
def test_gradients_of_hidden_states_and_attentions(backbone, is_decoder):
    model = make(backbone, is_decoder, attn_implementation="eager")
    output = model(**inputs(), output_hidden_states=True, output_attentions=True)
    kept = [output.hidden_states[0], output.attentions[0]]
    for value in kept:
        value.retain_grad()
    output.logits.square().sum().backward()
    for value in kept:
        assert value.grad.abs().sum() > 0


@VARIANTS
def test_labels(backbone, is_decoder):
    """The loss is the plain cross-entropy in float64, without positions labeled -100."""
    model, labels = make_trained(backbone, is_decoder), inputs(1)["input_ids"].clone()
    for hidden in ([], [(0, 3), (1, 0), (2, 9)]):
        for position in hidden:
            labels[position] = -100
        output = run(model, labels=labels)
        log_p = output.logits.double().log_softmax(-1)
        scored = [log_p[i, j, labels[i, j]] for i in range(B) for j in range(N) if labels[i, j] != -100]
        assert_close(output.loss.double(), -torch.stack(scored).mean(), atol=1e-6, rtol=1e-6)


@VARIANTS
def test_deterministic(backbone, is_decoder):
    model = make(backbone, is_decoder, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    assert_close(logits(model), logits(model), atol=0, rtol=0)
    assert (logits(model.train()) - logits(model)).abs().max() > 0


# Attention


def implementations(model):
    """What every attention layer is configured to use."""
    return {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}


@VARIANTS
def test_attention_implementation_reaches_the_backbone(backbone, is_decoder, tmp_path):
    model = make(backbone, is_decoder)
    assert implementations(model) == {"sdpa"}
    model.save_pretrained(tmp_path)
    assert implementations(D3PMTextModel.from_pretrained(tmp_path)) == {"sdpa"}
    assert implementations(D3PMTextModel.from_pretrained(tmp_path, attn_implementation="eager")) == {"eager"}
    assert implementations(make(backbone, is_decoder, attn_implementation="eager")) == {"eager"}
    assert implementations(D3PMTextModel._from_config(model.config, attn_implementation="eager")) == {"eager"}
    model = make(backbone, is_decoder)
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert implementations(model) == {name}
    with pytest.raises(ValueError, match='`attn_implementation="other"` is not supported'):
        model.set_attn_implementation("other")
    assert implementations(model) == {"sdpa"}


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_attention_without_biases_is_refused_for_t5(name, tmp_path):
    model = make("t5")
    model.save_pretrained(tmp_path)
    message = f"attn_implementation is '{name}', which cannot add the relative position biases of backbone='t5'"
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation(name)
    assert implementations(model) == {"sdpa"}
    with pytest.raises(ValueError, match=message):
        D3PMTextModel.from_pretrained(tmp_path, attn_implementation=name)


@VARIANTS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eager_matches_sdpa(backbone, is_decoder, dtype):
    model = make_trained(backbone, is_decoder).to(dtype)
    left, right = torch.ones(2, B, N, dtype=torch.long)
    left[1, :4], right[1, -4:] = 0, 0
    for mask in (None, left, right):
        results = []
        for name in ("eager", "sdpa"):
            model.set_attn_implementation(name)
            results.append(logits(model, attention_mask=mask).float())
        visible = torch.ones(B, N, dtype=torch.bool) if mask is None else mask.bool()
        scale = results[0][visible].abs().max()
        assert ((results[0] - results[1])[visible].abs().max() / scale) < 16 * torch.finfo(dtype).eps


# Embeddings


@VARIANTS
def test_get_and_set_embeddings(backbone, is_decoder):
    model = make(backbone, is_decoder)
    assert isinstance(model.get_input_embeddings(), nn.Embedding) and isinstance(
        model.get_output_embeddings(), nn.Linear
    )
    embedding, head = nn.Embedding(K, D), nn.Linear(D, K, bias=False)
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(head)
    assert model.get_input_embeddings() is embedding and model.get_output_embeddings() is head
    expected = logits(model, input_ids=None, inputs_embeds=embedding(inputs()["input_ids"]))
    assert_close(logits(model), expected)


@VARIANTS
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_resize_token_embeddings(backbone, is_decoder, tied, tmp_path):
    """New tokens get the mean of the others, and the logits of the old ones stay; so does everything after a load."""
    model = make_trained(backbone, is_decoder, tie_word_embeddings=tied, bos_token_id=0)
    before, embedding = logits(model), model.get_input_embeddings().weight.detach().clone()
    resized = model.resize_token_embeddings(K + 10)
    assert model.config.vocab_size == model.get_output_embeddings().out_features == resized.num_embeddings == K + 10
    assert_close(resized.weight[K:].mean(0), embedding.mean(0), atol=1e-3, rtol=1e-3)
    assert torch.equal(resized.weight[:K], embedding)
    assert_close(logits(model)[..., :K], before)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    model.save_pretrained(tmp_path)
    assert_close(logits(D3PMTextModel.from_pretrained(tmp_path)), logits(model))
    model.resize_token_embeddings(K - 15)
    ids = inputs()["input_ids"] % (K - 15)
    assert logits(model, input_ids=ids).shape == (B, N, K - 15)
    assert torch.equal(model.get_input_embeddings().weight, embedding[: K - 15])
    assert model.resize_token_embeddings(K, pad_to_multiple_of=64).num_embeddings == model.config.vocab_size == 64
    with pytest.raises(ValueError, match="multiple of `1.3`"):
        model.resize_token_embeddings(K, pad_to_multiple_of=1.3)


@BACKBONES
def test_tied_weights_keys(backbone):
    """Every group of parameters that share memory has exactly one that is no key of tied weights."""
    model = make(backbone)
    groups = {}
    for name, value in model.state_dict().items():
        groups.setdefault(value.data_ptr(), []).append(name)
    tied = {name for names in groups.values() if len(names) > 1 for name in names}
    assert len(tied) == (3 if backbone == "t5" else 2)
    assert tied - set(model.all_tied_weights_keys) == set(model.all_tied_weights_keys.values())
    assert len(set(model.all_tied_weights_keys.values())) == 1


# Training


def first_layer(model):
    return next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


@VARIANTS
def test_gradient_checkpointing(backbone, is_decoder):
    model = make(backbone, is_decoder).train()
    expected = gradients(model)
    assert not model.is_gradient_checkpointing
    calls = []
    first_layer(model).register_forward_pre_hook(lambda *_: calls.append(1))
    for arguments in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        assert model.is_gradient_checkpointing
        calls.clear()
        assert_close(gradients(model), expected)
        assert len(calls) == 2  # the second time for the backward pass
        model.gradient_checkpointing_disable()
        assert not model.is_gradient_checkpointing
    config = copy.deepcopy(model.config)
    config.gradient_checkpointing = True
    assert D3PMTextModel(config).is_gradient_checkpointing


@VARIANTS
def test_inputs_require_gradients(backbone, is_decoder):
    """Layers train above frozen embeddings with gradient checkpointing."""
    model = make(backbone, is_decoder, timestep_conditioning=False).train()
    model.get_input_embeddings().requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    model(**inputs(), labels=inputs(1)["input_ids"]).loss.backward()
    for name, parameter in first_layer(model).named_parameters():
        # A bias of all keys does not change BERT's attention.
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0 or name.endswith("key.bias"), name
    model.disable_input_require_grads()


@VARIANTS
def test_feed_forward_chunking(backbone, is_decoder):
    """BERT computes its MLPs in chunks; T5 has no such option, and ignores it."""
    assert_close(logits(make(backbone, is_decoder, chunk_size_feed_forward=1)), logits(make(backbone, is_decoder)))


# Compilers


@pytest.mark.slow
@VARIANTS
def test_torch_export(backbone, is_decoder):
    model = make_trained(backbone, is_decoder)
    arguments = {**inputs(), "attention_mask": torch.ones(B, N).index_fill(1, torch.tensor([9]), 0)}
    program = torch.export.export(model, args=(), kwargs=copy.deepcopy(arguments))
    with torch.no_grad():
        assert_close(program.module()(**arguments).logits, logits(model, **arguments))


@pytest.mark.slow
@VARIANTS
def test_torch_compile(backbone, is_decoder):
    """One graph without breaks, forward and backward."""
    model = make(backbone, is_decoder).train()
    expected = gradients(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    compiled(**inputs(), labels=inputs(1)["input_ids"]).loss.backward()
    assert_close({name: p.grad for name, p in model.named_parameters()}, expected)


# Configuration


@BACKBONES
def test_configuration_round_trips(backbone, tmp_path):
    options = {"vocab_size": 40, "hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 5}
    config = D3PMTextConfig(backbone=backbone, is_decoder=True, timestep_conditioning=False, **options)
    stored = json.loads(config.to_json_string())
    assert all(stored[name] == value == getattr(config, name) for name, value in options.items())
    config.to_json_file(tmp_path / "config.json")
    assert D3PMTextConfig.from_json_file(tmp_path / "config.json").to_dict() == config.to_dict()
    config.save_pretrained(tmp_path / "folder" / "inner")
    for arguments in ({}, {"subfolder": "inner"}):
        folder = tmp_path / "folder" / ("" if arguments else "inner")
        loaded = D3PMTextConfig.from_pretrained(folder, **arguments)
        assert {**loaded.to_dict(), "_name_or_path": None} == {**config.to_dict(), "_name_or_path": None}
    loaded = D3PMTextConfig.from_pretrained(folder, output_hidden_states=True, vocab_size=41, **arguments)
    assert loaded.output_hidden_states and loaded.vocab_size == 41
    assert D3PMTextConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_configuration_common_arguments():
    config = D3PMTextConfig()
    config.num_labels = 3
    assert len(config.id2label) == len(config.label2id) == 3
    common = {"output_hidden_states": True, "dtype": "float16", "tie_word_embeddings": False, "return_dict": False}
    common |= {"chunk_size_feed_forward": 5, "id2label": {0: "label"}, "label2id": {"label": "0"}, "bos_token_id": 6}
    config = D3PMTextConfig(**common)
    assert config.dtype == torch.float16
    assert all(getattr(config, name) == value for name, value in common.items() if name != "dtype")


@BACKBONES
def test_special_tokens(backbone):
    """Special tokens of a configuration do not disturb the network: all tokens are states of the process."""
    config = D3PMTextConfig(**{**make(backbone).config.to_diff_dict(), "sep_token_id": 0, "eos_token_id": 0})
    torch.manual_seed(0)
    assert_close(logits(D3PMTextModel(config).eval()), logits(make(backbone)))


@BACKBONES
def test_fill_mask(backbone, tmp_path):
    """A model that is not told the timestep is a masked language model like any other."""
    model = make_trained(backbone, timestep_conditioning=False)
    model.save_pretrained(tmp_path)
    tokenizer = character_tokenizer()
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is D3PMTextModel and not loaded.can_generate()
    best = pipeline("fill-mask", model=loaded, tokenizer=tokenizer)("the [MASK]at", top_k=1)[0]
    ids = torch.tensor([tokenizer("the [MASK]at")["input_ids"]])
    p = logits(model, input_ids=ids, timestep=None)[0, 4].softmax(-1)
    assert best["token"] == p.argmax() and abs(best["score"] - p.max().item()) < 1e-5
