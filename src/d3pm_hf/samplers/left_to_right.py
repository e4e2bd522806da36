# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Ancestral sampling of an autoregressive process with a causal network that keeps its keys and values."""

from typing import Any

import torch

from ..numerics import categorical, uniforms
from .ancestral import take_steps
from .sampler import as_sampler, register_sampler
from .walk import Walk


def reveals_in_order(scheduler, timesteps: list[int]) -> bool:
    """Whether the steps reveal one token after the other, from the left, each drawn from the logits of x_0 as they are.

    This holds for the autoregressive process with no timestep left out, if its data never hold the mask and its steps are plain
    ([`~D3PMScheduler.has_plain_steps`]). Whether it holds for a step of your own, of a scheduler or of a transition, is not known.
    """
    transition = scheduler.transition
    return (
        scheduler.has_plain_steps
        and transition.reveals_in_order
        and transition.absorbing_state in transition.never_data
        and timesteps == list(range(timesteps[0], -1, -1))
    )


def start_cache(denoiser, condition: dict) -> Any:
    """An empty cache of a denoiser ([`~models.Denoiser.start_cache`]), or `None` if it keeps none."""
    start = getattr(denoiser, "start_cache", None)
    return None if start is None else start(condition)


@register_sampler("left_to_right")
@as_sampler
def left_to_right(walk: Walk) -> torch.Tensor:
    """Draws the x_0 of [`ancestral`] for an autoregressive process, with one call of the network for one token each.

        x^i ~ p(x_0^i | x^0, ..., x^{i-1})        for each position i from the left

    The denoiser must be causal and keep what it has read ([`~models.Denoiser.start_cache`]): a call reads the tokens that are
    new, where a call of [`ancestral`] reads all N. Tokens that are known or given in all rows, such as a prompt, are read
    together with the next call. Each token spends the random numbers that [`ancestral`] spends, so that both draw the same
    samples from the same generators, up to the rounding of the network.

    `temperature=0` is greedy decoding: each token is the most likely one, and nothing is random.

    The arguments are those of [`Sampler`]. With a `callback`, which sees the logits of all positions, and on XLA, where shapes
    should not change, this is [`ancestral`].
    """
    scheduler, timesteps, condition = walk.scheduler, walk.timesteps, walk.condition
    if not reveals_in_order(scheduler, timesteps):
        raise ValueError(
            f"sampler is 'left_to_right', and the process is {scheduler.config.transition!r} with {len(timesteps)} steps from "
            f"timestep {timesteps[0]}: it must be 'autoregressive' with all timesteps, a mask that is never data, and "
            "reconstruction='posterior'; choose 'ancestral'"
        )
    cache = start_cache(walk.denoiser, condition)
    if cache is None:
        raise ValueError(
            "sampler is 'left_to_right', and the denoiser keeps no keys and values of the tokens that it has read, or not with "
            f"the condition {sorted(condition)}: choose 'ancestral', or define start_cache and next_logits in your Denoiser"
        )
    if walk.callback is not None or walk.x_t.device.type == "xla":
        return take_steps(walk, walk.step)
    scheduler.transition.log_survival(0, 1, walk.x_t)  # checks that there is a timestep for each token

    x = walk.show_known(walk.x_t, timesteps[0])  # [B, N]
    is_drawn = x == scheduler.transition.absorbing_state
    for is_fixed in (walk.is_known, walk.is_given):
        is_drawn = is_drawn if is_fixed is None else is_drawn & ~is_fixed
    x, calls = walk.show_given(x).clone(), is_drawn.any(0).tolist()
    for t in walk.progress(timesteps):
        i = x.shape[1] - 1 - t
        u = uniforms((*x.shape, 1), walk.generator, x.device)[:, i, 0]  # [B]; `ancestral` draws for all positions
        if walk.known is not None:
            x[:, i] = torch.where(walk.is_known[:, i], walk.known[:, i], x[:, i])
        if calls[i]:
            model_output = walk.denoiser.next_logits(x[:, :i], cache, **condition)  # [B, K]
            if x.device.type != "cpu":
                walk.note_output(model_output, t)
            x[:, i] = torch.where(is_drawn[:, i], categorical(walk.logits(model_output), u), x[:, i])
    return x
