# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Tokenizers of the paper's text data."""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..utils.checks import check_str


TEXT8_ALPHABET = string.ascii_lowercase + " "


def character_tokenizer(alphabet: str = TEXT8_ALPHABET, mask_token: str = "[MASK]") -> PreTrainedTokenizerFast:
    """One token per character, in the order of `alphabet` (text8's by default), and a mask token after them.

    The mask is a state of masking processes; for others it only marks the gaps of a prompt.
    """
    check_str("alphabet", alphabet)
    check_str("mask_token", mask_token)
    if mask_token in alphabet:
        raise ValueError(f"mask_token is {mask_token!r}, which is part of the alphabet: choose another one")
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    if len(vocabulary) != len(alphabet):
        raise ValueError(f"the alphabet {alphabet!r} holds a character twice")
    tokenizer = Tokenizer(models.WordLevel({**vocabulary, mask_token: len(vocabulary)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token=mask_token, clean_up_tokenization_spaces=False
    )
