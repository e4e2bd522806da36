# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Character tokenizers."""

import string

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..utils.checks import check_str


TEXT8_ALPHABET = string.ascii_lowercase + " "


def check_alphabet(alphabet: str) -> None:
    """Checks that an alphabet lists each of its characters once."""
    check_str("alphabet", alphabet)
    if len(set(alphabet)) != len(alphabet):
        twice = next(character for i, character in enumerate(alphabet) if character in alphabet[:i])
        raise ValueError(f"the alphabet {alphabet!r} contains {twice!r} twice: list each character once")


def character_tokenizer(alphabet: str = TEXT8_ALPHABET, mask_token: str = "[MASK]") -> PreTrainedTokenizerFast:
    """Creates a tokenizer with one token per character and a mask token after them.

    The mask token is a state of absorbing processes. With other processes it marks the gaps of a prompt. It is the padding token
    too, as what comes after a shorter text is a gap. Capitals are lowercased if the alphabet has none.

    Args:
        alphabet (`str`, *optional*): Characters in the order of their tokens. Defaults to a-z and the space, as in text8.
        mask_token (`str`, defaults to `"[MASK]"`): Mask token.
    """
    check_alphabet(alphabet)
    check_str("mask_token", mask_token)
    if mask_token in alphabet:
        raise ValueError(f"mask_token is {mask_token!r}, which is part of the alphabet: pass another one")
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.WordLevel({**vocabulary, mask_token: len(vocabulary)}))
    if alphabet == alphabet.lower():
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        mask_token=mask_token,
        pad_token=mask_token,
        clean_up_tokenization_spaces=False,
    )
