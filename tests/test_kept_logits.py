# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Networks that are asked for logits only where they count: what they give, and that nothing else changes."""

import copy
import functools
import re
import threading
from pathlib import Path

import accelerate
import families
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import d3pm_hf.kernels.head_loss as head_loss
import d3pm_hf.utils.kept_logits as kept_logits
from d3pm_hf import (
    CausalLMDenoiser,
    D3PMScheduler,
    D3PMTextPipeline,
    Denoiser,
    TextDenoiser,
    character_tokenizer,
    create_text_model,
    d3pm_loss,
    evaluate_bound,
    logits_to_keep,
    network_loss,
)
from d3pm_hf.data import python_prose
from d3pm_hf.evaluation import optimize_timesteps
from d3pm_hf.kernels import kernels_disabled
from d3pm_hf.likelihood.measure import repeatable
from d3pm_hf.likelihood.strides import evaluate_strides
from d3pm_hf.models.output_layer import LINEAR_LAST, POINTWISE_LAST, find_pointwise_part
from d3pm_hf.samplers import confidence, first_hitting, guide, positions_first, predictor_corrector


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
K, N = 9, 6
SETTINGS = [("raw", 0.0), ("raw", 0.1), ("denoising", 0.1)]


@pytest.fixture(autouse=True)
def few_states(monkeypatch):
    """Any network that can is asked for some logits, whatever its number of states."""
    monkeypatch.setattr(kept_logits, "FEW_STATES", 0)


@pytest.fixture
def small_pieces(monkeypatch):
    """Logits of at most four rows at a time."""
    monkeypatch.setattr(head_loss, "PIECE_BYTES", 4 * 4 * K)


def noised(name, dtype=torch.float64, **options):
    """A scheduler, x_0, x_t at mixed timesteps, and a mask of the elements that count."""
    family = families.build(name, K)
    scheduler, generator = family.scheduler(**options), torch.Generator().manual_seed(0)
    x_0 = family.data((8, N))
    timesteps = torch.arange(8) % len(scheduler)
    x_t = scheduler.add_noise(x_0, timesteps, generator)
    loss_mask = torch.rand(x_0.shape, generator=generator) < 0.8
    return scheduler, x_0, x_t, timesteps, loss_mask, generator


# The loss


