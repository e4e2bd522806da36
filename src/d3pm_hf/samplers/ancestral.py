# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Ancestral sampling."""

from collections.abc import Iterator

import torch

from ..numerics import scalar_tensor
from ..utils.devices import finish_graph
from .base import OutputCheck, SamplerStep, check_sampler_arguments, register_sampler


@register_sampler("ancestral")
@torch.no_grad()
def ancestral(
    scheduler,
    denoiser,
    x_t: torch.Tensor,
    timesteps: list[int],
    *,
    known: torch.Tensor | None = None,
    is_known: torch.Tensor | None = None,
    generator: torch.Generator | list[torch.Generator] | None = None,
    condition: dict | None = None,
    callback=None,
    progress_bar=None,
    **step_arguments,
) -> torch.Tensor:
    """Draws x_0 by ancestral sampling, with one call of the denoiser per timestep. The arguments are those of [`Sampler`].

        x_s ~ p(x_s | x_t)        (eq. 4 of the paper) for each t of `timesteps` and the s that follows it

    At known positions, x_t shows the data wherever the process can have kept them until t. For absorbing processes the
    result is a sample given the known data if the network is exact. For every process and network, [`particle_filter`] draws
    from p(x_0 | known) in the limit of many particles.

    With `temperature=0`, x_s is drawn from q(x_s | x_t, x_0) for the most likely x_0 of the prediction.
    """
    timesteps = check_sampler_arguments(
        scheduler, denoiser, x_t, timesteps, known, is_known, condition, callback, progress_bar
    )
    steps = list(zip(timesteps, [*timesteps[1:], -1]))  # t and s
    times, outputs = move_timesteps(timesteps, x_t.device), OutputCheck(scheduler)
    finish_graph(x_t.device)
    for i, (t, s) in enumerate(steps if progress_bar is None else progress_bar(steps)):
        x_t = show_known(scheduler, x_t, t, known, is_known)
        model_output = denoiser(x_t, next(times), **(condition or {}))
        outputs.add(model_output, t)
        x_s = scheduler.step(
            model_output, t, x_t, previous_timestep=s, generator=generator, **step_arguments
        ).prev_sample
        x_s = show_known(scheduler, x_s, s, known, is_known)
        if callback is not None:
            changed = callback(SamplerStep(i, t, s, x_t, model_output, x_s))
            x_s = x_s if changed is None else changed
        x_t = x_s
        finish_graph(x_t.device)
    outputs.finish()
    return x_t


def move_timesteps(timesteps: list[int], device: torch.device) -> Iterator[torch.Tensor]:
    """The timesteps one by one, as tensors of no dimension on `device`. They are moved at once, except to XLA.

    The graph of each step is the same there only if its timestep is moved for itself.
    """
    if device.type == "xla":
        return (scalar_tensor(t, torch.long, device) for t in timesteps)
    return iter(torch.tensor(timesteps, device=device))


def show_known(scheduler, x_t, t: int, known, is_known) -> torch.Tensor:
    """`x_t` with its known elements replaced by what the process can show of `known` at timestep t."""
    return x_t if known is None else torch.where(is_known, scheduler.reveal(known, t), x_t)
