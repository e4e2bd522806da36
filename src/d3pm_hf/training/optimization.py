# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The optimizer of a run, the schedule of its learning rate, and the exponential moving average of the weights (EMA)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from diffusers.training_utils import EMAModel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import get_scheduler

from ..utils.checks import check_type
from .run_network import reshard, shard_like, whole_tensor
from .training_args import D3PMTrainingArguments


def create_optimizer(
    arguments: D3PMTrainingArguments, given: torch.optim.Optimizer | Callable | None, network: torch.nn.Module
) -> torch.optim.Optimizer:
    """AdamW with the settings of the run; or the optimizer that the caller has given, or that a function of the weights makes."""
    parameters = list(network.parameters())
    if given is None:
        return torch.optim.AdamW(
            parameters,
            lr=arguments.learning_rate,
            betas=(arguments.adam_beta1, arguments.adam_beta2),
            weight_decay=arguments.adam_weight_decay,
            eps=arguments.adam_epsilon,
            fused=parameters[0].device.type != "xla",  # several times as fast on a CPU
        )
    optimizer = given
    if not isinstance(optimizer, torch.optim.Optimizer):
        expected = "a `torch.optim.Optimizer`, or a function of the weights that makes one"
        check_type("optimizer", optimizer, Callable, expected)
        optimizer = optimizer([parameter for parameter in parameters if parameter.requires_grad])
        check_type("optimizer(parameters)", optimizer, torch.optim.Optimizer, "a `torch.optim.Optimizer`")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not held or not held <= set(map(id, parameters)):
        raise ValueError(
            "optimizer holds weights that are not those of the network: make it of `pipeline.denoiser.parameters()`, or pass a "
            "function such as `lambda parameters: torch.optim.SGD(parameters, lr=0.1)`"
        )
    return optimizer


def create_lr_scheduler(
    arguments: D3PMTrainingArguments, given: LRScheduler | Callable | None, optimizer: torch.optim.Optimizer
) -> LRScheduler:
    """The schedule that the run names; or the one that the caller has given, or that a function of the optimizer makes."""
    if given is None:
        name, num_warmup_steps = arguments.lr_scheduler, arguments.lr_warmup_steps
        return get_scheduler(name, optimizer, num_warmup_steps, arguments.max_train_steps)
    lr_scheduler = given
    if not isinstance(lr_scheduler, LRScheduler):
        expected = "a schedule of torch, or a function of the optimizer that makes one"
        check_type("lr_scheduler", lr_scheduler, Callable, expected)
        lr_scheduler = lr_scheduler(optimizer)
        check_type("lr_scheduler(optimizer)", lr_scheduler, LRScheduler, "a schedule of torch")
    if isinstance(lr_scheduler, ReduceLROnPlateau):
        raise ValueError("lr_scheduler is a ReduceLROnPlateau, which steps by a metric: pass one that steps by itself")
    if lr_scheduler.optimizer is not optimizer:
        raise ValueError(
            "lr_scheduler belongs to another optimizer: pass that optimizer too, or a function of the optimizer"
        )
    return lr_scheduler


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
