# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The discretized, truncated logistic distribution, for ordinal data."""

import torch
import torch.nn.functional as F

from ..utils.checks import check_int, check_tensor


# exp(60) leaves every logit and every gradient finite in float32; a scale that small is a point mass anyway.
MAX_LOG_INVERSE_SCALE = 60.0


def logistic_logits(location: torch.Tensor, log_scale: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Logits `[..., K]` of a logistic distribution cut into K bins over [-1, 1] and truncated to them (appendix A.8 of the paper).

    The bin around c has the probability sigmoid((c + w/2 - mu) / s) - sigmoid((c - w/2 - mu) / s), w = 2 / (K - 1). With
    sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)) its logarithm is, up to a constant,

        log sigmoid((c + w/2 - mu) / s) + log sigmoid((mu - c + w/2) / s)

    in which nothing cancels: both tails are exact, however small the scale. The scale is shifted as in the paper, so
    that `log_scale = 0` is a broad distribution.

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
    inverse_scale = torch.exp((2 - log_scale).clamp(max=MAX_LOG_INVERSE_SCALE))[..., None]
    centers = torch.linspace(-1, 1, num_classes, dtype=location.dtype, device=location.device)
    offset, half_width = centers - location[..., None], 1 / (num_classes - 1)
    return F.logsigmoid(inverse_scale * (half_width + offset)) + F.logsigmoid(inverse_scale * (half_width - offset))
