# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Which sampler a pipeline takes if none is named."""

from .ancestral import ancestral
from .base import Sampler, start_cache
from .left_to_right import left_to_right, reveals_in_order
from .positions_first import is_mixed, positions_first, reveals_once


def default_sampler(scheduler, denoiser, timesteps: list[int], condition: dict) -> Sampler:
    """The sampler that draws from the distribution of [`ancestral`] with the least work. The arguments are those of a [`Sampler`]."""
    if reveals_once(scheduler) or is_mixed(scheduler):
        return positions_first
    if reveals_in_order(scheduler, timesteps) and start_cache(denoiser, condition) is not None:
        return left_to_right
    return ancestral
