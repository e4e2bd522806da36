# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The files of a checkpoint of a run: what they hold, and that reading them runs no code."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from sharded_run import Hostile
from test_training import assert_same_run
from training_run import make_pipeline, run, texts

from d3pm_hf.training.run_state import load_checkpoint, save_checkpoint
from d3pm_hf.training.state_files import STATE_NAME, TENSORS_NAME, load_states, save_states


SHORT = {"max_train_steps": 4, "checkpointing_steps": 2, "validation_steps": 2, "num_samples": 0, "logging_steps": 1}
PARTS = ["progress", "lr_scheduler", "ema"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(output_dir=str(folder), **SHORT)
    return folder


def same(a, b):
    """Whether two states have equal types and values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (torch.Tensor, np.ndarray)):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return a == b or a != a and b != b


def test_states_are_read_as_they_were_written(tmp_path):
    """With names that look alike, tensors that share memory, and what JSON does not have."""
    table = torch.arange(6.0).reshape(2, 3)
    state = {
        "numbers": [
            None,
            True,
            0,
            -(2**200),
            0.1,
            float("inf"),
            float("nan"),
            "text \U0001f600 \u0000",
            b"\x00\xff",
        ],
        "nested": {"a.b": table, "a": {"b": table + 1}, "": {}, "list": [[], ({}, ())]},
        "tensors": [table.t(), table[0], table, table, torch.tensor(3), torch.zeros(0, 2), torch.ones(2).bfloat16()],
        "arrays": [np.arange(3, dtype=np.uint32), np.float64(0.5), np.array([[True]])],
        "keys": {1: "one", (2, "two"): 2, None: 3.0, "__tensor__": "no tensor"},
        "random": torch.get_rng_state(),
        "generator": np.random.default_rng(0).bit_generator.state,
        "legacy": np.random.get_state(),
    }
    save_states({"stream": state, "other": {"step": 1}}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [STATE_NAME, TENSORS_NAME]
    assert same(load_states(tmp_path, ["stream", "other"]), {"stream": state, "other": {"step": 1}})


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path):
    class Stream:
        """A stream whose position is an object."""

        def __iter__(self):
            return iter(texts(40))

        def state_dict(self):
            return {"position": object()}

        def load_state_dict(self, state):
            pass

    with pytest.raises(
        TypeError, match="the state of the stream.position is a object, which a checkpoint cannot hold"
    ):
        run(make_pipeline(), Stream(), texts(8, seed=1), output_dir=str(tmp_path), **SHORT)
    assert not list(tmp_path.glob("checkpoint-*"))


# Runs of before


def as_before(checkpoint, names=PARTS):
    """Gives a checkpoint the files of the state that earlier versions wrote."""
    for i, state in enumerate(load_states(checkpoint, names).values()):
        torch.save(state, checkpoint / f"custom_checkpoint_{i}.pkl")
    (checkpoint / STATE_NAME).unlink()
    (checkpoint / TENSORS_NAME).unlink()


def test_a_run_of_before_is_resumed(whole, tmp_path):
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    as_before(folder / "checkpoint-2")
    run(output_dir=str(folder), resume_from_checkpoint=str(folder / "checkpoint-2"), **SHORT)
    assert_same_run(folder, whole, step=4)


def test_a_run_of_before_on_a_stream_is_resumed(tmp_path):
    data = Dataset.from_list(list(texts(40))).to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=1)
    for name in ("whole", "resumed"):
        run(make_pipeline(), data, texts(8, seed=1), output_dir=str(tmp_path / name), **SHORT)
    checkpoint = tmp_path / "resumed/checkpoint-2"
    as_before(checkpoint, [*PARTS, "stream"])
    options = {"output_dir": str(tmp_path / "resumed"), "resume_from_checkpoint": str(checkpoint), **SHORT}
    run(make_pipeline(), data, texts(8, seed=1), **options)
    assert_same_run(tmp_path / "resumed", tmp_path / "whole", step=4)


# Hostile files


def raw(value, path):
    path.write_bytes(pickle.dumps(value))


def zipped(value, path):
    torch.save(value, path)


def unzipped(value, path):
    torch.save(value, path, _use_new_zipfile_serialization=False)


class Counter:
    """A part of a run."""

    def __init__(self):
        self.value = torch.zeros(2)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


FILES = (
    *("model.safetensors", "optimizer.bin", "random_states_0.pkl", STATE_NAME, TENSORS_NAME, "settings.json"),
    # Files that Accelerate reads in other runs, or in place of others.
    *(
        "custom_checkpoint_0.pkl",
        "scheduler.bin",
        "sampler.bin",
        "scaler.pt",
        "dl_state_dict.bin",
        "pytorch_model.bin",
    ),
)


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("write", [raw, zipped, unzipped])
def test_no_file_of_a_checkpoint_runs_code(tmp_path, write):
    """Alone, in place of the state of the run, and in place of the weights."""
    accelerator, counter, settings = Accelerator(cpu=True), Counter(), {"seed": 0}
    model = torch.nn.Linear(2, 2)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    save_checkpoint(accelerator, tmp_path, 1, settings, {"counter": counter}, None)
    good = tmp_path / "checkpoint-1"
    load_checkpoint(accelerator, good, settings, {"counter": counter})
    assert {path.name for path in good.iterdir()} == set(FILES[:6])
    missing = {"custom_checkpoint_0.pkl": [STATE_NAME], "pytorch_model.bin": ["model.safetensors"]}
    refused = []
    for name in FILES:
        for removed in ([], missing.get(name, [])):
            folder = shutil.copytree(good, tmp_path / "checkpoint-2", dirs_exist_ok=True)
            for other in removed:
                (folder / other).unlink()
            write(Hostile(tmp_path / "ran"), folder / name)
            try:
                load_checkpoint(accelerator, folder, settings, {"counter": counter})
            except OSError as error:
                assert "weights_only" not in str(error) and f"{folder} is " in str(error)
                refused.append(name)
            assert not (tmp_path / "ran").exists(), name
            shutil.rmtree(folder)
    # Accelerate goes on without random states that it cannot read; others are not read at all.
    assert set(FILES) - set(refused) == {
        *("random_states_0.pkl", "scheduler.bin", "sampler.bin", "scaler.pt", "dl_state_dict.bin")
    }


@pytest.mark.parametrize("name", ["optimizer.bin", "custom_checkpoint_2.pkl"])
def test_a_hostile_file_ends_a_run_in_a_sentence(whole, tmp_path, name):
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    if name.startswith("custom"):
        as_before(folder / "checkpoint-4")
    zipped({"shadow_params": Hostile(tmp_path / "ran")}, folder / "checkpoint-4" / name)
    with pytest.raises(OSError) as error:
        run(output_dir=str(folder), resume_from_checkpoint="latest", **SHORT)
    assert str(error.value) == (
        f"{folder / 'checkpoint-4'} is broken, as its file {name} is damaged (it is cut, or holds more than numbers): remove the "
        "checkpoint, and resume from an older one"
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change", [{"progress": {}}, {"ema": None}, {"lr_scheduler": [1]}, {"progress": {"__tensor__": "x"}}]
)
def test_a_state_of_something_else_is_refused(whole, tmp_path, change):
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    path = folder / "checkpoint-4" / STATE_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(
        OSError, match="checkpoint-4 is broken, as a file does not hold the state of this run .*: remove"
    ):
        run(output_dir=str(folder), resume_from_checkpoint="latest", **SHORT)
