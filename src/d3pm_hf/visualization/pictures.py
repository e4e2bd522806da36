# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Grids of generated images, with small images enlarged."""

from diffusers.utils import make_image_grid
from PIL import Image, ImageOps


# A picture is enlarged to about this many pixels, and framed by some more.
PICTURE_SIZE = 128
FRAME = 6


def enlarge(images: list[Image.Image]) -> list[Image.Image]:
    """Images with each pixel as a square, if they are small, in a grey frame."""
    factor = max(1, PICTURE_SIZE // max(images[0].size))
    grey = (128,) * len(images[0].getbands())
    return [
        ImageOps.expand(
            image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST), FRAME, grey
        )
        for image in images
    ]


def image_grid(images: list[Image.Image]) -> Image.Image:
    """All images in one picture, enlarged, in about as many rows as columns."""
    rows = next(n for n in range(int(len(images) ** 0.5), 0, -1) if len(images) % n == 0)
    return make_image_grid(enlarge(images), rows=rows, cols=len(images) // rows)
