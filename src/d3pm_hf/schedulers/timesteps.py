# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The timesteps of a scheduler: which ones sampling goes through, and which ones are valid."""

import operator
from numbers import Integral
from typing import Any

import torch

from ..utils.checks import check_choice, check_device, check_int, check_timestep, values_are_known
from .arguments import check_inference_timesteps


# Which timesteps a number of steps stands for: those stored for it, if there are any, or evenly spaced ones.
SPACINGS = ("chosen", "even")


class TimestepsMixin:
    """Timesteps of [`D3PMScheduler`]: `t` in `0 .. T-1`, with `t + 1` corruption steps behind it."""

    config: Any
    family: Any
    register_to_config: Any
    num_inference_steps: int | None
    timesteps: torch.Tensor
    _previous: dict[int, int]

    def __len__(self) -> int:
        return self.config.num_train_timesteps

    @staticmethod
    def num_steps_behind(timestep):
        """Number of corruption steps at `timestep` (`timestep + 1`). Nothing else converts between the two."""
        return timestep + 1

    def spaced_timesteps(self, num_inference_steps: int, start: int | None = None) -> list[int]:
        """Evenly spaced timesteps from `start` down to the data; the numbers of steps between them differ by at most one.

        Args:
            num_inference_steps (`int`): Number of timesteps.
            start (`int`, *optional*): First timestep. Defaults to T - 1.
        """
        if start is not None:
            check_int("start", start, 0, len(self) - 1)
        total = len(self) if start is None else self.num_steps_behind(start)
        if not isinstance(num_inference_steps, Integral) or not 1 <= num_inference_steps <= total:
            raise ValueError(
                f"num_inference_steps is {num_inference_steps!r}: it must be an integer from 1 to {total}"
            )
        return [i * total // num_inference_steps - 1 for i in range(num_inference_steps, 0, -1)]

    def register_inference_timesteps(self, timesteps: dict[int, list[int]] | None) -> None:
        """Stores the timesteps of sampling by their number in the configuration, which is saved with a checkpoint.

        `set_timesteps(n)` and `pipeline(num_inference_steps=n)` use those stored for n, and evenly spaced ones if there are
        none.

        Args:
            timesteps (`dict[int, list[int]]`, *optional*): For each number of steps n its n timesteps, strictly decreasing
                from T - 1, such as `result.inference_timesteps` of [`~evaluation.optimize_timesteps`]. `None` removes
                the stored ones.
        """
        check_inference_timesteps(timesteps, self.config, self.family)
        stored = None
        if timesteps is not None:  # the keys of JSON are strings
            stored = {str(number): [operator.index(t) for t in times] for number, times in timesteps.items()}
        self.register_to_config(inference_timesteps=stored)

    def chosen_timesteps(self, num_inference_steps: int) -> list[int] | None:
        """The timesteps that are stored for this number of steps, `None` if there are none."""
        stored = self.config.get("inference_timesteps") or {}
        is_number = isinstance(num_inference_steps, Integral) and not isinstance(num_inference_steps, bool)
        timesteps = stored.get(str(int(num_inference_steps))) if is_number else None
        return None if timesteps is None else list(timesteps)

    def sampling_timesteps(
        self,
        num_inference_steps: int | None = None,
        timesteps: list[int] | None = None,
        start_timestep: int | None = None,
        spacing: str = "chosen",
    ) -> list[int]:
        """The timesteps of a sampling run, strictly decreasing; after the last one comes x_0. The scheduler is not changed.

        Args:
            num_inference_steps (`int`, *optional*): Number of timesteps; all of them by default.
            timesteps (`list[int]`, *optional*): The timesteps themselves, in place of `num_inference_steps`.
            start_timestep (`int`, *optional*): Timestep that `num_inference_steps` starts from; T - 1 by default. From
                another one the timesteps are spaced evenly.
            spacing (`str`, defaults to `"chosen"`): `"chosen"`, the timesteps of [`register_inference_timesteps`] if there are
                any for this number, else evenly spaced ones; or `"even"`, evenly spaced ones.
        """
        check_choice("spacing", spacing, SPACINGS)
        last = len(self) - 1 if start_timestep is None else start_timestep
        if not isinstance(last, Integral) or not 0 <= last < len(self):
            raise ValueError(f"start_timestep is {last!r}: it must be an integer from 0 to {len(self) - 1}")
        if timesteps is None:
            steps = self.num_steps_behind(last) if num_inference_steps is None else num_inference_steps
            chosen = self.chosen_timesteps(steps) if spacing == "chosen" and last == len(self) - 1 else None
            timesteps = self.spaced_timesteps(steps, last) if chosen is None else chosen
        elif num_inference_steps is not None:
            raise ValueError(
                f"got num_inference_steps={num_inference_steps} and timesteps={timesteps}: pass one of the two"
            )
        elif start_timestep is not None:
            raise ValueError("got timesteps and start_timestep: the first of the timesteps is where the call starts")
        try:
            timesteps = [operator.index(t) for t in timesteps]
        except TypeError:
            raise ValueError(f"timesteps is {timesteps!r}: pass a list of integers") from None
        for before, after in zip(timesteps, timesteps[1:]):
            if after >= before:
                raise ValueError(f"`timesteps` must be strictly decreasing, got {after} after {before}")
        if not timesteps or timesteps[0] > last or timesteps[-1] < 0:
            raise ValueError(f"timesteps {timesteps[:1]} .. {timesteps[-1:]} leave the range {last} .. 0")
        self.check_spacing(timesteps)
        return timesteps

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        timesteps: list[int] | None = None,
        spacing: str = "chosen",
    ) -> None:
        """Sets the timesteps of sampling, from the noisiest one down; after the last comes x_0.

        Args:
            num_inference_steps (`int`, *optional*): Number of timesteps.
            device (`str` or `torch.device`, *optional*): Device of `self.timesteps`.
            timesteps (`list[int]`, *optional*): Your own timesteps, strictly decreasing, in place of `num_inference_steps`.
            spacing (`str`, defaults to `"chosen"`): `"chosen"`, the timesteps of [`register_inference_timesteps`] if there are
                any for this number, else evenly spaced ones; or `"even"`, evenly spaced ones.
        """
        if num_inference_steps is None and timesteps is None:
            raise ValueError("got num_inference_steps=None and timesteps=None: pass one of the two")
        if device is not None:
            check_device("device", device)
        self._show_timesteps(self.sampling_timesteps(num_inference_steps, timesteps, spacing=spacing), device)

    def _show_timesteps(self, timesteps: list[int], device) -> None:
        """Sets the attributes of the timesteps to those of [`sampling_timesteps`]."""
        self._previous = dict(zip(timesteps, [*timesteps[1:], -1]))
        self.num_inference_steps = len(timesteps)
        self.timesteps = torch.tensor(timesteps, device=device)

    def check_spacing(self, timesteps: list[int]) -> None:
        """Checks that the model can step through `timesteps`: one that predicts x_{t-1} cannot skip any."""
        self.check_timesteps(torch.tensor(timesteps), timesteps, torch.tensor([*timesteps[1:], -1]))

    def previous_timestep(self, timestep: int) -> int:
        """The timestep that follows `timestep` in sampling; -1 stands for the data.

        It is the next entry of `self.timesteps`, or `timestep - 1` before `set_timesteps` was called.
        """
        timestep = check_timestep("timestep", timestep)
        if self.num_inference_steps is None:
            self.check_timesteps(timestep, torch.empty(1))
            return timestep - 1
        if timestep not in self._previous:
            raise ValueError(
                f"timestep {timestep} is not one of those that `set_timesteps` chose: step from one of "
                "`scheduler.timesteps`, or pass `previous_timestep`"
            )
        return self._previous[timestep]

    def check_timesteps(self, timesteps, sample, previous=None) -> None:
        """Checks that `timesteps` lie in 0 .. T-1, and that each of `previous` comes before its timestep.

        With `prediction_type="previous"` the previous timestep must be t - 1.
        """
        for name, times in (("timesteps", timesteps), ("previous timesteps", previous)):
            is_tensor = isinstance(times, torch.Tensor) and not times.is_floating_point()
            if not is_tensor and not (times is None and name == "previous timesteps"):
                check_int(name, times)
            if is_tensor and times.ndim and times.shape != (len(sample),):
                raise ValueError(
                    f"{name} have the shape {tuple(times.shape)}: pass one for all, or one per sample of the batch of "
                    f"{len(sample)}"
                )
        times = torch.as_tensor(timesteps)
        if not values_are_known(times):
            return
        low, high = (v.item() for v in times.aminmax())
        if low < 0 or high >= len(self):
            outside = times[(times < 0) | (times >= len(self))]
            raise ValueError(
                f"timestep {outside[0].item()} is outside 0 .. {len(self) - 1}: draw them from "
                "`torch.randint(0, scheduler.config.num_train_timesteps, ...)`"
            )
        if previous is None or not values_are_known(torch.as_tensor(previous)):
            return
        times, before = torch.broadcast_tensors(times, torch.as_tensor(previous))
        after = (before < -1) | (before >= times)
        if after.any():
            raise ValueError(
                f"previous timestep {before[after][0].item()} of t = {times[after][0].item()} is not in -1 .. t - 1"
            )
        if self.config.prediction_type == "previous" and (before != times - 1).any():
            raise ValueError(
                "a network that predicts x_{t-1} directly has no prediction of x_0 to skip timesteps with: use "
                f"every timestep (num_inference_steps={len(self)}), or train with prediction_type='x0'"
            )
