# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checkpoints of a run on disk, and the settings by which a checkpoint is known to belong to a run."""

import dataclasses
import json
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from accelerate import Accelerator
from accelerate.utils import load
from safetensors import SafetensorError, safe_open

from ..hub.layout import read_json
from ..pipelines import D3PMPipeline
from ..utils.files import flush_folder, flush_names
from .arguments import D3PMTrainingArguments
from .fingerprint import data_fingerprint, tensor_fingerprint
from .serialization import load_states, save_states
from .sharding import check_layout, find_damaged_shard, plain_errors
from .streams import is_stream


LOG_NAME = "log.jsonl"
SETTINGS_NAME = "settings.json"
# Arguments that may change when a run is resumed, as the weights do not depend on them.
FREE = (
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "report_to", "logging_dir", "max_train_steps"),
    *("checkpointing_steps", "checkpoints_total_limit", "dataloader_num_workers", "train_batch_size"),
    *("gradient_accumulation_steps", "validation_steps", "eval_batch_size", "max_eval_samples", "num_eval_timesteps"),
    *("num_samples", "num_inference_steps", "push_to_hub", "hub_model_id", "hub_token", "hub_private_repo"),
)


# Errors of a file that can be read, and that lacks something.
WRONG_CONTENT = (LookupError, TypeError, AttributeError)
# What an error says of settings that are fingerprints.
CHANGED = {
    "data_fingerprint": "the content of the training data changed",
    "scheduler_tensors": "the tensors of the scheduler, which are computed from the data or passed to it, changed",
}


