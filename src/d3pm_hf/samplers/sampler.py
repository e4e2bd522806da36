# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The signature of a sampler, samplers by name, and how they are called."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import wraps
from types import FunctionType
from typing import Any, Protocol

import torch

from ..utils.checks import check_str, check_type
from ..utils.registry import Registry
from .walk import SamplerStep, Walk


class Sampler(Protocol):
    """A function that draws x_0, given x_t at the first of `timesteps`.

    A sampler decides which rows of a batch the denoiser reads, at which timesteps and how often. It may call
    `scheduler.step`, `scheduler.posterior_logits` or the methods of `scheduler.transition`.

    Args:
        scheduler ([`D3PMScheduler`]): The process.
        denoiser (`Callable`): `denoiser(x_t, timestep, **condition)` gives the output of the network.
        x_t (`torch.LongTensor` of shape `[B, ...]`): The state at `timesteps[0]`.
        timesteps (`list[int]`): Strictly decreasing timesteps; x_0 comes after the last one.
        known (`torch.LongTensor` of shape `[B, ...]`, *optional*): Data x_0, of which the elements in `is_known` are
            given. The sampler returns them unchanged.
        is_known (`torch.BoolTensor` of shape `[B, ...]`, *optional*): True where `known` is given.
        generator (`torch.Generator`, or a list of one per row, *optional*): Source of all random numbers. With a list, a
            row depends on its own generator alone.
        condition (`dict`, *optional*): Further arguments of the denoiser; tensors have one row per row of `x_t`.
        callback (`Callable`, *optional*): Called with a [`SamplerStep`] after each step. The state that it returns, if
            any, replaces x_s.
        progress_bar (`Callable`, *optional*): Wraps the iterable of steps, as `tqdm` does. The sampler returns the
            state that it has reached when the iteration ends, which may be early.
        step_arguments: Arguments of `scheduler.step`, such as `temperature`; further options of the sampler. With
            `temperature=0`, all samplers take the most likely x_0 of each prediction (the argmax, of equal ones the first). What
            the process decides stays random: when a position is revealed, and its noise.

    Returns:
        `torch.LongTensor` of shape `[B, ...]`: x_0.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler
        from d3pm_hf.samplers import ancestral

        scheduler = D3PMScheduler(28)
        x_T = scheduler.sample_prior((2, 16))
        x_0 = ancestral(scheduler, lambda x_t, t: torch.zeros(*x_t.shape, 28), x_T, scheduler.sampling_timesteps(20))
        ```
    """

    def __call__(
        self,
        scheduler,
        denoiser: Callable[..., torch.Tensor],
        x_t: torch.Tensor,
        timesteps: list[int],
        *,
        known: torch.Tensor | None = None,
        is_known: torch.Tensor | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        condition: dict | None = None,
        callback: Callable[[SamplerStep], torch.Tensor | None] | None = None,
        progress_bar: Callable[[Iterable], Iterable] | None = None,
        **step_arguments,
    ) -> torch.Tensor: ...


# The functions of a [`Walk`] behind the samplers of this package.
_draws: dict[Callable, Callable[..., torch.Tensor]] = {}


def as_sampler(draw: Callable[..., torch.Tensor]) -> Sampler:
    """Makes a [`Sampler`] of a function of a [`Walk`] and options: it takes the fields of the walk as arguments."""
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in list(inspect.signature(draw).parameters.values())[1:]]
    *shared, step_arguments = list(inspect.signature(Sampler.__call__).parameters.values())[1:]
    signature = inspect.Signature([*shared, *own, step_arguments], return_annotation=torch.Tensor)

    @wraps(draw)
    def sampler(*args, **kwargs) -> torch.Tensor:
        fields: dict = signature.bind(*args, **kwargs).arguments
        options = {p.name: fields.pop(p.name) for p in own if p.name in fields}
        if fields.get("condition") is None:
            fields["condition"] = {}
        if isinstance(fields["denoiser"], GivenDenoiser):
            fields |= fields["denoiser"].unwrap(fields["condition"])
        fields["step_options"] = fields.pop("step_arguments", {})
        walk = Walk(**fields)
        walk.check()
        check_type("timesteps", walk.timesteps, Iterable, "a list of integers")
        timesteps = walk.scheduler.sampling_timesteps(timesteps=walk.timesteps)
        return run_sampler(sampler, replace(walk, timesteps=timesteps), options)

    vars(sampler)["__signature__"] = signature
    _draws[sampler] = torch.no_grad()(draw)
    return sampler


def run_sampler(sampler: Sampler, walk: Walk, options: dict) -> torch.Tensor:
    """Draws x_0. A sampler of this package takes the walk; one of a user's own takes the arguments of [`Sampler`]."""
    if isinstance(sampler, FunctionType) and sampler in _draws:
        x_0 = _draws[sampler](walk, **options)
        walk.check_outputs()
        return x_0
    denoiser, condition = walk.denoiser, walk.condition
    if walk.given is not None:
        denoiser = GivenDenoiser(walk)
        condition = {**condition, "given": walk.given, "is_given": walk.is_given}
    return sampler(
        walk.scheduler,
        denoiser,
        walk.x_t,
        walk.timesteps,
        known=walk.known,
        is_known=walk.is_known,
        generator=walk.generator,
        condition=condition,
        callback=walk.callback,
        progress_bar=walk.progress_bar,
        **options,
        **walk.step_options,
    )


class GivenDenoiser:
    """The denoiser of a walk for a sampler of a user's own, which may call it with some rows of x_t and of the condition.

    What is given are two more entries of the condition. A call without them has all rows.
    """

    def __init__(self, walk: Walk):
        self.walk = walk

    def __call__(self, x_t, timestep, **condition) -> torch.Tensor:
        fields = self.unwrap(condition)
        return self.walk.denoise_given(x_t, timestep, fields["condition"], fields["given"], fields["is_given"])

    def unwrap(self, condition: dict) -> dict[str, Any]:
        """The fields of a walk that a denoiser of this class and its condition stand for."""
        condition = {"given": self.walk.given, "is_given": self.walk.is_given, **condition}
        given = {name: condition.pop(name) for name in ("given", "is_given")}
        return {"denoiser": self.walk.denoiser, "condition": condition, **given}


_samplers: Registry[Sampler] = Registry("sampler", "register_sampler")


def register_sampler(name: str) -> Callable[[Sampler], Sampler]:
    """Registers a function with the signature of [`Sampler`], so that `pipeline(sampler=name)` uses it.

    Example:
        @register_sampler("mine")
        def mine(scheduler, denoiser, x_t, timesteps, *, generator=None, **others): ...
    """
    check_str("name", name)

    def register(sampler: Sampler) -> Sampler:
        check_type("sampler", sampler, Callable, "a function")
        return _samplers.add(name, sampler)

    return register


def registered_samplers() -> Mapping[str, Sampler]:
    """All registered samplers by name, in the order of their registration."""
    return _samplers


def get_sampler(sampler: str | Sampler) -> Sampler:
    """The sampler of this name; a function is returned as it is."""
    return sampler if callable(sampler) else _samplers.find("sampler", sampler)
