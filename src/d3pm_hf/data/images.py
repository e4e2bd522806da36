# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Images as states: CIFAR-10, and the user's own."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm.auto import tqdm

from ..utils.checks import check_int, check_path, check_str
from ..visualization.pictures import flatten_picture
from .memory import Rows
from .sources import choose_column, choose_split, load_splits


def load_cifar10(
    split: str = "train",
    dataset_name: str = "uoft-cs/cifar10",
    dataset_path: str | Path | None = None,
    random_flip: bool = True,
    resolution: int = 32,
    cache_dir: str | None = None,
) -> Rows:
    """A split of CIFAR-10, `"train"` (50,000) or `"test"` (10,000): images `[3, 32, 32]` of 256 levels.

    Args:
        split (`str`): `"train"` or `"test"`.
        dataset_name (`str`): of the Hub.
        dataset_path (`str`, *optional*): in place of the Hub, a folder of this machine, as for [`load_images`].
        random_flip (`bool`, defaults to `True`): as the paper trains; evaluation reads images as they are.
        resolution (`int`, defaults to 32): smaller for quick experiments.
        cache_dir (`str`, *optional*): where downloads are kept.
    """
    check_int("resolution", resolution, 1)
    check_path(*("dataset_name", dataset_name) if dataset_path is None else ("dataset_path", dataset_path))
    name = dataset_name if dataset_path is None else dataset_path
    return load_images(name, split, resolution, random_flip=random_flip, cache_dir=cache_dir)


def load_images(
    path_or_name: str | Path,
    split: str = "train",
    resolution: int | None = None,
    num_levels: int = 256,
    random_flip: bool = False,
    grayscale: bool = False,
    cache_dir: str | None = None,
) -> Rows:
    """Images as states `[C, H, W]`, level 0 for black and `num_levels - 1` for white.

    Images may have 8 or 16 bits per channel. Transparent pixels are composited over white, and EXIF orientation is
    applied; 32-bit and floating-point pixels are refused.

    Args:
        path_or_name (`str`): a folder of images (with the folders `train`, `validation`, `test` in it, or all for
            `"train"`), a local copy of a data set of the Hub, or its name there. The column is `image` or `img`.
        split (`str`, defaults to `"train"`): which part of it.
        resolution (`int`, *optional*): scales the shorter side of each image to this, and keeps the square in the
            middle. Without it, all images must have one size.
        num_levels (`int`, defaults to 256): to how many levels each channel is rounded.
        random_flip (`bool`, defaults to `False`): mirror half of the images in training.
        grayscale (`bool`, defaults to `False`): one channel in place of red, green and blue.
        cache_dir (`str`, *optional*): where downloads are kept.
    """
    check_path("path_or_name", path_or_name)
    check_str("split", split)
    check_int("num_levels", num_levels, 2, 256)
    if resolution is not None:
        check_int("resolution", resolution, 1)
    dataset = choose_split(load_splits(str(path_or_name), cache_dir), split, str(path_or_name))
    column = choose_column(dataset, ("image", "img"), str(path_or_name))
    from datasets import Image as ImageFeature  # it is installed: `load_splits` has checked

    kind = dataset.features[column]
    if not isinstance(kind, ImageFeature):
        raise ValueError(f"the column {column!r} of {path_or_name} holds {kind}, not images: pass another data set")
    dataset, images = dataset.select_columns(column).cast_column(column, ImageFeature(decode=False)), None
    levels = np.round(np.arange(256) * (num_levels - 1) / 255).astype(np.uint8)
    for i in tqdm(range(len(dataset)), desc="reading images", delay=2, leave=False):
        encoded = dataset[i][column]  # {"path", "bytes"}
        name = f"image {i} of {path_or_name} ({encoded['path'] or 'stored without a file name'})"
        try:
            pixels = to_pixels(ImageFeature().decode_example(encoded), resolution, grayscale)  # [C, H, W]
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise OSError(f"{name} cannot be read ({error}): replace the file or remove it") from error
        if images is None:
            images = np.empty((len(dataset), *pixels.shape), dtype=np.uint8)
        if pixels.shape != images.shape[1:]:
            raise ValueError(
                f"{name} is {size_of(pixels)} and the first image is {size_of(images[0])}: pass `resolution` to have all "
                "images scaled and cropped to one size"
            )
        images[i] = levels[pixels]
    if images is None:
        raise ValueError(f"the {split} split of {path_or_name} is empty: pass one with images in it")
    return Rows(images, num_levels, random_flip)


def to_pixels(image, resolution: int | None, grayscale: bool) -> np.ndarray:
    """The pixels of a PIL image, `[C, H, W]`, uint8."""
    image = flatten_picture(image, "L" if grayscale else "RGB")
    if resolution is not None and image.size != (resolution, resolution):
        image = ImageOps.fit(image, (resolution, resolution))
    pixels = np.asarray(image)
    return pixels[None] if grayscale else pixels.transpose(2, 0, 1)


def size_of(pixels: np.ndarray) -> str:
    return f"{pixels.shape[-1]} x {pixels.shape[-2]}"
