# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""How fast noise arrives: the formulas, and what the mutual-information schedule promises."""

import math

import families
import pytest
import reference as ref
import torch

from d3pm_hf import D3PMScheduler, schedules


# These processes need not end near their prior, of which the scheduler warns.
pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose")
# the user's own matrices come with their schedule, and left to right is one
SCHEDULED = [n for n in families.NAMES if n not in ("absorbing_in_data", "matrix", *families.BY_POSITION)]
STEPS = pytest.mark.parametrize("num_steps", [1, 2, 20, 1000])


def assert_same(got, expected, **tolerance):
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, **{"atol": 1e-12, "rtol": 1e-10, **tolerance})


@STEPS
def test_linear(num_steps):
    betas = schedules.linear_betas(num_steps, 1e-4, 0.02)
    assert_same(betas, ref.linear_betas(num_steps, 1e-4, 0.02))
    assert betas[0] == 1e-4
    assert num_steps == 1 or betas[-1] == 0.02


@STEPS
def test_cosine(num_steps):
    betas = schedules.cosine_betas(num_steps)
    assert_same(betas, ref.cosine_betas(num_steps))
    assert betas[-1] == 1 and (betas > 0).all()
    # the survival is the cosine itself, not its square: the quarter way point by hand
    if num_steps == 20:
        angle = math.pi / 2 / 1.008
        expected = math.cos((0.25 + 0.008) * angle) / math.cos(0.008 * angle)
        assert (1 - betas[:5]).prod().item() == pytest.approx(expected, rel=1e-12)


@STEPS
def test_reciprocal(num_steps):
    betas = schedules.reciprocal_betas(num_steps)
    assert_same(betas, ref.reciprocal_betas(num_steps))
    assert betas[0].item() == pytest.approx(1 / num_steps) and betas[-1] == 1
    lost = 1 - (1 - betas).cumprod(0)
    assert_same(lost, torch.arange(1, num_steps + 1).double() / num_steps)


def test_exponents():
    betas = torch.tensor([0.0, 1e-18, 0.5, 1.0], dtype=torch.float64)
    expected = torch.tensor([0.0, 1e-18, math.log(2), math.inf], dtype=torch.float64)
    torch.testing.assert_close(schedules.exponents_from_betas(betas), expected, rtol=1e-14, atol=0)


def step_matrices(scheduler):
    return torch.stack([scheduler.transition.matrix(n, n + 1) for n in range(scheduler.config.num_train_timesteps)])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "reciprocal"])
@pytest.mark.parametrize("name", ["uniform", "gaussian", "rate"])
def test_scheduler_follows_its_schedule(name, schedule):
    """The names in the configuration lead to the reference's matrices."""
    T, K = 7, 4
    betas = {
        "linear": ref.linear_betas(T, 0.01, 0.3),
        "cosine": ref.cosine_betas(T),
        "reciprocal": ref.reciprocal_betas(T),
    }[schedule]
    family = families.build(name, K, betas.tolist())
    ends = {"beta_start": 0.01, "beta_end": 0.3} if schedule == "linear" else {}
    kwargs = {k: v for k, v in family.kwargs.items() if k != "trained_betas"}
    scheduler = D3PMScheduler(K, T, beta_schedule=schedule, **ends, **kwargs)
    torch.testing.assert_close(step_matrices(scheduler), family.matrices[:, 0], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("num_steps", [1, 20, 100, 1000])
def test_mutual_information_of_absorbing_is_reciprocal(num_steps):
    """Appendix: m_t = t/T, so beta_t = 1 / (T - t + 1), whatever the data."""
    for unigram in (None, torch.tensor([0.7, 0.2, 0.06, 0.04, 0.0], dtype=torch.float64)):
        scheduler = D3PMScheduler(5, num_steps, transition="absorbing", unigram_probs=unigram)
        assert scheduler.config.beta_schedule == "mutual_information"
        betas = step_matrices(scheduler)[:, 0, 4]
        torch.testing.assert_close(betas, ref.reciprocal_betas(num_steps), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_steps", [20, 100])
@pytest.mark.parametrize("name", SCHEDULED)
def test_information_falls_linearly(name, num_steps):
    """I(x_t; x_0) / H(x_0) = 1 - t/T within 1e-3, of data that is far from uniform."""
    family = families.build(name, 9, [0.1])
    unigram = torch.tensor([0.3, 0.02, 0.2, 0.1, 0.15, 0.01, 0.05, 0.07, 0.1], dtype=torch.float64)
    if family.mask is not None:
        unigram[family.mask] = 0
    unigram = unigram / unigram.sum()
    kwargs = {k: v for k, v in family.kwargs.items() if k != "trained_betas"}
    scheduler = D3PMScheduler(9, num_steps, beta_schedule="mutual_information", unigram_probs=unigram, **kwargs)
    kept = torch.stack(
        [ref.mutual_information(unigram[:, None] * scheduler.transition.matrix(0, n)) for n in range(num_steps + 1)]
    )
    kept = kept / ref.entropy(unigram)
    expected = 1 - torch.arange(num_steps + 1).double() / num_steps
    # One step of these two can lose only so much: when little is left they come late, and never early.
    end = {"gaussian": num_steps, "band_diagonal": int(0.88 * num_steps)}.get(name, num_steps + 1)
    torch.testing.assert_close(kept[:end], expected[:end], atol=1e-3, rtol=0)
    assert (kept[end:] > expected[end:] - 1e-3).all() and (kept.diff() <= 1e-12).all()
