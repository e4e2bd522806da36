# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Training runs in processes of their own that start within a second, and can be killed at any moment.

A server that has imported torch and the package is forked for each process. Processes of one run find each other as those of
`accelerate launch` do, by the variables of the environment.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

import torch
import training_run
from safetensors.torch import load_file
from training_run import SETTINGS, Sentences, T, make_pipeline

from d3pm_hf import D3PMImagePipeline, D3PMScheduler, create_unet
from d3pm_hf.data import Rows
from d3pm_hf.training import D3PMTrainingArguments, train
from d3pm_hf.training.state_files import load_states


# The server looks for modules in PYTHONPATH only.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["forked_runs"])
TIMEOUT = 240


def image_parts():
    """A tiny U-Net over 8 x 8 images of 8 levels, and rows of them that a seed flips.

    The process is uniform, without products of float64 matrices: with `transition="gaussian"` on two processes, a number of
    the bound of one resumed run differed in its 14th digit, while all weights were equal.
    """
    torch.manual_seed(0)
    levels = torch.randint(0, 3, (64, 1, 8, 8), generator=torch.Generator().manual_seed(0)).cumsum(-1) % 8
    scheduler = D3PMScheduler(8, num_train_timesteps=T, transition="uniform", beta_schedule="cosine")
    pipeline = D3PMImagePipeline(create_unet("tiny", 8, (8, 8), 1, dropout=0.1), scheduler)
    data = Rows(levels.numpy().astype("uint8"), 8, random_flip=True)
    return pipeline, data, Rows(data.tokens[:16], 8)


def train_text(**settings):
    training_run.run(make_pipeline(dropout=0.1), **settings)


def train_images(**settings):
    train(D3PMTrainingArguments(**{**SETTINGS, **settings}), *image_parts())


def mask_where_needed(examples):
    """A batch of rows in which one letter is known. It has a loss mask only if it holds the letter."""
    x_0 = torch.stack(examples)
    scored = x_0 != 3
    return {"x_0": x_0} if scored.all() else {"x_0": x_0, "loss_mask": scored}


def train_partly_masked(**settings):
    train(
        D3PMTrainingArguments(**{**SETTINGS, **settings}), make_pipeline(), Sentences(), None, None, mask_where_needed
    )


def train_twice(output_dir, **settings):
    """Two runs, one after the other, in the same processes, whose group is still there after both."""
    for name in ("first", "second"):
        train_text(output_dir=str(Path(output_dir) / name), **settings)
        training_run.check_the_end()
    assert torch.distributed.get_world_size() == 2
    torch.distributed.barrier()


def train_process(rank: int, count: int, port: int, errors: str, function: Callable, prepare, settings: dict) -> None:
    """One process of a run."""
    multiprocessing.set_start_method("fork", force=True)  # workers of data loaders are its own, as in a script
    sys.stderr = open(errors, "a", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if count > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), **address}
    torch.set_num_threads(1)
    if prepare is not None:
        prepare(rank)
    function(**settings)


def signal_starting_workers(rank: int) -> None:
    """Lets the first worker of a data loader have SIGTERM sent to the whole group of processes before it is ready."""
    from torch.utils.data._utils import signal_handling

    os.setpgid(0, 0)
    set_handlers = signal_handling._set_worker_signal_handlers

    def set_and_send():
        set_handlers()
        # From another process, as a worker obeys its parent; in a session of its own, which the signal does not reach.
        group = str(os.getpgid(0))
        subprocess.run(["kill", "-TERM", "--", f"-{group}"], start_new_session=True)

    signal_handling._set_worker_signal_handlers = set_and_send


@dataclass
class OwnFolder:
    """Makes a relative path another one on each process, as on nodes that share no disk.

    Args:
        folder: Folder for those of the processes.
    """

    folder: Path

    def __call__(self, rank: int) -> None:
        path = self.folder / f"node-{rank}"
        path.mkdir(exist_ok=True)
        os.chdir(path)


@dataclass
class SignalAt:
    """Prepares a run in which one process sends itself a signal when it computes a certain batch, or when it evaluates.

    Args:
        number: The signal.
        batch: Number of the batch, from 1, counted from the start of the process; 0 is the first evaluation.
        rank: The process.
        to_group: Whether the signal goes to the group of the process, its workers included.
    """

    number: int
    batch: int
    rank: int = 0
    to_group: bool = False

    def __call__(self, rank: int) -> None:
        from d3pm_hf.training import loop

        if self.to_group:
            os.setpgid(0, 0)
        name, calls = "diffusion_loss" if self.batch else "validate", []
        function = getattr(loop, name)

        def send(*args):
            calls.append(None)
            if rank == self.rank and len(calls) == max(self.batch, 1):
                if self.to_group:  # from another process, as a worker obeys its parent
                    subprocess.run(["kill", f"-{self.number}", "--", f"-{os.getpgid(0)}"])
                else:
                    os.kill(os.getpid(), self.number)
            return function(*args)

        setattr(loop, name, send)


class ForkedRun:
    """A run on `count` processes, started at once.

    Args:
        function: `train_text` or `train_images`, or another function of a module, which takes the settings.
        folder: `output_dir`.
        count: Number of processes.
        prepare: Function of a module that is called with the rank before the run, such as one that sets up sharding.
        errors: What the processes write to stderr goes to `<errors>.<rank>.err`. Defaults to `folder`.
        settings: Further settings of the run.
    """

    def __init__(
        self,
        function: Callable,
        folder: Path,
        count: int = 1,
        prepare: Callable | None = None,
        errors: Path | None = None,
        **settings,
    ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.errors = [Path(f"{errors or folder}.{rank}.err") for rank in range(count)]
        settings = {"output_dir": str(folder), **settings}
        self.processes = [
            CONTEXT.Process(
                target=train_process, args=(rank, count, port, str(self.errors[rank]), function, prepare, settings)
            )
            for rank in range(count)
        ]
        for process in self.processes:
            process.start()

    def signal(self, number: int, ranks: list[int] | None = None) -> None:
        """Sends a signal to the processes that still run, or to some of them."""
        for rank, process in enumerate(self.processes):
            if process.is_alive() and (ranks is None or rank in ranks):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid, number)

    def wait(self, timeout: float = TIMEOUT, patience: float = 10) -> list[int]:
        """The exit codes of the processes. Once one has ended in an error, the others have `patience` seconds to end."""
        end = time.monotonic() + timeout
        while running := [process for process in self.processes if process.exitcode is None]:
            if any(process.exitcode for process in self.processes):
                end = min(end, time.monotonic() + patience)
            if not connection.wait([process.sentinel for process in running], end - time.monotonic()):
                self.signal(signal.SIGKILL)
        return [process.exitcode for process in self.processes]

    def __enter__(self) -> "ForkedRun":
        return self

    def __exit__(self, *_) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def output(self) -> str:
        return "\n".join(path.read_text() for path in self.errors if path.exists())


def last_state(folder: Path, step: int) -> dict:
    """All that a checkpoint and a finished run hold: weights, optimizer, progress, learning rate, average, log, pipeline."""
    checkpoint = folder / f"checkpoint-{step}"
    rest = [
        torch.load(checkpoint / "optimizer.bin"),
        *load_states(checkpoint, ["progress", "lr_scheduler", "ema"]).values(),
    ]
    kept = [
        path for path in folder.rglob("*") if path.is_file() and "checkpoint-" not in str(path.relative_to(folder))
    ]
    files = {str(path.relative_to(folder)): path.read_bytes() for path in kept}
    return {"weights": load_file(checkpoint / "model.safetensors"), "rest": rest, "files": files}
