# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Ancestral sampling of an absorbing process that draws first when each position is revealed."""

import torch

from ..numerics import categorical, count_up_to, to_device, uniforms
from .ancestral import take_steps
from .sampler import as_sampler, register_sampler
from .walk import Walk


def reveals_once(scheduler) -> bool:
    """Whether a step of the process replaces masks by data and changes nothing else, each mask independently of the network.

    This holds for an absorbing process whose data never hold the mask, and which masks all positions alike.
    """
    transition = scheduler.transition
    return (
        scheduler.has_plain_steps
        and transition.has_rank_one_steps
        and transition.is_alike
        and transition.absorbing_state in transition.never_data
    )


def is_mixed(scheduler) -> bool:
    """Whether the process has a mask, which data never hold, and other noise beside it, and skips steps ([`skip_steps`])."""
    return (
        scheduler.has_plain_steps
        and scheduler.transition.has_rank_one_steps
        and scheduler.transition.absorbing_state is None
        and scheduler.gap_token_id is not None
    )


def check_reveals_once(scheduler, sampler: str) -> None:
    """Checks that the `sampler` of this name, which draws first when a position is revealed, applies to the process."""
    if not reveals_once(scheduler):
        raise ValueError(
            f"sampler is {sampler!r}, and the process is {scheduler.config.transition!r}: it must be an absorbing one that masks "
            "all positions alike and whose data never hold the mask, with prediction_type 'x0' or 'logistic' and reconstruction 'posterior'; choose 'ancestral'"
        )


@register_sampler("positions_first")
@as_sampler
def positions_first(walk: Walk) -> torch.Tensor:
    """Draws x_0 from the distribution of [`ancestral`], and calls the denoiser only for steps that reveal something.

    In an absorbing process a mask stays one from t to s with a probability that does not depend on the network,

        p(x_s = m | x_t = m) = (1 - A_s) / (1 - A_t),   A_t = q(x_t = x_0 | x_0),

    and all other states stay as they are. So the step that reveals a position is drawn first, for all positions; then the
    network is called for those steps alone. Each row has its own: the rows of a batch go through their steps side by side,
    each at its own timestep, and leave the batch when they are done. One row of N positions has an expected number of calls of

        sum over the steps of 1 - (1 - P(a position is revealed in this step))^N

    With `temperature=0` each position gets the most likely state, at a step that stays random.

    A process of masks and other noise, `"absorbing_uniform"`, skips fewer steps ([`skip_steps`]).

    The arguments are those of [`Sampler`]. With a `callback`, which sees all steps, and on XLA, where shapes should not
    change, this is [`ancestral`]. A sample is the same alone and in a batch if it has a generator of its own.
    """
    scheduler, timesteps, device = walk.scheduler, walk.timesteps, walk.x_t.device
    mixed = not reveals_once(scheduler)
    if mixed and not is_mixed(scheduler):
        check_reveals_once(scheduler, "positions_first")
    skips = not mixed or (device.type == "cpu" and hasattr(scheduler.transition, "propose_previous"))
    if walk.callback is not None or device.type == "xla" or not skips:
        return take_steps(walk, walk.step)
    if mixed:
        return skip_steps(walk)
    x_t = walk.show_known(walk.x_t, timesteps[0])
    u_step, u_state = draw_uniforms(x_t, walk.generator)
    steps = draw_steps(scheduler, timesteps, u_step).where(find_masks(scheduler, x_t), len(timesteps)).cpu()
    times = torch.tensor(timesteps)[steps.clamp(max=len(timesteps) - 1)]
    return reveal(walk, x_t, order_calls(steps, len(timesteps)), times, u_state)


