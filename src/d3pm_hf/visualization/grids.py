# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Grids of generated images, with small images enlarged, and pictures of text."""

from diffusers.utils import make_image_grid
from PIL import Image, ImageDraw, ImageFont, ImageOps


# Size in pixels that small images are enlarged to, and width of the frame around them.
PICTURE_SIZE = 128
FRAME = 6
# Characters in a line of a picture of text, and the size and the colors of the font.
LINE_LENGTH = 64
FONT_SIZE = 18
PAPER, INK, MARK = "white", "#222222", "#ffd54d"


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


def text_pictures(frames: list[list[tuple[str, bool]]]) -> list[Image.Image]:
    """Draws each frame, a list of characters and whether they are marked, in lines of equal width, all in one size."""
    font = ImageFont.load_default(FONT_SIZE)
    width, height = (round(FONT_SIZE * factor) for factor in (0.7, 1.5))  # of a cell
    num_lines = max(-(-len(characters) // LINE_LENGTH) for characters in frames)
    columns = min(LINE_LENGTH, max(map(len, frames)))
    pictures = []
    for characters in frames:
        picture = Image.new("RGB", (columns * width + 2 * FRAME, num_lines * height + 2 * FRAME), PAPER)
        draw = ImageDraw.Draw(picture)
        for i, (character, is_marked) in enumerate(characters):
            x, y = FRAME + i % LINE_LENGTH * width, FRAME + i // LINE_LENGTH * height
            if is_marked:
                draw.rectangle((x, y, x + width - 1, y + height - 1), fill=MARK)
            draw.text((x + width / 2, y + height / 2), character, fill=INK, font=font, anchor="mm")
        pictures.append(picture)
    return pictures
