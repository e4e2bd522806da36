# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Compares the samplers of an image model side by side: network calls, seconds, the bound of the timesteps, and FID*.

    python examples/optimal_timesteps.py --dataset photos --num_examples 64 --output_dir outputs/photos
    python examples/image_samplers.py outputs/photos --dataset photos

The checkpoint is one of `optimal_timesteps.py`, which has chosen timesteps for some numbers of steps. Evenly spaced timesteps,
chosen ones and correctors draw batches in turns. FID* is the Frechet distance to the training images in the features of a small
classifier of the digits, which is trained first, or in the pixels of the photographs. Scores of different data, features or numbers
of samples cannot be compared; the last row has the real test images.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint", type=Path, help="Folder of a checkpoint of `optimal_timesteps.py`.")
parser.add_argument("--dataset", default="digits", choices=("digits", "photos"), help="Its data set.")
parser.add_argument("--steps", type=int, nargs="+", default=[1000, 100, 20, 10, 5], help="Numbers of steps.")
parser.add_argument("--num_corrected_steps", type=int, default=10, help="Number of steps with a corrector.")
parser.add_argument("--turns", type=int, default=2, help="Number of batches of each sampler.")
parser.add_argument("--batch_size", type=int, default=256, help="Number of samples of a batch.")
parser.add_argument("--max_eval_samples", type=int, default=256, help="Number of test images of the bound.")
parser.add_argument(
    "--num_classifier_steps", type=int, default=600, help="Number of training steps of the classifier of digits."
)
if __name__ == "__main__":
    parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import torch
import torch.nn.functional as F
from optimal_timesteps import photo_patches
from torch import nn
from tqdm.auto import tqdm

from d3pm_hf import D3PMImagePipeline, D3PMPipeline, evaluate_bound
from d3pm_hf.data import Rows, digits
from d3pm_hf.data.batches import evaluation_batches
from d3pm_hf.evaluation import image_scores
from d3pm_hf.utils.scripts import run_script
from d3pm_hf.visualization.grids import image_grid


@dataclass
class Setting:
    """A sampler with a number of steps, and what is measured of it.

    Args:
        title: Its name in the table.
        steps: Number of inference steps.
        spacing: `"even"` or `"optimized"` timesteps.
        arguments: Further arguments of the pipeline.
    """

    title: str
    steps: int
    spacing: str = "even"
    arguments: dict = field(default_factory=dict)
    batches: list[torch.Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    seconds_alone: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)


class CallCounter:
    """Counts the rows that a network reads."""

    def __init__(self, network: nn.Module):
        self.rows = 0
        network.register_forward_pre_hook(self.add)

    def add(self, network, arguments) -> None:
        self.rows += len(arguments[0])


