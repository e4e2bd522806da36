# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A particle filter around ancestral sampling, for samples given some of the data, or under a reward."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..numerics import categorical, uniforms
from ..utils.checks import check_int, check_type
from .ancestral import ancestral
from .base import SamplerStep, check_sampler_arguments, register_sampler
from .particles import evidence, log_mean_weight, resample_uneven, take_particles
from .reward import Reward, look_ahead


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
    reward_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    reward_scale: float = 1.0,
    report: dict | None = None,
    **step_arguments,
) -> torch.Tensor:
    """Draws x_0 given known elements, or under a reward, with `num_particles` particles per sample.

    Each particle is an ancestral sample. After each step, its weight is multiplied by the probability of the known
    elements, p(x_s at the known positions | x_t), and by how much the reward that can be seen ahead from x_s has grown
    ([`look_ahead`]); where the weights have become uneven, the particles are resampled. One particle is drawn at the end, in
    proportion to its weight. In the limit of many particles it has the distribution

        p(x_0 | known) exp(reward_scale r(x_0)) / Z

    The arguments are those of [`Sampler`], with P = `num_particles` consecutive rows per sample in all of them, and:

    Args:
        num_particles (`int`, defaults to 1): Number of particles P per sample.
        reward_fn (`Callable`, *optional*): r, which maps data `[n, ...]` to numbers `[n]`. It needs several particles.
        reward_scale (`float`, defaults to 1.0): Factor of the reward.
        report (`dict`, *optional*): Receives `log_normalizer`, `[B]`: the logarithm of the mean weight of the particles, an
            unbiased estimate of Z, the expectation of exp(reward_scale r(x_0)). With known elements it is multiplied by
            the probability of their path, which is 1 for absorbing processes.

    Returns:
        `torch.LongTensor` of shape `[B, ...]`, for `x_t` of shape `[B * P, ...]`: x_0.
    """
    check_int("num_particles", num_particles, 1)
    timesteps = check_sampler_arguments(
        scheduler, denoiser, x_t, timesteps, known, is_known, condition, callback, progress_bar
    )
    if len(x_t) % num_particles:
        raise ValueError(f"x_t has {len(x_t)} rows: pass a multiple of num_particles={num_particles}")
    reward = None if reward_fn is None else Reward(reward_fn, reward_scale)
    if reward is not None and num_particles == 1:
        raise ValueError("reward_fn needs several particles to choose from: pass num_particles of at least 2")
    if report is not None:
        check_type("report", report, dict, "a dictionary")
    log_weights = torch.zeros(len(x_t) // num_particles, num_particles, device=x_t.device)  # [B, P]
    log_potentials = torch.zeros(len(x_t), device=x_t.device)  # of the reward that is seen ahead
    log_normalizer = torch.zeros(len(log_weights), device=x_t.device)  # up to the last time of resampling
    each = generator[::num_particles] if isinstance(generator, (list, tuple)) else generator  # one per sample

    def weigh(step: SamplerStep) -> torch.Tensor | None:
        nonlocal log_weights, log_potentials, log_normalizer
        if known is not None and is_known is not None:
            log_p = scheduler.posterior_logits(step.model_output, step.timestep, step.sample, step.previous_timestep)
            log_weights = log_weights + evidence(log_p, step.prev_sample, is_known).view_as(log_weights)
        if reward is not None:
            ahead = look_ahead(scheduler, step, reward, num_particles, each, known, is_known)
            log_weights, log_potentials = log_weights + (ahead - log_potentials).view_as(log_weights), ahead
        if known is not None or reward is not None:
            before = log_mean_weight(log_weights)
            survivors, log_weights = resample_uneven(log_weights, uniforms(before.shape, each, x_t.device))
            log_normalizer = log_normalizer + before - log_mean_weight(log_weights)
            log_potentials = take_particles(log_potentials, survivors)
            step = replace(step, prev_sample=take_particles(step.prev_sample, survivors))
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
    if report is not None:
        report["log_normalizer"] = log_normalizer + log_mean_weight(log_weights)
    chosen = categorical(log_weights, uniforms(log_weights.shape[:1], each, x_t.device))  # [B]
    return take_particles(x_0, chosen[:, None])
