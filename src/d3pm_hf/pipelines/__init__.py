# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Pipelines: a network, a process, and what turns states into pictures or text."""

from ..visualization.trajectory import Trajectory
from .pipeline_d3pm import D3PMPipeline
from .pipeline_d3pm_image import D3PMImagePipeline, D3PMImagePipelineOutput
from .pipeline_d3pm_text import D3PMTextPipeline, D3PMTextPipelineOutput


__all__ = [
    "D3PMImagePipeline",
    "D3PMImagePipelineOutput",
    "D3PMPipeline",
    "D3PMTextPipeline",
    "D3PMTextPipelineOutput",
    "Trajectory",
]
