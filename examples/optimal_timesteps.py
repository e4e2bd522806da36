# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Chooses the timesteps of a few inference steps, and compares the bound with that of evenly spaced timesteps.

    python examples/optimal_timesteps.py --dataset photos --transition gaussian --beta_schedule linear
    python examples/optimal_timesteps.py --dataset digits --transition uniform --beta_schedule cosine
    python examples/optimal_timesteps.py --dataset text8 --text_path text8.txt --output_dir CHECKPOINT

An image model is trained, unless `--output_dir` has a checkpoint. A text model is a checkpoint of `train_text8.py`. The
timesteps are chosen on training data and stored in the checkpoint; the bounds are measured on test data, all terms of each
example. A difference of two bounds is that of the same examples, and its standard error that of their differences.
"""

import argparse
from pathlib import Path


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--dataset", default="digits", choices=("digits", "photos", "text8"), help="Data set.")
parser.add_argument("--text_path", help="Text in the alphabet of text8: a file, or a folder with one file per split.")
parser.add_argument("--transition", default="gaussian", help="Transition family of an image model.")
parser.add_argument("--beta_schedule", default="linear", help="Noise schedule of an image model.")
parser.add_argument(
    "--schedule", dest="beta_schedule", default=argparse.SUPPRESS, help=argparse.SUPPRESS
)  # earlier name
parser.add_argument("--num_train_timesteps", type=int, default=1000, help="Number of timesteps T of an image model.")
parser.add_argument("--max_train_steps", type=int, default=1000, help="Number of training steps of an image model.")
parser.add_argument("--output_dir", default="outputs/timesteps", help="Folder of the checkpoint and of the plot.")
parser.add_argument(
    "--num_examples", type=int, default=256, help="Number of training examples on which timesteps are chosen."
)
parser.add_argument("--grid", type=int, default=60, help="Number of timesteps to choose among.")
parser.add_argument("--max_eval_samples", type=int, default=256, help="Number of test examples.")
parser.add_argument("--num_seeds", type=int, default=1, help="Number of seeds for the noise of the measurement.")
parser.add_argument("--batch_size", type=int, default=64, help="Number of examples in a batch.")
parser.add_argument("--steps", type=int, nargs="+", default=[5, 10, 20, 30, 60], help="Numbers of inference steps.")
if __name__ == "__main__":
    parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import numpy as np
from matplotlib.figure import Figure

from d3pm_hf import D3PMImagePipeline, D3PMPipeline, evaluate_bound
from d3pm_hf.data import Rows, digits, load_text8
from d3pm_hf.data.batches import evaluation_batches
from d3pm_hf.evaluation import optimize_timesteps
from d3pm_hf.likelihood import OptimalTimesteps
from d3pm_hf.training import D3PMTrainingArguments, train
from d3pm_hf.training.script_arguments import ImageModelArguments, ProcessArguments
from d3pm_hf.training.script_parts import create_image_parts
from d3pm_hf.utils.scripts import run_script


def photo_patches() -> tuple[Rows, Rows]:
    """The two photographs of scikit-learn in patches of 8 x 8 pixels of 256 gray levels; the right fifth is for testing."""
    from sklearn.datasets import load_sample_images

    parts: tuple[list, list] = [], []
    for image in load_sample_images().images:
        gray = image.mean(-1).round().astype(np.uint8)
        height, width = (size // 8 for size in gray.shape)
        patches = gray[: height * 8, : width * 8].reshape(height, 8, width, 8).transpose(0, 2, 1, 3)
        for part, columns in zip(parts, (slice(0, width * 4 // 5), slice(width * 4 // 5, width))):
            part.append(patches[:, columns].reshape(-1, 1, 8, 8))
    first, second = (Rows(np.concatenate(part), 256) for part in parts)
    return first, second


def train_images(options: argparse.Namespace, train_dataset: Rows, eval_dataset: Rows) -> None:
    """Trains a small U-Net; one with Gaussian noise predicts a logistic distribution of x_0."""
    process = ProcessArguments(
        transition=options.transition,
        beta_schedule=options.beta_schedule,
        prediction_type="logistic" if options.transition == "gaussian" else "x0",
        num_train_timesteps=options.num_train_timesteps,
    )
    network = ImageModelArguments(
        block_out_channels=[32, 64],
        norm_num_groups=32,  # with which the tables of the documentation were measured
        layers_per_block=2,
        attention_levels=[1],
        unet_dropout=0.0,
    )
    pipeline = D3PMImagePipeline(*create_image_parts(process, network, train_dataset))
    arguments = D3PMTrainingArguments(
        output_dir=options.output_dir,
        overwrite_output_dir=True,
        max_train_steps=options.max_train_steps,
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
    name = {"digits": "scikit-learn's digits", "photos": "scikit-learn's photographs"}[options.dataset]
    train(arguments, pipeline, train_dataset, eval_dataset, {"dataset_name": name, "split": "test"})


def draw_plot(result: OptimalTimesteps, numbers: list[int], path: Path) -> None:
    """Draws the cost per timestep of the steps to the next timestep of the grid, and the timesteps of sampling below."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[2, 1])
    strides = [t - s for s, t in zip([-1, *result.grid], result.grid)]
    costs = [result.costs[i, i].item() / stride for i, stride in enumerate(strides)]
    above.stairs(costs, [0.5, *(t + 1 for t in result.grid)], fill=True, alpha=0.4)
    above.set_ylabel("nats per element\nand timestep")
    for row, number in enumerate(numbers):
        below.plot([t + 1 for t in result.timesteps(number)], [row] * number, "|", markersize=12)
    labels = (f"{number} steps" + ("" if number in result.inference_timesteps else " (even)") for number in numbers)
    below.set_yticks(range(len(numbers)), list(labels))
    below.set_ylim(len(numbers) - 0.4, -0.6)
    below.set_xlabel("timestep + 1")
    if result.cheapest_timesteps(5)[2] < result.num_train_timesteps / 5:  # most of the bound is near the data
        above.set(xscale="log", yscale="log")
    figure.savefig(path, dpi=120)


