# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Evaluation of checkpoints: bounds, sampling times, statistics of samples, and reports of them."""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_names


if TYPE_CHECKING:
    from .evaluator import evaluate_pipeline, time_sampling
    from .fid import ClassifierFeatures, image_scores
    from .optimal_timesteps import optimize_timesteps
    from .report import Evaluation, LikelihoodResult, StepResult
    from .text_statistics import JudgedSamples, judge_samples, ngram_entropy, token_entropy, word_statistics

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".evaluator": ["evaluate_pipeline", "time_sampling"],
        ".fid": ["ClassifierFeatures", "image_scores"],
        ".optimal_timesteps": ["optimize_timesteps"],
        ".report": ["Evaluation", "LikelihoodResult", "StepResult"],
        ".text_statistics": ["JudgedSamples", "judge_samples", "ngram_entropy", "token_entropy", "word_statistics"],
    },
)

__all__ = [
    "ClassifierFeatures",
    "Evaluation",
    "JudgedSamples",
    "LikelihoodResult",
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
