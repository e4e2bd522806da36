# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Handwritten digits of a chosen class, 28 x 28 pixels of 16 gray levels, and a classifier that reads the samples.

    python examples/mnist.py train --data mnist/ --output_dir outputs/mnist
    python examples/mnist.py evaluate --data mnist/
    python examples/mnist.py picture --data mnist/ --output mnist.png

The data are the four files of MNIST (`train-images-idx3-ubyte`, ...) in a folder, as they are or with the ending .gz. The last 5,000
images of the training part are kept for validation. The process is the discretized Gaussian, the network predicts a logistic
distribution of each pixel, and one class in ten is left out in training, so that samples can be guided.
docs/source/en/mnist.md has the results.
"""

import argparse
from pathlib import Path


CHECKPOINT = str(Path(__file__).resolve().parent / "checkpoints" / "mnist")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("command", choices=["train", "evaluate", "picture"], help="What to do.")
parser.add_argument("--data", required=True, help="Folder with the four files of MNIST.")
parser.add_argument("--checkpoint", default=CHECKPOINT, help="Folder of the checkpoint to evaluate or to draw with.")
parser.add_argument("--seed", type=int, default=0, help="Seed of weights, noise and samples.")
parser.add_argument("--num_per_class", type=int, default=100, help="evaluate: number of samples of each class.")
parser.add_argument("--num_inference_steps", type=int, default=50, help="evaluate, picture: number of steps.")
parser.add_argument(
    "--guidance_scales", type=float, nargs="+", default=[1.0, 1.5, 2.0], help="evaluate: guidance scales to compare."
)
parser.add_argument("--guidance_scale", type=float, default=1.5, help="picture: guidance scale.")
parser.add_argument("--num_images", type=int, default=1000, help="evaluate: number of test images of the bound.")
parser.add_argument("--output", default="mnist.png", help="picture: file to write.")
parser.add_argument("--output_dir", default="outputs/mnist", help="train: folder of the run.")
parser.add_argument("--resume_from_checkpoint", help="train: checkpoint folder to resume from, or `latest`.")
parser.add_argument("--max_train_steps", type=int, default=7000, help="train: number of steps.")
parser.add_argument("--train_batch_size", type=int, default=32, help="train: number of images of a step.")
parser.add_argument("--learning_rate", type=float, default=1e-3, help="train: peak learning rate.")
parser.add_argument("--mixed_precision", default="bf16", choices=["no", "bf16"], help="train: dtype of the products.")
if __name__ == "__main__":
    parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import gzip

import numpy as np
import torch
import torch.nn.functional as F
from binarized_mnist import SIDE, UNET, load_pipeline
from diffusers.utils import make_image_grid
from torch import nn
from tqdm.auto import tqdm

from d3pm_hf import D3PMImagePipeline, D3PMScheduler, create_unet, evaluate_bound
from d3pm_hf.data import Rows, unigram_probs
from d3pm_hf.evaluation import image_scores
from d3pm_hf.training import D3PMTrainingArguments, train
from d3pm_hf.utils.scripts import run_script
from d3pm_hf.visualization.grids import enlarge


NUM_LEVELS, NUM_DIGITS = 16, 10
NUM_VALID = 5000
# The file names of a split, and its images in them.
SPLITS = {
    "train": ("train", slice(-NUM_VALID)),
    "valid": ("train", slice(-NUM_VALID, None)),
    "test": ("t10k", slice(None)),
}


def read_idx(folder: str, name: str) -> np.ndarray:
    """An array of bytes in the format of MNIST: a header with the shape, then the values."""
    path = Path(folder) / name
    if path.exists():
        data = path.read_bytes()
    elif path.with_name(f"{name}.gz").exists():
        data = gzip.decompress(path.with_name(f"{name}.gz").read_bytes())
    else:
        raise FileNotFoundError(f"{path} is missing: pass --data, a folder with the four files of MNIST")
    num_axes = data[3]
    shape = np.frombuffer(data, ">i4", num_axes, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * num_axes).reshape(shape)


def load_digits(folder: str, split: str) -> Rows:
    """The images of a split, `[n, 1, 28, 28]` in 16 levels, each with its class."""
    name, part = SPLITS[split]
    images = read_idx(folder, f"{name}-images-idx3-ubyte")[part, None] // (256 // NUM_LEVELS)
    labels = read_idx(folder, f"{name}-labels-idx1-ubyte")[part].astype(int)
    return Rows(images, NUM_LEVELS, labels=labels)


def create_pipeline(train_digits: Rows) -> D3PMImagePipeline:
    """A U-Net with an embedding for each digit, and a Gaussian process."""
    unet = create_unet("paper", NUM_LEVELS, SIDE, 1, "logistic", num_class_labels=NUM_DIGITS, **UNET)
    unet.to(memory_format=torch.channels_last)  # convolutions of a CPU are faster
    scheduler = D3PMScheduler(
        NUM_LEVELS,
        num_train_timesteps=400,
        transition="gaussian",
        beta_schedule="mutual_information",
        prediction_type="logistic",
        unigram_probs=unigram_probs(Rows(train_digits.tokens, NUM_LEVELS)),
    )
    return D3PMImagePipeline(unet, scheduler, num_class_labels=NUM_DIGITS)


def train_network(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    settings = D3PMTrainingArguments(
        output_dir=options.output_dir,
        overwrite_output_dir=options.resume_from_checkpoint is None,
        resume_from_checkpoint=options.resume_from_checkpoint,
        seed=options.seed,
        max_train_steps=options.max_train_steps,
        train_batch_size=options.train_batch_size,
        hybrid_coeff=0.001,
        condition_dropout=0.1,  # guidance needs predictions without a class, too
        learning_rate=options.learning_rate,
        lr_scheduler="cosine",
        lr_warmup_steps=min(200, options.max_train_steps // 10),
        ema_max_decay=0.999,
        mixed_precision=options.mixed_precision,
        logging_steps=50,
        checkpointing_steps=250,
        checkpoints_total_limit=2,
        validation_steps=2000,
        max_eval_samples=200,
        num_eval_timesteps=20,
        num_samples=0,
    )
    train_digits, valid_digits = (load_digits(options.data, split) for split in ("train", "valid"))
    train(settings, create_pipeline(train_digits), train_digits, valid_digits, {"dataset_name": "MNIST"})


class Reader(nn.Module):
    """A small convolutional classifier of digits. Its features measure the distance of samples from data."""

    num_features = 64

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2, 2), nn.ReLU(), nn.Flatten(),
            nn.Linear(32 * 7 * 7, self.num_features), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(self.num_features, NUM_DIGITS)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Features `[n, 64]` of images `[n, C, 28, 28]` in [0, 1]."""
        return self.body(images[:, :1] - 0.5)

    def class_logits(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self(images))


