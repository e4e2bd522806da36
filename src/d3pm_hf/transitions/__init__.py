# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Transition families q(x_t | x_s) of the forward process, one to a file, each registered under its name."""

from .autoregressive import AutoregressiveTransition
from .base import Transition
from .by_element import ByElementTransition
from .dense import DenseTransition, MatrixTransition
from .dense_rates import DenseRateTransition
from .family import TransitionFamily, TransitionSettings, get_family, register_transition, transition_families
from .rank_one import RankOneTransition
from .rates import RateFamily, rate_transition
from .sparse_rates import SparseRateTransition
from .toeplitz import ToeplitzTransition


__all__ = [
    "AutoregressiveTransition",
    "ByElementTransition",
    "DenseRateTransition",
    "DenseTransition",
    "MatrixTransition",
    "RankOneTransition",
    "RateFamily",
    "SparseRateTransition",
    "ToeplitzTransition",
    "Transition",
    "TransitionFamily",
    "TransitionSettings",
    "get_family",
    "rate_transition",
    "register_transition",
    "transition_families",
]
