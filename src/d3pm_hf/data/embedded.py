# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Data sets that need no download: the documentation inside Python, and the digits inside scikit-learn."""

import ast
import sysconfig
from pathlib import Path

import numpy as np

from ..utils.checks import check_int, check_type
from .characters import TEXT8_ALPHABET, encode_characters, text8_normalize
from .rows import Rows, TextCrops


# Folders below the standard library that are not prose or not part of it.
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
# Nodes that can have a docstring.
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NUM_TRAIN_DIGITS = 1500


def python_prose(length: int = 256) -> tuple[TextCrops, TextCrops]:
    """Loads about 2 MB of English in the alphabet of text8, as a training and a validation set.

    The text is the language reference in `pydoc_data` and the docstrings of the standard library, which is parsed and
    not run. The last tenth of each topic and each module is for validation. Each version of Python has a different text.

    Args:
        length (`int`, defaults to 256): Number of characters of an item.
    """
    check_int("length", length, 1)
    train, validation = [], []
    seen: set[str] = set()
    for source in prose_sources():
        # Some paragraphs occur in several topics and modules. Training text must not occur in the validation set.
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
    """Yields the text of each topic of the language reference and the docstrings of each module of the standard library."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts):
            yield "\n\n".join(docstrings(ast.parse(path.read_bytes())))


def docstrings(node: ast.AST):
    """Yields the docstrings of a module, its classes and its functions in the order of the file."""
    if isinstance(node, DOCUMENTED):
        text = ast.get_docstring(node)
        if text:
            yield text
        for child in node.body:
            yield from docstrings(child)


def digits(labels: bool = False) -> tuple[Rows, Rows]:
    """Loads the handwritten digits of scikit-learn, 1,500 for training and 297 for testing: `[1, 8, 8]`, 17 gray levels.

    Args:
        labels (`bool`, defaults to `False`): Whether each image comes with its class, the digit that it shows.
    """
    check_type("labels", labels, bool, "True or False")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits need the package scikit-learn: pip install 'd3pm-hf[demo]'") from error
    bunch, cut = load_digits(), NUM_TRAIN_DIGITS
    images = bunch.images.astype(np.uint8)[:, None]  # [1797, 1, 8, 8]
    first, second = (bunch.target[:cut], bunch.target[cut:]) if labels else (None, None)
    return Rows(images[:cut], 17, labels=first), Rows(images[cut:], 17, labels=second)
