# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Trains a class-conditional model of scikit-learn's digits, and lets a classifier of scikit-learn read what it writes.

    python examples/conditional_digits.py

A support vector machine is fitted to the same training images, and reads images that neither has seen. Then it reads samples
of each class, at several guidance scales. The share of samples that are read as their class says whether the model follows its
condition; the spread of the samples beside that of the data says whether it still draws more than one digit of each class.
"""

import argparse
from pathlib import Path


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--output_dir", default="outputs/conditional_digits", help="Folder of the checkpoint.")
parser.add_argument("--max_train_steps", type=int, default=2000, help="Number of training steps.")
parser.add_argument("--num_per_class", type=int, default=100, help="Number of samples of each class.")
parser.add_argument("--num_inference_steps", type=int, default=50, help="Number of steps of a sample.")
parser.add_argument(
    "--max_eval_samples", type=int, default=200, help="Number of examples on which the bound is measured."
)
parser.add_argument(
    "--guidance_scales", type=float, nargs="+", default=[1.0, 2.0, 4.0], help="Guidance scales to compare."
)
if __name__ == "__main__":
    parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

from d3pm_hf import D3PMImagePipeline, D3PMPipeline, D3PMScheduler, create_unet
from d3pm_hf.data import Rows, unigram_probs
from d3pm_hf.training import D3PMTrainingArguments, train
from d3pm_hf.utils.scripts import run_script
from d3pm_hf.visualization.grids import image_grid


NUM_LEVELS, NUM_DIGITS = 17, 10


def load_splits() -> tuple[Rows, Rows]:
    """1,500 digits for training and 297 for testing, each with its class. The writers of both are the same."""
    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[:, None]  # [1797, 1, 8, 8]
    parts = train_test_split(images, bunch.target, test_size=297, stratify=bunch.target, random_state=0)
    return Rows(parts[0], NUM_LEVELS, labels=parts[2]), Rows(parts[1], NUM_LEVELS, labels=parts[3])


def create_pipeline(train_dataset: Rows) -> D3PMImagePipeline:
    """A Gaussian process, and a U-Net with an embedding for each digit and one for "no class"."""
    torch.manual_seed(0)
    unet = create_unet(
        "paper",
        NUM_LEVELS,
        8,
        1,
        "logistic",
        num_class_labels=NUM_DIGITS,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        dropout=0.0,
    )
    scheduler = D3PMScheduler(
        NUM_LEVELS,
        num_train_timesteps=400,
        transition="gaussian",
        beta_schedule="mutual_information",
        prediction_type="logistic",
        unigram_probs=unigram_probs(Rows(train_dataset.tokens, NUM_LEVELS)),
    )
    return D3PMImagePipeline(unet, scheduler, num_class_labels=NUM_DIGITS)


def draw(
    pipeline: D3PMImagePipeline, num_per_class: int, guidance_scale: float, num_inference_steps: int
) -> np.ndarray:
    """Samples `[10, n, 64]` of each class."""
    pipeline.set_progress_bar_config(disable=True)
    states = pipeline(
        class_labels=list(range(NUM_DIGITS)),
        num_images_per_prompt=num_per_class,
        guidance_scale=guidance_scale,
        num_inference_steps=num_inference_steps,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).images
    return states.reshape(NUM_DIGITS, num_per_class, -1).cpu().numpy()


def spread(images: np.ndarray) -> float:
    """Root mean square distance of the images `[n, 64]` of a class from their mean."""
    return float(np.sqrt(images.var(0).sum()))


def main():
    options = parser.parse_args()
    folder = Path(options.output_dir)
    train_dataset, test_dataset = load_splits()

    arguments = D3PMTrainingArguments(
        output_dir=str(folder),
        overwrite_output_dir=True,
        max_train_steps=options.max_train_steps,
        train_batch_size=64,
        learning_rate=2e-3,
        lr_scheduler="cosine",
        lr_warmup_steps=50,
        hybrid_coeff=0.001,
        condition_dropout=0.1,  # guidance needs the model without a class, too
        logging_steps=100,
        validation_steps=1_000_000,
        checkpointing_steps=1_000_000,
        max_eval_samples=options.max_eval_samples,
        num_eval_timesteps=40,
        num_samples=0,
    )
    train(
        arguments,
        create_pipeline(train_dataset),
        train_dataset,
        test_dataset,
        {"dataset_name": "scikit-learn's digits"},
    )

    flat, labels = train_dataset.tokens.reshape(len(train_dataset), -1), train_dataset.labels
    reader = SVC(gamma=0.001, C=10).fit(flat, labels)
    accuracy = reader.score(test_dataset.tokens.reshape(len(test_dataset), -1), test_dataset.labels)
    print(f"\nThe classifier reads {accuracy:.1%} of {len(test_dataset)} real test digits.\n")

    pipeline = D3PMPipeline.from_pretrained(folder)
    digits = " ".join(f"{digit:>5}" for digit in range(NUM_DIGITS))
    print(f"guidance_scale  spread    read {digits}")
    print(f"{'(data)':>14} {np.mean([spread(flat[labels == digit]) for digit in range(NUM_DIGITS)]):7.1f}")
    for scale in options.guidance_scales:
        samples = draw(pipeline, options.num_per_class, scale, options.num_inference_steps)
        read = [(reader.predict(rows) == digit).mean() for digit, rows in enumerate(samples)]
        shares = " ".join(f"{share:5.0%}" for share in read)
        print(f"{scale:14.1f} {np.mean([spread(rows) for rows in samples]):7.1f} {np.mean(read):7.1%} {shares}")
        shown = torch.from_numpy(samples[:, :10].reshape(-1, 1, 8, 8))
        image_grid(pipeline.decode(shown)).save(folder / f"samples_guidance_{scale:g}.png")
    print(f"\n{folder}: the checkpoint, and a picture of samples for each scale, one row for each digit")


if __name__ == "__main__":
    run_script(main)
