# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Hostile files: whatever a field holds, the checkpoint loads and samples, or one sentence of this package says why not.

Every field of every JSON file of a checkpoint is replaced by values of wrong types, sizes and depths. `make test` tries one
value on each field, so that each value meets fields of every file; `make test-slow` tries more of them on more files.
"""

import copy
import itertools
import json
import shutil
import traceback
from pathlib import Path

import pytest
import torch
from test_checkpoints import make_text
from test_masked_lm import tiny_model, tiny_tokenizer

import d3pm_hf
from d3pm_hf import (
    D3PMImagePipeline,
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    character_tokenizer,
    create_model_card,
    create_text_model,
    create_unet,
)
from d3pm_hf.data.sources import load_splits
from d3pm_hf.evaluation import Evaluation, StepResult
from d3pm_hf.training import read_log
from d3pm_hf.training.progress import JSONLinesTracker
from d3pm_hf.training.run_state import SETTINGS_NAME, load_checkpoint


pytestmark = pytest.mark.filterwarnings("ignore")
PACKAGE = Path(d3pm_hf.__file__).parent
NESTED: object = 1
for _ in range(200):
    NESTED = [NESTED]
VALUES = [
    *(None, True, -1, 0, 3, 10**12, 10**400, 1.5, 1e308, float("nan"), float("inf"), "", "x", "\udcff", "a" * 100_000),
    *([], [1], [None], ["x"] * 3, [[1]], {}, {"a": 1}, NESTED),
]
# Values tried on each field by `make test` and by `make test-slow`. They take turns: the next field gets the next values.
NUM_TRIED, NUM_TRIED_SLOWLY = 1, 7
# Contents in place of a whole file.
CONTENTS = [
    b"",
    b"\xff\xfe",
    b"null",
    b"3",
    b"[1]",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a": ' + b"9" * 5_000 + b"}",
    b"{",
]


def assert_explained(call):
    """A call ends normally, or in one short sentence that this package has raised."""
    try:
        call()
    except BaseException as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        assert type(error) in (ValueError, OSError, FileNotFoundError), repr(error)[:300]
        assert PACKAGE in raised_in.parents, f"{raised_in}: {error!r}"[:300]
        assert "\n" not in str(error) and len(str(error)) < 1_500


# Checkpoints


def make_gaussian():
    scheduler = D3PMScheduler(28, 10, transition="gaussian", trained_betas=[0.1] * 10)
    model = create_text_model("tiny", 28, backbone="t5")
    return D3PMTextPipeline(model, scheduler, character_tokenizer(), sequence_length=8)


def make_neighbors():
    options = {"embeddings": torch.eye(28), "num_neighbors": 5, "trained_exponents": [0.1] * 10}
    scheduler = D3PMScheduler(28, 10, transition="nearest_neighbor", inference_timesteps={"2": [9, 4]}, **options)
    return D3PMTextPipeline(create_text_model("tiny", 28), scheduler, character_tokenizer(), sequence_length=8)


def make_image():
    scheduler = D3PMScheduler(17, 10, transition="uniform", beta_schedule="cosine")
    return D3PMImagePipeline(create_unet("tiny", 17, 8, 1), scheduler)


def use_pipeline(folder):
    """Loads a checkpoint, samples, infills and writes a card."""
    pipeline = D3PMPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    takes_all = pipeline.scheduler.config.prediction_type == "previous" or pipeline.scheduler.family.is_autoregressive
    if takes_all and len(pipeline.scheduler) > 100:
        return
    options = {"num_inference_steps": None if takes_all else 1, "generator": torch.Generator().manual_seed(0)}
    pipeline(**options)
    if pipeline.task == "text-generation":
        pipeline("ab[MASK]", **options)
    create_model_card(pipeline)


def save_masked(folder):
    tiny_model("bert").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def use_masked(folder):
    pipeline = D3PMTextPipeline.from_masked_lm(folder, num_train_timesteps=4)
    pipeline.set_progress_bar_config(disable=True)
    pipeline("ac[MASK]", num_inference_steps=1)


# How a checkpoint is written, and used.
KINDS = {
    "text": (lambda folder: make_text().save_pretrained(folder), use_pipeline),
    "gaussian": (lambda folder: make_gaussian().save_pretrained(folder), use_pipeline),
    "neighbors": (lambda folder: make_neighbors().save_pretrained(folder), use_pipeline),
    "image": (lambda folder: make_image().save_pretrained(folder), use_pipeline),
    "masked": (save_masked, use_masked),
}
# The files whose fields are changed.
NAMES = {
    "text": ("model_index.json", "scheduler/scheduler_config.json", "text_model/config.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"),
    "gaussian": ("scheduler/scheduler_config.json", "text_model/config.json"),
    "neighbors": ("scheduler/scheduler_config.json",),
    "image": ("scheduler/scheduler_config.json", "unet/config.json"),
    "masked": ("config.json", "tokenizer.json", "tokenizer_config.json"),
}  # fmt: skip
CASES = [(kind, name) for kind, names in NAMES.items() for name in names]
FAST = [case for case in CASES if case[0] in ("text", "masked") or case[1] == "unet/config.json"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    for kind, (save, use) in KINDS.items():
        save(root / kind)
        use(root / kind)
    return root


def fields(value, path=()):
    """The paths of all fields: of three levels, and of a few entries of a vocabulary."""
    entries = []
    if isinstance(value, dict):
        entries = list(value.items())[: 3 if path[-1:] == ("vocab",) else None]
    elif isinstance(value, list):
        entries = list(enumerate(value))[:1]
    for key, inner in entries:
        yield (*path, key)
        if len(path) < 3:
            yield from fields(inner, (*path, key))


def change(values, path, value):
    changed = copy.deepcopy(values)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def try_values(root, kind, name, tmp_path, number):
    cycle = itertools.cycle(VALUES)
    folder = shutil.copytree(root / kind, tmp_path / kind)
    values = json.loads((folder / name).read_text())
    use = KINDS[kind][1]
    for path in fields(values):
        for value in itertools.islice(cycle, number):
            (folder / name).write_text(json.dumps(change(values, path, value)))
            try:
                assert_explained(lambda: use(folder))
            except AssertionError as error:
                raise AssertionError(f"{name} with {path} = {value!r:.60}: {error}") from error


@pytest.mark.parametrize(("kind", "name"), FAST)
def test_a_few_values_of_every_field(saved, kind, name, tmp_path):
    try_values(saved, kind, name, tmp_path, NUM_TRIED)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_more_values_of_every_field(saved, kind, name, tmp_path):
    try_values(saved, kind, name, tmp_path, NUM_TRIED_SLOWLY)


@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if case[0] in ("text", "masked")])
def test_contents_of_every_file(saved, kind, name, tmp_path):
    folder = shutil.copytree(saved / kind, tmp_path / kind)
    for content in CONTENTS:
        (folder / name).write_bytes(content)
        with pytest.raises((ValueError, OSError)):
            KINDS[kind][1](folder)
        assert_explained(lambda: KINDS[kind][1](folder))


@pytest.mark.parametrize(
    ("kind", "name", "path", "value", "words"),
    [
        ("text", "model_index.json", ("sequence_length",), 10**12, "sequence_length is 1000000000000: it must be"),
        ("gaussian", "model_index.json", ("sequence_length",), 10**12, "sequence_length is 1000000000000: it must be"),
        ("text", "model_index.json", ("sequence_length",), 600, "a text has 600 tokens, and the network has 64 pos"),
        ("text", "model_index.json", ("tokenizer", 0), "", "names .TokenizersBackend as the tokenizer, which is not"),
        ("neighbors", "scheduler/scheduler_config.json", ("trained_exponents", 0), 10**400, "alpha_1 of .* is 1000+[.]"),
        ("neighbors", "scheduler/scheduler_config.json", ("trained_exponents", 0), 1e300, "in 0 .. 1e12, or 'inf' for"),
        ("gaussian", "scheduler/scheduler_config.json", ("trained_betas", 0), 10**400, "beta_1 of trained_betas is 10"),
        ("text", "scheduler/scheduler_config.json", ("beta_end",), 10**400, "beta_end is 10.*: it must be a finite"),
        ("text", "scheduler/scheduler_config.json", ("num_classes",), 10**400, "num_classes is 10.*: it must be an int"),
        ("text", "text_model/config.json", ("num_attention_heads",), -1, "has num_attention_heads=-1, which no network can"),
        ("text", "text_model/config.json", ("hidden_dropout_prob",), float("nan"), "has hidden_dropout_prob=nan, which no"),
        ("text", "tokenizer/tokenizer_config.json", ("model_max_length",), "x", "has model_max_length='x': it must be"),
        ("text", "tokenizer/tokenizer.json", ("pre_tokenizer",), None, r"the prompt has words that the tokenizer does not know \(.ab.\)"),
        ("masked", "tokenizer_config.json", ("unk_token",), "", "do not describe a component .RecursionError"),
        ("image", "unet/config.json", ("freq_shift",), "x", "unet do not describe a component .*: download or save"),
        ("image", "unet/config.json", ("sample_size",), 17_000, "sample_size of the network is 17000: it must be"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_said(saved, kind, name, path, value, words, tmp_path):
    folder = shutil.copytree(saved / kind, tmp_path / kind)
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(change(values, path, value)))
    with pytest.raises(ValueError, match=words):
        KINDS[kind][1](folder)


# Data sets

DATASETS = {
    "script": {"data.py": "raise SystemExit('this must not run')", "a.txt": "x\n"},
    "yaml": {"README.md": "---\nconfigs: [\n---\n", "train.txt": "a\nb\n"},
    "configs": {"README.md": "---\nconfigs: 3\n---\n", "train.txt": "a\nb\n"},
    "features": {"README.md": "---\ndataset_info:\n  features: 3\n---\n", "train.txt": "a\nb\n"},
    "card": {"README.md": b"---\n\xff\n---\n", "train.txt": "a\nb\n"},
    "outside": {"README.md": "---\nconfigs:\n- config_name: default\n  data_files: ../../../etc/passwd\n---\n"},
    "infos": {"dataset_infos.json": "[", "train.txt": "a\n"},
    "state": {"state.json": "{}", "dataset_info.json": "{", "train.txt": "a\n"},
    "empty": {},
    "text": {"train.txt": b"\xff\xfe"},
    "json": {"train.json": "[1, 2"},
    "nested": {"train.jsonl": "[" * 100_000},
    "csv": {"train.csv": b"a,b\n1\n1,2,3\n\x00"},
    "parquet": {"train.parquet": b"PAR1xxxx"},
    "zip": {"train.zip": b"PK\x03\x04xx"},
}


@pytest.mark.parametrize("case", DATASETS)
def test_data_sets(case, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in DATASETS[case].items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OSError, match="the data set .* cannot be loaded .*: check its name") as error:
        load_splits(str(folder), cache_dir=str(tmp_path / "cache"))
    assert "\n" not in str(error.value)


# Cards, logs and settings of runs

HEADS = [
    *("model-index: 3", "model-index:\n- name: x", "model-index:\n- name: x\n  results: 3", "a: [", "- 1", "3"),
    *("x: !!python/object/apply:os.system ['exit']", "&a [*a]", "eval_results: 3", "[" * 5_000),
]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head[:30])
def test_cards(head, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\n\n# A card\n")
    row = StepResult(20, 2.85, 0.01, 7.2, 0.05, "sampled terms")
    with pytest.raises(ValueError, match="the head of the card .*README.md cannot be read .*: correct it") as error:
        Evaluation("text8", "test", [row], task="text-generation").write_to_card(tmp_path)
    assert "\n" not in str(error.value)


LINES = [b"{", b"3", b"null", b'{"loss": 1}', b'{"step": "x"}', b'{"step": 1.5}', b"[" * 100_000, b"\xff", b'{"step": ' + b"9" * 5_000 + b"}"]  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=lambda line: repr(line[:12]))
def test_logs(line, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n' + line + b"\n")
    for call in (lambda: read_log(path), JSONLinesTracker(path, 5).start):
        with pytest.raises(OSError, match=r"log.jsonl is (not|no) .*: remove what was changed"):
            call()


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content[:6]))
def test_settings_of_a_run(content, tmp_path):
    (tmp_path / SETTINGS_NAME).write_bytes(content)
    with pytest.raises(OSError, match="is not a checkpoint of d3pm_hf, or it is incomplete .*: pass another one"):
        load_checkpoint(None, tmp_path, {}, {})
