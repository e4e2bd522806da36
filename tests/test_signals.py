# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""SIGTERM and SIGINT: a run saves a checkpoint after its step, on all processes, and resumes bit for bit."""

import signal
import threading
import time

import pytest
from forked_runs import ForkedRun, SignalAt, last_state, train_images, train_text
from test_training import assert_same
from training_run import run

from d3pm_hf.training import interruption, read_log


pytestmark = pytest.mark.usefixtures("fresh_accelerator")
STEPS = 8
SETTINGS = {
    "max_train_steps": STEPS,
    "train_batch_size": 4,
    "checkpointing_steps": 4,
    "validation_steps": 4,
    "logging_steps": 3,
    "num_inference_steps": 4,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nothing happened to, by their settings."""
    runs = {}

    def get(function=train_text, count=1, **settings):
        key = (function, count, *settings.items())
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("whole") / "run"
            with ForkedRun(function, runs[key], count, **{**SETTINGS, **settings}) as whole_run:
                assert whole_run.wait() == [0] * count, whole_run.output()
        return last_state(runs[key], STEPS)

    return get


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("*checkpoint-*"))


@pytest.mark.parametrize(
    ("number", "batch", "saved"),
    [
        pytest.param(signal.SIGTERM, 1, ["checkpoint-1"], marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, ["checkpoint-2"], marks=pytest.mark.slow),
        # The checkpoint of this step is due, and so is an evaluation, which a resumed run makes up for.
        (signal.SIGTERM, 4, ["checkpoint-4"]),
        pytest.param(signal.SIGTERM, STEPS, ["checkpoint-4", "checkpoint-8"], marks=pytest.mark.slow),
        (signal.SIGINT, 0, ["checkpoint-4"]),  # while the run is evaluated
    ],
)
def test_a_signal_saves_a_checkpoint(whole, tmp_path, number, batch, saved):
    folder = tmp_path / "run"
    with ForkedRun(train_text, folder, prepare=SignalAt(number, batch), **SETTINGS) as killed:
        assert killed.wait() == [128 + number], killed.output()
    assert f"{number.name}: {saved[-1]} is saved; continue the run with --resume_from_checkpoint" in killed.output()
    assert checkpoints(folder) == saved
    with ForkedRun(train_text, folder, resume_from_checkpoint="latest", **SETTINGS) as resumed:
        assert resumed.wait() == [0], resumed.output()
    assert_same(last_state(folder, STEPS), whole())


@pytest.mark.slow
@pytest.mark.parametrize("function", [train_text, train_images])
def test_processes_agree_on_the_step(whole, tmp_path, function):
    """Although only one of them has received the signal, in the middle of accumulation and between lines of the log."""
    folder, settings = tmp_path / "run", {"gradient_accumulation_steps": 2, **SETTINGS, "train_batch_size": 2}
    with ForkedRun(function, folder, 2, SignalAt(signal.SIGTERM, 9, rank=1), **settings) as killed:
        assert killed.wait() == [143, 143], killed.output()
    assert checkpoints(folder) == ["checkpoint-4", "checkpoint-5"]
    with ForkedRun(function, folder, 2, resume_from_checkpoint="latest", **settings) as resumed:
        assert resumed.wait() == [0, 0], resumed.output()
    expected = whole(function, 2, gradient_accumulation_steps=2, train_batch_size=2)
    assert_same(last_state(folder, STEPS), expected)


def test_handlers_are_put_back(tmp_path):
    """After a run, after an error, and after a signal, which reaches whoever has called `train` as a `SystemExit`."""
    before = [signal.getsignal(number) for number in interruption.SIGNALS]
    options = {"validation_steps": 0, "num_samples": 0, "max_train_steps": 3}
    run(output_dir=str(tmp_path / "a"), **options)
    with pytest.raises(ValueError, match="already holds a run"):
        run(output_dir=str(tmp_path / "a"), **options)
    with pytest.MonkeyPatch.context() as patch:
        from d3pm_hf.training import loop

        compute = loop.diffusion_loss
        patch.setattr(loop, "diffusion_loss", lambda *args: (signal.raise_signal(signal.SIGINT), compute(*args))[1])
        with pytest.raises(SystemExit) as ended:
            run(output_dir=str(tmp_path / "b"), **options)
    assert ended.value.code == 130 and checkpoints(tmp_path / "b") == ["checkpoint-1"]
    assert [signal.getsignal(number) for number in interruption.SIGNALS] == before


def test_a_second_signal_ends_at_once(tmp_path, monkeypatch):
    """One that comes right after the first is a copy that a launcher has forwarded."""
    monkeypatch.setattr(interruption, "FORWARDING_SECONDS", 0.2)
    from d3pm_hf.training import loop

    compute, sent = loop.diffusion_loss, []

    def send(*args):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        sent.append(len(sent))
        time.sleep(0.4)
        signal.raise_signal(signal.SIGINT)
        sent.append("never")
        return compute(*args)

    monkeypatch.setattr(loop, "diffusion_loss", send)
    with pytest.raises(SystemExit) as ended:
        run(output_dir=str(tmp_path), max_train_steps=3, validation_steps=0, num_samples=0)
    assert ended.value.code == 130 and sent == [0] and checkpoints(tmp_path) == []


def test_outside_the_main_thread(tmp_path):
    """Python lets only the main thread install handlers: a run in another thread leaves them alone."""
    before, errors = signal.getsignal(signal.SIGTERM), []

    def work():
        try:
            run(output_dir=str(tmp_path), max_train_steps=2, validation_steps=0, num_samples=0)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == [] and signal.getsignal(signal.SIGTERM) == before and len(read_log(tmp_path / "log.jsonl")) == 2


def test_workers_leave_signals_to_the_run(tmp_path):
    """A signal to the whole group of processes reaches the workers of the data loader too, which must go on."""
    folder = tmp_path / "run"
    prepare = SignalAt(signal.SIGTERM, 3, to_group=True)
    with ForkedRun(train_text, folder, prepare=prepare, dataloader_num_workers=1, **SETTINGS) as killed:
        assert killed.wait() == [143], killed.output()
    assert checkpoints(folder) == ["checkpoint-3"]
