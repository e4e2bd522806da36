# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The checkpoints in examples/checkpoints can be loaded, are small, and have the numbers of their cards."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from d3pm_hf import D3PMPipeline
from d3pm_hf.data import character_tokenizer
from d3pm_hf.evaluation.__main__ import create_parser


ROOT = Path(__file__).parents[1]
CHECKPOINTS = ROOT / "examples" / "checkpoints"
# Of an example, with a card and tests of their own (test_bible.py, test_showcases.py, test_sudoku.py).
OWN_SCRIPTS = {"bible", "binarized-mnist", "mnist", "molecules", "sudoku"}
ALL_FOLDERS = sorted(path.parent for path in CHECKPOINTS.glob("*/model_index.json"))
FOLDERS = [folder for folder in ALL_FOLDERS if folder.name not in OWN_SCRIPTS]

spec = importlib.util.spec_from_file_location("publish", ROOT / "examples/reproduce/publish.py")
publish = importlib.util.module_from_spec(spec)
spec.loader.exec_module(publish)


def test_every_checkpoint_is_there_and_on_the_page():
    page = (CHECKPOINTS / "README.md").read_text(encoding="utf-8")
    names = {folder.name for folder in ALL_FOLDERS}
    assert names == set(publish.CHECKPOINTS) | OWN_SCRIPTS
    assert names == set(re.findall(r"^\| \[([\w-]+)\]", page, re.MULTILINE))


@pytest.mark.parametrize("folder", ALL_FOLDERS, ids=lambda folder: folder.name)
def test_a_checkpoint_is_small(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= publish.LARGEST_FOLDER
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".md"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_card_of_a_checkpoint_is_complete(folder):
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "apache-2.0" and card.data.library_name == "d3pm_hf"
    assert all(result.metric_args["protocol"] for result in card.data.eval_results)
    assert f'from_pretrained("d3pm-hf/{folder.name}")' in card.text
    _, measured_by = publish.commands(folder.name)
    assert measured_by in card.text.replace("\\", "")
    create_parser().parse_args(shlex.split(measured_by)[3:])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_checkpoint_draws(folder):
    pipeline = D3PMPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    out = pipeline(batch_size=2, num_inference_steps=2, generator=torch.Generator().manual_seed(0))
    assert len(out[0]) == 2


def test_a_prompt_of_everybody_is_lowercased_and_padded():
    """The tokenizer of characters has the tokens that the network was trained with, and no others."""
    tokenizer = D3PMPipeline.from_pretrained(CHECKPOINTS / "text8-absorbing").tokenizer
    assert tokenizer.get_vocab() == character_tokenizer().get_vocab() and len(tokenizer) == 28
    assert tokenizer.decode(tokenizer("The Capital of France").input_ids) == "the capital of france"
    assert tokenizer(["ab", "a"], padding=True).input_ids == [[0, 1], [0, 27]]


def test_the_readme_fills_in_a_gap_as_it_says():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    prompt, result = re.search(r'gaps = "(.*)"\n.*\nprint\(filled.texts\)\n# \[\'(.*)\'\]', page).groups()
    assert "filled = pipeline(gaps, temperature=0.3, generator=torch.Generator().manual_seed(0), **order)" in page
    pipeline = D3PMPipeline.from_pretrained(CHECKPOINTS / "bible")
    order = {"sampler": "confidence", "sampler_kwargs": {"measure": "margin"}}
    filled = pipeline(prompt, temperature=0.3, generator=torch.Generator().manual_seed(0), **order)
    assert filled.texts == [result]
