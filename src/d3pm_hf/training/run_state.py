# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The folder of a run: its lock, its checkpoints, and the settings that a checkpoint must share with the run."""

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ..hub.adapters import adapter_configs, base_fingerprint, config_values
from ..hub.layout import read_json
from ..pipelines import D3PMPipeline
from ..utils.checks import describe
from ..utils.files import flush_folder, flush_names
from .distributed import run_on_main
from .state_files import (
    STATE_NAME,
    TENSORS_NAME,
    check_layout,
    find_damaged,
    find_damaged_shard,
    load_states,
    plain_errors,
    save_states,
    without_pickles,
)
from .step_batches import is_stream
from .training_args import D3PMTrainingArguments


LOCK_NAME = ".lock"
LOG_NAME = "log.jsonl"
SETTINGS_NAME = "settings.json"
# Arguments that may change when a run is resumed, as the weights do not depend on them.
FREE = (
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "report_to", "logging_dir", "disable_tqdm"),
    *("max_train_steps", "checkpointing_steps", "checkpoints_total_limit", "dataloader_num_workers"),
    *("train_batch_size", "gradient_accumulation_steps", "validation_steps", "eval_batch_size", "max_eval_samples"),
    *("num_eval_timesteps", "num_samples", "num_inference_steps", "merge_lora"),
    *("push_to_hub", "hub_model_id", "hub_token", "hub_private_repo"),
)
# Number of examples in the fingerprint of a data set.
NUM_EXAMPLES = 64
# Errors of a file that can be read, and that lacks something.
WRONG_CONTENT = (LookupError, TypeError, AttributeError)
# Errors of a file system without locks, such as some network drives.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# What an error says of settings that are fingerprints.
CHANGED = {
    "data_fingerprint": "the content of the training data changed",
    "base": "the weights that the LoRA is added to changed",
    "scheduler_tensors": "the tensors of the scheduler, which are computed from the data or passed to it, changed",
}


