# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Known elements that follow the forward process, and the weights that make samples around them those of the model.

Given the data at some positions, the others are to be drawn from p(x_0 | known), the conditional distribution of the model.
The states of the known elements are drawn from the forward process, which leads to the data,

    x_T ~ q(x_T | x_0),   x_s ~ q(x_s | x_t, x_0),

and all others from the model. A particle is then weighed by how much more probable its known elements are under the model:

    p(x_T) / q(x_T | x_0),   p(x_s | x_t) / q(x_s | x_t, x_0)        and p(x_0 | x_t) in the last step

The mean weight is an unbiased estimate of p(known), for every network and process.
"""

from dataclasses import replace

import torch

from ..numerics import categorical, uniforms
from .base import SamplerStep
from .particles import evidence
from .reward import data_logits


def start_path(
    scheduler, x_t: torch.Tensor, timestep: int, known: torch.Tensor, is_known: torch.Tensor, generator=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x_t with known elements from q(x_t | x_0), and log p(x_t) / q(x_t | x_0) of them, `[n]`, at the last timestep T - 1.

    States that are impossible under the prior are not drawn. At any other timestep there is no prior, and no weight.
    """
    scheduler.check_states(known)
    transition, n = scheduler.transition, scheduler.num_steps_behind(timestep)
    log_q = transition.log_marginal(known, 0, n)  # [n, ..., K]
    if n < transition.num_steps:
        return draw_known(log_q, x_t, is_known, generator), torch.zeros(len(x_t), device=x_t.device)
    log_p = transition.table("log_prior", x_t.device, log_q.dtype).expand_as(log_q)
    log_q = log_q.masked_fill(log_p == -torch.inf, -torch.inf).log_softmax(-1)
    x_t = draw_known(log_q, x_t, is_known, generator)
    return x_t, evidence(log_p, x_t, is_known) - evidence(log_q, x_t, is_known)


def follow_path(
    scheduler, step: SamplerStep, known: torch.Tensor, is_known: torch.Tensor, generator=None
) -> tuple[SamplerStep, torch.Tensor]:
    """The step with known elements from q(x_s | x_t, x_0), and log q(x_s | x_t, x_0) of them, `[n]`."""
    if step.previous_timestep == -1:
        x_0 = torch.where(is_known, known, step.prev_sample)
        return replace(step, prev_sample=x_0), torch.zeros(len(x_0), device=x_0.device)
    s, t = (scheduler.num_steps_behind(timestep) for timestep in (step.previous_timestep, step.timestep))
    log_q = scheduler.transition.log_posterior(known, step.sample, s, t)  # [n, ..., K]
    x_s = draw_known(log_q, step.prev_sample, is_known, generator)
    return replace(step, prev_sample=x_s), evidence(log_q, x_s, is_known)


def foresee_known(scheduler, step: SamplerStep, known: torch.Tensor, is_known: torch.Tensor) -> torch.Tensor:
    """log p(known | x_s) from the prediction of the network at x_t, `[n]`: what the next weights of a good network will be.

    Particles are resampled by it ahead of time. As it cancels along a path, any guess leaves the filter exact: elements that
    the network excludes at x_t do not count, and with `prediction_type="previous"`, which says nothing about x_0, none does.
    """
    if step.previous_timestep == -1 or scheduler.config.prediction_type == "previous":
        return torch.zeros(len(known), device=known.device)
    log_p = data_logits(scheduler, step).log_softmax(-1)
    return evidence(log_p, known, is_known & (log_p.gather(-1, known[..., None]).squeeze(-1) > -torch.inf))


def draw_known(log_q: torch.Tensor, x: torch.Tensor, is_known: torch.Tensor, generator=None) -> torch.Tensor:
    """`x` `[n, ...]` with draws from `log_q` `[n, ..., K]` at the known positions."""
    log_q = log_q.masked_fill(~is_known[..., None], 0)  # the others may have no posterior
    u = uniforms(x.shape, generator, x.device)
    return torch.where(is_known, categorical(log_q.flatten(0, -2), u.flatten()).view_as(x), x)
