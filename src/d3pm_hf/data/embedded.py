# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Data that are on every machine: the prose inside Python, and the digits inside scikit-learn."""

import ast
import sysconfig
from pathlib import Path

import numpy as np

from ..utils.checks import check_int
from .characters import encode_characters, text8_normalize
from .memory import Rows, TextCrops
from .tokenizers import TEXT8_ALPHABET


# Not prose, or not part of the standard library, though its folder holds them.
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
# What can have a docstring, and what can hold such things.
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NUM_TRAIN_DIGITS = 1500


def python_prose(length: int = 256) -> tuple[TextCrops, TextCrops]:
    """About 2 MB of English in the alphabet of text8, for training and for validation.

    The language reference in `pydoc_data` and the docstrings of the standard library, which is parsed and never run.
    The last tenth of each topic and each module is for validation. Another version of Python has another text.

    Args:
        length (`int`, defaults to 256): of an item, in characters.
    """
    check_int("length", length, 1)
    train, validation = [], []
    seen: set[str] = set()
    for source in prose_sources():
        # Whole paragraphs come again in other topics and modules: what is held out must not.
        paragraphs = dict.fromkeys(map(text8_normalize, source.split("\n\n")))
        text = " ".join(paragraph for paragraph in paragraphs if paragraph and paragraph not in seen)
        seen.update(paragraphs)
        if text:
            middle = text.rfind(" ", 0, len(text) * 9 // 10) + 1
            train.append(text[:middle])
            validation.append(text[middle:] + " ")
    texts = "".join(train), "".join(validation)
    first, second = (TextCrops(encode_characters(text), length, len(TEXT8_ALPHABET)) for text in texts)
    return first, second


def prose_sources():
    """The text of each topic of the language reference, and of each module of the standard library."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts):
            yield "\n\n".join(docstrings(ast.parse(path.read_bytes())))


def docstrings(node: ast.AST):
    """The docstrings of a module, its classes, and their functions, in the order of the file."""
    if isinstance(node, DOCUMENTED):
        text = ast.get_docstring(node)
        if text:
            yield text
        for child in node.body:
            yield from docstrings(child)


def digits() -> tuple[Rows, Rows]:
    """The handwritten digits of scikit-learn, 1,500 for training and 297 for testing: `[1, 8, 8]`, 17 grey levels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits need the package scikit-learn: pip install 'd3pm-hf[demo]'") from error
    images = load_digits().images.astype(np.uint8)[:, None]  # [1797, 1, 8, 8]
    return Rows(images[:NUM_TRAIN_DIGITS], 17), Rows(images[NUM_TRAIN_DIGITS:], 17)
