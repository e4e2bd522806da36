# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""exp(a R) applied to vectors in float32 by a Chebyshev series, for symmetric rates.

    exp(a R) = sum_k c_k(x) T_k(B),   c_k(x) = (2 - [k = 0]) exp(-x) I_k(x),   B = I + R / h,   x = h a

The eigenvalues of -R lie in 0 .. 2h, so that those of B and of T_k(B) lie in -1 .. 1. What is left out after c_n changes no
entry of the result by more than the tail c_{n+1}(x) + c_{n+2}(x) + ... times the Euclidean norm of the vector. A tail of e takes about
sqrt(2 x log(1 / e)) terms, where the series of `dense_rates` takes more than 2x. The series of a distribution goes on until
this bound is below 1e-6 of its smallest entry, down to a tail of 1e-16: every probability above 1e-10 has six digits.

Rounding is not part of the bound. It stays relative to each entry, because T_k is computed by its differences,

    D_{k+1} = D_k + (2 R / h) T_k,   T_{k+1} = T_k + D_{k+1},

and what arrives at a state far from the others has been multiplied by the same small rates as the result. The tests measure it.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.special import ive
from torch.nn.functional import embedding_bag


# What the terms that are left out may add to an entry of a distribution, relative to its smallest one.
PRECISION = 1e-6
# The same in absolute terms, for derivatives.
MAX_ERROR = 1e-7
# The tail at which the series of a distribution is first looked at, and that at which it ends in any case.
FIRST_TAIL, LAST_TAIL = 1e-11, 1e-16
# Bytes of a block of vectors that go through the series together: it stays in the cache of a core.
BLOCK_BYTES = 1 << 20


def to_scipy(rates: torch.Tensor) -> csr_array:
    """A coalesced sparse matrix on the CPU as one of scipy."""
    rows, columns = rates.indices().numpy()
    return csr_array((rates.values().numpy(), (rows, columns)), shape=rates.shape)


def is_symmetric(rates: torch.Tensor) -> bool:
    """Whether a coalesced sparse matrix is its own transpose, to the rounding of float64."""
    matrix = to_scipy(rates)
    return abs(matrix - matrix.T).max() <= 1e-14 * abs(matrix).max()


def largest_eigenvalue_bound(rates: torch.Tensor) -> float:
    """An upper bound of the eigenvalues of -R, for symmetric rates.

    They are at most those of |R|, and these are at most max_i (|R| y)_i / y_i for every positive vector y (Collatz and
    Wielandt): y is |R|^n times a vector of ones, n = 0 .. 19, which comes near to the largest.
    """
    absolute, y, bound = abs(to_scipy(rates)), np.ones(len(rates)), math.inf
    for _ in range(20):
        image = absolute @ y
        bound = min(bound, (image / y).max())
        y = np.maximum(image / image.max(), 1e-100)
    return bound * (1 + 1e-9)  # rounding


@lru_cache(maxsize=4096)
def coefficients(x: float) -> tuple[np.ndarray, np.ndarray]:
    """c_0(x), ..., c_n(x), and the tail after each of them: bounds of c_1 + c_2 + ..., down to LAST_TAIL."""
    size = 32
    while True:
        c = 2 * ive(np.arange(size + 1), x)
        c[0] /= 2
        # I_{k+1}(x) / I_k(x) <= x / (k + sqrt(k^2 + x^2)), which falls with k: what comes after is below a geometric series.
        ratio = x / (size + math.hypot(size, x))
        tail = (c[::-1].cumsum()[::-1] + c[-1] * ratio / (1 - ratio))[1:]
        if tail[-1] <= LAST_TAIL:
            count = int(np.argmax(tail <= LAST_TAIL)) + 1
            return c[:count], tail[:count]
        size *= 2


