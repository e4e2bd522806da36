# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Trackers: the log of each run, a file of JSON lines, and those of Accelerate that are asked for."""

import json
import math
import os
from pathlib import Path

from accelerate.tracking import GeneralTracker, get_available_trackers, on_main_process

from ..utils.checks import check_path
from ..utils.files import write_text_atomically


# JSON has no numbers that are not finite: they are written as these strings, and `read_log` reads them as floats.
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
BROKEN_LOG = "remove what was changed, or the file if it is not the log of a run"


class JSONLinesTracker(GeneralTracker):
    """Appends one line to `log.jsonl` at each call of `accelerator.log`.

    The log holds no times and no rates, so that the log of a killed and resumed run equals that of an uninterrupted run.
    A line that a run repeats, because it was killed between the line and the checkpoint, is not written twice.

    Args:
        path (`str` or `os.PathLike`): Path of the file.
        step (`int`, defaults to 0): Step of the checkpoint that the run starts from. Lines of later steps are removed.
    """

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, path: str | os.PathLike, step: int = 0):
        super().__init__()
        self.path, self.step = Path(path), step
        self._present: set[tuple[str, ...]] = set()  # the names in each line of the step that the run starts from

    @property
    def tracker(self):
        return self.path

    @on_main_process
    def start(self):
        lines = complete_lines(self.path) if self.path.exists() else []
        values = parse_lines(self.path, lines)
        self._present = {tuple(value) for value in values if value["step"] == self.step}
        write_text_atomically(
            self.path, "".join(line for line, value in zip(lines, values) if value["step"] <= self.step)
        )

    @on_main_process
    def store_init_configuration(self, values: dict):
        """Does nothing: each checkpoint holds the settings."""

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs):
        line = {"step": step, **{name: json_number(value) for name, value in values.items()}}
        if step == self.step and tuple(line) in self._present:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def json_number(value):
    """A value of the log, with a string in place of a number that is not finite."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def complete_lines(path: Path) -> list[str]:
    """The lines of a log without a last one that is still being written."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OSError(f"{path} is not UTF-8 text ({error}): {BROKEN_LOG}") from error
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def parse_lines(path: Path, lines: list[str]) -> list[dict]:
    """The lines of the log `path` as dictionaries, each with its step."""
    values = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise OSError(f"line {number} of {path} is not JSON ({error}): {BROKEN_LOG}") from error
        step = value.get("step") if isinstance(value, dict) else None
        if not isinstance(step, int):
            raise OSError(f"line {number} of {path} is no JSON object with an integer `step`: {BROKEN_LOG}")
        values.append(value)
    return values


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
    """The lines of a log as dictionaries. A last line that is still being written is left out.

    A number that is not finite stands in the file as `"NaN"`, `"Infinity"` or `"-Infinity"`, and is a float here.
    """
    check_path("path", path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"path is {path}, which is not a file: pass the `log.jsonl` of a run")
    lines = parse_lines(Path(path), complete_lines(Path(path)))
    return [
        {name: NOT_FINITE.get(value, value) if isinstance(value, str) else value for name, value in line.items()}
        for line in lines
    ]
