# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What the training examples share: flags for the process and the network, presets, and what is built from them."""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import HfArgumentParser

from ..data import cooccurrence_embeddings, unigram_probs
from ..models import create_text_model, create_unet
from ..schedulers.arguments import CHOICES
from ..schedulers.scheduling_d3pm import D3PMScheduler
from ..schedules import MUTUAL_INFORMATION, schedule_names
from ..transitions.registry import transition_families


# Processes over a graph of nearest neighbors, and those that take tensors from a file: the one they need, and others.
NEIGHBORS = ("nearest_neighbor", "absorbing_nearest_neighbor")
TENSORS = {
    "rate": ("rate_matrix",),
    "matrix": ("transition_matrices", "stationary_probs"),
    "stationary": ("stationary_probs",),
}

# Presets for two cores. Text: some minutes, words rather than sentences.
CPU_TEXT = {
    "sequence_length": 64,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "train_batch_size": 32,
    "max_train_steps": 3000,
    "learning_rate": 2.5e-3,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 100,
    "logging_steps": 20,
    "validation_steps": 1500,
    "checkpointing_steps": 500,
    "checkpoints_total_limit": 2,
    "num_eval_timesteps": 20,
    "num_samples": 4,
}
# Images: half an hour, shapes and colours rather than objects.
CPU_IMAGES = {
    "resolution": 16,
    "block_out_channels": [32, 64, 64],
    "layers_per_block": 1,
    "train_batch_size": 32,
    "max_train_steps": 4000,
    "learning_rate": 1e-3,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 100,
    "logging_steps": 20,
    "validation_steps": 2000,
    "checkpointing_steps": 500,
    "checkpoints_total_limit": 2,
    "max_eval_samples": 64,
    "num_eval_timesteps": 20,
    "num_inference_steps": 100,
}


@dataclass
class ProcessArguments:
    """The forward process, and what the network says about it."""

    transition: str = field(
        default="absorbing",
        metadata={"help": "Transition family of the forward process. rate and matrix need --tensors_path.",
                  "choices": tuple(transition_families())},
    )  # fmt: skip
    schedule: str = field(
        default="mutual_information", metadata={"help": "How fast it arrives.", "choices": schedule_names()}
    )
    num_train_timesteps: int = field(
        default=1000, metadata={"help": "T. An autoregressive process has one per token."}
    )
    beta_start: float | None = field(
        default=None, metadata={"help": "Of the linear schedule; the paper's by default."}
    )
    beta_end: float | None = field(default=None, metadata={"help": "Of the linear schedule; the paper's by default."})
    bandwidth: int = field(default=1, metadata={"help": "Of a band-diagonal process."})
    num_neighbors: int = field(default=5, metadata={"help": "Of a token in the graph of nearest neighbours."})
    embeddings_path: str | None = field(
        default=None,
        metadata={"help": "A safetensors file with one tensor [tokens, d] that neighbors are near in; by default they are "
                          "computed from the training data."},
    )  # fmt: skip
    tensors_path: str | None = field(
        default=None,
        metadata={"help": "A safetensors file with rate_matrix [K, K] for `rate`, transition_matrices [T, K, K] or [K, K] for "
                          "`matrix`, or stationary_probs [K] for `stationary` (by default the frequencies of the states in "
                          "the training data)."},
    )  # fmt: skip
    prediction_type: str = field(
        default="x0", metadata={"help": "What the network puts out.", "choices": CHOICES["prediction_type"]}
    )
    x0_posterior: str = field(
        default="leave_one_out", metadata={"help": "What its logits of x_0 mean.", "choices": CHOICES["x0_posterior"]}
    )
    reconstruction: str = field(
        default="posterior", metadata={"help": "How the last step is scored.", "choices": CHOICES["reconstruction"]}
    )


@dataclass
class TextModelArguments:
    """The text denoiser: the paper's sizes by default."""

    backbone: str = field(default="t5", metadata={"help": "t5 is the paper's.", "choices": ("t5", "bert")})
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    dropout: float = 0.0
    timestep_conditioning: bool = field(default=True, metadata={"help": "Whether the network is told the timestep."})


@dataclass
class ImageModelArguments:
    """The U-Net: the paper's by default."""

    block_out_channels: list[int] = field(default_factory=lambda: [128, 256, 256, 256])
    layers_per_block: int = 2
    attention_levels: list[int] = field(
        default_factory=lambda: [1], metadata={"help": "Levels with attention; each level halves the resolution."}
    )
    unet_dropout: float = 0.1