class ChebyshevExponential:
    """exp(a R) times vectors in float32 on the CPU, for symmetric rates R, coalesced sparse `[K, K]`."""

    def __init__(self, rates: torch.Tensor):
        self.half_width = largest_eigenvalue_bound(rates) / 2  # h
        steps = to_scipy(rates) * (2 / self.half_width)  # 2 R / h
        columns, offsets = torch.from_numpy(steps.indices).int(), torch.from_numpy(steps.indptr).int()
        self.matrix = columns, offsets, torch.from_numpy(steps.data).float()
        self.block_size = max(1, BLOCK_BYTES // (4 * len(rates)))

    def distributions(self, vectors: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        """exp(a R) times each vector `[n, K]`, for its own finite exponent `[n]`.

        The entries of a vector are not negative, and their sum is at most one.
        """

        def sum_block(series: _Series, rows) -> torch.Tensor:
            tail, needed = 1.0, FIRST_TAIL
            while needed < tail:
                tail = needed
                smallest = series.up_to(tail).amin().item()
                needed = max(LAST_TAIL, PRECISION * smallest)  # the first if the other is NaN
            return series.total.clamp_(min=0)

        return self._in_blocks(sum_block, vectors, exponents)

    def derivatives(self, vectors: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        """The same for vectors of any sign and size, to an absolute error of MAX_ERROR."""
        tails = MAX_ERROR / vectors.norm(dim=-1).clamp(min=MAX_ERROR)  # [n]
        return self._in_blocks(lambda series, rows: series.up_to(tails[rows].amin().item()), vectors, exponents)

    def _in_blocks(self, sum_block, vectors: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        """Vectors of near exponents share a block, which ends when the longest of its series ends."""
        result = torch.empty_like(vectors, memory_format=torch.contiguous_format)
        for block in exponents.argsort(stable=True).split(self.block_size):
            first, count = block[0].item(), len(block)
            is_slice = torch.equal(block, torch.arange(first, first + count))
            rows = slice(first, first + count) if is_slice else block  # a slice is not copied
            result[rows] = sum_block(_Series(self, vectors[rows].T.contiguous(), exponents[block]), rows).T
        return result

    def step(self, polynomial: torch.Tensor) -> torch.Tensor:
        """(2 R / h) T_k. Sums of weighted rows of an embedding are faster than the sparse products of torch."""
        columns, offsets, values = self.matrix
        return embedding_bag(
            columns, polynomial, offsets, mode="sum", per_sample_weights=values, include_last_offset=True
        )


class _Series:
    """The series of a block of vectors `[K, n]`, which can be continued."""

    def __init__(self, exponential: ChebyshevExponential, vectors: torch.Tensor, exponents: torch.Tensor):
        self.exponential, self.vectors = exponential, vectors
        xs = [exponential.half_width * exponent for exponent in exponents.tolist()]
        # The tail after a number of terms grows with x: that of the largest holds for all.
        longest, self.tails = coefficients(max(xs))
        weights = np.zeros((len(longest), len(xs)), dtype=np.float32)
        for column, x in enumerate(xs):
            c = coefficients(x)[0][: len(longest)]
            weights[: len(c), column] = c
        self.weights = torch.from_numpy(weights)  # [N+1, n]
        self.total, self.count = vectors * self.weights[0], 1
        self.polynomial = self.difference = vectors

    def up_to(self, tail: float) -> torch.Tensor:
        """The sum of the terms that are needed for a tail, `[K, n]`."""
        is_enough = self.tails <= tail
        count = int(np.argmax(is_enough)) + 1 if is_enough.any() else len(self.tails)
        for k in range(self.count, count):
            step = self.exponential.step(self.polynomial)
            if k == 1:
                self.difference = step.div_(2)
                self.polynomial = self.vectors + self.difference
            else:
                self.difference = step.add_(self.difference)
                self.polynomial.add_(self.difference)
            self.total.addcmul_(self.polynomial, self.weights[k])
        self.count = max(self.count, count)
        return self.total
