# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Entry points of command-line programs."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def run_script(main: Callable[[], object]) -> None:
    """Runs the main function of a script. Errors raised by this package end it with their message, without a traceback."""
    try:
        main()
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if Path(__file__).parents[1] not in raised_in.parents:
            raise
        sys.exit(f"error: {error}")
