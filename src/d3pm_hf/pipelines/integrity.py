# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checks of the files of a checkpoint before it is loaded: all there, complete, and fitting each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diffusers import ModelMixin, SchedulerMixin
from diffusers.utils import logging as diffusers_logging
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ..hub.layout import WEIGHTS_STEMS, list_components, read_json
from .limits import check_buffers, check_counts, create_on_meta, limit_modules
from .trust import check_file_names, find_component


# File that every component of a kind has.
CONFIG_NAMES = {
    SchedulerMixin: "scheduler_config.json",
    PreTrainedTokenizerBase: "tokenizer_config.json",
    ModelMixin: "config.json",
    PreTrainedModel: "config.json",
}
TOKENIZER_PATTERNS = ("tokenizer.json", "*.model", "vocab.*")
# Errors that libraries raise for settings that they do not expect.
FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)
TRY_AGAIN = "download or save the checkpoint again"


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


def check_tokenizer(part: Path, cls: type[PreTrainedTokenizerBase]) -> None:
    """Checks that the files of a tokenizer are there and can be loaded."""
    if not any([*part.glob(pattern)] for pattern in TOKENIZER_PATTERNS):
        raise OSError(f"{part / 'tokenizer.json'} is missing: the checkpoint is incomplete; download or save it again")
    with explain_failure(part):
        cls.from_pretrained(part, local_files_only=True)


def check_has_weights(part: Path, variant: str | None) -> None:
    """Checks that there are safetensors of the variant."""
    suffix = "" if variant is None else f".{variant}"
    if any(
        [*part.glob(f"{stem}{suffix}.safetensors"), *part.glob(f"{stem}{suffix}-*.safetensors")]
        for stem in WEIGHTS_STEMS
    ):
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
    arguments = {"variant": variant, "use_safetensors": num_tensors is not None, "local_files_only": True}
    if issubclass(cls, PreTrainedModel):
        arguments["ignore_mismatched_sizes"] = True  # they are reported below
    config = part / CONFIG_NAMES[ModelMixin]
    if num_tensors is not None:
        check_counts(config, num_tensors)
    with explain_failure(part), hide_progress_bars(), limit_modules(config, num_tensors):
        created = create_on_meta(cls, part) if issubclass(cls, ModelMixin) else None
        if created is not None:
            check_buffers(config, created)
        network, report = cls.from_pretrained(part, device_map={"": "meta"}, output_loading_info=True, **arguments)
        check_buffers(config, network)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(f"the weights in {part} lack {name_some(missing)} of a {cls.__name__}: {TRY_AGAIN}")
    if report["unexpected_keys"]:
        unexpected = sorted(report["unexpected_keys"])
        raise ValueError(
            f"the weights in {part} hold {name_some(unexpected)}, which a {cls.__name__} with this config.json does not "
            f"have: {TRY_AGAIN}"
        )
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
def explain_failure(part: Path) -> Iterator[None]:
    """Replaces the error of a library that cannot load a component from its files by a sentence."""
    try:
        yield
    except Exception as error:
        # tokenizers raises a bare `Exception`.
        if not isinstance(error, FAILURES) and type(error) is not Exception:
            raise
        reason = " ".join(str(error).split()).split(". ")[0]
        raise ValueError(
            f"the files in {part} do not describe a component ({type(error).__name__}: {reason}): {TRY_AGAIN}"
        ) from error


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Hides the progress bars of diffusers and transformers, which show up when the weights are loaded for good."""
    shown = [logging for logging in (diffusers_logging, transformers_logging) if logging.is_progress_bar_enabled()]
    for logging in shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        for logging in shown:
            logging.enable_progress_bar()


def name_some(names: list[str], count: int = 3) -> str:
    """Returns the first few names of tensors, and how many there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:count])}{more})"
