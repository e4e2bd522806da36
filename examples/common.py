# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Shared by the training scripts: arguments of the process and the network, presets, and the parts built from them."""

import argparse
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, HfArgumentParser
from transformers.hf_argparser import HfArg

from d3pm_hf import D3PMScheduler, D3PMTextPipeline, create_text_model, create_unet
from d3pm_hf.data import cooccurrence_embeddings, unigram_probs
from d3pm_hf.schedulers.arguments import CHOICES
from d3pm_hf.schedules import MUTUAL_INFORMATION, schedule_names
from d3pm_hf.transitions import get_family, transition_families


# Presets for two cores of a CPU. Text: some minutes, for words rather than sentences. docs/source/en/results.md has what was tried.
CPU_TEXT = {
    "sequence_length": 64,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 512,
    "position_bias_init": "offset",
    "timestep_sampling": "logit_normal",
    "logit_mean": -0.5,
    "train_batch_size": 16,
    "max_train_steps": 7000,
    "learning_rate": 2e-3,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 100,
    "logging_steps": 20,
    "validation_steps": 3500,
    "checkpointing_steps": 1000,
    "checkpoints_total_limit": 2,
    "num_eval_timesteps": 20,
    "num_samples": 4,
}
# 70 minutes for 1.9M weights, on a core that multiplies in bfloat16; longer on others.
HOUR_TEXT = {
    **CPU_TEXT,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "intermediate_size": 768,
    "mixed_precision": "bf16",
    "max_train_steps": 30_000,
    "learning_rate": 1.5e-3,
    "lr_warmup_steps": 300,
    "validation_steps": 1500,
    "max_eval_samples": 256,
}
# The settings before these, which most results of docs/source/en/results.md were measured with.
EARLIER_CPU_TEXT = {
    **CPU_TEXT,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "position_bias_init": "distance",
    "timestep_sampling": "uniform",
    "logit_mean": 0.0,
    "train_batch_size": 32,
    "max_train_steps": 3000,
    "learning_rate": 2.5e-3,
    "validation_steps": 1500,
    "checkpointing_steps": 500,
}
# Images: half an hour, for shapes and colors rather than objects.
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
    """The forward process, and what the network predicts."""

    transition: str = HfArg(
        default="absorbing",
        help="Transition family of the forward process. "
        + " ".join(f"{name}: {family.description}." for name, family in transition_families().items()),
        metadata={"choices": tuple(transition_families())},
    )
    beta_schedule: str | None = HfArg(
        default=None,
        help="Noise schedule. Defaults to mutual_information, and for Gaussian noise on 256 levels or more to the "
        "paper's linear one.",
        metadata={"choices": schedule_names()},
    )
    num_train_timesteps: int = HfArg(
        default=1000, help="Number of timesteps T. An autoregressive process always has one per token."
    )
    beta_start: float | None = HfArg(default=None, help="First beta of the linear schedule. Defaults to the paper's.")
    beta_end: float | None = HfArg(default=None, help="Last beta of the linear schedule. Defaults to the paper's.")
    bandwidth: int = HfArg(default=1, help="Bandwidth of a band-diagonal process.")
    num_neighbors: int = HfArg(default=5, help="Number of nearest neighbors of a token.")
    embeddings_path: str | None = HfArg(
        default=None,
        help="Safetensors file with one tensor [tokens, d], the embeddings in which nearest neighbors are found. By "
        "default they are computed from the training data.",
    )
    tensors_path: str | None = HfArg(
        default=None,
        help="Safetensors file with the tensors of the transition family. "
        + " ".join(
            f"{name}: {', '.join(family.input_tensors())}."
            for name, family in transition_families().items()
            if family.input_tensors()
        )
        + " By default stationary_probs are the frequencies of the states in the training data, and embeddings are "
        "computed from it.",
    )
    prediction_type: str = HfArg(
        default="x0", help="Output of the network.", metadata={"choices": CHOICES["prediction_type"]}
    )
    x0_posterior: str = HfArg(
        default="leave_one_out", help="Meaning of the logits of x_0.", metadata={"choices": CHOICES["x0_posterior"]}
    )
    reconstruction: str = HfArg(
        default="posterior",
        help="Distribution of the last reverse step.",
        metadata={"choices": CHOICES["reconstruction"]},
    )


