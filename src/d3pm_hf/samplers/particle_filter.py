# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A particle filter around ancestral sampling, for samples given some of the data, or under a reward."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..numerics import categorical, compute_dtype, count_up_to, uniforms
from ..utils.checks import check_choice, check_float, check_int, check_type, describe
from ..utils.modules import finish_graph
from .sampler import as_sampler, register_sampler
from .walk import SamplerStep, Walk


KNOWN_PATHS = ("noised", "clamped")
# Number of x_0 drawn for each particle in each step, none of which takes a call of the network.
NUM_DRAWS = 4


@register_sampler("particle_filter")
@as_sampler
def particle_filter(
    walk: Walk,
    num_particles: int = 1,
    known_path: str = "noised",
    reward_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    reward_scale: float = 1.0,
    report: dict | None = None,
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
    scheduler, x_t, generator, device = walk.scheduler, walk.x_t, walk.generator, walk.x_t.device
    if len(x_t) % num_particles:
        raise ValueError(f"x_t has {len(x_t)} rows: pass a multiple of num_particles={num_particles}")
    reward = None if reward_fn is None else Reward(reward_fn, reward_scale)
    if reward is not None and num_particles == 1:
        raise ValueError("reward_fn needs several particles to choose from: pass num_particles of at least 2")
    if report is not None:
        check_type("report", report, dict, "a dictionary")
    log_weights = torch.zeros(len(x_t) // num_particles, num_particles, device=device)  # [B, P]
    log_potentials = torch.zeros(len(x_t), device=device)  # of what is seen ahead
    log_normalizer = torch.zeros(len(log_weights), device=device)  # up to the last time of resampling
    each = generator[::num_particles] if isinstance(generator, (list, tuple)) else generator  # one per sample
    has_known, is_noised = walk.known is not None, walk.known is not None and known_path == "noised"
    if is_noised:
        x_t, log_ratio = start_path(walk)
        log_weights = log_weights + log_ratio.view_as(log_weights)

    finish_graph(device)
    for i, (t, s) in enumerate(walk.progress(walk.steps)):
        x_t = x_t if is_noised else walk.show_known(x_t, t)
        model_output = walk.predict(x_t, t)
        x_s = walk.step(model_output, x_t, t, s)
        step = SamplerStep(i, t, s, x_t, model_output, x_s if is_noised else walk.show_known(x_s, s))
        gain, ahead = torch.zeros_like(log_potentials), torch.zeros_like(log_potentials)
        if has_known:
            log_p = scheduler.posterior_logits(model_output, t, x_t, s, **walk.step_options)
            if is_noised:
                step, log_q = follow_path(walk, step)
                gain, ahead = gain - log_q, foresee_known(walk, step)
            gain = gain + evidence(log_p, step.prev_sample, walk.is_known)
        if reward is not None:
            ahead = ahead + look_ahead(scheduler, step, reward, num_particles, each, walk.known, walk.is_known)
        if has_known or reward is not None:
            log_weights = log_weights + (gain + ahead - log_potentials).view_as(log_weights)
            before = log_mean_weight(log_weights)
            survivors, log_weights = resample_uneven(log_weights, uniforms(before.shape, each, device))
            log_normalizer = log_normalizer + before - log_mean_weight(log_weights)
            log_potentials = take_particles(ahead, survivors)
            step = replace(step, prev_sample=take_particles(step.prev_sample, survivors))
        changed = None if walk.callback is None else walk.callback(step)
        x_t = step.prev_sample if changed is None else changed
        if is_noised:  # the path of the known elements goes on
            x_t = torch.where(walk.is_known, step.prev_sample, x_t)
        finish_graph(device)
    if is_noised:
        x_t = torch.where(walk.is_known, walk.known, x_t)  # of a call that was ended before the data, too
    walk.check_outputs()
    log_normalizer = log_normalizer + log_mean_weight(log_weights)
    if not log_normalizer.isfinite().all():
        sample = int((~log_normalizer.isfinite()).nonzero()[0])
        raise ValueError(
            f"no particle of sample {sample} gives the known elements a positive probability: leave out top_k and top_p, or pass "
            f"num_particles above {num_particles}"
        )
    if report is not None:
        report["log_normalizer"] = log_normalizer
    chosen = categorical(log_weights, uniforms(log_weights.shape[:1], each, device))  # [B]
    return take_particles(x_t, chosen[:, None])


@dataclass(frozen=True)
class Reward:
    """scale r(x_0), the logarithm of the factor by which the distribution of x_0 is multiplied.

    Args:
        function (`Callable`): r, which maps data `[n, ...]` to numbers `[n]`.
        scale (`float`, defaults to 1.0): Factor of the reward.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    scale: float = 1.0

    def __post_init__(self):
        check_type("reward_fn", self.function, Callable, "a function")
        check_float("reward_scale", self.scale)

    def __call__(self, x_0: torch.Tensor) -> torch.Tensor:
        """scale r(x_0), `[n]`, float32."""
        values = self.function(x_0)
        is_float = isinstance(values, torch.Tensor) and values.is_floating_point()
        if not is_float or values.shape != x_0.shape[:1]:
            raise ValueError(
                f"reward_fn returned {describe(values)} for {len(x_0)} rows: return one number per row, a floating-point "
                f"tensor of shape [{len(x_0)}]"
            )
        if not values.isfinite().all():
            raise ValueError("reward_fn returned NaN or infinity: return finite numbers")
        return self.scale * values.float().to(x_0.device)


def start_path(walk: Walk) -> tuple[torch.Tensor, torch.Tensor]:
    """x_t with known elements from q(x_t | x_0), and log p(x_t) / q(x_t | x_0) of them, `[n]`, at the last timestep T - 1.

    States that are impossible under the prior are not drawn. At any other timestep there is no prior, and no weight.
    """
    x_t, transition, n = walk.x_t, walk.scheduler.transition, walk.scheduler.num_steps_behind(walk.timesteps[0])
    log_q = transition.log_marginal(walk.known, 0, n)  # [n, ..., K]
    if n < transition.num_steps:
        return draw_known(walk, log_q, x_t), torch.zeros(len(x_t), device=x_t.device)
    log_p = transition.table("log_prior", x_t.device, log_q.dtype).expand_as(log_q)
    log_q = log_q.masked_fill(log_p == -torch.inf, -torch.inf).log_softmax(-1)
    x_t = draw_known(walk, log_q, x_t)
    return x_t, evidence(log_p, x_t, walk.is_known) - evidence(log_q, x_t, walk.is_known)


def follow_path(walk: Walk, step: SamplerStep) -> tuple[SamplerStep, torch.Tensor]:
    """The step with known elements from q(x_s | x_t, x_0), and log q(x_s | x_t, x_0) of them, `[n]`."""
    if step.previous_timestep == -1:
        x_0 = torch.where(walk.is_known, walk.known, step.prev_sample)
        return replace(step, prev_sample=x_0), torch.zeros(len(x_0), device=x_0.device)
    s, t = (walk.scheduler.num_steps_behind(timestep) for timestep in (step.previous_timestep, step.timestep))
    log_q = walk.scheduler.transition.log_posterior(walk.known, step.sample, s, t)  # [n, ..., K]
    x_s = draw_known(walk, log_q, step.prev_sample)
    return replace(step, prev_sample=x_s), evidence(log_q, x_s, walk.is_known)


def draw_known(walk: Walk, log_q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x` `[n, ...]` with draws from `log_q` `[n, ..., K]` at the known positions."""
    log_q = log_q.masked_fill(~walk.is_known[..., None], 0)  # the others may have no posterior
    u = uniforms(x.shape, walk.generator, x.device)
    return torch.where(walk.is_known, categorical(log_q.flatten(0, -2), u.flatten()).view_as(x), x)


def foresee_known(walk: Walk, step: SamplerStep) -> torch.Tensor:
    """log p(known | x_s) from the prediction of the network at x_t, `[n]`: what the next weights of a good network will be.

    Particles are resampled by it ahead of time. As it cancels along a path, any guess leaves the filter exact: elements that
    the network excludes at x_t do not count, and with `prediction_type="previous"`, which says nothing about x_0, none does.
    """
    known = walk.known
    if step.previous_timestep == -1 or walk.scheduler.config.prediction_type == "previous":
        return torch.zeros(len(known), device=known.device)
    log_p = data_logits(walk.scheduler, step).log_softmax(-1)
    return evidence(log_p, known, walk.is_known & (log_p.gather(-1, known[..., None]).squeeze(-1) > -torch.inf))


def look_ahead(
    scheduler,
    step: SamplerStep,
    reward: Reward,
    num_particles: int,
    generator: torch.Generator | list[torch.Generator] | None = None,
    known: torch.Tensor | None = None,
    is_known: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logarithm of the expected exp(scale r(x_0)) given x_s, one number per particle, `[n]`: the potential of x_s.

    At the data it is scale r(x_0) itself. Before, it is the mean over a few draws of x_0. The filter is consistent for any
    potential, as those of one path cancel but for the last. All particles of a sample spend the same
    random numbers, so that they differ only as far as their states do. A network that predicts x_{t-1} sees nothing ahead.

    Args:
        num_particles: Number of consecutive rows of x_s that belong to one sample.
        generator: Source of the draws, or a list of one per sample.
        known, is_known: Data that the draws show.
    """
    x_s = step.prev_sample
    if step.previous_timestep == -1:
        return reward(x_s)
    if scheduler.config.prediction_type == "previous":
        return torch.zeros(len(x_s), device=x_s.device)
    logits = data_logits(scheduler, step).flatten(0, -2)  # [n N, K]
    values = []
    for _ in range(NUM_DRAWS):
        u = uniforms((len(x_s) // num_particles, *x_s.shape[1:]), generator, x_s.device)
        x_0 = categorical(logits, u.repeat_interleave(num_particles, 0).flatten()).view_as(x_s)
        values.append(reward(x_0 if known is None or is_known is None else torch.where(is_known, known, x_0)))
    return torch.stack(values).logsumexp(0) - math.log(NUM_DRAWS)


def data_logits(scheduler, step: SamplerStep) -> torch.Tensor:
    """Logits of x_0 given x_s, `[n, ..., K]`, from the prediction of the network at x_t, which takes no further call.

    log p(x_0 | x_s) = log p(x_0 | the other positions of x_t) + log q(x_s | x_0) + const
    """
    transition = scheduler.transition
    s, t = (scheduler.num_steps_behind(timestep) for timestep in (step.previous_timestep, step.timestep))
    logits = scheduler.logits(step.model_output).to(compute_dtype(step.model_output))
    if scheduler.config.x0_posterior == "denoising":
        logits = transition.to_leave_one_out(logits, step.sample, t)
    logits = transition.forbid(logits + transition.log_likelihood(step.prev_sample, 0, s, logits.dtype))
    # A known element may be one that the network has excluded; any guess will do.
    is_excluded = logits.amax(-1, keepdim=True) == -torch.inf
    return torch.where(is_excluded, transition.forbid(torch.zeros_like(logits)), logits)


def evidence(log_p: torch.Tensor, x: torch.Tensor, is_known: torch.Tensor) -> torch.Tensor:
    """log p(x at the known positions), one number per particle, `[n]`.

    A known token that the process cannot have kept until t has no posterior (NaN), and does not count.
    """
    log_p = log_p.gather(-1, x[..., None]).squeeze(-1)  # [n, ...]
    return torch.where(is_known & ~log_p.isnan(), log_p, 0).flatten(1).sum(-1)


def effective_number(log_weights: torch.Tensor) -> torch.Tensor:
    """Effective number of particles 1 / sum_p w_p^2, `[B]`, for weights `[B, P]`."""
    return 1 / log_weights.softmax(-1).square().sum(-1)


def resample(log_weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Systematic resampling: indices `[B, P]` of the particles that survive, in proportion to their weights, by uniforms `[B]`."""
    num_particles = log_weights.shape[-1]
    cumulative = log_weights.to(u.dtype).softmax(-1).cumsum(-1)
    places = (torch.arange(num_particles, device=u.device) + u[:, None]) / num_particles  # [B, P]
    return count_up_to(cumulative, places).clamp_(max=num_particles - 1)


def resample_uneven(log_weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Resamples the particles of the samples whose effective number is below P / 2, and resets their weights.

    Gives the indices of the particles that survive, `[B, P]`, and their `log_weights`.
    """
    num_particles = log_weights.shape[1]
    uneven = (effective_number(log_weights) < num_particles / 2)[:, None]  # [B, 1]
    stay = torch.arange(num_particles, device=u.device)
    return torch.where(uneven, resample(log_weights, u), stay), log_weights.masked_fill(uneven, 0)


def log_mean_weight(log_weights: torch.Tensor) -> torch.Tensor:
    """Logarithm of the mean weight of the particles of each sample, `[B]`, for `log_weights` `[B, P]`."""
    return log_weights.logsumexp(-1) - math.log(log_weights.shape[-1])


def take_particles(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The particles `indices` `[B, p]` of each sample, from `[B * P, ...]` to `[B * p, ...]`."""
    grouped = x.unflatten(0, (len(indices), -1))  # [B, P, ...]
    rows = torch.arange(len(indices), device=x.device)[:, None]
    return grouped[rows, indices].flatten(0, 1)
