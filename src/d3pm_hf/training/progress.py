# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The position of a run: its step, its losses since the last line of the log, and its speed."""

import math
import time

import torch
from accelerate import Accelerator

from ..likelihood.units import bits


class Progress:
    """The step of a run, and the sums of the losses since the last line of the log. It is part of each checkpoint."""

    def __init__(self):
        self.step, self.sums, self.count = 0, torch.zeros(3, dtype=torch.float64), 0

    def add(self, *losses: torch.Tensor) -> None:
        """Adds the losses of one batch."""
        self.sums = self.sums.to(losses[0].device) + torch.stack([loss.detach().double() for loss in losses])
        self.count += 1

    def log_line(self, accelerator: Accelerator, num_timesteps: int, learning_rate: float) -> dict[str, float]:
        """The averages over all processes since the last line. The sums start again at zero."""
        loss, vb, cross_entropy = accelerator.reduce(self.sums / self.count, reduction="mean").tolist()
        self.sums, self.count = torch.zeros_like(self.sums), 0
        return {
            "loss": loss,
            "vb": vb,
            "cross_entropy": cross_entropy,
            # Timesteps are drawn uniformly: T times the average term estimates the bound, except for the constant L_T.
            "bits": bits(vb * num_timesteps),
            "learning_rate": learning_rate,
        }

    def state_dict(self) -> dict:
        return {"step": self.step, "sums": self.sums.cpu(), "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.step, self.sums, self.count = state["step"], state["sums"], state["count"]


class Clock:
    """The speed of a run, in samples per second."""

    def __init__(self, step: int):
        self.time, self.step, self.rate = time.perf_counter(), step, math.nan

    def lap(self, step: int, batch_size: int) -> None:
        """Computes the rate since the last lap."""
        now = time.perf_counter()
        self.rate = (step - self.step) * batch_size / (now - self.time)
        self.time, self.step = now, step
