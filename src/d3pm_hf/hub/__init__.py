# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Model cards, uploads, and exports that `DiffusionPipeline` of diffusers loads."""

from .cards import bound_results, create_model_card


__all__ = ["bound_results", "create_model_card"]
