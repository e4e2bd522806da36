# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Chooses the timesteps of a few inference steps, and compares the bound with that of evenly spaced timesteps.

A Gaussian and logistic model of scikit-learn's digits (8 x 8 pixels of 17 levels) is trained, unless `--output_dir` has a
checkpoint. The timesteps are chosen on training images and stored in the checkpoint; the bounds are measured on test images.
"""

import argparse
import math
from pathlib import Path

from common import ImageModelArguments, ProcessArguments, create_image_parts
from matplotlib.figure import Figure

from d3pm_hf import D3PMImagePipeline, D3PMPipeline, evaluate_bound
from d3pm_hf.data import digits
from d3pm_hf.data.batches import evaluation_batches
from d3pm_hf.evaluation import optimize_timesteps
from d3pm_hf.likelihood import OptimalTimesteps
from d3pm_hf.training import D3PMTrainingArguments, train


def train_digits(output_dir: Path, schedule: str, num_train_timesteps: int, max_train_steps: int) -> None:
    """Trains a Gaussian and logistic model of the digits."""
    train_dataset, eval_dataset = digits()
    process = ProcessArguments(
        transition="gaussian",
        schedule=schedule,
        prediction_type="logistic",
        num_train_timesteps=num_train_timesteps,
    )
    network = ImageModelArguments(
        block_out_channels=[32, 64], layers_per_block=2, attention_levels=[1], unet_dropout=0.0
    )
    pipeline = D3PMImagePipeline(*create_image_parts(process, network, train_dataset))
    arguments = D3PMTrainingArguments(
        output_dir=str(output_dir),
        overwrite_output_dir=True,
        max_train_steps=max_train_steps,
        train_batch_size=64,
        learning_rate=2e-3,
        lr_scheduler="cosine",
        lr_warmup_steps=50,
        hybrid_coeff=0.001,
        logging_steps=20,
        validation_steps=1_000_000,
        checkpointing_steps=1_000_000,
        max_eval_samples=100,
        num_eval_timesteps=40,
        num_samples=0,
    )
    train(arguments, pipeline, train_dataset, eval_dataset, {"dataset_name": "scikit-learn's digits", "split": "test"})


def draw_plot(result: OptimalTimesteps, numbers: list[int], path: Path) -> None:
    """Draws the cost per timestep of the steps to the next timestep of the grid, and the chosen timesteps below."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[2, 1])
    strides = [t - s for s, t in zip(result.grid, result.grid[1:])]
    costs = [result.costs[i + 1, i + 1].item() / stride for i, stride in enumerate(strides)]
    above.fill_between(result.grid[1:], costs, step="pre", alpha=0.4)
    above.set_ylabel("nats per pixel\nand timestep")
    for row, number in enumerate(numbers):
        below.plot(result.timesteps(number), [row] * number, "|", markersize=12)
    below.set_yticks(range(len(numbers)), [f"{number} steps" for number in numbers])
    below.set_ylim(len(numbers) - 0.4, -0.6)
    below.set_xlabel("timestep")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="outputs/timesteps", help="Folder of the checkpoint and of the plot.")
    parser.add_argument(
        "--schedule", default="linear", choices=("linear", "mutual_information"), help="Noise schedule."
    )
    parser.add_argument("--num_train_timesteps", type=int, default=1000, help="Number of timesteps T.")
    parser.add_argument("--max_train_steps", type=int, default=1000, help="Number of training steps.")
    parser.add_argument(
        "--num_examples", type=int, default=256, help="Number of training images on which timesteps are chosen."
    )
    parser.add_argument("--grid", type=int, default=64, help="Number of timesteps to choose among.")
    parser.add_argument("--max_eval_samples", type=int, default=128, help="Number of test images.")
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[5, 10, 20, 30, 60], help="Numbers of inference steps."
    )
    options = parser.parse_args()
    folder = Path(options.output_dir)
    if not (folder / "model_index.json").exists():
        train_digits(folder, options.schedule, options.num_train_timesteps, options.max_train_steps)

    train_dataset, eval_dataset = digits()
    pipeline = D3PMPipeline.from_pretrained(folder)
    result = optimize_timesteps(
        pipeline, train_dataset, num_examples=options.num_examples, grid=options.grid, batch_size=options.num_examples
    )
    pipeline.scheduler.register_inference_timesteps(result.inference_timesteps)
    pipeline.scheduler.save_pretrained(folder / "scheduler")
    draw_plot(result, [n for n in options.steps if n <= len(result.grid)], folder / "timesteps.png")

    print("| steps | even | chosen | predicted, even | predicted, chosen |\n| --- | --- | --- | --- | --- |")
    for n in options.steps:
        cells = []
        for spacing in ("even", "chosen"):
            batches = evaluation_batches(eval_dataset, options.max_eval_samples, options.max_eval_samples)
            bound = evaluate_bound(
                pipeline.scheduler,
                pipeline.denoiser,
                batches,
                num_inference_steps=n,
                spacing=spacing,
                progress_bar=False,
            )
            cells.append(f"{bound.bits_per_dim:.3f} ± {bound.bits_per_dim_standard_error:.3f}")
        if n <= len(result.grid):
            predicted = result.even_bounds[n - 1], result.bounds[n - 1]
            cells += [f"{nats / math.log(2):.3f}" for nats in predicted]
        print(f"| {n} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
