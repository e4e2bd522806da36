# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Measures a checkpoint: `python -m d3pm_hf.evaluate CHECKPOINT --dataset text8`.

Prints the bound at several numbers of inference steps with standard errors, the time of a sample, and what samples are like; writes
the same to a JSON file, and into the card of a checkpoint that is a folder. Every number comes with its protocol.
"""

import argparse
from pathlib import Path

import torch

from .data import digits, load_cifar10, load_images, load_lm1b, load_text8, python_prose
from .evaluation import evaluate_pipeline
from .files import write_text_atomically
from .pipelines import D3PMPipeline
from .schedulers.scheduling_d3pm import CHOICES


# The embedded sets have one split to measure on.
ONLY_SPLITS = {"prose": "validation", "digits": "test"}
DATASETS = ("text8", "lm1b", "cifar10", "images", "prose", "digits")


def load_evaluation_data(pipeline, arguments: argparse.Namespace):
    """The data set that a checkpoint is measured on, at the checkpoint's own length or size."""
    path, split, cache_dir = arguments.dataset_path, arguments.split, arguments.cache_dir
    if arguments.dataset == "prose":
        return python_prose(pipeline.config.sequence_length)[1]
    if arguments.dataset == "digits":
        return digits()[1]
    if arguments.dataset == "text8":
        return load_text8(split, dataset_path=path, length=pipeline.config.sequence_length, cache_dir=cache_dir)
    if arguments.dataset == "lm1b":
        length = pipeline.config.sequence_length
        return load_lm1b(split, pipeline.tokenizer, dataset_path=path, length=length, cache_dir=cache_dir)
    size, channels = pipeline.unet.config.sample_size, pipeline.unet.config.in_channels
    resolution = size if isinstance(size, int) else size[0]
    if arguments.dataset == "cifar10":
        return load_cifar10(split, dataset_path=path, resolution=resolution, cache_dir=cache_dir)
    levels = pipeline.scheduler.config.num_classes
    return load_images(path, split, resolution, levels, grayscale=channels == 1, cache_dir=cache_dir)


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m d3pm_hf.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a folder, or the id of a repository on the Hub")
    parser.add_argument("--dataset", choices=DATASETS, required=True, help="prose and digits are those of `make demo`")
    parser.add_argument("--dataset_path", help="a local file or folder in place of the Hub")
    parser.add_argument("--cache_dir", help="where downloads are kept")
    parser.add_argument("--split", help="of the data set; test by default (validation of prose)")
    parser.add_argument("--num_inference_steps", type=int, nargs="+", default=[1000, 256, 64, 20, 10])
    parser.add_argument("--max_eval_samples", type=int, help="examples, spread over the split; all by default")
    parser.add_argument("--num_eval_timesteps", type=int, help="terms of the bound per example; all by default")
    parser.add_argument("--num_timed_samples", type=int, default=3, help="at each number of steps; 0 for none")
    parser.add_argument("--num_samples", type=int, default=64, help="samples to look at; 0 for none")
    parser.add_argument("--num_sample_steps", type=int, default=20, help="their number of steps")
    parser.add_argument(
        "--feature_extractor",
        help="for FID and Inception score: `inception`, or an image classifier of transformers, as a folder or an id",
    )
    parser.add_argument("--eval_batch_size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", help="of the weights")
    parser.add_argument(
        "--x0_posterior",
        choices=CHOICES["x0_posterior"],
        help="what the logits of x_0 mean, whatever the checkpoint says",
    )
    parser.add_argument(
        "--output_file", type=Path, default=Path("evaluation.json"), help="where the results go, as JSON"
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = create_parser()
    options = parser.parse_args(arguments)
    only = ONLY_SPLITS.get(options.dataset)
    options.split = options.split or only or "test"
    if only is not None and options.split != only:
        parser.error(f"{options.dataset} is measured on its {only} split, not on {options.split}")
    if not options.output_file.parent.is_dir():  # now: not when all is measured
        parser.error(
            f"there is no folder {options.output_file.parent} for the results: make it, or choose another --output_file"
        )

    pipeline = D3PMPipeline.from_pretrained(options.checkpoint, variant=options.variant)
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    if options.x0_posterior is not None:
        pipeline.scheduler.register_to_config(x0_posterior=options.x0_posterior)
    evaluation = evaluate_pipeline(
        pipeline,
        load_evaluation_data(pipeline, options),
        options.dataset,
        options.split,
        num_inference_steps=tuple(options.num_inference_steps),
        max_eval_samples=options.max_eval_samples,
        num_eval_timesteps=options.num_eval_timesteps,
        num_timed_samples=options.num_timed_samples,
        num_samples=options.num_samples,
        num_sample_steps=options.num_sample_steps,
        feature_extractor=options.feature_extractor,
        batch_size=options.eval_batch_size,
        seed=options.seed,
    )
    if options.x0_posterior is not None:
        evaluation.protocol += f"; logits of x_0 read as {options.x0_posterior}"
    print(evaluation.to_markdown())
    write_text_atomically(options.output_file, evaluation.to_json() + "\n")
    if options.x0_posterior is None and Path(options.checkpoint, "README.md").is_file():
        evaluation.write_to_card(options.checkpoint, hasattr(pipeline, "text_model"))


if __name__ == "__main__":
    main()
