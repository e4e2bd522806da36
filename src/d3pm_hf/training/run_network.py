# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The network of a run: its random numbers, its unused and its tied weights, and its weights sharded by FSDP2 and whole again.

The modules of torch that are specific to sharding are imported where they are used: they need torch 2.6.
"""

from collections.abc import Collection
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, send_to_device
from safetensors.torch import load_file

from ..data.batches import condition_of
from ..models.denoisers import Denoiser
from ..utils.modules import tied_names, with_tensors
from .distributed import run_on_main


if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


logger = get_logger(__name__)


def check_distribution(accelerator: Accelerator) -> None:
    """Checks that the weights are replicated, or sharded by FSDP2. Others would be averaged and saved wrongly."""
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("fsdp_version is 1: set `fsdp_version: 2` in the configuration of Accelerate")
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(f"distributed_type is {kind.value}: use FSDP with `fsdp_version: 2` to shard the weights")


def check_ties(network: torch.nn.Module, groups: list[list[str]]) -> None:
    """Checks that `accelerator.prepare` has kept the tied weights of a network, `groups` of [`tied_names`], tied.

    Accelerate ties them by `tie_weights` if it distributes the weights of the first process. Others are not trained.
    """
    names = {canonical_name(name) for group in tied_names(network) for name in group}
    lost = [group for group in groups if not names.issuperset(group)]
    if lost:
        raise ValueError(
            f"Accelerate has untied the weights {' and '.join(lost[0])}: set `fsdp_cpu_ram_efficient_loading: false` in its "
            "configuration, or define `tie_weights` in the denoiser"
        )


def is_sharded(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is a `DTensor`, of which each process holds a part."""
    return hasattr(tensor, "full_tensor")


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor as a whole one on the CPU, for which all processes must call; another tensor as it is."""
    return tensor.full_tensor().cpu() if is_sharded(tensor) else tensor


def shard_like(whole: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """A whole tensor on the device of `example`, and sharded as `example` is."""
    whole = whole.to(example.device)
    if not is_sharded(example):
        return whole
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole tensor, and takes its own part of it.
    return distribute_tensor(whole, example.device_mesh, example.placements, src_data_rank=None)


def reshard(network: torch.nn.Module, parameters: list) -> None:
    """Makes a sharded network gather its weights again, after their shards have changed.

    FSDP2 keeps the gathered weights of the outermost group between calls. Without this, the network would go on with
    the weights from before the change.
    """
    if not any(map(is_sharded, parameters)):
        return
    from torch.distributed.fsdp import FSDPModule

    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def canonical_name(name: str) -> str:
    """The name of a parameter or buffer without the parts that `fsdp_activation_checkpointing` adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


def repeat_dropout(network: torch.nn.Module) -> None:
    """Makes layers under `fsdp_activation_checkpointing` draw the same dropout when they are computed again.

    Accelerate does not keep the state of the random numbers, and the gradients would be those of another dropout.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    for module in network.modules():
        if isinstance(module, CheckpointWrapper):
            module.checkpoint_fn = partial(module.checkpoint_fn, preserve_rng_state=True)


def whole_network(sharded: torch.nn.Module, empty: torch.nn.Module) -> torch.nn.Module:
    """A network on the CPU with all weights of a sharded one, and the modules of its `empty` copy. All processes must call."""
    held = chain(sharded.named_parameters(), sharded.named_buffers())
    tensors = {canonical_name(name): whole_tensor(tensor.detach()).cpu() for name, tensor in held}
    return with_tensors(empty, tensors).eval()


def freeze_unused(
    accelerator: Accelerator, denoiser: Denoiser, batch: dict, is_dropped: bool
) -> list[torch.nn.Parameter]:
    """Freezes the weights that get no gradient from a batch, such as a head that is never called, and returns them.

    DDP would wait for their gradients, and FSDP2 would look for them in the state of the optimizer. A run on one process does
    neither, and nothing is frozen. If the run leaves out conditions (`is_dropped`), the weights in `drop_condition` are used.
    """
    is_needed = accelerator.num_processes > 1 or accelerator.is_fsdp2
    if not is_needed or accelerator.distributed_type == DistributedType.XLA:
        return []
    # Only the main process has the weights if it is to distribute them.
    batch = dict(send_to_device(batch, denoiser.device))
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


def drop_weights(
    models: list[torch.nn.Module], weights: list[dict], folder: str, frozen: Collection[str] = ()
) -> None:
    """Removes tied weights, except the first of each, and `frozen` ones from the states that are about to be written.

    Accelerate would remove tied ones too, with a warning.
    """
    for model, state in zip(models, weights):
        names = [name for name in state if name.removeprefix("module.") in frozen]
        for name in {*names, *(name for _, *others in tied_names(model) for name in others)}:
            del state[name]


def load_weights(models: list[torch.nn.Module], folder: str, frozen: Collection[str] = ()) -> None:
    """Loads the network of a checkpoint in place of Accelerate, but for the `frozen` weights, which it does not hold.

    Accelerate expects all weights, and cannot tell on XLA which of them are tied.
    """
    if not models:  # FSDP2 has loaded it
        return
    model = models.pop()
    state = load_file(Path(folder, "model.safetensors"))
    for first, *others in tied_names(model):
        if first in state:
            state.update(dict.fromkeys(others, state[first]))
    missing, unexpected = model.load_state_dict(state, strict=False)
    for name in [*(name for name in missing if name.removeprefix("module.") not in frozen), *unexpected]:
        raise KeyError(name)
