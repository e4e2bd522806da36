# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A transition from outside the package that defines nothing but `sample`, `log_marginal` and `log_likelihood`."""

from unittest.mock import patch

import families
import pytest
import reference as ref
import torch
from families import NUM_STEPS

from d3pm_hf import D3PMScheduler, d3pm_loss, evaluate_bound, prior_loss
from d3pm_hf.kernels import fused as registry
from d3pm_hf.losses import Options, plain_terms, register_fused_loss
from d3pm_hf.numerics import categorical, uniforms
from d3pm_hf.transitions import Transition


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
# Those whose matrices do not depend on the position, each once.
NAMES = [name for name in families.NAMES if name not in families.BY_POSITION and not name.endswith("sparse")]
PAIRS = torch.tensor([(s, t) for s in range(NUM_STEPS) for t in range(s + 1, NUM_STEPS + 1)])  # steps behind, s < t


class OutsideTransition(Transition):
    """Q_1 .. Q_T by the first formulas that come to mind."""

    def __init__(self, steps, prior, never_data=()):
        super().__init__()
        self.num_steps, self.num_classes = steps.shape[:2]
        self.steps, self.log_prior, self.never_data = steps, prior.log(), never_data

    def log_matrices(self, s, t, x):
        """log Q_{s..t} for each sample of x, [B, 1, ..., K, K]."""
        pairs = zip(*(torch.as_tensor(n).expand(len(x)).tolist() for n in (s, t)))
        eye = torch.eye(self.num_classes, dtype=torch.float64)
        products = [torch.linalg.multi_dot([eye, eye, *self.steps[first:last]]) for first, last in pairs]
        return torch.stack(products).log().reshape(len(x), *[1] * (x.ndim - 1), *eye.shape)

    def sample(self, x_0, t, generator=None):
        u = uniforms(x_0.shape, generator)
        return categorical(self.log_marginal(x_0, 0, t).flatten(0, -2), u.flatten()).view_as(x_0)

    def log_marginal(self, x, s, t, dtype=torch.float32):
        if x.is_floating_point():
            return (x[..., None] + self.log_matrices(s, t, x[..., 0]).to(x.dtype)).logsumexp(-2)
        at = x[..., None, None].expand(*x.shape, 1, self.num_classes)
        return self.log_matrices(s, t, x).expand(*x.shape, -1, -1).gather(-2, at).squeeze(-2).to(dtype)

    def log_likelihood(self, x_t, s, t, dtype=torch.float32):
        at = x_t[..., None, None].expand(*x_t.shape, self.num_classes, 1)
        matrices = self.log_matrices(t - 1 if s is None else s, t, x_t)
        return matrices.expand(*x_t.shape, -1, -1).gather(-1, at).squeeze(-1).to(dtype)


def outside(family, **options):
    """A scheduler over the matrices of a family of the table."""
    never_data = () if family.mask is None else (family.mask,)
    transition = OutsideTransition(family.matrices[:, 0], family.prior, never_data)
    return D3PMScheduler(transition=transition, **options)


@pytest.mark.parametrize("name", NAMES)
def test_it_has_the_numbers_of_ours(name):
    """Losses with their gradients, eq. 4 and the prior term, by the plain formulas."""
    family = families.build(name)
    x_0 = family.data((len(PAIRS), 4))
    x_t = family.corrupt(x_0, PAIRS[:, 1])
    times = {"timesteps": PAIRS[:, 1] - 1, "previous_timesteps": PAIRS[:, 0] - 1}
    logits = torch.randn(*x_0.shape, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:9].scatter_(-1, (x_t[:9, :, None] + 1) % 5, -torch.inf)  # not x_t itself, which may be certain
    for options in ({}, {"x0_posterior": "denoising", "reconstruction": "raw"}):
        results = []
        for scheduler in (outside(family, **options), family.scheduler(**options)):
            given = logits.clone().requires_grad_()
            out = d3pm_loss(scheduler, given, x_0, x_t, hybrid_coeff=0.3, auxiliary="denoising", **times)
            out.loss.sum().backward()
            posterior = scheduler.posterior_logits(logits, PAIRS[:, 1] - 1, x_t, PAIRS[:, 0] - 1).exp()
            results.append((out.loss.detach(), out.vb, out.cross_entropy, given.grad, posterior))
            results[-1] += (prior_loss(scheduler, x_0), scheduler.transition.matrix(1, 4))
        for mine, ours in zip(*results):
            torch.testing.assert_close(mine, ours, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["band_diagonal", "absorbing_nearest_neighbor"])
