# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The terms of eq. 1 of the paper at chosen timesteps, for each example of a batch."""

from collections.abc import Callable, Iterator

import torch

from ..losses.network import network_loss
from ..losses.variational import autoregressive_loss
from ..numerics import ShortRow
from ..schedulers import D3PMScheduler


# Index into the timesteps [B], the number of timesteps that a term stands for (one number, or [B]), and the term in nats [B].
Term = tuple[torch.Tensor, int | torch.Tensor, torch.Tensor]


def stratify(count: int, num_evaluated: int) -> list[tuple[int, int]]:
    """Divides the terms 0 .. count-1 into `num_evaluated` stretches, given as (first, size).

    L_0 is a stretch by itself. The others end at (count-1) (i/n)^1.5, so that they grow with time: equal stretches
    would sample Gaussian noise too coarsely, half of whose bound lies in the first steps, and ends at (i/n)^2 would be
    coarse in the middle, where uniform noise has most of its bound.
    """
    fewest = min(2, count)
    if not fewest <= num_evaluated <= count:
        raise ValueError(f"num_eval_timesteps is {num_evaluated}: it must lie in {fewest} .. {count}")
    n = num_evaluated - 1
    ends = [0] + [1 + max(i, int((count - 1) * (i / max(n, 1)) ** 1.5)) for i in range(n + 1)]
    return [(first, end - first) for first, end in zip(ends, ends[1:])]


def sampled_terms(
    scheduler: D3PMScheduler,
    model: Callable,
    x_0: torch.Tensor,
    mask: torch.Tensor,
    timesteps: list[int],
    strata: list[tuple[int, int]],
    generators: list[torch.Generator] | list[ShortRow],
    condition: dict[str, torch.Tensor] | None = None,
) -> Iterator[Term]:
    """One term of each stretch of time: each example draws a timestep from the stretch, and x_t at that timestep.

    Elements that do not count are known: x_t shows them as they are.

    Args:
        scheduler, model: The process and the network.
        x_0, mask: Data `[B, ...]`, and the elements that count.
        timesteps: Timesteps of the reverse process, ascending.
        strata: The stretches of [`stratify`].
        generators: One per example; of padded texts a [`~numerics.ShortRow`].
        condition: Further arguments of the network.
    """
    sources = [g.generator if isinstance(g, ShortRow) else g for g in generators]
    previous = [-1, *timesteps[:-1]]
    one_step = len(timesteps) == len(scheduler)
    for first, size in strata:
        index = torch.tensor([first + int(torch.rand((), generator=g) * size) for g in sources])  # [B]
        t = torch.tensor(timesteps)[index].to(x_0.device)
        s = None if one_step else torch.tensor(previous)[index].to(x_0.device)
        x_t = torch.where(mask, scheduler.add_noise(x_0, t, generators), x_0)
        output = network_loss(scheduler, model, x_0, x_t, t, condition, previous_timesteps=s, loss_mask=mask)
        yield index, size, per_example(output.vb, mask)


def causal_terms(
    scheduler: D3PMScheduler,
    model: Callable,
    x_0: torch.Tensor,
    mask: torch.Tensor,
    condition: dict[str, torch.Tensor],
) -> Iterator[Term]:
    """All terms of a causal network in one pass over x_0 `[B, N]`: the term of timestep t is that of position N-1-t."""
    first_step = torch.zeros(len(x_0), dtype=torch.long, device=x_0.device)
    terms = autoregressive_loss(scheduler, model(x_0, first_step, **condition), x_0, loss_mask=mask)  # [B, N]
    for t in range(len(scheduler)):
        position = slice(len(scheduler) - 1 - t, len(scheduler) - t)
        yield torch.full((len(x_0),), t), 1, per_example(terms[:, position], mask[:, position])


def per_example(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum over the elements that count, `[B]`, in float64 on the CPU."""
    return torch.where(mask, values, 0).reshape(len(values), -1).cpu().double().sum(-1)
