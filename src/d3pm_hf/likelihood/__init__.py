# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The variational bound on the negative log-likelihood of a data set, and the exact likelihood of samplers with an order."""

from .bound import Bound, Likelihood
from .documents import DocumentBounds, evaluate_documents
from .exact import evaluate_likelihood, log_likelihood
from .measure import evaluate_bound
from .orders import block_timesteps
from .strides import OptimalTimesteps, evaluate_strides


__all__ = [
    "Bound",
    "DocumentBounds",
    "Likelihood",
    "OptimalTimesteps",
    "block_timesteps",
    "evaluate_bound",
    "evaluate_documents",
    "evaluate_likelihood",
    "evaluate_strides",
    "log_likelihood",
]
