# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What stands in the fields of the page before a visitor writes anything, for any checkpoint."""

import torch
from PIL import Image, ImageDraw

from .actions import GAP_SIGN
from .checkpoints import Checkpoint
from .pictures import enlarge_to


SENTENCE = "the value of the argument is returned as a string"
HIDDEN = "argument"
NUM_STEPS = 20
# Size in pixels to which small pictures are enlarged to be painted on.
CANVAS_SIDE = 320


def example_steps(checkpoint: Checkpoint) -> int:
    """A number of steps that is soon done."""
    return checkpoint.num_timesteps if checkpoint.takes_all_steps else min(NUM_STEPS, checkpoint.num_timesteps)


def example_text(checkpoint: Checkpoint) -> tuple[str, str]:
    """A text for a model of text, and the same with gaps: a sentence, or a sample where its tokenizer does not know it."""
    pipeline = checkpoint.pipeline
    if pipeline.tokenizer is None:
        return "", ""
    try:
        if pipeline.tokenizer.unk_token_id not in pipeline.tokenize(SENTENCE)[0]:
            return SENTENCE, SENTENCE.replace(HIDDEN, GAP_SIGN * len(pipeline.tokenizer.tokenize(HIDDEN)))
    except ValueError:
        pass
    text = draw_example(checkpoint).texts[0].strip()
    third = len(text) // 3
    return text, text[:third] + GAP_SIGN * third + text[2 * third :]


def example_picture(checkpoint: Checkpoint) -> Image.Image:
    """A picture drawn from a model of images, enlarged."""
    return enlarge_to(draw_example(checkpoint).images[0], CANVAS_SIDE)


def draw_example(checkpoint: Checkpoint):
    """The output of a call for one sample."""
    return checkpoint.pipeline(
        num_inference_steps=example_steps(checkpoint), generator=torch.Generator().manual_seed(3)
    )


def noise_picture() -> Image.Image:
    """A picture with edges, colors and a gradient, to add noise to."""
    side = 56
    picture = Image.new("RGB", (side, side))
    for x in range(side):
        for y in range(side):
            sky = (250 - 3 * y, 150 + y, 130 + 2 * y)
            picture.putpixel((x, y), (40 + x, 60 + y // 2, 110) if y > 34 + (x % 28) // 4 else sky)
    draw = ImageDraw.Draw(picture)
    draw.ellipse((8, 6, 26, 24), fill=(255, 236, 150))
    draw.polygon([(22, 46), (36, 16), (52, 46)], fill=(52, 62, 98))
    draw.polygon([(36, 16), (31, 27), (36, 24), (41, 27)], fill=(245, 247, 252))
    return enlarge_to(picture, CANVAS_SIDE)
