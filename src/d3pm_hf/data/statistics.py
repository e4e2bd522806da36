# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Statistics of the data for forward processes: token frequencies, and embeddings of tokens by their contexts."""

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch

from ..utils.checks import check_int, check_type
from .rows import CHUNK_TOKENS, Rows, TextCrops


# Number of positions before and after a token that are its contexts.
WINDOW = 2
# More text hardly changes the nearest neighbors.
MAX_TOKENS = 4_000_000
# Vocabularies up to this size are decomposed densely.
MAX_DENSE = 512
# Contexts are weighted as count^0.75: rare ones would otherwise score too high (Levy, Goldberg and Dagan, 2015).
CONTEXT_SMOOTHING = 0.75


def unigram_probs(dataset: TextCrops | Rows) -> torch.Tensor:
    """Returns the relative frequency of each token in the data, in float64, `[num_tokens]`."""
    check_type("dataset", dataset, (TextCrops, Rows), "a `TextCrops` or `Rows`")
    tokens, counts = dataset.tokens.reshape(-1), np.zeros(dataset.num_tokens, dtype=np.int64)
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS].astype(np.int64)
        counts += np.bincount(chunk, minlength=dataset.num_tokens)
    return torch.from_numpy(counts / counts.sum())


def cooccurrence_embeddings(dataset: TextCrops | Rows, dim: int = 64) -> torch.Tensor:
    """Returns unit vectors `[num_tokens, d]` in which tokens with similar contexts are near each other.

    The vectors are the leading singular directions of the positive pointwise mutual information of a token with the
    tokens up to two positions before and after it, where each position is a separate context. The result is
    deterministic.

    Args:
        dataset ([`TextCrops`] or [`Rows`]): Text. Above 4 million tokens, an evenly spread part of it is used.
        dim (`int`, defaults to 64): Largest dimension d. It is limited to an eighth of the vocabulary, but not below 4:
            further directions would separate the tokens of a small vocabulary by rare contexts.
    """
    check_type("dataset", dataset, (TextCrops, Rows), "a `TextCrops` or `Rows`")
    check_int("dim", dim, 1)
    rows = dataset.tokens
    if isinstance(dataset, TextCrops):
        rows = rows[: len(dataset) * dataset.length].reshape(-1, dataset.length)
    rows = rows.reshape(-1, rows.shape[-1])  # [n, N]
    if rows.shape[1] <= WINDOW:
        raise ValueError(
            f"items of {rows.shape[1]} tokens are too short for contexts: pass items of more than {WINDOW} tokens"
        )
    if rows.size > MAX_TOKENS:
        rows = rows[np.linspace(0, len(rows) - 1, max(1, MAX_TOKENS // rows.shape[1])).astype(np.int64)]
    places = [count_pairs(rows, offset, dataset.num_tokens) for offset in range(1, WINDOW + 1)]
    information = [mutual_information(counts) for place in places for counts in (place, place.T)]
    dim = min(dim, max(4, dataset.num_tokens // 8), dataset.num_tokens)
    vectors = leading_directions(scipy.sparse.hstack(information, format="csr"), dim)  # [K, d]
    # A token without contexts gets a random direction. With equal vectors, such tokens would be neighbors of each other
    # only, and the graph of nearest neighbors would not be connected.
    norms = np.linalg.norm(vectors, axis=1)
    if not norms.any():
        raise ValueError(
            "all tokens of the data set are equally frequent in all contexts, so that they have no nearest neighbors: pass "
            "other data, or your own embeddings"
        )
    isolated = norms < 1e-6 * norms.max()
    vectors[isolated] = np.random.default_rng(0).standard_normal((isolated.sum(), vectors.shape[1]))
    return torch.from_numpy(vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).float()


def count_pairs(rows: np.ndarray, offset: int, num_tokens: int) -> scipy.sparse.csr_array:
    """Counts how often token j stands `offset` positions after token i, `[K, K]`.

    Args:
        rows (`np.ndarray` of shape `[n, N]`): Tokens. Pairs across rows are not counted.
        offset (`int`): Distance between the two tokens.
        num_tokens (`int`): Number of tokens K.
    """
    total = scipy.sparse.csr_array((num_tokens, num_tokens))
    step = max(1, CHUNK_TOKENS // rows.shape[1])
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step].astype(np.int32)
        first, second = chunk[:, :-offset].reshape(-1), chunk[:, offset:].reshape(-1)
        pairs = (np.ones(len(first)), (first, second))
        total += scipy.sparse.coo_array(pairs, shape=(num_tokens, num_tokens)).tocsr()
    return total


def mutual_information(counts: scipy.sparse.csr_array) -> scipy.sparse.coo_array:
    """Returns max(0, log p(token, context) / (p(token) p(context))) for pairs that occur, and 0 elsewhere, `[K, K]`."""
    pairs = counts.tocoo()
    tokens, contexts = counts.sum(1), counts.sum(0) ** CONTEXT_SMOOTHING
    tokens, contexts = tokens / tokens.sum(), contexts / contexts.sum()
    seen = pairs.data / pairs.data.sum()
    information = np.maximum(np.log(seen / (tokens[pairs.row] * contexts[pairs.col])), 0)
    return scipy.sparse.coo_array((information, (pairs.row, pairs.col)), shape=counts.shape)


def leading_directions(matrix: scipy.sparse.csr_array, dim: int) -> np.ndarray:
    """Returns U sqrt(S) of the truncated singular value decomposition, `[K, d]`."""
    if matrix.shape[0] <= MAX_DENSE:
        left, values, _ = np.linalg.svd(matrix.toarray(), full_matrices=False)
        left, values = left[:, :dim], values[:dim]
    else:
        start = np.random.default_rng(0).standard_normal(matrix.shape[0])
        left, values, _ = scipy.sparse.linalg.svds(matrix, k=dim, v0=start, return_singular_vectors="u")
    return left * np.sqrt(values)
