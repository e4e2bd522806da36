# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Fused losses: the KL terms of the bound with their gradients in one pass over the logits, one closed form to a file."""

import torch

from ...transitions import Transition
from ..plain import Options
from .absorbing import absorbing_terms
from .compiled import fused_operator, traced_terms
from .matrix import matrix_terms
from .rank_one import rank_one_terms
from .registry import FusedLoss, create_walk, get_fused_loss, is_traceable, reads_logistic, register_fused_loss
from .walk import SHORT_ROW, FusedTerms, Walk


def fused_terms(
    transition: Transition,
    logits: torch.Tensor,
    x_0,
    x_t,
    s,
    t,
    options: Options,
    loss_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`vb + options.hybrid_coeff * cross_entropy`, vb and cross-entropy of [`plain_terms`], by `transition.fused_loss`.

    With `options.logistic`, `logits` are location and log-scale of a logistic. Only the first can be differentiated, and once.
    """
    if torch.compiler.is_compiling():
        is_short = logits.shape[-1] <= SHORT_ROW and is_traceable(transition.fused_loss)
        compiled = traced_terms if is_short else fused_operator
        return compiled(transition, logits, x_0, x_t, s, t, options, loss_mask)
    walk = create_walk(transition, x_0, x_t, s, t, options, loss_mask)
    return FusedTerms.apply(logits, walk, options.hybrid_coeff)


__all__ = [
    "FusedLoss",
    "Walk",
    "absorbing_terms",
    "fused_terms",
    "get_fused_loss",
    "matrix_terms",
    "rank_one_terms",
    "reads_logistic",
    "register_fused_loss",
]
