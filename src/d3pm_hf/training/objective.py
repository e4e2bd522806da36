# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The loss of a batch: at one timestep per example, or of all timesteps in one pass over the data."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
from accelerate import Accelerator

from ..data.batches import condition_of
from ..losses.network import network_loss
from ..losses.variational import autoregressive_loss
from ..schedulers import D3PMScheduler
from ..transitions.base import expand_time
from .training_args import D3PMTrainingArguments


# The loss to minimize, its part L_vb, and its cross-entropy: averages over the batch, in nats per element.
Losses = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def diffusion_loss(scheduler: D3PMScheduler, model: Callable, batch: dict, arguments: D3PMTrainingArguments) -> Losses:
    """L_vb or L_lambda (eq. 5 of the paper) at one timestep per example.

    The loss is that of the timesteps as they were drawn. The part L_vb, for the log, is weighted to be that of uniform ones.
    The batch is one of [`~step_batches.RunCollator`].
    """
    x_0, timesteps, scored = batch["x_0"], batch["timestep"], batch.get("loss_mask")
    x_t = scheduler.add_noise(x_0, timesteps, noise_generators(batch["seed"]))
    if scored is not None:
        x_t = torch.where(scored, x_t, x_0)  # the rest is known
    output = network_loss(
        scheduler,
        model,
        x_0,
        x_t,
        timesteps,
        condition_of(batch),
        hybrid_coeff=0.0 if arguments.loss == "vb" else arguments.hybrid_coeff,
        auxiliary=arguments.auxiliary,
        loss_mask=scored,
    )
    vb, cross_entropy = output.vb, output.vb if output.cross_entropy is None else output.cross_entropy
    weights = arguments.timestep_law.weights(timesteps, len(scheduler))
    if weights is not None:
        weights = expand_time(weights, vb)
        vb, cross_entropy = vb * weights, cross_entropy * weights
    return average(output.loss, batch), average(vb, batch), average(cross_entropy, batch)


def one_pass_loss(scheduler: D3PMScheduler, model: Callable, batch: dict, arguments: D3PMTrainingArguments) -> Losses:
    """The cross-entropy of a causal network on x_0 `[B, N]`, which is the sum of the terms of all timesteps.

    L_vb is divided by T, as the term of one timestep would be, so that the log estimates the bound in the same way.
    """
    x_0 = batch["x_0"]
    output = model(x_0, batch["timestep"], **condition_of(batch))
    loss = average(autoregressive_loss(scheduler, output, x_0, loss_mask=batch.get("loss_mask")), batch)
    return loss, loss / len(scheduler), loss


def average(values: torch.Tensor, batch: dict) -> torch.Tensor:
    """The mean over the scored elements of the step: of this batch, in units of the average batch of the step."""
    return values.sum() / batch["num_scored"] if "num_scored" in batch else values.mean()


def count_scored(
    batches: Iterable[dict], accelerator: Accelerator, batches_per_step: int, drop_condition: Callable | None = None
) -> Iterator[dict]:
    """The batches, with the number of scored elements of an average batch of their step as `num_scored`.

    The mean of the losses of all batches of a step, of all processes, is then the mean over the scored elements of the step.
    Any of the batches may have a loss mask. One without it scores everything. The rows of `is_dropped` lose their condition by
    `drop_condition`. All processes must iterate together.
    """
    batches = iter(batches)
    while step := list(islice(batches, batches_per_step)):
        counts = [batch["loss_mask"].sum() if "loss_mask" in batch else batch["x_0"].numel() for batch in step]
        count = sum(counts) / len(step)  # a number, or a tensor on the device of the masks
        if accelerator.num_processes > 1:
            count = torch.as_tensor(count, dtype=torch.float32, device=accelerator.device)
            count = accelerator.reduce(count, reduction="mean")
        for batch in step:
            batch = {**batch, "num_scored": count}
            if "is_dropped" in batch and "condition" in batch and drop_condition is not None:
                batch["condition"] = drop_condition(batch["condition"], batch["is_dropped"])
            yield batch


def noise_generators(seeds: list[int]) -> list[torch.Generator]:
    """One generator per example, on the CPU, so that the noise is the same on every device."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]
