# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Arguments of the training scripts: the process, the network, presets, and their parser. torch is not imported here."""

import argparse
import re
import sys
from dataclasses import dataclass

from transformers.hf_argparser import HfArgumentParser

from ..utils.names import CHOICES, INPUT_TENSORS, SCHEDULES, TRANSITIONS
from .training_args import flag


# Families and schedules of your own are registered by a program that has imported the package.
if "d3pm_hf.transitions" in sys.modules:
    from ..schedules import schedule_names
    from ..transitions import transition_families

    SCHEDULES: tuple[str, ...] = schedule_names()  # type: ignore[no-redef]  # of any length
    TRANSITIONS = {name: family.description for name, family in transition_families().items()}
    INPUT_TENSORS = {name: family.input_tensors() for name, family in transition_families().items()}

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

    transition: str = flag(
        "absorbing",
        "Transition family of the forward process. "
        + " ".join(f"{name}: {description}." for name, description in TRANSITIONS.items()),
        choices=tuple(TRANSITIONS),
    )
    beta_schedule: str | None = flag(
        None,
        "Noise schedule. Defaults to mutual_information, and for Gaussian noise on 256 levels or more to the "
        "paper's linear one.",
        choices=SCHEDULES,
    )
    num_train_timesteps: int = flag(1000, "Number of timesteps T. An autoregressive process always has one per token.")
    beta_start: float | None = flag(None, "First beta of the linear schedule. Defaults to the paper's.")
    beta_end: float | None = flag(None, "Last beta of the linear schedule. Defaults to the paper's.")
    bandwidth: int = flag(1, "Bandwidth of a band-diagonal process.")
    num_neighbors: int = flag(5, "Number of nearest neighbors of a token.")
    embeddings_path: str | None = flag(
        None,
        "Safetensors file with one tensor [tokens, d], the embeddings in which nearest neighbors are found. By "
        "default they are computed from the training data.",
    )
    tensors_path: str | None = flag(
        None,
        "Safetensors file with the tensors of the transition family. "
        + " ".join(f"{name}: {', '.join(tensors)}." for name, tensors in INPUT_TENSORS.items() if tensors)
        + " By default stationary_probs are the frequencies of the states in the training data, and embeddings are "
        "computed from it.",
    )
    prediction_type: str = flag("x0", "Output of the network.", choices=CHOICES["prediction_type"])
    x0_posterior: str = flag("leave_one_out", "Meaning of the logits of x_0.", choices=CHOICES["x0_posterior"])
    reconstruction: str = flag(
        "posterior", "Distribution of the last reverse step.", choices=CHOICES["reconstruction"]
    )


@dataclass
class TextModelArguments:
    """The text denoiser. The defaults are the paper's."""

    backbone: str = flag("t5", "Architecture of the network; the paper uses t5.", choices=("t5", "bert", "dit"))
    hidden_size: int = flag(768, "Size of the hidden states.")
    num_hidden_layers: int = flag(12, "Number of layers.")
    num_attention_heads: int = flag(12, "Number of attention heads.")
    intermediate_size: int = flag(3072, "Size of the feed-forward layers.")
    dropout: float = flag(0.0, "Dropout probability.")
    position_bias_init: str = flag(
        "distance",
        "Initial position biases of t5. distance: they decrease with the distance. offset: each head but two "
        "attends to an offset of its own.",
        choices=("distance", "offset"),
    )
    timestep_conditioning: bool = flag(True, "Whether the network reads the timestep. A causal network never does.")


@dataclass
class ImageModelArguments:
    """The U-Net. The defaults are the paper's."""

    block_out_channels: list[int] = flag([128, 256, 256, 256], "Number of channels of each level.")
    layers_per_block: int = flag(2, "Number of layers of each level.")
    attention_levels: list[int] = flag([1], "Levels with attention; each level halves the resolution.")
    norm_num_groups: int | None = flag(
        None,
        "Number of groups of channels that are normalized together. Defaults to one for every four channels of the "
        "narrowest level, at most 32, which is the paper's.",
    )
    unet_dropout: float = flag(0.1, "Dropout probability.")


@dataclass
class LanguageModelArguments:
    """A language model of transformers to start from. The names of the flags are those of `run_mlm.py` of transformers."""

    model_name_or_path: str | None = flag(
        None,
        "Id on the Hub or folder of a language model of transformers: a masked one for --transition absorbing, a "
        "causal one for --transition autoregressive. Or of a pipeline of this package, which keeps its process.",
    )
    config_name: str | None = flag(
        None, "Id or folder of a configuration, for a network with new weights, in place of a model."
    )
    tokenizer_name: str | None = flag(None, "Id or folder of the tokenizer. Defaults to that of the model.")
    model_revision: str = flag("main", "Branch, tag or commit of the model and of the tokenizer.")
    trust_remote_code: bool = flag(False, "Whether transformers may run code of the repository.")
    use_safetensors: bool = flag(True, "Whether weights are read from safetensors. False reads pickles.")


@dataclass
class LoraArguments:
    """A LoRA in place of the training of all weights. The names of the flags are those of TRL."""

    use_peft: bool = flag(False, "Whether to train a LoRA of the network (needs the package peft).")
    lora_r: int = flag(16, "Rank of the LoRA.")
    lora_alpha: int = flag(32, "Scale of the LoRA, whose change is multiplied by lora_alpha / lora_r.")
    lora_dropout: float = flag(0.05, "Dropout probability of the input of the LoRA.")
    lora_target_modules: list[str] | None = flag(
        None, "Names of the layers that get a LoRA. Defaults to all-linear, all linear layers but the output."
    )
    lora_modules_to_save: list[str] | None = flag(
        None, "Names of modules that are trained and saved whole beside the LoRA."
    )
    use_rslora: bool = flag(False, "Whether the scale is lora_alpha / sqrt(lora_r).")
    use_dora: bool = flag(False, "Whether to train the magnitudes of the weights apart (DoRA).")


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
        default_preset (*optional*): Preset that all others are added to, as in `train_cifar10.py`.
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


def answer_help(*arguments) -> None:
    """Prints the help and ends the script if it was called with `--help`, before the imports that take seconds.

    Args:
        arguments: Arguments of [`parse_arguments`].
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        parse_arguments(*arguments)


def read_old_names(arguments: list[str]) -> list[str]:
    """The command line with `--beta_schedule` for `--schedule`, and `--loss hybrid --auxiliary denoising` for its old name."""
    arguments = [re.sub("^--schedule(?=$|=)", "--beta_schedule", argument) for argument in arguments]
    for place, argument in enumerate(arguments):
        if argument == "--loss=hybrid_denoising" or arguments[place - 1 : place + 1] == ["--loss", "hybrid_denoising"]:
            arguments[place] = argument.removesuffix("_denoising")
            arguments += ["--auxiliary", "denoising"]
    return arguments
