# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""State dictionaries as JSON and safetensors, which can be read without running code."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import load
from safetensors.torch import load_file, save_file


STATE_NAME = "run_state.json"
TENSORS_NAME = "run_state.safetensors"
# Keys of JSON objects that stand for what JSON does not have.
TENSOR, ARRAY, TUPLE, DICTIONARY, BYTES = "__tensor__", "__array__", "__tuple__", "__dict__", "__bytes__"


def save_states(states: dict[str, dict], folder: Path) -> None:
    """Writes state dictionaries by name to `run_state.json`, and their tensors to `run_state.safetensors`."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps({name: encode(state, name, tensors) for name, state in states.items()}, indent=1)
    save_file(separate(tensors), folder / TENSORS_NAME)
    (folder / STATE_NAME).write_text(text + "\n", encoding="utf-8")


def load_states(folder: Path, names: list[str]) -> dict[str, Any]:
    """Reads the state dictionaries that [`save_states`] has written.

    Earlier versions wrote pickles, one for each of the `names` in their order. Only tensors and numbers are read from them.
    """
    if not (folder / STATE_NAME).exists() and (folder / "custom_checkpoint_0.pkl").exists():
        return {
            name: load(folder / f"custom_checkpoint_{i}.pkl", map_location="cpu", weights_only=True)
            for i, name in enumerate(names)
        }
    values = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    tensors = load_file(folder / TENSORS_NAME)
    return {name: decode(values[name], tensors) for name in names}


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A state as values of JSON. Its tensors and arrays are added to `tensors`.

    Args:
        value: Numbers, strings, bytes, tensors and arrays, in lists, tuples and dictionaries.
        name: Name of the value, for its tensors and for the error.
        tensors: Receives the tensors, on the CPU.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return {TENSOR: _add(value, name, tensors)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        return {ARRAY: _add(torch.from_numpy(np.array(value)), name, tensors)}
    if isinstance(value, (list, tuple)):
        parts = [encode(part, f"{name}.{i}", tensors) for i, part in enumerate(value)]
        return {TUPLE: parts} if isinstance(value, tuple) else parts
    if isinstance(value, dict):
        pairs = [[encode(key, name, tensors), encode(part, f"{name}.{key}", tensors)] for key, part in value.items()]
        is_plain = all(isinstance(key, str) and not key.startswith("__") for key in value)
        return dict(pairs) if is_plain else {DICTIONARY: pairs}
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    raise TypeError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: return numbers, strings, bytes, tensors and arrays, "
        "in lists, tuples and dictionaries, from state_dict"
    )


def _add(tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> str:
    """Adds a tensor under a name that is not taken, and returns the name."""
    name = name if name not in tensors else f"{name}#{len(tensors)}"
    tensors[name] = tensor.detach().cpu().contiguous()
    return name


def separate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with memory of their own, as safetensors takes them. Only those that share it are copied."""
    taken: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in taken:
            tensors[name] = tensor.clone()
        taken.add(storage.data_ptr())
    return tensors


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The state that [`encode`] has made `value` of."""
    if isinstance(value, list):
        return [decode(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]]
    if ARRAY in value:
        return tensors[value[ARRAY]].numpy()[()]
    if TUPLE in value:
        return tuple(decode(part, tensors) for part in value[TUPLE])
    if DICTIONARY in value:
        return {decode(key, tensors): decode(part, tensors) for key, part in value[DICTIONARY]}
    if BYTES in value:
        return base64.b64decode(value[BYTES])
    return {key: decode(part, tensors) for key, part in value.items()}
