# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Modules on devices: moved and copied with their tied weights, and the graphs of XLA (TPU)."""

import copy
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch


def tied_names(module: torch.nn.Module) -> list[list[str]]:
    """The names of each parameter that has more than one, such as those of word embeddings and output layer."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(module: torch.nn.Module, groups: list[list[str]]) -> None:
    """Makes the parameters of each group of [`tied_names`] one again: the first of them."""
    for first, *others in groups:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, parameter)


def move_module(module: torch.nn.Module, device: torch.device | str) -> None:
    """Moves a module to a device, and keeps its tied weights tied.

    `Module.to` makes a new parameter for each name where the tensors of the device are of another kind, as on XLA. An
    optimizer must be created after the move.
    """
    groups = tied_names(module)
    module.to(device)
    tie(module, groups)


def copy_module(module: torch.nn.Module, device: str = "cpu") -> torch.nn.Module:
    """A copy of a module on a device, with its tied weights tied. The module stays where it is."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    return with_tensors(module, {name: tensor.detach().to(device) for name, tensor in tensors})


def with_tensors(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A copy of a module with other parameters and buffers, by name. Its tied weights stay tied."""
    copies: dict[int, torch.Tensor] = {}  # what `deepcopy` takes for the tensors
    for name, parameter in module.named_parameters():
        copies[id(parameter)] = torch.nn.Parameter(tensors[name], parameter.requires_grad)
    for name, buffer in module.named_buffers():
        copies[id(buffer)] = tensors[name]
    return copy.deepcopy(module, copies)


def without_compilation(module: Any) -> Any:
    """The module that `torch.compile` was given, or the module itself."""
    return getattr(module, "_orig_mod", module)


def num_output_rows(model: Any) -> int:
    """Number of logits that a language model of transformers has for each token."""
    head = model.get_output_embeddings()
    if head is not None and getattr(head, "weight", None) is not None:
        return len(head.weight)
    return model.config.vocab_size


def finish_graph(device: torch.device) -> None:
    """Runs the operations that XLA has recorded since the last call, as one graph. Does nothing on other devices.

    Called after each step of a loop, the graph is the same each time and is compiled once. A number that is read without it
    would run parts of the graph twice.
    """
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()
