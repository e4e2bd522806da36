# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The position of a run: its step, its losses since the last line of the log, its last bound, and its speed."""

import math
import time
from dataclasses import asdict

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather

from ..likelihood import Bound
from ..likelihood.units import bits


class Progress:
    """The step of a run, the sums of its losses since the last line of the log, and its last evaluation.

    It is part of each checkpoint.

    Args:
        accelerator (`Accelerator`): Accelerator of the run. Each process has the sums of its own batches.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.step, self.sums, self.count = 0, torch.zeros(3, dtype=torch.float64), 0
        self.bound: Bound | None = None
        self.evaluated_step: int | None = None  # the step of the last evaluation, with or without a bound

    def add(self, *losses: torch.Tensor) -> None:
        """Adds the losses of one batch."""
        self.sums = self.sums.to(losses[0].device) + torch.stack([loss.detach().double() for loss in losses])
        self.count += 1

    def log_line(self, num_timesteps: int, learning_rate: float) -> dict[str, float]:
        """The averages over all processes since the last line. The sums start again at zero."""
        reduce = self.accelerator.reduce
        sums = self.sums if self.accelerator.num_processes == 1 else reduce(self.sums, reduction="mean")
        loss, vb, cross_entropy = (value / self.count for value in sums.tolist())
        self.sums, self.count = torch.zeros_like(self.sums), 0
        return {
            "loss": loss,
            "vb": vb,
            "cross_entropy": cross_entropy,
            # Terms are weighted as for uniform timesteps: T times their average estimates the bound without the constant L_T.
            "bits": bits(vb * num_timesteps),
            "learning_rate": learning_rate,
        }

    def evaluated(self, bound: Bound | None) -> None:
        """Keeps the result of the evaluation at the present step."""
        self.bound, self.evaluated_step = bound, self.step

    @property
    def final_bound(self) -> Bound | None:
        """The bound of the present weights, if it was measured. That of an earlier step says nothing about them."""
        return self.bound if self.evaluated_step == self.step else None

    def check_finite(self, parameters: list[torch.Tensor]) -> None:
        """Raises an error on all processes if a loss since the last line of the log, or a weight, is not finite.

        It waits for the device, so it is called where a checkpoint or an evaluation would wait in any case.
        """
        # Shards of a weight are looked at by the process that holds them.
        shards = [getattr(parameter, "_local_tensor", parameter).detach() for parameter in parameters]
        norms = torch._foreach_norm([shard for shard in shards if shard.numel()], ord=math.inf) or (self.sums[0],)
        largest = torch.stack([norm.double() for norm in norms]).max()
        loss = self.sums[0].to(largest.device) / max(self.count, 1)
        loss, largest = self.accelerator.reduce(torch.stack([loss, largest]), reduction="mean").tolist()
        if not math.isfinite(loss):
            raise loss_error(loss, self.step)
        if not math.isfinite(largest):
            raise FloatingPointError(
                f"a weight is {largest} after step {self.step}: start a new run with a lower learning_rate or "
                "max_grad_norm"
            )

    def state_dict(self) -> dict:
        """The state with the sums of each process, `[num_processes, 3]`. All processes must call."""
        sums, processes = self.sums[None], PartialState()
        if processes.num_processes > 1:
            sums = gather(sums.to(processes.device))
        bound = None if self.bound is None else asdict(self.bound)
        return {
            "step": self.step,
            "sums": sums.cpu(),
            "count": self.count,
            "bound": bound,
            "evaluated_step": self.evaluated_step,
        }

    def load_state_dict(self, state: dict) -> None:
        """Takes the sums of this process, or those of an average process if there were more or fewer of them."""
        self.step, self.count = state["step"], state["count"]
        sums, processes = state["sums"].reshape(-1, 3), PartialState()  # earlier versions had those of one process
        self.sums = sums[processes.process_index] if len(sums) == processes.num_processes else sums.mean(0)
        bound = state.get("bound")  # earlier versions did not keep it
        self.bound = None if bound is None else Bound(**bound)
        self.evaluated_step = state.get("evaluated_step")


def loss_error(loss: float, step: int) -> FloatingPointError:
    """The error of a loss that is not finite."""
    return FloatingPointError(
        f"the loss is {loss} at step {step}: start a new run with a lower learning_rate or max_grad_norm"
    )


class Clock:
    """The speed of a run, in samples per second."""

    def __init__(self, step: int):
        self.time, self.step, self.rate = time.perf_counter(), step, math.nan

    def lap(self, step: int, batch_size: int) -> None:
        """Computes the rate since the last lap."""
        now = time.perf_counter()
        self.rate = (step - self.step) * batch_size / (now - self.time)
        self.time, self.step = now, step
