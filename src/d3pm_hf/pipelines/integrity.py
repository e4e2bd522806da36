# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checks of the files of a checkpoint before it is loaded: all there, complete, and fitting each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin, SchedulerMixin, UNet2DModel
from diffusers.utils import logging as diffusers_logging
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import WEIGHTS_NAME
from transformers.utils import logging as transformers_logging

from ..hub.layout import WEIGHTS_STEMS, list_components, read_json, weights_names
from ..utils.checks import check_type, describe, is_number, shorten
from ..utils.panics import is_panic
from .limits import check_buffers, check_growth, check_settings, create_on_meta, limit_modules
from .trust import check_file_names, find_component


# File that every component of a kind has.
CONFIG_NAMES = {
    SchedulerMixin: "scheduler_config.json",
    PreTrainedTokenizerBase: "tokenizer_config.json",
    ModelMixin: "config.json",
    PreTrainedModel: "config.json",
}
# JSON files beside a network of transformers that are read; repositories of the Hub have others, of any content.
NETWORK_FILES = (
    *("config.json", "generation_config.json", "preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json"),
)
ADAPTER_NAME = "adapter_config.json"
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_PATTERNS = (TOKENIZER_NAME, "*.model", "vocab.*")
# Errors that libraries raise for settings that they do not expect.
FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)
TRY_AGAIN = "download or save the checkpoint again"


def reads_safetensors(use_safetensors: bool | None) -> bool:
    """Returns whether weights are read from safetensors: by default (`None`), and unless it is `False`."""
    if use_safetensors is not None:
        check_type("use_safetensors", use_safetensors, bool, "True, False or None")
    return use_safetensors is not False


def check_files(folder: Path, index: dict, variant: str | None, use_safetensors: bool) -> None:
    """Checks the files of all components in an index.

    Raises an `OSError` for files that are missing or truncated, and a `ValueError` for files that lead elsewhere or do
    not fit each other.
    """
    for name, value in list_components(index):
        part, cls = folder / name, find_component(value)
        for path in sorted(part.glob("*.json")):
            check_file_names(path, read_json(path), variant)
        sizes = [count_tensors(path) for path in part.glob("*.safetensors")]
        if cls is None:  # code of the repository, which is trusted
            continue
        kind = next((base for base in CONFIG_NAMES if issubclass(cls, base)), None)
        if kind is None:
            continue
        if not (part / CONFIG_NAMES[kind]).is_file():
            raise OSError(
                f"{part / CONFIG_NAMES[kind]} is missing: the checkpoint is incomplete; download or save it again"
            )
        if kind is PreTrainedTokenizerBase:
            check_tokenizer(part, cls)
        if kind in (ModelMixin, PreTrainedModel):
            if use_safetensors:
                check_has_weights(part, variant)
            check_weights(part, cls, variant, sum(sizes) if use_safetensors else None)


def check_network(
    part: Path,
    auto_class: Any,
    variant: str | None,
    use_safetensors: bool,
    trust_remote_code: bool,
    config: Any = None,
) -> None:
    """Checks the files of a network of transformers by itself as those of a checkpoint.

    The weights may hold further tensors, such as other heads of the network, which are not loaded.

    Args:
        part (`Path`): Folder of the network.
        auto_class (`type`): Class of transformers that loads the network, such as `AutoModelForMaskedLM`.
        variant (`str`, *optional*): Variant of the weights.
        use_safetensors (`bool`): Whether the weights are safetensors or pickles.
        trust_remote_code (`bool`): Whether transformers may run code of the folder.
        config (`PreTrainedConfig`, *optional*): Configuration in place of that of the folder.
    """
    settings = part / CONFIG_NAMES[PreTrainedModel]
    if not settings.is_file():
        raise OSError(f"{settings} is missing: the checkpoint is incomplete; download or save it again")
    if (part / ADAPTER_NAME).is_file():
        raise ValueError(
            f"{part / ADAPTER_NAME} is an adapter of PEFT: load it with PEFT, call `merge_and_unload`, and pass the network itself"
        )
    for path in sorted(part.glob("*.json")):
        if path.name in NETWORK_FILES or ".index." in path.name:
            check_file_names(path, read_json(path), variant)
    sizes = [count_tensors(path) for path in part.glob("*.safetensors")] if use_safetensors else []
    if use_safetensors:
        check_has_weights(part, variant)
    elif not any((part / name).is_file() for name in weights_names(variant, pickled=True)):
        raise OSError(f"{part} has no pickled weights ({WEIGHTS_NAME}): leave out use_safetensors=False")
    arguments = {"trust_remote_code": trust_remote_code, **({} if config is None else {"config": config})}
    network, report = load_on_meta(
        part, auto_class, variant, sum(sizes) if use_safetensors else None, ignore_mismatched_sizes=True, **arguments
    )
    check_missing(part, type(network), report, auto_class)
    check_shapes(part, type(network), report)


