# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A computation that can be watched while it runs, and that stops when nobody watches it any more."""

import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import torch


# Seconds between two reports of a computation that is watched, and seconds without a report after which it shows that it is alive.
REPORT_SECONDS, SILENT_SECONDS = 0.08, 1.0


class Stopped(Exception):
    """Raised inside a computation that nobody waits for."""


class TooLong(ValueError):
    """Raised inside a computation that has taken more than its seconds."""


class Work:
    """The state of one computation: whether it should stop, and how often it has called the network.

    Args:
        max_seconds (`float`): Seconds after which it ends with an error.
    """

    _current = threading.local()

    def __init__(self, max_seconds: float):
        self.max_seconds, self.num_calls = max_seconds, 0
        self.began = time.monotonic()
        self.should_stop = threading.Event()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def check(self) -> None:
        """Ends the computation if it should stop or has taken too long."""
        if self.should_stop.is_set():
            raise Stopped
        if self.seconds > self.max_seconds:
            raise TooLong(
                f"this has taken more than {self.max_seconds:g} seconds: choose fewer steps, samples or particles"
            )

    @classmethod
    def current(cls) -> "Work | None":
        """The computation of this thread, `None` outside of one."""
        return getattr(cls._current, "work", None)

    def run(self, function: Callable[[Callable[[Any], None]], Any]) -> Generator[Any, None, None]:
        """Runs `function(report)` in a thread, and yields what it reports as it goes and what it returns in the end.

        Reports that come fast are left out, except for the last one before a pause; after a second without any it yields `None`.
        Closing the iterator, which happens when a visitor leaves, stops the function at its next call of a network or report.
        """
        messages: queue.SimpleQueue = queue.SimpleQueue()

        def report(value) -> None:
            self.check()
            messages.put(("report", value))

        def work() -> None:
            self._current.work = self
            try:
                messages.put(("result", function(report)))
            except Stopped:
                messages.put(("stopped", None))
            except BaseException as error:  # noqa: B036  (it is raised again where somebody waits)
                messages.put(("error", error))

        threading.Thread(target=work, daemon=True).start()
        try:
            while True:
                try:
                    kind, value = messages.get(timeout=SILENT_SECONDS)
                except queue.Empty:
                    yield None
                    continue
                while kind == "report" and not messages.empty():
                    kind, value = messages.get()
                if kind == "error":
                    raise value
                if kind == "stopped":
                    return
                yield value
                if kind == "result":
                    return
                time.sleep(REPORT_SECONDS)
        finally:
            self.should_stop.set()


def watch_network(network: torch.nn.Module) -> None:
    """Makes a network look before each of its calls whether the computation that calls it should stop."""

    def look(module, inputs) -> None:
        work = Work.current()
        if work is not None:
            work.num_calls += 1
            work.check()

    network.register_forward_pre_hook(look)
