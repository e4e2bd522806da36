# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Text as the tokens of a checkpoint's own tokenizer, to measure the checkpoint on."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from .characters import encode_characters
from .memory import TextCrops, token_dtype


# How many of the characters that a tokenizer lacks an error names.
NUM_NAMED = 10


def encode_crops(text: str, tokenizer: PreTrainedTokenizerBase, length: int, name: str) -> TextCrops:
    """The text as consecutive stretches of `length` tokens of `tokenizer`, which must know all of it.

    Args:
        text (`str`): all of the text.
        tokenizer: of characters, or of word pieces.
        length (`int`): of an item, in tokens.
        name (`str`): what errors call the text.
    """
    tokens = encode_text(text, tokenizer, name)
    if len(tokens) < length:
        raise ValueError(
            f"{name} has {len(tokens)} tokens, and an example of this checkpoint has {length}: pass a longer text"
        )
    return TextCrops(tokens, length, len(tokenizer) - (tokenizer.mask_token_id == len(tokenizer) - 1))


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, name: str) -> np.ndarray:
    """The tokens `[n]` of a text; characters that the tokenizer lacks are refused, and not replaced by an unknown token."""
    alphabet = find_tokenizer_alphabet(tokenizer)
    if alphabet is not None:
        check_characters(sorted(set(text) - set(alphabet)), name)
        return encode_characters(text, alphabet)
    unknown = tokenizer.unk_token_id
    try:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    except Exception as error:
        if type(error) is not Exception:  # tokenizers has no class of its own for this
            raise
        raise ValueError(
            f"{name} holds words that the tokenizer of the checkpoint lacks ({error}): replace or remove them, or measure on "
            "other data"
        ) from error
    tokens = np.array(ids, dtype=token_dtype(len(tokenizer)))
    if unknown is None:
        check_characters(find_lacking(text, tokenizer), name)
    if unknown is not None and (tokens == unknown).any():
        check_characters(find_lacking(text, tokenizer), name)
        raise ValueError(
            f"{name} holds {int((tokens == unknown).sum())} words for which the tokenizer of the checkpoint has no pieces "
            f"({tokenizer.unk_token!r}): replace or remove them, or measure on other data"
        )
    if tokenizer.mask_token_id is not None and (tokens == tokenizer.mask_token_id).any():
        raise ValueError(
            f"{name} holds {tokenizer.mask_token!r}, the mask token of the checkpoint, which data must not: remove it"
        )
    return tokens


def find_tokenizer_alphabet(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The characters of a tokenizer with one token per character, in the order of the tokens; `None` for any other."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    characters = [token for token, _ in vocabulary if token != tokenizer.mask_token]
    if not characters or max(map(len, characters)) > 1:
        return None
    alphabet = "".join(characters)
    ids = tokenizer(alphabet, add_special_tokens=False, verbose=False).input_ids
    return alphabet if ids == list(range(len(alphabet))) else None


def find_lacking(text: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The characters of a text that are unknown to a tokenizer or, if it has no unknown token, that it drops."""

    def is_lacking(character: str) -> bool:
        try:
            ids = tokenizer(character, add_special_tokens=False).input_ids
        except Exception as error:
            if type(error) is not Exception:
                raise
            return False  # a part of words, which it knows as wholes
        return not ids if tokenizer.unk_token_id is None else tokenizer.unk_token_id in ids

    return [character for character in sorted(set(text)) if not character.isspace() and is_lacking(character)]


def check_characters(lacking: list[str], name: str) -> None:
    if lacking:
        named = " ".join(map(repr, lacking[:NUM_NAMED]))
        more = f" and {len(lacking) - NUM_NAMED} more" if len(lacking) > NUM_NAMED else ""
        raise ValueError(
            f"{name} holds characters that the tokenizer of the checkpoint lacks ({named}{more}): replace or remove them, or "
            "measure on other data"
        )
