# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Matrix processes hold probabilities that float64 cannot: everything against a reference in logarithms."""

import math
import threading

import pytest
import torch

from d3pm_hf import D3PMScheduler, d3pm_loss
from d3pm_hf.kernels import dense_tables as dense
from d3pm_hf.transitions import MatrixTransition, toeplitz
from d3pm_hf.transitions import rates as rate_module


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
NUM_STEPS = 6


def log_gaussian(num_classes, betas):
    """log Q_t of the paper's discretized Gaussian, [T, K, K]."""
    i = torch.arange(num_classes).double()
    n = torch.arange(1 - num_classes, num_classes).double()

    def log_weight(distance, beta):
        return -4 * distance**2 / ((num_classes - 1) ** 2 * beta)

    steps = torch.stack([log_weight(i[:, None] - i, b) - log_weight(n, b).logsumexp(0) for b in betas])
    return with_diagonal(steps)


def log_band(num_classes, betas, bandwidth):
    i = torch.arange(num_classes)
    band = ((i[:, None] - i).abs() <= bandwidth).double()
    return with_diagonal(torch.stack([(band * b / num_classes).log() for b in betas]))


def with_diagonal(log_steps):
    off_diagonal = log_steps.masked_fill(torch.eye(log_steps.shape[-1]).bool(), -torch.inf)
    return off_diagonal.diagonal_scatter(torch.log1p(-off_diagonal.exp().sum(-1)), dim1=-2, dim2=-1)


def path(num_classes, rates=None):
    """Rates of a path, on which the last state is K - 1 jumps from the first."""
    rates = torch.ones(num_classes - 1, dtype=torch.float64) if rates is None else rates
    matrix = torch.diag(rates, 1) + torch.diag(rates.flip(0), -1)
    return matrix - torch.diag(matrix.sum(-1))


def log_exponential(rates, exponent):
    """log exp(a R) = log sum_k Poisson(k; q a) (I + R / q)^k, term by term."""
    fastest = -rates.diagonal().min().item()
    log_chances = (torch.eye(len(rates)) + rates / fastest).log()
    power = torch.eye(len(rates)).double().log()
    if not exponent:
        return power
    total, mean = torch.full_like(power, -torch.inf), fastest * exponent
    for k in range(3 * len(rates) + 60):
        total = torch.logaddexp(total, power + k * math.log(mean) - mean - math.lgamma(k + 1))
        power = log_product(power, log_chances)
    return total


def log_product(log_p, log_q):
    """log (p Q), term by term: [..., K] and [K, K]."""
    return (log_p.unsqueeze(-1) + log_q).logsumexp(-2)


def log_stretches(log_steps):
    """log Q_{s..t} for all s <= t."""
    identity = torch.eye(log_steps.shape[-1]).double().log()
    stretches = {}
    for s in range(len(log_steps) + 1):
        stretches[s, s] = identity
        for t in range(s + 1, len(log_steps) + 1):
            stretches[s, t] = log_steps[t - 1] if t == s + 1 else log_product(stretches[s, t - 1], log_steps[t - 1])
    return stretches


def rate_case(rates, exponents):
    sums = [0.0, *torch.tensor(exponents, dtype=torch.float64).cumsum(0).tolist()]
    return {(s, t): log_exponential(rates, sums[t] - sums[s]) for s in range(len(sums)) for t in range(s, len(sums))}


BETAS = torch.linspace(1e-4, 2e-4, NUM_STEPS, dtype=torch.float64)
EXPONENTS = [1e-4, 1e-3, 0.5]
UNEVEN = 10 ** torch.linspace(0, -20, 29, dtype=torch.float64)


def make(name):
    """A process, and log Q_{s..t} for all its times."""
    exponents = torch.tensor(EXPONENTS, dtype=torch.float64)
    if name == "gaussian":
        process = toeplitz.ToeplitzTransition(toeplitz.gaussian_log_kernels(64, BETAS / 10))
        return process, log_stretches(log_gaussian(64, BETAS / 10))
    if name == "band":
        process = toeplitz.ToeplitzTransition(toeplitz.band_log_kernels(64, BETAS, 12))
        return process, log_stretches(log_band(64, BETAS, 12))
    if name == "matrix":
        log_steps = log_gaussian(41, BETAS / 10)
        steps = log_steps.exp()
        return MatrixTransition(steps, NUM_STEPS), log_stretches((steps / steps.sum(-1, keepdim=True)).log())
    kind, form = name.split("-")
    rates = {"path": path(40), "uneven": path(30, UNEVEN)}[kind]
    family = {"dense": rate_module.DenseRateTransition, "sparse": rate_module.SparseRateTransition}[form]
    return family(rates, exponents), rate_case(rates, EXPONENTS)


