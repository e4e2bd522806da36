# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Networks of diffusers and transformers, loaded from files that are checked first.

A file of a few bytes must not take hours, or all memory. Every layer of a network has tensors, and the weights hold them: a
configuration that counts many more layers than there are tensors is refused before anything is built, and a network of
transformers that is much larger than its weights is refused before it takes memory.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin, UNet2DModel
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel
from transformers.utils import WEIGHTS_NAME

from ..hub.layout import (
    ADAPTER_NAME,
    PICKLED_WEIGHTS,
    SAFE_WEIGHTS,
    check_report,
    open_safetensors,
    read_json,
    weights_files,
)
from ..hub.transfers import HUB_ARGUMENTS, download_network
from ..utils.checks import check_type, describe, is_number, shorten
from .trust import check_file_names


CONFIG_NAME = "config.json"
# JSON files beside a network of transformers that are read; repositories of the Hub have others, of any content.
NETWORK_FILES = (
    *(CONFIG_NAME, "generation_config.json", "preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json"),
)
# Settings that count layers (`num_hidden_layers`, `layers_per_block`, `depth`, ...), and settings that count labels or experts,
# with the counts that are allowed for weights of any size.
COUNTED = {
    re.compile(r"^(num|n)_.*(layer|block|stage)|layers|depth"): 500,
    re.compile(r"^(num|n)_.*(expert|label)"): 100_000,
}
# Any other number that is allowed for weights of any size.
LARGEST_SETTING = 1 << 24
# Bytes of a network per element of its weights, with room for other data types, and bytes that are allowed beside them.
BYTES_PER_ELEMENT, FREE_BYTES = 32, 1 << 26
# Errors that libraries raise for settings that they do not expect.
FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NameError, RuntimeError),
    *(TypeError, ValueError, StrictDataclassError),
)
TRY_AGAIN = "download or save the checkpoint again"


def reads_safetensors(use_safetensors: bool | None) -> bool:
    """Returns whether weights are read from safetensors: by default (`None`), and unless it is `False`."""
    if use_safetensors is not None:
        check_type("use_safetensors", use_safetensors, bool, "True, False or None")
    return use_safetensors is not False


def load_pretrained(
    auto_class: Any, name: str, trust_remote_code: bool = False, use_safetensors: bool = True, **kwargs: Any
) -> tuple[PreTrainedModel, Path, dict[str, dict]]:
    """Loads a network of transformers by itself, from the Hub or from a folder, by a class such as `AutoModelForMaskedLM`.

    Returns it with its folder and the JSON files of the folder. The weights may hold further tensors, such as other heads of the
    network, which are not loaded.
    """
    hub = {key: kwargs.pop(key) for key in HUB_ARGUMENTS if key in kwargs}
    subfolder, variant, folder = kwargs.pop("subfolder", None) or "", kwargs.pop("variant", None), name
    if not os.path.isdir(name):
        folder = download_network(name, subfolder, variant, trust_remote_code, not use_safetensors, **hub)
    part = Path(folder, subfolder)
    if (part / ADAPTER_NAME).is_file():
        raise ValueError(
            f"{part / ADAPTER_NAME} is an adapter of PEFT: load the network that it belongs to, and add it with `load_lora_weights`"
        )
    settings = read_settings(part, variant, NETWORK_FILES)
    if not use_safetensors and not any([*part.glob(name)] for name in weights_files(*PICKLED_WEIGHTS[-1], variant)):
        raise OSError(f"{part} has no pickled weights ({WEIGHTS_NAME}): leave out use_safetensors=False")
    kwargs["trust_remote_code"] = trust_remote_code
    network, report = load_network(part, auto_class, settings, variant, use_safetensors, **kwargs)
    fix = TRY_AGAIN
    if not report["mismatched_keys"]:
        fix = (
            f"choose a checkpoint with all of them, or load the network with {auto_class.__name__}, train what is missing, and pass "
            "the network itself"
        )
    check_report({**report, "unexpected_keys": ()}, part, f"a {type(network).__name__}", fix)
    network.config._name_or_path = name  # the repository, which a card names as its base model
    return network, part, settings


def read_settings(part: Path, variant: str | None, names: tuple[str, ...] | None = None) -> dict[str, dict]:
    """Reads the JSON files of a component by their names, those in `names` and indexes of shards, and checks what they name."""
    settings = {}
    for path in sorted(part.glob("*.json")):
        if names is None or path.name in names or ".index." in path.name:
            settings[path.name] = read_json(path)
            check_file_names(path, settings[path.name], variant)
    return settings