def check_tokenizer(part: Path, cls: type[PreTrainedTokenizerBase]) -> None:
    """Checks that the files of a tokenizer are there and can be loaded."""
    if not any([*part.glob(pattern)] for pattern in TOKENIZER_PATTERNS):
        raise OSError(f"{part / TOKENIZER_NAME} is missing: the checkpoint is incomplete; download or save it again")
    load_tokenizer(part, cls)


def load_tokenizer(part: Path, cls: Any, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from its folder, unless its file makes texts grow beyond all measure."""
    if (part / TOKENIZER_NAME).is_file():
        check_growth(part / TOKENIZER_NAME)
    with explain_failure(part):
        tokenizer = cls.from_pretrained(part, trust_remote_code=trust_remote_code, local_files_only=True)
    if not is_number(tokenizer.model_max_length):
        raise ValueError(
            f"{part / 'tokenizer_config.json'} has model_max_length={describe(tokenizer.model_max_length)}: it must be a number"
        )
    return tokenizer


def check_has_weights(part: Path, variant: str | None) -> None:
    """Checks that there are safetensors of the variant."""
    suffix = "" if variant is None else f".{variant}"
    if any(
        [*part.glob(f"{stem}{suffix}.safetensors"), *part.glob(f"{stem}{suffix}-*.safetensors")]
        for stem in WEIGHTS_STEMS
    ):
        return
    if (part / weights_names(variant, pickled=False)[1]).is_file():  # its shards may have any name
        return
    if variant is not None:
        raise OSError(
            f"{part} has no weights of the variant {variant!r}: leave out `variant`, or pass one that it has"
        )
    if [*part.glob("*.bin")]:
        raise OSError(
            f"{part} has pickled weights only, which can run code: pass `use_safetensors=False` if you trust them"
        )
    raise OSError(
        f"{part} has no weights (*.safetensors): the checkpoint is incomplete, or has pickled weights only, which can run "
        "code: pass `use_safetensors=False` if you trust them"
    )


def check_weights(
    part: Path, cls: type[ModelMixin] | type[PreTrainedModel], variant: str | None, num_tensors: int | None
) -> None:
    """Checks that the weights hold the tensors of the network, no others, and all in their shapes.

    The network is built and loaded on the `meta` device, where tensors have no values and take no memory.

    Args:
        part (`Path`): Folder of the network.
        cls (`type`): Class of the network.
        variant (`str`, *optional*): Variant of the weights.
        num_tensors (`int`, *optional*): Number of tensors in the safetensors files; `None` for pickled weights.
    """
    # Mismatched sizes are reported below.
    arguments = {"ignore_mismatched_sizes": True} if issubclass(cls, PreTrainedModel) else {}
    _, report = load_on_meta(part, cls, variant, num_tensors, **arguments)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(f"the weights in {part} lack {name_some(missing)} of a {cls.__name__}: {TRY_AGAIN}")
    if report["unexpected_keys"]:
        unexpected = sorted(report["unexpected_keys"])
        raise ValueError(
            f"the weights in {part} hold {name_some(unexpected)}, which a {cls.__name__} with this config.json does not "
            f"have: {TRY_AGAIN}"
        )
    check_shapes(part, cls, report)


def load_on_meta(part: Path, cls: Any, variant: str | None, num_tensors: int | None, **arguments: Any) -> tuple:
    """Loads a network without values, within the limits of its size, and returns it with the report of its library."""
    arguments |= {"variant": variant, "use_safetensors": num_tensors is not None, "local_files_only": True}
    config = part / CONFIG_NAMES[ModelMixin]
    if num_tensors is not None:
        check_settings(config, num_tensors)
    with explain_failure(part, cls), hide_output(), limit_modules(config, num_tensors):
        created = create_on_meta(cls, part) if issubclass(cls, ModelMixin) else None
        if created is not None:
            check_buffers(config, created)
        network, report = cls.from_pretrained(part, device_map={"": "meta"}, output_loading_info=True, **arguments)
        check_buffers(config, network)
        if cls is UNet2DModel:
            try_unet(network)
    return network, report


def try_unet(network: UNet2DModel) -> None:
    """Runs a U-Net of diffusers on the `meta` device: some of its settings are not looked at before that."""
    size = network.config.sample_size
    height, width = size if isinstance(size, (list, tuple)) and len(size) == 2 else (size, size)
    if isinstance(height, int) and isinstance(width, int) and min(height, width) > 0:  # else the pipeline refuses it
        sample = torch.empty(1, network.config.in_channels, height, width, device="meta")
        classes = None if network.class_embedding is None else torch.zeros(1, dtype=torch.long, device="meta")
        with torch.no_grad():
            network.eval()(sample, torch.zeros(1, dtype=torch.long, device="meta"), class_labels=classes)


def check_missing(part: Path, cls: type[PreTrainedModel], report: dict, auto_class: Any) -> None:
    """Checks that the weights hold all tensors of a network; transformers would initialize the others at random."""
    if report["missing_keys"]:
        missing = name_some(sorted(report["missing_keys"]))
        raise ValueError(
            f"the weights in {part} lack {missing} of a {cls.__name__}: choose a checkpoint with all of them, or load the "
            f"network with {auto_class.__name__}, train what is missing, and pass the network itself"
        )


def check_shapes(part: Path, cls: type, report: dict) -> None:
    """Checks that all tensors that transformers has loaded have the shapes of the network."""
    for name, found, needed in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"the tensor {name} in {part} has the shape {tuple(found)}, and a {cls.__name__} with this config.json "
            f"needs {tuple(needed)}: {TRY_AGAIN}"
        )


def count_tensors(path: Path) -> int:
    """Returns the number of tensors in a safetensors file, whose header also tells whether the file is complete."""
    try:
        with safe_open(path, framework="pt") as file:
            return len(file.keys())
    except SafetensorError as error:
        raise OSError(
            f"{path} is truncated or not a safetensors file ({error}): download it again with `force_download=True`, or "
            "save it again"
        ) from error


@contextmanager
def explain_failure(part: Path, cls: Any = None) -> Iterator[None]:
    """Replaces the error of a library that cannot load a component of the class `cls` from its files by a sentence."""
    try:
        yield
    except BaseException as error:
        # tokenizers raises a bare `Exception`, or panics.
        if not isinstance(error, FAILURES) and type(error) is not Exception and not is_panic(error):
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
def hide_output() -> Iterator[None]:
    """Hides the progress bars and reports of diffusers and transformers, which show up when weights are loaded for good."""
    shown = [logging for logging in (diffusers_logging, transformers_logging) if logging.is_progress_bar_enabled()]
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    for logging in shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        for logging in shown:
            logging.enable_progress_bar()


def name_some(names: list[str], count: int = 3) -> str:
    """Returns the first few names of tensors, and how many there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:count])}{more})"
