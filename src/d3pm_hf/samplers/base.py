# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The signature of a sampler, and the registry of samplers by name."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..utils.checks import check_str, check_type, describe
from ..utils.registry import Registry


@dataclass(frozen=True)
class SamplerStep:
    """One step from x_t to x_s, as the callback of a sampler receives it.

    Args:
        index (`int`): Number of the step, from 0.
        timestep (`int`): t.
        previous_timestep (`int`): s, -1 for the data.
        sample (`torch.LongTensor` of shape `[B, ...]`): x_t.
        model_output (`torch.Tensor` of shape `[B, ..., K]`): Output of the denoiser for x_t.
        prev_sample (`torch.LongTensor` of shape `[B, ...]`): x_s.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler
        from d3pm_hf.samplers import ancestral

        scheduler, changes = D3PMScheduler(28, 10), []


        def count(step):
            changes.append((step.timestep, int((step.sample != step.prev_sample).sum())))


        ancestral(scheduler, lambda x_t, t: torch.zeros(*x_t.shape, 28), scheduler.sample_prior((1, 8)), [9, 4], callback=count)
        assert sum(number for _, number in changes) == 8  # each mask is revealed once
        ```
    """

    index: int
    timestep: int
    previous_timestep: int
    sample: torch.Tensor
    model_output: torch.Tensor
    prev_sample: torch.Tensor


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
    if not isinstance(sampler, str) and not callable(sampler):
        raise ValueError(
            f"sampler is {describe(sampler)}: it must be the name of a sampler, or a function with the signature of "
            "`d3pm_hf.samplers.Sampler`"
        )
    return _samplers.find("sampler", sampler) if isinstance(sampler, str) else sampler


def check_sampler_kwargs(options: dict | None, sampler: Sampler) -> dict:
    """Checks that `options` (`sampler_kwargs` of a pipeline) are arguments of the sampler, and returns them."""
    if options is None:
        return {}
    check_type("sampler_kwargs", options, dict, "a dictionary of options of the sampler")
    # What a pipeline passes itself, from arguments of its own.
    passed = {*inspect.signature(Sampler.__call__).parameters, "num_particles", "reward_fn", "reward_scale", "report"}
    parameters = inspect.signature(sampler).parameters.values()
    names = [p.name for p in parameters if p.name not in passed and p.kind is not p.VAR_KEYWORD]
    for name in options:
        if name not in names:
            raise ValueError(
                f"sampler_kwargs holds {describe(name)}, and the sampler takes {', '.join(names) or 'no options'}: leave it out"
            )
    return options


def check_sampler_arguments(
    scheduler, denoiser, x_t, timesteps, known=None, is_known=None, condition=None, callback=None, progress_bar=None
) -> list[int]:
    """Checks the arguments of a sampler, and returns the timesteps as a list."""
    check_scheduler(scheduler)
    check_type("denoiser", denoiser, Callable, "a function or a module")
    check_type("x_t", x_t, torch.Tensor, "a `torch.LongTensor`")
    scheduler.check_states(x_t)
    for name, value, dtype in (("known", known, torch.long), ("is_known", is_known, torch.bool)):
        if known is None and is_known is None:
            break
        if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.shape != x_t.shape:
            raise ValueError(
                f"{name} is {describe(value)}: pass both known ({torch.long}) and is_known ({torch.bool}), with the shape "
                f"{tuple(x_t.shape)} of x_t"
            )
    if condition is not None:
        check_type("condition", condition, dict, "a dictionary of arguments of the denoiser")
    for name, value in (("callback", callback), ("progress_bar", progress_bar)):
        if value is not None:
            check_type(name, value, Callable, "a function")
    check_type("timesteps", timesteps, Iterable, "a list of integers")
    return scheduler.sampling_timesteps(timesteps=timesteps)


def start_cache(denoiser, condition: dict) -> Any:
    """An empty cache of a denoiser ([`~models.Denoiser.start_cache`]), or `None` if it keeps none."""
    start = getattr(denoiser, "start_cache", None)
    return None if start is None else start(condition)


class OutputCheck:
    """Checks the outputs of a denoiser in one call of a sampler, with one wait for the device at the end.

    On a CPU `scheduler.step` checks each of them.

    Args:
        scheduler ([`D3PMScheduler`]): The process.
    """

    def __init__(self, scheduler):
        self.scheduler, self.timesteps, self.ends = scheduler, [], []

    def add(self, model_output: torch.Tensor, timestep: int) -> None:
        """Notes the largest logit of the rows of an output `[B, ..., K]` where it is largest and where it is smallest."""
        if model_output.device.type == "cpu":
            return
        top = self.scheduler.transition.forbid(self.scheduler.logits(model_output)).amax(-1)  # [B, ...]
        self.timesteps.append(timestep)
        self.ends.append(torch.stack([top.max(), top.min()]))  # both are NaN if any is

    def finish(self) -> None:
        """Raises an error if an output held NaN or infinity, or a row in which no state is possible."""
        if not self.ends:
            return
        if self.ends[0].device.type == "xla":  # which would compile the stack of each number of steps
            self.ends = [end.cpu() for end in self.ends]
        for timestep, (high, low) in zip(self.timesteps, torch.stack(self.ends).cpu().tolist()):
            if not high < torch.inf:
                raise ValueError(
                    f"the network's output holds NaN or infinity at timestep {timestep}: look at its weights and its input"
                )
            if low == -torch.inf:
                raise ValueError(
                    f"all logits of a position are -inf at timestep {timestep}: leave at least one state possible"
                )


def check_scheduler(scheduler) -> None:
    """Checks that `scheduler` is a [`D3PMScheduler`], or the copy of one in an exported checkpoint."""
    if not hasattr(getattr(scheduler, "config", None), "num_classes"):
        raise ValueError(f"scheduler is a {type(scheduler).__name__}: it must be a `D3PMScheduler`")
