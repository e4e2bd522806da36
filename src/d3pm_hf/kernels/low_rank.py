# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Matrix losses by factors of Qbar_s, for a sample whose Qbar_s is of low rank and whose step reaches few states.

Noise makes distributions smooth: after some steps Qbar_n is of rank r << K, up to an error below the rounding of a product in
float32. As Qbar_t = Qbar_s Q_{s..t}, the columns of Qbar_t lie in the space of those of Qbar_s: one basis serves many times. The
prediction

    m = p Qbar_s = (p left) right

is needed only at the states x_s from which a step leads to x_t. Rows are sorted by x_t, so that those that are worked on at once
need it at one stretch of states. Beside that, only p has K numbers per row, and the gradient in its place.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ..transitions.kernel import Options


# Singular values below this are left out. The error in an entry is smaller than that by about K / 2.
MIN_SINGULAR_VALUE = 2e-8
# Factors whose rank is above this share of K are not used.
MAX_RANK_SHARE = 1 / 3
# A decomposition is not tried if the squares of the entries have a sum above this share of K: the rank of a Gaussian kernel is
# six times that.
MAX_SQUARES_SHARE = MAX_RANK_SHARE / 6
# Fewer states need no factors.
MIN_STATES = 128
# The errors of products of float32 are random. The error of their weighted sums is below this many standard deviations.
NUM_DEVIATIONS = 4.0
# Factors, and products to find them in, are kept up to this size each.
MAX_FACTOR_BYTES = 1 << 27

# Bytes of p, and of a buffer of sums over states, that are worked on at once.
PIECE_BYTES, SUMMED_BYTES = 1 << 20, 1 << 19
# The sums over states are those of this share of the rows at once, whose x_t are near each other, but of no fewer than so many.
SUMMED_SHARE, MIN_SUMMED_ROWS = 1 / 6, 256
# The terms and gradients of a row are within this of the exact ones, in nats; other rows are computed with Qbar_s itself.
TOLERANCE = 1e-5
# Rows whose Z_0 is below this share of the largest q(x_s | x_0) are such other rows.
MIN_EVIDENCE_SHARE = 1e-5
# A log p(x_0) below this may have underflowed.
MIN_LOG_P = -80.0


class Basis(NamedTuple):
    """A basis of the columns of Qbar_n, float64 `[K, r]`, and the errors of [`Factors`]."""

    left: torch.Tensor
    truncation: float
    rounding: float


class Factors(NamedTuple):
    """Qbar_n as a product of rank r up to an error, float32. Products with a factor of few rows on the left are fast.

    Fields:
        left: The transpose of the left factor, `[r + 1, K]`; the last row, which is not part of the product, is one.
        right: The right factor, `[r + 1, K]`; the last row, too.
        truncation: A bound on what is missing in the product of a distribution with Qbar_n.
        rounding: The error of an entry of (p left) right is below this times the norm of p left.
        lowest, highest: The smallest and the largest entry of Qbar_n.
    """

    left: torch.Tensor
    right: torch.Tensor
    truncation: float
    rounding: float
    lowest: float
    highest: float


class FactorTable:
    """Factors of the cumulative products of a process of doubly stochastic matrices."""

    def __init__(self) -> None:
        # By the first time that they serve; a basis takes the place of a product when it is needed.
        self._products: dict[int, torch.Tensor] = {}
        self._bases: dict[int, Basis | None] = {}
        self._factors: dict[int, Factors] = {}

    def add(self, n: int, product: Callable[[], torch.Tensor]) -> None:
        """Keeps Qbar_n = product(), float64 `[K, K]`, if n is the first time that its basis serves, and its rank may be low.

        Without it there are no factors: products of many states would take more memory than factors save time.
        """
        if n and n == first_time(n) and n not in self._bases:
            matrix = product()
            if may_be_low(matrix) and (1 + len(self._products)) * 8 * matrix.numel() <= MAX_FACTOR_BYTES:
                self._products[n] = matrix

    def find(self, n: int, cumulative: Callable[[], torch.Tensor]) -> Factors | None:
        """The factors of Qbar_n = cumulative(), or `None` if its rank is not low."""
        first, found = first_time(n), self._factors.get(n)
        product = self._products.get(first)
        if product is not None:
            self._bases[first] = find_basis(product)
            self._products.pop(first, None)  # another thread may have been here
        basis = self._bases.get(first)
        if found is None and basis is not None:
            found = create_factors(basis, cumulative())
            if len(self._factors) * 8 * found.right.numel() > MAX_FACTOR_BYTES:
                self._factors = {}  # other threads may have the one before
            self._factors[n] = found
        return found


