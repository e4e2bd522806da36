# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Text encoded by the tokenizer of a checkpoint, for its evaluation."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from .characters import encode_characters
from .memory import TextCrops, token_dtype


# Number of unknown characters that an error lists.
NUM_NAMED = 10


def encode_crops(text: str, tokenizer: PreTrainedTokenizerBase, length: int, name: str) -> TextCrops:
    """Encodes a text and cuts it into consecutive stretches of `length` tokens.

    Args:
        text (`str`): The whole text.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the checkpoint, over characters or word pieces.
        length (`int`): Number of tokens of an item.
        name (`str`): Name of the text in errors.
    """
    tokens = encode_text(text, tokenizer, name)
    if len(tokens) < length:
        raise ValueError(
            f"{name} has {len(tokens)} tokens, and an example of this checkpoint has {length}: pass a longer text"
        )
    return TextCrops(tokens, length, len(tokenizer) - (tokenizer.mask_token_id == len(tokenizer) - 1))


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, name: str) -> np.ndarray:
    """Returns the tokens `[n]` of a text. Characters that the tokenizer lacks raise an error and do not become unknown."""
    alphabet = find_tokenizer_alphabet(tokenizer)
    if alphabet is not None:
        check_characters(sorted(set(text) - set(alphabet)), name)
        return encode_characters(text, alphabet)
    unknown = tokenizer.unk_token_id
    try:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    except Exception as error:
        if type(error) is not Exception:  # tokenizers raises a bare `Exception`
            raise
        raise ValueError(
            f"{name} contains words that the tokenizer of the checkpoint lacks ({error}): replace or remove them, or measure on "
            "other data"
        ) from error
    tokens = np.array(ids, dtype=token_dtype(len(tokenizer)))
    if unknown is None:
        check_characters(find_lacking(text, tokenizer), name)
    if unknown is not None and (tokens == unknown).any():
        check_characters(find_lacking(text, tokenizer), name)
        raise ValueError(
            f"{name} contains {int((tokens == unknown).sum())} words for which the tokenizer of the checkpoint has no pieces "
            f"({tokenizer.unk_token!r}): replace or remove them, or measure on other data"
        )
    if tokenizer.mask_token_id is not None and (tokens == tokenizer.mask_token_id).any():
        raise ValueError(
            f"{name} contains {tokenizer.mask_token!r}, the mask token of the checkpoint, which data must not contain: remove it"
        )
    return tokens


def find_tokenizer_alphabet(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns the characters of a tokenizer with one token per character, in token order; `None` for other tokenizers."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    characters = [token for token, _ in vocabulary if token != tokenizer.mask_token]
    if not characters or max(map(len, characters)) > 1:
        return None
    alphabet = "".join(characters)
    ids = tokenizer(alphabet, add_special_tokens=False, verbose=False).input_ids
    return alphabet if ids == list(range(len(alphabet))) else None


def find_lacking(text: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the characters of a text that a tokenizer does not know or, if it has no unknown token, drops."""

    def is_lacking(character: str) -> bool:
        try:
            ids = tokenizer(character, add_special_tokens=False).input_ids
        except Exception as error:
            if type(error) is not Exception:
                raise
            return False  # part of a word that the tokenizer knows as a whole
        return not ids if tokenizer.unk_token_id is None else tokenizer.unk_token_id in ids

    return [character for character in sorted(set(text)) if not character.isspace() and is_lacking(character)]


def check_characters(lacking: list[str], name: str) -> None:
    """Raises an error that lists the characters that a tokenizer lacks, if any."""
    if lacking:
        named = " ".join(map(repr, lacking[:NUM_NAMED]))
        more = f" and {len(lacking) - NUM_NAMED} more" if len(lacking) > NUM_NAMED else ""
        raise ValueError(
            f"{name} contains characters that the tokenizer of the checkpoint lacks ({named}{more}): replace or remove them, or "
            "measure on other data"
        )
