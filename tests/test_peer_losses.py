# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The losses of MDLM, SEDD, UDLM and Duo are those of this package on the same network: by enumeration of all x_t of a toy.

The references are the formulas of the papers in float64, per unit of the noise level sigma = -log alpha.
"""

import math

import numpy as np
import pytest
import reference as ref
import torch
from torch.testing import assert_close

from d3pm_hf import D3PMScheduler, create_text_model, d3pm_loss
from d3pm_hf.losses.continuous import divergence_rate, predict_data


K, N = 4, 3
MASK = K - 1
SIGMAS = (0.01, 0.3, 1.0, 4.0)


@pytest.fixture(scope="module")
def logits():
    """The raw output `[K ** N, N, K]` of a diffusion transformer for all x_t."""
    torch.manual_seed(0)
    network = create_text_model("tiny", K, backbone="dit", timestep_conditioning=False).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.12 * torch.randn_like(parameter))
        return network(ref.states(K, N)).logits


def mdlm(logits, x_0, x_t, sigma):
    """alpha / (1 - alpha) times the cross-entropy of the masked tokens; the mask is never predicted."""
    log_p = logits.masked_fill(torch.arange(K) == MASK, -math.inf).log_softmax(-1)
    cross_entropy = -log_p.gather(-1, x_0[..., None]).squeeze(-1)
    return torch.where(x_t == MASK, cross_entropy / math.expm1(sigma), 0)


def ratios(x_0, x_t, sigma, transition):
    """q(y | x_0) / q(x_t | x_0) for all y, `[..., K]`."""
    alpha = math.exp(-sigma)
    noise = torch.eye(K).double()[MASK] if transition == "absorbing" else torch.full((K,), 1 / K).double()
    q = alpha * torch.eye(K).double()[x_0] + (1 - alpha) * noise
    return q / q.gather(-1, x_t[..., None])


def score_entropy(log_scores, x_0, x_t, sigma, transition):
    """sum over y != x_t of Q(x_t, y) (s_y - r_y log s_y + r_y (log r_y - 1)), r the ratios of q."""
    r = ratios(x_0, x_t, sigma, transition)
    terms = log_scores.exp() - r * log_scores + torch.xlogy(r, r) - r
    rates = torch.full_like(terms, 1 / K)
    if transition == "absorbing":  # only a mask came from another state
        rates = ((x_t == MASK)[..., None] & (torch.arange(K) != MASK)).double()
    rates = rates.scatter(-1, x_t[..., None], 0)
    return torch.where(rates > 0, rates * terms, 0).sum(-1)


def udlm(logits, x_0, x_t, sigma):
    """The continuous-time bound of uniform diffusion with the mean parameterization."""
    alpha = math.exp(-sigma)
    bar = K * alpha * torch.eye(K).double()[x_0] + 1 - alpha  # [..., K]
    bar_theta = K * alpha * logits.softmax(-1) + 1 - alpha
    at, at_theta = bar.gather(-1, x_t[..., None]), bar_theta.gather(-1, x_t[..., None])
    inner = (bar / at * (at_theta * bar / (bar_theta * at)).log()).sum(-1)
    return -(K / at - K / at_theta).squeeze(-1) / K + inner / K


def ours(logits, x_0, x_t, sigma, transition):
    """The rate of this package's bound per unit of sigma."""
    scheduler = D3PMScheduler(K, 10, transition=transition, beta_schedule="reciprocal")
    shape = x_0.shape
    log_a = torch.full(shape, -sigma, dtype=torch.float64)
    log_noise = torch.log(-torch.expm1(log_a))
    mask, t = torch.ones(shape, dtype=torch.bool), torch.zeros(len(x_0), dtype=torch.long)
    prediction = predict_data(scheduler, logits, x_0, x_t, t, log_a - log_noise, mask, None)
    return divergence_rate(scheduler.transition, prediction, x_0, x_t, log_a, log_noise)


