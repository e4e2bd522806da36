# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The progress of a run: its step, its losses, and its last bound; and its log, a file of JSON lines."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import GeneralTracker, get_available_trackers, on_main_process
from accelerate.utils import LoggerType, gather

from ..likelihood.bound import Bound, bits
from ..numerics import wide_dtype
from ..utils.checks import check_path
from ..utils.files import write_text_atomically


# Losses of so many batches stay on the device before they are added up. Reading them synchronizes with it.
MAX_PENDING = 256
# JSON has no numbers that are not finite: they are written as these strings, and `read_log` reads them as floats.
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
BROKEN_LOG = "remove what was changed, or the file if it is not the log of a run"


class Progress:
    """The step of a run, the sums of its losses since the last line of the log, and its last evaluation.

    It is part of each checkpoint. Each process has the sums of its own batches.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.step, self.count = 0, 0
        # The sums are float64, which a device may not have: they are on the CPU, but for the last batches.
        self._sums, self._pending = torch.zeros(3, dtype=torch.float64), list[torch.Tensor]()
        self.bound: Bound | None = None
        self.evaluated_step: int | None = None  # the step of the last evaluation, with or without a bound

    def add(self, *losses: torch.Tensor) -> None:
        """Adds the losses of one batch."""
        self._pending.append(torch.stack([loss.detach() for loss in losses]))
        self.count += 1
        if len(self._pending) >= MAX_PENDING:
            self.read_sums()

    def read_sums(self) -> torch.Tensor:
        """The sums of the losses since the last line of the log, float64 on the CPU. This synchronizes with the device."""
        for losses in self._pending:
            self._sums = self._sums + losses.cpu().double()
        self._pending.clear()
        return self._sums

    def log_line(self, num_timesteps: int, learning_rate: float) -> dict[str, float]:
        """The averages over all processes since the last line. The sums start again at zero."""
        sums = self.read_sums()
        if self.accelerator.num_processes > 1:
            sums = self.accelerator.reduce(sums.to(self.accelerator.device), reduction="mean")
        loss, vb, cross_entropy = (value / self.count for value in sums.tolist())
        self._sums, self.count = torch.zeros_like(self._sums), 0
        return {
            "loss": loss,
            "vb": vb,
            "cross_entropy": cross_entropy,
            # Terms are weighted as for uniform timesteps: T times their average estimates the bound without the constant L_T.
            "bits": bits(vb * num_timesteps),
            "learning_rate": learning_rate,
        }

    def check_finite(self, parameters: list[torch.Tensor]) -> None:
        """Raises an error on all processes if a loss since the last line of the log, or a weight, is not finite.

        It waits for the device, so it is called where a checkpoint or an evaluation would wait in any case.
        """
        # Shards of a weight are looked at by the process that holds them.
        shards = [getattr(parameter, "_local_tensor", parameter).detach() for parameter in parameters]
        loss = self.read_sums()[0] / max(self.count, 1)
        held = [shard for shard in shards if shard.numel()]
        norms = torch._foreach_norm(held, ord=math.inf) if held else (loss,)
        largest = torch.stack([norm.to(wide_dtype(norm.device)) for norm in norms]).max()
        both = torch.stack([loss.to(largest.dtype).to(largest.device), largest])
        loss, largest = self.accelerator.reduce(both, reduction="mean").cpu().tolist()
        if not math.isfinite(loss):
            raise loss_error(loss, self.step)
        if not math.isfinite(largest):
            raise FloatingPointError(
                f"a weight is {largest} after step {self.step}: start a new run with a lower learning_rate or "
                "max_grad_norm"
            )

    def state_dict(self) -> dict:
        """The state with the sums of each process, `[num_processes, 3]`. All processes must call."""
        sums, processes = self.read_sums()[None], PartialState()
        if processes.num_processes > 1:
            sums = gather(sums.to(processes.device))
        bound = None if self.bound is None else asdict(self.bound)
        return {
            "step": self.step,
            "sums": sums.cpu(),
            "count": self.count,
            "batches_per_step": self.accelerator.gradient_accumulation_steps,
            "bound": bound,
            "evaluated_step": self.evaluated_step,
        }

    def load_state_dict(self, state: dict) -> None:
        """Takes the sums of this process, or those of an average process if there were more or fewer of them.

        If a step has more or fewer batches now, the sums are those of so many batches for the same steps.
        """
        now = self.accelerator.gradient_accumulation_steps
        ratio = now / state.get("batches_per_step", now)  # earlier versions did not keep it
        self.step, self.count = state["step"], round(state["count"] * ratio)
        sums, processes = state["sums"].reshape(-1, 3), PartialState()  # earlier versions had those of one process
        self._sums = sums[processes.process_index] if len(sums) == processes.num_processes else sums.mean(0)
        self._sums = self._sums * ratio
        self._pending.clear()
        bound = state.get("bound")  # earlier versions did not keep it, or called one entry by another name
        if bound is not None and "num_evaluated_timesteps" in bound:
            bound["num_eval_timesteps"] = bound.pop("num_evaluated_timesteps")
        self.bound = None if bound is None else Bound(**bound)
        self.evaluated_step = state.get("evaluated_step")


def loss_error(loss: float, step: int) -> FloatingPointError:
    """The error of a loss that is not finite."""
    return FloatingPointError(
        f"the loss is {loss} at step {step}: start a new run with a lower learning_rate or max_grad_norm"
    )


class JSONLinesTracker(GeneralTracker):
    """Appends one line to `log.jsonl` at each call of `accelerator.log`.

    The log holds no times and no rates, so that the log of a killed and resumed run equals that of an uninterrupted run.
    Lines of steps after `step`, that of the checkpoint that the run starts from, are removed. A line that the run repeats,
    because it was killed between the line and the checkpoint, is not written twice.
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
        lines = read_lines(self.path) if self.path.exists() else []
        self._present = {tuple(value) for _, value in lines if value["step"] == self.step}
        write_text_atomically(self.path, "".join(line for line, value in lines if value["step"] <= self.step))

    @on_main_process
    def store_init_configuration(self, values: dict):
        """Does nothing: each checkpoint holds the settings."""

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs):
        line = {"step": step, **values}
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                line[name] = json.dumps(value)
        if step == self.step and tuple(line) in self._present:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[tuple[str, dict]]:
    """The lines of a log as text and as dictionaries, each with its step. A last line that is still being written is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OSError(f"{path} is not UTF-8 text ({error}): {BROKEN_LOG}") from error
    lines = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise OSError(f"line {number} of {path} is not JSON ({error}): {BROKEN_LOG}") from error
        step = value.get("step") if isinstance(value, dict) else None
        if not isinstance(step, int):
            raise OSError(f"line {number} of {path} is no JSON object with an integer `step`: {BROKEN_LOG}")
        lines.append((line, value))
    return lines


def tracker_names(report_to: str | None) -> list[str]:
    """The names in `report_to`, such as `"tensorboard,wandb"`. Each must be a tracker of Accelerate that is installed."""
    names = [name.strip() for name in (report_to or "").split(",") if name.strip()]
    known = [str(tracker.value) for tracker in LoggerType if tracker != LoggerType.ALL]
    for name in names:
        if name not in known:
            raise ValueError(f"report_to names {name!r}: it must be one or several of {', '.join(known)}")
        if LoggerType(name) not in get_available_trackers():
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
    return [
        {name: NOT_FINITE.get(value, value) if isinstance(value, str) else value for name, value in line.items()}
        for _, line in read_lines(Path(path))
    ]