def to_pixels(states: np.ndarray) -> torch.Tensor:
    """Images in [0, 1] of states `[n, 1, 28, 28]`."""
    return torch.from_numpy(states).float() / (NUM_LEVELS - 1)


def train_reader(digits: Rows, num_epochs: int = 4, batch_size: int = 64) -> Reader:
    """A classifier that is trained on the images of the training part, shifted by up to two pixels."""
    torch.manual_seed(0)
    reader, labels = Reader(), torch.as_tensor(digits.labels)
    steps = num_epochs * len(labels) // batch_size
    optimizer = torch.optim.AdamW(reader.parameters(), 2e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    order = torch.cat([torch.randperm(len(labels)) for _ in range(num_epochs)])
    for chosen in tqdm(order[: steps * batch_size].split(batch_size), desc="training the classifier"):
        shift = tuple(torch.randint(-2, 3, (2,)).tolist())
        images = to_pixels(digits.tokens[chosen.numpy()]).roll(shift, (2, 3))  # the border is black
        loss = F.cross_entropy(reader.class_logits(images), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return reader.eval()


@torch.no_grad()
def read(reader: Reader, states: np.ndarray) -> np.ndarray:
    """The digits that a classifier reads, `[n]`."""
    return torch.cat([reader.class_logits(part).argmax(1) for part in to_pixels(states).split(500)]).numpy()


def draw(pipeline: D3PMImagePipeline, num_per_class: int, seed: int, **arguments) -> np.ndarray:
    """States `[10 * n, 1, 28, 28]`: n digits of class 0, then n of class 1, ..."""
    generator = torch.Generator().manual_seed(seed)
    rounds = []
    for start in tqdm(range(0, num_per_class, 10), desc="drawing"):
        output = pipeline(
            class_labels=list(range(NUM_DIGITS)),
            num_images_per_prompt=min(10, num_per_class - start),
            generator=generator,
            output_type="latent",
            **arguments,
        )
        rounds.append(output.images.view(NUM_DIGITS, -1, 1, SIDE, SIDE))
    return torch.cat(rounds, 1).flatten(0, 1).numpy()


def evaluate(options: argparse.Namespace) -> None:
    """Prints the bound, then FID* and the share of samples that are read as their class, by guidance scale."""
    pipeline = load_pipeline(options.checkpoint)
    train_digits, valid, test = (load_digits(options.data, split) for split in SPLITS)
    order = np.random.default_rng(options.seed).permutation(len(test))[: options.num_images]
    batches = [
        {
            "x_0": torch.from_numpy(test.tokens[part]).long(),
            "condition": {"class_labels": torch.from_numpy(test.labels[part])},
        }
        for part in np.split(order, range(50, len(order), 50))
    ]
    bound = evaluate_bound(pipeline.scheduler, pipeline.denoiser, batches, num_eval_timesteps=20, seed=options.seed)
    print(f"bound given the class: {bound}")

    reader = train_reader(train_digits)
    accuracy = (read(reader, test.tokens) == test.labels).mean()
    print(f"the classifier reads {accuracy:.2%} of {len(test)} test images; {options.num_inference_steps} steps:")
    print(f"{'guidance_scale':>14} {'FID*':>6} {'read':>6} " + " ".join(f"{digit:>5}" for digit in range(NUM_DIGITS)))

    def report(name: str, states: np.ndarray) -> None:
        right = (read(reader, states).reshape(NUM_DIGITS, -1) == np.arange(NUM_DIGITS)[:, None]).mean(1)
        with torch.no_grad():
            fid = image_scores(to_pixels(states), to_pixels(test.tokens), reader)["fid"]
        print(f"{name:>14} {fid:6.2f} {right.mean():6.1%} " + " ".join(f"{share:5.0%}" for share in right), flush=True)

    count = min(options.num_per_class, np.bincount(valid.labels).min())
    of_class = [np.flatnonzero(valid.labels == digit)[:count] for digit in range(NUM_DIGITS)]
    report("(real)", valid.tokens[np.concatenate(of_class)])
    for scale in options.guidance_scales:
        settings = {"guidance_scale": scale, "num_inference_steps": options.num_inference_steps}
        report(f"{scale:g}", draw(pipeline, options.num_per_class, options.seed, **settings))
    print(
        f"FID*: {Reader.num_features} features of the classifier, {len(test)} test images; (real): validation images"
    )


def make_picture(options: argparse.Namespace) -> None:
    """Four samples of each class, then test images, their upper halves and completions of them."""
    pipeline, test = load_pipeline(options.checkpoint), load_digits(options.data, "test")
    settings = {"num_inference_steps": options.num_inference_steps, "guidance_scale": options.guidance_scale}
    samples = torch.from_numpy(draw(pipeline, 4, options.seed, **settings)).view(NUM_DIGITS, 4, 1, SIDE, SIDE)
    samples = torch.cat([*samples.transpose(0, 1)])  # [40, ...], a row has one digit of each class
    chosen = [int(np.flatnonzero(test.labels == digit)[0]) for digit in range(NUM_DIGITS)]
    real = torch.from_numpy(test.tokens[chosen]).long()
    mask_image = torch.zeros(SIDE, SIDE)
    mask_image[SIDE // 2 :] = 1  # white is what is repainted
    completed = pipeline(
        image=real.float() / (NUM_LEVELS - 1),
        mask_image=mask_image,
        class_labels=list(range(NUM_DIGITS)),
        generator=torch.Generator().manual_seed(options.seed),
        output_type="latent",
        **settings,
    ).images
    halves = torch.where(mask_image.bool(), torch.tensor(NUM_LEVELS // 2), real)
    rows = torch.cat([samples, real, halves, completed])
    make_image_grid(enlarge(pipeline.decode(rows)), rows=7, cols=NUM_DIGITS).save(options.output)
    print(options.output)


def main():
    options = parser.parse_args()
    run = {"train": train_network, "evaluate": evaluate, "picture": make_picture}[options.command]
    run(options)


if __name__ == "__main__":
    run_script(main)
