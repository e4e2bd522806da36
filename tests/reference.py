# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The dense float64 truth that everything mathematical is compared with.

A forward process is a tensor `Q` [T, P, K, K] of one-step matrices, rows summing to one, with P = 1 (every position
alike) or P = N (position-dependent). Time is the number n of corruption steps, 0 .. T; states are int64 [B, ...].
Build Q_t by the paper's formula, multiply, apply Bayes, sum: nothing here is clever, and nothing imports the package.
"""

import itertools

import scipy.linalg
import scipy.stats
import torch
from torch.nn.functional import logsigmoid, one_hot


# --- schedules -------------------------------------------------------------------------------------------------------
def linear_betas(num_steps, start, end):
    return start + (end - start) * torch.arange(num_steps).double() / max(num_steps - 1, 1)


def cosine_betas(num_steps, offset=0.008):
    f = torch.cos((torch.arange(num_steps + 1).double() / num_steps + offset) / (1 + offset) * torch.pi / 2)
    return torch.cat([1 - f[1:-1] / f[:-2], torch.ones(1).double()])  # cos(pi/2) = 0: everything is lost at T


def reciprocal_betas(num_steps):
    return 1 / (num_steps - torch.arange(1, num_steps + 1).double() + 1)


# --- one-step matrices [T, P, K, K] ----------------------------------------------------------------------------------
def rank_one(betas, stationary):
    """(1 - beta) I + beta 1 pi': uniform, absorbing, their mix, any stationary distribution."""
    eye = torch.eye(len(stationary)).double()
    return torch.stack([(1 - b) * eye + b * stationary.expand_as(eye) for b in betas])[:, None]


def stationary_mix(num_classes, mask=None, mask_fraction=1.0):
    """mask_fraction on the mask, the rest uniform over all K states."""
    pi = torch.ones(num_classes).double() * (1 - mask_fraction if mask is not None else 1.0) / num_classes
    if mask is not None:
        pi[mask] += mask_fraction
    return pi


def with_diagonal(off_diagonal):
    """The diagonal makes up what is missing to one."""
    off_diagonal = off_diagonal - torch.diag(off_diagonal.diagonal())
    return off_diagonal + torch.diag(1 - off_diagonal.sum(-1))


def gaussian(betas, num_classes):
    i = torch.arange(num_classes).double()
    n = torch.arange(1 - num_classes, num_classes).double()

    def weight(distance, beta):
        return torch.exp(-4 * distance**2 / ((num_classes - 1) ** 2 * beta))

    return torch.stack([with_diagonal(weight(i[:, None] - i, b) / weight(n, b).sum()) for b in betas])[:, None]


def band_diagonal(betas, num_classes, bandwidth):
    i = torch.arange(num_classes)
    band = ((i[:, None] - i).abs() <= bandwidth).double()
    return torch.stack([with_diagonal(band * b / num_classes) for b in betas])[:, None]


def neighbor_rates(embeddings, num_neighbors):
    """A = (G + G') / 2k with G[i, j] = 1 if i is one of the k nearest neighbors of j; R = A - diag(row sums)."""
    distances = torch.cdist(embeddings.double(), embeddings.double(), compute_mode="donot_use_mm_for_euclid_dist")
    distances.fill_diagonal_(torch.inf)
    graph = torch.zeros_like(distances)
    for j, row in enumerate(distances):
        graph[row.argsort()[:num_neighbors], j] = 1
    adjacency = (graph + graph.T) / (2 * num_neighbors)
    return adjacency - torch.diag(adjacency.sum(-1))


def add_absorbing_state(rates, mask_rate, mask):
    """Every token also goes to the mask at a constant rate; the mask goes nowhere."""
    num_classes = len(rates) + 1
    tokens = torch.tensor([k for k in range(num_classes) if k != mask])
    out = torch.zeros(num_classes, num_classes).double()
    out[tokens[:, None], tokens] = rates - mask_rate * torch.eye(len(rates)).double()
    out[tokens, mask] = mask_rate
    return out


