# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The exponential moving average of the weights (EMA)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers.training_utils import EMAModel


class AveragedWeights(EMAModel):
    """The `EMAModel` of diffusers, updated in one pass over the weights: its own step copies all weights first."""

    @torch.no_grad()
    def step(self, parameters: list) -> None:
        """Updates the average by the present weights."""
        self.optimization_step += 1
        self.cur_decay_value = self.get_decay(self.optimization_step)
        torch._foreach_lerp_(self.shadow_params, parameters, 1 - self.cur_decay_value)


@contextmanager
def averaged_weights(ema: AveragedWeights | None, parameters: list, denoiser: torch.nn.Module) -> Iterator[None]:
    """A context in which the network is in eval mode and has its averaged weights, if there is an average."""
    denoiser.eval()
    if ema:
        ema.store(parameters)
        ema.copy_to(parameters)
    try:
        yield
    finally:
        if ema:
            ema.restore(parameters)
        denoiser.train()
