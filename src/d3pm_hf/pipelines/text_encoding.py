# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Between texts and tokens: prompts, and the special tokens in and around them."""

from typing import Any

import torch

from ..data.collator import padding_token
from ..data.encoding import encode_prompt
from ..utils.checks import check_int, check_type, describe
from ..utils.panics import explain_panic


BROKEN_TOKENIZER = "the tokenizer fails on this text"


class TextEncodingMixin:
    """Gives a text pipeline `encode` and `decode`."""

    config: Any
    scheduler: Any
    tokenizer: Any
    _execution_device: torch.device

    def encode(self, prompt: str | list[str], sequence_length: int | None = None) -> torch.Tensor:
        """Encodes prompts as tokens `[B, N]`. Gaps, and everything after a shorter prompt, are the mask token.

        With `add_special_tokens`, those of the tokenizer are put around the prompt and what is continued.
        """
        if sequence_length is not None:
            check_int("sequence_length", sequence_length, 1)
        rows = self.tokenize(prompt)
        if sequence_length is None and self.scheduler.family.is_autoregressive:  # its number of tokens is fixed
            sequence_length = len(self.scheduler)
        num_added = self.num_special_tokens
        lengths = sorted({len(row) + num_added for row in rows})
        if sequence_length is None and len(lengths) > 1:
            raise ValueError(
                f"the prompts have between {lengths[0]} and {lengths[-1]} tokens: encode them one by one, or pass "
                "`sequence_length` to have gaps after the shorter ones"
            )
        length = lengths[-1] if sequence_length is None else sequence_length
        if lengths[-1] > length or not length:
            raise ValueError(f"a prompt has {lengths[-1]} tokens, and sequence_length is {length}: make it longer")
        gap = self.gap_token_id
        if gap is None and lengths[0] < length:
            raise ValueError("the tokenizer has no mask token to mark gaps with: give it one, or pass `input_ids`")
        before, after = self.surrounding_tokens
        return torch.tensor([before + row + [gap] * (length - num_added - len(row)) + after for row in rows])

    def tokenize(self, prompt: str | list[str]) -> list[list[int]]:
        """The tokens of each prompt, without special tokens around them."""
        if self.tokenizer is None:
            raise ValueError("this pipeline has no tokenizer: pass `input_ids` in place of `prompt`")
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompts, (list, tuple)) or not prompts or not all(isinstance(one, str) for one in prompts):
            raise ValueError(f"prompt is {prompt!r}: pass a string or a list of at least one string")
        with explain_panic(BROKEN_TOKENIZER):
            return [encode_prompt(one, self.tokenizer) for one in prompts]

    def decode(self, sequences: torch.Tensor) -> list[str]:
        """Decodes tokens `[B, N]` to text."""
        if self.tokenizer is None:
            raise ValueError("this pipeline has no tokenizer: pass output_type='latent'")
        check_type("sequences", sequences, torch.Tensor, "a `torch.LongTensor` of shape [B, N]")
        if sequences.dtype != torch.long or sequences.ndim != 2 or not sequences.numel():
            raise ValueError(f"sequences are {describe(sequences)}: they must be a `torch.LongTensor` of shape [B, N]")
        low, high = sequences.min().item(), sequences.max().item()
        if low < 0 or high >= len(self.tokenizer):
            raise ValueError(
                f"sequences hold the token {low if low < 0 else high}: the tokenizer has those from 0 to {len(self.tokenizer) - 1}"
            )
        with explain_panic("the tokenizer fails on these tokens"):
            return self.tokenizer.batch_decode(sequences.tolist(), skip_special_tokens=True)

    @property
    def gap_token_id(self) -> int | None:
        """Token that marks a gap: the mask of the tokenizer, or that of the process if the tokenizer has none."""
        mask = None if self.tokenizer is None else self.tokenizer.mask_token_id
        return self.scheduler.gap_token_id if mask is None else mask

    @property
    def end_token_id(self) -> int | None:
        """Token that ends a text: the end-of-sequence token of the tokenizer, if the process can produce it."""
        end = None if self.tokenizer is None else self.tokenizer.eos_token_id
        is_data = end is not None and end < self.scheduler.config.num_classes and end not in self.scheduler.never_data
        return end if is_data else None

    @property
    def padding_token_id(self) -> int:
        """Token behind the end of a text: that for padding, or for the end, of the tokenizer; or else that of a gap."""
        candidates = [self.gap_token_id]
        if self.tokenizer is not None:
            candidates = [padding_token(self.tokenizer), self.tokenizer.eos_token_id, *candidates]
        num_classes = self.scheduler.config.num_classes
        return next((token for token in candidates if token is not None and token < num_classes), 0)

    @property
    def special_token_ids(self) -> list[int]:
        """Tokens that are no data: those that the process cannot produce, and those that the tokenizer puts around a text."""
        special = set(self.scheduler.never_data)
        if self.num_special_tokens:
            special.update(self.tokenizer.all_special_ids)
        return sorted(special - {self.gap_token_id})

    @property
    def num_special_tokens(self) -> int:
        """Number of special tokens that stand around a text."""
        return self.tokenizer.num_special_tokens_to_add() if self.config.get("add_special_tokens") else 0

    @property
    def surrounding_tokens(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before a text, and those that it puts after it."""
        if not self.num_special_tokens:
            return [], []
        mask, token = self.tokenizer.mask_token, self.tokenizer.mask_token_id
        with explain_panic(BROKEN_TOKENIZER):
            template = [] if mask is None else self.tokenizer(mask).input_ids
        if template.count(token) != 1 or len(template) != 1 + self.num_special_tokens:
            raise ValueError(
                f"the tokenizer reads its mask token {mask!r} as {template}, which does not tell where a text stands among "
                "the special tokens: pass `input_ids` with the special tokens in place of `prompt`"
            )
        place = template.index(token)
        return template[:place], template[place + 1 :]
