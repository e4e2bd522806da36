# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Absorbing transitions, the autoregressive mask included: a weighted masked-language-model loss."""

from typing import NamedTuple

import torch

from ..numerics import log1mexp, logaddexp, wide_dtype
from ..transitions import RankOneTransition
from ..transitions.base import expand_time
from ..transitions.excluded import ExcludedStates
from ..transitions.kernel import Options
from .fused import register_fused_loss
from .pieces import RowWalk, softmax_parts, weighted


class MaskedElements(NamedTuple):
    """The weights of -log p(x_0) for each element, where the mask is not among the data.

    Fields:
        x_0: The data.
        vb: The weight in vb: w, the chance of a reveal, where x_t is the mask, else zero.
        auxiliary: The weight in the cross-entropy, zero or one; `None` if all are one.
    """

    x_0: torch.Tensor
    vb: torch.Tensor
    auxiliary: torch.Tensor | None


class MaskOrDataElements(NamedTuple):
    """The weights of each element if the mask is a data state, in which log Z(A) = log(A p(m) + 1 - A); see [`absorbing_terms`].

    Fields:
        x_0, vb, auxiliary: As in [`MaskedElements`].
        vb_z_s, vb_z_t: The weights of log Z(A_s) and log Z(A_t) in vb.
        auxiliary_z_t: The weight of log Z(A_t) in the cross-entropy.
        log_a_s, log_a_t: log A_s and log A_t.
        noise_s, noise_t: log(1 - A_s) and log(1 - A_t).
        norm_s, norm_t: log Z of a network that is sure of x_0.
        shift: What converts the logit of the mask from the denoising posterior, or `None` if nothing is converted.
    """

    x_0: torch.Tensor
    vb: torch.Tensor
    auxiliary: torch.Tensor
    vb_z_s: torch.Tensor
    vb_z_t: torch.Tensor
    auxiliary_z_t: torch.Tensor
    log_a_s: torch.Tensor
    log_a_t: torch.Tensor
    noise_s: torch.Tensor
    noise_t: torch.Tensor
    norm_s: torch.Tensor
    norm_t: torch.Tensor
    shift: torch.Tensor | None


@register_fused_loss("absorbing", traceable=True, has_rows=True)
def absorbing_terms(
    transition: RankOneTransition, x_0: torch.Tensor, x_t: torch.Tensor, s, t, options: Options, loss_mask=None
) -> RowWalk:
    """KL(q(x_s | x_t, x_0) || p(x_s | x_t)) for Q = a I + (1 - a) 1 e_m' (the paper's appendix A.3).

    It is zero unless x_t is the mask and may hide another state. There, with A the survival, w = (A_s - A_t) / (1 - A_t) the
    chance of a reveal, Z(A) = A p(m) + 1 - A, and x_0 not the mask,

        KL = -w log p(x_0) + log Z(A_t) / (1 - A_t) - (1 - w) log Z(A_s) / (1 - A_s)

    and log Z(A_t) - log Z(A_s) if x_0 is the mask, which stays itself. If the mask is not among the data, p(m) = 0, and
    -w log p(x_0) is all there is.
    """
    mask, wide = transition.absorbing_state, wide_dtype(x_t.device)
    if mask is None:
        raise ValueError(
            f"fused_loss of {type(transition).__name__} is 'absorbing', but it has no absorbing state: use 'rank_one'"
        )
    mask_in_data = mask not in transition.never_data
    before = t - 1 if s is None else s
    log_a_s, log_a_t = transition.log_survival(0, before, x_t), transition.log_survival(0, t, x_t)
    moved = -torch.expm1(transition.log_survival(s, t, x_t))  # 1 - A_t / A_s
    reveal = torch.where(moved > 0, moved * log_a_s.exp() / -torch.expm1(log_a_t), 0)
    masked = x_t == mask
    if mask_in_data:  # a mask that no step has touched shows itself, as every other state does
        masked = masked & (log_a_t < 0)
    vb = torch.where(masked, reveal, 0)
    # The last step of the authors' image code scores the output as it is. Logits of the denoising posterior do so by
    # themselves where x_t is the mask: there KL is the cross-entropy of what they were before the conversion.
    counts = masked
    if options.raw_reconstruction:
        is_raw = (expand_time(before, x_t) == 0) & ~(masked & options.denoising)
        vb, counts = torch.where(is_raw, 1, vb), masked & ~is_raw
    auxiliary = masked.to(wide) if options.convert_auxiliary else None
    if not mask_in_data:
        rows = _MaskedRows(transition.excluded, options.hybrid_coeff)
        return RowWalk(MaskedElements(x_0, vb, auxiliary), rows, x_t.shape, 0)

    stays = x_0 == mask
    noise_s, noise_t = log1mexp(log_a_s), log1mexp(log_a_t)
    elements = MaskOrDataElements(
        x_0=x_0,
        vb=torch.where(stays & counts, 0, vb),
        auxiliary=vb.new_ones(()) if auxiliary is None else auxiliary,
        vb_z_s=torch.where(counts, torch.where(stays, 1.0, 1 - reveal), 0).to(wide),
        vb_z_t=counts.to(wide),
        auxiliary_z_t=(masked & (options.convert_auxiliary or options.denoising)).to(wide),
        log_a_s=log_a_s,
        log_a_t=log_a_t,
        noise_s=noise_s,
        noise_t=noise_t,
        norm_s=torch.where(stays, 0, noise_s),
        norm_t=torch.where(stays, 0, noise_t),
        shift=torch.where(masked, transition.log_odds_of_staying(x_t, t), 0) if options.denoising else None,
    )
    return RowWalk(elements, _MaskOrDataRows(mask, transition.excluded, options.hybrid_coeff), x_t.shape, 0)


