# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Weights and resampling of particles."""

import math

import torch

from ..numerics import count_up_to


def evidence(log_p: torch.Tensor, x: torch.Tensor, is_known: torch.Tensor) -> torch.Tensor:
    """log p(x at the known positions), one number per particle, `[n]`.

    A known token that the process cannot have kept until t has no posterior (NaN), and does not count.

    Args:
        log_p: log-probabilities, `[n, ..., K]`.
        x: `[n, ...]`.
        is_known: `[n, ...]`.
    """
    log_p = log_p.gather(-1, x[..., None]).squeeze(-1)  # [n, ...]
    return torch.where(is_known & ~log_p.isnan(), log_p, 0).flatten(1).sum(-1)


def effective_number(log_weights: torch.Tensor) -> torch.Tensor:
    """Effective number of particles, `[B]`, for weights `[B, P]`.

    1 / sum_p w_p^2        (w normalized)
    """
    return 1 / log_weights.softmax(-1).square().sum(-1)


def resample(log_weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Systematic resampling: indices `[B, P]` of the particles that survive, in proportion to their weights.

    Args:
        log_weights: `[B, P]`.
        u: uniforms in [0, 1), `[B]`.
    """
    num_particles = log_weights.shape[-1]
    cumulative = log_weights.to(u.dtype).softmax(-1).cumsum(-1)
    places = (torch.arange(num_particles, device=u.device) + u[:, None]) / num_particles  # [B, P]
    return count_up_to(cumulative, places).clamp_(max=num_particles - 1)


def resample_uneven(log_weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Resamples the particles of the samples whose effective number is below P / 2, and resets their weights.

    Args:
        log_weights: `[B, P]`.
        u: uniforms in [0, 1), `[B]`.

    Returns:
        The indices of the particles that survive, `[B, P]`, and their `log_weights`.
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
