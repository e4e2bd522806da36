# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`python -m d3pm_hf.app [CHECKPOINT ...]` serves a page to play with."""

from ..utils.scripts import run_script
from .command_line import main


if __name__ == "__main__":
    run_script(main)
