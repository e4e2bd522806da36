# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The terms of the bound in continuous time, for processes that keep a state or draw it anew from pi.

The limit of eq. 1 of the paper for infinitely many steps is an integral over L = -log A, where A = q(x_t = x_0 | x_0) without
the draws from pi that hit x_0. With q(z) = A [z = x_0] + (1 - A) pi(z) and m(z) = A p(z) + (1 - A) pi(z), p the prediction of
x_0, the reverse process of eq. 3 jumps from x_t to z at the rate pi(x_t) q(z) / q(x_t), and that of eq. 4 at the rate
pi(x_t) m(z) / m(x_t). The KL divergence between the two grows by

    sum_{z != x_t} pi(x_t) (q(z) / q(x_t) log(q(z) m(x_t) / (q(x_t) m(z))) - q(z) / q(x_t) + m(z) / m(x_t))
    = pi(x_t) / q(x_t) (KL(q || m) + r - 1 - log r),   r = q(x_t) / m(x_t)

per unit of L. For an absorbing process it is -A / (1 - A) log p(x_0) where x_t is the mask, and zero elsewhere.
"""

from typing import NamedTuple

import torch

from ..numerics import in_pieces, logaddexp, spread, wide_dtype, without_autocast
from ..schedulers import D3PMScheduler
from ..transitions import RankOneTransition


class Prediction(NamedTuple):
    """Statistics of the leave-one-out prediction p of x_0 that the rate is computed from, each `[B, ...]` in float64.

    Fields:
        log_p_0: log p(x_0).
        log_p_t: log p(x_t).
        spread: sum_z pi(z) log(m(z) / ((1 - A) pi(z))).
    """

    log_p_0: torch.Tensor
    log_p_t: torch.Tensor
    spread: torch.Tensor


def continuous_transition(scheduler: D3PMScheduler) -> RankOneTransition:
    """The transition of a scheduler, after checks that its process has a limit of infinitely many steps."""
    transition, config = scheduler.transition, scheduler.config
    if not (isinstance(transition, RankOneTransition) and transition.has_continuous_time):
        raise ValueError(
            "continuous_time=True needs a process that keeps a state or draws it anew ('absorbing', 'uniform', "
            f"'absorbing_uniform', 'stationary'), and this one is {config.transition!r}: pass continuous_time=False"
        )
    if config.prediction_type == "previous" or config.reconstruction != "posterior":
        raise ValueError(
            "continuous_time=True needs prediction_type 'x0' or 'logistic' and reconstruction='posterior', and this "
            f"scheduler has {config.prediction_type!r} and {config.reconstruction!r}: pass continuous_time=False"
        )
    return transition


@without_autocast
def predict_data(
    scheduler: D3PMScheduler,
    model_output: torch.Tensor,
    x_0: torch.Tensor,
    x_t: torch.Tensor,
    timesteps: torch.Tensor,
    log_odds: torch.Tensor,
    loss_mask: torch.Tensor,
    index: torch.Tensor | None = None,
) -> Prediction:
    """The prediction of x_0 from the output of the network, in pieces that fit a cache.

    Args:
        model_output: Output of the network for `(x_t, timesteps)`.
        x_0, x_t: States `[B, ...]`.
        timesteps: The timesteps that the network was shown, `[B]`. Logits of the denoising posterior are converted at them:
            the network knows of no other time.
        log_odds: log(A / (1 - A)), broadcastable over the elements.
        loss_mask: The elements that count.
        index: The elements `[n]` that the output `[n, K]` has rows for; all others get zeros. All elements by default.
    """
    scheduler.check_model_output(model_output, x_t, index)
    index = torch.arange(x_t.numel(), device=x_t.device) if index is None else index
    scheduler.check_data_states(x_0, loss_mask)
    transition, wide = continuous_transition(scheduler), wide_dtype(x_t.device)
    n = scheduler.num_steps_behind(timesteps)
    denoising = scheduler.config.x0_posterior == "denoising"
    shift = transition.log_odds_of_staying(x_t, n) if denoising else torch.zeros_like(x_t, dtype=wide)
    pi, log_pi = transition.table("stationary", x_t.device), transition.table("log_stationary", x_t.device)
    mask = transition.absorbing_state

    def piece(logits, x_0, x_t, shift, log_odds):
        """log p(x_0), log p(x_t) and the spread of rows of logits `[r, K]`, `[r, 3]`."""
        logits = transition.excluded.fill_(logits.to(wide, copy=True), -torch.inf)
        log_p = logits.scatter_add_(-1, x_t[:, None], -shift[:, None]).log_softmax(-1)
        zero = log_p.new_zeros(())
        if mask is None:
            log_share = (log_odds[:, None] + log_p - log_pi).masked_fill_(pi == 0, -torch.inf)
            mean = logaddexp(log_share, zero) @ pi
        else:
            mean = logaddexp(log_odds + log_p[:, mask], zero)
        return torch.stack([*(log_p.gather(-1, x[:, None]).squeeze(-1) for x in (x_0, x_t)), mean], -1)

    logits = scheduler.logits(model_output.reshape(len(index), -1), index)  # [n, K]
    elements = [v.expand(x_t.shape).flatten()[index] for v in (x_0, x_t, shift, log_odds)]
    parts = in_pieces(piece, transition.num_classes, logits, *elements)  # [n, 3]
    undefined = parts.isnan().any(-1) & ~logits.isnan().any(-1) & loss_mask.flatten()[index]
    if undefined.any():
        undefined = spread(undefined, index, x_t.shape)
        scheduler.check_possible(undefined, spread(logits, index, x_t.shape), x_t, n)
    return Prediction(*spread(parts, index, x_t.shape).unbind(-1))


def divergence_rate(
    transition: RankOneTransition,
    prediction: Prediction,
    x_0: torch.Tensor,
    x_t: torch.Tensor,
    log_a: torch.Tensor,
    log_noise: torch.Tensor,
) -> torch.Tensor:
    """The growth of the bound per unit of L = -log A, `[B, ...]`: pi(x_t) / q(x_t) (KL(q || m) + r - 1 - log r).

    It is zero where noise cannot lead to x_t. Its expectation over x_t is that of the KL divergences of infinitely short steps.

    Args:
        x_0, x_t: States `[B, ...]`.
        log_a, log_noise: log A and log(1 - A), broadcastable over the elements.
    """
    log_pi = transition.table("log_stationary", x_t.device)
    noise_0, noise_t = log_noise + log_pi[x_0], log_noise + log_pi[x_t]
    log_q_0, log_m_0 = logaddexp(log_a.expand_as(noise_0), noise_0), logaddexp(log_a + prediction.log_p_0, noise_0)
    # Of KL(q || m), state x_0 has a term of its own. All others have q(z) = (1 - A) pi(z), and the spread has their sum.
    own = torch.where(noise_0 > -torch.inf, log_pi[x_0].exp() * (log_m_0 - noise_0), 0)
    divergence = log_q_0.exp() * (log_q_0 - log_m_0) - log_noise.exp() * (prediction.spread - own)
    log_q_t = torch.where(x_t == x_0, log_q_0, noise_t)
    log_r = log_q_t - logaddexp(log_a + prediction.log_p_t, noise_t)
    rate = torch.exp(log_pi[x_t] - log_q_t) * (divergence + torch.expm1(log_r) - log_r)
    return torch.where(noise_t > -torch.inf, rate, 0)


def unchanged_rate(log_p_0: torch.Tensor, log_pi_0: torch.Tensor, log_a, log_noise) -> torch.Tensor:
    """A pi(x_0) / m(x_0), which grows without bound at the data if p(x_0) is small; zero where pi(x_0) is.

    [`divergence_rate`] at x_t = x_0 is pi(x_0) / m(x_0) plus what stays bounded.
    """
    rate = torch.exp(log_a + log_pi_0 - logaddexp(log_a + log_p_0, log_noise + log_pi_0))
    return torch.where(log_pi_0 > -torch.inf, rate, 0)


def unchanged_integral(log_p_0: torch.Tensor, log_pi_0: torch.Tensor, last_a: float) -> torch.Tensor:
    """The integral of [`unchanged_rate`] over L from the data to A = `last_a`, in closed form.

        int dA / (1 + A (r - 1)) from `last_a` to 1 = (log r - log(1 + `last_a` (r - 1))) / (r - 1),   r = p(x_0) / pi(x_0)

    It is infinite if p(x_0) is zero: the reverse process cannot end in x_0.
    """
    log_r = torch.where(log_pi_0 > -torch.inf, log_p_0 - log_pi_0, 0)
    excess = torch.expm1(log_r)
    integral = torch.where(excess == 0, 1 - last_a, (log_r - torch.log1p(last_a * excess)) / excess)
    return torch.where(log_pi_0 > -torch.inf, integral, 0)
