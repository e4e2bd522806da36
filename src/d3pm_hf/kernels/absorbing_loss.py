# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Absorbing transitions, the autoregressive mask included: a weighted masked-language-model loss."""

from typing import NamedTuple

import torch

from ..numerics import wide_dtype
from ..transitions import RankOneTransition
from ..transitions.base import expand_time
from ..transitions.excluded import ExcludedStates
from ..transitions.kernel import Options
from .fused import register_fused_loss
from .pieces import RowWalk, Walk, softmax_parts, weighted
from .rank_one_loss import rank_one_terms


class MaskedElements(NamedTuple):
    """The weights of -log p(x_0) for each element.

    Fields:
        x_0: The data.
        vb: The weight in vb: w, the chance of a reveal, where x_t is the mask, else zero.
        auxiliary: The weight in the cross-entropy, zero or one; `None` if all are one.
    """

    x_0: torch.Tensor
    vb: torch.Tensor
    auxiliary: torch.Tensor | None


@register_fused_loss("absorbing", traceable=True, has_rows=True)
def absorbing_terms(
    transition: RankOneTransition, x_0: torch.Tensor, x_t: torch.Tensor, s, t, options: Options, loss_mask=None
) -> Walk:
    """KL(q(x_s | x_t, x_0) || p(x_s | x_t)) for Q = a I + (1 - a) 1 e_m' (the paper's appendix A.3).

    It is -w log p(x_0) where x_t is the mask, with w = (A_s - A_t) / (1 - A_t) the chance of a reveal and A the survival, and
    zero elsewhere. If the mask is a data state, [`rank_one_terms`] has the terms that p(m) adds.
    """
    mask, wide = transition.absorbing_state, wide_dtype(x_t.device)
    if mask is None:
        raise ValueError(
            f"fused_loss of {type(transition).__name__} is 'absorbing', but it has no absorbing state: use 'rank_one'"
        )
    if mask not in transition.never_data:
        return rank_one_terms(transition, x_0, x_t, s, t, options)
    before = t - 1 if s is None else s
    log_a_s, log_a_t = transition.log_survival(0, before, x_t), transition.log_survival(0, t, x_t)
    moved = -torch.expm1(transition.log_survival(s, t, x_t))  # 1 - A_t / A_s
    reveal = torch.where(moved > 0, moved * log_a_s.exp() / -torch.expm1(log_a_t), 0)
    masked = x_t == mask
    vb = torch.where(masked, reveal, 0)
    # The last step of the authors' image code scores the output as it is. Logits of the denoising posterior do so by
    # themselves where x_t is the mask: there KL is the cross-entropy of what they were before the conversion.
    if options.raw_reconstruction:
        is_raw = (expand_time(before, x_t) == 0) & ~(masked & options.denoising)
        vb = torch.where(is_raw, 1, vb)
    auxiliary = masked.to(wide) if options.convert_auxiliary else None
    rows = _MaskedRows(transition.excluded, options.hybrid_coeff)
    return RowWalk(MaskedElements(x_0, vb, auxiliary), rows, x_t.shape, 0)


class _MaskedRows:
    """vb = -w log p(x_0) and the cross-entropy of some rows; see [`absorbing_terms`]."""

    def __init__(self, excluded: ExcludedStates, hybrid_coeff: float):
        self.excluded, self.hybrid_coeff = excluded, hybrid_coeff

    def __call__(self, logits, e: MaskedElements, weights, _, want_gradient):
        at_0, vb, dtype = e.x_0[..., None], e.vb.to(weights.dtype), weights.dtype
        auxiliary = None if e.auxiliary is None else e.auxiliary.to(dtype)
        # The weight of -log p(x_0) in the loss.
        h_0 = (vb + self.hybrid_coeff * (1 if auxiliary is None else auxiliary))[..., None]
        total, log_p_0 = softmax_parts(logits, self.excluded, weights, at_0)
        if want_gradient:
            weights.mul_(h_0 / total).scatter_add_(-1, at_0, -h_0)
        return -weighted(vb, log_p_0), -log_p_0 if auxiliary is None else -weighted(auxiliary, log_p_0)
