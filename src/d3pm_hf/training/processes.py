# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Work of the main process whose outcome all processes share."""

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list


Result = TypeVar("Result")


def run_on_main(accelerator: Accelerator, function: Callable[[], Result]) -> Result:
    """Calls a function on the main process, and returns its result on all processes.

    A `ValueError` or an `OSError` is raised on all processes, so that none waits for one that has ended.
    """
    outcome: list = [None, None, False]  # the result, or the sentence of an error and whether it is a `ValueError`
    failure: Exception | None = None
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except (ValueError, OSError) as error:
            failure, outcome[1:] = error, [str(error), isinstance(error, ValueError)]
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise (ValueError if outcome[2] else OSError)(outcome[1])
    return outcome[0]
