# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A particle filter around ancestral sampling, for samples given some of the data."""

from dataclasses import replace

import torch

from ..numerics import categorical, uniforms
from ..utils.checks import check_int
from .ancestral import ancestral
from .base import SamplerStep, check_sampler_arguments, register_sampler
from .particles import evidence, resample_uneven, take_particles


@register_sampler("particle_filter")
@torch.no_grad()
def particle_filter(
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
    num_particles: int = 1,
    **step_arguments,
) -> torch.Tensor:
    """Draws x_0 given known elements, with `num_particles` particles per sample.

    Each particle is an ancestral sample. After each step, its weight is multiplied by the probability of the known
    elements, p(x_s at the known positions | x_t); where the weights have become uneven, the particles are resampled. One
    particle is drawn at the end, in proportion to its weight.

    The arguments are those of [`Sampler`], with P = `num_particles` consecutive rows per sample in all of them.

    Returns:
        `torch.LongTensor` of shape `[B, ...]`, for `x_t` of shape `[B * P, ...]`: x_0.
    """
    check_int("num_particles", num_particles, 1)
    timesteps = check_sampler_arguments(
        scheduler, denoiser, x_t, timesteps, known, is_known, condition, callback, progress_bar
    )
    if len(x_t) % num_particles:
        raise ValueError(f"x_t has {len(x_t)} rows: pass a multiple of num_particles={num_particles}")
    log_weights = torch.zeros(len(x_t) // num_particles, num_particles, device=x_t.device)  # [B, P]
    each = generator[::num_particles] if isinstance(generator, (list, tuple)) else generator  # one per sample

    def weigh(step: SamplerStep) -> torch.Tensor | None:
        nonlocal log_weights
        if known is not None and is_known is not None:
            log_p = scheduler.posterior_logits(step.model_output, step.timestep, step.sample, step.previous_timestep)
            log_weights = log_weights + evidence(log_p, step.prev_sample, is_known).view_as(log_weights)
            u = uniforms(log_weights.shape[:1], each, x_t.device)
            x_s, log_weights = resample_uneven(step.prev_sample, log_weights, u)
            step = replace(step, prev_sample=x_s)
        changed = None if callback is None else callback(step)
        return step.prev_sample if changed is None else changed

    x_0 = ancestral(
        scheduler,
        denoiser,
        x_t,
        timesteps,
        known=known,
        is_known=is_known,
        generator=generator,
        condition=condition,
        callback=weigh,
        progress_bar=progress_bar,
        **step_arguments,
    )
    chosen = categorical(log_weights, uniforms(log_weights.shape[:1], each, x_t.device))  # [B]
    return take_particles(x_0, chosen[:, None])
