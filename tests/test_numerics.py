# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Draws have the distribution that they claim, down to the rare events that a large vocabulary is made of."""

import math

import families
import pytest
import reference as ref
import scipy.stats
import torch
from comparison import assert_same_draws

from d3pm_hf import D3PMScheduler, numerics


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
T = families.NUM_STEPS


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def uniforms(*shape, seed=0):
    return numerics.uniforms(shape, seeded(seed))


def many(x, copies):
    return x.expand(copies, *x.shape[1:])


# The draw itself


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)  # the second on a device without the first
@pytest.mark.parametrize("num_classes", [2, 3, 64, 65, 256, 300, 1000, 50257])
def test_each_state_has_its_share_of_the_uniforms(num_classes, dtype):
    """Evenly spaced u: a state gets as many as its probability says, but for the two ends of its stretch of u."""
    n = 20000 if num_classes < 2000 else 3000
    logits = 2 * torch.randn(num_classes, generator=seeded())
    u = ((torch.arange(n).double() + 0.5) / n).to(dtype)
    drawn = numerics.categorical(logits.expand(n, -1), u)
    counts = torch.bincount(drawn, minlength=num_classes)
    assert len(counts) == num_classes
    assert (counts - n * logits.double().softmax(-1)).abs().max() < 1.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_classes", [3, 300, 1000])
def test_chi_square(num_classes, dtype):
    logits = torch.randn(2, num_classes, generator=seeded()).to(dtype)
    rows = logits.repeat(10000, 1)
    drawn = numerics.categorical(rows, uniforms(len(rows))).view(-1, 2)
    assert ref.fit(drawn, logits.double().softmax(-1)) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_chi_square_of_a_large_vocabulary(dtype):
    """Zipf's law over 50,257 states, in the bins that 20,000 draws can tell apart."""
    K, draws = 50257, 20000
    logits = -torch.log(torch.arange(1, K + 1).float())[torch.randperm(K, generator=seeded())]
    drawn = torch.cat([numerics.categorical(logits.expand(500, -1), u) for u in uniforms(draws).to(dtype).split(500)])
    probs = logits.double().softmax(-1)
    bins = (probs.cumsum(0) * 200).long().clamp_(max=199)
    seen, due = (
        torch.bincount(bins[drawn], minlength=200),
        torch.zeros(200).double().index_add_(0, bins, probs) * draws,
    )
    statistic = ((seen - due) ** 2 / due)[due > 0].sum().item()
    assert scipy.stats.chi2.sf(statistic, int((due > 0).sum()) - 1) > 1e-4


@pytest.mark.parametrize("num_classes", [3, 300, 1000, 50257])
def test_impossible_states_and_extreme_uniforms(num_classes):
    u = torch.cat([torch.tensor([0.0, 2**-53, 0.5, 1 - 2**-53], dtype=torch.float64), uniforms(60)])
    logits = torch.randn(len(u), num_classes, generator=seeded())
    impossible = torch.rand(logits.shape, generator=seeded(1)) < 0.7
    impossible[:, [0, -1]] = True  # both ends, where the extremes of u would fall
    impossible[:, 1] = False
    logits[impossible] = -torch.inf
    drawn = numerics.categorical(logits, u)
    assert ((drawn >= 0) & (drawn < num_classes)).all()
    assert not impossible.gather(-1, drawn[:, None]).any()
    lowest, highest = numerics.categorical(logits[[0, 0]], u[[0, 3]])
    assert (lowest != highest) == ((~impossible[0]).sum() > 1)


@pytest.mark.parametrize("num_classes", [3, 300, 50257])
def test_one_possible_state(num_classes):
    state = num_classes // 2
    logits = torch.full((4, num_classes), -torch.inf)
    logits[:, state] = torch.tensor([-1e4, 0.0, 1e4, 3e38])
    u = torch.tensor([0.0, 0.3, 1 - 2**-53, 0.9], dtype=torch.float64)
    assert (numerics.categorical(logits, u) == state).all()


def test_pieces_do_not_show(monkeypatch):
    logits, u = torch.randn(50, 700, generator=seeded()), uniforms(50)
    whole = numerics.categorical(logits, u)
    monkeypatch.setattr(numerics, "CHUNK_BYTES", 3 * 4 * 700)
    assert_same_draws(numerics.categorical(logits, u), whole)


def test_uniforms_are_wide():
    """53 bits: on the grid of float32 one draw in 2^24 is zero, and here none is on that grid."""
    u = uniforms(1000)
    assert u.dtype == torch.float64 and (u >= 0).all() and (u < 1).all()
    assert ((u * 2**24) % 1 != 0).all()


# Rare events: a vocabulary of 50,257 and 1,000 steps