def exponential(rates, exponents):
    """exp(alpha R) by scipy (torch.matrix_exp errs by 1e-9); alpha = inf is the limit, by squaring."""

    def power(alpha):
        if alpha < torch.inf:
            return torch.from_numpy(scipy.linalg.expm((alpha * rates).numpy()))
        out = power(1.0)
        for _ in range(60):
            out = out @ out
            out = out / out.sum(-1, keepdim=True)
        return out

    return torch.stack([power(a) for a in exponents])[:, None]


def autoregressive(num_classes, length, mask):
    """Step n masks position length - n, whatever stands there; the others keep still."""
    out = torch.eye(num_classes).double().repeat(length, length, 1, 1)
    for n in range(1, length + 1):
        out[n - 1, length - n] = one_hot(torch.tensor(mask), num_classes).double()
    return out


# --- the forward process ---------------------------------------------------------------------------------------------
def stretch(Q, s, t):
    """Q_{s+1} ... Q_t [P, K, K]; the identity where s = t."""
    out = torch.eye(Q.shape[-1]).double().expand(Q.shape[1:])
    for n in range(s, t):
        out = out @ Q[n]
    return out


def between(Q, s, t, shape):
    """The matrices of every element of a batch of states of this shape, [B, ..., K, K] up to broadcasting."""
    s, t = (torch.as_tensor(n).expand(shape[0]).tolist() for n in (s, t))
    per_sample = torch.stack([stretch(Q, a, b) for a, b in zip(s, t)])  # [B, P, K, K]
    inner = shape[1:] if Q.shape[1] > 1 else [1] * len(shape[1:])
    return per_sample.reshape(shape[0], *inner, *Q.shape[2:])


def marginal(Q, probs, s, t):
    """p Q_{s..t} [B, ..., K], of distributions or of states."""
    probs = probs if probs.is_floating_point() else one_hot(probs, Q.shape[-1])
    return (probs.double().unsqueeze(-2) @ between(Q, s, t, probs.shape[:-1])).squeeze(-2)


def likelihood(Q, x_t, s, t):
    """The column q(x_t | x_s = .) [B, ..., K]."""
    return (between(Q, s, t, x_t.shape) @ one_hot(x_t, Q.shape[-1]).double().unsqueeze(-1)).squeeze(-1)


def normalize(weights):
    return weights / weights.sum(-1, keepdim=True)


def posterior(Q, x_0, x_t, s, t):
    """q(x_s | x_t, x_0) by Bayes."""
    return normalize(likelihood(Q, x_t, s, t) * marginal(Q, x_0, 0, s))


def mutual_information(joint):
    """I of a joint distribution [K, K], in nats."""
    independent = joint.sum(0, keepdim=True) * joint.sum(1, keepdim=True)
    return (torch.special.xlogy(joint, joint) - torch.special.xlogy(joint, independent)).sum()


def entropy(probs):
    return -torch.special.xlogy(probs, probs).sum()


# --- the reverse process ---------------------------------------------------------------------------------------------
def forbid(logits, mask):
    """The x_0 logits in float64; data never shows the mask state, or any of several."""
    logits = logits.double()
    for state in () if mask is None else (mask,) if isinstance(mask, int) else mask:
        logits = logits.masked_fill(torch.arange(logits.shape[-1]) == state, -torch.inf)
    return logits


def leave_one_out(Q, logits, x_t, t, x0_posterior):
    """What the network says of x_0 before x_t's own value is taken into account (up to a constant factor)."""
    probs = logits.softmax(-1)
    if x0_posterior == "leave_one_out":
        return probs
    evidence = likelihood(Q, x_t, 0, t)
    return torch.where(evidence > 0, probs / torch.where(evidence > 0, evidence, 1), 0)


def reverse(Q, logits, x_t, s, t, x0_posterior="leave_one_out", reconstruction="posterior"):
    """p(x_s | x_t) of eq. 4, sum over x_0 of q(x_s, x_t | x_0) p(x_0); `raw`: the network's own output where s = 0."""
    prediction = leave_one_out(Q, logits, x_t, t, x0_posterior)
    out = normalize(likelihood(Q, x_t, s, t) * marginal(Q, prediction, 0, s))
    if reconstruction == "raw":
        last = (torch.as_tensor(s).expand(len(x_t)) == 0).reshape(-1, *[1] * x_t.ndim)
        out = torch.where(last, logits.softmax(-1), out)
    return out


