# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""exp(a R) applied to vectors in float32 by a Chebyshev series, for symmetric rates.

    exp(a R) = sum_k c_k(x) T_k(B),   c_k(x) = (2 - [k = 0]) exp(-x) I_k(x),   B = I + R / h,   x = h a

The eigenvalues of -R lie in 0 .. 2h, so that those of B and of T_k(B) lie in -1 .. 1. What is left out after c_n changes no
entry of the result by more than the tail c_{n+1}(x) + c_{n+2}(x) + ... times the Euclidean norm of the vector. A tail of e takes about
sqrt(2 x log(1 / e)) terms, where the series of `dense_rates` takes more than 2x. The series of a distribution goes on until
this bound is below 1e-6 of its smallest entry, down to a tail of 1e-16: every probability above 1e-10 has six digits. Those of a loss
end when the bound on the error of the loss is small enough.

Rounding is not part of the bound. It stays relative to each entry, because T_k is computed by its differences,

    D_{k+1} = D_k + (2 R / h) T_k,   T_{k+1} = T_k + D_{k+1},

and what arrives at a state far from the others has been multiplied by the same small rates as the result. The tests measure it.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.special import ive


# What the terms that are left out may add to an entry of a distribution, relative to its smallest one.
PRECISION = 1e-6
# The same in absolute terms, for derivatives.
MAX_ERROR = 1e-6
# The tail at which the series of a distribution is first looked at, and that at which it ends in any case.
FIRST_TAIL, LAST_TAIL = 1e-9, 1e-16
# What each of three series may change a term of a loss by.
TOLERANCE = 1e-6
SMALLEST = torch.finfo(torch.float32).tiny
# The largest log(row / m), less the smallest one: no m is below the first, and no row that counts is below the second.
LOG_RANGE = -math.log(SMALLEST) - math.log(LAST_TAIL)  # 124
# What 2 may differ by from a sum of two probabilities that are one each.
ROUNDING = 1e-6
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
        self.num_classes = len(rates)
        self.block_size = max(1, BLOCK_BYTES // (4 * len(rates)))

    def distributions(self, vectors: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        """exp(a R) times each vector `[n, K]`, for its own finite exponent `[n]`.

        The entries of a vector are not negative, and their sum is at most one.
        """

        def sum_block(series: Series, norms: torch.Tensor) -> torch.Tensor:
            return series.until(lambda total: PRECISION * (total.amin(0) / norms).amin().item()).clamp_(min=0)

        return self._in_blocks(sum_block, vectors, exponents)

    def derivatives(self, vectors: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        """exp(a R) times vectors `[n, K]` of any sign and size, to an absolute error of MAX_ERROR."""

        def sum_block(series: Series, norms: torch.Tensor) -> torch.Tensor:
            return series.up_to(MAX_ERROR / norms.amax().clamp(min=MAX_ERROR).item())

        return self._in_blocks(sum_block, vectors, exponents)

    def _in_blocks(self, sum_block: Callable, vectors: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        """Neighboring vectors that share an exponent go through the series together."""
        runs, lengths = exponents.unique_consecutive(return_counts=True)
        parts = []
        for run, exponent in zip(vectors.split(lengths.tolist()), runs.tolist()):
            for block in self.split(run):
                parts.append(sum_block(Series(self, block.T.contiguous(), exponent), block.norm(dim=-1)).T)
        return join(parts)

    def split(self, vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Blocks of vectors, or of states. None is much smaller than the others: a series costs almost the same for it."""
        return vectors.tensor_split(max(1, len(vectors) // self.block_size))

    def products(
        self, p: torch.Tensor, x_0: torch.Tensor, x_t: torch.Tensor, cumulative: float, step: float
    ) -> tuple[torch.Tensor, ...]:
        """q(x_s = . | x_0), q(x_t | x_s = .) and p Qbar_s for p `[N, K]`, and whether a loss needs more digits of them, `[N]`.

        The exponents are those of Qbar_s, and of the step from s to t. With w = row column / Z_0 and l = log(row / m), errors of e_0 in
        row, e_t in column and e in m change a term of the loss,

            <w, l> + log Z - log Z_0,

        by at most LOG_RANGE (e_0 (1 - w(x_t) + 1 - column(x_t)) + e_t) / Z_0 + e <w, 1 / m> + (e + e_t) / Z, because row, column and
        m each add up to one. The derivative by row is column (l - <w, l>) / Z_0, and l - <w, l> is at most LOG_RANGE, and at x_t
        at most LOG_RANGE (1 - w(x_t)), where w(x_t) is known up to 2 e_0 / Z_0.
        """
        parts = zip(self.split(p), self.split(x_0), self.split(x_t))
        return tuple(map(join, zip(*(self._products(*part, cumulative, step) for part in parts))))

    def _products(self, p, x_0, x_t, cumulative: float, step: float) -> tuple[torch.Tensor, ...]:
        """[`products`] of one block of vectors, as transposed views of `[K, n]`, the layout of the series."""
        steps, rows = Series(self, self.one_hot(x_t), step), Series(self, self.one_hot(x_0), cumulative)
        column, at_t = steps.up_to(LAST_TAIL).clamp_(min=0), x_t[None]  # [K, n], [1, n]

        def sensitivity_to_row(row: torch.Tensor) -> torch.Tensor:
            """Largest change of a term of the loss by the tail of the series of row, in units of the tail, `[n]`."""
            w = row.clamp(min=0) * column
            z_0 = w.sum(0)
            moves = 2 - (w.gather(0, at_t) / z_0 + column.gather(0, at_t))[0]
            return LOG_RANGE * (moves + ROUNDING + 2 * rows.tail / z_0) / z_0  # an error of row changes w(x_t) too

        row = rows.until(lambda row: TOLERANCE / sensitivity_to_row(row).amax().item()).clamp_(min=0)
        w = row * column
        z_0, norms, products = w.sum(0), p.norm(dim=-1), Series(self, p.T.contiguous(), cumulative)
        w.div_(z_0)

        def sensitivity(m: torch.Tensor) -> torch.Tensor:
            """Largest change of a term of the loss by the tail of the series of m, in units of the tail, `[n]`."""
            return norms * ((w / m.clamp(min=SMALLEST)).sum(0) + 1 / (column * m).sum(0))

        m = products.until(lambda m: TOLERANCE / sensitivity(m).amax().item()).clamp_(min=0)
        error = rows.tail * sensitivity_to_row(row) + products.tail * sensitivity(m)
        error += steps.tail * (LOG_RANGE / z_0 + 1 / (column * m).sum(0))
        return row.T, column.T, m.T, ~(error <= 3 * TOLERANCE)

    def one_hot(self, states: torch.Tensor) -> torch.Tensor:
        """`[K, n]` for states `[n]`."""
        return torch.zeros(self.num_classes, len(states)).scatter_(0, states[None], 1)

    def step(self, polynomial: torch.Tensor) -> torch.Tensor:
        """(2 R / h) T_k. Sums of weighted rows of an embedding are faster than the sparse products of torch."""
        columns, offsets, values = self.matrix
        return torch.embedding_bag(
            polynomial, columns, offsets, mode=0, per_sample_weights=values, include_last_offset=True
        )[0]


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All parts as one tensor, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Series:
    """The series of a block of vectors `[K, n]` that share an exponent. It can be continued."""

    def __init__(self, exponential: ChebyshevExponential, vectors: torch.Tensor, exponent: float):
        self.exponential, self.vectors = exponential, vectors
        self.coefficients, self.tails = coefficients(exponential.half_width * exponent)
        self.total, self.count = vectors * self.coefficients[0], 1
        self.polynomial = self.difference = vectors

    @property
    def tail(self) -> float:
        """Largest error of an entry of the sum, in units of the norm of its vector."""
        return float(self.tails[self.count - 1])

    def until(self, needed: Callable[[torch.Tensor], float]) -> torch.Tensor:
        """The sum, `[K, n]`, with a tail below the one that `needed` returns for the sum."""
        tail, wanted = 1.0, FIRST_TAIL
        while wanted < tail:
            tail = wanted
            wanted = max(LAST_TAIL, needed(self.up_to(tail)))  # the first if the other is NaN
        return self.total

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
            self.total.add_(self.polynomial, alpha=float(self.coefficients[k]))
        self.count = max(self.count, count)
        return self.total
