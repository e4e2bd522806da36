# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The forward processes of all registered families on a visitor's own text or picture: matrices, and noise over time."""

import functools
import string
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..data.image_modes import flatten_picture
from ..numerics import categorical, uniforms
from ..schedulers import D3PMScheduler
from ..schedules import schedule_names
from ..transitions.family import get_family, transition_families
from ..visualization.trajectory import MASK_SIGN
from .actions import on_page, spread_frames
from .limits import Limits, check_name, check_seed
from .player import ImagePanel, TextPanel, escape, render_player


# Timesteps of a process, states of a channel, largest side of a picture, and frames of its noise.
NUM_TIMESTEPS, NUM_LEVELS, PICTURE_SIDE, NUM_FRAMES = 50, 16, 56, 26
# Characters beside those of the text, and the longest text whose noise is shown.
ALPHABET, MAX_LENGTH = string.ascii_lowercase + " ", 300
# The most characters that an alphabet may have.
MAX_ALPHABET = 120
KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm", "    ")
VOWELS = "aeiouy"
# Stands for the space beside a matrix.
SPACE_SIGN = "\u2423"
# Colors of the probabilities of a matrix from 0 to 1, dark to light, with equal steps between them.
COLORS = ((13, 8, 35), (62, 31, 102), (124, 47, 107), (186, 66, 84), (236, 113, 55), (250, 180, 70), (252, 246, 189))
# Probabilities below this are dark.
SMALLEST = 1e-3


@dataclass(frozen=True)
class Data:
    """Data of a visitor that noise is added to.

    Args:
        states (`torch.LongTensor` of shape `[1, ...]`): x_0.
        num_classes (`int`): Number of its states, without a mask.
        alphabet (`str`, *optional*): The characters of a text, by their states; `None` for pictures.
    """

    states: torch.Tensor
    num_classes: int
    alphabet: str | None = None

    @property
    def frequencies(self) -> torch.Tensor:
        """The share of each state, `[K]`, as if each occurred once more."""
        counts = torch.bincount(self.states.flatten(), minlength=self.num_classes).double() + 1
        return counts / counts.sum()

    def panel(self, path: list[torch.Tensor], labels: list[str]) -> TextPanel | ImagePanel:
        """States `[1, ...]` over time as a text or as a picture. The mask of a picture is gray."""
        if self.alphabet is not None:
            signs = self.alphabet + MASK_SIGN
            return TextPanel("your text", [[signs[i] for i in state[0].tolist()] for state in path], labels)
        gray, total = (self.num_classes - 1) // 2, self.num_classes
        pictures = [from_levels(state[0].where(state[0] < total, gray), total) for state in path]
        return ImagePanel("your picture", pictures, labels, "a picture with noise")


def text_data(text: str) -> Data:
    """A text as states: those of a-z and the space, and behind them all other characters that occur in it."""
    if len(text) > MAX_LENGTH:
        raise ValueError(
            f"the text has {len(text)} characters, and the noise of at most {MAX_LENGTH} is shown: shorten it"
        )
    alphabet = ALPHABET + "".join(sorted(set(text) - set(ALPHABET)))
    if len(alphabet) > MAX_ALPHABET:
        raise ValueError(f"the text has {len(alphabet)} different characters, and at most {MAX_ALPHABET} are allowed")
    return Data(torch.tensor([[alphabet.index(character) for character in text]]), len(alphabet), alphabet)


