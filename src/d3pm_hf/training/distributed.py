# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The processes of a run: their shared outcomes and errors, and their group, which outlives the run."""

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import broadcast_object_list


Result = TypeVar("Result")


def run_on_main(accelerator: Accelerator, function: Callable[[], Result]) -> Result:
    """Calls a function on the main process, and returns its result on all processes; errors as for [`run_on_all`]."""
    outcome: list = [None]

    def call() -> None:
        if accelerator.is_main_process:
            outcome[0] = function()

    run_on_all(accelerator, call)
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    return outcome[0]


def run_on_all(accelerator: Accelerator, function: Callable[[], None]) -> None:
    """Calls a function on every process.

    A `ValueError` or an `OSError` of any process is raised on all of them, so that none waits for one that has ended.
    """
    failure: Exception | None = None
    try:
        function()
    except (ValueError, OSError) as error:
        failure = error
    if accelerator.num_processes > 1:
        has_failed = torch.tensor([failure is not None], dtype=torch.int64, device=accelerator.device)
        failed = accelerator.gather(has_failed).nonzero().flatten().tolist()
        outcome: list = [failure and (str(failure), isinstance(failure, ValueError))]
        if failed:
            broadcast_object_list(outcome, from_process=failed[0])
            sentence, is_value_error = outcome[0]
            failure = failure or (ValueError if is_value_error else OSError)(sentence)
    if failure is not None:
        raise failure


@contextmanager
def separate_state() -> Iterator[None]:
    """A context after which the state of Accelerate is as it was, so that a run does not set up the next one.

    Accelerate keeps the mixed precision of its first `Accelerator` for the whole process.
    """
    atexit.unregister(destroy_group)  # an error may leave a model behind that the group serves
    before = [(state, dict(state._shared_state)) for state in (AcceleratorState, GradientState)]
    try:
        yield
    finally:
        for state, values in before:
            state._shared_state.clear()
            state._shared_state.update(values)


def end_run(accelerator: Accelerator) -> None:
    """Ends a run as `accelerator.end_training` does. The group of processes ends with the process, not with the run.

    torch does not start a group again that was destroyed, and the caller of `train` may go on to use it.
    """
    accelerator.free_memory()  # the model, before the group that it uses: to avoid a deadlock
    for tracker in accelerator.trackers:
        tracker.finish()
    if not accelerator.state.fork_launched:
        atexit.register(destroy_group)


def destroy_group() -> None:
    """Destroys the group of processes, if there is one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
