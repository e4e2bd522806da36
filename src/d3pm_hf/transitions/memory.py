# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The limit on the memory of a process, which is checked before anything is built."""

import os


# A process that needs more bytes than this is refused: a configuration file is short, whatever it asks for.
MAX_PROCESS_BYTES = int(os.environ.get("D3PM_HF_MAX_PROCESS_BYTES", 4 << 30))


def check_memory(name: str, needed: int, num_classes: int, num_steps: int) -> None:
    """Checks that the process needs no more than `MAX_PROCESS_BYTES`."""
    if needed > MAX_PROCESS_BYTES:
        raise ValueError(
            f"a {name!r} process over {num_classes:,} classes and {num_steps:,} timesteps needs at least "
            f"{needed:,} bytes of memory, more than the limit of {MAX_PROCESS_BYTES:,}: use fewer classes or timesteps, or "
            "raise the limit by the environment variable D3PM_HF_MAX_PROCESS_BYTES"
        )
