# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The variational bound, its parts, and the auxiliary cross-entropy: L_vb and L_lambda, in nats per element.

Everything is per element, so that padding can be masked and losses weighted. The terms of logits of x_0 come with
their gradients: the rows are walked once, in pieces that fit a cache, and the gradient is written where autograd would
have put several copies of the logits.
"""

from dataclasses import dataclass
from typing import Callable

import torch
from diffusers.utils import BaseOutput
from torch.autograd.function import once_differentiable

from .sampling import CHUNK_BYTES, wide_dtype
from .schedulers import D3PMScheduler
from .transitions import DenseTransition, RankOneTransition, SparseRateTransition, Transition
from .transitions.base import divergence_terms, expand_time
from .transitions.rank_one import log1mexp


# Bytes of logits in one piece on an accelerator, where a piece is a handful of kernel launches.
ACCELERATOR_CHUNK_BYTES = 1 << 28
# From this K on a piece is one sample: its matrices are then as large as its logits.
LARGE_MATRIX = 64
# Beyond these, in float32, 1 / pi stands for a state without noise and A_s / (1 - A_s) for no noise at all; their product
# is still finite.
MAX_INVERSE_PI, MAX_SURVIVAL_ODDS = 1e10, 1e25
# A ratio q(x_s | x_0) / p(x_s) above this means that a float32 product has left the normal numbers.
MAX_RATIO = 1e25


@dataclass
class D3PMLossOutput(BaseOutput):
    """Output of [`d3pm_loss`]; all of shape `[B, ...]`, in nats.

    Args:
        loss (`torch.Tensor`): `vb + hybrid_coeff * cross_entropy`, to be weighted, averaged and differentiated.
        vb (`torch.Tensor`): the term of L_vb at this timestep, detached.
        cross_entropy (`torch.Tensor`, *optional*): -log p(x_0), detached; `None` if the network predicts no x_0.
    """

    loss: torch.Tensor
    vb: torch.Tensor
    cross_entropy: torch.Tensor | None = None


def d3pm_loss(
    scheduler: D3PMScheduler,
    model_output: torch.Tensor,
    x_0: torch.LongTensor,
    x_t: torch.LongTensor,
    timesteps: torch.LongTensor | int,
    *,
    hybrid_coeff: float = 0.0,
    auxiliary: str = "raw",
    previous_timesteps: torch.LongTensor | int | None = None,
) -> D3PMLossOutput:
    """The term of L_lambda = L_vb + lambda sum_t CE_t at one timestep per sample (the paper's eq. 5).

        vb_t = KL(q(x_s | x_t, x_0) || p(x_s | x_t)),   and -log p(x_0 | x_1) where x_s is the data

    The expectation of `T * loss` over uniform timesteps is L_lambda without the prior term, [`prior_loss`].

    Args:
        scheduler: the process.
        model_output (`torch.Tensor` of shape `[B, ..., K]`, or `[B, ..., 2]` if logistic): the network's output for x_t.
        x_0, x_t (`torch.LongTensor` of shape `[B, ...]`): the data and `scheduler.add_noise(x_0, timesteps)`.
        timesteps (`torch.LongTensor` of shape `[B]`, or `int`): t.
        hybrid_coeff (`float`, defaults to 0.0): lambda, per timestep: the paper's 0.001 for images and 0.01 for text.
        auxiliary (`str`, defaults to `"raw"`): what the cross-entropy looks at: the network's output as it is, as in the
            paper; or `"denoising"`, the denoising posterior that leave-one-out logits stand for, which shares its optimum
            with L_vb. Logits of the denoising posterior itself need no conversion.
        previous_timesteps (`torch.LongTensor` of shape `[B]`, or `int`, *optional*): s, for the bound at fewer steps;
            -1 stands for the data. One step before `timesteps` by default.
    """
    if auxiliary not in ("raw", "denoising"):
        raise ValueError(f"auxiliary is {auxiliary!r}: it must be 'raw' or 'denoising'")
    scheduler.check_model_output(model_output, x_t)
    scheduler.check_timesteps(timesteps)
    t = scheduler.num_steps_behind(timesteps)
    s = None if previous_timesteps is None else scheduler.num_steps_behind(previous_timesteps)
    if scheduler.config.prediction_type == "previous":
        if hybrid_coeff:
            raise ValueError("prediction_type='previous' predicts no x_0: leave hybrid_coeff at 0")
        vb = _previous_terms(scheduler.transition, model_output, x_0, x_t, s, t)
        return D3PMLossOutput(loss=vb, vb=vb.detach())
    terms = _rank_one_terms if isinstance(scheduler.transition, RankOneTransition) else _matrix_terms
    denoising = scheduler.config.x0_posterior == "denoising"
    walk = terms(
        scheduler.transition,
        *(x_0, x_t, s, t),
        denoising=denoising,
        raw_reconstruction=scheduler.config.reconstruction == "raw",
        hybrid_coeff=hybrid_coeff,
        convert_auxiliary=auxiliary == "denoising" and not denoising,
    )
    logits = scheduler.x0_logits(model_output, x_t)
    return D3PMLossOutput(*_Terms.apply(logits, walk, hybrid_coeff))


def prior_loss(scheduler: D3PMScheduler, x_0: torch.LongTensor) -> torch.Tensor:
    """L_T = KL(q(x_T | x_0) || prior), per element, in nats. It does not depend on the network."""
    return scheduler.transition.prior_divergence(x_0)


class _Terms(torch.autograd.Function):
    """Lets autograd use the gradient that a walk over the logits makes on its way."""

    @staticmethod
    def forward(ctx, logits, walk, hybrid_coeff):
        vb, cross_entropy, ctx.gradient = walk(logits, ctx.needs_input_grad[0])
        ctx.walk = walk
        ctx.save_for_backward(logits)
        ctx.mark_non_differentiable(vb, cross_entropy)
        return vb + hybrid_coeff * cross_entropy, vb, cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, weight, _, __):
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:  # a second pass over a retained graph: the first one has used the buffer up
            gradient = ctx.walk(ctx.saved_tensors[0], True)[2]
        return gradient.mul_(weight[..., None].to(gradient.dtype)), None, None


Walk = Callable[[torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def _compute_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunk_rows(logits: torch.Tensor) -> int:
    limit = CHUNK_BYTES if logits.device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
    return max(1, limit // (4 * logits.shape[-1]))


def _rank_one_terms(
    transition: RankOneTransition,
    x_0: torch.Tensor,
    x_t: torch.Tensor,
    s,
    t,
    *,
    denoising: bool,
    raw_reconstruction: bool,
    hybrid_coeff: float,
    convert_auxiliary: bool,
) -> Walk:
    """The terms of Q = a I + (1 - a) 1 pi', in O(K) with one pass over the logits.

    Write A_s, A_t for the survival of s and t steps, a = A_t / A_s, m_j = A_s p_j + (1 - A_s) pi_j for the predicted
    distribution of x_s, D_j = log q(x_s = j | x_0) - log m_j, and Z = A_t p(x_t) + (1 - A_t) pi(x_t), Z_0 the same with
    p = [x_0]. The posterior q(x_s | x_t, x_0) is a mixture of three, so that

        KL = W_t D(x_t) + W_0 D(x_0) + W_pi sum_j pi_j D_j + log Z - log Z_0
        W_t = a (A_s [x_0 = x_t] + (1 - A_s) pi(x_t)) / Z_0,   W_0 = (1 - a) pi(x_t) A_s / Z_0,   W_t + W_0 + W_pi = 1

    Numbers per element are float64: the terms nearly cancel where a step is short.
    """
    wide = wide_dtype(x_t.device)
    s = t - 1 if s is None else s
    log_a, log_a_s, log_a_t = (transition.log_survival(*pair, x_t) for pair in ((s, t), (0, s), (0, t)))
    log_pi = transition.table("log_stationary", x_t.device)
    same = x_0 == x_t
    noise_s, noise_t = log1mexp(log_a_s), log1mexp(log_a_t)  # log(1 - A)
    pi_t, log_pi_t, log_pi_0 = log_pi[x_t].exp(), log_pi[x_t], log_pi[x_0]
    z_0 = torch.where(same, log_a_t.exp(), 0) + noise_t.exp() * pi_t
    w_t = log_a.exp() * (torch.where(same, log_a_s.exp(), 0) + noise_s.exp() * pi_t) / z_0
    w_0 = -torch.expm1(log_a) * pi_t * log_a_s.exp() / z_0
    w_pi = -torch.expm1(log_a) * pi_t * noise_s.exp() / z_0
    log_noise_0, log_noise_t = noise_s + log_pi_0, noise_s + log_pi_t
    log_q_0 = torch.logaddexp(log_a_s, log_noise_0)  # log q(x_s = x_0 | x_0)
    log_q_t = torch.where(same, log_q_0, log_noise_t)
    # What KL owes to q alone. A weight of zero takes its term along: that keeps 0 * -inf away.
    state = transition.absorbing_state
    if state is None:
        own = torch.where(log_noise_0 > -torch.inf, log_pi_0.exp() * (log_q_0 - log_noise_0), 0)
    else:
        own = noise_s.expand(x_0.shape).masked_fill(x_0 == state, 0)  # log q(x_s = m | x_0)
    constant = _weighted(w_t, log_q_t) + _weighted(w_0, log_q_0) + _weighted(w_pi, own)
    # log Z - log Z_0 turns -log p(x_0) into the cross-entropy of the denoising posterior. Logits of that posterior need
    # it to be scored as they are, but where x_0 = x_t is certain: there `log_odds_of_staying` leaves them alone.
    log_tail = noise_t + log_pi_t  # log (1 - A_t) pi(x_t)
    raw_keeps_z = log_tail > -torch.inf if denoising else torch.zeros_like(same)
    keeps_z = raw_keeps_z | ((expand_time(s, x_t) > 0) | (not raw_reconstruction))
    constant = constant - keeps_z * z_0.log()
    shift = transition.log_odds_of_staying(x_t, t) if denoising else None

    elements = {
        "x_0": x_0,
        "x_t": x_t,
        "w_t": w_t,
        "w_0": w_0,
        "w_pi": w_pi,
        "constant": constant,
        "log_z_0": z_0.log(),
        "log_a_s": log_a_s,
        "log_a_t": log_a_t,
        "noise_s": noise_s,
        "log_noise_0": log_noise_0,
        "log_noise_t": log_noise_t,
        "log_tail": log_tail,
        "keeps_z": keeps_z.to(wide),
        "auxiliary_keeps_z": (raw_keeps_z | convert_auxiliary).to(wide),
        "odds": torch.exp(log_a_s - noise_s).clamp(max=MAX_SURVIVAL_ODDS),
        "shift": shift,
    }
    elements = {name: v.expand(x_t.shape).flatten() for name, v in elements.items() if v is not None}

    def walk(logits, want_gradient):
        dtype = _compute_dtype(logits)
        flat = logits.reshape(-1, transition.num_classes)
        gradient = torch.empty_like(flat) if want_gradient else None
        size = _chunk_rows(flat)
        pieces = []
        for first in range(0, len(flat), size):
            rows = slice(first, first + size)
            piece = {name: v[rows] for name, v in elements.items()}
            out = None if gradient is None else gradient[rows]
            pieces.append(_rank_one_rows(transition, flat[rows], piece, dtype, hybrid_coeff, out))
        vb, cross_entropy = (torch.cat(part).to(dtype).view_as(x_t) for part in zip(*pieces))
        return vb, cross_entropy, None if gradient is None else gradient.view_as(logits)

    return walk


def _weighted(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.where(weight > 0, weight * value, 0)


def _rank_one_rows(
    transition: RankOneTransition,
    logits: torch.Tensor,  # [n, K]
    e: dict[str, torch.Tensor],  # [n] each
    dtype: torch.dtype,
    hybrid_coeff: float,
    gradient: torch.Tensor | None,  # [n, K], written
) -> tuple[torch.Tensor, torch.Tensor]:
    """vb and cross-entropy of some rows; see `_rank_one_terms` for the formula and its letters."""
    at_0, at_t = e["x_0"][:, None], e["x_t"][:, None]
    if "shift" in e:
        logits = logits.to(dtype).scatter_add(-1, at_t, -e["shift"][:, None].to(dtype))
    log_p = transition.forbid(logits).log_softmax(-1, dtype=dtype)
    wide = e["w_t"].dtype
    log_p_0, log_p_t = log_p.gather(-1, at_0).squeeze(-1).to(wide), log_p.gather(-1, at_t).squeeze(-1).to(wide)
    log_m_0 = torch.logaddexp(e["log_a_s"] + log_p_0, e["log_noise_0"])
    log_m_t = torch.logaddexp(e["log_a_s"] + log_p_t, e["log_noise_t"])
    log_z = torch.logaddexp(e["log_a_t"] + log_p_t, e["log_tail"])
    vb = e["constant"] + e["keeps_z"] * log_z - _weighted(e["w_t"], log_m_t) - _weighted(e["w_0"], log_m_0)
    cross_entropy = e["auxiliary_keeps_z"] * (log_z - e["log_z_0"]) - log_p_0

    result = gradient if gradient is None or gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    # h_j = p_j dL/dp_j, which is all that the gradient p_j (dL/dp_j - sum_i p_i dL/dp_i) is made of.
    h_0 = -_weighted(e["w_0"], torch.exp(e["log_a_s"] + log_p_0 - log_m_0)) - hybrid_coeff
    share_of_z = torch.exp(e["log_a_t"] + log_p_t - log_z)
    h_t = (e["keeps_z"] + hybrid_coeff * e["auxiliary_keeps_z"]) * share_of_z
    h_t = h_t - _weighted(e["w_t"], torch.exp(e["log_a_s"] + log_p_t - log_m_t))
    if transition.absorbing_state is not None:
        m = transition.absorbing_state
        log_p_m = log_p[:, m].to(wide)
        log_m_m = torch.logaddexp(e["log_a_s"] + log_p_m, e["noise_s"])
        vb = vb - _weighted(e["w_pi"], log_m_m)
        if gradient is None:
            return vb, cross_entropy
        h_m = -_weighted(e["w_pi"], torch.exp(e["log_a_s"] + log_p_m - log_m_m))
        total = h_0 + h_t + h_m
        torch.mul(log_p.exp_(), -total[:, None].to(dtype), out=result)
        result[:, m] += h_m.to(dtype)
    else:
        p = log_p.exp_()
        inverse_pi = transition.table("stationary", p.device, dtype).reciprocal().clamp(max=MAX_INVERSE_PI)
        signal = p * inverse_pi if transition.stationary.min() != transition.stationary.max() else p * inverse_pi[0]
        signal.mul_(e["odds"][:, None].to(dtype))  # A_s p_j / ((1 - A_s) pi_j)
        information = torch.log1p(signal) @ transition.table("stationary", p.device, dtype)
        vb = vb - _weighted(e["w_pi"], information.to(wide))
        if gradient is None:
            return vb, cross_entropy
        damped = signal.add_(1).reciprocal_()  # the share of noise in m_j
        h_pi = -e["w_0"] * torch.linalg.vecdot(p, damped).to(wide)  # sum over j
        total = h_0 + h_t + h_pi
        damped.mul_(-e["w_0"][:, None].to(dtype)).sub_(total[:, None].to(dtype))
        torch.mul(p, damped, out=result)
    result.scatter_add_(-1, at_0, h_0[:, None].to(dtype))
    result.scatter_add_(-1, at_t, h_t[:, None].to(dtype))
    if result is not gradient:
        gradient.copy_(result)
    return vb, cross_entropy


def _matrix_terms(
    transition: DenseTransition | SparseRateTransition,
    x_0: torch.Tensor,
    x_t: torch.Tensor,
    s,
    t,
    *,
    denoising: bool,
    raw_reconstruction: bool,
    hybrid_coeff: float,
    convert_auxiliary: bool,
) -> Walk:
    """The terms of any other process: one product with Qbar_s each way.

    With row = q(x_s | x_0), column = q(x_t | x_s), m = p Qbar_s, Z_0 = <row, column>, Z = <column, m>, w = row column / Z_0:

        KL = <w, log(row / m)> + log Z - log Z_0
    """
    shape = x_t.shape
    x_0, x_t = x_0.flatten(1), x_t.flatten(1)  # [B, N]
    t = torch.as_tensor(t, device=x_t.device).expand(len(x_t))
    s = s if s is None else torch.as_tensor(s, device=x_t.device).expand(len(x_t))

    def walk(logits, want_gradient):
        logits = logits.reshape(*x_t.shape, -1)
        gradient = torch.empty_like(logits) if want_gradient else None
        size = 1
        if transition.num_classes < LARGE_MATRIX:
            size = max(1, _chunk_rows(logits) // x_t.shape[1])
        pieces = []
        for first in range(0, len(logits), size):
            part = slice(first, first + size)
            piece = logits[part], x_0[part], x_t[part], s if s is None else s[part], t[part]
            vb, cross_entropy, part_gradient = _matrix_rows(
                transition, *piece, denoising, raw_reconstruction, hybrid_coeff, convert_auxiliary, want_gradient
            )
            pieces.append((vb, cross_entropy))
            if want_gradient:
                gradient[part] = part_gradient
        vb, cross_entropy = (torch.cat(values).view(shape) for values in zip(*pieces))
        return vb, cross_entropy, None if gradient is None else gradient.view(*shape, -1)

    return walk


def _matrix_rows(
    transition: DenseTransition | SparseRateTransition,
    logits: torch.Tensor,  # [b, N, K]
    x_0: torch.Tensor,  # [b, N]
    x_t: torch.Tensor,
    s: torch.Tensor | None,  # [b]
    t: torch.Tensor,
    denoising: bool,
    raw_reconstruction: bool,
    hybrid_coeff: float,
    convert_auxiliary: bool,
    want_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """vb, cross-entropy and the gradient of some samples; see `_matrix_terms`."""
    table_dtype = _compute_dtype(logits)
    raw_log_p = transition.forbid(logits.to(table_dtype)).log_softmax(-1)
    log_p = raw_log_p
    if denoising:
        log_p = transition.to_leave_one_out(raw_log_p, x_t, t).log_softmax(-1)
    before = t - 1 if s is None else s
    # The last step of the authors' image code takes the network's output as it is, without q(x_t | x_0).
    is_raw = (before == 0) & raw_reconstruction  # [b]

    def terms(log_p, raw_log_p, x_0, x_t, s, t, before, is_raw):
        at_0, is_raw = x_0[..., None], is_raw[:, None, None]
        row, column = transition.posterior_factors(x_0, x_t, s, t, log_p.dtype, table_dtype)
        p = log_p.exp()
        m = transition.apply_cumulative(p, before, table_dtype)
        w = row * column
        z_0, z = w.sum(-1, keepdim=True), torch.linalg.vecdot(column, m)[..., None]
        w = w.div_(z_0)
        without = w == 0  # also keeps 0 / 0 away
        ratio = (row / m).masked_fill_(without, 1)
        kl = torch.linalg.vecdot(w, ratio.log()) + (z / z_0).log().squeeze(-1)
        raw_cross_entropy = -raw_log_p.gather(-1, at_0).squeeze(-1)
        cross_entropy = raw_cross_entropy
        if convert_auxiliary:
            cross_entropy = (z / z_0).log().squeeze(-1) - log_p.gather(-1, at_0).squeeze(-1)
        vb = torch.where(is_raw[..., 0], raw_cross_entropy, kl)
        if not want_gradient:
            return vb, cross_entropy, ratio, None
        # dL/dm; p dL/dp then sums to zero over the classes, but for the x_0 term of the converted cross-entropy.
        slope = torch.where(is_raw, 0, w.div_(m).masked_fill_(without, 0).neg_().addcdiv_(column, z))
        converted = hybrid_coeff if convert_auxiliary else 0.0
        if converted:
            slope = slope.addcdiv_(column, z, value=converted)
        gradient = transition.apply_cumulative(slope, before, table_dtype, transposed=True).mul_(p)
        raw = is_raw.to(p.dtype) + (hybrid_coeff - converted)
        if hybrid_coeff or raw_reconstruction:
            gradient += raw * (raw_log_p.exp() if denoising else p)
            gradient.scatter_add_(-1, at_0, (-raw - converted).expand(at_0.shape))
        return vb, cross_entropy, ratio, gradient

    vb, cross_entropy, ratio, gradient = terms(log_p, raw_log_p, x_0, x_t, s, t, before, is_raw)
    if table_dtype == torch.float32:
        # Where a network is sure of something else, m underflows. Those few rows are done again in float64.
        sample, position = (~(ratio.amax(-1) < MAX_RATIO)).nonzero(as_tuple=True)
        if len(position):
            one = len(logits) == 1  # one sample with several positions; else each row is a sample of its own
            rows, whose = ((slice(None), position), slice(None)) if one else ((sample, position, None), sample)
            again = terms(
                *(v[rows].double() for v in (log_p, raw_log_p)),
                *(v[rows] for v in (x_0, x_t)),
                *(v if v is None else v[whose] for v in (s, t, before, is_raw)),
            )
            for values, exact in zip((vb, cross_entropy, gradient), (again[0], again[1], again[3])):
                if values is not None:
                    values[sample, position] = exact.flatten(0, 1).to(table_dtype)
    return vb, cross_entropy, gradient


def _previous_terms(transition: Transition, logits: torch.Tensor, x_0, x_t, s, t) -> torch.Tensor:
    """KL(q(x_s | x_t, x_0) || softmax(logits)) for a network that predicts x_s itself."""
    log_p = logits.log_softmax(-1, dtype=_compute_dtype(logits))
    before = t - 1 if s is None else s
    log_q = transition.log_likelihood(x_t, s, t, log_p.dtype) + transition.log_marginal(x_0, 0, before, log_p.dtype)
    return divergence_terms(log_q.log_softmax(-1), log_p).sum(-1)