def pairs(transition):
    """All pairs of x_0 and x_t `[P, N]` that the process can show, and the index of x_t `[P]`."""
    x_t = ref.states(K, N)
    x_0 = x_t[(x_t != MASK).all(-1)] if transition == "absorbing" else x_t
    index = torch.arange(len(x_t)).repeat(len(x_0))
    x_0, x_t = x_0.repeat_interleave(len(x_t), 0), x_t.repeat(len(x_0), 1)
    if transition == "absorbing":
        possible = ((x_t == MASK) | (x_t == x_0)).all(-1)
        x_0, x_t, index = x_0[possible], x_t[possible], index[possible]
    return x_0, x_t, index


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_bound_of_mdlm_is_ours(logits, sigma):
    x_0, x_t, index = pairs("absorbing")
    assert_close(ours(logits[index], x_0, x_t, sigma, "absorbing"), mdlm(logits[index], x_0, x_t, sigma))


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_score_entropy_of_sedd_is_ours(logits, sigma):
    """SEDD reads the output as log-scores, less log(exp(sigma) - 1) and log(K - 1), which need not add up to those of a p(x_0).

    With Z the factor by which they miss it, its loss exceeds the bound of the same network read as logits of x_0 by
    (Z - 1 - log Z) / (exp(sigma) - 1) per mask, and is the same for normalized scores.
    """
    x_0, x_t, index = pairs("absorbing")
    output = logits[index]
    expected = ours(output, x_0, x_t, sigma, "absorbing")
    log_scores = output - math.log(math.expm1(sigma)) - math.log(K - 1)
    log_z = output[..., :MASK].logsumexp(-1) - math.log(K - 1)
    excess = torch.where(x_t == MASK, (log_z.exp() - 1 - log_z) / math.expm1(sigma), 0)
    assert (excess >= 0).all() and excess.max() > 1e-3
    assert_close(score_entropy(log_scores, x_0, x_t, sigma, "absorbing"), expected + excess)
    normalized = output - output[..., :MASK].logsumexp(-1, keepdim=True) - math.log(math.expm1(sigma))
    assert_close(score_entropy(normalized, x_0, x_t, sigma, "absorbing"), expected)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_bounds_of_udlm_and_duo_are_ours(logits, sigma):
    """Their mean parameterization puts softmax(output) into eq. 4: the leave-one-out reading."""
    x_0, x_t, index = pairs("uniform")
    assert_close(ours(logits[index], x_0, x_t, sigma, "uniform"), udlm(logits[index], x_0, x_t, sigma))


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_score_entropy_of_a_uniform_process_is_ours(logits, sigma):
    """The scores of a prediction p of x_0 are m(y) / m(x_t), m = alpha p + (1 - alpha) / K."""
    x_0, x_t, index = pairs("uniform")
    alpha = math.exp(-sigma)
    m = alpha * logits[index].softmax(-1) + (1 - alpha) / K
    scores = (m / m.gather(-1, x_t[..., None])).log()
    assert_close(score_entropy(scores, x_0, x_t, sigma, "uniform"), ours(logits[index], x_0, x_t, sigma, "uniform"))


@pytest.mark.parametrize(("transition", "peer"), [("absorbing", mdlm), ("uniform", udlm)])
def test_their_integrals_are_the_limit_of_the_steps(logits, transition, peer):
    """Their expected loss over all x_t, integrated over time, is the sum of all T terms of `d3pm_loss` for large T."""
    x_0, x_t, index = pairs(transition)
    chosen = (x_0 == x_0[len(x_0) // 2]).all(-1)
    x_0, x_t, output = x_0[chosen], x_t[chosen], logits[index[chosen]]
    same, num_noise = x_t == x_0, K if transition == "uniform" else 1

    def law(alpha):
        """q(x_t | x_0) of each pair."""
        q = alpha * same + (1 - alpha) / num_noise if transition == "uniform" else torch.where(same, alpha, 1 - alpha)
        return q.prod(-1)

    nodes, weights = np.polynomial.legendre.leggauss(60)
    integral = 0.0
    for node, weight in zip(
        (nodes + 1) * math.pi / 4, weights * math.pi / 4, strict=True
    ):  # angles f: alpha = cos(f)^2
        alpha = math.cos(node) ** 2
        rate = peer(output, x_0, x_t, -math.log(alpha)).sum(-1)
        integral += weight * 2 * math.tan(node) * (law(alpha) * rate).sum().item()
    sums = []
    for num_steps in (250, 500):
        scheduler = D3PMScheduler(K, num_steps, transition=transition, beta_schedule="reciprocal")
        terms = [
            (law(1 - (t + 1) / num_steps) * d3pm_loss(scheduler, output, x_0, x_t, t).vb.double().sum(-1)).sum().item()
            for t in range(num_steps)
        ]
        sums.append(sum(terms))
    assert 2 * sums[1] - sums[0] == pytest.approx(integral, rel=2e-4)  # what is left after the error of order 1 / T
    assert abs(sums[1] - integral) < 0.6 * abs(sums[0] - integral) < 0.02 * integral
