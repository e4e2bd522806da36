# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Fingerprints of the training data and of the tensors of the scheduler, by which a resumed run knows them again."""

import hashlib
from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
import torch

from .streams import is_stream


NUM_EXAMPLES = 64
MASKS = ("attention_mask", "loss_mask")
CHUNK = 1 << 20
# Frequencies of the waves that a tensor is projected on: irrational, so that no two entries have the same weights.
FREQUENCIES = (0.7548776662466927, 0.5698402909980532)


def data_fingerprint(dataset, collate: Callable[[list], dict]) -> str:
    """The SHA-256 of the size of a data set and of at most 64 examples, spread evenly from the first to the last.

    Examples are read as in training, with a seed, so that the fingerprint covers crops and other augmentation too. Its cost
    does not grow with the data set. Edits of a few examples between those that are read are not noticed. Of a stream the
    first 64 examples are read.

    Args:
        dataset: `dataset[index, seed]` is an example; or a stream.
        collate: Makes a batch of a list of pairs of an index and an example.
    """
    examples: Iterable
    if is_stream(dataset):
        size, examples = None, enumerate(islice(dataset, NUM_EXAMPLES))
    else:
        size = len(dataset)
        indices = np.unique(np.linspace(0, size - 1, NUM_EXAMPLES).round().astype(int)).tolist()
        examples = ((index, dataset[index, seed]) for seed, index in enumerate(indices))
    digest = hashlib.sha256(str(size).encode())
    for example in examples:
        batch = collate([example])
        others = {**(batch.get("condition") or {}), **{name: batch[name] for name in MASKS if name in batch}}
        for tensor in (batch["x_0"], *(others[name] for name in sorted(others))):
            digest.update(str(tuple(tensor.shape[1:])).encode())
            kind = "<f8" if tensor.is_floating_point() else "<i8"
            digest.update(tensor[0].cpu().numpy().astype(kind).tobytes())
    return digest.hexdigest()


def tensor_fingerprint(tensor: torch.Tensor) -> list:
    """The shape of a tensor, its sum of absolute values, and its projections on waves, divided by that sum.

    The numbers are rounded, because statistics of the same data differ in their last bits between CPUs.

    Args:
        tensor: A floating-point tensor, dense or sparse.
    """
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        strides = torch.tensor([int(np.prod(tensor.shape[axis + 1 :])) for axis in range(tensor.sparse_dim())])
        positions, values = (tensor.indices() * strides[:, None]).sum(0), tensor.values()
    else:
        values = tensor.reshape(-1)
        positions = torch.arange(len(values))
    # Infinity, which ends a schedule that destroys all information, counts as one more than the largest entry.
    limit = values[values.isfinite()].abs().max().item() + 1 if values.isfinite().any() else 1.0
    sums = torch.zeros(1 + len(FREQUENCIES), dtype=torch.float64)
    for part, where in zip(values.split(CHUNK), positions.split(CHUNK)):
        part, where = part.double().nan_to_num(posinf=limit, neginf=-limit), where.double()
        waves = [(part * torch.cos(frequency * where)).sum() for frequency in FREQUENCIES]
        sums += torch.stack([part.abs().sum(), *waves])
    size, *waves = sums.tolist()
    return [list(tensor.shape), float(f"{size:.6g}"), *(round(wave / (size or 1.0), 6) + 0.0 for wave in waves)]
