# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What a forward process needs to know of the data: how often each token comes, and which tokens are alike."""

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch

from ..utils.checks import check_int, check_type
from .memory import CHUNK_TOKENS, Rows, TextCrops


# Positions before and after a token that count as its context.
WINDOW = 2
# More text hardly changes the neighbours, and would take longer than it is worth.
MAX_TOKENS = 4_000_000
# Vocabularies up to this size are decomposed densely.
MAX_DENSE = 512
# Contexts are weighted as count^0.75: rare ones would otherwise score too high (Levy, Goldberg and Dagan, 2015).
CONTEXT_SMOOTHING = 0.75


def unigram_probs(dataset: TextCrops | Rows) -> torch.Tensor:
    """How often each token comes in all of the stored data, as float64 probabilities `[num_tokens]`."""
    check_type("dataset", dataset, (TextCrops, Rows), "a `TextCrops` or `Rows`")
    tokens, counts = dataset.tokens.reshape(-1), np.zeros(dataset.num_tokens, dtype=np.int64)
    for start in range(0, len(tokens), CHUNK_TOKENS):
        counts += np.bincount(tokens[start : start + CHUNK_TOKENS], minlength=dataset.num_tokens)
    return torch.from_numpy(counts / counts.sum())


def cooccurrence_embeddings(dataset: TextCrops | Rows, dim: int = 64) -> torch.Tensor:
    """Unit vectors `[num_tokens, d]` in which tokens that come in the same contexts are near.

    The positive pointwise mutual information of a token with those up to two places before and after it (each place a
    context of its own), reduced to its leading singular directions. Two calls on the same data give the same.

    Args:
        dataset: of text. A very large one is thinned out evenly.
        dim (`int`, defaults to 64): of a vector, at most. A small vocabulary gets an eighth of its size, and 4 at least:
            more directions tell its few tokens apart by their oddities, and not by their kinds.
    """
    check_type("dataset", dataset, (TextCrops, Rows), "a `TextCrops` or `Rows`")
    check_int("dim", dim, 1)
    rows = dataset.tokens
    if isinstance(dataset, TextCrops):
        rows = rows[: len(dataset) * dataset.length].reshape(-1, dataset.length)
    rows = rows.reshape(-1, rows.shape[-1])  # [n, N]
    if rows.shape[1] <= WINDOW:
        raise ValueError(f"items of {rows.shape[1]} tokens show no contexts: pass items of more than {WINDOW} tokens")
    if rows.size > MAX_TOKENS:
        rows = rows[np.linspace(0, len(rows) - 1, max(1, MAX_TOKENS // rows.shape[1])).astype(np.int64)]
    places = [count_pairs(rows, offset, dataset.num_tokens) for offset in range(1, WINDOW + 1)]
    information = [mutual_information(counts) for place in places for counts in (place, place.T)]
    dim = min(dim, max(4, dataset.num_tokens // 8), dataset.num_tokens)
    vectors = leading_directions(scipy.sparse.hstack(information, format="csr"), dim)  # [K, d]
    # A token without contexts gets a direction of its own. At one common point such tokens would be neighbours of each
    # other alone, and the graph would fall apart.
    norms = np.linalg.norm(vectors, axis=1)
    if not norms.any():
        raise ValueError(
            "no token of the data set comes more often in some contexts than in others, so that none are alike: pass "
            "other data, or your own embeddings"
        )
    lonely = norms < 1e-6 * norms.max()
    vectors[lonely] = np.random.default_rng(0).standard_normal((lonely.sum(), vectors.shape[1]))
    return torch.from_numpy(vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).float()


def count_pairs(rows: np.ndarray, offset: int, num_tokens: int) -> scipy.sparse.csr_array:
    """How often each token is followed, `offset` places later, by each other one, `[K, K]`.

    Args:
        rows: `[n, N]`; nothing is counted from one row to the next.
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
    """max(0, log p(token, context) / (p(token) p(context))) where a pair was seen, and 0 elsewhere, `[K, K]`."""
    pairs = counts.tocoo()
    tokens, contexts = counts.sum(1), counts.sum(0) ** CONTEXT_SMOOTHING
    tokens, contexts = tokens / tokens.sum(), contexts / contexts.sum()
    seen = pairs.data / pairs.data.sum()
    information = np.maximum(np.log(seen / (tokens[pairs.row] * contexts[pairs.col])), 0)
    return scipy.sparse.coo_array((information, (pairs.row, pairs.col)), shape=counts.shape)


def leading_directions(matrix: scipy.sparse.csr_array, dim: int) -> np.ndarray:
    """U sqrt(S) of the truncated singular value decomposition, `[K, d]`; small matrices are decomposed whole."""
    if matrix.shape[0] <= MAX_DENSE:
        left, values, _ = np.linalg.svd(matrix.toarray(), full_matrices=False)
        left, values = left[:, :dim], values[:dim]
    else:
        start = np.random.default_rng(0).standard_normal(matrix.shape[0])
        left, values, _ = scipy.sparse.linalg.svds(matrix, k=dim, v0=start, return_singular_vectors="u")
    return left * np.sqrt(values)
