# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Requests of a visitor for a checkpoint: each action checks a request, calls the pipeline, and yields HTML as the result grows."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image, ImageOps

from ..data.image_modes import flatten_picture
from ..visualization import Trajectory
from ..visualization.trajectory import show_tokens
from .checkpoints import Checkpoint
from .limits import Limits, check_count, check_name, check_number, check_seed
from .player import ImagePanel, TextPanel, render_error, render_player, render_status, render_ticks
from .work import Work


logger = logging.getLogger(__name__)

# Marks one missing token of a text, beside the mask token of the tokenizer.
GAP_SIGN = "_"
# The entry of the list of samplers that leaves the choice to the pipeline.
DEFAULT_SAMPLER = "default"
# Entries of the list of classes: none, and one class after the other.
NO_CLASS, EACH_CLASS = "any", "each in turn"
# Size in pixels to which the images of a grid are enlarged by a whole factor, and width of the line between them.
CELL, LINE = 64, 4


@dataclass(frozen=True)
class Settings:
    """Settings of a visitor, as they come from the page: any of it may be of a wrong type, or outside of the limits."""

    steps: Any = 20
    sampler: Any = DEFAULT_SAMPLER
    temperature: Any = 1.0
    seed: Any = 0
    samples: Any = 1
    particles: Any = 1
    class_label: Any = NO_CLASS
    guidance_scale: Any = 1.0

    def arguments(self, checkpoint: Checkpoint, limits: Limits) -> dict[str, Any]:
        """The arguments of a call of the pipeline of `checkpoint`."""
        arguments: dict[str, Any] = {
            "num_inference_steps": self.num_steps(checkpoint, limits),
            "temperature": check_number("the temperature", self.temperature, 0.05, 5.0),
            "num_particles": check_count("the number of particles", self.particles, limits.max_particles),
            "generator": torch.Generator().manual_seed(check_seed(self.seed)),
        }
        samples = check_count("the number of samples", self.samples, limits.max_samples)
        sampler = check_name("the sampler", self.sampler, (DEFAULT_SAMPLER, *checkpoint.samplers))
        if sampler != DEFAULT_SAMPLER:
            arguments["sampler"] = sampler
        arguments |= self.condition(checkpoint, samples)
        num_per_input = 1 if isinstance(arguments.get("class_labels"), list) else samples
        arguments["num_return_sequences" if checkpoint.is_text else "num_images_per_prompt"] = num_per_input
        return arguments

    def num_steps(self, checkpoint: Checkpoint, limits: Limits) -> int:
        """The number of inference steps: that of the page, or all timesteps of a model that may skip none."""
        if checkpoint.takes_all_steps:
            return checkpoint.num_timesteps
        most = min(limits.max_steps, checkpoint.num_timesteps)
        return check_count("the number of steps", self.steps, most)

    def condition(self, checkpoint: Checkpoint, samples: int) -> dict[str, Any]:
        """The class, or one for each of the samples, and the scale of guidance, for a model that has classes."""
        number = checkpoint.num_class_labels
        if number is None or self.class_label in (None, NO_CLASS):
            return {}
        label: int | list[int]
        if self.class_label == EACH_CLASS:
            label = [i % number for i in range(samples)]
        else:
            label = int(check_name("the class", str(self.class_label), [str(label) for label in range(number)]))
        if not checkpoint.can_guide:
            return {"class_labels": label}
        scale = check_number("the guidance scale", self.guidance_scale, 0.0, 10.0)
        return {"class_labels": label, "guidance_scale": scale}


class LiveTrajectory(Trajectory):
    """A trajectory that reports each step: the state that it leads to, its timestep, and the number of steps so far."""

    def __init__(self, report: Callable[[torch.Tensor, int, int], None]):
        super().__init__()
        self.report = report

    def callback_fn(self, pipeline, step_index, timesteps, callback_kwargs):
        result = super().callback_fn(pipeline, step_index, timesteps, callback_kwargs)
        self.report(self.states[-1], self.timesteps[-1], len(self.states) - 1)
        return result


