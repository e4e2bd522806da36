# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The result of a run: the pipeline with its card and its samples, in a folder and on the Hub."""

import shlex
import textwrap
from pathlib import Path

from huggingface_hub import upload_file
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..hub.cards import bound_results, create_model_card, single_line
from ..hub.upload import check_write_access, create_repository, upload_command
from ..likelihood import Bound
from ..pipelines import D3PMPipeline
from .arguments import D3PMTrainingArguments
from .state import LOG_NAME
from .validation import save_samples


# Arguments that are listed on the card.
CARD_SETTINGS = (
    *("max_train_steps", "train_batch_size", "gradient_accumulation_steps", "loss", "hybrid_coeff", "seed"),
    *("learning_rate", "lr_scheduler", "lr_warmup_steps", "max_grad_norm", "mixed_precision", "ema_max_decay"),
)

# Number of characters of a sample that are printed.
SAMPLE_WIDTH = 100


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


def save_pipeline(
    arguments: D3PMTrainingArguments,
    pipeline: D3PMPipeline,
    bound: Bound | None,
    samples: list | None,
    card: dict,
    repo_id: str | None = None,
) -> None:
    """Writes the pipeline, its card and its samples to `output_dir`, prints what they are, and pushes them.

    Args:
        bound: The last bound of the run, for the card.
        samples: Images or lines of text.
        card: Further arguments of [`create_model_card`]; `dataset_name` and `split` of the evaluation data.
        repo_id: Id of the repository of [`prepare_repository`], if the pipeline is pushed.
    """
    output_dir = Path(arguments.output_dir)
    card = dict(card)
    dataset_name, split = card.pop("dataset_name", "the evaluation data"), card.pop("split", "validation")
    path = None
    if samples is not None:
        path = save_samples(samples, output_dir / "samples" / "final")
        card["sample"] = samples[0] if isinstance(samples[0], str) else str(path.relative_to(output_dir))
    if bound is not None:
        card["eval_results"] = bound_results(bound, dataset_name, split=split, task=pipeline.task)
    training = {name: getattr(arguments, name) for name in CARD_SETTINGS}
    readme = create_model_card(pipeline, repo_id, training=training, **card)
    pipeline.save_pretrained(output_dir)
    readme.save(output_dir / "README.md")
    print(describe_result(arguments, bound, samples, path))
    if repo_id is None:
        return
    token = arguments.hub_token
    try:
        pipeline.push_to_hub(repo_id, private=arguments.hub_private_repo or None, token=token, card=readme)
        if path is not None:
            upload_file(path_or_fileobj=path, path_in_repo=f"samples/{path.name}", repo_id=repo_id, token=token)
    except Exception as error:  # whatever it is, the run is complete
        # What the pipeline needs, without the state of the run.
        exclude = ["checkpoint-*", ".*", LOG_NAME, f"{arguments.logging_dir}/*", "samples/step-*"]
        raise OSError(
            f"the pipeline is saved in {output_dir}, but could not be pushed to {repo_id} ({single_line(error)}): push it with "
            f"`{upload_command(output_dir, repo_id, exclude)}`"
        ) from error


def describe_result(
    arguments: D3PMTrainingArguments, bound: Bound | None, samples: list | None, path: Path | None
) -> str:
    """What a run has made, in a few lines: its folder, its bound and a sample if there are any, and what comes next."""
    folder = arguments.output_dir
    lines = [f"\nTrained for {arguments.max_train_steps} steps. The pipeline, its card and its log are in {folder}."]
    if bound is not None:
        lines.append(f"bound   {bound}")
    if samples is not None:
        is_text = isinstance(samples[0], str)
        lines.append(f"sample  {textwrap.shorten(samples[0], SAMPLE_WIDTH) if is_text else path}")
    lines.append(f"next    python -m d3pm_hf.app {shlex.quote(folder)}")
    return "\n".join(lines)
