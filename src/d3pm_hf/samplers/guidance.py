# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Classifier-free guidance: a denoiser that combines the predictions with and without its condition."""

import copy
from collections.abc import Callable

import torch

from ..numerics import compute_dtype
from ..utils.checks import check_float
from .walk import check_scheduler


def guide(
    scheduler, denoiser: Callable[..., torch.Tensor], guidance_scale: float
) -> tuple[object, Callable[..., torch.Tensor]]:
    """The scheduler and the denoiser that a sampler takes for samples with `guidance_scale` w.

        log p(x_0) = log p(x_0 | x_t) + w (log p(x_0 | x_t, c) - log p(x_0 | x_t)) + const

    1 is the conditional and 0 the unconditional model, each with one row of the network per row of x_t. Any other w takes
    one call of the network with two rows per row of x_t.

    Logits of x_0 are combined; with `prediction_type="previous"` those of x_{t-1}. The scheduler is the same one, except for
    `prediction_type="logistic"`: then it is a copy that takes logits, and shares everything else with it.

    Args:
        scheduler ([`D3PMScheduler`]): The process.
        denoiser ([`Denoiser`]): The denoiser, whose method `drop_condition` says what no condition is.
        guidance_scale (`float`): w.
    """
    check_scheduler(scheduler)
    check_float("guidance_scale", guidance_scale)
    if guidance_scale == 1:
        return scheduler, denoiser
    drop_condition = getattr(denoiser, "drop_condition", None)
    if drop_condition is None:
        raise ValueError(
            f"denoiser is a {type(denoiser).__name__}, and guidance_scale needs one with the method drop_condition: derive "
            "it from `Denoiser`"
        )

    def without_condition(x_t, condition):
        check_guided(condition, guidance_scale)
        return drop_condition(condition, torch.ones(len(x_t), dtype=torch.bool, device=x_t.device))

    def predict_without(x_t, timestep, **condition):
        return denoiser(x_t, timestep, **without_condition(x_t, condition))

    def predict_guided(x_t, timestep, **condition):
        timestep = torch.as_tensor(timestep, device=x_t.device)
        dropped = without_condition(x_t, condition)
        both = {  # all rows with their condition, and then all rows without
            name: torch.cat([value, dropped[name]]) if isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in condition.items()
        }
        rows = torch.cat([timestep, timestep]) if timestep.ndim else timestep
        model_output = denoiser(torch.cat([x_t, x_t]), rows, **both)  # [2 B, ..., K], or [2 B, ..., 2]
        logits = scheduler.logits(model_output).to(compute_dtype(model_output))
        conditional, unconditional = logits.chunk(2)
        return combine_logits(conditional, unconditional, guidance_scale)

    if guidance_scale == 0:
        return scheduler, predict_without
    return taking_logits(scheduler), predict_guided


def check_guided(condition: dict, guidance_scale: float) -> None:
    """Checks that there is a condition to guide to."""
    if not set(condition) - {"attention_mask"}:
        raise ValueError(
            f"guidance_scale is {guidance_scale}, and there is no condition to guide to: pass class_labels or condition"
        )


def combine_logits(conditional: torch.Tensor, unconditional: torch.Tensor, guidance_scale: float) -> torch.Tensor:
    """unconditional + guidance_scale (conditional - unconditional). A state that either excludes (`-inf`) is excluded.

    Args:
        conditional, unconditional: Logits `[B, ..., K]`.
    """
    combined = torch.lerp(unconditional, conditional, guidance_scale)
    excluded = (conditional == -torch.inf) | (unconditional == -torch.inf)
    return combined.masked_fill(excluded, -torch.inf)


def taking_logits(scheduler):
    """The scheduler, or for `prediction_type="logistic"` a copy with the same transition that takes logits of x_0."""
    if scheduler.config.prediction_type != "logistic":
        return scheduler
    _ = scheduler.transition  # created now, so that both have the same one
    copied = copy.copy(scheduler)
    copied.register_to_config(prediction_type="x0")
    return copied
