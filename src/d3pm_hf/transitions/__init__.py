# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Where noise leads: q(x_t | x_s), one family to a file."""

from .autoregressive import AutoregressiveTransition
from .base import Transition
from .dense import DenseTransition, MatrixTransition, ToeplitzTransition
from .rank_one import RankOneTransition
from .rates import DenseRateTransition, SparseRateTransition


__all__ = [
    "AutoregressiveTransition",
    "DenseRateTransition",
    "DenseTransition",
    "MatrixTransition",
    "RankOneTransition",
    "SparseRateTransition",
    "ToeplitzTransition",
    "Transition",
]
