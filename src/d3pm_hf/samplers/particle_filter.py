# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A particle filter around ancestral sampling, for samples given some of the data, or under a reward."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..numerics import categorical, uniforms
from ..utils.checks import check_choice, check_int, check_type
from .ancestral import ancestral
from .base import SamplerStep, check_sampler_arguments, register_sampler
from .known_path import follow_path, foresee_known, start_path
from .particles import evidence, log_mean_weight, resample_uneven, take_particles
from .reward import Reward, look_ahead


KNOWN_PATHS = ("noised", "clamped")


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
    known_path: str = "noised",
    reward_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    reward_scale: float = 1.0,
    report: dict | None = None,
    **step_arguments,
) -> torch.Tensor:
    """Draws x_0 given known elements, or under a reward, with `num_particles` particles per sample.

    Each particle is an ancestral sample, except that its known elements follow the forward process to their data:

        x_T ~ q(x_T | x_0),   x_s ~ q(x_s | x_t, x_0)        at the known positions

    Its weight is multiplied by p(x_T) / q(x_T | x_0) at the start, by p(x_s | x_t) / q(x_s | x_t, x_0) of the known elements after
    each step, and by how much the reward that can be seen ahead from x_s has grown ([`look_ahead`]); where the weights have become
    uneven, the particles are resampled. One particle is drawn at the end, in proportion to its weight. In the limit of many
    particles it has the distribution

        p(x_0 | known) exp(reward_scale r(x_0)) / Z

    of the model itself, for every network and process, where p includes `temperature`, `top_k` and `top_p`. With
    `temperature=0` it is the limit of low temperatures: the particles survive whose predictions come closest to what is known.

    The arguments are those of [`Sampler`], with P = `num_particles` consecutive rows per sample in all of them, and:

    Args:
        num_particles (`int`, defaults to 1): Number of particles P per sample.
        known_path (`str`, defaults to `"noised"`): States of the known elements at the timesteps before the data. `"noised"`: draws
            from the forward process, one path per particle. `"clamped"`: the data at all timesteps, weighed by
            p(x_s | x_t) alone. This is p(x_0 | known) only for an exact network, and with few particles often the better
            approximation of it.
        reward_fn (`Callable`, *optional*): r, which maps data `[n, ...]` to numbers `[n]`. It needs several particles.
        reward_scale (`float`, defaults to 1.0): Factor of the reward.
        report (`dict`, *optional*): Receives `log_normalizer`, `[B]`: the logarithm of the mean weight of the particles. It is
            an unbiased estimate of p(known) Z, where Z is the expectation of exp(reward_scale r(x_0)) given the known elements.
            With clamped elements, the probability of their path takes the place of p(known), which is 1 for absorbing processes.

    Returns:
        `torch.LongTensor` of shape `[B, ...]`, for `x_t` of shape `[B * P, ...]`: x_0.
    """
    check_int("num_particles", num_particles, 1)
    check_choice("known_path", known_path, KNOWN_PATHS)
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
    log_potentials = torch.zeros(len(x_t), device=x_t.device)  # of what is seen ahead
    log_normalizer = torch.zeros(len(log_weights), device=x_t.device)  # up to the last time of resampling
    each = generator[::num_particles] if isinstance(generator, (list, tuple)) else generator  # one per sample
    given = None if known is None or is_known is None else (known, is_known)
    noised = given if known_path == "noised" else None
    if noised is not None:
        x_t, log_ratio = start_path(scheduler, x_t, timesteps[0], *noised, generator)
        log_weights = log_weights + log_ratio.view_as(log_weights)

    def weigh(step: SamplerStep) -> torch.Tensor | None:
        nonlocal log_weights, log_potentials, log_normalizer
        gain, ahead = torch.zeros_like(log_potentials), torch.zeros_like(log_potentials)
        if given is not None:
            times = step.timestep, step.sample, step.previous_timestep
            log_p = scheduler.posterior_logits(step.model_output, *times, **step_arguments)
            if noised is not None:
                step, log_q = follow_path(scheduler, step, *noised, generator)
                gain, ahead = gain - log_q, foresee_known(scheduler, step, *noised)
            gain = gain + evidence(log_p, step.prev_sample, given[1])
        if reward is not None:
            ahead = ahead + look_ahead(scheduler, step, reward, num_particles, each, known, is_known)
        if given is not None or reward is not None:
            log_weights = log_weights + (gain + ahead - log_potentials).view_as(log_weights)
            before = log_mean_weight(log_weights)
            survivors, log_weights = resample_uneven(log_weights, uniforms(before.shape, each, x_t.device))
            log_normalizer = log_normalizer + before - log_mean_weight(log_weights)
            log_potentials = take_particles(ahead, survivors)
            step = replace(step, prev_sample=take_particles(step.prev_sample, survivors))
        changed = None if callback is None else callback(step)
        if changed is None:
            return step.prev_sample
        return changed if noised is None else torch.where(noised[1], step.prev_sample, changed)  # the path goes on

    x_0 = ancestral(
        scheduler,
        denoiser,
        x_t,
        timesteps,
        known=None if noised else known,
        is_known=None if noised else is_known,
        generator=generator,
        condition=condition,
        callback=weigh,
        progress_bar=progress_bar,
        **step_arguments,
    )
    if noised is not None:
        x_0 = torch.where(noised[1], noised[0], x_0)  # of a call that was ended before the data, too
    log_normalizer = log_normalizer + log_mean_weight(log_weights)
    if not log_normalizer.isfinite().all():
        sample = int((~log_normalizer.isfinite()).nonzero()[0])
        raise ValueError(
            f"no particle of sample {sample} gives the known elements a positive probability: leave out top_k and top_p, or pass "
            f"num_particles above {num_particles}"
        )
    if report is not None:
        report["log_normalizer"] = log_normalizer
    chosen = categorical(log_weights, uniforms(log_weights.shape[:1], each, x_t.device))  # [B]
    return take_particles(x_0, chosen[:, None])
