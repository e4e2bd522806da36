# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The training loop: what a step averages over, what one run leaves to the next, and what is saved and refused when."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from forked_runs import (
    ForkedRun,
    OwnFolder,
    mask_where_needed,
    signal_starting_workers,
    train_partly_masked,
    train_text,
    train_twice,
)
from sharded_run import Pictures, make_image_pipeline
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from training_run import SETTINGS, Sentences, make_pipeline, run, texts

from d3pm_hf.training import D3PMTrainingArguments, loop, read_log, train
from d3pm_hf.training.objective import average, count_scored
from d3pm_hf.training.state_files import load_states
from d3pm_hf.training.step_batches import IndexedExamples


pytestmark = pytest.mark.usefixtures("fresh_accelerator")
SHORT = {"max_train_steps": 4, "checkpointing_steps": 2, "validation_steps": 2, "num_inference_steps": 4}
BARE = {"max_train_steps": 2, "validation_steps": 0, "num_samples": 0}


def files_of(folder):
    """The content of each file of a run by its path, without checkpoints."""
    paths = [path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): (folder / path).read_bytes() for path in paths if not path.parts[0].startswith("checkpoint-")}


# The mean of a step


@pytest.mark.parametrize("order", [1, -1])
def test_a_step_may_have_batches_with_and_without_a_mask(order):
    x_0, scored = torch.zeros(2, 5, dtype=torch.long), torch.arange(10).reshape(2, 5) < 3
    batches = [{"x_0": x_0}, {"x_0": x_0, "loss_mask": scored}][::order]
    step = list(count_scored(batches, Accelerator(cpu=True), 2))
    losses = [average(batch.get("loss_mask", torch.ones(2, 5)).float(), batch) for batch in step]
    assert sum(losses).item() / 2 == pytest.approx(1)  # 13 elements with a loss of 1 each


@pytest.mark.parametrize("processes", [1, 2])
def test_masks_where_they_are_needed(tmp_path, processes):
    """Steps of two batches of which one, both or none have a mask average over the same elements as one batch."""
    options = {"max_train_steps": 12, "validation_steps": 0, "num_samples": 0}
    train_partly_masked(output_dir=str(tmp_path / "whole"), train_batch_size=4, **options)
    folder, options = tmp_path / "run", {**options, "train_batch_size": 2}
    if processes == 1:
        train_partly_masked(output_dir=str(folder), gradient_accumulation_steps=2, **options)
    else:
        with ForkedRun(train_partly_masked, folder, 2, **options) as shared:
            assert shared.wait(timeout=100) == [0, 0], shared.output()
    rows = torch.stack([Sentences()[index] for index in range(200)])
    assert 0.2 < (rows == 3).any(1).float().mean() < 0.8 and "loss_mask" not in mask_where_needed([rows[0] * 0])
    for line, other in zip(read_log(folder / "log.jsonl"), read_log(tmp_path / "whole/log.jsonl"), strict=True):
        assert line == pytest.approx(other, abs=1e-5)


# Streams


class OneIteration:
    """A stream as torchdata's `StatefulDataLoader` is: a state that was loaded is that of the next iteration alone."""

    def __init__(self, examples):
        self.examples, self.position, self.start = list(examples), 0, 0

    def __iter__(self):
        start, self.start = self.start, 0
        for self.position in range(start + 1, len(self.examples) + 1):
            yield self.examples[self.position - 1]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


def train_on(folder, dataset, **settings):
    train(D3PMTrainingArguments(output_dir=str(folder), **{**SETTINGS, **settings}), make_pipeline(), dataset)


