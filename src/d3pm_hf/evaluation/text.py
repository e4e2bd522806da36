# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Statistics of text samples."""

import math
from collections import Counter

import torch
from scipy.stats import entropy

from ..utils.checks import check_int, check_type, describe


def token_entropy(sequences: torch.Tensor) -> float:
    """Entropy of the tokens within a sample in bits, averaged over samples `[B, N]`. It is low for repetitive samples."""
    return float(token_entropies(sequences).mean())


def token_entropies(sequences: torch.Tensor) -> torch.Tensor:
    """Entropy of the tokens within each sample, in bits, `[B]` in float64.

    H_b = -sum_k f_bk log2 f_bk,   f_bk the share of token k among the N tokens of sample b
    """
    check_sequences("sequences", sequences)
    counts = [torch.unique(row, return_counts=True)[1].numpy() for row in sequences.cpu()]
    return torch.tensor([entropy(each, base=2) for each in counts], dtype=torch.float64)


def ngram_entropy(sequences: torch.Tensor, ngram_size: int = 3) -> tuple[float, float]:
    """Entropy of the n-grams of all samples `[B, N]` together in bits, and its standard error.

        H = -sum_g f_g log2 f_g,   f_g the share of n-gram g among the B (N - n + 1) n-grams of all samples

    It is low if samples repeat one another, which [`token_entropy`] does not see, and it sees the order of tokens within an
    n-gram. Rare n-grams are missing from few samples, so that it grows with B: compare the same number of samples. The
    standard error is that of the mean of -log2 f over the n-grams of a sample, the first order in f; it is NaN for one sample.

    Args:
        sequences (`torch.LongTensor` of shape `[B, N]`): Samples.
        ngram_size (`int`, defaults to 3): n.
    """
    check_sequences("sequences", sequences)
    check_int("ngram_size", ngram_size, 1, sequences.shape[1])
    ngrams = sequences.cpu().unfold(1, ngram_size, 1)  # [B, N - n + 1, n]
    _, index, counts = torch.unique(ngrams.flatten(0, 1), dim=0, return_inverse=True, return_counts=True)
    surprise = -(counts.double() / len(index)).log2()[index].reshape(ngrams.shape[:2]).mean(1)  # [B]
    return float(surprise.mean()), standard_error(surprise)


def standard_error(values: torch.Tensor) -> float:
    """Standard error of the mean of `values`, `[B]`; NaN for a single one."""
    return float(values.std() / len(values) ** 0.5) if len(values) > 1 else math.nan


def check_sequences(name: str, value) -> None:
    """Checks that `value` is a tensor of tokens of shape `[B, N]` that is not empty."""
    check_type(name, value, torch.Tensor, "a `torch.LongTensor` of shape [B, N]")
    if value.is_floating_point() or value.dtype == torch.bool or value.ndim != 2 or not value.numel():
        raise ValueError(f"{name} is {describe(value)}: it must be a `torch.LongTensor` of shape [B, N]")


def word_statistics(texts: list[str], reference: list[str]) -> dict[str, float]:
    """Statistics of the words of samples: the share that occurs in the reference, their mean length, and their entropy.

    The first and the last word of a text are left out, as they may be cut.

    Args:
        texts (`list[str]`): Samples.
        reference (`list[str]`): Texts of the data set.
    """
    for name, strings in (("texts", texts), ("reference", reference)):
        check_type(name, strings, (list, tuple), "a list of strings")
        for text in strings:
            check_type(f"an entry of {name}", text, str, "a string")
    vocabulary = {word for text in reference for word in _whole_words(text)}
    words = [word for text in texts for word in _whole_words(text)]
    if not words:
        return {"known_words": 0.0, "word_length": 0.0, "word_entropy": 0.0}
    return {
        "known_words": sum(word in vocabulary for word in words) / len(words),
        "word_length": sum(map(len, words)) / len(words),
        "word_entropy": float(entropy(list(Counter(words).values()), base=2)),
    }


def _whole_words(text: str) -> list[str]:
    return [word for word in text.split(" ")[1:-1] if word]
