# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The plain KL divergence, which defines the loss, at its ends; test_losses.py has its numbers beside the fused ones."""

import itertools
import math
from contextlib import nullcontext
from unittest.mock import patch

import families
import pytest
import torch
from families import NUM_STEPS, without_fused_loss

from d3pm_hf.kernels.fused import fused_terms
from d3pm_hf.losses import Options, d3pm_loss, plain_terms, register_fused_loss
from d3pm_hf.numerics import lower_excluded, safe_log, safe_logaddexp


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
PAIRS = torch.tensor([(s, t) for s in range(NUM_STEPS) for t in range(s + 1, NUM_STEPS + 1)])  # steps behind, s < t
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
FAMILIES = pytest.mark.parametrize("name", families.NAMES)
ALL_OPTIONS = [
    Options(denoising, raw, hybrid_coeff, convert)
    for denoising, raw, hybrid_coeff, convert in itertools.product(
        (False, True), (False, True), (0.0, 0.3), (False, True)
    )
    if not (denoising and convert)  # logits of the denoising posterior need no conversion
]


def case(family, pairs=PAIRS):
    """x_0, x_t and logits, one sample for each pair of times."""
    x_0 = family.data((len(pairs), NUM_STEPS))
    x_t = family.corrupt(x_0, pairs[:, 1])
    generator = torch.Generator().manual_seed(0)
    return x_0, x_t, 2 * torch.randn(*x_0.shape, family.num_classes, generator=generator, dtype=torch.float64)


def plain(transition, logits, *states):
    """Loss, vb, cross-entropy and gradient of the plain form."""
    logits = logits.clone().requires_grad_()
    vb, cross_entropy = plain_terms(transition, logits, *states)
    loss = vb + states[-1].hybrid_coeff * cross_entropy if states[-1].hybrid_coeff else vb
    loss.sum().backward()
    return loss.detach(), vb.detach(), cross_entropy.detach(), logits.grad


def fused(transition, logits, *states):
    """The same of the fused form that the transition names."""
    logits = logits.clone().requires_grad_()
    loss, vb, cross_entropy = fused_terms(transition, logits, *states)
    loss.sum().backward()
    return loss.detach(), vb, cross_entropy, logits.grad


# --- minus infinity -------------------------------------------------------------------------------------------------
@FAMILIES
@families.needs_kernels
def test_logits_of_minus_infinity(name):
    """Half of them: infinite terms, and the gradients that they have in the limit; both forms find the same undefined."""
    family = families.build(name, betas="middle")
    pairs = PAIRS[::5] if name.endswith("sparse") else PAIRS
    transition, (s, t) = family.transition, pairs.unbind(-1)
    if name == "blockwise":  # which names no fused loss, and for which this one is right
        transition.fused_loss = "absorbing"
    x_0, x_t, logits = case(family, pairs)
    excluded = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    logits = logits.masked_fill(excluded.scatter(-1, family.data(x_0.shape, 2)[..., None], False), -torch.inf)
    for options in ALL_OPTIONS[2::3] if name.endswith("sparse") else ALL_OPTIONS:
        expected, got = (form(transition, logits, x_0, x_t, s, t, options) for form in (plain, fused))
        defined = ~got[1].isnan() & ~got[2].isnan()
        assert (expected[1] == torch.inf).any() and torch.equal(~expected[1].isnan() & ~expected[2].isnan(), defined)
        for mine, theirs in zip(expected, got):
            torch.testing.assert_close(mine[defined], theirs[defined], atol=1e-9, rtol=1e-9)
        assert expected[3][defined].isfinite().all()


