# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The denoiser of images: states as the input of a U-Net, and its output channels as logits."""

import torch

from ..utils.checks import check_choice, check_int, check_integers, check_type, describe, values_are_known
from .denoisers import Denoiser


# What the network predicts: logits of x_0, a logistic distribution of x_0, or logits of x_{t-1}.
PREDICTION_TYPES = ("x0", "logistic", "previous")
# The largest height or width of an image.
MAX_SIDE = 1 << 14


class ImageDenoiser(Denoiser):
    """Wraps a network of diffusers over images, such as an unmodified `UNet2DModel`.

    The network reads x_t scaled to [-1, 1] as `network(sample, timestep, **condition, return_dict=False)`. Its output
    channels become logits, to which the one-hot of x_t is added, or location and log-scale.

    Args:
        network (`torch.nn.Module`): The network, with `in_channels`, `out_channels` and `sample_size` in its configuration.
        num_classes (`int`): Number of levels K of a pixel.
        prediction_type (`str`, defaults to `"x0"`): The scheduler's: `"x0"`, `"logistic"` or `"previous"`.
        num_class_labels (`int`, *optional*): Number of class labels of a network with `num_class_embeds`. By default each
            embedding is that of a class; if there is one more than classes, the last stands for "no class".

    Examples:
        ```python
        import torch
        from d3pm_hf import ImageDenoiser, create_unet

        denoiser = ImageDenoiser(create_unet("tiny", num_classes=16, sample_size=8, in_channels=1), num_classes=16)
        logits = denoiser(torch.randint(0, 16, (2, 1, 8, 8)), torch.tensor([3, 700]))  # [2, 1, 8, 8, 16]
        ```
    """

    num_classes: int

    def __init__(
        self,
        network: torch.nn.Module,
        num_classes: int,
        prediction_type: str = "x0",
        num_class_labels: int | None = None,
    ):
        check_type("network", network, torch.nn.Module, "a network (`torch.nn.Module`), such as a `UNet2DModel`")
        check_int("num_classes", num_classes, 2)
        check_choice("prediction_type", prediction_type, PREDICTION_TYPES)
        super().__init__(network)
        self.num_classes, self.prediction_type = num_classes, prediction_type
        config = getattr(network, "config", None)
        self.num_channels: int | None = getattr(config, "in_channels", None)
        size = getattr(config, "sample_size", None)
        if self.num_channels is not None and size is not None:
            sizes = size if isinstance(size, (list, tuple)) else [size, size]
            for one in sizes:
                check_int("sample_size of the network", one, 1, MAX_SIDE)
            if len(sizes) != 2:
                raise ValueError(f"sample_size of the network is {size}: it must be an integer, or height and width")
            self.sample_shape = (self.num_channels, *sizes)
        out_channels = getattr(config, "out_channels", None)
        if self.num_channels is not None and out_channels is not None:
            needed = num_output_channels(self.num_channels, num_classes, prediction_type)
            if out_channels != needed:
                raise ValueError(
                    f"the network has {out_channels} output channels, and {self.num_channels} channels of {num_classes} levels "
                    f"with prediction_type={prediction_type!r} need {needed}: use a network and a scheduler of the same "
                    "checkpoint"
                )
        self._set_classes(num_class_labels)

    def forward(self, x_t: torch.Tensor, timestep: torch.Tensor | int, **condition) -> torch.Tensor:
        """Predicts `[B, C, H, W, K]`, or `[B, C, H, W, 2]` for `prediction_type="logistic"`, in float32.

        Args:
            x_t (`torch.LongTensor` of shape `[B, C, H, W]`): States.
            timestep (`int`, or `torch.LongTensor` of shape `[B]` or `[]`): Timesteps.
            condition: Further arguments of the network, such as `class_labels`. Without them, a network with a null
                class predicts without a class.
        """
        check_integers("x_t", x_t, "[B, C, H, W]")
        if self.num_channels not in (None, x_t.shape[1]):
            raise ValueError(f"x_t has {x_t.shape[1]} channels, and the network reads {self.num_channels}")
        if values_are_known(x_t) and not 0 <= x_t.min() <= x_t.max() < self.num_classes:
            raise ValueError(
                f"x_t has states from {x_t.min()} to {x_t.max()}: they must lie in 0 .. {self.num_classes - 1}"
            )
        condition = self._with_class(condition, x_t)
        sample = normalize(x_t, self.num_classes).to(self.dtype)
        output = self.network(sample, self._expand(timestep, x_t), **condition, return_dict=False)[0]
        if self.prediction_type == "logistic":
            return logistic_parameters(output, x_t, self.num_classes)
        return residual_logits(output, x_t)

    @staticmethod
    def _expand(timestep: torch.Tensor | int, x_t: torch.Tensor) -> torch.Tensor:
        """`timestep` with one entry per image, `[B]`."""
        if not isinstance(timestep, torch.Tensor) or timestep.is_floating_point():
            check_int("timestep", timestep)
        times = torch.as_tensor(timestep, device=x_t.device)
        if times.ndim and times.shape != x_t.shape[:1]:
            raise ValueError(
                f"timestep is {describe(times)}: pass one integer, or one per image of the batch of {x_t.shape[0]}"
            )
        return times.expand(x_t.shape[:1])  # `len(x_t)` would fix the size of the batch in `torch.export`


def predict_image(
    unet: torch.nn.Module, x_t: torch.Tensor, timestep, num_classes: int, prediction_type: str
) -> torch.Tensor:
    """Output of a U-Net as the scheduler and the losses take it: one call of [`ImageDenoiser`].

    Args:
        unet (`torch.nn.Module`): A `UNet2DModel`, or another network with its signature.
        x_t (`torch.LongTensor` of shape `[B, C, H, W]`): States.
        timestep (`int`, or `torch.LongTensor` of shape `[B]` or `[]`): Timesteps.
        num_classes (`int`): Number of levels K of a pixel.
        prediction_type (`str`): The scheduler's: `"x0"`, `"logistic"` or `"previous"`.
    """
    check_type("unet", unet, torch.nn.Module, "a `UNet2DModel`")
    return ImageDenoiser(unet, num_classes, prediction_type)(x_t, timestep)


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
