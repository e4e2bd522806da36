# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Training through Accelerate: settings, batches, checkpoints, the log and the loop."""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_names


if TYPE_CHECKING:
    from .loop import train
    from .progress import read_log
    from .trainer import D3PMTrainer
    from .training_args import D3PMTrainingArguments

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".loop": ["train"],
        ".progress": ["read_log"],
        ".trainer": ["D3PMTrainer"],
        ".training_args": ["D3PMTrainingArguments"],
    },
)

__all__ = ["D3PMTrainer", "D3PMTrainingArguments", "read_log", "train"]
