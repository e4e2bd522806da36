# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Factors of Qbar_n of low rank, for products with many vectors in float32.

Noise makes distributions smooth: after some steps Qbar_n is of rank r << K, up to an error below the rounding of a product in
float32. As Qbar_t = Qbar_s Q_{s..t}, the columns of Qbar_t lie in the space of those of Qbar_s: one basis serves many times.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


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
# Factors are kept up to this size.
MAX_FACTOR_BYTES = 1 << 27


class Factors(NamedTuple):
    """Qbar_n as a product of rank r up to an error, float32. Products with a factor of few rows on the left are fast.

    Fields:
        left: the transpose of the left factor, `[r + 1, K]`; the last row, which is not part of the product, is one.
        right: the right factor, `[r + 1, K]`; the last row, too.
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


class Basis(NamedTuple):
    """A basis of the columns of Qbar_n, float64 `[K, r]`, and the errors of [`Factors`]."""

    left: torch.Tensor
    truncation: float
    rounding: float


class LowRankProducts:
    """Factors of the cumulative products of a process of doubly stochastic matrices."""

    def __init__(self) -> None:
        self._bases: dict[int, Basis] = {}  # by the first time that they serve
        self._factors: dict[int, Factors] = {}

    def add(self, n: int, matrix: torch.Tensor) -> None:
        """Finds the basis of Qbar_n, float64 `[K, K]`, if n is the first time that one serves."""
        if n and n == first_time(n):
            basis = find_basis(matrix)
            if basis is not None:
                self._bases[n] = basis

    def factors(self, n: int, cumulative: Callable[[], torch.Tensor]) -> Factors | None:
        """The factors of Qbar_n = cumulative(), or `None` if its rank is not low."""
        found = self._factors.get(n)
        if found is None and first_time(n) in self._bases:
            found = as_factors(self._bases[first_time(n)], cumulative())
            if len(self._factors) * 8 * found.right.numel() > MAX_FACTOR_BYTES:
                self._factors = {}  # other threads may have the one before
            self._factors[n] = found
        return found


def first_time(n: int) -> int:
    """The first time that shares its basis with n: n with all but its two highest bits set to zero."""
    shift = max(0, n.bit_length() - 2)
    return n >> shift << shift


def as_factors(basis: Basis, matrix: torch.Tensor) -> Factors:
    """`Factors` of Qbar_n, float64 `[K, K]`, by a basis of its columns."""
    ones = torch.ones_like(matrix[:1])
    left, right = (torch.cat([factor, ones]).float() for factor in (basis.left.T, basis.left.T @ matrix))
    lowest, highest = (v.item() for v in matrix.aminmax())
    return Factors(left, right, basis.truncation, basis.rounding, lowest, highest)


def find_basis(matrix: torch.Tensor) -> Basis | None:
    """A basis of the columns of a doubly stochastic matrix, float64 `[K, K]`, or `None` if its rank is not low.

    The bound on the truncation holds for the product of the matrix with another doubly stochastic one, too: an entry of that is
    an average of entries, and so is its error.
    """
    num_classes = len(matrix)
    if num_classes < MIN_STATES or matrix.square().sum() > MAX_SQUARES_SHARE * num_classes:
        return None
    left, singular_values, _ = torch.linalg.svd(matrix)
    rank = int((singular_values > MIN_SINGULAR_VALUE).sum())
    if rank > MAX_RANK_SHARE * num_classes:
        return None
    left = left[:, :rank].contiguous()
    right = left.T @ matrix
    exact = left @ right
    rounding = (left.float() @ right.float() - exact) / left.norm(dim=-1, keepdim=True)
    deviation = rounding.square().mean().sqrt().item()
    return Basis(left, (exact - matrix).abs().max().item(), NUM_DEVIATIONS * deviation)
