# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""log Qbar_0 .. log Qbar_T: a table of matrices at first, and factors of low rank once all entries are of one size."""

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch

from ..numerics import wide_dtype
from ..transitions.base import at_times, expand_time
from ..transitions.dense import select_rows
from ..utils.checks import values_are_known
from .log_matmul import probabilities


# A matrix is flat if its smallest entry is above this share of the largest. An error that is small beside the largest entry is
# then small beside all of them.
FLAT = 1e-3
# Singular values below this are left out, and no entry of a flat matrix may change by more than this, relative to itself.
MIN_TABLE_SINGULAR_VALUE, MAX_RELATIVE_ERROR = 1e-15, 1e-11
# Fewer states have small tables, and factors save nothing if their rank is above this share of K.
MIN_TABLE_STATES, MAX_TABLE_RANK_SHARE = 128, 1 / 4


def is_flat(log_matrix: torch.Tensor) -> bool:
    """Whether all entries are of one size."""
    low, high = log_matrix.aminmax()
    return len(log_matrix) >= MIN_TABLE_STATES and (low - high).item() > math.log(FLAT)


def flat_basis(matrix: torch.Tensor) -> torch.Tensor | None:
    """A basis `[K, r]` of the columns of a flat matrix, to rounding in every entry; `None` if r is not small.

    If the matrix Q and another one, P, are doubly stochastic, the same basis holds for Q P: no error in an entry of Q P is above
    the largest in Q, and no entry is below the smallest of Q.
    """
    left, singular_values, _ = torch.linalg.svd(matrix)
    left = left[:, : int((singular_values > MIN_TABLE_SINGULAR_VALUE).sum())].contiguous()
    if left.shape[1] > MAX_TABLE_RANK_SHARE * len(matrix):
        return None
    error = (left @ (left.T @ matrix) / matrix - 1).abs().max().item()
    return left if error < MAX_RELATIVE_ERROR else None


class CumulativeProducts:
    """log Qbar_n for n = 0 .. T.

    Args:
        table: log Qbar_n for n < N, `[N, K, K]`, of the dtype of the results.
        left, right: Factors of Qbar_n for n >= N, `[K, r]` and `[T + 1 - N, r, K]`, float64; `None` if the table has all.
    """

    def __init__(
        self,
        table: torch.Tensor,
        left: torch.Tensor | None = None,
        right: torch.Tensor | None = None,
    ):
        self.table = table
        self.left: Any = left
        self.right: Any = right

    def to(self, device) -> "CumulativeProducts":
        """The table and the factors on `device`."""
        left, right = (None if v is None else v.to(device, wide_dtype(device)) for v in (self.left, self.right))
        return CumulativeProducts(self.table.to(device), left, right)

    def matrices(self, n) -> torch.Tensor:
        """log Qbar_n for times `[B]`, `[B, K, K]`, or `[1, K, K]` for an integer."""
        return self._at(n, lambda n: at_times(self.table, n), lambda right: self._log(self.left @ right))

    def probabilities(self, n, dtype: torch.dtype) -> torch.Tensor:
        """Qbar_n for times `[B]` or an integer, `[B, K, K]`; the product of two entries is no denormal number."""
        return self._at(
            n,
            lambda n: probabilities(at_times(self.table, n), squared=True).to(dtype),
            lambda right: (self.left @ right).to(dtype),
        )

    def rows(self, n, x: torch.Tensor) -> torch.Tensor:
        """log q(x_n = . | x_0 = x), `[B, ..., K]`, for times `[B]` or an integer."""

        def late(right, x):
            left = self.left.index_select(0, x.flatten()).view(len(x), -1, right.shape[1])  # [B, N, r]
            return self._log(left @ right).view(*x.shape, -1)

        return self._at(n, lambda n, x: select_rows(self.table, n, x), late, x)

    def _log(self, p: torch.Tensor) -> torch.Tensor:
        return p.log().to(self.table.dtype)

    def _at(self, n, early: Callable, late: Callable, *x: torch.Tensor) -> torch.Tensor:
        """`early` of times in the table, and `late` of the right factors `[B, r, K]` of the others.

        Where it would wait for a device to know which times are which, both are computed.
        """
        if self.left is None or self.right is None:
            return early(n, *x)
        size = len(self.table)
        if isinstance(n, Integral):
            return early(n, *x) if n < size else late(self.right[int(n) - size].unsqueeze(0), *x)
        n = n.reshape(-1)
        if values_are_known(n) and values_are_known(self.table):
            if len(n) == 1:
                return self._at(n.item(), early, late, *x)
            parts = [v.split(1) for v in x]
            return torch.cat([self._at(m, early, late, *part) for m, *part in zip(n.tolist(), *parts)])
        n = n.to(self.table.device)
        in_table = early(n.clamp(max=size - 1), *x)
        beyond = late(self.right.index_select(0, (n - size).clamp(min=0)), *x)
        return torch.where(expand_time(n, in_table) < size, in_table, beyond)
