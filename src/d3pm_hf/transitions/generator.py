# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Continuous-time processes, Q_{s..t} = exp((abar_t - abar_s) R): nearest neighbours, and the user's own rates.

Both implementations expand the exponential in powers of a non-negative matrix, I + R / q: nothing cancels, so that
the smallest probabilities keep their relative precision and their logarithms can be trusted. A small vocabulary
gets matrices; a large one keeps R sparse and applies the exponential to the vectors of a batch.
"""

import warnings

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.stats import poisson
from tqdm.auto import tqdm

from ..sampling import check_generators, uniforms
from ..schedules import NUM_EXPONENTS, accumulate, entropy, mutual_information_exponents
from .base import Transition, divergence_terms, log_product
from .dense import DenseTransition, information


# A table of Qbar_t in float32 up to this size is kept; beyond it R stays sparse.
MAX_TABLE_BYTES = 1 << 28
# Vectors of a large vocabulary that are carried through an exponential at once: as many as stay in a cache.
VECTORS_AT_ONCE = 64
# States x_0 over which the entropy of x_t is averaged for the schedule of a large vocabulary.
NUM_INFORMATION_STATES = 512
# Probability of the jumps that are left out of an expansion.
TAIL = 1e-14


def nearest_neighbor_rates(embeddings: torch.Tensor, num_neighbors: int) -> torch.Tensor:
    """The paper's doubly stochastic rate matrix over the symmetrized k-nearest-neighbour graph, sparse `[K, K]`.

    A = (G + G') / (2k) with G_ij = 1 if i is one of the k nearest neighbours of j; R = A off the diagonal, and each
    row sums to zero.

    Args:
        embeddings: `[K, d]`; distances are Euclidean.
    """
    num_classes = len(embeddings)
    if not 1 <= num_neighbors < num_classes:
        raise ValueError(f"num_neighbors is {num_neighbors}: it must lie between 1 and {num_classes - 1}")
    embeddings = embeddings.double()
    neighbors = []
    for first in range(0, num_classes, 512):
        distances = torch.cdist(embeddings[first : first + 512], embeddings)
        own = torch.arange(len(distances))
        distances[own, first + own] = torch.inf  # by position: two words may share an embedding
        neighbors.append(distances.topk(num_neighbors, largest=False).indices)
    neighbors = torch.cat(neighbors)  # [K, k]
    pairs = torch.stack([torch.arange(num_classes).repeat_interleave(num_neighbors), neighbors.flatten()])
    weight = torch.full((pairs.shape[1],), 1 / (2 * num_neighbors), dtype=torch.float64)
    return rates_from_adjacency(torch.cat([pairs, pairs.flip(0)], 1), weight.repeat(2), num_classes)


def rates_from_adjacency(pairs: torch.Tensor, weights: torch.Tensor, num_classes: int) -> torch.Tensor:
    """The sparse rate matrix that leaves i for j at the given rate, with a diagonal that makes rows sum to zero."""
    leaving = torch.zeros(num_classes, dtype=torch.float64).index_add_(0, pairs[0], weights)
    diagonal = torch.arange(num_classes).expand(2, -1)
    indices, values = torch.cat([pairs, diagonal], 1), torch.cat([weights, -leaving])
    return torch.sparse_coo_tensor(indices, values, (num_classes, num_classes), check_invariants=True).coalesce()


def add_absorbing_state(rates: torch.Tensor, mask_rate: float, mask_token_id: int) -> torch.Tensor:
    """Rates over one more state, put in at `mask_token_id`, which every other moves to at `mask_rate` and none leaves."""
    rates, num_tokens = rates.coalesce(), len(rates)
    states = torch.arange(num_tokens) + (torch.arange(num_tokens) >= mask_token_id)  # the tokens' new numbers
    pairs, values = states[rates.indices()], rates.values()
    moves = pairs[0] != pairs[1]
    to_mask = torch.stack([states, torch.full_like(states, mask_token_id)])
    return rates_from_adjacency(
        torch.cat([pairs[:, moves], to_mask], 1),
        torch.cat([values[moves], torch.full((num_tokens,), mask_rate, dtype=torch.float64)]),
        num_tokens + 1,
    )


def check_rates(rates: torch.Tensor) -> torch.Tensor:
    """A rate matrix as coalesced float64, or a sentence about what is wrong with it."""
    rates = (rates if rates.is_sparse else rates.to_sparse_coo()).double().coalesce()
    (rows, columns), values = rates.indices(), rates.values()
    if rates.shape[0] != rates.shape[1]:
        raise ValueError(f"a rate matrix of shape {tuple(rates.shape)}: it must be square")
    negative = (rows != columns) & ~(values >= 0)
    if negative.any():
        i, j = rates.indices()[:, negative][:, 0].tolist()
        raise ValueError(f"the rate from state {i} to state {j} is negative: off the diagonal rates are >= 0")
    sums = torch.zeros(len(rates), dtype=torch.float64).index_add_(0, rows, values)
    if sums.abs().max() > 1e-5:
        row = int(sums.abs().argmax())
        raise ValueError(f"row {row} of the rate matrix sums to {sums[row].item():.4g}: every row must sum to zero")
    moves = rows != columns
    return rates_from_adjacency(rates.indices()[:, moves], values[moves], len(rates))


def stationary_distribution(rates: torch.Tensor) -> torch.Tensor:
    """pi with pi R = 0, `[K]`, for a process that forgets where it began; refuses one that does not."""
    num_classes = len(rates)
    (rows, columns), values = rates.indices().numpy(), rates.values().numpy()
    graph = coo_array((values != 0, (rows, columns)), shape=rates.shape)
    num_components, label = connected_components(graph, connection="strong")
    leaks = np.zeros(num_components, dtype=bool)
    leaks[label[rows[label[rows] != label[columns]]]] = True
    closed = np.flatnonzero(~leaks)
    if len(closed) > 1:
        raise ValueError(
            f"the states fall into {len(closed)} groups that never mix, so that there is no common distribution to "
            "end in: raise num_neighbors, or connect the groups"
        )
    members = np.flatnonzero(label == closed[0])
    pi = torch.zeros(num_classes, dtype=torch.float64)
    column_sums = torch.zeros(num_classes, dtype=torch.float64).index_add_(0, rates.indices()[1], rates.values())
    if len(members) == num_classes and column_sums.abs().max() < 1e-9 or len(members) == 1:
        pi[members] = 1 / len(members)
        return pi
    # Replace one equation of pi R = 0 by sum(pi) = 1, on the states that are not left for good.
    system = rates.to_dense().T[members][:, members].clone()
    system[-1] = 1
    target = torch.zeros(len(members), dtype=torch.float64)
    target[-1] = 1
    pi[members] = torch.linalg.solve(system, target).clamp(min=0)
    return pi / pi.sum()


def expm(rates: torch.Tensor, stationary: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """exp(a R) for each exponent a in [0, inf], float64, `[n, K, K]`.

    Scaling and squaring of exp(-aq) exp(a (R + q I)), in which every entry of every power is non-negative.
    """
    identity = torch.eye(len(rates), dtype=torch.float64, device=rates.device)
    fastest = (-rates.diagonal()).max()
    finite = exponents.masked_fill(torch.isinf(exponents), 0)
    squarings = int(np.ceil(np.log2(max(1.0, (finite.max() * fastest).item()))))
    scaled = (finite / 2**squarings)[:, None, None]
    power = scaled * (rates + fastest * identity)
    total = identity.expand_as(power)
    for k in range(18, 0, -1):  # Horner's scheme: the norm is at most one, and 1/18! is below rounding
        total = identity + (power / k) @ total
    total = total * torch.exp(-scaled * fastest)
    for _ in range(squarings):
        total = total @ total
    total = total / total.sum(-1, keepdim=True)
    return torch.where(torch.isinf(exponents)[:, None, None], stationary, total)


class DenseRateTransition(DenseTransition):
    """exp(a R) as matrices: for vocabularies of up to a few hundred states."""

    def __init__(self, rates: torch.Tensor, exponents: torch.Tensor):
        super().__init__(len(rates), len(exponents))
        rates = check_rates(rates)
        self.stationary = stationary_distribution(rates)
        self.log_prior = self.stationary.log()
        self.rates, self.exponents = rates.to_dense(), exponents.double()

    def log_step_matrices(self, t):
        exponents = self.table("exponents", t.device)[t - 1]
        return expm(self.table("rates", t.device), self.table("stationary", t.device), exponents).log()

    def log_stretch(self, s, t):
        return expm(self.rates, self.stationary, self.exponents[s:t].sum()[None])[0].log()


class SparseRateTransition(Transition):
    """exp(a R) applied to vectors by uniformization, for large vocabularies; no [K, K] is ever built.

    exp(a R) = sum_k Poisson(k; q a) P^k,   P = I + R / q,   q = the fastest rate of leaving a state
    """

    min_rows = 256  # fewer vectors at a time would waste the walk over R

    def __init__(self, rates: torch.Tensor, exponents: torch.Tensor):
        super().__init__()
        rates = check_rates(rates)
        self.num_classes, self.num_steps = len(rates), len(exponents)
        self.stationary = stationary_distribution(rates)
        self.log_prior = self.log_stationary = self.stationary.log()
        (rows, columns), values = rates.indices(), rates.values()
        self.fastest = -values[rows == columns].min().item()
        chances = torch.where(rows == columns, 1 + values / self.fastest, values / self.fastest)
        jumps = torch.sparse_coo_tensor(rates.indices(), chances, rates.shape, check_invariants=True).coalesce()  # P
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            # Row vectors times P, and P times columns, as products with a sparse matrix on the left.
            self.jumps_from, self.jumps_to = jumps.T.to_sparse_csr(), jumps.to_sparse_csr()
        # The CDFs of the rows of P make one ascending sequence when row i is lifted by i: a jump is one search in it.
        ends = jumps.values().cumsum(0)[torch.searchsorted(rows, torch.arange(len(rates)), right=True) - 1]
        self.jump_ladder = jumps.values().cumsum(0) + (torch.arange(1, len(rates) + 1) - ends)[rows]
        self.jump_columns = columns.clone()
        self.cumulative_exponents, self.num_forgotten = accumulate(exponents)  # [T+1]

    def _exponent(self, s, t, count: int) -> torch.Tensor:
        """The exponent of the stretch s..t for each of `count` samples, float64, on the CPU."""
        s, t = (torch.as_tensor(n).cpu() for n in (t - 1 if s is None else s, t))
        exponents = self.cumulative_exponents[t] - self.cumulative_exponents[s]
        return exponents.masked_fill(self.num_forgotten[s] != self.num_forgotten[t], torch.inf).expand(count)

    def _apply(self, vectors: torch.Tensor, exponents: torch.Tensor, transposed: bool) -> torch.Tensor:
        """Each vector `[n, K]` times exp(a R), or exp(a R) times it if `transposed`, for its own exponent `[n]`."""
        parts = zip(vectors.split(VECTORS_AT_ONCE), exponents.split(VECTORS_AT_ONCE))
        return torch.cat([self._expand(*part, transposed) for part in parts])

    def _expand(self, vectors: torch.Tensor, exponents: torch.Tensor, transposed: bool) -> torch.Tensor:
        jumps = self.table("jumps_to" if transposed else "jumps_from", vectors.device, vectors.dtype)
        stationary = self.table("stationary", vectors.device, vectors.dtype)
        forgets = torch.isinf(exponents)
        mean = self.fastest * exponents.masked_fill(forgets, 0).numpy()
        num_terms = int(poisson.isf(TAIL, mean.max())) + 1
        weights = torch.from_numpy(poisson.pmf(np.arange(num_terms + 1)[:, None], mean)).to(vectors)  # [terms, n]
        power = vectors.T.contiguous()  # [K, n]
        total = weights[0] * power
        for weight in weights[1:]:
            power = jumps @ power
            total.addcmul_(power, weight)
        if transposed:
            limit = (stationary @ vectors.T).expand(self.num_classes, -1)
        else:
            limit = stationary[:, None] * vectors.sum(-1)
        return torch.where(forgets.to(vectors.device), limit, total).T

    def _one_hot(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = torch.zeros(x.numel(), self.num_classes, dtype=dtype, device=x.device)
        return rows.scatter_(-1, x.reshape(-1, 1), 1)

    def sample(self, x_0, t, generator=None):
        """Follows the jumps of each element: as many as a Poisson variable says, each one search in the rows of P."""
        if isinstance(generator, (list, tuple)):
            check_generators(generator, len(x_0))
            times = torch.as_tensor(t).expand(len(x_0))
            parts = zip(x_0.split(1), times.split(1), generator)
            return torch.cat([self.sample(*part) for part in parts])
        exponents = self._exponent(0, t, len(x_0))
        forgets = torch.isinf(exponents)
        mean = self.fastest * exponents.masked_fill(forgets, 0).numpy()
        u_count, u_fresh = uniforms((2, *x_0.shape), generator, x_0.device)
        num_terms = int(poisson.isf(TAIL, mean.max())) + 1
        cdf = torch.from_numpy(poisson.cdf(np.arange(num_terms), mean[:, None])).to(u_count)  # [B, terms]
        left = torch.searchsorted(cdf, u_count.reshape(len(x_0), -1), right=True).view_as(x_0)  # jumps to make
        ladder, columns = self.table("jump_ladder", x_0.device), self.table("jump_columns", x_0.device)
        x = x_0
        for _ in range(int(left.max())):
            found = torch.searchsorted(ladder, x + uniforms(x.shape, generator, x.device), right=True)
            x = torch.where(left > 0, columns[found.clamp_(max=len(columns) - 1)], x)
            left = left - 1
        cumulative = self.table("stationary", x_0.device).cumsum(0)
        fresh = torch.searchsorted(cumulative / cumulative[-1], u_fresh, right=True)
        return torch.where(forgets.to(x.device).reshape(-1, *[1] * (x.ndim - 1)), fresh, x)

    def reveal(self, x_0, t):
        """x_0 itself, unless all is forgotten and the stationary distribution does not hold it."""
        if not self.num_forgotten[t]:
            return x_0
        return self._unless(self.table("stationary", x_0.device)[x_0] > 0, x_0, t)

    def log_marginal(self, x, s, t, dtype=torch.float32):
        is_state = not x.is_floating_point()
        exponents = self._exponent(s, t, len(x)).repeat_interleave(x[0].numel() // (1 if is_state else x.shape[-1]))
        if is_state:
            return self._apply(self._one_hot(x, dtype), exponents, transposed=False).log().view(*x.shape, -1)
        product = log_product(x.flatten(0, -2), lambda p: self._apply(p, exponents, transposed=False))
        return product.to(x.dtype).view_as(x)

    def log_likelihood(self, x_t, s, t, dtype=torch.float32):
        exponents = self._exponent(s, t, len(x_t)).repeat_interleave(x_t[0].numel())
        columns = self._apply(self._one_hot(x_t, dtype), exponents, transposed=True)
        return columns.log().view(*x_t.shape, -1)

    def operators(self, s, t, dtype: torch.dtype, table_dtype: torch.dtype, device) -> "SparseOperators":
        """What the posterior of some samples is made of, for times `[b]`. There are no tables, in any precision."""
        before = t - 1 if s is None else s
        return SparseOperators(self, self._exponent(0, before, len(t)), self._exponent(s, t, len(t)), dtype)

    def matrix(self, s, t):
        states = torch.arange(self.num_classes)[None]
        return self.log_marginal(states, s, t, torch.float64)[0].exp()

    def prior_divergence(self, x_0):
        tokens, inverse = x_0.unique(return_inverse=True)
        if self.num_forgotten[-1]:
            log_q = self.table("log_stationary", x_0.device).expand(len(tokens), -1)
        else:
            log_q = self.log_marginal(tokens[None], 0, self.num_steps, torch.float64)[0]
        return divergence_terms(log_q, self.table("log_prior", x_0.device)).sum(-1)[inverse]


class SparseOperators:
    """The same as `DenseOperators`, with the series applied to each vector."""

    def __init__(
        self, process: SparseRateTransition, cumulative: torch.Tensor, step: torch.Tensor, dtype: torch.dtype
    ):
        self._process, self._cumulative, self._step, self._dtype = process, cumulative, step, dtype

    def _apply(self, vectors, exponents, transposed):
        exponents = exponents.repeat_interleave(vectors.shape[1])
        return self._process._apply(vectors.flatten(0, 1), exponents, transposed).view_as(vectors)

    def row(self, x_0):
        one_hot = self._process._one_hot(x_0, self._dtype).view(*x_0.shape, -1)
        return self._apply(one_hot, self._cumulative, transposed=False)

    def column(self, x_t):
        one_hot = self._process._one_hot(x_t, self._dtype).view(*x_t.shape, -1)
        return self._apply(one_hot, self._step, transposed=True)

    def forward(self, vectors):
        return self._apply(vectors, self._cumulative, transposed=False)

    def backward(self, vectors):
        return self._apply(vectors, self._cumulative, transposed=True)


def rate_transition(rates: torch.Tensor, exponents: torch.Tensor) -> Transition:
    """The process with the rate matrix `[K, K]` (dense or sparse), as matrices where their table is small."""
    fits = (len(exponents) + 1) * len(rates) ** 2 * 4 <= MAX_TABLE_BYTES
    return (DenseRateTransition if fits else SparseRateTransition)(rates, exponents)


def rate_information_exponents(rates: torch.Tensor, unigram: torch.Tensor, num_steps: int) -> torch.Tensor:
    """The mutual-information schedule of the process with this rate matrix."""
    rates = check_rates(rates)
    if len(rates) <= 2 * NUM_INFORMATION_STATES:
        return mutual_information_exponents(lambda a: _lost_by_matrices(rates, unigram, a), num_steps)
    return mutual_information_exponents(
        lambda a: _lost_by_vectors(rates, unigram, a, enough=1 - 0.5 / num_steps),
        num_steps,
        num_exponents=NUM_EXPONENTS // 4,
    )


def _lost_by_matrices(rates: torch.Tensor, unigram: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """1 - I(x_t; x_0) / H(x_0) after the cumulative exponents `[n]`."""
    stationary, dense = stationary_distribution(rates), rates.to_dense()
    left = [information(unigram, expm(dense, stationary, part)) for part in exponents.split(16)]
    return 1 - torch.cat(left) / entropy(unigram)


def _lost_by_vectors(
    rates: torch.Tensor, unigram: torch.Tensor, exponents: torch.Tensor, enough: float
) -> torch.Tensor:
    """The same for a large vocabulary: H(x_t) is exact, H(x_t | x_0) an average over some x_0.

    The most frequent half of those count with their weight. The others stand for equal shares of all the rest, ordered by
    how fast a state is left, which is what its entropy depends on most. The vectors are carried from one exponent to the
    next, until `enough` is lost; what comes after counts as all.
    """
    process = SparseRateTransition(rates, torch.zeros(1, dtype=torch.float64))
    half = NUM_INFORMATION_STATES // 2
    order = unigram.argsort(descending=True)
    head, tail = order[:half], order[half:]
    (rows, columns), values = rates.indices(), rates.values()
    tail = tail[values[rows == columns][tail].argsort()]
    shares = (torch.arange(half, dtype=torch.float64) + 0.5) / half
    picked = torch.searchsorted(unigram[tail].cumsum(0) / unigram[tail].sum(), shares).clamp_(max=len(tail) - 1)
    weights = torch.cat([unigram[head], (unigram[tail].sum() / half).expand(half)])
    vectors = torch.cat([unigram[None].float(), process._one_hot(torch.cat([head, tail[picked]]), torch.float32)])
    lost = torch.ones_like(exponents)
    before = 0.0
    for i, exponent in enumerate(tqdm(exponents.tolist(), desc="mutual-information schedule", delay=2, leave=False)):
        vectors = process._apply(vectors, torch.full((len(vectors),), exponent - before).double(), transposed=False)
        before = exponent
        entropies = entropy(vectors.double())
        lost[i] = 1 - (entropies[0] - weights @ entropies[1:]) / entropy(unigram)
        if lost[i] > enough:
            break
    return lost
