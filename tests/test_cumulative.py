# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Cumulative products as factors of low rank: tables, draws and losses are those of the matrices themselves."""

import pytest
import torch

from d3pm_hf import D3PMScheduler, d3pm_loss
from d3pm_hf.kernels import cumulative, low_rank
from d3pm_hf.kernels.low_rank import LowRankTerms, first_time


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
K, T = 128, 40


@pytest.fixture(scope="module")
def schedulers():
    """By `prediction_type`; the mixing of the paper's thousand steps in forty."""
    options = {"transition": "gaussian", "beta_schedule": "linear", "beta_start": 1e-3, "beta_end": 0.5}
    return {name: D3PMScheduler(K, T, prediction_type=name, **options) for name in ("x0", "logistic")}


@pytest.fixture(scope="module")
def table(schedulers):
    return schedulers["x0"].transition.log_cumulative(torch.float32, "cpu")


def exact_matrices(transition):
    """Qbar_0 .. Qbar_T, products of the matrices of the steps in float64."""
    product, products = torch.eye(K, dtype=torch.float64), []
    for t in range(T + 1):
        product = product @ transition.log_step_matrices(torch.tensor([t]))[0].exp() if t else product
        products.append(product)
    return torch.stack(products)


def test_flat_matrices_are_factors(schedulers, table):
    """Rows, matrices and probabilities before and after the table ends, for one time and for many."""
    exact = exact_matrices(schedulers["x0"].transition)
    assert table.left is not None and len(table.table) < T and table.left.shape[1] < K // 4
    n = torch.tensor([len(table.table) - 1, len(table.table), T])
    x = torch.arange(K).expand(3, -1)
    torch.testing.assert_close(table.probabilities(n, torch.float64), exact[n], rtol=2e-6, atol=1e-7)
    late = table.probabilities(T, torch.float64)[0]
    torch.testing.assert_close(late, exact[T], rtol=1e-10, atol=0)
    torch.testing.assert_close(table.matrices(n), exact[n].log().float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(table.rows(n, x), table.matrices(n))
    torch.testing.assert_close(table.rows(T, x[:1]), table.matrices(T))


def test_times_that_are_not_known_to_the_host(monkeypatch, table):
    """Both forms are computed, and the right one is chosen."""
    n, x = torch.tensor([3, T]), torch.arange(6).view(2, 3)
    expected = table.matrices(n), table.rows(n, x), table.probabilities(n, torch.float32)
    monkeypatch.setattr(cumulative, "values_are_known", lambda tensor: False)
    for got, known in zip((table.matrices(n), table.rows(n, x), table.probabilities(n, torch.float32)), expected):
        torch.testing.assert_close(got, known)


def test_factors(schedulers):
    """Products with factors are those with Qbar_n within their errors; early matrices have none."""
    kernel = schedulers["x0"].transition
    exact = exact_matrices(kernel)
    assert kernel.factors(1) is None
    for n in (10, 20, T):
        left, right, truncation, rounding, lowest, highest = kernel.factors(n)
        assert [lowest, highest] == pytest.approx([exact[n].min().item(), exact[n].max().item()], rel=1e-5)
        assert left.shape == right.shape and len(left) < K // 3
        error = (left[:-1].T @ right[:-1] - exact[n]).abs().max()
        assert error < 5 * (truncation + rounding) + 2e-7 * exact[n].max()
    assert [first_time(n) for n in (1, 3, 4, 5, 7, 11, 100)] == [1, 3, 4, 4, 6, 8, 96]


def test_products_to_find_factors_in_are_few(monkeypatch):
    """None is kept whose rank is high, or beyond the limit on memory: then there are no factors."""
    flat, table = torch.full((K, K), 1 / K, dtype=torch.float64), low_rank.FactorTable()
    table.add(2, lambda: torch.eye(K, dtype=torch.float64))
    assert table.find(2, lambda: flat) is None
    monkeypatch.setattr(low_rank, "MAX_FACTOR_BYTES", 8 * K**2)
    for n in (4, 6):
        table.add(n, lambda: flat)
    assert table.find(4, lambda: flat).right.shape == (2, K) and table.find(6, lambda: flat) is None


def test_reach(schedulers):
    """Steps from farther away than the reach are as improbable as it says, and those from nearer are not left out."""
    kernel, most = schedulers["x0"].transition, 1e-6
    for t in (1, 20, T):
        reach = kernel.step_reach(None, torch.tensor([t]), most)
        far = (torch.arange(K)[:, None] - torch.arange(K)).abs() > reach
        step = kernel.log_step_matrices(torch.tensor([t]))[0].exp()
        assert (step * far).sum(0).max() <= most and (step * ~far).sum(0).min() > 1 - 1e-5
    assert kernel.step_reach(None, torch.tensor([1]), most) < K // 4


@pytest.mark.parametrize(
    "options", [{}, {"auxiliary": "denoising"}, {"masked": True}], ids=["raw", "converted", "masked"]
)
@pytest.mark.parametrize("prediction_type", ["x0", "logistic"])
def test_losses_are_those_of_float64(monkeypatch, schedulers, prediction_type, options):
    """Networks that know little, that are nearly right, and that are sure of something wrong, in one batch."""
    added, add = [], LowRankTerms.add
    monkeypatch.setattr(LowRankTerms, "add", lambda self, i, *rest: added.append(i) or add(self, i, *rest))
    scheduler, generator = schedulers[prediction_type], torch.Generator().manual_seed(0)
    x_0 = torch.randint(K, (6, 20 * K), generator=generator)  # too many rows to work on two samples at once
    t = torch.tensor([6, 9, 14, 20, 30, T - 1])
    x_t = scheduler.add_noise(x_0, t, generator)
    noise = torch.randn(*x_0.shape, K, generator=generator)
    if prediction_type == "logistic":
        scale = torch.tensor([0.0, -2.0, 2.0, -7.0]).repeat(len(x_0), 5 * K)
        output = torch.stack([x_0 * 2 / (K - 1) - 1 + 0.1 * noise[..., 0], scale], -1)
    else:
        distance = (torch.arange(K) - x_0[..., None]).abs()
        output = noise - distance / torch.tensor([1e3, 20.0, 3.0, 0.3]).repeat(5 * K)[:, None]
        output[:, ::16] = 40 * noise[:, ::16]
    options = dict(options)
    mask = torch.rand(x_0.shape, generator=generator) < 0.7 if options.pop("masked", False) else None
    results = []
    for dtype in (torch.float64, torch.float32):
        given = output.to(dtype, copy=True).requires_grad_()
        loss = d3pm_loss(scheduler, given, x_0, x_t, t, hybrid_coeff=0.1, loss_mask=mask, **options)
        loss.loss.sum().backward()
        gradient = given.grad.double()
        if prediction_type == "logistic":
            gradient[..., 0] *= torch.exp(output[..., 1] - 2)  # per scale of the distribution
        results.append([loss.vb.double(), loss.cross_entropy.double(), gradient])
    assert len(added) >= 4  # samples of float32 with factors
    for got, expected in zip(results[1], results[0]):
        torch.testing.assert_close(got, expected, atol=5e-5, rtol=2e-4)


def test_draws_follow_the_rows(schedulers):
    """Frequencies of x_t for one x_0, before and after the table ends, against q(x_t | x_0)."""
    scheduler, generator = schedulers["x0"], torch.Generator().manual_seed(0)
    exact, t = exact_matrices(scheduler.transition), torch.tensor([4, T - 1])
    x_t = scheduler.add_noise(torch.full((2, 60_000), 7), t, generator)
    for drawn, n in zip(x_t, t):
        expected = exact[n + 1, 7] * x_t.shape[1]
        counts = drawn.bincount(minlength=K).double()
        chi_square = ((counts - expected) ** 2 / expected)[expected > 5].sum()
        assert chi_square < (expected > 5).sum() + 5 * (2 * (expected > 5).sum()).sqrt()