@dataclass(frozen=True)
class Run:
    """One call of a pipeline.

    Args:
        checkpoint ([`Checkpoint`]): The checkpoint.
        arguments (`dict`): Arguments of the call.
        title (`str`): Heading of its panels.
        original (`torch.LongTensor` of shape `[1, ...]`, *optional*): Data to show beside the samples.
        has_clock (`bool`, defaults to `False`): Whether its timesteps are written beside the heading.
    """

    checkpoint: Checkpoint
    arguments: dict[str, Any]
    title: str = ""
    original: torch.Tensor | None = None
    has_clock: bool = False

    def draw(self, report: Callable[[torch.Tensor, int, int], None]) -> tuple[list[torch.Tensor], list[int]]:
        """The states x_T .. x_0 of the call, `[B, ...]` each, and their timesteps, -1 for the data.

        `report` is that of a [`LiveTrajectory`]. A sampler without steps has one state, the sample.
        """
        trajectory = LiveTrajectory(report)
        has_steps = self.checkpoint.samplers.get(self.arguments.get("sampler", DEFAULT_SAMPLER), True)
        watched = {"callback_on_step_end": trajectory} if has_steps else {}
        output = self.checkpoint.pipeline(output_type="latent", **self.arguments, **watched)
        final = (output.sequences if self.checkpoint.is_text else output.images).cpu()
        if not trajectory.states:
            return [final], [-1]
        # The last state is the particle that was drawn, with padding behind the end of a text.
        return [self.first_particles(state) for state in trajectory.states[:-1]] + [final], trajectory.timesteps

    def first_particles(self, state: torch.Tensor) -> torch.Tensor:
        """The first particle of each sample, `[B, ...]`."""
        return state[:: self.arguments["num_particles"]]

    def panels(self, states: list[torch.Tensor], timesteps: list[int]) -> list[TextPanel | ImagePanel]:
        """The panels of some states: one for each text, or one for all images; before them the original, if there is one."""
        labels = [label_of(t) for t in timesteps] if self.has_clock else None
        panels = [] if self.original is None else self.show([self.original] * len(states), "original", None)
        return panels + self.show(states, self.title, labels)

    def show(self, states: list[torch.Tensor], title: str, labels: list[str] | None) -> list[TextPanel | ImagePanel]:
        """States `[B, ...]` over time as panels."""
        pipeline, number = self.checkpoint.pipeline, len(states[0])
        if not self.checkpoint.is_text:
            grids = [small_grid(pipeline.decode(state)) for state in states]
            return [ImagePanel(title, grids, labels, "images over time", max_scale=3)]
        tokens = [[show_tokens(pipeline.tokenizer, row) for row in state] for state in states]
        titles = [title] if number == 1 else [f"{title} {i + 1}".strip() for i in range(number)]
        columns = pipeline.denoiser.grid_columns
        return [TextPanel(titles[i], [frame[i] for frame in tokens], labels, columns) for i in range(number)]

    def report_recovered(self, state: torch.Tensor) -> str:
        """How much of the original the samples `[B, ...]` have, in words; nothing without an original."""
        if self.original is None or self.original.shape[1:] != state.shape[1:]:
            return ""
        share = (state == self.original.cpu()).float().mean().item()
        return f", {share:.0%} of the {'tokens' if self.checkpoint.is_text else 'levels'} as they were"


def label_of(timestep: int) -> str:
    """Label of the slider at a timestep, -1 for the data."""
    return "data" if timestep < 0 else f"t = {timestep}"


def spread_frames(number: int, limit: int) -> list[int]:
    """At most `limit` of the numbers 0 .. number - 1, spread evenly, with both ends."""
    kept = min(number, limit)
    return sorted({round(i * (number - 1) / max(kept - 1, 1)) for i in range(kept)} | {number - 1})