def denoising(Q, logits, x_t, t, x0_posterior):
    """The model's q(x_0 | x_t): the output as it is, if that is what it means."""
    probs = logits.softmax(-1)
    return probs if x0_posterior == "denoising" else normalize(probs * likelihood(Q, x_t, 0, t))


# --- losses, per element, in nats ------------------------------------------------------------------------------------
def kl(q, p):
    return torch.where(q > 0, q * (torch.where(q > 0, q, 1).log() - torch.where(q > 0, p, 1).log()), 0).sum(-1)


def variational(Q, logits, x_0, x_t, s, t, **options):
    """KL(q(x_s | x_t, x_0) || p(x_s | x_t)); q is a point mass where s = 0, which makes it the reconstruction term."""
    return kl(posterior(Q, x_0, x_t, s, t), reverse(Q, logits, x_t, s, t, **options))


def cross_entropy(Q, logits, x_0, x_t, t, auxiliary="raw", x0_posterior="leave_one_out"):
    probs = logits.softmax(-1) if auxiliary == "raw" else denoising(Q, logits, x_t, t, x0_posterior)
    return -probs.gather(-1, x_0.unsqueeze(-1)).squeeze(-1).log()


# The same two in logarithms, for networks whose probabilities are out of the reach of float64.
def finite_log(probs):
    """Of zero, a number below all others: autograd has no derivative at infinity."""
    return torch.where(probs > 0, torch.where(probs > 0, probs, 1).log(), -1e30)


def log_leave_one_out(Q, logits, x_t, t, x0_posterior):
    if x0_posterior == "leave_one_out":
        return logits.log_softmax(-1)
    evidence = likelihood(Q, x_t, 0, t)
    return torch.where(evidence > 0, logits - finite_log(evidence), -1e30).log_softmax(-1)


def log_reverse(Q, logits, x_t, s, t, x0_posterior="leave_one_out", reconstruction="posterior"):
    prediction = log_leave_one_out(Q, logits, x_t, t, x0_posterior)
    terms = prediction.unsqueeze(-1) + finite_log(between(Q, 0, s, x_t.shape))  # [B, ..., x_0, x_s]
    out = (terms.logsumexp(-2) + finite_log(likelihood(Q, x_t, s, t))).log_softmax(-1)
    if reconstruction == "raw":
        last = (torch.as_tensor(s).expand(len(x_t)) == 0).reshape(-1, *[1] * x_t.ndim)
        out = torch.where(last, logits.log_softmax(-1), out)
    return out


def log_variational(Q, logits, x_0, x_t, s, t, **options):
    out = log_reverse(Q, logits, x_t, s, t, **options)
    q = posterior(Q, x_0, x_t, s, t)
    return (torch.special.xlogy(q, q) - torch.where(q > 0, q * torch.where(q > 0, out, 0), 0)).sum(-1)


def log_cross_entropy(Q, logits, x_0, x_t, t, auxiliary="raw", x0_posterior="leave_one_out"):
    log_p = logits.log_softmax(-1)
    if auxiliary != "raw" and x0_posterior == "leave_one_out":
        log_p = (log_p + finite_log(likelihood(Q, x_t, 0, t))).log_softmax(-1)
    return -log_p.gather(-1, x_0.unsqueeze(-1)).squeeze(-1)


def prior_kl(Q, x_0, prior):
    return kl(marginal(Q, x_0, 0, len(Q)), prior.expand(*x_0.shape, -1))


def logistic_logits(loc, log_scale, num_classes):
    """log of cdf(upper edge) - cdf(lower edge) of each bin of [-1, 1], mirrored to the side where the cdf is small."""
    loc, scale = loc.double().unsqueeze(-1), torch.exp(log_scale.double().unsqueeze(-1) - 2)
    center = torch.linspace(-1, 1, num_classes, dtype=torch.float64) - loc
    half = 1 / (num_classes - 1)
    upper, lower = logsigmoid((-center.abs() + half) / scale), logsigmoid((-center.abs() - half) / scale)
    return upper + torch.log(-torch.expm1(lower - upper))


