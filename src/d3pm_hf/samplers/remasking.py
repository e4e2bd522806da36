# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Sampling of an absorbing process that masks some of its tokens again."""

import torch

from ..numerics import categorical, uniforms
from ..utils.checks import check_float
from .ancestral import ancestral
from .base import check_sampler_arguments, register_sampler
from .positions_first import check_reveals_once
from .wrapped import SchedulerWithStep


@register_sampler("remasking")
@torch.no_grad()
def remasking(
    scheduler,
    denoiser,
    x_t: torch.Tensor,
    timesteps: list[int],
    *,
    eta: float = 0.1,
    known: torch.Tensor | None = None,
    is_known: torch.Tensor | None = None,
    condition: dict | None = None,
    generator: torch.Generator | list[torch.Generator] | None = None,
    progress_bar=None,
    callback=None,
    **step_arguments,
) -> torch.Tensor:
    """Draws x_0 of an absorbing process by steps that also mask tokens again, with one call of the network per timestep.

        q(x_s = m | x_t = x_0, x_0) = sigma
        q(x_s = x_0 | x_t = m, x_0) = (A_s - (1 - sigma) A_t) / (1 - A_t),   sigma = eta min(1, (1 - A_s) / A_t)

    with A_t = q(x_t = x_0 | x_0), as in ReMDM (Wang et al., 2025). More masks are revealed than by [`ancestral`], in exchange
    for those that return, so that q(x_s | x_0) is that of the process for every `eta`. What is kept is therefore the
    distribution of each position: a step from q(x_t) with an exact denoiser gives q(x_s^i) for all i. It is a heuristic in two
    ways: the samples of a network that is not exact have another distribution than those of [`ancestral`], of which the bound
    tells nothing, and as more positions change at once, more of their dependence is lost in a step. No token is masked in the
    last step.

    With `temperature=0` a mask that is revealed gets the most likely state. Which ones are, and which return, stays random.

    The arguments are those of [`Sampler`], and:

    Args:
        eta (`float`, defaults to 0.1): Share of the largest possible probability of a token to be masked again. 0 is
            [`ancestral`], with the same samples from the same generators.
    """
    check_float("eta", eta, 0, 1)
    timesteps = check_sampler_arguments(
        scheduler, denoiser, x_t, timesteps, known, is_known, condition, callback, progress_bar
    )
    check_reveals_once(scheduler, "remasking")

    def draw(model_output, logits, x_t, t, s):
        p_reveal, p_mask = reveal_and_mask(scheduler, t, s, eta)
        mask = scheduler.transition.absorbing_state
        u, is_mask = uniforms((*x_t.shape, 1), generator, x_t.device)[..., 0], x_t == mask
        u_state = torch.where(u < p_reveal, u / p_reveal, 0)  # uniform, given that the mask is revealed
        drawn = categorical(logits.flatten(0, -2), u_state.flatten()).view_as(x_t)
        revealed = torch.where(u < p_reveal, drawn, x_t)
        return torch.where(is_mask, revealed, x_t.masked_fill(u < p_mask, mask))

    options: dict = {"generator": generator, "condition": condition, "known": known, "is_known": is_known}
    options |= {"callback": callback, "progress_bar": progress_bar, **step_arguments}
    return ancestral(SchedulerWithStep(scheduler, draw), denoiser, x_t, timesteps, **options)


def reveal_and_mask(scheduler, t: int, s: int, eta: float) -> tuple[float, float]:
    """The probabilities that a step from t to s reveals a mask, and that it masks a token, sigma."""
    times = (scheduler.num_steps_behind(timestep) for timestep in (t, s))
    a_t, a_s = (scheduler.transition.log_survival(0, n, torch.empty(1)).exp().item() for n in times)
    sigma = eta * min(1.0, (1 - a_s) / a_t) if a_t > 0 else 0.0  # there is no token to mask if A_t = 0
    return min(1.0, (a_s - (1 - sigma) * a_t) / (1 - a_t)) if a_t < 1 else 0.0, sigma
