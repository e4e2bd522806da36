# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""KL terms of the bound with their gradients, one closed form to a file."""

import torch

from ...transitions import RankOneTransition, Transition
from .absorbing import absorbing_terms
from .matrix import matrix_terms
from .rank_one import rank_one_terms
from .walk import Options, Walk, WalkedTerms, counted


def terms_of(transition: Transition, *args, loss_mask: torch.Tensor | None = None) -> Walk:
    """The walk over logits of x_0 that suits a process, for x_0, x_t, s, t and `Options`.

    Args:
        loss_mask (`torch.BoolTensor` of shape `[B, ...]`, *optional*): Elements that count; all by default.
    """
    if not isinstance(transition, RankOneTransition):
        walk = matrix_terms(transition, *args, loss_mask)
    elif transition.absorbing_state is not None:
        walk = absorbing_terms(transition, *args)
    else:
        walk = rank_one_terms(transition, *args)
    return walk if loss_mask is None else counted(walk, loss_mask)


__all__ = ["Options", "Walk", "WalkedTerms", "terms_of"]