def skip_steps(walk: Walk) -> torch.Tensor:
    """Draws the x_0 of [`ancestral`] for a process of rank one, and calls the denoiser only for rows that a step may change.

    Each position is replaced with a probability of at most (1 - a) / (1 - A_t), a = A_t / A_s, for any output of the network, and
    where this is proposed, the network decides. Whether it is, and whether a mask is replaced by noise, is drawn first. All draws
    are those of [`ancestral`] from the same generators. Which rows are left has to be known to the host, so that this is for a CPU.
    """
    scheduler, transition, x_t = walk.scheduler, walk.scheduler.transition, walk.x_t
    for timestep, previous_timestep in walk.progress(walk.steps):
        x_t = walk.show_known(x_t, timestep)
        s, t = (scheduler.num_steps_behind(n) for n in (previous_timestep, timestep))
        proposal = transition.propose_previous(x_t, s, t, walk.generator)
        # A state that is never data has p(x_t) = 0, and its proposal is accepted whatever the network says.
        asks = proposal.may_change & (proposal.from_data | ~transition.excluded.contain(x_t))
        rows = asks.flatten(1).any(1).nonzero().squeeze(-1)
        x_s = torch.where(proposal.may_change, transition.draw_stationary(proposal.u_state), x_t)
        if len(rows):
            model_output = walk.predict(x_t[rows], timestep, rows)
            logits = scheduler.step_logits(model_output, **walk.step_options)
            is_denoising = scheduler.config.x0_posterior == "denoising"
            x_s[rows] = transition.accept_previous(logits, x_t[rows], t, proposal.take(rows), is_denoising)
        x_t = walk.show_known(x_s, previous_timestep)
    return x_t


def reveal(walk: Walk, x_t: torch.Tensor, calls: torch.Tensor, times: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Replaces masks by draws from the network, those of a row in the order of its calls, all rows side by side.

    Args:
        x_t: States `[B, ...]`, with N elements each.
        calls: The number of the call that reveals each element, from 0, on the host, `[B, N]`; -1 if none does.
        times: The timestep of that call, on the host, `[B, N]`.
        u: A uniform in [0, 1) for each element, `[B, N]`.
    """
    # The rows with the most calls come first, so that those that are left are the first ones.
    num_calls, order = (calls.amax(1) + 1).sort(descending=True, stable=True)
    calls, times, rows = calls[order], times[order], to_device(order, x_t.device)
    x, u = x_t.flatten(1)[rows], u[rows].contiguous()
    for i in walk.progress(range(int(num_calls[0]))):
        active = int((num_calls > i).sum())
        is_next = calls[:active] == i  # [n, N]
        t = times[:active].where(is_next, -1).amax(1)  # [n]: elements of one call have one timestep
        elements = to_device(is_next.flatten().nonzero().squeeze(-1), x.device)  # [r], in the first rows
        revealed = walk.predict(x[:active].unflatten(1, x_t.shape[1:]), t, rows[:active], elements)  # [r, K]
        x.view(-1)[elements] = categorical(walk.logits(revealed), u.view(-1)[elements])
    return x[to_device(order.argsort(), x.device)].view_as(x_t)


def draw_uniforms(x_t: torch.Tensor, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two uniforms for each element: when it is revealed, and as what; `[B, N]` each."""
    first, second = uniforms((*x_t.shape, 2), generator, x_t.device).flatten(1, -2).unbind(-1)
    return first.contiguous(), second


def find_masks(scheduler, x_t: torch.Tensor) -> torch.Tensor:
    """Where x_t is the mask, `[B, N]`."""
    return (x_t == scheduler.transition.absorbing_state).flatten(1)


def draw_steps(scheduler, timesteps: list[int], u: torch.Tensor) -> torch.Tensor:
    """The index of the step that reveals an element, of the shape of `u`, if it is a mask at `timesteps[0]`.

    A mask at t_0 is still one at s with probability (1 - A_s) / (1 - A_{t_0}). Larger uniforms are revealed earlier.
    """
    behind = scheduler.num_steps_behind(torch.tensor([*timesteps, -1], device=u.device))
    log_a = scheduler.transition.log_survival(0, behind, u.new_empty(len(behind)))
    masked = -torch.expm1(log_a).to(u.dtype)  # 1 - A, [S + 1]
    remaining = masked[1:] / masked[0]  # after each step; 0 at the end
    return len(timesteps) - count_up_to(remaining.flip(0), u)


def order_calls(steps: torch.Tensor, num_steps: int) -> torch.Tensor:
    """The number of the call that reveals each element, from 0 in each row, `[B, N]`; -1 if none does.

    `steps` are those that reveal each element, `[B, N]`; `num_steps` if none does.
    """
    ordered, index = steps.sort(-1)
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[:, 1:] = ordered[:, 1:] > ordered[:, :-1]
    numbers = (is_new.cumsum(-1) - 1).masked_fill(ordered == num_steps, -1)
    return numbers.gather(-1, index.argsort(-1))
