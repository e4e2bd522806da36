# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The law of the timesteps of training: the probability P(t) with which an example is noised to timestep t."""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import expit, ndtri

from ..numerics import wide_dtype


@dataclass(frozen=True)
class UniformLaw:
    """P(t) = 1 / T, the law of L_vb and L_lambda."""

    def times(self, quantiles: np.ndarray) -> np.ndarray:
        """The times in [0, 1] below which the law has the probabilities `quantiles` `[B]`; timestep t is at [t, t + 1) / T."""
        return quantiles

    def weights(self, timesteps: torch.Tensor, num_timesteps: int) -> torch.Tensor | None:
        """The weights 1 / (T P(t)) of `timesteps` `[B]`, in float32, or `None` if all of them are one.

        The mean of weighted terms is an unbiased estimate of their mean over all timesteps:

            sum_t P(t) weight(t) f(t) = sum_t f(t) / T
        """
        return None


@dataclass(frozen=True)
class LogitNormalLaw(UniformLaw):
    """A bell around the middle of time: the logit of t / T is normal, as in the training of Stable Diffusion 3.

        P(t) = F((t + 1) / T) - F(t / T),   F(u) = Phi((logit u - mean) / std)

    Args:
        mean (`float`): Mean of the logit. Below zero, timesteps with less noise are more frequent.
        std (`float`): Standard deviation of the logit.
    """

    mean: float
    std: float

    def times(self, quantiles: np.ndarray) -> np.ndarray:
        return expit(self.mean + self.std * ndtri(quantiles))

    def weights(self, timesteps: torch.Tensor, num_timesteps: int) -> torch.Tensor:
        edges = torch.stack([timesteps, timesteps + 1]).to(wide_dtype(timesteps.device)) / num_timesteps
        low, high = (edges.logit() - self.mean) / self.std
        # Phi is close to one above the mean, where the difference is that of the upper tails.
        low, high = torch.where(low > 0, -high, low), torch.where(low > 0, -low, high)
        probabilities = torch.special.ndtr(high) - torch.special.ndtr(low)
        return (1 / (num_timesteps * probabilities)).float()
