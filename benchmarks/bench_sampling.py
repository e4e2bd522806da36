# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Network calls and seconds per sample. `make bench` runs it.

    python benchmarks/bench_sampling.py

An absorbing process of T = 1000 steps over 27 letters and a mask, 256 characters, and the network of the `cpu` preset,
untrained: what it predicts does not change what a step costs. The samplers take turns in one run, and the ratio is that of the
medians of their turns. Calls are rows that the network reads, per sample.
"""

import argparse
import statistics
import time
from functools import partial

import torch

from d3pm_hf import D3PMScheduler, D3PMTextPipeline, create_text_model


NUM_TIMESTEPS, LENGTH, NUM_CLASSES = 1000, 256, 28
NETWORK = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}


class Counter:
    """Counts the calls of a network, and the rows of each."""

    def __init__(self, network: torch.nn.Module):
        self.calls = self.rows = 0
        network.register_forward_pre_hook(self.add)

    def add(self, network, arguments):
        self.calls, self.rows = self.calls + 1, self.rows + len(arguments[0])


def measure(pipeline: D3PMTextPipeline, counter: Counter, batch_size: int, turns: int) -> list[str]:
    """Two lines of the table: the plain loop, and positions first."""
    samplers = {
        name: partial(pipeline, batch_size=batch_size, sampler=name) for name in ("ancestral", "positions_first")
    }
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    rows, calls = dict.fromkeys(samplers, 0), dict.fromkeys(samplers, 0)
    for turn in range(turns):
        for name, draw in samplers.items():
            counter.calls = counter.rows = 0
            begin = time.perf_counter()
            draw(generator=torch.Generator().manual_seed(turn), output_type="latent")
            seconds[name].append((time.perf_counter() - begin) / batch_size)
            rows[name], calls[name] = rows[name] + counter.rows, calls[name] + counter.calls
    plain, lines = statistics.median(seconds["ancestral"]), []
    for name, values in seconds.items():
        ratio = plain / statistics.median(values)
        per_sample = rows[name] / (turns * batch_size)
        lines.append(
            f"| {name} | {batch_size} | {per_sample:.0f} | {calls[name] / turns:.0f} | {statistics.median(values):.2f} | {ratio:.1f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="Number of turns of each sampler.")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 16], help="Numbers of samples of a call.")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    network = create_text_model("paper", NUM_CLASSES, **NETWORK, max_position_embeddings=LENGTH).eval()
    pipeline = D3PMTextPipeline(network, D3PMScheduler(NUM_CLASSES, NUM_TIMESTEPS), sequence_length=LENGTH)
    pipeline.set_progress_bar_config(disable=True)
    counter = Counter(network)
    pipeline(num_inference_steps=5, output_type="latent")
    print("| sampler | batch | rows per sample | calls of the network | seconds per sample | times as fast |")
    print("| --- | --- | --- | --- | --- | --- |")
    for batch_size in arguments.batch_sizes:
        for line in measure(pipeline, counter, batch_size, arguments.turns):
            print(line, flush=True)


if __name__ == "__main__":
    main()
