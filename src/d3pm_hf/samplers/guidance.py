# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Classifier-free guidance: a denoiser that combines the predictions with and without its condition."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from ..numerics import compute_dtype
from ..utils.checks import check_float, check_type
from ..utils.kept_logits import predict_rows
from .walk import check_scheduler


def guide(
    scheduler, denoiser: Callable[..., torch.Tensor], guidance_scale: float, drops_given: bool = False
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
        drops_given (`bool`, defaults to `False`): Whether c is what is given outside of the process, such as a prompt: the
            network then sees masks in its place, and the condition stays. LLaDA's `cfg_scale` is w - 1.
    """
    check_scheduler(scheduler)
    check_float("guidance_scale", guidance_scale)
    check_type("drops_given", drops_given, bool, "True or False")
    if guidance_scale == 1:
        return scheduler, denoiser
    guided = GuidedDenoiser(scheduler, denoiser, guidance_scale, drops_given)
    return (scheduler if guidance_scale == 0 else taking_logits(scheduler)), guided


class GuidedDenoiser:
    """The denoiser of [`guide`]: the output of the network without the condition for a scale of 0, and combined logits for others.

    With `reads_given`, it takes `is_given` `[B, ...]`, where elements are given outside of the process.
    """

    def __init__(self, scheduler, denoiser: Any, guidance_scale: float, drops_given: bool):
        if drops_given and scheduler.gap_token_id is None:
            raise ValueError(
                f"guidance_scale is {guidance_scale}, and the process {scheduler.config.transition!r} has no mask to put in place of "
                "the prompt: use an absorbing process, or leave out guidance_scale"
            )
        if not drops_given and not hasattr(denoiser, "drop_condition"):
            raise ValueError(
                f"denoiser is a {type(denoiser).__name__}, and guidance_scale needs one with the method drop_condition: derive "
                "it from `Denoiser`"
            )
        self.scheduler, self.denoiser, self.guidance_scale = scheduler, denoiser, guidance_scale
        self.reads_given = drops_given

    def __call__(self, x_t, timestep, logits_to_keep=None, is_given=None, **condition) -> torch.Tensor:
        without, dropped = self.drop(x_t, is_given, condition)
        num_classes = self.scheduler.config.num_classes
        if self.guidance_scale == 0:
            return predict_rows(self.denoiser, without, timestep, dropped, logits_to_keep, num_classes)
        both = {  # all rows with their condition, and then all rows without
            name: torch.cat([value, dropped[name]]) if isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in condition.items()
        }
        timestep = torch.as_tensor(timestep, device=x_t.device)
        timestep = torch.cat([timestep, timestep]) if timestep.ndim else timestep
        if logits_to_keep is not None:
            logits_to_keep = torch.cat([logits_to_keep, logits_to_keep + x_t.numel()])  # indices [n] of elements
        x_t = torch.cat([x_t, without])
        model_output = predict_rows(self.denoiser, x_t, timestep, both, logits_to_keep, num_classes)
        logits = self.scheduler.logits(model_output).to(compute_dtype(model_output))  # [2 B, ..., K], or [2 n, K]
        conditional, unconditional = logits.chunk(2)
        return combine_logits(conditional, unconditional, self.guidance_scale)

    def drop(self, x_t: torch.Tensor, is_given, condition: dict) -> tuple[torch.Tensor, dict]:
        """x_t and the condition of the unconditional model: masks in place of what is given, or "no condition" in all rows."""
        if self.reads_given:
            return x_t.masked_fill(is_given, self.scheduler.gap_token_id), condition
        check_guided(condition, self.guidance_scale)
        everywhere = torch.ones(len(x_t), dtype=torch.bool, device=x_t.device)
        return x_t, self.denoiser.drop_condition(condition, everywhere)


def check_guided(condition: dict, guidance_scale: float) -> None:
    """Checks that there is a condition to guide to."""
    if not set(condition) - {"attention_mask"}:
        raise ValueError(
            f"guidance_scale is {guidance_scale}, and there is no condition to guide to: pass class_labels or "
            "condition, or a prompt with max_new_tokens"
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
