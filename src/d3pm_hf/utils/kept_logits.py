# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Networks that can be asked for the logits of some elements only, by the argument `logits_to_keep`."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .modules import without_compilation


# Up to this many states, the output layer of a network costs less than the choice of its rows.
FEW_STATES = 256


def accepted_names(model: Any) -> tuple[str, ...]:
    """The names of the arguments of a network or a function, also of a network that is wrapped for several processes."""
    while isinstance(model, torch.nn.Module) and isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of built-in functions
        return ()


def is_asked_for_rows(model: Any, num_classes: int, device: torch.device) -> bool:
    """Whether a network is asked for the logits of some elements only.

    It is if it takes `logits_to_keep` and has many states, but not on XLA, nor if it is compiled: the shape of its output would be
    another one in each call.
    """
    if num_classes <= FEW_STATES or device.type == "xla" or torch.compiler.is_compiling():
        return False
    modules = model, getattr(model, "network", model)
    is_compiled = any(without_compilation(module) is not module for module in modules)
    return not is_compiled and "logits_to_keep" in accepted_names(model)


def predict_rows(
    model: Callable, x_t: torch.Tensor, timestep, condition: dict, index: torch.Tensor | None, num_classes: int
) -> torch.Tensor:
    """The output `[n, K]` of a network at the elements `index` `[n]` of x_t, which are flattened, or at all, `[B, ..., K]`.

    A network that cannot be asked for some is asked for all, and some are taken.
    """
    if index is None:
        return model(x_t, timestep, **condition)
    if is_asked_for_rows(model, num_classes, x_t.device):
        return model(x_t, timestep, logits_to_keep=index, **condition)
    return model(x_t, timestep, **condition).flatten(0, -2)[index]
