# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Data sets and tokenizers."""

from .characters import character_tokenizer, encode_characters, text8_normalize
from .collator import DataCollatorForD3PM
from .embedded import digits, python_prose
from .encoding import tokenize
from .image_files import load_cifar10, load_images
from .rows import Rows, TextCrops
from .statistics import cooccurrence_embeddings, unigram_probs
from .text8 import load_text, load_text8
from .word_pieces import load_lm1b, load_sentencepiece, load_sentences, train_piece_tokenizer


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
