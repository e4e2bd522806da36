# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
# /// script
# requires-python = ">=3.11"
# dependencies = ["d3pm-hf[training] @ git+https://github.com/d3pm-hf/d3pm-hf"]
# ///
"""Trains a character model on text8, as in the paper's section 5.1.

    accelerate launch --quiet examples/train_text8.py --output_dir d3pm-text8
    accelerate launch --quiet examples/train_text8.py --preset uniform --output_dir d3pm-text8-uniform
    accelerate launch --quiet examples/train_text8.py --preset cpu --dataset_path text8.txt --output_dir small

The defaults are the paper's: D3PM absorbing, the mutual-information schedule, L_lambda with lambda = 0.01, 12 layers, and
one million steps with a batch size of 512 over all processes (8 GPUs take --train_batch_size 64). The paper reports a bound of
1.45 bits per character (1.61 for uniform, 1.59 for nearest neighbors, 1.23 for the autoregressive baseline).
"""

from dataclasses import dataclass

from transformers.hf_argparser import HfArg

from d3pm_hf.training import D3PMTrainingArguments
from d3pm_hf.training.script_arguments import (
    CPU_TEXT,
    EARLIER_CPU_TEXT,
    HOUR_TEXT,
    ProcessArguments,
    TextModelArguments,
    answer_help,
    parse_arguments,
)


@dataclass
class DataArguments:
    """The text."""

    dataset_name: str = HfArg(default="afmck/text8", help="Id of the data set on the Hub.")
    dataset_path: str | None = HfArg(default=None, help="Local text file, or folder with one file per split.")
    cache_dir: str | None = HfArg(default=None, help="Folder for downloads.")
    sequence_length: int = HfArg(default=256, help="Number of characters of an example.")


# The rows of the paper's Table 1, and of the tables of losses and schedules in its appendix.
PRESETS = {
    "absorbing": {},
    "absorbing_vb": {"loss": "vb"},
    "uniform": {"transition": "uniform", "beta_schedule": "cosine", "loss": "vb"},
    "uniform_hybrid": {"transition": "uniform", "beta_schedule": "cosine"},
    "uniform_reciprocal": {"transition": "uniform", "beta_schedule": "reciprocal", "loss": "vb"},
    "uniform_mutual_information": {"transition": "uniform", "loss": "vb"},
    "nearest_neighbor": {"transition": "nearest_neighbor", "loss": "vb"},
    "autoregressive": {"transition": "autoregressive", "loss": "vb"},
    "cpu": CPU_TEXT,
    "cpu_hour": HOUR_TEXT,
    "cpu_earlier": EARLIER_CPU_TEXT,
}
ARGUMENTS = (DataArguments, ProcessArguments, TextModelArguments, D3PMTrainingArguments), PRESETS, __doc__

if __name__ == "__main__":
    answer_help(*ARGUMENTS)

from d3pm_hf import D3PMTextPipeline, character_tokenizer
from d3pm_hf.data import load_text8
from d3pm_hf.data.sources import dataset_title
from d3pm_hf.training import train
from d3pm_hf.training.script_parts import create_text_parts
from d3pm_hf.utils.scripts import run_script


def main():
    data, process, network, training = parse_arguments(*ARGUMENTS)
    source = {"dataset_name": data.dataset_name, "dataset_path": data.dataset_path, "cache_dir": data.cache_dir}
    train_dataset = load_text8("train", length=data.sequence_length, **source)
    eval_dataset = load_text8("validation", length=data.sequence_length, **source)

    model, scheduler = create_text_parts(process, network, train_dataset, data.sequence_length, training.seed)
    pipeline = D3PMTextPipeline(model, scheduler, character_tokenizer(), sequence_length=data.sequence_length)
    card = {"dataset_name": dataset_title("text8", data.dataset_path)}
    if data.dataset_path is None:
        card |= {"datasets": data.dataset_name, "language": "en"}
    train(training, pipeline, train_dataset, eval_dataset, card)


if __name__ == "__main__":
    run_script(main)