def measure(pipeline: D3PMPipeline, dataset, number: int, spacing: str, options: argparse.Namespace) -> np.ndarray:
    """The bound of each test example in bits per element, averaged over the seeds of the noise."""
    runs = []
    for seed in range(options.num_seeds):
        batches = evaluation_batches(dataset, options.batch_size, options.max_eval_samples)
        bound = evaluate_bound(
            *(pipeline.scheduler, pipeline.denoiser, batches),
            num_inference_steps=number,
            spacing=spacing,
            seed=seed,
            progress_bar=False,
        )
        runs.append(bound.nats_per_example / bound.elements_per_example)
    return np.mean(runs, axis=0) / np.log(2)


def show(values: np.ndarray, sign: str = "") -> str:
    """The mean of the examples and its standard error."""
    return f"{values.mean():{sign}.4f} ± {values.std(ddof=1) / len(values) ** 0.5:.4f}"


def main():
    options = parser.parse_args()
    folder = Path(options.output_dir)
    is_trained = (folder / "model_index.json").exists()
    if options.dataset == "text8":
        if not is_trained:
            parser.error(f"{folder} has no checkpoint: train one with examples/train_text8.py")
        pipeline = D3PMPipeline.from_pretrained(folder)
        train_dataset, eval_dataset = (
            load_text8(split, dataset_path=options.text_path, length=pipeline.sample_shape[0])
            for split in ("train", "test")
        )
    else:
        train_dataset, eval_dataset = digits() if options.dataset == "digits" else photo_patches()
        if not is_trained:
            train_images(options, train_dataset, eval_dataset)
        pipeline = D3PMPipeline.from_pretrained(folder)

    result = optimize_timesteps(
        *(pipeline, train_dataset),
        num_examples=options.num_examples,
        grid=options.grid,
        batch_size=options.batch_size,
    )
    pipeline.scheduler.register_inference_timesteps(result.inference_timesteps)
    pipeline.scheduler.save_pretrained(folder / "scheduler")
    draw_plot(result, options.steps, folder / "timesteps.png")

    even, chosen = {}, {}
    print("| steps | even | chosen | chosen - even |\n| --- | --- | --- | --- |")
    for n in options.steps:
        even[n] = chosen[n] = measure(pipeline, eval_dataset, n, "even", options)
        if n in result.inference_timesteps:
            chosen[n] = measure(pipeline, eval_dataset, n, "optimized", options)
        if n in result.inference_timesteps:
            difference = show(chosen[n] - even[n], "+")
        else:
            gain, error = np.array(result.gains[n - 1]) / np.log(2)
            difference = f"even ones are kept ({-gain:+.4f} ± {error:.4f} on training data)"
        print(f"| {n} | {show(even[n])} | {show(chosen[n])} | {difference} |", flush=True)
    for n in options.steps:
        if 3 * n in options.steps:
            print(f"{n} chosen - {3 * n} even: {show(chosen[n] - even[3 * n], '+')}")


if __name__ == "__main__":
    run_script(main)
