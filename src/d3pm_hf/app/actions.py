# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What a visitor can do with a checkpoint: each function checks a request, and yields the HTML of its result as it grows."""

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from PIL import Image

from .checkpoints import Checkpoint
from .limits import Limits, check_name, check_number
from .pictures import fit_picture, painted_mask
from .player import render_error, render_ticks
from .runs import Run, Settings, watch_runs


logger = logging.getLogger(__name__)

# Marks one missing token of a text, beside the mask token of the tokenizer.
GAP_SIGN = "_"


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
    else:
        arguments["image"] = fit_picture(limits.check_picture(data), pipeline.sample_shape)
        original = pipeline.encode(arguments["image"])
    yield from watch_runs([Run(checkpoint, arguments, "reconstruction", original)], limits)


@on_page
def compare(checkpoint: Checkpoint, number, settings: Settings, limits: Limits) -> Iterator[str]:
    """Samples with evenly spaced timesteps and with those stored for this number of steps, from the same seed."""
    if not checkpoint.chosen_numbers:
        raise ValueError(
            "this checkpoint has even timesteps alone: find better ones with d3pm_hf.evaluation.optimize_timesteps, and store "
            "them with scheduler.register_inference_timesteps"
        )
    numbers = [str(one) for one in checkpoint.chosen_numbers]
    steps = int(check_name("the number of steps", str(number), numbers))
    scheduler, runs, rows = checkpoint.pipeline.scheduler, [], {}
    for title, spacing in (("even", "even"), ("optimal", "chosen")):
        arguments = replace(settings, steps=steps).arguments(checkpoint, limits)  # each with a generator of its own
        runs.append(Run(checkpoint, {**arguments, "spacing": spacing}, title, has_clock=True))
        rows[title] = scheduler.sampling_timesteps(steps, spacing=spacing)
    yield from watch_runs(runs, limits, render_ticks(rows, checkpoint.num_timesteps))
