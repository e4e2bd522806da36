# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The variational bound, its parts, and the auxiliary cross-entropy: L_vb and L_lambda, in nats per element.

Everything is per element, so that losses can be weighted; `loss_mask` says which elements count. `fused/` has the closed forms: they walk
the logits once, in pieces that fit a cache, and write the gradient where autograd would have put several copies of them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers.utils import BaseOutput

from ..numerics import compute_dtype, divergence_terms, without_autocast
from ..schedulers import D3PMScheduler
from ..transitions import Transition
from ..utils.checks import check_choice, check_float, check_type
from .fused import Options, WalkedTerms, counted, get_fused_loss


# What F.cross_entropy calls a target that does not count.
IGNORED = -100


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


@without_autocast
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
    loss_mask: torch.Tensor | None = None,
) -> D3PMLossOutput:
    """The term of L_lambda = L_vb + lambda sum_t CE_t at one timestep per sample (the paper's eq. 5).

        vb_t = KL(q(x_s | x_t, x_0) || p(x_s | x_t)),   and -log p(x_0 | x_1) where x_s is the data

    The expectation of `T * loss` over uniform timesteps is L_lambda without the prior term, [`prior_loss`]. It is computed
    in float32 (in float64 if `model_output` is), inside `torch.autocast` as well, and can be differentiated once. A logit of
    `-inf` makes a state impossible: losses and gradients are the limits for ever lower logits.

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
        loss_mask (`torch.Tensor` of shape `[B, ...]`, *optional*): True (or 1) where an element counts, False (or 0) at
            padding. Elements that do not count have a loss and a gradient of zero, whatever their states and logits are.
    """
    check_type("scheduler", scheduler, D3PMScheduler, "a `D3PMScheduler`")
    check_choice("auxiliary", auxiliary, ("raw", "denoising"))
    check_float("hybrid_coeff", hybrid_coeff, 0)
    scheduler.check_model_output(model_output, x_t)
    scheduler.check_states(x_0)
    scheduler.check_timesteps(timesteps, x_t, previous_timesteps)
    loss_mask = _check_loss_mask(loss_mask, x_0)
    _check_data(scheduler, x_0, loss_mask)
    t = scheduler.num_steps_behind(timesteps)
    s = None if previous_timesteps is None else scheduler.num_steps_behind(previous_timesteps)
    if scheduler.config.prediction_type == "previous":
        if hybrid_coeff:
            raise ValueError("prediction_type='previous' predicts no x_0: leave hybrid_coeff at 0")
        vb = _previous_terms(scheduler.transition, model_output, x_0, x_t, s, t, loss_mask)
        _explain_nan(scheduler, vb, model_output, x_t, t)
        return D3PMLossOutput(loss=vb, vb=vb.detach())
    denoising = scheduler.config.x0_posterior == "denoising"
    options = Options(
        denoising=denoising,
        raw_reconstruction=scheduler.config.reconstruction == "raw",
        hybrid_coeff=hybrid_coeff,
        convert_auxiliary=auxiliary == "denoising" and not denoising,
    )
    transition = scheduler.transition
    walk = get_fused_loss(transition.fused_loss)(transition, x_0, x_t, s, t, options, loss_mask)
    walk = walk if loss_mask is None else counted(walk, loss_mask)
    logits = scheduler.logits(model_output)
    output = D3PMLossOutput(*WalkedTerms.apply(logits, walk, hybrid_coeff))
    _explain_nan(scheduler, output.vb + output.cross_entropy, logits, x_t, t)
    return output


def prior_loss(scheduler: D3PMScheduler, x_0: torch.LongTensor) -> torch.Tensor:
    """L_T = KL(q(x_T | x_0) || prior), per element, in nats. It does not depend on the network."""
    check_type("scheduler", scheduler, D3PMScheduler, "a `D3PMScheduler`")
    scheduler.check_states(x_0)
    return scheduler.transition.prior_divergence(x_0)


