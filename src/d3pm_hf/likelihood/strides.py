# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The cost of every stride between the timesteps of a grid, the timesteps of least total cost, and grids to choose among."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from tqdm.auto import tqdm

from ..losses.network import predict_needed
from ..losses.variational import d3pm_loss, prior_loss
from ..schedulers import D3PMScheduler
from ..utils.checks import check_int, check_type
from .bound import ratio_estimate
from .measure import as_batches, evaluating, read_scored, repeatable, row_generators
from .terms import per_example


# Chosen timesteps are stored if they are better than even ones by so many standard errors.
MIN_GAIN = 3.0


@dataclass(frozen=True)
class OptimalTimesteps:
    """The timesteps of least cost for every number of steps up to the size G of a grid. Costs are in nats per element.

    A sampling run over timesteps t_1 > t_2 > ... > t_n has the bound `prior` + costs of t_1 -> t_2, ..., t_n -> data.

    Args:
        grid (`list[int]`): The G timesteps among which the best ones are chosen, ascending; the last one is T - 1.
        nats_per_example (`torch.Tensor` of shape `[num_examples, G, G + 1]`): Term of the bound of each whole example for a
            step from `grid[i]` to the data, in column 0, and to `grid[j]`, in column `j + 1`. Steps that do not go down
            are `inf`.
        elements_per_example (`torch.Tensor` of shape `[num_examples]`): Number of scored elements of each example.
        prior (`float`): L_T of eq. 1 of the paper, which no step changes.
        num_train_timesteps (`int`): T.
        seed (`int`): Seed for the noise.
        costs, standard_errors (`torch.Tensor` of shape `[G, G + 1]`): Average term of each step, and its standard error from
            the spread between examples. Filled in.
        inference_timesteps (`dict[int, list[int]]`): For each n the timesteps to sample with, as
            `scheduler.register_inference_timesteps` takes them. Numbers for which evenly spaced timesteps are as good are
            not in it. Filled in.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler
        from d3pm_hf.likelihood import evaluate_strides

        scheduler, data = D3PMScheduler(5, 20), torch.randint(0, 4, (8, 6))


        def model(x_t, timesteps):
            return torch.zeros(*x_t.shape, 5)


        result = evaluate_strides(scheduler, model, [data], grid=[19, 14, 9, 4], progress_bar=False)
        assert result.timesteps(2)[0] == 19  # sampling begins with T - 1
        ```
    """

    grid: list[int]
    nats_per_example: torch.Tensor
    elements_per_example: torch.Tensor
    prior: float
    num_train_timesteps: int
    seed: int
    costs: torch.Tensor = field(init=False)
    standard_errors: torch.Tensor = field(init=False)
    inference_timesteps: dict[int, list[int]] = field(init=False)

    def __post_init__(self):
        down = torch.ones(self.nats_per_example.shape[1:]).tril().bool()  # the steps that were measured
        nats = self.nats_per_example.where(down, 0).movedim(0, -1).numpy()  # [G, G + 1, M]
        costs, errors, _ = ratio_estimate(nats, self.elements_per_example.numpy())
        object.__setattr__(self, "costs", torch.from_numpy(costs).where(down, torch.inf))
        object.__setattr__(self, "standard_errors", torch.from_numpy(errors).where(down, torch.nan))
        chosen = enumerate(zip(self._paths(), self.gains), 1)
        stored = {n: [self.grid[i] for i in path] for n, (path, (gain, error)) in chosen if gain > MIN_GAIN * error}
        object.__setattr__(self, "inference_timesteps", stored)

    @property
    def num_examples(self) -> int:
        """Number of examples in the averages."""
        return len(self.elements_per_example)

    @property
    def num_elements(self) -> int:
        """Number of scored elements in the averages."""
        return int(self.elements_per_example.sum())

    @property
    def even_numbers(self) -> list[int]:
        """The numbers of steps whose evenly spaced timesteps all lie on the grid."""
        times = set(self.grid)
        return [n for n in range(1, len(self.grid) + 1) if times.issuperset(self.even_timesteps(n))]

    def even_timesteps(self, num_inference_steps: int) -> list[int]:
        """Evenly spaced timesteps, as `scheduler.spaced_timesteps` gives them."""
        check_int("num_inference_steps", num_inference_steps, 1, self.num_train_timesteps)
        n, T = num_inference_steps, self.num_train_timesteps
        return [i * T // n - 1 for i in range(n, 0, -1)]

    def timesteps(self, num_inference_steps: int) -> list[int]:
        """The timesteps to sample with, descending from T - 1: the chosen ones, or evenly spaced ones if they are as good."""
        even = self.even_timesteps(num_inference_steps)
        return list(self.inference_timesteps.get(num_inference_steps, even))

    def cheapest_timesteps(self, num_inference_steps: int) -> list[int]:
        """The timesteps of the grid with the least total cost, whether they are better than even ones or not."""
        check_int("num_inference_steps", num_inference_steps, 1, len(self.grid))
        return [self.grid[i] for i in self._paths()[num_inference_steps - 1]]

    def bound(self, timesteps: list[int]) -> float:
        """The bound over these timesteps of the grid, in nats per element: `prior` and the sum of the costs.

        The timesteps were chosen on the same examples: [`evaluate_bound`] on other data gives a value free of that choice.
        """
        return self.prior + (self._path_nats(timesteps).sum() / self.elements_per_example.sum()).item()

    @property
    def bounds(self) -> list[float]:
        """The predicted bound of the cheapest timesteps for 1 .. G steps, in nats per element."""
        return [self.bound([self.grid[i] for i in path]) for path in self._paths()]

    @property
    def even_bounds(self) -> list[float]:
        """The predicted bound of evenly spaced timesteps for 1 .. G steps.

        For numbers that are not in `even_numbers` it is an estimate from those that are. If one step is the only such number,
        there is no other.
        """
        return [self.prior + (nats.sum() / self.elements_per_example.sum()).item() for nats in self._even_nats()]

    @property
    def gains(self) -> list[tuple[float, float]]:
        """How much lower the bound of chosen timesteps is than that of even ones, and its standard error, for 1 .. G steps.

        A choice looks better on the examples that it was made on than on others. So the timesteps of this comparison are
        chosen twice, on every second example, and compared on the others.
        """
        folds = slice(0, None, 2), slice(1, None, 2)
        if self.num_examples < 2 or any(not self.elements_per_example[fold].sum() for fold in folds):
            return []
        gains = []
        paths = [self._paths(fold) for fold in folds]
        for index, gain in enumerate(self._even_nats()):
            for fold, others in zip(folds, reversed(paths)):
                gain[fold] -= self._path_nats([self.grid[i] for i in others[index]])[fold]
            mean, error, _ = ratio_estimate(gain.numpy(), self.elements_per_example.numpy())
            gains.append((float(mean), float(error)))
        return gains

    def _path_nats(self, timesteps: list[int]) -> torch.Tensor:
        """The sum of the terms of each example over a path, `[M]`."""
        place = {t: i for i, t in enumerate(self.grid)}
        if len(timesteps) == 0 or any(t not in place for t in timesteps) or timesteps[0] != self.grid[-1]:
            raise ValueError(f"timesteps is {timesteps}: pass timesteps of the grid, from {self.grid[-1]} down")
        path = [place[t] for t in timesteps]
        return self.nats_per_example[:, path, [*(j + 1 for j in path[1:]), 0]].sum(-1)

    def _even_nats(self) -> list[torch.Tensor]:
        """The sum of the terms of each example over evenly spaced timesteps, `[M]`, for 1 .. G steps.

        With many steps the bound is a constant and a multiple of 1 / n. If the timesteps are not on the grid, it is taken from
        the line in 1 / n through two numbers of steps whose timesteps are: the nearest one on each side, or the last two.
        """
        known = {n: self._path_nats(self.even_timesteps(n)) for n in self.even_numbers}
        numbers = list(known)
        if len(numbers) == 1:
            return list(known.values())
        nats = []
        for n in range(1, len(self.grid) + 1):
            last = next((i for i, number in enumerate(numbers) if number >= n), len(numbers) - 1)
            first, second = numbers[max(last, 1) - 1], numbers[max(last, 1)]
            weight = (1 / n - 1 / second) / (1 / first - 1 / second)
            nats.append(weight * known[first] + (1 - weight) * known[second])
        return nats

    def _paths(self, rows: slice = slice(None)) -> list[list[int]]:
        """The cheapest paths for 1 .. G steps, chosen on the examples `rows`."""
        total = self.elements_per_example[rows].sum()
        return cheapest_paths((self.nats_per_example[rows].sum(0) / total).numpy())


@torch.no_grad()
def evaluate_strides(
    scheduler: D3PMScheduler,
    model: Callable,
    batches: Iterable,
    *,
    grid: int | list[int] = 60,
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
        grid (`int` or `list[int]`, defaults to 60): Number of timesteps of the grid, evenly spaced up to T - 1 (a number above
            T stands for T); or the timesteps themselves, strictly decreasing from T - 1. Of 60 evenly spaced timesteps those of
            1, 2, 3, 4, 5, 6, 10, 12, 15, 20 and 30 steps are a part, so that the comparison with them is exact.
    """
    check_type("scheduler", scheduler, D3PMScheduler, "a `D3PMScheduler`")
    check_type("model", model, Callable, "a function or a module")
    batches = as_batches(batches)
    check_int("seed", seed, 0)
    if scheduler.config.prediction_type == "previous" or scheduler.family.is_autoregressive:
        raise ValueError(
            "there are no timesteps to choose: a model that predicts x_{t-1} or one token at a time takes all "
            f"{len(scheduler)} steps"
        )
    times = grid_timesteps(scheduler, grid)  # ascending
    behind = [scheduler.num_steps_behind(s) for s in (-1, *times)]
    prior, count, tables, elements = 0.0, 0, [], []
    # A module is in eval mode here. That of another function is not known: its first call is made twice.
    predict = model if isinstance(getattr(model, "__self__", model), torch.nn.Module) else repeatable(model)
    with evaluating(model), tqdm(desc="strides", disable=not progress_bar, unit="timestep") as bar:
        for batch in batches:
            x_0, mask, condition = read_scored(scheduler, batch)
            rows, count = torch.arange(count, count + len(x_0)), count + len(x_0)
            prior += per_example(prior_loss(scheduler, x_0), mask).sum().item()
            table = torch.full((len(x_0), len(times), len(times) + 1), torch.inf, dtype=torch.float64)
            for i, t in enumerate(times):
                # The same random numbers at every t: their noise is much the same in all paths, and does not choose between them.
                generators = row_generators(seed, rows, condition)
                x_t = torch.where(mask, scheduler.add_noise(x_0, t, generators), x_0)
                shown = torch.full((len(x_0),), t, device=x_0.device)
                # The step to the data depends on all logits that any step from t depends on.
                options = {"previous_timesteps": -1, "loss_mask": mask}
                output, index = predict_needed(scheduler, predict, x_t, shown, condition, **options)
                scheduler.transition.prepare_stretches(behind[: i + 1], behind[i + 1], x_0.device)
                for j, s in enumerate([-1, *times[:i]]):
                    table[:, i, j] = per_example(stride_terms(scheduler, output, x_0, x_t, s, t, mask, index), mask)
                bar.update()
            if table.isnan().any():
                raise ValueError(
                    "the costs are NaN: the output of the network holds NaN; check its weights and its input"
                )
            tables.append(table)
            elements.append(mask.reshape(len(mask), -1).sum(-1).cpu().double())  # [B]
    if not sum(each.sum() for each in elements):
        raise ValueError("there is nothing to evaluate: `batches` is empty, or no element counts")
    elements_per_example = torch.cat(elements)
    return OptimalTimesteps(
        grid=times,
        nats_per_example=torch.cat(tables),
        elements_per_example=elements_per_example,
        prior=prior / elements_per_example.sum().item(),
        num_train_timesteps=len(scheduler),
        seed=seed,
    )


def stride_terms(scheduler: D3PMScheduler, output, x_0, x_t, s: int, t: int, mask, index=None) -> torch.Tensor:
    """The term of the bound for a step from t to s, `[B, ...]`; s = -1 stands for the data. `output` may be that of `index`.

    A loss of matrices multiplies those between s and t for each sample. All samples are at one t here: as a single long one they
    need one product, if their elements are alike.
    """
    shape = x_0.shape
    if scheduler.transition.is_alike and scheduler.config.get("element_classes") is None:
        x_0, x_t, mask = (x.reshape(1, -1) for x in (x_0, x_t, mask))
        output = output if index is not None else output.reshape(1, x_0.shape[1], -1)
    options = {"previous_timesteps": s, "loss_mask": mask, "logits_to_keep": index}
    return d3pm_loss(scheduler, output, x_0, x_t, t, **options).vb.reshape(shape)


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


def grid_timesteps(scheduler: D3PMScheduler, grid: int | list[int]) -> list[int]:
    """The timesteps of the grid, ascending up to T - 1: `grid` of them, evenly spaced, or `grid` itself."""
    last = len(scheduler) - 1
    if isinstance(grid, (list, tuple)):
        times = scheduler.sampling_timesteps(timesteps=list(grid))
        if times[0] != last:
            raise ValueError(f"grid starts at {times[0]}: the first timestep must be T - 1 = {last}")
        return times[::-1]
    check_int("grid", grid, 1)
    return scheduler.spaced_timesteps(min(grid, len(scheduler)))[::-1]


def first_grid(scheduler: D3PMScheduler, size: int) -> list[int]:
    """At most `size` timesteps for a first look, descending: half of them evenly spaced, the others denser near the data.

    Gaussian noise has most of the bound in its first steps, so that the others lie at T (i/n)^3.
    """
    return fill_grid(scheduler, size, [round(len(scheduler) * (i / size) ** 3) - 1 for i in range(size + 1)])


def finer_grid(scheduler: D3PMScheduler, size: int, path: list[int]) -> list[int]:
    """At most `size` timesteps, descending: half of them evenly spaced, the others as dense as those of `path`.

    Args:
        path: The cheapest timesteps of a first look, descending.
    """
    return fill_grid(scheduler, size, [-1, *path[::-1]])


def fill_grid(scheduler: D3PMScheduler, size: int, places: list[int]) -> list[int]:
    """`size // 2` evenly spaced timesteps and others, equally many in each stretch between two of the `places`."""
    if size >= len(scheduler):
        return scheduler.spaced_timesteps(len(scheduler))
    grid = even = set(scheduler.spaced_timesteps(max(1, size // 2)))
    for count in range(1, 4 * size):
        index = np.linspace(0, len(places) - 1, count + 1)
        others = np.interp(index, range(len(places)), places).round().astype(int).tolist()
        more = even.union(t for t in others if t >= 0)
        if len(grid) < len(more) <= size:
            grid = more
    return sorted(grid, reverse=True)
