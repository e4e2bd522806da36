# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What a run keeps besides its weights: its results, losses that are finite, its data, its folder and its files."""

import errno
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from forked_runs import ForkedRun, train_text
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from training_run import Sentences, make_pipeline, run

from d3pm_hf import D3PMScheduler
from d3pm_hf.data import DataCollatorForD3PM, Rows, TextCrops
from d3pm_hf.training import read_log, run_state
from d3pm_hf.training.progress import Progress
from d3pm_hf.training.run_state import data_fingerprint, locked_folder, tensor_fingerprint
from d3pm_hf.training.state_files import STATE_NAME, find_damaged, load_states
from d3pm_hf.training.step_batches import IndexedExamples, RunCollator


pytestmark = pytest.mark.usefixtures("fresh_accelerator")
SHORT = {"max_train_steps": 4, "checkpointing_steps": 2, "validation_steps": 2, "num_inference_steps": 4}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run that has come to its end. Tests copy it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(output_dir=str(folder), **SHORT)
    return folder


def files_of(folder, *left_out):
    """The content of each file of a pipeline by its path, without checkpoints."""
    paths = [path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file()]
    kept = [path for path in paths if not path.parts[0].startswith("checkpoint-") and path.name not in left_out]
    return {str(path): (folder / path).read_bytes() for path in kept}


# The results


