# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The network of a run and its random numbers, on the device of the run."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from ..utils.modules import move_module, tied_names


def place_network(network: torch.nn.Module, accelerator: Accelerator) -> None:
    """Moves the network to the device of the run, before an optimizer is created over its parameters.

    FSDP moves the parts of the network itself, after it has cut them.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        move_module(network, accelerator.device)


def seed_device(seed: int, device: torch.device) -> None:
    """Seeds the random numbers of `device` and of the CPU. `torch.manual_seed` does not reach XLA."""
    torch.manual_seed(seed)
    if device.type == "xla":
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(seed, str(device))


def register_weights(accelerator: Accelerator) -> None:
    """Lets Accelerate write tied weights once, without a warning, and read them on XLA too.

    There it cannot tell which weights are tied by the addresses of their memory.
    """
    accelerator.register_save_state_pre_hook(drop_tied_weights)
    if accelerator.device.type == "xla":
        accelerator.register_load_state_pre_hook(load_weights)


def drop_tied_weights(models: list[torch.nn.Module], weights: list[dict], folder: str) -> None:
    """Removes the names of tied weights from the states that are about to be written, except the first of each."""
    for model, state in zip(models, weights):
        for _, *others in tied_names(model):
            for name in others:
                del state[name]


def load_weights(models: list[torch.nn.Module], folder: str) -> None:
    """Loads the network of a checkpoint. It is taken off the list of those that Accelerate loads."""
    model = models.pop()
    state = load_file(Path(folder, "model.safetensors"))
    for first, *others in tied_names(model):
        state.update(dict.fromkeys(others, state[first]))
    model.load_state_dict(state)
