# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Orders in which an absorbing process reveals its masks, and the probability of the data along them."""

import math
from collections.abc import Callable

import numpy as np
import torch

from ..numerics import to_device, to_float64
from ..samplers.confidence import masked_shares, measure_confidence, merge_ties, sort_positions
from ..samplers.positions_first import reveals_once
from ..schedulers import D3PMScheduler
from ..utils.checks import check_int, describe
from ..utils.kept_logits import predict_rows
from ..utils.names import EXACT_ORDERS


# The measure of `sampler="confidence"` by the name of the order in which it reveals.
MEASURES = {"left_to_right": "left_to_right", "confidence": "probability", "margin": "margin", "entropy": "entropy"}
ORDERS = (*EXACT_ORDERS, "random")
# `order(logits [B, N, K], is_hidden [B, N])` gives scores [B, N]; the largest is revealed first.
Order = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Number of calls of a batch at which an order is probed: in the first one, all rows may be alike.
NUM_PROBED = 2
# The timestep of each call, and the number of positions that are hidden after it.
Calls = list[tuple[int, int]]


def get_order(order: str | Order) -> Order | None:
    """The function behind an order; `None` for those that do not look at logits, `"left_to_right"` and `"random"`."""
    if callable(order):
        return order
    if order not in ORDERS:
        raise ValueError(
            f"order is {describe(order)}: it must be one of {', '.join(ORDERS)}, or a function order(logits, is_hidden)"
        )
    if order in ("left_to_right", "random"):
        return None
    return lambda logits, is_hidden: merge_ties(measure_confidence(logits, MEASURES[order]), is_hidden)


def has_orders(scheduler: D3PMScheduler) -> bool:
    """Whether the process starts from masks alone and reveals them in an order that a sampler may choose."""
    return reveals_once(scheduler) and scheduler.transition.log_prior[scheduler.mask_token_id].item() == 0


def check_has_orders(scheduler: D3PMScheduler) -> None:
    """Checks that the process reveals its masks in an order that a sampler may choose."""
    if scheduler.family.is_autoregressive:
        raise ValueError(
            f"the process is {scheduler.config.transition!r}, whose only order is 'left_to_right': "
            "`evaluate_bound(scheduler, denoiser, batches, is_causal=True)` gives its exact likelihood in one pass"
        )
    if not reveals_once(scheduler):
        raise ValueError(
            f"the process is {scheduler.config.transition!r}, which has no order: one needs an absorbing process that masks all "
            "positions alike and whose data never hold the mask, with prediction_type 'x0' or 'logistic' and reconstruction "
            "'posterior'; use `evaluate_bound`"
        )
    if not has_orders(scheduler):
        raise ValueError(
            f"prior is {scheduler.config.prior!r}, which starts from states other than the mask: an order needs "
            "prior='stationary'; use `evaluate_bound`"
        )


def block_timesteps(scheduler: D3PMScheduler, num_hidden: int, block_length: int = 1) -> list[int]:
    """The timesteps with which `sampler="confidence"` reveals `block_length` of `num_hidden` positions in each step.

    The timestep of a step with h hidden positions is the smallest t at which no fewer are expected:

        floor(num_hidden (1 - A_t) / (1 - A_{T-1})) >= h,   A_t = q(x_t = x_0 | x_0)

    With `block_length=1`, `sampler="confidence"` with all T timesteps calls the network at these, if none of its steps reveals two
    positions. If the process has too few timesteps, one of them comes twice: the likelihood is defined all the same, and no list of
    timesteps gives the sampler.

    Args:
        scheduler ([`D3PMScheduler`]): An absorbing process.
        num_hidden (`int`): Number of positions that are revealed, without those that are given.
        block_length (`int`, defaults to 1): Number of positions that a step reveals. The last one reveals what is left.

    Examples:
        ```python
        from d3pm_hf import D3PMScheduler
        from d3pm_hf.likelihood import block_timesteps

        assert block_timesteps(D3PMScheduler(28, 1000), 8, 2) == [999, 749, 499, 249]
        ```
    """
    check_int("num_hidden", num_hidden, 1)
    check_int("block_length", block_length, 1)
    check_has_orders(scheduler)
    shares = masked_shares(scheduler, scheduler.sampling_timesteps())
    return [t for t, _ in block_calls(shares, num_hidden, block_length)]


def block_calls(shares: dict[int, float], num_hidden: int, block_length: int) -> Calls:
    """The calls that reveal `block_length` positions each. `shares` are those of all timesteps ([`masked_shares`])."""
    ascending = np.array([*shares.values()])[-2::-1]  # [T], without the data
    left = np.floor(num_hidden * ascending + 1e-6)  # rounding as in the sampler
    before = np.arange(num_hidden, 0, -block_length)
    times = np.searchsorted(left, before)
    return list(zip(times.tolist(), np.maximum(before - block_length, 0).tolist()))


def step_calls(shares: dict[int, float], num_hidden: int) -> Calls:
    """The calls of `sampler="confidence"` with the timesteps of `shares`: steps that reveal nothing call no network."""
    left = [math.floor(num_hidden * share + 1e-6) for share in shares.values()]
    return [(t, after) for t, before, after in zip(shares, left, left[1:]) if after < before]