@dataclass(frozen=True)
class Drawn:
    """A run that is finished: its states `[B, ...]` from x_T to x_0, and their timesteps."""

    run: Run
    states: list[torch.Tensor]
    timesteps: list[int]


def watch_runs(runs: list[Run], limits: Limits, notes: str = "") -> Iterator[str]:
    """Draws the runs one after the other, and yields the HTML of each moment; in the end, with a slider over time."""
    work = Work(limits.max_seconds)

    def draw(report) -> str:
        done: list[Drawn] = []
        for run in runs:
            before = [panel for one in done for panel in one.run.panels(one.states[-1:], one.timesteps[-1:])]

            def show(state, timestep, number, run=run, before=before) -> None:
                status = f"step {number} of {run.arguments['num_inference_steps']}"
                now = [run.first_particles(state)], [timestep]
                report(lambda: render_player(before + run.panels(*now), [""], status, notes))

            done.append(Drawn(run, *run.draw(show)))
        return render_finished(done, limits, work, notes)

    with closing(work.run(draw)) as moments:
        shown = ""
        for moment in moments:
            if callable(moment):
                shown = moment()
            # Without a step to show, it shows that it is alive.
            yield (
                moment if isinstance(moment, str) else shown or render_status(f"{work.num_calls} calls of the network")
            )


def render_finished(done: list[Drawn], limits: Limits, work: Work, notes: str) -> str:
    """The HTML of all runs with a slider over their frames, of which each has the same number."""
    number = max(len(one.states) for one in done)
    frames = spread_frames(number, limits.max_frames)
    panels: list[TextPanel | ImagePanel] = []
    for one in done:
        kept = [min(i, len(one.states) - 1) for i in frames]
        panels += one.run.panels([one.states[i] for i in kept], [one.timesteps[i] for i in kept])
    timesteps = done[0].timesteps
    same = all(one.timesteps == timesteps for one in done)
    labels = [label_of(timesteps[i]) if same else f"step {i} of {number - 1}" for i in frames]
    steps = f"{number - 1} steps" if number > 1 else "no steps to watch"
    status = f"{steps}, {work.num_calls} calls of the network, {work.seconds:.1f} seconds"
    status += "".join(one.run.report_recovered(one.states[-1]) for one in done)
    status += f", seed {done[0].run.arguments['generator'].initial_seed()}"
    return render_player(panels, labels, status, notes)


def on_page(action: Callable[..., Iterator[str]]) -> Callable[..., Iterator[str]]:
    """An action whose errors are shown as one sentence. What is not the visitor's fault is left to the log."""

    @functools.wraps(action)
    def guarded(*args, **kwargs) -> Iterator[str]:
        try:
            yield from action(*args, **kwargs)
        except ValueError as error:
            yield render_error(str(error))
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of tokenizers is no `Exception`
            logger.exception("an action of the page failed")
            yield render_error("this could not be computed: the log of the server says why")

    return guarded


@on_page
def generate(checkpoint: Checkpoint, settings: Settings, limits: Limits) -> Iterator[str]:
    """Samples from noise to data."""
    yield from watch_runs([Run(checkpoint, settings.arguments(checkpoint, limits))], limits)


@on_page
def infill_text(checkpoint: Checkpoint, text, settings: Settings, limits: Limits) -> Iterator[str]:
    """Fills in the gaps of a text: each `_`, or mask token of the tokenizer, is one missing token."""
    prompt = limits.check_text(text)
    tokenizer = checkpoint.pipeline.tokenizer
    mask = None if tokenizer is None else tokenizer.mask_token
    if mask is None:
        raise ValueError("the checkpoint has no tokenizer with a mask token to mark gaps with: choose another one")
    prompt = prompt.replace(GAP_SIGN, mask)
    if mask not in prompt:
        raise ValueError(f"the text has no gaps: write {GAP_SIGN} for each missing token")
    yield from watch_runs([Run(checkpoint, {"prompt": prompt, **settings.arguments(checkpoint, limits)})], limits)


