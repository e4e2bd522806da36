# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Runs that are killed at random moments and resumed: they end with the bytes of a run that nothing happened to.

`pytest -m slow -s tests/test_kills.py` prints where the kills fell. To test another way to train, add a `Case`.
"""

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from forked_runs import ForkedRun, last_state, train_images, train_text
from sharded_run import shard_images, shard_text, sharded_state
from test_training import assert_same


pytestmark = pytest.mark.slow
STEPS = 24
SETTINGS = {
    "max_train_steps": STEPS,
    "train_batch_size": 4,
    "checkpointing_steps": 5,
    "checkpoints_total_limit": 2,
    "validation_steps": 8,
    "logging_steps": 2,
    "num_inference_steps": 4,
    "eval_batch_size": 4,
    "max_eval_samples": 8,
}
TERM, KILL = signal.SIGTERM, signal.SIGKILL


@dataclass
class Case:
    """A way to train.

    Args:
        function: `train_text`, `train_images`, or another function that trains with the settings that it is called with.
        count: Number of processes.
        moments: Number of moments at which runs are killed.
        prepare: Called with the rank in each process before it trains, such as a function that sets up sharding.
        settings: Further settings.
        state: All that must be equal at the end, from the folder of a run and its last step.
    """

    function: Callable
    count: int = 1
    moments: int = 20
    prepare: Callable | None = None
    settings: dict = field(default_factory=dict)
    state: Callable = last_state

    def start(self, folder: Path, **more) -> ForkedRun:
        return ForkedRun(self.function, folder, self.count, self.prepare, **{**SETTINGS, **self.settings, **more})


CASES = {
    "text": Case(train_text),
    "images": Case(train_images),
    "text-2": Case(train_text, count=2),
    "images-2": Case(train_images, count=2),
    "text-sharded": Case(train_text, count=2, moments=10, prepare=shard_text, state=sharded_state),
    "images-sharded": Case(train_images, count=2, moments=10, prepare=shard_images, state=sharded_state),
    "text-workers": Case(train_text, moments=5, settings={"dataloader_num_workers": 2}),
}


def count_lines(folder: Path) -> int:
    """The number of lines in the log of a run, which may not have begun."""
    path = folder / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def describe(folder: Path) -> str:
    """What a killed run has left."""
    if (folder / "README.md").exists():
        return "after the pipeline"
    if (folder / f"checkpoint-{STEPS}").exists():
        return "after the last checkpoint"
    if list(folder.glob(".checkpoint-*.partial")):
        return "while saving"
    return "between checkpoints" if list(folder.glob("checkpoint-*")) else "before a checkpoint"


def interrupt(case: Case, folder: Path, number: int, draw: random.Random, num_lines: int) -> list[int]:
    """Starts or resumes a run, and sends it a signal at a random moment: a line of the log, and a time after it."""
    # Some processes receive it before the first line, and some between the last line and the end.
    line, delay = draw.randint(0, num_lines), draw.uniform(0, 0.15)
    ranks = None if draw.random() < 0.7 else [draw.randrange(case.count)]
    with case.start(folder, resume_from_checkpoint="latest") as killed:
        while count_lines(folder) < line and any(process.is_alive() for process in killed.processes):
            time.sleep(0.002)
        time.sleep(delay)
        killed.signal(number, ranks)
        if number == KILL:  # what one process leaves of the others, a launcher ends
            time.sleep(0.05)
            killed.signal(KILL)
        return killed.wait()


@pytest.mark.parametrize("name", CASES)
def test_killed_at_random_moments(tmp_path, name):
    case, draw, kills = CASES[name], random.Random(f"kills of {name}"), Counter()
    with case.start(tmp_path / "whole") as whole:
        assert whole.wait() == [0] * case.count, whole.output()
    expected, num_lines = case.state(tmp_path / "whole", STEPS), count_lines(tmp_path / "whole")
    for moment in range(case.moments):
        folder = tmp_path / f"run-{moment}"
        numbers = [TERM if moment % 4 == 3 else KILL]
        if moment % 5 == 4:  # twice in a row
            numbers.append(draw.choice([TERM, KILL]))
        for number in numbers:
            codes = interrupt(case, folder, number, draw, num_lines)
            # SIGTERM before the first step and after the last one ends a process as it does by default.
            allowed = {0, -KILL, 1} if number == KILL else {0, 128 + TERM, -TERM, 1, -KILL}
            assert set(codes) <= allowed, codes
            if case.count == 1:
                assert 1 not in codes
            kind = "finished" if codes == [0] * case.count else f"{signal.Signals(number).name} {describe(folder)}"
            kills[kind] += 1
        with case.start(folder, resume_from_checkpoint="latest") as resumed:
            assert resumed.wait() == [0] * case.count, resumed.output()
        assert_same(case.state(folder, STEPS), expected)
        assert not (folder / ".lock").exists()
    print(f"\n{name}: {case.moments} moments, {sum(kills.values())} signals: {dict(sorted(kills.items()))}")
