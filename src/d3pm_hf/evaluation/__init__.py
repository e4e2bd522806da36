# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Evaluation of checkpoints: bounds, sampling times, statistics of samples, and reports of them."""

from .frontier import JudgedSamples, judge_samples
from .images import ClassifierFeatures, image_scores
from .measurement import evaluate_pipeline, time_sampling
from .report import Evaluation, StepResult
from .text import ngram_entropy, token_entropy, word_statistics
from .timesteps import optimize_timesteps


__all__ = [
    "ClassifierFeatures",
    "Evaluation",
    "JudgedSamples",
    "StepResult",
    "evaluate_pipeline",
    "image_scores",
    "judge_samples",
    "ngram_entropy",
    "optimize_timesteps",
    "time_sampling",
    "token_entropy",
    "word_statistics",
]
