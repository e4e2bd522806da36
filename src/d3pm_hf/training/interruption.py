# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""SIGTERM and SIGINT: a run that is asked to end saves a checkpoint first, on all processes at the same step."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger


SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Launchers forward a signal that the whole group of processes has received: the copy is not a second signal.
FORWARDING_SECONDS = 2.0
logger = get_logger(__name__)


class Interruption:
    """Waits for a signal between [`start`] and [`stop`], and lets all processes agree on the step at which they end.

    A second signal ends the process at once. As a context, it puts the handlers back that were there before, also after an
    error. Outside the main thread, where Python delivers no signals, it waits for those of other processes only.

    Args:
        accelerator (`Accelerator`): Accelerator of the run. All processes create the object together.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.number = 0  # the signal that ends the run, once the processes have agreed on it
        self._received, self._time = 0, 0.0
        self._previous: dict[signal.Signals, object] = {}
        # A separate group on the hosts, so that agreeing on a step does not synchronize with the device.
        self._group = None
        if accelerator.num_processes > 1 and accelerator.device.type != "xla":
            self._group = torch.distributed.new_group(backend="gloo")

    def __enter__(self) -> "Interruption":
        return self

    def __exit__(self, *_) -> None:
        self._restore()
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)
            self._group = None

    def _restore(self) -> None:
        """Puts the former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what `signal.signal` has returned
        self._previous = {}

    def start(self) -> None:
        """Receives signals from now on."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def stop(self, step: int) -> None:
        """Leaves signals to the former handlers. One that came since the last step ends the run now."""
        self._restore()
        if self.is_agreed(is_waiting=True):
            self.end(step)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received and time.monotonic() - self._time > FORWARDING_SECONDS:
            raise SystemExit(128 + number)
        if not self._received:
            self._received, self._time = number, time.monotonic()

    def is_agreed(self, is_waiting: bool) -> bool:
        """Whether the run ends after this step, because any process has received a signal. All processes ask together.

        Args:
            is_waiting (`bool`): Whether the step waits for the device in any case. Processes without a group of hosts
                (XLA) agree at such steps only.
        """
        if self.accelerator.num_processes == 1:
            self.number = self._received
        elif self._group is not None:
            number = torch.tensor([self._received])
            torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, self._group)
            self.number = int(number)
        elif is_waiting:
            numbers = self.accelerator.gather(torch.tensor([self._received], device=self.accelerator.device))
            self.number = int(numbers.max())
        return self.number > 0

    def end(self, step: int) -> NoReturn:
        """Ends the process with status 143 (SIGTERM) or 130 (SIGINT), after the checkpoint of `step` was saved."""
        name = signal.Signals(self.number).name
        logger.warning(
            f"{name}: checkpoint-{step} is saved; continue the run with --resume_from_checkpoint latest",
            main_process_only=True,
        )
        raise SystemExit(128 + self.number)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """A context in which signals wait, in this process and in those that it starts, until they are unblocked there."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals(worker: int) -> None:
    """Makes a worker process of a data loader leave signals, which reach the whole group, to the training process.

    A worker that ends by itself would end the training step in an error. It ends when the training process does. A worker
    that starts under [`blocked_signals`] drops the signals that have come until now.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
