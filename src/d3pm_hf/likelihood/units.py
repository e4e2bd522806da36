# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Units of a negative log-likelihood: the only place where nats become bits and perplexities."""

import math


def bits(nats: float) -> float:
    """`nats` in bits: nats / log 2."""
    return nats / math.log(2)


def perplexity(nats: float) -> float:
    """Perplexity at `nats` per token or per word: exp(nats)."""
    return math.exp(nats)


def perplexity_standard_error(nats: float, standard_error: float) -> float:
    """Standard error of exp(nats), to first order: exp(nats) times the standard error of `nats`."""
    return math.exp(nats) * standard_error


def with_error(value: float, error: float, digits: int) -> str:
    """A value and its standard error as they are printed: `"2.85 ± 0.01"`, without an error that is NaN, or `"infinite"`."""
    if math.isinf(value):
        return "infinite"
    return f"{value:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")
