# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Which examples, timesteps and noise a step sees: a function of the seed and the step alone.

A step is one global batch, in one order; whoever shares it out (processes, accumulation)
sees the same examples with the same timesteps and the same noise, and a run that is resumed need not replay anything.
"""

import numpy as np
import torch
from torch.utils.data import Dataset


class StepBatches:
    """The batch sampler of a run: batches of (index, seed, timestep), as many to a step as processes and accumulation need.

    Args:
        num_examples: of the data set. An epoch is a random order of all of them, without those left over at its end.
        batch_size: of one process.
        batches_per_step: processes times accumulation steps.
        num_timesteps: T.
        seed: of everything.
        steps: the range of steps to go through.
    """

    drop_last = True

    def __init__(self, num_examples, batch_size, batches_per_step, num_timesteps, seed, steps: range):
        self.num_examples, self.batch_size, self.batches_per_step = num_examples, batch_size, batches_per_step
        self.num_timesteps, self.seed, self.steps = num_timesteps, seed, steps
        self.global_batch_size = batch_size * batches_per_step
        self.steps_per_epoch = num_examples // self.global_batch_size
        if not self.steps_per_epoch:
            raise ValueError(
                f"the data set has {num_examples} examples, and a step takes {self.global_batch_size}: use a smaller batch "
                "or more data"
            )

    def __len__(self):
        return len(self.steps) * self.batches_per_step

    def __iter__(self):
        epoch = order = None
        for step in self.steps:
            if epoch != step // self.steps_per_epoch:
                epoch = step // self.steps_per_epoch
                order = np.random.default_rng((self.seed, 0, epoch)).permutation(self.num_examples)
            first = step % self.steps_per_epoch * self.global_batch_size
            indices = order[first : first + self.global_batch_size].tolist()
            rng = np.random.default_rng((self.seed, 1, step))
            items = list(zip(indices, sample_seeds(rng, len(indices)), self.timesteps(rng)))
            for batch in range(0, len(items), self.batch_size):
                yield items[batch : batch + self.batch_size]

    def timesteps(self, rng: np.random.Generator) -> list[int]:
        """One timestep per example of the global batch: one from each of as many equal stretches of 0 .. T-1.

        Each is uniform by itself, and together they cover time evenly, which takes most of the noise out of the loss.
        """
        count = self.global_batch_size
        strata = (rng.permutation(count) + rng.random(count)) / count
        return np.minimum(strata * self.num_timesteps, self.num_timesteps - 1).astype(int).tolist()


def sample_seeds(rng: np.random.Generator, count: int) -> list[int]:
    """Seeds of the augmentation and of the noise, one per example."""
    return rng.integers(2**63 - 1, size=count).tolist()


class CheckedExamples(Dataset):
    """A data set that refuses examples which are not data of the process, before they reach a device.

    Args:
        dataset: `dataset[index]` or `dataset[index, seed]` is x_0.
        num_classes: K.
        never_data: the state that x_0 never takes, or `None`.
    """

    def __init__(self, dataset, num_classes: int, never_data: int | None):
        self.dataset, self.num_classes, self.never_data = dataset, num_classes, never_data

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, item):
        x_0 = self.dataset[item]
        wrong = (x_0 < 0) | (x_0 >= self.num_classes)
        if self.never_data is not None:
            wrong |= x_0 == self.never_data
        if wrong.any():
            position = tuple(wrong.nonzero()[0].tolist())
            token, index = x_0[position].item(), item[0] if isinstance(item, tuple) else item
            reason = f"is outside the vocabulary of {self.num_classes}: use the tokenizer of the network"
            if token == self.never_data:
                reason = (
                    "is the mask of the process and never data: pass the token that masks to D3PMScheduler as "
                    "mask_token_id, or mask_in_data=True if the data do hold it"
                )
            raise ValueError(f"token {token} at position {position} of example {index} {reason}")
        return x_0


class SeededExamples(Dataset):
    """A data set as the sampler asks for it.

    Args:
        dataset: `dataset[index, seed]` is x_0, augmented as the seed decides.
    """

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, item):
        index, seed, timestep = item
        return {"x_0": self.dataset[index, seed], "seed": seed, "timestep": timestep}


def noise_generators(seeds: torch.Tensor) -> list[torch.Generator]:
    """One generator per example, on the CPU: the noise is the same on every device."""
    return [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