def test_it_trains_and_samples_and_has_a_bound(name):
    family = families.build(name, betas="end")
    scheduler, generator = outside(family), torch.Generator().manual_seed(0)
    network = torch.nn.Embedding(5 * NUM_STEPS, 5, dtype=torch.float64)  # logits for each x_t and timestep
    torch.nn.init.normal_(network.weight, generator=generator)

    def model(x_t, t):
        return network(x_t + 5 * t.reshape(-1, *[1] * (x_t.ndim - 1)))

    # A step of gradient descent lowers the loss on its batch.
    x_0, t = family.data((24, 4)), torch.arange(24) % NUM_STEPS
    x_t = scheduler.add_noise(x_0, t, generator)
    before = d3pm_loss(scheduler, model(x_t, t), x_0, x_t, t).loss.mean()
    before.backward()
    assert network.weight.grad.isfinite().all() and network.weight.grad.abs().max() > 0
    with torch.no_grad():
        network.weight -= network.weight.grad
    assert d3pm_loss(scheduler, model(x_t, t), x_0, x_t, t).loss.mean() < before

    # The bound is the exact expectation over x_t, up to its error.
    x_0 = family.data((400, 4))
    bound = evaluate_bound(scheduler, model, [x_0], progress_bar=False)
    data = torch.arange(5)[torch.arange(5) != (-1 if family.mask is None else family.mask)]  # [D]
    pairs = torch.cartesian_prod(data, torch.arange(5))  # every x_0 and x_t
    per_token = ref.prior_kl(family.matrices, data[:, None], family.prior)[:, 0]
    for n in range(1, NUM_STEPS + 1):
        chance = ref.marginal(family.matrices, data[:, None], 0, n)[:, 0]  # [D, 5]
        with torch.no_grad():
            logits = ref.forbid(model(pairs[:, 1:], torch.tensor(n - 1)), family.mask)
        vb = ref.variational(family.matrices, logits, pairs[:, :1], pairs[:, 1:], n - 1, n).reshape(-1, 5)
        per_token += torch.where(chance > 0, chance * vb, 0).sum(-1)
    expected = per_token[torch.searchsorted(data, x_0)].mean().item()
    assert abs(bound.total - expected) < 4 * bound.standard_error < 0.2 * expected

    # Draws follow eq. 4, for a step of one and for a longer one.
    x_t = family.corrupt(family.data((1, 4)), NUM_STEPS - 1)
    with torch.no_grad():
        logits = model(x_t, torch.tensor(NUM_STEPS - 2))
    for s in (NUM_STEPS - 2, 1, 0):
        truth = ref.reverse(family.matrices, ref.forbid(logits, family.mask), x_t, s, NUM_STEPS - 1)
        rows = {"timestep": NUM_STEPS - 2, "sample": x_t.expand(4000, -1), "previous_timestep": s - 1}
        draws = scheduler.step(logits.expand(4000, -1, -1), generator=generator, **rows).prev_sample
        assert ref.fit(draws[:, None], truth) > 1e-4


class FusedTransition(OutsideTransition):
    """The same with a fused loss of its own."""

    fused_loss = "outside"


def test_a_fused_loss_of_its_own():
    """It is found by its name, gets the options, and does not have to look at the mask."""
    family, calls = families.build("uniform"), []
    x_0 = family.data((NUM_STEPS, 4))
    t = torch.arange(1, NUM_STEPS + 1)
    x_t, loss_mask = family.corrupt(x_0, t), x_0 != 2
    logits = torch.randn(*x_0.shape, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def terms(transition, x_0, x_t, s, t, options, loss_mask):
        def walk(logits, want_gradient):
            calls.append((s, options, want_gradient))
            with torch.enable_grad():
                logits = logits.detach().requires_grad_()
                vb, cross_entropy = plain_terms(transition, logits, x_0, x_t, s, t, options)
                loss = (vb + options.hybrid_coeff * cross_entropy).sum()
            gradient = torch.autograd.grad(loss, logits)[0] if want_gradient else None
            return vb.detach(), cross_entropy.detach(), gradient

        return walk

    results = []
    with patch.dict(registry._fused_losses._entries):
        register_fused_loss("outside")(terms)
        for kind in (FusedTransition, OutsideTransition):
            scheduler = D3PMScheduler(transition=kind(family.matrices[:, 0], family.prior))
            given = logits.clone().requires_grad_()
            out = d3pm_loss(scheduler, given, x_0, x_t, t - 1, hybrid_coeff=0.3, loss_mask=loss_mask)
            out.loss.sum().backward()
            results.append((out.loss.detach(), out.vb, out.cross_entropy, given.grad))
    assert calls == [(None, Options(False, False, 0.3, False), True)]
    for mine, plain in zip(*results):
        torch.testing.assert_close(mine, plain, atol=1e-10, rtol=1e-10)
        assert (mine[~loss_mask] == 0).all()
