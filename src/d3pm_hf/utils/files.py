# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Atomic writes: a file is replaced as a whole, or stays as it was."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

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


def write_atomically(path: str | os.PathLike, write: Callable[[BinaryIO], object]) -> None:
    """Calls `write(file)` on a binary file that replaces `path` when it is complete."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        write(file)


def write_text_atomically(path: str | os.PathLike, text: str) -> None:
    """Writes `text` to `path` in UTF-8."""
    write_atomically(path, lambda file: file.write(text.encode("utf-8")))


def write_safetensors_atomically(
    path: str | os.PathLike, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Writes dense `tensors`, which need not be contiguous, and `metadata` to a safetensors file."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(contiguous, temporary, metadata={"format": "pt", **(metadata or {})})
