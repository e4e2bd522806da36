# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Fused losses: the KL terms of the bound with their gradients in one pass over the logits.

Autograd has them as one function, and `torch.compile` as one operator: the walk over the logits decides on values (a row that
underflows) and has a gradient of its own, so that it can neither be traced nor needs to be.
"""

from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any, NamedTuple

import torch

from ..numerics import autocast_disabled, compute_dtype, scalar_tensor, spread
from ..transitions import Transition
from ..transitions.kernel import Options, transition_of
from ..utils.checks import check_str, check_type, values_are_known
from ..utils.registry import Registry
from .pieces import Walk, masked


# Rows of up to this many logits are traced by `torch.compile`, if the fused loss can be.
SHORT_ROW = 64

FusedLoss = Callable[..., Walk]


class Abilities(NamedTuple):
    """Abilities of a fused loss beside its terms; see [`register_fused_loss`]."""

    reads_logistic: bool = False
    traceable: bool = False
    has_rows: bool = False


_fused_losses: Registry[FusedLoss] = Registry("fused loss", "register_fused_loss")
_abilities: dict[str, Abilities] = {}


def register_fused_loss(
    name: str, reads_logistic: bool = False, traceable: bool = False, has_rows: bool = False
) -> Callable[[FusedLoss], FusedLoss]:
    """Registers a fused loss under `name`, the value of the attribute `fused_loss` of the transitions that use it.

    A fused loss computes what [`plain_terms`] defines, with its gradient, in one pass over the logits. It is a function
    `(transition, x_0, x_t, s, t, options, loss_mask) -> walk`:

    - `x_0`, `x_t` (`torch.LongTensor` of shape `[B, ...]`), `s` (`None` for t - 1) and `t` are those of
      `Transition.log_posterior`, and `options` are [`Options`].
    - `loss_mask` (`torch.BoolTensor` of shape `[B, ...]`, *optional*) is False at elements that do not count. Their
      states and logits may have any value. Their terms and gradients are set to zero afterwards, so that a fused loss needs
      it only to save work.
    - `walk(logits, want_gradient)` takes logits of x_0 `[B, ..., K]` and returns vb and cross-entropy, both `[B, ...]`,
      and the gradient of `vb + options.hybrid_coeff * cross_entropy` `[B, ..., K]`, or `None` if it is not wanted. All
      are float32, or float64 if the logits are.
    - With `reads_logistic=True`, and only then, `options.logistic` may be set: the walk takes location and log-scale of a
      logistic `[B, ..., 2]` in place of logits, and returns the gradient with respect to those.
    - With `traceable=True`, `torch.compile` traces the fused loss and its walk where rows of logits are short, and makes a few
      loops of them. They must decide on no values. Without, they are one operator that is called as it is.
    - With `has_rows=True`, the logits of each element are read by themselves, and the walk is a `kernels.pieces.RowWalk`: it can
      be given the rows of some elements alone.

    Example:
        @register_fused_loss("keyboard")
        def keyboard_terms(transition, x_0, x_t, s, t, options, loss_mask): ...
    """
    check_str("name", name)
    abilities = Abilities(reads_logistic, traceable, has_rows)
    for option, value in zip(abilities._fields, abilities):
        check_type(option, value, bool, "True or False")

    def register(function: FusedLoss) -> FusedLoss:
        check_type("the fused loss", function, Callable, "a function")
        _fused_losses.add(name, function)
        _abilities[name] = abilities
        return function

    return register


def abilities_of(name: str | None) -> Abilities:
    """The abilities of the fused loss of this name; none if there is no such loss."""
    return _abilities.get(name or "", Abilities())


def create_walk(
    transition: Transition,
    x_0: torch.Tensor,
    x_t: torch.Tensor,
    s,
    t,
    options: Options,
    loss_mask: torch.Tensor | None,
    index: torch.Tensor | None = None,
) -> Any:
    """The walk of the fused loss of a transition, with zeros for the elements that do not count.

    With `index` `[n]`, it is the `RowWalk` over the logits `[n, K]` of these elements alone, for a fused loss that has rows.
    """
    fused_loss = _fused_losses.find("fused_loss", transition.fused_loss)
    if index is None:
        walk = fused_loss(transition, x_0, x_t, s, t, options, loss_mask)
        return walk if loss_mask is None else masked(walk, loss_mask)
    rows: Any = fused_loss(transition, x_0, x_t, s, t, options, None)
    counts = None if loss_mask is None else loss_mask.flatten()[index]
    if counts is not None and values_are_known(counts) and counts.all():
        counts = None
    return replace(rows.take(index), counts=counts)


def fused_terms(
    transition: Transition,
    logits: torch.Tensor,
    x_0,
    x_t,
    s,
    t,
    options: Options,
    loss_mask: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`vb + options.hybrid_coeff * cross_entropy`, vb and cross-entropy of [`plain_terms`], by `transition.fused_loss`.

    With `options.logistic`, `logits` are location and log-scale of a logistic. With `index` `[n]`, the elements that count, they
    are the logits `[n, K]` of these alone, for a fused loss that has rows. Only the first result can be differentiated, and once.
    """
    if torch.compiler.is_compiling():
        s, t = (
            n if n is None or isinstance(n, torch.Tensor) else scalar_tensor(n, torch.long, x_t.device) for n in (s, t)
        )
        return _compiled_terms(transition, logits, x_0, x_t, s, t, options, loss_mask)
    walk = create_walk(transition, x_0, x_t, s, t, options, loss_mask, index)
    places = None if index is None else Places(index, x_t.shape)
    return FusedTerms.apply(logits, walk, options.hybrid_coeff, places)


