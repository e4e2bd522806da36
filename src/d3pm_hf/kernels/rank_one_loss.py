# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Transitions that draw a state anew from pi: uniform, BERT's mix, any stationary distribution."""

from typing import NamedTuple

import torch

from ..numerics import log1mexp, logaddexp
from ..transitions import RankOneTransition
from ..transitions.base import expand_time
from ..transitions.kernel import Options
from .fused import register_fused_loss
from .pieces import RowWalk, softmax_parts, weighted


# Upper limits of 1 / pi (a state that noise never leads to) and of A_s / (1 - A_s) (no noise at all), whose product is finite in
# float32.
MAX_INVERSE_PI, MAX_SURVIVAL_ODDS = 1e25, 1e13


class RankOneElements(NamedTuple):
    """The numbers of each element apart from the logits; see [`rank_one_terms`] for the letters.

    Fields:
        x_0, x_t: The states.
        w_t, w_0, w_pi: W_t, W_0 and W_pi, the weights of the three parts of the posterior.
        constant: All of vb that does not depend on the logits.
        log_a_s, log_a_t: log A_s and log A_t.
        log_noise_0, log_noise_t: log (1 - A_s) pi(x_0) and log (1 - A_s) pi(x_t).
        log_tail: log (1 - A_t) pi(x_t).
        vb_z: The weight of log Z in vb, zero or one.
        odds: A_s / (1 - A_s).
        auxiliary: The weight of -log p(x_0) in the cross-entropy, zero or one; `None` if all are one.
        auxiliary_z: The weight of log Z - log Z_0 in the cross-entropy, zero or one; `None` if all are zero.
        log_z_0: log Z_0.
        shift: What converts the logit of x_t from the denoising posterior, or `None` if nothing is converted.
    """

    x_0: torch.Tensor
    x_t: torch.Tensor
    w_t: torch.Tensor
    w_0: torch.Tensor
    w_pi: torch.Tensor
    constant: torch.Tensor
    log_a_s: torch.Tensor
    log_a_t: torch.Tensor
    log_noise_0: torch.Tensor
    log_noise_t: torch.Tensor
    log_tail: torch.Tensor
    vb_z: torch.Tensor
    odds: torch.Tensor
    auxiliary: torch.Tensor | None
    auxiliary_z: torch.Tensor | None
    log_z_0: torch.Tensor
    shift: torch.Tensor | None


@register_fused_loss("rank_one", traceable=True, has_rows=True)
def rank_one_terms(
    transition: RankOneTransition, x_0: torch.Tensor, x_t: torch.Tensor, s, t, options: Options, loss_mask=None
) -> RowWalk:
    """KL(q(x_s | x_t, x_0) || p(x_s | x_t)) for Q = a I + (1 - a) 1 pi', in O(K) with one pass over the logits.

    Write A_s, A_t for the survival of s and t steps, a = A_t / A_s, m_j = A_s p_j + (1 - A_s) pi_j for the predicted
    distribution of x_s, D_j = log q(x_s = j | x_0) - log m_j, and Z = A_t p(x_t) + (1 - A_t) pi(x_t), Z_0 the same with
    p = [x_0]. The posterior q(x_s | x_t, x_0) is a mixture of three, so that

        KL = W_t D(x_t) + W_0 D(x_0) + W_pi sum_j pi_j D_j + log Z - log Z_0
        W_t = a (A_s [x_0 = x_t] + (1 - A_s) pi(x_t)) / Z_0,   W_0 = (1 - a) pi(x_t) A_s / Z_0,   W_t + W_0 + W_pi = 1

    Where pi(x_t) = 0 or A_t = 1, x_0 = x_t is certain, and the KL is zero whatever p is. Numbers per element are float64: the
    terms nearly cancel where a step is short.
    """
    elements = _elements(transition, x_0, x_t, s, t, options)
    return RowWalk(elements, _Rows(transition, options.hybrid_coeff), x_t.shape, 2)


