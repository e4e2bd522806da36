# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The data of a run, and the examples, timesteps and noise of a training step, as a function of the seed and the step alone.

A step is one global batch in one order. Processes and accumulation steps that share it see the same examples with the same
timesteps and the same noise, and a resumed run does not replay anything. A stream is read in its own order, and continued from
its own state.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import send_to_device
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from ..data.batches import MASKS, read_batch
from ..data.collator import DataCollatorForD3PM
from ..models.text_denoisers import num_positions
from ..pipelines import D3PMPipeline, D3PMTextPipeline
from ..transitions.excluded import ExcludedStates
from ..utils.checks import check_dataset, check_type, describe
from .interruption import blocked_signals, ignore_signals
from .state_files import encode
from .timestep_laws import UniformLaw
from .training_args import D3PMTrainingArguments


# Streams of random numbers of a run: the order of the examples by epoch, the seeds and timesteps by step, and which conditions
# are left out by seed.
ORDER, NOISE, DROPOUT = 0, 1, 2


class StepBatches:
    """The batch sampler of a run. A batch is a list of (index, seed, timestep); a step has `batches_per_step` of them.

    An epoch is a random permutation of the examples, without the remainder that does not fill a step. `batches_per_step` is the
    number of processes times accumulation steps.
    """

    drop_last = True

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        batches_per_step: int,
        num_timesteps: int,
        seed: int,
        steps: range,
        law: UniformLaw = UniformLaw(),
    ):
        self.num_examples, self.batch_size, self.batches_per_step = num_examples, batch_size, batches_per_step
        self.num_timesteps, self.seed, self.steps, self.law = num_timesteps, seed, steps, law
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
            draws = draw_step(step, self.seed, self.global_batch_size, self.num_timesteps, self.law)
            items = list(zip(indices, *draws))
            for batch in range(0, len(items), self.batch_size):
                yield items[batch : batch + self.batch_size]


def draw_step(step: int, seed: int, count: int, num_timesteps: int, law: UniformLaw) -> tuple[list[int], list[int]]:
    """The seeds and the timesteps of the `count` examples of a step.

    Each timestep is from its own of B parts of 0 .. T-1 to which the law gives equal probability. The timestep of each example
    has the law. Together they cover time evenly, which removes most of the variance of the loss.
    """
    rng = np.random.default_rng((seed, NOISE, step))
    seeds = rng.integers(2**63 - 1, size=count).tolist()
    strata = (rng.permutation(count) + rng.random(count)) / count
    return seeds, np.minimum(law.times(strata) * num_timesteps, num_timesteps - 1).astype(int).tolist()


def is_stream(dataset) -> bool:
    """Whether a data set is a stream, such as a `datasets.IterableDataset`: it is iterated, and its position is a state."""
    return all(hasattr(dataset, name) for name in ("__iter__", "state_dict", "load_state_dict"))


class StreamBatches:
    """The batches of one process in training on a stream. A step takes the next examples of the stream.

    Each process reads all examples, and keeps its own: the examples of a step do not depend on the number of processes. When
    the stream ends, it starts again, in the order of the next epoch if it is shuffled.

    It is part of each checkpoint, with the state of the stream after the step of the checkpoint.
    """

    def __init__(
        self,
        arguments: D3PMTrainingArguments,
        accelerator: Accelerator,
        dataset,
        collate: Callable,
        num_timesteps: int,
    ):
        self.arguments, self.accelerator = arguments, accelerator
        self.dataset, self.collate, self.num_timesteps = dataset, collate, num_timesteps
        self.step = self.epoch = self.position = 0
        self._states: dict[int, dict] = {}

    def __iter__(self) -> Iterator[dict]:
        arguments, accelerator, examples = self.arguments, self.accelerator, self._read()
        size = arguments.train_batch_size
        batches_per_step = accelerator.num_processes * arguments.gradient_accumulation_steps
        draws = arguments.seed, size * batches_per_step, self.num_timesteps, arguments.timestep_law
        for step in range(self.step, arguments.max_train_steps):
            seeds, timesteps = draw_step(step, *draws)
            items = [(*next(examples), seed, timestep) for seed, timestep in zip(seeds, timesteps)]
            stream = {"epoch": self.epoch, "position": self.position, "dataset": self.dataset.state_dict()}
            if not self._states:  # rather now than at the first checkpoint
                encode(stream["dataset"], "the state of the stream", {})
            self._states = {step + 1: stream, **{k: v for k, v in self._states.items() if k == step}}
            for number in range(accelerator.process_index, batches_per_step, accelerator.num_processes):
                batch = self.collate(items[number * size : (number + 1) * size])
                self.step = step + 1
                yield send_to_device(batch, accelerator.device)

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


