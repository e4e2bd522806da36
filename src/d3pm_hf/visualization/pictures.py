# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Pictures of any kind read as 8-bit levels, and small ones made large enough to look at."""

import numpy as np
from diffusers.utils import make_image_grid
from PIL import Image, ImageOps


# A picture is enlarged to about this many pixels, and framed by some more.
PICTURE_SIZE = 128
FRAME = 6
# Formats whose pictures of mode "I" have 16 bits per pixel; elsewhere the range of that mode is unknown.
SIXTEEN_BIT_FORMATS = ("PNG", "PPM")


def flatten_picture(image: Image.Image, mode: str) -> Image.Image:
    """The picture upright and opaque, with 8 bits per channel.

    EXIF orientation is applied, 16-bit levels v become round(v / 257), and transparent pixels are composited over white:
    alpha * color + (1 - alpha) * white.

    Args:
        image (`PIL.Image.Image`): A picture of any mode with a known range: `"F"` and 32-bit `"I"` are refused.
        mode (`str`): `"L"` for one channel, `"RGB"` for three.
    """
    has_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in SIXTEEN_BIT_FORMATS)
    if image.mode in ("I", "F") and not has_16_bits:
        raise ValueError(
            f"the picture has 32-bit pixels (mode {image.mode!r}), whose range is unknown: convert it to 8 or 16 bits "
            "per channel"
        )
    transparent = image.info.get("transparency")  # the color that stands for transparency, in some pictures
    if image.mode == "RGB" and transparent is not None and max(transparent) > 255:
        raise ValueError(
            f"the picture has 16 bits per channel and a transparent color, {transparent}, which Pillow cannot match: "
            "convert it to 8 bits per channel, or give it an alpha channel"
        )
    image = ImageOps.exif_transpose(image)
    if has_16_bits:
        levels = np.asarray(image)  # [H, W]
        image = Image.fromarray(np.round(levels / 257).astype(np.uint8))
        if transparent is not None:
            image.putalpha(Image.fromarray(np.where(levels == transparent, 0, 255).astype(np.uint8)))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def flatten_pictures(images, num_channels: int):
    """PIL pictures, one or a list, as [`flatten_picture`] has them; anything else, such as an array, as it is."""
    mode = {1: "L", 3: "RGB"}.get(num_channels)
    if isinstance(images, (list, tuple)):
        return [flatten_pictures(image, num_channels) for image in images]
    return flatten_picture(images, mode) if mode and isinstance(images, Image.Image) else images


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
