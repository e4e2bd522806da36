# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The reward of a particle filter, and what can be seen of it ahead, from a noisy state."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..numerics import categorical, compute_dtype, uniforms
from ..utils.checks import check_float, check_type, describe
from .walk import SamplerStep


# Number of x_0 drawn for each particle in each step, none of which takes a call of the network.
NUM_DRAWS = 4


@dataclass(frozen=True)
class Reward:
    """scale r(x_0), the logarithm of the factor by which the distribution of x_0 is multiplied.

    Args:
        function (`Callable`): r, which maps data `[n, ...]` to numbers `[n]`.
        scale (`float`, defaults to 1.0): Factor of the reward.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    scale: float = 1.0

    def __post_init__(self):
        check_type("reward_fn", self.function, Callable, "a function")
        check_float("reward_scale", self.scale)

    def __call__(self, x_0: torch.Tensor) -> torch.Tensor:
        """scale r(x_0), `[n]`, float32."""
        values = self.function(x_0)
        is_float = isinstance(values, torch.Tensor) and values.is_floating_point()
        if not is_float or values.shape != x_0.shape[:1]:
            raise ValueError(
                f"reward_fn returned {describe(values)} for {len(x_0)} rows: return one number per row, a floating-point "
                f"tensor of shape [{len(x_0)}]"
            )
        if not values.isfinite().all():
            raise ValueError("reward_fn returned NaN or infinity: return finite numbers")
        return self.scale * values.float().to(x_0.device)


def look_ahead(
    scheduler,
    step: SamplerStep,
    reward: Reward,
    num_particles: int,
    generator: torch.Generator | list[torch.Generator] | None = None,
    known: torch.Tensor | None = None,
    is_known: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logarithm of the expected exp(scale r(x_0)) given x_s, one number per particle, `[n]`: the potential of x_s.

    At the data it is scale r(x_0) itself. Before, it is the mean over a few draws of x_0. The filter is consistent for any
    potential, as those of one path cancel but for the last. All particles of a sample spend the same
    random numbers, so that they differ only as far as their states do. A network that predicts x_{t-1} sees nothing ahead.

    Args:
        num_particles: Number of consecutive rows of x_s that belong to one sample.
        generator: Source of the draws, or a list of one per sample.
        known, is_known: Data that the draws show.
    """
    x_s = step.prev_sample
    if step.previous_timestep == -1:
        return reward(x_s)
    if scheduler.config.prediction_type == "previous":
        return torch.zeros(len(x_s), device=x_s.device)
    logits = data_logits(scheduler, step).flatten(0, -2)  # [n N, K]
    values = []
    for _ in range(NUM_DRAWS):
        u = uniforms((len(x_s) // num_particles, *x_s.shape[1:]), generator, x_s.device)
        x_0 = categorical(logits, u.repeat_interleave(num_particles, 0).flatten()).view_as(x_s)
        values.append(reward(x_0 if known is None or is_known is None else torch.where(is_known, known, x_0)))
    return torch.stack(values).logsumexp(0) - math.log(NUM_DRAWS)


def data_logits(scheduler, step: SamplerStep) -> torch.Tensor:
    """Logits of x_0 given x_s, `[n, ..., K]`, from the prediction of the network at x_t, which takes no further call.

    log p(x_0 | x_s) = log p(x_0 | the other positions of x_t) + log q(x_s | x_0) + const
    """
    transition = scheduler.transition
    s, t = (scheduler.num_steps_behind(timestep) for timestep in (step.previous_timestep, step.timestep))
    logits = scheduler.logits(step.model_output).to(compute_dtype(step.model_output))
    if scheduler.config.x0_posterior == "denoising":
        logits = transition.to_leave_one_out(logits, step.sample, t)
    logits = transition.forbid(logits + transition.log_likelihood(step.prev_sample, 0, s, logits.dtype))
    # A known element may be one that the network has excluded; any guess will do.
    is_excluded = logits.amax(-1, keepdim=True) == -torch.inf
    return torch.where(is_excluded, transition.forbid(torch.zeros_like(logits)), logits)
