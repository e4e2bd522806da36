# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The results of a run: the bound and the samples at its evaluations, and the pipeline with its card, in a folder and on the Hub."""

import shlex
import tempfile
import textwrap
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import ModelCard, upload_file
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..data.batches import evaluation_batches
from ..hub.adapters import check_adapter_place, choose_adapter, has_adapters
from ..hub.cards import base_of, bound_results, create_model_card, single_line
from ..hub.layout import CARD_NAME
from ..hub.staging import check_can_be_saved
from ..hub.transfers import check_write_access, create_repository, upload_command
from ..likelihood import Bound, evaluate_bound
from ..likelihood.causal import possible_steps, scores_in_one_pass
from ..losses import prior_loss
from ..models.denoisers import Denoiser
from ..pipelines import D3PMPipeline
from ..pipelines.drawing import draw_given, draw_samples
from ..schedulers import D3PMScheduler
from ..schedules import entropy
from ..utils.checks import check_type
from ..visualization.grids import image_grid
from .run_state import LOG_NAME
from .step_batches import IndexedExamples, RunCollator, is_stream
from .training_args import D3PMTrainingArguments


# Largest share of the entropy of the data that x_T may keep (L_T): the network never sees more noise than x_T has.
MAX_PRIOR_SHARE = 0.1
# Arguments that are listed on the card.
CARD_SETTINGS = (
    *(
        "max_train_steps",
        "train_batch_size",
        "gradient_accumulation_steps",
        "loss",
        "hybrid_coeff",
        "auxiliary",
        "seed",
    ),
    *("learning_rate", "lr_scheduler", "lr_warmup_steps", "max_grad_norm", "mixed_precision", "ema_max_decay"),
)
# Number of characters of a sample that are printed.
SAMPLE_WIDTH = 100


def check_can_be_kept(arguments: D3PMTrainingArguments, pipeline: D3PMPipeline) -> None:
    """Checks that what the run trains can be saved: the pipeline, or a LoRA that names its base."""
    network = pipeline.bare_network
    check_type(pipeline.network_name, network, torch.nn.Module, "a network (`torch.nn.Module`)")
    has_lora = has_adapters(network)
    check_can_be_saved(pipeline, with_adapters=has_lora)
    if not has_lora:
        if arguments.merge_lora:
            raise ValueError(
                "merge_lora is True, and the network has no LoRA: leave it out, or add one with `add_adapter` or `get_peft_model`"
            )
        return
    choose_adapter(network)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ValueError(
            "no weight of the LoRA is trained: load it with `load_lora_weights`, or with `is_trainable=True` of PEFT"
        )
    if arguments.merge_lora:
        return
    if base_of(pipeline) is None:
        raise ValueError(
            f"{pipeline.network_name} has a LoRA, and was not loaded from a checkpoint that the LoRA could name as its base: save the "
            "pipeline, load it and add the LoRA to that, or pass merge_lora=True (--merge_lora) to save the whole pipeline"
        )
    repo_id = arguments.hub_model_id if arguments.push_to_hub else None
    check_adapter_place(Path(arguments.output_dir), pipeline.network_name, repo_id, base_of(pipeline))


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
    whole = entropy(frequencies).mean().item()  # over the elements, if they differ
    average = nats.cpu().double().mean().item()
    if average > MAX_PRIOR_SHARE * whole:
        raise ValueError(
            f"after {len(scheduler)} steps q(x_T | x_0) is still {average:.3g} nats per element from the prior (L_T), more than "
            f"{MAX_PRIOR_SHARE:.0%} of the {whole:.3g} nats of the data, so that there is too little noise to learn from: choose "
            "another schedule, such as mutual_information, or more timesteps"
        )


def validate(
    arguments: D3PMTrainingArguments,
    accelerator: Accelerator,
    pipeline: D3PMPipeline,
    denoiser: Denoiser,
    dataset,
    collator: RunCollator,
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
            evaluation_batches(dataset, batch_size, arguments.max_eval_samples, accelerator.device, collator),
            num_eval_timesteps=min(arguments.num_eval_timesteps, len(scheduler)),
            is_causal=scores_in_one_pass(scheduler, denoiser),
            progress_bar=accelerator.is_main_process and not arguments.disable_tqdm,
            accelerator=accelerator,
        )
        values = {"eval_bits_per_dim": bound.bits_per_dim, "eval_standard_error": bound.bits_per_dim_standard_error}
        accelerator.log(values, step=step)
    if arguments.num_samples:
        samples = draw_decoded(arguments, pipeline, denoiser, known)
        if accelerator.is_main_process:
            save_samples(samples, Path(arguments.output_dir) / "samples" / f"step-{step}")
    return bound


def known_of(arguments: D3PMTrainingArguments, collator: RunCollator, dataset) -> dict | None:
    """Conditioning inputs for the validation samples: the known elements and the conditions of the first examples, if any."""
    if not arguments.num_samples:
        return None
    if is_stream(dataset):
        dataset = IndexedExamples(list(islice(dataset, arguments.num_samples)))
    batch = collator([dataset[number % len(dataset)] for number in range(arguments.num_samples)])
    return batch if batch.keys() > {"x_0"} else None


