# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Measures a checkpoint: `python -m d3pm_hf.evaluation CHECKPOINT --dataset text8`, or `--dataset_path` with your own data.

Prints the bound at several numbers of inference steps with standard errors, the time per sample, and statistics of samples.
Writes the same results to a JSON file, and to the card of a checkpoint that is a folder. Each number comes with its protocol.
"""

import argparse
from pathlib import Path

from ..utils.names import ALL_SPLITS, CHOICES, DATASETS, EXACT_ORDERS, ONLY_SPLITS, OWN_DATASETS
from ..utils.scripts import run_script


def create_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m d3pm_hf.evaluation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="Folder of the checkpoint, or its id on the Hub.")
    parser.add_argument(
        "--dataset",
        choices=[name for names in DATASETS.values() for name in names],
        help="Data set to measure on. `text` and `images` are your own data at --dataset_path, and the default if it is "
        "given. `prose` and `digits` are the data sets of `make demo`.",
    )
    parser.add_argument(
        "--dataset_path",
        help="Your own text file or folder of images, or a local copy of text8, lm1b or cifar10.",
    )
    parser.add_argument("--cache_dir", help="Folder for downloads.")
    parser.add_argument(
        "--split",
        help="Split of the data set. Defaults to test (validation for prose). Your own text file is cut 90 : 5 : 5 into "
        "train, validation and test; `all` takes the whole file, or all images of your folder.",
    )
    parser.add_argument(
        "--num_inference_steps",
        type=int,
        nargs="+",
        default=[1000, 256, 64, 20, 10],
        help="Numbers of inference steps to measure at.",
    )
    parser.add_argument(
        "--max_eval_samples", type=int, help="Number of examples, spread over the split. Defaults to all of them."
    )
    parser.add_argument(
        "--num_eval_timesteps", type=int, help="Number of terms of the bound per example. Defaults to all of them."
    )
    parser.add_argument(
        "--continuous_time", action="store_true", help="Whether to measure the bound of infinitely many steps as well."
    )
    parser.add_argument(
        "--likelihood",
        nargs="+",
        default=[],
        choices=EXACT_ORDERS,
        help="Orders whose exact likelihoods are measured as well, for an absorbing process.",
    )
    parser.add_argument(
        "--num_timed_samples", type=int, default=3, help="Number of timed samples at each number of steps; 0 for none."
    )
    parser.add_argument("--num_samples", type=int, default=64, help="Number of samples for statistics; 0 for none.")
    parser.add_argument("--num_sample_steps", type=int, default=20, help="Number of inference steps of these samples.")
    parser.add_argument(
        "--feature_extractor",
        help="Feature extractor for FID and Inception score: `inception`, or the folder or id of an image classifier of "
        "transformers.",
    )
    parser.add_argument("--eval_batch_size", type=int, default=64, help="Batch size of everything that is not timed.")
    parser.add_argument("--seed", type=int, default=0, help="Seed for the timesteps, the noise and the samples.")
    parser.add_argument("--variant", help="Variant of the weights, such as `fp16`.")
    parser.add_argument(
        "--x0_posterior",
        choices=CHOICES["x0_posterior"],
        help="Meaning of the logits of x_0, in place of that of the checkpoint.",
    )
    parser.add_argument("--output_file", type=Path, default=Path("evaluation.json"), help="JSON file for the results.")
    return parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line, with a split and a name of the data (`dataset_name`) filled in."""
    parser = create_parser()
    options = parser.parse_args(arguments)
    is_own = options.dataset in (*OWN_DATASETS, None)
    if is_own and options.dataset_path is None:
        parser.error("there is nothing to measure on: pass --dataset, or the path of your own data as --dataset_path")
    if is_own:  # a path, or an id on the Hub
        path = Path(options.dataset_path)
        options.dataset_name = path.resolve().name if path.exists() else options.dataset_path
    else:
        from ..data.sources import dataset_title  # with torch, which --help does not need

        options.dataset_name = dataset_title(options.dataset, options.dataset_path)
    only = ONLY_SPLITS.get(options.dataset)
    if only is not None and options.dataset_path is not None:
        parser.error(f"{options.dataset} is part of the package: leave out --dataset_path, or --dataset")
    options.split = options.split or only or "test"
    if only is not None and options.split != only:
        parser.error(f"{options.dataset} is measured on its {only} split, not on {options.split}")
    if options.split == ALL_SPLITS and not is_own:
        parser.error(
            f"--split {ALL_SPLITS} is for your own data, and --dataset is {options.dataset}: name one of its splits"
        )
    if not options.output_file.parent.is_dir():  # before anything is measured
        parser.error(
            f"there is no folder {options.output_file.parent} for the results: create it, or choose another --output_file"
        )
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    # After the arguments, so that --help and wrong ones are answered without torch.
    import torch

    from ..pipelines import D3PMPipeline
    from ..utils.files import write_text_atomically
    from .evaluator import evaluate_pipeline
    from .splits import load_evaluation_data

    pipeline = D3PMPipeline.from_pretrained(options.checkpoint, variant=options.variant)
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    if options.x0_posterior is not None:
        pipeline.scheduler.register_to_config(x0_posterior=options.x0_posterior)
    own_dataset = DATASETS.get(pipeline.task, [""])[-1]
    evaluation = evaluate_pipeline(
        pipeline,
        load_evaluation_data(
            pipeline, options.dataset or own_dataset, options.split, options.dataset_path, options.cache_dir
        ),
        options.dataset_name,
        options.split,
        num_inference_steps=tuple(options.num_inference_steps),
        max_eval_samples=options.max_eval_samples,
        num_eval_timesteps=options.num_eval_timesteps,
        continuous_time=options.continuous_time,
        likelihood=tuple(options.likelihood),
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
        evaluation.write_to_card(options.checkpoint)


if __name__ == "__main__":
    run_script(main)
