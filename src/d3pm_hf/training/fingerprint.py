# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Fingerprints of the training data and of the tensors of the scheduler, by which a resumed run knows them again."""

import hashlib

import numpy as np
import torch


NUM_EXAMPLES = 64
CHUNK = 1 << 20
# Frequencies of the waves that a tensor is projected on: irrational, so that no two entries have the same weights.
FREQUENCIES = (0.7548776662466927, 0.5698402909980532)


def data_fingerprint(dataset) -> str:
    """The SHA-256 of the size of a data set and of at most 64 examples, spread evenly from the first to the last.

    Examples are read as in training, with a seed, so that the fingerprint covers crops and other augmentation too. Its cost
    does not grow with the data set. Edits of a few examples between those that are read are not noticed.

    Args:
        dataset: `dataset[index, seed]` is x_0.
    """
    indices = np.unique(np.linspace(0, len(dataset) - 1, NUM_EXAMPLES).round().astype(int)).tolist()
    digest = hashlib.sha256(str(len(dataset)).encode())
    for seed, index in enumerate(indices):
        x_0 = dataset[index, seed]
        digest.update(str(tuple(x_0.shape)).encode())
        digest.update(x_0.cpu().numpy().astype("<i8").tobytes())
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
