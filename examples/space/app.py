# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The page of `python -m d3pm_hf.app` as a Space. CHECKPOINTS names what it shows: ids on the Hub, or folders beside this file."""

import os

from d3pm_hf.app.command_line import main


# Separated by spaces. Without any, the page shows the processes alone.
CHECKPOINTS = os.environ.get("CHECKPOINTS", "")

if __name__ == "__main__":
    main(CHECKPOINTS.split())
