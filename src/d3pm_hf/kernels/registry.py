# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The registry of fused losses by name."""

from collections.abc import Callable

import torch

from ..transitions import Transition
from ..transitions.kernel import Options
from ..utils.checks import check_str, check_type
from ..utils.registry import Registry
from .walk import Walk, masked


FusedLoss = Callable[..., Walk]

_fused_losses: Registry[FusedLoss] = Registry("fused loss", "register_fused_loss")


# The fused losses whose walk takes location and log-scale of a logistic in place of logits.
_reads_logistic: set[str] = set()
# Those whose walk `torch.compile` may trace.
_traceable: set[str] = set()


def register_fused_loss(
    name: str, reads_logistic: bool = False, traceable: bool = False
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

    Example:
        @register_fused_loss("keyboard")
        def keyboard_terms(transition, x_0, x_t, s, t, options, loss_mask): ...
    """
    check_str("name", name)
    check_type("reads_logistic", reads_logistic, bool, "True or False")
    check_type("traceable", traceable, bool, "True or False")

    def register(function: FusedLoss) -> FusedLoss:
        check_type("the fused loss", function, Callable, "a function")
        for names, belongs in ((_reads_logistic, reads_logistic), (_traceable, traceable)):
            (names.add if belongs else names.discard)(name)
        return _fused_losses.add(name, function)

    return register


def get_fused_loss(name: str | None) -> FusedLoss:
    """The fused loss of this name."""
    return _fused_losses.find("fused_loss", name)


def reads_logistic(name: str | None) -> bool:
    """Whether the fused loss of this name takes location and log-scale of a logistic."""
    return name in _reads_logistic


def is_traceable(name: str | None) -> bool:
    """Whether `torch.compile` may trace the walk of the fused loss of this name."""
    return name in _traceable


def create_walk(
    transition: Transition,
    x_0: torch.Tensor,
    x_t: torch.Tensor,
    s,
    t,
    options: Options,
    loss_mask: torch.Tensor | None,
) -> Walk:
    """The walk of the fused loss of a transition, with zeros for the elements that do not count."""
    walk = get_fused_loss(transition.fused_loss)(transition, x_0, x_t, s, t, options, loss_mask)
    return walk if loss_mask is None else masked(walk, loss_mask)
