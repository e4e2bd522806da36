# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""KL terms of the bound with their gradients, one closed form to a file."""

from ..transitions import RankOneTransition, Transition
from .absorbing import absorbing_terms
from .base import Options, Walk, WalkedTerms
from .matrix import matrix_terms
from .rank_one import rank_one_terms


def terms_of(transition: Transition, *args) -> Walk:
    """The walk over logits of x_0 that suits a process, for x_0, x_t, s, t and `Options`."""
    if not isinstance(transition, RankOneTransition):
        return matrix_terms(transition, *args)
    if transition.absorbing_state is not None:
        return absorbing_terms(transition, *args)
    return rank_one_terms(transition, *args)


__all__ = ["Options", "Walk", "WalkedTerms", "terms_of"]
