# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The variational bound and the auxiliary cross-entropy, L_vb and L_lambda, in nats per element.

    L_vb = KL(q(x_T | x_0) || p(x_T))                                     prior             [`prior_loss`]
         + sum_{t > 1} KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t))      diffusion         [`d3pm_loss`]
         - log p(x_0 | x_1)                                               reconstruction    [`d3pm_loss` at t = 0]

This is the paper's eq. 1. `plain.py` defines the terms for any transition. `kernels/` computes the same numbers for the
families of the package: one pass over the logits, in pieces that fit a cache, with the gradient in place of the copies of the
logits that autograd would keep.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers.utils import BaseOutput

from ..kernels.fused import Abilities, abilities_of, fused_terms
from ..kernels.head_loss import Head, head_terms
from ..numerics import compute_dtype, spread, without_autocast
from ..schedulers import D3PMScheduler
from ..transitions import Transition
from ..transitions.kernel import Options
from ..utils.checks import check_choice, check_float, check_type, describe, values_are_known
from .plain import divergence, plain_terms


# What F.cross_entropy calls a target that does not count.
IGNORED = -100

# Inside `torch.compile` these run as they are, and the graph breaks around them.
not_compiled = torch.compiler.disable(
    reason="this loss of d3pm_hf decides on values: compile without fullgraph=True, or use a transition with a fused loss"
)


@dataclass
class D3PMLossOutput(BaseOutput):
    """Output of [`d3pm_loss`]; all of shape `[B, ...]`, in nats.

    Args:
        loss (`torch.Tensor`): `vb + hybrid_coeff * cross_entropy`, to be weighted, averaged and differentiated.
        vb (`torch.Tensor`): The term of L_vb at this timestep (diffusion, or reconstruction at t = 0), detached.
        cross_entropy (`torch.Tensor`, *optional*): -log p(x_0), detached; `None` if the network predicts no x_0.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler, d3pm_loss

        scheduler, x_0, timesteps = D3PMScheduler(28), torch.randint(0, 27, (2, 8)), torch.tensor([10, 900])
        x_t = scheduler.add_noise(x_0, timesteps)
        output = d3pm_loss(scheduler, torch.randn(2, 8, 28, requires_grad=True), x_0, x_t, timesteps, hybrid_coeff=0.01)
        output.loss.mean().backward()
        print(output.vb.mean(), output.cross_entropy.mean())
        ```
    """

    loss: torch.Tensor
    vb: torch.Tensor
    cross_entropy: torch.Tensor | None = None