@dataclass
class TextModelArguments:
    """The text denoiser. The defaults are the paper's."""

    backbone: str = HfArg(
        default="t5", help="Architecture of the network; the paper uses t5.", metadata={"choices": ("t5", "bert")}
    )
    hidden_size: int = HfArg(default=768, help="Size of the hidden states.")
    num_hidden_layers: int = HfArg(default=12, help="Number of layers.")
    num_attention_heads: int = HfArg(default=12, help="Number of attention heads.")
    intermediate_size: int = HfArg(default=3072, help="Size of the feed-forward layers.")
    dropout: float = HfArg(default=0.0, help="Dropout probability.")
    position_bias_init: str = HfArg(
        default="distance",
        help="Initial position biases of t5. distance: they decrease with the distance. offset: each head but two "
        "attends to an offset of its own.",
        metadata={"choices": ("distance", "offset")},
    )
    timestep_conditioning: bool = HfArg(
        default=True, help="Whether the network reads the timestep. A causal network never does."
    )


@dataclass
class ImageModelArguments:
    """The U-Net. The defaults are the paper's."""

    block_out_channels: list[int] = HfArg(
        default_factory=lambda: [128, 256, 256, 256], help="Number of channels of each level."
    )
    layers_per_block: int = HfArg(default=2, help="Number of layers of each level.")
    attention_levels: list[int] = HfArg(
        default_factory=lambda: [1], help="Levels with attention; each level halves the resolution."
    )
    norm_num_groups: int | None = HfArg(
        default=None,
        help="Number of groups of channels that are normalized together. Defaults to one for every four channels of the "
        "narrowest level, at most 32, which is the paper's.",
    )
    unet_dropout: float = HfArg(default=0.1, help="Dropout probability.")


@dataclass
class LanguageModelArguments:
    """A language model of transformers to start from. The names of the flags are those of `run_mlm.py` of transformers."""

    model_name_or_path: str | None = HfArg(
        default=None,
        help="Id on the Hub or folder of a language model of transformers: a masked one for --transition absorbing, a "
        "causal one for --transition autoregressive.",
    )
    config_name: str | None = HfArg(
        default=None, help="Id or folder of a configuration, for a network with new weights, in place of a model."
    )
    tokenizer_name: str | None = HfArg(
        default=None, help="Id or folder of the tokenizer. Defaults to that of the model."
    )
    model_revision: str = HfArg(default="main", help="Branch, tag or commit of the model and of the tokenizer.")
    trust_remote_code: bool = HfArg(default=False, help="Whether transformers may run code of the repository.")
    use_safetensors: bool = HfArg(default=True, help="Whether weights are read from safetensors. False reads pickles.")


def parse_arguments(
    classes: tuple,
    presets: dict[str, dict],
    description: str,
    default_preset: str | None = None,
    arguments: list[str] | None = None,
) -> tuple:
    """Parses the command line into dataclasses. `--preset` changes their defaults.

    Args:
        classes: Dataclasses whose fields are flags.
        presets: Values by flag, for each name of a preset. `--preset uniform,cpu` takes both, the later over the earlier.
        description: Description of the script.
        default_preset (*optional*): Preset that all others are added to.
        arguments (*optional*): Arguments to parse. Defaults to those of the command line.
    """
    chooser = argparse.ArgumentParser(add_help=False)
    chooser.add_argument("--preset", default="")
    arguments = read_old_names(sys.argv[1:] if arguments is None else arguments)
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


def read_old_names(arguments: list[str]) -> list[str]:
    """The command line with `--beta_schedule` for `--schedule`, and `--loss hybrid --auxiliary denoising` for its old name."""
    arguments = [re.sub("^--schedule(?=$|=)", "--beta_schedule", argument) for argument in arguments]
    for flag, argument in zip(["", *arguments], list(arguments)):
        if argument == "--loss=hybrid_denoising" or (flag, argument) == ("--loss", "hybrid_denoising"):
            arguments[arguments.index(argument)] = argument.removesuffix("_denoising")
            arguments += ["--auxiliary", "denoising"]
    return arguments


