# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Trains and measures the models of docs/source/en/results.md. Each name is one row of a table.

    python examples/reproduce/run.py text-uniform --text_path prose27
    python examples/reproduce/run.py text-uniform text-uniform_hybrid --seed 1 --text_path prose27
    python examples/reproduce/run.py cifar10-gaussian --cifar10_path cifar10 --feature_extractor outputs/cifar10-resnet

A run is two commands, which are printed: one of the training examples with its preset for CPUs, and `python -m
d3pm_hf.evaluation`. Text has the preset `cpu_earlier`, with which the tables were measured.
Checkpoints are written to outputs/reproduce, and results to docs/results as JSON. Without paths the data are downloaded.
"""

import argparse
import json
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

from d3pm_hf.training import read_log


EXAMPLES = Path(__file__).parents[1]
RESULTS = EXAMPLES.parent / "docs" / "results"

# What the runs of a table share: the script, its flags, and the flags of the evaluation.
TEXT = {
    "script": "train_text8.py",
    "train": "",
    "evaluate": "--dataset text8 --num_inference_steps 1000 256 64 20 10 5 --max_eval_samples 1024 --num_eval_timesteps 10 "
    "--num_samples 64 --num_sample_steps 256",
}
HOUR = {**TEXT, "train": "--num_samples 0"}
PIECES = {
    "script": "train_lm1b.py",
    "train": "--train_batch_size 8 --max_train_steps 1800 --validation_steps 0 --num_samples 0",
    "evaluate": "--dataset lm1b --num_inference_steps 1000 128 64 20 10 --max_eval_samples 256 --num_eval_timesteps 8 "
    "--eval_batch_size 8 --num_samples 0",
}
# Ten times the pieces.
LONG_PIECES = {**PIECES, "train": "--num_hidden_layers 3 --max_train_steps 9000 --validation_steps 0 --num_samples 0"}
# The tables of images were measured with a group of the normalization for each channel.
GROUPS = "--norm_num_groups 32"
CIFAR10_FLAGS = (
    "--train_batch_size 8 --max_train_steps 5000 --unet_dropout 0 --reconstruction posterior --validation_steps 0 "
    "--num_samples 0"
)
CIFAR10 = {
    "script": "train_cifar10.py",
    "train": f"{CIFAR10_FLAGS} {GROUPS}",
    "evaluate": "--dataset cifar10 --num_inference_steps 1000 20 --max_eval_samples 128 --num_eval_timesteps 100 "
    "--num_samples 512 --num_sample_steps 50",
}
# At full size, for as many steps, with groups of four channels.
FULL_CIFAR10 = {
    **CIFAR10,
    "train": f"{CIFAR10_FLAGS} --resolution 32",
    "evaluate": "--dataset cifar10 --num_inference_steps 1000 100 20 --max_eval_samples 64 --num_eval_timesteps 100 --num_samples 0",
}
DIGITS = {
    "script": "train.py",
    "train": f"--dataset_path digits --validation_steps 0 --num_samples 0 {GROUPS}",
    "evaluate": "--dataset digits --num_inference_steps 400 100 20 --num_eval_timesteps 40 --num_samples 0",
}
GAUSSIAN = "--preset images,digits --prediction_type x0"
UNIFORM = f"{GAUSSIAN} --transition uniform --beta_schedule cosine"
ABSORBING = f"{GAUSSIAN} --transition absorbing --beta_schedule reciprocal"
# The rows: their table, and their own flags. A name without a loss has the paper's: L_vb for uniform and nearest neighbors,
# L_lambda for the others.
RUNS = {
    "text-uniform": (TEXT, "--preset uniform,cpu_earlier"),
    "text-nearest_neighbor": (TEXT, "--preset nearest_neighbor,cpu_earlier"),
    "text-absorbing": (TEXT, "--preset absorbing,cpu_earlier"),
    "text-absorbing_vb": (TEXT, "--preset absorbing_vb,cpu_earlier"),
    "text-autoregressive": (TEXT, "--preset autoregressive,cpu_earlier"),
    "text-uniform_hybrid": (TEXT, "--preset uniform_hybrid,cpu_earlier"),
    "text-uniform_hybrid_denoising": (TEXT, "--preset uniform_hybrid,cpu_earlier --auxiliary denoising"),
    "text-uniform_reciprocal": (TEXT, "--preset uniform_reciprocal,cpu_earlier"),
    "text-uniform_mutual_information": (TEXT, "--preset uniform_mutual_information,cpu_earlier"),
    "text8-uniform": (HOUR, "--preset uniform,cpu_hour"),
    "text8-nearest_neighbor": (HOUR, "--preset nearest_neighbor,cpu_hour"),
    "text8-absorbing": (HOUR, "--preset absorbing,cpu_hour"),
    "text8-autoregressive": (HOUR, "--preset autoregressive,cpu_hour"),
    "pieces-uniform": (PIECES, "--preset uniform,cpu_earlier"),
    "pieces-nearest_neighbor": (PIECES, "--preset nearest_neighbor,cpu_earlier"),
    "pieces-absorbing": (PIECES, "--preset absorbing,cpu_earlier"),
    "pieces-autoregressive": (PIECES, "--preset autoregressive,cpu_earlier"),
    "pieces_long-uniform": (LONG_PIECES, "--preset uniform,cpu"),
    "pieces_long-nearest_neighbor": (LONG_PIECES, "--preset nearest_neighbor,cpu"),
    "pieces_long-absorbing": (LONG_PIECES, "--preset absorbing,cpu"),
    "pieces_long-autoregressive": (LONG_PIECES, "--preset autoregressive,cpu"),
    "cifar10-uniform": (CIFAR10, "--preset uniform,cpu"),
    "cifar10-uniform_hybrid": (CIFAR10, "--preset uniform,cpu --loss hybrid"),
    "cifar10-absorbing_vb": (CIFAR10, "--preset absorbing_vb,cpu"),
    "cifar10-absorbing": (CIFAR10, "--preset absorbing,cpu"),
    "cifar10-gaussian_vb": (CIFAR10, "--preset gaussian_vb,cpu"),
    "cifar10-gaussian": (CIFAR10, "--preset gaussian,cpu"),
    "cifar10-gaussian_logistic_vb": (CIFAR10, "--preset gaussian_logistic,cpu --loss vb"),
    "cifar10-gaussian_logistic": (CIFAR10, "--preset gaussian_logistic,cpu"),
    "cifar10_full-gaussian_logistic": (FULL_CIFAR10, "--preset gaussian_logistic,cpu"),
    "digits-uniform": (DIGITS, f"{UNIFORM} --loss vb"),
    "digits-uniform_hybrid": (DIGITS, UNIFORM),
    "digits-absorbing_vb": (DIGITS, f"{ABSORBING} --loss vb"),
    "digits-absorbing": (DIGITS, ABSORBING),
    "digits-gaussian_vb": (DIGITS, f"{GAUSSIAN} --loss vb"),
    "digits-gaussian": (DIGITS, GAUSSIAN),
    "digits-gaussian_logistic_vb": (DIGITS, "--preset images,digits --loss vb"),
    "digits-gaussian_logistic": (DIGITS, "--preset images,digits"),
    "digits-gaussian_classes": (
        DIGITS,
        "--preset images,digits --label_column label --condition_dropout 0.1 --max_train_steps 2000",
    ),
}

# The checkpoint of another run, with its logits read as the denoising posterior.
REREADINGS = {"text-uniform_hybrid_reread": "text-uniform_hybrid"}
RUNS |= {name: RUNS[other] for name, other in REREADINGS.items()}


def call(command: list[str]) -> dict[str, float]:
    """Runs a command with this Python, and returns the seconds and the processor seconds that it took."""
    print(f"\n$ python {shlex.join(command)}", flush=True)
    begin, used = time.time(), processor_seconds()
    subprocess.run([sys.executable, *command], check=True)
    return {
        "train_seconds": round(time.time() - begin, 1),
        "processor_seconds": round(processor_seconds() - used, 1),
    }


def processor_seconds() -> float:
    """Processor time of all commands so far. It counts what a run costs, also beside other programs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def train(name: str, folder: Path, options: argparse.Namespace) -> None:
    """Runs the first command of a run, and writes its time beside the checkpoint."""
    table, flags = RUNS[name]
    command = [str(EXAMPLES / table["script"]), *flags.split(), *table["train"].split()]
    command += ["--seed", str(options.seed), "--output_dir", str(folder), "--overwrite_output_dir"]
    paths = data_paths(table, options)
    if table in (PIECES, LONG_PIECES):
        paths["sentencepiece_path"] = options.sentencepiece_path
    timing = {**call(command + to_flags(paths)), "threads": torch.get_num_threads()}
    (folder / "timing.json").write_text(json.dumps(timing) + "\n")


