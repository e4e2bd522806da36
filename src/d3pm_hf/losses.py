# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The variational bound, its parts, and the auxiliary cross-entropy: L_vb and L_lambda, in nats per element.

Everything is per element, so that padding can be masked and losses weighted. `terms/` has the closed forms: they walk
the logits once, in pieces that fit a cache, and write the gradient where autograd would have put several copies of them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers.utils import BaseOutput

from .schedulers import D3PMScheduler
from .terms import Options, WalkedTerms, terms_of
from .terms.base import compute_dtype
from .transitions import Transition
from .transitions.base import divergence_terms


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
    scheduler.check_states(x_0)
    scheduler.check_timesteps(timesteps, x_t, previous_timesteps)
    t = scheduler.num_steps_behind(timesteps)
    s = None if previous_timesteps is None else scheduler.num_steps_behind(previous_timesteps)
    if scheduler.config.prediction_type == "previous":
        if hybrid_coeff:
            raise ValueError("prediction_type='previous' predicts no x_0: leave hybrid_coeff at 0")
        vb = _previous_terms(scheduler.transition, model_output, x_0, x_t, s, t)
        return D3PMLossOutput(loss=vb, vb=vb.detach())
    denoising = scheduler.config.x0_posterior == "denoising"
    options = Options(
        denoising=denoising,
        raw_reconstruction=scheduler.config.reconstruction == "raw",
        hybrid_coeff=hybrid_coeff,
        convert_auxiliary=auxiliary == "denoising" and not denoising,
    )
    walk = terms_of(scheduler.transition, x_0, x_t, s, t, options)
    logits = scheduler.logits(model_output)
    return D3PMLossOutput(*WalkedTerms.apply(logits, walk, hybrid_coeff))


def prior_loss(scheduler: D3PMScheduler, x_0: torch.LongTensor) -> torch.Tensor:
    """L_T = KL(q(x_T | x_0) || prior), per element, in nats. It does not depend on the network."""
    return scheduler.transition.prior_divergence(x_0)


def autoregressive_loss(scheduler: D3PMScheduler, model_output: torch.Tensor, x_0: torch.LongTensor) -> torch.Tensor:
    """-log p(x_0^i | x_0 before i), per element, in nats: all terms of an `"autoregressive"` process in one pass.

    The term of timestep t is that of position N - 1 - t, which is the only one that its step reveals. A causal network gives
    the same answer for it whether the tokens behind are masked or not, so that the data itself can be read.

    Args:
        model_output (`torch.Tensor` of shape `[B, N, K]`): of a causal network, for the input x_0.
        x_0 (`torch.LongTensor` of shape `[B, N]`): the data.
    """
    scheduler.check_model_output(model_output, x_0)
    logits = scheduler.transition.forbid(model_output.to(compute_dtype(model_output)))
    return F.cross_entropy(logits.transpose(1, 2), x_0, reduction="none")


def _previous_terms(transition: Transition, logits: torch.Tensor, x_0, x_t, s, t) -> torch.Tensor:
    """KL(q(x_s | x_t, x_0) || softmax(logits)) for a network that predicts x_s itself."""
    log_p = logits.log_softmax(-1, dtype=compute_dtype(logits))
    before = t - 1 if s is None else s
    log_q = transition.log_likelihood(x_t, s, t, log_p.dtype) + transition.log_marginal(x_0, 0, before, log_p.dtype)
    return divergence_terms(log_q.log_softmax(-1), log_p).sum(-1)
