# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Limits on what a visitor of the page may ask for. A value outside of them raises an error of one sentence."""

from collections.abc import Iterable
from dataclasses import dataclass

from PIL import Image

from ..utils.checks import check_choice, check_float, check_int, check_type


# The largest file that a visitor may upload, and the largest body of any other request, in bytes.
MAX_FILE_BYTES, MAX_REQUEST_BYTES = 4 * 2**20, 2**20
# Uploaded files are deleted after this many seconds, and beyond this number the oldest first.
UPLOAD_SECONDS, MAX_UPLOADS = 1800.0, 256
# Pictures that are painted on at once, and layers of each of them.
MAX_DRAWINGS, MAX_LAYERS = 32, 8
# Requests that wait for their turn; more are refused.
MAX_WAITING = 32
# Seconds within which a visitor must begin to listen for the result of a request.
LISTEN_SECONDS = 5.0
# Seconds that the first sample of a checkpoint may take when the page starts.
START_SECONDS = 20.0
# Seconds that the page waits for the first of them before it is served without it.
OPEN_SECONDS = 5.0


@dataclass(frozen=True)
class Limits:
    """The largest request that the page accepts.

    Args:
        max_characters (`int`, defaults to 1000): Characters of a text.
        max_steps (`int`, defaults to 250): Inference steps.
        max_samples (`int`, defaults to 10): Samples of one request.
        max_particles (`int`, defaults to 16): Particles of each sample.
        max_pixels (`int`, defaults to 4,000,000): Pixels of a picture that is uploaded.
        max_seconds (`float`, defaults to 120.0): Seconds that a request may compute.
        max_frames (`int`, defaults to 60): States of a run that the page receives.
    """

    max_characters: int = 1000
    max_steps: int = 250
    max_samples: int = 10
    max_particles: int = 16
    max_pixels: int = 4_000_000
    max_seconds: float = 120.0
    max_frames: int = 60

    def check_text(self, text) -> str:
        """Checks that a text is not empty and not too long, and returns it."""
        check_type("the text", text, str, "a string")
        if len(text) > self.max_characters:
            raise ValueError(
                f"the text has {len(text)} characters, and at most {self.max_characters} are allowed: shorten it"
            )
        if not text.strip():
            raise ValueError("there is no text: write some")
        return text

    def check_picture(self, picture) -> Image.Image:
        """Checks that there is a picture and that it is not too large."""
        if picture is None:
            raise ValueError("there is no picture: upload one, or draw one from the model")
        check_type("the picture", picture, Image.Image, "an image")
        if picture.width * picture.height > self.max_pixels:
            raise ValueError(
                f"the picture has {picture.width} x {picture.height} pixels, and at most {self.max_pixels:,} are allowed: "
                "make it smaller"
            )
        return picture


def check_count(name: str, value, high: int, low: int = 1) -> int:
    """Checks that a number of the page is an integer in low .. high, and returns it."""
    is_whole = isinstance(value, float) and value.is_integer()  # JSON of a browser does not tell 20.0 from 20
    check_int(name, int(value) if is_whole else value, low, high)
    return int(value)


def check_number(name: str, value, low: float, high: float) -> float:
    """Checks that a number of the page lies in [low, high], and returns it."""
    check_float(name, value, low, high)
    return float(value)


def check_seed(value) -> int:
    """Checks the seed of a request; none is 0."""
    return check_count("the seed", 0 if value is None else value, 2**31 - 1, 0)


def check_name(what: str, name, names: Iterable[str]) -> str:
    """Checks that a name of the page is one of those that it offers, and returns it."""
    check_choice(what, name, list(names))
    return name
