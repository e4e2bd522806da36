# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Pictures of the page: frames of images in one file, matrices in colors, and what a visitor uploads or paints."""

import base64
import io

import numpy as np
import torch
from PIL import Image, ImageOps

from ..data.image_modes import flatten_picture


# Colors of the probabilities of a matrix from 0 to 1, dark to light, with equal steps between them.
COLORS = ((13, 8, 35), (62, 31, 102), (124, 47, 107), (186, 66, 84), (236, 113, 55), (250, 180, 70), (252, 246, 189))
# Size in pixels to which the images of a grid are enlarged by a whole factor, and width of the line between them.
CELL, LINE = 64, 4
# Probabilities below this are dark.
SMALLEST = 1e-3


def to_address(picture: Image.Image) -> str:
    """A picture as an address that holds it, for a style or an `<img>`."""
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=picture.width * picture.height < 100_000)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def small_grid(images: list[Image.Image]) -> Image.Image:
    """Arranges images in rows of four or five with lines between them."""
    images = [enlarge_to(image, CELL) for image in images]
    columns = min(len(images), 4 if len(images) % 4 == 0 or len(images) % 5 else 5)
    rows = -(-len(images) // columns)
    width, height = images[0].size
    size = columns * (width + LINE) - LINE, rows * (height + LINE) - LINE
    grid = Image.new("RGB", size, (128, 128, 160))
    for i, image in enumerate(images):
        grid.paste(image.convert("RGB"), (i % columns * (width + LINE), i // columns * (height + LINE)))
    return grid


def stack(frames: list[Image.Image]) -> Image.Image:
    """Pictures of one size below each other."""
    width, height = frames[0].size
    whole = Image.new("RGB", (width, height * len(frames)))
    for i, frame in enumerate(frames):
        whole.paste(frame, (0, i * height))
    return whole


def matrix_picture(matrix: torch.Tensor) -> Image.Image:
    """Probabilities `[K, K]` as colors, one pixel each: on a logarithmic scale from 1/1000 to 1."""
    levels = 1 - torch.log10(matrix.double().clamp(SMALLEST, 1)) / np.log10(SMALLEST)  # 0 .. 1
    places = levels.numpy() * (len(COLORS) - 1)
    below = np.clip(places.astype(int), 0, len(COLORS) - 2)
    share, colors = (places - below)[..., None], np.array(COLORS, dtype=float)
    mixed = (1 - share) * colors[below] + share * colors[below + 1]
    return Image.fromarray(mixed.round().astype(np.uint8))


def fit_picture(picture: Image.Image, shape: tuple[int, ...]) -> Image.Image:
    """A picture upright and opaque, cropped and scaled to the shape (C, H, W) of the images of a model."""
    channels, height, width = shape
    if channels not in (1, 3):
        raise ValueError(
            f"the images of this model have {channels} channels, and a picture has 1 or 3: choose another model"
        )
    flat = flatten_picture(picture, "L" if channels == 1 else "RGB")
    return ImageOps.fit(flat, (width, height), Image.Resampling.BOX)


def fit_within(picture: Image.Image, side: int) -> Image.Image:
    """A picture upright, opaque and in color, scaled down to fit a square."""
    flat = flatten_picture(picture, "RGB")
    flat.thumbnail((side, side), Image.Resampling.BOX)
    return flat


def enlarge_to(picture: Image.Image, side: int) -> Image.Image:
    """A small picture enlarged by a whole factor, to paint on."""
    factor = max(1, side // max(picture.size))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def painted_mask(painted: Image.Image, shape: tuple[int, ...]) -> Image.Image:
    """The mask of a layer of paint for images of shape (C, H, W): white where at least a quarter of a pixel is painted."""
    _, height, width = shape
    alpha = painted.convert("RGBA").getchannel("A")
    alpha = ImageOps.fit(alpha, (width, height), Image.Resampling.BOX)
    return alpha.point([255 * (level >= 64) for level in range(256)])


def to_levels(picture: Image.Image, num_levels: int) -> torch.Tensor:
    """The pixels of a picture as states `[C, H, W]` of `num_levels` levels."""
    pixels = torch.from_numpy(np.asarray(picture.convert("RGB"), dtype=np.float32))
    return (pixels / 255 * (num_levels - 1)).round().long().permute(2, 0, 1)


def from_levels(states: torch.Tensor, num_levels: int) -> Image.Image:
    """The picture of states `[C, H, W]`."""
    pixels = (states.permute(1, 2, 0) * 255 / (num_levels - 1)).round().to(torch.uint8)
    return Image.fromarray(pixels.numpy())