def reveal_data(
    scheduler: D3PMScheduler,
    model: Callable,
    x_0: torch.Tensor,
    is_hidden: torch.Tensor,
    calls: list[Calls],
    order: Order | None,
    fixed_scores: torch.Tensor,
    condition: dict[str, torch.Tensor],
    report: Callable[[], object],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reveals x_0 call by call, and returns log p of each example, `[B]` in float64, and whether every state of it was the most likely
    one when it was revealed, `[B]`.

    All rows go side by side, each at its own timestep, and leave the batch when they are done. Positions of one call are
    drawn independently of each other, so that their probabilities are multiplied.

    Args:
        scheduler, model: The process and the network.
        x_0, is_hidden: Data `[B, ...]`, and the elements that are revealed. The others are given.
        calls: The calls of each row.
        order: The function that chooses the positions of a call, `None` for `fixed_scores`.
        fixed_scores: Scores `[B, N]` that do not depend on what is revealed.
        condition: Further arguments of the network.
        report: Called after each call of the network.
    """
    total, num_misses = torch.zeros(len(x_0), dtype=torch.float64), torch.zeros(len(x_0), dtype=torch.long)
    num_calls = torch.tensor([len(row) for row in calls])
    rows = num_calls.argsort(descending=True, stable=True)
    calls, on_device = [calls[i] for i in rows.tolist()], to_device(rows, x_0.device)
    data, hidden = x_0.flatten(1)[on_device], is_hidden.flatten(1)[on_device]  # [B, N]
    condition, fixed_scores = {name: v[on_device] for name, v in condition.items()}, fixed_scores[on_device]
    for i in range(int(num_calls.max())):
        n = int((num_calls > i).sum())
        x_t = torch.where(hidden[:n], scheduler.mask_token_id, data[:n]).unflatten(1, x_0.shape[1:])
        t, left = to_device(torch.tensor([row[i] for row in calls[:n]]), x_0.device).unbind(1)  # [n] each
        given = {name: value[:n] for name, value in condition.items()}
        num_next = hidden[:n].sum(1) - left  # [n]
        if order is None:  # nothing is asked of the network but what is revealed
            is_next = choose(fixed_scores[:n], hidden[:n], num_next)
            log_p = predict_log_probs(scheduler, model, x_t, t, given, is_next)  # [r, K]
        else:
            output = model(x_t, t, **given)
            scheduler.check_model_output(output, x_t)
            logits = scheduler.transition.forbid(scheduler.logits(output)).flatten(1, -2)  # [n, N, K]
            is_next = choose(score_positions(order, logits, hidden[:n], probe=i < NUM_PROBED), hidden[:n], num_next)
            log_p = to_float64(logits[is_next]).log_softmax(-1)
        row, position = is_next.nonzero().unbind(1)  # [r] each
        states, examples = data[row, position].to(log_p.device), rows[row.cpu()]
        total.index_add_(0, examples, log_p.gather(1, states[:, None]).squeeze(1).cpu())
        num_misses.index_add_(0, examples, (log_p.argmax(1) != states).long().cpu())
        hidden[:n] &= ~is_next
        report()
    return total, num_misses == 0


def predict_log_probs(
    scheduler: D3PMScheduler,
    model: Callable,
    x_t: torch.Tensor,
    t: torch.Tensor,
    condition: dict,
    is_asked: torch.Tensor,
) -> torch.Tensor:
    """log p(x_0^j | x_t) at the positions `is_asked` `[n, N]`, one row of classes for each, `[r, K]` in float64."""
    elements = is_asked.flatten().nonzero().squeeze(1)  # [r]
    output = predict_rows(model, x_t, t, condition, elements, scheduler.config.num_classes)
    scheduler.check_model_output(output, x_t, elements)
    return to_float64(scheduler.transition.forbid(scheduler.logits(output, elements))).log_softmax(-1)


def choose(scores: torch.Tensor, is_hidden: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The hidden positions of largest score, `numbers` `[n]` of them in each row `[n, N]`."""
    places = sort_positions(scores.masked_fill(~is_hidden, -torch.inf)).argsort(1)
    return is_hidden & (places < numbers[:, None])


def score_positions(order: Order, logits: torch.Tensor, is_hidden: torch.Tensor, probe: bool) -> torch.Tensor:
    """Scores of an order `[n, N]`, finite ones.

    With `probe`, the order is asked again about the last half of the rows, reversed. A function of each row alone gives
    these the scores that they had; one that knows the data by their place in the batch, or that is random, does not.
    """
    scores = order(logits, is_hidden)
    check_scores(scores, is_hidden)
    if probe:
        some = torch.arange(len(logits) - 1, len(logits) // 2 - 1, -1, device=logits.device)
        advice = "it must be a function of `logits` and `is_hidden`, row by row, and must not look at data that are not revealed"
        try:
            again = order(logits[some], is_hidden[some])
            check_scores(again, is_hidden[some])
        except Exception as error:
            raise ValueError(f"order fails on some of the rows that it was called with ({error}): {advice}") from error
        first, second = (to_float64(s.masked_fill(~is_hidden[some], 0)) for s in (scores[some], again))
        if not torch.allclose(first, second):
            raise ValueError(f"order gives rows other scores when they are at other places of a batch: {advice}")
    return scores.clamp(min=torch.finfo(scores.dtype).min)


def check_scores(scores: torch.Tensor, is_hidden: torch.Tensor) -> None:
    """Checks the scores of an order, `[n, N]`."""
    is_float = isinstance(scores, torch.Tensor) and scores.is_floating_point()
    if not is_float or scores.shape != is_hidden.shape:
        raise ValueError(
            f"order returned {describe(scores)}: it must return a floating-point tensor of shape {tuple(is_hidden.shape)}, the "
            "score of each position"
        )
    if scores[is_hidden].isnan().any():
        raise ValueError("order returned NaN for a hidden position: return a number, or look at the network's output")