def first_time(n: int) -> int:
    """The first time that shares its basis with n: n with all but its two highest bits set to zero."""
    shift = max(0, n.bit_length() - 2)
    return n >> shift << shift


def create_factors(basis: Basis, matrix: torch.Tensor) -> Factors:
    """`Factors` of Qbar_n, float64 `[K, K]`, by a basis of its columns."""
    ones = torch.ones_like(matrix[:1])
    left, right = (torch.cat([factor, ones]).float() for factor in (basis.left.T, basis.left.T @ matrix))
    lowest, highest = (v.item() for v in matrix.aminmax())
    return Factors(left, right, basis.truncation, basis.rounding, lowest, highest)


def may_be_low(matrix: torch.Tensor) -> bool:
    """Whether the rank of a doubly stochastic matrix may be low, by its size and the squares of its entries."""
    return len(matrix) >= MIN_STATES and bool(matrix.square().sum() <= MAX_SQUARES_SHARE * len(matrix))


def find_basis(matrix: torch.Tensor) -> Basis | None:
    """A basis of the columns of a doubly stochastic matrix, float64 `[K, K]`, or `None` if its rank is not low.

    The bound on the truncation holds for the product of the matrix with another doubly stochastic one, too: an entry of that is
    an average of entries, and so is its error.
    """
    left, singular_values, _ = torch.linalg.svd(matrix)
    rank = int((singular_values > MIN_SINGULAR_VALUE).sum())
    if rank > MAX_RANK_SHARE * len(matrix):
        return None
    left = left[:, :rank].contiguous()
    right = left.T @ matrix
    exact = left @ right
    rounding = (left.float() @ right.float() - exact) / left.norm(dim=-1, keepdim=True)
    deviation = rounding.square().mean().sqrt().item()
    return Basis(left, (exact - matrix).abs().max().item(), NUM_DEVIATIONS * deviation)


