# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Chooses the timesteps that a pipeline samples with."""

from ..data.batches import evaluation_batches
from ..data.collator import DataCollatorForD3PM
from ..likelihood import OptimalTimesteps, evaluate_strides
from ..pipelines import D3PMPipeline
from ..utils.checks import check_dataset, check_int, check_type


def optimize_timesteps(
    pipeline: D3PMPipeline,
    dataset,
    *,
    num_examples: int = 256,
    grid: int | list[int] = 64,
    batch_size: int = 64,
    seed: int = 0,
    progress_bar: bool = True,
) -> OptimalTimesteps:
    """The timesteps with the lowest bound for every number of inference steps up to the size of a grid.

    The network is called once per example and timestep of the grid; [`~likelihood.evaluate_strides`] says why that is enough.
    The pipeline is not changed: `pipeline.scheduler.register_inference_timesteps(result.inference_timesteps)` makes it sample
    with these timesteps, and `pipeline.save_pretrained` saves them.

    A model that predicts x_{t-1}, and one of an autoregressive process, takes all steps: it raises an error.

    Args:
        pipeline ([`D3PMPipeline`]): Pipeline with a trained network.
        dataset: `dataset[i]` is an example, as for training. Take training data, so that test data remain to measure on.
        num_examples (`int`, defaults to 256): Number of examples, spread over the data set.
        grid (`int` or `list[int]`, defaults to 64): Number of timesteps to choose among, evenly spaced from 0 to T - 1 (a
            number above T stands for T); or the timesteps themselves, strictly decreasing from T - 1.
        batch_size (`int`, defaults to 64): Number of examples in a batch.
        seed (`int`, defaults to 0): Seed for the noise.
        progress_bar (`bool`, defaults to `True`): Whether to show a progress bar.
    """
    check_type("pipeline", pipeline, D3PMPipeline, "a `D3PMPipeline`")
    check_dataset("dataset", dataset, columns=True)
    check_int("num_examples", num_examples, 1)
    check_int("batch_size", batch_size, 1)
    denoiser = pipeline.denoiser
    label_column = None if denoiser.num_class_labels is None else "label"
    collator = DataCollatorForD3PM(getattr(pipeline, "tokenizer", None), label_column=label_column)
    batches = evaluation_batches(dataset, batch_size, num_examples, pipeline.device, collator)
    return evaluate_strides(pipeline.scheduler, denoiser, batches, grid=grid, seed=seed, progress_bar=progress_bar)
