# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A page to play with checkpoints and processes, in a browser: `python -m d3pm_hf.app [CHECKPOINT ...]`."""