def measure(name: str, folder: Path, options: argparse.Namespace) -> dict:
    """Runs the second command, and returns all results of the run."""
    table, _ = RUNS[name]
    output_file = folder / f"{name}.json"
    command = ["-m", "d3pm_hf.evaluation", str(folder), *table["evaluate"].split(), "--num_timed_samples", "0"]
    if name in REREADINGS:
        command += ["--x0_posterior", "denoising"]
    paths = data_paths(table, options)
    if table is CIFAR10:
        paths["feature_extractor"] = options.feature_extractor
    call([*command, "--output_file", str(output_file), *to_flags(paths)])
    return {
        "run": name,
        "seed": options.seed,
        **json.loads((folder / "timing.json").read_text()),
        **json.loads(output_file.read_text()),
        "validation": [line for line in read_log(folder / "log.jsonl") if "eval_bits_per_dim" in line],
    }


def data_paths(table: dict, options: argparse.Namespace) -> dict[str, str | None]:
    if table is DIGITS:
        return {}
    path = options.cifar10_path if table in (CIFAR10, FULL_CIFAR10) else options.text_path
    return {"dataset_path": path, "cache_dir": options.cache_dir}


def to_flags(paths: dict[str, str | None]) -> list[str]:
    return [word for name, path in paths.items() if path is not None for word in (f"--{name}", path)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"runs: {', '.join(RUNS)}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", choices=RUNS, metavar="RUN", help="Names of runs, listed below.")
    parser.add_argument("--seed", type=int, default=0, help="Seed for training.")
    parser.add_argument(
        "--text_path", help="Text in the alphabet of text8: a file, or a folder with one file per split."
    )
    parser.add_argument(
        "--sentencepiece_path", help="Sentencepiece model. By default word pieces are trained on the text."
    )
    parser.add_argument("--cifar10_path", help="Folder of images, or of parquet files.")
    parser.add_argument("--feature_extractor", help="Feature extractor for FID, see train_classifier.py.")
    parser.add_argument("--cache_dir", help="Folder for downloads.")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/reproduce"), help="Folder for checkpoints.")
    parser.add_argument("--results_dir", type=Path, default=RESULTS, help="Folder for results.")
    parser.add_argument(
        "--skip_training",
        action="store_true",
        help="Whether to measure the checkpoints in --output_dir without training.",
    )
    options = parser.parse_args()
    options.results_dir.mkdir(parents=True, exist_ok=True)
    for name in options.runs:
        folder = options.output_dir / f"{REREADINGS.get(name, name)}-{options.seed}"
        if name not in REREADINGS and not options.skip_training:
            train(name, folder, options)
        elif not (folder / "timing.json").is_file():
            parser.error(
                f"{folder} holds no finished run: train it first, without --skip_training, under its own name"
            )
        result = measure(name, folder, options)
        (options.results_dir / f"{name}-{options.seed}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