def run_settings(
    arguments: D3PMTrainingArguments,
    global_batch_size: int,
    train_dataset,
    collate: Callable[[list], dict],
    pipeline: D3PMPipeline,
) -> dict:
    """All settings that the weights depend on, with fingerprints of the data and of the tensors of the scheduler."""
    settings = {name: value for name, value in dataclasses.asdict(arguments).items() if name not in FREE}
    if arguments.lr_scheduler in ("cosine", "linear"):  # the learning rate depends on the number of steps
        settings["max_train_steps"] = arguments.max_train_steps
    config = getattr(getattr(pipeline, pipeline.network_name), "config", {})
    config = config.to_diff_dict() if hasattr(config, "to_diff_dict") else dict(config)
    return {
        **settings,
        "global_batch_size": global_batch_size,
        "num_examples": None if is_stream(train_dataset) else len(train_dataset),
        "data_fingerprint": data_fingerprint(train_dataset, collate),
        "scheduler_tensors": {
            name: tensor_fingerprint(tensor) for name, tensor in sorted(pipeline.scheduler.transition_tensors.items())
        },
        "scheduler": {k: v for k, v in pipeline.scheduler.config.items() if not k.startswith("_")},
        "network": {k: list(v) if isinstance(v, tuple) else v for k, v in config.items() if not k.startswith("_")},
    }


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run with their steps, the oldest first."""
    found = []
    for path in output_dir.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found)


def find_checkpoint(arguments: D3PMTrainingArguments) -> tuple[int, Path | None]:
    """The step and the folder to resume from; (0, None) for a new run."""
    step, folder = _choose_checkpoint(arguments)
    if step > arguments.max_train_steps:
        raise ValueError(
            f"max_train_steps is {arguments.max_train_steps}, and {folder} has {step} steps already: pass --max_train_steps "
            f"{step} or more, or an earlier checkpoint as --resume_from_checkpoint"
        )
    return step, folder


def _choose_checkpoint(arguments: D3PMTrainingArguments) -> tuple[int, Path | None]:
    """The step and the folder that the arguments name; (0, None) for a new run."""
    output_dir, resume_from = Path(arguments.output_dir), arguments.resume_from_checkpoint
    found = list_checkpoints(output_dir)
    if resume_from is None:
        if (found or (output_dir / LOG_NAME).exists()) and not arguments.overwrite_output_dir:
            raise ValueError(
                f"{output_dir} already holds a run: pass --resume_from_checkpoint latest to continue it, "
                "--overwrite_output_dir to replace it, or another --output_dir"
            )
        return 0, None
    if resume_from == "latest":
        return found[-1] if found else (0, None)
    for step, path in list_checkpoints(Path(resume_from).parent):
        if path.resolve() == Path(resume_from).resolve():
            return step, path
    raise ValueError(f"{resume_from} is not a checkpoint: pass a folder named checkpoint-<step>, or `latest`")


def clear_run(output_dir: Path) -> None:
    """Removes the checkpoints and the log of an older run, and nothing else."""
    for _, path in list_checkpoints(output_dir):
        remove_checkpoint(path)
    (output_dir / LOG_NAME).unlink(missing_ok=True)


def remove_checkpoint(folder: Path, replacement: Path | None = None) -> None:
    """Removes a checkpoint, if it exists, and gives its name to the folder `replacement`.

    If the process is killed meanwhile, what is left of it is not taken for a checkpoint.
    """
    stale = folder.with_name(f".{folder.name}.removed.partial")
    if folder.exists():
        shutil.rmtree(stale, ignore_errors=True)
        os.replace(folder, stale)
    if replacement is not None:
        os.replace(replacement, folder)
        flush_names(folder.parent)
    shutil.rmtree(stale, ignore_errors=True)


def save_checkpoint(
    accelerator: Accelerator, output_dir: Path, step: int, settings: dict, parts: dict[str, Any], limit: int | None
) -> None:
    """Writes `checkpoint-<step>` under a temporary name, renames it, and removes the oldest ones beyond `limit`.

    `parts` are objects with `state_dict` and `load_state_dict` that belong to the run, beside weights and optimizer. The files are on the disk before the name is, so that a checkpoint is complete after a failure of power too.
    """
    folder = output_dir / f"checkpoint-{step}"
    partial = output_dir / f".checkpoint-{step}.partial"
    if accelerator.is_main_process:
        for stale in output_dir.glob(".checkpoint-*.partial"):
            shutil.rmtree(stale)
    accelerator.wait_for_everyone()
    try:
        with plain_errors():
            accelerator.save_state(str(partial))
        states = {name: part.state_dict() for name, part in parts.items()}  # of all processes together
        if accelerator.is_main_process:
            save_states(states, partial)
            (partial / SETTINGS_NAME).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        flush_folder(partial)  # each process its own files
    except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a full disk as a RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        older = list_checkpoints(output_dir)
        rest = f"{older[-1][1].name} is complete" if older else "there is no older checkpoint"
        raise OSError(
            f"checkpoint-{step} could not be written to {output_dir} ({error}): free some space and continue with "
            f"--resume_from_checkpoint latest; {rest}"
        ) from error
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        remove_checkpoint(folder, replacement=partial)
        for _, path in list_checkpoints(output_dir)[: -limit if limit else 0]:
            remove_checkpoint(path)
    accelerator.wait_for_everyone()


def _without_none(value):
    """A setting without entries that are `None`: an older checkpoint does not have those that were added since."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def load_checkpoint(accelerator: Accelerator, folder: Path, settings: dict, parts: dict[str, Any]) -> None:
    """Restores the weights, the optimizer and the `parts` of a run, if the checkpoint has the same settings.

    No code of the checkpoint runs: files of torch are read with `weights_only=True`, as Accelerate does for its own.
    """
    if not folder.is_dir():  # the main process has found it
        raise OSError(
            f"process {accelerator.process_index} does not find {folder.absolute()}, which the main process has: use an "
            "--output_dir that all nodes share, or copy the checkpoint to each of them"
        )
    try:
        saved = read_json(folder / SETTINGS_NAME)
    except OSError as error:
        raise OSError(
            f"{folder} is not a checkpoint of d3pm_hf, or it is incomplete ({error}): pass another one"
        ) from error
    # What an older checkpoint does not have is unknown, such as the mixed precision of `accelerate config`.
    if saved.get("mixed_precision") is None:
        saved.pop("mixed_precision", None)
    different = [
        CHANGED.get(name) or f"{name} is {settings.get(name)!r} and was {saved[name]!r}"
        for name in sorted(saved)
        if _without_none(saved[name]) != _without_none(settings.get(name))
    ]
    if different:
        raise ValueError(
            f"{folder} is a checkpoint of a run with other settings ({'; '.join(different)}): use the same settings and "
            "data, or another --output_dir"
        )
    check_layout(accelerator, folder)
    try:
        damaged = find_damaged_shard(folder)
        if damaged is not None:
            raise UnpicklingError(damaged)
        states = load_states(folder, list(parts))
        with plain_errors(), without_pickles(folder) as visible:
            accelerator.load_state(str(visible))
        for name, part in parts.items():
            part.load_state_dict(states[name])
    except (OSError, RuntimeError, EOFError, SafetensorError, UnpicklingError, ValueError, *WRONG_CONTENT) as error:
        damaged = find_damaged(folder)
        if damaged is not None:
            reason = f"its file {damaged} is damaged"
        elif isinstance(error, FileNotFoundError):
            reason = "a file is missing"
        elif isinstance(error, WRONG_CONTENT):
            reason = "a file does not hold the state of this run"
        else:
            raise  # out of memory, or another network: the checkpoint is not to blame
        # torch advises to read a pickle in full, which would run its code.
        cause = "it is cut, or holds more than numbers" if isinstance(error, UnpicklingError) else error
        raise OSError(
            f"{folder} is broken, as {reason} ({cause}): remove the checkpoint, and resume from an older one"
        ) from error


@contextmanager
def without_pickles(folder: Path) -> Iterator[Path]:
    """A context with a folder that has all files of a checkpoint but the pickles that Accelerate would read in full.

    Those are `custom_checkpoint_*.pkl`, which earlier versions wrote.
    """
    pickles = set(folder.glob("custom_checkpoint_*.pkl"))
    if not pickles:
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        for path in set(folder.iterdir()) - pickles:
            Path(name, path.name).symlink_to(path.resolve())
        yield Path(name)


def find_damaged(folder: Path) -> str | None:
    """The name of a file of a checkpoint that is truncated or changed, or that holds more than numbers, if there is one.

    Files of torch have a checksum for each of their parts. Those of safetensors and of shards have the number of their
    bytes.
    """
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    pass
            elif path.suffix in (".bin", ".pkl", ".pt"):
                with zipfile.ZipFile(path) as archive:
                    if archive.testzip() is not None:
                        return path.name
                load(path, map_location="meta", weights_only=True)
            elif path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
        except (
            SafetensorError,
            zipfile.BadZipFile,
            EOFError,
            zlib.error,
            UnpicklingError,
            ValueError,
            RecursionError,
        ):
            return path.name
    return find_damaged_shard(folder)
