# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Evaluation on several processes: which rows of a batch each of them takes, and the results of all rows on all of them."""

import torch
from accelerate import Accelerator

from ..utils.checks import check_type


class SharedRows:
    """The rows of batches, shared out among processes.

    Each process takes as many rows as the others, since all of them must call a sharded network equally often. Those
    that are left without a row repeat the last one, and its result is dropped.

    Args:
        accelerator (`Accelerator`, *optional*): The processes. Defaults to this process alone.
    """

    def __init__(self, accelerator: Accelerator | None = None):
        if accelerator is not None:
            check_type("accelerator", accelerator, Accelerator, "an `Accelerator`")
        self.accelerator = accelerator if accelerator is not None and accelerator.num_processes > 1 else None

    def take(
        self, x_0: torch.Tensor, mask: torch.Tensor, condition: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        """The rows of this process in x_0, in the mask and in the condition, and their indices `[R]`.

        No element of a repeated row counts.
        """
        size = len(x_0)
        if self.accelerator is None:
            return x_0, mask, condition, torch.arange(size)
        share = -(-size // self.accelerator.num_processes)
        index = torch.arange(share) + share * self.accelerator.process_index  # [R]
        rows = index.clamp(max=size - 1).to(x_0.device)
        repeated = (index >= size).to(mask.device)
        mask = mask[rows] & ~repeated.reshape(-1, *[1] * (mask.ndim - 1))
        return x_0[rows], mask, {name: value[rows] for name, value in condition.items()}, index

    def gather(self, results: torch.Tensor, size: int) -> torch.Tensor:
        """The results of the `size` rows of a batch, in their order, from those of the rows of each process, `[R, ...]`."""
        if self.accelerator is None:
            return results
        return self.accelerator.gather(results.to(self.accelerator.device)).cpu()[:size]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of the values of all processes."""
        if self.accelerator is None:
            return values
        return self.accelerator.reduce(values.to(self.accelerator.device), reduction="sum").cpu()
