# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Chooses the timesteps that a pipeline samples with."""

from torch.utils.data import Subset

from ..data.batches import evaluation_batches
from ..data.collator import DataCollatorForD3PM
from ..likelihood import OptimalTimesteps, evaluate_strides
from ..likelihood.strides import finer_grid, first_grid
from ..pipelines import D3PMPipeline
from ..utils.checks import check_dataset, check_int, check_type


# There is one example for a first look at the costs for so many others.
NUM_PER_FIRST = 8


def optimize_timesteps(
    pipeline: D3PMPipeline,
    dataset,
    *,
    num_examples: int = 256,
    grid: int | list[int] = 60,
    batch_size: int = 64,
    seed: int = 0,
    progress_bar: bool = True,
) -> OptimalTimesteps:
    """The timesteps with the lowest bound for every number of inference steps up to the size of a grid.

    The network is called at most once per example and timestep of the grid; [`~likelihood.evaluate_strides`] says why that is
    enough. A first look, on an eighth as many examples beside the others, shows where steps should be dense. There half of
    the grid lies; the other half is evenly spaced, so that evenly spaced timesteps are among the candidates. Numbers of steps for
    which they are as good, within three standard errors on examples that the choice was not made on, are left to them.

    The pipeline is not changed: `pipeline.scheduler.register_inference_timesteps(result.inference_timesteps)` makes it sample
    with these timesteps, and `pipeline.save_pretrained` saves them.

    A model that predicts x_{t-1}, and one of an autoregressive process, takes all steps: it raises an error.

    Args:
        pipeline ([`D3PMPipeline`]): Pipeline with a trained network.
        dataset: `dataset[i]` is an example, as for training. Take training data, so that test data remain to measure on.
        num_examples (`int`, defaults to 256): Number of examples, spread over the data set, without those of the first look.
        grid (`int` or `list[int]`, defaults to 60): Number of timesteps to choose among (a number of T or more stands for all
            of them, without a first look); or the timesteps themselves, strictly decreasing from T - 1.
        batch_size (`int`, defaults to 64): Number of examples in a batch.
        seed (`int`, defaults to 0): Seed for the noise.
        progress_bar (`bool`, defaults to `True`): Whether to show a progress bar.
    """
    check_type("pipeline", pipeline, D3PMPipeline, "a `D3PMPipeline`")
    check_dataset("dataset", dataset)
    check_int("num_examples", num_examples, 1)
    check_int("batch_size", batch_size, 1)
    scheduler, denoiser = pipeline.scheduler, pipeline.denoiser
    label_column = None if denoiser.num_class_labels is None else "label"
    collator = DataCollatorForD3PM(getattr(pipeline, "tokenizer", None), label_column=label_column)

    def measure(grid: int | list[int], indices: list[int]) -> OptimalTimesteps:
        batches = evaluation_batches(Subset(dataset, indices), batch_size, None, pipeline.device, collator)
        return evaluate_strides(scheduler, denoiser, batches, grid=grid, seed=seed, progress_bar=progress_bar)

    size = len(dataset)
    whole = spread(size, min(num_examples, size))
    if isinstance(grid, (list, tuple)):
        return measure(grid, whole)
    check_int("grid", grid, 1)
    if grid >= len(scheduler) or size == 1:
        return measure(grid, whole)
    num_first = max(1, num_examples // NUM_PER_FIRST)
    indices = spread(size, min(num_examples + num_first, size))
    # The first look has examples of its own, so that the network sees each of them once per timestep of one grid.
    first_indices = [indices[i] for i in spread(len(indices), min(num_first, len(indices) // 2))]
    first = measure(first_grid(scheduler, grid), first_indices)
    path = first.cheapest_timesteps(max(1, len(first.grid) // 4))
    return measure(finer_grid(scheduler, grid, path), sorted(set(indices) - set(first_indices)))


def spread(size: int, count: int) -> list[int]:
    """`count` of the numbers 0 .. size - 1, spread evenly."""
    return [i * size // count for i in range(count)]
