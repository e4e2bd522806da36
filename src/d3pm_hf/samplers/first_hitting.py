# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Sampling of an absorbing process in continuous time: one position after the other."""

import torch

from .positions_first import check_reveals_once, draw_steps, draw_uniforms, find_masks, reveal
from .sampler import as_sampler, register_sampler
from .walk import Walk


@register_sampler("first_hitting")
@as_sampler
def first_hitting(walk: Walk) -> torch.Tensor:
    """Draws x_0 from the limit of infinitely many steps of an absorbing process, with one call of the denoiser per mask.

    In continuous time no two positions are revealed at once, and they are revealed in a random order: the network sees each
    token before it predicts the next one. With exact predictions the samples have the distribution of the data itself, without
    an error of discretization. The clock of the network is that of all timesteps from `timesteps[0]` on: a call has the one
    from which its position is revealed, or the one after it if it is not the first. All rows of a batch go side by side.

    With `temperature=0` each position gets the most likely state, in an order that stays random.

    The arguments are those of [`Sampler`], without `callback`: steps of no length have no state between them.
    """
    check_reveals_once(walk.scheduler, "first_hitting")
    if walk.callback is not None:
        raise ValueError(
            "got a callback, and sampler='first_hitting' has no steps to call it after: choose 'ancestral'"
        )
    x_t = walk.show_known(walk.x_t, walk.timesteps[0])
    u_time, u_state = draw_uniforms(x_t, walk.generator)
    calls, times = order_positions(walk.scheduler, walk.timesteps[0], u_time, find_masks(walk.scheduler, x_t))
    return reveal(walk, x_t, calls, times, u_state)


def order_positions(scheduler, start: int, u: torch.Tensor, masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of the call that reveals each element, from 0 in each row, -1 if none does, and its timestep, `[B, N]` both.

    The larger its uniform in `u` `[B, N]`, the earlier one of the `masks` `[B, N]` of timestep `start` is revealed.
    """
    u, masks = u.cpu(), masks.cpu()
    clock = list(range(start, -1, -1))
    places = u.masked_fill(~masks, -1).argsort(-1, descending=True)  # [B, N]; those that are no masks come last
    steps = draw_steps(scheduler, clock, u).gather(-1, places)
    times = torch.tensor(clock)[steps]
    is_later = torch.zeros_like(masks)
    is_later[:, 1:] = steps[:, 1:] == steps[:, :-1]  # something has been revealed since this timestep
    times = torch.where(is_later, (times - 1).clamp(min=0), times)
    calls = places.argsort(-1)
    return calls.where(masks, -1), times.gather(-1, calls)
