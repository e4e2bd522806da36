# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Text as tokens of a tokenizer: documents of a data set, one long text or a prompt, and what the tokenizer does not know."""

import re
from itertools import chain

import numpy as np
from tokenizers import models
from transformers import PreTrainedTokenizerBase

from ..utils.checks import check_int, check_str, check_type, describe
from .characters import encode_characters
from .rows import TextCrops, token_dtype


# Number of characters or words that an error lists.
NUM_NAMED = 10
# Number of consecutive characters from which on they are listed as a range.
MIN_RANGE = 4
WHITESPACE = {" ": "space", "\n": "line break"}


def tokenize(
    dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_column: str = "text",
    max_length: int | None = None,
    packing: bool = False,
    truncation: bool = False,
    add_special_tokens: bool = True,
    append_eos: bool = False,
    num_proc: int | None = None,
):
    """Tokenizes the texts of a data set, which keeps its other columns unless it is packed.

    Args:
        dataset (`datasets.Dataset`, `IterableDataset` or `DatasetDict`): The documents. A stream stays a stream.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer of the network.
        text_column (`str`, defaults to `"text"`): Column of the texts.
        max_length (`int`, *optional*): Number of tokens of the longest document that is allowed, special tokens included; the
            number of tokens of each row with `packing`.
        packing (`bool`, defaults to `False`): Whether documents are joined, and cut into rows of `max_length` tokens. The end
            of each thousand of documents that does not fill a row is left out. Otherwise each document is an example.
        truncation (`bool`, defaults to `False`): Whether longer documents are cut to `max_length`. Otherwise they raise an
            error.
        add_special_tokens (`bool`, defaults to `True`): Whether the special tokens of the tokenizer are put around each
            document.
        append_eos (`bool`, defaults to `False`): Whether the end of text follows each document, as data.
        num_proc (`int`, *optional*): Number of processes; not for streams.

    Example:
        dataset = tokenize(load_dataset("my/poems", split="train"), pipeline.tokenizer, max_length=128)
    """
    if not hasattr(dataset, "map") or not hasattr(dataset, "column_names"):
        raise ValueError(f"dataset is {describe(dataset)}: it must be a data set of the package datasets")
    check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, "a tokenizer of transformers")
    check_str("text_column", text_column)
    for name, number in (("max_length", max_length), ("num_proc", num_proc)):
        if number is not None:
            check_int(name, number, 1)
    for name, flag in (("packing", packing), ("truncation", truncation), ("add_special_tokens", add_special_tokens)):
        check_type(name, flag, bool, "True or False")
    check_type("append_eos", append_eos, bool, "True or False")
    if (packing or truncation) and max_length is None:
        raise ValueError(
            f"{'packing' if packing else 'truncation'} is True: pass max_length, the number of tokens of a row"
        )
    if packing and truncation:
        raise ValueError(
            "packing and truncation are True: packed documents are cut where a row ends; leave truncation out"
        )
    if append_eos and tokenizer.eos_token_id is None:
        raise ValueError(
            f"append_eos is True, and the tokenizer ({type(tokenizer).__name__}) has no end of text: give it one "
            "(`tokenizer.add_special_tokens({'eos_token': ...})`), or leave append_eos False"
        )
    columns = dataset.column_names
    if isinstance(columns, dict):  # of each split
        columns = next(iter(columns.values()))
    if columns is None:
        raise ValueError("the columns of this stream are not known: call `dataset.resolve_features()` first")
    if text_column not in columns:
        raise ValueError(
            f"text_column is {text_column!r}, and the data set has the columns {', '.join(map(repr, columns))}: name one of them"
        )
    ends = [tokenizer.eos_token_id] if append_eos else []

    def encode(batch: dict, indices: list[int]) -> dict:
        rows = []
        for index, text in zip(indices, batch[text_column]):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(
                    f"document {index} is {describe(text)}, which has no text: remove it with `dataset.filter`"
                )
            ids = find_tokens(text, tokenizer, add_special_tokens)
            if ids is None:
                raise unknown_error(text, tokenizer, f"document {index}")
            row = ids + ends
            if max_length is not None and not packing and len(row) > max_length:
                if not truncation:
                    raise ValueError(
                        f"document {index} has {len(row)} tokens, and max_length is {max_length}: pass truncation=True to cut "
                        "it, packing=True to spread it over rows, or a larger max_length if the network has the positions"
                    )
                row = row[:max_length]  # its end is cut off, so that no end of text follows
                if add_special_tokens:
                    cut = {"truncation": True, "max_length": max_length, "verbose": False}
                    row = tokenizer(text, add_special_tokens=True, **cut).input_ids
            rows.append(row)
        if packing and max_length:
            tokens = list(chain.from_iterable(rows))
            starts = range(0, len(tokens) - max_length + 1, max_length)  # what does not fill a row is left out
            rows = [tokens[start : start + max_length] for start in starts]
        return {"input_ids": rows}

    options: dict = {} if num_proc is None else {"num_proc": num_proc}
    dropped = columns if packing else [text_column]
    return dataset.map(encode, batched=True, with_indices=True, remove_columns=dropped, **options)


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
        check_characters(sorted(set(text) - set(alphabet)), name, tokenizer)
        return encode_characters(text, alphabet)
    unknown, ids = tokenizer.unk_token_id, find_tokens(text, tokenizer)
    if ids is None:
        raise ValueError(
            f"{name} contains words that the tokenizer of the checkpoint lacks ({list_some(find_unknown(text, tokenizer))}): "
            "replace or remove them, or measure on other data"
        )
    tokens = np.array(ids, dtype=token_dtype(len(tokenizer)))
    if unknown is None:
        check_characters(find_lacking(text, tokenizer), name, tokenizer)
    if unknown is not None and (tokens == unknown).any():
        check_characters(find_lacking(text, tokenizer), name, tokenizer)
        raise ValueError(
            f"{name} contains {int((tokens == unknown).sum())} words for which the tokenizer of the checkpoint has no pieces "
            f"({tokenizer.unk_token!r}): replace or remove them, or measure on other data"
        )
    if tokenizer.mask_token_id is not None and (tokens == tokenizer.mask_token_id).any():
        raise ValueError(
            f"{name} contains {tokenizer.mask_token!r}, the mask token of the checkpoint, which data must not contain: remove it"
        )
    return tokens


