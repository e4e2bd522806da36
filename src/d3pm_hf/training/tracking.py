# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The log that every run has: a file of JSON lines."""

import json
import os
from pathlib import Path

from accelerate.tracking import GeneralTracker, on_main_process

from ..utils.checks import check_path
from ..utils.files import write_text_atomically


class JSONLinesTracker(GeneralTracker):
    """Appends a line to `log.jsonl` whenever something is logged.

    It holds nothing that depends on the machine (no times, no rates): the log of a run that was killed and resumed equals
    that of one which was not.

    Args:
        path: of the file.
        step: of the checkpoint that the run starts from. What was logged after it is forgotten, as it will happen again.
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
        """The settings stand in each checkpoint."""

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs):
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def read_log(path: str | os.PathLike) -> list[dict]:
    """The lines of a log, without one that is still being written."""
    check_path("path", path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"path is {path}, which is not a file: pass the `log.jsonl` of a run")
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