RATES = ["path-dense", "path-sparse", "uneven-dense", "uneven-sparse"]
NAMES = ["gaussian", "band", "matrix", *RATES]


@pytest.fixture(scope="module")
def cases():
    made = {}
    return lambda name: made.setdefault(name, make(name)) if name not in made else made[name]


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_probability_keeps_its_digits(name, has_kernel, cases):
    """Rows, columns and carried distributions, to 1e-10 of their logarithms."""
    process, expected = cases(name)
    process = process.kernel() if has_kernel else process
    states = torch.arange(process.num_classes)[None]
    log_p = 500 * torch.randn(1, 7, process.num_classes, dtype=torch.float64)
    log_p[..., 3] = -torch.inf
    smallest = 0.0
    for (s, t), log_q in expected.items():
        tolerance = {"atol": 1e-10, "rtol": 1e-14}
        torch.testing.assert_close(process.log_marginal(states, s, t, torch.float64)[0], log_q, **tolerance)
        torch.testing.assert_close(process.log_likelihood(states, s, t, torch.float64)[0], log_q.T, **tolerance)
        carried = process.log_marginal(log_p, s, t)
        torch.testing.assert_close(carried, log_product(log_p, log_q), **tolerance)
        smallest = min(smallest, log_q[log_q > -torch.inf].min().item())
    assert (
        smallest < {"gaussian": -5000, "band": -50, "matrix": -300, "path": -300, "uneven": -1000}[name.split("-")[0]]
    )


def scheduler_of(process, **kwargs):
    """A scheduler around a process that is there already."""
    scheduler = D3PMScheduler(process.num_classes, process.num_steps, transition="uniform", **kwargs)
    scheduler._transition = process
    return scheduler


def log_reverse(expected, logits, x_t, s, t, denoising):
    """log p(x_s | x_t), [..., K]."""
    log_p = logits - expected[0, t].T[x_t] if denoising else logits
    log_p = torch.where(expected[0, t].T[x_t] > -torch.inf, log_p, -torch.inf) if denoising else log_p
    return (expected[s, t].T[x_t] + log_product(log_p.log_softmax(-1), expected[0, s])).log_softmax(-1)


def log_terms(expected, logits, x_0, x_t, s, t, denoising):
    """KL(q(x_s | x_t, x_0) || p(x_s | x_t)) per element."""
    log_q = (expected[0, s][x_0] + expected[s, t].T[x_t]).log_softmax(-1)
    log_p = log_reverse(expected, logits, x_t, s, t, denoising)
    return torch.where(log_q > -200, log_q.exp() * (log_q - torch.where(log_q > -200, log_p, 0)), 0).sum(-1)


