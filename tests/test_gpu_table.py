# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`make test-gpu`: the rows of its table that a CPU can run, what it says without a GPU, and a row that fails."""

import sys
from pathlib import Path

import pytest
import torch


pytestmark = [pytest.mark.usefixtures("fresh_accelerator"), pytest.mark.filterwarnings("ignore:after .* steps q")]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    import gpu

    yield gpu
    for name in ("gpu", "bench_core", "peers"):
        sys.modules.pop(name, None)


def test_without_a_gpu(script, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 0
    assert capsys.readouterr().out.startswith("Skipped: torch finds no GPU on this machine")


def test_the_rows_that_compare(script, capsys):
    assert script.main(["--device", "cpu", "--small", "--only", "beside"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("| ok |") == 10 and "Failed rows: 0" in shown


def test_a_row_of_speed_and_training_in_bfloat16(script, capsys):
    assert script.main(["--device", "cpu", "--small", "--only", "text8 absorbing, 2x64"]) == 0
    assert "| text8 absorbing, 2x64 x 28 | loss " in capsys.readouterr().out
    assert script.main(["--device", "cpu", "--small", "--only", "bfloat16"]) == 0


@pytest.mark.slow
def test_two_processes(script, capsys):
    assert script.main(["--device", "cpu", "--small", "--only", "processes"]) == 0
    assert "weights differ by" in capsys.readouterr().out


def test_a_row_that_fails(script, monkeypatch, capsys):
    """The others are shown all the same, and the exit status says it."""

    def broken(family, device):
        raise RuntimeError("out of memory\nwith a long story")

    monkeypatch.setattr(script, "compare_noise", broken)
    assert script.main(["--device", "cpu", "--small", "--only", "absorbing, beside the CPU"]) == 1
    shown = capsys.readouterr().out
    assert "| RuntimeError: out of memory |  | **FAIL** |" in shown and shown.count("| ok |") == 2
    assert "Failed rows: 1" in shown
