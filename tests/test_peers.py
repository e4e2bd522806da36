# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Defects that were found in other implementations of discrete diffusion, by running them: one test each."""

import math

import families
import pytest
import reference as ref
import torch

from d3pm_hf import D3PMScheduler, d3pm_loss, prior_loss


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def sure_of(x_0, num_classes):
    """The logits of a network that knows x_0."""
    return torch.nn.functional.one_hot(x_0, num_classes).float().log()


@pytest.mark.parametrize("shape", [(64, 7), (64, 5, 4), (64, 3, 4, 5)], ids=len)
def test_1_images_get_no_noise(shape):
    """x_T equalled x_0 wherever the data had more than one axis; with K = 8 they agree on 1 element in 8."""
    scheduler = D3PMScheduler(8, 100, transition="uniform", beta_schedule="cosine")
    x_0 = torch.randint(8, shape, generator=seeded())
    agree = (scheduler.add_noise(x_0, 99, seeded(1)) == x_0).double().mean().item()
    assert agree == pytest.approx(1 / 8, abs=4 * math.sqrt(1 / 8 * 7 / 8 / x_0.numel()))


@pytest.mark.parametrize("name", families.NAMES)
def test_2_a_perfect_network_pays(name):
    """The target was made of one-hots that were taken for logits: a perfect predictor had a divergence of 0.05."""
    family = families.build(name)
    scheduler, x_0 = family.scheduler(), family.data((6, 6))
    t = torch.arange(6)
    x_t = family.corrupt(x_0, t + 1)
    loss = d3pm_loss(scheduler, sure_of(x_0, family.num_classes), x_0, x_t, t).vb
    assert loss.abs().max() < 1e-6


@pytest.mark.parametrize("transition", ["uniform", "absorbing", "gaussian"])
def test_3_images_are_transposed(transition):
    """Predictions were laid over the transposed image: oblong ones crashed, square ones learned to transpose.

    Also there: L_vb was the term that was scaled instead of the cross-entropy, and t = T was never trained.
    """
    scheduler = D3PMScheduler(6, 10, transition=transition, beta_schedule="linear")
    x_0 = torch.randint(5, (3, 1, 2, 4), generator=seeded())
    x_T = scheduler.add_noise(x_0, 9, seeded(1))
    scheduler.set_timesteps(1)
    assert torch.equal(scheduler.step(sure_of(x_0, 6), 9, x_T).prev_sample, x_0)
    logits = torch.randn(*x_0.shape, 6, generator=seeded(2))
    once, parts = (d3pm_loss(scheduler, logits, x_0, x_T, 9, hybrid_coeff=c) for c in (0.0, 0.01))
    torch.testing.assert_close(parts.loss, once.vb + 0.01 * parts.cross_entropy)
    assert (parts.loss > 0).all()  # t = T is like any other


