# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Between texts and states: prompts, their gaps and the special tokens around them."""

from typing import Any

import torch

from ..utils.checks import check_int, check_type, describe


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
        if self.tokenizer is None:
            raise ValueError("this pipeline has no tokenizer: pass `input_ids` in place of `prompt`")
        if sequence_length is not None:
            check_int("sequence_length", sequence_length, 1)
        elif self.scheduler.family.is_autoregressive:  # its number of tokens is fixed
            sequence_length = len(self.scheduler)
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompts, (list, tuple)) or not prompts or not all(isinstance(one, str) for one in prompts):
            raise ValueError(f"prompt is {prompt!r}: pass a string or a list of at least one string")
        try:
            rows = [self.tokenizer(one, add_special_tokens=False).input_ids for one in prompts]
        except Exception as error:
            if type(error) is not Exception:  # tokenizers has no class of its own for this
                raise
            raise ValueError(
                f"the prompt has characters that the tokenizer does not know ({error}): use those of its vocabulary"
            ) from error
        num_added = self.num_special_tokens
        lengths = sorted({len(row) + num_added for row in rows})
        if sequence_length is None and len(lengths) > 1:
            raise ValueError(
                f"the prompts have between {lengths[0]} and {lengths[-1]} tokens: write their gaps out to one length, or "
                "pass `sequence_length` to have all of them continued to it"
            )
        length = lengths[-1] if sequence_length is None else sequence_length
        if lengths[-1] > length or not length:
            raise ValueError(f"a prompt has {lengths[-1]} tokens, and sequence_length is {length}: make it longer")
        gap = self.gap_token_id
        if gap is None and lengths[0] < length:
            raise ValueError("the tokenizer has no mask token to mark gaps with: give it one, or pass `input_ids`")
        return torch.stack([self._surround(row + [gap] * (length - num_added - len(row))) for row in rows])

    @property
    def gap_token_id(self) -> int | None:
        """Token that marks a gap: the mask of the tokenizer, or that of the process if the tokenizer has none."""
        mask = None if self.tokenizer is None else self.tokenizer.mask_token_id
        return self.scheduler.gap_token_id if mask is None else mask

    @property
    def num_special_tokens(self) -> int:
        """Number of special tokens that stand around a text."""
        return self.tokenizer.num_special_tokens_to_add() if self.config.get("add_special_tokens") else 0

    def _surround(self, tokens: list[int]) -> torch.Tensor:
        """Tokens `[N]` with the special tokens around them, where the tokenizer puts them."""
        if not self.num_special_tokens:
            return torch.tensor(tokens)
        mask = self.tokenizer.mask_token
        template = torch.tensor(self.tokenizer(mask * len(tokens)).input_ids)
        places = template == self.tokenizer.mask_token_id
        if places.sum() != len(tokens):
            raise ValueError(
                f"the tokenizer reads {len(tokens)} times {mask!r} as {int(places.sum())} mask tokens: pass `input_ids` with the "
                "special tokens in place of `prompt`"
            )
        template[places] = torch.tensor(tokens)
        return template

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
        return self.tokenizer.batch_decode(sequences.tolist(), skip_special_tokens=True)

    def encode_known(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, start_timestep: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tokens `[B, N]`, 0 in their gaps, and where they are kept: `None` if they are to be reconstructed."""
        if not isinstance(input_ids, torch.Tensor) or input_ids.dtype != torch.long or input_ids.ndim != 2:
            raise ValueError(f"input_ids are {describe(input_ids)}: pass a `torch.LongTensor` of shape [B, N]")
        input_ids = input_ids.to(self._execution_device)
        gaps = self._find_gaps(input_ids, mask)
        known = input_ids.masked_fill(gaps, 0)
        self.scheduler.check_states(known)
        if start_timestep is not None and gaps.any():
            raise ValueError("a text with gaps cannot be corrupted: pass one without, or leave out start_timestep")
        return known, ~gaps if start_timestep is None else None

    def _find_gaps(self, input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The positions to fill in: `mask`, or by default those of the mask token."""
        if mask is not None:
            check_type("mask", mask, torch.Tensor, "a tensor with the shape of the tokens")
            if tuple(mask.shape) != tuple(input_ids.shape):
                raise ValueError(f"mask has the shape {tuple(mask.shape)}, and the tokens {tuple(input_ids.shape)}")
            return mask.bool().to(input_ids.device)
        gap = self.gap_token_id
        return torch.zeros_like(input_ids, dtype=torch.bool) if gap is None else input_ids == gap