@pytest.mark.cover
@pytest.mark.parametrize("x0_posterior", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("auxiliary, hybrid_coeff", SETTINGS)
@pytest.mark.parametrize("name", families.NAMES)
@pytest.mark.parametrize("with_kernels", [True, False])
def test_the_loss_depends_on_no_other_logits(name, auxiliary, hybrid_coeff, x0_posterior, with_kernels):
    """By the plain loss: logits that are left out have no gradient, and losses of zero; the others are those of the full form."""
    scheduler, x_0, x_t, timesteps, loss_mask, generator = noised(name, x0_posterior=x0_posterior)
    options = {"auxiliary": auxiliary, "hybrid_coeff": hybrid_coeff, "loss_mask": loss_mask}
    logits = torch.randn(*x_0.shape, K, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(x_0.shape, generator=generator)
    index = logits_to_keep(scheduler, x_t, timesteps, **options)
    with kernels_disabled():
        full = d3pm_loss(scheduler, logits, x_0, x_t, timesteps, **options)
        (gradient,) = torch.autograd.grad((full.loss * weights).sum(), logits)
    is_kept = torch.zeros(x_0.numel(), dtype=torch.bool).index_fill(0, index, True).view_as(x_0)
    assert not (is_kept & ~loss_mask).any()
    assert (full.loss[~is_kept] == 0).all() and (gradient[~is_kept] == 0).all()
    kept = logits.detach()[is_kept].requires_grad_()
    with_or_without = kernels_disabled() if not with_kernels else torch.enable_grad()
    with with_or_without:
        for which in (index, is_kept):
            part = d3pm_loss(scheduler, kept, x_0, x_t, timesteps, **options, logits_to_keep=which)
            (own,) = torch.autograd.grad((part.loss * weights).sum(), kept)
            torch.testing.assert_close(part.loss, full.loss, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(part.vb, full.vb, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(own, gradient[is_kept], rtol=1e-6, atol=1e-9)


def test_which_logits_are_needed():
    x_t = torch.tensor([[0, 4, 4, 1], [4, 4, 2, 4]])  # 4 is the mask
    scheduler = D3PMScheduler(5, 10)
    masks = [1, 2, 4, 5, 7]
    t = torch.tensor([5, 7])
    loss_mask = torch.ones(2, 4).index_fill(1, torch.tensor([1]), 0)
    assert logits_to_keep(scheduler, x_t, t, hybrid_coeff=0.1) is None
    assert logits_to_keep(scheduler, x_t, t, hybrid_coeff=0.1, loss_mask=loss_mask).tolist() == [0, 2, 3, 4, 6, 7]
    with kernels_disabled():
        assert logits_to_keep(scheduler, x_t, t) is None
    if scheduler.transition.kernel() is None:
        return
    assert logits_to_keep(scheduler, x_t, t).tolist() == masks
    assert logits_to_keep(scheduler, x_t, t, hybrid_coeff=0.1, auxiliary="denoising").tolist() == masks
    assert logits_to_keep(scheduler, x_t, t, loss_mask=loss_mask).tolist() == [2, 4, 7]
    assert logits_to_keep(D3PMScheduler(5, 10, transition="uniform", beta_schedule="cosine"), x_t, t) is None
    assert logits_to_keep(D3PMScheduler(5, 10, reconstruction="raw"), x_t, t) is None
    assert logits_to_keep(D3PMScheduler(5, 10, prediction_type="previous"), x_t, t) is None
    left_to_right = D3PMScheduler(5, 4, transition="autoregressive")
    x_t = torch.tensor([[0, 1, 4, 4], [4, 4, 4, 4]])
    assert logits_to_keep(left_to_right, x_t, torch.tensor([1, 3])).tolist() == [2, 4]  # what the step reveals
    both = logits_to_keep(left_to_right, x_t, torch.tensor([1, 3]), hybrid_coeff=1.0, auxiliary="denoising")
    assert both.tolist() == [2, 3, 4, 5, 6, 7]


# The output layer and the loss in one pass


@pytest.mark.cover
@pytest.mark.parametrize("name", families.NAMES)
@pytest.mark.parametrize("auxiliary, hybrid_coeff", SETTINGS)
@pytest.mark.parametrize("weighting", ["mean", "weights", "twice"])
@pytest.mark.parametrize("bias", [True, False])
def test_an_output_layer_and_the_loss(small_pieces, name, auxiliary, hybrid_coeff, weighting, bias):
    scheduler, x_0, x_t, timesteps, loss_mask, generator = noised(name)
    layer = torch.nn.Linear(5, K, bias=bias).double()
    options = {"auxiliary": auxiliary, "hybrid_coeff": hybrid_coeff, "loss_mask": loss_mask}
    hidden = torch.randn(*x_0.shape, 5, generator=generator, dtype=torch.float64)
    weights = torch.rand(x_0.shape, generator=generator) if weighting == "weights" else torch.tensor(1 / 48)
    index = logits_to_keep(scheduler, x_t, timesteps, **options)
    with torch.no_grad():  # an evaluation wants no gradient
        plain = d3pm_loss(scheduler, layer(hidden), x_0, x_t, timesteps, **options)
        pieces = d3pm_loss(scheduler, hidden, x_0, x_t, timesteps, **options, output_layer=layer)
        torch.testing.assert_close(pieces.loss, plain.loss, rtol=1e-6, atol=1e-9)

    def gradients(is_fused):
        layer.zero_grad()
        rows = hidden.clone().requires_grad_()
        kept = rows.flatten(0, 1)[index]
        how = {"output_layer": layer} if is_fused else {}
        loss = d3pm_loss(
            *(scheduler, kept if is_fused else layer(kept), x_0, x_t, timesteps),
            **options, **how, logits_to_keep=index,
        ).loss  # fmt: skip
        for _ in range(2 if weighting == "twice" else 1):
            (loss * weights).sum().backward(retain_graph=True)
        return [
            loss.detach(),
            rows.grad,
            layer.weight.grad.clone(),
            None if layer.bias is None else layer.bias.grad.clone(),
        ]

    for own, plain in zip(gradients(True), gradients(False)):
        if plain is not None:
            torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_the_output_layer_inside_autocast(small_pieces, dtype, scale):
    """Losses and gradients are as close to those in float64 as the plain form is; a loss scale lifts small gradients."""
    scheduler, x_0, x_t, timesteps, loss_mask, generator = noised("absorbing")
    layer, hidden = torch.nn.Linear(64, K), torch.randn(*x_0.shape, 64, generator=generator)

    def compute(layer, hidden, is_fused, dtype=None, factor=1.0):
        layer.zero_grad()
        hidden = hidden.clone().requires_grad_()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            how = {"output_layer": layer} if is_fused else {}
            output = hidden if is_fused else layer(hidden)
            loss = d3pm_loss(scheduler, output, x_0, x_t, timesteps, loss_mask=loss_mask, **how).loss
        (loss.mean() * 1e-4 * factor).backward()
        return [loss.detach().double(), hidden.grad.double() / factor, layer.weight.grad.double() / factor]

    exact = compute(copy.deepcopy(layer).double(), hidden.double(), False)
    autocast_dtype = None if dtype == torch.float32 else dtype
    plain = compute(layer, hidden, False, autocast_dtype, scale)
    fused = compute(layer, hidden, True, autocast_dtype, scale)
    for a, b, c in zip(exact, plain, fused):
        size = a.abs().max()
        assert (c - a).abs().max() <= 2 * (b - a).abs().max() + 1e-6 * size
    assert fused[0].dtype == torch.float64 and layer.weight.grad.dtype == torch.float32


def test_no_more_than_a_piece_of_logits_exists(monkeypatch):
    """The largest tensor of a step is a piece: forward and backward are traced, and all sizes of results recorded."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple | list) else (result,):
                if isinstance(value, torch.Tensor):
                    Sizes.largest = max(Sizes.largest, value.numel())
            return result

    num_classes, rows = 3000, 16
    monkeypatch.setattr(head_loss, "PIECE_BYTES", 4 * rows * num_classes)
    scheduler, layer = D3PMScheduler(num_classes), torch.nn.Linear(8, num_classes)
    x_0, t = torch.randint(0, num_classes - 1, (8, 32)), torch.arange(8) * 100 + 99
    x_t, hidden = scheduler.add_noise(x_0, t), torch.randn(8, 32, 8, requires_grad=True)
    with Sizes():
        d3pm_loss(scheduler, hidden, x_0, x_t, t, output_layer=layer).loss.mean().backward()
    assert rows * num_classes <= Sizes.largest <= rows * num_classes + 8 * num_classes


def test_no_second_gradient(small_pieces):
    scheduler, x_0, x_t, timesteps, *_ = noised("absorbing")
    layer, hidden = torch.nn.Linear(5, K), torch.randn(8, N, 5, requires_grad=True)
    loss = d3pm_loss(scheduler, hidden, x_0, x_t, timesteps, output_layer=layer).loss.sum()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    if scheduler.transition.kernel() is not None:
        with pytest.raises(RuntimeError, match="kernels_disabled"):
            gradient.sum().backward()


@pytest.mark.parametrize(
    "value", ["all", torch.zeros(3, 3), torch.zeros(2, 2, dtype=torch.bool), torch.zeros(2, 2).long(), [1]]
)
def test_wrong_elements(value):
    scheduler, x_0, x_t, timesteps, *_ = noised("absorbing")
    with pytest.raises(ValueError, match="logits_to_keep is .*(indices|mask)"):
        d3pm_loss(scheduler, torch.zeros(3, K), x_0, x_t, timesteps, logits_to_keep=value)
    with pytest.raises(ValueError, match=r"output has the shape \(3, 9\), and states \(2,\)"):
        d3pm_loss(scheduler, torch.zeros(3, K), x_0, x_t, timesteps, logits_to_keep=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="output_layer is 'head'"):
        d3pm_loss(scheduler, torch.zeros(8, N, K), x_0, x_t, timesteps, output_layer="head")


@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian", "matrix"])
@pytest.mark.parametrize("with_kernels", [True, False])
def test_a_logit_that_is_no_number(name, with_kernels):
    """It makes the loss of its element NaN, and of no other."""
    scheduler, x_0, x_t, timesteps, loss_mask, generator = noised(name)
    with kernels_disabled() if not with_kernels else torch.enable_grad():
        index = logits_to_keep(scheduler, x_t, timesteps, loss_mask=loss_mask)
        logits = torch.randn(len(index), K, generator=generator, dtype=torch.float64)
        logits[0, 1] = torch.nan
        options = {"loss_mask": loss_mask, "logits_to_keep": index}
        # Of an element whose state is certain, the full form does not read the logits either.
        certain = scheduler.transition.needs_logits(x_t, None, scheduler.num_steps_behind(timesteps))
        loss = d3pm_loss(scheduler, logits, x_0, x_t, timesteps, **options).loss.flatten()
    assert loss[index[1:]].isfinite().all()
    assert loss[index[0]].isnan() or (certain is None and loss[index[0]] == 0)


def test_an_output_layer_with_other_rows(small_pieces):
    scheduler, x_0, x_t, timesteps, *_ = noised("absorbing")
    layer = torch.nn.Linear(5, K)
    for shape in ((8, N + 1, 5), (7, N, 5), (8 * N, 5)):
        with pytest.raises(ValueError, match="the input of output_layer has the shape|output has the shape"):
            d3pm_loss(scheduler, torch.zeros(shape), x_0, x_t, timesteps, output_layer=layer)


# Denoisers

SMALL = {
    **{"vocab_size": K, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    **{"max_position_embeddings": 64, "pad_token_id": 0, "embedding_size": 16, "dim": 16, "hidden_dim": 16},
    **{"n_layers": 1, "n_heads": 2, "n_layer": 1, "n_head": 2, "n_embd": 16, "num_key_value_heads": 2, "head_dim": 8},
    **{"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
}
MASKED = """
    albert bert big_bird camembert convbert deberta deberta-v2 distilbert electra ernie esm eurobert fnet ibert longformer
    megatron-bert mobilebert modernbert mpnet mra nystromformer rembert roberta roberta-prelayernorm roformer squeezebert
    xlm-roberta yoso
""".split()
CAUSAL = ["gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_neox", "opt", "olmo", "phi"]


def small_network(kind, auto_class):
    config = transformers.CONFIG_MAPPING[kind]()
    config = transformers.CONFIG_MAPPING[kind](
        **{name: value for name, value in SMALL.items() if hasattr(config, name)}
    )
    torch.manual_seed(0)
    return auto_class.from_config(config).eval()


def check_denoiser(denoiser, num_classes):
    x_t, index = torch.randint(3, K, (3, N)), torch.tensor([0, 4, 5, 11, 17])
    attention_mask = torch.ones(3, N, dtype=torch.long)
    attention_mask[1, 4:] = 0
    with torch.no_grad():
        for condition in ({}, {"attention_mask": attention_mask}):
            full = denoiser(x_t, torch.tensor([1, 5, 9]), **condition)
            mask = torch.zeros(3 * N, dtype=torch.bool).index_fill(0, index, True).view(3, N)
            for which in (index, mask):
                part = denoiser(x_t, torch.tensor([1, 5, 9]), logits_to_keep=which, **condition)
                assert part.shape == (5, num_classes)
                torch.testing.assert_close(part, full.flatten(0, 1)[index], rtol=1e-5, atol=1e-5)
            again = denoiser(x_t, torch.tensor([1, 5, 9]), **condition)
            torch.testing.assert_close(again, full)  # nothing is left behind
    return full


def test_the_list_of_the_docs():
    """The networks that docs/source/en/speed.md names are those that are tested here."""
    text = (Path(__file__).parents[1] / "docs/source/en/speed.md").read_text()
    text = text.replace("\n", " ").replace("ö", "o")
    for kinds, start in ((MASKED, "Masked language models: "), (CAUSAL, "Causal language models: ")):
        names = text.split(start)[1].split(".")[0].split(", ")
        assert [re.sub("[^a-z0-9]", "", name.lower()) for name in names] == [
            re.sub("[-_]", "", kind) for kind in kinds
        ]


@pytest.mark.parametrize("kind", MASKED)
def test_masked_language_models(kind):
    network = small_network(kind, AutoModelForMaskedLM)
    denoiser = TextDenoiser(network)
    check_denoiser(denoiser, K)
    rows, layers = [], []

    def apply_head(found, layer=None):
        rows.append(found)
        layers.append(layer)
        return found

    index, x_t = torch.tensor([0, 4, 5, 11, 17]), torch.randint(3, K, (3, N))
    with torch.no_grad():
        logits = denoiser(x_t, 1).flatten(0, 1)[index]
        denoiser(x_t, 1, logits_to_keep=index, apply_head=apply_head)
    found = rows[0] if layers[0] is None else layers[0](rows[0])
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
    assert (layers[0] is not None) == (type(network).__name__ in LINEAR_LAST)


def last_layer_inputs(denoiser, **condition):
    """The shapes of what the parts of the last layer read that compute each position by itself, in a call for two elements."""
    part = find_pointwise_part(denoiser.network)
    if part is None:
        return None
    shapes, hook = [], lambda module, arguments, output: shapes.append(tuple(output.shape[:-1]))
    handle = part.register_forward_hook(hook)
    denoiser(torch.randint(3, K, (3, N)), 1, logits_to_keep=torch.tensor([1, 7]), **condition)
    handle.remove()
    return shapes


def test_the_last_layer_computes_the_kept_positions_alone():
    found = set()
    for kind in MASKED:
        denoiser = TextDenoiser(small_network(kind, AutoModelForMaskedLM))
        shapes = last_layer_inputs(denoiser)
        assert shapes in (None, [(1, 2)])
        if shapes is not None:
            found.add(type(denoiser.network.base_model.encoder.layer[-1]).__name__)
    assert found | {"T5Block"} == POINTWISE_LAST
    for backbone in ("bert", "t5"):
        denoiser = TextDenoiser(create_text_model("tiny", K, backbone=backbone))
        assert last_layer_inputs(denoiser) == [(1, 2)]
        denoiser.network.gradient_checkpointing_enable()  # the backward pass computes the layer again, and would not know
        assert find_pointwise_part(denoiser.network) is None
        denoiser.network.gradient_checkpointing_disable()
        assert find_pointwise_part(denoiser.network) is not None
        handle = denoiser.network.backbone.register_forward_hook(lambda module, arguments, output: None)
        assert find_pointwise_part(denoiser.network) is None
        handle.remove()
    assert find_pointwise_part(masked_lm(chunk_size_feed_forward=1).network) is None


@pytest.mark.parametrize("kind", CAUSAL)
def test_causal_language_models(kind):
    check_denoiser(CausalLMDenoiser(small_network(kind, AutoModelForCausalLM)), K + 1)


@pytest.mark.parametrize("backbone", ["bert", "t5"])
@pytest.mark.parametrize("is_decoder", [False, True])
def test_text_models(backbone, is_decoder):
    network = create_text_model(
        "tiny", K, backbone=backbone, is_decoder=is_decoder, timestep_conditioning=not is_decoder
    )
    check_denoiser(TextDenoiser(network.eval()), K)


def test_a_network_that_cannot():
    class Own(transformers.BertForMaskedLM):
        """Logits of another kind: what a subclass does with them is not known."""

        def forward(self, *args, **kwargs):
            return (super().forward(*args, **kwargs)[0].transpose(1, 2).contiguous().transpose(1, 2),)

    config = transformers.BertConfig(**{k: v for k, v in SMALL.items() if hasattr(transformers.BertConfig(), k)})
    check_denoiser(TextDenoiser(Own(config).eval()), K)


def test_who_can_be_asked():
    class Call:
        def __call__(self, x_t, timestep, logits_to_keep=None): ...

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    def plain(x_t, timestep, **condition): ...

    def keyword(x_t, timestep, *, logits_to_keep=None): ...

    counting, device = Counting(), torch.device("cpu")
    knowing = [
        counting,
        counting.forward,
        Wrapper(counting),
        Wrapper(Wrapper(counting)),
        Call(),
        Call().__call__,
        keyword,
    ]
    knowing += [
        functools.wraps(keyword)(lambda *args, **kwargs: None),
        functools.partial(keyword),
        repeatable(counting),
    ]
    for model in knowing:
        assert kept_logits.is_asked_for_rows(model, K, device)
    for model in (plain, lambda x_t, t: x_t, max, Asked(counting), functools.partial(plain), torch.compile(counting)):
        assert not kept_logits.is_asked_for_rows(model, K, device)
    assert not kept_logits.is_asked_for_rows(counting, K, torch.device("xla"))


def test_threads_do_not_see_each_other():
    """A thread that asks for all logits gets them while another one asks for some."""
    denoiser = TextDenoiser(create_text_model("tiny", K).eval())
    x_t, failures = torch.randint(0, K, (2, N)), []

    def work(index):
        for _ in range(40):
            with torch.no_grad():
                shape = denoiser(x_t, 3, logits_to_keep=index).shape
            if shape != ((2, N, K) if index is None else (len(index), K)):
                failures.append(shape)

    threads = [threading.Thread(target=work, args=(v,)) for v in (None, torch.tensor([1]), torch.tensor([0, 5, 7]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Training with the output layer in pieces


def masked_lm(**options):
    """A small BERT with a tied output layer, and the denoiser of it."""
    torch.manual_seed(0)
    size = {
        "vocab_size": K,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    config = transformers.BertConfig(**size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options)
    return TextDenoiser(transformers.BertForMaskedLM(config))


def text_model(backbone="t5"):
    torch.manual_seed(0)
    return TextDenoiser(create_text_model("tiny", K, backbone=backbone, hidden_dropout_prob=0.0))


def gradients_of(denoiser, batches, is_part, cast=None, scaler=None):
    """The gradients of the mean losses of batches, which are summed, and the sum of the losses."""
    denoiser.zero_grad()
    total = 0
    for scheduler, x_0, x_t, timesteps in batches:
        with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
            if is_part:
                loss = network_loss(scheduler, denoiser, x_0, x_t, timesteps).loss.mean()
            else:
                loss = d3pm_loss(scheduler, denoiser(x_t, timesteps), x_0, x_t, timesteps).loss.mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        total += loss.item()
    scale = 1 if scaler is None else scaler.get_scale()
    gradients = {name: p.grad.double() / scale for name, p in denoiser.named_parameters() if p.grad is not None}
    return gradients, total


def compare_training(denoiser, rtol=1e-5, atol=1e-7, seeds=(0, 1), **options):
    batches = []
    for seed in seeds:
        generator, scheduler = torch.Generator().manual_seed(seed), D3PMScheduler(K, 12)
        x_0, timesteps = torch.randint(0, K - 1, (4, N), generator=generator), torch.tensor([1, 5, 8, 11])
        batches.append((scheduler, x_0, scheduler.add_noise(x_0, timesteps, generator), timesteps))
    (part, own), (full, plain) = (gradients_of(denoiser, batches, is_part, **options) for is_part in (True, False))
    assert own == pytest.approx(plain, rel=rtol) and part.keys() == full.keys()
    for name, gradient in full.items():
        torch.testing.assert_close(
            part[name], gradient, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
    return part


@pytest.fixture
def head_calls(monkeypatch):
    """Counts the losses that are computed in pieces."""
    calls, before = [], head_loss.HeadTerms.apply
    monkeypatch.setattr(head_loss.HeadTerms, "apply", lambda *args: (calls.append(1), before(*args))[1])
    return calls


@pytest.mark.parametrize("create", [masked_lm, text_model, functools.partial(text_model, "bert")])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tied_weights_and_accumulated_gradients(small_pieces, head_calls, create, checkpointing):
    """The word vectors have the gradient of both of their uses, over two batches, with checkpointed activations too."""
    denoiser = create().train()
    if checkpointing:
        denoiser.network.gradient_checkpointing_enable()
    compare_training(denoiser)
    assert len(head_calls) == 2


def test_weights_of_16_bits_and_float64(small_pieces, head_calls):
    compare_training(masked_lm().to(torch.bfloat16), rtol=0.05, atol=2e-3)
    compare_training(masked_lm().double(), rtol=1e-6, atol=1e-10)
    assert len(head_calls) == 4


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.05), (torch.float16, 0.02)])
def test_autocast_and_a_loss_scale(small_pieces, head_calls, dtype, tolerance):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=dtype == torch.float16)
    compare_training(masked_lm(), rtol=tolerance, atol=tolerance / 20, cast=dtype, scaler=scaler)
    assert len(head_calls) == 2


@pytest.mark.parametrize("is_frozen", ["head", "body"])
def test_frozen_parameters(small_pieces, head_calls, is_frozen):
    denoiser = masked_lm(tie_word_embeddings=False)
    frozen = denoiser.network.cls.predictions.decoder if is_frozen == "head" else denoiser.network.bert
    frozen.requires_grad_(False)
    part = compare_training(denoiser)
    assert len(head_calls) == 2 and any("decoder" in name for name in part) == (is_frozen == "body")


def test_an_adapter_of_the_output_layer(small_pieces, head_calls):
    """What the output layer computes is then more than its weight says."""
    peft = pytest.importorskip("peft")
    denoiser = masked_lm(tie_word_embeddings=False)
    denoiser.network.add_adapter(peft.LoraConfig(r=2, target_modules=["decoder"], init_lora_weights=False))
    part = compare_training(denoiser)
    assert not head_calls and any("lora" in name for name in part)


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_on_the_output_layer(small_pieces, head_calls, hook):
    """They are called, and what they change is used."""
    denoiser, calls = masked_lm(), []
    layer = denoiser.network.get_output_embeddings()

    def change(module, first, *others):
        calls.append(hook)
        if hook == "forward":
            return 2 * others[0]
        if hook == "forward_pre":
            return (2 * first[0],)

    getattr(layer, f"register_{hook}_hook")(change)
    compare_training(denoiser)
    assert not head_calls and len(calls) == 4


def test_an_offloaded_output_layer(small_pieces, head_calls):
    """Accelerate replaces `forward` of a layer whose weights it moves."""
    denoiser = masked_lm(tie_word_embeddings=False)
    accelerate.cpu_offload(denoiser.network.cls.predictions.decoder, torch.device("cpu"))
    scheduler, x_0, x_t, timesteps, *_ = noised("absorbing")
    with torch.no_grad():
        part = network_loss(scheduler, denoiser, x_0, x_t, timesteps).loss
        full = d3pm_loss(scheduler, denoiser(x_t, timesteps), x_0, x_t, timesteps).loss
    torch.testing.assert_close(part, full, rtol=1e-5, atol=1e-7)
    assert not head_calls


def test_a_quantized_output_layer(small_pieces, head_calls):
    denoiser = masked_lm(tie_word_embeddings=False).eval()
    predictions = denoiser.network.cls.predictions
    predictions.decoder = torch.ao.nn.quantized.dynamic.Linear(16, K)
    scheduler, x_0, x_t, timesteps, *_ = noised("absorbing")
    with torch.no_grad():
        part = network_loss(scheduler, denoiser, x_0, x_t, timesteps).loss
        full = d3pm_loss(scheduler, denoiser(x_t, timesteps), x_0, x_t, timesteps).loss
    assert part.isfinite().all() and part.shape == full.shape and not head_calls


@pytest.mark.parametrize("x_t", [[[0, 1, 2]], [[8, 8, 8]], [[8, 8, 8], [0, 1, 2]], [[8]], [[3]], [[8, 1]] * 5])
@pytest.mark.parametrize("piece", [1, 10**6])
def test_batches_with_no_masks_and_of_masks_alone(monkeypatch, x_t, piece):
    monkeypatch.setattr(head_loss, "PIECE_BYTES", piece)
    scheduler, x_t, denoiser = D3PMScheduler(K, 12), torch.tensor(x_t), masked_lm()
    batch = scheduler, x_t.where(x_t < 8, 4), x_t, torch.full((len(x_t),), 5)
    (part, own), (full, plain) = (gradients_of(denoiser, [batch], is_part) for is_part in (True, False))
    assert own == pytest.approx(plain, rel=1e-6)
    for name, gradient in full.items():
        torch.testing.assert_close(part[name], gradient, rtol=1e-5, atol=1e-7)


def test_an_input_that_is_not_contiguous(small_pieces):
    scheduler, x_0, x_t, timesteps, *_ = noised("uniform")
    layer, hidden = torch.nn.Linear(5, K).double(), torch.randn(N, 8, 10, dtype=torch.float64)
    results = []
    for is_fused in (True, False):
        leaf = hidden.clone().requires_grad_()
        rows = leaf.transpose(0, 1)[..., ::2]
        how = {"output_layer": layer} if is_fused else {}
        loss = d3pm_loss(scheduler, rows if is_fused else layer(rows), x_0, x_t, timesteps, **how).loss
        results.append((loss.detach(), *torch.autograd.grad(loss.mean(), [leaf, layer.weight, layer.bias])))
    for own, plain in zip(*results):
        torch.testing.assert_close(own, plain, rtol=1e-6, atol=1e-9)


# What is built on them


class Counting(Denoiser):
    """A denoiser that knows how, and counts the rows of logits that it computes."""

    def __init__(self, num_classes=K):
        super().__init__()
        self.num_classes, self.num_rows = num_classes, 0
        self.embedding, self.head = torch.nn.Embedding(num_classes, 8), torch.nn.Linear(8, num_classes)

    def forward(self, x_t, timestep, logits_to_keep=None, shift=None):
        hidden = self.embedding(x_t) + self.embedding(x_t).mean(-2, keepdim=True) + 0.01 * timestep.view(-1, 1, 1)
        hidden = hidden if shift is None else hidden + shift[:, None, None]
        if logits_to_keep is not None:
            hidden = hidden.flatten(0, -2)[logits_to_keep.flatten()]
        self.num_rows += hidden[..., 0].numel()
        return self.head(hidden)

    def drop_condition(self, condition, rows):
        return {"shift": torch.where(rows, 0.0, condition["shift"])}


class Asked(Denoiser):
    """The denoiser above for those who ask for everything."""

    def __init__(self, denoiser):
        super().__init__(denoiser)
        self.num_classes = denoiser.num_classes

    def forward(self, x_t, timestep, shift=None):
        return self.network(x_t, timestep, shift=shift)

    def drop_condition(self, condition, rows):
        return self.network.drop_condition(condition, rows)


@pytest.mark.cover
@pytest.mark.parametrize("name", families.NAMES)
@pytest.mark.parametrize("auxiliary, hybrid_coeff", SETTINGS)
def test_the_loss_of_a_network(name, auxiliary, hybrid_coeff):
    scheduler, x_0, x_t, timesteps, loss_mask, _ = noised(name)
    options = {"auxiliary": auxiliary, "hybrid_coeff": hybrid_coeff, "loss_mask": loss_mask}
    part, full = Counting().double(), Asked(Counting().double())
    full.network.load_state_dict(part.state_dict())
    for denoiser in (part, full):
        output = network_loss(scheduler, denoiser, x_0, x_t, timesteps, **options)
        output.loss.mean().backward()
        denoiser.result = output.loss.detach()
    torch.testing.assert_close(part.result, full.result, rtol=1e-6, atol=1e-9)
    for a, b in zip(part.parameters(), full.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-9)
    assert part.num_rows < full.network.num_rows


@pytest.mark.cover
@pytest.mark.parametrize("continuous_time", [False, True])
@pytest.mark.parametrize("name", families.NAMES)
def test_bounds(name, continuous_time):
    family = families.build(name, K)
    if continuous_time and not family.transition.has_continuous_time:
        return
    scheduler, part = family.scheduler(), Counting().double()
    full = Asked(copy.deepcopy(part))
    x_0 = family.data((6, N))
    batch = {"x_0": x_0, "loss_mask": torch.rand(x_0.shape, generator=torch.Generator().manual_seed(1)) < 0.8}
    a, b = (
        evaluate_bound(scheduler, model, batch, continuous_time=continuous_time, progress_bar=False)
        for model in (part, full)
    )
    assert a.total == pytest.approx(b.total, rel=1e-6) and part.num_rows < full.network.num_rows
    torch.testing.assert_close(a.per_timestep, b.per_timestep, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian"])
def test_strides(name):
    family = families.build(name, K)
    scheduler, part = family.scheduler(), Counting().double()
    full = Asked(copy.deepcopy(part))
    batch = {"x_0": family.data((4, N)), "loss_mask": torch.arange(4 * N).view(4, N) % 5 > 0}
    a, b = (evaluate_strides(scheduler, model, batch, grid=4, progress_bar=False) for model in (part, full))
    torch.testing.assert_close(a.nats_per_example, b.nats_per_example, rtol=1e-6, atol=1e-9)
    assert part.num_rows < full.network.num_rows


@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian"])
def test_gibbs_steps_ask_for_the_positions_that_they_draw(name):
    scheduler, part = families.build(name, K).scheduler(), Counting().double()
    full = Asked(copy.deepcopy(part))
    drawn = []
    for model in (part, full):
        generator = torch.Generator().manual_seed(0)
        x_t, timesteps = scheduler.sample_prior((3, N), generator), scheduler.sampling_timesteps(4)
        options = {"generator": generator, "corrector": "gibbs", "num_positions": 2}
        drawn.append(predictor_corrector(scheduler, model, x_t, timesteps, **options))
    assert torch.equal(*drawn)
    assert part.num_rows == 4 * 3 * N + 3 * 3 * 2  # a step reads all positions, and a corrector two of each row


@pytest.mark.cover
@pytest.mark.parametrize("sampler", [positions_first, first_hitting, confidence])
@pytest.mark.parametrize("guidance_scale", [None, 0.0, 2.5])
@pytest.mark.parametrize("has_known", [False, True])
def test_samples_to_the_token(sampler, guidance_scale, has_known):
    scheduler, part = D3PMScheduler(K, 12), Counting().eval()
    full = Asked(copy.deepcopy(part)).eval()
    known = {}
    if has_known:
        is_known = torch.arange(4 * N).view(4, N) % 3 == 0
        known = {"known": torch.full((4, N), 2), "is_known": is_known}
    results = []
    for denoiser in (part, full):
        process, predict = scheduler, denoiser
        if guidance_scale is not None:
            process, predict = guide(scheduler, denoiser, guidance_scale)
        condition = {} if guidance_scale is None else {"shift": torch.arange(4.0)}
        generators = [torch.Generator().manual_seed(i) for i in range(4)]
        x_t = scheduler.sample_prior((4, N), generators)
        with torch.no_grad():
            results.append(
                sampler(process, predict, x_t, [11, 8, 4, 1], condition=condition, generator=generators, **known)
            )
    assert torch.equal(*results) and part.num_rows < full.network.num_rows


@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
def test_a_pipeline_with_a_prompt(guidance_scale):
    """Samples of a text model are those of all logits, token by token, padded and in batches."""
    tokenizer = character_tokenizer()
    pipeline = D3PMTextPipeline(
        create_text_model("tiny", len(tokenizer)), D3PMScheduler(len(tokenizer), 20), tokenizer
    )
    texts = {}
    for few in (0, 10**9):
        kept_logits.FEW_STATES = few
        pipeline.set_progress_bar_config(disable=True)
        for sampler in ("positions_first", "confidence", "first_hitting"):
            generators = [torch.Generator().manual_seed(i) for i in range(3)]
            texts[sampler, few] = pipeline(
                prompt=["a", "the cat", "one two"], max_new_tokens=10, sampler=sampler, num_inference_steps=8,
                generator=generators, guidance_scale=guidance_scale,
            ).texts  # fmt: skip
    for sampler in ("positions_first", "confidence", "first_hitting"):
        assert texts[sampler, 0] == texts[sampler, 10**9]


def test_a_compiled_network_is_asked_for_everything():
    """Shapes that change from step to step would be compiled again and again."""
    torch._dynamo.reset()
    compilations = []

    def count(graph, inputs):
        compilations.append(graph)
        return graph.forward

    denoiser, scheduler = TextDenoiser(create_text_model("tiny", K, timestep_conditioning=False)), D3PMScheduler(K, 12)
    compiled = torch.compile(denoiser, backend=count)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x_0 = torch.randint(0, K - 1, (8, N), generator=generator)
        timesteps = torch.randint(0, 12, (8,), generator=generator)
        x_t = scheduler.add_noise(x_0, timesteps, generator)
        network_loss(scheduler, compiled, x_0, x_t, timesteps).loss.mean().backward()
    assert len(compilations) == 1


def test_a_compiled_step_is_one_graph():
    """A function of network and loss asks for everything, however many masks there are."""
    torch._dynamo.reset()
    compilations = []

    def count(graph, inputs):
        compilations.append(graph)
        return graph.forward

    denoiser, scheduler = masked_lm(), D3PMScheduler(K, 12)
    compiled = TextDenoiser(torch.compile(masked_lm().network, backend=count), K)
    step = torch.compile(lambda x_0, x_t, t: network_loss(scheduler, denoiser, x_0, x_t, t).loss.mean(), backend=count)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x_0, timesteps = torch.randint(0, K - 1, (8, N), generator=generator), torch.arange(8)
        x_t = scheduler.add_noise(x_0, timesteps, generator)
        before = len(compilations)
        step(x_0, x_t, timesteps).backward()
        network_loss(scheduler, compiled, x_0, x_t, timesteps).loss.mean().backward()
        assert seed < 2 or len(compilations) == before  # the first step fills the tables of the process


def test_timesteps_are_chosen_by_few_logits():
    pipeline = D3PMTextPipeline(
        create_text_model("tiny", 28), D3PMScheduler(28, 20), character_tokenizer(), sequence_length=N
    )
    rows = []
    pipeline.text_model.lm_head.register_forward_hook(
        lambda module, inputs, output: rows.append(output[..., 0].numel())
    )
    dataset, results = python_prose(N)[1], []
    for kept_logits.FEW_STATES in (0, 10**9):
        start = len(rows)
        options = {"num_examples": 6, "grid": 5, "batch_size": 3, "progress_bar": False}
        results.append((optimize_timesteps(pipeline, dataset, **options), sum(rows[start:])))
    (some, few), (every, many) = results
    torch.testing.assert_close(some.nats_per_example, every.nats_per_example, rtol=1e-5, atol=1e-6)
    assert some.inference_timesteps == every.inference_timesteps and few < many
