# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The discretized, truncated logistic distribution, for ordinal data."""

import torch
import torch.nn.functional as F

from ..utils.checks import check_int, check_tensor


# exp(60) leaves every logit and every gradient finite in float32; a scale that small is a point mass anyway.
MAX_LOG_INVERSE_SCALE = 60.0
# Divided by the smallest scale, it is finite in float32.
MAX_DISTANCE = 1e10


def logistic_logits(location: torch.Tensor, log_scale: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Logits `[..., K]` of a logistic distribution cut into K bins over [-1, 1] and truncated to them (appendix A.8 of the paper).

    The bin around c has the probability sigmoid((c + w/2 - mu) / s) - sigmoid((c - w/2 - mu) / s), w = 2 / (K - 1). With
    sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)) its logarithm is, up to a constant,

        log sigmoid((c + w/2 - mu) / s) + log sigmoid((mu - c + w/2) / s)

    in which nothing cancels: both tails are exact, however small the scale. The scale is shifted as in the paper, so
    that `log_scale = 0` is a broad distribution. A location outside of all bins adds its distance to all logits of one side
    ([`standardize`]), which is left out: the distribution has the same digits however far away it is.

    Args:
        location (`torch.Tensor` of shape `[...]`): mu, for states mapped to [-1, 1].
        log_scale (`torch.Tensor` of shape `[...]`): log s.
        num_classes (`int`): Number of bins K.
    """
    check_tensor("location", location)
    check_tensor("log_scale", log_scale)
    check_int("num_classes", num_classes, 2)
    if location.shape != log_scale.shape:
        raise ValueError(
            f"location has the shape {tuple(location.shape)} and log_scale {tuple(log_scale.shape)}: pass one of each per element"
        )
    near, far, inverse_scale = standardize(location[..., None], log_scale[..., None], num_classes)
    half_width, side, distance = 1 / (num_classes - 1), far.sign(), inverse_scale * far
    right = inverse_scale * (half_width + near) - distance
    left = inverse_scale * (half_width - near) + distance
    # log sigmoid(a) = a + log sigmoid(-a), where a is below zero for all bins.
    logits = F.logsigmoid(torch.where(side > 0, -right, right)) + F.logsigmoid(torch.where(side < 0, -left, left))
    return logits + side * inverse_scale * near


def standardize(
    location: torch.Tensor, log_scale: torch.Tensor, num_classes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parts of (c - mu) / s = (near - far) / s, and 1 / s, for the centers c of all bins: `[..., K]`, `[..., 1]`, `[..., 1]`.

    `near` is the distance of a center from mu, or from the outer edge of the last bin if mu lies beyond it, and `far` is how
    far beyond. Their sum would have no digits left for the centers if mu is far away.

    Args:
        location, log_scale (`torch.Tensor` of shape `[..., 1]`): mu and log s.
        num_classes (`int`): Number of bins K.
    """
    edge = 1 + 1 / (num_classes - 1)
    inverse_scale = torch.exp((2 - log_scale).clamp(max=MAX_LOG_INVERSE_SCALE))
    centers = torch.linspace(-1, 1, num_classes, dtype=location.dtype, device=location.device)
    inside = location.clamp(-edge, edge)
    # Beyond MAX_DISTANCE all exponentials that it is a part of are zero.
    return centers - inside, (location - inside).clamp(-MAX_DISTANCE, MAX_DISTANCE), inverse_scale
