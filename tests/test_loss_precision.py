# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Logits of 16 bits, loss scaling and `torch.autocast`: losses, likelihoods and steps are those of float32."""

import families
import pytest
import reference as ref
import torch
from families import NUM_STEPS

from d3pm_hf import D3PMScheduler
from d3pm_hf.losses import autoregressive_loss, d3pm_loss


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
FAMILIES = pytest.mark.parametrize("name", families.NAMES)
TIMES = torch.arange(1, NUM_STEPS + 1)  # steps behind


def case(family, dtype=torch.float32, seed=0):
    """x_0, x_t and logits, one sample for each number of steps."""
    x_0 = family.data((NUM_STEPS, NUM_STEPS), seed)
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*x_0.shape, family.num_classes, generator=generator)
    return x_0, family.corrupt(x_0, TIMES, seed), logits.to(dtype)


def expected_loss(family, logits, x_0, x_t):
    """vb + 0.3 * cross-entropy, float64, with its graph."""
    allowed = ref.forbid(logits, family.mask)
    vb = ref.variational(family.matrices, allowed, x_0, x_t, TIMES - 1, TIMES)
    return vb + 0.3 * ref.cross_entropy(family.matrices, allowed, x_0, x_t, TIMES)


@HALVES
@FAMILIES
def test_gradients_of_16_bits_survive_loss_scaling(name, dtype):
    """Small weights, as of a mean over a large batch, and a large scale, as of a GradScaler: only the product is rounded."""
    family = families.build(name)
    x_0, x_t, logits = case(family, dtype)
    for weight, scale in [(2.0**-16, 2.0**16), (2.0**-30, 2.0**20)]:
        given = logits.clone().requires_grad_()
        truth = logits.double().requires_grad_()
        out = d3pm_loss(family.scheduler(), given, x_0, x_t, TIMES - 1, hybrid_coeff=0.3)
        ((out.loss.sum() * weight) * scale).backward()
        (expected_loss(family, truth, x_0, x_t).sum() * weight * scale).backward()
        assert out.loss.dtype == torch.float32 and given.grad.dtype == dtype
        rounding = torch.finfo(dtype).eps / 2
        smallest = 2.0**-25 if dtype == torch.float16 else 0  # half of the smallest float16
        close = {"rtol": rounding, "atol": 1e-5 * weight * scale + smallest}
        torch.testing.assert_close(given.grad.double(), truth.grad, **close)


@pytest.mark.parametrize("name", ["uniform", "absorbing"])
def test_no_gradient_of_a_large_vocabulary_vanishes(name):
    """At K = 50258 most entries of the gradient are below the smallest float16, until the loss scale lifts them."""
    K, scale = 50258, 2.0**16
    scheduler = D3PMScheduler(K, 10, transition=name, beta_schedule="cosine")
    x_0, x_t = torch.tensor([[5, 6]]), torch.tensor([[K - 1, K - 1]])
    logits = 2 * torch.randn(1, 2, K, generator=torch.Generator().manual_seed(0))
    logits[..., :100] += 6
    half = logits.half().requires_grad_()
    single = half.detach().double().requires_grad_()
    for given in (half, single):
        (d3pm_loss(scheduler, given, x_0, x_t, 4).loss.mean() * scale).backward()
    expected = single.grad.half()
    assert half.grad.isfinite().all()
    small = single.grad.abs() < 2.0**-14
    torch.testing.assert_close(half.grad[~small].double(), single.grad[~small], rtol=1e-3, atol=0)
    assert ((half.grad == 0) & (expected.abs() > 2.0**-23)).sum() == 0
    assert (half.grad == 0).double().mean() < 0.02


