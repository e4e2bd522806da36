# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Exact likelihoods of a checkpoint by order and block length, and their paired differences to random order.

    python benchmarks/likelihood_orders.py examples/checkpoints/text8-absorbing text8-prefix.test.txt --num_examples 500

The text file is encoded by the tokenizer of the checkpoint and cut into rows of its sequence length, of which
`--num_examples` are taken, spread over the file. With `--num_scored`, each of its lines is a row and has two tabs: of the tokens between
them, so many in the middle are scored, given the rest of the line. Differences are in bits per token, with the standard error over examples.
`--results docs/results/orders-text8-absorbing.json` writes the rows to a file, from which `examples/reproduce/tables.py` writes the tables of
the documentation.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from d3pm_hf import D3PMPipeline, evaluate_bound, evaluate_likelihood
from d3pm_hf.likelihood.bound import bits, ratio_estimate, with_error
from d3pm_hf.likelihood.orders import ORDERS
from d3pm_hf.likelihood.texts import text_batches


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="Folder of the checkpoint, or its id on the Hub.")
    parser.add_argument("text_file", type=Path, help="Text to measure on.")
    parser.add_argument("--num_examples", type=int, default=500, help="Number of rows of the text.")
    parser.add_argument(
        "--num_scored",
        type=int,
        help="Number of tokens that are scored, in the middle between the two tabs of a line.",
    )
    parser.add_argument("--orders", nargs="+", default=ORDERS, choices=ORDERS, help="Orders to measure.")
    parser.add_argument("--block_lengths", type=int, nargs="+", default=[1], help="Numbers of positions per call.")
    parser.add_argument("--num_eval_timesteps", type=int, default=64, help="Number of times of the bound per example.")
    parser.add_argument("--batch_size", type=int, default=64, help="Number of examples in a batch.")
    parser.add_argument("--figure", type=Path, help="File for a figure of bits per token against calls.")
    parser.add_argument("--results", type=Path, help="JSON file for the rows of the table.")
    parser.add_argument(
        "--max_characters", type=int, default=1_000_000, help="Number of characters of the file to read."
    )
    return parser.parse_args()


def load_rows(pipeline, text: str, num_examples: int) -> torch.Tensor:
    """Rows of tokens `[num_examples, N]`, spread over the text."""
    tokens, length = torch.tensor(pipeline.tokenize(text)[0]), pipeline.sample_shape[0]
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return rows[torch.arange(num_examples) * len(rows) // num_examples]


def load_lines(pipeline, lines: list[str], num_scored: int, batch_size: int) -> list[dict]:
    """Batches of lines, of which `num_scored` tokens in the middle between two tabs are scored, or all if there are fewer."""
    rows = []
    for line in lines:
        before, middle, after = pipeline.tokenize(line.split("\t"))
        start = max(len(middle) - num_scored, 0) // 2
        end = start + min(len(middle), num_scored)
        rows.append((before + middle[:start], middle[start:end], middle[end:] + after))
    return text_batches(pipeline, rows, batch_size)[0]


def difference(result, base) -> tuple[float, float]:
    """The paired difference of two likelihoods of the same examples in bits per token, and its standard error."""
    nats, elements = (result.nats_per_example - base.nats_per_example).numpy(), base.elements_per_example.numpy()
    estimate, error, _ = ratio_estimate(nats, elements)
    return bits(float(estimate)), bits(float(error))


def to_row(result, base=None, **names) -> dict:
    """What was measured, as a row of the results."""
    row = {**names, "bits_per_dim": result.bits_per_dim, "standard_error": result.bits_per_dim_standard_error}
    if base is not None:
        row["difference"], row["difference_standard_error"] = difference(result, base)
    return {**row, "protocol": result.protocol}


def main() -> None:
    options = parse_arguments()
    pipeline = D3PMPipeline.from_pretrained(options.checkpoint)
    text = options.text_file.read_text(encoding="utf-8")[: options.max_characters]
    if options.num_scored is not None:
        lines = text.splitlines()[: options.num_examples]
        batches = load_lines(pipeline, lines, options.num_scored, options.batch_size)
    else:
        batches = load_rows(pipeline, text, options.num_examples).split(options.batch_size)
    arguments = {"progress_bar": False}
    begin = time.process_time()
    base = evaluate_likelihood(pipeline, batches, order="random", **arguments)
    base_seconds = time.process_time() - begin
    bound = evaluate_bound(
        *(pipeline.scheduler, pipeline.denoiser, batches),
        continuous_time=True,
        num_eval_timesteps=options.num_eval_timesteps,
        **arguments,
    )
    print(f"bound: {bound}\nrandom: {base}\n", flush=True)
    print("| order | positions per call | calls | bits per token | minus random order | processor seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows = [to_row(bound, order="bound")]
    points: dict[str, list] = {}
    for block_length in options.block_lengths:
        for order in options.orders:
            result, seconds, begin = base, base_seconds, time.process_time()
            if (order, block_length) != ("random", 1):
                result = evaluate_likelihood(pipeline, batches, order=order, block_length=block_length, **arguments)
                seconds = time.process_time() - begin
            value = with_error(result.bits_per_dim, result.bits_per_dim_standard_error, 3)
            gap, error = difference(result, base)
            paired = f"{gap:+.3f} ± {error:.3f}"
            cells = (order, block_length, result.num_calls, value, paired, f"{seconds:.0f}")
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            points.setdefault(order, []).append((result.num_calls, result))
            names = {"order": order, "block_length": block_length, "num_calls": result.num_calls}
            rows.append(to_row(result, base, **names))
            if options.results is not None:
                content = {
                    "checkpoint": Path(options.checkpoint).name,
                    "num_examples": base.num_examples,
                    "rows": rows,
                }
                options.results.write_text(json.dumps(content, indent=1) + "\n")
    if options.figure is not None:
        draw(points, options.figure)


def draw(points: dict[str, list], path: Path) -> None:
    """Bits per token against calls of the network, with one standard error, a line for each order."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for order, results in points.items():
        calls, measured = zip(*results)
        errors = [result.bits_per_dim_standard_error for result in measured]
        label = f"{order} (estimate of the bound)" if order == "random" else order
        style = "--" if order == "random" else "-"
        values = [result.bits_per_dim for result in measured]
        axes.errorbar(calls, values, errors, fmt=f"o{style}", capsize=2, markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="calls of the network", ylabel="bits per token, exact likelihood")
    axes.legend(title="order", fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
