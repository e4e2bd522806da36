# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Ancestral sampling of an autoregressive process with a causal network that keeps its keys and values."""

import torch

from ..numerics import categorical, uniforms
from ..schedulers.warping import create_warpers
from .ancestral import ancestral, show_known
from .base import OutputCheck, check_sampler_arguments, register_sampler, start_cache
from .given import show_given


def reveals_in_order(scheduler, timesteps: list[int]) -> bool:
    """Whether the steps reveal one token after the other, from the left, each drawn from the logits of x_0 as they are.

    This holds for the autoregressive process with no timestep left out, if its data never hold the mask, unless the network
    predicts x_{t-1} itself or its raw output is the last step. Whether it holds for a step of your own, of a scheduler or of a
    transition, is not known.
    """
    transition, config = scheduler.transition, scheduler.config
    return (
        scheduler.has_plain_steps
        and transition.reveals_in_order
        and transition.absorbing_state in transition.never_data
        and config.prediction_type != "previous"
        and config.reconstruction == "posterior"
        and timesteps == list(range(timesteps[0], -1, -1))
    )


@register_sampler("left_to_right")
@torch.no_grad()
def left_to_right(
    scheduler,
    denoiser,
    x_t: torch.Tensor,
    timesteps: list[int],
    *,
    condition: dict | None = None,
    known: torch.Tensor | None = None,
    is_known: torch.Tensor | None = None,
    callback=None,
    progress_bar=None,
    generator: torch.Generator | list[torch.Generator] | None = None,
    **step_arguments,
) -> torch.Tensor:
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
    timesteps = check_sampler_arguments(
        scheduler, denoiser, x_t, timesteps, known, is_known, condition, callback, progress_bar
    )
    if not reveals_in_order(scheduler, timesteps):
        raise ValueError(
            f"sampler is 'left_to_right', and the process is {scheduler.config.transition!r} with {len(timesteps)} steps from "
            f"timestep {timesteps[0]}: it must be 'autoregressive' with all timesteps, a mask that is never data, and "
            "reconstruction='posterior'; choose 'ancestral'"
        )
    condition = condition or {}
    cache = start_cache(denoiser, condition)
    if cache is None:
        raise ValueError(
            "sampler is 'left_to_right', and the denoiser keeps no keys and values of the tokens that it has read, or not with "
            f"the condition {sorted(condition)}: choose 'ancestral', or define start_cache and next_logits in your Denoiser"
        )
    if callback is not None or x_t.device.type == "xla":
        arguments: dict = {"known": known, "is_known": is_known, "generator": generator, "condition": condition}
        arguments |= {"callback": callback, "progress_bar": progress_bar, **step_arguments}
        return ancestral(scheduler, denoiser, x_t, timesteps, **arguments)
    create_warpers(**step_arguments)  # checks them, also if there is nothing to draw
    scheduler.transition.log_survival(0, 1, x_t)  # checks that there is a timestep for each token

    x = show_known(scheduler, x_t, timesteps[0], known, is_known).clone()  # [B, N]
    is_drawn = x == scheduler.transition.absorbing_state
    for is_fixed in (is_known, condition.get("is_given")):
        is_drawn = is_drawn if is_fixed is None else is_drawn & ~is_fixed
    calls, outputs = is_drawn.any(0).tolist(), OutputCheck(scheduler)
    for t in timesteps if progress_bar is None else progress_bar(timesteps):
        i = x.shape[1] - 1 - t
        u = uniforms((*x.shape, 1), generator, x.device)[:, i, 0]  # [B]; `ancestral` draws for all positions
        if known is not None and is_known is not None:
            x[:, i] = torch.where(is_known[:, i], known[:, i], x[:, i])
        if calls[i]:
            model_output = denoiser.next_logits(x[:, :i], cache, **condition)  # [B, K]
            outputs.add(model_output, t)
            logits = scheduler.transition.forbid(scheduler.step_logits(model_output, **step_arguments))
            x[:, i] = torch.where(is_drawn[:, i], categorical(logits, u), x[:, i])
    outputs.finish()
    return show_given(x, condition.get("given"), condition.get("is_given"))
