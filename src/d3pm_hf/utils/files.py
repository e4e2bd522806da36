# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Files that are there in full or not at all."""

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, write) -> None:
    """Calls `write(file)` for a file that is there in full or not at all, whoever else writes it at the same time."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "wb") as file:
            write(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode("utf-8")))