@HALVES
@pytest.mark.parametrize("name", ["absorbing", "uniform", "absorbing_uniform", "stationary"])
def test_mixed_precision_of_a_large_vocabulary(name, dtype):
    """A network in autocast with a GradScaler, at the size of the GPT-2 vocabulary: the losses are near those of float32."""
    K = 50258
    probs = 1 / torch.arange(1, K + 1, dtype=torch.float64)
    tensors = {"stationary_probs": probs / probs.sum()} if name == "stationary" else {}
    scheduler = D3PMScheduler(K, 1000, transition=name, beta_schedule="cosine", **tensors)
    generator = torch.Generator().manual_seed(0)
    x_0, hidden = torch.randint(K - 1, (4, 4), generator=generator), torch.randn(4, 4, 16, generator=generator)
    timesteps = torch.tensor([0, 300, 700, 999])
    x_t = scheduler.add_noise(x_0, timesteps, generator=generator)
    network = torch.nn.Linear(16, K)
    with torch.no_grad():
        network.weight.copy_(torch.randn(K, 16, generator=generator) / 2)
        network.bias.copy_(torch.randn(K, generator=generator))
    losses, gradients = [], []
    for enabled in (False, True):
        network.zero_grad()
        scaler = torch.amp.GradScaler("cpu", enabled=enabled and dtype == torch.float16)
        with torch.autocast("cpu", dtype, enabled=enabled):
            logits = network(hidden)
            assert logits.dtype == (dtype if enabled else torch.float32)
            output = d3pm_loss(scheduler, logits, x_0, x_t, timesteps, hybrid_coeff=0.01)
        scaler.scale(output.loss.mean()).backward()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        scaler.unscale_(optimizer)
        losses.append(output.loss.detach())
        gradients.append(network.weight.grad.clone())
    assert all(v.isfinite().all() for v in (*losses, *gradients))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=1e-4)
    difference = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert difference < 2e-2


@HALVES
@FAMILIES
def test_autocast_changes_nothing(name, dtype):
    """Losses with their gradients, posteriors and steps inside `torch.autocast` are those outside of it."""
    family = families.build(name)
    scheduler = family.scheduler()
    scheduler.set_timesteps(NUM_STEPS)
    x_0, x_t, logits = case(family)
    results = []
    for enabled in (False, True):
        given = logits.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=enabled):
            noised = scheduler.add_noise(x_0, TIMES - 1, generator=torch.Generator().manual_seed(1))
            out = d3pm_loss(scheduler, given, x_0, x_t, TIMES - 1, hybrid_coeff=0.3)
            out.loss.sum().backward(retain_graph=True)
            out.loss.sum().backward()  # the second pass computes the gradient again
            posterior = scheduler.posterior_logits(logits, TIMES - 1, x_t)
            generator = torch.Generator().manual_seed(2)
            drawn = scheduler.step(logits[-1:], NUM_STEPS - 1, x_t[-1:], generator=generator).prev_sample
        results.append((noised, out.loss.detach(), given.grad, posterior, drawn))
    for outside, inside in zip(*results):
        assert inside.dtype == outside.dtype
        torch.testing.assert_close(inside, outside, rtol=1e-6, atol=1e-7)


@HALVES
def test_autocast_of_other_predictions(dtype):
    """Logistic heads, networks that predict x_{t-1}, and the causal loss, from outputs of 16 bits."""
    family = families.build("uniform")
    x_0, x_t, logits = case(family, dtype)
    parameters = logits[..., :2] / 4
    truth = ref.logistic_logits(*parameters.unbind(-1), family.num_classes)
    vb = ref.variational(family.matrices, truth, x_0, x_t, TIMES - 1, TIMES)
    previous = ref.kl(ref.posterior(family.matrices, x_0, x_t, TIMES - 1, TIMES), logits.double().softmax(-1))
    causal = families.build("autoregressive")
    log_p = ref.forbid(logits, causal.mask).log_softmax(-1)
    tokens = causal.data(x_0.shape)
    with torch.autocast("cpu", dtype):
        got = d3pm_loss(family.scheduler(prediction_type="logistic"), parameters, x_0, x_t, TIMES - 1).loss
        direct = d3pm_loss(family.scheduler(prediction_type="previous"), logits, x_0, x_t, TIMES - 1).loss
        one_pass = autoregressive_loss(causal.scheduler(), logits, tokens)
    torch.testing.assert_close(got.double(), vb, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(direct.double(), previous, rtol=1e-5, atol=1e-5)
    expected = -log_p.gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(one_pass.double(), expected, rtol=1e-5, atol=1e-5)
