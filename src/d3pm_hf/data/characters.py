# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Text as characters: their tokenizer, and their tokens by table lookup.

A tokenizer would take minutes for the 100 million characters of text8.
"""

import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..utils.checks import check_str, check_type
from .rows import CHUNK_TOKENS, token_dtype
from .token_files import map_tokens


TEXT8_ALPHABET = string.ascii_lowercase + " "
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPELLED = {ord(str(i)): f" {word} " for i, word in enumerate(DIGITS)}


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
    return np.concatenate([np.empty(0, token_dtype(len(alphabet))), *encode_chunks([text], alphabet)])


def map_characters(read: Callable[[], Iterable[str]], alphabet: str, cache_dir: str | None = None) -> np.ndarray:
    """Returns the index in `alphabet` of each character of the text that `read` yields, as a memory-mapped file."""
    return map_tokens(
        read,
        lambda chunks: encode_chunks(chunks, alphabet),
        ["characters", alphabet],
        token_dtype(len(alphabet)),
        cache_dir,
    )


def encode_chunks(chunks: Iterable[str], alphabet: str) -> Iterator[np.ndarray]:
    """Yields the index in `alphabet` of each character of a text that comes in parts."""
    table = np.full(max(map(ord, alphabet)) + 2, -1, dtype=np.int32)  # the last entry is for all code points beyond
    table[[ord(character) for character in alphabet]] = np.arange(len(alphabet))
    first = 0
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
            yield places.astype(token_dtype(len(alphabet)))
        first += len(chunk)


def code_points(text: str):
    """Yields the Unicode code points of a text in arrays of bounded length, each with its position in the text."""
    for start in range(0, len(text), CHUNK_TOKENS):
        chunk = text[start : start + CHUNK_TOKENS].encode("utf-32-le", "surrogatepass")
        yield start, np.frombuffer(chunk, dtype="<u4")


def scan_chunks(chunks: Iterable[str]) -> tuple[int, str]:
    """Returns the number of characters of a text, and the distinct ones in the order of their code points."""
    size, found = 0, np.zeros(sys.maxunicode + 1, dtype=bool)
    for chunk in chunks:
        size += len(chunk)
        for _, codes in code_points(chunk):
            found[codes] = True
    return size, "".join(map(chr, np.flatnonzero(found)))


def check_alphabet(alphabet: str) -> None:
    """Checks that an alphabet lists each of its characters once."""
    check_str("alphabet", alphabet)
    if len(set(alphabet)) != len(alphabet):
        twice = next(character for i, character in enumerate(alphabet) if character in alphabet[:i])
        raise ValueError(f"the alphabet {alphabet!r} contains {twice!r} twice: list each character once")