def parse_arguments(
    classes: tuple,
    presets: dict[str, dict],
    description: str,
    default_preset: str | None = None,
    arguments: list[str] | None = None,
) -> tuple:
    """Dataclasses from the command line, over the defaults of the presets that are named there.

    Args:
        classes: the dataclasses whose fields are flags.
        presets: values by flag, by name. `--preset uniform,cpu` takes both, the later over the earlier.
        description: of the script.
        default_preset (*optional*): which one the others are named on top of.
        arguments (*optional*): in place of the command line's.
    """
    chooser = argparse.ArgumentParser(add_help=False)
    chooser.add_argument("--preset", default="")
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen, rest = chooser.parse_known_args(arguments)
    known = "\n".join(
        f"  {name}: {', '.join(f'{flag}={value}' for flag, value in values.items()) or 'the defaults'}"
        for name, values in presets.items()
    )
    parser = HfArgumentParser(
        classes,
        description=description,
        epilog=f"--preset NAME[,NAME...] changes the defaults:\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in filter(None, [default_preset, *chosen.preset.split(",")]):
        if name not in presets:
            parser.error(f"there is no preset {name!r}: choose from {', '.join(presets)}")
        parser.set_defaults(**presets[name])
    return parser.parse_args_into_dataclasses(rest)


def create_text_parts(process: ProcessArguments, network: TextModelArguments, dataset, length: int, seed: int = 0):
    """The network and the scheduler for tokens; the mask, where there is one, comes after them."""
    torch.manual_seed(seed)
    masks = transition_families()[process.transition].has_mask
    num_classes = dataset.num_tokens + masks
    is_causal = transition_families()[process.transition].is_autoregressive
    scheduler = create_scheduler(process, dataset, num_classes, num_timesteps=length if is_causal else None)
    model = create_text_model(
        "paper",
        num_classes,
        backbone=network.backbone,
        hidden_size=network.hidden_size,
        num_hidden_layers=network.num_hidden_layers,
        num_attention_heads=network.num_attention_heads,
        intermediate_size=network.intermediate_size,
        hidden_dropout_prob=network.dropout,
        attention_probs_dropout_prob=network.dropout,
        max_position_embeddings=max(length, 512),
        timestep_conditioning=network.timestep_conditioning and not is_causal,
        is_decoder=is_causal,
    )
    return model, scheduler


def create_image_parts(process: ProcessArguments, network: ImageModelArguments, dataset, seed: int = 0):
    """The network and the scheduler for pixels; the mask, where there is one, is grey, and the data may hold it."""
    torch.manual_seed(seed)
    num_classes = dataset.num_tokens
    masks = transition_families()[process.transition].has_mask
    mask = {"mask_token_id": num_classes // 2, "mask_in_data": True} if masks else {}
    scheduler = create_scheduler(process, dataset, num_classes, **mask)
    channels, height, width = dataset[0].shape
    levels = range(len(network.block_out_channels))
    attends = [level in network.attention_levels for level in levels]
    unet = create_unet(
        "paper",
        num_classes,
        (height, width),
        channels,
        process.prediction_type,
        block_out_channels=tuple(network.block_out_channels),
        layers_per_block=network.layers_per_block,
        down_block_types=tuple("AttnDownBlock2D" if attends[level] else "DownBlock2D" for level in levels),
        up_block_types=tuple("AttnUpBlock2D" if attends[level] else "UpBlock2D" for level in reversed(levels)),
        norm_num_groups=min(32, *network.block_out_channels),
        dropout=network.unet_dropout,
    )
    return unet, scheduler


def create_scheduler(
    process: ProcessArguments, dataset, num_classes: int, num_timesteps: int | None = None, **options
) -> D3PMScheduler:
    """The scheduler of a process over a data set; what it needs to know of the data is measured, and saved with it."""
    tensors = {}
    if process.schedule == MUTUAL_INFORMATION and transition_families()[process.transition].has_schedule:
        unigram = unigram_probs(dataset)
        tensors["unigram_probs"] = torch.cat([unigram, unigram.new_zeros(num_classes - len(unigram))])
    if process.transition in NEIGHBORS:
        tensors["embeddings"] = load_embeddings(process.embeddings_path, dataset)
    tensors |= load_transition_tensors(process, dataset)
    return D3PMScheduler(
        num_classes,
        num_train_timesteps=num_timesteps or process.num_train_timesteps,
        transition=process.transition,
        beta_schedule=process.schedule,
        beta_start=process.beta_start,
        beta_end=process.beta_end,
        bandwidth=process.bandwidth,
        num_neighbors=process.num_neighbors,
        prediction_type=process.prediction_type,
        x0_posterior=process.x0_posterior,
        reconstruction=process.reconstruction,
        **options,
        **tensors,
    )


def load_transition_tensors(process: ProcessArguments, dataset) -> dict[str, torch.Tensor]:
    """The tensors that define the process: those of a file, or the frequencies of the states for `stationary`.

    A state that the data lack would never be reached, and its bound would be infinite: each state counts once more than
    it comes, pi_k = (n_k + 1) / (n + K).
    """
    path, names = process.tensors_path, TENSORS.get(process.transition, ())
    if path is None and process.transition == "stationary":
        size = dataset.tokens.size
        return {"stationary_probs": (unigram_probs(dataset) * size + 1) / (size + dataset.num_tokens)}
    if path is None and names:
        raise ValueError(
            f"transition is {process.transition!r}, which needs {names[0]}: pass --tensors_path with a safetensors file "
            f"that holds a tensor {names[0]!r}"
        )
    if path is None:
        return {}
    if not names:
        raise ValueError(
            f"tensors_path is {path}, and a {process.transition!r} process needs no tensors: leave it out, or choose "
            f"--transition {', '.join(TENSORS)}"
        )
    tensors = read_tensors(path)
    if names[0] not in tensors or not tensors.keys() <= set(names):
        raise ValueError(
            f"{path} holds the tensors {sorted(tensors)}, and a {process.transition!r} process takes {' and '.join(names)}"
        )
    return tensors


def read_tensors(path: str) -> dict[str, torch.Tensor]:
    try:
        return load_file(Path(path))
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{path} cannot be read as safetensors ({error}): write it with `safetensors.torch.save_file`"
        ) from error


def load_embeddings(path: str | None, dataset) -> torch.Tensor:
    """The vectors of the tokens: those of a file, or of which tokens stand beside which in the data."""
    if path is None:
        return cooccurrence_embeddings(dataset)
    tensors = list(read_tensors(path).values())
    if len(tensors) != 1 or tensors[0].ndim != 2 or len(tensors[0]) != dataset.num_tokens:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(f"{path} holds tensors of shape {shapes}: one of shape ({dataset.num_tokens}, d) is needed")
    return tensors[0]
