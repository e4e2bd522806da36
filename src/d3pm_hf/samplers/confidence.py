# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Sampling of an absorbing process that reveals first what the network is most certain of."""

import torch

from ..numerics import categorical, compute_dtype, log1mexp, to_device
from ..utils.checks import check_choice, check_float, check_int
from .positions_first import check_reveals_once, draw_uniforms, find_masks
from .sampler import as_sampler, register_sampler
from .walk import SamplerStep, Walk


MEASURES = ("probability", "margin", "entropy", "left_to_right")
# Confidences that differ by less count as equal. Rounding in float32 moves them by about a hundredth of it.
TIE = 1e-4


@register_sampler("confidence")
@as_sampler
def confidence(
    walk: Walk, measure: str = "probability", choice_temperature: float = 0.0, block_length: int | None = None
) -> torch.Tensor:
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
            likely state; `"margin"`, the difference between its two most likely states; `"entropy"`, minus its entropy. Or
            `"left_to_right"`, which asks for no certainty: the first positions come first (of images, row by row).
        choice_temperature (`float`, defaults to 0.0): Scale of the Gumbel noise on the logarithm of the confidence (on minus
            the entropy itself). It falls to 0 with the share of masks that are left. A large one is a random order.
        block_length (`int`, *optional*): Number of masks of a block. The masks of each row are cut into blocks from the left, and
            a block is revealed before the next one. These are the steps of LLaDA if there is a whole number of blocks, and
            of steps for each of them. (The `block_length` of [`log_likelihood`] is the number of positions of one call.)

    Positions whose confidences differ by less than 1e-4 count as equal. Otherwise rounding, which depends on the batch, would choose
    between positions of which the network knows equally much, such as all of an empty text. Of these, positions that are far
    apart come first ([`~samplers.confidence.sort_positions`]).
    """
    scheduler = walk.scheduler
    check_reveals_once(scheduler, "confidence")
    check_choice("measure", measure, MEASURES)
    check_float("choice_temperature", choice_temperature, 0)
    if block_length is not None:
        check_int("block_length", block_length, 1)
    x_t = walk.show_known(walk.x_t, walk.timesteps[0])
    u_choice, u_state = draw_uniforms(x_t, walk.generator)
    gumbel = -(-u_choice.clamp(min=2**-54).log()).log()  # [B, N]
    is_mask = find_masks(scheduler, x_t)  # [B, N]
    num_masks = is_mask.sum(1).cpu().double()  # [B]
    blocks = None if block_length is None else (is_mask.cumsum(1) - 1) // block_length  # [B, N]
    shares = masked_shares(scheduler, walk.timesteps)
    # A number that is whole but for rounding is not rounded down.
    left = {t: (num_masks * share + 1e-6).floor().long() for t, share in shares.items()}  # [B] each

    callback = walk.callback  # it sees all steps and all logits, and may change x_s
    steps = [(t, s) for t, s in walk.steps if callback is not None or (left[s] < left[t]).any()]
    for i, (t, s) in enumerate(walk.progress(steps)):
        x_t = x_t if callback is None else walk.show_known(x_t, t)
        is_mask = find_masks(scheduler, x_t)  # [B, N]
        # The masks, as indices [r] into the flattened x_t, and the output [r, K] of the network for them.
        if callback is not None:
            elements = is_mask.flatten().nonzero().squeeze(-1)
            if not len(elements):
                elements = elements.new_zeros(1)  # many functions refuse tensors without elements
            model_output = walk.predict(x_t, t)
            rows = model_output.flatten(0, -2)[elements]
        else:  # their number is known, so that the host does not wait for the device
            elements = (~is_mask).flatten().byte().argsort(stable=True)[: int(left[t].sum())]
            rows = model_output = walk.predict(x_t, t, elements=elements)
        scheduler.check_model_output(rows, x_t, elements)
        if measure == "left_to_right":
            scores = -torch.arange(is_mask.shape[1], dtype=gumbel.dtype, device=x_t.device).expand_as(gumbel)
        else:
            scores = measure_confidence(scheduler.transition.forbid(scheduler.logits(rows)), measure)
            scores = scores.new_zeros(x_t.numel()).index_copy_(0, elements, scores).view_as(is_mask)
            scores = merge_ties(scores, is_mask)
        scores = scores + choice_temperature * shares[t] * gumbel
        order = sort_positions(scores.masked_fill(~is_mask, -torch.inf))  # [B, N], masks first
        if blocks is not None:  # masks by their blocks, and then by their scores
            block = blocks.masked_fill(~is_mask, order.shape[1])
            order = order.gather(1, block.gather(1, order).argsort(dim=1, stable=True))
        num_next = is_mask.sum(1) - to_device(left[s], x_t.device)  # [B]
        is_next = (order.argsort(1) < num_next[:, None]).flatten()[elements]
        drawn = categorical(walk.logits(rows), u_state.flatten()[elements])
        x = x_t.flatten()
        x_s = x.index_copy(0, elements, drawn.where(is_next, x[elements])).view_as(x_t)
        if callback is not None:
            changed = callback(SamplerStep(i, t, s, x_t, model_output, x_s))
            x_s = x_s if changed is None else changed
        x_t = x_s
    return x_t


def masked_shares(scheduler, timesteps: list[int]) -> dict[int, float]:
    """The expected share of the masks at the first timestep that are left at each, and at -1, the data."""
    times = [*timesteps, -1]
    behind = scheduler.num_steps_behind(torch.tensor(times))
    masked = -torch.expm1(scheduler.transition.log_survival(0, behind, torch.empty(len(times))))
    first = masked[0].item() or 1.0  # without noise there are no masks
    return dict(zip(times, (masked / first).tolist()))


def measure_confidence(logits: torch.Tensor, measure: str) -> torch.Tensor:
    """How certain predictions `[..., K]` are, `[...]`: a logarithm, or minus their entropy; always finite."""
    log_p = logits.to(compute_dtype(logits)).log_softmax(-1)
    if measure == "entropy":
        return -torch.special.entr(log_p.exp()).sum(-1)
    first, second = log_p.topk(2).values.unbind(-1)
    log_confidence = first if measure == "probability" else first + log1mexp(second - first)
    return log_confidence.clamp(min=torch.finfo(log_p.dtype).min)


def merge_ties(scores: torch.Tensor, is_hidden: torch.Tensor) -> torch.Tensor:
    """Scores `[B, N]` less the best hidden one of their row, with the distance rounded down to a multiple of `TIE`."""
    best = scores.masked_fill(~is_hidden, -torch.inf).amax(1, keepdim=True)  # [B, 1]
    return (-TIE * ((best - scores) / TIE).floor()).clamp(torch.finfo(scores.dtype).min, 0)


def sort_positions(scores: torch.Tensor) -> torch.Tensor:
    """Positions `[B, N]` by descending scores `[B, N]`. Equal ones follow the van der Corput sequence: 0, N/2, N/4, 3N/4, ...

    Positions of one step are drawn independently of each other, which costs least if they are far apart.
    """
    i = torch.arange(scores.shape[1], device=scores.device)
    num_bits = scores.shape[1].bit_length()
    reversed_bits = sum(((i >> bit & 1) << (num_bits - bit) for bit in range(num_bits)), torch.zeros_like(i))
    spread = reversed_bits.argsort()  # [N]
    return spread[scores[:, spread].argsort(dim=1, descending=True, stable=True)]
