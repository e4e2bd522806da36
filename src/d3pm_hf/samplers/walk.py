# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The record of a call that all samplers take, from x_T to x_0."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ..numerics import scalar_tensor, to_device
from ..schedulers.warping import create_warpers
from ..utils.checks import check_type, describe
from ..utils.kept_logits import predict_rows


# Logit of the states that are not drawn at given positions, beside one of zero. It is finite in float16 too.
HIDDEN_LOGIT = -1e4


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


@dataclass(frozen=True, eq=False)
class Walk:
    """The arguments of a [`Sampler`] as one record, built and checked once per call; `step_options` are those of `scheduler.step`.

    Known elements are part of the data of the process: x_t shows them as the process can have kept them, and the particle filter
    weighs them. Given elements are outside of the process, such as a prompt, special tokens and padding: the denoiser always sees
    them, without noise, as in training where only a part of each example is noised. Samplers draw x_s at given positions too,
    and nothing depends on it: there every prediction is [`hidden_token`], whatever the network makes of a prompt.
    """

    scheduler: Any
    denoiser: Any
    x_t: torch.Tensor
    timesteps: list[int]
    known: Any = None  # tensors of the shape of x_t, or both `None`; `given` and `is_given` alike
    is_known: Any = None
    given: Any = None
    is_given: Any = None
    condition: dict = field(default_factory=dict)
    generator: torch.Generator | list[torch.Generator] | None = None
    callback: Callable[[SamplerStep], torch.Tensor | None] | None = None
    progress_bar: Callable[[Iterable], Iterable] | None = None
    step_options: dict = field(default_factory=dict)
    # The timestep of each output, and its largest logit at the position where that is largest and where it is smallest.
    outputs: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def check(self) -> None:
        """Checks all fields but `timesteps`, which the scheduler checks."""
        check_scheduler(self.scheduler)
        check_type("denoiser", self.denoiser, Callable, "a function or a module")
        check_type("x_t", self.x_t, torch.Tensor, "a `torch.LongTensor`")
        self.scheduler.check_states(self.x_t)
        for name in ("known", "given"):
            states, where = getattr(self, name), getattr(self, f"is_{name}")
            if states is None and where is None:
                continue
            for which, value, dtype in ((name, states, torch.long), (f"is_{name}", where, torch.bool)):
                if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.shape != self.x_t.shape:
                    raise ValueError(
                        f"{which} is {describe(value)}: pass both {name} ({torch.long}) and is_{name} ({torch.bool}), with "
                        f"the shape {tuple(self.x_t.shape)} of x_t"
                    )
            self.scheduler.check_states(states)
        check_type("condition", self.condition, dict, "a dictionary of arguments of the denoiser")
        for name in ("callback", "progress_bar"):
            if getattr(self, name) is not None:
                check_type(name, getattr(self, name), Callable, "a function")
        warping = inspect.signature(create_warpers).parameters  # `temperature`, `top_k` and `top_p`
        create_warpers(**{name: value for name, value in self.step_options.items() if name in warping})

    def hide_given(self) -> "Walk":
        """The walk with [`hidden_token`] at the given positions of x_t, as far as the process can have kept it. None is known."""
        hidden = self.scheduler.reveal(torch.full_like(self.x_t, hidden_token(self.scheduler)), self.timesteps[0])
        is_known = None if self.is_known is None else self.is_known & ~self.is_given
        return replace(self, x_t=torch.where(self.is_given, hidden, self.x_t), is_known=is_known)

    @property
    def steps(self) -> list[tuple[int, int]]:
        """The timesteps t and s of each step; -1 stands for the data."""
        return list(zip(self.timesteps, [*self.timesteps[1:], -1]))

    def progress(self, steps: Iterable) -> Iterable:
        """`steps` with the progress bar, which may end them early."""
        return steps if self.progress_bar is None else self.progress_bar(steps)

    def show_known(self, x: torch.Tensor, t: int) -> torch.Tensor:
        """`x` with its known elements replaced by what the process can show of them at timestep t."""
        return x if self.known is None else torch.where(self.is_known, self.scheduler.reveal(self.known, t), x)

    def show_given(self, x: torch.Tensor) -> torch.Tensor:
        """`x` with the given elements in place of its own."""
        return x if self.given is None else torch.where(self.is_given, self.given, x)

    def predict(self, x_t: torch.Tensor, t: int | torch.Tensor, rows=None, elements=None) -> torch.Tensor:
        """Output of the network `[n, ..., K]` for states `[n, ...]`.

        Args:
            x_t: States of some rows of the walk.
            t: Their timestep, or one for each row on the host.
            rows: Indices of the rows; all of them by default.
            elements: Indices `[r]` of the elements whose output `[r, K]` is used, in the flattened x_t; all of them by default.
        """
        condition, given, is_given = self.condition, self.given, self.is_given
        if rows is not None:
            condition = {
                name: value[rows] if isinstance(value, torch.Tensor) and value.ndim else value
                for name, value in condition.items()
            }
        if not isinstance(t, int):
            timestep = to_device(t, x_t.device)
        elif x_t.device.type == "xla":  # the graph of each step is the same only if its timestep is moved for itself
            timestep = scalar_tensor(t, torch.long, x_t.device)
        else:
            timestep = self._moved_timesteps[t]
        if is_given is not None and rows is not None:
            given, is_given = given[rows], is_given[rows]
        model_output = self.denoise_given(x_t, timestep, condition, given, is_given, elements)
        if model_output.device.type != "cpu":
            self.note_output(model_output, t if isinstance(t, int) else int(t[0]))
        return model_output

    def note_output(self, model_output: torch.Tensor, t: int) -> None:
        """Records the extreme logits of an output on an accelerator for [`Walk.check_outputs`]. On a CPU each step checks its own."""
        top = self.scheduler.transition.forbid(self.scheduler.logits(model_output)).amax(-1)
        self.outputs.append((t, torch.stack([top.max(), top.min()])))  # both are NaN if any is

    def denoise_given(self, x_t, timestep, condition: dict, given, is_given, elements=None) -> torch.Tensor:
        """Output of the denoiser, which sees the given elements, and says of them that x_0 is the hidden token."""
        x_t = x_t if is_given is None else torch.where(is_given, given, x_t)
        if getattr(self.denoiser, "reads_given", False):  # guidance on what is given
            condition = {**condition, "is_given": is_given}
        num_classes = self.scheduler.config.num_classes
        model_output = predict_rows(self.denoiser, x_t, timestep, condition, elements, num_classes)
        model_output = self.scheduler.restrict(model_output, elements)
        if is_given is None:
            return model_output
        is_given = is_given if elements is None else is_given.flatten()[elements]
        return torch.where(is_given[..., None], self._hidden_output.to(model_output.dtype), model_output)

    @cached_property
    def _moved_timesteps(self) -> dict[int, torch.Tensor]:
        return dict(zip(self.timesteps, torch.tensor(self.timesteps, device=self.x_t.device)))

    @cached_property
    def _hidden_output(self) -> torch.Tensor:
        config, device = self.scheduler.config, self.x_t.device
        if config.prediction_type == "logistic":
            return torch.zeros(2, device=device)  # location and log-scale, which leave every state possible
        hidden = torch.full((config.num_classes,), HIDDEN_LOGIT, device=device)
        hidden[hidden_token(self.scheduler)] = 0
        return hidden

    def logits(self, model_output: torch.Tensor) -> torch.Tensor:
        """Logits of x_0, `[..., K]`, after `temperature`, `top_k` and `top_p`; those of states that data never hold are -inf."""
        return self.scheduler.transition.forbid(self.scheduler.step_logits(model_output, **self.step_options))

    def step(self, model_output: torch.Tensor, x_t: torch.Tensor, t: int, s: int) -> torch.Tensor:
        """Draws x_s from p(x_s | x_t)."""
        options = {"previous_timestep": s, "generator": self.generator, **self.step_options}
        return self.scheduler.step(model_output, t, x_t, **options).prev_sample

    def check_outputs(self) -> None:
        """Checks all outputs that were recorded since the last check, and synchronizes with the device once."""
        if not self.outputs:
            return
        timesteps, ends = [t for t, _ in self.outputs], [end for _, end in self.outputs]
        self.outputs.clear()
        if ends[0].device.type == "xla":  # which would compile the stack of each number of steps
            ends = [end.cpu() for end in ends]
        for timestep, (high, low) in zip(timesteps, torch.stack(ends).cpu().tolist()):
            if not high < torch.inf:
                raise ValueError(
                    f"the network's output holds NaN or infinity at timestep {timestep}: look at its weights and its input"
                )
            if low == -torch.inf:
                raise ValueError(
                    f"all logits of a position are -inf at timestep {timestep}: leave at least one state possible"
                )


def hidden_token(scheduler) -> int:
    """The first state that data can hold. It stands in for given elements, whose tokens, such as `[CLS]`, need not be states."""
    never_data = set(scheduler.never_data)
    return next(state for state in range(scheduler.config.num_classes) if state not in never_data)


def check_scheduler(scheduler) -> None:
    """Checks that `scheduler` is a [`D3PMScheduler`], or wraps one as guidance does."""
    if not hasattr(getattr(scheduler, "config", None), "num_classes"):
        raise ValueError(f"scheduler is a {type(scheduler).__name__}: it must be a `D3PMScheduler`")
