# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The page before a visitor does anything, for any checkpoint: settings, a sample, and what the fields hold."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from PIL import Image, ImageDraw

from ..models.text_denoisers import num_positions
from .actions import EACH_CLASS, GAP_SIGN, NO_CLASS, Drawn, Run, Settings, enlarge_to, render_finished
from .checkpoints import Checkpoint
from .limits import START_SECONDS, Limits
from .work import TooLong, Work


logger = logging.getLogger(__name__)

SENTENCE = "the value of the argument is returned as a string"
HIDDEN = "argument"
NUM_STEPS, GRID_STEPS = 20, 100
SEED = 7
# Size in pixels to which small pictures are enlarged to be painted on.
CANVAS_SIDE = 320


def example_settings(checkpoint: Checkpoint, limits: Limits) -> Settings:
    """The settings that the page begins with."""
    most = min(limits.max_steps, checkpoint.num_timesteps)
    number = checkpoint.num_class_labels
    if checkpoint.pipeline.denoiser.grid_columns and "confidence" in checkpoint.samplers:
        # A puzzle is solved cell by cell, the most certain one first.
        return Settings(min(GRID_STEPS, most), "confidence", temperature=0.05, seed=SEED)
    return Settings(
        steps=most if checkpoint.takes_all_steps else min(NUM_STEPS, most),
        # A small model of text spreads its probability over many tokens: a temperature below 1 takes the likelier ones.
        temperature=0.8 if checkpoint.is_text else 1.0,
        seed=SEED,
        samples=min(4 if checkpoint.is_text else number or 8, limits.max_samples),
        class_label=NO_CLASS if number is None else EACH_CLASS,
        guidance_scale=2.0,
    )


@dataclass(frozen=True)
class Example:
    """A sample of a checkpoint, and the content of the fields, before anybody asks for one.

    Args:
        page (`str`): The HTML of the samples.
        text (`str`): A text to reconstruct.
        gaps (`str`): A text with gaps.
        picture (`PIL.Image.Image`, *optional*): A picture to paint on and to reconstruct.
    """

    page: str = ""
    text: str = ""
    gaps: str = ""
    picture: Image.Image | None = None


class Examples:
    """Draws an example of each checkpoint, once, in a thread: the page need not wait for it."""

    def __init__(self, checkpoints: Mapping[str, Checkpoint], limits: Limits):
        self.checkpoints, self.limits = checkpoints, limits
        self.drawn: dict[str, Example] = {}
        self.is_drawn = {name: threading.Event() for name in checkpoints}
        threading.Thread(target=self.draw_all, daemon=True).start()

    def draw_all(self) -> None:
        for name, checkpoint in self.checkpoints.items():
            try:
                self.drawn[name] = draw_example(checkpoint, self.limits)
            except BaseException:  # noqa: B036  (a checkpoint that cannot be sampled must not keep the others from it)
                logger.exception("no example of %s could be drawn", name)
                self.drawn[name] = Example()
            self.is_drawn[name].set()

    def get(self, name: str, seconds: float = 0.0) -> Example | None:
        """The example of a checkpoint, or `None` if it is not drawn within some seconds."""
        self.is_drawn[name].wait(seconds)
        return self.drawn.get(name)


def draw_example(checkpoint: Checkpoint, limits: Limits) -> Example:
    """Samples a checkpoint with the settings that the page begins with, for a limited time."""
    sentence, gapped = known_sentence(checkpoint) if checkpoint.is_text else ("", "")
    given = checkpoint.card.example[: limits.max_characters]
    run = Run(checkpoint, example_settings(checkpoint, limits).arguments(checkpoint, limits))
    work = Work(START_SECONDS)
    try:
        *_, drawn = work.run(lambda report: Drawn(run, *run.draw(lambda *step: work.check())))
    except TooLong:
        logger.warning("the first sample of %s takes more than %g seconds", checkpoint.name, START_SECONDS)
        return Example(text=sentence, gaps=given or gapped)
    page = render_finished([drawn], limits, work, "")
    if not checkpoint.is_text:
        (image,) = checkpoint.pipeline.decode(drawn.states[-1][:1])
        return Example(page, picture=enlarge_to(image, CANVAS_SIDE))
    if not sentence and checkpoint.pipeline.tokenizer is not None:
        sentence = checkpoint.pipeline.decode(drawn.states[-1][:1])[0]
        if not checkpoint.has_one_length:
            sentence = sentence.strip()
        third = len(sentence) // 3
        gapped = sentence[:third] + GAP_SIGN * third + sentence[2 * third :]
    return Example(page, sentence, given or gapped)


def known_sentence(checkpoint: Checkpoint) -> tuple[str, str]:
    """A sentence, and the same with a gap; both empty if it does not fit the model, or if the tokenizer does not know its characters."""
    pipeline = checkpoint.pipeline
    if pipeline.tokenizer is None or checkpoint.has_one_length:
        return "", ""
    try:
        tokens = pipeline.tokenize(SENTENCE)[0]
    except ValueError:
        return "", ""
    positions = num_positions(pipeline.denoiser.network)
    is_too_long = positions is not None and len(tokens) + pipeline.num_special_tokens > positions
    if is_too_long or pipeline.tokenizer.unk_token_id in tokens:
        return "", ""
    return SENTENCE, SENTENCE.replace(HIDDEN, GAP_SIGN * len(pipeline.tokenizer.tokenize(HIDDEN)))


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