def test_logarithms_with_derivatives_at_zero():
    """Values of torch; first and second derivatives are zero where those of torch are NaN, and the same elsewhere."""
    values = torch.tensor([-math.inf, -2e3, -1.0, 0.5], dtype=torch.float64)
    a, b = (v.flatten().clone().requires_grad_() for v in torch.meshgrid(values, values, indexing="ij"))
    result = safe_logaddexp(a, b)
    torch.testing.assert_close(result, torch.logaddexp(a, b), atol=1e-14, rtol=1e-14)
    share = torch.where(a == -math.inf, 0, torch.sigmoid(a - b)).detach()
    (first,) = torch.autograd.grad(result.sum(), a, create_graph=True)
    torch.testing.assert_close(first, share)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), a)[0], share * (1 - share))

    p = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(safe_log(p).sum(), p, create_graph=True)
    torch.testing.assert_close(safe_log(p).detach(), p.detach().log())
    torch.testing.assert_close(first, torch.tensor([0.0, 4.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(torch.autograd.grad(first.sum(), p)[0], torch.tensor([0.0, -16.0, -1.0]).double())


def test_logits_that_are_lowered():
    """-inf becomes a number whose exponential is zero, and the gradient is that of the identity."""
    logits = torch.tensor([[1.0, -math.inf, -3e4], [0.0, 2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    lowered = lower_excluded(logits)
    assert lowered.isfinite().all() and lowered[0, 1] < -9e5
    torch.testing.assert_close(lowered.softmax(-1), logits.softmax(-1), atol=0, rtol=0)
    (lowered * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([1.0, 2.0, 3.0]).double().expand(2, 3))


# --- the plain form by itself ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["uniform", "absorbing", "stationary", "gaussian", "band_diagonal", "rate"])
def test_second_derivatives(name):
    """Autograd differentiates the plain form any number of times, where the fused one refuses."""
    family = families.build(name, num_classes=3, betas=[0.3, 0.5])
    x_0 = family.data((2, 2))
    s, t = torch.tensor([0, 1]), torch.tensor([1, 2])
    x_t = family.corrupt(x_0, t)
    logits = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    transition = family.transition
    for options in (Options(False, False, 0.3, True), Options(True, True, 0.3, False)):

        def loss(logits):
            vb, cross_entropy = plain_terms(transition, logits, x_0, x_t, s, t, options)
            return vb + 0.3 * cross_entropy

        assert torch.autograd.gradgradcheck(loss, (logits,))


@pytest.mark.parametrize(
    "name", ["uniform", "absorbing", "autoregressive", "band_diagonal", "nearest_neighbor-sparse"]
)
def test_d3pm_loss_without_a_fused_loss(name):
    """The same output, gradient, dtypes and detachment, with a mask over elements that hold nonsense."""
    family = families.build(name)
    scheduler = family.scheduler(x0_posterior="denoising")
    x_0, x_t, logits = case(family)
    counts = torch.rand(x_0.shape, generator=torch.Generator().manual_seed(0)) < 0.6
    x_0, x_t = x_0.where(counts, 0 if family.mask is None else family.mask), x_t.where(counts, 0)
    times = {"timesteps": PAIRS[:, 1] - 1, "previous_timesteps": PAIRS[:, 0] - 1}
    for dtype, filler in [(torch.float64, math.nan), (torch.float32, -math.inf), (torch.bfloat16, math.inf)]:
        outputs = []
        for form in (nullcontext(), without_fused_loss(scheduler.transition)):
            given = logits.where(counts[..., None], filler).to(dtype).requires_grad_()
            with form:
                out = d3pm_loss(scheduler, given, x_0, x_t, hybrid_coeff=0.3, loss_mask=counts, **times)
            assert out.loss.requires_grad and not out.vb.requires_grad and not out.cross_entropy.requires_grad
            assert (out.loss[~counts] == 0).all() and (out.cross_entropy[~counts] == 0).all()
            (out.loss * 2.0**-8).sum().backward()
            outputs.append((out.loss.detach(), out.vb, out.cross_entropy, given.grad))
        rounding = 8e-3 if dtype == torch.bfloat16 else 0
        for got, value in zip(*outputs):
            assert got.dtype == value.dtype
            tolerance = max(TOLERANCE.get(dtype, 1e-5), rounding if got.dtype == torch.bfloat16 else 0)
            torch.testing.assert_close(got, value, atol=tolerance, rtol=tolerance)


def test_the_loss_without_its_cross_entropy_is_finite():
    """`hybrid_coeff=0` leaves the cross-entropy out, also where that is infinite."""
    family = families.build("uniform")
    scheduler = family.scheduler()
    x_0 = torch.zeros(1, 2, dtype=torch.long)
    logits = torch.zeros(1, 2, 5).scatter(-1, x_0[..., None], -math.inf).requires_grad_()
    with without_fused_loss(scheduler.transition):
        out = d3pm_loss(scheduler, logits, x_0, x_0, 2)
    out.loss.sum().backward()
    assert out.loss.isfinite().all() and (out.cross_entropy == math.inf).all() and logits.grad.isfinite().all()


def test_logits_that_leave_nothing_possible_are_refused():
    family = families.build("band_diagonal")
    scheduler = family.scheduler()
    x = torch.zeros(1, 2, dtype=torch.long)
    logits = torch.zeros(1, 2, 5)
    logits[0, 1, :3] = -math.inf  # a band of width 2 leads to state 0 from these alone
    with without_fused_loss(scheduler.transition):
        with pytest.raises(ValueError, match=r"at position \(0, 1\) rule out every x_0 that can lead to x_t = 0"):
            d3pm_loss(scheduler, logits, x, x, 0)


def test_states_that_do_not_belong_together_are_refused():
    family = families.build("band_diagonal")
    x_0, x_t, logits = torch.zeros(1, 2, dtype=torch.long), torch.tensor([[1, 4]]), torch.zeros(1, 2, 5)
    message = (
        r"x_0 = 0 at position \(0, 1\) cannot become x_t = 4 by its timestep: pass the timesteps that the noise was"
    )
    for prediction_type in ("x0", "previous"):
        scheduler = family.scheduler(prediction_type=prediction_type)
        with without_fused_loss(scheduler.transition):
            with pytest.raises(ValueError, match=message):
                d3pm_loss(scheduler, logits, x_0, x_t, 0)
            out = d3pm_loss(scheduler, logits, x_0, x_t, 0, loss_mask=torch.tensor([[True, False]]))
        assert out.loss[0, 0] > 0 and out.loss[0, 1] == 0


# --- the registry ----------------------------------------------------------------------------------------------------
def test_unknown_and_repeated_names():
    scheduler = families.build("uniform").scheduler()
    x, logits = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, 5)
    with patch.object(scheduler.transition, "fused_loss", "fast"):
        message = "fused_loss is 'fast': it must be one of .*; register your own with `register_fused_loss`"
        with pytest.raises(ValueError, match=message):
            d3pm_loss(scheduler, logits, x, x, 0)
    with pytest.raises(
        ValueError, match="the fused loss 'matrix' is part of the package: register yours under another name"
    ):
        register_fused_loss("matrix")(lambda *_: None)
    with pytest.raises(ValueError, match="name is 3"):
        register_fused_loss(3)
    with pytest.raises(ValueError, match="the fused loss is 'matrix'.*a function"):
        register_fused_loss("other")("matrix")
    with pytest.raises(ValueError, match="traceable is 1: it must be True or False"):
        register_fused_loss("other", traceable=1)
    with patch.object(scheduler.transition, "fused_loss", "absorbing"):
        message = f"fused_loss of {type(scheduler.transition).__name__} is 'absorbing', but it has no absorbing state: use 'rank_one'"
        with pytest.raises(ValueError, match=message):
            d3pm_loss(scheduler, logits, x, x, 0)
