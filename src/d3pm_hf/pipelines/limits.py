# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Limits on the size of a network and of texts: a file of a few bytes must not take hours, or all memory.

Every layer of a network has tensors, and the weights hold them. A configuration that asks for many more layers than the
weights hold tensors is wrong, and is refused before the layers are built. Buffers that are not part of the weights have a
limit of their own. So has the length that the steps of a tokenizer can give to a text.
"""

import base64
import binascii
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..hub.layout import read_json
from ..utils.checks import describe, is_number


# Settings that count what is built one by one: `num_hidden_layers`, `layers_per_block`, `depth`, `num_labels`, ...
COUNTED = re.compile(r"^(num|n)_.*(layer|block|stage|expert|label)|layers|depth")
# Counts up to this number are allowed for weights of any size.
SMALLEST_LIMIT = 5_000
# Registrations of modules and parameters per tensor of the weights. Networks of diffusers and transformers need 3 to 5.
REGISTRATIONS_PER_TENSOR = 20
# Buffers that a network computes from its configuration, such as embeddings of positions.
MAX_BUFFER_BYTES = 1 << 30
# How many times longer a tokenizer may make a text. Tokenizers of the Hub stay below 100.
MAX_GROWTH = 10_000
# Steps of a tokenizer that are a list of steps, by the name of the list.
STEP_LISTS = ("normalizers", "pretokenizers", "decoders")


def check_settings(path: Path, num_tensors: int) -> None:
    """Checks the numbers in a configuration that libraries do not look at before it is too late.

    No count, such as `num_hidden_layers`, may exceed the number of tensors by far: some configurations make a list with an
    entry per layer or label, which happens before [`limit_modules`] can act. Dropout must be in 0 .. 1, and there must be
    attention heads: a network with other values is built, and fails when it is run.
    """
    limit = max(SMALLEST_LIMIT, num_tensors)
    settings = list(read_json(path).items())
    for name, value in settings:
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            settings += value.items()
        values = value if isinstance(value, list) else [value]
        is_wrong = name == "num_attention_heads" and is_number(value) and value < 1
        if is_wrong or ("dropout" in name and is_number(value) and not 0 <= value <= 1):
            raise ValueError(
                f"{path} has {name}={value}, which no network can run with: download or save the checkpoint again"
            )
        too_large = [count for count in values if isinstance(count, (int, float)) and count > limit]
        if too_large and COUNTED.search(name):
            raise ValueError(
                f"{path} has {name}={describe(too_large[0])}, and the weights beside it hold {num_tensors} tensors: download or save "
                "the checkpoint again"
            )


@contextmanager
def limit_modules(path: Path, num_tensors: int | None) -> Iterator[None]:
    """Stops the construction of a network that grows far beyond the number of tensors in its weights.

    Args:
        path (`Path`): Configuration of the network, for the error.
        num_tensors (`int`, *optional*): Number of tensors in the weights; `None` for no limit.
    """
    thread, count = threading.get_ident(), 0

    def register(module: nn.Module, name: str, value) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if num_tensors is not None and count > SMALLEST_LIMIT + REGISTRATIONS_PER_TENSOR * num_tensors:
            raise ValueError(
                f"{path} describes a network with many more layers than its weights hold tensors ({num_tensors})"
            )

    hooks = [
        register_module_module_registration_hook(register),
        register_module_parameter_registration_hook(register),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_buffers(path: Path, network: nn.Module) -> None:
    """Checks the size of the buffers of a network on the `meta` device, before they are computed."""
    size = sum(buffer.numel() * buffer.element_size() for buffer in network.buffers())
    if size > MAX_BUFFER_BYTES:
        raise ValueError(
            f"{path} describes a network with buffers of {size / 2**30:.0f} GiB, and at most {MAX_BUFFER_BYTES / 2**30:.0f} "
            "are allowed"
        )


def create_on_meta(cls: type[ModelMixin], part: Path) -> nn.Module | None:
    """Creates a network without values from its configuration; `None` if its code needs the values of tensors.

    diffusers itself creates parameters on the `meta` device, but computes buffers. Errors in the configuration are left to
    `from_pretrained`, which raises them again.
    """
    try:
        with torch.device("meta"):
            return cls.from_config(cls.load_config(part))
    except (RuntimeError, TypeError):
        return None


def check_growth(path: Path) -> None:
    """Checks that a `tokenizer.json` does not make texts grow beyond all measure.

    tokenizers ends the process if it runs out of memory, and forty replacements of "a" by "aa" make a terabyte of one letter.
    """
    values = read_json(path)
    encoding = text_growth(values.get("normalizer")) * text_growth(values.get("pre_tokenizer"))
    for step, growth in (("encode", encoding), ("decode", text_growth(values.get("decoder")))):
        if growth > MAX_GROWTH:
            raise ValueError(
                f"{path} can make a text {growth:.1e} times longer to {step} it, and at most {MAX_GROWTH} times are allowed: do not "
                "trust this checkpoint"
            )


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
