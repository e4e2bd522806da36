# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Batches of a data set in a fixed order, for evaluation."""

from collections.abc import Callable, Iterator

import torch
from accelerate.utils import send_to_device
from torch.utils.data import default_collate


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