class LowRankTerms:
    """The terms of the samples of a batch that have factors: each is added, then those of all are read.

    Args:
        options: What is computed.
        num_classes: K.
        x_0, x_t: `[B, N]`.
    """

    def __init__(self, options: Options, num_classes: int, x_0: torch.Tensor, x_t: torch.Tensor):
        self._options, self._x_0 = options, x_0
        order = argsort_states(x_t, num_classes)
        self._order, self._sorted = order, [x.gather(-1, order) for x in (x_0, x_t)]
        self._inverse = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[1]).expand_as(order))
        self.samples: list[int] = []
        self._sums: list[tuple[torch.Tensor, ...]] = []
        self._limits: list[tuple[float, float, float]] = []

    def add(self, i: int, operators, predict: Callable, output: torch.Tensor, p: torch.Tensor, want_gradient: bool):
        """Adds sample `i`, and turns p into the gradient with respect to the logits if that is wanted.

        Args:
            operators: Those of the transition for this sample, with `factors`.
            predict: `(output, p) -> None` writes p(x_0) of some rows of the output to those of p.
            output: The output of the network, `[N, ...]`.
            p: Space for p(x_0), float32 `[N, K]`.
        """
        factors, at_0, (x_0, x_t) = operators.factors, self._x_0[i, :, None], (x[i] for x in self._sorted)
        inside = _predict(factors.left[:-1], predict, output, p)  # p left, [r, N]
        p_0, inside = p.gather(-1, at_0).squeeze(-1), inside.index_select(1, self._order[i])
        evidence = (factors.right[:-1] @ operators.columns[0].T).index_select(1, x_t)  # right q(x_t | x_s = .), [r, N]
        z, squares = (inside * evidence).sum(0), inside.square().sum(0)
        # No Z_0 is below the lowest q(x_s | x_0). States beyond the reach add at most their q(x_t | x_s) times the highest one to
        # Z_0, which is to change the terms by less than the tolerance.
        min_z_0 = max(factors.lowest / 2, MIN_EVIDENCE_SHARE * factors.highest)
        reach = operators.reach(TOLERANCE / 10 * min_z_0 / factors.highest)
        z_0, kl, back = _sum_states(operators, reach, inside, x_0, x_t)
        self.samples.append(i)
        self._sums.append((p_0, z, squares, z_0, kl, back[-1].clone()))
        self._limits.append((factors.truncation / TOLERANCE, factors.rounding / TOLERANCE, min_z_0))
        if want_gradient:
            coefficient = self._options.hybrid_coeff
            converted = coefficient if self._options.convert_auxiliary else 0.0
            back.div_(-z_0)
            back[:-1].addcmul_(evidence, (1 + converted) / z)
            back[-1] = coefficient - converted
            _multiply(p, back.index_select(1, self._inverse[i]), factors.left)
            p.scatter_add_(-1, at_0, p.new_full((1, 1), -coefficient).expand_as(at_0))

    def read(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """vb, the cross-entropy, and whether they may be off by more than `TOLERANCE`, of all `samples`, `[b, N]`."""
        p_0, z, squares, z_0, kl, back = (torch.stack(part) for part in zip(*self._sums))
        truncation, rounding, min_z_0 = z.new_tensor(self._limits).T[..., None]  # [b, 1] each
        # m and Z have an error. It must be small beside Z, and beside m, in the mean that counts.
        is_good = torch.minimum(z, z_0 / back) > squares.sqrt_().mul_(rounding).add_(truncation)
        is_good &= z_0 > min_z_0
        log_evidence = (z / z_0).log_()
        vb, inverse = kl.div_(z_0).add_(log_evidence), self._inverse[self.samples]
        vb, log_evidence, is_good = (v.gather(-1, inverse) for v in (vb, log_evidence, is_good))
        log_p_0 = p_0.log_()
        cross_entropy = log_evidence - log_p_0 if self._options.convert_auxiliary else -log_p_0
        return vb, cross_entropy, ~(is_good & (log_p_0 > MIN_LOG_P))


def argsort_states(x: torch.Tensor, num_classes: int) -> torch.Tensor:
    """The order that sorts each row of the states `[B, N]` on a CPU. Numbers of 16 bits are counted, which is faster."""
    narrow = torch.int16 if num_classes <= 1 << 15 else torch.int64
    return torch.from_numpy(np.argsort(x.to(narrow).numpy(), axis=-1, kind="stable"))


def _piece_size(p: torch.Tensor) -> int:
    """Number of rows of p that are worked on at once."""
    return max(1, PIECE_BYTES // (4 * p.shape[1]))


def _predict(left: torch.Tensor, predict: Callable, output: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Fills p `[N, K]`, and returns p left, `[r, N]`."""
    size, inside = _piece_size(p), left.new_empty(len(left), len(p))
    for given, p_part, inside_part in zip(output.split(size), p.split(size), inside.split(size, 1)):
        predict(given, p_part)
        torch.mm(left, p_part.T, out=inside_part)
    return inside


def _multiply(p: torch.Tensor, back: torch.Tensor, left: torch.Tensor) -> None:
    """Multiplies p `[N, K]` by dL/dp = back^T left; the factors are `[r + 1, N]` and `[r + 1, K]`."""
    size = _piece_size(p)
    slope = torch.empty_like(p[:size])
    for p_part, back_part in zip(p.split(size), back.split(size, 1)):
        p_part.mul_(torch.mm(back_part.T, left, out=slope[: len(p_part)]))


def _sum_states(
    operators, reach: int, inside: torch.Tensor, x_0: torch.Tensor, x_t: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Z_0 and sum_j w_j log(row_j / m_j), `[N]`, and right (w / m), `[r + 1, N]`.

    Where w = row column, m = inside^T right, and inside is `[r, N]`. x_t is sorted. States farther from x_t than `reach` are left
    out.
    """
    factors, rows, columns = operators.factors, operators.rows[0], operators.columns[0]
    if factors.lowest < (smallest := torch.finfo(rows.dtype).tiny ** 0.5):
        rows = rows.clamp(min=smallest)  # no logarithm of zero
    num_rows, num_states = len(x_t), len(columns)
    size = max(1, min(SUMMED_BYTES // (4 * num_states), max(MIN_SUMMED_ROWS, int(SUMMED_SHARE * num_rows))))
    firsts, ends, sums = range(0, num_rows, size), x_t.tolist(), []
    for first, part, at_0, at_t in zip(firsts, inside.T.split(size), x_0.split(size), x_t.split(size)):
        low, high = max(0, ends[first] - reach), min(num_states, ends[first + len(at_t) - 1] + reach + 1)
        right, near_rows, near_columns = (v.narrow(1, low, high - low) for v in (factors.right, rows, columns))
        m = (part @ right[:-1]).clamp_(min=factors.truncation)
        ratio = near_rows.index_select(0, at_0).div_(m)
        slope = near_columns.index_select(0, at_t).mul_(ratio)  # w / m
        z_0 = m.mul_(slope).sum(-1)
        sums.append((z_0, m.mul_(ratio.log_()).sum(-1), right @ slope.T))
    z_0, kl, back = (torch.cat(part, -1) for part in zip(*sums))
    return z_0, kl, back
