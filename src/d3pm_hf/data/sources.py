# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Sources of data: local files, and data sets of the Hub."""

import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tqdm.auto import tqdm

from ..utils.checks import check_choice, check_path


# Words in file names by which a split is recognized.
SPLIT_NAMES = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
# Start of the validation and the test text in percent, if all text is in one file.
VALIDATION_START, TEST_START = 90, 95
OPENERS: dict[str, Callable] = {".xz": lzma.open, ".gz": gzip.open}
# Number of bytes of a text file that are read at once, which limits the memory of a pass over it.
CHUNK_BYTES = 1 << 20


def dataset_title(name: str, path: str | None) -> str:
    """The name of a data set on cards and in results. A file of the user's own is named too: it may hold other data."""
    return name if path is None else f"{name} ({Path(path).resolve().name})"


def split_range(split: str, size: int) -> tuple[int, int]:
    """Returns the range of items of a split, if `size` items are cut 90 : 5 : 5."""
    cuts = [size * percent // 100 for percent in (0, VALIDATION_START, TEST_START, 100)]
    number = list(SPLIT_NAMES).index(split)
    return cuts[number], cuts[number + 1]


def find_files(path: str | Path) -> dict[str, Path]:
    """Returns the file of each split.

    Args:
        path (`str`): A file that holds all splits, or a folder with one file per split, such as `text.train.txt.xz`.
    """
    check_path("path", path)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"the path {path} does not exist: pass the path of a text file or of a folder of text files"
        )
    if path.is_file():
        return dict.fromkeys(SPLIT_NAMES, path)
    found: dict[str, Path] = {}
    for file in sorted(file for file in path.iterdir() if file.is_file()):
        words = re.split("[^a-z]+", file.name.lower())
        for split in (split for split, names in SPLIT_NAMES.items() if set(names) & set(words)):
            if split in found:
                raise ValueError(
                    f"{found[split]} and {file.name} are both files of the {split} split: remove one of them"
                )
            found[split] = file
    return found


def find_file(path: str | Path, split: str) -> tuple[Path, bool]:
    """Returns the file of a split, and whether the file holds all splits."""
    check_choice("split", split, SPLIT_NAMES)
    files = find_files(path)
    if split not in files:
        raise FileNotFoundError(
            f"{path} has no file of the {split} split: add one with a name like text.{split}.txt, or pass one file"
        )
    return files[split], Path(path).is_file()


def read_chunks(path: Path) -> Iterator[str]:
    """Yields the text of a file, which may be compressed (`.xz`, `.gz`), in parts of bounded length.

    A byte order mark and line breaks at the end are removed, and all line breaks become `\\n`. Python stores a string with one emoji in 4 bytes per character, so that a whole text takes several times its file.
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    # Bytes that have been read, and line breaks that are part of the text if more of it follows.
    position = num_breaks = 0
    is_empty, chunk = True, b""
    size = None if path.suffix in OPENERS else path.stat().st_size  # of the text, not of the compressed file
    shown = {"desc": f"reading {path.name}", "unit": "B", "unit_scale": True, "delay": 2, "leave": False}
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file, tqdm(total=size, **shown) as progress:
            while True:
                position += len(chunk)
                chunk = file.read(CHUNK_BYTES)
                text = decoder.decode(chunk, final=not chunk)
                line = text.rstrip("\n")
                if line:
                    yield "\n" * num_breaks + line
                    is_empty, num_breaks = False, 0
                num_breaks += len(text) - len(line)
                if not chunk:
                    break
                progress.update(len(chunk))
    except UnicodeDecodeError as error:
        position += error.start - len(error.object) + len(chunk)  # the decoder keeps the start of a character
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.object[error.start]:#x} at position {position}: {error.reason}): convert "
            "it first"
        ) from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise OSError(f"{path} cannot be decompressed ({error}): copy or download it again") from error
    if is_empty:
        raise ValueError(f"{path} is empty: pass a file with text in it")


def slice_chunks(chunks: Iterable[str], first: int, last: int) -> Iterator[str]:
    """Yields the parts of a text from character `first` up to `last`."""
    start = 0
    for chunk in chunks:
        yield chunk[max(first - start, 0) : max(last - start, 0)]
        start += len(chunk)


def load_splits(name: str, /, cache_dir: str | None = None, **options):
    """Loads all splits of a data set of the Hub or of a local folder as a `datasets.DatasetDict`.

    `options` are further arguments of `load_dataset`, such as `name`, the configuration.
    """
    check_path("dataset_name", name)
    if cache_dir is not None:
        check_path("cache_dir", cache_dir)
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("reading data sets needs the package datasets: pip install 'd3pm-hf[training]'") from error
    try:
        return load_dataset(name, cache_dir=cache_dir, **options)
    except Exception as error:  # the class depends on the reader of the format
        reason = " ".join(str(error.__cause__ or error).split())
        raise OSError(
            f"the data set {options.get('data_files', name)} cannot be loaded ({reason}): check its name, "
            "its content and the connection to the Hub, or pass the path of a local copy"
        ) from error


def choose_split(splits, split: str, name: str):
    """Returns a split of a data set."""
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}: choose one of {', '.join(splits)}")
    return splits[split]


def choose_column(dataset, names: tuple[str, ...], name: str) -> str:
    """Returns the first of `names` that is a column of the data set."""
    for column in names:
        if column in dataset.column_names:
            return column
    raise ValueError(
        f"{name} has no column {' or '.join(map(repr, names))}, only {', '.join(map(repr, dataset.column_names))}: rename "
        "the column, or pass another data set"
    )
