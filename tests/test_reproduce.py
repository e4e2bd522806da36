# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The page of results says what was measured, and the scripts behind it run."""

import argparse
import importlib.util
import json
import math
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    character_tokenizer,
    create_text_model,
    create_unet,
)
from d3pm_hf.evaluation import ClassifierFeatures
from d3pm_hf.evaluation.__main__ import create_parser
from d3pm_hf.evaluation.__main__ import main as measure_here
from d3pm_hf.training import D3PMTrainingArguments
from d3pm_hf.training.script_arguments import (
    ImageModelArguments,
    ProcessArguments,
    TextModelArguments,
    parse_arguments,
)


ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "reproduce"


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run, figures, tables, frontier, cost, learning, publish = (
    load_script(name) for name in ("run", "figures", "tables", "frontier", "cost", "learning", "publish")
)


def call(monkeypatch, module, *words):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
    module.main()


def test_the_tables_of_the_pages_are_those_of_the_results():
    pages = [page.read_text(encoding="utf-8") for page in tables.PAGES]
    assert sum(page.count("<!-- table: ") for page in pages) == len(tables.TABLES)
    for page in pages:
        assert tables.fill_in(page, tables.Results(ROOT / "docs" / "results")) == page


@pytest.mark.parametrize("name", run.RUNS)
def test_the_flags_of_every_run_are_known(name):
    table, flags = run.RUNS[name]
    script = runpy.run_path(str(run.EXAMPLES / table["script"]))
    networks = {run.CIFAR10["script"]: [ImageModelArguments], "train.py": [TextModelArguments, ImageModelArguments]}
    classes = [
        script["DataArguments"],
        *networks.get(table["script"], [TextModelArguments]),
        ProcessArguments,
        D3PMTrainingArguments,
    ]
    words = [*flags.split(), *table["train"].split()]
    *_, process, training = parse_arguments(classes, script["PRESETS"], "", arguments=words)
    assert process.transition in name and training.max_train_steps <= 30_000
    papers_choice = "vb" if process.transition in ("uniform", "nearest_neighbor", "autoregressive") else "hybrid"
    said = next((loss for loss in ("hybrid_denoising", "hybrid", "vb") if name.endswith(loss)), papers_choice)
    assert name in run.REREADINGS or said == (
        "hybrid_denoising" if training.auxiliary == "denoising" else training.loss
    )
    create_parser().parse_args(["checkpoint", *table["evaluate"].split()])


