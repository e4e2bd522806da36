# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Symmetric rates in float32: the Chebyshev series against exponentials in float64, its bounds, and what is made of it."""

import itertools
import math
from functools import lru_cache

import pytest
import torch
from scipy.special import ive
from scipy.stats import chisquare

from d3pm_hf import D3PMScheduler, d3pm_loss
from d3pm_hf.kernels import chebyshev
from d3pm_hf.transitions import SparseRateTransition, rate_matrices


K = 300
# From almost nothing to almost everything, then one step that forgets.
EXPONENTS = [1e-3, 0.01, 0.2, 1.0, 5.0, 40.0, math.inf]
TIMES = list(itertools.combinations(range(len(EXPONENTS) + 1), 2))
PRECISION = {torch.float32: 1e-5, torch.float64: 1e-9}


def graph(num_classes=K):
    points = torch.randn(num_classes, 8, generator=torch.Generator().manual_seed(0))
    return rate_matrices.nearest_neighbor_rates(points, 5)


def star(num_classes=50):
    """A hub that all other states are joined to."""
    others = torch.arange(1, num_classes)
    pairs = torch.stack([torch.zeros_like(others), others])
    weights = torch.rand(len(others), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return rate_matrices.rates_from_adjacency(torch.cat([pairs, pairs.flip(0)], 1), weights.repeat(2), num_classes)


def path(num_classes=40):
    states = torch.arange(num_classes - 1)
    pairs = torch.stack([states, states + 1])
    return rate_matrices.rates_from_adjacency(
        torch.cat([pairs, pairs.flip(0)], 1), torch.ones(2 * len(states), dtype=torch.float64), num_classes
    )


@lru_cache
def exponential(make, exponent, *size):
    """exp(a R) for symmetric R, float64, [K, K]: a series of positive terms, then squarings; in the limit 1 / K."""
    rates = make(*size).to_dense()
    if exponent == math.inf:
        return torch.full_like(rates, 1 / len(rates))
    fastest = -rates.diagonal().min().item()
    squarings = max(0, math.ceil(math.log2(max(fastest * exponent, 1))))
    mean = fastest * exponent / 2**squarings
    term = torch.eye(len(rates), dtype=torch.float64) * math.exp(-mean)
    total, chances = term.clone(), torch.eye(len(rates), dtype=torch.float64) + rates / fastest
    for k in range(1, 60 if make is path else 30):  # two states of the graph are a few jumps apart
        term = term @ chances * (mean / k)
        total += term
    for _ in range(squarings):
        total = total @ total
    return total


@pytest.fixture(scope="module")
def process():
    return SparseRateTransition(graph(), torch.tensor(EXPONENTS, dtype=torch.float64)).kernel()


@pytest.fixture(scope="module")
def matrices():
    """Q_{s..t} for all s <= t."""
    made = {(t, t): torch.eye(K, dtype=torch.float64) for t in range(len(EXPONENTS) + 1)}
    for s, t in TIMES:
        made[s, t] = made[s, t - 1] @ exponential(graph, EXPONENTS[t - 1])
    return made


@pytest.mark.parametrize("make", [graph, star, path])
def test_eigenvalues_are_below_their_bound(make):
    rates = make()
    largest = torch.linalg.eigvalsh(-rates.to_dense())[-1].item()
    assert largest <= chebyshev.largest_eigenvalue_bound(rates) <= 1.2 * largest


@pytest.mark.parametrize("x", [0.0, 1e-12, 0.02, 1.0, 30.0, 3e3])
def test_tails_bound_what_is_left_out(x):
    c, tails = chebyshev.coefficients(x)
    k = torch.arange(len(c) + 2000)
    exact = torch.from_numpy(2 * ive(k.numpy(), x))
    exact[0] /= 2
    after = exact.flip(0).cumsum(0).flip(0)[1 : len(c) + 1]
    torch.testing.assert_close(torch.from_numpy(c), exact[: len(c)], rtol=1e-12, atol=0)
    assert (torch.from_numpy(tails) >= after * (1 - 1e-12)).all() and tails[-1] <= chebyshev.LAST_TAIL
    assert len(c) == 1 or tails[-2] > chebyshev.LAST_TAIL


def vectors_of(kind, count, num_classes=K):
    generator = torch.Generator().manual_seed(1)
    states = torch.randint(num_classes, (count,), generator=generator)
    if kind == "states":
        return torch.nn.functional.one_hot(states, num_classes).float()
    scale = {"broad": 1.0, "sharp": 8.0}[kind]
    return (scale * torch.randn(count, num_classes, generator=generator)).softmax(-1)


@pytest.mark.parametrize("kind", ["states", "broad", "sharp"])
@pytest.mark.parametrize("make", [graph, star, path])
def test_every_probability_keeps_its_digits(make, kind):
    """Exponents in any order, more vectors than a block holds: each entry above 1e-10 to 3e-5 of itself."""
    rates = make()
    series = chebyshev.ChebyshevExponential(rates)
    series.block_size = 4
    exponents = torch.tensor([3.0, 0.0, 1e-4, 0.3, 60.0, 0.01, 3.0, 1.0, 0.3, 600.0], dtype=torch.float64)
    vectors = vectors_of(kind, len(exponents), len(rates))
    expected = torch.stack([v.double() @ exponential(make, a) for v, a in zip(vectors, exponents.tolist())])
    result = series.distributions(vectors, exponents).double()
    counts = expected > 1e-10
    assert ((result - expected).abs()[counts] <= 3e-5 * expected[counts]).all()
    assert (result[~counts] >= 0).all() and (result[~counts] < 2e-10).all()
    assert torch.equal(result[1], vectors[1].double())


def test_derivatives_of_any_size():
    series = chebyshev.ChebyshevExponential(graph())
    exponents = torch.tensor([0.0, 0.01, 0.5, 3.0, 50.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    for scale in (1e-12, 1.0, 1e4):
        vectors = scale * torch.randn(5, K, generator=generator)
        expected = torch.stack([v.double() @ exponential(graph, a) for v, a in zip(vectors, exponents.tolist())])
        error = (series.derivatives(vectors, exponents).double() - expected).abs().max()
        assert error <= chebyshev.MAX_ERROR + 1e-5 * scale


def test_other_rates_keep_the_positive_series(process):
    """A mask is entered and never left."""
    masked = rate_matrices.add_absorbing_state(graph(40), 1.0, 40)
    assert process.chebyshev is not None
    assert SparseRateTransition(masked, torch.ones(2, dtype=torch.float64)).kernel().chebyshev is None


@pytest.mark.parametrize("dtype", PRECISION)
def test_rows_columns_and_products(process, matrices, dtype):
    x = torch.randint(K, (1, 6), generator=torch.Generator().manual_seed(0))
    x[0, 3] = x[0, 0]  # a state that occurs twice
    log_p = vectors_of("sharp", 6).log_softmax(-1).to(dtype)[None]
    for (s, t), matrix in matrices.items():
        if s == t:
            continue
        for log_result, expected in [
            (process.log_marginal(x, s, t, dtype), matrix[x]),
            (process.log_likelihood(x, s, t, dtype), matrix.T[x]),
            (process.log_marginal(log_p, s, t), log_p.double().exp() @ matrix),
        ]:
            assert log_result.dtype == dtype
            torch.testing.assert_close(log_result.double(), expected.log(), atol=2 * PRECISION[dtype], rtol=1e-6)


def reference_terms(matrices, logits, x_0, x_t, s, t):
    """KL(q(x_s | x_t, x_0) || p(x_s | x_t)) and -log p(x_0) of the denoising posterior, per element."""
    column, p = matrices[s, t].T[x_t], logits.softmax(-1)
    q = matrices[0, s][x_0] * column
    q = q / q.sum(-1, keepdim=True)
    reverse = (p @ matrices[0, s]) * column
    reverse = reverse / reverse.sum(-1, keepdim=True)
    counts = q > 1e-12
    vb = torch.where(counts, q * (q / torch.where(counts, reverse, 1)).clamp(min=1e-300).log(), 0).sum(-1)
    joint = p * matrices[0, t].T[x_t]
    return vb, -(joint / joint.sum(-1, keepdim=True)).gather(-1, x_0[..., None]).squeeze(-1).log()


def scheduler_of(process, **kwargs):
    """A scheduler around a process that is there already."""
    scheduler = D3PMScheduler(process.num_classes, process.num_steps, transition="uniform", **kwargs)
    scheduler._transition = process
    return scheduler


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_losses_and_gradients(process, matrices, scale, dtype):
    """All pairs of times, from noise to data: 1e-5 in float32."""
    scheduler, generator = scheduler_of(process), torch.Generator().manual_seed(3)
    x_0 = torch.randint(K, (1, 8), generator=generator)
    logits = scale * torch.randn(1, 8, K, generator=generator, dtype=torch.float64)
    for s, t in TIMES:
        x_t = process.sample(x_0, t, generator)
        theirs, ours = logits.clone().requires_grad_(), logits.to(dtype, copy=True).requires_grad_()
        terms = reference_terms(matrices, theirs, x_0, x_t, s, t)
        (gradient,) = torch.autograd.grad((terms[0] + 0.1 * terms[1]).sum(), theirs)
        output = d3pm_loss(
            scheduler, ours, x_0, x_t, t - 1, previous_timesteps=s - 1, hybrid_coeff=0.1, auxiliary="denoising"
        )
        output.loss.sum().backward()
        tolerance = {"atol": PRECISION[dtype], "rtol": PRECISION[dtype]}
        torch.testing.assert_close(output.vb.double(), terms[0], **tolerance)
        torch.testing.assert_close(ours.grad.double(), gradient, **tolerance)


def term(row, column, m):
    """<w, log(row / m)> + log Z - log Z_0, with w = row column / Z_0, per element."""
    w, z = row * column, (column * m).sum(-1)
    logs = torch.where(w > 0, row.log() - m.log(), 0)
    return (w * logs).sum(-1) / w.sum(-1) + z.log() - w.sum(-1).log()


@pytest.mark.parametrize("scale", [1.0, 12.0])
@pytest.mark.parametrize("make", [graph, star, path])
def test_products_have_the_digits_of_the_loss_or_say_so(make, scale):
    """Every state as x_0 and x_t, more elements than a block holds. The ends of a path are too far apart for float32."""
    series, num_elements, num_exact = chebyshev.ChebyshevExponential(make()), 40, 0
    series.block_size = 16
    generator = torch.Generator().manual_seed(5)
    p = (scale * torch.randn(num_elements, series.num_classes, generator=generator)).softmax(-1)
    x_0, x_t = torch.randint(series.num_classes, (2, num_elements), generator=generator)
    for cumulative, step in [(0.0, 0.3), (0.01, 1e-3), (0.5, 0.02), (3.0, 0.1), (3.0, 20.0), (40.0, 5.0)]:
        cumulatives, steps = exponential(make, cumulative), exponential(make, step)
        exact = term(cumulatives[x_0], steps[x_t], p.double() @ cumulatives)
        *products, is_inexact = series.products(p, x_0, x_t, cumulative, step)
        assert all(product.shape == p.shape for product in products)
        error = (term(*(product.double() for product in products)) - exact).abs()
        assert (error[~is_inexact] < 1e-5).all()
        num_exact += int((~is_inexact).sum())
        if make is path and cumulative < 0.1:
            assert is_inexact[(x_0 - x_t).abs() > 20].all()
    assert num_exact > 2 * num_elements


@pytest.mark.parametrize("denoising", [False, True], ids=["leave_one_out", "denoising"])
@pytest.mark.parametrize("make", [graph, path])
def test_reverse_steps_are_drawn_from_their_distribution(make, denoising):
    """The ends of a path are too far apart for products of float32 probabilities."""
    exponents = torch.tensor([1e-3, 0.3, 2.0], dtype=torch.float64)
    process, sums = SparseRateTransition(make(12), exponents), [0.0, 1e-3, 0.301, 2.301]
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(12, generator=generator)
    logits[8:] += 5
    for s, t in [(0, 1), (1, 2), (0, 3), (2, 3)]:
        row, step, whole = (exponential(make, a, 12) for a in (sums[s], sums[t] - sums[s], sums[t]))
        for state in (0, 11):
            p = logits.double() - whole[:, state].log() if denoising else logits.double()
            expected = step[:, state] * (p.softmax(-1) @ row)
            expected = 1000 * expected / expected.sum()
            x_t = torch.full((2, 500), state)
            draws = process.sample_previous(logits.expand(2, 500, 12), x_t, s, t, generator, denoising)
            counts, likely = draws.flatten().bincount(minlength=12), expected > 5
            assert counts[expected < 1e-6].sum() == 0
            if likely.sum() > 1:
                scale = counts[likely].sum() / expected[likely].sum()
                assert chisquare(counts[likely], expected[likely] * scale).pvalue > 1e-4
            else:
                assert counts[likely] > 980


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_improbable_steps_in_half_precision(dtype):
    # One jump in 1e30 leads to x_t from any other state, which is too little for sums of probabilities.
    rates = torch.ones(5, 5, dtype=torch.float64) - 5 * torch.eye(5, dtype=torch.float64)
    process = SparseRateTransition(rates.to_sparse(), torch.tensor([1e-30, 1e-30], dtype=torch.float64)).kernel()
    x_t = torch.full((200, 3), 4)
    logits = torch.tensor([1.0, 1.0, -torch.inf, -torch.inf, -torch.inf], dtype=dtype).expand(200, 3, 5)
    drawn = process.sample_previous(logits, x_t, 1, 2, torch.Generator().manual_seed(0))
    # p(x_1 | x_2 = 4) is proportional to q(x_2 | x_1) p(x_1): the jump to 4 was the first one half of the time.
    counts = torch.bincount(drawn.flatten(), minlength=5)
    assert counts[2] == counts[3] == 0
    assert chisquare(counts[[0, 1, 4]], [150, 150, 300]).pvalue > 1e-3
