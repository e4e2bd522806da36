# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Rate matrices that stay sparse say the same as those that become matrices, and build no [K, K]."""

import resource

import pytest
import torch
from scipy.stats import chisquare

from d3pm_hf import D3PMScheduler, d3pm_loss
from d3pm_hf.schedules import cosine_betas, exponents_from_betas, linear_betas
from d3pm_hf.transitions import rates as rate_module


K, T = 9, 12
SCHEDULES = {
    "forgets at the end": cosine_betas(T),
    "never forgets": linear_betas(T, 0.02, 0.9),
    "forgets midway": torch.cat([linear_betas(T - 5, 0.02, 0.3), torch.ones(1), linear_betas(4, 0.1, 0.2)]),
}
TIMES = [(0, 1), (0, T), (3, 7), (T - 1, T), (0, 0), (T - 2, T), (T - 6, T - 4)]


def rates(masks: bool) -> torch.Tensor:
    neighbors = rate_module.nearest_neighbor_rates(torch.randn(K, 4, generator=torch.Generator().manual_seed(0)), 3)
    return rate_module.add_absorbing_state(neighbors, 2.0, 4) if masks else neighbors


@pytest.fixture(params=SCHEDULES)
def exponents(request):
    return exponents_from_betas(SCHEDULES[request.param].double())


@pytest.mark.parametrize("masks", [False, True])
def test_sparse_equals_dense(masks, exponents):
    dense = rate_module.DenseRateTransition(rates(masks), exponents).kernel()
    sparse = rate_module.SparseRateTransition(rates(masks), exponents).kernel()
    x = torch.randint(0, K, (len(TIMES), 5))
    s, t = torch.tensor(TIMES).T
    log_p = torch.randn(len(TIMES), 5, dense.num_classes, dtype=torch.float64).log_softmax(-1)
    for pair in TIMES:
        torch.testing.assert_close(sparse.matrix(*pair), dense.matrix(*pair), atol=1e-12, rtol=0)
    for ask in (
        lambda process: process.log_likelihood(x, s, t, torch.float64),
        lambda process: process.log_likelihood(x, None, t.clamp(min=1), torch.float64),
        lambda process: process.log_marginal(x, s, t, torch.float64),
        lambda process: process.log_marginal(log_p, s, t),
    ):
        torch.testing.assert_close(ask(sparse).exp(), ask(dense).exp(), atol=1e-12, rtol=0)
    torch.testing.assert_close(sparse.prior_divergence(x), dense.prior_divergence(x))


def test_far_states_keep_their_relative_precision():
    """A chain of states: reaching the n-th takes n jumps, and a short time makes that as unlikely as a^n / n!."""
    chain = torch.zeros(8, 8, dtype=torch.float64)
    for i in range(7):
        chain[i, i + 1] = chain[i + 1, i] = 1.0
    chain -= torch.diag(chain.sum(-1))
    process = rate_module.SparseRateTransition(chain, torch.full((1,), 1e-4, dtype=torch.float64))
    row = process.log_marginal(torch.tensor([[0]]), 0, 1, torch.float64)[0, 0]
    expected = torch.tensor([n * -9.210340371976182 - torch.lgamma(torch.tensor(n + 1.0)).item() for n in range(3)])
    torch.testing.assert_close(row[:3], expected.double(), atol=1e-3, rtol=0)
    dense = rate_module.DenseRateTransition(chain, torch.full((1,), 1e-4, dtype=torch.float64))
    assert dense.log_marginal(torch.tensor([[0]]), 0, 1, torch.float64)[0, 0, 7] == pytest.approx(
        7 * -9.2103 - 8.5252, abs=1e-3
    )


@pytest.mark.parametrize("masks", [False, True])
def test_jumps_are_drawn_from_the_marginal(masks, exponents):
    process = rate_module.SparseRateTransition(rates(masks), exponents).kernel()
    times = torch.tensor([1, 3, 6, T])
    draws = process.sample(torch.full((4, 5_000), 2), times, torch.Generator().manual_seed(0))
    for draw, t in zip(draws, times.tolist()):
        expected = process.matrix(0, t)[2] * draw.numel()
        counts = draw.bincount(minlength=process.num_classes)
        assert (counts[expected < 1e-9] == 0).all()
        likely = expected > 5
        if likely.sum() > 1:
            scale = counts[likely].sum() / expected[likely].sum()
            assert chisquare(counts[likely], expected[likely] * scale).pvalue > 1e-4


