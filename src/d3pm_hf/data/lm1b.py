# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Sentences packed into rows of word pieces: LM1B."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..utils.checks import check_int, check_path, check_str, check_type
from ..utils.files import write_atomically, write_text_atomically
from .memory import Rows, token_dtype
from .sources import choose_column, choose_split, find_file, load_splits, split_range


COLUMN = "text"
BATCH_SENTENCES = 10_000


def load_lm1b(
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    dataset_name: str = "dvruette/lm1b",
    dataset_path: str | Path | None = None,
    length: int = 128,
    cache_dir: str | None = None,
    max_examples: int | None = None,
) -> Rows:
    """Concatenates sentences, each followed by the end-of-sequence token, and cuts them into rows of `length` tokens.

    Tokens at the end that do not fill a row are dropped. `num_words` of the result is the number of words in the rows,
    plus one for the end of each sentence. The paper's perplexity per word divides by this number. The rows are computed
    once and cached on disk.

    Args:
        split (`str`): A split of the data set, such as `"train"` or `"test"`.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer with an end-of-sequence token. A mask token that comes last in its
            vocabulary is not counted as a state of the data.
        dataset_name (`str`, defaults to `"dvruette/lm1b"`): Id of the data set on the Hub, with one sentence per row in its
            column `text`.
        dataset_path (`str`, *optional*): Local data to read in place of the Hub: a file with one sentence per line (`.txt`,
            `.txt.xz` or `.txt.gz`), which is cut 90 : 5 : 5; or a folder with one file per split, such as
            `lm1b.train.txt`.
        length (`int`, defaults to 128): Number of tokens of a row.
        cache_dir (`str`, *optional*): Folder for downloads and rows.
        max_examples (`int`, *optional*): Number of sentences to read from the start of the split.
    """
    check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, "a tokenizer of transformers")
    check_int("length", length, 1)
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token: set `tokenizer.eos_token`")
    sentences = open_sentences(split, dataset_name, dataset_path, cache_dir, max_examples)
    path = rows_path(sentences, split, tokenizer, length, cache_dir)
    if not path.exists():
        rows, num_words = pack_rows(
            sentences[COLUMN], tokenizer, length, f"the {split} split of {dataset_path or dataset_name}"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        # The rows are written last: if they exist, the file beside them is complete.
        write_text_atomically(path.with_suffix(".json"), json.dumps({"words": num_words}))
        write_atomically(path, lambda file: np.save(file, rows))
    num_tokens = len(tokenizer) - (tokenizer.mask_token_id == len(tokenizer) - 1)
    num_words = json.loads(path.with_suffix(".json").read_text())["words"]
    return Rows(np.load(path, mmap_mode="r"), num_tokens, num_words=num_words)


def load_sentences(
    split: str,
    dataset_name: str = "dvruette/lm1b",
    dataset_path: str | Path | None = None,
    cache_dir: str | None = None,
    max_examples: int | None = None,
) -> Sequence[str]:
    """Loads the sentences that [`load_lm1b`] packs, to train a tokenizer on. They are read from disk on access."""
    return open_sentences(split, dataset_name, dataset_path, cache_dir, max_examples)[COLUMN]


def open_sentences(split, dataset_name, dataset_path, cache_dir, max_examples):
    """Returns a `datasets.Dataset` with one sentence per row, from the Hub or from local files."""
    check_str("split", split)
    if cache_dir is not None:
        check_path("cache_dir", cache_dir)
    if max_examples is not None:
        check_int("max_examples", max_examples, 1)
    if dataset_path is None:
        sentences = choose_split(load_splits(dataset_name, cache_dir), split, dataset_name)
        choose_column(sentences, (COLUMN,), dataset_name)
    else:
        file, whole = find_file(dataset_path, split)
        if not file.stat().st_size:
            raise ValueError(f"{file} is empty: pass a file with one sentence per line")
        # A byte order mark is dropped, and every kind of line break ends a sentence.
        sentences = load_splits("text", cache_dir, data_files=str(file), encoding="utf-8-sig")["train"]
        if whole:
            sentences = sentences.select(range(*split_range(split, len(sentences))))
    return sentences if max_examples is None else sentences.select(range(min(max_examples, len(sentences))))


def pack_rows(
    sentences: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, name: str
) -> tuple[np.ndarray, int]:
    """Returns rows of tokens `[n, length]` and their number of words and ends of sentences; errors call them `name`."""
    eos, dtype = tokenizer.eos_token_id, token_dtype(len(tokenizer))
    batches, num_words = [], 0
    with tqdm(total=len(sentences), desc="tokenizing", unit=" sentences", delay=2, leave=False) as progress:
        for start in range(0, len(sentences), BATCH_SENTENCES):
            batch = sentences[start : start + BATCH_SENTENCES]
            texts = [text for text in batch if text and not text.isspace()]
            if texts:
                encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
                batches.append(np.concatenate([np.array([*ids, eos], dtype=dtype) for ids in encoded]))
                num_words += sum(len(text.split()) + 1 for text in texts)
            progress.update(len(batch))
    tokens = np.concatenate(batches) if batches else np.empty(0, dtype)
    kept = len(tokens) - len(tokens) % length
    if not kept:
        raise ValueError(
            f"{name} has {len(sentences)} sentences with {len(tokens)} tokens, fewer than length={length}: pass more "
            "sentences or a smaller length (--sequence_length)"
        )
    return tokens[:kept].reshape(-1, length), num_words - count_words(tokens[kept:], tokenizer)


def count_words(tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the number of words and ends of sentences in a stretch of tokens."""
    ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
    texts = tokenizer.batch_decode([part.tolist() for part in np.split(tokens, ends)], skip_special_tokens=True)
    return len(ends) + sum(len(text.split()) for text in texts)


def rows_path(sentences, split: str, tokenizer: PreTrainedTokenizerBase, length: int, cache_dir: str | None) -> Path:
    """Returns the path of cached rows, which depends on the data, the tokenizer and the length."""
    from datasets import config

    # `datasets` names its files by the revision on the Hub, or by the path and the time of a local file.
    files = [file["filename"] for file in sentences.cache_files]
    settings = [files, split, len(sentences), tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token, length]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    return Path(cache_dir or config.HF_DATASETS_CACHE) / "d3pm_hf" / f"{key}.npy"
