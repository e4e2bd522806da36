# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Image data sets: CIFAR-10, and your own images."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm.auto import tqdm

from ..utils.checks import check_int, check_path, check_str
from .image_modes import flatten_picture
from .rows import Rows
from .sources import choose_column, choose_split, load_splits


def load_cifar10(
    split: str = "train",
    dataset_name: str = "uoft-cs/cifar10",
    dataset_path: str | Path | None = None,
    random_flip: bool = True,
    resolution: int = 32,
    cache_dir: str | None = None,
    label_column: str | None = None,
) -> Rows:
    """Loads a split of CIFAR-10, with 50,000 training and 10,000 test images of shape `[3, 32, 32]` and 256 levels.

    Args:
        split (`str`, defaults to `"train"`): `"train"` or `"test"`.
        dataset_name (`str`, defaults to `"uoft-cs/cifar10"`): Id of the data set on the Hub.
        dataset_path (`str`, *optional*): Local folder to read in place of the Hub, as for [`load_images`].
        random_flip (`bool`, defaults to `True`): Whether to mirror half of the images in training, as the paper does.
        resolution (`int`, defaults to 32): Height and width of the images. Smaller ones are for quick experiments.
        cache_dir (`str`, *optional*): Folder for downloads.
        label_column (`str`, *optional*): Column of the class, `"label"` on the Hub, to be loaded with the images.
    """
    check_int("resolution", resolution, 1)
    check_path(*("dataset_name", dataset_name) if dataset_path is None else ("dataset_path", dataset_path))
    name = dataset_name if dataset_path is None else dataset_path
    return load_images(
        name, split, resolution, random_flip=random_flip, cache_dir=cache_dir, label_column=label_column
    )


def load_images(
    path_or_name: str | Path,
    split: str = "train",
    resolution: int | None = None,
    num_levels: int = 256,
    random_flip: bool = False,
    grayscale: bool = False,
    cache_dir: str | None = None,
    label_column: str | None = None,
) -> Rows:
    """Loads images as states of shape `[C, H, W]`, where level 0 is black and `num_levels - 1` is white.

    Images may have 8 or 16 bits per channel. Transparent pixels are composited over white, and EXIF orientation is
    applied. Images with 32-bit or floating-point pixels raise an error, because their range is unknown.

    Args:
        path_or_name (`str`): A folder of images (with subfolders `train`, `validation` and `test`; without them, all images
            are the `"train"` split), a local copy of a data set of the Hub, or its id. The column is `image` or `img`.
        split (`str`, defaults to `"train"`): Split to load.
        resolution (`int`, *optional*): Scales the shorter side of each image to this size and crops the square in the
            middle. Without it, all images must have the same size.
        num_levels (`int`, defaults to 256): Number of levels per channel.
        random_flip (`bool`, defaults to `False`): Whether to mirror half of the images in training.
        grayscale (`bool`, defaults to `False`): Whether to load one channel instead of red, green and blue.
        cache_dir (`str`, *optional*): Folder for downloads.
        label_column (`str`, *optional*): Column of the class of an image, to be loaded with it. Of a folder with one folder of
            images per class it is `"label"`.
    """
    check_path("path_or_name", path_or_name)
    check_str("split", split)
    check_int("num_levels", num_levels, 2, 256)
    if resolution is not None:
        check_int("resolution", resolution, 1)
    dataset = choose_split(load_splits(str(path_or_name), cache_dir), split, str(path_or_name))
    column = choose_column(dataset, ("image", "img"), str(path_or_name))
    from datasets import Image as ImageFeature  # it is installed: `load_splits` has checked

    labels = None
    if label_column is not None:
        check_str("label_column", label_column)
        labels = np.asarray(dataset[choose_column(dataset, (label_column,), str(path_or_name))][:])
    kind = dataset.features[column]
    if not isinstance(kind, ImageFeature):
        raise ValueError(
            f"the column {column!r} of {path_or_name} has the type {kind}, not images: pass another data set"
        )
    dataset, images = dataset.select_columns(column).cast_column(column, ImageFeature(decode=False)), None
    levels = np.round(np.arange(256) * (num_levels - 1) / 255).astype(np.uint8)
    for i in tqdm(range(len(dataset)), desc="reading images", delay=2, leave=False):
        encoded = dataset[i][column]  # {"path", "bytes"}
        if encoded is None:
            raise ValueError(f"image {i} of {path_or_name} is missing: remove its row from the data set")
        name = f"image {i} of {path_or_name} ({encoded['path'] or 'stored without a file name'})"
        try:
            pixels = to_pixels(ImageFeature().decode_example(encoded), resolution, grayscale)  # [C, H, W]
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise OSError(f"{name} cannot be read ({error}): replace the file or remove it") from error
        if images is None:
            images = np.empty((len(dataset), *pixels.shape), dtype=np.uint8)
        if pixels.shape != images.shape[1:]:
            raise ValueError(
                f"{name} is {pixels.shape[2]} x {pixels.shape[1]} and the first image is {images.shape[3]} x {images.shape[2]}: pass `resolution` to scale and "
                "crop all images to one size"
            )
        images[i] = levels[pixels]
    if images is None:
        raise ValueError(f"the {split} split of {path_or_name} is empty: pass one with images in it")
    return Rows(images, num_levels, random_flip, labels=labels)


def to_pixels(image, resolution: int | None, grayscale: bool) -> np.ndarray:
    """Returns the pixels of a PIL image, `[C, H, W]`, uint8."""
    image = flatten_picture(image, "L" if grayscale else "RGB")
    if resolution is not None and image.size != (resolution, resolution):
        image = ImageOps.fit(image, (resolution, resolution))
    pixels = np.asarray(image)
    return pixels[None] if grayscale else pixels.transpose(2, 0, 1)
