# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What programs of the command line have in common."""

import sys
import traceback
from pathlib import Path


def run_script(main) -> None:
    """Runs the main function of a script. An error that this package raises ends it with the message alone."""
    try:
        main()
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if Path(__file__).parents[1] not in raised_in.parents:
            raise
        sys.exit(f"error: {error}")
