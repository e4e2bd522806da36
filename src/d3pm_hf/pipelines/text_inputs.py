# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The rows of text that a call samples, out of its prompts or tokens, and the texts that it returns."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from ..models.denoisers import Denoiser
from ..models.text_denoisers import TextDenoiser, num_positions
from ..numerics import ShortRow
from ..utils.checks import check_int, check_integers, check_type, describe
from ..utils.modules import without_compilation


@dataclass(frozen=True)
class TextInputs:
    """The rows that a call samples, `[B, N]`; one row stands for all of the batch.

    Args:
        length (`int`): Number of tokens N.
        tokens (`torch.LongTensor` of shape `[B, N]`, *optional*): Tokens that are known or given.
        is_known (`torch.BoolTensor` of shape `[B, N]`, *optional*): Where they are data of the process.
        is_given (`torch.BoolTensor` of shape `[B, N]`, *optional*): Where they are outside of it.
        is_attended (`torch.BoolTensor` of shape `[B, N]`, *optional*): False at the padding behind shorter rows.
        is_new (`torch.BoolTensor` of shape `[B, N]`, *optional*): Where a prompt is continued.
    """

    length: int
    tokens: Any = None
    is_known: Any = None
    is_given: Any = None
    is_attended: Any = None
    is_new: Any = None

    def add_attention_mask(self, condition: dict | None) -> dict:
        """The condition of the denoiser, with the attention mask of padded rows."""
        if "attention_mask" in (condition or {}):
            raise ValueError(
                "condition has an attention_mask, and the rows are padded: pass `input_ids` and `attention_mask` as "
                "arguments of the call"
            )
        return {**(condition or {}), "attention_mask": self.is_attended.long()}

    def shorten_rows(self, generator, num_samples: int):
        """A list of generators whose rows draw without their padding, what they draw alone; any other as it is."""
        if not isinstance(generator, (list, tuple)):
            return generator
        lengths = self.repeat_rows(self.is_attended, num_samples).sum(1).tolist()
        if len(generator) != len(lengths):
            return generator  # `sample_states` says what is wrong
        return [one if n == self.length else ShortRow(one, n) for one, n in zip(generator, lengths)]

    @staticmethod
    def repeat_rows(mask: torch.Tensor, num_samples: int) -> torch.Tensor:
        """The rows of a mask `[B, N]`, each as often as it has samples: `[num_samples, N]`."""
        return mask.repeat_interleave(num_samples // len(mask), dim=0)


def prepare_inputs(
    pipeline: Any,
    prompt: str | list[str] | None,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    mask: torch.Tensor | None,
    sequence_length: int | None,
    max_new_tokens: int | None,
    start_timestep: int | None,
) -> TextInputs:
    """Encodes the text of a call of a text pipeline: which of its tokens are known, given, padding and to be drawn."""
    default_length = pipeline.config.sequence_length if sequence_length is None else sequence_length
    check_int("sequence_length", default_length, 1)
    check_combination(prompt, input_ids, attention_mask, mask, sequence_length, max_new_tokens, start_timestep)
    device, num_new, width = pipeline._execution_device, max_new_tokens or 0, None
    if prompt is None and input_ids is None:
        if not pipeline.num_special_tokens:
            check_lengths(pipeline, [default_length], None)
            return TextInputs(default_length)
        prompt = ""  # the special tokens alone

    # 1. The tokens of each row, and the position at which it is continued.
    if input_ids is not None:
        row_lengths = attended_lengths(attention_mask, input_ids)
        new = input_ids.new_zeros(num_new)
        rows = [(torch.cat([row[:length], new]).cpu(), length) for row, length in zip(input_ids, row_lengths)]
        width = input_ids.shape[1] if max_new_tokens is None else None
    else:
        rows = encode_rows(pipeline, prompt, default_length if prompt == "" else sequence_length, max_new_tokens)
    lengths = [len(row) for row, _ in rows]
    check_lengths(pipeline, lengths, max_new_tokens)

    # 2. One tensor `[B, N]`, with padding behind shorter rows.
    tokens = torch.full((len(rows), max(lengths) if width is None else width), pipeline.padding_token_id)
    for i, (row, _) in enumerate(rows):
        tokens[i, : len(row)] = row
    position, start = torch.arange(tokens.shape[1]), torch.tensor([start for _, start in rows])[:, None]
    is_attended = position < torch.tensor(lengths)[:, None]
    if not is_attended.all():
        check_reads_mask(pipeline.denoiser)
    is_new = (position >= start) & (position < start + num_new)
    is_gap = is_attended & (find_gaps(pipeline, tokens, mask) | is_new)
    tokens = tokens.masked_fill(is_gap, 0)
    pipeline.scheduler.check_states(tokens)
    if start_timestep is not None and is_gap.any():
        raise ValueError("a text with gaps cannot be corrupted: pass one without, or leave out start_timestep")

    # 3. Outside of the process are padding, special tokens, and a prompt that is continued.
    is_given = ~is_gap
    if max_new_tokens is None:
        special = torch.tensor(pipeline.special_token_ids, dtype=torch.long)
        is_given = is_given & (~is_attended | torch.isin(tokens, special))
    is_known = ~is_gap & ~is_given
    is_infilled = max_new_tokens is None and start_timestep is None and is_known.any()
    return TextInputs(
        tokens.shape[1],
        tokens.to(device),
        is_known=is_known.to(device) if is_infilled else None,
        is_given=is_given.to(device) if is_given.any() else None,
        is_attended=None if is_attended.all() else is_attended.to(device),
        is_new=None if max_new_tokens is None else is_new.to(device),
    )


def encode_rows(
    pipeline, prompt, sequence_length: int | None, max_new_tokens: int | None
) -> list[tuple[torch.Tensor, int]]:
    """The rows of all prompts, each with the position at which it is continued."""
    if max_new_tokens is None and (sequence_length is not None or pipeline.scheduler.family.is_autoregressive):
        return [(row, 0) for row in pipeline.encode(prompt, sequence_length)]
    before, after = pipeline.surrounding_tokens
    new, rows = [0] * (max_new_tokens or 0), pipeline.tokenize(prompt)
    if not all(before + row + new + after for row in rows):
        raise ValueError("a prompt has no tokens: write some, or pass `max_new_tokens` or `sequence_length`")
    return [(torch.tensor(before + row + new + after), len(before + row)) for row in rows]


def find_gaps(pipeline, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The positions to fill in: `mask`, or by default those of the mask token."""
    if mask is not None:
        check_type("mask", mask, torch.Tensor, "a tensor with the shape of the tokens")
        if tuple(mask.shape) != tuple(tokens.shape):
            raise ValueError(f"mask has the shape {tuple(mask.shape)}, and the tokens {tuple(tokens.shape)}")
        return mask.bool().cpu()
    gap = pipeline.gap_token_id
    return torch.zeros_like(tokens, dtype=torch.bool) if gap is None else tokens == gap


def finish_texts(
    pipeline: Any, sequences: torch.Tensor, inputs: TextInputs, return_full_text: bool, with_texts: bool
) -> tuple[torch.Tensor, list[str] | None]:
    """Samples `[B, N]` with padding behind the end of each continuation, and the texts up to there, if asked for.

    Without `return_full_text`, a text is what comes after the prompt.
    """
    is_continued = inputs.is_new is not None
    has_ends = is_continued or pipeline.config.get("ends_with_eos", False)
    if inputs.is_attended is None and not has_ends:
        return sequences, pipeline.decode(sequences) if with_texts else None
    is_text = may_end = torch.ones_like(sequences, dtype=torch.bool)
    if inputs.is_attended is not None:
        is_text = inputs.repeat_rows(inputs.is_attended, len(sequences))
    if is_continued:
        may_end = inputs.repeat_rows(inputs.is_new, len(sequences))
    if has_ends and pipeline.end_token_id is not None:
        is_end = (sequences == pipeline.end_token_id) & may_end
        num_ends = is_end.cumsum(1)  # [B, N]
        is_text = is_text & ~(may_end & (num_ends > 0))
        is_behind = may_end & (num_ends > is_end)
        sequences = sequences.masked_fill(is_behind, pipeline.padding_token_id)
    if not with_texts:
        return sequences, None
    rows = [row[kept] for row, kept in zip(sequences.cpu(), is_text.cpu())]  # without what comes after the end
    texts = [decode_row(pipeline, row) for row in rows]
    if is_continued and not return_full_text:
        for i, start in enumerate(may_end.long().argmax(1).tolist()):
            prompt = decode_row(pipeline, rows[i][:start])
            # A piece of a word has no space before it only where it is decoded with the piece that it continues.
            texts[i] = (
                texts[i][len(prompt) :] if texts[i].startswith(prompt) else decode_row(pipeline, rows[i][start:])
            )
    return sequences, texts


def decode_row(pipeline, tokens: torch.Tensor) -> str:
    """The text of tokens `[n]`, of which there may be none."""
    return pipeline.decode(tokens[None])[0] if len(tokens) else ""


def check_combination(
    prompt, input_ids, attention_mask, mask, sequence_length, max_new_tokens, start_timestep
) -> None:
    """Checks which arguments of a call come together."""
    if prompt is not None and input_ids is not None:
        raise ValueError("got prompt and input_ids: pass one of the two")
    if attention_mask is not None and input_ids is None:
        raise ValueError("attention_mask says which `input_ids` are padding: pass both; prompts need none")
    if max_new_tokens is not None:
        check_int("max_new_tokens", max_new_tokens, 1)
        if prompt is None and input_ids is None:
            raise ValueError(
                f"max_new_tokens is {max_new_tokens}, and there is no prompt to continue: pass `prompt` or `input_ids`, or "
                "`sequence_length` for texts without a prompt"
            )
        others = {"sequence_length": sequence_length, "mask": mask, "start_timestep": start_timestep}
        for name, value in others.items():
            if value is not None:
                raise ValueError(f"got max_new_tokens and {name}: pass one of the two")
    if prompt is None and input_ids is None and (mask is not None or start_timestep is not None):
        raise ValueError("infilling and reconstruction need a text: pass `prompt` or `input_ids`")


def check_lengths(pipeline, lengths: list[int], max_new_tokens: int | None) -> None:
    """Checks that the network has a position for each token, and an autoregressive process a timestep."""
    longest, positions, num_timesteps = max(lengths), num_positions(pipeline.denoiser.network), len(pipeline.scheduler)
    added = "" if max_new_tokens is None else f", {max_new_tokens} of them new"
    if positions is not None and longest > positions:
        raise ValueError(
            f"a text has {longest} tokens{added}, and the network has {positions} positions: shorten it"
            + ("" if max_new_tokens is None else ", or pass a smaller max_new_tokens")
        )
    if pipeline.scheduler.family.is_autoregressive and {*lengths} != {num_timesteps}:
        wrong = next(length for length in lengths if length != num_timesteps)
        raise ValueError(
            f"a text has {wrong} tokens{added}, and the autoregressive process has {num_timesteps} timesteps, one for each "
            f"token: make all texts {num_timesteps} tokens long, prompt and continuation together"
        )


def check_reads_mask(denoiser: Denoiser) -> None:
    """Checks that a denoiser takes an `attention_mask`, and so does the network that a [`TextDenoiser`] passes it on to."""
    for module in (denoiser, denoiser.network) if isinstance(denoiser, TextDenoiser) else (denoiser,):
        original = without_compilation(module)
        parameters = inspect.signature(original.forward).parameters.values()
        if not any(one.name == "attention_mask" or one.kind is one.VAR_KEYWORD for one in parameters):
            raise ValueError(
                f"texts of unequal lengths are padded, and forward of {type(original).__name__} takes no attention_mask to hide "
                "the padding with: give it one, or pass texts of one length"
            )


def attended_lengths(attention_mask: torch.Tensor | None, input_ids: torch.Tensor) -> list[int]:
    """Number of tokens in front of the padding of each row, for an attention mask of the shape of `input_ids`."""
    check_integers("input_ids", input_ids, "[B, N]")
    if not input_ids.numel():
        raise ValueError(f"input_ids are {describe(input_ids)}: pass at least one token")
    if attention_mask is None:
        return [input_ids.shape[1]] * len(input_ids)
    check_type("attention_mask", attention_mask, torch.Tensor, "a tensor with the shape of input_ids")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}, and input_ids {tuple(input_ids.shape)}: pass one "
            "number for each token"
        )
    is_attended = attention_mask.bool().cpu()
    if not torch.equal(is_attended.to(attention_mask.dtype), attention_mask.cpu()):
        raise ValueError("attention_mask has numbers other than 0 and 1: pass 1 for tokens and 0 for padding")
    has_gap = (is_attended[:, 1:] & ~is_attended[:, :-1]).any(1)
    if has_gap.any():
        raise ValueError(
            f"attention_mask has a 0 before a 1 in row {int(has_gap.nonzero()[0])}: put the padding behind the tokens "
            "(`tokenizer.padding_side = 'right'`)"
        )
    lengths = is_attended.sum(1).tolist()
    if 0 in lengths:
        raise ValueError(f"attention_mask has no 1 in row {lengths.index(0)}: leave out rows without tokens")
    return lengths
