# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Texts of a data set as tokens: each document for itself, or packed into rows of equal length."""

from itertools import chain

from transformers import PreTrainedTokenizerBase

from ..utils.checks import check_int, check_str, check_type, describe
from .encoding import unknown_error


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
            try:
                row = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids + ends
            except Exception as error:
                if type(error) is not Exception:  # tokenizers has no class of its own for this
                    raise
                raise unknown_error(text, tokenizer, f"document {index}") from error
            if max_length is not None and not packing and len(row) > max_length:
                if not truncation:
                    raise ValueError(
                        f"document {index} has {len(row)} tokens, and max_length is {max_length}: pass truncation=True to cut "
                        "it, packing=True to spread it over rows, or a larger max_length if the network has the positions"
                    )
                row = _cut(row, text, tokenizer, max_length, add_special_tokens)
            rows.append(row)
        return {"input_ids": pack(rows, max_length) if packing and max_length else rows}

    options: dict = {} if num_proc is None else {"num_proc": num_proc}
    dropped = columns if packing else [text_column]
    return dataset.map(encode, batched=True, with_indices=True, remove_columns=dropped, **options)


def _cut(row: list[int], text: str, tokenizer: PreTrainedTokenizerBase, length: int, special: bool) -> list[int]:
    """The first tokens of a document, with its special tokens. Its end was cut off, so that no end of text follows."""
    if not special:
        return row[:length]
    return tokenizer(text, add_special_tokens=True, truncation=True, max_length=length, verbose=False).input_ids


def pack(rows: list[list[int]], length: int) -> list[list[int]]:
    """Documents joined, and cut into rows of `length` tokens. What does not fill a row is left out."""
    tokens = list(chain.from_iterable(rows))
    return [tokens[first : first + length] for first in range(0, len(tokens) - length + 1, length)]