def test_a_finished_run_keeps_its_results(finished, tmp_path):
    """It trains no further, and leaves the same pipeline, card, samples and log."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    steps = []
    pipeline = make_pipeline()
    pipeline.text_model.register_forward_pre_hook(lambda module, inputs: steps.append(module.training))
    run(pipeline, output_dir=str(folder), resume_from_checkpoint="latest", **SHORT)
    assert not any(steps)
    assert "None measured" not in (folder / "README.md").read_text()
    assert files_of(folder) == files_of(finished)


def test_a_run_killed_after_its_last_checkpoint_keeps_its_results(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished / "checkpoint-4", folder / "checkpoint-4")
    for name in ("log.jsonl", "samples"):
        copy = shutil.copytree if (finished / name).is_dir() else shutil.copy
        copy(finished / name, folder / name)
    (folder / "samples/final.txt").unlink()
    run(output_dir=str(folder), resume_from_checkpoint="latest", **SHORT)
    assert files_of(folder) == files_of(finished)


def forget_evaluation(folder):
    """Makes a checkpoint one that was saved before the evaluation at its step, or by an earlier version."""
    states = json.loads((folder / STATE_NAME).read_text())
    states["progress"] = {name: states["progress"][name] for name in ("step", "sums", "count")}
    (folder / STATE_NAME).write_text(json.dumps(states))


@pytest.mark.parametrize("logged", [True, False])
def test_an_evaluation_that_is_missing_is_made_up_for(finished, tmp_path, logged):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    forget_evaluation(folder / "checkpoint-4")
    if not logged:
        lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
        assert "eval_bits_per_dim" in lines[-1]
        (folder / "log.jsonl").write_text("".join(lines[:-1]))
    (folder / "samples/step-4.txt").unlink()
    run(output_dir=str(folder), resume_from_checkpoint="latest", **SHORT)
    assert files_of(folder) == files_of(finished)
    kept = load_states(folder / "checkpoint-4", ["progress"])["progress"]
    assert kept["evaluated_step"] == 4 and kept["bound"]["num_examples"] == 16  # it is not measured a third time


def test_the_bound_of_an_earlier_step_is_not_that_of_the_last(finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    run(
        output_dir=str(folder),
        resume_from_checkpoint="latest",
        **{**SHORT, "max_train_steps": 5, "validation_steps": 0},
    )
    assert ModelCard.load(folder / "README.md").data.eval_results is None


# Losses that are not finite


def break_gradients(pipeline, step):
    """Makes the gradients of one step NaN, after a loss that is finite."""
    calls = []

    def spoil(gradient):
        calls.append(None)
        return gradient * (math.nan if len(calls) == step else 1)

    pipeline.text_model.lm_head.weight.register_hook(spoil)
    return pipeline


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (3, "the loss is nan at step 4: start a new run with a lower learning_rate"),
        (4, "a weight is nan after step 4"),
    ],
)
def test_no_checkpoint_after_a_loss_that_is_not_finite(tmp_path, step, words):
    """Although the next line of the log, which would tell, is far away."""
    options = {**SHORT, "max_train_steps": 20, "logging_steps": 100, "checkpoints_total_limit": 1}
    pipeline = break_gradients(make_pipeline(), step)
    with pytest.raises(FloatingPointError, match=words):
        run(pipeline, output_dir=str(tmp_path), **{**options, "validation_steps": 0})
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    weights = load_states(tmp_path / "checkpoint-2", ["ema"])["ema"]["shadow_params"]
    assert all(tensor.isfinite().all() for tensor in weights)


def test_an_evaluation_of_weights_that_are_not_finite(tmp_path):
    options = {**SHORT, "logging_steps": 100, "checkpointing_steps": 100}
    with pytest.raises(FloatingPointError, match="the loss is nan at step 2: start a new run"):
        run(break_gradients(make_pipeline(), 1), output_dir=str(tmp_path), **options)


def test_a_log_line_that_is_not_finite_is_json(tmp_path):
    with pytest.raises(FloatingPointError, match="the loss is nan at step 2"):
        run(break_gradients(make_pipeline(), 1), output_dir=str(tmp_path), **SHORT)

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    text = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse)["loss"] for line in text][1] == "NaN"
    lines = read_log(tmp_path / "log.jsonl")
    assert math.isfinite(lines[0]["loss"]) and math.isnan(lines[1]["loss"]) and lines[1]["step"] == 2


def test_numbers_that_are_not_finite_are_read_back(tmp_path):
    from d3pm_hf.training.progress import JSONLinesTracker

    tracker = JSONLinesTracker(tmp_path / "log.jsonl")
    tracker.start()
    tracker.log({"loss": math.inf, "vb": -math.inf, "bits": 1.5}, step=3)
    assert read_log(tmp_path / "log.jsonl") == [{"step": 3, "loss": math.inf, "vb": -math.inf, "bits": 1.5}]


# The data


class Counted(Sentences):
    """Sentences that count how often they are read."""

    reads = 0

    def __getitem__(self, item):
        self.reads += 1
        return super().__getitem__(item)


def fingerprint(dataset):
    return data_fingerprint(IndexedExamples(dataset), RunCollator(DataCollatorForD3PM(), 256, ()))


def test_fingerprints_of_data():
    """They depend on the content, the order, the size and the augmentation, and cost the same for every size."""
    text = np.random.default_rng(0).integers(0, 26, 5000).astype(np.uint8)
    images = np.random.default_rng(0).integers(0, 200, (90, 1, 4, 4)).astype(np.uint8)
    different = [
        TextCrops(text, 10, 30),
        TextCrops((text + 1) % 26, 10, 30),
        TextCrops(np.roll(text, 1), 10, 30),
        TextCrops(text[:-10], 10, 30),
        TextCrops(text, 20, 30),
        Rows(images, 256),
        Rows(images[::-1], 256),
        Rows(images, 256, random_flip=True),
        Rows(images[..., ::-1], 256),
    ]
    assert len({fingerprint(dataset) for dataset in different}) == len(different)
    assert fingerprint(TextCrops(text.astype(np.int32), 10, 26)) == fingerprint(different[0])
    first, last = images.copy(), images.copy()
    first[0], last[-1] = 7, 7
    assert len({fingerprint(Rows(changed, 256)) for changed in (images, first, last)}) == 3
    large = Counted(20_000)
    assert fingerprint(large) and large.reads == 64
    assert fingerprint(Counted(1))


def test_fingerprints_of_tensors():
    """They depend on the values and their places, not on their last bits, and are the same dense and sparse."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.rand(40, 30, generator=generator, dtype=torch.float64) - 0.5
    matrix -= matrix.mean()  # sums that are zero but for rounding
    for close in (matrix * (1 + 1e-14), matrix.to_sparse(), matrix.T.contiguous().T):
        assert tensor_fingerprint(close) == tensor_fingerprint(matrix)
    for other in (matrix.T, matrix.flip(0), matrix.roll(1, 1), -matrix, matrix * 2, matrix + 1e-3):
        assert tensor_fingerprint(other) != tensor_fingerprint(matrix)
    assert tensor_fingerprint(torch.zeros(3)) != tensor_fingerprint(torch.zeros(4))
    matrix[3, 4], matrix[5, 6] = math.inf, -math.inf
    assert tensor_fingerprint(matrix) != tensor_fingerprint(-matrix)
    assert json.loads(json.dumps(tensor_fingerprint(matrix))) == tensor_fingerprint(matrix)