def create_language_pipeline(
    process: ProcessArguments, model: LanguageModelArguments, length: int | None, seed: int = 0
) -> D3PMTextPipeline:
    """The pipeline around a language model of transformers, pretrained or new."""
    kinds = {"absorbing": AutoModelForMaskedLM, "autoregressive": AutoModelForCausalLM}
    if process.transition not in kinds:
        raise ValueError(
            f"transition is {process.transition!r}, and a language model of transformers is a denoiser of {' or '.join(kinds)}: "
            "choose one of them, or train a network of this package with --dataset_path"
        )
    is_causal = process.transition == "autoregressive"
    source = model.model_name_or_path or model.config_name
    hub, trust = {"revision": model.model_revision}, model.trust_remote_code
    tokenizer = None
    if model.tokenizer_name is not None or model.model_name_or_path is None:
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer_name or source, trust_remote_code=trust, **hub)
    network = model.model_name_or_path
    options = {**hub, "trust_remote_code": trust, "use_safetensors": model.use_safetensors}
    if network is None:
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(model.config_name, trust_remote_code=trust, **hub)
        network, options = kinds[process.transition].from_config(config, trust_remote_code=trust), {}
    settings = {name: getattr(process, name) for name in ("prediction_type", "x0_posterior", "reconstruction")}
    if is_causal:
        return D3PMTextPipeline.from_causal_lm(
            network, tokenizer, sequence_length=length, scheduler_kwargs=settings, **options
        )
    schedule = process.beta_schedule or MUTUAL_INFORMATION
    settings |= {"beta_schedule": schedule, "beta_start": process.beta_start, "beta_end": process.beta_end}
    return D3PMTextPipeline.from_masked_lm(
        network,
        tokenizer,
        num_train_timesteps=process.num_train_timesteps,
        sequence_length=length,
        scheduler_kwargs=settings,
        **options,
    )


def create_text_parts(process: ProcessArguments, network: TextModelArguments, dataset, length: int, seed: int = 0):
    """The network and the scheduler for tokens. The mask token, if there is one, comes after the tokens of the data."""
    torch.manual_seed(seed)
    family = get_family(process.transition)
    num_classes, is_causal = dataset.num_tokens + family.has_mask, family.is_autoregressive
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
        position_bias_init=network.position_bias_init,
        timestep_conditioning=network.timestep_conditioning and not is_causal,
        is_decoder=is_causal,
    )
    return model, scheduler