def _elements(transition: RankOneTransition, x_0, x_t, s, t, options: Options) -> RankOneElements:
    """The elements of states x_0 and x_t of one shape."""
    before = t - 1 if s is None else s
    log_a, log_a_s, log_a_t = (transition.log_survival(a, b, x_t) for a, b in ((s, t), (0, before), (0, t)))
    noise_s, noise_t = log1mexp(log_a_s), log1mexp(log_a_t)  # log(1 - A)
    log_pi = transition.table("log_stationary", x_t.device)
    log_pi_0, log_pi_t = log_pi[x_0], log_pi[x_t]
    pi_t, same, moved = log_pi_t.exp(), x_0 == x_t, -torch.expm1(log_a)
    z_0 = torch.where(same, log_a_t.exp(), 0) + noise_t.exp() * pi_t
    w_t = log_a.exp() * (torch.where(same, log_a_s.exp(), 0) + noise_s.exp() * pi_t) / z_0
    w_0, w_pi = moved * pi_t * log_a_s.exp() / z_0, moved * pi_t * noise_s.exp() / z_0
    log_noise_0, log_noise_t = noise_s + log_pi_0, noise_s + log_pi_t
    log_q_0 = logaddexp(log_a_s, log_noise_0)  # log q(x_s = x_0 | x_0)
    log_q_t = torch.where(same, log_q_0, log_noise_t)
    # sum_j pi_j D_j = own - sum_j pi_j log(1 + A_s p_j / ((1 - A_s) pi_j))
    own = weighted(log_noise_0.exp(), log_pi_0.exp() * (log_q_0 - log_noise_0) / log_noise_0.exp())
    # log Z - log Z_0 turns -log p(x_0) into the cross-entropy of the denoising posterior. Logits of that posterior need it
    # to be scored as they are, but where x_0 = x_t is certain: there `log_odds_of_staying` leaves them alone.
    log_tail = noise_t + log_pi_t  # log (1 - A_t) pi(x_t)
    uncertain = log_tail > -torch.inf
    is_raw = (expand_time(before, x_t) == 0) & options.raw_reconstruction
    vb_z = uncertain & (options.denoising | ~is_raw)
    w_t, w_pi = (torch.where(uncertain, w, 0) for w in (w_t, w_pi))
    w_0 = torch.where(uncertain, w_0, is_raw.to(w_0.dtype))
    log_z_0 = z_0.log()
    constant = weighted(w_t, log_q_t) + weighted(w_0, log_q_0) + weighted(w_pi, own) - weighted(vb_z, log_z_0)
    return RankOneElements(
        x_0=x_0,
        x_t=x_t,
        w_t=w_t,
        w_0=w_0,
        w_pi=w_pi,
        constant=constant,
        log_a_s=log_a_s,
        log_a_t=log_a_t,
        log_noise_0=log_noise_0,
        log_noise_t=log_noise_t,
        log_tail=log_tail,
        log_z_0=log_z_0,
        vb_z=vb_z.to(w_t.dtype),
        auxiliary=uncertain.to(w_t.dtype) if options.convert_auxiliary else None,
        auxiliary_z=uncertain.to(w_t.dtype) if options.convert_auxiliary or options.denoising else None,
        odds=torch.exp(log_a_s - noise_s).clamp(max=MAX_SURVIVAL_ODDS),
        shift=transition.log_odds_of_staying(x_t, t) if options.denoising else None,
    )


class _Rows:
    """vb, cross-entropy and gradient of some rows; see [`rank_one_terms`] for the formula and its letters."""

    def __init__(self, transition: RankOneTransition, hybrid_coeff: float):
        self.transition, self.hybrid_coeff = transition, hybrid_coeff

    def __call__(self, logits, e: RankOneElements, weights, scratch, want_gradient):
        at_0, at_t, wide, dtype = e.x_0[..., None], e.x_t[..., None], e.w_t.dtype, weights.dtype
        if e.shift is not None:
            logits = logits.to(dtype).scatter_add(-1, at_t, -e.shift.to(dtype).expand(e.x_t.shape)[..., None])
        total, *log_p = softmax_parts(logits, self.transition.excluded, weights, at_0, at_t)
        total, log_p_0, log_p_t = total.squeeze(-1).to(wide), *(v.to(wide) for v in log_p)

        signal, logarithm = scratch
        pi = self.transition.table("stationary", weights.device, dtype)
        scale = (e.odds / total).to(dtype)[..., None]
        if self.transition.is_uniform:
            torch.mul(weights, scale / pi[0], out=signal)
        else:
            torch.mul(weights, pi.reciprocal().clamp(max=MAX_INVERSE_PI), out=signal).mul_(scale)
        signal.add_(1)  # 1 + A_s p_j / ((1 - A_s) pi_j)
        information = (torch.log(signal, out=logarithm) @ pi).to(wide)

        kept_0, kept_t, kept_z = e.log_a_s + log_p_0, e.log_a_s + log_p_t, e.log_a_t + log_p_t  # without the noise
        log_m_0, log_m_t = logaddexp(kept_0, e.log_noise_0), logaddexp(kept_t, e.log_noise_t)
        log_z = logaddexp(kept_z, e.log_tail)
        vb = torch.addcmul(e.constant, e.w_pi, information, value=-1)
        vb = vb + weighted(e.vb_z, log_z) - weighted(e.w_t, log_m_t) - weighted(e.w_0, log_m_0)
        cross_entropy = -log_p_0 if e.auxiliary is None else -weighted(e.auxiliary, log_p_0)
        if e.auxiliary_z is not None:
            cross_entropy = cross_entropy + weighted(e.auxiliary_z, log_z - e.log_z_0)
        if want_gradient:
            # h_j = p_j dL/dp_j: the gradient with respect to the logits is h_j - p_j sum_i h_i.
            share_0, share_t = (
                # of p in m: all of it where there is no noise, even if the logits exclude the state
                torch.exp(kept - log_m).masked_fill_(log_noise == -torch.inf, 1)
                for kept, log_m, log_noise in ((kept_0, log_m_0, e.log_noise_0), (kept_t, log_m_t, e.log_noise_t))
            )
            auxiliary = 1 if e.auxiliary is None else e.auxiliary
            weight_z = e.vb_z if e.auxiliary_z is None else e.vb_z + self.hybrid_coeff * e.auxiliary_z
            h_0 = -self.hybrid_coeff * auxiliary - e.w_0 * share_0
            h_t = weighted(weight_z, torch.exp(kept_z - log_z)) - e.w_t * share_t
            product = torch.mul(weights, signal.reciprocal_(), out=logarithm)  # of p_j and the share of noise in m_j
            w_0 = -e.w_0 / total
            h_pi = w_0 * product.sum(-1).to(wide)  # sum over j
            weights.mul_(((h_0 + h_t + h_pi) / -total).to(dtype)[..., None])
            weights.addcmul_(product, w_0.to(dtype)[..., None])
            weights.scatter_add_(-1, at_0, h_0.to(dtype)[..., None]).scatter_add_(-1, at_t, h_t.to(dtype)[..., None])
        return vb, cross_entropy
