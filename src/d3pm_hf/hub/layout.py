# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Layout of a checkpoint folder: its index, its components and the files of their weights."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open


PACKAGE = "d3pm_hf"
INDEX_NAME = "model_index.json"
ADAPTER_NAME, ADAPTER_WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
CARD_NAME = "README.md"
# Stems and endings of the weights of diffusers and of transformers.
SAFE_WEIGHTS = (("diffusion_pytorch_model", "safetensors"), ("model", "safetensors"))
PICKLED_WEIGHTS = (("diffusion_pytorch_model", "bin"), ("pytorch_model", "bin"))
TRUSTED_LIBRARIES = ("diffusers", "transformers")


def list_components(index: dict) -> dict[str, list[str]]:
    """Returns the `[library, class]` of each component named in an index."""
    return {
        name: value
        for name, value in index.items()
        if isinstance(value, list) and [*map(type, value)] == [str, str] and not name.startswith("_")
    }


def read_json(path: Path) -> dict:
    """Reads a JSON object from a file of a checkpoint."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise OSError(f"{path} is not valid JSON ({error}): download or save the checkpoint again") from error
    if not isinstance(values, dict):
        raise OSError(f"{path} does not contain a JSON object: download or save the checkpoint again")
    return values


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file of a checkpoint, whose header tells whether it is complete."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise OSError(
            f"{path} is truncated or not a safetensors file ({error}): download it again with `force_download=True`, or "
            "save it again"
        ) from error


def weights_files(stem: str, ending: str, variant: str | None) -> tuple[str, str, str]:
    """Returns the name of weights in a single file, a pattern of the names of shards, and the name of the index of shards."""
    suffix = f".{variant}" if variant else ""
    return f"{stem}{suffix}.{ending}", f"{stem}{suffix}-*-of-*.{ending}", f"{stem}.{ending}.index{suffix}.json"


def compare_shapes(found: Mapping[str, tuple], needed: Mapping[str, tuple]) -> dict[str, Any]:
    """Returns the report of transformers and diffusers on weights with the shapes `found`, for a network with the shapes `needed`."""
    both = found.keys() & needed.keys()
    return {
        "missing_keys": needed.keys() - both,
        "unexpected_keys": found.keys() - both,
        "mismatched_keys": [(name, found[name], needed[name]) for name in both if found[name] != needed[name]],
    }


def check_report(report: Mapping[str, Any], folder: Path, network: str, fix: str) -> None:
    """Checks that the weights in a folder are those of a network, by the report of a library that has read them."""
    for name, found, needed in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"the tensor {name} in {folder} has the shape {tuple(found)}, and {network} needs {tuple(needed)}: {fix}"
        )
    if report["missing_keys"]:
        raise ValueError(f"the weights in {folder} lack {name_some(report['missing_keys'])} of {network}: {fix}")
    if report["unexpected_keys"]:
        raise ValueError(
            f"the weights in {folder} hold {name_some(report['unexpected_keys'])}, which {network} does not have: {fix}"
        )


def name_some(names: Iterable[str]) -> str:
    """Returns the first three names of tensors, and how many there are."""
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:3])}{more})"


def weights_patterns(folder: Path) -> list[str]:
    """Returns patterns for every form of the weights in `folder`: a single file, shards and their index, pickled or not, or a LoRA.

    A library that finds several forms reads only one of them, so that files of the other forms must be deleted when new
    weights are written over old ones. Weights of other variants do not match.
    """
    patterns, forms = set(), SAFE_WEIGHTS + PICKLED_WEIGHTS
    for path in folder.glob("*/*.*"):
        stem, *variant, ending = re.sub(r"-\d{5}-of-\d{5}", "", path.name).split(".")
        if (stem, ending) in forms:
            part, own = path.parent.name, ".".join(variant)
            patterns |= {f"{part}/{name}" for form in forms for name in weights_files(*form, own)}
    if any(folder.glob("*/config.json")):  # a network, in place of a LoRA
        patterns |= {ADAPTER_NAME, ADAPTER_WEIGHTS_NAME}
    return sorted(patterns)
