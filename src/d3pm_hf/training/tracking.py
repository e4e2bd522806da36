# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Trackers: the log of each run, a file of JSON lines, and those of Accelerate that are asked for."""

import json
import os
from pathlib import Path

from accelerate.tracking import GeneralTracker, get_available_trackers, on_main_process

from ..utils.checks import check_path
from ..utils.files import write_text_atomically


class JSONLinesTracker(GeneralTracker):
    """Appends one line to `log.jsonl` at each call of `accelerator.log`.

    The log holds no times and no rates, so that the log of a killed and resumed run equals that of an uninterrupted run.

    Args:
        path (`str` or `os.PathLike`): Path of the file.
        step (`int`, defaults to 0): Step of the checkpoint that the run starts from. Lines of later steps are removed.
    """

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, path: str | os.PathLike, step: int = 0):
        super().__init__()
        self.path, self._step = Path(path), step

    @property
    def tracker(self):
        return self.path

    @on_main_process
    def start(self):
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self._step]
        write_text_atomically(self.path, "".join(kept))

    @on_main_process
    def store_init_configuration(self, values: dict):
        """Does nothing: each checkpoint holds the settings."""

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs):
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def tracker_names(report_to: str | None) -> list[str]:
    """The names in `report_to`, such as `"tensorboard,wandb"`. A tracker that is not installed raises an error."""
    names = [name.strip() for name in (report_to or "").split(",") if name.strip()]
    available = [str(tracker.value) for tracker in get_available_trackers()]
    for name in names:
        if name not in available:
            raise ValueError(
                f"report_to names {name!r}, which is not installed: run `pip install {name}`, or leave it out"
            )
    return names


def read_log(path: str | os.PathLike) -> list[dict]:
    """The lines of a log as dictionaries. A last line that is still being written is left out."""
    check_path("path", path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"path is {path}, which is not a file: pass the `log.jsonl` of a run")
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
