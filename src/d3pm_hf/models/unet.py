# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What stands between integer images and diffusers' `UNet2DModel`, which knows only channels of real numbers."""

import torch

from ..utils.checks import check_choice, check_int, check_type, describe


# What the output of the network stands for.
PREDICTION_TYPES = ("x0", "logistic", "previous")


def num_output_channels(num_channels: int, num_classes: int, prediction_type: str) -> int:
    """The `out_channels` that a U-Net needs: K logits per channel, or a location and a log-scale."""
    return num_channels * (2 if prediction_type == "logistic" else num_classes)


def normalize(x: torch.Tensor, num_classes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """States 0 .. K-1 as real numbers in [-1, 1]."""
    return x.to(dtype) * (2 / (num_classes - 1)) - 1


def residual_logits(output: torch.Tensor, x_t: torch.Tensor) -> torch.Tensor:
    """Logits of x_0: those of the network, plus the one-hot of x_t.

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
    """Location and log-scale of the logistic distribution of x_0; the network puts out a change of the location.

        location = tanh(location' + x_t)        (x_t scaled to [-1, 1])

    Args:
        output: `[B, 2 C, H, W]`.
        x_t: `[B, C, H, W]`.

    Returns:
        `[B, C, H, W, 2]`, float32.
    """
    location, log_scale = output.float().chunk(2, dim=1)  # [B, C, H, W] each
    return torch.stack([torch.tanh(location + normalize(x_t, num_classes)), log_scale], dim=-1)


def predict_image(unet, x_t: torch.Tensor, timestep, num_classes: int, prediction_type: str) -> torch.Tensor:
    """What the scheduler and the losses call the model's output: `[B, C, H, W, K]`, or `[B, C, H, W, 2]` if logistic.

    Args:
        unet: a `UNet2DModel`, or anything with its signature and a `dtype`.
        x_t: integers `[B, C, H, W]`.
        timestep: an integer, or `[B]`.
    """
    check_type("unet", unet, torch.nn.Module, "a `UNet2DModel`")
    check_int("num_classes", num_classes, 2)
    check_choice("prediction_type", prediction_type, PREDICTION_TYPES)
    check_type("x_t", x_t, torch.Tensor, "a `torch.LongTensor` of shape [B, C, H, W]")
    if x_t.dtype != torch.long or x_t.ndim != 4:
        raise ValueError(f"x_t is {describe(x_t)}: it must be a `torch.LongTensor` of shape [B, C, H, W]")
    channels = getattr(getattr(unet, "config", None), "in_channels", x_t.shape[1])
    if x_t.shape[1] != channels:
        raise ValueError(f"x_t has {x_t.shape[1]} channels, and the U-Net reads {channels}")
    # Values are looked at on a CPU only: elsewhere that would be a sync.
    if x_t.device.type == "cpu" and not 0 <= x_t.min() <= x_t.max() < num_classes:
        raise ValueError(f"x_t has states from {x_t.min()} to {x_t.max()}: they must lie in 0 .. {num_classes - 1}")
    is_tensor = isinstance(timestep, torch.Tensor) and not timestep.is_floating_point()
    if not is_tensor:
        check_int("timestep", timestep)
    elif timestep.ndim and timestep.shape != x_t.shape[:1]:
        raise ValueError(
            f"timestep is {describe(timestep)}: pass one integer, or one per image of the batch of {len(x_t)}"
        )
    output = unet(normalize(x_t, num_classes).to(unet.dtype), timestep, return_dict=False)[0]
    if prediction_type == "logistic":
        return logistic_parameters(output, x_t, num_classes)
    return residual_logits(output, x_t)
