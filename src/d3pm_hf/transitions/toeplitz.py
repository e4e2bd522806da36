# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Processes over ordinal states: discretized Gaussian and band-diagonal noise."""

import warnings
from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import brentq
from tqdm.auto import tqdm

from ..schedules import entropy, information
from ..utils.checks import check_tensor
from ..utils.names import TRANSITIONS
from .dense import DenseTransition
from .family import register_transition


# The largest beta of a Gaussian that is tried for the mutual-information schedule: its kernel is flat.
FLAT_BETA = 1e6


def gaussian_log_kernels(num_classes: int, betas: torch.Tensor) -> torch.Tensor:
    """log [Q_t]_ij as a function of |i - j|, `[T, K]`: the discretized, truncated Gaussian of appendix A.2.3.

    exp(-4 |i-j|^2 / ((K-1)^2 beta_t)), normalized over -(K-1) .. K-1.
    """
    distance = torch.arange(num_classes, dtype=torch.float64)
    logits = -4 * distance**2 / ((num_classes - 1) ** 2 * betas[:, None])
    both_sides = torch.cat([logits[:, 1:], logits], -1)  # -(K-1) .. -1 and 0 .. K-1
    return logits - both_sides.logsumexp(-1, keepdim=True)


def band_log_kernels(num_classes: int, betas: torch.Tensor, bandwidth: int) -> torch.Tensor:
    """log [Q_t]_ij as a function of |i - j|, `[T, K]`: log (beta_t / K) up to `bandwidth`, -inf beyond (appendix A.2.5)."""
    distance = torch.arange(num_classes)
    return (betas[:, None] / num_classes * (distance <= bandwidth)).log()


class ToeplitzTransition(DenseTransition):
    """[Q_t]_ij = kernel_t(|i - j|) off the diagonal, which makes up the rest: doubly stochastic, so pi is uniform.

    Args:
        log_kernels: log kernel_t(d) for d = 0 .. K-1, `[T, K]`; the entry at d = 0 is not used.

    Examples:
        ```python
        import torch
        from d3pm_hf.transitions import ToeplitzTransition

        kernel = torch.tensor([0.0, 0.2, 0.1, 0.0]).log()  # probabilities of moves by 1, 2 and 3 levels
        process = ToeplitzTransition(kernel.expand(10, -1))  # ten steps
        assert torch.allclose(process.matrix(0, 1)[1, 2], torch.tensor(0.2).double())
        ```
    """

    max_beta = torch.inf  # a variance; how large that of a band may be, its diagonal decides

    @classmethod
    def create(cls, settings):
        """The transition whose kernels `cls.log_kernels_of` makes of the betas."""

        def kernels(betas: torch.Tensor) -> torch.Tensor:
            return cls.log_kernels_of(betas, settings)

        def from_information(unigram: torch.Tensor) -> torch.Tensor:
            return information_betas(kernels, unigram, settings.num_steps, cls.widest_beta(settings))

        return cls(kernels(settings.betas(from_information)))

    @staticmethod
    def log_kernels_of(betas: torch.Tensor, settings) -> torch.Tensor:
        """log kernel_t(d) of the betas `[T]`, `[T, K]`."""
        raise NotImplementedError("a registered family of Toeplitz transitions defines `log_kernels_of`")

    @staticmethod
    def widest_beta(settings) -> float:
        """The largest beta that is tried for the mutual-information schedule."""
        return FLAT_BETA

    @classmethod
    def min_bytes(cls, num_classes, num_steps):
        """Kernels and diagonals of all steps, `[T, K]` in float64, are at most 6 while they are built."""
        return super().min_bytes(num_classes, num_steps) + 6 * 8 * num_steps * num_classes

    def __init__(self, log_kernels: torch.Tensor):
        check_tensor("log_kernels", log_kernels, None, None)
        super().__init__(log_kernels.shape[1], log_kernels.shape[0])
        # The row i reaches i states on its left and K - 1 - i on its right.
        reach = torch.nn.functional.pad(log_kernels[:, 1:].exp().cumsum(-1), (1, 0))  # [T, K]
        diagonals = 1 - reach - reach.flip(-1)
        if not diagonals.min() >= 0:
            raise ValueError(
                f"with these log_kernels the chance to stay in a state would be {diagonals.min().item():.4g}: the betas must be positive, "
                "and small enough to leave every diagonal entry non-negative"
            )
        self.log_kernels, self.log_diagonals = log_kernels, diagonals.log()
        self.log_prior = torch.full((self.num_classes,), 1 / self.num_classes, dtype=torch.float64).log()

    def log_step_matrices(self, t):
        kernels, diagonals = (self.table(name, t.device)[t - 1] for name in ("log_kernels", "log_diagonals"))
        return self._spread(self._both_sides(kernels), diagonals)

    @staticmethod
    def _both_sides(kernels: torch.Tensor) -> torch.Tensor:
        """Kernels at the distances -(K-1) .. K-1, `[b, 2K - 1]`, from those at 0 .. K-1."""
        return torch.cat([kernels.flip(-1), kernels[:, 1:]], -1)

    @staticmethod
    def _spread(both_sides: torch.Tensor, diagonals: torch.Tensor) -> torch.Tensor:
        """Matrices `[b, K, K]` with kernels(i - j) off the diagonal, given as `[b, 2K - 1]`, and diagonals `[b, K]`."""
        num_classes = diagonals.shape[-1]
        if both_sides.device.type == "xla":  # which has no `unfold`
            states = torch.arange(num_classes, device=both_sides.device)
            matrices = both_sides[:, states - states[:, None] + num_classes - 1]
        else:
            matrices = both_sides.unfold(-1, num_classes, 1).flip(1)  # row i begins at -i
        matrices.diagonal(dim1=-2, dim2=-1).copy_(diagonals)
        return matrices


