# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Training through Accelerate: settings, batches, checkpoints, the log and the loop."""

from .loop import train
from .progress import read_log
from .training_args import D3PMTrainingArguments


__all__ = ["D3PMTrainingArguments", "read_log", "train"]
