# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Texts and tokens as batches of what is given and what is scored."""

import torch
from diffusers import DiffusionPipeline

from ..data.collator import DataCollatorForD3PM
from ..models.text_denoisers import num_positions
from ..utils.checks import describe


def is_texts(data) -> bool:
    """Whether `data` are texts: a string, or a list of at least one."""
    is_list = isinstance(data, (list, tuple)) and len(data) > 0
    return isinstance(data, str) or (is_list and all(isinstance(one, str) for one in data))


# The tokens of a text: those that are given before the scored ones, the scored ones, and those that are given after them.
Row = tuple[list[int], list[int], list[int]]


def whole_texts(pipeline: DiffusionPipeline, name: str, texts) -> list[Row]:
    """Rows of [`text_batches`] of which nothing is given: all tokens of each text, of which there is at least one."""
    rows = as_token_rows(pipeline, name, texts)
    if not all(rows):
        raise ValueError(f"{name} number {rows.index([])} has no tokens: leave it out")
    return [([], row, []) for row in rows]


def as_token_rows(pipeline: DiffusionPipeline, name: str, value) -> list[list[int]]:
    """The tokens of each entry of `value`: a text or several, a tensor `[n]` or `[B, n]`, or a list of tensors or lists `[n]`."""
    if pipeline.task != "text-generation":
        raise ValueError(f"{name} are texts, and the pipeline is a {type(pipeline).__name__}: pass tensors of states")
    if is_texts(value):
        rows = pipeline.tokenize([value] if isinstance(value, str) else list(value))
    elif isinstance(value, torch.Tensor) and value.dtype == torch.long and value.ndim in (1, 2):
        rows = value.tolist() if value.ndim == 2 else [value.tolist()]
    elif isinstance(value, (list, tuple)) and value and all(isinstance(one, (torch.Tensor, list)) for one in value):
        rows = [one.tolist() if isinstance(one, torch.Tensor) else one for one in value]
    else:
        rows = [[None]]
    if any(type(token) is not int for row in rows for token in row):
        raise ValueError(
            f"{name} is {describe(value)}: pass a string, a list of strings, or tokens as a `torch.LongTensor` of shape [n] or "
            "[B, n] or a list of these"
        )
    gap = pipeline.gap_token_id
    for index, row in enumerate(rows):
        if gap in row:
            raise ValueError(
                f"{name} number {index} holds the mask token {gap}, which stands for a gap: pass texts without gaps"
            )
    return rows


def text_batches(pipeline: DiffusionPipeline, rows: list[Row], batch_size: int) -> tuple[list[dict], list[int]]:
    """Batches of rows, of similar length in each, and the place of each row of `rows` among those of the batches.

    Args:
        pipeline: Pipeline whose special tokens stand around each row, and are given.
        rows: The tokens of each text that are given, those after them that are scored, and those after these that are given.
        batch_size: Number of rows in a batch.
    """
    before, after = pipeline.surrounding_tokens
    positions = num_positions(pipeline.denoiser.network)
    examples = []
    for given, scored, given_after in rows:
        tokens = before + given + scored + given_after + after
        if positions is not None and len(tokens) > positions:
            parts = (
                f"a context of {len(given)} tokens and {len(scored)} after it"
                if given
                else f"a text of {len(scored)} tokens"
            )
            added = f", {len(before + after)} special tokens around them" if before + after else ""
            raise ValueError(
                f"got {parts}{added}, and the network has {positions} positions: cut the {'start of the context' if given else 'text'}"
            )
        is_scored = [False] * len(before + given) + [True] * len(scored) + [False] * len(given_after + after)
        examples.append({"input_ids": tokens, "loss_mask": is_scored})
    indices = sorted(range(len(rows)), key=lambda i: len(examples[i]["input_ids"]))
    collator = DataCollatorForD3PM(pipeline.tokenizer)
    batches = [
        collator([examples[i] for i in indices[first : first + batch_size]])
        for first in range(0, len(indices), batch_size)
    ]
    return batches, sorted(range(len(rows)), key=lambda place: indices[place])


def check_length(pipeline: DiffusionPipeline, x_0: torch.Tensor) -> None:
    """Checks that the network has a position for each token of texts `[B, N]`."""
    positions = num_positions(pipeline.denoiser.network) if x_0.ndim == 2 else None
    if positions is not None and x_0.shape[1] > positions:
        raise ValueError(f"a text has {x_0.shape[1]} tokens, and the network has {positions} positions: cut the text")
