# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The output layer of a network and its loss in one pass over pieces of the rows: no more than a piece of logits exists at a time.

    logits = hidden W' + b,   dL / dhidden = G W,   dL / dW = G' hidden,   dL / db = G' 1,   G = dL / dlogits

The gradients are computed with the loss, for a weight of one per element, and are scaled when the gradient of the loss is known:
that of a mean or of a sum is one number. For other weights the logits are computed once more.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..numerics import autocast_disabled, compute_dtype, spread
from ..transitions import Transition
from ..transitions.kernel import Options
from ..utils.checks import values_are_known
from .fused import NotDifferentiable, Places, create_walk, total_loss
from .pieces import RowWalk


# Bytes of float32 logits of a piece on a CPU, and on an accelerator. A piece reads all of W, so that it has many rows.
PIECE_BYTES, ACCELERATOR_PIECE_BYTES = 1 << 24, 1 << 28


class Head(NamedTuple):
    """An output layer: its weight `[K, D]`, its bias `[K]` or `None`, and the dtype of its products (that of autocast inside of it)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: torch.nn.Linear, hidden: torch.Tensor) -> "Head":
        """The head of an output layer and its input."""
        device = hidden.device.type
        is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_autocast else layer.weight.dtype
        return cls(layer.weight, layer.bias, torch.float64 if hidden.dtype == torch.float64 else dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """All logits `[..., K]` of the input `[..., D]`."""
        head = self.cast()
        return F.linear(hidden.to(head.dtype), head.weight, head.bias)

    def cast(self) -> "Head":
        """The head with its weight and bias in the dtype of its products."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return self._replace(weight=self.weight.to(self.dtype), bias=bias)

    @property
    def num_rows(self) -> int:
        """Number of rows of a piece."""
        limit = PIECE_BYTES if self.weight.device.type == "cpu" else ACCELERATOR_PIECE_BYTES
        return max(1, limit // (4 * len(self.weight)))


def head_terms(
    transition: Transition, hidden: torch.Tensor, head: Head, x_0, x_t, s, t, options: Options, loss_mask, index
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[`~fused.fused_terms`] of the input of a head `[n, D]`, at the elements `index` `[n]`, or at all, `[B, ..., D]`.

    Only the first result can be differentiated, and once: with respect to `hidden` and to the weight and the bias of the head.
    """
    if index is None:
        index = torch.arange(x_t.numel(), device=x_t.device)
    walk = create_walk(transition, x_0, x_t, s, t, options, loss_mask, index)
    return HeadTerms.apply(hidden.flatten(0, -2), *head, walk, options.hybrid_coeff, Places(index, x_t.shape))


class HeadTerms(torch.autograd.Function):
    """[`head_terms`] as autograd has it."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, dtype, walk, hybrid_coeff, places):
        ctx.head, ctx.walk, ctx.places = Head(weight, bias, dtype), walk, places
        # float16 would lose gradients that no loss scale has lifted yet: those wait for the backward pass.
        needs = (False,) * 3 if dtype == torch.float16 else ctx.needs_input_grad[:3]
        vb, cross_entropy, ctx.gradients = _walk_pieces(hidden, ctx.head, walk, needs)
        vb, cross_entropy = spread(vb, *places), spread(cross_entropy, *places)
        ctx.head = ctx.head._replace(weight=None, bias=None)  # autograd keeps them, and knows if they are changed
        ctx.save_for_backward(hidden, weight, bias)
        ctx.set_materialize_grads(False)  # vb and cross-entropy have none
        ctx.mark_non_differentiable(vb, cross_entropy)
        return total_loss(vb, cross_entropy, hybrid_coeff), vb, cross_entropy

    @staticmethod
    def backward(ctx, weight, _, __):
        if weight is None:
            return (None,) * 7
        hidden, *parameters = saved = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        with torch.no_grad(), autocast_disabled(hidden):
            scale = _row_weights(weight, ctx.places)
            if gradients is None or scale.ndim:
                head = ctx.head._replace(weight=parameters[0], bias=parameters[1])
                gradients = _walk_pieces(hidden, head, ctx.walk, ctx.needs_input_grad[:3], scale)[2]
            else:
                gradients = [None if g is None else g.mul_(scale.to(g.dtype)) for g in gradients]
            gradients = [None if g is None else g.to(v.dtype) for g, v in zip(gradients, saved)]
        if torch.is_grad_enabled():  # with `create_graph`, autograd must not take the gradients for constants
            gradients = [None if g is None else NotDifferentiable.apply(g, hidden) for g in gradients]
        return (*gradients, None, None, None, None)


def _row_weights(weight: torch.Tensor, places: Places) -> torch.Tensor:
    """Weights `[n, 1]` of the rows from those of all elements, `[B, ...]`, or one number if all are the same, as for a mean."""
    is_one = not any(weight.stride())
    if not is_one and values_are_known(weight) and weight.numel():
        low, high = weight.aminmax()
        is_one = low.item() == high.item()
    return weight[(0,) * weight.ndim] if is_one else weight.flatten()[places.elements][:, None]


def _walk_pieces(hidden: torch.Tensor, head: Head, walk: RowWalk, needs: tuple[bool, bool, bool], scale=None):
    """vb and cross-entropy `[n]`, and the gradients of hidden states, weight and bias, each row's times its `scale`.

    A gradient that is not among those that `needs` says is `None`; if it needs none, all three are one `None`.
    """
    head, wide, size = head.cast(), compute_dtype(hidden), head.num_rows
    vb, cross_entropy = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(2))
    of_hidden = torch.empty_like(hidden) if needs[0] else None
    of_weight = of_bias = None  # sums over the pieces, in float32 at least
    for first in range(0, len(hidden), size):
        rows = slice(first, first + size)
        part = hidden[rows].to(head.dtype)
        vb[rows], cross_entropy[rows], slope = walk.take(rows)(head.logits(part), any(needs))
        if slope is None:
            continue
        if scale is not None:
            slope = slope.mul_((scale[rows] if scale.ndim else scale).to(slope.dtype))
        if needs[2]:
            of_bias = slope.sum(0) if of_bias is None else of_bias.add_(slope.sum(0))
        slope = slope.to(head.dtype)  # [r, K]
        if of_hidden is not None:
            of_hidden[rows] = slope @ head.weight
        if needs[1] and of_weight is None:
            of_weight = (slope.mT @ part).to(wide)
        elif of_weight is not None:  # without a second matrix [K, D] if the dtypes agree
            of_weight = of_weight.addmm_(slope.mT, part) if head.dtype == wide else of_weight.add_(slope.mT @ part)
        del slope  # before the next piece
    return vb, cross_entropy, [of_hidden, of_weight, of_bias] if any(needs) else None
