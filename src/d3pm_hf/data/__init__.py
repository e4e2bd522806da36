# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Data sets and tokenizers."""

from .characters import encode_characters, text8_normalize
from .collator import DataCollatorForD3PM
from .embedded import digits, python_prose
from .images import load_cifar10, load_images
from .lm1b import load_lm1b, load_sentences
from .memory import Rows, TextCrops
from .pieces import load_sentencepiece, train_piece_tokenizer
from .statistics import cooccurrence_embeddings, unigram_probs
from .text8 import load_text, load_text8
from .tokenization import tokenize
from .tokenizers import character_tokenizer


__all__ = [
    "DataCollatorForD3PM",
    "Rows",
    "TextCrops",
    "character_tokenizer",
    "cooccurrence_embeddings",
    "digits",
    "encode_characters",
    "load_cifar10",
    "load_images",
    "load_lm1b",
    "load_sentencepiece",
    "load_sentences",
    "load_text",
    "load_text8",
    "python_prose",
    "text8_normalize",
    "tokenize",
    "train_piece_tokenizer",
    "unigram_probs",
]
