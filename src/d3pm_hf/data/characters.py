# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Character tokens by table lookup: a tokenizer would take minutes for the 100 million characters of text8."""

import re
from collections.abc import Iterable

import numpy as np

from ..utils.checks import check_type
from .memory import CHUNK_TOKENS, token_dtype
from .tokenizers import TEXT8_ALPHABET, check_alphabet


DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPELLED = {ord(str(i)): f" {word} " for i, word in enumerate(DIGITS)}


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


def text8_normalize(text: str) -> str:
    """Normalizes a text as text8 does: lower case a-z, digits spelled out, and single spaces for everything else."""
    check_type("text", text, str, "a string")
    return re.sub("[^a-z]+", " ", text.lower().translate(SPELLED)).strip()
