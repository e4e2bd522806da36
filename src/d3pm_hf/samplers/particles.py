# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Weights and resampling of particles, which make conditional samples exact in the limit.

Given the data at some positions, the other positions are to be drawn from p(x_0 | known). The denoiser, which reads the
known tokens as one more noisy x_t, does not do that by itself (absorbing processes excepted: there a token that is not the
mask is known to be right). A particle filter does: of several samples that are denoised side by side, those survive whose
predictions the known tokens bear out. It targets p(x_0 | known) because the noise at one position says nothing about the
data at another: any path of the known positions that the forward process can take leads to the same conditional, and the
filter may as well take the path that never leaves the data.
"""

import torch


def evidence(log_posterior: torch.Tensor, x_s: torch.Tensor, is_known: torch.Tensor) -> torch.Tensor:
    """log p(x_s at the known positions | x_t), one number per sample.

    A known token that the process cannot have kept until t has no posterior; it says nothing.

    Args:
        log_posterior: log p(x_s | x_t), `[n, ..., K]`.
        x_s: `[n, ...]`.
        is_known: `[n, ...]`.
    """
    log_p = log_posterior.gather(-1, x_s[..., None]).squeeze(-1)  # [n, ...]
    return torch.where(is_known & ~log_p.isnan(), log_p, 0).flatten(1).sum(-1)


def effective_number(log_weights: torch.Tensor) -> torch.Tensor:
    """How many equally weighted particles those of `[B, P]` are worth: `[B]`."""
    return 1 / log_weights.softmax(-1).square().sum(-1)


def resample(log_weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Systematic resampling: for each of P places the particle that takes it, `[B, P]`, in proportion to the weights.

    Args:
        log_weights: `[B, P]`.
        u: uniforms in [0, 1), `[B]`.
    """
    num_particles = log_weights.shape[-1]
    cumulative = log_weights.to(u.dtype).softmax(-1).cumsum(-1)
    places = (torch.arange(num_particles, device=u.device) + u[:, None]) / num_particles  # [B, P]
    return torch.searchsorted(cumulative, places, right=True).clamp_(max=num_particles - 1)
