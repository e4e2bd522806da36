# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What the posterior q(x_s | x_t, x_0) of a process of matrices, and its prediction, are made of."""

from functools import cached_property
from typing import Any

import torch

from ..utils.checks import values_are_known
from .cumulative import CumulativeProducts
from .log_matmul import log_matmul, probabilities
from .low_rank import Factors


class DenseOperators:
    """q(x_s | x_0), q(x_t | x_s) and products with Qbar_s for states `[b, N]` and vectors `[b, N, K]`.

    As probabilities of `dtype`, and as logarithms in float64 for what probabilities cannot hold. All are from tables of
    `table_dtype`. `transition` is a `DenseTransition`, and `s` (`None` for t - 1) and `t` are times `[b]`.
    """

    def __init__(self, transition: Any, s, t, dtype: torch.dtype, table_dtype: torch.dtype, device: torch.device):
        self._transition, self._times, self._before = transition, (s, t), t - 1 if s is None else s
        self._dtype, self._table_dtype, self._device = dtype, table_dtype, device

    @property
    def _cumulative_products(self) -> CumulativeProducts:
        return self._transition.log_cumulative(self._table_dtype, self._device)

    @cached_property
    def _log_cumulative(self) -> torch.Tensor:
        return self._cumulative_products.matrices(self._before).to(self._dtype)

    @cached_property
    def _cumulative(self) -> torch.Tensor:
        return probabilities(self._log_cumulative)

    @cached_property
    def factors(self) -> Factors | None:
        """Qbar_s of one sample as a product of low rank, if it is one and float32 is wanted on a CPU."""
        if len(self._before) > 1 or self._dtype != torch.float32 or not values_are_known(self._before):
            return None
        return self._cumulative_products.factors(int(self._before))

    @cached_property
    def rows(self) -> torch.Tensor:
        """q(x_s | x_0) as `[b, x_0, x_s]`; the product of two probabilities is no denormal number."""
        return self._cumulative_products.probabilities(self._before, self._dtype)

    @cached_property
    def columns(self) -> torch.Tensor:
        """q(x_t | x_s) as `[b, x_t, x_s]`; the product of two probabilities is no denormal number."""
        return self._transition.step_columns(*self._times, self._dtype, self._table_dtype, self._device)

    def reach(self, most: float) -> int:
        """A distance |x_t - x_s| beyond which q(x_t | x_s) sums up to `most` or less in the step of one sample."""
        return self._transition.step_reach(*self._times, most)

    def row(self, x_0: torch.Tensor) -> torch.Tensor:
        """q(x_s = . | x_0)."""
        gather = self._transition._gather_rows
        if self._transition._is_small(x_0):
            return probabilities(gather(self._log_cumulative, x_0), squared=True)
        return gather(self.rows, x_0)

    def column(self, x_t: torch.Tensor) -> torch.Tensor:
        """q(x_t | x_s = .)."""
        if self._transition._is_small(x_t):
            column = self._transition.log_likelihood(x_t, *self._times, self._table_dtype)
            return probabilities(column.to(self._dtype), squared=True)
        return self._transition._gather_rows(self.columns, x_t)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors times Qbar_s."""
        return vectors @ (self._cumulative[0] if len(vectors) == 1 else self._cumulative)

    def backward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors times the transpose of Qbar_s."""
        return vectors @ (self._cumulative[0].T if len(vectors) == 1 else self._cumulative.mT)

    def log_row(self, x_0: torch.Tensor) -> torch.Tensor:
        """log q(x_s = . | x_0)."""
        return self._transition._gather_rows(self._log_cumulative, x_0).double()

    def log_column(self, x_t: torch.Tensor) -> torch.Tensor:
        """log q(x_t | x_s = .)."""
        return self._transition.log_likelihood(x_t, *self._times, self._table_dtype).double()

    def log_forward(self, log_vectors: torch.Tensor, log_floor: torch.Tensor) -> torch.Tensor:
        """log (vectors times Qbar_s), where that is above `log_floor`."""
        return log_matmul(log_vectors, self._log_cumulative, log_floor)

    def log_backward(self, log_vectors: torch.Tensor, log_floor: torch.Tensor) -> torch.Tensor:
        """log (vectors times the transpose of Qbar_s), where that is above `log_floor`."""
        return log_matmul(log_vectors, self._log_cumulative.mT, log_floor)
