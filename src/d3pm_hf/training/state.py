# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checkpoints of a run: whole or not at all, no more than asked for, and only for the run that they belong to."""

import json
import os
import re
import shutil
from pathlib import Path
from pickle import UnpicklingError

from accelerate import Accelerator
from safetensors import SafetensorError


SETTINGS_NAME = "settings.json"


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """The whole checkpoints of a run with their steps, the oldest first."""
    found = []
    for path in output_dir.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found)


def find_checkpoint(output_dir: Path, resume_from: str | None, overwrite: bool) -> tuple[int, Path | None]:
    """The step and the folder to resume from; (0, None) for a fresh start."""
    found = list_checkpoints(output_dir)
    if resume_from is None:
        if (found or (output_dir / "log.jsonl").exists()) and not overwrite:
            raise ValueError(
                f"{output_dir} holds a run already: pass --resume_from_checkpoint latest to go on with it, "
                "--overwrite_output_dir to start anew, or another --output_dir"
            )
        return 0, None
    if resume_from == "latest":
        return found[-1] if found else (0, None)
    for step, path in list_checkpoints(Path(resume_from).parent):
        if path.resolve() == Path(resume_from).resolve():
            return step, path
    raise ValueError(f"{resume_from} is no checkpoint: pass a folder named checkpoint-<step>, or `latest`")


def clear_run(output_dir: Path) -> None:
    """Removes the checkpoints and the log of an older run, and nothing else."""
    for _, path in list_checkpoints(output_dir):
        shutil.rmtree(path)
    (output_dir / "log.jsonl").unlink(missing_ok=True)


def save_checkpoint(accelerator: Accelerator, output_dir: Path, step: int, settings: dict, limit: int | None) -> None:
    """Writes `checkpoint-<step>` beside its place and renames it, then drops the oldest ones beyond `limit`."""
    folder = output_dir / f"checkpoint-{step}"
    partial = output_dir / f".checkpoint-{step}.partial"
    if accelerator.is_main_process:
        for stale in output_dir.glob(".checkpoint-*.partial"):
            shutil.rmtree(stale)
    accelerator.wait_for_everyone()
    try:
        accelerator.save_state(str(partial))
        if accelerator.is_main_process:
            (partial / SETTINGS_NAME).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a full disk as a RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        older = list_checkpoints(output_dir)
        rest = f"{older[-1][1].name} is whole" if older else "there is no older one"
        raise OSError(
            f"checkpoint-{step} could not be written to {output_dir} ({error}): free some space and go on with "
            f"--resume_from_checkpoint latest; {rest}"
        ) from error
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
        for _, path in list_checkpoints(output_dir)[: -limit if limit else 0]:
            shutil.rmtree(path)
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Accelerator, folder: Path, settings: dict) -> None:
    """Restores weights, optimiser and all that was registered, after a look at what run they are from."""
    try:
        saved = json.loads((folder / SETTINGS_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OSError(f"{folder} is not a checkpoint of ours, or not a whole one ({error}): pass another") from error
    different = [
        f"{name} is {settings.get(name)!r} and was {saved.get(name)!r}"
        for name in sorted({*saved, *settings})
        if saved.get(name) != settings.get(name)
    ]
    if different:
        raise ValueError(
            f"{folder} is a checkpoint of other settings ({'; '.join(different)}): use the same ones, or another "
            "--output_dir"
        )
    try:
        accelerator.load_state(str(folder))
    except (OSError, RuntimeError, EOFError, SafetensorError, UnpicklingError) as error:
        raise OSError(f"{folder} is broken ({error}): remove it, and resume from the one before") from error
