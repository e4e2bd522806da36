# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Training on a stream, which is read in its own order and continued from its own state."""

from collections.abc import Callable, Iterator

from accelerate import Accelerator
from accelerate.utils import send_to_device

from .batches import draw_step
from .serialization import encode
from .timestep_laws import TimestepLaw, UniformLaw


def is_stream(dataset) -> bool:
    """Whether a data set is a stream, such as a `datasets.IterableDataset`: it is iterated, and its position is a state."""
    return all(hasattr(dataset, name) for name in ("__iter__", "state_dict", "load_state_dict"))


class StreamBatches:
    """The batches of one process in training on a stream. A step takes the next examples of the stream.

    Each process reads all examples, and keeps its own: the examples of a step do not depend on the number of processes. When
    the stream ends, it starts again, in the order of the next epoch if it is shuffled.

    It is part of each checkpoint, with the state of the stream after the step of the checkpoint.

    Args:
        dataset (`datasets.IterableDataset`): The stream, with `state_dict` and `load_state_dict`.
        collate (`Callable`): Makes a batch of (index, example, seed, timestep).
        accelerator (`Accelerator`): The processes.
        batch_size (`int`): Number of examples in a batch of one process.
        batches_per_step (`int`): Number of processes times accumulation steps.
        num_timesteps (`int`): T.
        seed (`int`): Seed of the timesteps and the noise.
        last_step (`int`): Number of steps of the run.
        law ([`TimestepLaw`], defaults to `UniformLaw()`): Law of the timesteps.
    """

    def __init__(
        self,
        dataset,
        collate: Callable,
        accelerator: Accelerator,
        batch_size: int,
        batches_per_step: int,
        num_timesteps: int,
        seed: int,
        last_step: int,
        law: TimestepLaw = UniformLaw(),
    ):
        self.dataset, self.collate, self.accelerator = dataset, collate, accelerator
        self.batch_size, self.batches_per_step = batch_size, batches_per_step
        self.num_timesteps, self.seed, self.last_step, self.law = num_timesteps, seed, last_step, law
        self.global_batch_size = batch_size * batches_per_step
        self.step = self.epoch = self.position = 0
        self._states: dict[int, dict] = {}

    def __iter__(self) -> Iterator[dict]:
        examples = self._read()
        for step in range(self.step, self.last_step):
            seeds, timesteps = draw_step(step, self.seed, self.global_batch_size, self.num_timesteps, self.law)
            items = [(*next(examples), seed, timestep) for seed, timestep in zip(seeds, timesteps)]
            stream = {"epoch": self.epoch, "position": self.position, "dataset": self.dataset.state_dict()}
            if not self._states:  # rather now than at the first checkpoint
                encode(stream["dataset"], "the state of the stream", {})
            self._states = {step + 1: stream, **{k: v for k, v in self._states.items() if k == step}}
            for number in range(self.accelerator.process_index, self.batches_per_step, self.accelerator.num_processes):
                batch = self.collate(items[number * self.batch_size : (number + 1) * self.batch_size])
                self.step = step + 1
                yield send_to_device(batch, self.accelerator.device)

    def _read(self) -> Iterator[tuple[int, object]]:
        """The examples of the stream with their positions, again and again."""
        while True:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(self.epoch)
            for example in self.dataset:
                self.position += 1
                yield self.position - 1, example
            if not self.position:
                raise ValueError("the stream is empty: pass one with at least one example")
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict:
        """The position of the stream after the step that has been taken last."""
        return {"step": self.step, "stream": self._states.get(self.step)}

    def load_state_dict(self, state: dict) -> None:
        """Continues from a position."""
        self.step, stream = state["step"], state["stream"]
        if stream is not None:
            self.epoch, self.position = stream["epoch"], stream["position"]
            self.dataset.load_state_dict(stream["dataset"])
            self._states = {self.step: stream}
