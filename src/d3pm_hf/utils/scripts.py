# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Entry points of command-line programs."""

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def run_script(main: Callable[[], object]) -> None:
    """Runs the main function of a script.

    Errors raised by this package, or by a file beside the script, end it with their message, without a traceback. A launcher of
    several processes is told of them, so that its report names the error too.
    """
    folders = {Path(__file__).resolve().parents[1], Path(inspect.getfile(main)).resolve().parent}
    try:
        main()
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        if folders.isdisjoint(raised_in.parents):
            raise
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        sys.exit(f"error: {error}")
