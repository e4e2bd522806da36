# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The bound and the samples of a network in training."""

from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator

from ..data.batches import evaluation_batches
from ..likelihood import Bound, evaluate_bound
from ..likelihood.causal import possible_steps, scores_in_one_pass
from ..losses import prior_loss
from ..models.denoisers import Denoiser
from ..pipelines import D3PMPipeline
from ..pipelines.drawing import draw_given, draw_samples
from ..schedulers import D3PMScheduler
from ..schedules import entropy
from ..utils.checks import check_int
from ..visualization.grids import image_grid
from .arguments import D3PMTrainingArguments
from .batches import CheckedCollator
from .streams import is_stream


# Largest share of the entropy of the data that x_T may keep (L_T): the network never sees more noise than x_T has.
MAX_PRIOR_SHARE = 0.1


def check_noise(scheduler: D3PMScheduler, batch: dict) -> None:
    """Checks on a batch that the forward process ends near its prior: L_T <= 0.1 H(x_0), per element.

    H(x_0) is the entropy of the frequencies of the states if the scheduler has them, else that of equally frequent states.
    """
    x_0 = batch["x_0"]
    nats = prior_loss(scheduler, x_0)[batch.get("loss_mask", torch.ones_like(x_0, dtype=torch.bool))]
    frequencies = scheduler.transition_tensors.get("unigram_probs")
    if frequencies is None:
        num_states = scheduler.config.num_classes - len(scheduler.never_data)
        frequencies = torch.full((num_states,), 1 / num_states, dtype=torch.float64)
    average, whole = nats.cpu().double().mean().item(), entropy(frequencies).item()
    if average > MAX_PRIOR_SHARE * whole:
        raise ValueError(
            f"after {len(scheduler)} steps q(x_T | x_0) is still {average:.3g} nats per element from the prior (L_T), more than "
            f"{MAX_PRIOR_SHARE:.0%} of the {whole:.3g} nats of the data, so that there is too little noise to learn from: choose "
            "another schedule, such as mutual_information, or more timesteps"
        )


def check_evaluation(arguments: D3PMTrainingArguments, pipeline: D3PMPipeline, dataset) -> None:
    """Checks before the first step that the bound can be measured as the arguments say."""
    scheduler = pipeline.scheduler
    if dataset is not None and arguments.validation_steps and not scores_in_one_pass(scheduler, pipeline.denoiser):
        # The first term of the bound is always one of those that are evaluated, with at least one of the others.
        check_int("num_eval_timesteps", arguments.num_eval_timesteps, min(2, len(scheduler)))


def validate(
    arguments: D3PMTrainingArguments,
    accelerator: Accelerator,
    pipeline: D3PMPipeline,
    denoiser: Denoiser,
    dataset,
    collator: CheckedCollator,
    known: dict | None,
    step: int,
) -> Bound | None:
    """Measures and logs the bound if there is a data set, and saves samples. The processes share the examples."""
    bound = None
    if dataset is not None:
        scheduler, batch_size = pipeline.scheduler, arguments.eval_batch_size * accelerator.num_processes
        bound = evaluate_bound(
            scheduler,
            denoiser,
            evaluation_batches(Indexed(dataset), batch_size, arguments.max_eval_samples, accelerator.device, collator),
            num_eval_timesteps=min(arguments.num_eval_timesteps, len(scheduler)),
            is_causal=scores_in_one_pass(scheduler, denoiser),
            progress_bar=accelerator.is_main_process,
            accelerator=accelerator,
        )
        values = {"eval_bits_per_dim": bound.bits_per_dim, "eval_standard_error": bound.bits_per_dim_standard_error}
        accelerator.log(values, step=step)
    if arguments.num_samples:
        samples = draw_decoded(arguments, pipeline, denoiser, known)
        if accelerator.is_main_process:
            save_samples(samples, Path(arguments.output_dir) / "samples" / f"step-{step}")
    return bound


def known_of(arguments: D3PMTrainingArguments, collator: CheckedCollator, dataset) -> dict | None:
    """What the samples of a run are drawn given: the known elements and the conditions of its first examples, if any.

    Args:
        dataset: The evaluation data, or the training data if there are none.
    """
    if not arguments.num_samples:
        return None
    if is_stream(dataset):
        dataset = list(islice(dataset, arguments.num_samples))
    indices = [number % len(dataset) for number in range(arguments.num_samples)]
    batch = collator([(index, dataset[index]) for index in indices])
    return batch if batch.keys() > {"x_0"} else None


def draw_decoded(
    arguments: D3PMTrainingArguments, pipeline: D3PMPipeline, denoiser: Denoiser, known: dict | None = None
) -> list:
    """The samples of a run as images or lines of text, from the same noise at each evaluation.

    Every process draws all samples, as a sharded network needs them all for each call. Without a tokenizer, a line of
    text is the numbers of its tokens.

    Args:
        denoiser: The network in training. A sharded one cannot be called beneath this wrapper.
        known (*optional*): The batch of [`known_of`].
    """
    steps = possible_steps(pipeline.scheduler, denoiser, arguments.num_inference_steps)
    network = getattr(pipeline, pipeline.network_name)
    setattr(pipeline, pipeline.network_name, denoiser)  # what `pipeline.denoiser` then is
    try:
        if known is None:
            states = draw_samples(pipeline, arguments.num_samples, steps, arguments.seed)
        else:
            states = draw_given(pipeline, known, steps, arguments.seed)
    finally:
        setattr(pipeline, pipeline.network_name, network)
    if pipeline.task != "text-generation":
        return pipeline.decode(states)
    attended = (known or {}).get("attention_mask", torch.ones(1)).bool().expand(states.shape)
    rows = [row[is_text].cpu() for row, is_text in zip(states, attended.to(states.device))]  # without padding
    if pipeline.tokenizer is None:
        return [" ".join(map(str, row.tolist())) for row in rows]
    return [text for row in rows for text in pipeline.decode(row[None])]


class Indexed:
    """A data set whose examples come with their indices."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, object]:
        return index, self.dataset[index]


def save_samples(samples: list, path: Path) -> Path:
    """Writes lines of text, or one picture of all images. Returns the path with its suffix."""
    path.parent.mkdir(exist_ok=True)
    if isinstance(samples[0], str):
        path = path.with_suffix(".txt")
        path.write_text("\n".join(samples) + "\n", encoding="utf-8")
    else:
        path = path.with_suffix(".png")
        image_grid(samples).save(path)
    return path
