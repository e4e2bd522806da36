# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What a run does differently on some devices, above all on XLA (TPU), where operations are recorded and run as one graph."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..utils.modules import move_module


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


def finish_step(device: torch.device) -> None:
    """Runs the operations that XLA has recorded as one graph. A number that is read before would run parts of it twice."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()
