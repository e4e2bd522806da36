# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The loss of a batch: at one timestep per example, or of all timesteps in one pass over the data."""

from collections.abc import Callable

import torch

from ..losses.variational import autoregressive_loss, d3pm_loss
from ..schedulers import D3PMScheduler
from .arguments import D3PMTrainingArguments
from .batches import noise_generators


# The loss to minimize, its part L_vb, and its cross-entropy: averages over the batch, in nats per element.
Losses = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def diffusion_loss(scheduler: D3PMScheduler, model: Callable, batch: dict, arguments: D3PMTrainingArguments) -> Losses:
    """L_vb or L_lambda (eq. 5 of the paper) at one timestep per example.

    Args:
        batch: x_0 `[B, ...]`, timesteps `[B]`, and the seeds of the noise, a list of B integers.
    """
    x_0, timesteps = batch["x_0"], batch["timestep"]
    x_t = scheduler.add_noise(x_0, timesteps, noise_generators(batch["seed"]))
    output = d3pm_loss(
        scheduler,
        model(x_t, timesteps),
        x_0,
        x_t,
        timesteps,
        hybrid_coeff=0.0 if arguments.loss == "vb" else arguments.hybrid_coeff,
        auxiliary="denoising" if arguments.loss == "hybrid_denoising" else "raw",
    )
    vb = output.vb.mean()
    return output.loss.mean(), vb, vb if output.cross_entropy is None else output.cross_entropy.mean()


def one_pass_loss(scheduler: D3PMScheduler, model: Callable, batch: dict, arguments: D3PMTrainingArguments) -> Losses:
    """The cross-entropy of a causal network on x_0 `[B, N]`, which is the sum of the terms of all timesteps.

    L_vb is divided by T, as the term of one timestep would be, so that the log estimates the bound in the same way.
    """
    x_0 = batch["x_0"]
    loss = autoregressive_loss(scheduler, model(x_0, batch["timestep"]), x_0).mean()
    return loss, loss / len(scheduler), loss
