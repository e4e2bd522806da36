# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Errors of tokenizers, a library in Rust: bare exceptions, and panics, which no `except Exception` catches."""

from collections.abc import Iterator
from contextlib import contextmanager


def is_panic(error: BaseException) -> bool:
    """Whether an error is a bare `Exception`, or a `pyo3_runtime.PanicException`, a `BaseException` that cannot be imported."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


@contextmanager
def explain_panic(sentence: str) -> Iterator[None]:
    """Replaces a panic by a `ValueError`: `sentence`, and the panic in parentheses."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ValueError(f"{sentence} ({' '.join(str(error).split())}): use another checkpoint") from error