@without_autocast
def autoregressive_loss(
    scheduler: D3PMScheduler,
    model_output: torch.Tensor,
    x_0: torch.LongTensor,
    *,
    loss_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """-log p(x_0^i | x_0 before i), per element, in nats: all terms of an `"autoregressive"` process in one pass.

    The term of timestep t is that of position N - 1 - t, which is the only one that its step reveals. A causal network gives
    the same answer for it whether the tokens behind are masked or not, so that the data itself can be read.

    Args:
        model_output (`torch.Tensor` of shape `[B, N, K]`): of a causal network, for the input x_0.
        x_0 (`torch.LongTensor` of shape `[B, N]`): the data.
        loss_mask (`torch.Tensor` of shape `[B, N]`, *optional*): True (or 1) where an element counts, as in [`d3pm_loss`].
    """
    check_type("scheduler", scheduler, D3PMScheduler, "a `D3PMScheduler`")
    scheduler.check_model_output(model_output, x_0)
    loss_mask = _check_loss_mask(loss_mask, x_0)
    _check_data(scheduler, x_0, loss_mask)
    if loss_mask is not None:
        model_output = model_output.where(loss_mask[..., None], 0)
    logits = scheduler.transition.forbid(model_output.to(compute_dtype(model_output)))
    targets = x_0 if loss_mask is None else x_0.masked_fill(~loss_mask, IGNORED)
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORED)


def _check_loss_mask(loss_mask: torch.Tensor | None, x_0: torch.Tensor) -> torch.Tensor | None:
    """`loss_mask` as booleans, after checks of its shape and, on a CPU, of its values."""
    if loss_mask is None:
        return None
    check_type("loss_mask", loss_mask, torch.Tensor, "a tensor with the shape of x_0")
    if loss_mask.shape != x_0.shape:
        raise ValueError(
            f"loss_mask has the shape {tuple(loss_mask.shape)}, and x_0 the shape {tuple(x_0.shape)}: pass one value per "
            "element, True where it counts"
        )
    if loss_mask.dtype != torch.bool and loss_mask.device.type == "cpu":
        wrong = (loss_mask != 0) & (loss_mask != 1)
        if wrong.any():
            raise ValueError(
                f"loss_mask holds {loss_mask[wrong][0].item():g}: pass True (or 1) where an element counts and False (or 0) "
                "elsewhere, and multiply the loss by weights of your own"
            )
    return loss_mask.bool()


def _check_data(scheduler: D3PMScheduler, x_0: torch.Tensor, loss_mask: torch.Tensor | None) -> None:
    """Checks that no x_0 that counts is the state which is never data. Values are looked at on a CPU only."""
    never = scheduler.transition.never_data
    if never is None or x_0.device.type != "cpu":
        return
    wrong = x_0 == never if loss_mask is None else (x_0 == never) & loss_mask
    if wrong.any():
        raise ValueError(
            f"x_0 at position {tuple(wrong.nonzero()[0].tolist())} is the mask token {never}, which data never hold: exclude "
            "padding with loss_mask, check that the tokenizer and the scheduler agree on the mask, or set mask_in_data=True"
        )


def _explain_nan(scheduler: D3PMScheduler, loss: torch.Tensor, logits: torch.Tensor, x_t: torch.Tensor, t) -> None:
    """Raises for a loss that has no value although no logit is NaN. On a CPU only: elsewhere that would be a sync."""
    if loss.device.type == "cpu" and loss.isnan().any():
        undefined = loss.isnan() & ~(logits.isnan() | (logits == torch.inf)).any(-1)
        scheduler.check_possible(undefined, logits, x_t, t)


def _previous_terms(transition: Transition, logits: torch.Tensor, x_0, x_t, s, t, loss_mask=None) -> torch.Tensor:
    """KL(q(x_s | x_t, x_0) || softmax(logits)) for a network that predicts x_s itself."""
    if loss_mask is not None:
        logits = logits.where(loss_mask[..., None], 0)
    log_p = logits.log_softmax(-1, dtype=compute_dtype(logits))
    log_q = transition.log_posterior(x_0, x_t, s, t, log_p.dtype)
    vb = divergence_terms(log_q, log_p).sum(-1)
    return vb if loss_mask is None else vb.where(loss_mask, 0)
