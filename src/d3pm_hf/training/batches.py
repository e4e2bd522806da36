# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The examples, timesteps and noise of a training step, as a function of the seed and the step alone.

A step is one global batch in one order. Processes and accumulation steps that share it see the same examples with the same
timesteps and the same noise, and a resumed run does not replay anything.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from ..transitions.excluded import ExcludedStates


# Streams of random numbers of a run: the order of the examples by epoch, and the seeds and timesteps by step.
ORDER, NOISE = 0, 1


class StepBatches:
    """The batch sampler of a run. A batch is a list of (index, seed, timestep); a step has `batches_per_step` of them.

    Args:
        num_examples (`int`): Size of the data set. An epoch is a random permutation of it, without the remainder that
            does not fill a step.
        batch_size (`int`): Number of examples in a batch of one process.
        batches_per_step (`int`): Number of processes times accumulation steps.
        num_timesteps (`int`): T.
        seed (`int`): Seed for the order of the examples, the timesteps, the augmentation and the noise.
        steps (`range`): Steps to iterate over.
    """

    drop_last = True

    def __init__(
        self, num_examples: int, batch_size: int, batches_per_step: int, num_timesteps: int, seed: int, steps: range
    ):
        self.num_examples, self.batch_size, self.batches_per_step = num_examples, batch_size, batches_per_step
        self.num_timesteps, self.seed, self.steps = num_timesteps, seed, steps
        self.global_batch_size = batch_size * batches_per_step
        self.steps_per_epoch = num_examples // self.global_batch_size
        if not self.steps_per_epoch:
            raise ValueError(
                f"the data set has {num_examples} examples, and a step takes {self.global_batch_size}: use a smaller batch "
                "or more data"
            )

    def __len__(self) -> int:
        return len(self.steps) * self.batches_per_step

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        epoch, order = -1, np.empty(0, dtype=np.int64)
        for step in self.steps:
            if epoch != step // self.steps_per_epoch:
                epoch = step // self.steps_per_epoch
                order = np.random.default_rng((self.seed, ORDER, epoch)).permutation(self.num_examples)
            first = step % self.steps_per_epoch * self.global_batch_size
            indices = order[first : first + self.global_batch_size].tolist()
            rng = np.random.default_rng((self.seed, NOISE, step))
            seeds = rng.integers(2**63 - 1, size=len(indices)).tolist()
            items = list(zip(indices, seeds, self.draw_timesteps(rng)))
            for batch in range(0, len(items), self.batch_size):
                yield items[batch : batch + self.batch_size]

    def draw_timesteps(self, rng: np.random.Generator) -> list[int]:
        """One timestep per example of the global batch, each from its own of B equal parts of 0 .. T-1.

        The timestep of each example is uniform. Together they cover time evenly, which removes most of the variance of
        the loss.
        """
        count = self.global_batch_size
        strata = (rng.permutation(count) + rng.random(count)) / count
        return np.minimum(strata * self.num_timesteps, self.num_timesteps - 1).astype(int).tolist()


class CheckedExamples(Dataset):
    """A data set whose examples are checked to hold states of the process before they are moved to a device.

    Args:
        dataset: `dataset[index]` or `dataset[index, seed]` is x_0.
        num_classes (`int`): K.
        never_data (`tuple[int, ...]`): States that x_0 never takes.
        mask (`int`, *optional*): The one of them that is the mask.
    """

    def __init__(self, dataset, num_classes: int, never_data: tuple[int, ...], mask: int | None = None):
        self.dataset, self.num_classes, self.mask = dataset, num_classes, mask
        self.excluded = ExcludedStates(never_data, num_classes)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, item):
        x_0 = self.dataset[item]
        wrong = (x_0 < 0) | (x_0 >= self.num_classes) | self.excluded.contain(x_0)
        if wrong.any():
            position = tuple(wrong.nonzero()[0].tolist())
            token, index = x_0[position].item(), item[0] if isinstance(item, tuple) else item
            reason = f"is outside the vocabulary of {self.num_classes}: use the tokenizer of the network"
            if token == self.mask:
                reason = (
                    "is the mask of the process, which data must not hold: pass the mask token to D3PMScheduler as "
                    "mask_token_id, or mask_in_data=True if the data do hold it"
                )
            elif token in self.excluded.states:
                reason = (
                    "is one of suppress_tokens of the scheduler, which data must not hold: encode them without special tokens, "
                    "or leave it out of suppress_tokens"
                )
            raise ValueError(f"token {token} at position {position} of example {index} {reason}")
        return x_0


class SeededExamples(Dataset):
    """The examples that [`StepBatches`] asks for, with their seeds and timesteps.

    Args:
        dataset: `dataset[index, seed]` is x_0, with the augmentation that the seed decides.
    """

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, item: tuple[int, int, int]) -> dict:
        index, seed, timestep = item
        return {"x_0": self.dataset[index, seed], "seed": seed, "timestep": timestep}


def collate(examples: list[dict]) -> dict:
    """A batch of x_0 `[B, ...]` and timesteps `[B]`. The seeds stay a list, which is not moved to the device."""
    seeds = [example.pop("seed") for example in examples]
    return {**default_collate(examples), "seed": seeds}


def noise_generators(seeds: list[int]) -> list[torch.Generator]:
    """One generator per example, on the CPU, so that the noise is the same on every device."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]
