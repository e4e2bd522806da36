# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Plans the paper's full runs: operations of a training step, counted by torch, and hours on some GPUs.

    python examples/reproduce/cost.py
    python examples/reproduce/cost.py --num_gpus 8 --teraflops 120

The networks, batches and numbers of steps are the paper's. A network runs forward and backward on the meta device, where nothing is
computed, under `torch.utils.flop_counter`. The loss and the noise are left out: for the rank-one families they read the logits about
as often as a cross-entropy does (benchmarks/bench_core.py). `--teraflops` is what a GPU sustains in training, a third to a half of
the peak that its data sheet names for bfloat16.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from d3pm_hf import create_text_model, create_unet


@dataclass(frozen=True)
class Run:
    """A run of the paper: its network, the shape of an example, the batch and the number of steps."""

    title: str
    shape: tuple[int, ...]
    num_classes: int
    batch_size: int
    num_steps: int

    def create_network(self) -> nn.Module:
        if len(self.shape) == 1:
            return create_text_model("paper", self.num_classes)
        return create_unet("paper", self.num_classes, self.shape[1:], self.shape[0])

    def count_operations(self) -> int:
        """Floating-point operations of the forward and the backward pass of one example; a product and its sum are two."""
        with torch.device("meta"):
            network = self.create_network()
            timestep = torch.zeros(1, dtype=torch.long)
            if len(self.shape) == 1:
                x_t = torch.zeros(1, *self.shape, dtype=torch.long)
            else:
                x_t = torch.zeros(1, *self.shape)
            with FlopCounterMode(display=False) as counter:
                output = network(x_t, timestep)
                output[0].sum().backward()
        return counter.get_total_flops()


RUNS = (
    Run("text8", (256,), 28, 512, 1_000_000),
    Run("LM1B", (128,), 8193, 512, 1_000_000),
    Run("CIFAR-10", (3, 32, 32), 256, 128, 1_500_000),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_gpus", type=int, default=8, help="Number of GPUs.")
    parser.add_argument("--teraflops", type=float, default=100.0, help="10^12 operations per second of each GPU.")
    options = parser.parse_args()
    print("| run | parameters | batch | steps | elements | operations of an example | of the run | hours |")
    print("|" + " --- |" * 8)
    for run in RUNS:
        with torch.device("meta"):
            num_parameters = sum(weights.numel() for weights in run.create_network().parameters())
        operations = run.count_operations()
        total = operations * run.batch_size * run.num_steps
        hours = total / (options.num_gpus * options.teraflops * 1e12) / 3600
        elements = torch.Size(run.shape).numel() * run.batch_size * run.num_steps
        print(
            f"| {run.title} | {num_parameters / 1e6:.1f}M | {run.batch_size} | {run.num_steps / 1e6:g}M | {elements / 1e9:.0f}G | "
            f"{operations / 1e9:.0f}G | {total:.1e} | {hours:.0f} |"
        )


if __name__ == "__main__":
    main()
