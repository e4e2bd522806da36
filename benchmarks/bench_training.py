# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What the training loop costs, in milliseconds and as a multiple of the network's own step. `make bench` runs it.

    python benchmarks/bench_training.py                 # everything, some minutes on two cores
    python benchmarks/bench_training.py --only U-Net    # the cases whose name holds this
    python benchmarks/bench_training.py --cpu-time      # on a machine that is doing other work

Ours is `train` as the examples call it: random crops or flips, one noise generator per example, the loss, clipping,
AdamW, EMA, and a line of the log at every step. The bare step is forward, backward and AdamW of the same network, in
training mode, on the same batch, with the plainest loss that its output has. Validation, samples and checkpoints are
left out.

The two take turns, step by step, in one run: the bare step comes when the loop asks for its next batch (the loop's own
progress bar counts the time of both). The learning rate of the bare step is zero, so that the weights, and with them
the work, are those of a run. Batches are as small as a CPU needs them, against the paper's 512 and 128: EMA and
clipping, which do not grow with the batch, weigh more here than there. The share of the loss stays. The `cpu` rows are the
presets of the examples for a laptop, whose networks are so small that everything beside them weighs most.

The ratio is that of the medians; beside it stands the interquartile range of the ratios of single turns. With worker
processes the data are loaded beside the steps. With two processes (gloo, one thread each) the bare step is that of the
process by itself: the ratio has the exchange of gradients in it. Both compete with the steps for the two cores here.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from bench_core import CLOCKS, number, row, table, verdict, zipf

from d3pm_hf import D3PMImagePipeline, D3PMTextPipeline, evaluate_bound
from d3pm_hf.data import Rows, TextCrops, character_tokenizer
from d3pm_hf.data.batches import evaluation_batches
from d3pm_hf.training import D3PMTrainingArguments, train
from d3pm_hf.training.script_arguments import (
    CPU_IMAGES,
    EARLIER_CPU_TEXT,
    ImageModelArguments,
    ProcessArguments,
    TextModelArguments,
)
from d3pm_hf.training.script_parts import create_image_parts, create_text_parts


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
    num_processes: int = 1

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
        pipeline = D3PMImagePipeline(*create_image_parts(self.process, self.network, dataset))
        return pipeline, dataset, lambda batch: image_loss(pipeline.unet, batch)


