# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Pictures of samples and of the way to them."""

from .trajectory import Trajectory


__all__ = ["Trajectory"]
