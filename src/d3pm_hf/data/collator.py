# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Examples of unequal length as batches: the data, what is attended to, what is scored, and a condition."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from ..utils.checks import check_choice, check_int, check_str, check_type
from .batches import read_example
from .encoding import padding_token


PADDINGS = ("longest", "max_length")


@dataclass
class DataCollatorForD3PM:
    """Makes a batch of examples. Texts of unequal length are padded on the right.

    An example is a tensor x_0, or a dictionary with
    - x_0, a list or tensor of states, as `"x_0"` or `"input_ids"`;
    - `"loss_mask"`, *optional*: true where an element is scored. `"labels"` of transformers do as well: -100 where an
      element is not scored, and x_0 elsewhere. What is not scored is known: it is not noised, and the network sees it;
    - `"attention_mask"`, *optional*: zero at padding, which is never scored;
    - `label_column`, *optional*: a class, which becomes the condition `class_labels`;
    - `"condition"`, *optional*: a dictionary of further arguments of the denoiser.

    A batch has `"x_0"` `[B, ...]`; for text in dictionaries, and wherever the examples say it, `"loss_mask"` `[B, ...]`;
    `"attention_mask"` `[B, N]` if the examples have one or a text is padded; and `"condition"` if there is one.

    Args:
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer whose padding token, and end of text, are put in. Padding
            is state 0 without one.
        padding (`str`, defaults to `"longest"`): Length that texts are padded to: `"longest"` of the batch, or `"max_length"`.
        max_length (`int`, *optional*): Number of tokens of the longest text that is allowed.
        pad_to_multiple_of (`int`, *optional*): Number that the length of a batch is a multiple of.
        fill_with_eos (`bool`, defaults to `False`): Whether texts are filled up to `max_length` with the end of text, which
            is data: it is attended to and scored, so that the network learns where a text ends.
        label_column (`str`, *optional*): Column of the class of an example.

    Examples:
        ```python
        from d3pm_hf import character_tokenizer
        from d3pm_hf.data import DataCollatorForD3PM

        collator = DataCollatorForD3PM(character_tokenizer())
        batch = collator([{"input_ids": [0, 1, 2]}, {"input_ids": [3, 4], "labels": [-100, 4]}])
        assert batch["loss_mask"].tolist() == [[True, True, True], [False, True, False]]
        ```
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    padding: str = "longest"
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    fill_with_eos: bool = False
    label_column: str | None = None

    def __post_init__(self):
        if self.tokenizer is not None:
            check_type("tokenizer", self.tokenizer, PreTrainedTokenizerBase, "a tokenizer of transformers")
        check_choice("padding", self.padding, PADDINGS)
        for name in ("max_length", "pad_to_multiple_of"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        check_type("fill_with_eos", self.fill_with_eos, bool, "True or False")
        if self.label_column is not None:
            check_str("label_column", self.label_column)
        if self.max_length is None and (self.padding == "max_length" or self.fill_with_eos):
            raise ValueError(
                "padding='max_length' and fill_with_eos=True need a length to pad texts to: pass max_length"
            )
        if self.fill_with_eos and (self.tokenizer is None or self.tokenizer.eos_token_id is None):
            raise ValueError(
                "fill_with_eos is True, and there is no tokenizer with an end of text: give it one "
                "(`tokenizer.add_special_tokens({'eos_token': ...})`), or leave fill_with_eos False"
            )

    def __call__(self, examples: list) -> dict:
        """The batch of `examples`."""
        check_type("examples", examples, (list, tuple), "a list of examples")
        if not examples:
            raise ValueError("examples is empty: pass at least one")
        rows = [read_example(example, self.label_column) for example in examples]
        shapes = {tuple(row["x_0"].shape) for row in rows}
        is_text = all(len(shape) == 1 for shape in shapes)
        if is_text and all(isinstance(example, Mapping) for example in examples):
            rows = self._pad(rows)
        elif len(shapes) > 1:
            raise ValueError(
                f"the examples have the shapes {', '.join(map(str, sorted(shapes)))}: pass data of one shape, or texts of "
                "unequal length as dictionaries with input_ids"
            )
        return _stack(rows)

    def _pad(self, rows: list[dict]) -> list[dict]:
        """Texts with the length of the batch, and masks of what is scored."""
        longest = max(len(row["x_0"]) for row in rows)
        if self.max_length is not None and longest > self.max_length:
            raise ValueError(
                f"a text has {longest} tokens, and max_length is {self.max_length}: cut or pack the texts "
                "(`d3pm_hf.data.tokenize`), or pass a larger max_length if the network has the positions"
            )
        length = longest
        if self.max_length is not None and (self.fill_with_eos or self.padding == "max_length"):
            length = self.max_length
        if self.fill_with_eos and self.tokenizer is not None:
            rows = [_fill(row, length, self.tokenizer.eos_token_id) for row in rows]
        if self.pad_to_multiple_of is not None:
            length = -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of
        pad = None if self.tokenizer is None else padding_token(self.tokenizer)
        is_padded = any(len(row["x_0"]) < length or "attention_mask" in row for row in rows)
        padded = []
        for row in rows:
            ones = torch.ones_like(row["x_0"])
            attended, scored = row.get("attention_mask", ones), row.get("loss_mask", ones.bool())
            missing = (0, length - len(ones))
            row = {
                **row,
                "x_0": torch.nn.functional.pad(row["x_0"], missing, value=pad or 0),
                "loss_mask": torch.nn.functional.pad(scored & attended.bool(), missing),
            }
            if is_padded:
                row["attention_mask"] = torch.nn.functional.pad(attended, missing)
            padded.append(row)
        return padded


def _fill(row: dict, length: int, eos: int) -> dict:
    """A text with the end of text behind it, up to `length`. All of it is attended to, and what is filled in is scored."""
    if not row.get("attention_mask", torch.ones(1)).all():
        raise ValueError("attention_mask has zeros, and fill_with_eos is True: pass texts without padding")
    missing = (0, length - len(row["x_0"]))
    scored = row.get("loss_mask", torch.ones_like(row["x_0"], dtype=torch.bool))
    row = {key: value for key, value in row.items() if key != "attention_mask"}
    pad = torch.nn.functional.pad
    return {**row, "x_0": pad(row["x_0"], missing, value=eos), "loss_mask": pad(scored, missing, value=True)}


def _stack(rows: list[dict]) -> dict:
    """One tensor of each entry of the rows, which must have the same entries."""
    batch: dict = {}
    for name in rows[0]:
        if any(row.keys() != rows[0].keys() for row in rows):
            found = ", ".join(sorted({repr(key) for row in rows for key in row}))
            raise ValueError(f"some examples have the entries {found} and some do not: give all of them the same ones")
        values = [row[name] for row in rows]
        batch[name] = _stack(values) if isinstance(values[0], dict) else torch.stack(values)
    return batch
