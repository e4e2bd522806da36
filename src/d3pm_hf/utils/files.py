# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Atomic writes: a file is replaced as a whole, or stays as it was."""

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary path beside `path`, which replaces `path` at the end of the block.

    If the block raises, the temporary file is removed and `path` stays as it was. Several processes may write the same
    `path` at the same time: each has a temporary file of its own, and the last one to finish wins.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: str | os.PathLike, text: str) -> None:
    """Writes `text` to `path` in UTF-8."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def write_safetensors_atomically(
    path: str | os.PathLike, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Writes dense `tensors`, which need not be contiguous, and `metadata` to a safetensors file.

    Equal tensors and metadata give equal files.
    """
    contiguous = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    with replacing(path) as temporary:
        save_file(contiguous, temporary, metadata={"format": "pt", **(metadata or {})})
        # The metadata in the header come in another order with each save: they are sorted.
        with open(temporary, "r+b") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8").ljust(size)
            if len(text) == size:  # the tensors begin after it, so the header cannot grow
                file.seek(8)
                file.write(text)


def flush_folder(folder: str | os.PathLike) -> None:
    """Writes the files of a folder, and their names, from the memory of the system to the disk.

    A file that another process has just removed or renamed is left to that process.
    """
    for parent, _, names in os.walk(os.fspath(folder), topdown=False):
        for name in names:
            _flush(os.path.join(parent, name), os.O_RDWR)
        flush_names(parent)


def flush_names(folder: str | os.PathLike) -> None:
    """Writes the names of the files in a folder to the disk. Windows does that by itself."""
    if os.name != "nt":
        _flush(folder, os.O_RDONLY)


def _flush(path: str | os.PathLike, flags: int) -> None:
    try:
        file = os.open(path, flags)
    except FileNotFoundError:
        return
    try:
        os.fsync(file)
    finally:
        os.close(file)
