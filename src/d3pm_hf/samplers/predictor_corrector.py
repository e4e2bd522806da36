# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Ancestral sampling with correctors between its steps: moves from x_t to another x_t that keep q(x_t) if the denoiser is exact."""

from dataclasses import replace

import torch

from ..numerics import categorical, compute_dtype, uniforms
from ..utils.checks import check_choice, check_int
from .ancestral import take_steps
from .classifier import ClassifierGuidedScheduler
from .positions_first import draw_uniforms
from .sampler import as_sampler, register_sampler
from .walk import SamplerStep, Walk


CORRECTORS = ("forward_backward", "gibbs")


@register_sampler("predictor_corrector")
@as_sampler
def predictor_corrector(
    walk: Walk, corrector: str = "forward_backward", correct_steps: int = 1, num_positions: int | None = None
) -> torch.Tensor:
    """Draws x_0 by ancestral sampling, with steps of a corrector at each timestep that it reaches.

        x_s ~ p(x_s | x_t),   then `correct_steps` times x_s ~ C(x_s' | x_s)

    A corrector C keeps q(x_s) if the denoiser is exact, and brings x_s closer to it if the steps before had an error, such as
    that of positions which change at once. `"forward_backward"` goes one step ahead in `timesteps` and back:
    all positions may change, and q(x_s) is kept up to second order in the length of that step. `"gibbs"` draws one position given all others, which keeps q(x_s) exactly.

    With `temperature=0`, steps and correctors take the most likely x_0 of the prediction. Its noise stays random.

    Over n timesteps the network is called n + (n - 1) `correct_steps` times: the data are not corrected, nor is the first
    state. The arguments are those of [`Sampler`], and:

    Args:
        corrector (`str`, defaults to `"forward_backward"`): `"forward_backward"` or `"gibbs"`.
        correct_steps (`int`, defaults to 1): Number of steps of the corrector at each timestep, one call of the network each.
            0 is ancestral sampling.
        num_positions (`int`, *optional*): Number of positions of each row that a step of `"gibbs"` draws. Defaults to 1; more
            are drawn independently of each other, which is not exact.
    """
    check_choice("corrector", corrector, CORRECTORS)
    check_int("correct_steps", correct_steps, 0)
    if num_positions is not None:
        check_int("num_positions", num_positions, 1)
    check_corrects(walk.scheduler, corrector, num_positions)
    following = dict(walk.steps)

    def correct(step: SamplerStep) -> torch.Tensor:
        x, t = step.prev_sample, step.previous_timestep
        for _ in range(correct_steps if t >= 0 else 0):
            if corrector == "gibbs":
                x = gibbs(walk, x, t, num_positions or 1)
            else:
                x = forward_backward(walk, x, t, following[t])
            x = walk.show_known(x, t)
        changed = None if walk.callback is None else walk.callback(replace(step, prev_sample=x))
        return x if changed is None else changed

    return take_steps(replace(walk, callback=correct), walk.step)


def check_corrects(scheduler, corrector: str, num_positions: int | None) -> None:
    """Checks that the corrector applies to the process and to what its network predicts."""
    if num_positions is not None and corrector != "gibbs":
        raise ValueError(
            f"num_positions is {num_positions}, and corrector is {corrector!r}, which moves all positions: leave it out, or "
            "choose corrector='gibbs'"
        )
    if scheduler.family.is_autoregressive:
        raise ValueError(
            f"sampler is 'predictor_corrector', and the process is {scheduler.config.transition!r}, whose tokens no corrector "
            "can change as their order is fixed: choose 'ancestral'"
        )
    if corrector == "gibbs" and scheduler.config.prediction_type == "previous":
        raise ValueError(
            "corrector is 'gibbs', and prediction_type is 'previous', which says nothing about x_0: choose "
            "corrector='forward_backward'"
        )
    if corrector == "gibbs" and isinstance(scheduler, ClassifierGuidedScheduler):
        raise ValueError(
            "corrector is 'gibbs', which does not follow a classifier: leave out the classifier, or choose "
            "corrector='forward_backward'"
        )


def forward_backward(walk: Walk, x_t: torch.Tensor, t: int, s: int) -> torch.Tensor:
    """Draws another x_t by a step of the model to s < t, and back by the process, with one call of the network.

        x_s ~ p(x_s | x_t),   x_t' ~ q(x_t' | x_s)

    This keeps q(x_t) exactly where p(x_s | x_t) is that of the data: for one position, and for several up to their dependence
    given x_t, as a step draws all of them independently. Two positions that change in one step are the cause, so that the
    error is of the order (t - s)^2.
    """
    x_s = walk.step(walk.predict(x_t, t), x_t, t, s)
    times = (walk.scheduler.num_steps_behind(timestep) for timestep in (s, t))
    logits = walk.scheduler.transition.log_marginal(x_s, *times)  # log q(x_t | x_s), [B, ..., K]
    u = uniforms(x_t.shape, walk.generator, x_t.device)
    return categorical(logits.flatten(0, -2), u.flatten()).view_as(x_t)


