# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Grids of images and trajectories of samples."""

from .trajectory import Trajectory


__all__ = ["Trajectory"]