@on_page
def infill_image(checkpoint: Checkpoint, drawing, settings: Settings, limits: Limits) -> Iterator[str]:
    """Paints the masked part of a picture.

    Args:
        drawing: What the editor of Gradio gives: a dictionary with the picture as `background` and the paint as `layers`.
    """
    drawing = drawing if isinstance(drawing, dict) else {}
    picture = limits.check_picture(drawing.get("background"))
    shape = checkpoint.pipeline.sample_shape
    layers = [limits.check_picture(layer) for layer in drawing.get("layers") or []]
    paint = Image.new("RGBA", picture.size)
    for layer in layers:
        paint = Image.alpha_composite(paint, layer.convert("RGBA").resize(picture.size))
    mask = painted_mask(paint, shape)
    if mask.getextrema() == (0, 0):
        raise ValueError("nothing is painted: paint over the part of the picture that the model should fill in")
    image = fit_picture(picture, shape)
    arguments = {"image": image, "mask_image": mask, **settings.arguments(checkpoint, limits)}
    yield from watch_runs([Run(checkpoint, arguments)], limits)


@on_page
def reconstruct(checkpoint: Checkpoint, data, noise, settings: Settings, limits: Limits) -> Iterator[str]:
    """Corrupts a text or a picture up to a share of all timesteps, and denoises it from there."""
    share = check_number("the share of noise", noise, 0.01, 1.0)
    pipeline, start = checkpoint.pipeline, max(0, round(share * checkpoint.num_timesteps) - 1)
    arguments = {**settings.arguments(checkpoint, limits), "start_timestep": start}
    arguments["num_inference_steps"] = min(arguments["num_inference_steps"], start + 1)
    if checkpoint.is_text:
        arguments["prompt"] = limits.check_text(data)
        original = pipeline.encode(arguments["prompt"])
        if checkpoint.has_one_length and (original == pipeline.gap_token_id).any():  # behind a text that is too short
            raise ValueError(
                f"this model reconstructs texts of {checkpoint.num_timesteps} tokens without gaps: make the text longer"
            )
    else:
        arguments["image"] = fit_picture(limits.check_picture(data), pipeline.sample_shape)
        original = pipeline.encode(arguments["image"])
    yield from watch_runs([Run(checkpoint, arguments, "reconstruction", original)], limits)


@on_page
def compare(checkpoint: Checkpoint, number, settings: Settings, limits: Limits) -> Iterator[str]:
    """Samples with evenly spaced timesteps and with those stored for this number of steps, from the same seed."""
    if not checkpoint.chosen_numbers:
        raise ValueError(
            "This checkpoint has no optimized timesteps: find some with d3pm_hf.evaluation.optimize_timesteps, and store them with "
            "scheduler.register_inference_timesteps"
        )
    numbers = [str(one) for one in checkpoint.chosen_numbers]
    steps = int(check_name("the number of steps", str(number), numbers))
    scheduler, runs, rows = checkpoint.pipeline.scheduler, [], {}
    for title, spacing in (("even", "even"), ("optimal", "optimized")):
        arguments = replace(settings, steps=steps).arguments(checkpoint, limits)  # each with a generator of its own
        runs.append(Run(checkpoint, {**arguments, "spacing": spacing}, title, has_clock=True))
        rows[title] = scheduler.sampling_timesteps(steps, spacing=spacing)
    yield from watch_runs(runs, limits, render_ticks(rows, checkpoint.num_timesteps))


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


def fit_picture(picture: Image.Image, shape: tuple[int, ...]) -> Image.Image:
    """A picture upright and opaque, cropped and scaled to the shape (C, H, W) of the images of a model."""
    channels, height, width = shape
    if channels not in (1, 3):
        raise ValueError(
            f"the images of this model have {channels} channels, and a picture has 1 or 3: choose another model"
        )
    flat = flatten_picture(picture, "L" if channels == 1 else "RGB")
    return ImageOps.fit(flat, (width, height), Image.Resampling.BOX)


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
