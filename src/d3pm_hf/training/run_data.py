# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The examples that a run reads: rows of a data set, or a stream; and how they become batches of the process."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset

from ..data.collator import DataCollatorForD3PM
from ..models.text_denoisers import num_positions
from ..pipelines import D3PMPipeline
from ..utils.checks import check_dataset, check_type, describe
from .interruption import blocked_signals, ignore_signals
from .step_batches import IndexedExamples, RunCollator, StepBatches, StreamBatches, is_stream
from .training_args import D3PMTrainingArguments


def create_collator(
    arguments: D3PMTrainingArguments, pipeline: D3PMPipeline, data_collator: Callable | None
) -> RunCollator:
    """The collator of a run: `data_collator`, or one for the pipeline, with checks of what it returns."""
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
    check_dataset(name, dataset, columns=True)
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
    batches_per_step = accelerator.num_processes * arguments.gradient_accumulation_steps
    sizes = arguments.train_batch_size, batches_per_step, num_timesteps, arguments.seed
    if is_stream(dataset):
        stream = StreamBatches(
            dataset, collator, accelerator, *sizes, arguments.max_train_steps, arguments.timestep_law
        )
        return stream, stream
    loader = DataLoader(
        dataset,
        batch_sampler=StepBatches(
            len(dataset), *sizes, range(start, arguments.max_train_steps), arguments.timestep_law
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
