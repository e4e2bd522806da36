# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The model card of a checkpoint: what the page says and links of it."""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # of huggingface_hub, and without hints
from huggingface_hub import ModelCard, constants, try_to_load_from_cache

from ..hub.layout import CARD_NAME


# Characters of a card that are read.
MAX_CHARACTERS = 100_000


@dataclass(frozen=True)
class Card:
    """A model card.

    Args:
        trained_on (`str`): The training data, or `""` if the card does not name them.
        text (`str`): The card without its metadata, or `""` if there is none.
        address (`str`, *optional*): The page of the checkpoint on the Hub; `None` for a folder.
    """

    trained_on: str = ""
    text: str = ""
    address: str | None = None


def read_card(source: str) -> Card:
    """The card of a checkpoint that has been loaded from a folder or from the Hub."""
    is_folder = Path(source).is_dir()
    path = Path(source) / CARD_NAME if is_folder else try_to_load_from_cache(source, CARD_NAME)
    address = None if is_folder else f"{constants.ENDPOINT}/{source}"
    if not isinstance(path, (str, Path)) or not Path(path).is_file():
        return Card(address=address)
    with open(path, encoding="utf-8", errors="replace") as file:
        content = file.read(MAX_CHARACTERS)
    text = re.sub(r"\A---\n.*?\n---\n", "", content, flags=re.DOTALL).strip()
    return Card(training_data(content), text, address)


def training_data(content: str) -> str:
    """The training data that a card names: in its table of settings, or else in its metadata."""
    row = re.search(r"^\| data \| (.*) \|$", content, re.MULTILINE)
    if row:
        return re.sub(r"\\(.)", r"\1", row[1])
    if not content.startswith("---\n"):
        return ""
    try:
        data = ModelCard(content, ignore_metadata_errors=True).data
    except (ValueError, TypeError, AttributeError, yaml.YAMLError):  # metadata that somebody else wrote
        return ""
    names = data.get("datasets") or [result.dataset_name for result in getattr(data, "eval_results", None) or []][:1]
    return ", ".join([names] if isinstance(names, str) else map(str, names))