def create_image_parts(process: ProcessArguments, network: ImageModelArguments, dataset, seed: int = 0):
    """The network and the scheduler for pixels, and the number of classes, if the data have them.

    The mask of a process that has one is gray, which the data may hold too.
    """
    torch.manual_seed(seed)
    num_classes = dataset.num_tokens
    has_mask = get_family(process.transition).has_mask
    mask = {"mask_token_id": num_classes // 2, "mask_in_data": True} if has_mask else {}
    scheduler = create_scheduler(process, dataset, num_classes, **mask)
    channels, height, width = dataset.tokens.shape[1:]
    levels = range(len(network.block_out_channels))
    attends = [level in network.attention_levels for level in levels]
    unet = create_unet(
        "paper",
        num_classes,
        (height, width),
        channels,
        process.prediction_type,
        num_class_labels=dataset.num_class_labels,
        block_out_channels=tuple(network.block_out_channels),
        layers_per_block=network.layers_per_block,
        down_block_types=tuple("AttnDownBlock2D" if attends[level] else "DownBlock2D" for level in levels),
        up_block_types=tuple("AttnUpBlock2D" if attends[level] else "UpBlock2D" for level in reversed(levels)),
        norm_num_groups=count_groups(network),
        dropout=network.unet_dropout,
    )
    return unet, scheduler, dataset.num_class_labels


def count_groups(network: ImageModelArguments) -> int:
    """The groups of the normalization, which must divide the channels of each level.

    A channel that is normalized by itself loses its magnitude, and a network then learns to keep it by spikes.
    """
    common = math.gcd(*network.block_out_channels)
    if network.norm_num_groups is None:
        return next(count for count in range(max(1, min(32, common // 4)), 0, -1) if common % count == 0)
    if network.norm_num_groups < 1 or common % network.norm_num_groups:
        raise ValueError(
            f"norm_num_groups is {network.norm_num_groups}, which does not divide each of block_out_channels "
            f"{network.block_out_channels}: pass a divisor of {common}"
        )
    return network.norm_num_groups


def create_scheduler(
    process: ProcessArguments, dataset, num_classes: int, num_timesteps: int | None = None, **options
) -> D3PMScheduler:
    """The scheduler for a data set. Statistics of the data that the process needs are computed, and saved with it."""
    tensors, schedule = load_transition_tensors(process, dataset), choose_schedule(process, num_classes)
    if schedule == MUTUAL_INFORMATION and get_family(process.transition).has_schedule:
        unigram = unigram_probs(dataset)
        tensors["unigram_probs"] = torch.cat([unigram, unigram.new_zeros(num_classes - len(unigram))])
    return D3PMScheduler(
        num_classes,
        num_train_timesteps=num_timesteps or process.num_train_timesteps,
        transition=process.transition,
        beta_schedule=schedule,
        beta_start=process.beta_start,
        beta_end=process.beta_end,
        bandwidth=process.bandwidth,
        num_neighbors=process.num_neighbors,
        prediction_type=process.prediction_type,
        x0_posterior=process.x0_posterior,
        reconstruction=process.reconstruction,
        transition_tensors=tensors,
        **options,
    )


def choose_schedule(process: ProcessArguments, num_classes: int) -> str:
    """The schedule of `--beta_schedule`, or one that fits the number of states.

    The paper's betas of Gaussian noise are variances in units of 256 levels: with few levels they leave x_0 almost as it is.
    """
    if process.beta_schedule is not None:
        return process.beta_schedule
    return "linear" if process.transition == "gaussian" and num_classes >= 256 else MUTUAL_INFORMATION


def load_transition_tensors(process: ProcessArguments, dataset) -> dict[str, torch.Tensor]:
    """The tensors that the transition family takes: those of `--tensors_path`, or statistics of the training data."""
    path, family = process.tensors_path, get_family(process.transition)
    names = family.input_tensors()
    if path is not None and not names:
        takers = [name for name, other in transition_families().items() if other.input_tensors()]
        raise ValueError(
            f"tensors_path is {path}, and a {family.name!r} process needs no tensors: leave it out, or choose "
            f"--transition {', '.join(takers)}"
        )
    measured = {
        "embeddings": lambda: load_embeddings(process.embeddings_path, dataset),
        "stationary_probs": lambda: smoothed_frequencies(dataset),
    }
    tensors = {} if path is None else read_tensors(path)
    if path is None and names and names[0] in measured:
        tensors = {names[0]: measured[names[0]]()}
    if path is None and names and names[0] not in tensors:
        raise ValueError(
            f"transition is {family.name!r}, which needs {names[0]}: pass --tensors_path with a safetensors file that "
            f"holds a tensor {names[0]!r}"
        )
    if names and (names[0] not in tensors or not tensors.keys() <= set(names)):
        raise ValueError(
            f"{path} holds the tensors {sorted(tensors)}, and a {family.name!r} process takes {' and '.join(names)}"
        )
    return tensors


def smoothed_frequencies(dataset) -> torch.Tensor:
    """Frequencies of the states, each counted once more than it occurs: pi_k = (n_k + 1) / (n + K).

    A state of probability zero would never be reached, and the bound of data that hold it would be infinite.
    """
    size = dataset.tokens.size
    return (unigram_probs(dataset) * size + 1) / (size + dataset.num_tokens)


def read_tensors(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file."""
    try:
        return load_file(Path(path))
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{path} cannot be read as safetensors ({error}): write it with `safetensors.torch.save_file`"
        ) from error


def load_embeddings(path: str | None, dataset) -> torch.Tensor:
    """Embeddings of the tokens `[tokens, d]`: those of a file, or co-occurrence embeddings of the training data."""
    if path is None:
        return cooccurrence_embeddings(dataset)
    tensors = list(read_tensors(path).values())
    if len(tensors) != 1 or tensors[0].ndim != 2 or len(tensors[0]) != dataset.num_tokens:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(f"{path} holds tensors of shape {shapes}: one of shape ({dataset.num_tokens}, d) is needed")
    return tensors[0]
