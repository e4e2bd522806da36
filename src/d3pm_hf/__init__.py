# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Structured denoising diffusion models in discrete state-spaces (D3PM) for the HuggingFace ecosystem."""

from .likelihood import Bound, evaluate_bound
from .logistic import logistic_logits
from .losses import D3PMLossOutput, d3pm_loss, prior_loss
from .schedulers import D3PMScheduler, D3PMSchedulerOutput


__version__ = "0.1.0.dev0"

__all__ = [
    "Bound",
    "D3PMLossOutput",
    "D3PMScheduler",
    "D3PMSchedulerOutput",
    "d3pm_loss",
    "evaluate_bound",
    "logistic_logits",
    "prior_loss",
]
