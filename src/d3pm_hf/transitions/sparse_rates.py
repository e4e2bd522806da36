# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""exp(a R) applied to vectors, for large vocabularies.

The series is that of `dense_rates`, applied to the vectors of a batch with R sparse. Symmetric rates, as those of nearest
neighbors, have a shorter one (`chebyshev`) for probabilities that float32 can hold.
"""

import math
import warnings

import numpy as np
import torch
from scipy.special import gammaln, xlogy
from scipy.stats import poisson

from ..numerics import (
    categorical,
    divergence_terms,
    draw,
    in_pieces,
    safe_log,
    safe_logaddexp,
    uniforms,
    wide_dtype,
    with_float64,
)
from ..schedules import accumulate, check_exponents
from .base import LOSS_DEFINITION, STEP_DEFINITION, Transition, sample_rows
from .chebyshev import ChebyshevExponential, is_symmetric
from .dense_rates import LOG_PRECISION
from .operators import SparseOperators
from .rate_matrices import check_rates, stationary_distribution


# Vectors of a large vocabulary that are carried through an exponential at once: as many as stay in a cache.
VECTORS_AT_ONCE = 64
# Probabilities below the first are lost in the sums of a loss; where they matter, the loss is computed in logarithms.
LOG_NEGLIGIBLE = {torch.float32: math.log(1e-22), torch.float64: math.log(1e-112)}
# A series in float32, or float64, has lost none of its terms if the smallest entry is above this, for vectors of size one.
SAFE = {torch.float32: 1e-25, torch.float64: 1e-280}
# A Chebyshev series has the digits of float32 in entries above this, for vectors that add up to one.
MIN_CHEBYSHEV = 1e-10
# A reverse step is drawn from products of float32 probabilities if their sum is above this.
MIN_EVIDENCE = 1e-10
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

    fused_loss = "matrix"
    is_alike = True
    shortcuts = {
        "fused_loss": LOSS_DEFINITION,
        "is_alike": ("log_marginal", "log_likelihood"),
        "sample": ("log_marginal",),
        "sample_previous": STEP_DEFINITION,
        "_staying_states": ("log_marginal",),
        "prior_divergence": ("log_marginal",),
    }

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
        self.chebyshev = ChebyshevExponential(rates) if is_symmetric(rates) else None
        # Fewer vectors at a time would waste the walk over R.
        self.min_rows = 256 if self.chebyshev is None else self.chebyshev.block_size
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

    def _short_series(self, vectors: torch.Tensor, dtype: torch.dtype) -> ChebyshevExponential | None:
        """The Chebyshev series where it applies: symmetric rates, in float32, on the CPU, without a gradient."""
        is_plain = vectors.device.type == "cpu" and not vectors.requires_grad
        return self.chebyshev if dtype == torch.float32 and is_plain else None

    @with_float64
    def _apply(self, vectors, exponents: torch.Tensor, transposed: bool, signed: bool = False) -> torch.Tensor:
        """Each vector `[n, K]` times exp(a R), or exp(a R) times it if `transposed`, for its own exponent `[n]`.

        What is below the rounding of the largest entries, and too small for a loss to see, may be missing. Vectors that are not
        `signed` have no negative entries.
        """
        short = self._short_series(vectors, vectors.dtype)
        if short is not None:
            forgets = torch.isinf(exponents)
            result = (short.derivatives if signed else short.distributions)(vectors, exponents.masked_fill(forgets, 0))
            if forgets.any():
                result[forgets] = self._limit(vectors[forgets], transposed).T
            return result
        parts = zip(vectors.split(VECTORS_AT_ONCE), exponents.split(VECTORS_AT_ONCE))
        return torch.cat([self._expand(*part, transposed) for part in parts])

    @with_float64
    def _log_apply(self, log_vectors, exponents, transposed: bool, dtype=torch.float64, log_floor=None):
        """The same in logarithms, to the relative precision of `dtype` in every entry, float64 or `dtype`.

        Entries below `log_floor` `[n, K]` are not needed.
        """
        if self._short_series(log_vectors, dtype) is not None and log_floor is None:
            return self._log_apply_short(log_vectors, exponents, transposed)
        floors = [None] * len(log_vectors) if log_floor is None else log_floor.split(VECTORS_AT_ONCE)
        parts = zip(log_vectors.split(VECTORS_AT_ONCE), exponents.split(VECTORS_AT_ONCE), floors)
        return torch.cat([self._log_expand(vectors, a, transposed, dtype, floor) for vectors, a, floor in parts])

    def _log_apply_short(self, log_vectors: torch.Tensor, exponents: torch.Tensor, transposed: bool) -> torch.Tensor:
        """The same in float32: by the Chebyshev series, and again in logarithms where an entry is too small for it."""
        log_sum = log_vectors.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        result = self._apply((log_vectors - log_sum).exp().float(), exponents, transposed)
        is_small = ~(result.amin(-1) > MIN_CHEBYSHEV)
        result = result.log_().add_(log_sum)
        if is_small.any():
            again = log_vectors[is_small].double(), exponents[is_small]
            result[is_small] = self._log_apply(*again, transposed).float()
        return result

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
            result = safe_logaddexp(result, top + self._log_series(part, exponents, transposed, dtype))
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
        total = torch.where(forgets, safe_log(self._limit(vectors, transposed)), total.double())
        return torch.where(stays, safe_log(vectors.T), total).T

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
                total = safe_logaddexp(total, safe_log(power) + torch.from_numpy(log_weight).to(vectors))
            else:
                lost = log_weight < math.log(torch.finfo(vectors.dtype).tiny)
                total.addcmul_(power, torch.from_numpy(np.where(lost, 0, np.exp(log_weight))).to(vectors))
                reached |= (power > 0) if lost.any() else reached
            if before is not None:
                is_new = (power > 0) & ~before & moves
                smallest = torch.where((before | reached | is_new) & moves, total.detach(), torch.inf).amin(0)  # [n]
                if not in_logarithms:
                    if not (smallest > SAFE[vectors.dtype]).all():
                        return None
                    smallest = smallest.log()
                log_smallest = (smallest.double() - math.log(scale)).clamp(max=0).cpu().numpy()
                last = num_jumps(mean, LOG_PRECISION + log_smallest - log_mass)
                if k >= last and not is_new.any():
                    return (total if in_logarithms else safe_log(total)) - math.log(scale)
                last = max(last, k + 1)
            power = jumps @ power
            k += 1

    def _one_hot(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = torch.zeros(x.numel(), self.num_classes, dtype=dtype, device=x.device)
        return rows.scatter_(-1, x.reshape(-1, 1), 1)

    @with_float64
    def sample(self, x_0, t, generator=None):
        """Follows the jumps of each element: as many as a Poisson variable says, each one search in the rows of P."""
        if isinstance(generator, (list, tuple)):
            return sample_rows(self, x_0, t, generator)
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

    def sample_previous(self, x0_logits, x_t, s: int, t: int, generator=None, denoising: bool = False):
        """Draws x_s from p(x_s | x_t) (eq. 4). A row of Qbar_s costs as much as the product of Qbar_s with the network's output,

            p(x_s | x_t) ~ q(x_t | x_s) sum_{x_0} q(x_s | x_0) p(x_0),

        so that x_0 is drawn first only for logits of the denoising posterior, which is its distribution.
        """
        steps = self._exponent(0, s, len(x_t)), self._exponent(s, t, len(x_t))
        is_short = self._short_series(x0_logits, torch.float32) is not None and bool((steps[0] + steps[1] > 0).all())
        if self.chebyshev is None or (denoising and not is_short):
            return super().sample_previous(x0_logits, x_t, s, t, generator, denoising)
        u_0, u = uniforms((*x_t.shape, 2), generator, x_t.device).flatten(0, -2).unbind(-1)
        operators, states = SparseOperators(self, *steps, torch.float32), x_t.reshape(len(x_t), -1)  # [B, N]
        x_0: torch.Tensor | None = None
        weights: torch.Tensor | None = None
        if denoising:  # all x_0 lead to x_t
            x_0 = categorical(self.forbid(x0_logits).flatten(0, -2), u_0).view_as(x_t)
            if s == 0:
                return x_0
            weights = operators.row(x_0.view_as(states)).mul_(operators.column(states))
        elif is_short:
            p = self.forbid(x0_logits).float().softmax(-1).reshape(*states.shape, -1)
            weights = operators.forward(p).mul_(operators.column(states))
        if weights is not None and (weights.sum(-1) > MIN_EVIDENCE).all():
            return in_pieces(draw, self.num_classes, weights.flatten(0, 1), u).view_as(x_t)
        # The same draw in logarithms, for other devices and where the weights are too small for float32.
        logits = self.posterior_logits(x0_logits, x_t, s, t) if x_0 is None else self.log_posterior(x_0, x_t, s, t)
        return categorical(logits.flatten(0, -2), u).view_as(x_t)

    def _staying_states(self, t, device):
        """All states, unless everything is forgotten; then those that the stationary distribution holds."""
        stays = (self.stationary > 0) | (self.num_forgotten[t] == 0)
        return stays.to(device)

    def log_marginal(self, x, s, t, dtype=torch.float32):
        is_state = not x.is_floating_point()
        exponents = self._exponent(s, t, len(x)).repeat_interleave(x[0].numel() // (1 if is_state else x.shape[-1]))
        log_p = self._one_hot(x, wide_dtype(x.device)).log() if is_state else x.flatten(0, -2)
        dtype = dtype if is_state else x.dtype
        return self._log_apply(log_p, exponents, transposed=False, dtype=dtype).view(
            *x.shape[: x.ndim - (not is_state)], -1
        )

    def log_likelihood(self, x_t, s, t, dtype=torch.float32):
        exponents = self._exponent(s, t, len(x_t)).repeat_interleave(x_t[0].numel())
        one_hot = self._one_hot(x_t, wide_dtype(x_t.device)).log()
        return self._log_apply(one_hot, exponents, transposed=True, dtype=dtype).view(*x_t.shape, -1)

    def operators(self, s, t, dtype: torch.dtype, table_dtype: torch.dtype, device) -> SparseOperators:
        """What the posterior of some samples is made of, for times `[b]`. There are no tables, in any precision."""
        before = t - 1 if s is None else s
        return SparseOperators(self, self._exponent(0, before, len(t)), self._exponent(s, t, len(t)), dtype)

    def prior_divergence(self, x_0):
        tokens, inverse = x_0.unique(return_inverse=True)
        if self.num_forgotten[-1]:
            log_q = self.table("log_stationary", x_0.device).expand(len(tokens), -1)
        else:
            log_q = self.log_marginal(tokens[None], 0, self.num_steps, wide_dtype(x_0.device))[0]
        return divergence_terms(log_q, self.table("log_prior", x_0.device)).sum(-1)[inverse]