@pytest.mark.cover
@pytest.mark.parametrize("scale", [0.0, 30.0, 1e4])
@pytest.mark.parametrize("denoising", [False, True], ids=["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", ["gaussian", "path-dense", "path-sparse", "uneven-sparse"])
def test_losses_and_posteriors(name, denoising, scale, cases):
    """The terms, their gradients and the reverse step, for networks that know nothing or are sure of something wrong."""
    process, expected = cases(name)
    scheduler = scheduler_of(process, x0_posterior="denoising" if denoising else "leave_one_out")
    x_0 = torch.arange(process.num_classes)[None, ::3]
    x_t = (x_0 + torch.arange(x_0.shape[1]) % 3 - 1).clamp(0, process.num_classes - 1)
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(*x_0.shape, process.num_classes, generator=generator, dtype=torch.float64)
    for s, t in [(0, 1), (1, 2), (0, 3), (2, 3)]:
        theirs = logits.clone().requires_grad_()
        terms = log_terms(expected, theirs, x_0, x_t, s, t, denoising)
        (gradient,) = torch.autograd.grad(terms.sum(), theirs)
        for dtype, tolerance in [(torch.float64, 1e-9), (torch.float32, 1e-4)]:
            ours = logits.to(dtype, copy=True).requires_grad_()
            vb = d3pm_loss(scheduler, ours, x_0, x_t, t - 1, previous_timesteps=s - 1).loss
            vb.sum().backward()
            torch.testing.assert_close(vb.double(), terms, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(ours.grad.double(), gradient, atol=tolerance, rtol=tolerance)
        posterior = scheduler.posterior_logits(logits, t - 1, x_t, s - 1)
        reverse = log_reverse(expected, logits, x_t, s, t, denoising)
        torch.testing.assert_close(posterior, reverse, atol=1e-9, rtol=1e-13)


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_a_network_that_knows_nothing(form, cases):
    """Zero logits of the denoising posterior at the last step are worth log K, however far the states are apart."""
    process, _ = cases(f"path-{form}")
    x = torch.arange(40)[None]
    scheduler = scheduler_of(process, x0_posterior="denoising")
    vb = d3pm_loss(scheduler, torch.zeros(1, 40, 40), x, x, 0).vb
    torch.testing.assert_close(vb, torch.full_like(vb, math.log(40)), atol=1e-4, rtol=0)


def test_the_papers_gaussian():
    """K = 256 and the paper's first betas, float32: log 256 at the last step, and the reference in logarithms at t = 5."""
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)[:NUM_STEPS]
    scheduler = D3PMScheduler(
        256, NUM_STEPS, transition="gaussian", trained_betas=betas.tolist(), x0_posterior="denoising"
    )
    x = torch.arange(0, 256, 15)[None]
    logits = torch.zeros(1, x.shape[1], 256)
    vb = d3pm_loss(scheduler, logits, x, x, 0).vb
    torch.testing.assert_close(vb, torch.full_like(vb, math.log(256)), atol=1e-5, rtol=0)
    log_steps = log_gaussian(256, betas)
    rows = torch.eye(256).double()[x[0]].log()
    for step in log_steps[:5]:
        rows = log_product(rows, step)  # log q(x_5 | x_0), [N, K]
    columns = log_steps[5][:, x[0]].T  # log q(x_6 | x_5)
    for step in log_steps[:5].flip(0):
        columns = torch.stack([(step + column).logsumexp(-1) for column in columns])  # log q(x_6 | x_0), [N, K]
    log_p = (-columns).log_softmax(-1)
    log_m = log_p
    for step in log_steps[:5]:
        log_m = log_product(log_m, step)
    step = log_steps[5][:, x[0]].T
    log_q, log_reversed = (rows + step).log_softmax(-1), (log_m + step).log_softmax(-1)
    expected = (log_q.exp() * (log_q - log_reversed)).sum(-1)
    vb = d3pm_loss(scheduler, logits, x, x, 5).vb[0]
    torch.testing.assert_close(vb.double(), expected, atol=2e-4, rtol=0)


def peak_bytes(run):
    """The most memory that a call holds at once, beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_networks_that_are_sure_of_something_wrong_need_little_memory():
    """A matrix for each sample, not for each element: 512 of those would be 268 MB in float64."""
    process = toeplitz.ToeplitzTransition(toeplitz.gaussian_log_kernels(256, 10 * BETAS))
    scheduler = scheduler_of(process)
    x_0 = torch.arange(256).expand(2, -1)
    logits = 1e4 * torch.eye(256)[(x_0 + 128) % 256]
    t = torch.tensor([2, 5])
    x_t = scheduler.add_noise(x_0, t, generator=torch.Generator().manual_seed(0))

    def run():
        given = logits.clone().requires_grad_()
        d3pm_loss(scheduler, given, x_0, x_t, t).loss.sum().backward()
        assert given.grad.isfinite().all()

    assert peak_bytes(run) < 50e6


def test_stretches_may_be_asked_for_by_many_threads(monkeypatch):
    """The cache is emptied all the time while others read it."""
    process = toeplitz.ToeplitzTransition(toeplitz.gaussian_log_kernels(6, torch.full((8,), 0.1, dtype=torch.float64)))
    process = process.kernel()
    expected = {(s, t): process.log_stretch(s, t) for s in range(1, 7) for t in range(s + 1, 9)}
    monkeypatch.setattr(dense, "MAX_STRETCH_BYTES", 1)
    errors = []

    def ask(seed):
        order = torch.randperm(len(expected), generator=torch.Generator().manual_seed(seed)).tolist()
        try:
            for pair in [list(expected)[i] for i in order * 3]:
                got = process.log_matrices(*(torch.tensor([n, n]) for n in pair), torch.float64, "cpu")
                torch.testing.assert_close(got, expected[pair].expand(2, -1, -1))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_table_is_built_once_for_all_threads(monkeypatch):
    process = toeplitz.ToeplitzTransition(
        toeplitz.gaussian_log_kernels(6, torch.full((50,), 0.1, dtype=torch.float64))
    ).kernel()
    built = []
    products = process._log_products
    monkeypatch.setattr(process, "_log_products", lambda s, t: built.append((s, t)) or products(s, t))
    x = torch.zeros(2, 3, dtype=torch.long)
    threads = [threading.Thread(target=process.sample, args=(x, 7)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process.prior_divergence(x)
    assert built == [(0, 50)]
