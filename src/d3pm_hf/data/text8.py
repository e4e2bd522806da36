# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Text files as characters: text8, and your own text."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from ..utils.checks import check_choice, check_int
from .characters import TEXT8_ALPHABET, character_tokenizer, map_characters, scan_chunks
from .rows import TextCrops
from .sources import (
    SPLIT_NAMES,
    choose_column,
    choose_split,
    find_file,
    find_files,
    load_splits,
    read_chunks,
    slice_chunks,
    split_range,
)


# Number of characters of the training text. A longer text includes the 5M of validation and the 5M of test.
TEXT8_TRAIN_LENGTH = 90_000_000


def load_text8(
    split: str = "train",
    dataset_name: str = "afmck/text8",
    dataset_path: str | Path | None = None,
    length: int = 256,
    cache_dir: str | None = None,
) -> TextCrops:
    """Loads a split of text8 (90M, 5M and 5M characters), where a-z are tokens 0 .. 25 and the space is 26.

    Args:
        split (`str`, defaults to `"train"`): `"train"`, `"validation"` or `"test"`.
        dataset_name (`str`, defaults to `"afmck/text8"`): Id of the data set on the Hub, with a column `text`. If `train`
            is its only split or contains the whole text, the text is cut 90 : 5 : 5.
        dataset_path (`str`, *optional*): Local data to read in place of the Hub: a text file (`.txt`, `.txt.xz` or
            `.txt.gz`), which is cut 90 : 5 : 5; or a folder with one file per split, such as `text8.train.txt`.
        length (`int`, defaults to 256): Number of characters of an item.
        cache_dir (`str`, *optional*): Folder for downloads and tokens. Defaults to the cache of `datasets`.
    """
    check_choice("split", split, SPLIT_NAMES)
    check_int("length", length, 1)
    source: str | Path = dataset_name
    if dataset_path is not None:
        source, whole = find_file(dataset_path, split)
        read: Callable[[], Iterable[str]] = partial(read_chunks, source)
    else:
        read, whole = hub_text(split, dataset_name, cache_dir)
    total = sum(map(len, read()))
    first, last = split_range(split, total) if whole else (0, total)
    check_length(last - first, length, split, source, total)
    tokens = map_characters(lambda: slice_chunks(read(), first, last), TEXT8_ALPHABET, cache_dir)
    return TextCrops(tokens, length, len(TEXT8_ALPHABET))


def load_text(
    path: str | Path, split: str = "train", length: int = 256, cache_dir: str | None = None
) -> tuple[TextCrops, PreTrainedTokenizerFast]:
    """Loads your own text as characters, and a tokenizer for its alphabet: all characters of all splits.

    A byte order mark at the start of a file is removed, and all line breaks (`\\r\\n`, `\\r`) become `\\n`. The text is read
    in parts into one array of tokens, a file that all processes map: it is never in memory as a whole.

    Args:
        path (`str`): A text file (`.txt`, `.txt.xz` or `.txt.gz`), which is cut 90 : 5 : 5; or a folder with one file per
            split, such as `novel.train.txt`, `novel.validation.txt` and `novel.test.txt`.
        split (`str`, defaults to `"train"`): `"train"`, `"validation"` or `"test"`.
        length (`int`, defaults to 256): Number of characters of an item.
        cache_dir (`str`, *optional*): Folder for the tokens. Defaults to the cache of `datasets`.
    """
    check_int("length", length, 1)
    file, whole = find_file(path, split)
    total, alphabet = scan_chunks(read_chunks(file))
    if not whole:
        _, alphabet = scan_chunks(chain.from_iterable(map(read_chunks, find_files(path).values())))
    first, last = split_range(split, total) if whole else (0, total)
    check_length(last - first, length, split, file, total)
    if len(alphabet) == 1:
        raise ValueError(
            f"{path} contains only the character {alphabet!r}: pass a text with at least 2 different characters"
        )
    tokens = map_characters(lambda: slice_chunks(read_chunks(file), first, last), alphabet, cache_dir)
    return TextCrops(tokens, length, len(alphabet)), character_tokenizer(alphabet)


def check_length(size: int, length: int, split: str, source: str | Path, total: int) -> None:
    """Checks that a split, which has `size` of the `total` characters of a text, has at least `length` characters."""
    if size >= length:
        return
    if size == total:
        raise ValueError(
            f"{source} has {total} characters, fewer than length={length}: pass a longer text or a smaller length "
            "(--sequence_length)"
        )
    first, last = split_range(split, 100)
    raise ValueError(
        f"the {split} split of {source} has {size} of its {total} characters, fewer than length={length}: pass a text "
        f"of at least {-(-100 * length // (last - first))} characters, a folder with one file per split, or a smaller length "
        "(--sequence_length)"
    )


def hub_text(split: str, name: str, cache_dir: str | None) -> tuple[Callable[[], Iterable[str]], bool]:
    """Returns what yields the text of a split and `False`, or the whole text and `True` if splits are not separate."""
    splits = load_splits(name, cache_dir)
    train = choose_split(splits, "train", name)
    texts = train[choose_column(train, ("text",), name)]  # usually a single row
    whole = list(splits) == ["train"] or sum(map(len, texts)) > TEXT8_TRAIN_LENGTH
    if not whole and split != "train":
        held_out = choose_split(splits, split, name)
        texts = held_out[choose_column(held_out, ("text",), name)]
    return lambda: texts, whole
