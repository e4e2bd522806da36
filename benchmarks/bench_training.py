# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What the training loop costs, as a multiple of the network's own step, beside the goal. `make bench` runs it.

    python benchmarks/bench_training.py                 # everything, under three minutes on two cores
    python benchmarks/bench_training.py --only U-Net    # the cases whose name holds this
    python benchmarks/bench_training.py --cpu-time      # on a machine that is doing other work

Ours is `train` as the examples call it: random crops or flips, one noise generator per example, the loss, clipping,
AdamW, EMA, and a line of the log at every step. The bare step is forward, backward and AdamW of the same network, in
training mode, on the same batch, with the plainest loss that its output has. Validation, samples and checkpoints are
left out.

The two take turns, step by step, in one run: the bare step comes when the loop asks for its next batch (the loop's own
progress bar counts the time of both). The learning rate of the bare step is zero, so that the weights, and with them
the work, are those of a run. Batches are as small as a CPU needs them, against the paper's 512 and 128: EMA and
clipping, which do not grow with the batch, weigh more here than there. The share of the loss stays.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.data_loader import DataLoaderShard
from bench_core import CLOCKS, number, row, table, verdict, zipf

from d3pm_hf import D3PMImagePipeline, D3PMTextPipeline
from d3pm_hf.data import Rows, TextCrops, character_tokenizer
from d3pm_hf.training import D3PMTrainingArguments, train


sys.path.append(str(Path(__file__).parents[1] / "examples"))
from common import (  # noqa: E402
    ImageModelArguments,
    ProcessArguments,
    TextModelArguments,
    create_image_parts,
    create_text_parts,
)


# The first turns build the states of the optimizers and fill caches; they are not counted.
WARM_UP, STEPS = 2, 7
GOAL = 1.10
NUM_CHARACTERS, NUM_IMAGES = 4_000_000, 10_000

clock = CLOCKS[False]


@dataclass(frozen=True)
class Case:
    """One of the paper's experiments, at the size of batch that it is measured with."""

    name: str
    shape: tuple[int, ...]
    process: ProcessArguments
    network: TextModelArguments | ImageModelArguments
    training: dict = field(default_factory=dict)

    def build(self) -> tuple[D3PMTextPipeline | D3PMImagePipeline, TextCrops | Rows, Callable]:
        """The pipeline, data of its kind, and the loss of its bare step as a function of the batch."""
        rng = np.random.default_rng(0)
        if isinstance(self.network, TextModelArguments):
            length = self.shape[1]
            tokens = rng.choice(27, NUM_CHARACTERS, p=zipf(27).numpy()).astype(np.uint8)
            dataset = TextCrops(tokens, length, 27)
            model, scheduler = create_text_parts(self.process, self.network, dataset, length)
            pipeline = D3PMTextPipeline(model, scheduler, character_tokenizer(), sequence_length=length)
            return pipeline, dataset, lambda batch: text_loss(model, batch)
        dataset = Rows(rng.integers(256, size=(NUM_IMAGES, *self.shape[1:]), dtype=np.uint8), 256, random_flip=True)
        unet, scheduler = create_image_parts(self.process, self.network, dataset)
        return D3PMImagePipeline(unet, scheduler), dataset, lambda batch: image_loss(unet, batch)


ABSORBING = ProcessArguments(transition="absorbing", schedule="mutual_information")
GAUSSIAN = ProcessArguments(transition="gaussian", schedule="linear", prediction_type="logistic", reconstruction="raw")
CONSTANT = {"learning_rate": 2e-4, "lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 0}
CASES = [
    Case("text8 absorbing, T5 of 12 layers", (4, 256), ABSORBING, TextModelArguments(backbone="t5")),
    Case("text8 absorbing, BERT of 12 layers", (4, 256), ABSORBING, TextModelArguments(backbone="bert")),
    Case(
        "CIFAR-10 gaussian + logistic, U-Net",
        (4, 3, 32, 32),
        GAUSSIAN,
        ImageModelArguments(),
        {"hybrid_coeff": 0.001, **CONSTANT},
    ),
]


def text_loss(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """What any language model is trained with."""
    logits = model(batch["x_0"], batch["timestep"], return_dict=False)[0]  # [B, N, K]
    return F.cross_entropy(logits.flatten(0, 1), batch["x_0"].flatten())


def image_loss(unet: torch.nn.Module, batch: dict) -> torch.Tensor:
    """The mean square of the output: there is no plainer one that has a gradient everywhere."""
    pixels = batch["x_0"].float() / 127.5 - 1
    return unet(pixels, batch["timestep"], return_dict=False)[0].square().mean()


class Turns:
    """The batches of a loop that gives way to the bare step after each of its own; the seconds of both.

    Args:
        bare_step: of a batch.
        num_steps: that are counted. There is no batch after them, which ends the loop without a checkpoint.
    """

    def __init__(self, bare_step: Callable, num_steps: int):
        self.bare_step, self.num_steps = bare_step, num_steps
        self.ours, self.bare, self.waited = [], [], []

    def __call__(self, loader: Iterable):
        batches = iter(loader)
        for turn in range(-WARM_UP, self.num_steps):
            start = clock()
            batch = next(batches)
            arrived = clock()
            yield batch
            done = clock()
            self.bare_step(batch)
            if turn >= 0:
                self.bare.append(clock() - done)
                self.ours.append(done - start)
                self.waited.append(arrived - start)


def measure(case: Case, num_steps: int) -> Turns:
    pipeline, dataset, loss = case.build()
    network = getattr(pipeline, pipeline.network_name)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.0, weight_decay=0.0, fused=True)

    def bare_step(batch):
        loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    turns, batches_of = Turns(bare_step, num_steps), DataLoaderShard.__iter__
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(DataLoaderShard, "__iter__", lambda loader: turns(batches_of(loader))),
    ):
        arguments = D3PMTrainingArguments(
            output_dir=os.path.join(folder, "run"),
            train_batch_size=case.shape[0],
            max_train_steps=1 + WARM_UP + num_steps,  # one more than there are batches for
            logging_steps=1,
            validation_steps=0,
            num_samples=0,
            mixed_precision="no",
            **case.training,
        )
        train(arguments, pipeline, dataset)
    return turns


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the cases whose name holds this")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each case, after the warm-up")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, and the time that it worked")
    options = parser.parse_args()
    global clock
    clock = CLOCKS[options.cpu_time]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1 if options.cpu_time else 2)
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, threads: {torch.get_num_threads()}, load: {load:.1f}", flush=True)
    if load > 0.5 and not options.cpu_time:
        print("\n**The machine is busy: do not believe these ratios, or use --cpu-time.**", flush=True)
    table(
        "Training loop, over forward + backward + AdamW of the network",
        *("case, batch", "bare ms", "ours", "goal", "", "waits for data", "samples/s"),
    )
    for case in CASES:
        if options.only not in case.name:
            continue
        turns = measure(case, options.steps)
        bare, ours = statistics.median(turns.bare), statistics.median(turns.ours)
        row(
            *(f"{case.name}, {'x'.join(map(str, case.shape))}", f"{1e3 * bare:.0f}"),
            *(number(ours / bare), GOAL, verdict(ours / bare, GOAL)),
            *(f"{sum(turns.waited) / sum(turns.ours):.2%}", number(case.shape[0] / ours)),
        )


if __name__ == "__main__":
    main()
