# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`examples/bible.py`: its data, each command for a few steps, and what its checkpoint writes."""

import re
import sys

import bible
import pytest
import torch

from d3pm_hf import D3PMPipeline


pytestmark = pytest.mark.usefixtures("fresh_accelerator")
WORDS = "And the LORD spake unto Moses, saying, Go (for he is Pharaoh's) into the land: and they did so; Behold! Who art thou?"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """40 chapters of four verses, each of which begins with its own words."""
    path = tmp_path_factory.mktemp("bible") / "kjv.txt"
    words = WORDS.split()
    path.write_text(
        "".join(
            f"Ge{chapter}:{verse} " + " ".join(words[chapter % 20 :] + words[: chapter % 20]) + "\n"
            for chapter in range(1, 41)
            for verse in range(1, 5)
        )
    )
    return str(path)


@pytest.fixture(autouse=True)
def few_pieces(monkeypatch):
    monkeypatch.setattr(bible, "NUM_PIECES", 80)
    monkeypatch.setattr(bible, "WIDTH", 16)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bible.py", *map(str, arguments)])
    bible.main()


def test_of_twenty_chapters_one_is_for_validation_and_one_for_testing(text):
    chapters = bible.load_chapters(text)
    assert {split: len(part) for split, part in chapters.items()} == {"train": 36, "validation": 2, "test": 2}
    assert chapters["validation"][0][0].startswith("is Pharaoh's) into") and len(chapters["test"][1]) == 4


def test_pieces_are_words_and_marks_and_decode_to_the_text(text):
    tokenizer = bible.train_tokenizer([WORDS] * 3)
    assert len(tokenizer) == tokenizer.mask_token_id + 1
    tokens = tokenizer(WORDS).input_ids
    assert tokens[0] == tokenizer.bos_token_id and tokenizer.decode(tokens, skip_special_tokens=True) == WORDS
    pieces = tokenizer.tokenize("Moses, saying")
    assert "," in pieces and not any("," in piece and len(piece) > 1 for piece in pieces)
    gap = tokenizer(
        "spake unto [MASK], saying", add_special_tokens=False
    ).input_ids  # the space before a gap is part of the mask
    place = gap.index(tokenizer.mask_token_id)
    assert (
        tokenizer.decode([*gap[:place], *tokenizer("Moses", add_special_tokens=False).input_ids, *gap[place + 1 :]])
        == "spake unto Moses, saying"
    )


def test_rows_begin_with_a_verse_and_stay_in_a_chapter(text):
    chapters = bible.load_chapters(text)
    tokenizer = bible.train_tokenizer([WORDS])
    (first, *_), *_ = chapters["test"]
    whole = "".join(f" {verse}" for verse in chapters["test"][0])
    for overlap in (True, False):
        rows = bible.cut_rows(tokenizer, chapters["test"][:1], overlap)
        texts = tokenizer.batch_decode(rows.tokens)
        assert rows.tokens.shape[1] == bible.LENGTH and rows.num_tokens == tokenizer.mask_token_id
        assert all(row.startswith(first[:20]) and f" {row}" in whole for row in texts)
        assert len(rows) > 1


def test_bible(text, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    run(monkeypatch, "train", "--data", text, "--max_train_steps", 2, "--train_batch_size", 2, "--output_dir", folder)
    pipeline = D3PMPipeline.from_pretrained(folder)
    assert pipeline.config.sequence_length == bible.LENGTH + 1 and not pipeline.denoiser.reads_timestep
    capsys.readouterr()
    counts = ["--num_ordered", 2, "--num_samples", 2]
    run(monkeypatch, "evaluate", "--data", text, "--checkpoint", folder, *counts)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "bound,",
        "left_to_right",
        "margin",
        "random",
        "samples",
        "test",
    ]
    bits = [float(re.search(r"([\d.]+) ± [\d.]+ bits per piece", line)[1]) for line in lines[1:5]]
    assert all(3 < value < 8 for value in bits)  # 81 pieces, hardly any training
    assert lines[-1].split()[1:4] == ["8", "texts", "100.0%"]
    run(monkeypatch, "draw", "--checkpoint", folder, "--num_samples", 3, "--temperature", 0.1)
    assert len(capsys.readouterr().out.splitlines()) == 3
    with pytest.raises(ValueError, match="pass --data"):
        run(monkeypatch, "train")


def test_similar_pieces_begin_near_each_other(text):
    chapters = bible.load_chapters(text)
    tokenizer = bible.train_tokenizer([WORDS])
    rows = bible.cut_rows(tokenizer, chapters["train"], overlap=True)
    weight = bible.create_pipeline(tokenizer, rows).text_model.get_input_embeddings().weight.detach()
    directions = bible.cooccurrence_embeddings(rows, bible.WIDTH)
    agree = torch.nn.functional.cosine_similarity(weight[: len(directions), : directions.shape[1]], directions)
    assert torch.allclose(agree, torch.ones(len(directions)), atol=1e-5)
    assert torch.isfinite(weight).all() and weight[-1].norm() > 0  # the mask has a random vector


def test_share_of_known_words():
    assert bible.count_known(["And the sea", "of Galileeq"], ["THE SEA of and"]) == 4 / 5
