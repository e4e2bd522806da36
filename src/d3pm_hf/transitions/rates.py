# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Continuous-time processes, Q_{s..t} = exp((abar_t - abar_s) R): nearest neighbors, and the user's own rates.

Both implementations expand the exponential in powers of a non-negative matrix, P = I + R / q:

    exp(a R) = sum_k Poisson(k; q a) P^k,   q = the fastest rate of leaving a state

Nothing cancels, and the series goes on until what is left out is below the rounding of the smallest entry: every
probability keeps its relative precision, and its logarithm can be trusted. A small vocabulary gets matrices; a large one
keeps R sparse and applies the exponential to the vectors of a batch.
"""

import math
import warnings
from functools import cached_property

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.special import gammaln, xlogy
from scipy.stats import poisson
from tqdm.auto import tqdm

from ..numerics import check_generators, uniforms
from ..schedules import NUM_EXPONENTS, accumulate, check_exponents, entropy, mutual_information_exponents
from ..utils.checks import check_type
from .base import Transition, divergence_terms, log_matmul
from .dense import STEP_BYTES, DenseTransition, information


# A table of Qbar_t in float32 up to this size is kept; beyond it R stays sparse.
MAX_TABLE_BYTES = 1 << 28
# So is that of a sparse R whose T products of matrices take up to this many multiplications, which is a few seconds.
MAX_TABLE_PRODUCTS = 1 << 33
# Vectors of a large vocabulary that are carried through an exponential at once: as many as stay in a cache.
VECTORS_AT_ONCE = 64
# States x_0 over which the entropy of x_t is averaged for the schedule of a large vocabulary.
NUM_INFORMATION_STATES = 512
# What may be left out of a series, relative to the result: its logarithm.
LOG_PRECISION = math.log(1e-14)
# Probabilities below the first are lost in the sums of a loss; where they matter, the loss is computed in logarithms.
LOG_NEGLIGIBLE = {torch.float32: math.log(1e-22), torch.float64: math.log(1e-112)}
# A series in float32, or float64, has lost none of its terms if the smallest entry is above this, for vectors of size one.
SAFE = {torch.float32: 1e-25, torch.float64: 1e-280}
# The parts of a vector that are carried at once differ by at most exp of this.
MAGNITUDE = 300.0
# Vectors are multiplied by this on the way, so that float64 holds small powers of P as long as large ones.
SCALE = 1e150


def log_poisson(k: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """log of the probability of k events."""
    return xlogy(k, mean) - mean - gammaln(k + 1.0)


def num_jumps(mean: np.ndarray, log_tail: np.ndarray | float) -> int:
    """The least n for which more than n events of any of the Poisson variables have a probability below exp(log_tail).

    P(more than n) <= P(n + 1) / (1 - mean / (n + 2)) for n + 1 >= mean.
    """
    mean, log_tail = np.broadcast_arrays(np.asarray(mean, dtype=float), log_tail)

    def is_enough(n):
        return log_poisson(n + 1, mean) - np.log1p(-mean / (n + 2)) <= log_tail

    high = low = np.ceil(mean)
    while not is_enough(high).all():
        high = low + 2 * (high - low) + 16
    while (high > low).any():
        middle = (low + high) // 2
        low, high = np.where(is_enough(middle), (low, middle), (middle + 1, high))
    return int(high.max())


def by_magnitude(log_p: torch.Tensor):
    """Cuts vectors `[n, K]` into parts that float64 can carry, from their largest entries down.

    Yields log c `[n, 1]`, p / c `[n, K]` for the states whose p is between c exp(-300) and c, all others being zero, and
    the logarithm of the largest entry that is left, `[n, 1]`.
    """
    rest = log_p.double()
    top = rest.amax(-1, keepdim=True)
    while (top > -torch.inf).any():
        inside = (rest > top - MAGNITUDE) & (rest > -torch.inf)
        part = torch.where(inside, rest - top, -torch.inf).exp()
        rest = rest.masked_fill(inside, -torch.inf)
        left = rest.amax(-1, keepdim=True)
        yield top, part, left
        top = left


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
    check_type("the rate matrix", rates, torch.Tensor, "a tensor, dense or sparse")
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


def log_power_series(rates: torch.Tensor) -> torch.Tensor:
    """log P^0, ..., log P^N, `[N+1, K, K]`, for as many terms as exp(a R) needs in any entry, if q a <= 1.

    An entry that d jumps lead to is at least Poisson(d) [P^d]_ij, and all that comes after N is at most Poisson(N+1) e.
    """
    num_classes = len(rates)
    chances = rates / -rates.diagonal().min() + torch.eye(num_classes, dtype=torch.float64)
    log_chances = chances.clamp(min=0).log()
    powers = [torch.eye(num_classes, dtype=torch.float64).log()]
    reached = powers[0] > -torch.inf
    log_needed = -LOG_PRECISION + 1  # of N!
    with tqdm(desc="powers of the rate matrix", delay=2, leave=False) as progress:
        while True:
            power = log_matmul(powers[-1][None], log_chances[None])[0]
            new = (power > -torch.inf) & ~reached
            if new.any():
                log_needed = max(
                    log_needed, -LOG_PRECISION + 1 + math.lgamma(len(powers) + 1) - power[new].min().item()
                )
            elif math.lgamma(len(powers) + 1) >= log_needed:
                return torch.stack(powers)
            reached |= new
            powers.append(power)
            progress.update()


class DenseRateTransition(DenseTransition):
    """exp(a R) as matrices: for vocabularies of up to a few hundred states."""

    def __init__(self, rates: torch.Tensor, exponents: torch.Tensor):
        rates, exponents = check_rates(rates), check_exponents(exponents)
        super().__init__(len(rates), len(exponents))
        self.stationary = stationary_distribution(rates)
        self.log_prior = self.log_stationary = self.stationary.log()
        self.rates, self.exponents = rates.to_dense(), exponents.double()
        self.fastest = -self.rates.diagonal().min().item()

    @cached_property
    def log_powers(self) -> torch.Tensor:
        return log_power_series(self.rates)

    def log_exponentials(self, exponents: torch.Tensor) -> torch.Tensor:
        """log exp(a R) for each exponent a in [0, inf], float64, `[n, K, K]`: a series for q a <= 1, then squarings."""
        forgets = torch.isinf(exponents)
        mean = self.fastest * exponents.masked_fill(forgets, 0)  # [n]
        squarings = mean.clamp(min=1).log2().ceil()
        log_powers = self.table("log_powers", exponents.device)
        k = torch.arange(len(log_powers), dtype=torch.float64, device=exponents.device)
        scaled = (mean / 2**squarings)[:, None]
        log_weights = torch.special.xlogy(k, scaled) - scaled - torch.lgamma(k + 1)  # [n, N+1]
        total = log_matmul(log_weights[None], log_powers.flatten(1)[None]).view(-1, *log_powers.shape[1:])
        for n in range(int(squarings.max())):
            again = squarings > n
            total[again] = log_matmul(total[again], total[again])
        total = total - total.logsumexp(-1, keepdim=True)
        return torch.where(forgets[:, None, None], self.table("log_stationary", exponents.device), total)

    def log_step_matrices(self, t):
        return self.log_exponentials(self.table("exponents", t.device)[t - 1])

    def log_stretch(self, s, t):
        return self.log_exponentials(self.exponents[s:t].sum()[None])[0]

    def _log_after_all(self, log_p):
        return log_matmul(log_p[None], self.log_stretch(0, self.num_steps)[None])[0]


class SparseRateTransition(Transition):
    """exp(a R) applied to vectors by uniformization, for large vocabularies; no [K, K] is ever built."""

    fused_loss = "matrix"
    min_rows = 256  # fewer vectors at a time would waste the walk over R

    def __init__(self, rates: torch.Tensor, exponents: torch.Tensor):
        super().__init__()
        rates, exponents = check_rates(rates), check_exponents(exponents)
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
        """Each vector `[n, K]` times exp(a R), or exp(a R) times it if `transposed`, for its own exponent `[n]`.

        What is below the rounding of the largest entries, and too small for a loss to see, may be missing.
        """
        parts = zip(vectors.split(VECTORS_AT_ONCE), exponents.split(VECTORS_AT_ONCE))
        return torch.cat([self._expand(*part, transposed) for part in parts])

    def _log_apply(self, log_vectors, exponents, transposed: bool, dtype=torch.float64, log_floor=None):
        """The same in logarithms, to the relative precision of `dtype` in every entry, float64 or `dtype`.

        Entries below `log_floor` `[n, K]` are not needed.
        """
        floors = [None] * len(log_vectors) if log_floor is None else log_floor.split(VECTORS_AT_ONCE)
        parts = zip(log_vectors.split(VECTORS_AT_ONCE), exponents.split(VECTORS_AT_ONCE), floors)
        return torch.cat([self._log_expand(vectors, a, transposed, dtype, floor) for vectors, a, floor in parts])

    def _mean(self, exponents: torch.Tensor) -> np.ndarray:
        """q a, the mean number of jumps; zero where everything is forgotten."""
        return self.fastest * exponents.masked_fill(torch.isinf(exponents), 0).numpy()

    def _limit(self, vectors: torch.Tensor, transposed: bool) -> torch.Tensor:
        """The vectors `[n, K]` after infinite time, `[K, n]`."""
        stationary = self.table("stationary", vectors.device, vectors.dtype)
        if transposed:
            return (stationary @ vectors.T).expand(self.num_classes, -1)
        return stationary[:, None] * vectors.sum(-1)

    def _jumps(self, vectors: torch.Tensor, transposed: bool) -> torch.Tensor:
        return self.table("jumps_to" if transposed else "jumps_from", vectors.device, vectors.dtype)

    def _expand(self, vectors: torch.Tensor, exponents: torch.Tensor, transposed: bool) -> torch.Tensor:
        jumps, mean = self._jumps(vectors, transposed), self._mean(exponents)
        power = vectors.T.contiguous()  # [K, n]
        total, first = torch.zeros_like(power), 0
        for log_tail in (LOG_PRECISION, LOG_NEGLIGIBLE[vectors.dtype]):
            last = num_jumps(mean, log_tail)
            weights = np.exp(log_poisson(np.arange(first, last + 1)[:, None], mean))
            weights = torch.from_numpy(np.where(weights < torch.finfo(vectors.dtype).tiny, 0, weights)).to(vectors)
            for k, weight in enumerate(weights, first):
                power = jumps @ power if k else power
                total.addcmul_(power, weight)
            first = last + 1
            if total.amin() > 1e8 * math.exp(log_tail):
                break
        forgets = torch.isinf(exponents).to(vectors.device)
        return torch.where(forgets, self._limit(vectors, transposed), total).T

    def _log_expand(self, log_vectors, exponents, transposed, dtype, log_floor):
        result = torch.full_like(log_vectors, -torch.inf, dtype=torch.float64)
        for top, part, left in by_magnitude(log_vectors):
            result = torch.logaddexp(result, top + self._log_series(part, exponents, transposed, dtype))
            # No entry of exp(a R) is above one: all that is left adds at most this.
            bound = left + math.log(self.num_classes)
            done = result > bound - LOG_PRECISION
            if (done if log_floor is None else done | (bound < log_floor)).all():
                break
        return result.to(dtype)

    def _log_series(self, vectors: torch.Tensor, exponents: torch.Tensor, transposed: bool, dtype) -> torch.Tensor:
        """log of vectors `[n, K]` with entries in [0, 1] times exp(a R): as fast as their size allows, float64."""
        forgets, stays = torch.isinf(exponents).to(vectors.device), (exponents == 0).to(vectors.device)
        for in_dtype, in_logarithms in [(dtype, False), (torch.float64, False), (torch.float64, True)]:
            total = self._sum_series(vectors.to(in_dtype), exponents, transposed, in_logarithms)
            if total is not None:
                break
        total = torch.where(forgets, self._limit(vectors, transposed).log(), total.double())
        return torch.where(stays, vectors.T.log(), total).T

    def _sum_series(self, vectors: torch.Tensor, exponents: torch.Tensor, transposed: bool, in_logarithms: bool):
        """log of the sum, `[K, n]`, or `None` if one of its entries is too small for sums of this dtype.

        The series ends when its last jump has reached no new state, and what comes after is below the rounding of the
        smallest entry.
        """
        jumps, mean = self._jumps(vectors, transposed), self._mean(exponents)
        moves = torch.from_numpy(mean > 0).to(vectors.device)
        scale = SCALE if vectors.dtype == torch.float64 else 1.0
        power = scale * vectors.T.contiguous()  # [K, n]
        mass = vectors.detach().amax(-1) if transposed else vectors.detach().sum(-1)
        log_mass = mass.double().log().cpu().numpy()
        zero = -torch.inf if in_logarithms else 0.0
        total = torch.full_like(power, zero)
        reached = torch.zeros_like(power, dtype=torch.bool)  # by jumps that came with a weight of zero
        k, last = 0, num_jumps(mean, LOG_PRECISION)
        while True:
            log_weight = log_poisson(k, mean)
            before = total > zero if k >= last else None
            if in_logarithms:
                total = torch.logaddexp(total, power.log() + torch.from_numpy(log_weight).to(vectors))
            else:
                lost = log_weight < math.log(torch.finfo(vectors.dtype).tiny)
                total.addcmul_(power, torch.from_numpy(np.where(lost, 0, np.exp(log_weight))).to(vectors))
                reached |= (power > 0) if lost.any() else reached
            if k >= last:
                is_new = (power > 0) & ~before & moves
                smallest = torch.where((before | reached | is_new) & moves, total.detach(), torch.inf).amin(0)  # [n]
                if not in_logarithms:
                    if not (smallest > SAFE[vectors.dtype]).all():
                        return None
                    smallest = smallest.log()
                smallest = (smallest.double() - math.log(scale)).clamp(max=0).cpu().numpy()
                last = num_jumps(mean, LOG_PRECISION + smallest - log_mass)
                if k >= last and not is_new.any():
                    return (total if in_logarithms else total.log()) - math.log(scale)
                last = max(last, k + 1)
            power = jumps @ power
            k += 1

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
        forgets, mean = torch.isinf(exponents), self._mean(exponents)
        u_count, u_fresh = uniforms((2, *x_0.shape), generator, x_0.device)
        num_terms = num_jumps(mean, math.log(1e-17)) + 1  # a uniform of float64 is never so near to one
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
        log_p = self._one_hot(x, torch.float64).log() if is_state else x.flatten(0, -2)
        dtype = dtype if is_state else x.dtype
        return self._log_apply(log_p, exponents, transposed=False, dtype=dtype).view(
            *x.shape[: x.ndim - (not is_state)], -1
        )

    def log_likelihood(self, x_t, s, t, dtype=torch.float32):
        exponents = self._exponent(s, t, len(x_t)).repeat_interleave(x_t[0].numel())
        one_hot = self._one_hot(x_t, torch.float64).log()
        return self._log_apply(one_hot, exponents, transposed=True, dtype=dtype).view(*x_t.shape, -1)

    def operators(self, s, t, dtype: torch.dtype, table_dtype: torch.dtype, device) -> "SparseOperators":
        """What the posterior of some samples is made of, for times `[b]`. There are no tables, in any precision."""
        before = t - 1 if s is None else s
        return SparseOperators(self, self._exponent(0, before, len(t)), self._exponent(s, t, len(t)), dtype)

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

    def _log_apply(self, log_vectors, exponents, transposed, log_floor=None):
        exponents = exponents.repeat_interleave(log_vectors.shape[1])
        log_floor = None if log_floor is None else log_floor.flatten(0, 1)
        flat = log_vectors.flatten(0, 1)
        return self._process._log_apply(flat, exponents, transposed, log_floor=log_floor).view_as(log_vectors)

    def log_row(self, x_0):
        one_hot = self._process._one_hot(x_0, torch.float64).view(*x_0.shape, -1)
        return self._log_apply(one_hot.log(), self._cumulative, transposed=False)

    def log_column(self, x_t):
        one_hot = self._process._one_hot(x_t, torch.float64).view(*x_t.shape, -1)
        return self._log_apply(one_hot.log(), self._step, transposed=True)

    def log_forward(self, log_vectors, log_floor):
        return self._log_apply(log_vectors, self._cumulative, False, log_floor)

    def log_backward(self, log_vectors, log_floor):
        return self._log_apply(log_vectors, self._cumulative, True, log_floor)


def rate_transition(rates: torch.Tensor, exponents: torch.Tensor) -> Transition:
    """The process with the rate matrix `[K, K]` (dense or sparse): as matrices where they are soon made, else sparse."""
    num_classes, num_steps = len(rates), len(exponents)
    fits = (num_steps + 1) * num_classes**2 * 4 <= MAX_TABLE_BYTES
    num_rates = rates.coalesce().values().numel() if rates.is_sparse else int(rates.count_nonzero())
    is_sparse = num_rates < num_classes**2 / 8
    is_soon = num_steps * num_classes**3 <= MAX_TABLE_PRODUCTS
    return (DenseRateTransition if fits and (is_soon or not is_sparse) else SparseRateTransition)(rates, exponents)


def rate_information_exponents(rates: torch.Tensor, unigram: torch.Tensor, num_steps: int) -> torch.Tensor:
    """The mutual-information schedule of the process with this rate matrix."""
    rates, enough = check_rates(rates), 1 - 0.5 / num_steps
    if len(rates) <= NUM_INFORMATION_STATES:
        return mutual_information_exponents(lambda a: _lost_by_matrices(rates, unigram, a, enough), num_steps)
    return mutual_information_exponents(
        lambda a: _lost_by_vectors(rates, unigram, a, enough), num_steps, num_exponents=NUM_EXPONENTS // 4
    )


def _lost_by_matrices(
    rates: torch.Tensor, unigram: torch.Tensor, exponents: torch.Tensor, enough: float = torch.inf
) -> torch.Tensor:
    """1 - I(x_t; x_0) / H(x_0) after the cumulative exponents `[n]`, ascending; once `enough` is lost, 1."""
    process = DenseRateTransition(rates, torch.zeros(1, dtype=torch.float64))
    lost = torch.ones_like(exponents)
    parts = torch.arange(len(exponents)).split(max(1, STEP_BYTES // (8 * len(rates) ** 2)))
    for part in tqdm(parts, desc="mutual-information schedule", delay=2, leave=False):
        matrices = process.log_exponentials(exponents[part]).exp()
        lost[part] = 1 - information(unigram, matrices) / entropy(unigram)
        if lost[part[-1]] > enough:
            break
    return lost


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
