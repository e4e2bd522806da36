# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""exp(a R) applied to vectors, for large vocabularies: the series of `dense_rates`, with R sparse."""

import math
import warnings

import numpy as np
import torch
from scipy.special import gammaln, xlogy

from ..numerics import safe_log, safe_logaddexp, wide_dtype, with_float64
from ..schedules import accumulate
from .base import Transition
from .dense_rates import LOG_PRECISION
from .kernel import keeps
from .rate_matrices import check_rates, stationary_distribution


# The parts of a vector that are carried at once differ by at most exp of this.
MAGNITUDE = 300.0
# Vectors are multiplied by this on the way, so that float64 holds small powers of P as long as large ones.
SCALE = 1e150


def log_poisson(k: np.ndarray | int, mean: np.ndarray) -> np.ndarray:
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


class SparseRateTransition(Transition):
    """exp(a R) applied to the vectors of a batch, for large vocabularies; no [K, K] is ever built.

    Examples:
        ```python
        import torch
        from d3pm_hf.transitions import SparseRateTransition

        rates = torch.tensor([[-1.0, 1.0], [1.0, -1.0]]).to_sparse()
        process = SparseRateTransition(rates, exponents=torch.tensor([0.1, 0.2]))
        x_t = process.sample(torch.zeros(1, 4, dtype=torch.long), 2)
        ```
    """

    @property
    def is_alike(self):
        return keeps(type(self), SparseRateTransition, ("log_marginal", "log_likelihood"))

    def __init__(self, rates: torch.Tensor, exponents: torch.Tensor):
        super().__init__()
        self.rates = rates = check_rates(rates)
        self.cumulative_exponents, self.num_forgotten = accumulate(exponents)  # [T+1]
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

    def _exponent(self, s, t, count: int) -> torch.Tensor:
        """The exponent of the stretch s..t for each of `count` samples, float64, on the CPU."""
        s, t = (torch.as_tensor(n).cpu() for n in (t - 1 if s is None else s, t))
        exponents = self.cumulative_exponents[t] - self.cumulative_exponents[s]
        return exponents.masked_fill(self.num_forgotten[s] != self.num_forgotten[t], torch.inf).expand(count)

    @with_float64
    def log_apply(
        self, log_vectors, exponents: torch.Tensor, transposed: bool, dtype=torch.float64, log_floor=None
    ) -> torch.Tensor:
        """log of each vector `[n, K]` times exp(a R), or of exp(a R) times it if `transposed`, for its own exponent `[n]`.

        Every entry has the relative precision of `dtype`, but for those below `log_floor` `[n, K]`, which are not needed. Sums are
        those of logarithms in float64.
        """
        result = torch.full_like(log_vectors, -torch.inf, dtype=torch.float64)
        for top, part, left in by_magnitude(log_vectors):
            result = safe_logaddexp(result, top + self._log_series(part, exponents, transposed, dtype))
            bound = left + math.log(self.num_classes)  # of all that is left: no entry of exp(a R) is above one
            is_known = result > bound - LOG_PRECISION
            if (is_known if log_floor is None else is_known | (bound < log_floor)).all():
                break
        return result.to(dtype)

    def apply(self, vectors: torch.Tensor, exponents: torch.Tensor, transposed: bool) -> torch.Tensor:
        """Each vector `[n, K]`, none of whose entries is negative, times exp(a R), or exp(a R) times it if `transposed`."""
        return self.log_apply(safe_log(vectors), exponents, transposed, vectors.dtype).exp()

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

    def _log_series(self, vectors: torch.Tensor, exponents: torch.Tensor, transposed: bool, dtype) -> torch.Tensor:
        """log of vectors `[n, K]` with entries in [0, 1] times exp(a R), float64, to the precision of `dtype`."""
        forgets, stays = torch.isinf(exponents).to(vectors.device), (exponents == 0).to(vectors.device)
        total = self._log_sum(vectors, exponents, transposed, dtype)
        total = torch.where(forgets, safe_log(self._limit(vectors, transposed)), total)
        return torch.where(stays, safe_log(vectors.T), total).T

    def _log_mass(self, vectors: torch.Tensor, transposed: bool) -> np.ndarray:
        """log of the largest entry that a vector `[n, K]` can have after any number of jumps, `[n]`."""
        mass = vectors.detach().amax(-1) if transposed else vectors.detach().sum(-1)
        return mass.double().log().cpu().numpy()

    def _log_sum(self, vectors: torch.Tensor, exponents: torch.Tensor, transposed: bool, dtype) -> torch.Tensor:
        """log of sum_k Poisson(k; q a) P^k times the vectors `[n, K]`, `[K, n]`, float64, whatever `dtype` needs.

        The series ends when its last jump has reached no new state, and what comes after is below the rounding of the
        smallest entry.
        """
        jumps, mean = self._jumps(vectors, transposed), self._mean(exponents)
        moves, log_mass = torch.from_numpy(mean > 0).to(vectors.device), self._log_mass(vectors, transposed)
        power = SCALE * vectors.T.contiguous()  # [K, n]
        total = torch.full_like(power, -torch.inf)
        k, last = 0, num_jumps(mean, LOG_PRECISION)
        while True:
            before = total > -torch.inf
            total = safe_logaddexp(total, safe_log(power) + torch.from_numpy(log_poisson(k, mean)).to(vectors))
            if k >= last:
                is_new = (power > 0) & ~before & moves
                smallest = torch.where((total > -torch.inf) & moves, total.detach(), torch.inf).amin(0)  # [n]
                log_smallest = (smallest - math.log(SCALE)).clamp(max=0).cpu().numpy()
                last = num_jumps(mean, LOG_PRECISION + log_smallest - log_mass)
                if k >= last and not is_new.any():
                    return total - math.log(SCALE)
                last = max(last, k + 1)
            power = jumps @ power
            k += 1

    def _one_hot(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = torch.zeros(x.numel(), self.num_classes, dtype=dtype, device=x.device)
        return rows.scatter_(-1, x.reshape(-1, 1), 1)

    def _log_rows(self, log_rows: torch.Tensor, s, t, shape, transposed: bool, dtype: torch.dtype) -> torch.Tensor:
        """`log_apply` for the stretch s..t of each of the samples `shape` `[B, ...]`, whose elements are rows `[n, K]`."""
        exponents = self._exponent(s, t, shape[0]).repeat_interleave(shape[1:].numel())
        return self.log_apply(log_rows, exponents, transposed, dtype).view(*shape, -1)

    def log_marginal(self, x, s, t, dtype=torch.float32):
        if x.is_floating_point():
            return self._log_rows(x.flatten(0, -2), s, t, x.shape[:-1], False, x.dtype)
        return self._log_rows(self._one_hot(x, wide_dtype(x.device)).log(), s, t, x.shape, False, dtype)

    def log_likelihood(self, x_t, s, t, dtype=torch.float32):
        return self._log_rows(self._one_hot(x_t, wide_dtype(x_t.device)).log(), s, t, x_t.shape, True, dtype)