class RunCollator:
    """Makes the batches of a run: examples are collated, and their states checked before they are moved to a device.

    Special tokens that the process suppresses are known, and not scored.

    `never_data` are the states that x_0 never takes, one of which may be the `mask`. `condition_dropout` is the share of examples
    whose condition is left out, as their seeds decide: `"is_dropped"` `[B]`.
    """

    def __init__(
        self,
        collator: Callable,
        num_classes: int,
        never_data: tuple[int, ...],
        mask: int | None = None,
        num_class_labels: int | None = None,
        condition_dropout: float = 0.0,
    ):
        self.collator, self.num_classes, self.mask = collator, num_classes, mask
        self.num_class_labels, self.condition_dropout = num_class_labels, condition_dropout
        self.suppressed = ExcludedStates(state for state in never_data if state != mask)

    def __call__(self, items: list[tuple]) -> dict:
        """The batch of examples, each with its index in the data set: `(index, example)`.

        That of a training step, `(index, example, seed, timestep)`, has the timesteps `[B]`, and the seeds, a list that stays
        on the CPU.
        """
        indices, rows, *draws = zip(*items)
        try:
            batch = self.collator(list(rows))
        except KeyError as error:
            if not isinstance(rows[0], Mapping) or error.args[0] in rows[0]:
                raise
            raise ValueError(
                f"data_collator reads the column {error}, and an example has the columns {', '.join(map(repr, rows[0]))}: rename one of "
                "them, or pass another data_collator"
            ) from error
        if not isinstance(batch, Mapping) or not isinstance(batch.get("x_0"), torch.Tensor):
            raise ValueError(
                f"data_collator returned {describe(batch)}: it must return a dictionary with x_0, a `torch.LongTensor`"
            )
        batch, x_0 = dict(batch), batch["x_0"]
        if {*MASKS, "labels"} & batch.keys():
            batch["loss_mask"] = read_batch(batch)[1]
        wrong = (x_0 < 0) | (x_0 >= self.num_classes)
        if wrong.any():
            self._refuse(x_0, wrong, indices, "is outside the vocabulary of {}: use the tokenizer of the network")
        if self.suppressed:
            is_data = ~self.suppressed.contain(x_0)
            batch["loss_mask"] = is_data & batch["loss_mask"] if "loss_mask" in batch else is_data
        scored = batch.get("loss_mask")
        wrong = torch.zeros_like(wrong) if self.mask is None else x_0 == self.mask
        wrong = wrong if scored is None else wrong & scored
        if wrong.any():
            self._refuse(
                *(x_0, wrong, indices),
                "is the mask of the process, which data must not hold: pass the mask token to D3PMScheduler as mask_token_id, "
                "or mask_in_data=True if the data do hold it",
            )
        if scored is not None and not scored.flatten(1).any(1).all():
            index = indices[int((~scored.flatten(1).any(1)).nonzero()[0])]
            raise ValueError(
                f"example {index} has no element that is scored: remove it, or score what the network has to predict (labels "
                "other than -100, loss_mask true)"
            )
        labels, count = (batch.get("condition") or {}).get("class_labels"), self.num_class_labels
        if labels is not None and count is not None and ((labels < 0) | (labels >= count)).any():
            row = int(((labels < 0) | (labels >= count)).nonzero()[0, 0])
            raise ValueError(
                f"class {labels[row].item()} of example {indices[row]} is not one of the {count} classes of the network: pass 0 to "
                f"{count - 1}, or a network with more classes"
            )
        if draws:
            seeds, timesteps = draws
            batch |= {"seed": list(seeds), "timestep": torch.tensor(timesteps)}
            if self.condition_dropout:
                dropped = [np.random.default_rng((seed, DROPOUT)).random() for seed in seeds]
                batch["is_dropped"] = torch.tensor(dropped) < self.condition_dropout
        return batch

    def _refuse(self, x_0: torch.Tensor, wrong: torch.Tensor, indices, reason: str) -> None:
        row, *position = wrong.nonzero()[0].tolist()
        token = x_0[row][tuple(position)].item()
        where = f"token {token} at position {tuple(position)} of example {indices[row]}"
        raise ValueError(f"{where} {reason.format(self.num_classes)}")


class IndexedExamples(Dataset):
    """Examples with their indices, for errors that name them.

    `examples[index]` is `(index, example)`. For an item of [`StepBatches`], `examples[index, seed, timestep]` is `(index,
    example, seed, timestep)`, with the augmentation of the seed. `Subset` and `ConcatDataset` of torch pass the seed on to the
    data sets that they are made of. A `datasets.Dataset`, a list and a tensor have no augmentation.
    """

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, item: int | tuple[int, int, int]) -> tuple:
        number, *draws = item if isinstance(item, tuple) else (item,)
        dataset: Any = self.dataset
        index = number
        while type(dataset) in (Subset, ConcatDataset):
            if type(dataset) is Subset:
                dataset, index = dataset.dataset, int(dataset.indices[index])
            else:
                part = bisect_right(dataset.cumulative_sizes, index)
                index -= dataset.cumulative_sizes[part - 1] if part else 0
                dataset = dataset.datasets[part]
        has_seeds = not hasattr(dataset, "column_names") and not isinstance(dataset, (list, tuple, torch.Tensor))
        example = dataset[index, draws[0]] if draws and has_seeds else dataset[index]
        return number, example, *draws


