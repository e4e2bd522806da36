# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Another device, without one: tensors that say where they are, compute on the CPU, refuse to mix, and count."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from d3pm_hf import numerics


# The one device type that autograd and `Tensor.to` accept in every build of torch, and that nothing else here uses.
AWAY = torch.device("lazy", 0)
MOVES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
# What the host has to wait for: the device decides on a number or a shape.
aten = torch.ops.aten
WAITS = (
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.is_nonzero.default),
    *(aten.equal.default, aten._unique2.default, aten.unique_dim.default, aten.repeat_interleave.Tensor),
)
# What launches no kernel: it makes another view, or memory without content.
NO_KERNELS = ("detach", "alias", "lift_fresh", "_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided")


@dataclass
class Counts:
    """What a piece of code asks of a device.

    Fields:
        waits: How often the host waits for it: numbers that are read back, shapes that depend on values.
        copies: Copies of tensors from the host. On a GPU they wait too, unless the memory is pinned.
        kernels: Operations that compute something.
    """

    waits: int = 0
    copies: int = 0
    kernels: int = 0


_counts: list[Counts] = []
_has_float64 = True


@contextmanager
def without_float64():
    """A context in which the device has no float64, as MPS: the package knows it, and a tensor of that dtype is an error."""
    global _has_float64
    _has_float64 = False
    numerics.WITHOUT_FLOAT64.add(AWAY.type)
    try:
        yield
    finally:
        _has_float64 = True
        numerics.WITHOUT_FLOAT64.remove(AWAY.type)


@contextmanager
def counting():
    """A context that counts what is asked of the device; it gives the [`Counts`]."""
    counts = Counts()
    _counts.append(counts)
    try:
        yield counts
    finally:
        _counts.remove(counts)


def count(function, tensors: list, is_away: bool) -> None:
    """Counts one operation on `tensors`, which leaves its result on the device if `is_away`."""
    packet, away = function.overloadpacket.__name__, [a for a in tensors if isinstance(a, AwayTensor)]
    # An index by a mask looks for the elements that are true.
    by_mask = packet in ("index", "index_put", "index_put_") and any(a.dtype == torch.bool for a in away[1:])
    for counts in _counts:
        counts.waits += bool(away) and (function in WAITS or by_mask or not is_away)
        counts.copies += is_away and function in MOVES and len(away) < len(tensors)
        counts.kernels += is_away and not function.is_view and packet not in NO_KERNELS


class AwayTensor(torch.Tensor):
    """A tensor on the device AWAY; what it holds is on the CPU."""

    @staticmethod
    def __new__(cls, held):
        strides = held.stride() if held.layout == torch.strided else None
        return cls._make_wrapper_subclass(cls, held.size(), strides, dtype=held.dtype, device=AWAY)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run_on_cpu(function, args, kwargs or {})


class Away(TorchDispatchMode):
    """Makes `device=AWAY` work where no tensor argument says so: in `torch.arange`, `torch.rand`, `Tensor.to`."""

    def __enter__(self):
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(.., device=AWAY)` asks this mode too
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(False)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run_on_cpu(function, args, kwargs or {})


def run_on_cpu(function, args, kwargs):
    """What the function gives for the held tensors, where the function would have put it."""
    tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    away = [a for a in tensors if isinstance(a, AwayTensor)]
    at_home = [a for a in tensors if not isinstance(a, AwayTensor) and a.ndim]  # numbers may travel
    if away and at_home and function not in MOVES:
        raise RuntimeError(f"{function} got tensors on {AWAY} and on the CPU")
    device = kwargs.get("device")
    is_away = bool(away) if device is None else torch.device(device).type == AWAY.type
    kwargs = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}
    result = function(*tree_map(hold, args), **tree_map(hold, kwargs))
    count(function, tensors, is_away)
    if not is_away:
        return result
    known = {id(a.held): a for a in away}  # what is written in place comes back as the same object

    def send(value):
        if value.dtype == torch.float64 and not _has_float64:
            raise TypeError(f"{function} makes a tensor of float64, which {AWAY} does not have")
        return known[id(value)] if id(value) in known else AwayTensor(value)

    return tree_map(lambda value: send(value) if isinstance(value, torch.Tensor) else value, result)


def hold(value):
    return value.held if isinstance(value, AwayTensor) else value