def draw_decoded(
    arguments: D3PMTrainingArguments, pipeline: D3PMPipeline, denoiser: Denoiser, known: dict | None = None
) -> list:
    """The samples of a run as images or lines of text, from the same noise at each evaluation.

    Every process draws all samples, as a sharded network needs them all for each call. Without a tokenizer, a line of
    text is the numbers of its tokens. A sharded network cannot be called beneath `denoiser`, its wrapper.
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


def save_samples(samples: Any, path: Path) -> tuple[Path, str | None]:
    """Writes lines of text, one picture of all images, or rows of a table.

    Returns the path with its suffix, and the first line or the first rows; `None` of images.
    """
    path.parent.mkdir(exist_ok=True)
    if hasattr(samples, "to_csv"):
        path = path.with_suffix(".csv")
        samples.to_csv(path, index=False)
        return path, samples.head(5).to_string(index=False)
    if isinstance(samples[0], str):
        path = path.with_suffix(".txt")
        path.write_text("\n".join(samples) + "\n", encoding="utf-8")
        return path, samples[0]
    path = path.with_suffix(".png")
    image_grid(samples).save(path)
    return path, None


def prepare_repository(arguments: D3PMTrainingArguments) -> str | None:
    """Creates the repository that the pipeline is pushed to, and checks the token, before anything is trained.

    Returns its id with the namespace; `None` if nothing is pushed.
    """
    if not arguments.push_to_hub:
        return None
    name = arguments.hub_model_id or Path(arguments.output_dir).resolve().name
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(
            f"{name!r} is not the name of a repository ({single_line(error)}): pass --hub_model_id, such as your-name/d3pm-model"
        ) from error
    try:
        repo_id = create_repository(name, arguments.hub_private_repo or None, arguments.hub_token)
        check_write_access(repo_id, arguments.hub_token)
    except Exception as error:  # of the network or of the Hub
        if type(error) is OSError:
            raise  # a sentence about the token
        raise OSError(
            f"the repository {name!r} cannot be created ({single_line(error)}): check the connection to the Hub, or leave out --push_to_hub"
        ) from error
    return repo_id


def create_run_card(
    pipeline: D3PMPipeline, repo_id: str | None, training: dict, bound: Bound | None, options: dict
) -> ModelCard:
    """The card of a trained pipeline, with the settings of its training and its bound, if that was measured.

    `options` are further arguments of [`create_model_card`]; and `dataset_name` and `split` of the evaluation data.
    """
    options = {"dataset_name": "the evaluation data", "split": "validation", **options}
    name, split = options.pop("dataset_name"), options.pop("split")
    if bound is not None:
        options["eval_results"] = bound_results(bound, name, split=split, task=pipeline.task)
    return create_model_card(pipeline, repo_id, training=training, **options)


def save_trained(pipeline: D3PMPipeline, folder: Path, card: ModelCard) -> str:
    """Saves the pipeline, or the LoRA if its network has one, with its card. Returns which of them, for messages."""
    if has_adapters(getattr(pipeline, pipeline.network_name)):
        pipeline.save_lora_weights(folder, card=card)
        return "LoRA"
    pipeline.save_pretrained(folder)
    card.save(folder / CARD_NAME)
    return "pipeline"


def save_pipeline(
    arguments: D3PMTrainingArguments,
    pipeline: D3PMPipeline,
    bound: Bound | None,
    samples: Any,
    card: dict,
    repo_id: str | None = None,
) -> None:
    """Writes the pipeline, its card and its samples, if any, to `output_dir`, prints what they are, and pushes them to `repo_id`."""
    output_dir = Path(arguments.output_dir)
    path = shown = None
    if samples is not None:
        path, shown = save_samples(samples, output_dir / "samples" / "final")
        card = {**card, "sample": shown or str(path.relative_to(output_dir))}
    training = {name: getattr(arguments, name) for name in CARD_SETTINGS}
    readme = create_run_card(pipeline, repo_id, training, bound, card)
    kind, folder = save_trained(pipeline, output_dir, readme), arguments.output_dir
    lines = [f"\nTrained for {arguments.max_train_steps} steps. The {kind}, its card and its log are in {folder}."]
    if bound is not None:
        lines.append(f"bound   {bound}")
    if samples is not None:
        lines.append(f"sample  {path if shown is None else textwrap.shorten(shown, SAMPLE_WIDTH)}")
    if pipeline.task != "tabular-generation":  # which the page does not show
        lines.append(f"next    python -m d3pm_hf.app {shlex.quote(folder)}")
    if not arguments.disable_tqdm:
        print("\n".join(lines))
    if repo_id is None:
        return
    token = arguments.hub_token
    try:
        options: dict[str, Any] = {"private": arguments.hub_private_repo or None, "token": token, "card": readme}
        if kind == "LoRA":
            with tempfile.TemporaryDirectory() as copy:
                pipeline.save_lora_weights(copy, push_to_hub=True, repo_id=repo_id, **options)
        else:
            pipeline.push_to_hub(repo_id, **options)
        if path is not None:
            upload_file(path_or_fileobj=path, path_in_repo=f"samples/{path.name}", repo_id=repo_id, token=token)
    except Exception as error:  # whatever it is, the run is complete
        # What the pipeline needs, without the state of the run.
        exclude = ["checkpoint-*", ".*", LOG_NAME, f"{arguments.logging_dir}/*", "samples/step-*"]
        raise OSError(
            f"the pipeline is saved in {output_dir}, but could not be pushed to {repo_id} ({single_line(error)}): push it with "
            f"`{upload_command(output_dir, repo_id, exclude)}`"
        ) from error
