# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Character tokens by table lookup: a tokenizer would take minutes for the 100 million characters of text8."""

import re

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


def find_alphabet(text: str) -> str:
    """Returns the distinct characters of a text in the order of their code points."""
    return "".join(map(chr, sorted(set().union(*(np.unique(codes).tolist() for _, codes in code_points(text))))))


def encode_characters(text: str, alphabet: str = TEXT8_ALPHABET) -> np.ndarray:
    """Returns the index of each character in `alphabet`, `[len(text)]`, in the smallest sufficient integer type.

    These are the tokens of `character_tokenizer(alphabet)`, as [`TextCrops`] takes them.

    Args:
        text (`str`): The text. A character that is not in `alphabet` raises an error.
        alphabet (`str`, *optional*): Characters in the order of their tokens. Defaults to a-z and the space, as in text8.
    """
    check_type("text", text, str, "a string")
    check_alphabet(alphabet)
    table = np.full(max(map(ord, alphabet)) + 2, -1, dtype=np.int32)  # the last entry is for all code points beyond
    table[[ord(character) for character in alphabet]] = np.arange(len(alphabet))
    tokens = np.empty(len(text), dtype=token_dtype(len(alphabet)))
    for start, codes in code_points(text):
        places = table[np.minimum(codes, len(table) - 1)]
        if places.min() < 0:
            position = start + int(np.argmax(places < 0))
            raise ValueError(
                f"the character {text[position]!r} at position {position} is not one of {alphabet!r}: normalize the text "
                "(`text8_normalize` leaves a-z and space), or load it with `load_text`, which finds its alphabet"
            )
        tokens[start : start + len(places)] = places
    return tokens


def text8_normalize(text: str) -> str:
    """Normalizes a text as text8 does: lower case a-z, digits spelled out, and single spaces for everything else."""
    check_type("text", text, str, "a string")
    return re.sub("[^a-z]+", " ", text.lower().translate(SPELLED)).strip()
