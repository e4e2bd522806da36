# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Measures a checkpoint: `python -m d3pm_hf.evaluation CHECKPOINT --dataset text8`, or `--dataset_path` with your own data.

Prints the bound at several numbers of inference steps with standard errors, the time of a sample, and what samples are like; writes
the same to a JSON file, and into the card of a checkpoint that is a folder. Every number comes with its protocol.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from ..data import digits, load_cifar10, load_images, load_lm1b, load_text8, python_prose
from ..data.encoding import encode_crops
from ..data.memory import Rows
from ..data.sources import find_file, load_splits, read_text
from ..data.text8 import cut
from ..data.tokenizers import TEXT8_ALPHABET
from ..pipelines import D3PMPipeline
from ..schedulers.arguments import CHOICES
from ..utils.files import write_text_atomically
from ..utils.scripts import run_script
from . import evaluate_pipeline


# The embedded sets have one split to measure on.
ONLY_SPLITS = {"prose": "validation", "digits": "test"}
TEXT_DATASETS, IMAGE_DATASETS = ("text8", "lm1b", "prose", "text"), ("cifar10", "digits", "images")
ALL_SPLITS = "all"
# Sentences in which more of the tokens than this are unknown are not measured: an unknown token is easy to predict.
MAX_UNKNOWN = 0.01


def load_evaluation_data(pipeline, arguments: argparse.Namespace):
    """The data set that a checkpoint is measured on: at its own length or size, and in its own tokens or levels."""
    is_text = pipeline.task == "text-generation"
    kind, possible = ("text", TEXT_DATASETS) if is_text else ("images", IMAGE_DATASETS)
    if arguments.dataset not in possible:
        raise ValueError(
            f"the checkpoint makes {kind}, and {arguments.dataset} is not: choose --dataset from {', '.join(possible)}"
        )
    return load_text_data(pipeline, arguments) if is_text else load_image_data(pipeline, arguments)


def load_text_data(pipeline, arguments: argparse.Namespace):
    """Text in the tokens of the checkpoint's own tokenizer."""
    dataset, path, split, cache_dir = (
        getattr(arguments, name) for name in ("dataset", "dataset_path", "split", "cache_dir")
    )
    tokenizer, length = pipeline.tokenizer, pipeline.config.sequence_length
    if tokenizer is None:
        raise ValueError(
            "the checkpoint has no tokenizer to encode text with: save one with it, or call `evaluate_pipeline` with tokens"
        )
    if dataset == "lm1b":
        rows = load_lm1b(split, tokenizer, dataset_path=path, length=length, cache_dir=cache_dir)
        unknown = np.count_nonzero(rows.tokens == tokenizer.unk_token_id) / rows.tokens.size
        if unknown > MAX_UNKNOWN:
            raise ValueError(
                f"{unknown:.1%} of the tokens of {path or dataset} are {tokenizer.unk_token!r}, which stands for pieces that "
                "the tokenizer of the checkpoint lacks: measure it on other data"
            )
        return rows
    if dataset == "text":
        source = path if split == ALL_SPLITS else f"the {split} split of {path}"
        return encode_crops(read_split(path, split), tokenizer, length, source)
    if dataset == "prose":
        crops = python_prose(length)[1]
    else:
        crops = load_text8(split, dataset_path=path, length=length, cache_dir=cache_dir)
    codes = np.frombuffer(TEXT8_ALPHABET.encode(), np.uint8)
    text = codes[crops.tokens].tobytes().decode()
    return encode_crops(text, tokenizer, length, f"the {split} split of {dataset}")


def read_split(path: str, split: str) -> str:
    """The part of a user's text that belongs to a split."""
    if split == ALL_SPLITS and Path(path).is_file():
        return read_text(Path(path))
    file, whole = find_file(path, split)
    text = read_text(file)
    return cut(text, split) if whole else text


def load_image_data(pipeline, arguments: argparse.Namespace) -> Rows:
    """Images of the checkpoint's own size and levels."""
    dataset, path, split, cache_dir = (
        getattr(arguments, name) for name in ("dataset", "dataset_path", "split", "cache_dir")
    )
    (channels, height, width), levels = pipeline.denoiser.sample_shape, pipeline.scheduler.config.num_classes
    if dataset == "digits":
        images = digits()[1]
    elif dataset == "cifar10":
        images = load_cifar10(split, dataset_path=path, resolution=height, cache_dir=cache_dir)
    else:
        splits = load_splits(path, cache_dir) if split == ALL_SPLITS else [split]
        parts = [
            load_images(path, part, height, levels, grayscale=channels == 1, cache_dir=cache_dir) for part in splits
        ]
        images = Rows(np.concatenate([part.tokens for part in parts]), levels)
    shape, needed = (*images.tokens.shape[1:], images.num_tokens), (channels, height, width, levels)
    if shape != needed:
        raise ValueError(
            "{} has images of {} x {} x {} with {} levels".format(dataset, *shape)
            + ", and the checkpoint makes {} x {} x {} with {}: measure it on data of its own kind".format(*needed)
        )
    return images


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m d3pm_hf.evaluation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a folder, or the id of a repository on the Hub")
    parser.add_argument(
        "--dataset",
        choices=(*TEXT_DATASETS, *IMAGE_DATASETS),
        help="What to measure on. `text` and `images` are your own, at --dataset_path, and the default where that is given; "
        "prose and digits are those of `make demo`.",
    )
    parser.add_argument(
        "--dataset_path",
        help="Your own text file or folder of images; or a local copy of text8, lm1b or cifar10 in place of the Hub.",
    )
    parser.add_argument("--cache_dir", help="where downloads are kept")
    parser.add_argument(
        "--split",
        help="Split of the data set; test by default (validation of prose). A text file of your own is cut 90 : 5 : 5 into "
        "train, validation and test; `all` takes all of it, or all images of your folder.",
    )
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
    own = options.dataset in ("text", "images", None)
    if own and options.dataset_path is None:
        parser.error("there is nothing to measure on: pass --dataset, or the path of your own data as --dataset_path")
    name = options.dataset
    if own:  # a path, or an id on the Hub
        path = Path(options.dataset_path)
        name = path.resolve().name if path.exists() else options.dataset_path
    only = ONLY_SPLITS.get(options.dataset)
    if only is not None and options.dataset_path is not None:
        parser.error(f"{options.dataset} is part of the package: leave out --dataset_path, or --dataset")
    options.split = options.split or only or "test"
    if only is not None and options.split != only:
        parser.error(f"{options.dataset} is measured on its {only} split, not on {options.split}")
    if options.split == ALL_SPLITS and not own:
        parser.error(
            f"--split {ALL_SPLITS} is for your own data, and --dataset is {options.dataset}: name one of its splits"
        )
    if not options.output_file.parent.is_dir():  # now: not when all is measured
        parser.error(
            f"there is no folder {options.output_file.parent} for the results: make it, or choose another --output_file"
        )

    pipeline = D3PMPipeline.from_pretrained(options.checkpoint, variant=options.variant)
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    options.dataset = options.dataset or ("text" if pipeline.task == "text-generation" else "images")
    if options.x0_posterior is not None:
        pipeline.scheduler.register_to_config(x0_posterior=options.x0_posterior)
    evaluation = evaluate_pipeline(
        pipeline,
        load_evaluation_data(pipeline, options),
        name,
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
        evaluation.write_to_card(options.checkpoint, pipeline.task == "text-generation")


if __name__ == "__main__":
    run_script(main)
