# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Model cards, uploads, and checkpoints that carry their own code."""

from .cards import bound_results, create_model_card


__all__ = ["bound_results", "create_model_card"]