class DigitFeatures(nn.Module):
    """The last hidden layer of a convolutional classifier of 8 x 8 digits."""

    name, num_features = "digit classifier", 64

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 16, self.num_features),
            nn.ReLU(),
        )
        self.head = nn.Linear(self.num_features, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Features `[n, 64]` of gray images `[n, C, 8, 8]` in [0, 1]."""
        return self.body(images[:, :1])

    def fit(self, dataset: Rows, num_steps: int) -> None:
        """Trains the classifier on labeled digits."""
        images, labels = to_images(dataset), torch.as_tensor(dataset.labels)
        optimizer = torch.optim.AdamW(self.parameters(), 2e-3)
        for _ in tqdm(range(num_steps), desc="training the classifier", leave=False):
            chosen = torch.randint(0, len(images), (128,))
            loss = F.cross_entropy(self.head(self(images[chosen])), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def accuracy(self, dataset: Rows) -> float:
        """The share of labeled digits that the classifier reads correctly."""
        found = self.head(self(to_images(dataset))).argmax(-1)
        return (found == torch.as_tensor(dataset.labels)).float().mean().item()


class PixelFeatures(nn.Module):
    """The pixels of gray images themselves: the Frechet distance then compares their means and covariances."""

    name, num_features = "pixels", 64

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, 0].flatten(1)


def to_images(dataset: Rows) -> torch.Tensor:
    """All images of a data set as levels in [0, 1], `[n, C, H, W]`."""
    return torch.from_numpy(dataset.tokens).float() / (dataset.num_tokens - 1)


def load_data(name: str, num_classifier_steps: int) -> tuple[Rows, Rows, nn.Module]:
    """Training images, test images, and the feature extractor."""
    if name == "photos":
        return *photo_patches(), PixelFeatures()
    labeled, labeled_test = digits(labels=True)
    features = DigitFeatures()
    features.fit(labeled, num_classifier_steps)
    print(f"The classifier reads {features.accuracy(labeled_test):.1%} of the test digits.")
    return *digits(), features.eval().requires_grad_(False)


def create_settings(pipeline: D3PMImagePipeline, numbers: list[int], num_corrected: int) -> list[Setting]:
    """Even and, where they are stored, chosen timesteps for each number, and `num_corrected` steps with each corrector."""
    settings = []
    for number in numbers:
        settings.append(Setting(f"{number} even", number))
        if pipeline.scheduler.chosen_timesteps(number) is not None:
            settings.append(Setting(f"{number} optimized", number, "optimized"))
    for corrector in ("forward_backward", "gibbs"):
        arguments = {"sampler": "predictor_corrector", "sampler_kwargs": {"corrector": corrector}}
        title = f"{num_corrected} even, {corrector.replace('_', '-')}"
        settings.append(Setting(title, num_corrected, arguments=arguments))
    return settings


def draw_all(pipeline: D3PMImagePipeline, settings: list[Setting], turns: int, batch_size: int) -> None:
    """Draws a single sample and a batch with every setting, in turns, and records what they cost."""
    counter = CallCounter(pipeline.unet)

    def draw(setting: Setting, count: int, seed: int) -> tuple[torch.Tensor, float]:
        counter.rows, begin = 0, time.perf_counter()
        states = pipeline(
            batch_size=count,
            num_inference_steps=setting.steps,
            spacing=setting.spacing,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
            **setting.arguments,
        ).images
        return states, (time.perf_counter() - begin) / count

    draw(settings[-1], 1, 0)  # the first call of a network takes longer
    for turn in range(turns):
        for setting in tqdm(settings, desc=f"turn {turn + 1}/{turns}"):
            setting.seconds_alone.append(draw(setting, 1, turn)[1])
            states, seconds = draw(setting, batch_size, turn)
            setting.batches.append(states)
            setting.seconds.append(seconds)
            setting.calls.append(counter.rows / batch_size)


def measure_bound(pipeline: D3PMImagePipeline, setting: Setting, dataset: Rows, num_examples: int) -> str:
    """The bound of the timesteps in bits per element; correctors have none."""
    if setting.arguments:
        return ""
    bound = evaluate_bound(
        *(pipeline.scheduler, pipeline.denoiser, evaluation_batches(dataset, 256, num_examples)),
        num_inference_steps=setting.steps,
        spacing=setting.spacing,
        num_eval_timesteps=min(setting.steps, 100),
        progress_bar=False,
    )
    return f"{bound.bits_per_dim:.3f} ± {bound.bits_per_dim_standard_error:.3f}"


def main():
    options = parser.parse_args()

    torch.manual_seed(0)
    train_dataset, test_dataset, features = load_data(options.dataset, options.num_classifier_steps)
    pipeline = D3PMPipeline.from_pretrained(options.checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    settings = create_settings(pipeline, options.steps, options.num_corrected_steps)
    draw_all(pipeline, settings, options.turns, options.batch_size)

    reference, levels = to_images(train_dataset), train_dataset.num_tokens - 1
    print(
        f"\nFID* of {options.turns * options.batch_size} samples, {len(reference)} training images, {features.name}\n"
    )
    print("| timesteps | network calls | seconds, alone | seconds, in a batch | bits/dim | FID* |")
    print("|" + " --- |" * 6)
    for setting in settings:
        samples = torch.cat(setting.batches)
        fid = image_scores(samples / levels, reference, features)["fid"]
        alone, together = statistics.median(setting.seconds_alone), statistics.median(setting.seconds)
        bound = measure_bound(pipeline, setting, test_dataset, options.max_eval_samples)
        cost = f"{statistics.mean(setting.calls):.0f} | {alone:.2f} | {together:.4f}"
        print(f"| {setting.title} | {cost} | {bound} | {fid:.3f} |", flush=True)
        name = setting.title.replace(", ", "_").replace(" ", "_")
        image_grid(pipeline.decode(samples[:64])).save(options.checkpoint / f"samples_{name}.png")
    fid = image_scores(to_images(test_dataset), reference, features)["fid"]
    print(f"| {len(test_dataset)} real test images |  |  |  |  | {fid:.3f} |")


if __name__ == "__main__":
    run_script(main)
