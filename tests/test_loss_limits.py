# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Logits of minus infinity, elements that do not count, and derivatives of the gradient."""

import math

import families
import pytest
import torch
from families import NUM_STEPS

from d3pm_hf import D3PMScheduler
from d3pm_hf.losses import autoregressive_loss, d3pm_loss


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
FAMILIES = pytest.mark.parametrize("name", families.NAMES)
TIMES = torch.arange(NUM_STEPS)  # public timesteps
INF = math.inf


def draw_logits(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- minus infinity --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("x0_posterior", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("transition", ["absorbing", "autoregressive", "stationary"])
def test_a_state_that_noise_cannot_make_stays(transition, x0_posterior):
    """Logits that exclude it do not matter: posterior, step, preview and loss agree, and -1e4 has the same limit."""
    probs = {"stationary_probs": torch.tensor([0.5, 0.0, 0.5])} if transition == "stationary" else {}
    schedule = {"trained_betas": [0.2, 0.5, 0.7]} if transition != "autoregressive" else {}
    scheduler = D3PMScheduler(3, 3, transition, x0_posterior=x0_posterior, **schedule, **probs)
    scheduler.set_timesteps(3)
    x_0 = torch.tensor([[1, 1, 1]])
    x = torch.tensor([[1, 1, 2]]) if transition == "autoregressive" else x_0
    for low in (-1e4, -INF):
        logits = torch.tensor([0.3, low, 0.1]).expand(1, 3, -1).clone().requires_grad_()
        timestep = 0 if transition == "autoregressive" else 1  # two positions are still visible
        seen = slice(0, 2)
        posterior = scheduler.posterior_logits(logits, timestep, x)[:, seen]
        torch.testing.assert_close(posterior.exp(), torch.tensor([0.0, 1.0, 0.0]).expand(1, 2, -1))
        assert (scheduler.step(logits, timestep, x).prev_sample[:, seen] == 1).all()
        assert (scheduler.predict_original_sample(logits, timestep, x)[:, seen] == 1).all()
        loss = d3pm_loss(scheduler, logits, x_0, x, timestep).loss[:, seen]
        loss.sum().backward()
        torch.testing.assert_close(loss.detach(), torch.zeros(1, 2))
        assert torch.equal(logits.grad[:, seen], torch.zeros(1, 2, 3))


@pytest.mark.parametrize("hybrid_coeff", [0.0, 0.5])
@FAMILIES
def test_excluding_the_data_costs_infinity_with_a_finite_gradient(name, hybrid_coeff):
    """At t = 0 the loss is -log p(x_0); where it is infinite, its gradient is that of ever lower logits."""
    family = families.build(name)
    scheduler = family.scheduler()
    x_0 = family.data((1, NUM_STEPS))
    x_t = family.corrupt(x_0, 1, seed=3)
    logits = draw_logits(1, NUM_STEPS, family.num_classes)
    gradients = []
    for low in (-1e5, -INF):
        given = logits.scatter(-1, x_0[..., None], low).requires_grad_()
        out = d3pm_loss(scheduler, given, x_0, x_t, 0, hybrid_coeff=hybrid_coeff)
        out.loss.sum().backward()
        gradients.append(given.grad)
        assert ((out.loss == INF) == ((out.vb > 9e4) | (hybrid_coeff > 0))).all() or low > -INF
    assert gradients[1].isfinite().all() and out.cross_entropy.min() == INF and not out.loss.isnan().any()
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-9, rtol=1e-9)


def test_logits_that_leave_nothing_possible_are_refused():
    """In one sentence, and the same by posterior, step and loss."""
    scheduler = D3PMScheduler(5, 4, "uniform", trained_betas=[0.2] * 4)
    scheduler.set_timesteps(4)
    x = torch.zeros(2, 3, dtype=torch.long)
    logits = torch.zeros(2, 3, 5)
    logits[1, 2] = -INF
    for call in (
        lambda: scheduler.posterior_logits(logits, 1, x),
        lambda: scheduler.step(logits, 1, x),
        lambda: d3pm_loss(scheduler, logits, x, x, 1),
    ):
        with pytest.raises(
            ValueError, match=r"all logits at position \(1, 2\) are -inf: leave at least one state pos"
        ):
            call()
    # A band reaches one state in a step: nothing that the logits leave leads to x_t = 0.
    scheduler = D3PMScheduler(5, 4, "band_diagonal", trained_betas=[0.9] * 4)
    scheduler.set_timesteps(4)
    logits = torch.zeros(2, 3, 5)
    logits[0, 1, :3] = -INF
    for call in (
        lambda: scheduler.posterior_logits(logits, 1, x),
        lambda: scheduler.step(logits, 1, x),
        lambda: d3pm_loss(scheduler, logits, x, x, 1),
    ):
        with pytest.raises(ValueError, match="rule out every x_0 that can lead to x_t"):
            call()


# --- the mask among the data -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("reconstruction", ["posterior", "raw"])
@pytest.mark.parametrize("x0_posterior", ["leave_one_out", "denoising"])
def test_a_mask_in_the_data_that_no_step_has_touched(x0_posterior, reconstruction):
    """With a survival of one, x_t = mask means x_0 = mask: the KL is zero and the cross-entropy that of the output."""
    options = {"x0_posterior": x0_posterior, "reconstruction": reconstruction, "mask_in_data": True}
    scheduler = D3PMScheduler(5, 2, "absorbing", trained_betas=[0.0, 0.5], **options)
    x = torch.tensor([[4]])
    logits = torch.zeros(1, 1, 5, dtype=torch.float64, requires_grad=True)
    out = d3pm_loss(scheduler, logits, x, x, 0, hybrid_coeff=1.0)
    vb = math.log(5) if reconstruction == "raw" else 0.0
    assert out.cross_entropy.item() == pytest.approx(math.log(5)) and out.vb.item() == pytest.approx(vb)
    out.loss.sum().backward()
    weight = 2 if reconstruction == "raw" else 1
    expected = weight * torch.tensor([0.2, 0.2, 0.2, 0.2, -0.8], dtype=torch.float64)
    torch.testing.assert_close(logits.grad[0, 0], expected)


# --- elements that do not count --------------------------------------------------------------------------------------
@pytest.mark.cover
@pytest.mark.parametrize("filler", [0.0, -INF, INF, math.nan])
@pytest.mark.parametrize("prediction_type", ["x0", "previous"])
@FAMILIES
def test_loss_mask(name, prediction_type, filler):
    """Zero loss and gradient, whatever the states and the logits are; all other elements as they were."""
    family = families.build(name)
    scheduler = family.scheduler(prediction_type=prediction_type)
    hybrid_coeff = 0.3 if prediction_type == "x0" else 0.0
    x_0 = family.data((NUM_STEPS, NUM_STEPS))
    x_t = family.corrupt(x_0, TIMES + 1)
    logits = draw_logits(NUM_STEPS, NUM_STEPS, family.num_classes)
    whole = logits.clone().requires_grad_()
    expected = d3pm_loss(scheduler, whole, x_0, x_t, TIMES, hybrid_coeff=hybrid_coeff)
    expected.loss.sum().backward()
    counts = torch.rand(x_0.shape, generator=torch.Generator().manual_seed(0)) < 0.6
    state = 0 if family.mask is None else family.mask
    x_0, x_t = x_0.where(counts, state), x_t.where(counts, 0)
    for loss_mask in (counts, counts.long(), counts.float()):
        padded = logits.where(counts[..., None], filler).requires_grad_()
        options = {"hybrid_coeff": hybrid_coeff, "loss_mask": loss_mask}
        out = d3pm_loss(scheduler, padded, x_0, x_t, TIMES, **options)
        out.loss.sum().backward()
        torch.testing.assert_close(out.loss, expected.loss.where(counts, 0))
        torch.testing.assert_close(out.vb, expected.vb.where(counts, 0))
        if prediction_type == "x0":
            torch.testing.assert_close(out.cross_entropy, expected.cross_entropy.where(counts, 0))
        torch.testing.assert_close(padded.grad, whole.grad.where(counts[..., None], 0))


def test_loss_mask_of_the_causal_loss():
    family = families.build("autoregressive")
    scheduler = family.scheduler()
    x_0, logits = family.data((2, NUM_STEPS)), draw_logits(2, NUM_STEPS, 5)
    whole = logits.clone().requires_grad_()
    expected = autoregressive_loss(scheduler, whole, x_0)
    expected.sum().backward()
    counts = torch.arange(NUM_STEPS).expand(2, -1) < torch.tensor([[4], [6]])
    padded = logits.where(counts[..., None], math.nan).requires_grad_()
    got = autoregressive_loss(scheduler, padded, x_0.where(counts, family.mask), loss_mask=counts)
    got.sum().backward()
    torch.testing.assert_close(got, expected.where(counts, 0))
    torch.testing.assert_close(padded.grad, whole.grad.where(counts[..., None], 0))


def test_wrong_loss_masks_and_data_are_refused():
    scheduler = D3PMScheduler(5, 4)
    x_0 = torch.tensor([[1, 2, 4]])
    x_t = torch.tensor([[1, 4, 4]])
    logits = torch.zeros(1, 3, 5)
    message = r"x_0 at position \(0, 2\) is the mask token 4, which data never hold: exclude padding with loss_mask"
    with pytest.raises(ValueError, match=message):
        d3pm_loss(scheduler, logits, x_0, x_t, 1)
    out = d3pm_loss(scheduler, logits, x_0, x_t, 1, loss_mask=x_0 != 4)
    torch.testing.assert_close(out.loss, torch.tensor([[0, math.log(4) / 2, 0]]))
    with pytest.raises(
        ValueError, match=r"loss_mask has the shape \(1, 1\), and x_0 the shape \(1, 3\): pass one value"
    ):
        d3pm_loss(scheduler, logits, x_0, x_t, 1, loss_mask=torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"loss_mask holds 255: pass True \(or 1\) where an element counts"):
        d3pm_loss(scheduler, logits, x_0, x_t, 1, loss_mask=torch.tensor([[255, 0, 0]]))


# --- derivatives of the gradient -------------------------------------------------------------------------------------
@families.needs_kernels
@pytest.mark.parametrize("name", ["uniform", "absorbing", "absorbing_in_data", "gaussian", "rate-sparse"])
def test_double_backward_is_refused(name):
    """A gradient penalty would miss how the gradient depends on the logits: silently, as autograd sees no graph there."""
    family = families.build(name)
    x_0 = family.data((NUM_STEPS, NUM_STEPS))
    x_t = family.corrupt(x_0, TIMES + 1)
    logits = draw_logits(NUM_STEPS, NUM_STEPS, 5).requires_grad_()
    out = d3pm_loss(family.scheduler(), logits, x_0, x_t, TIMES)
    (gradient,) = torch.autograd.grad(out.loss.sum(), logits, create_graph=True)
    penalty = out.loss.sum() + (gradient * logits).sum()
    with pytest.raises(RuntimeError, match="d3pm_loss can be differentiated once: for gradient penalties"):
        penalty.backward()
