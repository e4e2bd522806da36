# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Shared by the training scripts: networks, schedulers and pipelines built from their arguments."""

import math
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from ..data import cooccurrence_embeddings, unigram_probs
from ..hub.adapters import add_adapter, has_adapters, load_peft
from ..hub.layout import ADAPTER_NAME, INDEX_NAME
from ..hub.transfers import download_index
from ..models import create_text_model, create_unet
from ..pipelines import D3PMPipeline, D3PMTextPipeline
from ..schedulers import D3PMScheduler
from ..schedules import MUTUAL_INFORMATION
from ..transitions import get_family, transition_families
from .script_arguments import (
    ImageModelArguments,
    LanguageModelArguments,
    LoraArguments,
    ProcessArguments,
    TextModelArguments,
)
from .training_args import D3PMTrainingArguments


PipelineType = TypeVar("PipelineType", bound=D3PMPipeline)


def create_language_pipeline(
    process: ProcessArguments, model: LanguageModelArguments, length: int | None, seed: int = 0
) -> D3PMTextPipeline:
    """The pipeline around a language model of transformers, pretrained or new; or a pipeline that was saved."""
    if is_pipeline(model):
        return load_pipeline(model, D3PMTextPipeline, **({} if length is None else {"sequence_length": length}))
    kinds = {"absorbing": AutoModelForMaskedLM, "autoregressive": AutoModelForCausalLM}
    if process.transition not in kinds:
        raise ValueError(
            f"transition is {process.transition!r}, and a language model of transformers is a denoiser of {' or '.join(kinds)}: "
            "choose one of them, or train a network of this package with --dataset_path"
        )
    is_causal = process.transition == "autoregressive"
    network: Any = model.model_name_or_path
    trust = model.trust_remote_code
    options: dict[str, Any] = {"revision": model.model_revision}
    tokenizer = None
    if model.tokenizer_name is not None or network is None:
        name = model.tokenizer_name or network or model.config_name
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust, **options)
    if network is None:
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(model.config_name, trust_remote_code=trust, **options)
        network, options = kinds[process.transition].from_config(config, trust_remote_code=trust), {}
    else:
        options |= {"trust_remote_code": trust, "use_safetensors": model.use_safetensors}
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


def is_pipeline(model: LanguageModelArguments) -> bool:
    """Whether `--model_name_or_path` is the checkpoint of a pipeline, or a LoRA, and not that of a network."""
    folder = model.model_name_or_path
    if folder is None:
        return False
    if not Path(folder).is_dir():
        folder = download_index(folder, revision=model.model_revision)
    return any(Path(folder, name).is_file() for name in (INDEX_NAME, ADAPTER_NAME))


def load_pipeline(model: LanguageModelArguments, kind: type[PipelineType], **options) -> PipelineType:
    """The pipeline of `--model_name_or_path`, which must be a `kind`."""
    assert model.model_name_or_path is not None
    options |= {"revision": model.model_revision, "use_safetensors": model.use_safetensors}
    pipeline = D3PMPipeline.from_pretrained(model.model_name_or_path, **options)
    if not isinstance(pipeline, kind):
        raise ValueError(
            f"model_name_or_path is {model.model_name_or_path}, a {type(pipeline).__name__}, and these data are for a "
            f"{kind.__name__}: pass --dataset_name for text, and --dataset_path for images"
        )
    return pipeline


def add_lora(pipeline: D3PMPipeline, lora: LoraArguments, training: D3PMTrainingArguments) -> D3PMPipeline:
    """The pipeline with a new LoRA in its network, if `--use_peft` asks for one."""
    if not lora.use_peft:
        return pipeline
    peft, network = load_peft(), getattr(pipeline, pipeline.network_name)
    if has_adapters(network):
        raise ValueError("the model has a LoRA already: leave out --use_peft to train it further")
    targets = lora.lora_target_modules or ["all-linear"]
    config = peft.LoraConfig(
        r=lora.lora_r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=targets[0] if len(targets) == 1 else targets,
        modules_to_save=lora.lora_modules_to_save,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
    )
    torch.manual_seed(training.seed)
    add_adapter(network, config, "default")
    return pipeline


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
    tensors, schedule = load_transition_tensors(process, dataset), process.beta_schedule
    if schedule is None:
        # The paper's betas of Gaussian noise are variances in units of 256 levels: with few levels they leave x_0 almost as it is.
        schedule = "linear" if process.transition == "gaussian" and num_classes >= 256 else MUTUAL_INFORMATION
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


def load_transition_tensors(process: ProcessArguments, dataset) -> dict[str, torch.Tensor]:
    """The tensors that the transition family takes: those of `--tensors_path`, or statistics of the training data."""
    path, family = process.tensors_path, get_family(process.transition)
    names = family.input_tensors()
    if path is None:
        if not names:
            return {}
        if names[0] == "embeddings":
            return {"embeddings": load_embeddings(process.embeddings_path, dataset)}
        if names[0] == "stationary_probs":
            # Each state is counted once more than it occurs, pi_k = (n_k + 1) / (n + K): one of probability zero would never be
            # reached, and the bound of data that hold it would be infinite.
            size = dataset.tokens.size
            return {"stationary_probs": (unigram_probs(dataset) * size + 1) / (size + dataset.num_tokens)}
        raise ValueError(
            f"transition is {family.name!r}, which needs {names[0]}: pass --tensors_path with a safetensors file that "
            f"holds a tensor {names[0]!r}"
        )
    if not names:
        takers = [name for name, other in transition_families().items() if other.input_tensors()]
        raise ValueError(
            f"tensors_path is {path}, and a {family.name!r} process needs no tensors: leave it out, or choose "
            f"--transition {', '.join(takers)}"
        )
    tensors = read_tensors(path)
    if names[0] not in tensors or not tensors.keys() <= set(names):
        raise ValueError(
            f"{path} holds the tensors {sorted(tensors)}, and a {family.name!r} process takes {' and '.join(names)}"
        )
    return tensors


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
