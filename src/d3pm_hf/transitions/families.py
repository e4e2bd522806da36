# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The families of this package. Importing them registers them."""

from .autoregressive import AutoregressiveTransition
from .dense import MatrixTransition
from .rank_one import AbsorbingTransition, AbsorbingUniformTransition, StationaryTransition, UniformTransition
from .rates import AbsorbingNearestNeighborFamily, NearestNeighborFamily, RateFamily
from .toeplitz import BandDiagonalTransition, GaussianTransition


FAMILIES = (
    AbsorbingTransition,
    UniformTransition,
    AbsorbingUniformTransition,
    StationaryTransition,
    GaussianTransition,
    BandDiagonalTransition,
    MatrixTransition,
    RateFamily,
    NearestNeighborFamily,
    AbsorbingNearestNeighborFamily,
    AutoregressiveTransition,
)
