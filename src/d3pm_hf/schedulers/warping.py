# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Temperature, top-k and top-p sampling, by the logits processors of transformers."""

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..numerics import FAR_BELOW
from ..utils.checks import check_float, check_int


class GreedyLogitsWarper(LogitsProcessor):
    """The limit of low temperatures: all probability on the largest logit, of equal ones on the first.

    The others keep their order, far below, for a step in which the best x_0 cannot have led to x_t.
    """

    def __call__(self, input_ids, scores: torch.Tensor) -> torch.Tensor:
        best = scores.argmax(-1, keepdim=True)
        return ((scores - scores.gather(-1, best)) * 2.0**40).scatter(-1, best, FAR_BELOW)


def create_warpers(
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> LogitsProcessorList:
    """The logits processors for these settings; an empty list if they leave the distribution as it is.

    A temperature of 0 is greedy. `top_k` and `top_p` always keep the best state, and change nothing then.
    """
    check_float("temperature", temperature, 0)
    if top_k is not None:
        check_int("top_k", top_k, 1)
    if top_p is not None:
        check_float("top_p", top_p, 0, 1)
    warpers = LogitsProcessorList()
    if temperature == 0:
        warpers.append(GreedyLogitsWarper())
        return warpers
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
