# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Networks of the sizes of the paper, and tiny ones for tests and first experiments."""

from diffusers import UNet2DModel

from ..utils.checks import check_choice, check_int
from .configuration_d3pm_dit import D3PMDiTConfig
from .configuration_d3pm_text import D3PMTextConfig
from .image_denoiser import PREDICTION_TYPES, num_output_channels
from .modeling_d3pm_dit import D3PMDiT
from .modeling_d3pm_text import D3PMTextModel


TEXT_PRESETS = {
    "tiny": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    },
    "paper": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
    },
}

# Arguments of the other backbones that a diffusion transformer does not have: its length is not limited, and it is not causal.
NOT_OF_DIT = (
    "backbone",
    "max_position_embeddings",
    "position_bias_init",
    "attention_probs_dropout_prob",
    "is_decoder",
)

UNET_PRESETS = {
    "tiny": {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "norm_num_groups": 8,
        "attention_head_dim": 8,
    },
    # The U-Net of DDPM: 128 channels x (1, 2, 2, 2), two blocks per level, one attention head at 16 x 16.
    "paper": {
        "block_out_channels": (128, 256, 256, 256),
        "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": None,
        "downsample_padding": 0,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "norm_eps": 1e-6,
        "dropout": 0.1,
    },
}


def create_text_model(
    preset: str, vocab_size: int, num_class_labels: int | None = None, **overrides
) -> D3PMTextModel | D3PMDiT:
    """Creates a text network with randomly initialized weights.

    Args:
        preset (`str`): `"tiny"`, or `"paper"`: 12 layers, 12 heads, hidden size 768, MLP size 3072.
        vocab_size (`int`): Number of states K, the `num_classes` of the scheduler.
        num_class_labels (`int`, *optional*): Number of class labels, for a network that is conditioned on a class. It gets
            one class embedding more, for "no class".
        overrides: Further arguments of [`D3PMTextConfig`], such as `backbone="t5"`. With `backbone="dit"` the network is a
            [`D3PMDiT`], and they are arguments of [`D3PMDiTConfig`].
    """
    check_choice("preset", preset, TEXT_PRESETS)
    check_int("vocab_size", vocab_size, 1)
    arguments = {"vocab_size": vocab_size, **TEXT_PRESETS[preset], **_class_embeds(num_class_labels)}
    arguments |= overrides
    if arguments.get("backbone") == "dit":
        if arguments.get("is_decoder"):
            raise ValueError(
                "backbone is 'dit', which has no causal attention: choose 'bert' or 't5' with is_decoder=True"
            )
        arguments = {name: value for name, value in arguments.items() if name not in NOT_OF_DIT}
        return D3PMDiT(D3PMDiTConfig(**arguments))
    return D3PMTextModel(D3PMTextConfig(**arguments))


def create_unet(
    preset: str,
    num_classes: int,
    sample_size,
    in_channels: int = 3,
    prediction_type: str = "x0",
    num_class_labels: int | None = None,
    **overrides,
) -> UNet2DModel:
    """Creates a U-Net with randomly initialized weights.

    Args:
        preset (`str`): `"tiny"`, or `"paper"`: the U-Net of the CIFAR-10 experiments.
        num_classes (`int`): Number of levels K of a pixel.
        sample_size (`int` or a tuple `(height, width)`): Size of the images.
        in_channels (`int`, defaults to 3): Number of channels: 3 for color, 1 for grayscale.
        prediction_type (`str`, defaults to `"x0"`): The scheduler's. It determines the number of output channels.
        num_class_labels (`int`, *optional*): Number of class labels, for a network that is conditioned on a class. It gets
            one class embedding more, for "no class".
        overrides: Further arguments of `UNet2DModel`.
    """
    check_choice("preset", preset, UNET_PRESETS)
    check_int("num_classes", num_classes, 2)
    check_int("in_channels", in_channels, 1)
    check_choice("prediction_type", prediction_type, PREDICTION_TYPES)
    sides = sample_size if isinstance(sample_size, (list, tuple)) and len(sample_size) == 2 else [sample_size]
    for side in sides:
        check_int("sample_size", side, 1)
    arguments = {
        "sample_size": sample_size,
        "in_channels": in_channels,
        "out_channels": num_output_channels(in_channels, num_classes, prediction_type),
        **UNET_PRESETS[preset],
        **_class_embeds(num_class_labels),
    }
    return UNet2DModel(**{**arguments, **overrides})


def _class_embeds(num_class_labels: int | None) -> dict:
    """The number of class embeddings: one per class, and one for "no class"."""
    if num_class_labels is None:
        return {}
    check_int("num_class_labels", num_class_labels, 1)
    return {"num_class_embeds": num_class_labels + 1}