def gibbs(walk: Walk, x_t: torch.Tensor, t: int, num_positions: int = 1) -> torch.Tensor:
    """Draws x_t^i anew given all other positions, at a random position i of each row, with one call of the network.

        x_t^i ~ p(x_t^i | x_t without i) = sum_{x_0} q(x_t^i | x_0) p(x_0^i | x_t without i)

    This keeps q(x_t) exactly, for every number of positions. With `num_positions` above 1 so many positions of each row are
    drawn in one call, independently of each other, which is not exact: their dependence is lost.

    The prediction p(x_0^i | x_t without i) is the output of a network in the leave-one-out reading, or is converted from
    q(x_0^i | x_t). The network is asked with the mask at position i, if the process has one: what it says at a token that an
    absorbing process has left as it is has never been trained. If a process without a mask cannot lead from everywhere to
    everywhere by timestep t, such as band-diagonal noise in few steps, some of that prediction has never been trained either.
    Then x_0^i is drawn from q(x_0^i | x_t), and x_t^i from q(x_t^i | x_0^i), which keeps q(x_t) too and moves less.

    Positions that are known or given stay as they are.
    """
    scheduler, x = walk.scheduler, x_t.flatten(1)  # [B, N]
    u_choice, u_state = draw_uniforms(x_t, walk.generator)
    for is_fixed in (walk.is_known, walk.is_given):
        u_choice = u_choice if is_fixed is None else u_choice.masked_fill(is_fixed.flatten(1), -1)
    top = u_choice.topk(min(num_positions, x.shape[1]), dim=1)  # [B, k]
    chosen = x.gather(1, top.indices)
    state, is_everywhere = find_question(scheduler, t, x_t.shape)
    asked = chosen if state is None else torch.full_like(chosen, state)
    x_asked = x.scatter(1, top.indices, asked).view_as(x_t)
    if scheduler.transition.is_alike and scheduler.config.get("element_classes") is None:
        # The chosen positions need not know where they are.
        elements = torch.arange(len(x), device=x.device)[:, None] * x.shape[1] + top.indices  # [B, k]
        model_output = walk.predict(x_asked, t, elements=elements.flatten()).view(*asked.shape, -1)  # [B, k, K]
        log_p = conditional_logits(scheduler, model_output, asked, t, is_everywhere, **walk.step_options)
    else:
        model_output = walk.predict(x_asked, t)  # [B, ..., K]
        log_p = conditional_logits(scheduler, model_output, x_asked, t, is_everywhere, **walk.step_options)
        log_p = log_p.flatten(1, -2).take_along_dim(top.indices[..., None], 1)
    drawn = categorical(log_p.flatten(0, 1), u_state.gather(1, top.indices).flatten()).view_as(chosen)
    return x.scatter(1, top.indices, torch.where(top.values < 0, chosen, drawn)).view_as(x_t)


def find_question(scheduler, t: int, shape: torch.Size) -> tuple[int | None, bool]:
    """State that replaces a position in the network's input (`None` keeps x_t), and whether every x_0 can reach it."""
    transition, n = scheduler.transition, scheduler.num_steps_behind(t)
    if not scheduler.family.has_mask:
        return None, transition.is_alike and transition.leads_everywhere(n)
    masks = torch.full((1, 1) if transition.is_alike else (1, *shape[1:]), scheduler.mask_token_id)
    log_column = transition.log_likelihood(masks, 0, n)  # log q(x_t = mask | x_0 = .)
    is_data = transition.forbid(torch.zeros_like(log_column)) > -torch.inf
    is_masked = bool((log_column > -torch.inf)[is_data].all())
    return scheduler.mask_token_id if is_masked else None, is_masked


def conditional_logits(
    scheduler, model_output: torch.Tensor, x_t: torch.Tensor, t: int, is_everywhere: bool, **step_arguments
) -> torch.Tensor:
    """log p(x_t^i | x_t without i), `[B, ..., K]`, from the output of the network at states x_t `[B, ...]`.

    log sum_{x_0} q(x_t^i | x_0) p(x_0^i | x_t without i)        with q(x_0^i | x_t) unless all data can lead to x_t
    """
    transition, n = scheduler.transition, scheduler.num_steps_behind(t)
    logits = transition.forbid(scheduler.step_logits(model_output, **step_arguments))
    logits = logits.to(compute_dtype(logits))
    if scheduler.config.x0_posterior == "denoising":
        logits = transition.to_leave_one_out(logits, x_t, n)
    if not is_everywhere:
        logits = logits + transition.log_likelihood(x_t, 0, n, logits.dtype)
    return transition.log_marginal(logits.log_softmax(-1), 0, n)