def create_collator(
    arguments: D3PMTrainingArguments, pipeline: D3PMPipeline, data_collator: Callable | None
) -> RunCollator:
    """The collator of a run: `data_collator`, or one for the pipeline, with checks of what it returns.

    If it fills up texts with their end, the end ends the samples of the pipeline.
    """
    scheduler, denoiser = pipeline.scheduler, pipeline.denoiser
    has_classes, label_column = denoiser.num_class_labels is not None, arguments.label_column
    if label_column is not None and not has_classes:
        raise ValueError(
            f"label_column is {label_column!r}, and the network has no classes: make it with num_class_embeds, or leave "
            "label_column out"
        )
    if data_collator is not None:
        check_type("data_collator", data_collator, Callable, "a function of a list of examples")
        if label_column is not None:
            raise ValueError("got label_column and data_collator: pass the column to the collator")
    else:
        # An autoregressive process has one timestep for each position.
        is_fixed = scheduler.family.is_autoregressive
        data_collator = DataCollatorForD3PM(
            getattr(pipeline, "tokenizer", None),
            padding="max_length" if is_fixed else "longest",
            max_length=len(scheduler) if is_fixed else num_positions(denoiser.network),
            label_column=(label_column or "label") if has_classes else None,
        )
    if arguments.condition_dropout and has_classes and denoiser.null_class is None:
        raise ValueError(
            f"condition_dropout is {arguments.condition_dropout}, and the network has no row for no class: make it with "
            "num_class_embeds one above num_class_labels, and pass num_class_labels to the pipeline"
        )
    if getattr(data_collator, "fill_with_eos", False) and isinstance(pipeline, D3PMTextPipeline):
        pipeline.set_end()
    states = scheduler.config.num_classes, scheduler.never_data, scheduler.gap_token_id
    return RunCollator(data_collator, *states, denoiser.num_class_labels, arguments.condition_dropout)


def check_examples(name: str, dataset, collator: RunCollator, max_examples: int | None = None) -> tuple[Any, dict]:
    """The data set as a run reads it, and the batch of its first example. Of a stream, `max_examples` are kept as a list."""
    has_items = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    is_iterated = is_stream(dataset) or hasattr(dataset, "__iter__") and not has_items
    if is_iterated and max_examples is not None:
        dataset, is_iterated = list(islice(dataset, max_examples)), False
    if is_iterated and not is_stream(dataset):  # a generator, or an `IterableDataset` of torch
        raise ValueError(
            f"{name} is {describe(dataset)}, a stream without state_dict and load_state_dict, which cannot be resumed: pass a "
            "`datasets.IterableDataset`, such as `datasets.IterableDataset.from_generator(function)`, or a list"
        )
    if is_iterated:
        examples = list(islice(dataset, 1))
        if not examples:
            raise ValueError("the stream is empty: pass one with at least one example")
        return dataset, collator([(0, examples[0])])
    check_dataset(name, dataset)
    dataset = IndexedExamples(dataset)
    first = collator([dataset[0]])
    if max_examples is None:
        check_seeds(name, dataset, collator, first["x_0"].ndim)
    return dataset, first


def check_seeds(name: str, dataset: IndexedExamples, collator: RunCollator, num_dims: int) -> None:
    """Checks that an example with augmentation has as many dimensions as one without."""
    error: Exception | None = None
    try:
        if collator([dataset[0, 0, 0]])["x_0"].ndim == num_dims:
            return
        reason = "is no whole example"
    except Exception as failure:  # of the code of the user
        error, reason = failure, f"raises {type(failure).__name__} ({failure})"
    raise ValueError(
        f"{name}[0, 0] {reason}: training reads an example by its index and a seed for its augmentation; let "
        "`__getitem__` take the pair (index, seed), or pass a list or a `datasets.Dataset`, which have none"
    ) from error


def create_loader(
    arguments: D3PMTrainingArguments,
    accelerator: Accelerator,
    dataset,
    collator: RunCollator,
    num_timesteps: int,
    start: int,
) -> tuple[Iterable[dict], StreamBatches | None]:
    """The batches of this process from step `start` on; and the stream that they come from, if any, to be checkpointed."""
    if is_stream(dataset):
        stream = StreamBatches(arguments, accelerator, dataset, collator, num_timesteps)
        return stream, stream
    loader = DataLoader(
        dataset,
        batch_sampler=StepBatches(
            len(dataset),
            arguments.train_batch_size,
            accelerator.num_processes * arguments.gradient_accumulation_steps,
            num_timesteps,
            arguments.seed,
            range(start, arguments.max_train_steps),
            arguments.timestep_law,
        ),
        collate_fn=collator,
        num_workers=arguments.dataloader_num_workers,
        worker_init_fn=ignore_signals,
        pin_memory=accelerator.device.type == "cuda",
    )
    # The position in the data follows from the step, so the loader is not part of the state that Accelerate saves.
    batches = prepare_data_loader(loader, accelerator.device, put_on_device=True)
    return start_workers(batches) if arguments.dataloader_num_workers else batches, None


def start_workers(loader: Iterable[dict]) -> Iterator[dict]:
    """The batches of a loader. A signal that comes while its workers start does not end them."""
    batches = iter(loader)
    with blocked_signals():
        first = list(islice(batches, 1))
    yield from first
    yield from batches