def reveals(draw, num_steps=1000, num_positions=4096):
    """What half of a sampling run reveals, from nothing but masks; `draw` gives the new tokens of step t."""
    revealed = []
    for t in range(num_steps, num_steps // 2, -1):
        tokens = draw(t, num_positions)
        num_positions -= len(tokens)
        revealed.append(tokens)
    return torch.cat(revealed)


def assert_exact(revealed, probs, num_positions=4096):
    """Half of the positions are revealed, and what is revealed has the right entropy: both within 3 sigma."""
    assert abs(len(revealed) - num_positions / 2) < 3 * math.sqrt(num_positions / 4)
    entropy = -torch.special.xlogy(probs, probs).sum()
    spread = torch.sqrt((probs * probs.log() ** 2).sum() - entropy**2)
    assert abs(-probs.log()[revealed].mean() - entropy) <= 3 * spread / math.sqrt(len(revealed)) + 1e-12


@pytest.mark.parametrize("has_float64", [True, False], ids=["float64", "float32"])  # as on MPS
@pytest.mark.parametrize("prediction", ["flat", "zipf"])
def test_reveals_of_a_large_vocabulary(prediction, has_float64, monkeypatch):
    K = 50257
    monkeypatch.setattr(numerics, "WITHOUT_FLOAT64", set() if has_float64 else {"cpu"})
    transition = D3PMScheduler(K, 1000).transition
    ranks = torch.arange(1, K).double()
    probs = ref.normalize(torch.ones(K - 1).double() if prediction == "flat" else 1 / ranks)
    logits = torch.cat([probs.log().float(), torch.zeros(1)])  # the last is the mask, which is never data
    source = seeded()

    def draw(t, num_masked):
        x_t = torch.full((1, num_masked), K - 1)
        x_s = transition.sample_previous(logits.expand(1, num_masked, -1), x_t, t - 1, t, source)
        return x_s[x_s != K - 1]

    assert_exact(reveals(draw), probs)


def test_float32_races_would_be_caught():
    """The Gumbel trick with float32 uniforms, which live on a grid of 2^-24, reveals a fraction of what it should.

    The race of K flat predictions against the mask is decided by the largest of K uniforms on the grid, which is the
    largest of K exact uniforms, put on the grid.
    """
    K, source = 50257, seeded()
    probs = ref.normalize(torch.ones(K - 1).double())

    def race(t, num_masked, grid):
        largest = numerics.uniforms((num_masked,), source) ** (1 / (K - 1))
        mask = numerics.uniforms((num_masked,), source)
        if grid:
            largest, mask = (torch.floor(v * 2**24) / 2**24 for v in (largest, mask))
        wins = -largest.log() * t * (K - 1) < -mask.log() * t / (t - 1)
        return torch.randint(K - 1, (int(wins.sum()),), generator=source)

    assert_exact(reveals(lambda *args: race(*args, grid=False)), probs)
    with pytest.raises(AssertionError):
        assert_exact(reveals(lambda *args: race(*args, grid=True)), probs)


@pytest.mark.parametrize("num_classes", [3, 300, 513, 50257])
def test_a_step_may_reveal_nothing(num_classes):
    assert numerics.categorical(torch.zeros(0, num_classes), torch.zeros(0).double()).shape == (0,)
    scheduler = D3PMScheduler(num_classes, 10)
    scheduler.set_timesteps(10)
    x_t = torch.zeros(2, 4, dtype=torch.long)  # nothing is masked
    assert torch.equal(scheduler.step(torch.zeros(2, 4, num_classes), 5, x_t).prev_sample, x_t)


# The reverse step of a scheduler

STRIDES = [[5, 4], [5, 2], [3, 0], [5], [2], [0]]  # by one, by several, to the data


def assert_draws_fit(scheduler, family, shape, copies, seed=0):
    x_0 = family.data((1, *families.SHAPES[shape][1:]), seed=seed)
    logits = 2 * torch.randn(*x_0.shape, family.num_classes, generator=seeded(seed))
    source = seeded(seed + 1)
    for timesteps in STRIDES:
        scheduler.set_timesteps(timesteps=timesteps)
        t = timesteps[0]
        x_t = family.corrupt(x_0, t + 1, seed=t)
        law = scheduler.posterior_logits(logits, t, x_t, scheduler.previous_timestep(t))[0].exp()
        x_s = scheduler.step(many(logits, copies), t, many(x_t, copies), generator=source).prev_sample
        assert ref.fit(x_s, law) > 1e-4, timesteps


@pytest.mark.cover
@pytest.mark.parametrize("shape", families.SHAPES)
@pytest.mark.parametrize("meaning", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", families.NAMES)
def test_steps_follow_the_posterior(name, meaning, shape):
    if not families.can_take(name, shape=shape):
        pytest.skip("an order of text")
    family = families.build(name)
    assert_draws_fit(family.scheduler(x0_posterior=meaning), family, shape, 500 if name.endswith("-sparse") else 2000)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("meaning", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", families.NAMES)
def test_half_precision_is_exact(name, meaning, dtype):
    """Logits of few digits are taken at their word: what the process adds to them is not rounded as they are."""
    family, copies = families.build(name), 100 if name.endswith("-sparse") else 1000
    scheduler = family.scheduler(x0_posterior=meaning)
    x_0 = many(family.data((1, T)), copies)
    logits = (4 * torch.randn(*x_0.shape, family.num_classes, generator=seeded())).to(dtype)
    scheduler.set_timesteps(3)
    for t in scheduler.timesteps:
        x_t = scheduler.add_noise(x_0, int(t), seeded(1))
        half, full = (scheduler.step(v, t, x_t, generator=seeded(2)).prev_sample for v in (logits, logits.float()))
        assert_same_draws(half, full)


@pytest.mark.parametrize("betas", ["end", "middle"])
@pytest.mark.parametrize("name", ["uniform", "absorbing", "absorbing_uniform", "rate"])
def test_steps_that_forget_everything(name, betas):
    family = families.build(name, betas=betas)
    assert_draws_fit(family.scheduler(), family, "text", 2000)


@pytest.mark.parametrize("meaning", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", ["uniform", "absorbing", "gaussian"])
def test_raw_reconstruction(name, meaning):
    family = families.build(name)
    assert_draws_fit(family.scheduler(x0_posterior=meaning, reconstruction="raw"), family, "image", 2000)


@pytest.mark.parametrize("meaning", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", families.NAMES)
def test_there_and_back_with_a_perfect_network(name, meaning):
    """Forward to t and back to s, knowing x_0, is as forward to s; and given x_t it is q(x_s | x_t, x_0)."""
    family, copies = families.build(name), 500 if name.endswith("-sparse") else 2000
    scheduler = family.scheduler(x0_posterior=meaning)
    x_0 = family.data((1, T))
    sure = torch.nn.functional.one_hot(x_0, family.num_classes).float().log()
    source = seeded()
    for timesteps in ([5, 4], [5, 2], [4]):
        scheduler.set_timesteps(timesteps=timesteps)
        t, s = timesteps[0], scheduler.previous_timestep(timesteps[0])
        x_t = scheduler.add_noise(many(x_0, copies), t, source)
        x_s = scheduler.step(many(sure, copies), t, x_t, generator=source).prev_sample
        assert ref.fit(x_s, ref.marginal(family.matrices, x_0, 0, s + 1)[0]) > 1e-4
        one = x_t[:1]
        x_s = scheduler.step(many(sure, copies), t, many(one, copies), generator=source).prev_sample
        assert ref.fit(x_s, ref.posterior(family.matrices, x_0, one, s + 1, t + 1)[0]) > 1e-4


# What XLA has no operation for, as it is computed there


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 300])
def test_counts_by_bisection(size):
    ends = torch.randint(0, size, (5, size), generator=seeded()).double().cumsum(-1)  # some are equal
    values = torch.cat([ends - 0.5, ends, ends + 0.5], -1)
    expected = torch.searchsorted(ends, values, right=True)
    assert torch.equal(numerics.count_by_bisection(ends, values), expected)
    assert torch.equal(numerics.count_by_bisection(ends[0], values[0].view(3, -1)), expected[0].view(3, -1))


def test_the_last_state_that_is_drawn_has_a_weight():
    weights = torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.0, 0.0], [0.1, 0.2, 0.4]], dtype=torch.float64)
    ends = weights.cumsum(-1)
    assert numerics.count_below(ends, ends[:, -1:]).squeeze(-1).tolist() == [1, 0, 2]


def test_composed_logaddexp():
    values = torch.tensor([-torch.inf, -800, -40, -1, 0, 1e-12, 3, 750, torch.inf], dtype=torch.float64)
    a, b = (v.clone().requires_grad_() for v in torch.meshgrid(values, values, indexing="ij"))
    result = numerics.composed_logaddexp(a, b)
    torch.testing.assert_close(result, torch.logaddexp(a, b), rtol=1e-15, atol=1e-15)
    gradients = torch.autograd.grad(result.sum(), (a, b))
    finite = result.isfinite()
    torch.testing.assert_close(gradients[0][finite], (a - result)[finite].exp(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[1][finite], (b - result)[finite].exp(), rtol=1e-12, atol=1e-12)
