# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Network calls and seconds per sample. `make bench` runs it.

    python benchmarks/bench_sampling.py

An absorbing process of T = 1000 steps over 27 letters and a mask, the same with uniform noise beside the mask, and an autoregressive
process of a step per token; 256 characters, and the network of the `cpu` preset, untrained: what it predicts does not change what a
step costs. The causal network has the same size. The samplers of a process take turns in one run, and the ratio is that of the medians
of their turns. Rows and tokens are those that the network reads, per sample.
"""

import argparse
import statistics
import time
from functools import partial

import torch

from d3pm_hf import D3PMScheduler, D3PMTextPipeline, create_text_model


NUM_TIMESTEPS, LENGTH, NUM_CLASSES = 1000, 256, 28
NETWORK = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
# The processes, and the samplers of each beside the plain loop.
SAMPLERS = {
    "absorbing": ("positions_first", "first_hitting"),
    "absorbing_uniform": ("positions_first",),
    "autoregressive": ("left_to_right",),
}


class Counter:
    """Counts the calls of a network, and the rows and tokens that its layers read."""

    def __init__(self, network: torch.nn.Module):
        self.calls = self.rows = self.tokens = 0
        network.backbone.encoder.register_forward_pre_hook(self.add)

    def add(self, layers, arguments):
        num_rows, num_tokens, _ = arguments[0].shape
        self.calls, self.rows, self.tokens = self.calls + 1, self.rows + num_rows, self.tokens + num_rows * num_tokens


def create_pipeline(process: str) -> D3PMTextPipeline:
    if process != "autoregressive":
        scheduler, settings = D3PMScheduler(NUM_CLASSES, NUM_TIMESTEPS, process, "reciprocal"), {}
    else:
        scheduler = D3PMScheduler(NUM_CLASSES, LENGTH, transition="autoregressive")
        settings = {"is_decoder": True, "timestep_conditioning": False}
    network = create_text_model("paper", NUM_CLASSES, **NETWORK, **settings, max_position_embeddings=LENGTH).eval()
    pipeline = D3PMTextPipeline(network, scheduler, sequence_length=LENGTH)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def measure(process: str, batch_size: int, turns: int) -> list[str]:
    """Lines of the table: the plain loop, and the other samplers of the process."""
    pipeline = create_pipeline(process)
    counter = Counter(pipeline.text_model)
    pipeline(num_inference_steps=5, output_type="latent")
    samplers = {
        name: partial(pipeline, batch_size=batch_size, sampler=name) for name in ("ancestral", *SAMPLERS[process])
    }
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    calls, rows, tokens = (dict.fromkeys(samplers, 0) for _ in range(3))
    for turn in range(turns):
        for name, draw in samplers.items():
            counter.calls = counter.rows = counter.tokens = 0
            begin = time.perf_counter()
            draw(generator=torch.Generator().manual_seed(turn), output_type="latent")
            seconds[name].append((time.perf_counter() - begin) / batch_size)
            calls[name], rows[name] = calls[name] + counter.calls, rows[name] + counter.rows
            tokens[name] += counter.tokens
    plain, lines = statistics.median(seconds["ancestral"]), []
    for name, values in seconds.items():
        numbers = [rows[name] / (turns * batch_size), tokens[name] / (turns * batch_size), calls[name] / turns]
        median = statistics.median(values)
        counts = " | ".join(f"{number:.0f}" for number in numbers)
        lines.append(f"| {process} | {name} | {batch_size} | {counts} | {median:.2f} | {plain / median:.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="Number of turns of each sampler.")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 16], help="Numbers of samples of a call.")
    parser.add_argument("--processes", nargs="+", default=list(SAMPLERS), choices=list(SAMPLERS), help="Processes.")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(
        "| process | sampler | batch | rows per sample | tokens per sample | calls | seconds per sample | times as fast |"
    )
    print("|" + " --- |" * 8)
    for process in arguments.processes:
        for batch_size in arguments.batch_sizes:
            for line in measure(process, batch_size, arguments.turns):
                print(line, flush=True)


if __name__ == "__main__":
    main()
