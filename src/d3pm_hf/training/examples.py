# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The examples that a run reads: rows of a data set, or a stream; and how they become batches of the process."""

from collections.abc import Callable, Iterable
from itertools import islice

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from ..data.collator import DataCollatorForD3PM
from ..models.positions import num_positions
from ..pipelines import D3PMPipeline
from ..utils.checks import check_dataset, check_type
from .arguments import D3PMTrainingArguments
from .batches import CheckedCollator, SeededExamples, StepBatches, StepCollator, WithoutSeeds
from .interruption import ignore_signals
from .streams import StreamBatches, is_stream


def create_collator(
    arguments: D3PMTrainingArguments, pipeline: D3PMPipeline, data_collator: Callable | None
) -> CheckedCollator:
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
    return CheckedCollator(data_collator, *states, denoiser.num_class_labels)


def check_examples(name: str, dataset, collator: CheckedCollator, max_examples: int | None = None):
    """The data set as a run reads it, after a look at its first example. Of a stream, `max_examples` are kept as a list."""
    if is_stream(dataset):
        collator([(0, first_example(dataset))])
        return dataset if max_examples is None else list(islice(dataset, max_examples))
    check_dataset(name, dataset, columns=True)
    if hasattr(dataset, "column_names") or isinstance(dataset, (list, tuple)):
        dataset = WithoutSeeds(dataset)
    collator([(0, dataset[0])])
    return dataset


def create_loader(
    arguments: D3PMTrainingArguments,
    accelerator: Accelerator,
    dataset,
    collator: CheckedCollator,
    num_timesteps: int,
    start: int,
) -> tuple[Iterable[dict], StreamBatches | None]:
    """The batches of this process from step `start` on; and the stream that they come from, if any, to be checkpointed."""
    collate = StepCollator(collator, arguments.condition_dropout)
    batches_per_step = accelerator.num_processes * arguments.gradient_accumulation_steps
    sizes = arguments.train_batch_size, batches_per_step, num_timesteps, arguments.seed
    if is_stream(dataset):
        stream = StreamBatches(
            dataset, collate, accelerator, *sizes, arguments.max_train_steps, arguments.timestep_law
        )
        return stream, stream
    loader = DataLoader(
        SeededExamples(dataset),
        batch_sampler=StepBatches(
            len(dataset), *sizes, range(start, arguments.max_train_steps), arguments.timestep_law
        ),
        collate_fn=collate,
        num_workers=arguments.dataloader_num_workers,
        worker_init_fn=ignore_signals,
        pin_memory=accelerator.device.type == "cuda",
    )
    # The position in the data follows from the step, so the loader is not part of the state that Accelerate saves.
    return prepare_data_loader(loader, accelerator.device, put_on_device=True), None


def first_example(dataset):
    """The first example of a data set or a stream."""
    if not is_stream(dataset):
        return dataset[0]
    for example in dataset:
        return example
    raise ValueError("the stream is empty: pass one with at least one example")
