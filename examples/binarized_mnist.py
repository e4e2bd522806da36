# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Binarized MNIST: the likelihood of an image, in nats, in any order of its pixels.

    python examples/binarized_mnist.py train --data binarized-mnist.npz --output_dir outputs/binarized-mnist
    python examples/binarized_mnist.py evaluate --data binarized-mnist.npz
    python examples/binarized_mnist.py picture --data binarized-mnist.npz --output binarized_mnist.png

The data are the static binarization of MNIST: 50,000 images for training, 10,000 for validation and 10,000 for testing, as
`binarized_mnist_{train,valid,test}.amat` (784 zeros and ones per line) in a folder, or as one file `.npz` with the arrays `train`,
`valid` and `test`, one row of 784 packed bits (`numpy.packbits`) per image. A pixel is black, white or the mask, which is gray: 0, 2 and 1
of three levels, so that an unchanged `UNet2DModel` reads -1, 1 and 0. The bound of infinitely many steps is the mean of -log p
over all orders of the pixels. docs/source/en/binarized_mnist.md has the results.
"""

import argparse
from pathlib import Path


CHECKPOINT = str(Path(__file__).resolve().parent / "checkpoints" / "binarized-mnist")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("command", choices=["train", "evaluate", "picture"], help="What to do.")
parser.add_argument("--data", required=True, help="File .npz, or folder of files .amat.")
parser.add_argument("--checkpoint", default=CHECKPOINT, help="Folder of the checkpoint to evaluate or to draw with.")
parser.add_argument("--seed", type=int, default=0, help="Seed of weights, masks, orders and samples.")
parser.add_argument("--split", default="test", choices=["valid", "test"], help="evaluate: images to measure.")
parser.add_argument("--num_images", type=int, default=10_000, help="evaluate: number of images of the bound.")
parser.add_argument("--num_terms", type=int, default=4, help="evaluate: number of times of the bound per image.")
parser.add_argument(
    "--num_ordered", type=int, default=0, help="evaluate: number of images of exact likelihoods, one call per pixel."
)
parser.add_argument(
    "--orders", nargs="+", default=["left_to_right", "margin", "random"], help="evaluate: orders of the pixels."
)
parser.add_argument("--output", default="binarized_mnist.png", help="picture: file to write.")
parser.add_argument("--output_dir", default="outputs/binarized-mnist", help="train: folder of the run.")
parser.add_argument("--resume_from_checkpoint", help="train: checkpoint folder to resume from, or `latest`.")
parser.add_argument("--max_train_steps", type=int, default=7000, help="train: number of steps.")
parser.add_argument("--train_batch_size", type=int, default=32, help="train: number of images of a step.")
parser.add_argument("--adam_epsilon", type=float, default=1e-8, help="train: epsilon of AdamW.")
parser.add_argument("--learning_rate", type=float, default=1e-3, help="train: peak learning rate.")
if __name__ == "__main__":
    parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import numpy as np
import torch
from diffusers.utils import make_image_grid

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMPipeline,
    D3PMScheduler,
    create_unet,
    evaluate_bound,
    evaluate_likelihood,
)
from d3pm_hf.data import Rows
from d3pm_hf.training import D3PMTrainingArguments, train
from d3pm_hf.utils.scripts import run_script
from d3pm_hf.visualization.grids import enlarge


SIDE, NUM_LEVELS, MASK = 28, 3, 1
NUM_PIXELS = SIDE * SIDE
# 32, 64 and 128 channels at 28, 14 and 7 pixels, with attention at 7 x 7; mnist.py has them, too.
UNET = {
    "block_out_channels": (32, 64, 128),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    "norm_num_groups": 8,
    "attention_head_dim": 32,
    "dropout": 0.0,
}


def load_images(path: str, split: str) -> np.ndarray:
    """The images of a split in a random order, `[n, 1, 28, 28]` with the levels 0 and 2."""
    file = Path(path)
    if file.is_dir():
        bits = np.loadtxt(file / f"binarized_mnist_{split}.amat", dtype=np.uint8)
    else:
        with np.load(file) as arrays:
            bits = np.unpackbits(arrays[split], axis=1)[:, :NUM_PIXELS]
    if bits.shape[1:] != (NUM_PIXELS,) or bits.max() > 1:
        raise ValueError(f"{path} has rows of {bits.shape[1:]} values up to {bits.max()}: write 784 zeros and ones")
    images = 2 * bits.reshape(-1, 1, SIDE, SIDE)
    return images[np.random.default_rng(0).permutation(len(images))]  # the file may be sorted by class


def create_pipeline() -> D3PMImagePipeline:
    """A U-Net and an absorbing process."""
    unet = create_unet("paper", NUM_LEVELS, SIDE, 1, **UNET)
    unet.to(memory_format=torch.channels_last)  # convolutions of a CPU are faster
    return D3PMImagePipeline(unet, D3PMScheduler(NUM_LEVELS, mask_token_id=MASK))


def train_network(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    settings = D3PMTrainingArguments(
        output_dir=options.output_dir,
        overwrite_output_dir=options.resume_from_checkpoint is None,
        resume_from_checkpoint=options.resume_from_checkpoint,
        seed=options.seed,
        max_train_steps=options.max_train_steps,
        train_batch_size=options.train_batch_size,
        loss="vb",
        learning_rate=options.learning_rate,
        lr_scheduler="cosine",
        lr_warmup_steps=min(200, options.max_train_steps // 10),
        adam_epsilon=options.adam_epsilon,
        ema_max_decay=0.998,
        mixed_precision="no",
        logging_steps=50,
        checkpointing_steps=250,
        checkpoints_total_limit=2,
        validation_steps=1500,
        max_eval_samples=200,
        num_eval_timesteps=10,
        num_samples=0,
    )
    train_images, valid_images = (Rows(load_images(options.data, split), NUM_LEVELS) for split in ("train", "valid"))
    train(settings, create_pipeline(), train_images, valid_images, {"dataset_name": "binarized MNIST"})


def load_pipeline(folder: str) -> D3PMImagePipeline:
    pipeline = D3PMPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.unet.to(memory_format=torch.channels_last)
    return pipeline


def evaluate(options: argparse.Namespace) -> None:
    pipeline = load_pipeline(options.checkpoint)
    images = torch.from_numpy(load_images(options.data, options.split)).long()

    def report(name: str, nats: torch.Tensor) -> None:
        error = nats.double().std() / len(nats) ** 0.5
        print(f"{name:>30} {len(nats):7} {nats.double().mean():9.2f} ± {error:.2f}", flush=True)

    print(f"{'':>30} {'images':>7} {'nats per image':>16}")
    bound = evaluate_bound(
        pipeline.scheduler,
        pipeline.denoiser,
        images[: options.num_images].split(100),
        continuous_time=True,
        num_eval_timesteps=options.num_terms,
        seed=options.seed,
    )
    report("bound, infinitely many steps", bound.nats_per_example)
    for order in options.orders if options.num_ordered else []:
        batches = images[: options.num_ordered].split(50)
        result = evaluate_likelihood(pipeline, batches, order=order, seed=options.seed)
        report("random order (estimate)" if order == "random" else f"{order} (exact)", result.nats_per_example)


def make_picture(options: argparse.Namespace) -> None:
    """Four rows: samples; test images; their upper halves; completions of these."""
    pipeline = load_pipeline(options.checkpoint)
    generator = torch.Generator().manual_seed(options.seed)
    settings = {"num_inference_steps": 200, "generator": generator, "output_type": "latent"}
    real = torch.from_numpy(load_images(options.data, "test")[:16]).long()
    mask_image = torch.zeros(SIDE, SIDE)
    mask_image[SIDE // 2 :] = 1  # white is what is repainted
    samples = pipeline(batch_size=16, **settings).images
    completed = pipeline(image=real.float() / 2, mask_image=mask_image, **settings).images
    halves = torch.where(mask_image.bool(), torch.tensor(MASK), real)
    rows = torch.cat([samples, real, halves, completed])
    make_image_grid(enlarge(pipeline.decode(rows)), rows=4, cols=16).save(options.output)
    print(options.output)


def main():
    options = parser.parse_args()
    run = {"train": train_network, "evaluate": evaluate, "picture": make_picture}[options.command]
    run(options)


if __name__ == "__main__":
    run_script(main)
