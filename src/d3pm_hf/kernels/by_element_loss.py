# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The loss of a process whose elements differ: the fused losses of its parts."""

import torch

from ..numerics import compute_dtype
from ..transitions import ByElementTransition
from ..transitions.kernel import Kernel, register_kernel
from ..transitions.rank_one import STEP_DEFINITION
from .fused import create_walk, register_fused_loss
from .pieces import Walk


@register_fused_loss("by_element")
def by_element_terms(transition: ByElementTransition, x_0, x_t, s, t, options, loss_mask=None) -> Walk:
    """The fused loss of each part, for the logits of its elements and states; all other gradients are zero."""
    walks = []
    for number, part in enumerate(transition.parts):
        own_0, own_t = (transition.take(number, x) for x in (x_0, x_t))
        counts = None if loss_mask is None else transition.take(number, loss_mask)
        walks.append(create_walk(part.process, own_0, own_t, s, t, options, counts))

    def walk(logits, want_gradient):
        dtype = compute_dtype(logits)
        vb, cross_entropy = (logits.new_empty(x_t.shape, dtype=dtype) for _ in range(2))
        gradient = torch.zeros_like(logits, dtype=dtype) if want_gradient else None
        for number, one in enumerate(walks):
            elements, states, _ = transition.indices(number, logits.device)
            vb[:, elements], cross_entropy[:, elements], slope = one(transition.take(number, logits), want_gradient)
            if gradient is not None and slope is not None:
                gradient[:, elements[:, None], states] = slope
        return vb, cross_entropy, gradient

    return walk


@register_kernel(ByElementTransition)
class ByElementKernel(Kernel, ByElementTransition):
    """The kernel of a process all of whose parts have a fused loss."""

    derived_from = STEP_DEFINITION
    fused_loss = "by_element"

    @classmethod
    def applies(cls, transition):
        return all(part.process.fused_loss is not None for part in transition.parts)
