# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Examples and batches: the columns that they may have, and batches of a data set in a fixed order, for evaluation."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch.utils.data import default_collate

from ..utils.checks import check_int, check_type, describe


# What transformers calls a label that does not count.
IGNORED = -100
MASKS = ("attention_mask", "loss_mask")


def evaluation_batches(
    dataset,
    batch_size: int,
    max_examples: int | None = None,
    device: torch.device | str = "cpu",
    collate: Callable[[list], dict | torch.Tensor] = default_collate,
) -> Iterator[dict | torch.Tensor]:
    """Batches of examples, in the order of the data set.

    Args:
        dataset: `dataset[index]` is an example, without augmentation.
        batch_size (`int`): Number of examples in a batch; the last batch may have fewer.
        max_examples (`int`, *optional*): Number of examples, spread evenly over the data set. Defaults to all of them.
        device (`torch.device` or `str`, defaults to `"cpu"`): Device of the batches.
        collate (`Callable`, *optional*): Makes a batch of a list of examples. By default tensors x_0 are stacked.
    """
    size = len(dataset)
    count = size if max_examples is None else min(max_examples, size)
    indices = [i * size // count for i in range(count)]
    for first in range(0, count, batch_size):
        yield send_to_device(collate([dataset[i] for i in indices[first : first + batch_size]]), device)


def read_example(example, label_column: str | None = None) -> dict:
    """An example as tensors: `x_0`, and `loss_mask`, `attention_mask` and `condition` if it has them."""
    if not isinstance(example, Mapping):
        if label_column is not None:
            raise ValueError(
                f"label_column is {label_column!r}, and an example is {describe(example)}: pass dictionaries with 'x_0' and "
                f"{label_column!r}, the class"
            )
        return {"x_0": _as_states("an example", example)}
    name = _data_column(example, "an example")
    tensors = {key: _as_states(key, example[key]) for key in (name, *MASKS, "labels") if key in example}
    row: dict = {"x_0": tensors[name], **_read_masks(tensors, name)}
    condition = dict(example.get("condition") or {})
    if label_column is not None:
        if label_column not in example:
            raise ValueError(
                f"label_column is {label_column!r}, and an example has the columns {', '.join(map(repr, example))}: name the "
                "column of the class"
            )
        check_int(f"the class in column {label_column!r}", example[label_column], 0)
        condition["class_labels"] = int(example[label_column])
    if condition:
        row["condition"] = {name: torch.as_tensor(value) for name, value in condition.items()}
    return row


def read_batch(batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """x_0 and the mask of the elements that are scored, both `[B, ...]`, and the condition, all on one device.

    Args:
        batch: x_0, a pair of x_0 and the mask, or a dictionary of columns. Columns that are not known are not read, nor are
            `labels` of another shape than x_0, which are classes.
    """
    columns: Mapping = {"x_0": batch}
    if isinstance(batch, Mapping):
        columns = batch
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        columns = dict(zip(("x_0", "loss_mask"), batch))
    name = _data_column(columns, "a batch")
    x_0, condition = columns[name], columns.get("condition") or {}
    if not isinstance(x_0, torch.Tensor):
        raise ValueError(
            f"a batch is a {type(batch).__name__} with no tensor of states: pass a tensor x_0, a dictionary with the column "
            "'x_0' or 'input_ids' (and 'loss_mask'), or a pair (x_0, loss_mask)"
        )
    check_type("condition", condition, Mapping, "a dictionary of tensors, by the names of arguments of the model")
    for key, value in condition.items():
        if not isinstance(value, torch.Tensor) or not value.ndim or len(value) != len(x_0):
            raise ValueError(
                f"condition[{key!r}] is {describe(value)}: pass a tensor with one row per example, {len(x_0)} here"
            )
    tensors = {key: columns[key] for key in (*MASKS, "labels") if columns.get(key) is not None}
    if getattr(tensors.get("labels"), "shape", None) != x_0.shape:
        tensors.pop("labels", None)
    masks = {key: mask.to(x_0.device) for key, mask in _read_masks({name: x_0, **tensors}, name).items()}
    condition = {key: value.to(x_0.device) for key, value in condition.items()}
    scored = masks.get("loss_mask", torch.ones_like(x_0, dtype=torch.bool))
    if "attention_mask" in masks:
        scored = scored & masks["attention_mask"].bool()
        condition["attention_mask"] = masks["attention_mask"]
    return x_0, scored, condition


def condition_of(batch: Mapping) -> dict[str, torch.Tensor]:
    """The arguments of the denoiser besides x_t and the timestep in a batch of a collator."""
    condition = dict(batch.get("condition") or {})
    return condition if "attention_mask" not in batch else {**condition, "attention_mask": batch["attention_mask"]}


def _data_column(columns: Mapping, what: str) -> str:
    """The name of the column of x_0."""
    names = [name for name in ("x_0", "input_ids") if name in columns]
    if len(names) != 1:
        raise ValueError(
            f"{what} has the columns {', '.join(map(repr, columns))}: it needs the data in one column named 'x_0' or "
            "'input_ids'; `d3pm_hf.data.tokenize` makes it out of text"
        )
    return names[0]


def _as_states(name: str, value) -> torch.Tensor:
    """Integers as a tensor; booleans stay booleans."""
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {describe(value)}: pass a list or a tensor of integers") from error
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.ndim or not tensor.numel():
        raise ValueError(f"{name} is {describe(value)}: pass a list or a tensor of integers that is not empty")
    return tensor if tensor.dtype == torch.bool else tensor.long()


def _read_masks(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """`attention_mask` as it is and `loss_mask` as booleans, if they are among the columns; -100 in `labels` is not scored."""
    x_0 = tensors[name]
    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor) or value.shape != x_0.shape:
            found = (
                f"has the shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is {describe(value)}"
            )
            raise ValueError(
                f"{key} {found}, and {name} {tuple(x_0.shape)}: pass one value per element; classes are a column with a name of "
                "their own"
            )
    masks = {key: tensors[key] for key in MASKS if key in tensors}
    for key, mask in masks.items():
        wrong = mask[mask.bool() != mask]
        if wrong.numel():
            raise ValueError(
                f"{key} holds {wrong[0].item()}: pass booleans, or 1 where an element counts and 0 elsewhere; classes are a "
                "column with a name of their own"
            )
    if "labels" in tensors:
        scored = tensors["labels"] != IGNORED
        if (tensors["labels"] != x_0)[scored].any():
            raise ValueError(
                f"labels differ from {name} where they are not {IGNORED}: pass the data themselves in both, as the noise is "
                "added later, or leave labels out"
            )
        masks.setdefault("loss_mask", scored)
    if "loss_mask" in masks:
        masks["loss_mask"] = masks["loss_mask"].bool()
    return masks
