# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The result of a run: the pipeline with its card and its samples, in a folder and on the Hub."""

from pathlib import Path

from huggingface_hub import upload_file

from ..hub.cards import bound_results, create_model_card
from ..likelihood import Bound
from ..pipelines import D3PMPipeline
from .arguments import D3PMTrainingArguments
from .validation import save_samples


# Arguments that are listed on the card.
CARD_SETTINGS = (
    *("max_train_steps", "train_batch_size", "gradient_accumulation_steps", "loss", "hybrid_coeff", "seed"),
    *("learning_rate", "lr_scheduler", "lr_warmup_steps", "max_grad_norm", "mixed_precision", "ema_max_decay"),
)


def save_pipeline(
    arguments: D3PMTrainingArguments, pipeline: D3PMPipeline, bound: Bound | None, samples: list | None, card: dict
) -> None:
    """Writes the pipeline, its card and its samples to `output_dir`, and pushes them if `push_to_hub` is set.

    Args:
        bound: The last bound of the run, for the card.
        samples: Images or lines of text.
        card: Further arguments of [`create_model_card`]; `dataset_name` and `split` of the evaluation data.
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
    repo_id = arguments.hub_model_id or output_dir.name
    readme = create_model_card(pipeline, repo_id if arguments.push_to_hub else None, training=training, **card)
    pipeline.save_pretrained(output_dir)
    readme.save(output_dir / "README.md")
    if arguments.push_to_hub:
        token = arguments.hub_token
        pipeline.push_to_hub(repo_id, private=arguments.hub_private_repo or None, token=token, card=readme)
        if path is not None:
            upload_file(path_or_fileobj=path, path_in_repo=f"samples/{path.name}", repo_id=repo_id, token=token)
