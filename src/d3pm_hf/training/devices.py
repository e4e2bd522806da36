# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The network of a run and its random numbers, on the device of the run."""

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, send_to_device
from safetensors.torch import load_file

from ..models.denoisers import Denoiser
from ..utils.modules import move_module, tied_names
from .objective import condition_of
from .processes import run_on_main


logger = get_logger(__name__)


def place_network(network: torch.nn.Module, accelerator: Accelerator) -> None:
    """Moves the network to the device of the run, before an optimizer is created over its parameters.

    FSDP moves the parts of the network itself, after it has cut them.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        move_module(network, accelerator.device)


def freeze_unused(
    accelerator: Accelerator, denoiser: Denoiser, first_batch: Callable[[], dict], is_dropped: bool
) -> list[torch.nn.Parameter]:
    """Freezes the weights that get no gradient from a batch, such as a head that is never called, and returns them.

    DDP would wait for their gradients, and FSDP2 would look for them in the state of the optimizer. A run on one process does
    neither, and nothing is frozen.

    Args:
        accelerator: The processes, which must call together.
        denoiser: The network, before `accelerator.prepare`. It is in training mode afterwards.
        first_batch: Makes the batch.
        is_dropped: Whether the run leaves out conditions, so that the weights in `drop_condition` are used.
    """
    is_needed = accelerator.num_processes > 1 or accelerator.is_fsdp2
    if not is_needed or accelerator.distributed_type == DistributedType.XLA:
        return []
    # Only the main process has the weights if it is to distribute them.
    batch = send_to_device(first_batch(), denoiser.device)
    if is_dropped and batch.get("condition"):
        rows = torch.zeros(len(batch["x_0"]), dtype=torch.bool, device=denoiser.device)
        batch["condition"] = denoiser.drop_condition(batch["condition"], rows)
    names = run_on_main(accelerator, lambda: unused_names(denoiser, batch["x_0"], condition_of(batch)))
    if names:
        logger.warning(f"the loss does not depend on these weights, which are not trained: {', '.join(names)}")
    frozen = [denoiser.get_parameter(name) for name in names]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return frozen


def unused_names(denoiser: Denoiser, x_0: torch.Tensor, condition: dict) -> list[str]:
    """The names of the weights that get no gradient, neither in training mode nor in evaluation mode.

    Random numbers and buffers stay as they are. The denoiser is in training mode afterwards.
    """
    timesteps = torch.zeros(len(x_0), dtype=torch.long, device=x_0.device)
    buffers = [buffer.clone() for buffer in denoiser.buffers()]
    with torch.random.fork_rng([x_0.device] if x_0.is_cuda else []):
        outputs = [denoiser.train(mode)(x_0, timesteps, **condition) for mode in (True, False)]
    sum(output.float().sum() for output in outputs).backward()
    denoiser.train()
    names = [name for name, value in denoiser.named_parameters() if value.requires_grad and value.grad is None]
    denoiser.zero_grad(set_to_none=True)
    for buffer, value in zip(denoiser.buffers(), buffers):
        buffer.copy_(value)
    return names


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