@register_transition("gaussian", TRANSITIONS["gaussian"])
class GaussianTransition(ToeplitzTransition):
    """The discretized, truncated Gaussian of the paper (appendix A.2.3), for ordinal states such as the levels of a pixel."""

    formula = "exp(-4 d^2 / ((K-1)^2 b)) at the distance d"
    beta_range = (1e-4, 0.02)

    @staticmethod
    def log_kernels_of(betas, settings):
        return gaussian_log_kernels(settings.num_classes, betas)


@register_transition("band_diagonal", TRANSITIONS["band_diagonal"])
class BandDiagonalTransition(ToeplitzTransition):
    """Moves within a band around the diagonal, all equally likely (appendix A.2.5 of the paper)."""

    formula = "b / K up to the distance bandwidth"
    options = ("bandwidth",)

    @staticmethod
    def log_kernels_of(betas, settings):
        return band_log_kernels(settings.num_classes, betas, settings.option("bandwidth"))

    @staticmethod
    def widest_beta(settings):
        """A wider band than this would oscillate rather than mix."""
        return settings.num_classes / (2 * settings.option("bandwidth") + 1)


def information_betas(
    kernel: Callable[[torch.Tensor], torch.Tensor], unigram: torch.Tensor, num_steps: int, max_beta: float
) -> torch.Tensor:
    """The mutual-information schedule of a Toeplitz process: beta_t such that I(x_t; x_0) = (1 - t/T) H(x_0) (appendix A.7).

    The matrices do not commute, so that beta_t depends on all steps before: solved one after the other.

    Args:
        kernel: The logarithms of the family's kernels, `[1, K]`, for betas `[1]`.
        max_beta: No larger beta is tried. A step can only lose so much; where that is too little it is taken.
    """
    total = entropy(unigram)

    def lost(product: torch.Tensor, log_beta: float) -> tuple[float, torch.Tensor]:
        step = ToeplitzTransition(kernel(torch.tensor([log_beta], dtype=torch.float64).exp()))
        after = product @ step.log_step_matrices(torch.tensor([1]))[0].exp()
        return 1 - (information(unigram, after) / total).item(), after

    product = torch.eye(len(unigram), dtype=torch.float64)
    betas, guess, top, worst = [], -12.0, float(np.log(max_beta)), 0.0
    for n in tqdm(range(1, num_steps + 1), desc="mutual-information schedule", delay=2, leave=False):
        low, high = guess - 0.1, guess + 0.1
        while lost(product, low)[0] > n / num_steps:
            low -= 1
        while high < top and lost(product, high)[0] < n / num_steps:
            high += 1
        guess = top
        if lost(product, min(high, top))[0] > n / num_steps:
            guess = brentq(lambda log_beta: lost(product, log_beta)[0] - n / num_steps, low, min(high, top), rtol=1e-7)
        reached, product = lost(product, guess)
        worst = max(worst, abs(reached - n / num_steps))
        betas.append(np.exp(guess))
    if worst > 1e-3:
        warnings.warn(
            f"the process cannot lose information evenly over {num_steps} steps: it is off by {worst:.3f} of what there "
            "is to lose; use more timesteps",
            stacklevel=2,
        )
    return torch.tensor(betas, dtype=torch.float64)
