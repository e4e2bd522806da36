# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Data sets to measure a checkpoint on, in its own tokens or levels and at its own length or size."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..data import Rows, TextCrops, digits, load_cifar10, load_images, load_lm1b, load_text8, python_prose
from ..data.characters import TEXT8_ALPHABET
from ..data.encoding import encode_crops
from ..data.sources import CHUNK_BYTES, find_file, load_splits, read_chunks, slice_chunks, split_range
from ..pipelines import D3PMPipeline
from ..utils.names import ALL_SPLITS, DATASETS


# Maximum share of unknown tokens: an unknown token is easy to predict, and stands for text that is not.
MAX_UNKNOWN = 0.01


def load_evaluation_data(
    pipeline: D3PMPipeline, dataset: str, split: str, dataset_path: str | None = None, cache_dir: str | None = None
) -> TextCrops | Rows:
    """Loads the data set that a pipeline is measured on, encoded for its tokenizer or its image size.

    Args:
        pipeline ([`D3PMPipeline`]): Pipeline to measure.
        dataset (`str`): Name of the data set, see `DATASETS`.
        split (`str`): Split of the data set; `"all"` for all of the user's own data.
        dataset_path (`str`, *optional*): The user's own data, or a local copy of a data set of the Hub.
        cache_dir (`str`, *optional*): Folder for downloads.
    """
    if pipeline.task not in DATASETS:
        raise ValueError("the checkpoint is that of a table: measure rows with `pipeline.log_likelihood(frame)`")
    possible = DATASETS[pipeline.task]
    if dataset not in possible:
        raise ValueError(
            f"the checkpoint is for {pipeline.task}, and {dataset} is not: choose --dataset from {', '.join(possible)}"
        )
    load = load_text_data if pipeline.task == "text-generation" else load_image_data
    return load(pipeline, dataset, split, dataset_path, cache_dir)


def load_text_data(
    pipeline: D3PMPipeline, dataset: str, split: str, dataset_path: str | None, cache_dir: str | None
) -> TextCrops | Rows:
    """Text, encoded by the tokenizer of the checkpoint."""
    tokenizer, length = pipeline.tokenizer, pipeline.config.sequence_length
    if tokenizer is None:
        raise ValueError(
            "the checkpoint has no tokenizer to encode text with: save one with it, or call `evaluate_pipeline` with tokens"
        )
    if dataset == "lm1b":
        rows = load_lm1b(split, tokenizer, dataset_path=dataset_path, length=length, cache_dir=cache_dir)
        unknown = np.count_nonzero(rows.tokens == tokenizer.unk_token_id) / rows.tokens.size
        if unknown > MAX_UNKNOWN:
            raise ValueError(
                f"{unknown:.1%} of the tokens of {dataset_path or dataset} are {tokenizer.unk_token!r}, which stands for "
                "pieces that the tokenizer of the checkpoint lacks: measure it on other data"
            )
        return rows
    if dataset == "text":
        path = own_path(dataset, dataset_path)
        source = path if split == ALL_SPLITS else f"the {split} split of {path}"
        return encode_crops(lambda: read_split(path, split), tokenizer, length, source, cache_dir)
    if dataset == "prose":
        crops = python_prose(length)[1]
    else:
        crops = load_text8(split, dataset_path=dataset_path, length=length, cache_dir=cache_dir)
    codes, tokens = np.frombuffer(TEXT8_ALPHABET.encode(), np.uint8), crops.tokens
    starts = range(0, len(tokens), CHUNK_BYTES)
    return encode_crops(
        lambda: (codes[tokens[start : start + CHUNK_BYTES]].tobytes().decode() for start in starts),
        tokenizer,
        length,
        f"the {split} split of {dataset}",
        cache_dir,
    )


def own_path(dataset: str, dataset_path: str | None) -> str:
    """The path of the user's own data, which the data sets "text" and "images" need."""
    if dataset_path is None:
        raise ValueError(f"dataset is {dataset!r}, which stands for your own data: pass their path as dataset_path")
    return dataset_path


def read_split(path: str, split: str) -> Iterator[str]:
    """Yields one split of the user's own text, or all of it, in parts."""
    if split == ALL_SPLITS and Path(path).is_file():
        return read_chunks(Path(path))
    file, whole = find_file(path, split)
    if not whole:
        return read_chunks(file)
    size = sum(map(len, read_chunks(file)))
    return slice_chunks(read_chunks(file), *split_range(split, size))


def load_image_data(
    pipeline: D3PMPipeline, dataset: str, split: str, dataset_path: str | None, cache_dir: str | None
) -> Rows:
    """Images of the size and with the levels of the checkpoint; with their classes if its network has classes."""
    (channels, height, width), levels = pipeline.sample_shape, pipeline.scheduler.config.num_classes
    has_classes = pipeline.denoiser.num_class_labels is not None
    label_column = "label" if has_classes else None
    if dataset == "digits":
        images = digits(labels=has_classes)[1]
    elif dataset == "cifar10":
        images = load_cifar10(
            split, dataset_path=dataset_path, resolution=height, cache_dir=cache_dir, label_column=label_column
        )
    else:
        path, gray = own_path(dataset, dataset_path), channels == 1
        splits = load_splits(path, cache_dir) if split == ALL_SPLITS else [split]
        options: dict = {"grayscale": gray, "cache_dir": cache_dir, "label_column": label_column}
        parts = [load_images(path, part, height, levels, **options) for part in splits]
        labels = np.concatenate([part.labels for part in parts]) if has_classes else None
        images = Rows(np.concatenate([part.tokens for part in parts]), levels, labels=labels)
    shape, needed = (*images.tokens.shape[1:], images.num_tokens), (channels, height, width, levels)
    if shape != needed:
        raise ValueError(
            "{} has images of {} x {} x {} with {} levels".format(dataset, *shape)
            + ", and the checkpoint generates {} x {} x {} with {}: measure it on data of this kind".format(*needed)
        )
    return images
