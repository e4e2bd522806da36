# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Processes given by the matrices of their steps, such as the user's own Q_t.

Matrices are kept and multiplied as logarithms, which hold what float32 probabilities would round to zero.
"""

from abc import abstractmethod
from typing import Any

import torch

from ..numerics import log_matmul
from ..utils.checks import check_distributions, check_int, check_tensor
from ..utils.names import TRANSITIONS
from .base import Transition, expand_time
from .family import register_transition
from .kernel import keeps


def select_rows(matrices: torch.Tensor, which, x: torch.Tensor) -> torch.Tensor:
    """Row x of the matrix `which` (one, or one per sample): `[B, ..., K]`. `index_select` copies rows; an index is slower."""
    rows = expand_time(which, x) * matrices.shape[-1] + x
    return matrices.reshape(-1, matrices.shape[-1]).index_select(0, rows.flatten()).view(*x.shape, -1)


class DenseTransition(Transition):
    """A process given by the matrices of its steps, which a family defines in `log_step_matrices`.

    Examples:
        ```python
        from d3pm_hf import D3PMScheduler
        from d3pm_hf.transitions import DenseTransition

        scheduler = D3PMScheduler(8, 50, transition="gaussian", beta_schedule="linear", beta_end=1.0)
        assert isinstance(scheduler.transition, DenseTransition)
        ```
    """

    def __init__(self, num_classes: int, num_steps: int):
        super().__init__()
        self.num_classes, self.num_steps = num_classes, num_steps

    @property
    def is_alike(self):
        return keeps(type(self), DenseTransition, ("log_marginal", "log_likelihood"))

    @abstractmethod
    def log_step_matrices(self, t: torch.Tensor) -> torch.Tensor:
        """log Q_t for each of the times `[b]` (1 .. T), float64, `[b, K, K]`, on the device of `t`."""

    @classmethod
    def min_bytes(cls, num_classes, num_steps):
        """Bytes of the table of log Qbar_t, `[T+1, K, K]` in float32, and of products of matrices in float64."""
        table = 4 * (num_steps + 1) * num_classes**2
        return table + 4 * 8 * num_classes**2 + super().min_bytes(num_classes, num_steps)

    def multiply(self, log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
        """log (A B), float64 `[b, n, m]`, from log A `[b, n, K]` and log B `[b, K, m]` or `[1, K, m]`."""
        return log_matmul(log_a, log_b)

    def log_stretch(self, s: int, t: int) -> torch.Tensor:
        """log Q_{s..t} = log (Q_{s+1} ... Q_t), float64, `[K, K]`."""
        product = torch.eye(self.num_classes, dtype=torch.float64).log()
        for n in range(s + 1, t + 1):
            product = self.multiply(product[None], self.log_step_matrices(torch.tensor([n])))[0]
        return product

    def log_matrices(self, s, t, dtype: torch.dtype, device) -> torch.Tensor:
        """log Q_{s..t}, one per sample, `[B, K, K]`, or `[1, K, K]` where the times are integers. `s=None` means t - 1."""
        times = (torch.as_tensor(n).reshape(-1).cpu() for n in (t - 1 if s is None else s, t))
        pairs = torch.stack(torch.broadcast_tensors(*times), -1)
        stretches = [self.log_stretch(*pair) for pair in pairs.tolist()]
        empty: list[Any] = [torch.empty(0, self.num_classes, self.num_classes, dtype=torch.float64)]
        return torch.cat(empty + [stretch[None] for stretch in stretches]).to(device, dtype)

    def matrix(self, s, t):
        if not self.is_alike:
            return super().matrix(s, t)
        return self.log_stretch(s, t).exp()

    def log_marginal(self, x, s, t, dtype=torch.float32):
        if not x.is_floating_point():
            return self._gather_rows(self.log_matrices(s, t, dtype, x.device), x)
        log_p = x.reshape(len(x), -1, self.num_classes)  # [B, N, K]
        return self.multiply(log_p, self.log_matrices(s, t, x.dtype, x.device)).to(x.dtype).view_as(x)

    def log_likelihood(self, x_t, s, t, dtype=torch.float32):
        return self._gather_rows(self.log_matrices(s, t, dtype, x_t.device).mT.contiguous(), x_t)

    def _gather_rows(self, matrices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Row x of the matrix of each sample (or of the only one): `[B, ..., K]`."""
        which = torch.arange(len(x), device=x.device) if len(matrices) > 1 else 0
        return select_rows(matrices, which, x)


@register_transition("matrix", TRANSITIONS["matrix"])
class MatrixTransition(DenseTransition):
    """The user's own Q_1 .. Q_T.

    Args:
        matrices: `[T, K, K]`, or `[K, K]` for one matrix at every step.
        num_steps: T.
        prior: The distribution of x_T, `[K]`; by default where uniform data end up.

    Examples:
        ```python
        import torch
        from d3pm_hf.transitions import MatrixTransition

        process = MatrixTransition(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), num_steps=50)
        assert torch.allclose(process.log_prior.exp(), torch.tensor([2 / 3, 1 / 3]).double(), atol=1e-4)
        ```
    """

    formula = "transition_matrices"
    has_schedule = False
    required_tensors = ("transition_matrices",)

    @classmethod
    def create(cls, settings):
        tensors = settings.tensors
        return cls(tensors["transition_matrices"], settings.num_steps, tensors.get("stationary_probs"))

    @classmethod
    def input_tensors(cls):
        return "transition_matrices", "stationary_probs"

    @classmethod
    def tensor_shapes(cls, num_classes, num_steps):
        one = num_classes, num_classes
        return {"transition_matrices": [one, (num_steps, *one)], "stationary_probs": [(num_classes,)]}

    @classmethod
    def check_tensors(cls, tensors):
        for name in cls.tensor_shapes(1, 1):
            if name in tensors:
                check_distributions(name, tensors[name])

    def __init__(self, matrices: torch.Tensor, num_steps: int, prior: torch.Tensor | None = None):
        check_tensor("matrices", matrices)
        check_int("num_steps", num_steps, 1)
        if matrices.shape[-1] != matrices.shape[-2] or matrices.ndim not in (2, 3):
            raise ValueError(f"transition matrices of shape {tuple(matrices.shape)}: pass [T, K, K] or [K, K]")
        if matrices.ndim == 3 and len(matrices) != num_steps:
            raise ValueError(f"got {len(matrices)} transition matrices for {num_steps} steps: pass one per step")
        super().__init__(matrices.shape[-1], num_steps)
        given = matrices.double().reshape(-1, self.num_classes, self.num_classes)
        sums = given.sum(-1)
        if not (given >= 0).all() or (sums - 1).abs().max() > 1e-5:
            step, row = divmod(int((sums - 1).abs().argmax()), self.num_classes)
            raise ValueError(
                f"row {row} of the transition matrix of step {step + 1} sums to {sums[step, row].item():.6g} (smallest "
                f"entry of all: {given.min().item():.4g}): every row must be a probability distribution"
            )
        self.log_given = (given / sums[..., None]).log().expand(num_steps, -1, -1)
        if prior is None:
            uniform = torch.full((self.num_classes,), 1 / self.num_classes, dtype=torch.float64)
            (self.kernel() or self).fit_prior(uniform)
        else:
            check_tensor("prior", prior, self.num_classes)
            check_distributions("prior", prior)
            self.log_prior = prior.double().log()

    def log_step_matrices(self, t):
        return self.table("log_given", t.device)[t - 1]
