# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Sampling of an absorbing process that reveals first what the network is most certain of."""

from dataclasses import replace

import torch

from ..numerics import categorical, compute_dtype, log1mexp, to_device
from ..schedulers.warping import create_warpers
from ..utils.checks import check_choice, check_float
from .ancestral import take_steps
from .positions_first import check_reveals_once, draw_uniforms, find_masks
from .sampler import as_sampler, register_sampler
from .walk import Walk


MEASURES = ("probability", "margin", "entropy")


@register_sampler("confidence")
@as_sampler
def confidence(walk: Walk, measure: str = "probability", choice_temperature: float = 0.0) -> torch.Tensor:
    """Draws x_0 of an absorbing process by revealing in each step the masks of which the network is most certain.

    Of n masks at the first timestep t_0, so many are left after a step to s:

        floor(n (1 - A_s) / (1 - A_{t_0})),   A_t = q(x_t = x_0 | x_0)

    This is a heuristic: the process reveals its masks in a random order, and a network that is not exact has another
    distribution in another order, of which the bound tells nothing. A revealed token is a draw from the prediction of the
    network, whatever its place in the order. So the samples of an exact network have the distribution of the data if each step
    reveals one position, in any order.

    With `temperature=0` the most likely state is revealed. With `choice_temperature=0` too, nothing is random.

    Steps that reveal nothing in any row call no network: there are at most as many calls as timesteps, and as masks. With a
    `callback`, which sees all steps, there is a call for each. The arguments are those of [`Sampler`], and:

    Args:
        measure (`str`, defaults to `"probability"`): How certain a prediction p is: `"probability"`, that of its most
            likely state; `"margin"`, the difference between its two most likely states; `"entropy"`, minus its entropy.
        choice_temperature (`float`, defaults to 0.0): Scale of the Gumbel noise on the logarithm of the confidence (on minus
            the entropy itself). It falls to 0 with the share of masks that are left. A large one is a random order.
    """
    scheduler = walk.scheduler
    check_reveals_once(scheduler, "confidence")
    check_choice("measure", measure, MEASURES)
    check_float("choice_temperature", choice_temperature, 0)
    create_warpers(**walk.step_options)  # checks them, also if there is nothing to reveal
    x_t = walk.show_known(walk.x_t, walk.timesteps[0])
    u_choice, u_state = draw_uniforms(x_t, walk.generator)
    gumbel = -(-u_choice.clamp(min=2**-54).log()).log()  # [B, N]
    num_masks = find_masks(scheduler, x_t).sum(1).cpu().double()  # [B]
    shares = masked_shares(scheduler, walk.timesteps)
    # A number that is whole but for rounding is not rounded down.
    left = {t: (num_masks * share + 1e-6).floor().long() for t, share in shares.items()}  # [B] each

    def step(model_output, x_t, t, s):
        scheduler.check_model_output(model_output, x_t)
        prediction = scheduler.transition.forbid(scheduler.logits(model_output)).flatten(1, -2)  # [B, N, K]
        scores = measure_confidence(prediction, measure) + choice_temperature * shares[t] * gumbel
        is_mask = find_masks(scheduler, x_t)
        places = scores.masked_fill(~is_mask, -torch.inf).argsort(dim=1, descending=True, stable=True).argsort(1)
        num_next = is_mask.sum(1) - to_device(left[s], x_t.device)  # [B]
        is_next = is_mask & (places < num_next[:, None])
        drawn = categorical(walk.logits(model_output).flatten(0, -2), u_state.flatten()).view_as(places)
        return torch.where(is_next, drawn, x_t.flatten(1)).view_as(x_t)

    timesteps = walk.timesteps
    if walk.callback is None:
        timesteps = [t for t, s in walk.steps if (left[s] < left[t]).any()]
    return take_steps(replace(walk, x_t=x_t, timesteps=timesteps), step)


def masked_shares(scheduler, timesteps: list[int]) -> dict[int, float]:
    """The expected share of the masks at the first timestep that are left at each, and at -1, the data."""
    masked = {}
    for t in [*timesteps, -1]:
        log_a = scheduler.transition.log_survival(0, scheduler.num_steps_behind(t), torch.empty(1))
        masked[t] = -torch.expm1(log_a).item()
    first = masked[timesteps[0]] or 1.0  # without noise there are no masks
    return {t: value / first for t, value in masked.items()}


def measure_confidence(logits: torch.Tensor, measure: str) -> torch.Tensor:
    """How certain predictions `[..., K]` are, `[...]`: a logarithm, or minus their entropy; always finite."""
    log_p = logits.to(compute_dtype(logits)).log_softmax(-1)
    if measure == "entropy":
        return -torch.special.entr(log_p.exp()).sum(-1)
    first, second = log_p.topk(2).values.unbind(-1)
    log_confidence = first if measure == "probability" else first + log1mexp(second - first)
    return log_confidence.clamp(min=torch.finfo(log_p.dtype).min)
