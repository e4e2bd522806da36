# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A scheduler whose time is a number in (0, 1], for loops that are written for the discrete schedulers of diffusers to come."""

import torch

from ..utils.checks import check_type
from .scheduling_d3pm import D3PMScheduler, D3PMSchedulerOutput
from .warping import create_warpers


class UnitTimeScheduler:
    """Shows a [`D3PMScheduler`] with times in (0, 1] that fall, and with the shaping of logits among its own settings.

    These are the conventions that diffusers has proposed for its discrete schedulers (pull request 14741): time t of n
    corruption steps is n / T, `step` returns `prev_sample` and `pred_logits`, and `temperature`, `top_k` and `top_p` belong to the
    scheduler. Times between those of the process are rounded to the nearest one.

    Args:
        scheduler ([`D3PMScheduler`]): The process.
        temperature (`float`, defaults to 1.0): Divides the logits of the network. 0 takes the most likely state.
        top_k (`int`, *optional*): Number of most likely states of x_0 that are kept.
        top_p (`float`, *optional*): Total probability of the most likely states of x_0 that are kept.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler, UnitTimeScheduler

        scheduler = UnitTimeScheduler(D3PMScheduler(28), top_k=5)
        scheduler.set_timesteps(10)
        sample = scheduler.sample_prior((2, 16))
        for t in scheduler.timesteps:  # 1.0, 0.9, ..., 0.1
            sample = scheduler.step(torch.randn(2, 16, 28), t, sample).prev_sample  # noise: the output of a network
        ```
    """

    order = 1

    def __init__(
        self, scheduler: D3PMScheduler, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
    ):
        check_type("scheduler", scheduler, D3PMScheduler, "a `D3PMScheduler`")
        create_warpers(temperature, top_k, top_p)  # checks them
        self.scheduler = scheduler
        self.shaping = {"temperature": temperature, "top_k": top_k, "top_p": top_p}

    @property
    def config(self):
        """The configuration of the process."""
        return self.scheduler.config

    @property
    def timesteps(self) -> torch.Tensor:
        """The times of sampling, falling, in (0, 1]."""
        return self.scheduler.num_steps_behind(self.scheduler.timesteps).double() / len(self.scheduler)

    def set_timesteps(self, num_inference_steps: int, device: str | torch.device | None = None) -> None:
        """Sets the times of sampling: `num_inference_steps` of them, from 1 down; after the last comes x_0."""
        self.scheduler.set_timesteps(num_inference_steps, device)

    def to_timestep(self, time: torch.Tensor | float) -> torch.Tensor:
        """The timesteps 0 .. T-1 of the process at times in (0, 1]."""
        times = torch.as_tensor(time)
        if not times.is_floating_point():
            raise ValueError(
                f"time has the dtype {times.dtype}: pass a number in (0, 1], such as an entry of `timesteps`"
            )
        if not ((times > 0) & (times <= 1)).all():
            wrong = times[~((times > 0) & (times <= 1))].flatten()[0].item()
            raise ValueError(f"time is {wrong}: it must be in (0, 1], and 0 is the data")
        return (times.double() * len(self.scheduler)).round().long().clamp(min=1) - 1

    def sample_prior(self, shape, generator=None, device=None) -> torch.Tensor:
        """Draws x_T."""
        return self.scheduler.sample_prior(shape, generator, device)

    def add_noise(
        self, original_samples: torch.Tensor, timesteps: torch.Tensor | float, generator=None
    ) -> torch.Tensor:
        """Draws x_t from q(x_t | x_0), at one time for each sample `[B]` or one for all."""
        return self.scheduler.add_noise(original_samples, self.to_timestep(timesteps), generator)

    def step(
        self,
        model_output: torch.Tensor,
        timestep: torch.Tensor | float,
        sample: torch.Tensor,
        *,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
    ) -> D3PMSchedulerOutput | tuple:
        """Draws x_s from p(x_s | x_t), s being the time that follows t in `timesteps`.

        Args:
            model_output (`torch.Tensor` of shape `[B, ..., K]`): Output of the network.
            timestep (`float` or `torch.Tensor` of shape `[]`): t in (0, 1].
            sample (`torch.LongTensor` of shape `[B, ...]`): x_t.
            generator (`torch.Generator`, or a list of one per sample, *optional*): Source of all random numbers.
            return_dict (`bool`, defaults to `True`): Whether to return a [`D3PMSchedulerOutput`] or a tuple.
        """
        t = int(self.to_timestep(timestep))
        return self.scheduler.step(
            model_output, t, sample, generator=generator, return_dict=return_dict, **self.shaping
        )