def test_resuming_on_other_data_is_refused(finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    rotated = Sentences()
    rotated.rows = (rotated.rows + 1) % 27
    options = {"output_dir": str(folder), "resume_from_checkpoint": "latest", **SHORT}
    with pytest.raises(ValueError, match=r"other settings \(the content of the training data changed\): use the same"):
        run(None, rotated, **options)
    # A checkpoint of an earlier version has no fingerprint.
    path = folder / "checkpoint-4/settings.json"
    settings = json.loads(path.read_text())
    for name in ("data_fingerprint", "scheduler_tensors"):
        del settings[name]
    path.write_text(json.dumps(settings))
    run(None, rotated, **options)


def test_the_bound_of_an_earlier_version_is_read(finished):
    """It has another name for the number of its terms."""
    state = load_states(finished / "checkpoint-4", ["progress"])["progress"]
    expected = dict(state["bound"])
    state["bound"]["num_evaluated_timesteps"] = state["bound"].pop("num_eval_timesteps")
    progress = Progress(Accelerator())
    progress.load_state_dict(state)
    assert (
        progress.bound.num_eval_timesteps == progress.bound.num_evaluated_timesteps == expected["num_eval_timesteps"]
    )


@pytest.mark.parametrize("batches_per_step", [1, 2])
def test_a_line_of_the_log_weighs_steps_alike(batches_per_step):
    """Its first step has two batches of this process, and its second one, after resuming, one or two."""
    before = Progress(Accelerator(cpu=True, gradient_accumulation_steps=2))
    for loss in (3.0, 5.0):
        before.add(*torch.full((3,), loss))
    state = before.state_dict()
    after = Progress(Accelerator(cpu=True, gradient_accumulation_steps=batches_per_step))
    after.load_state_dict(state)
    for _ in range(batches_per_step):
        after.add(*torch.full((3,), 10.0))
    assert after.log_line(10, 0.1)["loss"] == 7


def test_resuming_with_other_tensors_is_refused(tmp_path):
    probs = torch.arange(1.0, 29, dtype=torch.float64)
    probs[27] = 0  # the mask
    options = {"output_dir": str(tmp_path), **SHORT, "max_train_steps": 1, "validation_steps": 0, "num_samples": 0}

    def pipeline(probs):
        return make_pipeline(
            beta_schedule="mutual_information", transition_tensors={"unigram_probs": probs / probs.sum()}
        )

    run(pipeline(probs), **options)
    run(pipeline(probs * (1 + 1e-12)), resume_from_checkpoint="latest", **options)
    # Earlier versions kept sums beside the shape, and called this loss by another name.
    path = tmp_path / "checkpoint-1/settings.json"
    settings = json.loads(path.read_text())
    old = {
        "scheduler_tensors": {
            name: [shape, 1.0, 0.1, 0.2] for name, (shape, _) in settings["scheduler_tensors"].items()
        }
    }
    path.write_text(json.dumps({**settings, **old, "loss": "hybrid_denoising"}))
    with pytest.raises(ValueError, match=r"other settings \(auxiliary is 'raw' and was 'denoising'\)"):
        run(pipeline(probs), resume_from_checkpoint="latest", **options)
    path.write_text(json.dumps({**settings, **old}))
    run(pipeline(probs), resume_from_checkpoint="latest", **options)
    path.write_text(json.dumps(settings))
    probs[:27] = probs[:27].roll(1)
    with pytest.raises(ValueError, match=r"other settings \(the tensors of the scheduler.* changed\)"):
        run(pipeline(probs), resume_from_checkpoint="latest", **options)


# Checkpoints that cannot be loaded


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: launch")])
def test_a_good_checkpoint_is_not_blamed(finished, tmp_path, monkeypatch, error):
    """An error that says nothing about the files is raised as it is: nobody shall remove a checkpoint for it."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(Accelerator, "load_state", fail)
    with pytest.raises(type(error)) as raised:
        run(output_dir=str(folder), resume_from_checkpoint="latest", **SHORT)
    assert raised.value is error


def test_weights_of_another_network_are_not_called_broken(finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    path = folder / "checkpoint-4/model.safetensors"
    weights = load_file(path)
    save_file({name: tensor[:1].clone() for name, tensor in weights.items()}, path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        run(output_dir=str(folder), resume_from_checkpoint="latest", **SHORT)


def test_a_checkpoint_that_lacks_a_file(finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / "checkpoint-4/optimizer.bin").unlink()
    with pytest.raises(OSError, match="checkpoint-4 is broken, as a file is missing .*optimizer.bin"):
        run(output_dir=str(folder), resume_from_checkpoint="latest", **SHORT)


@pytest.mark.parametrize("change", ["truncated", "empty", "changed"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "run_state.json", "run_state.safetensors"])
def test_damaged_files_are_found(finished, tmp_path, name, change):
    folder = Path(shutil.copytree(finished / "checkpoint-4", tmp_path / "checkpoint-4"))
    assert find_damaged(folder) is None
    content = bytearray((folder / name).read_bytes())
    if change == "changed":
        if name.endswith(".safetensors"):
            content[:4] = b"\xff\xff\xff\xff"  # the size of its header: its tensors have no checksum
        else:
            content[len(content) // 2] ^= 0xFF
    (folder / name).write_bytes({"truncated": content[:-20], "empty": b"", "changed": bytes(content)}[change])
    assert find_damaged(folder) == name


# The folder


def test_a_second_run_in_one_folder_is_refused(tmp_path):
    """Until the first one ends, however it ends, its workers included."""
    folder, options = tmp_path / "run", {"validation_steps": 0, "num_samples": 0, "checkpointing_steps": 2}
    endless = {"max_train_steps": 10**6, "dataloader_num_workers": 1, "checkpoints_total_limit": 2}
    with ForkedRun(train_text, folder, **options, **endless) as first:
        while not list(folder.glob("checkpoint-*")):
            assert first.processes[0].is_alive(), first.output()
            time.sleep(0.05)
        for more in ({}, {"resume_from_checkpoint": "latest"}, {"overwrite_output_dir": True}):
            with pytest.raises(ValueError, match="another run is writing to .*run: wait for its end, or pass another"):
                run(output_dir=str(folder), **options, **more)
        first.signal(signal.SIGKILL)
        first.wait()
        step = max(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))
        run(output_dir=str(folder), overwrite_output_dir=True, max_train_steps=2, **options)
    assert step >= 2 and [path.name for path in folder.glob("*checkpoint-*")] == ["checkpoint-2"]
    assert not (folder / ".lock").exists()


def test_a_second_run_in_one_process_is_refused(tmp_path):
    accelerator = Accelerator()
    with locked_folder(accelerator, tmp_path):
        with pytest.raises(ValueError, match="another run is writing to"):
            with locked_folder(accelerator, tmp_path):
                pass
    with locked_folder(accelerator, tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_locked(tmp_path, monkeypatch, number):
    """Such as some network drives."""

    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked_folder(Accelerator(), tmp_path / "run"):
        (tmp_path / "run" / "file").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_a_start_that_failed_leaves_nothing_behind(finished, tmp_path):
    with pytest.raises(ValueError, match="the data set has 200 examples, and a step takes 999"):
        run(output_dir=str(tmp_path / "run"), **{**SHORT, "train_batch_size": 999})
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="is not a checkpoint"):
        run(output_dir=str(tmp_path / "run"), resume_from_checkpoint=str(tmp_path / "checkpoint-7"), **SHORT)
    assert list((tmp_path / "run").iterdir()) == []
    # What an older run has left is removed when all checks have passed, not before.
    folder = Path(shutil.copytree(finished, tmp_path / "old"))
    with pytest.raises(ValueError, match="a step takes 999"):
        run(output_dir=str(folder), overwrite_output_dir=True, **{**SHORT, "train_batch_size": 999})
    with pytest.raises(ValueError, match="other settings"):
        run(output_dir=str(folder), resume_from_checkpoint=str(folder / "checkpoint-2"), learning_rate=0.1, **SHORT)
    assert files_of(folder) == files_of(finished) and (folder / "checkpoint-4").exists()


@pytest.mark.parametrize("place", ["file", "below a file", "read-only"])
def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("mine")
    folder = {"file": tmp_path / "file", "below a file": tmp_path / "file/run"}.get(place, tmp_path / "locked")
    if place == "read-only":  # for a superuser no folder is: the system call refuses here
        opened = os.open

        def refuse(path, *args, **kwargs):
            if "locked" in str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return opened(path, *args, **kwargs)

        monkeypatch.setattr(run_state.os, "open", refuse)
    words = r"output_dir is .*, which cannot be written to \(.*\): pass a folder that you may write to"
    with pytest.raises(OSError, match=words):
        run(output_dir=str(folder), **SHORT)
    assert (tmp_path / "file").read_text() == "mine"


def test_all_processes_are_told_of_a_start_that_failed(tmp_path):
    (tmp_path / "file").write_text("mine")
    with ForkedRun(train_text, tmp_path / "file/run", 2, errors=tmp_path / "run", **SHORT) as failed:
        assert failed.wait() == [1, 1]
    assert all("which cannot be written to" in path.read_text() for path in failed.errors)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"checkpointing_steps": 0}, "checkpointing_steps is 0: it must be an integer of at least 1"),
        ({"num_eval_timesteps": 1}, "num_eval_timesteps is 1: it must be an integer of at least 2"),
        ({"max_eval_samples": 0}, "max_eval_samples is 0: it must be an integer of at least 1"),
        ({"eval_batch_size": 0}, "eval_batch_size is 0: it must be an integer of at least 1"),
    ],
)
def test_settings_are_refused_before_the_first_step(tmp_path, wrong, words):
    with pytest.raises(ValueError, match=words):
        run(output_dir=str(tmp_path / "run"), **{**SHORT, **wrong})
    assert not (tmp_path / "run").exists()


def test_one_term_suffices_where_there_is_one(tmp_path):
    """Of a process of one step, and where the bound is not measured."""
    options = {**SHORT, "num_eval_timesteps": 1, "num_samples": 0, "max_train_steps": 1}
    run(make_pipeline(num_train_timesteps=1), output_dir=str(tmp_path / "one"), **options)
    run(output_dir=str(tmp_path / "two"), **{**options, "validation_steps": 0})


# Files


def test_a_checkpoint_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    """Every file, then the folder, then the new name, then the folder that holds the name."""
    events, fsync, replace = [], os.fsync, os.replace

    def record_flush(file):
        events.append(("flush", os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    def record_name(old, new):
        events.append(("name", str(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", record_flush)
    monkeypatch.setattr(os, "replace", record_name)
    run(output_dir=str(tmp_path), max_train_steps=1, validation_steps=0, num_samples=0)
    partial = tmp_path / ".checkpoint-1.partial"
    named = events.index(("name", str(tmp_path / "checkpoint-1")))
    names = [path.relative_to(tmp_path / "checkpoint-1") for path in (tmp_path / "checkpoint-1").rglob("*")]
    assert len(names) >= 6
    before = [path for kind, path in events[:named] if kind == "flush"]
    assert {str(partial), *(str(partial / name) for name in names)} <= set(before) and before[-1] == str(partial)
    assert events[named + 1] == ("flush", str(tmp_path))


def test_a_checkpoint_that_exists_is_replaced(finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / "checkpoint-4/settings.json").unlink()  # a checkpoint of which something is lost
    run(output_dir=str(folder), resume_from_checkpoint=str(folder / "checkpoint-2"), **SHORT)
    assert (folder / "checkpoint-4/settings.json").exists() and files_of(folder) == files_of(finished)
    assert sorted(path.name for path in folder.glob("*checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


def test_a_scheduler_has_the_same_bytes_on_every_save(tmp_path):
    probs = torch.arange(1.0, 29, dtype=torch.float64)
    probs[27] = 0
    tensors = {"unigram_probs": probs / probs.sum()}
    contents = set()
    for save in range(12):
        scheduler = D3PMScheduler(28, beta_schedule="mutual_information", transition_tensors=tensors)
        scheduler.save_pretrained(tmp_path / str(save))
        contents.add((tmp_path / str(save) / "transition.safetensors").read_bytes())
    assert len(contents) == 1
    loaded = D3PMScheduler.from_pretrained(tmp_path / "0")
    assert torch.equal(loaded.transition_tensors["unigram_probs"], scheduler.transition_tensors["unigram_probs"])
