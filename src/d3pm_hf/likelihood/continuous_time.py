# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The bound in continuous time: an integral over the survival A of the data, at drawn values of A.

The integral over L = -log A is taken over the angle f with A = cos(f)^2, so that dL = 2 tan(f) df: near the data, and near the
noise, the terms of single examples then have a finite variance.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..losses.continuous import (
    continuous_transition,
    divergence_rate,
    predict_data,
    unchanged_integral,
    unchanged_rate,
)
from ..losses.network import predict_needed
from ..numerics import ShortRow, to_device, uniforms
from ..schedulers import D3PMScheduler
from ..transitions.base import expand_time
from ..utils.checks import check_int
from .terms import Term, per_example


@dataclass(frozen=True)
class Clock:
    """The stretch of continuous time that belongs to each timestep: the survival between it and the one before.

    Args:
        angles (`torch.Tensor` of shape `[T + 1]`): The angle f of the data, and of each timestep.
        strata (`list[tuple[float, float]]`): Stretches of angles, given as (begin, width): one for each term.
    """

    angles: torch.Tensor
    strata: list[tuple[float, float]]

    @property
    def widths(self) -> torch.Tensor:
        """The range of angles of each timestep, `[T]`."""
        return self.angles.diff()

    @property
    def first(self) -> int:
        """The first timestep with noise: a network is shown it next to the data."""
        return int((self.widths > 0).nonzero()[0])


def create_clock(scheduler: D3PMScheduler, num_evaluated: int) -> Clock:
    """The clock of the process, with `num_evaluated` strata.

    The stretch of the first timestep is divided by itself, as its integral has a part in closed form. All strata are about
    equally wide.
    """
    transition = continuous_transition(scheduler)
    behind = torch.arange(len(scheduler) + 1)
    log_a = transition.log_survival(0, behind, torch.empty(len(behind)))
    angles = torch.atan2((-torch.expm1(log_a)).sqrt(), (log_a / 2).exp())  # [T + 1]
    last = angles[-1].item()
    if last == 0:  # no step adds noise
        return Clock(angles, [])
    near = angles[angles > 0][0].item()  # where the stretch of the first timestep ends
    check_int("num_eval_timesteps", num_evaluated, 2 if near < last else 1)
    num_near = num_evaluated
    if near < last:
        num_near = min(max(1, round(num_evaluated * near / last)), num_evaluated - 1)
    strata = []
    for begin, end, count in ((0.0, near, num_near), (near, last, num_evaluated - num_near)):
        width = (end - begin) / max(count, 1)
        strata += [(begin + i * width, width) for i in range(count)]
    return Clock(angles, strata)


def continuous_terms(
    scheduler: D3PMScheduler,
    model: Callable,
    x_0: torch.Tensor,
    mask: torch.Tensor,
    clock: Clock,
    generators: list[torch.Generator] | list[ShortRow],
    condition: dict[str, torch.Tensor],
) -> Iterator[Term]:
    """One term for each stratum: each example draws an angle from it, and x_t with the survival of that angle.

    A term is the integral over the stretch of its timestep, and stands for the share of it that the stratum covers. Next to the
    data the rate of an element that has not changed is about A / (A p(x_0) / pi(x_0) + 1 - A), by which no number of draws would
    find a small p(x_0). So one call of the network for x_0 itself gives the integral of that in closed form, and the draws give
    the rest.

    Args:
        scheduler, model, x_0, mask, generators, condition: As in [`sampled_terms`].
        clock: [`create_clock`].
    """
    transition = continuous_transition(scheduler)
    log_pi_0 = transition.table("log_stationary", x_0.device)[x_0]
    log_p_0, unchanged = torch.zeros_like(log_pi_0), torch.zeros(len(x_0), dtype=torch.float64)
    needed = {"previous_timesteps": -1, "loss_mask": mask}  # as for a step to the data
    # Noise that never leads to data leaves no doubt about what has not changed.
    if clock.strata and transition.absorbing_state not in transition.never_data:
        t = torch.full((len(x_0),), clock.first, device=x_0.device)
        output, kept = predict_needed(scheduler, model, x_0, t, condition, **needed)
        log_p_0 = predict_data(scheduler, output, x_0, x_0, t, log_p_0, mask, kept).log_p_0
        last_a = clock.angles[clock.first + 1].cos().item() ** 2
        unchanged = per_example(unchanged_integral(log_p_0, log_pi_0, last_a), mask)  # [B]
    for begin, width in clock.strata:
        angle = begin + width * (1 - uniforms((len(x_0),), generators))  # [B], above `begin`
        # The timestep in whose stretch each angle is.
        index = torch.searchsorted(clock.angles[1:].contiguous(), angle).clamp(max=len(clock.angles) - 2)
        t, f = index.to(x_0.device), expand_time(to_device(angle, x_0.device), x_0)
        log_a, log_noise = 2 * f.cos().log(), 2 * f.sin().log()
        x_t = torch.where(mask, transition.replace(x_0, log_noise.exp(), generators), x_0)
        output, kept = predict_needed(scheduler, model, x_t, t, condition, **needed)
        prediction = predict_data(scheduler, output, x_0, x_t, t, log_a - log_noise, mask, kept)
        rate = divergence_rate(transition, prediction, x_0, x_t, log_a, log_noise)
        integrated = unchanged_rate(log_p_0, log_pi_0, log_a, log_noise)
        rate = rate - torch.where(expand_time(t == clock.first, x_0), integrated, 0)
        share = clock.widths[index]  # [B], of the angles
        term = share * per_example(2 * f.tan() * rate, mask) + torch.where(index == clock.first, unchanged, 0)
        yield index, width / share, term
