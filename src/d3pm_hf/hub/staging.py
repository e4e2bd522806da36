# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Staging folders: a checkpoint is written beside its folder and moved there when it is complete."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .layout import INDEX_NAME, weights_patterns


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target`. Its files replace those of `target` at the end of the block.

    If the block raises, the staging folder is removed and `target` stays as it was.
    """
    staging = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".partial", dir=target.parent))
        yield staging
        move_into_place(staging, target)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the pipeline could not be saved to {target} ({error}): free some space or choose a folder that you may write "
            "to; what was there before is untouched"
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def move_into_place(staging: Path, target: Path) -> None:
    """Moves every file of a complete checkpoint to `target`, the index last, and deletes weights that it supersedes."""
    if not target.exists():
        staging.chmod(0o777 & ~current_umask())
        os.replace(staging, target)
        return
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    patterns = weights_patterns(staging)
    for path in sorted(files, key=lambda path: path.name == INDEX_NAME):
        place = target / path.relative_to(staging)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)
    written = [path.relative_to(staging) for path in files]
    for path in [path for pattern in patterns for path in target.glob(pattern)]:
        if path.relative_to(target) not in written:
            path.unlink()


def current_umask() -> int:
    """Returns the mask of permissions that new files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
