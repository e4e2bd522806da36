# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A small run, as a script for subprocesses and as functions for tests: `python training_run.py '{"output_dir": ...}'`."""

import gc
import json
import os
import resource
import signal
import sys

import torch
from datasets import Dataset

from d3pm_hf import D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model
from d3pm_hf.training import D3PMTrainingArguments, train


LENGTH, T = 16, 100
SETTINGS = {
    "max_train_steps": 50,
    "train_batch_size": 8,
    "lr_warmup_steps": 5,
    "logging_steps": 1,
    "validation_steps": 25,
    "checkpointing_steps": 20,
    "num_samples": 2,
    "num_inference_steps": 10,
    "eval_batch_size": 8,
    "max_eval_samples": 16,
    "num_eval_timesteps": 5,
}


class Sentences:
    """Rows with something to learn: each character is the one before it, or the next letter. A seed rolls them."""

    num_tokens = 27

    def __init__(self, count=200, seed=0):
        generator = torch.Generator().manual_seed(seed)
        moves = torch.randint(0, 2, (count, LENGTH), generator=generator)
        self.rows = (torch.randint(0, 27, (count, 1), generator=generator) + moves.cumsum(1)) % 27

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        index, seed = item if isinstance(item, tuple) else (item, 0)
        return self.rows[index].roll(seed % 3)


def texts(count=60, seed=0, prompt=1):
    """Such rows of unequal length, as examples of which the first `prompt` tokens are known."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for length in torch.randint(3, LENGTH + 1, (count,), generator=generator).tolist():
        moves = torch.randint(0, 2, (length,), generator=generator)
        tokens = ((torch.randint(0, 27, (), generator=generator) + moves.cumsum(0)) % 27).tolist()
        examples.append({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})
    return Dataset.from_list(examples)


def make_pipeline(dropout=0.0, **scheduler):
    torch.manual_seed(0)
    model = create_text_model("tiny", 28, hidden_dropout_prob=dropout)
    scheduler = D3PMScheduler(28, **{"num_train_timesteps": T, **scheduler})
    return D3PMTextPipeline(model, scheduler, character_tokenizer(), sequence_length=LENGTH)


def run(pipeline=None, train_dataset=None, eval_dataset=None, **settings):
    arguments = D3PMTrainingArguments(**{**SETTINGS, **settings})
    return train(
        arguments, pipeline or make_pipeline(), train_dataset or Sentences(), eval_dataset or Sentences(32, seed=1)
    )


def die_while_saving(step):
    """Kills this process, as `kill -9` does, when half of a checkpoint is on the disk."""
    from accelerate import Accelerator

    save_state = Accelerator.save_state

    def save_and_die(self, folder, **kwargs):
        save_state(self, folder, **kwargs)
        if f"checkpoint-{step}." in folder:
            os.remove(os.path.join(folder, "optimizer.bin"))
            os.kill(os.getpid(), signal.SIGKILL)

    Accelerator.save_state = save_and_die


def die_at(step):
    """Kills this process in the middle of a step."""
    from d3pm_hf.training import loop

    compute, calls = loop.diffusion_loss, []

    def compute_or_die(*args):
        calls.append(None)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(*args)

    loop.diffusion_loss = compute_or_die


def check_the_end():
    """Checks that the model ends before the group of processes: else each may wait for the other, once in many runs."""
    alive = [one for one in gc.get_objects() if type(one).__name__ == "DistributedDataParallel"]
    assert not alive, "the model outlives its run"


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if "die_while_saving" in settings:
        die_while_saving(settings.pop("die_while_saving"))
    if "die_at" in settings:
        die_at(settings.pop("die_at"))
    if "largest_file" in settings:  # a quota: no file may grow beyond so many bytes
        largest = settings.pop("largest_file")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    pipeline = make_pipeline(settings.pop("dropout", 0.0))
    if settings.pop("stream", False):
        run(pipeline, texts().to_iterable_dataset(), texts(8, seed=1), **settings)
    else:
        run(pipeline, **settings)
    check_the_end()