def test_a_run_trains_measures_and_leaves_its_result(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("the cat sat on the mat and saw the dog " * 60)
    small = (
        "--hidden_size 16 --num_hidden_layers 1 --num_attention_heads 2 --intermediate_size 32 --sequence_length 16 "
    )
    short = "--max_train_steps 2 --train_batch_size 4 --validation_steps 2 --num_samples 0 --num_train_timesteps 20"
    short += " --max_eval_samples 2 --num_eval_timesteps 2"
    monkeypatch.setitem(run.TEXT, "train", small + short)
    measured = "--dataset text8 --num_inference_steps 20 4 --max_eval_samples 4 --num_samples 2 --num_sample_steps 4"
    monkeypatch.setitem(run.TEXT, "evaluate", measured)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folders = ["--output_dir", tmp_path / "out", "--results_dir", tmp_path / "results"]
    start = run.call
    # The training is a process of its own; the other command would only import everything once more.
    monkeypatch.setattr(
        run, "call", lambda command: start(command) if "train" in command[0] else measure_here(command[2:])
    )
    call(monkeypatch, run, "text-uniform", "--seed", 3, "--text_path", tmp_path / "text.txt", *folders)
    result = json.loads((tmp_path / "results" / "text-uniform-3.json").read_text())
    assert (result["run"], result["seed"], result["dataset"]) == ("text-uniform", 3, "text8 (text.txt)")
    assert [row["num_inference_steps"] for row in result["steps"]] == [20, 4] and result["train_seconds"] > 0
    assert result["processor_seconds"] > 0 and [line["step"] for line in result["validation"]] == [2]

    monkeypatch.setitem(publish.CHECKPOINTS, "mine", ("text-uniform", "cats and dogs", "text.txt"))
    monkeypatch.setitem(publish.RUNS["text-uniform"][0], "evaluate", measured)
    monkeypatch.setattr(publish, "call", lambda command: measure_here(command[2:]))
    publish.publish("mine", tmp_path / "out/text-uniform-3", tmp_path / "mine", str(tmp_path / "text.txt"))
    card = ModelCard.load(tmp_path / "mine/README.md")
    bounds = [round(row["bits_per_dim"], 4) for row in result["steps"]]
    assert [value.metric_value for value in card.data.eval_results] == bounds and "cats and dogs" in card.text
    assert len(D3PMPipeline.from_pretrained(tmp_path / "mine")(num_inference_steps=4).texts) == 1


def test_what_was_not_trained_is_not_measured(tmp_path, monkeypatch, capsys):
    for words in (["text-uniform", "--skip_training"], ["text-uniform_hybrid_reread"]):
        with pytest.raises(SystemExit):
            call(monkeypatch, run, *words, "--output_dir", tmp_path, "--results_dir", tmp_path)
        assert "holds no finished run: train it first" in capsys.readouterr().err


def test_learning_gives_each_recipe_the_same_processor_time(tmp_path, monkeypatch, capsys):
    """The number of steps follows from the costs; the flags of every recipe are known; choices do not read the test text."""
    for split in ("train", "validation"):
        (tmp_path / f"text.{split}.txt").write_text("the cat sat on the mat and saw the dog " * 60)
    options = argparse.Namespace(text_path=str(tmp_path), output_dir=tmp_path / "out")
    recipes = {name: learning.Recipe(name, options, seed=2, num_steps=5) for name in learning.RECIPES}
    assert all(recipe.training.max_train_steps == 5 and recipe.training.seed == 2 for recipe in recipes.values())
    earlier, preset = recipes["earlier"], recipes["preset"]
    assert (earlier.network.num_attention_heads, earlier.training.timestep_sampling) == (4, "uniform")
    assert (preset.network.position_bias_init, preset.training.timestep_sampling) == ("offset", "logit_normal")
    for name in ("preset", "earlier"):
        small = (
            "--hidden_size 16 --num_hidden_layers 1 --intermediate_size 32 --sequence_length 16 --train_batch_size 4"
        )
        monkeypatch.setitem(learning.RECIPES, name, f"{learning.RECIPES[name]} {small}")
    assert len(learning.step_costs([learning.Recipe("preset", options, 0)], rounds=1, steps=1)) == 1
    monkeypatch.setattr(learning, "step_costs", lambda recipes: [2.0, 3.0])
    words = ["--text_path", tmp_path, "--output_dir", tmp_path / "out", "--output_file", tmp_path / "results.jsonl"]
    monkeypatch.setattr(learning, "EARLIER_STEPS", 4)
    call(monkeypatch, learning, "preset", "--share", 0.5, "--split", "validation", "--max_eval_samples", 2, *words)
    result = json.loads((tmp_path / "results.jsonl").read_text())
    assert (result["recipe"], result["num_steps"], result["split"]) == ("preset", 3, "validation")
    assert result["bits_1000"] > 0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Character models of every process, as small as can be."""
    folder = tmp_path_factory.mktemp("checkpoints")
    length = 16
    embeddings = torch.randn(27, 4, generator=torch.Generator().manual_seed(0))
    schedulers = {
        "absorbing": D3PMScheduler(28, 20),
        "uniform": D3PMScheduler(27, 20, transition="uniform", beta_schedule="cosine"),
        "nearest_neighbor": D3PMScheduler(
            27, 20, transition="nearest_neighbor", beta_schedule="reciprocal", embeddings=embeddings
        ),
        "autoregressive": D3PMScheduler(28, length, transition="autoregressive"),
    }
    for name, scheduler in schedulers.items():
        is_causal = name == "autoregressive"
        model = create_text_model(
            "tiny", scheduler.config.num_classes, is_decoder=is_causal, timestep_conditioning=not is_causal
        )
        pipeline = D3PMTextPipeline(model, scheduler, character_tokenizer(), sequence_length=length)
        pipeline.save_pretrained(folder / f"text-{name}-0")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    return folder


@pytest.mark.slow
def test_figures_of_text(checkpoints, tmp_path, monkeypatch):
    paths = ["--checkpoints", checkpoints, "--text_path", checkpoints / "text.txt", "--output_dir", tmp_path]
    names = ["mask_weighting", "neighbor_graph", "generations", "completions", "scaling", "tokens_seen"]
    call(monkeypatch, figures, *names, *paths)
    for name in names:
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert min(picture.size) > 300 and len(picture.convert("L").getcolors()) > 50


@pytest.mark.slow
def test_figures_of_images(tmp_path, monkeypatch):
    folders = {"cifar10": (256, 8, 3), "digits": (17, 8, 1)}
    for data, (num_classes, size, channels) in folders.items():
        processes = {
            "uniform": D3PMScheduler(num_classes, 12, transition="uniform", beta_schedule="cosine"),
            "absorbing": D3PMScheduler(
                num_classes, 12, beta_schedule="reciprocal", mask_token_id=num_classes // 2, mask_in_data=True
            ),
            "gaussian": D3PMScheduler(num_classes, 12, transition="gaussian", beta_schedule="linear"),
            "gaussian_logistic": D3PMScheduler(
                num_classes, 12, transition="gaussian", beta_schedule="linear", prediction_type="logistic"
            ),
        }
        for name, scheduler in processes.items():
            unet = create_unet("tiny", num_classes, size, channels, scheduler.config.prediction_type)
            D3PMImagePipeline(unet, scheduler).save_pretrained(tmp_path / f"{data}-{name}-0")
    shutil.copytree(tmp_path / "cifar10-gaussian_logistic-0", tmp_path / "cifar10_full-gaussian_logistic-0")
    sizes = {"progressive": (11, 8), "samples": (12, 8), "samples_at_full_size": (12, 2)}
    call(monkeypatch, figures, *sizes, "--checkpoints", tmp_path, "--output_dir", tmp_path)
    for name, (columns, rows) in sizes.items():
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.size == (columns * 100, rows * 100)


def test_the_time_of_every_model_is_measured(checkpoints, tmp_path, monkeypatch):
    paths = ["--checkpoints", checkpoints, "--output_dir", tmp_path, "--results_dir", tmp_path]
    monkeypatch.setattr(figures, "TIMED_STEPS", (2, 20))
    call(monkeypatch, figures, "inference_time", *paths)
    rows = json.loads((tmp_path / "inference_time.json").read_text())["rows"]
    assert len(rows) == 3 * 2 + 1 and all(row["seconds"] > 0 for row in rows)


@pytest.mark.slow
def test_samplers_are_judged_side_by_side(checkpoints, tmp_path, monkeypatch):
    settings = [replace(setting, steps=setting.steps and min(setting.steps // 8, 8)) for setting in frontier.SETTINGS]
    monkeypatch.setattr(frontier, "SETTINGS", settings)
    paths = ["--checkpoints", checkpoints, "--text_path", checkpoints / "text.txt", "--output_dir", tmp_path]
    counts = ["--turns", 2, "--batch_size", 2, "--num_examples", 4, "--judge", "text-autoregressive-0"]
    call(monkeypatch, frontier, *paths, *counts, "--results_dir", tmp_path)
    result = json.loads((tmp_path / "frontier.json").read_text())
    *rows, test = result["rows"]
    assert [(row["sampler"], row["temperature"]) for row in rows] == [
        (setting.title, temperature) for setting in settings for temperature in setting.temperatures
    ]
    for row in rows:
        assert row["num_samples"] in (2, 4) and row["nll"] > 0 and row["seconds"] > 0 and len(row["text"]) == 16
    calls = {row["sampler"]: row["calls"] for row in rows}
    assert calls["absorbing, first hitting"] == calls["autoregressive, left to right"] == 16
    assert calls["absorbing, 1000 even"] == 20 and calls["absorbing, 64 even"] == 8
    assert test["sampler"] == "test text" and test["nll"] > 0
    with Image.open(tmp_path / "frontier.png") as picture:
        assert min(picture.size) > 300


def test_the_gap_to_a_curve_at_equal_entropy():
    def point(sampler, entropy, nll, errors=(0.0, 0.0)):
        both = {"entropy": entropy, "ngram_entropy": 3 * entropy}
        noise = {"nll_standard_error": errors[0], "entropy_standard_error": errors[1]}
        return {
            "sampler": sampler,
            "num_samples": 8,
            "nll": nll,
            **both,
            **noise,
            "ngram_entropy_standard_error": 3 * errors[1],
        }

    curve = [point("a", 3.0, 2.0), point("a", 1.0, 1.0), point("a", 4.0, 4.0)]
    rows = [*curve, point("b", 2.5, 2.0), point("b", 3.5, 2.5), point("b", 0.5, 0.5), point("b", 2.0, 1.5, (0.3, 0.8))]
    few = {**rows[-1], "num_samples": 4}
    frontier.add_gaps([*rows, few], "a")
    assert few["gap_at_entropy"] == pytest.approx(0.0) and few["gap_at_ngram_entropy"] is None
    for name in ("entropy", "ngram_entropy"):
        assert [row[f"gap_at_{name}"] for row in rows] == pytest.approx([None] * 3 + [0.25, -0.5, None, 0.0])
        assert rows[-1][f"gap_at_{name}_standard_error"] == pytest.approx(0.5)  # 0.3 and 0.8 times the slope of 1/2


def test_weights_of_masks_are_those_of_the_formula():
    """alpha(k), with (t/T)^k (1 - t/T)^(n - k)."""
    weights = figures.mask_weights(6, 4)
    for k, weight in enumerate(weights.tolist()):
        terms = (math.comb(6, k) * (t / 4) ** k * (1 - t / 4) ** (6 - k) for t in range(1, 5))
        assert weight == pytest.approx(sum(terms) / 4, abs=1e-12)


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory):
    """The two files that prepare_cifar10.py writes, from a package of few images."""
    folder = tmp_path_factory.mktemp("cifar10")
    rng = np.random.default_rng(0)
    prepare = load_script("prepare_cifar10")
    for pictures, labels in prepare.FILES.values():
        for name in pictures:
            Image.fromarray(rng.integers(0, 256, (8, 1024, 3), dtype=np.uint8)).save(folder / name)
        (folder / labels).write_text(json.dumps(rng.integers(0, 10, 8 * len(pictures)).tolist()))
    with pytest.MonkeyPatch.context() as monkeypatch:
        call(monkeypatch, prepare, folder, "--output_dir", folder / "out")
    return folder


def test_cifar10_of_the_package(cifar10, monkeypatch):
    from d3pm_hf.data import load_cifar10

    dataset = load_cifar10("train", dataset_path=cifar10 / "out", cache_dir=str(cifar10 / "cache"))
    assert len(dataset) == 40
    pixels = np.asarray(Image.open(cifar10 / "data_batch_2.png"))[3]  # the fourth image of the second picture
    assert (dataset[11].numpy() == pixels.reshape(32, 32, 3).transpose(2, 0, 1)).all()


def test_a_classifier_is_trained_and_takes_images(cifar10, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cifar10 / "cache"))
    options = ["--dataset_path", cifar10 / "out", "--output_dir", tmp_path / "resnet"]
    call(monkeypatch, load_script("train_classifier"), *options, "--num_train_epochs", 1, "--train_batch_size", 8)
    assert 0 <= json.loads((tmp_path / "resnet" / "accuracy.json").read_text())["test_accuracy"] <= 1
    extractor = ClassifierFeatures(tmp_path / "resnet")
    assert extractor(torch.rand(2, 3, 32, 32)).shape == (2, 128)


@pytest.mark.slow
def test_the_operations_of_the_papers_runs(monkeypatch, capsys):
    """A text network takes about six operations for each weight and token; the page has what the script prints."""
    call(monkeypatch, cost)
    printed = capsys.readouterr().out.strip()
    assert printed in (ROOT / "docs" / "source" / "en" / "results.md").read_text(encoding="utf-8")
    text8 = cost.RUNS[0]
    with torch.device("meta"):
        network = text8.create_network()
    weights = sum(w.numel() for name, w in network.named_parameters() if "encoder" in name and w.ndim == 2)
    assert 1.0 < text8.count_operations() / (6 * weights * 256) < 1.1
    call(monkeypatch, cost, "--num_gpus", 16, "--teraflops", 200)
    hours = [
        [int(line.split("|")[-2]) for line in part.splitlines()[2:]] for part in (printed, capsys.readouterr().out)
    ]
    assert all(abs(slow / 4 - fast) <= 1 for slow, fast in zip(*hours))
