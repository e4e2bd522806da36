# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Training through Accelerate: settings, batches, checkpoints, the log and the loop."""

from .arguments import D3PMTrainingArguments
from .loop import train
from .tracking import read_log


__all__ = ["D3PMTrainingArguments", "read_log", "train"]
