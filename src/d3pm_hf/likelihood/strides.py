# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The cost of every stride between the timesteps of a grid, and the timesteps of least total cost."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from tqdm.auto import tqdm

from ..losses.variational import d3pm_loss, prior_loss
from ..schedulers import D3PMScheduler
from ..utils.checks import check_int, check_type
from .measurement import evaluating, read_scored, repeatable, row_generators
from .terms import per_example


@dataclass(frozen=True)
class OptimalTimesteps:
    """The timesteps of least cost for every number of steps up to the size G of a grid. Costs are in nats per element.

    A sampling run over timesteps t_1 > t_2 > ... > t_n has the bound `prior` + costs of t_1 -> t_2, ..., t_n -> data.

    Args:
        grid (`list[int]`): The G timesteps among which the best ones are chosen, ascending; the last one is T - 1.
        costs (`torch.Tensor` of shape `[G, G + 1]`): Average term of the bound for a step from `grid[i]` to the data, in column
            0, and to `grid[j]`, in column `j + 1`. Steps that do not go down are `inf`.
        standard_errors (`torch.Tensor` of shape `[G, G + 1]`): Standard error of each cost, from the spread between examples.
        prior (`float`): L_T of eq. 1 of the paper, which no step changes.
        num_examples, num_elements (`int`): Number of examples and of scored elements in the averages.
        num_train_timesteps (`int`): T.
        seed (`int`): Seed for the noise.
        inference_timesteps (`dict[int, list[int]]`): For each n the best timesteps, as
            `scheduler.register_inference_timesteps` takes them. Filled in from `costs`.
    """

    grid: list[int]
    costs: torch.Tensor
    standard_errors: torch.Tensor
    prior: float
    num_examples: int
    num_elements: int
    num_train_timesteps: int
    seed: int
    inference_timesteps: dict[int, list[int]] = field(init=False)

    def __post_init__(self):
        paths = cheapest_paths(self.costs.numpy())
        chosen = {len(path): [self.grid[i] for i in path] for path in paths}
        object.__setattr__(self, "inference_timesteps", chosen)

    def timesteps(self, num_inference_steps: int) -> list[int]:
        """The best timesteps for this number of steps, descending from T - 1."""
        check_int("num_inference_steps", num_inference_steps, 1, len(self.grid))
        return list(self.inference_timesteps[num_inference_steps])

    def even_timesteps(self, num_inference_steps: int) -> list[int]:
        """Evenly spaced timesteps, each rounded to the nearest one of the grid; two that fall together are one."""
        check_int("num_inference_steps", num_inference_steps, 1, self.num_train_timesteps)
        grid, T, n = np.array(self.grid), self.num_train_timesteps, num_inference_steps
        nearest = {self.grid[np.abs(grid - (i * T // n - 1)).argmin()] for i in range(1, n + 1)}
        return sorted(nearest, reverse=True)

    def bound(self, timesteps: list[int]) -> float:
        """The bound over these timesteps of the grid, in nats per element: `prior` and the sum of the costs.

        The timesteps were chosen on the same examples: [`evaluate_bound`] on other data gives a value free of that choice.
        """
        place = {t: i for i, t in enumerate(self.grid)}
        if len(timesteps) == 0 or any(t not in place for t in timesteps) or timesteps[0] != self.grid[-1]:
            raise ValueError(f"timesteps is {timesteps}: pass timesteps of the grid, from {self.grid[-1]} down")
        path = [place[t] for t in timesteps]
        return self.prior + sum(self.costs[i, j + 1].item() for i, j in zip(path, [*path[1:], -1]))

    @property
    def bounds(self) -> list[float]:
        """The predicted bound of the best timesteps for 1 .. G steps, in nats per element."""
        return [self.bound(self.timesteps(n)) for n in range(1, len(self.grid) + 1)]

    @property
    def even_bounds(self) -> list[float]:
        """The predicted bound of evenly spaced timesteps for 1 .. G steps, each rounded to the grid."""
        return [self.bound(self.even_timesteps(n)) for n in range(1, len(self.grid) + 1)]


@torch.no_grad()
def evaluate_strides(
    scheduler: D3PMScheduler,
    model: Callable,
    batches: Iterable,
    *,
    grid: int | list[int] = 64,
    seed: int = 0,
    progress_bar: bool = True,
) -> OptimalTimesteps:
    """Measures the term of the bound for every step t -> s between timesteps of a grid, and chooses the best ones.

        cost(t -> s) = KL(q(x_s | x_t, x_0) || p(x_s | x_t))        cost(t -> data) = -log p(x_0 | x_t)

    p(x_0 | x_t) does not depend on where the step lands: the network is called once per example and timestep of the grid, and
    its output gives the costs of all steps from there. Dynamic programming over them gives the best n timesteps for every n
    (Watson et al., "Learning to efficiently sample from diffusion probabilistic models", 2021).

    Args:
        scheduler, model, batches, seed, progress_bar: As in [`evaluate_bound`].
        grid (`int` or `list[int]`, defaults to 64): Number of timesteps of the grid, evenly spaced from 0 to T - 1 (a number above
            T stands for T); or the timesteps themselves, strictly decreasing from T - 1.
    """
    check_type("scheduler", scheduler, D3PMScheduler, "a `D3PMScheduler`")
    check_type("model", model, Callable, "a function or a module")
    check_type("batches", batches, Iterable, "an iterable of tensors or dictionaries")
    check_int("seed", seed, 0)
    if scheduler.config.prediction_type == "previous" or scheduler.family.is_autoregressive:
        raise ValueError(
            "there are no timesteps to choose: a model that predicts x_{t-1} or one token at a time takes all "
            f"{len(scheduler)} steps"
        )
    times = grid_timesteps(scheduler, grid)  # ascending
    sums = torch.zeros(3, len(times), len(times) + 1, dtype=torch.float64)  # of c, c^2 and c e over the examples
    prior, elements = 0.0, torch.zeros(0, dtype=torch.float64)
    predict = repeatable(model)
    bar = tqdm(desc="strides", disable=not progress_bar, unit="timestep")
    with evaluating(model):
        for batch in batches:
            x_0, mask, condition = read_scored(scheduler, batch)
            first = torch.arange(len(elements), len(elements) + len(x_0))
            scored = mask.reshape(len(mask), -1).sum(-1).cpu().double()  # [B]
            elements = torch.cat([elements, scored])
            prior += per_example(prior_loss(scheduler, x_0), mask).sum().item()
            for i, t in enumerate(times):
                # The same random numbers at every t: their noise is much the same in all paths, and does not choose between them.
                generators = row_generators(seed, first, condition.get("attention_mask"))
                x_t = torch.where(mask, scheduler.add_noise(x_0, t, generators), x_0)
                output = predict(x_t, torch.full((len(x_0),), t, device=x_0.device), **condition)
                behind = [scheduler.num_steps_behind(s) for s in [-1, *times[: i + 1]]]
                scheduler.transition.prepare_stretches(behind, behind[-1], x_0.device)
                for j, s in enumerate([-1, *times[:i]]):
                    cost = per_example(stride_terms(scheduler, output, x_0, x_t, s, t, mask), mask)  # [B]
                    sums[:, i, j] += torch.stack([cost.sum(), (cost**2).sum(), (cost * scored).sum()])
                bar.update()
            if sums.isnan().any():
                raise ValueError(
                    "the costs are NaN: the output of the network holds NaN; check its weights and its input"
                )
    bar.close()
    total = elements.sum().item()
    if not total:
        raise ValueError("there is nothing to evaluate: `batches` is empty, or no element counts")
    down = torch.ones(len(times), len(times) + 1).tril().bool()  # the steps that were measured
    costs = (sums[0] / total).where(down, torch.inf)
    return OptimalTimesteps(
        grid=times,
        costs=costs,
        standard_errors=ratio_errors(costs, sums, elements).where(down, torch.nan),
        prior=prior / total,
        num_examples=len(elements),
        num_elements=int(total),
        num_train_timesteps=len(scheduler),
        seed=seed,
    )


def stride_terms(scheduler: D3PMScheduler, output: torch.Tensor, x_0, x_t, s: int, t: int, mask) -> torch.Tensor:
    """The term of the bound for a step from t to s, `[B, ...]`; s = -1 stands for the data.

    A loss of matrices multiplies those between s and t for each sample. All samples are at one t here: as a single long one they
    need one product.
    """
    shape = x_0.shape
    if scheduler.transition.fused_loss == "matrix":
        x_0, x_t, mask = (x.reshape(1, -1) for x in (x_0, x_t, mask))
        output = output.reshape(1, x_0.shape[1], -1)
    return d3pm_loss(scheduler, output, x_0, x_t, t, previous_timesteps=s, loss_mask=mask).vb.reshape(shape)


def grid_timesteps(scheduler: D3PMScheduler, grid: int | list[int]) -> list[int]:
    """The timesteps of the grid, ascending up to T - 1: `grid` of them, evenly spaced from 0, or `grid` itself."""
    last = len(scheduler) - 1
    if isinstance(grid, (list, tuple)):
        times = scheduler.sampling_timesteps(timesteps=list(grid))
        if times[0] != last:
            raise ValueError(f"grid starts at {times[0]}: the first timestep must be T - 1 = {last}")
        return times[::-1]
    check_int("grid", grid, 1)
    count = min(grid, len(scheduler))
    return [last] if count == 1 else [round(i * last / (count - 1)) for i in range(count)]


def ratio_errors(costs: torch.Tensor, sums: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """The standard error of each cost r = sum(c) / sum(e) over the examples, from the sums of c, c^2 and c e.

    sqrt(m / (m - 1) sum((c - r e)^2)) / sum(e),   m the number of examples; NaN for a single one
    """
    count = len(elements)
    residual = sums[1] - 2 * costs * sums[2] + costs**2 * (elements**2).sum()
    scale = count / (count - 1) if count > 1 else float("nan")
    return (scale * residual.clamp(min=0)).sqrt() / elements.sum()


def cheapest_paths(costs: np.ndarray) -> list[list[int]]:
    """For n = 1 .. G the path of n steps of least total cost, from the last entry of the grid to the data.

        best(1, i) = cost(i -> data)        best(n, i) = min_{j < i} cost(i -> j) + best(n - 1, j)

    Args:
        costs: `[G, G + 1]`, as in [`OptimalTimesteps`].

    Returns:
        Indices into the grid, descending from G - 1.
    """
    size = len(costs)
    best, nexts = costs[:, 0], [np.full(size, -1)]
    for n in range(2, size + 1):
        ahead, step = np.full(size, np.inf), np.full(size, -1)
        for i in range(n - 1, size):  # n - 2 steps lie below the next entry
            totals = costs[i, n - 1 : i + 1] + best[n - 2 : i]
            step[i] = n - 2 + totals.argmin()
            ahead[i] = totals.min()
        best = ahead
        nexts.append(step)
    paths = []
    for n in range(1, size + 1):
        path = [size - 1]
        for step in reversed(nexts[1:n]):
            path.append(int(step[path[-1]]))
        paths.append(path)
    return paths
