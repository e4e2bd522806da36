# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""How much memory a process needs at least, from its sizes alone: known before any of it is built."""

import os


# A process that needs more bytes than this is refused. A configuration is a few bytes, whatever it asks for.
MAX_PROCESS_BYTES = int(os.environ.get("D3PM_HF_MAX_PROCESS_BYTES", 4 << 30))


def vector_bytes(num_classes: int, num_steps: int) -> int:
    """Processes that store vectors, `[T]` and `[K]` in float64: at most 16 of each while they are built."""
    return 16 * 8 * (num_classes + num_steps)


def table_bytes(num_classes: int, num_steps: int) -> int:
    """Processes that store log Qbar_t, `[T+1, K, K]` in float32, and multiply matrices in float64."""
    table = 4 * (num_steps + 1) * num_classes**2
    return table + 4 * 8 * num_classes**2 + vector_bytes(num_classes, num_steps)


def toeplitz_bytes(num_classes: int, num_steps: int) -> int:
    """The same, and kernels and diagonals of all steps, `[T, K]` in float64: at most 6 while they are built."""
    return table_bytes(num_classes, num_steps) + 6 * 8 * num_steps * num_classes


# The others store vectors, and a rate matrix that comes with its own file.
PROCESS_BYTES = {"gaussian": toeplitz_bytes, "band_diagonal": toeplitz_bytes, "matrix": table_bytes}


def check_memory(transition: str, num_classes: int, num_steps: int) -> None:
    """Refuses a process that needs more than `MAX_PROCESS_BYTES`."""
    needed = PROCESS_BYTES.get(transition, vector_bytes)(num_classes, num_steps)
    if needed > MAX_PROCESS_BYTES:
        raise ValueError(
            f"a {transition!r} process over {num_classes:,} classes and {num_steps:,} timesteps needs at least {needed:,} bytes of "
            f"memory, more than the limit of {MAX_PROCESS_BYTES:,}: use fewer classes or timesteps, or raise the limit by "
            "the environment variable D3PM_HF_MAX_PROCESS_BYTES"
        )
