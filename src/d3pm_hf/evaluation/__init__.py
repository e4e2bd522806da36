# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What a checkpoint is worth: bounds, times, samples, and how they are reported."""

from .images import ClassifierFeatures, image_scores
from .report import Evaluation, StepResult, evaluate_pipeline, time_sampling
from .text import token_entropy, word_statistics


__all__ = [
    "ClassifierFeatures",
    "Evaluation",
    "StepResult",
    "evaluate_pipeline",
    "image_scores",
    "time_sampling",
    "token_entropy",
    "word_statistics",
]
