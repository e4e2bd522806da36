# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Products with Q and Qbar used by the matrix losses."""

from functools import cached_property
from typing import Any

import torch

from ..utils.checks import values_are_known
from .log_matmul import log_matmul, probabilities
from .low_rank import Factors


class DenseOperators:
    """q(x_s | x_0), q(x_t | x_s) and products with Qbar_s for states `[b, N]` and vectors `[b, N, K]`, from tables of `dtype`.

    As probabilities of `dtype`, and as logarithms in float64 for what probabilities cannot hold. `transition` is a
    `DenseTransition`, and `s` (`None` for t - 1) and `t` are times `[b]`.
    """

    def __init__(self, transition: Any, s, t, dtype: torch.dtype, device: torch.device):
        self._transition, self._times, self._dtype, self._device = transition, (s, t), dtype, device
        self._before = t - 1 if s is None else s

    @cached_property
    def _log_cumulative(self) -> torch.Tensor:
        return self._transition.log_cumulative(self._dtype, self._device).matrices(self._before)

    @cached_property
    def _cumulative(self) -> torch.Tensor:
        return probabilities(self._log_cumulative)

    @cached_property
    def factors(self) -> Factors | None:
        """Qbar_s of one sample as a product of low rank, if it is one, in float32 on a CPU."""
        if len(self._before) > 1 or self._dtype != torch.float32 or not values_are_known(self._before):
            return None
        return self._transition.factors(int(self._before))

    def reach(self, most: float) -> int:
        """A distance |x_t - x_s| beyond which q(x_t | x_s) sums up to `most` or less in the step of one sample."""
        return self._transition.step_reach(*self._times, most)

    @cached_property
    def rows(self) -> torch.Tensor:
        """q(x_s | x_0) as `[b, x_0, x_s]`; the product of two probabilities is no denormal number."""
        return self._transition.log_cumulative(self._dtype, self._device).probabilities(self._before, self._dtype)

    @cached_property
    def columns(self) -> torch.Tensor:
        """q(x_t | x_s) as `[b, x_t, x_s]`; the product of two probabilities is no denormal number."""
        return self._transition.step_columns(*self._times, self._dtype, self._device)

    def products(self, p: torch.Tensor, x_0: torch.Tensor, x_t: torch.Tensor):
        """q(x_s = . | x_0), q(x_t | x_s = .), p Qbar_s, and which elements `[b, N]` need logarithms (`None`: not known)."""
        gather = self._transition._gather_rows
        if self._transition._is_small(x_0):
            log_row = gather(self._log_cumulative, x_0)
            log_column = self._transition.log_likelihood(x_t, *self._times, self._dtype)
            row, column = (probabilities(log, squared=True) for log in (log_row, log_column))
        else:
            row, column = gather(self.rows, x_0), gather(self.columns, x_t)
        return row, column, p @ (self._cumulative[0] if len(p) == 1 else self._cumulative), None

    def backward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors times the transpose of Qbar_s."""
        return vectors @ (self._cumulative[0].T if len(vectors) == 1 else self._cumulative.mT)

    def log_row(self, x_0: torch.Tensor) -> torch.Tensor:
        """log q(x_s = . | x_0)."""
        return self._transition._gather_rows(self._log_cumulative, x_0).double()

    def log_column(self, x_t: torch.Tensor) -> torch.Tensor:
        """log q(x_t | x_s = .)."""
        return self._transition.log_likelihood(x_t, *self._times, self._dtype).double()

    def log_forward(self, log_vectors: torch.Tensor, log_floor: torch.Tensor) -> torch.Tensor:
        """log (vectors times Qbar_s), where that is above `log_floor`."""
        return log_matmul(log_vectors, self._log_cumulative, log_floor)

    def log_backward(self, log_vectors: torch.Tensor, log_floor: torch.Tensor) -> torch.Tensor:
        """log (vectors times the transpose of Qbar_s), where that is above `log_floor`."""
        return log_matmul(log_vectors, self._log_cumulative.mT, log_floor)


class SparseOperators:
    """q(x_s | x_0), q(x_t | x_s) and products with Qbar_s as [`DenseOperators`] has them, by series that are applied to each vector.

    `process` is a `SparseRateTransition`, and `cumulative` and `step` are the exponents `[b]` of Qbar_s and of the step.
    """

    def __init__(self, process: Any, cumulative: torch.Tensor, step: torch.Tensor, dtype: torch.dtype):
        self._process, self._cumulative, self._step, self._dtype = process, cumulative, step, dtype

    def _apply(self, vectors, exponents, transposed, signed=False):
        exponents = exponents.repeat_interleave(vectors.shape[1])
        return self._process.apply(vectors.flatten(0, 1), exponents, transposed, signed).view_as(vectors)

    def _apply_states(self, x, exponents, transposed):
        """Rows or columns of the states `[b, N]`, computed once for all elements of a sample that share a state."""
        num_classes = self._process.num_classes
        keys = torch.arange(len(x), device=x.device)[:, None] * num_classes + x
        keys, inverse = keys.unique(return_inverse=True)
        one_hot = self._process._one_hot(keys % num_classes, self._dtype)
        return self._process.apply(one_hot, exponents[(keys // num_classes).cpu()], transposed)[inverse]

    def row(self, x_0):
        return self._apply_states(x_0, self._cumulative, transposed=False)

    def column(self, x_t):
        return self._apply_states(x_t, self._step, transposed=True)

    def forward(self, vectors):
        return self._apply(vectors, self._cumulative, transposed=False)

    def backward(self, vectors):
        return self._apply(vectors, self._cumulative, transposed=True, signed=True)

    def products(self, p, x_0, x_t):
        """q(x_s = . | x_0), q(x_t | x_s = .), p Qbar_s, and which elements need logarithms, by series as long as the loss needs them."""
        short = self._process._short_series(p, self._dtype)
        if short is None or len(p) > 1 or not (self._cumulative + self._step).isfinite().all():
            return self.row(x_0), self.column(x_t), self.forward(p), None
        products = short.products(p[0], x_0[0], x_t[0], self._cumulative.item(), self._step.item())
        return tuple(product[None] for product in products)

    def _log_apply(self, log_vectors, exponents, transposed, log_floor=None):
        exponents = exponents.repeat_interleave(log_vectors.shape[1])
        log_floor = None if log_floor is None else log_floor.flatten(0, 1)
        flat = log_vectors.flatten(0, 1)
        return self._process.log_apply(flat, exponents, transposed, log_floor=log_floor).view_as(log_vectors)

    def _log_one_hot(self, x):
        return self._process._one_hot(x, torch.float64).log().view(*x.shape, -1)

    def log_row(self, x_0):
        return self._log_apply(self._log_one_hot(x_0), self._cumulative, transposed=False)

    def log_column(self, x_t):
        return self._log_apply(self._log_one_hot(x_t), self._step, transposed=True)

    def log_forward(self, log_vectors, log_floor):
        return self._log_apply(log_vectors, self._cumulative, False, log_floor)

    def log_backward(self, log_vectors, log_floor):
        return self._log_apply(log_vectors, self._cumulative, True, log_floor)
