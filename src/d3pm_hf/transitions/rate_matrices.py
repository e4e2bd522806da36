# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Rate matrices R: checks, stationary distributions, nearest neighbors in an embedding space."""

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..utils.checks import check_type


def nearest_neighbor_rates(embeddings: torch.Tensor, num_neighbors: int) -> torch.Tensor:
    """The doubly stochastic rate matrix of the symmetrized k-nearest-neighbor graph, sparse `[K, K]` (appendix A.2.4).

    A = (G + G') / (2k) with G_ij = 1 if i is one of the k nearest neighbors of j; R = A off the diagonal, and each
    row sums to zero.

    Args:
        embeddings: `[K, d]`; distances are Euclidean.
    """
    num_classes = len(embeddings)
    if not 1 <= num_neighbors < num_classes:
        raise ValueError(f"num_neighbors is {num_neighbors}: it must lie between 1 and {num_classes - 1}")
    embeddings = embeddings.double()
    neighbors = []
    for first in range(0, num_classes, 512):
        distances = torch.cdist(embeddings[first : first + 512], embeddings)
        own = torch.arange(len(distances))
        distances[own, first + own] = torch.inf  # by position: two words may share an embedding
        neighbors.append(distances.topk(num_neighbors, largest=False).indices)
    nearest = torch.cat(neighbors).flatten()  # [K * k]
    pairs = torch.stack([torch.arange(num_classes).repeat_interleave(num_neighbors), nearest])
    weight = torch.full((pairs.shape[1],), 1 / (2 * num_neighbors), dtype=torch.float64)
    return rates_from_adjacency(torch.cat([pairs, pairs.flip(0)], 1), weight.repeat(2), num_classes)


def rates_from_adjacency(pairs: torch.Tensor, weights: torch.Tensor, num_classes: int) -> torch.Tensor:
    """The sparse rate matrix that leaves i for j at the given rate, with a diagonal that makes rows sum to zero."""
    leaving = torch.zeros(num_classes, dtype=torch.float64).index_add_(0, pairs[0], weights)
    diagonal = torch.arange(num_classes).expand(2, -1)
    indices, values = torch.cat([pairs, diagonal], 1), torch.cat([weights, -leaving])
    return torch.sparse_coo_tensor(indices, values, (num_classes, num_classes), check_invariants=True).coalesce()


def add_absorbing_state(rates: torch.Tensor, mask_rate: float, mask_token_id: int) -> torch.Tensor:
    """Rates over one more state, put in at `mask_token_id`, which every other moves to at `mask_rate` and none leaves (appendix A.2.6)."""
    rates, num_tokens = rates.coalesce(), len(rates)
    states = torch.arange(num_tokens) + (torch.arange(num_tokens) >= mask_token_id)  # the tokens' new numbers
    pairs, values = states[rates.indices()], rates.values()
    moves = pairs[0] != pairs[1]
    to_mask = torch.stack([states, torch.full_like(states, mask_token_id)])
    return rates_from_adjacency(
        torch.cat([pairs[:, moves], to_mask], 1),
        torch.cat([values[moves], torch.full((num_tokens,), mask_rate, dtype=torch.float64)]),
        num_tokens + 1,
    )


def check_rates(rates: torch.Tensor) -> torch.Tensor:
    """Checks that `rates` is a rate matrix, and returns it as a coalesced sparse tensor in float64."""
    check_type("the rate matrix", rates, torch.Tensor, "a tensor, dense or sparse")
    rates = (rates if rates.is_sparse else rates.to_sparse_coo()).double().coalesce()
    (rows, columns), values = rates.indices(), rates.values()
    if rates.shape[0] != rates.shape[1]:
        raise ValueError(f"a rate matrix of shape {tuple(rates.shape)}: it must be square")
    negative = (rows != columns) & ~(values >= 0)
    if negative.any():
        i, j = rates.indices()[:, negative][:, 0].tolist()
        raise ValueError(f"the rate from state {i} to state {j} is negative: off the diagonal rates are >= 0")
    sums = torch.zeros(len(rates), dtype=torch.float64).index_add_(0, rows, values)
    if sums.abs().max() > 1e-5:
        row = int(sums.abs().argmax())
        raise ValueError(f"row {row} of the rate matrix sums to {sums[row].item():.4g}: every row must sum to zero")
    moves = rows != columns
    return rates_from_adjacency(rates.indices()[:, moves], values[moves], len(rates))


def stationary_distribution(rates: torch.Tensor) -> torch.Tensor:
    """pi with pi R = 0, `[K]`, for a process with one stationary distribution; others raise a `ValueError`."""
    num_classes = len(rates)
    (rows, columns), values = rates.indices().numpy(), rates.values().numpy()
    graph = coo_array((values != 0, (rows, columns)), shape=rates.shape)
    num_components, label = connected_components(graph, connection="strong")
    leaks = np.zeros(num_components, dtype=bool)
    leaks[label[rows[label[rows] != label[columns]]]] = True
    closed = np.flatnonzero(~leaks)
    if len(closed) > 1:
        raise ValueError(
            f"the states form {len(closed)} groups that never mix, so that there is no common stationary "
            "distribution: raise num_neighbors, or connect the groups"
        )
    members = np.flatnonzero(label == closed[0])
    pi = torch.zeros(num_classes, dtype=torch.float64)
    column_sums = torch.zeros(num_classes, dtype=torch.float64).index_add_(0, rates.indices()[1], rates.values())
    if len(members) == num_classes and column_sums.abs().max() < 1e-9 or len(members) == 1:
        pi[members] = 1 / len(members)
        return pi
    # Replace one equation of pi R = 0 by sum(pi) = 1, on the states that are not left for good.
    system = rates.to_dense().T[members][:, members].clone()
    system[-1] = 1
    target = torch.zeros(len(members), dtype=torch.float64)
    target[-1] = 1
    pi[members] = torch.linalg.solve(system, target).clamp(min=0)
    return pi / pi.sum()
