# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Samples of a pipeline from seeds, for training and evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..data.batches import condition_of
from .pipeline_d3pm import D3PMPipeline


def draw_samples(
    pipeline: D3PMPipeline, num_samples: int, num_inference_steps: int, seed: int = 0, batch_size: int | None = None
) -> torch.Tensor:
    """Draws states `[num_samples, ...]` without progress bars; `pipeline.decode` turns them into text or images.

    If the network has classes, the samples have all of them in turn.

    Args:
        pipeline ([`D3PMPipeline`]): Pipeline to sample from.
        num_samples (`int`): Number of samples.
        num_inference_steps (`int`): Number of reverse steps.
        seed (`int`, defaults to 0): Seed for the noise, which one generator draws for all batches.
        batch_size (`int`, *optional*): Number of samples in a batch. Defaults to all of them.
    """
    batch_size = num_samples if batch_size is None else batch_size
    num_class_labels, states = pipeline.denoiser.num_class_labels, []
    generator = torch.Generator().manual_seed(seed)
    with silenced(pipeline):
        for first in range(0, num_samples, batch_size):
            numbers = range(first, min(first + batch_size, num_samples))
            classes = {} if num_class_labels is None else {"class_labels": [n % num_class_labels for n in numbers]}
            output = pipeline(
                **{pipeline.batch_argument: len(numbers)},
                num_inference_steps=num_inference_steps,
                generator=generator,
                output_type="latent",
                return_dict=False,
                **classes,
            )
            states.append(output[0])
    return torch.cat(states)


def draw_given(pipeline: D3PMPipeline, batch: dict, num_inference_steps: int, seed: int = 0) -> torch.Tensor:
    """Draws states `[B, ...]` given what is known of a batch: the elements that are not scored, and the condition.

    Args:
        pipeline ([`D3PMPipeline`]): Pipeline to sample from.
        batch (`dict`): A batch of [`~d3pm_hf.data.DataCollatorForD3PM`].
        num_inference_steps (`int`): Number of reverse steps.
        seed (`int`, defaults to 0): Seed for the noise.
    """
    x_0, scored = batch["x_0"], batch.get("loss_mask")
    with silenced(pipeline):
        return pipeline.sample_states(
            len(x_0),
            tuple(x_0.shape[1:]),
            given=None if scored is None else x_0.to(pipeline.device),
            is_given=None if scored is None else ~scored.to(pipeline.device),
            num_inference_steps=num_inference_steps,
            condition=condition_of(batch),
            generator=torch.Generator().manual_seed(seed),
        )


@contextmanager
def silenced(pipeline: D3PMPipeline) -> Iterator[None]:
    """A context in which calls of the pipeline show no progress bar."""
    shown = dict(getattr(pipeline, "_progress_bar_config", {}))
    pipeline.set_progress_bar_config(**{**shown, "disable": True})
    try:
        yield
    finally:
        pipeline.set_progress_bar_config(**shown)
