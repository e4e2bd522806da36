# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Conversions between images of integers and the input and output channels of a U-Net."""

import torch


# What the network predicts: logits of x_0, a logistic distribution of x_0, or logits of x_{t-1}.
PREDICTION_TYPES = ("x0", "logistic", "previous")


def num_output_channels(num_channels: int, num_classes: int, prediction_type: str) -> int:
    """Number of output channels of a U-Net: K logits per channel, or a location and a log-scale."""
    return num_channels * (2 if prediction_type == "logistic" else num_classes)


def normalize(x: torch.Tensor, num_classes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Scales states 0 .. K-1 to [-1, 1]."""
    return x.to(dtype) * (2 / (num_classes - 1)) - 1


def residual_logits(output: torch.Tensor, x_t: torch.Tensor) -> torch.Tensor:
    """Logits of x_0: the output of the network plus the one-hot of x_t (appendix B.1 of the paper).

        logits = h(x_t) + onehot(x_t)

    Args:
        output: `[B, C * K, H, W]`.
        x_t: `[B, C, H, W]`.

    Returns:
        `[B, C, H, W, K]`, float32.
    """
    logits = output.unflatten(1, (x_t.shape[1], -1)).movedim(2, -1)  # [B, C, H, W, K]
    logits = logits.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return logits.scatter_add_(-1, x_t[..., None], torch.ones_like(logits[..., :1]))


def logistic_parameters(output: torch.Tensor, x_t: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Location and log-scale of the truncated logistic distribution of x_0 (appendix A.8 of the paper).

    The network predicts the shift of the location from x_t, as in the code of the authors:

        location = tanh(location' + x_t)        (x_t scaled to [-1, 1])

    Args:
        output: `[B, 2 C, H, W]`.
        x_t: `[B, C, H, W]`.

    Returns:
        `[B, C, H, W, 2]`, float32.
    """
    location, log_scale = output.float().chunk(2, dim=1)  # [B, C, H, W] each
    return torch.stack([torch.tanh(location + normalize(x_t, num_classes)), log_scale], dim=-1)
