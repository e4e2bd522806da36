# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState


# The tests run on as many processes as there are cores; more threads than that would wait for each other.
torch.set_num_threads(1)


# Files that take the longest come first: each file is run by one process (`--dist loadfile`), and the short ones fill the gaps.
LONG = ("test_sharding", "test_examples", "test_hub", "test_training", "test_signals", "test_reproduce", "test_docs")


# Some virtual machines announce the matrix instructions of their CPU (AMX) and do not execute them: there a product in bfloat16 ends
# the process. oneDNN then takes the next older ones, in the processes that the tests start, too.
CPU_INFO = Path("/proc/cpuinfo")
PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
if "ONEDNN_MAX_CPU_ISA" not in os.environ and CPU_INFO.exists() and "amx_bf16" in CPU_INFO.read_text():
    probe = subprocess.run([sys.executable, "-c", PRODUCT], capture_output=True)
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16" if probe.returncode == -signal.SIGILL else "DEFAULT"


@pytest.fixture(autouse=True, scope="session")
def cache_of_tokens(tmp_path_factory):
    """Texts that the tests read leave their tokens in a folder of the tests, also those of the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


@pytest.fixture
def fresh_accelerator():
    """Accelerate keeps its state for the whole process; a test that trains shall not leave it to the next."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def pytest_addoption(parser):
    parser.addoption(
        "--once", action="store_true", help="run each test once for each family, with the first of its cases"
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "cover: of the product of parameters, `make test` runs a part, `make test-slow` the rest"
    )


@pytest.hookimpl(tryfirst=True)  # before what is marked as slow is left out
def pytest_collection_modifyitems(config, items):
    """With `--once`, keeps the first case of each test, or of each test and family of transitions.

    Else, of tests that are marked with `cover`, the cases that `families.cover` does not choose are marked as slow.
    """
    items.sort(key=lambda item: item.path.stem not in LONG)
    if config.getoption("--once"):
        keep_first(items)
    else:
        mark_uncovered(items)


def keep_first(items):
    from families import NAMES  # after the tests that look at how the package is imported

    seen, kept = set(), []
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        families = [value for value in parameters.values() if isinstance(value, str) and value in NAMES]
        key = item.parent.nodeid, getattr(item, "originalname", item.name), *families
        if key not in seen:
            seen.add(key)
            kept.append(item)
    items[:] = kept


def mark_uncovered(items):
    tests = {}
    for item in items:
        if item.get_closest_marker("cover"):
            tests.setdefault((item.parent.nodeid, item.originalname), []).append(item)
    if not tests:
        return
    from families import cover

    for cases in tests.values():
        chosen = cover([item.callspec.params for item in cases])
        for index, item in enumerate(cases):
            if index not in chosen:
                item.add_marker(pytest.mark.slow)