def d3pm_loss(
    scheduler: D3PMScheduler,
    model_output: torch.Tensor,
    x_0: torch.Tensor,
    x_t: torch.Tensor,
    timesteps: torch.Tensor | int,
    *,
    hybrid_coeff: float = 0.0,
    auxiliary: str = "raw",
    previous_timesteps: torch.Tensor | int | None = None,
    loss_mask: torch.Tensor | None = None,
    logits_to_keep: torch.Tensor | None = None,
    output_layer: torch.nn.Linear | None = None,
) -> D3PMLossOutput:
    """The term of L_lambda = L_vb + lambda sum_t CE_t at one timestep per sample (the paper's eq. 5).

        diffusion:       vb = KL(q(x_s | x_t, x_0) || p(x_s | x_t)),   s the timestep before t
        reconstruction:  vb = -log p(x_0 | x_t),                       where x_s is the data
        cross_entropy:   -log p(x_0)
        loss = vb + hybrid_coeff * cross_entropy

    The expectation of `T * loss` over uniform timesteps is L_lambda without the prior term, [`prior_loss`]. It is computed
    in float32 (in float64 if `model_output` is), inside `torch.autocast` as well. A logit of `-inf` makes a state impossible:
    losses and gradients are the limits for ever lower logits.

    With a fused loss (`scheduler.transition.fused_loss`; all families of this package have one) it can be differentiated once.
    Without, it is [`plain_terms`], which autograd differentiates any number of times. `torch.compile` has a fused loss in its
    graph as one operator, so that `fullgraph=True` works; around the plain one the graph breaks.

    Args:
        scheduler ([`D3PMScheduler`]): The scheduler that added the noise.
        model_output (`torch.Tensor` of shape `[B, ..., K]`, or `[B, ..., 2]` if logistic): Output of the network for x_t.
        x_0, x_t (`torch.LongTensor` of shape `[B, ...]`): The data and `scheduler.add_noise(x_0, timesteps)`.
        timesteps (`torch.LongTensor` of shape `[B]`, or `int`): t.
        hybrid_coeff (`float`, defaults to 0.0): lambda, per timestep. The paper uses 0.001 for images and 0.01 for text.
        auxiliary (`str`, defaults to `"raw"`): Distribution whose cross-entropy is taken: `"raw"`, the network's output as
            it is, as in the paper; or `"denoising"`, the denoising posterior that leave-one-out logits stand for, which
            shares its optimum with L_vb. Logits of the denoising posterior itself need no conversion.
        previous_timesteps (`torch.LongTensor` of shape `[B]`, or `int`, *optional*): s, for the bound at fewer steps;
            -1 stands for the data. One step before `timesteps` by default.
        loss_mask (`torch.Tensor` of shape `[B, ...]`, *optional*): True (or 1) where an element counts, False (or 0) at
            padding. Elements that do not count have a loss and a gradient of zero, whatever their states and logits are.
        logits_to_keep (`torch.Tensor`, *optional*): The elements that `model_output` `[n, K]` has rows for, in place of all: a
            mask `[B, ...]`, or indices `[n]` into the flattened elements. All others have a loss of zero, which is what they
            have in the full form if they are not among those of [`logits_to_keep`].
        output_layer (`torch.nn.Linear`, *optional*): The layer that gives the logits. `model_output` is then its input
            `[..., D]`, and for processes of rank one no more than a piece of the logits exists at a time.
    """
    check_type("scheduler", scheduler, D3PMScheduler, "a `D3PMScheduler`")
    check_choice("auxiliary", auxiliary, ("raw", "denoising"))
    check_float("hybrid_coeff", hybrid_coeff, 0)
    if hybrid_coeff and scheduler.config.prediction_type == "previous":
        raise ValueError("prediction_type='previous' predicts no x_0: leave hybrid_coeff at 0")
    index, head = None if logits_to_keep is None else _find_index(logits_to_keep, x_t), None
    if output_layer is not None:
        check_type("output_layer", output_layer, torch.nn.Linear, "a `torch.nn.Linear`")
        head = Head.of(output_layer, model_output)
        if not _is_read_in_pieces(scheduler, model_output, head):
            model_output, head = output_layer(model_output), None
    if head is None:
        scheduler.check_model_output(model_output, x_t, index)
    else:
        scheduler.check_states(x_t)
        if model_output.shape[:-1] != (x_t if index is None else index).shape:
            raise ValueError(
                f"the input of output_layer has the shape {tuple(model_output.shape)}: it must have a row for each element of x_t "
                f"{tuple(x_t.shape)}, or for each of logits_to_keep"
            )
    scheduler.check_states(x_0)
    scheduler.check_timesteps(timesteps, x_t, previous_timesteps)
    loss_mask = check_loss_mask(loss_mask, x_0)
    scheduler.check_data_states(x_0, loss_mask)
    t = scheduler.num_steps_behind(timesteps)
    s = None if previous_timesteps is None else scheduler.num_steps_behind(previous_timesteps)
    return _compute_loss(scheduler, model_output, head, index, x_0, x_t, s, t, hybrid_coeff, auxiliary, loss_mask)


