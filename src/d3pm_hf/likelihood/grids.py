# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The timesteps among which those of sampling are chosen."""

import numpy as np

from ..schedulers import D3PMScheduler
from ..utils.checks import check_int


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
