# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checks of arguments: each raises a `ValueError` that names the argument, its value, and what it must be.

torch is imported by the checks that look at tensors: command lines parse their arguments without it.
"""

import math
import numbers
import os
import reprlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    import torch

# Maximum number of characters of a foreign text in an error.
MAX_SHOWN = 300


def describe(value) -> str:
    """A value as an error shows it: tensors and arrays by dtype and shape, anything else shortened."""
    import torch

    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"a {type(value).__name__} of dtype {value.dtype} and shape {tuple(value.shape)}"
    return reprlib.repr(value)


def shorten(text: str) -> str:
    """The first characters of a text that an error shows, which may be of any length."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def values_are_known(tensor: "torch.Tensor") -> bool:
    """Whether the values of a tensor may be looked at: on a CPU, outside of `torch.compile`.

    Looking at them on an accelerator synchronizes with it, and breaks a compiled graph.
    """
    import torch

    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_type(name: str, value, types: Any, expected: str) -> None:
    """Checks that `value` is an instance of `types`, which an error calls `expected`."""
    if not isinstance(value, types):
        raise ValueError(f"{name} is {describe(value)}: it must be {expected}")


def check_int(name: str, value, low: int | None = None, high: int | None = None) -> None:
    """Checks that `value` is an integer in low .. high."""
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int or (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"{name} is {describe(value)}: it must be an integer{_range(low, high)}")


def is_number(value) -> bool:
    """Whether `value` is a real number that a float can hold; JSON has integers of any size."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def check_float(name: str, value, low: float | None = None, high: float | None = None) -> None:
    """Checks that `value` is a finite number in [low, high]."""
    is_finite = is_number(value) and math.isfinite(value)
    if not is_finite or (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"{name} is {describe(value)}: it must be a finite number{_range(low, high)}")


def check_positive(name: str, value) -> None:
    """Checks that `value` is a finite number above 0."""
    check_float(name, value)
    if value <= 0:
        raise ValueError(f"{name} is {value!r}: it must be above 0")


def check_choice(name: str, value, choices: Iterable[str]) -> None:
    """Checks that `value` is one of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {describe(value)}: it must be one of {', '.join(choices)}")


def check_str(name: str, value) -> None:
    """Checks that `value` is a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {describe(value)}: it must be a string that is not empty")


def check_path(name: str, value) -> None:
    """Checks that `value` names a file or a folder, whether it exists or not."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise ValueError(f"{name} is {describe(value)}: it must be a path")


def check_tensor(name: str, value, *shape: int | None) -> None:
    """Checks that `value` is a floating-point tensor of this shape; `None` stands for any size, no shape for any at all."""
    import torch

    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    fits = not shape or (
        is_float and value.ndim == len(shape) and all(size in (None, own) for size, own in zip(shape, value.shape))
    )
    if not is_float or not fits or not value.numel():
        sizes = f" of shape [{', '.join('n' if size is None else str(size) for size in shape)}]" if shape else ""
        raise ValueError(f"{name} is {describe(value)}: it must be a floating-point tensor{sizes} that is not empty")


def check_integers(name: str, value, axes: str) -> None:
    """Checks that `value` is a tensor of integers with the axes of a shape such as `"[B, N]"`."""
    import torch

    is_long = isinstance(value, torch.Tensor) and value.dtype == torch.long
    if not is_long or value.ndim != axes.count(",") + 1:
        raise ValueError(f"{name} is {describe(value)}: pass a `torch.LongTensor` of shape {axes}")


def check_device(name: str, value) -> None:
    """Checks that torch knows the device `value`."""
    import torch

    try:
        torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} is {describe(value)}: it must be a device of torch, such as 'cpu'") from error


def check_timestep(name: str, value) -> int:
    """Checks that `value` is an integer, or a tensor of one, and returns it."""
    import torch

    is_one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point()
    if not is_one and (not isinstance(value, numbers.Integral) or isinstance(value, bool)):
        raise ValueError(f"{name} is {describe(value)}: it must be one integer")
    return int(value)


def check_dataset(name: str, value) -> None:
    """Checks that `value` is a sequence of integer tensors or of dictionaries, by its first item."""
    import torch

    is_sequence = hasattr(value, "__len__") and hasattr(value, "__getitem__") and len(value) > 0
    first = value[0] if is_sequence else None
    if isinstance(first, Mapping):
        return
    if not isinstance(first, torch.Tensor) or first.is_floating_point() or not first.ndim:
        items = f", whose first item is {describe(first)}" if is_sequence else ""
        raise ValueError(
            f"{name} is {describe(value)}{items}: it must be a data set that is not empty, with items of integer states "
            "(`torch.LongTensor`)"
        )


def check_distributions(name: str, rows: "torch.Tensor") -> None:
    """Checks that `rows`, `[..., K]`, are probability distributions."""
    if not ((rows >= 0).all() and ((rows.double().sum(-1) - 1).abs() <= 1e-5).all()):
        raise ValueError(
            f"{name} has the minimum {rows.min().item():.4g} and a sum of {rows.double().sum(-1).max().item():.4g}: every "
            "row must be a probability distribution"
        )


def _range(low, high) -> str:
    if low is not None and high is not None:
        return f" in {low} .. {high}"
    return f" of at least {low}" if low is not None else f" of at most {high}" if high is not None else ""
