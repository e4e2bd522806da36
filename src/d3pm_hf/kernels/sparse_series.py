# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""exp(a R) applied to the vectors of a batch, as fast as their size and precision allow.

Sums of probabilities take the place of sums of logarithms where they lose no term, and symmetric rates, as those of nearest
neighbors, have a shorter series (`chebyshev.py`) for probabilities that float32 can hold.
"""

import math

import numpy as np
import torch
from scipy.stats import poisson

from ..numerics import (
    categorical,
    compute_dtype,
    divergence_terms,
    draw,
    in_pieces,
    safe_log,
    uniforms,
    wide_dtype,
    with_float64,
)
from ..transitions.dense_rates import LOG_PRECISION
from ..transitions.kernel import Kernel, register_kernel
from ..transitions.rank_one import STEP_DEFINITION
from ..transitions.sparse_rates import SCALE, SparseRateTransition, log_poisson, num_jumps
from .chebyshev import ChebyshevExponential, is_symmetric
from .dense_tables import sample_rows
from .operators import SparseOperators


# Vectors of a large vocabulary that are carried through an exponential at once: as many as stay in a cache.
VECTORS_AT_ONCE = 64
# A series in float32, or float64, has lost none of its terms if the smallest entry is above this, for vectors of size one.
SAFE = {torch.float32: 1e-25, torch.float64: 1e-280}
# Probabilities below the first are lost in the sums of a loss; where they matter, the loss is computed in logarithms.
LOG_NEGLIGIBLE = {torch.float32: math.log(1e-22), torch.float64: math.log(1e-112)}
# A Chebyshev series has the digits of float32 in entries above this, for vectors that add up to one.
MIN_CHEBYSHEV = 1e-10
# A reverse step is drawn from products of float32 probabilities if their sum is above this.
MIN_EVIDENCE = 1e-10


@register_kernel(SparseRateTransition)
class SparseRateKernel(Kernel, SparseRateTransition):
    """Series in float32, draws by jumps, and the fused loss of [`SparseRateTransition`]."""

    derived_from = (*STEP_DEFINITION, "_exponent", "_log_series")
    fused_loss = "matrix"

    def prepare(self):
        self.chebyshev = ChebyshevExponential(self.rates) if is_symmetric(self.rates) else None
        # Fewer vectors at a time would waste the walk over R.
        self.min_rows = 256 if self.chebyshev is None else self.chebyshev.block_size
        # The CDFs of the rows of P make one ascending sequence when row i is lifted by i: a jump is one search in it.
        offsets, self.jump_columns = self.jumps_to.crow_indices(), self.jumps_to.col_indices().clone()
        chances = self.jumps_to.values().cumsum(0)
        lift = torch.arange(1, self.num_classes + 1) - chances[offsets[1:] - 1]
        self.jump_ladder = chances + lift[self.rates.indices()[0]]

    def _short_series(self, vectors: torch.Tensor, dtype: torch.dtype) -> ChebyshevExponential | None:
        """The Chebyshev series where it applies: symmetric rates, in float32, on the CPU, without a gradient."""
        is_plain = vectors.device.type == "cpu" and not vectors.requires_grad
        return self.chebyshev if dtype == torch.float32 and is_plain else None

    @with_float64
    def apply(self, vectors, exponents: torch.Tensor, transposed: bool, signed: bool = False) -> torch.Tensor:
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
    def log_apply(self, log_vectors, exponents, transposed: bool, dtype=torch.float64, log_floor=None):
        """log of vectors times exp(a R), to the relative precision of `dtype`. Entries below `log_floor` `[n, K]` are not needed."""
        if self._short_series(log_vectors, dtype) is not None and log_floor is None:
            return self._log_apply_short(log_vectors, exponents, transposed)
        floors = [None] * len(log_vectors) if log_floor is None else log_floor.split(VECTORS_AT_ONCE)
        parts = zip(log_vectors.split(VECTORS_AT_ONCE), exponents.split(VECTORS_AT_ONCE), floors)
        apply = super().log_apply
        return torch.cat([apply(vectors, a, transposed, dtype, floor) for vectors, a, floor in parts])

    def _log_apply_short(self, log_vectors: torch.Tensor, exponents: torch.Tensor, transposed: bool) -> torch.Tensor:
        """`log_apply` in float32: by the Chebyshev series, and again in logarithms where an entry is too small for it."""
        log_sum = log_vectors.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        result = self.apply((log_vectors - log_sum).exp().float(), exponents, transposed)
        is_small = ~(result.amin(-1) > MIN_CHEBYSHEV)
        result = result.log_().add_(log_sum)
        if is_small.any():
            again = log_vectors[is_small].double(), exponents[is_small]
            result[is_small] = self.log_apply(*again, transposed).float()
        return result

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

    def _log_sum(self, vectors, exponents, transposed, dtype):
        """By sums of probabilities, in `dtype` or else in float64, where no entry is too small for them."""
        for precision in dict.fromkeys((dtype, torch.float64)):
            total = self._sum(vectors.to(precision), exponents, transposed)
            if total is not None:
                return total.double()
        return super()._log_sum(vectors, exponents, transposed, dtype)

    def _sum(self, vectors: torch.Tensor, exponents: torch.Tensor, transposed: bool) -> torch.Tensor | None:
        """`_log_sum` by sums of probabilities, or `None` if one of them is too small for the dtype of the vectors."""
        jumps, mean = self._jumps(vectors, transposed), self._mean(exponents)
        moves, log_mass = torch.from_numpy(mean > 0).to(vectors.device), self._log_mass(vectors, transposed)
        scale = SCALE if vectors.dtype == torch.float64 else 1.0
        power = scale * vectors.T.contiguous()  # [K, n]
        total = torch.zeros_like(power)
        reached = torch.zeros_like(power, dtype=torch.bool)  # by jumps that came with a weight of zero
        k, last = 0, num_jumps(mean, LOG_PRECISION)
        while True:
            log_weight = log_poisson(k, mean)
            lost = log_weight < math.log(torch.finfo(vectors.dtype).tiny)
            before = total > 0 if k >= last else None
            total.addcmul_(power, torch.from_numpy(np.where(lost, 0, np.exp(log_weight))).to(vectors))
            reached |= (power > 0) if lost.any() else reached
            if before is not None:
                is_new = (power > 0) & ~before & moves
                smallest = torch.where((before | reached | is_new) & moves, total.detach(), torch.inf).amin(0)  # [n]
                if not (smallest > SAFE[vectors.dtype]).all():
                    return None
                log_smallest = (smallest.log().double() - math.log(scale)).clamp(max=0).cpu().numpy()
                last = num_jumps(mean, LOG_PRECISION + log_smallest - log_mass)
                if k >= last and not is_new.any():
                    return safe_log(total) - math.log(scale)
                last = max(last, k + 1)
            power = jumps @ power
            k += 1

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
        if x_0 is None:
            logits = self.posterior_logits(x0_logits.to(compute_dtype(x0_logits)), x_t, s, t)
        else:
            logits = self.log_posterior(x_0, x_t, s, t)
        return categorical(logits.flatten(0, -2), u).view_as(x_t)

    def _staying_states(self, t, device):
        """All states, unless everything is forgotten; then those that the stationary distribution holds."""
        stays = (self.stationary > 0) | (self.num_forgotten[t] == 0)
        return stays.to(device)

    def operators(self, s, t, dtype: torch.dtype, device) -> SparseOperators:
        """Products with Q and Qbar used by the matrix losses, for times `[b]`. There are no tables."""
        before = t - 1 if s is None else s
        return SparseOperators(self, self._exponent(0, before, len(t)), self._exponent(s, t, len(t)), dtype)

    def prior_divergence(self, x_0):
        tokens, inverse = x_0.unique(return_inverse=True)
        if self.num_forgotten[-1]:
            log_q = self.table("log_stationary", x_0.device).expand(len(tokens), -1)
        else:
            log_q = self.log_marginal(tokens[None], 0, self.num_steps, wide_dtype(x_0.device))[0]
        return divergence_terms(log_q, self.table("log_prior", x_0.device)).sum(-1)[inverse]
