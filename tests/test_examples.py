# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The examples run for real, for a few steps."""

import os
import subprocess
import sys
from pathlib import Path

from PIL import Image


EXAMPLES = Path(__file__).parents[1] / "examples"


def test_swiss_roll(tmp_path):
    options = ["--max_train_steps", "3", "--num_inference_steps", "7", "--output_dir", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, EXAMPLES / "swiss_roll.py", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("bits/dim") == 4  # three bounds, and the entropy of the data
    with Image.open(tmp_path / "swiss_roll.png") as picture:
        assert min(picture.size) > 1000 and len(picture.convert("RGB").resize((200, 200)).getcolors(40_000)) > 1000
