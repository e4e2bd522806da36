# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Statistics of text samples."""

from collections import Counter

import torch
from scipy.stats import entropy

from ..utils.checks import check_type, describe


def token_entropy(sequences: torch.Tensor) -> float:
    """Entropy of the tokens within a sample in bits, averaged over samples `[B, N]`. It is low for repetitive samples."""
    check_type("sequences", sequences, torch.Tensor, "a `torch.LongTensor` of shape [B, N]")
    if sequences.is_floating_point() or sequences.ndim != 2 or not sequences.numel():
        raise ValueError(f"sequences are {describe(sequences)}: they must be a `torch.LongTensor` of shape [B, N]")
    rows = (torch.unique(row, return_counts=True)[1].numpy() for row in sequences.cpu())
    return float(sum(entropy(counts, base=2) for counts in rows) / len(sequences))


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