class Places(NamedTuple):
    """Where the rows of a walk belong: the `elements` `[n]` of all of a `shape`, which are flattened."""

    elements: torch.Tensor
    shape: torch.Size


def total_loss(vb: torch.Tensor, cross_entropy: torch.Tensor, hybrid_coeff: float) -> torch.Tensor:
    """`vb + hybrid_coeff * cross_entropy`. Without the cross-entropy the loss is finite where that is not."""
    return torch.add(vb, cross_entropy, alpha=hybrid_coeff) if hybrid_coeff else vb.clone()


class FusedTerms(torch.autograd.Function):
    """`vb + hybrid_coeff * cross_entropy`, `vb` and `cross_entropy`; only the first can be differentiated, and once."""

    @staticmethod
    def forward(ctx, logits, walk, hybrid_coeff, places):
        vb, cross_entropy, ctx.gradient = walk(logits, ctx.needs_input_grad[0])
        if places is not None:
            vb, cross_entropy = spread(vb, *places), spread(cross_entropy, *places)
        ctx.walk, ctx.places = walk, places
        ctx.save_for_backward(logits)
        ctx.set_materialize_grads(False)  # vb and cross-entropy have none
        ctx.mark_non_differentiable(vb, cross_entropy)
        return total_loss(vb, cross_entropy, hybrid_coeff), vb, cross_entropy

    @staticmethod
    def backward(ctx, weight, _, __):
        if weight is None:
            return None, None, None, None
        gradient, ctx.gradient = ctx.gradient, None
        logits = ctx.saved_tensors[0]
        if gradient is None:  # a second pass over a retained graph: the first one has overwritten the buffer
            with torch.no_grad(), autocast_disabled(logits):
                gradient = ctx.walk(logits, True)[2]
        weight = weight if ctx.places is None else weight.flatten()[ctx.places.elements]
        with torch.no_grad():
            gradient = gradient.mul_(weight[..., None].to(gradient.dtype)).to(logits.dtype)
        # With `create_graph`, autograd must not take the gradient for a constant.
        gradient = NotDifferentiable.apply(gradient, logits) if torch.is_grad_enabled() else gradient
        return gradient, None, None, None


class NotDifferentiable(torch.autograd.Function):
    """A gradient that depends on the logits, and raises when it is differentiated."""

    @staticmethod
    def forward(ctx, gradient, logits):
        return gradient.clone()

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "d3pm_loss can be differentiated once: for gradient penalties and other double backward passes compute it inside "
            "`with d3pm_hf.kernels.kernels_disabled():`, which makes it the plain KL divergence"
        )


def _compiled_terms(
    transition: Transition, logits: torch.Tensor, x_0, x_t, s, t, options: Options, loss_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[`fused_terms`] inside `torch.compile`: operations that it makes a few loops of, or one operator that is called as it is."""
    want_gradient = logits.requires_grad and torch.is_grad_enabled()
    states = x_0, x_t, s, t
    with torch.no_grad():
        if logits.shape[-1] <= SHORT_ROW and abilities_of(transition.fused_loss).traceable:
            vb, cross_entropy, gradient = create_walk(transition, *states, options, loss_mask)(logits, want_gradient)
            loss = total_loss(vb, cross_entropy, options.hybrid_coeff)
        else:
            numbers = transition.handle, want_gradient, *astuple(options)
            loss, vb, cross_entropy, gradient = _fused_loss(logits, *states, loss_mask, *numbers)
    return _WithGradient.apply(logits, loss, gradient) if want_gradient else loss, vb, cross_entropy


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
        definition = transition_of(transition)
        walk = create_walk(definition.kernel() or definition, x_0, x_t, s, t, options, loss_mask)
        vb, cross_entropy, gradient = walk(logits, want_gradient)
        loss = total_loss(vb, cross_entropy, hybrid_coeff)
    return loss, vb, cross_entropy, logits.new_empty(0) if gradient is None else gradient


@_fused_loss.register_fake
def _(logits, x_0, x_t, s, t, loss_mask, transition, want_gradient, *options):
    dtype = compute_dtype(logits)
    loss, vb, cross_entropy = (x_t.new_empty(x_t.shape, dtype=dtype) for _ in range(3))
    gradient = logits.new_empty(logits.shape, dtype=dtype) if want_gradient else logits.new_empty(0)
    return loss, vb, cross_entropy, gradient
