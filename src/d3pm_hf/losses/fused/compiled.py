# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The fused losses as one operator of torch, which `torch.compile` has in its graph as it is.

The walk over the logits decides on values (a row that underflows) and has a gradient of its own: neither can be traced, and
neither needs to be.
"""

from dataclasses import astuple

import torch

from ...numerics import autocast_disabled, compute_dtype, scalar_tensor
from ...transitions import Transition
from ...transitions.base import transition_of
from ..plain import Options
from .registry import create_walk
from .walk import total_loss


def traced_terms(
    transition: Transition, logits: torch.Tensor, x_0, x_t, s, t, options: Options, loss_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`fused_terms` inside `torch.compile`, as operations that a compiler makes a few loops of."""
    want_gradient = logits.requires_grad and torch.is_grad_enabled()
    with torch.no_grad():
        walk = create_walk(transition, x_0, x_t, s, t, options, loss_mask)
        vb, cross_entropy, gradient = walk(logits, want_gradient)
        loss = total_loss(vb, cross_entropy, options.hybrid_coeff)
    return loss if gradient is None else _WithGradient.apply(logits, loss, gradient), vb, cross_entropy


class _WithGradient(torch.autograd.Function):
    """The loss `[B, ...]` of the logits `[B, ..., K]`, with a gradient that is known."""

    @staticmethod
    def forward(ctx, logits, loss, gradient):
        ctx.dtype = logits.dtype
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx, weight):
        (gradient,) = ctx.saved_tensors
        return (gradient * weight[..., None]).to(ctx.dtype), None, None


def fused_operator(
    transition: Transition, logits: torch.Tensor, x_0, x_t, s, t, options: Options, loss_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`fused_terms` inside `torch.compile`."""
    s, t = (
        n if n is None or isinstance(n, torch.Tensor) else scalar_tensor(n, torch.long, x_t.device) for n in (s, t)
    )
    want_gradient = logits.requires_grad and torch.is_grad_enabled()
    loss, vb, cross_entropy, _ = _fused_loss(
        logits, x_0, x_t, s, t, loss_mask, transition.handle, want_gradient, *astuple(options)
    )
    return loss, vb.detach(), cross_entropy.detach()


@torch.library.custom_op("d3pm_hf::fused_loss", mutates_args=())
def _fused_loss(
    logits: torch.Tensor,
    x_0: torch.Tensor,
    x_t: torch.Tensor,
    s: torch.Tensor | None,
    t: torch.Tensor,
    loss_mask: torch.Tensor | None,
    transition: int,
    want_gradient: bool,
    denoising: bool,
    raw_reconstruction: bool,
    hybrid_coeff: float,
    convert_auxiliary: bool,
    logistic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, vb and cross-entropy `[B, ...]`, and the gradient of the loss, of the shape of `logits`, or nothing if it is not wanted."""
    options = Options(denoising, raw_reconstruction, hybrid_coeff, convert_auxiliary, logistic)
    with autocast_disabled(logits):
        walk = create_walk(transition_of(transition), x_0, x_t, s, t, options, loss_mask)
        vb, cross_entropy, gradient = walk(logits, want_gradient)
        loss = total_loss(vb, cross_entropy, hybrid_coeff)
    return loss, vb, cross_entropy, logits.new_empty(0) if gradient is None else gradient


@_fused_loss.register_fake
def _(logits, x_0, x_t, s, t, loss_mask, transition, want_gradient, *options):
    dtype = compute_dtype(logits)
    loss, vb, cross_entropy = (x_t.new_empty(x_t.shape, dtype=dtype) for _ in range(3))
    gradient = logits.new_empty(logits.shape, dtype=dtype) if want_gradient else logits.new_empty(0)
    return loss, vb, cross_entropy, gradient


def _keep_gradient(ctx, inputs, output):
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(output[3])


def _scale_gradient(ctx, weight, *_):
    (gradient,) = ctx.saved_tensors
    return ((gradient * weight[..., None]).to(ctx.dtype), *[None] * 12)


_fused_loss.register_autograd(_scale_gradient, setup_context=_keep_gradient)