class _MaskedRows:
    """vb = -w log p(x_0): the mask is not among the data."""

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


class _MaskOrDataRows:
    """vb and cross-entropy if the mask is a data state; see [`absorbing_terms`] for the formula."""

    def __init__(self, mask: int, excluded: ExcludedStates, hybrid_coeff: float):
        self.mask, self.excluded, self.hybrid_coeff = mask, excluded, hybrid_coeff

    def __call__(self, logits, e: MaskOrDataElements, weights, _, want_gradient):
        at_0, wide = e.x_0[..., None], e.vb.dtype
        at_m = torch.full_like(at_0, self.mask)
        if e.shift is not None:
            logits = logits.to(weights.dtype).scatter_add(
                -1, at_m, -e.shift.to(weights.dtype).expand(e.x_0.shape)[..., None]
            )
        total, log_p_0, log_p_m = softmax_parts(logits, self.excluded, weights, at_0, at_m)
        total, log_p_0, log_p_m = total.to(wide), log_p_0.to(wide), log_p_m.to(wide)
        log_z_s = logaddexp(e.log_a_s + log_p_m, e.noise_s)
        log_z_t = logaddexp(e.log_a_t + log_p_m, e.noise_t)
        # The share of p(m) in Z: all of it where there is no noise, even if the logits exclude m.
        share_s = torch.where(e.noise_s > -torch.inf, torch.exp(e.log_a_s + log_p_m - log_z_s), 1)
        z_s, z_t = weighted(e.vb_z_s, log_z_s - e.norm_s), log_z_t - e.norm_t
        vb = weighted(e.vb_z_t, z_t) - z_s - weighted(e.vb, log_p_0)
        cross_entropy = weighted(e.auxiliary_z_t, z_t) - weighted(e.auxiliary, log_p_0)
        if want_gradient:
            h_0 = e.vb + self.hybrid_coeff * e.auxiliary
            weight_z_t = e.vb_z_t + self.hybrid_coeff * e.auxiliary_z_t
            h_m = weighted(weight_z_t, torch.exp(e.log_a_t + log_p_m - log_z_t)) - weighted(e.vb_z_s, share_s)
            weights.mul_(((h_0 - h_m)[..., None] / total).to(weights.dtype))
            weights[..., self.mask] += h_m.to(weights.dtype)
            weights.scatter_add_(-1, at_0, -h_0.to(weights.dtype).expand(e.x_0.shape)[..., None])
        return vb, cross_entropy
