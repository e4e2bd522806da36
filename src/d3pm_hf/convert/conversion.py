# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checkpoints of MDLM, SEDD, UDLM and Duo, read from safetensors into a pipeline.

All four have the same network, a [`D3PMDiT`], and log-linear noise, of which sigma = -log alpha is the network's input. They
differ in how the output is read:

- MDLM (`subs`): logits of x_0 under absorbing noise, without the mask; what is not masked is copied. Both are part of an
  absorbing [`D3PMScheduler`].
- SEDD (`score`): log-scores log(p_t(y) / p_t(x_t)) under absorbing noise, which are log p(x_0 = y) less log(exp(sigma) - 1)
  where x_t is the mask. A constant per position is of no account, so that they are logits of x_0.
- UDLM and Duo (`mean`): logits of x_0 under uniform noise, whose softmax stands for x_0 in the posterior: eq. 4 of D3PM, the
  leave-one-out reading.
"""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..hub.layout import check_report, compare_shapes, open_safetensors, read_json
from ..hub.transfers import HUB_ARGUMENTS, download_network, download_texts
from ..models.configuration_d3pm_dit import D3PMDiTConfig
from ..models.modeling_d3pm_dit import LONGEST_PERIOD, D3PMDiT
from ..pipelines.networks import CONFIG_NAME, NETWORK_FILES, explain_failure, read_settings, read_shapes
from ..pipelines.pipeline_d3pm_text import D3PMTextPipeline
from ..pipelines.tokenizer_files import load_tokenizer
from ..schedulers.scheduling_d3pm import D3PMScheduler
from ..utils.checks import check_choice, check_int, check_path, check_str, check_type, describe
from ..utils.names import PARAMETERIZATIONS


# Tokenizers of the authors by the size of the vocabulary, a mask or padding token included.
TOKENIZERS = {50257: "gpt2", 50258: "gpt2", 30522: "bert-base-uncased"}
# How the output of the network of each `model_type` is read.
MODEL_TYPES = {"mdlm": "subs", "udlm": "mean", "duo": "mean"}
TRANSITIONS = {"subs": "absorbing", "score": "absorbing", "mean": "uniform"}
# Names of the sizes in the authors' configurations.
SIZES = {
    "hidden_size": ("hidden_dim", "hidden_size"),
    "num_hidden_layers": ("n_blocks",),
    "num_attention_heads": ("n_heads",),
    "cond_size": ("cond_dim",),
    "length": ("model_length", "length"),
}
PREFIX, FREQUENCIES, CLASSES = "backbone.", "rotary_emb.inv_freq", "cond_map.embedding_table.weight"
# Tensors that have another name here.
RENAMED = {"vocab_embed.embedding": "vocab_embed.weight", CLASSES: "cond_map.weight"}


def convert_checkpoint(
    model: str | os.PathLike,
    tokenizer: str | os.PathLike | PreTrainedTokenizerBase | None = None,
    *,
    num_train_timesteps: int = 1000,
    parameterization: str | None = None,
    **kwargs,
) -> D3PMTextPipeline:
    """Creates a pipeline from a checkpoint of MDLM, SEDD, UDLM or Duo, which are read from safetensors.

    The process has the survival 1 - t / T, the log-linear noise of the authors without the share of 0.001 that it leaves at the
    end; the network reads their noise level. No code of the repository is run.

    Args:
        model (`str` or `os.PathLike`): Id of a repository on the Hub, such as `"kuleshov-group/mdlm-owt"`, or a folder with
            `config.json` and `model.safetensors`.
        tokenizer (`str`, `os.PathLike` or `PreTrainedTokenizerBase`, *optional*): Tokenizer, its id or its folder. By default
            that of the checkpoint, or else the one with which the authors trained, found by the size of the vocabulary.
        num_train_timesteps (`int`, defaults to 1000): Number of timesteps T.
        parameterization (`str`, *optional*): What the network puts out: `"subs"` (MDLM), `"score"` (SEDD) or `"mean"` (UDLM,
            Duo). By default what `config.json` tells; it cannot be another one.
        kwargs: Arguments of the download: `revision`, `cache_dir`, `token`, `local_files_only` and `force_download`.

    Example:
        pipeline = convert_checkpoint("kuleshov-group/mdlm-owt")
    """
    check_path("model", model)
    check_int("num_train_timesteps", num_train_timesteps, 1)
    if parameterization is not None:
        check_choice("parameterization", parameterization, PARAMETERIZATIONS)
    for argument in kwargs:
        check_choice("an argument of the download", argument, HUB_ARGUMENTS)
    name = os.fspath(model)
    folder = Path(name if os.path.isdir(name) else download_network(name, "", None, False, False, **kwargs))
    if not (folder / CONFIG_NAME).is_file():
        raise OSError(f"{folder / CONFIG_NAME} is missing: choose a checkpoint of MDLM, SEDD, UDLM or Duo")
    parameterization, length, settings = read_description(folder / CONFIG_NAME, parameterization)
    network = load_dit(folder, {**settings, "num_train_timesteps": num_train_timesteps})
    network.config._name_or_path = name  # the repository, which a card names as its base model
    num_classes, transition = settings["vocab_size"], TRANSITIONS[parameterization]
    tokenizer = find_tokenizer(folder, tokenizer, num_classes, kwargs)
    options: dict[str, Any] = {"transition": transition, "beta_schedule": "reciprocal"}
    mask = fit_tokenizer(tokenizer, num_classes, transition)
    scheduler = D3PMScheduler(num_classes, num_train_timesteps, mask_token_id=mask, **options)
    num_embeds = network.config.num_class_embeds
    return D3PMTextPipeline(
        network,
        scheduler,
        tokenizer,
        length,
        num_class_labels=None if num_embeds is None else num_embeds - 1,  # the last one is "no class"
    )


def read_description(path: Path, parameterization: str | None = None) -> tuple[str, int, dict[str, Any]]:
    """Reads a config.json of MDLM, UDLM and Duo, or of SEDD; `parameterization` is what the caller expects.

    Returns how the output is read (`"subs"`, `"score"` or `"mean"`), the number of tokens of a sample, and arguments of
    [`D3PMDiTConfig`].
    """
    values = read_json(path)
    if isinstance(values.get("config"), dict):  # of newer versions of huggingface_hub
        values = values["config"]
    if "graph" in values:  # the settings of SEDD's training
        graph, noise, model = values["graph"], values.get("noise"), values.get("model")
        kind = graph.get("type") if isinstance(graph, dict) else None
        if kind != "absorb":
            raise ValueError(
                f"{path} describes a score model with graph.type={describe(kind)}: only the scores of 'absorb' are those of a "
                "prediction of x_0, whatever the network puts out; choose an absorbing checkpoint of SEDD"
            )
        if isinstance(noise, dict) and noise.get("type") != "loglinear":
            raise ValueError(
                f"{path} has noise.type={describe(noise.get('type'))}: only the noise levels of 'loglinear' are known here; "
                "choose another checkpoint"
            )
        found, sizes = "score", model if isinstance(model, dict) else {}
        vocab_size = read_size(path, values, "tokens") + 1  # the mask comes last
    else:
        model_type = str(values.get("model_type")).lower()
        if model_type not in MODEL_TYPES and parameterization is None:
            raise ValueError(
                f"{path} has model_type={describe(values.get('model_type'))}, which is none of {', '.join(MODEL_TYPES)}, and is not "
                "a configuration of SEDD: choose another checkpoint, or pass `parameterization` for a network with the same "
                "tensors"
            )
        found = MODEL_TYPES.get(model_type, parameterization or "")
        sizes, vocab_size = values, read_size(path, values, "vocab_size")
    if parameterization not in (None, found):
        raise ValueError(
            f"parameterization is {parameterization!r}, and {path} describes a network with {found!r}: leave it out, since the "
            "output would be read as something else"
        )
    if sizes.get("causal"):
        raise ValueError(
            f"{path} has causal=true, an autoregressive network: choose a checkpoint of a diffusion model"
        )
    conditioning = sizes.get("time_conditioning", True)
    check_type(f"time_conditioning of {path}", conditioning, bool, "true or false")
    settings = {ours: read_size(path, sizes, *names) for ours, names in SIZES.items()}
    length = settings.pop("length")
    return found, length, {**settings, "vocab_size": vocab_size, "timestep_conditioning": conditioning}


def read_size(path: Path, values: dict, *names: str) -> int:
    """The first of some settings that is there, after a check that it is a positive number."""
    for name in names:
        if name in values:
            check_int(f"{name} of {path}", values[name], 1, 1 << 24)
            return values[name]
    raise ValueError(f"{path} has no {names[0]}: choose a checkpoint of MDLM, SEDD, UDLM or Duo")


def load_dit(folder: Path, settings: dict[str, Any]) -> D3PMDiT:
    """The network of a folder, whose tensors are compared with those that the settings describe before it is built."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise OSError(
            f"{folder} has no *.safetensors: pickled weights (*.bin, *.ckpt, *.pth) can run code and are not read; where you trust "
            "them, load them with `torch.load(..., weights_only=True)` and write them with `safetensors.torch.save_file`"
        )
    shapes = read_shapes(folder)
    prefix = PREFIX if all(name.startswith(PREFIX) for name in shapes) else ""
    names = {RENAMED.get(name.removeprefix(prefix), name.removeprefix(prefix)): name for name in shapes}
    if settings["num_hidden_layers"] > len(shapes):
        raise ValueError(
            f"{folder / CONFIG_NAME} has n_blocks={settings['num_hidden_layers']}, and the weights beside it hold "
            f"{len(shapes)} tensors: the two files are not from the same checkpoint"
        )
    classes = shapes.get(prefix + CLASSES)
    with explain_failure(folder, D3PMDiT), torch.device("meta"):
        config = D3PMDiTConfig(
            intermediate_size=4 * settings["hidden_size"],
            num_class_embeds=classes[0] if classes else None,
            **settings,
        )
        network = D3PMDiT(config)
    needed = {names.get(name, name): tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    shapes.pop(prefix + FREQUENCIES, None)
    fix = "choose a checkpoint of MDLM, SEDD, UDLM or Duo, or download it again"
    check_report(compare_shapes(shapes, needed), folder, f"the network that {CONFIG_NAME} describes", fix)
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        with open_safetensors(path) as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    if prefix + FREQUENCIES in tensors:
        check_frequencies(folder, tensors[prefix + FREQUENCIES], config)
    network.load_state_dict({name: tensors[names[name]].float() for name in network.state_dict()}, assign=True)
    return network.eval()


def check_frequencies(folder: Path, frequencies: torch.Tensor, config: D3PMDiTConfig) -> None:
    """Checks that stored frequencies of rotary positions are those that the network computes."""
    size = config.hidden_size // config.num_attention_heads
    expected = LONGEST_PERIOD ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    if frequencies.shape != expected.shape or not torch.allclose(frequencies.double(), expected, rtol=1e-2, atol=1e-6):
        raise ValueError(
            f"the tensor {FREQUENCIES} in {folder} holds other frequencies than those of {config.num_attention_heads} heads with "
            f"a longest period of {LONGEST_PERIOD:.0f}: choose another checkpoint"
        )


def find_tokenizer(folder: Path, tokenizer: Any, vocab_size: int, hub_arguments: dict) -> PreTrainedTokenizerBase:
    """The tokenizer that was passed, that of the checkpoint, or the authors' for a vocabulary of this size."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    hub = {name: value for name, value in hub_arguments.items() if name != "revision"}  # that of the checkpoint
    if tokenizer is None:
        if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
            return load_tokenizer(folder, AutoTokenizer, read_settings(folder, None, NETWORK_FILES))
        if vocab_size not in TOKENIZERS:
            raise ValueError(
                f"the checkpoint has no tokenizer and a vocabulary of {vocab_size}, for which none is known: pass `tokenizer`"
            )
        tokenizer = TOKENIZERS[vocab_size]
    check_type("tokenizer", tokenizer, (str, os.PathLike), "a tokenizer, its id on the Hub, or its folder")
    name = os.fspath(tokenizer)
    check_str("tokenizer", name)
    part = Path(name if os.path.isdir(name) else download_texts(name, **hub))
    found = load_tokenizer(part, AutoTokenizer, read_settings(part, None, NETWORK_FILES))
    found.name_or_path = name
    return found


def fit_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, transition: str) -> int | None:
    """Adds the token that the authors add behind the vocabulary, and returns the mask of an absorbing process.

    That is a mask for absorbing noise, and padding for uniform noise (in Duo), unless the tokenizer has one.
    """
    size, is_absorbing = len(tokenizer), transition == "absorbing"
    kind = "mask_token" if is_absorbing else "pad_token"
    if size == vocab_size - 1 and getattr(tokenizer, kind) is None:
        tokenizer.add_special_tokens({kind: "[MASK]" if is_absorbing else "[PAD]"})
    if len(tokenizer) != vocab_size or (is_absorbing and tokenizer.mask_token_id is None):
        raise ValueError(
            f"the tokenizer ({type(tokenizer).__name__}) has a vocabulary of {size}, and the network one of {vocab_size}"
            f"{', the mask included' if is_absorbing else ''}: pass the tokenizer that the network was trained with"
        )
    return tokenizer.mask_token_id if is_absorbing else None
