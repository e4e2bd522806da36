# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`examples/train.py` with language models of transformers and texts of data sets."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hub_server import LoopbackHub
from test_causal_lm import tiny_model as tiny_causal_model
from test_causal_lm import tiny_tokenizer as tiny_causal_tokenizer
from test_masked_lm import tiny_model, tiny_tokenizer

from d3pm_hf import D3PMPipeline
from d3pm_hf.training import read_log


pytestmark = pytest.mark.usefixtures("fresh_accelerator")
TRAIN = Path(__file__).parents[1] / "examples" / "train.py"
SHORT = (
    "--max_train_steps 3 --train_batch_size 4 --logging_steps 1 --checkpointing_steps 3 --validation_steps 3 --num_samples 2 "
    "--num_inference_steps 3 --max_eval_samples 4 --num_eval_timesteps 3 --lr_warmup_steps 1 --num_train_timesteps 20"
)
TEXTS = ["acdc", "hill", "fry", "wig", "shelve", "mask"] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny models with their tokenizers, and texts as files."""
    folder = tmp_path_factory.mktemp("models")
    for name, model, tokenizer in (
        ("masked", tiny_model("bert"), tiny_tokenizer()),
        ("causal", tiny_causal_model("gpt2"), tiny_causal_tokenizer()),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    lines = [json.dumps({"word": text, "number": i}) for i, text in enumerate(TEXTS)]
    (folder / "words.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "words.csv").write_text("word,number\n" + "".join(f"{text},{i}\n" for i, text in enumerate(TEXTS)))
    (folder / "lines.txt").write_text("\n\n".join(TEXTS) + "\n")
    return folder


def run_script(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", [str(TRAIN), *" ".join(options).split()])
    runpy.run_path(str(TRAIN), run_name="__main__")


def check_run(output_dir):
    """The pipeline of a run, after a look at its log and its card."""
    steps = [line["step"] for line in read_log(output_dir / "log.jsonl") if "loss" in line]
    assert steps == [1, 2, 3]
    return D3PMPipeline.from_pretrained(output_dir), (output_dir / "README.md").read_text()


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("words.csv", "--text_column word --line_by_line"),
        ("words.jsonl", "--text_column word --streaming --max_seq_length 12"),
        ("lines.txt", "--max_seq_length 12"),
    ],
)
def test_masked_language_model(file, options, folder, tmp_path, monkeypatch):
    model = f"--model_name_or_path {folder / 'masked'} --dataset_name {folder / file} --output_dir {tmp_path / 'run'}"
    run_script(monkeypatch, model, options, SHORT, "--preset finetune")
    pipeline, card = check_run(tmp_path / "run")
    assert type(pipeline.text_model).__name__ == "BertForMaskedLM" and pipeline.config.add_special_tokens
    assert pipeline.config.sequence_length == (12 if "12" in options else 40)
    assert file in card and "base_model" not in card  # a local folder


def test_causal_language_model(folder, tmp_path, monkeypatch):
    for name, options in (("packed", ""), ("lines", "--line_by_line")):
        run_script(
            monkeypatch,
            f"--model_name_or_path {folder / 'causal'} --transition autoregressive --dataset_name {folder / 'lines.txt'}",
            f"--max_seq_length 8 {SHORT} --output_dir {tmp_path / name} {options}",
        )
        pipeline, _ = check_run(tmp_path / name)
        assert len(pipeline.scheduler) == 8 and type(pipeline.text_model).__name__ == "GPT2LMHeadModel"


def test_new_weights(folder, tmp_path, monkeypatch):
    model = f"--config_name {folder / 'masked'} --dataset_name {folder / 'words.csv'} --text_column word"
    run_script(monkeypatch, model, SHORT, f"--output_dir {tmp_path / 'run'} --max_seq_length 12")
    check_run(tmp_path / "run")


TWO_RUNS = """
import runpy, sys
script, *options = sys.argv[1:]
for data in ("some/words", "some/nothing"):
    sys.argv = [script, *options, "--dataset_name", data, "--overwrite_output_dir"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        print(ended)
"""


def test_from_the_hub(folder, tmp_path):
    """The card of a run that started from the Hub names the model and the data set."""
    with LoopbackHub() as hub:
        hub.put("some/bert", {path.name: path.read_bytes() for path in (folder / "masked").iterdir()})
        hub.put("some/words", {"train.jsonl": (folder / "words.jsonl").read_bytes()}, repo_type="dataset")
        environment = hub.environment(tmp_path / "home", PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
        options = f"--model_name_or_path some/bert --text_column word --max_seq_length 12 {SHORT} --num_samples 0"
        run = subprocess.run(
            [sys.executable, "-c", TWO_RUNS, str(TRAIN), *options.split(), "--output_dir", str(tmp_path / "run")],
            env={**environment, "ACCELERATE_USE_CPU": "true"},
            capture_output=True,
            text=True,
        )
    assert run.returncode == 0, run.stderr
    assert "error: the data set some/nothing cannot be loaded" in run.stdout
    data = yaml.safe_load(check_run(tmp_path / "run")[1].split("---")[1])
    assert data["base_model"] == "some/bert" and data["base_model_relation"] == "finetune"
    assert data["datasets"] in ("some/words", ["some/words"])


def test_what_is_refused_is_said_in_a_sentence(folder, tmp_path, monkeypatch):
    masked, words = f"--model_name_or_path {folder / 'masked'}", f"--dataset_name {folder / 'words.csv'}"
    (tmp_path / "long.jsonl").write_text(json.dumps({"word": "acdc" * 20}) + "\n")
    (tmp_path / "empty.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in ("acdc", " ")))
    (tmp_path / "words.doc").write_text("acdc")
    for options, sentence in (
        (
            f"{masked} {words}",
            "text_column is 'text', and .*words.csv has the columns 'word', 'number': pass one of them",
        ),
        (
            f"{masked} --dataset_name {tmp_path / 'words.doc'}",
            "its name must end in .csv, .json, .jsonl, .parquet, .txt",
        ),
        (
            masked,
            "pass --model_name_or_path .* with --dataset_name for a language model of transformers, or --dataset_path",
        ),
        (words, "pass --model_name_or_path"),
        (
            f"{masked} --dataset_name {tmp_path / 'empty.jsonl'} --text_column word",
            "document 1 is ' ', which has no text",
        ),
        (
            f"{masked} --dataset_name {tmp_path / 'long.jsonl'} --text_column word --line_by_line",
            "document 0 has 82 tokens, and max_length is 40: pass truncation=True",
        ),
        (
            f"{masked} {words} --text_column word --max_seq_length 41",
            "max_seq_length is 41, and the network has 40 positions: pass --max_seq_length 40 or less",
        ),
        (
            f"{masked} {words} --text_column word --truncation",
            "--truncation cuts single texts: pass --line_by_line too",
        ),
        (
            f"{masked} {words} --text_column word --transition uniform",
            "transition is 'uniform', and a language model of transformers is a denoiser of absorbing or autoregressive",
        ),
        (
            f"--model_name_or_path {folder / 'causal'} {words} --text_column word",
            "causal has a configuration that AutoModelForMaskedLM does not know",
        ),
    ):
        with pytest.raises(SystemExit, match=f"error: .*{sentence}"):
            run_script(monkeypatch, options, SHORT, f"--output_dir {tmp_path / 'run'}")