@contextmanager
def locked_folder(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """A context in which the main process holds the lock of a folder, which is created. Its errors reach all processes.

    The lock ends with the process, however that ends. A file system without locks is not locked. A start that fails leaves
    a folder behind only if there was one.
    """
    is_new, path = not folder.exists(), folder.resolve() / LOCK_NAME
    lock = FileLock(path, timeout=0, fallback_to_soft=False)

    def acquire() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout as error:
            raise ValueError(
                f"another run is writing to {folder}: wait for its end, or pass another --output_dir"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise OSError(
                    f"output_dir is {folder}, which cannot be written to ({error.strerror or error}): pass a folder that you "
                    "may write to"
                ) from error

    run_on_main(accelerator, acquire)
    try:
        yield
    finally:
        if accelerator.is_main_process:
            with suppress(OSError):  # the folder is gone, or an open file cannot be removed
                path.unlink(missing_ok=True)
            lock.release()
            if is_new and folder.exists() and not any(folder.iterdir()):
                folder.rmdir()


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
    network = pipeline.bare_network
    config = getattr(network, "config", {})
    config = config.to_diff_dict() if hasattr(config, "to_diff_dict") else dict(config)
    adapters = {name: config_values(value) for name, value in adapter_configs(network).items()}
    if adapters:
        settings |= {"adapters": adapters, "base": base_fingerprint(network)}
    tensors = sorted(pipeline.scheduler.transition_tensors.items())
    return {
        **settings,
        "global_batch_size": global_batch_size,
        "num_examples": None if is_stream(train_dataset) else len(train_dataset),
        "data_fingerprint": data_fingerprint(train_dataset, collate),
        "scheduler_tensors": {name: tensor_fingerprint(tensor) for name, tensor in tensors},
        "scheduler": {k: v for k, v in pipeline.scheduler.config.items() if not k.startswith("_")},
        "network": {k: list(v) if isinstance(v, tuple) else v for k, v in config.items() if not k.startswith("_")},
    }


def data_fingerprint(dataset, collate: Callable[[list], dict]) -> str:
    """The SHA-256 of the size of a data set and of at most 64 examples, spread evenly from the first to the last.

    Examples are read as in training, with a seed, so that the fingerprint covers crops and other augmentation too. Its cost
    does not grow with the data set. Edits of a few examples between those that are read are not noticed. Of a stream the
    first 64 examples are read.

    Args:
        dataset ([`~step_batches.IndexedExamples`]): The examples; or a stream.
        collate: Makes a batch of a list of pairs of an index and an example.
    """
    examples: Iterable
    if is_stream(dataset):
        size, examples = None, enumerate(islice(dataset, NUM_EXAMPLES))
    else:
        size = len(dataset)
        indices = np.unique(np.linspace(0, size - 1, NUM_EXAMPLES).round().astype(int)).tolist()
        examples = (dataset[index, seed, 0] for seed, index in enumerate(indices))
    digest = hashlib.sha256(str(size).encode())
    for example in examples:
        batch = collate([example])
        masks = {name: batch[name] for name in ("attention_mask", "loss_mask") if name in batch}
        others = {**(batch.get("condition") or {}), **masks}
        for tensor in (batch["x_0"], *(others[name] for name in sorted(others))):
            digest.update(str(tuple(tensor.shape[1:])).encode())
            kind = "<f8" if tensor.is_floating_point() else "<i8"
            digest.update(tensor[0].cpu().numpy().astype(kind).tobytes())
    return digest.hexdigest()


def tensor_fingerprint(tensor: torch.Tensor) -> list:
    """The shape of a tensor, dense or sparse, and the SHA-256 of its entries to six digits of the largest one.

    Statistics of the same data differ in their last bits between CPUs.
    """
    tensor = tensor.coalesce() if tensor.is_sparse else tensor.to_sparse()
    values = tensor.values().double()
    finite = values[values.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 1.0
    # Infinity ends a schedule that destroys all information.
    digits = (values / largest * 1e6).nan_to_num(posinf=2e6, neginf=-2e6).round().long()
    digest = hashlib.sha256(f"{largest:.6g}".encode())
    for part in (tensor.indices()[:, digits != 0], digits[digits != 0]):
        digest.update(part.numpy().astype("<i8").tobytes())
    return [list(tensor.shape), digest.hexdigest()]


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a run with their steps, the oldest first."""
    found = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in output_dir.glob("checkpoint-*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def find_checkpoint(arguments: D3PMTrainingArguments) -> tuple[int, Path | None]:
    """The step and the folder to resume from; (0, None) for a new run."""
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
        if not found:
            return 0, None
    else:
        beside = list_checkpoints(Path(resume_from).parent)
        found = [(step, path) for step, path in beside if path.resolve() == Path(resume_from).resolve()]
        if not found:
            raise ValueError(f"{resume_from} is not a checkpoint: pass a folder named checkpoint-<step>, or `latest`")
    step, folder = found[-1]
    if step > arguments.max_train_steps:
        raise ValueError(
            f"max_train_steps is {arguments.max_train_steps}, and {folder} has {step} steps already: pass --max_train_steps "
            f"{step} or more, or an earlier checkpoint as --resume_from_checkpoint"
        )
    return step, folder


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
    accelerator: Accelerator,
    output_dir: Path,
    step: int,
    settings: dict,
    parts: dict[str, Any],
    limit: int | None,
    has_weights: bool = False,
) -> None:
    """Writes `checkpoint-<step>` under a temporary name, renames it, and removes the oldest ones beyond `limit`.

    The files are on the disk before the name is, so that a checkpoint is complete after a failure of power too.

    Args:
        parts: Objects with `state_dict` and `load_state_dict` that belong to the run, beside weights and optimizer.
        limit: Number of checkpoints to keep; all of them if it is `None`.
        has_weights: Whether `checkpoint-<step>` exists, and only the parts have changed since. Its other files are kept.
    """
    folder, partial = output_dir / f"checkpoint-{step}", output_dir / f".checkpoint-{step}.partial"
    if accelerator.is_main_process:
        for stale in output_dir.glob(".checkpoint-*.partial"):
            shutil.rmtree(stale)
    accelerator.wait_for_everyone()
    try:
        if not has_weights:
            with plain_errors():
                accelerator.save_state(str(partial))
        elif accelerator.is_main_process:
            kept = shutil.ignore_patterns(STATE_NAME, TENSORS_NAME)
            shutil.copytree(folder, partial, ignore=kept, copy_function=_link)
        states = {name: part.state_dict() for name, part in parts.items()}  # of all processes together
        if accelerator.is_main_process:
            save_states(states, partial)
            (partial / SETTINGS_NAME).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if accelerator.is_main_process or not has_weights:
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
        # A run that was resumed from an older checkpoint leaves those after this one alone.
        present = [path for number, path in list_checkpoints(output_dir) if number <= step]
        for path in present[: -limit if limit else 0]:
            remove_checkpoint(path)
    accelerator.wait_for_everyone()


def _link(source: str, target: str) -> None:
    """Gives a file a second name, or copies it where the file system has no such names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


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
    check_settings(folder, saved, settings)
    check_layout(accelerator, folder)
    try:
        damaged = find_damaged_shard(folder)
        if damaged is not None:
            raise UnpicklingError(damaged)
        states = load_states(folder, list(parts))
        with plain_errors(), without_pickles(folder) as visible:
            accelerator.load_state(str(visible))
        for name, state in states.items():
            parts[name].load_state_dict(state)
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


def check_settings(folder: Path, saved: dict, settings: dict) -> None:
    """Checks that a checkpoint was saved with the settings of the run. Settings that an older one does not have are unknown."""
    if saved.get("mixed_precision") is None:  # that of `accelerate config`
        saved.pop("mixed_precision", None)
    if saved.get("loss") == "hybrid_denoising":  # the earlier name
        saved |= {"loss": "hybrid", "auxiliary": "denoising"}
    for name, fingerprint in (saved.get("scheduler_tensors") or {}).items():
        if len(fingerprint) > 2:  # earlier versions kept sums beside the shape
            fingerprint[1:] = settings["scheduler_tensors"].get(name, fingerprint)[1:]
    different = []
    for name in sorted(saved):
        lines = differences(name, settings.get(name), saved[name])
        different += [CHANGED[name]] if lines and name in CHANGED else lines
    if different:
        raise ValueError(
            f"{folder} is a checkpoint of a run with other settings ({'; '.join(different)}): use the same settings and "
            "data, or another --output_dir"
        )


def differences(name: str, now: Any, before: Any) -> list[str]:
    """The settings that differ from those of the checkpoint, in words; of a dictionary, each entry that does."""
    if isinstance(now, dict) and isinstance(before, dict):
        keys = sorted({*now, *before}, key=str)
        return [line for key in keys for line in differences(f"{name}.{key}", now.get(key), before.get(key))]
    return [] if now == before else [f"{name} is {describe(now)} and was {describe(before)}"]
