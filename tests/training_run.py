# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A small run, in the process of the test or in one of its own, where it may die."""

import gc
import os
import resource
import signal

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


def run_or_die(die_while_saving_at=None, die_at_step=None, largest_file=None, stream=False, **settings):
    """The run of a process that may be killed, or that may write no file of more than so many bytes."""
    if die_while_saving_at is not None:
        die_while_saving(die_while_saving_at)
    if die_at_step is not None:
        die_at(die_at_step)
    if largest_file is not None:  # a quota
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if stream:
        run(None, texts().to_iterable_dataset(), texts(8, seed=1), **settings)
    else:
        run(**settings)
    check_the_end()