@pytest.mark.parametrize("num_steps", [1, 10, 100, 1000])
@pytest.mark.parametrize("transition", ["absorbing", "uniform"])
def test_4_loss_is_nan_at_the_first_timestep(transition, num_steps):
    scheduler = D3PMScheduler(30, num_steps, transition=transition, beta_schedule="reciprocal")
    t = torch.tensor([0, 0, num_steps // 2, num_steps - 1])
    x_0 = torch.randint(29, (4, 50), generator=seeded())
    x_t = scheduler.add_noise(x_0, t, seeded(1))
    x_t[0] = x_0[0]  # nothing has happened, or everything
    x_t[1] = 29
    logits = (4 * torch.randn(4, 50, 30, generator=seeded(2))).requires_grad_()
    loss = d3pm_loss(scheduler, logits, x_0, x_t, t, hybrid_coeff=0.01)
    assert loss.loss.isfinite().all() and loss.vb.min() > -1e-6
    assert torch.autograd.grad(loss.loss.sum(), logits)[0].isfinite().all()


def test_5_float32_draws_miss_rare_events():
    """One step of 1000 over 50,257 flat predictions revealed 1 token in 19,200 positions, where 19 are due."""
    scheduler = D3PMScheduler(50257, 1000)
    transition, positions = scheduler.transition, 200_000
    x_t = torch.full((1, positions), 50256)
    x_s = transition.sample_previous(torch.zeros(50257).expand(1, positions, -1), x_t, 999, 1000, seeded())
    assert (x_s != 50256).sum().item() == pytest.approx(200, abs=3 * math.sqrt(200))


def test_6_an_epsilon_is_not_small_beside_a_vocabulary():
    """log(p + 1e-6) turned a divergence of 0.02 into 0.06 where p is 1/8192."""
    K = 8192
    scheduler = D3PMScheduler(K, 10, transition="uniform", trained_betas=[0.1] * 9 + [1.0])
    x_0, x_t = torch.tensor([[3]]), torch.tensor([[77]])
    got = d3pm_loss(scheduler, torch.zeros(1, 1, K), x_0, x_t, 4).vb.item()
    survival = {n: 0.9**n for n in (4, 5)}
    column = torch.full((K,), 0.1 / K, dtype=torch.float64)
    column[77] += 0.9
    row = torch.full((K,), (1 - survival[4]) / K, dtype=torch.float64)
    row[3] += survival[4]
    q, p = ref.normalize(row * column), ref.normalize(column)  # a flat prediction stays flat
    exact = ref.kl(q, p).item()
    assert got == pytest.approx(exact, rel=1e-4)
    with_epsilon = (q * ((q + 1e-6).log() - (p + 1e-6).log())).sum().item()
    assert abs(with_epsilon - exact) > 100 * abs(got - exact)


@pytest.mark.parametrize("name", ["uniform", "gaussian", "nearest_neighbor"])
def test_7_the_denoising_posterior_is_not_what_eq_4_wants(name):
    """On one variable with the law p_0: p_0 is the leave-one-out posterior, and reverses the process exactly.

    So does the denoising posterior q(x_0 | x_t), if the scheduler is told that it is one; else it does not.
    """
    family = families.build(name)
    law, x_t = families.stochastic(5, seed=3), torch.arange(5)[None]
    likelihood = ref.likelihood(family.matrices, x_t, 0, 4)
    denoising = ref.normalize(law * likelihood)
    exact = ref.normalize(
        ref.marginal(family.matrices, law.expand(1, 5, -1), 0, 2) * ref.likelihood(family.matrices, x_t, 2, 4)
    )

    def reverse(probs, meaning):
        return family.scheduler(x0_posterior=meaning).posterior_logits(probs.log(), 3, x_t, 1).exp()

    torch.testing.assert_close(reverse(law.expand(1, 5, -1), "leave_one_out"), exact)
    torch.testing.assert_close(reverse(denoising, "denoising"), exact)
    assert (reverse(denoising, "leave_one_out") - exact).abs().max() > 0.02


def test_8_fewer_steps_start_from_noise():
    """Ten steps of a hundred were the last ten, which start from data that are nearly clean."""
    scheduler = D3PMScheduler(8, 100, transition="uniform", beta_schedule="cosine")
    scheduler.set_timesteps(10)
    assert scheduler.timesteps.tolist() == list(range(99, 0, -10))
    x_0 = torch.randint(8, (500, 4), generator=seeded())
    assert prior_loss(scheduler, x_0).max() < 1e-6
    x = scheduler.sample_prior(x_0.shape, seeded(1))
    for t in scheduler.timesteps:
        x = scheduler.step(sure_of(x_0, 8), t, x, generator=seeded(2)).prev_sample
    assert torch.equal(x, x_0)


def test_9_batches_are_drawn_once():
    """Rows of a batch have their own numbers of reveals, and a dull sample is not drawn again to flatter a metric."""
    scheduler = D3PMScheduler(50, 20)
    scheduler.set_timesteps(20)
    calls, x = [], scheduler.sample_prior((5, 12))
    generators = [seeded(i) for i in range(5)]
    dull = torch.full((5, 12, 50), -50.0)
    dull[..., 7] = 50.0
    for t in scheduler.timesteps:
        calls.append((x == scheduler.mask_token_id).sum(-1))
        x = scheduler.step(dull, t, x, generator=generators).prev_sample
    assert (x == 7).all()  # the entropy is zero, and it stays
    revealed = calls[0] - calls[10]
    assert len(revealed.unique()) > 1 and len(calls) == 20
    alone, generator = scheduler.sample_prior((1, 12)), seeded(3)
    for i, t in enumerate(scheduler.timesteps):
        assert (alone == scheduler.mask_token_id).sum() == calls[i][3]
        alone = scheduler.step(dull[:1], t, alone, generator=generator).prev_sample
