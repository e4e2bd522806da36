# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""LoRA of PEFT: the layers in a network, and their files.

A LoRA is saved in the layout of PEFT, `adapter_config.json` and `adapter_model.safetensors`. `load_adapter` of transformers and
`PeftModel.from_pretrained` read it, and it names the checkpoint that it belongs to (`base_model_name_or_path`), which the file of
diffusers, `pytorch_lora_weights.safetensors`, does not.
"""

import copy
import hashlib
import inspect
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import CONFIG_NAME

from ..utils.checks import check_int, describe
from ..utils.modules import copy_module, without_compilation
from .layout import ADAPTER_NAME, ADAPTER_WEIGHTS_NAME, check_report, compare_shapes, open_safetensors, read_json


PICKLED_ADAPTER_NAME = "adapter_model.bin"
# Prefix of the tensors in a file of PEFT, and entry of the header of the file by which the base is known again.
PREFIX, FINGERPRINT = "base_model.model.", "d3pm_hf_base"
# Initial values that leave the weights of the base as they are, as those of a loaded LoRA must be.
PLAIN_STARTS = (True, False, "gaussian")
# Number of elements of each weight that the fingerprint of a base reads.
NUM_READ = 64


def load_peft() -> Any:
    """Imports PEFT."""
    try:
        import peft
    except ImportError as error:
        raise ImportError("LoRA needs the package peft: install it with `pip install d3pm-hf[lora]`") from error
    return peft


def is_of_peft(module: torch.nn.Module) -> bool:
    """Whether the class of a module is one of PEFT, or derives from one. PEFT itself need not be installed."""
    return any(parent.__module__.partition(".")[0] == "peft" for parent in type(module).__mro__)


def has_adapters(network: torch.nn.Module) -> bool:
    """Whether a network is a model of PEFT, or has layers of it (`get_peft_model`, `add_adapter`)."""
    return any(map(is_of_peft, network.modules()))


def bare_network(network: Any) -> Any:
    """The network inside of a `PeftModel`, which has the same layers; or the network itself.

    Both compute the same output. The network keeps its class, by which denoisers know how to call it.
    """
    inner = without_compilation(network)
    return inner.get_base_model() if hasattr(inner, "get_base_model") and is_of_peft(inner) else network


def adapter_layers(network: torch.nn.Module) -> list[tuple[str, Any]]:
    """The layers of PEFT in a network, and the modules that are trained beside them, by name."""
    if not has_adapters(network):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return [(name, module) for name, module in network.named_modules() if isinstance(module, kinds)]


def adapter_configs(network: torch.nn.Module) -> dict[str, Any]:
    """The configurations of the adapters of a network, by name."""
    return getattr(network, "peft_config", None) or {} if has_adapters(network) else {}


def is_fused(network: torch.nn.Module) -> bool:
    """Whether adapters are added to the weights of the base."""
    return any(getattr(layer, "merged", False) for _, layer in adapter_layers(network))


def check_not_fused(network: torch.nn.Module) -> None:
    """Checks that the adapters of a network are apart from the weights of the base."""
    if is_fused(network):
        raise ValueError("a LoRA is fused with the network: call `unfuse_lora` first")


def choose_adapter(network: torch.nn.Module, adapter_name: str | None = None) -> str:
    """The adapter of that name, or the active one. It is a LoRA that can be saved."""
    configs = adapter_configs(network)
    if not configs:
        raise ValueError("the network has no LoRA: call `load_lora_weights`, or `add_adapter` of the network")
    active = [adapter_name]
    if adapter_name is None:
        found = (getattr(layer, "active_adapters", []) for _, layer in adapter_layers(network))
        active = sorted({name for names in found for name in names}) or list(configs)
    if len(active) > 1 or active[0] not in configs:
        raise ValueError(
            f"the adapters are {', '.join(map(repr, configs))}, and {describe(active[0] if len(active) == 1 else active)} was "
            "chosen: choose one of them"
        )
    check_is_lora(configs[active[0]], "the adapter")
    check_not_fused(network)
    return active[0]


def check_is_lora(config: Any, where: object) -> None:
    """Checks that an adapter is a LoRA whose initial values do not change the weights of the base."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ValueError(
            f"{where} is of the kind {kind}, and a pipeline loads, trains and saves LORA: use a `LoraConfig`"
        )
    if config.init_lora_weights not in PLAIN_STARTS:
        raise ValueError(
            f"{where} has init_lora_weights={config.init_lora_weights!r}, which changes the weights of the base: use True or 'gaussian'"
        )


