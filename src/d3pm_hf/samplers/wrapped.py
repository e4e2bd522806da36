# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Schedulers with a step of their own, around another scheduler."""

from collections.abc import Callable

import torch

from ..schedulers.scheduling_d3pm import D3PMSchedulerOutput
from .base import check_scheduler


class WrappedScheduler:
    """A scheduler with all attributes of another one, except for those that a subclass defines. Samplers take it as any other.

    Args:
        scheduler ([`D3PMScheduler`]): The process.
    """

    has_plain_steps = False

    def __init__(self, scheduler):
        check_scheduler(scheduler)
        self._scheduler = scheduler

    def __getattr__(self, name: str):
        if name == "_scheduler":  # of an object that is being copied
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def __len__(self) -> int:
        return len(self._scheduler)


class SchedulerWithStep(WrappedScheduler):
    """A scheduler whose step is a function of the logits of x_0. A sampler with steps of its own is [`ancestral`] with it.

    Args:
        scheduler ([`D3PMScheduler`]): The process.
        draw (`Callable`): `draw(model_output, logits, x_t, t, s)` gives x_s, for timesteps t and s. `logits` are those of x_0,
            `[B, ..., K]`, after `temperature`, `top_k` and `top_p`, in which states that data never hold are -inf.
    """

    def __init__(self, scheduler, draw: Callable[..., torch.Tensor]):
        super().__init__(scheduler)
        self._draw = draw

    def step(self, model_output, timestep: int, sample, *, previous_timestep: int, generator=None, **warping):
        """Draws x_s. The arguments are those of [`D3PMScheduler.step`]; `draw` has its own generator."""
        scheduler = self._scheduler
        scheduler.check_model_output(model_output, sample)
        logits = scheduler.transition.forbid(scheduler.step_logits(model_output, **warping))
        x_s = self._draw(model_output, logits, sample, timestep, previous_timestep)
        return D3PMSchedulerOutput(prev_sample=x_s, pred_logits=logits)
