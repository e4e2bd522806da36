# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Temperature, top-k and top-p sampling, by the logits processors of transformers."""

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ..utils.checks import check_float, check_int, check_positive


def create_warpers(
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> LogitsProcessorList:
    """The logits processors for these settings; an empty list if they leave the distribution as it is."""
    check_positive("temperature", temperature)
    if top_k is not None:
        check_int("top_k", top_k, 1)
    if top_p is not None:
        check_float("top_p", top_p, 0, 1)
    warpers = LogitsProcessorList()
    if temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p != 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers


def apply_warpers(warpers: LogitsProcessorList, logits: torch.Tensor) -> torch.Tensor:
    """Logits `[B, ..., K]` after all processors, over the last axis."""
    return warpers(None, logits.flatten(0, -2)).view_as(logits)
