# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The variational bound on the negative log-likelihood of a data set, with its standard error."""

from .bound import Bound, ratio_estimate, skewed_interval
from .causal import check_causal, possible_steps, scores_in_one_pass
from .measurement import evaluate_bound, evaluating
from .strides import OptimalTimesteps, evaluate_strides


__all__ = [
    "Bound",
    "OptimalTimesteps",
    "check_causal",
    "evaluate_bound",
    "evaluate_strides",
    "evaluating",
    "possible_steps",
    "ratio_estimate",
    "scores_in_one_pass",
    "skewed_interval",
]
