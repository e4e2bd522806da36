# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The exponential moving average of the weights (EMA)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers.training_utils import EMAModel

from .run_network import reshard, shard_like, whole_tensor


class AveragedWeights(EMAModel):
    """The `EMAModel` of diffusers for weights that may be sharded over the processes.

    It is updated in one pass over the weights, where that of diffusers copies all weights first.
    """

    shadow_params: list[torch.Tensor]

    @torch.no_grad()
    def step(self, parameters: list) -> None:
        """Updates the average by the present weights."""
        self.optimization_step += 1
        self.cur_decay_value = self.get_decay(self.optimization_step)
        torch._foreach_lerp_(self.shadow_params, parameters, 1 - self.cur_decay_value)

    @torch.no_grad()
    def swap(self, parameters: list) -> None:
        """Exchanges the weights and their average on their device. A second call exchanges them back."""
        for average, parameter in zip(self.shadow_params, parameters):
            held = parameter.clone()
            parameter.copy_(average)
            average.copy_(held)

    def state_dict(self) -> dict:
        """The state with whole tensors, which does not depend on the number of processes. All of them must call."""
        return {**super().state_dict(), "shadow_params": [whole_tensor(average) for average in self.shadow_params]}

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads whole tensors, of which each process keeps its shards."""
        present = self.shadow_params
        super().load_state_dict(state_dict)
        shapes, expected = (
            [tuple(average.shape) for average in averages] for averages in (self.shadow_params, present)
        )
        if shapes != expected:
            raise ValueError(
                f"the average of the weights has the shapes {shapes}, and the network {expected}: it was saved by a "
                "process that had a part of it, or for another network"
            )
        self.shadow_params = [shard_like(average, old) for average, old in zip(self.shadow_params, present)]


@contextmanager
def averaged_weights(ema: AveragedWeights | None, parameters: list, denoiser: torch.nn.Module) -> Iterator[None]:
    """A context in which the network is in eval mode and has its averaged weights, if there is an average."""
    denoiser.eval()
    if ema:
        ema.swap(parameters)
        reshard(denoiser, parameters)
    try:
        yield
    finally:
        if ema:
            ema.swap(parameters)
            reshard(denoiser, parameters)
        denoiser.train()