# --- a toy small enough to enumerate: L positions of K states with an arbitrary joint p(x_0) [K, ..., K] -------------
def states(num_classes, length):
    return torch.tensor(list(itertools.product(range(num_classes), repeat=length)))  # [K^L, L]


def toy_likelihood(Q, length, s, t):
    """q(x_t^i | x_s^i) for every pair of states and every position, [K^L (x_s), K^L (x_t), L]."""
    x = states(Q.shape[-1], length)
    matrices = stretch(Q, s, t).expand(length, -1, -1)
    return torch.stack([matrices[i][x[:, i][:, None], x[:, i]] for i in range(length)], -1)


def exact_prediction(Q, joint, t, x0_posterior):
    """The exact q(x_0^i | x_t without i), or q(x_0^i | x_t), for every x_t, [K^L, L, K]."""
    length, num_classes = joint.ndim, Q.shape[-1]
    x, factors = states(num_classes, length), toy_likelihood(Q, length, 0, t)
    out = torch.zeros(len(x), length, num_classes).double()
    for i in range(length):
        used = [j for j in range(length) if x0_posterior == "denoising" or j != i]
        weights = joint.reshape(-1, 1) * factors[..., used].prod(-1)  # [x_0, x_t]
        out[:, i].index_add_(1, x[:, i], weights.T)
    return normalize(out)


def toy_terms(Q, joint, t):
    """Every pair (x_0, x_t) with its weight p(x_0) q(x_t | x_0), the impossible ones left out."""
    x = states(Q.shape[-1], joint.ndim)
    weights = (joint.reshape(-1, 1) * toy_likelihood(Q, joint.ndim, 0, t).prod(-1)).flatten()
    pairs = torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(x)))[weights > 0]
    return x[pairs[:, 0]], x[pairs[:, 1]], pairs[:, 1], weights[weights > 0]


def best_bound(Q, joint, prior, times):
    """The least bound a factorised reverse process can reach over these times (0 = times[0] < ... < T), in nats.

    The best p(x_s | x_t) is the product over positions of the true q(x_s^i | x_t), got by summing over x_0.
    """
    x, length, num_classes = states(Q.shape[-1], joint.ndim), joint.ndim, Q.shape[-1]
    data = joint.flatten()
    total = (data * prior_kl(Q, x, prior).sum(-1))[data > 0].sum()
    for s, t in itertools.pairwise(times):
        pair = data[:, None] * toy_likelihood(Q, length, 0, t).prod(-1)  # [x_0, x_t]
        for i in range(length):
            row, column = stretch(Q, 0, s).expand(length, -1, -1)[i], stretch(Q, s, t).expand(length, -1, -1)[i]
            # q(x_s^i | x_t^i, x_0^i) for every (x_0, x_t)
            given = row[x[:, i]][:, None, :] * column.T[x[:, i]][None]
            given = torch.where(pair[..., None] > 0, given / given.sum(-1, keepdim=True), 0)
            true = torch.einsum("ab,abk->bk", pair / pair.sum(0).clamp_min(1e-300), given)  # q(x_s^i | x_t)
            total = total + (pair * kl(given, true.expand(len(x), -1, num_classes))).sum()
    return total


# --- draws -----------------------------------------------------------------------------------------------------------
def fit(draws, probs):
    """p-value of the chi-square test that draws [n, ...] come from probs [..., K]; 0 if the impossible was drawn."""
    counts = one_hot(draws, probs.shape[-1]).sum(0).double().flatten(0, -2)  # [rows, K]
    expected = probs.double().flatten(0, -2) * len(draws)
    if (counts[expected == 0] > 0).any():
        return 0.0
    statistic, freedom = 0.0, 0
    for seen, due in zip(counts, expected):
        rare = due < 5  # too few for the test: together they count as one cell
        seen, due = (torch.cat([v[~rare], v[rare].sum()[None]]) for v in (seen, due))
        statistic += ((seen - due) ** 2 / due)[due > 0].sum().item()
        freedom += int((due > 0).sum()) - 1
    return float(scipy.stats.chi2.sf(statistic, freedom)) if freedom else 1.0
