# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Text as tokens of a tokenizer: documents of a data set, one long text or a prompt, and what the tokenizer does not know."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

import numpy as np
from tokenizers import models
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ..utils.checks import check_int, check_str, check_type, describe
from .characters import map_characters, scan_chunks
from .rows import TextCrops, token_dtype
from .token_files import map_tokens, tokenizer_settings


# Number of characters or words that an error lists.
NUM_NAMED = 10
# Number of consecutive characters from which on they are listed as a range.
MIN_RANGE = 4
WHITESPACE = {" ": "space", "\n": "line break"}
# Pre-tokenizers that cut a text into words by the characters near each place, whatever is further away.
LOCAL_PRE_TOKENIZERS = {"BertPreTokenizer", "ByteLevel", "Digits", "Metaspace", "Punctuation", "Sequence", "Split"}
LOCAL_PRE_TOKENIZERS |= {"Whitespace", "WhitespaceSplit"}
# Number of characters before and after a place that decide whether a text may be cut there, and of places that are tried.
NUM_NEAR, NUM_PLACES = 256, 16


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
    flags = {
        "packing": packing,
        "truncation": truncation,
        "add_special_tokens": add_special_tokens,
        "append_eos": append_eos,
    }
    for name, flag in flags.items():
        check_type(name, flag, bool, "True or False")
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
    if num_proc is not None and not hasattr(dataset, "num_rows"):
        raise ValueError(
            f"num_proc is {num_proc}, and dataset is a stream, which one process reads: leave num_proc out"
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
                raise unknown_error(f"document {index}", tokenizer, find_unknown(text, tokenizer))
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


def encode_crops(
    read: Callable[[], Iterable[str]],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    name: str,
    cache_dir: str | None = None,
) -> TextCrops:
    """Encodes the text that `read` yields, which errors call `name`, and cuts it into stretches of `length` tokens."""
    tokens = encode_text(read, tokenizer, name, cache_dir)
    if len(tokens) < length:
        raise ValueError(
            f"{name} has {len(tokens)} tokens, and an example of this checkpoint has {length}: pass a longer text"
        )
    return TextCrops(tokens, length, len(tokenizer) - (tokenizer.mask_token_id == len(tokenizer) - 1))


def encode_text(
    read: Callable[[], Iterable[str]], tokenizer: PreTrainedTokenizerBase, name: str, cache_dir: str | None = None
) -> np.ndarray:
    """Returns the tokens `[n]` of a text as a memory-mapped file. What the tokenizer lacks raises an error.

    Args:
        read (`Callable`): Yields the text in parts, anew with each call.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer. Tokens of one that is Python code are in memory, as nothing
            tells whether the code has changed.
        name (`str`): Name of the text in errors.
        cache_dir (`str`, *optional*): Folder of the file. Defaults to the cache of `datasets`.
    """
    alphabet = find_tokenizer_alphabet(tokenizer)
    if alphabet is not None:
        lacking = sorted(set(scan_chunks(read())[1]) - set(alphabet))
        if lacking:
            raise unknown_error(name, tokenizer, lacking)
        return map_characters(read, alphabet, cache_dir)
    settings, dtype = tokenizer_settings(tokenizer), token_dtype(len(tokenizer))
    if settings is None:
        return np.concatenate(list(encode_parts(read(), tokenizer, name)))
    return map_tokens(read, lambda chunks: encode_parts(chunks, tokenizer, name), settings, dtype, cache_dir)


def encode_parts(chunks: Iterable[str], tokenizer: PreTrainedTokenizerBase, name: str) -> Iterator[np.ndarray]:
    """Yields the tokens of a text that comes in parts: put together, they are those of the whole text."""
    unknown = tokenizer.unk_token_id
    known: set[str] = set()  # characters that were found to have tokens
    for text in cut_between_words(chunks, tokenizer):
        ids = find_tokens(text, tokenizer)
        if ids is None:
            raise unknown_error(name, tokenizer, find_unknown(text, tokenizer))
        lacking = []
        if unknown is None or unknown in ids:
            new = set(text) - known
            lacking = find_lacking("".join(new), tokenizer)
            known |= new
        if lacking or unknown in ids:
            raise unknown_error(name, tokenizer, lacking or find_unknown(text, tokenizer))
        if tokenizer.mask_token_id in ids:
            raise ValueError(
                f"{name} contains {tokenizer.mask_token!r}, the mask token of the checkpoint, which data must not contain: "
                "remove it"
            )
        yield np.array(ids, dtype=token_dtype(len(tokenizer)))


def cut_between_words(chunks: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yields a text in parts which have the tokens that they have within the whole text.

    A tokenizer encodes each word of its pre-tokenizer by itself, so that a text is cut where a word of a local pre-tokenizer
    ends. The text of any other tokenizer stays whole.
    """
    kept: list[str] = []
    is_local = has_local_words(tokenizer)
    for chunk in chunks:
        place = find_cut(chunk, tokenizer) if is_local else None
        if place is None:
            kept.append(chunk)
        else:
            yield "".join([*kept, chunk[:place]])
            kept = [chunk[place:]]
    yield "".join(kept)


def has_local_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer has a pre-tokenizer, and all steps of it are in `LOCAL_PRE_TOKENIZERS`."""
    settings = tokenizer_settings(tokenizer)
    if settings is None:
        return False
    types = set(re.findall(r'"type": "(\w+)"', json.dumps(json.loads(settings[-1])["pre_tokenizer"])))
    return bool(types) and types <= LOCAL_PRE_TOKENIZERS


def find_cut(text: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns a place late in a text, before a space or a line break, where a cut changes no word and no token near it."""
    spaces = re.finditer(r"(?<=\S)[ \n](?=\S)", text[::-1])
    for place in islice((len(text) - space.end() for space in spaces if space.start() >= NUM_NEAR), NUM_PLACES):
        before, after = text[max(place - NUM_NEAR, 0) : place], text[place : place + NUM_NEAR]
        whole, first, second = (find_encoding(part, tokenizer) for part in (before + after, before, after))
        if whole is None or first is None or second is None or not first.input_ids or not second.input_ids:
            continue
        last, words = len(first.input_ids) - 1, whole.word_ids()
        if whole.input_ids == first.input_ids + second.input_ids and words[last] != words[last + 1]:
            return place
    return None


def encode_prompt(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens of a prompt. What the tokenizer does not know raises an error: it would be missing from the text."""
    unknown, ids = tokenizer.unk_token_id, find_tokens(prompt, tokenizer)
    if ids is not None and unknown is not None and unknown not in ids:
        return ids
    if ids is not None and unknown is None and is_known("".join(split_special(prompt, tokenizer)), tokenizer):
        return ids
    parts = find_unknown(prompt, tokenizer)
    if ids is not None and not parts:  # the prompt has the unknown token itself
        return ids
    raise unknown_error("the prompt", tokenizer, parts)


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The padding token of a tokenizer; `None` if it is the mask, which stands for a gap and is no state of some processes."""
    return None if tokenizer.pad_token_id == tokenizer.mask_token_id else tokenizer.pad_token_id


def find_tokens(text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = False) -> list[int] | None:
    """Returns the tokens of a text, or `None` if it has a word that a tokenizer without an unknown token lacks."""
    encoding = find_encoding(text, tokenizer, add_special_tokens)
    return None if encoding is None else encoding.input_ids


def find_encoding(
    text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = False
) -> BatchEncoding | None:
    """Returns the encoding of a text, or `None` if it has a word that a tokenizer without an unknown token lacks."""
    try:
        return tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
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
    return alphabet if find_tokens(alphabet, tokenizer) == list(range(len(alphabet))) else None


def find_lacking(text: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the characters of a text that a tokenizer does not know or, if it has no unknown token, drops."""
    found = (
        (character, find_tokens(character, tokenizer)) for character in sorted(set(text)) if not character.isspace()
    )
    unknown = tokenizer.unk_token_id
    # A character without tokens is part of a word that the tokenizer knows as a whole.
    return [part for part, ids in found if ids is not None and (not ids if unknown is None else unknown in ids)]


def find_unknown(text: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the words of a text that a tokenizer does not know, or the characters if these are its tokens."""
    stretches = split_special(text, tokenizer)
    parts = " ".join(stretches).split() if find_tokenizer_alphabet(tokenizer) is None else "".join(stretches)
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


def unknown_error(name: str, tokenizer: PreTrainedTokenizerBase, parts: list[str]) -> ValueError:
    """The error that lists the characters or words that a tokenizer does not know of a text, and those that it knows."""
    kind = "characters" if all(len(part) == 1 for part in parts) else "words"
    shown = " ".join(map(repr, parts[:NUM_NAMED]))
    shown += f" and {len(parts) - NUM_NAMED} more" if len(parts) > NUM_NAMED else ""
    characters = find_tokenizer_alphabet(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if characters is None and backend is not None and isinstance(backend.model, models.Unigram):
        characters = "".join(token.replace("\u2581", " ") for token in tokenizer.get_vocab() if len(token) == 1)
    known = f"; it knows {describe_alphabet(characters)}" if characters else ""
    gap = f"; {tokenizer.mask_token} is a gap of one token" if name == "the prompt" and tokenizer.mask_token else ""
    return ValueError(
        f"{name} has {kind} that the tokenizer does not know ({shown}): replace or remove them{known}{gap}"
    )


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
