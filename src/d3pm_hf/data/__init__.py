# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What comes before and after the states: tokenizers."""

from .tokenizers import character_tokenizer


__all__ = ["character_tokenizer"]