def read_shapes(part: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors in all safetensors files of a folder."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in part.glob("*.safetensors"):
        with open_safetensors(path) as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    return shapes


def load_network(
    part: Path, cls: Any, settings: dict[str, dict], variant: str | None, use_safetensors: bool, **kwargs: Any
) -> tuple[Any, dict]:
    """Loads a network, once its files are checked, and returns it with the report of its library."""
    if CONFIG_NAME not in settings:
        raise OSError(f"{part / CONFIG_NAME} is missing: the checkpoint is incomplete; download or save it again")
    num_elements = 0
    if use_safetensors:
        check_has_weights(part, variant)
        shapes = read_shapes(part)
        num_elements = sum(map(math.prod, shapes.values()))
        check_settings(part / CONFIG_NAME, settings[CONFIG_NAME], len(shapes), num_elements)
    if not issubclass(cls, ModelMixin):
        kwargs["ignore_mismatched_sizes"] = True  # they are in the report
        if use_safetensors and kwargs.get("device_map") is None:
            # What does not fit would go to a folder on the disk. There is a file in its place, which stops transformers before it
            # takes memory for tensors of other shapes than those of the weights, or for tensors that the weights lack.
            limit = BYTES_PER_ELEMENT * num_elements + FREE_BYTES
            kwargs |= {"device_map": "sequential", "max_memory": {"cpu": limit}, "offload_folder": part / CONFIG_NAME}
    kwargs |= {"use_safetensors": use_safetensors, "local_files_only": True, "output_loading_info": True}
    try:
        with explain_failure(part, cls):
            return cls.from_pretrained(part, variant=variant, **kwargs)
    except FileExistsError as error:
        raise ValueError(
            f"{part / CONFIG_NAME} describes a network that is much larger than its weights, which hold {num_elements} numbers: "
            f"{TRY_AGAIN}"
        ) from error


def check_has_weights(part: Path, variant: str | None) -> None:
    """Checks that there are safetensors of the variant. Shards that an index names may have any name."""
    if any([*part.glob(name)] for form in SAFE_WEIGHTS for name in weights_files(*form, variant)):
        return
    if variant is not None:
        raise OSError(
            f"{part} has no weights of the variant {variant!r}: leave out `variant`, or pass one that it has"
        )
    fault = "has no weights (*.safetensors): the checkpoint is incomplete, or "
    raise OSError(
        f"{part} {'' if [*part.glob('*.bin')] else fault}has pickled weights only, which can run code: pass "
        "`use_safetensors=False` if you trust them"
    )


def check_settings(path: Path, settings: dict, num_tensors: int, num_elements: int) -> None:
    """Checks the numbers in a configuration that libraries do not look at before it is too late.

    No count, such as `num_hidden_layers`, may exceed the number of tensors by far, and no number that of their elements. Dropout
    must be in 0 .. 1, and there must be attention heads: a network with other values is built, and fails when it is run.
    """
    items = list(settings.items())
    for name, value in items:
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            items += value.items()
        is_wrong = name == "num_attention_heads" and is_number(value) and value < 1
        if is_wrong or ("dropout" in name and is_number(value) and not 0 <= value <= 1):
            raise ValueError(f"{path} has {name}={value}, which no network can run with: {TRY_AGAIN}")
        limit, held = max(LARGEST_SETTING, num_elements), f"{num_elements} numbers"
        for pattern, smallest in COUNTED.items():
            if pattern.search(name):
                limit, held = max(smallest, num_tensors), f"{num_tensors} tensors"
                break
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and number > limit:
                raise ValueError(
                    f"{path} has {name}={describe(number)}, and the weights beside it hold {held}: {TRY_AGAIN}"
                )


def try_unet(network: UNet2DModel) -> None:
    """Runs a U-Net of diffusers on the `meta` device, without values: some of its settings are not looked at before that."""
    size = network.config.sample_size
    height, width = size if isinstance(size, (list, tuple)) and len(size) == 2 else (size, size)
    if isinstance(height, int) and isinstance(width, int) and min(height, width) > 0:  # else the pipeline refuses it
        tensors = {
            name: tensor.to("meta") for name, tensor in chain(network.named_parameters(), network.named_buffers())
        }
        sample = torch.empty(1, network.config.in_channels, height, width, device="meta")
        index = torch.zeros(1, dtype=torch.long, device="meta")
        labels = None if network.class_embedding is None else index
        with torch.no_grad():
            torch.func.functional_call(network, tensors, (sample.to(network.dtype), index), {"class_labels": labels})


@contextmanager
def explain_failure(part: Path, cls: Any = None) -> Iterator[None]:
    """Replaces the error of a library that cannot load a component of the class `cls` from its files by a sentence."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, FAILURES) and not is_panic(error):
            raise
        if str(error).startswith("Unrecognized configuration class"):
            raise ValueError(
                f"{part} has a configuration that {cls.__name__} does not know: choose another network (`from_masked_lm` is for "
                "masked and `from_causal_lm` for causal language models)"
            ) from error
        reason = shorten(" ".join(str(error).split()).split(". ")[0])
        raise ValueError(
            f"the files in {part} do not describe a component ({type(error).__name__}: {reason}): {TRY_AGAIN}"
        ) from error


@contextmanager
def explain_panic(sentence: str) -> Iterator[None]:
    """Replaces a panic of tokenizers by a `ValueError`: `sentence`, and the panic in parentheses."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ValueError(f"{sentence} ({' '.join(str(error).split())}): use another checkpoint") from error


def is_panic(error: BaseException) -> bool:
    """Whether an error is one of tokenizers, a library in Rust, that no `except` names.

    These are bare `Exception`s, and `pyo3_runtime.PanicException`, a `BaseException` that cannot be imported.
    """
    return type(error) is Exception or type(error).__name__ == "PanicException"
