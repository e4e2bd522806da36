# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""PIL images of any mode, converted to 8 bits per channel."""

import numpy as np
from PIL import Image, ImageOps


# Formats in which mode "I" means 16 bits per pixel. In other formats its range is unknown.
SIXTEEN_BIT_FORMATS = ("PNG", "PPM")


def flatten_picture(image: Image.Image, mode: str) -> Image.Image:
    """Returns a PIL image upright and opaque, with 8 bits per channel.

    EXIF orientation is applied, 16-bit levels v become round(v / 257), and transparent pixels are composited over white:
    alpha * color + (1 - alpha) * white.

    Args:
        image (`PIL.Image.Image`): An image of any mode with a known range. Modes `"F"` and 32-bit `"I"` raise an error.
        mode (`str`): `"L"` for one channel, `"RGB"` for three.
    """
    has_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in SIXTEEN_BIT_FORMATS)
    if image.mode in ("I", "F") and not has_16_bits:
        raise ValueError(
            f"the picture has 32-bit pixels (mode {image.mode!r}), whose range is unknown: convert it to 8 or 16 bits "
            "per channel"
        )
    transparent = image.info.get("transparency")  # the color that means transparency in some images
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
    """Applies [`flatten_picture`] to a PIL image or a list of them; returns anything else, such as an array, as it is."""
    mode = {1: "L", 3: "RGB"}.get(num_channels)
    if isinstance(images, (list, tuple)):
        return [flatten_pictures(image, num_channels) for image in images]
    return flatten_picture(images, mode) if mode and isinstance(images, Image.Image) else images
