# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Trains a small classifier of CIFAR-10, as a feature extractor for FID where the weights of Inception are not available.

    python examples/reproduce/train_classifier.py --dataset_path cifar10 --output_dir outputs/cifar10-resnet

The checkpoint is a ResNet of transformers with 0.3M parameters. `--feature_extractor` of `python -m d3pm_hf.evaluation` takes it, or
any image classifier of the Hub. Its scores compare models with each other, not with the literature.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from datasets import load_dataset
from tqdm.auto import tqdm
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil


SIZE = 64  # the network looks at every fourth pixel: images of 32 x 32 are enlarged
MEAN, STD = [0.5] * 3, [0.25] * 3


def read_split(path: str, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images `[n, 3, 32, 32]` in uint8, and labels `[n]`."""
    dataset = load_dataset(path, split=split)
    images = np.stack([np.asarray(image) for image in tqdm(dataset["img"], desc=f"reading {split}")])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.tensor(dataset["label"])


def to_pixels(images: torch.Tensor) -> torch.Tensor:
    pixels = (images / 255 - MEAN[0]) / STD[0]
    return F.interpolate(pixels, (SIZE, SIZE), mode="bilinear", antialias=True)


@torch.no_grad()
def measure_accuracy(model, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    right = [(model(to_pixels(x)).logits.argmax(-1) == y).sum() for x, y in zip(images.split(250), labels.split(250))]
    return (sum(right) / len(labels)).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", default="uoft-cs/cifar10", help="Id of the data set on the Hub, or folder.")
    parser.add_argument("--output_dir", default="outputs/cifar10-resnet", help="Folder for the classifier.")
    parser.add_argument("--num_train_epochs", type=int, default=4, help="Number of epochs.")
    parser.add_argument("--train_batch_size", type=int, default=128, help="Batch size.")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="Peak learning rate.")
    parser.add_argument("--seed", type=int, default=0, help="Seed for the weights and the order of the data.")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic", num_labels=10
    )
    model = ResNetForImageClassification(config)
    images, labels = read_split(options.dataset_path, "train")
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=0.05)
    steps_per_epoch = len(images) // options.train_batch_size
    decay = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.learning_rate, options.num_train_epochs * steps_per_epoch
    )
    for epoch in range(options.num_train_epochs):
        model.train()
        batches = torch.randperm(len(images))[: steps_per_epoch * options.train_batch_size]
        progress = tqdm(batches.split(options.train_batch_size), desc=f"epoch {epoch + 1}/{options.num_train_epochs}")
        for chosen in progress:
            pixels = to_pixels(images[chosen])
            flip = torch.rand(len(pixels), 1, 1, 1) < 0.5
            loss = F.cross_entropy(model(torch.where(flip, pixels.flip(-1), pixels)).logits, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
            progress.set_postfix(loss=f"{loss.item():.3f}")

    accuracy = measure_accuracy(model, *read_split(options.dataset_path, "test"))
    model.save_pretrained(options.output_dir)
    ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}, image_mean=MEAN, image_std=STD).save_pretrained(
        options.output_dir
    )
    Path(options.output_dir, "accuracy.json").write_text(json.dumps({"test_accuracy": accuracy}) + "\n")
    print(f"accuracy on the test set: {accuracy:.3f}; the classifier is in {options.output_dir}")


if __name__ == "__main__":
    main()