@without_autocast
def _compute_loss(
    scheduler: D3PMScheduler,
    model_output: torch.Tensor,
    head: Head | None,
    index: torch.Tensor | None,
    x_0: torch.Tensor,
    x_t: torch.Tensor,
    s: torch.Tensor | int | None,
    t: torch.Tensor | int,
    hybrid_coeff: float,
    auxiliary: str,
    loss_mask: torch.Tensor | None,
) -> D3PMLossOutput:
    """[`d3pm_loss`] after its checks, of logits or of the input of a `head`: of the elements `index` `[n]`, or of all."""
    transition, config = scheduler.transition, scheduler.config
    is_previous, denoising = config.prediction_type == "previous", config.x0_posterior == "denoising"
    fused_loss = Abilities() if is_previous else abilities_of(transition.fused_loss)
    options = Options(
        denoising=denoising,
        raw_reconstruction=config.reconstruction == "raw",
        hybrid_coeff=hybrid_coeff,
        convert_auxiliary=auxiliary == "denoising" and not denoising,
        logistic=config.prediction_type == "logistic" and fused_loss.reads_logistic,
    )
    # A fused loss may compute the logits of a logistic, or of a head, piece by piece.
    logits = model_output if options.logistic or head is not None else scheduler.logits(model_output, index)
    rows = index if fused_loss.has_rows and not torch.compiler.is_compiling() else None
    if index is not None and rows is None:
        is_kept = torch.zeros(x_t.numel(), dtype=torch.bool, device=x_t.device).index_fill(0, index, True).view_as(x_t)
        logits, loss_mask = spread(logits, index, x_t.shape), is_kept if loss_mask is None else is_kept & loss_mask
    if is_previous or transition.fused_loss is None:
        definition = _previous_terms if is_previous else _plain_terms
        if loss_mask is not None:  # no NaN of an element that does not count may reach the gradient
            logits = logits.where(loss_mask[..., None], 0)
        terms = definition(transition, logits, x_0, x_t, s, t, options)
        vb, cross_entropy = (v if v is None or loss_mask is None else v.where(loss_mask, 0) for v in terms)
        # Without the cross-entropy the loss is finite where that is not.
        loss = vb + hybrid_coeff * cross_entropy if hybrid_coeff else vb
        vb, cross_entropy = vb.detach(), None if is_previous else cross_entropy.detach()
    elif head is not None:
        loss, vb, cross_entropy = head_terms(transition, logits, head, x_0, x_t, s, t, options, loss_mask, rows)
    else:
        loss, vb, cross_entropy = fused_terms(transition, logits, x_0, x_t, s, t, options, loss_mask, rows)
    if values_are_known(vb):
        terms = vb if cross_entropy is None else vb + cross_entropy
        if math.isnan(terms.sum().item()):
            logits = scheduler.logits(model_output if head is None else head.logits(model_output), index)
            logits = logits if index is None else spread(logits, index, x_t.shape)
            _explain_nan(scheduler, terms, logits, x_0, x_t, t)
    return D3PMLossOutput(loss=loss, vb=vb, cross_entropy=cross_entropy)


def _find_index(logits_to_keep: torch.Tensor, x_t: torch.Tensor) -> torch.Tensor:
    """The indices `[n]` of `logits_to_keep`, which may be a mask `[B, ...]`."""
    check_type(
        "logits_to_keep", logits_to_keep, torch.Tensor, "a mask with the shape of x_t, or indices of its elements"
    )
    if logits_to_keep.dtype == torch.bool and logits_to_keep.shape == x_t.shape:
        return logits_to_keep.flatten().nonzero().squeeze(-1)
    if logits_to_keep.dtype != torch.long or logits_to_keep.ndim != 1:
        raise ValueError(
            f"logits_to_keep is {describe(logits_to_keep)}: pass a mask ({torch.bool}) with the shape {tuple(x_t.shape)} of x_t, or "
            f"indices ({torch.long}) [n] of its elements"
        )
    return logits_to_keep


def _is_read_in_pieces(scheduler: D3PMScheduler, hidden: torch.Tensor, head: Head) -> bool:
    """Whether the loss reads the logits of a `head` piece by piece: a fused loss of rows can, and does for more than one piece."""
    # Where elements have states of their own, some of the logits are no output of the layer.
    is_output = scheduler.config.prediction_type == "x0" and scheduler.config.get("element_classes") is None
    is_traced = hidden.device.type == "xla" or torch.compiler.is_compiling()
    can = is_output and not is_traced and abilities_of(scheduler.transition.fused_loss).has_rows
    return can and hidden.shape[:-1].numel() > head.num_rows


