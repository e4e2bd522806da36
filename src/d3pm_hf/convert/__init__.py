# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checkpoints of MDLM, SEDD, UDLM and Duo as pipelines: `python -m d3pm_hf.convert CHECKPOINT FOLDER`."""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_names


if TYPE_CHECKING:
    from .conversion import convert_checkpoint

__getattr__, __dir__ = lazy_names(__name__, {".conversion": ["convert_checkpoint"]})

__all__ = ["convert_checkpoint"]
