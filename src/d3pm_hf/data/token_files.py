# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Arrays of tokens in files of the cache of data sets: written once, in parts, and memory-mapped by all processes."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tokenizers
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedTokenizerBase

from ..utils.checks import check_path
from ..utils.files import replacing


def cache_path(settings: list, cache_dir: str | None = None) -> Path:
    """Returns the file of the array that depends on `settings` only, in `cache_dir` or in the cache of `datasets`."""
    if cache_dir is not None:
        check_path("cache_dir", cache_dir)
    folder = cache_dir or os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME, "datasets")
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    return Path(folder).expanduser() / "d3pm_hf" / f"{key}.npy"


def tokenizer_settings(tokenizer: PreTrainedTokenizerBase) -> list[str] | None:
    """Returns what the tokens of a tokenizer depend on, its JSON last; `None` if a part of it is Python code."""
    try:
        return [tokenizers.__version__, type(tokenizer).__name__, tokenizer.backend_tokenizer.to_str()]
    except Exception as error:
        # A slow tokenizer has no backend, and tokenizers raises a plain `Exception` for a part in Python.
        if not isinstance(error, AttributeError) and type(error) is not Exception:
            raise
        return None


def write_once(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls `write(file)` on a file that becomes `path` when it is complete, and on the disk, unless `path` exists.

    One process writes, and those that need the same file wait for it.
    """
    if path.exists():  # in a folder that may not be written to, perhaps
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            for stale in path.parent.glob(f".{path.name}.*.partial"):  # of a process that was killed
                stale.unlink()
            if not path.exists():
                with replacing(path) as temporary, open(temporary, "wb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
    except OSError as error:
        if error.errno is None:  # a sentence about the source
            raise
        raise OSError(
            f"tokens cannot be written to {path.parent} ({error}): free some space, or name a folder with space that you may "
            "write to as cache_dir or in the environment variable HF_DATASETS_CACHE"
        ) from error


def write_array(
    file: BinaryIO, parts: Iterable[np.ndarray], dtype: type[np.integer], row: tuple[int, ...] = ()
) -> int:
    """Writes parts `[n_i, *row]` as one array `[n, *row]` in the format of `numpy.save`, and returns n.

    n is in the header, which is written again at the end. numpy keeps room in it for this purpose.
    """
    size = 0
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False}
    np.lib.format.write_array_header_1_0(file, {**header, "shape": (0, *row)})
    for part in parts:
        file.write(np.ascontiguousarray(part, dtype).data)
        size += len(part)
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, {**header, "shape": (size, *row)})
    return size


def map_tokens(
    read: Callable[[], Iterable[str]],
    encode: Callable[[Iterable[str]], Iterable[np.ndarray]],
    settings: list,
    dtype: type[np.integer],
    cache_dir: str | None = None,
) -> np.ndarray:
    """Returns the tokens `[n]` of a text as a memory-mapped file, which is written if the text is new.

    Args:
        read (`Callable`): Yields the text in parts, anew with each call.
        encode (`Callable`): Yields arrays of tokens of a text in parts.
        settings (`list`): Everything but the text that the tokens depend on.
        dtype (`type`): Type of the tokens.
        cache_dir (`str`, *optional*): Folder of the file. Defaults to the cache of `datasets`.
    """

    def hashed(digest) -> Iterator[str]:
        for part in read():
            digest.update(part.encode("utf-8", "surrogatepass"))
            yield part

    def write(file: BinaryIO) -> None:
        encoded = hashlib.sha256()
        write_array(file, encode(hashed(encoded)), dtype)
        if encoded.digest() != text.digest():
            raise OSError("the text was changed while it was read: load it again")

    text = hashlib.sha256()
    for _ in hashed(text):
        pass
    path = cache_path([text.hexdigest(), np.dtype(dtype).name, *settings], cache_dir)
    write_once(path, write)
    return np.load(path, mmap_mode="r")