@not_compiled
def prior_loss(scheduler: D3PMScheduler, x_0: torch.Tensor) -> torch.Tensor:
    """The prior term of L_vb, L_T = KL(q(x_T | x_0) || p(x_T)), per element, in nats. It does not depend on the network."""
    check_type("scheduler", scheduler, D3PMScheduler, "a `D3PMScheduler`")
    scheduler.check_states(x_0)
    return scheduler.transition.prior_divergence(x_0)


@not_compiled
@without_autocast
def autoregressive_loss(
    scheduler: D3PMScheduler,
    model_output: torch.Tensor,
    x_0: torch.Tensor,
    *,
    loss_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """-log p(x_0^i | x_0 before i), per element, in nats: all terms of an `"autoregressive"` process in one pass.

    The term of timestep t is that of position N - 1 - t, which is the only one that its step reveals. A causal network gives
    the same answer for it whether the tokens behind are masked or not, so that the data itself can be read.

    Args:
        scheduler ([`D3PMScheduler`]): The scheduler of the autoregressive process.
        model_output (`torch.Tensor` of shape `[B, N, K]`): Output of a causal network for the input x_0.
        x_0 (`torch.LongTensor` of shape `[B, N]`): The data.
        loss_mask (`torch.Tensor` of shape `[B, N]`, *optional*): True (or 1) where an element counts, as in [`d3pm_loss`].
    """
    check_type("scheduler", scheduler, D3PMScheduler, "a `D3PMScheduler`")
    scheduler.check_model_output(model_output, x_0)
    loss_mask = check_loss_mask(loss_mask, x_0)
    scheduler.check_data_states(x_0, loss_mask)
    if loss_mask is not None:
        model_output = model_output.where(loss_mask[..., None], 0)
    logits = scheduler.transition.forbid(model_output.to(compute_dtype(model_output)))
    targets = x_0 if loss_mask is None else x_0.masked_fill(~loss_mask, IGNORED)
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORED)


def check_loss_mask(loss_mask: torch.Tensor | None, x_0: torch.Tensor) -> torch.Tensor | None:
    """`loss_mask` as booleans, after checks of its shape and, where they are known, of its values."""
    if loss_mask is None:
        return None
    check_type("loss_mask", loss_mask, torch.Tensor, "a tensor with the shape of x_0")
    if loss_mask.shape != x_0.shape:
        raise ValueError(
            f"loss_mask has the shape {tuple(loss_mask.shape)}, and x_0 the shape {tuple(x_0.shape)}: pass one value per "
            "element, True where it counts"
        )
    if loss_mask.dtype != torch.bool and values_are_known(loss_mask):
        wrong = (loss_mask != 0) & (loss_mask != 1)
        if wrong.any():
            raise ValueError(
                f"loss_mask holds {loss_mask[wrong][0].item():g}: pass True (or 1) where an element counts and False (or 0) "
                "elsewhere, and multiply the loss by weights of your own"
            )
    return loss_mask.bool()


def _explain_nan(scheduler: D3PMScheduler, loss: torch.Tensor, logits: torch.Tensor, x_0, x_t, t) -> None:
    """Raises for a loss that has no value although no logit is NaN."""
    undefined = loss.isnan() & ~(logits.isnan() | (logits == torch.inf)).any(-1)
    scheduler.check_possible(undefined, logits, x_t, t)
    log_q = scheduler.transition.log_likelihood(x_t, 0, t).gather(-1, x_0[..., None]).squeeze(-1)  # log q(x_t | x_0)
    impossible = undefined & (log_q == -torch.inf)
    if impossible.any():
        position = tuple(impossible.nonzero()[0].tolist())
        raise ValueError(
            f"x_0 = {x_0[position].item()} at position {position} cannot become x_t = {x_t[position].item()} by its timestep: "
            "pass the timesteps that the noise was added with"
        )


_plain_terms = not_compiled(plain_terms)


def _previous_terms(transition: Transition, logits: torch.Tensor, x_0, x_t, s, t, options: Options):
    """KL(q(x_s | x_t, x_0) || softmax(logits)), eq. 1 for a network that predicts x_s itself, and no cross-entropy."""
    log_p = logits.log_softmax(-1, dtype=compute_dtype(logits))
    return divergence(transition.log_posterior(x_0, x_t, s, t, log_p.dtype), log_p), None