def base_parameters(network: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a network without those of adapters, by the names that they had before."""
    for name, parameter in network.named_parameters():
        parts = name.split(".")
        if "modules_to_save" not in parts and not any(part.startswith("lora_") for part in parts):
            yield ".".join(part for part in parts if part not in ("base_layer", "original_module")), parameter


def base_fingerprint(network: torch.nn.Module) -> str:
    """The data type of the base of a network, and the SHA-256 of the names and shapes of its weights and of 64 elements of each."""
    known = network.__dict__.get(FINGERPRINT)
    if known is not None:
        return known
    digest, dtype = hashlib.sha256(), None
    for name, parameter in sorted(base_parameters(network), key=lambda pair: pair[0]):
        dtype = dtype or parameter.dtype
        flat = parameter.detach().flatten()
        read = flat[torch.linspace(0, len(flat) - 1, min(NUM_READ, len(flat)), device=flat.device).round().long()]
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(read.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return f"{dtype}:{digest.hexdigest()}"


def remember_base(network: torch.nn.Module) -> None:
    """Keeps the fingerprint of the base of a network that is about to be fused, which rounds its weights, or sharded."""
    network.__dict__[FINGERPRINT] = base_fingerprint(network)


def add_adapter(network: Any, config: Any, adapter_name: str, is_empty: bool = False) -> None:
    """Adds a LoRA to a network of transformers or diffusers in place, and makes it the one that is active and trained.

    The weights of an empty one take no memory.
    """
    from peft.functional import inject_adapter_in_model, set_adapter

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # a second LoRA is meant
        inject_adapter_in_model(config, network, adapter_name, low_cpu_mem_usage=is_empty)
    network._hf_peft_config_loaded = True  # by which transformers and diffusers know that there is one
    set_adapter(network, adapter_name)
    network.train(network.training)  # the new layers, too


def remove_adapters(network: Any) -> None:
    """Puts the layers of the base in place of those of PEFT, and lets all weights be trained. What is fused stays in them."""
    keeps_changes = is_fused(network)
    for name, layer in reversed(adapter_layers(network)):  # what is inside of another layer first
        plain = layer.original_module if hasattr(layer, "original_module") else layer.get_base_layer()
        if keeps_changes and hasattr(layer, "modules_to_save") and layer.active_adapters:
            plain = layer.modules_to_save[layer.active_adapters[0]]
        owner, _, attribute = name.rpartition(".")
        setattr(network.get_submodule(owner), attribute, plain)
    network.__dict__.pop("peft_config", None)
    network.__dict__.pop(FINGERPRINT, None)
    network._hf_peft_config_loaded = False
    network.requires_grad_(True)


def config_values(config: Any) -> dict[str, Any]:
    """The settings of an adapter as values of JSON."""
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return json.loads(json.dumps(values, sort_keys=True))


def check_adapter_place(folder: Path, network_name: str, repo_id: str | None, base: str | None) -> None:
    """Checks that a LoRA is not saved beside a network, such as its own base, which could not be loaded any more."""
    for part in (folder, folder / network_name):
        if (part / CONFIG_NAME).is_file():
            raise ValueError(
                f"{folder} holds a whole network ({part / CONFIG_NAME}), and a LoRA beside it would be loaded in its place: save the "
                "LoRA to another folder"
            )
    if repo_id is not None and repo_id == base:
        raise ValueError(
            f"{repo_id!r} is the base of the LoRA, which would be loaded in its place: push it to another repository"
        )


def adapter_state(network: torch.nn.Module, adapter_name: str) -> dict[str, torch.Tensor]:
    """The tensors of an adapter, by names without that of the adapter."""
    from peft.functional import get_peft_model_state_dict

    # Whether the vocabulary has grown is not asked: PEFT would look for the base on the Hub.
    return get_peft_model_state_dict(network, adapter_name=adapter_name, save_embedding_layers=False)


def save_adapter(network: Any, adapter_name: str, base: str | None, folder: Path) -> None:
    """Writes a LoRA in the layout of PEFT. It names its base."""
    config = copy.copy(network.peft_config[adapter_name])
    config.base_model_name_or_path, config.inference_mode = base, True
    state = adapter_state(network, adapter_name)
    tensors = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(
        tensors, folder / ADAPTER_WEIGHTS_NAME, metadata={"format": "pt", FINGERPRINT: base_fingerprint(network)}
    )
    (folder / ADAPTER_NAME).write_text(json.dumps(config_values(config), indent=2) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> tuple[Any, dict[str, torch.Tensor], str | None]:
    """Reads a LoRA: its configuration, its tensors by their names in the network, and the fingerprint of its base, if it has one."""
    LoraConfig = load_peft().LoraConfig
    if not (folder / ADAPTER_NAME).is_file():
        raise OSError(
            f"{folder} has no {ADAPTER_NAME}, so it is not the folder of a LoRA: pass one that `save_lora_weights` wrote"
        )
    values = read_json(folder / ADAPTER_NAME)
    if values.get("peft_type") != "LORA":
        raise ValueError(
            f"{folder / ADAPTER_NAME} has peft_type={describe(values.get('peft_type'))}: it must be 'LORA'"
        )
    known = inspect.signature(LoraConfig.__init__).parameters
    try:
        config = LoraConfig(**{key: value for key, value in values.items() if key in known and key != "auto_mapping"})
        check_is_lora(config, folder / ADAPTER_NAME)
        check_int("r", config.r, 1)
        for rank in (config.rank_pattern or {}).values():
            check_int("a rank in rank_pattern", rank, 1)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{folder / ADAPTER_NAME} does not describe a LoRA ({error}): save it again") from error
    path = folder / ADAPTER_WEIGHTS_NAME
    if not path.is_file():
        has_pickle = (folder / PICKLED_ADAPTER_NAME).is_file()
        reason = "has pickled weights only, which can run code" if has_pickle else f"has no {ADAPTER_WEIGHTS_NAME}"
        raise OSError(f"{folder} {reason}: save the LoRA again with safetensors")
    with open_safetensors(path) as file:
        tensors = {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}
        return config, tensors, (file.metadata() or {}).get(FINGERPRINT)


def check_ranks(config: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Checks that the ranks of the tensors are those of the configuration, before there is memory for them."""
    found = {len(tensor) for name, tensor in tensors.items() if re.search(r"lora_(embedding_)?A\b", name)}
    named = {config.r, *(config.rank_pattern or {}).values()}
    if not found or not found <= named or max(named) > max(found):
        raise ValueError(
            f"{folder / ADAPTER_NAME} describes a LoRA of rank {', '.join(map(str, sorted(named)))}, and the tensors beside it have the "
            f"rank {', '.join(map(str, sorted(found))) or 'of no LoRA'}: save or download it again"
        )


def load_adapter(network: torch.nn.Module, folder: Path, adapter_name: str, check_base: bool = True) -> None:
    """Adds the LoRA of a folder to a network. A network that it does not fit stays as it was.

    `check_base` compares the weights of the network with those that the LoRA was trained on, if its file tells them and both
    have the same data type.
    """
    from peft.functional import set_peft_model_state_dict

    config, tensors, trained_on = read_adapter(folder)
    config.inference_mode = False
    kind, present = type(network).__name__, base_fingerprint(network)
    fix = f"load its base ({config.base_model_name_or_path!r}), or `D3PMPipeline.from_pretrained({str(folder)!r})`"
    if check_base and trained_on and trained_on.split(":")[0] == present.split(":")[0] and trained_on != present:
        raise ValueError(
            f"{folder} is a LoRA of another base than this {kind}, whose weights differ: {fix}; check_base=False adds it to these "
            "weights all the same"
        )
    check_ranks(config, tensors, folder)
    empty = copy_module(network, "meta")
    try:
        add_adapter(empty, copy.deepcopy(config), adapter_name, is_empty=True)
    except (ValueError, TypeError, RuntimeError, AttributeError, LookupError, re.error) as error:
        raise ValueError(f"{folder} is a LoRA that does not fit a {kind} ({error}): {fix}") from error
    needed = {name: tuple(value.shape) for name, value in adapter_state(empty, adapter_name).items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_report(compare_shapes(found, needed), folder, f"a LoRA of rank {config.r} of this {kind}", fix)
    add_adapter(network, config, adapter_name, is_empty=True)
    set_peft_model_state_dict(network, tensors, adapter_name, low_cpu_mem_usage=True)