def test_schedule_by_vectors_agrees_with_schedule_by_matrices(monkeypatch):
    """Averaged over some of the states, I(x_t; x_0) still falls linearly to within 1e-3."""
    monkeypatch.setattr(rate_module, "NUM_INFORMATION_STATES", 128)
    embeddings = torch.randn(400, 8, generator=torch.Generator().manual_seed(1))
    graph = rate_module.check_rates(rate_module.nearest_neighbor_rates(embeddings, 10))
    unigram = 1 / torch.arange(1.0, 401.0, dtype=torch.float64)
    unigram /= unigram.sum()
    exponents = rate_module.rate_information_exponents(graph, unigram, 20)
    lost = rate_module._lost_by_matrices(graph, unigram, exponents.cumsum(0)[[4, 9, 14, 18]])
    torch.testing.assert_close(lost, torch.tensor([0.25, 0.5, 0.75, 0.95]).double(), atol=1e-3, rtol=0)


def test_scheduler_with_a_sparse_process(monkeypatch):
    """The scheduler, the loss and its gradient are those of the dense process."""
    options = {
        "num_classes": K,
        "num_train_timesteps": T,
        "transition": "nearest_neighbor",
        "embeddings": torch.randn(K, 4),
        "num_neighbors": 3,
        "beta_schedule": "cosine",
    }
    dense = D3PMScheduler(**options)
    monkeypatch.setattr(rate_module, "MAX_TABLE_BYTES", 0)
    sparse = D3PMScheduler(**options)
    assert isinstance(sparse.transition, rate_module.SparseRateTransition)
    x_0, timesteps = torch.randint(0, K, (4, 6)), torch.tensor([0, 3, 7, T - 1])
    x_t = dense.add_noise(x_0, timesteps)
    results = []
    for scheduler in (dense, sparse):
        logits = torch.randn(4, 6, K, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        loss = d3pm_loss(scheduler, logits, x_0, x_t, timesteps, hybrid_coeff=0.1, auxiliary="denoising").loss
        loss.sum().backward()
        results.append((loss.detach(), logits.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-11, rtol=0)


@pytest.mark.slow
def test_8192_tokens_fit_a_laptop():
    """Set-up within 2 GB, a loss in float32 to 1e-5, and an information schedule that holds for other states than its own."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_tokens, seeded = 8192, torch.Generator().manual_seed(0)
    unigram = 1 / torch.arange(1.0, num_tokens + 1, dtype=torch.float64)
    unigram /= unigram.sum()
    scheduler = D3PMScheduler(
        num_tokens,
        transition="nearest_neighbor",
        embeddings=torch.randn(num_tokens, 64, generator=seeded),
        num_neighbors=25,
        unigram_probs=unigram,
    )
    x_0 = torch.randint(0, num_tokens, (2, 16), generator=seeded)
    timesteps = torch.tensor([300, 999])
    x_t = scheduler.add_noise(x_0, timesteps, seeded)
    logits = torch.randn(2, 16, num_tokens, generator=seeded).requires_grad_()
    loss = d3pm_loss(scheduler, logits, x_0, x_t, timesteps).loss
    loss.sum().backward()
    assert loss.isfinite().all() and logits.grad.isfinite().all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2e6  # kB

    few, exact = (slice(None), slice(4)), logits.detach()[:, :4].double().requires_grad_()
    exact_loss = d3pm_loss(scheduler, exact, x_0[few], x_t[few], timesteps).loss
    exact_loss.sum().backward()
    torch.testing.assert_close(loss[few].double(), exact_loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits.grad[few].double(), exact.grad, atol=1e-6, rtol=1e-5)

    process = scheduler.transition
    states = torch.multinomial(unigram, 1500, replacement=True, generator=seeded)
    for t in (250, 500, 750):
        conditional = process.log_marginal(states[None], 0, t, torch.float32)[0].double().exp()
        entropies = torch.special.entr(conditional).sum(-1)
        marginal = torch.special.entr(process.log_marginal(unigram.log()[None, None], 0, t).exp()).sum()
        lost = 1 - (marginal - entropies.mean()) / torch.special.entr(unigram).sum()
        error = entropies.std() / 1500**0.5 / torch.special.entr(unigram).sum()
        assert abs(lost - t / 1000) < 4 * error + 1e-3


@pytest.mark.parametrize(
    "num_classes, num_steps, is_full, form",
    [
        (28, 1000, False, rate_module.DenseRateTransition),
        (512, 200, False, rate_module.SparseRateTransition),  # its table would take minutes to build
        (2000, 10, False, rate_module.SparseRateTransition),
        (300, 400, True, rate_module.DenseRateTransition),  # without zeros there is nothing to gain
        (300, 2000, True, rate_module.SparseRateTransition),  # its table would not fit
    ],
)
def test_the_form_is_chosen_by_its_cost(num_classes, num_steps, is_full, form):
    if is_full:
        graph = torch.ones(num_classes, num_classes, dtype=torch.float64)
        graph -= num_classes * torch.eye(num_classes, dtype=torch.float64)
    else:
        points = torch.randn(num_classes, 8, generator=torch.Generator().manual_seed(0))
        graph = rate_module.nearest_neighbor_rates(points, 5)
    assert type(rate_module.rate_transition(graph, torch.full((num_steps,), 0.1, dtype=torch.float64))) is form
