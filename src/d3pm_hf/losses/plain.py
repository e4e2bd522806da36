# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The terms of the bound as the paper writes them: the definition of the loss, for any transition.

Fused losses (`kernels/`) compute the same numbers in one pass over the logits, with a gradient of their own.
"""

import torch

from ..numerics import compute_dtype, divergence_terms, lower_excluded, wide_dtype
from ..transitions import Transition
from ..transitions.base import expand_time
from ..transitions.kernel import Options


def plain_terms(
    transition: Transition, logits: torch.Tensor, x_0: torch.Tensor, x_t: torch.Tensor, s, t, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """The term of L_vb (eq. 1) and the cross-entropy of eq. 5, in nats, both `[B, ...]`.

        vb = KL(q(x_s | x_t, x_0) || p(x_s | x_t)),   which is -log p(x_0 | x_t) for s = 0
        cross_entropy = -log p(x_0)

    They are computed in float64, and returned in float32, or in float64 if the logits are. Autograd differentiates them any
    number of times, through `transition.log_marginal`. A logit of `-inf` is the limit of ever lower logits: a term may be
    infinite, and its gradient is still finite. If q(x_t | x_0) = 0, vb has no value and is NaN.

    Args:
        transition ([`Transition`]): The forward process.
        logits (`torch.Tensor` of shape `[B, ..., K]`): Logits of x_0.
        x_0, x_t, s, t: As in [`Transition.log_posterior`]; `s=None` means one step, t - 1.
        options ([`Options`]): What the logits mean, and which cross-entropy is computed.
    """
    dtype, logits = compute_dtype(logits), logits.to(wide_dtype(logits.device))
    states = (x_0, x_t, s, t, options)
    if not (logits == -torch.inf).any():
        terms = _terms(transition, logits, *states)
    else:
        terms = _terms(transition, lower_excluded(logits), *states)
        with torch.no_grad():
            limits = _terms(transition, logits, *states)
            undefined = transition.excludes_state(logits, x_t, t)
        # Infinity is added, so that the gradient stays. Undefined terms are NaN; no other NaN is.
        finite = (limit.isfinite() | (limit.isnan() & ~undefined) for limit in limits)
        terms = (v + limit.masked_fill(is_finite, 0) for v, limit, is_finite in zip(terms, limits, finite))
    vb, cross_entropy = (v.to(dtype) for v in terms)
    return vb, cross_entropy


def _terms(transition: Transition, logits: torch.Tensor, x_0, x_t, s, t, options: Options):
    """`plain_terms` in the dtype of the logits; gradients need finite logits."""
    log_q = transition.log_posterior(x_0, x_t, s, t, logits.dtype)  # eq. 3, [B, ..., K]
    raw = transition.forbid(logits).log_softmax(-1)  # log p(x_0) as the network gives it
    leave_one_out = transition.to_leave_one_out(logits, x_t, t) if options.denoising else logits
    log_p = transition.posterior_logits(leave_one_out, x_t, s, t).log_softmax(-1)  # eq. 4, [B, ..., K]
    if options.raw_reconstruction:
        is_last = expand_time(t - 1 if s is None else s, x_t) == 0
        log_p = torch.where(is_last[..., None], raw, log_p)
    log_p_0 = raw
    if options.convert_auxiliary:
        log_p_0 = (raw + transition.log_likelihood(x_t, 0, t, raw.dtype)).log_softmax(-1)
    return divergence(log_q, log_p), -log_p_0.gather(-1, x_0[..., None]).squeeze(-1)


def divergence(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """KL(q || p) of eq. 1, `[B, ...]`; NaN where q allows no state, which is eq. 3 for q(x_t | x_0) = 0."""
    total = divergence_terms(log_q, log_p).sum(-1)
    return total.masked_fill(log_q.amax(-1) == -torch.inf, torch.nan)