def picture_data(picture: Image.Image) -> Data:
    """A picture as states, scaled down."""
    flat = flatten_picture(picture, "RGB")
    flat.thumbnail((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.BOX)
    return Data(to_levels(flat, NUM_LEVELS)[None], NUM_LEVELS)


def example_tensors(num_classes: int, alphabet: str | None) -> dict[str, tuple[torch.Tensor, str]]:
    """Tensors for the families that need some, by name, each with what it stands for."""
    same = torch.eye(num_classes, dtype=torch.float64)
    around = same.roll(1, 1)
    steps = around + around.T
    rates = 4 * (steps - torch.diag(steps.sum(-1)))
    if alphabet is None:
        places = torch.arange(num_classes, dtype=torch.float64)[:, None]
        return {
            "transition_matrices": (0.8 * same + 0.2 * around, "each level gets lighter, and white turns black"),
            "rate_matrix": (rates, "levels move up and down, and white is next to black"),
            "embeddings": (places, "a level is close to those next to it"),
        }
    groups = torch.tensor([(c.lower() in VOWELS) + 2 * (not c.isalpha()) for c in alphabet])
    alike = (groups[:, None] == groups).double()
    alike = alike / alike.sum(-1, keepdim=True)
    return {
        "transition_matrices": (0.9 * same + 0.1 * alike, "vowels become vowels, and consonants consonants"),
        "rate_matrix": (rates, "letters move to the one before or after them in the alphabet"),
        "embeddings": (keyboard_places(alphabet), "a letter is close to those next to it on a keyboard"),
    }


def keyboard_places(alphabet: str) -> torch.Tensor:
    """Where characters are on a keyboard, `[K, 2]`; those of no letter are above it, in a row."""
    places = {c: (x + 0.4 * y, y) for y, row in enumerate(KEYBOARD) for x, c in enumerate(row)}
    others = [c for c in alphabet if c.lower() not in places]
    places |= {c: (i % 12, -1 - i // 12) for i, c in enumerate(others)}
    # Two cases of a letter are close to each other, and not at the same place.
    vectors = [(places[c.lower()][0] + 0.1 * c.isupper(), places[c.lower()][1]) for c in alphabet]
    return torch.tensor(vectors, dtype=torch.float64)


def create_process(name: str, schedule: str, data: Data) -> tuple[D3PMScheduler, str]:
    """A scheduler of the family `name` over the states of `data`, and what its tensors stand for."""
    family: Any = get_family(name)
    num_steps = data.states.shape[-1] if family.is_autoregressive else NUM_TIMESTEPS
    needs_data = "stationary_probs" in family.input_tensors()
    frequencies = tuple(data.frequencies.tolist()) if needs_data else None
    return cached_process(family, schedule, num_steps, data.num_classes, data.alphabet, frequencies)


@functools.lru_cache(maxsize=128)
def cached_process(
    family,
    schedule: str,
    num_steps: int,
    num_classes: int,
    alphabet: str | None,
    frequencies: tuple[float, ...] | None,
) -> tuple[D3PMScheduler, str]:
    """Creates the result of [`create_process`], once. It does not depend on the data, unless the family needs their frequencies."""
    options: dict = {"num_classes": num_classes + int(family.has_mask), "num_train_timesteps": num_steps}
    examples, meanings = example_tensors(num_classes, alphabet), []
    if frequencies is not None:
        meaning = f"the {'levels of this picture' if alphabet is None else 'characters of this text'}, as often as they occur"
        examples["stationary_probs"] = torch.tensor(frequencies, dtype=torch.float64), meaning
    for tensor in family.input_tensors():
        if tensor in examples:
            options[tensor], meaning = examples[tensor]
            meanings.append(meaning)
    if family.has_schedule:
        options["beta_schedule"] = schedule
        mask = torch.zeros(int(family.has_mask), dtype=torch.float64)
        options["unigram_probs"] = torch.cat([torch.full((num_classes,), 1 / num_classes, dtype=torch.float64), mask])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some examples do not reach their prior, which the matrix shows
        scheduler = D3PMScheduler(transition=family.name, **options)
        _ = scheduler.transition
    return scheduler, "; ".join(meanings)


def draw_path(transition, x_0: torch.Tensor, times: list[int], generator: torch.Generator) -> list[torch.Tensor]:
    """States x_t at the numbers of steps `times`, which ascend from 0, each drawn from q(x_t | x_s) given the one before."""
    path = [x_0]
    for s, t in zip(times, times[1:]):
        log_p = transition.log_marginal(path[-1], s, t)
        u = uniforms(x_0.shape, generator, x_0.device)
        path.append(categorical(log_p.flatten(0, -2), u.flatten()).view_as(x_0))
    return path


@on_page
def show_process(name, schedule, data: str | Image.Image | None, seed, is_text: bool, limits: Limits) -> Iterator[str]:
    """The matrix Qbar_t of a family over time, and the noise that it adds to a text or a picture."""
    family = get_family(check_name("the process", name, transition_families()))
    schedule = check_name("the schedule", schedule, schedule_names())
    own = text_data(limits.check_text(data)) if is_text else picture_data(limits.check_picture(data))
    if family.is_autoregressive and not is_text:
        raise ValueError(
            "the autoregressive process masks a text from its end, and a picture has none: choose another one"
        )
    scheduler, meaning = create_process(name, schedule, own)
    transition, last = scheduler.transition, len(scheduler)
    times = spread_frames(last + 1, NUM_FRAMES)
    path = draw_path(transition, own.states, times, torch.Generator().manual_seed(check_seed(seed)))
    matrices = [matrix if matrix.ndim == 2 else matrix.mean(0) for matrix in (transition.matrix(0, t) for t in times)]
    kept = [(state == own.states).double().mean().item() for state in path]
    labels = [f"t = {t} of {last}" for t in times]
    noise = [f"{share:.0%} as it was" for share in kept]
    pictures = [matrix_picture(matrix) for matrix in matrices]
    signs = "" if own.alphabet is None else (own.alphabet + MASK_SIGN)[: len(matrices[0])].replace(" ", SPACE_SIGN)
    what = "probabilities of each state given each"
    matrix = ImagePanel("transition matrix from 0 to t", pictures, None, what, signs=signs)
    yield render_player([matrix, own.panel(path, noise)], labels, notes=describe_process(family, meaning))


def describe_process(family, meaning: str) -> str:
    """Description of a family, and how to read its matrix."""
    colors = ", ".join(f"rgb{color}" for color in COLORS)
    example = f" Here {escape(meaning)}." if meaning else ""
    return (
        f'<p class="d3pm-about"><b>{escape(family.name)}</b>: {escape(family.description)}.{example} '
        f"Q<sub>t</sub> = <code>{escape(family.formula)}</code></p>"
        '<p class="d3pm-about">Rows of the matrix are what a state was, columns what it is at t; probabilities from 1/1000 to 1: '
        f'<span class="d3pm-scale" style="background: linear-gradient(90deg, {colors})"></span></p>'
    )


def matrix_picture(matrix: torch.Tensor) -> Image.Image:
    """Probabilities `[K, K]` as colors, one pixel each: on a logarithmic scale from 1/1000 to 1."""
    levels = 1 - torch.log10(matrix.double().clamp(SMALLEST, 1)) / np.log10(SMALLEST)  # 0 .. 1
    places = levels.numpy() * (len(COLORS) - 1)
    below = np.clip(places.astype(int), 0, len(COLORS) - 2)
    share, colors = (places - below)[..., None], np.array(COLORS, dtype=float)
    mixed = (1 - share) * colors[below] + share * colors[below + 1]
    return Image.fromarray(mixed.round().astype(np.uint8))


def to_levels(picture: Image.Image, num_levels: int) -> torch.Tensor:
    """The pixels of a picture as states `[C, H, W]` of `num_levels` levels."""
    pixels = torch.from_numpy(np.asarray(picture.convert("RGB"), dtype=np.float32))
    return (pixels / 255 * (num_levels - 1)).round().long().permute(2, 0, 1)


def from_levels(states: torch.Tensor, num_levels: int) -> Image.Image:
    """The picture of states `[C, H, W]`."""
    pixels = (states.permute(1, 2, 0) * 255 / (num_levels - 1)).round().to(torch.uint8)
    return Image.fromarray(pixels.numpy())
