# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The lock of an output folder: one run at a time writes to it."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator

from .processes import run_on_main


LOCK_NAME = ".lock"
_held: set[Path] = set()  # by this process, which the operating system does not lock out


@contextmanager
def locked_folder(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """A context in which the main process holds the lock of a folder, which is created. Its errors reach all processes.

    The lock ends with the process, however that ends. A start that fails leaves a folder behind only if there was one.
    """
    is_new = not folder.exists()
    file = None

    def acquire() -> None:
        nonlocal file
        file = acquire_lock(folder)

    run_on_main(accelerator, acquire)
    try:
        yield
    finally:
        if file is not None:
            release_lock(file, folder)
            if is_new and not any(folder.iterdir()):
                folder.rmdir()


def acquire_lock(folder: Path) -> int:
    """Creates the folder and locks it. Returns the descriptor of the lock file, which must stay open."""
    path = folder.resolve() / LOCK_NAME
    if path in _held:
        raise held_error(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                lock_file(file)
                if os.name == "nt" or os.path.samestat(os.fstat(file), os.stat(path)):
                    break
            except FileNotFoundError:
                pass  # another run has just removed it, at its end
            except BaseException:
                os.close(file)
                raise
            os.close(file)
    except BlockingIOError as error:
        raise held_error(folder) from error
    except OSError as error:
        raise OSError(
            f"output_dir is {folder}, which cannot be written to ({error.strerror or error}): pass a folder that you may "
            "write to"
        ) from error
    _held.add(path)
    return file


def lock_file(file: int) -> None:
    """Locks an open file, or raises a `BlockingIOError` if another process has locked it.

    Locks of this kind are not inherited by the workers of data loaders. A file system without locks is not locked.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            raise BlockingIOError(*error.args) from error
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def release_lock(file: int, folder: Path) -> None:
    """Removes the lock file and closes it, which unlocks the folder."""
    path = folder.resolve() / LOCK_NAME
    _held.discard(path)
    try:
        if os.name == "nt":  # where an open file cannot be removed
            os.close(file)
            path.unlink(missing_ok=True)
        else:
            path.unlink(missing_ok=True)
            os.close(file)
    except OSError:
        pass  # the folder is gone, or another run has the file open


def held_error(folder: Path) -> ValueError:
    """The error of a folder that another run writes to."""
    return ValueError(f"another run is writing to {folder}: wait for its end, or pass another --output_dir")
