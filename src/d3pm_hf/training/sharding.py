# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Networks whose weights are sharded over the processes by FSDP2, and their way back to whole ones.

The modules of torch that are specific to sharding are imported where they are used: they need torch 2.6.
"""

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..utils.modules import tied_names


if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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


def check_layout(accelerator: Accelerator, folder: Path) -> None:
    """Checks that a checkpoint has its weights in the files in which this run would save them."""
    names = {"pytorch_model_fsdp_0": "SHARDED_STATE_DICT", "pytorch_model_fsdp.bin": "FULL_STATE_DICT"}
    saved = next((layout for name, layout in names.items() if (folder / name).exists()), None)
    layout = accelerator.state.fsdp_plugin.state_dict_type.name if accelerator.is_fsdp2 else None
    if saved != layout:
        saved, layout = (
            f"sharded by FSDP2 with fsdp_state_dict_type {kind}" if kind else "replicated" for kind in (saved, layout)
        )
        raise ValueError(
            f"the weights of {folder} are {saved}, and those of this run {layout}: resume with the configuration of "
            "Accelerate that the checkpoint was saved with"
        )


@contextmanager
def plain_errors() -> Iterator[None]:
    """A context in which an error in a sharded checkpoint is an `OSError` or a `RuntimeError`, on all processes.

    torch raises a `CheckpointException`, which is no `Exception`, with the error of each process that has failed.
    """
    if not torch.distributed.is_available():
        yield
        return
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        kind: type[Exception] = OSError if isinstance(cause, OSError) else RuntimeError
        if isinstance(cause, AssertionError):  # torch asserts that the file with the metadata is there
            kind = FileNotFoundError
        raise kind(str(cause) or repr(cause)) from error


# The classes and functions that the metadata of shards name. None of them does anything but hold what it is called with.
METADATA_NAMES = {
    "pathlib": ("PosixPath", "WindowsPath"),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.serialization": ("_get_layout",),
}


class MetadataPart:
    """Stands for an object in the metadata of shards. It has its attributes, and no methods."""

    def __new__(cls, *arguments):
        return object.__new__(cls)

    def __init__(self, *arguments):
        pass

    def __setstate__(self, state) -> None:
        if not isinstance(state, dict) and type(self).__name__ != "TensorProperties":
            raise pickle.UnpicklingError(f"the metadata of shards give a {type(self).__name__} the state {state!r}")
        self.__dict__.update(state if isinstance(state, dict) else {})


class MetadataUnpickler(pickle.Unpickler):
    """Reads the metadata of shards, a pickle, and calls nothing that it names."""

    def find_class(self, module: str, name: str) -> type[MetadataPart]:
        if name not in METADATA_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"the metadata of shards name {module}.{name}")
        return type(name, (MetadataPart,), {})


def find_damaged_shard(folder: Path) -> str | None:
    """The name of a damaged file of a sharded checkpoint, if there is one.

    The file is missing, is shorter than its metadata say, or holds more than tensors and numbers. torch reads the metadata,
    and what is no tensor, as pickles, which could run code: it may read the shards only if this returns `None`.
    """
    for path in sorted(folder.rglob("*.metadata")):
        try:
            with path.open("rb") as file:
                metadata = MetadataUnpickler(file).load()
            for index, part in metadata.storage_data.items():
                shard, kind = path.with_name(part.relative_path), metadata.state_dict_metadata[index.fqn]
                is_cut = not shard.exists() or shard.stat().st_size < part.offset + part.length
                is_tensor = type(kind).__name__ == "TensorStorageMetadata"
                if is_cut or not is_tensor and not is_plain(shard, part.offset, part.length):
                    return shard.name
                if getattr(part, "transform_descriptors", None):  # torch would not read what was looked at
                    return path.name
        except (pickle.UnpicklingError, EOFError, ImportError, LookupError, AttributeError, TypeError, ValueError):
            return path.name
    return None


def is_plain(path: Path, offset: int, length: int) -> bool:
    """Whether a part of a file is an object of `torch.save` that `weights_only=True` can read."""
    with path.open("rb") as file:
        file.seek(offset)
        content = io.BytesIO(file.read(max(length, 0)))
    try:
        torch.load(content, weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError):
        return False
    return True


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

    Args:
        network: The network.
        parameters: Its parameters, as they were after `accelerator.prepare`.
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


def with_parameters(network: torch.nn.Module, parameters: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A copy of a network with other parameters, by name. Parameters that are shared between modules stay so."""
    memo = {
        id(parameter): torch.nn.Parameter(parameters[name], requires_grad=parameter.requires_grad)
        for name, parameter in network.named_parameters()
    }
    return copy.deepcopy(network, memo)


def without_weights(network: torch.nn.Module) -> torch.nn.Module:
    """A copy of a network whose parameters take no memory, from which [`whole_network`] makes a whole one."""
    empty = {name: torch.empty_like(value, device="meta") for name, value in network.named_parameters()}
    return with_parameters(network, empty)


def whole_network(sharded: torch.nn.Module, empty: torch.nn.Module) -> torch.nn.Module:
    """A network on the CPU with all weights of a sharded one, for which all processes must call.

    Args:
        sharded: The network, after [`reshard`].
        empty: The same network [`without_weights`], from before it was sharded.
    """
    parameters = {canonical_name(name): whole_tensor(value.detach()) for name, value in sharded.named_parameters()}
    whole = with_parameters(empty, parameters)
    for name, value in sharded.named_buffers():
        whole.get_buffer(canonical_name(name)).copy_(value)
    return whole.cpu().eval()
