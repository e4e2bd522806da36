# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Comparisons that hold on every CPU.

The same product over memory that is aligned otherwise (as weights read from a file are), in a batch of another size, or
compiled, may differ in its last bit. A draw flips only if its uniform falls between the two results, about once in 1e7
draws, but then it flips for good.
"""

import torch


# Independent draws over two states agree in about half of the elements, over more states in fewer.
MAX_FLIPPED = 0.05


def assert_same_draws(got, expected):
    """States drawn with one seed by two computations that agree up to rounding."""
    got, expected = torch.as_tensor(got), torch.as_tensor(expected)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    flipped = (got != expected).double().mean().item()
    assert flipped <= MAX_FLIPPED, f"{flipped:.1%} of the states differ"
