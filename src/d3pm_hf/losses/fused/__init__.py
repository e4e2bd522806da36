# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Fused losses: the KL terms of the bound with their gradients in one pass over the logits, one closed form to a file."""

from .absorbing import absorbing_terms
from .matrix import matrix_terms
from .rank_one import rank_one_terms
from .registry import FusedLoss, get_fused_loss, register_fused_loss
from .walk import Options, Walk, WalkedTerms, counted


__all__ = [
    "FusedLoss",
    "Options",
    "Walk",
    "WalkedTerms",
    "absorbing_terms",
    "counted",
    "get_fused_loss",
    "matrix_terms",
    "rank_one_terms",
    "register_fused_loss",
]
