# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The files of a checkpoint: states as JSON and safetensors, and guards of the files that Accelerate and torch read.

Reading them runs no code of the checkpoint.
"""

import base64
import io
import json
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import load
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file


STATE_NAME = "run_state.json"
TENSORS_NAME = "run_state.safetensors"
# Keys of JSON objects that stand for what JSON does not have.
TENSOR, ARRAY, TUPLE, DICTIONARY, BYTES = "__tensor__", "__array__", "__tuple__", "__dict__", "__bytes__"
# Errors of a file that is truncated or changed.
BROKEN = (SafetensorError, UnpicklingError, BadZipFile, zlib.error, EOFError, ValueError, RecursionError)
# The classes and functions that the metadata of shards may name. Each of them only holds its arguments.
METADATA_NAMES = {
    "pathlib": ("PosixPath", "WindowsPath"),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.serialization": ("_get_layout",),
}


def save_states(states: dict[str, dict], folder: Path) -> None:
    """Writes state dictionaries by name to `run_state.json`, and their tensors to `run_state.safetensors`."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps({name: encode(state, name, tensors) for name, state in states.items()}, indent=1)
    save_file(separate(tensors), folder / TENSORS_NAME)
    (folder / STATE_NAME).write_text(text + "\n", encoding="utf-8")


def load_states(folder: Path, names: list[str]) -> dict[str, Any]:
    """Reads the state dictionaries that [`save_states`] has written. Callbacks of a run that had none before have no state.

    Earlier versions wrote pickles, one for each of the `names` in their order. Only tensors and numbers are read from them.
    """
    if not (folder / STATE_NAME).exists() and (folder / "custom_checkpoint_0.pkl").exists():
        return {
            name: load(folder / f"custom_checkpoint_{i}.pkl", map_location="cpu", weights_only=True)
            for i, name in enumerate(names)
        }
    values = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    tensors = load_file(folder / TENSORS_NAME)
    return {name: decode(values[name], tensors) for name in names if name in values or name != "callbacks"}


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A state as values of JSON. Its tensors and arrays are added to `tensors`, on the CPU, under names that begin with `name`."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    is_array = isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf"
    if is_array or isinstance(value, torch.Tensor):
        tensor = torch.from_numpy(np.array(value)) if is_array else value
        name = name if name not in tensors else f"{name}#{len(tensors)}"
        tensors[name] = tensor.detach().cpu().contiguous()
        return {ARRAY if is_array else TENSOR: name}
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


def check_layout(accelerator: Accelerator, folder: Path) -> None:
    """Checks that a checkpoint has its weights in the files in which this run would save them."""
    names = {"pytorch_model_fsdp_0": "SHARDED_STATE_DICT", "pytorch_model_fsdp.bin": "FULL_STATE_DICT"}
    saved = next((layout for name, layout in names.items() if (folder / name).exists()), None)
    layout = accelerator.state.fsdp_plugin.state_dict_type.name if accelerator.is_fsdp2 else None
    if saved != layout:
        saved, layout = (
            f"sharded by FSDP2 with fsdp_state_dict_type {kind}" if kind else "replicated" for kind in (saved, layout)
        )
        raise ValueError(
            f"the weights of {folder} are {saved}, and those of this run {layout}: resume with the configuration of "
            "Accelerate that the checkpoint was saved with"
        )


@contextmanager
def plain_errors() -> Iterator[None]:
    """A context in which an error in a sharded checkpoint is an `OSError` or a `RuntimeError`, on all processes.

    torch raises a `CheckpointException`, which is no `Exception`, with the error of each process that has failed.
    """
    if not torch.distributed.is_available():
        yield
        return
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        kind: type[Exception] = OSError if isinstance(cause, OSError) else RuntimeError
        if isinstance(cause, AssertionError):  # torch asserts that the file with the metadata is there
            kind = FileNotFoundError
        raise kind(str(cause) or repr(cause)) from error


@contextmanager
def without_pickles(folder: Path) -> Iterator[Path]:
    """A context with a folder that has all files of a checkpoint but the pickles that Accelerate would read in full.

    Those are `custom_checkpoint_*.pkl`, which earlier versions wrote.
    """
    pickles = set(folder.glob("custom_checkpoint_*.pkl"))
    if not pickles:
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        for path in set(folder.iterdir()) - pickles:
            Path(name, path.name).symlink_to(path.resolve())
        yield Path(name)


def find_damaged(folder: Path) -> str | None:
    """The name of a file of a checkpoint that is truncated or changed, or that holds more than numbers, if there is one.

    Files of torch have a checksum for each of their parts. Those of safetensors and of shards have the number of their
    bytes.
    """
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    pass
            elif path.suffix in (".bin", ".pkl", ".pt"):
                with ZipFile(path) as archive:
                    if archive.testzip() is not None:
                        return path.name
                load(path, map_location="meta", weights_only=True)
            elif path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
        except BROKEN:
            return path.name
    return find_damaged_shard(folder)


class MetadataPart:
    """Stands for an object in the metadata of shards. It has its attributes, and no methods."""

    def __new__(cls, *arguments):
        return object.__new__(cls)

    def __init__(self, *arguments):
        pass

    def __setstate__(self, state) -> None:
        if not isinstance(state, dict) and type(self).__name__ != "TensorProperties":
            raise UnpicklingError(f"the metadata of shards give a {type(self).__name__} the state {state!r}")
        self.__dict__.update(state if isinstance(state, dict) else {})


class MetadataUnpickler(Unpickler):
    """Reads the metadata of shards, a pickle, and calls nothing that it names."""

    def find_class(self, module: str, name: str) -> type[MetadataPart]:
        if name not in METADATA_NAMES.get(module, ()):
            raise UnpicklingError(f"the metadata of shards name {module}.{name}")
        return type(name, (MetadataPart,), {})


def find_damaged_shard(folder: Path) -> str | None:
    """The name of a damaged file of a sharded checkpoint, if there is one.

    The file is missing, is shorter than its metadata say, or holds more than tensors and numbers. torch reads the metadata,
    and what is no tensor, as pickles, which could run code: it may read the shards only if this returns `None`.
    """
    for path in sorted(folder.rglob("*.metadata")):
        try:
            with path.open("rb") as file:
                metadata = MetadataUnpickler(file).load()
            for index, part in metadata.storage_data.items():
                shard, kind = path.with_name(part.relative_path), metadata.state_dict_metadata[index.fqn]
                is_cut = not shard.exists() or shard.stat().st_size < part.offset + part.length
                is_tensor = type(kind).__name__ == "TensorStorageMetadata"
                if is_cut or not is_tensor and not is_plain(shard, part.offset, part.length):
                    return shard.name
                if getattr(part, "transform_descriptors", None):  # torch would not read what was looked at
                    return path.name
        except (UnpicklingError, EOFError, ImportError, LookupError, AttributeError, TypeError, ValueError):
            return path.name
    return None


def is_plain(path: Path, offset: int, length: int) -> bool:
    """Whether a part of a file is an object of `torch.save` that `weights_only=True` can read."""
    with path.open("rb") as file:
        file.seek(offset)
        content = io.BytesIO(file.read(max(length, 0)))
    try:
        torch.load(content, weights_only=True)
    except (UnpicklingError, EOFError, RuntimeError):
        return False
    return True
