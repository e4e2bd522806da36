# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Keys and values that a causal network keeps between calls, so that each token of a sample is read once."""

import torch
from transformers import Cache

from ..utils.checks import check_type, describe


def check_prefix(x: torch.Tensor, cache: Cache) -> None:
    """Checks the arguments of `next_logits`: tokens `[B, n]`, and a cache that holds no more than those before them."""
    check_type("x", x, torch.Tensor, "a `torch.LongTensor` of shape [B, n]")
    if x.dtype != torch.long or x.ndim != 2:
        raise ValueError(f"x is {describe(x)}: it must be a `torch.LongTensor` of shape [B, n]")
    check_type("cache", cache, Cache, "the cache that `start_cache` returns")
    if cache.get_seq_length() > x.shape[1]:
        raise ValueError(
            f"the cache holds {cache.get_seq_length()} tokens, the start token included, and x has {x.shape[1]}: pass at least "
            "one more token in each call, or start a new cache"
        )


def shorten_mask(condition: dict, length: int) -> dict:
    """The condition with the first `length` columns of its attention mask, if it has one."""
    if condition.get("attention_mask") is None:
        return condition
    return {**condition, "attention_mask": condition["attention_mask"][:, :length]}
