# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Grids of generated images, with small images enlarged."""

from diffusers.utils import make_image_grid
from PIL import Image, ImageOps


# Size in pixels that small images are enlarged to, and width of the frame around them.
PICTURE_SIZE = 128
FRAME = 6


def enlarge(images: list[Image.Image]) -> list[Image.Image]:
    """Enlarges small images by a whole factor, and adds a gray frame."""
    factor = max(1, PICTURE_SIZE // max(images[0].size))
    gray = (128,) * len(images[0].getbands())
    return [
        ImageOps.expand(
            image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST), FRAME, gray
        )
        for image in images
    ]


def image_grid(images: list[Image.Image]) -> Image.Image:
    """Arranges images, enlarged, in a grid that is about square."""
    rows = next(n for n in range(int(len(images) ** 0.5), 0, -1) if len(images) % n == 0)
    return make_image_grid(enlarge(images), rows=rows, cols=len(images) // rows)
