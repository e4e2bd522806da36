# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Text as characters: their tokens and tokenizer, text8, and your own text.

Characters become tokens by table lookup: a tokenizer would take minutes for the 100 million characters of text8.
"""

import re
import string
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..utils.checks import check_choice, check_int, check_str, check_type
from .rows import CHUNK_TOKENS, TextCrops, token_dtype
from .sources import (
    SPLIT_NAMES,
    choose_column,
    choose_split,
    find_file,
    find_files,
    load_splits,
    read_chunks,
    read_text,
    slice_chunks,
    split_range,
)


TEXT8_ALPHABET = string.ascii_lowercase + " "
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPELLED = {ord(str(i)): f" {word} " for i, word in enumerate(DIGITS)}
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
        cache_dir (`str`, *optional*): Folder for downloads.
    """
    check_choice("split", split, SPLIT_NAMES)
    check_int("length", length, 1)
    source: str | Path = dataset_name
    if dataset_path is not None:
        source, whole = find_file(dataset_path, split)
        text = read_text(source)
    else:
        text, whole = hub_text(split, dataset_name, cache_dir)
    part = text[slice(*split_range(split, len(text)))] if whole else text
    check_length(len(part), length, split, source, len(text))
    return TextCrops(encode_characters(part), length, len(TEXT8_ALPHABET))


def load_text(path: str | Path, split: str = "train", length: int = 256) -> tuple[TextCrops, PreTrainedTokenizerFast]:
    """Loads your own text as characters, and a tokenizer for its alphabet: all characters of all splits.

    A byte order mark at the start of a file is removed, and all line breaks (`\\r\\n`, `\\r`) become `\\n`.

    Args:
        path (`str`): A text file (`.txt`, `.txt.xz` or `.txt.gz`), which is cut 90 : 5 : 5; or a folder with one file per
            split, such as `novel.train.txt`, `novel.validation.txt` and `novel.test.txt`.
        split (`str`, defaults to `"train"`): `"train"`, `"validation"` or `"test"`.
        length (`int`, defaults to 256): Number of characters of an item.
    """
    check_int("length", length, 1)
    file, whole = find_file(path, split)
    total, alphabet = scan_chunks(read_chunks(file))
    if not whole:
        _, alphabet = scan_chunks(scan_chunks(read_chunks(other))[1] for other in find_files(path).values())
    first, last = split_range(split, total) if whole else (0, total)
    check_length(last - first, length, split, file, total)
    if len(alphabet) == 1:
        raise ValueError(
            f"{path} contains only the character {alphabet!r}: pass a text with at least 2 different characters"
        )
    tokens = encode_chunks(slice_chunks(read_chunks(file), first, last), last - first, alphabet)
    return TextCrops(tokens, length, len(alphabet)), character_tokenizer(alphabet)


def character_tokenizer(alphabet: str = TEXT8_ALPHABET, mask_token: str = "[MASK]") -> PreTrainedTokenizerFast:
    """Creates a tokenizer with one token per character and a mask token after them.

    The mask token is a state of absorbing processes. With other processes it marks the gaps of a prompt. It is the padding token
    too, as what comes after a shorter text is a gap. Capitals are lowercased if the alphabet has none.

    Args:
        alphabet (`str`, *optional*): Characters in the order of their tokens. Defaults to a-z and the space, as in text8.
        mask_token (`str`, defaults to `"[MASK]"`): Mask token.
    """
    check_alphabet(alphabet)
    check_str("mask_token", mask_token)
    if mask_token in alphabet:
        raise ValueError(f"mask_token is {mask_token!r}, which is part of the alphabet: pass another one")
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.WordLevel({**vocabulary, mask_token: len(vocabulary)}))
    if alphabet == alphabet.lower():
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        mask_token=mask_token,
        pad_token=mask_token,
        clean_up_tokenization_spaces=False,
    )


def text8_normalize(text: str) -> str:
    """Normalizes a text as text8 does: lower case a-z, digits spelled out, and single spaces for everything else."""
    check_type("text", text, str, "a string")
    return re.sub("[^a-z]+", " ", text.lower().translate(SPELLED)).strip()


def encode_characters(text: str, alphabet: str = TEXT8_ALPHABET) -> np.ndarray:
    """Returns the index of each character in `alphabet`, `[len(text)]`, in the smallest sufficient integer type.

    These are the tokens of `character_tokenizer(alphabet)`, as [`TextCrops`] takes them.

    Args:
        text (`str`): The text. A character that is not in `alphabet` raises an error.
        alphabet (`str`, *optional*): Characters in the order of their tokens. Defaults to a-z and the space, as in text8.
    """
    check_type("text", text, str, "a string")
    check_alphabet(alphabet)
    return encode_chunks([text], len(text), alphabet)


def encode_chunks(chunks: Iterable[str], size: int, alphabet: str) -> np.ndarray:
    """Returns the index in `alphabet` of each of the `size` characters of a text that comes in parts."""
    table = np.full(max(map(ord, alphabet)) + 2, -1, dtype=np.int32)  # the last entry is for all code points beyond
    table[[ord(character) for character in alphabet]] = np.arange(len(alphabet))
    tokens, first = np.empty(size, dtype=token_dtype(len(alphabet))), 0
    for chunk in chunks:
        for start, codes in code_points(chunk):
            places = table[np.minimum(codes, len(table) - 1)]
            if places.min() < 0:
                wrong = int(np.argmax(places < 0))
                raise ValueError(
                    f"the character {chr(codes[wrong])!r} at position {first + start + wrong} is not one of {alphabet!r}: "
                    "normalize the text (`text8_normalize` leaves a-z and space), or load it with `load_text`, which finds "
                    "its alphabet"
                )
            tokens[first + start : first + start + len(places)] = places
        first += len(chunk)
    return tokens


def code_points(text: str):
    """Yields the Unicode code points of a text in arrays of bounded length, each with its position in the text."""
    for start in range(0, len(text), CHUNK_TOKENS):
        chunk = text[start : start + CHUNK_TOKENS].encode("utf-32-le", "surrogatepass")
        yield start, np.frombuffer(chunk, dtype="<u4")


def scan_chunks(chunks: Iterable[str]) -> tuple[int, str]:
    """Returns the number of characters of a text, and the distinct ones in the order of their code points."""
    size, found = 0, set()
    for chunk in chunks:
        size += len(chunk)
        for _, codes in code_points(chunk):
            found.update(np.unique(codes).tolist())
    return size, "".join(map(chr, sorted(found)))


def check_alphabet(alphabet: str) -> None:
    """Checks that an alphabet lists each of its characters once."""
    check_str("alphabet", alphabet)
    if len(set(alphabet)) != len(alphabet):
        twice = next(character for i, character in enumerate(alphabet) if character in alphabet[:i])
        raise ValueError(f"the alphabet {alphabet!r} contains {twice!r} twice: list each character once")


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


def hub_text(split: str, name: str, cache_dir: str | None) -> tuple[str, bool]:
    """Returns the text of a split and `False`, or the whole text and `True` if the repository does not separate splits."""
    splits = load_splits(name, cache_dir)
    train = choose_split(splits, "train", name)
    text = "".join(train[choose_column(train, ("text",), name)])  # usually a single row
    whole = list(splits) == ["train"] or len(text) > TEXT8_TRAIN_LENGTH
    if whole or split == "train":
        return text, whole
    held_out = choose_split(splits, split, name)
    return "".join(held_out[choose_column(held_out, ("text",), name)]), False
