# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Sampling of an absorbing process that masks some of its tokens again."""

import torch

from ..numerics import categorical, uniforms
from ..utils.checks import check_float
from .ancestral import take_steps
from .positions_first import check_reveals_once
from .sampler import as_sampler, register_sampler
from .walk import Walk


@register_sampler("remasking")
@as_sampler
def remasking(walk: Walk, eta: float = 0.1) -> torch.Tensor:
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
    check_reveals_once(walk.scheduler, "remasking")
    mask = walk.scheduler.transition.absorbing_state

    def step(model_output, x_t, t, s):
        walk.scheduler.check_model_output(model_output, x_t)
        p_reveal, p_mask = reveal_and_mask(walk.scheduler, t, s, eta)
        u = uniforms((*x_t.shape, 1), walk.generator, x_t.device)[..., 0]
        u_state = torch.where(u < p_reveal, u / p_reveal, 0)  # uniform, given that the mask is revealed
        drawn = categorical(walk.logits(model_output).flatten(0, -2), u_state.flatten()).view_as(x_t)
        revealed = torch.where(u < p_reveal, drawn, x_t)
        return torch.where(x_t == mask, revealed, x_t.masked_fill(u < p_mask, mask))

    return take_steps(walk, step)


def reveal_and_mask(scheduler, t: int, s: int, eta: float) -> tuple[float, float]:
    """The probabilities that a step from t to s reveals a mask, and that it masks a token, sigma."""
    times = (scheduler.num_steps_behind(timestep) for timestep in (t, s))
    a_t, a_s = (scheduler.transition.log_survival(0, n, torch.empty(1)).exp().item() for n in times)
    sigma = eta * min(1.0, (1 - a_s) / a_t) if a_t > 0 else 0.0  # there is no token to mask if A_t = 0
    return min(1.0, (a_s - (1 - sigma) * a_t) / (1 - a_t)) if a_t < 1 else 0.0, sigma