def find_tokens(text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = False) -> list[int] | None:
    """Returns the tokens of a text, or `None` if it has a word that a tokenizer without an unknown token lacks."""
    try:
        return tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids
    except Exception as error:
        if type(error) is not Exception:  # tokenizers has no class of its own for this
            raise
        return None


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
        ids = find_tokens(character, tokenizer)
        if ids is None:
            return False  # part of a word that the tokenizer knows as a whole
        return not ids if tokenizer.unk_token_id is None else tokenizer.unk_token_id in ids

    return [character for character in sorted(set(text)) if not character.isspace() and is_lacking(character)]


def check_characters(lacking: list[str], name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises an error that lists the characters that a tokenizer lacks, if any."""
    if lacking:
        raise ValueError(
            f"{name} contains characters that the tokenizer of the checkpoint lacks ({list_some(lacking)}): replace or remove "
            f"them, or measure on other data{describe_known(tokenizer)}"
        )


def encode_prompt(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens of a prompt. What the tokenizer does not know raises an error: it would be missing from the text."""
    unknown, ids = tokenizer.unk_token_id, find_tokens(prompt, tokenizer)
    if ids is None:
        raise unknown_error(prompt, tokenizer)
    is_whole = (
        unknown not in ids if unknown is not None else is_known("".join(split_special(prompt, tokenizer)), tokenizer)
    )
    if not is_whole and find_unknown(prompt, tokenizer):  # who writes the unknown token means it
        raise unknown_error(prompt, tokenizer)
    return ids


def unknown_error(text: str, tokenizer: PreTrainedTokenizerBase, name: str = "the prompt") -> ValueError:
    """The error that lists what a tokenizer does not know of a text, and the characters that it knows."""
    kind = "words" if find_tokenizer_alphabet(tokenizer) is None else "characters"
    gap = "" if tokenizer.mask_token is None else f"; {tokenizer.mask_token} is a gap of one token"
    return ValueError(
        f"{name} has {kind} that the tokenizer does not know ({list_some(find_unknown(text, tokenizer))}): replace or remove "
        f"them{describe_known(tokenizer)}{gap}"
    )


def find_unknown(text: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the words of a text that a tokenizer does not know, or the characters if these are its tokens."""
    stretches = split_special(text, tokenizer)
    words = " ".join(stretches).split()
    parts = words if find_tokenizer_alphabet(tokenizer) is None else "".join(stretches)
    return [part for part in dict.fromkeys(parts) if not is_known(part, tokenizer)]


def is_known(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer has tokens other than the unknown one for all of a text."""
    unknown, ids = tokenizer.unk_token_id, find_tokens(text, tokenizer)
    if ids is None:
        return False
    return unknown not in ids if unknown is not None else not find_lacking(text, tokenizer)


def split_special(text: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the stretches of a text between the special tokens that are written in it."""
    special = "|".join(map(re.escape, tokenizer.all_special_tokens))
    return re.split(special, text) if special else [text]


def list_some(parts: list[str]) -> str:
    """Returns the first of many characters or words, and the number of the others."""
    more = f" and {len(parts) - NUM_NAMED} more" if len(parts) > NUM_NAMED else ""
    return " ".join(map(repr, parts[:NUM_NAMED])) + more


def describe_known(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the end of an error that says which characters a tokenizer knows; nothing if it has no fixed set of them."""
    characters = find_tokenizer_alphabet(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if characters is None and backend is not None and isinstance(backend.model, models.Unigram):
        characters = "".join(token.replace("\u2581", " ") for token in tokenizer.get_vocab() if len(token) == 1)
    return f"; it knows {describe_alphabet(characters)}" if characters else ""


def describe_alphabet(alphabet: str) -> str:
    """Returns the characters of an alphabet in words: `"a to z and space"`."""
    runs: list[str] = []
    for character in sorted(alphabet):
        if runs and character.isalnum() and runs[-1].isalnum() and ord(character) == ord(runs[-1][-1]) + 1:
            runs[-1] += character
        else:
            runs.append(character)
    ranges = [f"{run[0]} to {run[-1]}" for run in runs if len(run) >= MIN_RANGE]
    single = [character for run in runs if len(run) < MIN_RANGE for character in run if character not in WHITESPACE]
    named = ranges + [character if character.isalnum() else repr(character) for character in single]
    if len(named) > NUM_NAMED:
        named = [*named[:NUM_NAMED], f"{len(named) - NUM_NAMED} more"]
    named += [name for character, name in WHITESPACE.items() if character in alphabet]
    return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
