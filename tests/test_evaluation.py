# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What is measured of a checkpoint, and where it is written."""

import importlib
import json
import math
import runpy
import string
import sys

import numpy as np
import pytest
import torch
from comparison import assert_same_draws
from huggingface_hub import ModelCard
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertLMHeadModel,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ResNetForImageClassification,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    TextDenoiser,
    character_tokenizer,
    create_text_model,
    create_unet,
    evaluate_bound,
    evaluate_likelihood,
    evaluation,
)
from d3pm_hf.data import Rows, digits, load_text8, python_prose, train_piece_tokenizer
from d3pm_hf.data.batches import evaluation_batches
from d3pm_hf.data.encoding import encode_text
from d3pm_hf.evaluation import (
    ClassifierFeatures,
    Evaluation,
    StepResult,
    evaluate_pipeline,
    evaluator,
    image_scores,
    time_sampling,
    token_entropy,
    word_statistics,
)
from d3pm_hf.evaluation.__main__ import main
from d3pm_hf.evaluation.splits import load_evaluation_data
from d3pm_hf.likelihood.causal import scores_in_one_pass
from d3pm_hf.pipelines.drawing import draw_samples


LENGTH, T = 16, 30


@pytest.fixture(scope="module")
def text():
    torch.manual_seed(0)
    scheduler = D3PMScheduler(28, num_train_timesteps=T)
    pipeline = D3PMTextPipeline(
        create_text_model("tiny", 28), scheduler, character_tokenizer(), sequence_length=LENGTH
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def rows():
    tokens = torch.randint(0, 27, (12, LENGTH), generator=torch.Generator().manual_seed(0))
    return Rows(tokens.numpy(), 27, num_words=40)


def test_images_are_measured_given_their_classes(tmp_path):
    torch.manual_seed(0)
    scheduler = D3PMScheduler(17, 10, "gaussian", "cosine")
    pipeline = D3PMImagePipeline(create_unet("tiny", 17, 8, 1, num_class_labels=10), scheduler, num_class_labels=10)
    dataset = load_evaluation_data(pipeline, "digits", "test")
    assert dataset[3].keys() == {"x_0", "label"}
    options = {"num_timed_samples": 0, "num_samples": 0, "max_eval_samples": 12, "progress_bar": False}
    result = evaluate_pipeline(pipeline, dataset, "digits", num_inference_steps=(10,), **options)
    batch = {
        "x_0": torch.stack([dataset[i * 297 // 12]["x_0"] for i in range(12)]),
        "condition": {"class_labels": torch.tensor([dataset[i * 297 // 12]["label"] for i in range(12)])},
    }
    expected = evaluate_bound(scheduler, pipeline.denoiser, [batch], progress_bar=False)
    assert result.steps[0].bits_per_dim == pytest.approx(expected.bits_per_dim, rel=1e-5)
    assert "12 examples, 768 elements given class_labels" in result.to_markdown()
    assert "samples have the 10 classes in turn" in result.protocol
    with pytest.raises(ValueError, match="label_column is 'label', and an example is a Tensor"):
        evaluate_pipeline(pipeline, digits()[1], "digits", num_inference_steps=(10,), **options)
    states = draw_samples(pipeline, 12, 2)
    assert states.shape == (12, 1, 8, 8)


def test_every_number_is_that_of_the_bound(text, rows):
    result = evaluate_pipeline(text, rows, "noise", num_inference_steps=(1000, 10), batch_size=5, progress_bar=False)
    assert [row.num_inference_steps for row in result.steps] == [T, 10]  # no more than the process has
    for row in result.steps:
        data = [torch.stack([rows[i] for i in range(12)])]
        bound = evaluate_bound(
            text.scheduler, text.denoiser, data, num_inference_steps=row.num_inference_steps, progress_bar=False
        )
        assert row.bits_per_dim == pytest.approx(bound.bits_per_dim, rel=1e-6)
        assert row.word_perplexity == pytest.approx(math.exp(bound.total * 12 * LENGTH / 40), rel=1e-5)
        # One standard error more of the bound is one more of the perplexities, to first order.
        for tokens, name in ((1, "perplexity"), (12 * LENGTH / 40, "word_perplexity")):
            slope = (math.exp(1e-4 * bound.standard_error * tokens) - 1) / 1e-4
            error = getattr(row, f"{name}_standard_error")
            assert error == pytest.approx(getattr(row, name) * slope, rel=1e-3)
        assert row.protocol == bound.protocol and row.seconds > 0
    assert result.samples["num_samples"] == 64 and 0 < result.samples["token_entropy"] <= math.log2(LENGTH)


def test_continuous_time_is_a_row_of_its_own(text, rows):
    result = evaluate_pipeline(
        text,
        rows,
        "noise",
        num_inference_steps=(5,),
        continuous_time=True,
        num_eval_timesteps=40,
        num_timed_samples=1,
        num_samples=0,
        progress_bar=False,
    )
    data = [torch.stack([rows[i] for i in range(12)])]
    options = {"continuous_time": True, "num_eval_timesteps": 40, "progress_bar": False}
    bound = evaluate_bound(text.scheduler, text.denoiser, data, **options)
    steps, continuous = result.steps
    assert steps.num_inference_steps == 5 and continuous.num_inference_steps is None
    assert continuous.bits_per_dim == pytest.approx(bound.bits_per_dim, rel=1e-6)
    assert continuous.seconds is None and continuous.protocol == bound.protocol
    assert "\n| continuous time | " in result.to_markdown()
    assert result.eval_results()[1].metric_name == "Bits per dimension (upper bound, continuous time)"
    assert json.loads(result.to_json())["steps"][1]["num_inference_steps"] is None


def test_texts_of_different_lengths(text, rows):
    """Statistics of the data are those of its texts, padded by the collator, by the user, or not at all."""
    lengths = [3, LENGTH, 5, LENGTH]
    own = [{"input_ids": rows[i][:n].tolist()} for i, n in enumerate(lengths)]
    padded = [{"x_0": rows[i], "attention_mask": (torch.arange(LENGTH) < n).long()} for i, n in enumerate(lengths)]
    options = {"num_inference_steps": (5,), "num_timed_samples": 0, "num_samples": 4, "progress_bar": False}
    found, same = (evaluate_pipeline(text, data, "noise", **options) for data in (own, padded))
    expected = sum(token_entropy(rows[i][None, :n]) for i, n in enumerate(lengths)) / 4
    assert found.samples["token_entropy_of_data"] == pytest.approx(expected)
    assert found.samples == same.samples
    assert found.steps[0].bits_per_dim == pytest.approx(same.steps[0].bits_per_dim)


def test_texts_that_end(rows):
    """The end of a text, and the padding behind it, are no part of its statistics, in samples and in the data."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "[EOS]"})
    torch.manual_seed(0)
    scheduler = D3PMScheduler(29, T, mask_token_id=tokenizer.mask_token_id)
    network = create_text_model("tiny", 29).eval()
    pipeline = D3PMTextPipeline(network, scheduler, tokenizer, sequence_length=LENGTH, ends_with_eos=True)
    end, lengths = tokenizer.eos_token_id, [3, 12, 5, 0]
    data = [{"x_0": torch.where(torch.arange(LENGTH) < n, rows[i], end)} for i, n in enumerate(lengths)]
    options = {"num_inference_steps": (5,), "num_timed_samples": 0, "num_samples": 16, "progress_bar": False}
    found = evaluate_pipeline(pipeline, data, "noise", **options).samples
    drawn = [row[: row.tolist().index(end)] if end in row else row for row in draw_samples(pipeline, 16, 20)]
    assert any(0 < len(row) < LENGTH for row in drawn)
    expected = [token_entropy(row[None]) for row in drawn if len(row)]
    assert found["token_entropy"] == pytest.approx(sum(expected) / len(expected))
    expected = [token_entropy(rows[i][None, :n]) for i, n in enumerate(lengths) if n]
    assert found["token_entropy_of_data"] == pytest.approx(sum(expected) / 3)


def test_json_holds_finite_numbers_alone(text, rows):
    """One example has no standard error, and a model may exclude the data: JSON has no NaN and no infinity."""
    options = {"num_inference_steps": (5,), "num_timed_samples": 0, "num_samples": 0, "progress_bar": False}
    result = evaluate_pipeline(text, rows, "noise", max_eval_samples=1, **options)
    (steps,) = result.steps
    steps.bits_per_dim = float("inf")
    assert np.isnan(steps.standard_error)

    def refuse(constant):
        raise ValueError(constant)

    (stored,) = json.loads(result.to_json(), parse_constant=refuse)["steps"]
    assert stored["bits_per_dim"] is None and stored["standard_error"] is None
    assert stored["perplexity"] == steps.perplexity


def test_exact_likelihoods_are_not_among_the_bounds(text, rows, tmp_path):
    options = {"num_inference_steps": (5,), "num_timed_samples": 0, "num_samples": 0, "progress_bar": False}
    orders = ("margin", "left_to_right")
    result = evaluate_pipeline(text, rows, "noise", likelihood=orders, batch_size=5, **options)
    data = [torch.stack([rows[i] for i in range(12)])]
    assert len(result.steps) == 1 and [one.order for one in result.likelihoods] == list(orders)
    for one in result.likelihoods:
        exact = evaluate_likelihood(text, data, order=one.order, progress_bar=False)
        assert one.bits_per_dim == pytest.approx(exact.bits_per_dim, rel=1e-5)
        assert one.standard_error == pytest.approx(exact.bits_per_dim_standard_error, rel=1e-4)
        assert one.protocol.startswith("exact, of the sampler") and "bound" not in one.protocol
    table = result.to_markdown()
    assert "| order | bits/dim (exact likelihood) |" in table and "\n| margin | " in table
    names = [entry.metric_name for entry in result.eval_results()]
    assert names[1] == "Bits per dimension (exact likelihood, order margin)" and "upper bound" in names[0]
    assert [entry.metric_type for entry in result.eval_results()] == ["bits_per_dim", *["exact_bits_per_dim"] * 2]
    assert json.loads(result.to_json())["likelihoods"][1]["order"] == "left_to_right"
    text.save_pretrained(tmp_path)
    result.write_to_card(tmp_path)
    result.write_to_card(tmp_path)  # replaces itself
    assert (tmp_path / "README.md").read_text().count("\n| margin | ") == 1


def test_words_of_a_part_of_the_data_are_those_of_the_whole_split(text, rows):
    result = evaluate_pipeline(
        text,
        rows,
        num_inference_steps=(5,),
        max_eval_samples=4,
        num_eval_timesteps=3,
        num_timed_samples=0,
        num_samples=0,
        progress_bar=False,
    )
    assert result.steps[0].seconds is None and "seconds" not in result.to_markdown()
    row = result.steps[0]
    assert row.word_perplexity == pytest.approx(row.perplexity ** (12 * LENGTH / 40)) and result.samples == {}
    assert result.protocol.startswith("4 of 12 examples; packed rows of 16 tokens; a word of the whole split is 4.800")
    assert "4 examples" in result.steps[0].protocol and "3 stratified terms" in result.steps[0].protocol


def test_reports(text, rows, tmp_path):
    result = evaluate_pipeline(text, rows, "noise", num_inference_steps=(10, 5), num_samples=4, progress_bar=False)
    table = result.to_markdown().splitlines()
    assert table[0].count("|") == table[2].count("|") == 6 and table[2].startswith("| 10 |")
    assert json.loads(result.to_json())["steps"][1]["num_inference_steps"] == 5
    below = "\n".join(table[4:])
    for row, steps in zip(result.steps, ("10 of 30 steps", "5 of 30 steps")):
        assert steps in row.protocol and f"- {row.protocol}" in below
    text.save_pretrained(tmp_path)
    for _ in range(2):  # measured again, the old numbers are replaced
        result.write_to_card(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert [r.metric_value for r in card.data.eval_results] == [round(row.bits_per_dim, 4) for row in result.steps]
    assert card.text.count("## Results") == card.text.count(table[0]) == 1 and "None measured." not in card.text
    for entry, row in zip(card.data.eval_results, result.steps):
        assert entry.metric_args["standard_error"] == pytest.approx(row.standard_error, rel=0.05)
    assert all(
        r.metric_args["protocol"] == result.steps[0].protocol.replace("10 of", f"{n} of")
        for r, n in zip(card.data.eval_results, (10, 5))
    )


@pytest.mark.parametrize("name", ["a --> b <b>c</b>", "# a\n| b", "[x](y) `z`"])
def test_any_name_of_data_on_a_card(text, rows, tmp_path, name):
    """Plain text, written once however often it is measured; what stands after it stays."""
    markdown_it = pytest.importorskip("markdown_it")
    options = {"num_timed_samples": 0, "num_samples": 0, "progress_bar": False}
    result = evaluate_pipeline(text, rows, name, num_inference_steps=(2,), max_eval_samples=2, **options)
    text.save_pretrained(tmp_path)
    result.write_to_card(tmp_path)
    (tmp_path / "README.md").write_text((tmp_path / "README.md").read_text() + "\nBy hand.\n")
    result.write_to_card(tmp_path)
    card, plain = ModelCard.load(tmp_path / "README.md"), " ".join(name.split())
    assert [entry.dataset_name for entry in card.data.eval_results] == [plain]
    measured = card.text[card.text.index("## Results") :]
    tokens = markdown_it.MarkdownIt("gfm-like", {"linkify": False}).parse(measured)
    comments = [token.content for token in tokens if token.type == "html_block"]
    assert len(comments) == 2 and all(comment.count("<") == comment.count(">") == 1 for comment in comments)
    inline = [token.children for token in tokens if token.type == "inline"]
    texts = ["".join(child.content for child in children) for children in inline]
    assert all(child.type in ("text", "text_special", "softbreak") for children in inline for child in children)
    assert [line.startswith(f"Measured on {plain}, test: 2 of 12 examples") for line in texts].count(True) == 1
    assert texts[-1] == "By hand."


def test_command_line(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    scheduler = D3PMScheduler(17, 20, transition="uniform", beta_schedule="cosine")
    D3PMImagePipeline(create_unet("tiny", 17, 8, 1), scheduler).save_pretrained(tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    main("digits --dataset digits --num_inference_steps 4 --max_eval_samples 4 --num_samples 2".split())
    printed = capsys.readouterr().out
    assert "| steps | bits/dim (bound) |" in printed and "digits, test: 4 of 297 examples" in printed
    stored = json.loads((tmp_path / "evaluation.json").read_text())
    assert stored["steps"][0]["num_inference_steps"] == 4
    assert ModelCard.load("digits/README.md").data.eval_results[0].dataset_name == "digits"


def test_another_reading_of_the_same_network(tmp_path, monkeypatch):
    """The bound is that of a scheduler with the other meaning, and the card does not claim it."""
    torch.manual_seed(0)
    scheduler = D3PMScheduler(17, 20, transition="uniform", beta_schedule="cosine")
    pipeline = D3PMImagePipeline(create_unet("tiny", 17, 8, 1), scheduler)
    pipeline.save_pretrained(tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    words = "model --dataset digits --num_inference_steps 4 --max_eval_samples 4 --num_samples 0 --num_timed_samples 0"
    main([*words.split(), "--x0_posterior", "denoising"])
    stored = json.loads((tmp_path / "evaluation.json").read_text())
    other = D3PMScheduler(17, 20, transition="uniform", beta_schedule="cosine", x0_posterior="denoising")
    data = [torch.stack([digits()[1][i * 297 // 4] for i in range(4)])]
    bound = evaluate_bound(other, pipeline.denoiser, data, num_inference_steps=4, progress_bar=False)
    assert stored["steps"][0]["bits_per_dim"] == pytest.approx(bound.bits_per_dim, rel=1e-5)
    assert stored["protocol"].endswith("logits of x_0 read as denoising")
    assert (tmp_path / "model" / "README.md").read_text() == card


def test_a_split_that_there_is_not(capsys):
    with pytest.raises(SystemExit):
        main("anywhere --dataset prose --split test".split())
    assert "prose is measured on its validation split, not on test" in capsys.readouterr().err


# Data in the tokens or levels of the checkpoint


def save_text_checkpoint(folder, tokenizer, length=LENGTH):
    """A checkpoint of a network with random answers, which differ from token to token."""
    torch.manual_seed(0)
    network = create_text_model("tiny", len(tokenizer), initializer_range=0.3)
    pipeline = D3PMTextPipeline(network, D3PMScheduler(len(tokenizer), 6), tokenizer, sequence_length=length)
    pipeline.save_pretrained(folder)
    return pipeline


def measure(folder, words):
    """What the command line writes to a file of JSON about a checkpoint."""
    flags = "--num_inference_steps 6 --num_timed_samples 0 --num_samples 0".split()
    main([str(folder), *words, *flags, "--output_file", str(folder / "evaluation.json")])
    return json.loads((folder / "evaluation.json").read_text())


def bound_of(pipeline, rows):
    return evaluate_bound(pipeline.scheduler, pipeline.denoiser, [rows], num_inference_steps=6, progress_bar=False)


@pytest.mark.parametrize("dataset", ["text8", pytest.param("prose", marks=pytest.mark.slow)])
def test_text_is_encoded_by_the_tokenizer_of_the_checkpoint(tmp_path, dataset):
    """Another order of the letters, and capitals: the tokens are those of this alphabet, and the text is the same."""
    alphabet = string.ascii_letters[::-1] + " "
    pipeline = save_text_checkpoint(tmp_path, character_tokenizer(alphabet))
    words = ["--dataset", dataset, "--max_eval_samples", "3"]
    if dataset == "prose":
        data = python_prose(LENGTH)[1]
    else:
        (tmp_path / "text8.txt").write_text("the quick brown fox jumps over the lazy dog " * 50)
        data = load_text8("test", dataset_path=tmp_path / "text8.txt", length=LENGTH)
        words += ["--dataset_path", str(tmp_path / "text8.txt")]
    texts = character_tokenizer().batch_decode([data[i * len(data) // 3].tolist() for i in range(3)])
    rows = torch.tensor([[alphabet.index(character) for character in text] for text in texts])
    stored = measure(tmp_path, words)
    assert stored["steps"][0]["bits_per_dim"] == pytest.approx(bound_of(pipeline, rows).bits_per_dim, rel=1e-5)
    assert stored["dataset"] == ("prose" if dataset == "prose" else "text8 (text8.txt)")


def test_characters_that_the_tokenizer_lacks(tmp_path):
    save_text_checkpoint(tmp_path, character_tokenizer("abcdefghijklmnoprstuvwxy "))
    card, path = tmp_path / "README.md", tmp_path / "text8.txt"
    before = card.read_text()
    path.write_text("the quick brown fox jumps over the lazy dog " * 50)
    with pytest.raises(
        ValueError,
        match=r"the test split of text8 has characters that the tokenizer does not know \('q' 'z'\): replace or remove them; it "
        "knows a to p, r to y and space",
    ):
        measure(tmp_path, ["--dataset", "text8", "--dataset_path", str(path)])
    (tmp_path / "mine.txt").write_text("ABCDEFGHIJKLMNOP " * 40)
    with pytest.raises(ValueError, match=r"the test split of .*mine.txt .* \('A' 'B' 'C' .*'J' and 6 more\)"):
        measure(tmp_path, ["--dataset_path", str(tmp_path / "mine.txt")])
    assert card.read_text() == before


@pytest.mark.parametrize("split", ["test", "all"])
def test_a_text_of_ones_own(tmp_path, split):
    """The kind of data follows from the checkpoint; a file is cut 90 : 5 : 5, or taken whole."""
    alphabet = "\nabcdefg!"
    pipeline = save_text_checkpoint(tmp_path, character_tokenizer(alphabet))
    text = "".join(alphabet[i] for i in torch.randint(9, (800,), generator=torch.Generator().manual_seed(0)).tolist())
    text = text[:-1] + "a"  # a file does not end in line breaks
    (tmp_path / "mine.txt").write_text(text)
    stored = measure(tmp_path, ["--dataset_path", str(tmp_path / "mine.txt"), "--split", split])
    part = text[760:] if split == "test" else text
    count = len(part) // LENGTH
    rows = torch.tensor([alphabet.index(character) for character in part[: count * LENGTH]]).view(count, LENGTH)
    assert stored["steps"][0]["bits_per_dim"] == pytest.approx(bound_of(pipeline, rows).bits_per_dim, rel=1e-5)
    assert (stored["dataset"], stored["split"]) == ("mine.txt", split)
    assert ModelCard.load(tmp_path / "README.md").data.eval_results[0].dataset_name == "mine.txt"


def test_word_pieces(tmp_path):
    """Text in the pieces of the checkpoint, none of them unknown; a mask in the text is no data."""
    words = "the cat sat on the mat and the dog ran to the other cat".split()
    texts = [" ".join(words[i % 9 :] + words[: i % 7]) for i in range(60)]
    tokenizer = train_piece_tokenizer(texts, vocab_size=20)
    pipeline = save_text_checkpoint(tmp_path, tokenizer)
    path = tmp_path / "mine.txt"
    path.write_text(" ".join(texts))
    ids = tokenizer(" ".join(texts), add_special_tokens=False).input_ids
    rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    stored = measure(tmp_path, ["--dataset", "text", "--dataset_path", str(path), "--split", "all"])
    assert stored["steps"][0]["bits_per_dim"] == pytest.approx(bound_of(pipeline, rows).bits_per_dim, rel=1e-5)
    for wrong, sentence in (
        ("the cät saß", r"has characters that the tokenizer does not know \('ß' 'ä'\): replace or remove them"),
        (
            "the [MASK] sat",
            r"contains '\[MASK\]', the mask token of the checkpoint, which data must not contain: remove it",
        ),
        ("the cat", "has 2 tokens, and an example of this checkpoint has 16: pass a longer text"),
    ):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=f"mine.txt .*{sentence}"):
            measure(tmp_path, ["--dataset_path", str(path), "--split", "all"])
    path.write_text("THE CAT SAT\n" * 400)
    with pytest.raises(
        ValueError, match=r"\d+\.\d% of the tokens of .*mine.txt are '<unk>', which stands for pieces that"
    ):
        measure(tmp_path, ["--dataset", "lm1b", "--dataset_path", str(path), "--cache_dir", str(tmp_path / "cache")])


def test_a_tokenizer_without_an_unknown_token():
    """One that drops what it lacks, and one that raises: neither leaves anything out of a text."""
    pairs = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, mask_token="[MASK]")
    assert encode_text(lambda: ["abba"], tokenizer, "the text").tolist() == [2, 1, 0]
    with pytest.raises(
        ValueError, match=r"the text has characters that the tokenizer does not know \('c' 'd'\): replace"
    ):
        encode_text(lambda: ["abcadb"], tokenizer, "the text")
    words = Tokenizer(models.WordLevel({"aa": 0, "b": 1}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, mask_token="[MASK]")
    assert encode_text(lambda: ["aa b aa"], tokenizer, "the text").tolist() == [0, 1, 0]
    with pytest.raises(
        ValueError, match=r"the text has .* that the tokenizer does not know \('c'\): replace or remove them"
    ):
        encode_text(lambda: ["aa c"], tokenizer, "the text")


def test_a_folder_of_images_of_ones_own(tmp_path):
    """At the size and the levels of the checkpoint; two splits, one, or all images."""
    torch.manual_seed(0)
    scheduler = D3PMScheduler(5, 6, transition="uniform", beta_schedule="cosine")
    pipeline = D3PMImagePipeline(create_unet("tiny", 5, 8, 1), scheduler)
    pipeline.save_pretrained(tmp_path / "model")
    levels = torch.randint(5, (6, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    for i, image in enumerate(levels):
        folder = tmp_path / "pictures" / ("train" if i < 4 else "test")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (image[0] * 255 / 4).round().to(torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
    words = ["--dataset_path", str(tmp_path / "pictures"), "--cache_dir", str(tmp_path / "cache")]
    for split, rows in (([], levels[4:]), (["--split", "all"], levels)):
        stored = measure(tmp_path / "model", [*words, *split])
        assert stored["steps"][0]["bits_per_dim"] == pytest.approx(bound_of(pipeline, rows).bits_per_dim, rel=1e-5)
        assert stored["dataset"] == "pictures"
    with pytest.raises(
        ValueError,
        match="digits has images of 1 x 8 x 8 with 17 levels, and the checkpoint generates 1 x 8 x 8 with 5: measure it on data",
    ):
        measure(tmp_path / "model", ["--dataset", "digits"])
    with pytest.raises(
        ValueError,
        match="the checkpoint is for unconditional-image-generation, and prose is not: choose --dataset from cifar10,",
    ):
        measure(tmp_path / "model", ["--dataset", "prose"])


def test_nothing_to_measure_on(tmp_path, text, capsys):
    for words, sentence in (
        ("anywhere", "there is nothing to measure on: pass --dataset, or the path of your own data as --dataset_path"),
        ("anywhere --dataset text", "there is nothing to measure on"),
        ("anywhere --dataset digits --dataset_path x", "digits is part of the package: leave out --dataset_path"),
        ("anywhere --dataset text8 --split all", "--split all is for your own data, and --dataset is text8: name one"),
    ):
        with pytest.raises(SystemExit):
            main(words.split())
        assert sentence in capsys.readouterr().err
    D3PMTextPipeline(text.text_model, text.scheduler, sequence_length=LENGTH).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the checkpoint has no tokenizer to encode text with: save one with it"):
        measure(tmp_path, ["--dataset", "prose"])
    with pytest.raises(
        ValueError, match="the checkpoint is for text-generation, and digits is not: choose --dataset from text8, lm1b"
    ):
        measure(tmp_path, ["--dataset", "digits"])


def test_sampling_time_is_that_of_the_steps(monkeypatch):
    """By a clock that ticks once to a step: each sample costs its steps, and the first, longer one does not count."""
    scheduler = D3PMScheduler(28, T, "uniform", "cosine")  # which calls its network in each step
    text = D3PMTextPipeline(create_text_model("tiny", 28), scheduler, sequence_length=LENGTH)
    ticks = [100, 0]  # of the first sample, and until now

    def tick(module, inputs):
        ticks[1] += 1 + ticks[0]
        ticks[0] = 0

    hook = text.text_model.register_forward_pre_hook(tick)
    monkeypatch.setattr("time.perf_counter", lambda: ticks[1])
    assert time_sampling(text, 2) == (2, 0) and time_sampling(text, 30, num_timed_samples=1) == (30, 0)
    hook.remove()


def test_a_result_that_cannot_be_written(tmp_path, capsys):
    """Is found out before anything is measured."""
    with pytest.raises(SystemExit):
        main(["anywhere", "--dataset", "digits", "--output_file", str(tmp_path / "nowhere" / "result.json")])
    assert "nowhere for the results: create it" in capsys.readouterr().err


def test_text_statistics():
    assert token_entropy(torch.tensor([[1, 1, 1, 1], [0, 1, 2, 3]])) == pytest.approx(1.0)
    statistics = word_statistics(["xx the cat zz", "yy dog the cat w"], ["a the cat sat b"])
    assert statistics["known_words"] == 4 / 5 and statistics["word_length"] == 3
    assert statistics["word_entropy"] == pytest.approx(-(0.8 * math.log2(0.4) + 0.2 * math.log2(0.2)))
    assert word_statistics(["word"], ["word"])["known_words"] == 0.0  # cut at both ends


def test_a_causal_network_is_measured_in_one_pass(rows):
    torch.manual_seed(0)
    scheduler = D3PMScheduler(28, num_train_timesteps=LENGTH, transition="autoregressive")
    model = create_text_model("tiny", 28, is_decoder=True, timestep_conditioning=False)
    pipeline = D3PMTextPipeline(model, scheduler, character_tokenizer(), sequence_length=LENGTH)
    pipeline.set_progress_bar_config(disable=True)
    data = [torch.stack([rows[i] for i in range(12)])]
    slow, fast = (
        evaluate_bound(scheduler, pipeline.denoiser, data, is_causal=is_causal, progress_bar=False)
        for is_causal in (False, True)
    )
    assert fast.per_timestep.tolist() == pytest.approx(slow.per_timestep.tolist(), rel=1e-5)
    for name in ("prior", "diffusion", "reconstruction", "standard_error"):
        assert getattr(fast, name) == pytest.approx(getattr(slow, name), rel=1e-5)
    result = evaluate_pipeline(pipeline, rows, num_inference_steps=(1000, 4), num_samples=2, progress_bar=False)
    assert [row.num_inference_steps for row in result.steps] == [LENGTH]  # one token at a time, and no other way
    assert result.steps[0].bits_per_dim == pytest.approx(slow.bits_per_dim, rel=1e-5)


def test_no_process_but_the_autoregressive_one_is_measured_in_one_pass(text, rows):
    with pytest.raises(
        ValueError,
        match=f"one step per token, and this one is 'absorbing' with {T} of {T} steps: pass is_causal=False",
    ):
        evaluate_bound(text.scheduler, text.denoiser, [rows[0][None]], is_causal=True)
    raw = D3PMScheduler(28, LENGTH, transition="autoregressive", reconstruction="raw")
    with pytest.raises(ValueError, match="needs prediction_type='x0' and reconstruction='posterior'.* 'x0' and 'raw'"):
        evaluate_bound(raw, text.denoiser, [rows[0][None]], is_causal=True)


def unshifted_decoder():
    """Causal attention, and yet position i reads its own token."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"max_position_embeddings": LENGTH, "initializer_range": 0.3}
    return BertLMHeadModel(BertConfig(vocab_size=28, is_decoder=True, **sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backbone", ["bert", "t5"])
def test_causality_is_that_of_the_network(rows, backbone, dtype):
    """A network that reads what it is asked for is refused in one pass, and scored term by term otherwise."""
    scheduler = D3PMScheduler(28, LENGTH, transition="autoregressive")
    x_0 = torch.stack([rows[i] for i in range(12)])
    torch.manual_seed(0)
    options = {"backbone": backbone, "timestep_conditioning": False, "initializer_range": 0.3}
    for network, in_one_pass in (
        (create_text_model("tiny", 28, is_decoder=True, **options), True),
        (create_text_model("tiny", 28, **options), False),
        (create_text_model("tiny", 28, is_decoder=True, **{**options, "timestep_conditioning": True}), False),
        (TextDenoiser(unshifted_decoder()), False),
    ):
        pipeline = D3PMTextPipeline(network.to(dtype), scheduler, character_tokenizer(), sequence_length=LENGTH)
        pipeline.set_progress_bar_config(disable=True)
        assert scores_in_one_pass(scheduler, pipeline.denoiser) == in_one_pass
        slow = evaluate_bound(scheduler, pipeline.denoiser, [x_0], progress_bar=False)
        if in_one_pass:
            fast = evaluate_bound(scheduler, pipeline.denoiser, [x_0], is_causal=True, progress_bar=False)
            assert fast.total == pytest.approx(slow.total, rel=1e-5 if dtype == torch.float32 else 1e-2)
        else:
            with pytest.raises(
                ValueError, match="change when it and the tokens after it are masked: .* set is_causal to False"
            ):
                evaluate_bound(scheduler, pipeline.denoiser, [x_0], is_causal=True, progress_bar=False)
        if dtype == torch.float32:
            result = evaluate_pipeline(
                pipeline, rows, num_inference_steps=(8,), num_timed_samples=0, num_samples=0, progress_bar=False
            )
            steps = 8 if not getattr(network, "is_causal", False) else LENGTH
            assert [row.num_inference_steps for row in result.steps] == [steps]
            if steps == LENGTH:
                assert result.steps[0].bits_per_dim == pytest.approx(slow.bits_per_dim, rel=1e-5)


def test_one_pass_takes_logits_of_x_0_as_they_are():
    network = TextDenoiser(create_text_model("tiny", 28, is_decoder=True, timestep_conditioning=False))
    assert scores_in_one_pass(D3PMScheduler(28, LENGTH, transition="autoregressive"), network)
    for other in ({"transition": "absorbing"}, {"prediction_type": "previous"}, {"reconstruction": "raw"}):
        assert not scores_in_one_pass(D3PMScheduler(28, LENGTH, **{"transition": "autoregressive", **other}), network)


def test_the_mode_of_a_pipeline_is_put_back(rows):
    """Train mode would add noise; the numbers are those of eval mode, and training can go on."""
    torch.manual_seed(0)
    network = create_text_model("tiny", 28, hidden_dropout_prob=0.5).eval()
    pipeline = D3PMTextPipeline(network, D3PMScheduler(28, 8), character_tokenizer(), sequence_length=LENGTH)
    options = {"num_inference_steps": (4,), "num_timed_samples": 0, "num_samples": 0, "progress_bar": False}
    expected = evaluate_pipeline(pipeline, rows, **options).steps[0].bits_per_dim
    network.train()
    x_0 = torch.stack([rows[i] for i in range(12)])
    bound = evaluate_bound(pipeline.scheduler, pipeline.denoiser, [x_0], num_inference_steps=4, progress_bar=False)
    assert bound.bits_per_dim == pytest.approx(expected, rel=1e-6) and network.training
    assert evaluate_pipeline(pipeline, rows, **options).steps[0].bits_per_dim == pytest.approx(expected, rel=1e-6)
    assert all(part.training for part in network.modules())


def test_a_network_that_predicts_the_previous_step_is_measured_at_every_step(rows):
    scheduler = D3PMScheduler(28, 6, transition="uniform", beta_schedule="cosine", prediction_type="previous")
    pipeline = D3PMTextPipeline(create_text_model("tiny", 28), scheduler, sequence_length=LENGTH)
    pipeline.set_progress_bar_config(disable=True)
    options = {"num_samples": 2, "num_sample_steps": 3, "progress_bar": False}
    result = evaluate_pipeline(pipeline, rows, num_inference_steps=(4, 2), **options)
    assert [row.num_inference_steps for row in result.steps] == [6] and result.samples["num_inference_steps"] == 6


class Means(torch.nn.Module):
    """Features that can be worked out by hand: the means of three parts of an image."""

    num_features = 3

    def forward(self, images):
        return images.float().flatten(1).unflatten(1, (3, -1)).mean(-1)


def test_image_scores():
    pytest.importorskip("torchmetrics")
    generator = torch.Generator().manual_seed(0)
    reference = torch.rand(300, 3, 8, 8, generator=generator)
    same = image_scores(reference, reference, Means())
    assert same["fid"] == pytest.approx(0, abs=1e-3) and same["feature_extractor"] == "Means"
    # Darker by a quarter in every part: the distance of the means, squared, is 3 / 16; that of the spreads is small.
    other = image_scores(reference * 0.5, reference, Means())
    assert other["fid"] == pytest.approx(3 / 16, rel=0.05)
    assert "inception_score" not in other  # it takes classes
    assert image_scores(reference[:, :1], reference[:, :1], Means())["num_reference"] == 300


def test_a_classifier_as_feature_extractor(tmp_path):
    pytest.importorskip("torchmetrics")
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
    classifier = ResNetForImageClassification(config)
    classifier.save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 16, "width": 24}, image_mean=[0.4] * 3, image_std=[0.2] * 3).save_pretrained(
        tmp_path
    )
    extractor = ClassifierFeatures(tmp_path)
    images = torch.rand(40, 3, 16, 24)  # of its own size: nothing is scaled
    classifier.eval()
    pixels = (images - 0.4) / 0.2
    torch.testing.assert_close(extractor(images), classifier.resnet(pixels).pooler_output.flatten(1))
    torch.testing.assert_close(extractor.class_logits(images), classifier(pixels).logits)
    assert extractor.num_features == 16 and extractor(torch.rand(2, 3, 8, 8)).shape == (2, 16)

    classifier.classifier[-1] = torch.nn.Linear(16, 3)  # not its five classes
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="does not end in a linear layer"):
        patch.setattr("d3pm_hf.evaluation.fid.load_pretrained", lambda *_: (classifier, tmp_path, {}))
        ClassifierFeatures(tmp_path)

    classifier.resnet.save_pretrained(tmp_path / "headless")
    with pytest.raises(ValueError, match=r"lack 2 tensors \(classifier.1.bias, classifier.1.weight\) of a ResNetFor"):
        ClassifierFeatures(tmp_path / "headless")

    scores = image_scores(images, images, str(tmp_path))
    assert scores["feature_extractor"] == str(tmp_path) and scores["fid"] == pytest.approx(0, abs=1e-3)
    assert 1 <= scores["inception_score"] <= 5


def test_classifiers_are_found_out_first_and_read_from_safetensors_alone(text, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "evaluate_bound", lambda *_, **__: pytest.fail("the bound came first"))
    with pytest.raises(OSError):
        evaluate_pipeline(text, rows, feature_extractor=str(tmp_path / "none"))
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=5)
    config.save_pretrained(tmp_path)
    torch.save(ResNetForImageClassification(config).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        evaluate_pipeline(text, rows, feature_extractor=str(tmp_path))


def test_metrics():
    """-log p of all examples over their size, and the standard error of a ratio of sums, in their units."""
    pytest.importorskip("evaluate")
    from d3pm_hf.evaluation.metrics import BitsPerDim, Perplexity, WordPerplexity

    nats, sizes = np.array([1.0, 3.0, 5.0]), np.array([2, 3, 5])
    ratio = 9 / 10
    error = np.std(nats - ratio * sizes, ddof=1) * math.sqrt(3) / 10
    for metric, size, name, value, slope in (
        (BitsPerDim, "elements", "bits_per_dim", ratio / math.log(2), 1 / math.log(2)),
        (Perplexity, "tokens", "perplexity", math.exp(ratio), math.exp(ratio)),
        (WordPerplexity, "words", "word_perplexity", math.exp(ratio), math.exp(ratio)),
    ):
        expected = {name: value, f"{name}_standard_error": error * slope}
        assert metric().compute(nats=nats, **{size: sizes}) == pytest.approx(expected, rel=1e-12)
        in_batches = metric()
        in_batches.add_batch(nats=nats[:1], **{size: sizes[:1]})
        in_batches.add_batch(nats=nats[1:], **{size: sizes[1:]})
        assert in_batches.compute() == pytest.approx(expected, rel=1e-12)


def test_metrics_of_a_bound_are_its_own(text, rows):
    """Bits and perplexities have one definition, whether a bound or a metric is asked."""
    pytest.importorskip("evaluate")
    from d3pm_hf.evaluation.metrics import BitsPerDim, Perplexity, WordPerplexity

    mask = torch.arange(LENGTH) < torch.arange(5, 17)[:, None]
    x_0 = torch.stack([rows[i] for i in range(12)])
    bound = evaluate_bound(text.scheduler, text.denoiser, [(x_0, mask)], progress_bar=False)
    assert bound.elements_per_example.tolist() == mask.sum(1).tolist()
    assert bound.nats_per_example.sum().item() == pytest.approx(bound.total * bound.num_elements, rel=1e-12)
    nats, elements = bound.nats_per_example, bound.elements_per_example
    word_perplexity = bound.word_perplexity(0.25 * bound.num_elements)
    for metric, sizes, values in (
        (BitsPerDim(), {"elements": elements}, (bound.bits_per_dim, bound.bits_per_dim_standard_error)),
        (Perplexity(), {"tokens": elements}, (bound.perplexity, bound.perplexity_standard_error)),
        (WordPerplexity(), {"words": 0.25 * elements}, (word_perplexity, 4 * bound.standard_error * word_perplexity)),
    ):
        assert tuple(metric.compute(nats=nats, **sizes).values()) == pytest.approx(values, rel=1e-12)


def test_perplexities_of_words(text, rows):
    """They are those of the bound, at the number of words per token of the whole data set."""

    class Counted(list):
        num_words = 48

    data = Counted(rows[i] for i in range(12))
    options = {"num_timed_samples": 0, "num_samples": 0, "progress_bar": False}
    (row,) = evaluate_pipeline(text, data, num_inference_steps=(5,), **options).steps
    bound = evaluate_bound(
        text.scheduler, text.denoiser, [torch.stack(data)], num_inference_steps=5, progress_bar=False
    )
    assert row.word_perplexity == pytest.approx(bound.word_perplexity(48), rel=1e-5)
    error = bound.word_perplexity(48) * bound.standard_error * 12 * LENGTH / 48
    assert row.word_perplexity_standard_error == pytest.approx(error, rel=1e-4)


def test_results_stand_once_on_a_card():
    """Those of the same data leave the table of results, and others stay."""
    row = StepResult(20, 2.85, 0.01, 7.2, 0.05, "sampled terms")
    evaluation = Evaluation("a | b", "test", [row], task="text-generation")
    head = "| data | metric | value | protocol |\n| --- | --- | --- | --- |"
    own, other = (f"| {name}, test | Bits | 3.0 | all |" for name in ("a \\| b", "other"))
    for rows, kept in (([own], []), ([own, other], [other]), ([other], [other])):
        text = "\n".join(["# Card", "", "## Results", "", head, *rows, "", "## A sample", "", "abc"])
        found = evaluation.replace_results(text)
        assert own not in found and (other in found) == (head in found) == bool(kept)
        assert found.count("## Results") == found.count("2.850") == 1 and found.endswith("\n## A sample\n\nabc\n")
        assert evaluation.replace_results(found) == found
    assert evaluation.replace_results("# Mine").startswith("\n# Mine\n\n## Results\n\n<!-- measured")
    # What the user has written stays, and so does what was measured on other data; a table without rows goes wherever it stands.
    others = Evaluation("other", "test", [row], task="text-generation")
    text = "\n".join(["# Card", "", "## Results", "", "Measured by me.", "", head, own, "", "Thanks."])
    found = evaluation.replace_results(others.replace_results(text))
    assert "Measured by me." in found and "Thanks." in found and head not in found and own not in found
    assert found.count("2.850") == 2 and others.replace_results(found) == evaluation.replace_results(found) == found


def test_own_data_need_a_path(text):
    message = "dataset is 'text', which stands for your own data: pass their path as dataset_path"
    with pytest.raises(ValueError, match=message):
        load_evaluation_data(text, "text", "test")


def test_the_package_evaluate_is_optional(text, rows, monkeypatch):
    monkeypatch.setitem(sys.modules, "evaluate", None)
    monkeypatch.delitem(sys.modules, "d3pm_hf.evaluation.metrics", raising=False)
    monkeypatch.delattr(evaluation, "metrics", raising=False)
    options = {"num_timed_samples": 0, "num_samples": 0, "progress_bar": False}
    assert evaluate_pipeline(text, rows, num_inference_steps=(2,), **options).steps[0].bits_per_dim > 0
    with pytest.raises(ImportError, match=r"^metrics need the package evaluate: pip install 'd3pm-hf\[evaluation\]'$"):
        importlib.import_module("d3pm_hf.evaluation.metrics")


def test_batches_are_spread_over_the_data(rows):
    everything = torch.stack([rows[i] for i in range(12)])
    assert torch.equal(torch.cat(list(evaluation_batches(rows, 5))), everything)
    assert [len(batch) for batch in evaluation_batches(rows, 5)] == [5, 5, 2]
    assert torch.equal(torch.cat(list(evaluation_batches(rows, 2, max_examples=3))), everything[[0, 4, 8]])
    assert torch.equal(torch.cat(list(evaluation_batches(rows, 20, max_examples=100))), everything)


def test_samples_are_those_of_their_seeds(text, capsys):
    """One generator draws all batches, so that two seeds share none; no bar is shown, and the settings of bars stay."""
    text.set_progress_bar_config(desc="mine")
    samples = draw_samples(text, 5, 3, seed=7, batch_size=2)
    assert "mine" not in capsys.readouterr().err and text._progress_bar_config == {"desc": "mine"}
    text.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(7)
    expected = [text(batch_size=n, num_inference_steps=3, generator=generator).sequences for n in (2, 2, 1)]
    assert_same_draws(samples, torch.cat(expected))
    others = {tuple(row) for row in draw_samples(text, 5, 3, seed=8, batch_size=2).tolist()}
    assert others.isdisjoint(tuple(row) for row in samples.tolist())
    assert len(draw_samples(text, 5, 3, seed=7)) == 5


def test_the_program_ends_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["evaluate", str(tmp_path), "--dataset", "digits"])
    with pytest.raises(SystemExit, match="error: .* has no model_index.json"):
        runpy.run_module("d3pm_hf.evaluation", run_name="__main__")
