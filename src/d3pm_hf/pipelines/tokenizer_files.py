# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Tokenizers from a folder, unless their files make a text grow beyond all measure."""

import base64
import binascii
import math
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..utils.checks import describe, is_number
from .networks import explain_failure


TOKENIZER_NAME = "tokenizer.json"
# How many times longer a tokenizer may make a text. Tokenizers of the Hub stay below 100.
MAX_GROWTH = 10_000
# Steps of a tokenizer that are a list of steps, by the name of the list.
STEP_LISTS = ("normalizers", "pretokenizers", "decoders")


def load_tokenizer(
    part: Path, cls: Any, settings: dict[str, dict], trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from its folder; `settings` are the JSON files of [`read_settings`]."""
    # tokenizers ends the process if it runs out of memory, and forty replacements of "a" by "aa" make a terabyte of one letter.
    steps = settings.get(TOKENIZER_NAME, {})
    encoding = text_growth(steps.get("normalizer")) * text_growth(steps.get("pre_tokenizer"))
    for step, growth in (("encode", encoding), ("decode", text_growth(steps.get("decoder")))):
        if growth > MAX_GROWTH:
            raise ValueError(
                f"{part / TOKENIZER_NAME} can make a text {growth:.1e} times longer to {step} it, and at most {MAX_GROWTH} times are "
                "allowed: do not trust this checkpoint"
            )
    with explain_failure(part):
        tokenizer = cls.from_pretrained(part, trust_remote_code=trust_remote_code, local_files_only=True)
        _ = tokenizer.all_special_ids  # an unknown token that is unknown itself is looked up forever
    if not is_number(tokenizer.model_max_length):
        raise ValueError(
            f"{part / 'tokenizer_config.json'} has model_max_length={describe(tokenizer.model_max_length)}: it must be a number"
        )
    return tokenizer


def text_growth(step: Any) -> float:
    """Upper bound on how many times longer a text becomes in a step of a tokenizer.

    Steps that add a few characters, or that change nothing when they are repeated, count as 1.
    """
    if not isinstance(step, dict):
        return 1
    for name in STEP_LISTS:
        if isinstance(step.get(name), list):
            return math.prod(map(text_growth, step[name]), start=1.0)
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = step.get("pattern"), step.get("content")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        size = float(len(content) if isinstance(content, str) else 0)
        # A regular expression, or an empty text, may match between any two characters.
        return max(1, size / len(text)) if isinstance(text, str) and text else 1 + size
    if kind == "Precompiled":
        return max(1, longest_replacement(step.get("precompiled_charsmap")))
    # Bytes become characters of up to two bytes, and the others replace a text, which may be empty, by a space.
    return 2 if kind in ("ByteLevel", "BPEDecoder", "CTC") else 1


def longest_replacement(charsmap: Any) -> int:
    """Number of bytes of the longest text that a map of characters of sentencepiece replaces one by.

    The map is the size of a trie in four bytes, the trie, and the texts, each with a zero behind it.
    """
    try:
        data = base64.b64decode(charsmap)
    except (TypeError, ValueError, binascii.Error):
        return 1  # tokenizers refuses it
    start = 4 + int.from_bytes(data[:4], "little")
    return max(map(len, data[start:].split(b"\0")))
