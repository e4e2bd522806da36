# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Training and sampling on an XLA device, beside the same on the CPU: `make test-xla`.

torch_xla runs on a CPU here (`PJRT_DEVICE=CPU`). Its counters are those of any device: graphs that are compiled and run,
copies to the host, and operations that run on the host because XLA has none of that name.
"""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from comparison import assert_same_draws
from safetensors.torch import load_file
from test_training import assert_same, state_of
from xla_run import make_run

from d3pm_hf import D3PMPipeline
from d3pm_hf.training import read_log


SCRIPT = Path(__file__).with_name("xla_run.py")
STEPS = 12
KINDS = ["absorbing", "uniform", "gaussian", "unet"]
# Steps after the first evaluation that neither an evaluation nor a checkpoint follows. Each writes a line to the log.
PLAIN_STEPS = (7, 8, 9, 11)
# Graphs and copies to the host of such a step: its own and that of the line of the log. Gaussian noise has one more of each,
# which tells the host whether products of probabilities have underflowed, and the U-Net has the operation below.
MOST = {"absorbing": (2, 1), "uniform": (2, 1), "gaussian": (3, 2), "unet": (4, 3)}
# What torch_xla computes on the host if its device is a CPU.
ON_THE_HOST = {"unet": {"aten::upsample_nearest2d_backward": 1}}
# Compiles the graphs of the U-Net several times as fast, and runs them more slowly.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
TOLERANCE = 1e-4


def launch(kind, folder, on_xla=True, **settings):
    """The run of xla_run.py in a process of its own."""
    environment = {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", "USE_TORCH_XLA": str(int(on_xla)), "XLA_FLAGS": FLAGS}
    environment = {**os.environ, **environment}
    command = [sys.executable, str(SCRIPT), json.dumps({"kind": kind, "output_dir": str(folder), **settings})]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def finish(*args, **kwargs):
    result = launch(*args, **kwargs)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module", params=KINDS)
def runs(request, tmp_path_factory):
    """The kind of a run, its folder on XLA and its folder on the CPU."""
    folder = tmp_path_factory.mktemp(request.param)
    for name in ("xla", "cpu"):
        finish(request.param, folder / name, on_xla=name == "xla")
    return request.param, folder / "xla", folder / "cpu"


def num_parameters(kind):
    """Those of the network before it is moved; a text model has one for the word embeddings and the output layer."""
    return len(list(make_run(kind, dropout=0.0)[0].denoiser.parameters()))


def drawn(folder):
    """States and logits of the pipeline that the run has returned."""
    return load_file(folder / "drawn.safetensors")


def counters(folder, name):
    """What each step or call added to the counters, after the first one."""
    counts = json.loads((folder / "counters.json").read_text())[name]
    return [
        {
            **{key: after[key] - before[key] for key in ("compiled", "executed", "copied")},
            "fallbacks": {
                key: value - before["fallbacks"].get(key, 0)
                for key, value in after["fallbacks"].items()
                if value != before["fallbacks"].get(key, 0)
            },
        }
        for before, after in zip(counts, counts[1:])
    ]


def test_the_versions_are_the_pinned_ones():
    pins = (Path(__file__).parents[2] / "constraints-xla.txt").read_text().split()
    for line in pins:
        name, version = line.split("==")
        assert importlib.metadata.version(name).split("+")[0] == version


def test_the_run_was_on_xla(runs):
    _, xla, cpu = runs
    for folder, device in ((xla, "xla:0"), (cpu, "cpu")):
        assert bytes(drawn(folder)["device"].tolist()).decode() == device


def test_losses_and_bounds_are_those_of_the_cpu(runs):
    _, xla, cpu = runs
    lines = [read_log(folder / "log.jsonl") for folder in (xla, cpu)]
    assert len(lines[0]) == len(lines[1]) == STEPS + 2
    for on_xla, on_cpu in zip(*lines):
        assert on_xla == pytest.approx(on_cpu, rel=TOLERANCE, abs=TOLERANCE)


def test_weights_are_those_of_the_cpu(runs):
    kind, xla, cpu = runs
    states = [state_of(folder, STEPS) for folder in (xla, cpu)]
    assert_same(states[0]["weights"], states[1]["weights"], 10 * TOLERANCE)
    (optimizer, *_, average), (expected, *_, expected_average) = (state["rest"] for state in states)
    assert_same(optimizer["state"], expected["state"], 10 * TOLERANCE)
    assert_same(average, expected_average, 10 * TOLERANCE)
    assert len(optimizer["state"]) == len(optimizer["param_groups"][0]["params"]) == num_parameters(kind)


def test_every_parameter_was_trained(runs):
    _, xla, _ = runs
    first, last = (load_file(xla / f"checkpoint-{step}/model.safetensors") for step in (5, STEPS))
    still = [name for name in last if torch.equal(first[name], last[name])]
    assert not still


def test_the_saved_model_is_the_evaluated_one(runs):
    kind, xla, cpu = runs
    pipeline = D3PMPipeline.from_pretrained(xla)
    assert len(list(pipeline.denoiser.parameters())) == num_parameters(kind)
    states, logits = drawn(xla)["states"], drawn(xla)["logits"]
    with torch.no_grad():
        torch.testing.assert_close(pipeline.denoiser(states, torch.tensor(3)), logits, rtol=1e-4, atol=1e-4)
    assert_same_draws(states, drawn(cpu)["states"])
    assert (xla / "README.md").exists() and len(list((xla / "samples").glob("final.*"))) == 1


def kill_and_resume(kind, whole, folder, **settings):
    """Compares a run that was killed in its ninth step and resumed with the whole run."""
    killed = launch(kind, folder, die_at=9, **settings)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-5"]
    finish(kind, folder, resume_from_checkpoint="latest", **settings)
    assert_same(state_of(folder, STEPS), state_of(whole, STEPS), 1e-6)
    assert read_log(folder / "log.jsonl") == [pytest.approx(line, rel=1e-6) for line in read_log(whole / "log.jsonl")]
    assert_same(drawn(folder), drawn(whole), 1e-5)
    step = counters(folder, "steps")[-1]
    assert step["executed"] <= MOST[kind][0] and step["copied"] <= MOST[kind][1], step


def test_a_killed_run_resumes(runs, tmp_path):
    kind, whole, _ = runs
    kill_and_resume(kind, whole, tmp_path / "run")


def test_a_killed_run_resumes_with_its_dropout(tmp_path):
    whole = tmp_path / "whole"
    finish("absorbing", whole, dropout=0.2)
    kill_and_resume("absorbing", whole, tmp_path / "run", dropout=0.2)


def test_bfloat16(tmp_path):
    """Losses and bounds are those of float32 on the CPU to one percent."""
    finish("absorbing", tmp_path / "xla", mixed_precision="bf16", num_samples=0)
    finish("absorbing", tmp_path / "cpu", on_xla=False, num_samples=0)
    on_xla, on_cpu = (read_log(tmp_path / name / "log.jsonl") for name in ("xla", "cpu"))
    assert on_xla != on_cpu and on_xla == [pytest.approx(line, rel=1e-2) for line in on_cpu]


def test_training_compiles_nothing_after_warm_up(runs):
    _, xla, _ = runs
    steps = counters(xla, "steps")
    assert len(steps) == STEPS - 1
    assert [step["compiled"] for step in steps[6:]] == [0] * 5  # the first evaluation is behind them


def test_a_training_step_runs_few_graphs_and_is_read_once(runs):
    kind, xla, _ = runs
    for after in PLAIN_STEPS:
        step = counters(xla, "steps")[after - 1]
        assert step["executed"] <= MOST[kind][0] and step["copied"] <= MOST[kind][1], step


def test_no_operation_of_training_runs_on_the_host(runs):
    kind, xla, _ = runs
    fallbacks = [counters(xla, "steps")[after - 1]["fallbacks"] for after in (1, 2, 3, 4, *PLAIN_STEPS)]
    assert fallbacks == [ON_THE_HOST.get(kind, {})] * 8


def test_sampling_compiles_nothing_after_warm_up(runs):
    """The second call, with another seed, and a third one with three more steps, of one graph each."""
    _, xla, _ = runs
    _, second, third = counters(xla, "calls")
    assert second["compiled"] == third["compiled"] == 0
    assert third["executed"] - second["executed"] == 3
