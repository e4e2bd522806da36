# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The variational bound on the negative log-likelihood of a data set, with its standard error."""

from .bound import Bound
from .measure import evaluate_bound
from .strides import OptimalTimesteps, evaluate_strides


__all__ = ["Bound", "OptimalTimesteps", "evaluate_bound", "evaluate_strides"]