@pytest.mark.parametrize("kind", [OneIteration, lambda rows: rows.to_iterable_dataset()], ids=["loader", "datasets"])
def test_a_stream_without_evaluation_data_is_resumed(tmp_path, kind):
    """The samples are drawn given its first examples, and the training steps go on where it was."""
    options = {**SHORT, "max_train_steps": 10, "checkpointing_steps": 3}
    train_on(tmp_path / "whole", kind(texts()), **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for step in (6, 9, 10):
        shutil.rmtree(tmp_path / f"run/checkpoint-{step}")
    train_on(tmp_path / "run", kind(texts()), resume_from_checkpoint="latest", **options)
    assert files_of(tmp_path / "run") == files_of(tmp_path / "whole")


# One run after the other


def table_pipeline():
    """A pipeline whose network is a denoiser itself, and a list of whether each call of it computes in low precision."""
    pipeline, seen = make_image_pipeline("table"), []
    pipeline.unet.table.register_forward_pre_hook(lambda layer, inputs: seen.append(torch.is_autocast_enabled("cpu")))
    return pipeline, seen


def train_table(folder, pipeline=None, **settings):
    arguments = D3PMTrainingArguments(output_dir=str(folder), **{**SETTINGS, **BARE, **settings})
    train(arguments, pipeline or make_image_pipeline("table"), Pictures())


@pytest.mark.parametrize("order", [("bf16", None), ("no", "bf16")])
def test_a_run_has_its_own_precision(tmp_path, order):
    for number, precision in enumerate(order):
        pipeline, seen = table_pipeline()
        train_table(tmp_path / str(number), pipeline, mixed_precision=precision)
        assert set(seen) == {precision == "bf16"}


def test_a_run_that_failed_leaves_no_precision(tmp_path):
    pipeline, seen = table_pipeline()
    with pytest.raises(ValueError, match="already holds a run"):
        (tmp_path / "log.jsonl").touch()
        train_table(tmp_path, pipeline, mixed_precision="bf16")
    train_table(tmp_path / "run", pipeline)
    assert set(seen) == {False}


def test_a_network_leaves_mixed_precision_behind(tmp_path):
    """Accelerate replaces the method `forward` of a network that is a denoiser, which the pipeline keeps."""
    pipeline, seen = table_pipeline()
    train_table(tmp_path / "low", pipeline, mixed_precision="bf16")
    assert set(seen) == {True}
    seen.clear()
    pipeline.denoiser(torch.zeros(1, 1, 8, 8, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    train_table(tmp_path / "full", pipeline)
    assert len(seen) == 3 and set(seen) == {False}


def test_the_accelerator_of_the_caller_stays(tmp_path):
    accelerator = Accelerator(gradient_accumulation_steps=3)
    train_table(tmp_path)
    assert accelerator.mixed_precision == "no" and accelerator.gradient_accumulation_steps == 3


def test_two_runs_of_several_processes(tmp_path):
    with ForkedRun(train_twice, tmp_path, 2, errors=tmp_path / "errors", **{**SHORT, "num_samples": 0}) as both:
        assert both.wait() == [0, 0], both.output()
    first, second = (tmp_path / name for name in ("first", "second"))
    assert files_of(first) == files_of(second) and len(read_log(first / "log.jsonl")) == 6


# The settings


def test_the_precision_of_the_launcher_is_a_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train_table(tmp_path)
    path = tmp_path / "checkpoint-2/settings.json"
    settings = json.loads(path.read_text())
    assert settings["mixed_precision"] == "bf16"
    assert "| mixed_precision | bf16 |" in (tmp_path / "README.md").read_text()
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    options = {"resume_from_checkpoint": "latest", "max_train_steps": 3}
    with pytest.raises(ValueError, match=r"other settings \(mixed_precision is 'no' and was 'bf16'\)"):
        train_table(tmp_path, **options)
    # Earlier versions kept the argument, which is not known to have been the precision.
    path.write_text(json.dumps({**settings, "mixed_precision": None}))
    train_table(tmp_path, **options)


def test_fewer_steps_than_the_checkpoint_has(tmp_path):
    run(output_dir=str(tmp_path), **{**SHORT, "num_samples": 0})
    before = files_of(tmp_path)
    with pytest.raises(
        ValueError,
        match="max_train_steps is 3, and .*checkpoint-4 has 4 steps already: pass --max_train_steps 4 or more",
    ):
        run(output_dir=str(tmp_path), resume_from_checkpoint="latest", **{**SHORT, "max_train_steps": 3})
    assert files_of(tmp_path) == before and (tmp_path / "checkpoint-4").exists()
    run(
        output_dir=str(tmp_path),
        resume_from_checkpoint=str(tmp_path / "checkpoint-2"),
        **{**BARE, "max_train_steps": 3},
    )


@pytest.mark.parametrize("case", ["no condition", "unknown condition"])
def test_conditions_that_cannot_be_dropped_are_refused_first(tmp_path, case):
    """Before the run in the folder is replaced."""
    run(output_dir=str(tmp_path), **BARE)
    before, words = (
        files_of(tmp_path),
        "condition_dropout is 0.1, and the examples have no condition to leave out: leave",
    )
    data: object = Sentences()
    if case == "unknown condition":
        data = [{"x_0": row, "condition": {"key": 1}} for row in Sentences().rows]
        words = "there is no value of 'key' that stands for no condition"
    with pytest.raises(ValueError, match=words):
        run(None, data, output_dir=str(tmp_path), overwrite_output_dir=True, condition_dropout=0.1, **BARE)
    assert files_of(tmp_path) == before and (tmp_path / "checkpoint-2").exists()


# The checkpoint and the evaluation


def test_an_evaluation_that_fails_loses_no_step(tmp_path, monkeypatch):
    options = {**SHORT, "checkpoints_total_limit": 1}
    run(output_dir=str(tmp_path / "whole"), **options)
    validate, calls = loop.validate, []

    def fail_at_the_second(*args):
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return validate(*args)

    monkeypatch.setattr(loop, "validate", fail_at_the_second)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(output_dir=str(tmp_path / "run"), **options)
    assert sorted(path.name for path in (tmp_path / "run").glob("*checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    run(output_dir=str(tmp_path / "run"), resume_from_checkpoint="latest", **options)
    assert len(calls) == 3 and files_of(tmp_path / "run") == files_of(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "run").glob("*checkpoint-*")] == ["checkpoint-4"]
    run(output_dir=str(tmp_path / "run"), resume_from_checkpoint="latest", **options)
    assert len(calls) == 3  # the checkpoint has the result of the evaluation


def test_a_checkpoint_with_an_evaluation_is_written_once(tmp_path, monkeypatch):
    """The result of the evaluation joins the weights that are there."""
    save_state, written = Accelerator.save_state, []

    def save(self, folder, *args, **kwargs):
        written.append(Path(folder).name)
        return save_state(self, folder, *args, **kwargs)

    monkeypatch.setattr(Accelerator, "save_state", save)
    run(output_dir=str(tmp_path), **SHORT)
    folders = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert sorted(written) == [f".{name}.partial" for name in folders] and len(folders) > 1
    for name in folders:
        progress = load_states(tmp_path / name, ["progress"])["progress"]
        assert progress["evaluated_step"] == progress["step"] and progress["bound"] is not None
        assert (tmp_path / name / "model.safetensors").exists() and (tmp_path / name / "optimizer.bin").exists()


# Nodes


def test_nodes_that_do_not_share_the_folder(tmp_path):
    """The main process decides what is resumed, and all of them are told that one does not find it."""
    options = {**BARE, "errors": tmp_path / "errors", "prepare": OwnFolder(tmp_path)}
    with ForkedRun(train_text, Path("run"), 2, **options) as first:
        assert first.wait() == [0, 0], first.output()
    assert (tmp_path / "node-0/run/checkpoint-2").is_dir() and not (tmp_path / "node-1/run/checkpoint-2").exists()
    options |= {"max_train_steps": 4, "resume_from_checkpoint": "latest"}
    with ForkedRun(train_text, Path("run"), 2, **options) as resumed:
        assert resumed.wait(timeout=100) == [1, 1], resumed.output()
    words = f"process 1 does not find {tmp_path / 'node-1/run/checkpoint-2'}, which the main process has: use an --output_dir"
    assert all(words in path.read_text() for path in resumed.errors)


# Signals


def test_workers_that_start_leave_signals_to_the_run(tmp_path):
    """The status says that a checkpoint is saved, and a job of Slurm is queued again."""
    folder = tmp_path / "run"
    options = {"dataloader_num_workers": 2, **BARE, "max_train_steps": 50}
    with ForkedRun(train_text, folder, prepare=signal_starting_workers, **options) as killed:
        assert killed.wait() == [128 + signal.SIGTERM], killed.output()
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]


# Data sets


def test_subsets_and_concatenations(tmp_path):
    """They pass the seed of the augmentation on to the data set that they are made of."""
    data = Sentences()
    parts = ConcatDataset([Subset(data, range(10, 20)), ConcatDataset([data, list(data.rows[:5])]), texts(3)])
    examples = IndexedExamples(parts)
    assert len(examples) == 218
    for seed in (1, 2):
        for index, expected in ((9, data[19, seed]), (10, data[0, seed]), (209, data[199, seed]), (214, data[4])):
            found, example, *draws = examples[index, seed, 5]
            assert found == index and torch.equal(example, expected) and draws == [seed, 5]
        assert examples[217, seed, 5][1] == texts(3)[2]
    index, example = examples[3]
    assert index == 3 and torch.equal(example, data[13])
    whole, subset = tmp_path / "whole", tmp_path / "subset"
    run(output_dir=str(whole), **BARE)
    halves = [Subset(data, torch.arange(100)), Subset(Subset(data, range(50, 200)), range(50, 150))]
    run(None, ConcatDataset(halves), Subset(Sentences(32, seed=1), range(32)), output_dir=str(subset), **BARE)
    assert (subset / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()


class Plain(torch.utils.data.Dataset):
    """Rows that are read by an index alone."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (
            Plain(list(Sentences().rows)),
            r"train_dataset\[0, 0\] raises TypeError \(list indices .*let `__getitem__` take",
        ),
        (Plain(Sentences().rows), r"train_dataset\[0, 0\] raises ValueError .*let `__getitem__` take the pair"),
        (
            Plain(torch.zeros(9, 1, 4, 4).long()),
            r"train_dataset\[0, 0\] is no whole example: training reads an example by",
        ),
        (Subset(Plain(list(Sentences().rows)), [1, 2]), r"train_dataset\[0, 0\] raises TypeError"),
    ],
    ids=["list", "text", "images", "subset"],
)
def test_a_data_set_that_takes_no_seeds(tmp_path, dataset, words):
    with pytest.raises(ValueError, match=words):
        run(None, dataset, output_dir=str(tmp_path / "run"), **BARE)
    assert not (tmp_path / "run").exists()


def test_a_tensor_is_a_data_set(tmp_path):
    train_on(tmp_path, Sentences().rows, **BARE)


class Endless(IterableDataset):
    """A stream of torch, without a state."""

    def __init__(self, rows, has_length=False):
        self.rows = rows
        if has_length:
            self.__class__ = type("Sized", (Endless,), {"__len__": lambda self: len(self.rows)})

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize(
    "kind", [Endless, lambda rows: Endless(rows, True), iter], ids=["torch", "length", "iterator"]
)
def test_a_stream_without_a_state(tmp_path, kind):
    rows = Sentences().rows
    with pytest.raises(
        ValueError,
        match="train_dataset is .*a stream without state_dict and load_state_dict, which cannot be resumed: pass a `datasets",
    ):
        train_on(tmp_path / "run", kind(rows), **BARE)
    assert not (tmp_path / "run").exists()
    # Of evaluation data only the first ones are read, once.
    options = {**SHORT, "num_samples": 2, "max_train_steps": 2}
    run(None, None, kind(Sentences(32, seed=1).rows), output_dir=str(tmp_path / "run"), **options)
    run(None, None, list(Sentences(32, seed=1).rows[:16]), output_dir=str(tmp_path / "list"), **options)
    assert (tmp_path / "run/log.jsonl").read_bytes() == (tmp_path / "list/log.jsonl").read_bytes()