ABSORBING = ProcessArguments(transition="absorbing", beta_schedule="mutual_information")
GAUSSIAN = ProcessArguments(
    transition="gaussian", beta_schedule="linear", prediction_type="logistic", reconstruction="raw"
)
CONSTANT = {"learning_rate": 2e-4, "lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 0}
UNIFORM = ProcessArguments(transition="uniform", beta_schedule="cosine")
GAUSSIAN_LOGITS = ProcessArguments(transition="gaussian", beta_schedule="linear")
SMALL_TEXT = TextModelArguments(
    **{name: EARLIER_CPU_TEXT[name] for name in vars(TextModelArguments()) if name in EARLIER_CPU_TEXT}
)
SMALL_UNET = ImageModelArguments(
    **{name: CPU_IMAGES[name] for name in vars(ImageModelArguments()) if name in CPU_IMAGES}
)
SMALL_TEXT_BATCH = EARLIER_CPU_TEXT["train_batch_size"], EARLIER_CPU_TEXT["sequence_length"]
SMALL_IMAGE_BATCH = CPU_IMAGES["train_batch_size"], 3, CPU_IMAGES["resolution"], CPU_IMAGES["resolution"]
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
    Case(
        "CIFAR-10 gaussian, U-Net",
        (4, 3, 32, 32),
        GAUSSIAN_LOGITS,
        ImageModelArguments(),
        {"hybrid_coeff": 0.001, **CONSTANT},
    ),
    Case("text8 absorbing, cpu", SMALL_TEXT_BATCH, ABSORBING, SMALL_TEXT),
    Case("text8 uniform, cpu", SMALL_TEXT_BATCH, UNIFORM, SMALL_TEXT),
    Case("CIFAR-10 gaussian, cpu", SMALL_IMAGE_BATCH, GAUSSIAN_LOGITS, SMALL_UNET),
    Case("text8 absorbing, cpu, 2 workers", SMALL_TEXT_BATCH, ABSORBING, SMALL_TEXT, {"dataloader_num_workers": 2}),
    Case("text8 absorbing, cpu, 2 processes", SMALL_TEXT_BATCH, ABSORBING, SMALL_TEXT, num_processes=2),
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


def report(case: Case, num_steps: int) -> None:
    """Measures a case and prints its row, in the first process."""
    turns = measure(case, num_steps)
    if int(os.environ.get("RANK", 0)):
        return
    bare, ours = statistics.median(turns.bare), statistics.median(turns.ours)
    ratios = [mine / its for mine, its in zip(turns.ours, turns.bare)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    goal = GOAL if case.shape[0] == 4 else None  # that of the paper's networks
    row(
        *(f"{case.name}, {'x'.join(map(str, case.shape))}", f"{1e3 * bare:.3g}", f"{1e3 * ours:.3g}"),
        *(number(ours / bare), f"{low:.2f} - {high:.2f}", goal, verdict(ours / bare, goal) if goal else ""),
        *(f"{sum(turns.waited) / sum(turns.ours):.2%}", number(case.num_processes * case.shape[0] / ours)),
    )


def launch(part: str, num_processes: int, options: argparse.Namespace, **kwargs) -> subprocess.CompletedProcess:
    """Runs a part of the benchmark in one process or several, each with one thread."""
    command = [sys.executable]
    if num_processes > 1:
        command += ["-m", "accelerate.commands.launch", "--multi_gpu", "--main_process_port", "0"]
        command += ["--num_processes", str(num_processes)]
    command += [__file__, "--part", part, "--steps", str(options.steps), *["--cpu-time"] * options.cpu_time]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, **kwargs)


def evaluation_seconds() -> float:
    """CPU seconds of this process for the bound of 256 sequences of 128 tokens, 20 terms each, with the network of `cpu`."""
    accelerator = Accelerator()
    case = Case("evaluation", (1, 128), ABSORBING, SMALL_TEXT)
    pipeline, dataset, _ = case.build()
    batches = list(evaluation_batches(dataset, 64, 256))
    arguments = {"num_eval_timesteps": 20, "accelerator": accelerator, "progress_bar": False}
    evaluate_bound(pipeline.scheduler, pipeline.denoiser, batches[:1], **arguments)  # fills caches
    start = CLOCKS[True]()
    evaluate_bound(pipeline.scheduler, pipeline.denoiser, batches, **arguments)
    return CLOCKS[True]() - start


def report_evaluation(options: argparse.Namespace) -> None:
    """Prints what an evaluation costs a process that has it alone, and one that shares it with another."""
    title = "Evaluation, 256 sequences of 128 tokens, 20 terms: CPU seconds of the first process"
    table(title, "processes", "seconds, three runs", "of one process")
    seconds = {}
    for num_processes in (1, 2):
        runs = (launch("evaluation", num_processes, options, stdout=subprocess.PIPE, text=True) for _ in range(3))
        seconds[num_processes] = sorted(float(run.stdout.split()[-1]) for run in runs)
        ratio = statistics.median(seconds[num_processes]) / statistics.median(seconds[1])
        row(num_processes, ", ".join(f"{one:.2f}" for one in seconds[num_processes]), f"{ratio:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the cases whose name holds this")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each case, after the warm-up")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, and the time that it worked")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    global clock
    clock = CLOCKS[options.cpu_time]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if options.part is not None:  # one of several processes
        torch.set_num_threads(1)
        if options.part != "evaluation":
            report(CASES[int(options.part)], options.steps)
        elif not int(os.environ.get("RANK", 0)):
            print(evaluation_seconds(), flush=True)
        else:
            evaluation_seconds()
        return
    torch.set_num_threads(1 if options.cpu_time else 2)
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, threads: {torch.get_num_threads()}, load: {load:.1f}", flush=True)
    if load > 0.5 and not options.cpu_time:
        print("\n**The machine is busy: do not believe these ratios, or use --cpu-time.**", flush=True)
    table(
        "Training loop, over forward + backward + AdamW of the network",
        *("case, batch", "bare ms", "ours ms", "ratio", "spread", "goal", "", "waits for data", "samples/s"),
    )
    for index, case in enumerate(CASES):
        if options.only not in case.name:
            continue
        if case.num_processes == 1:
            report(case, options.steps)
        else:
            launch(str(index), case.num_processes, options)
    if options.only in "evaluation":
        report_evaluation(options)


if __name__ == "__main__":
    main()
