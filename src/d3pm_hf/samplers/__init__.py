# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Samplers: ways to walk from x_T to x_0, all with the signature of [`Sampler`]."""

from .ancestral import ancestral
from .classifier import ClassifierGuidance, ClassifierGuidedScheduler
from .confidence import confidence
from .first_hitting import first_hitting
from .guidance import guide
from .left_to_right import left_to_right
from .particle_filter import particle_filter
from .positions_first import positions_first
from .predictor_corrector import predictor_corrector
from .remasking import remasking
from .sampler import Sampler, get_sampler, register_sampler, registered_samplers
from .walk import SamplerStep


__all__ = [
    "ClassifierGuidance",
    "ClassifierGuidedScheduler",
    "Sampler",
    "SamplerStep",
    "ancestral",
    "confidence",
    "first_hitting",
    "get_sampler",
    "guide",
    "left_to_right",
    "particle_filter",
    "positions_first",
    "predictor_corrector",
    "register_sampler",
    "registered_samplers",
    "remasking",
]
