# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A walk over the logits in pieces that fit a cache, which fused losses share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..numerics import chunk_rows, compute_dtype
from ..transitions.excluded import ExcludedStates


# (logits, whether a gradient is wanted) -> vb, cross-entropy, and the gradient of vb + hybrid_coeff * cross-entropy, all in
# float32 at least: 16 bits would lose what is small before a loss scale can lift it.
Walk = Callable[[torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def masked(walk: Walk, loss_mask: torch.Tensor) -> Walk:
    """A walk with zeros for the elements that do not count, whatever their logits are."""

    def masked_walk(logits, want_gradient):
        vb, cross_entropy, gradient = walk(logits, want_gradient)
        if gradient is not None:
            gradient.masked_fill_(~loss_mask[..., None], 0)  # an index by a mask would synchronize
        return vb.where(loss_mask, 0), cross_entropy.where(loss_mask, 0), gradient

    return masked_walk


def weighted(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """weight * value, and zero where the weight is zero, even if the value is infinite."""
    return (weight * value).masked_fill_(weight == 0, 0)


@dataclass(frozen=True, eq=False)
class RowWalk:
    """A walk that calls `rows_terms` on one piece of the rows after the other.

    Args:
        elements: A named tuple of what is known about each element, tensors that broadcast to `shape`, or `None`.
        rows_terms: `(logits, elements, weights, scratch, want_gradient) -> vb, cross_entropy` of the rows `[..., K]`. It
            fills `weights` `[..., K]`, which holds the gradient in the end if that is wanted. Elements broadcast to the rows.
        shape: That of the elements, `[B, ...]`.
        num_scratch: Number of further buffers of that size which it needs.
        counts: Which elements count, of the shape `shape`; all of them if it is `None`.
    """

    elements: Any
    rows_terms: Callable
    shape: torch.Size
    num_scratch: int
    counts: torch.Tensor | None = None

    def take(self, index: torch.Tensor | slice) -> "RowWalk":
        """The walk over some rows `[n, K]`: those of the elements `index` of all, which are flattened."""
        elements = self.elements._make(
            None if v is None else v.expand(self.shape).flatten()[index] for v in self.elements
        )
        counts = None if self.counts is None else self.counts.flatten()[index]
        return replace(self, elements=elements, shape=elements[0].shape, counts=counts)

    def __call__(self, logits, want_gradient):
        if self.counts is not None:
            return masked(replace(self, counts=None), self.counts)(logits, want_gradient)
        dtype, device, num_classes = compute_dtype(logits), logits.device, logits.shape[-1]
        is_compiling = torch.compiler.is_compiling()  # which makes pieces of its own
        if is_compiling or logits.numel() <= chunk_rows(num_classes, device) * num_classes:
            # One piece: what is known about a sample need not be repeated for its elements.
            weights = logits.new_empty(logits.shape, dtype=dtype)  # contiguous: `out=` of some kernels ignores strides
            buffers = list(logits.new_empty(self.num_scratch, *logits.shape, dtype=dtype)) if self.num_scratch else []
            vb, cross_entropy = self.rows_terms(logits, self.elements, weights, buffers, want_gradient)
            return vb.to(dtype), cross_entropy.to(dtype), weights if want_gradient else None
        flat = logits.reshape(-1, num_classes)
        size = min(chunk_rows(num_classes, device), len(flat))
        gradient = flat.new_empty(flat.shape, dtype=dtype) if want_gradient else None
        scratch = flat.new_empty(self.num_scratch + (not want_gradient), size, num_classes, dtype=dtype)
        results, rows_of_all = [], self.take(slice(None))
        for first in range(0, len(flat), size):
            rows = slice(first, min(first + size, len(flat)))
            buffers = list(scratch[:, : rows.stop - first])
            weights = buffers.pop() if gradient is None else gradient[rows]
            piece = rows_of_all.take(rows).elements
            results.append(self.rows_terms(flat[rows], piece, weights, buffers, want_gradient))
        vb, cross_entropy = (torch.cat(part).to(dtype).view(self.shape) for part in zip(*results))
        return vb, cross_entropy, None if gradient is None else gradient.view_as(logits)


def softmax_parts(logits: torch.Tensor, excluded: ExcludedStates, out: torch.Tensor, *at: torch.Tensor):
    """Writes exp(logits) to `out`, up to a factor per row, and returns the row sums of that and log p at some states.

    Args:
        logits: `[..., K]`.
        excluded: States of probability zero.
        out: `[..., K]`, of the dtype to compute in.
        at: States `[..., 1]`.
    Returns:
        The sums `[..., 1]`, then log p `[...]` at each of `at`.
    """
    # The maximum is that of the other states: they must not vanish beside a state that is never taken.
    excluded.fill_(out.copy_(logits), -torch.inf)
    out.sub_(out.amax(-1, keepdim=True))
    values = [out.gather(-1, states) for states in at]
    total = out.exp_().sum(-1, keepdim=True)
    log_total = total.log()
    return total, *((value - log_total).squeeze(-1) for value in values)
