# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The layout of the page in Gradio. What its buttons do stands in `actions` and `noise`.

No component holds a state on the server: a request brings everything that it needs, and visitors share nothing but the networks.
"""

import functools
import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import gradio as gr
from fastapi.responses import PlainTextResponse
from gradio.components.image_editor import AcceptBlobs
from starlette.middleware import Middleware

from ..schedules import schedule_names
from ..transitions.family import transition_families
from . import actions
from .actions import DEFAULT_SAMPLER, EACH_CLASS, NO_CLASS, Settings
from .checkpoints import Checkpoint
from .guard import Guard, Uploads
from .limits import (
    MAX_DRAWINGS,
    MAX_FILE_BYTES,
    MAX_LAYERS,
    MAX_WAITING,
    OPEN_SECONDS,
    START_SECONDS,
    Limits,
    check_count,
    check_name,
)
from .noise import show_process
from .opening import CANVAS_SIDE, Example, Examples, example_settings, noise_picture
from .player import SCRIPT, STYLE, escape, render_error, render_status


TITLE = "Discrete diffusion, step by step"
ABOUT = (
    "Watch a D3PM write text and paint pictures, from noise to data. Move the slider to go back in time; the color of a token tells "
    "when it was written, from violet to orange."
)
LINKS = {
    "Documentation": "https://github.com/d3pm-hf/d3pm-hf/tree/main/docs/source/en",
    "Code": "https://github.com/d3pm-hf/d3pm-hf",
    "Paper": "https://arxiv.org/abs/2107.03006",
}
NOISE_TEXT = (
    "the quick brown fox jumps over the lazy dog, and a transition matrix says what becomes of each of its letters"
)
# Seeds are drawn below this: few digits are easy to read and to copy.
MAX_SEED = 1_000_000
# Seconds between two looks at the uploaded files.
SWEEP_SECONDS = 60.0
# Events are those of the page itself: they are no interface for programs.
PRIVATE: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
# Requests that call a network share one limit.
COMPUTES: dict[str, Any] = {**PRIVATE, "concurrency_id": "networks"}


def create_page(checkpoints: Mapping[str, Checkpoint], limits: Limits):
    """The page for some checkpoints by their names, as a `gradio.Blocks`."""
    page = Page(checkpoints, limits)
    with gr.Blocks(title=TITLE, analytics_enabled=False) as blocks:
        links = " · ".join(link(address, title) for title, address in LINKS.items())
        gr.HTML(f"<h1>{TITLE}</h1><p>{ABOUT}</p><p>{links}</p>", elem_id="d3pm-title")
        page.build(blocks)
    return blocks


def serve(
    blocks,
    checkpoints: Mapping[str, Checkpoint],
    uploads: Uploads,
    host: str | None,
    port: int | None,
    max_requests: int,
) -> None:
    """Serves the page until it is interrupted. It loads nothing from other servers, and tells none of its use.

    Args:
        blocks (`gradio.Blocks`): The page.
        checkpoints: The checkpoints by name, whose cards are served.
        uploads ([`Uploads`]): The folder in which Gradio keeps pictures.
        host (`str`, *optional*): Address to listen at.
        port (`int`, *optional*): Port to listen at.
        max_requests (`int`): Number of requests that are computed at once.
    """
    theme = gr.themes.Soft(
        primary_hue="indigo", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    limit_drawings()
    uploads.keep()
    threading.Thread(target=uploads.sweep, args=(SWEEP_SECONDS,), daemon=True).start()
    blocks.queue(default_concurrency_limit=max_requests, max_size=MAX_WAITING, api_open=False)
    app, address, _ = blocks.launch(
        server_name=host,
        server_port=port,
        share=False,
        ssr_mode=False,
        enable_monitoring=False,
        mcp_server=False,
        pwa=False,
        max_file_size=MAX_FILE_BYTES,
        app_kwargs={"middleware": [Middleware(Guard, uploads=uploads)]},
        footer_links=[],
        theme=theme,
        css=STYLE,
        head=f"<script>{SCRIPT}</script>",
        quiet=True,
        prevent_thread_lock=True,
    )

    @app.get("/cards/{name:path}")
    def card(name: str) -> PlainTextResponse:
        checkpoint = checkpoints.get(name)
        if checkpoint is None or not checkpoint.card.text:
            return PlainTextResponse("There is no such card.", 404)
        return PlainTextResponse(checkpoint.card.text)

    print(f"The page is at {address} and stays there until Ctrl+C.", flush=True)
    blocks.block_thread()


def link(address: str, title: str) -> str:
    """A link that opens in a new tab."""
    return f'<a href="{escape(address)}" target="_blank" rel="noopener">{escape(title)}</a>'


def describe(checkpoint: Checkpoint) -> str:
    """Description of a checkpoint and of its training data, with a link to its card."""
    card, about = checkpoint.card, escape(checkpoint.description.capitalize())
    if card.trained_on:
        about = f"<b>Trained on</b> {escape(card.trained_on)}.<br>{about}"
    address = card.address or (f"cards/{quote(checkpoint.name)}" if card.text else None)
    if address:
        about = f"{about} · {link(address, 'Model card')}"
    return f'<p class="d3pm-about">{about}</p>'


def limit_drawings() -> None:
    """Makes Gradio keep a limited number of drawings in memory until they are asked for, and of layers in each of them.

    The method of the class is replaced: of a subclass, Gradio would write a stub file beside this one.
    """
    accept = gr.ImageEditor.accept_blobs
    drawings: dict[str, Any] = {}  # of all visitors

    @functools.wraps(accept)
    def accept_blobs(self, data: AcceptBlobs):
        index: Any = data.data["index"]  # a string of the form
        if index and index != "null":
            check_count("the layer", int(index), MAX_LAYERS, 0)
        self.blob_storage = drawings
        accept(self, data)
        while len(drawings) > MAX_DRAWINGS:
            drawings.pop(next(iter(drawings)), None)

    gr.ImageEditor.accept_blobs = accept_blobs


class Page:
    """Builds the components, and says what each event does.

    Args:
        checkpoints: The checkpoints by name.
        limits ([`Limits`]): The largest requests.
    """

    def __init__(self, checkpoints: Mapping[str, Checkpoint], limits: Limits):
        self.checkpoints, self.limits = checkpoints, limits
        self.examples = Examples(checkpoints, limits)
        # Each button: itself, the one that stops it, what it runs, its inputs, and the place of its result.
        self.buttons: list[tuple[Any, Any, Any, list, Any]] = []

    def build(self, blocks) -> None:
        """All components and events of the page."""
        if not self.checkpoints:
            gr.HTML(
                '<p class="d3pm-about">No checkpoint is loaded: the operator can name some when starting the page.</p>'
            )
            self.build_noise()
            return
        first = next(iter(self.checkpoints.values()))
        self.opening = self.examples.get(first.name, OPEN_SECONDS)
        self.first = self.fit_to(first, self.opening)
        with gr.Group(elem_id="settings"):
            self.build_settings()
        with gr.Tabs(overflow_behavior="wrap"):
            tabs = [self.build_generate(), self.build_infill(), self.build_reconstruct(), self.build_compare()]
            with gr.Tab("Noise", id="noise") as noise:
                self.build_noise()
        # In the browser alone: while the answer of a server changes the page, the editor uploads its picture many times.
        for tab in [*tabs, noise]:
            shown = json.dumps(tab is not noise)
            tab.select(None, None, None, js=f"() => d3pm.showSettings({shown})", **PRIVATE)
        self.connect(blocks)

    def build_settings(self) -> None:
        """The choice of a checkpoint, and the settings of a call."""
        limits, names = self.limits, list(self.checkpoints)
        with gr.Row(equal_height=True):
            self.name = gr.Dropdown(names, value=names[0], label="Checkpoint", elem_id="checkpoint", min_width=250)
            self.steps = gr.Slider(1, step=1, label="Steps", elem_id="steps", min_width=160, **self.first["steps"])
            self.sampler = gr.Dropdown(label="Sampler", elem_id="sampler", min_width=130, **self.first["sampler"])
            with gr.Column(min_width=130):
                self.seed = gr.Number(
                    precision=0, minimum=0, label="Seed", elem_id="seed", min_width=130, **self.first["seed"]
                )
                self.randomize = gr.Checkbox(
                    True, label="New on each press", container=False, elem_id="randomize", min_width=130
                )
        self.about = gr.HTML(elem_id="about", **self.first["about"])
        with gr.Row(**self.first["classes"]) as self.classes:
            self.label = gr.Dropdown(label="Class", elem_id="label", min_width=130, **self.first["label"])
            self.scale = gr.Slider(
                0, 10, step=0.1, label="Guidance", elem_id="guidance", min_width=130, **self.first["scale"]
            )
        with gr.Accordion("More settings", open=False), gr.Row():
            self.samples = gr.Slider(
                1, limits.max_samples, step=1, label="Samples", elem_id="samples", **self.first["samples"]
            )
            self.temperature = gr.Slider(
                0.05, 2, step=0.05, label="Temperature", elem_id="temperature", **self.first["temperature"]
            )
            self.particles = gr.Slider(1, limits.max_particles, 1, step=1, label="Particles", elem_id="particles")
        # In the order of `Settings`.
        self.settings = [self.steps, self.sampler, self.temperature, self.seed, self.samples, self.particles]
        self.settings += [self.label, self.scale]

    def build_generate(self):
        """Samples from noise to data."""
        with gr.Tab("Generate", id="generate") as tab:
            self.sample = self.run_with("Generate", actions.generate, [], "generate", **self.first["sample"])
        return tab

    def build_infill(self):
        """A text with gaps, or a picture with a painted mask."""
        with gr.Tab("Fill in", id="infill") as tab:
            with gr.Column(**self.first["text_infilling"]) as self.text_infilling:
                self.gaps = gr.Textbox(
                    label="Text with gaps",
                    info=f"Each {actions.GAP_SIGN} is one missing token.",
                    lines=2,
                    elem_id="gaps",
                    **self.first["gaps"],
                )
                self.run_with("Fill in the gaps", actions.infill_text, [self.gaps], "infill-text")
            with gr.Column(**self.first["image_infilling"]) as self.image_infilling:
                gr.HTML('<p class="d3pm-about">Paint over the part of the picture that the model should fill in.</p>')
                self.canvas = gr.ImageEditor(
                    type="pil",
                    image_mode="RGBA",
                    sources=("upload",),
                    transforms=(),
                    layers=False,
                    height=CANVAS_SIDE + 100,
                    brush=gr.Brush(default_size=40, colors=["#6366f1"], default_color="#6366f1", color_mode="fixed"),
                    eraser=gr.Eraser(default_size=40),
                    show_label=False,
                    elem_id="canvas",
                    **self.first["canvas"],
                )
                self.run_with("Fill in the painted part", actions.infill_image, [self.canvas], "infill-image")
        return tab

    def build_reconstruct(self):
        """A text or a picture that is corrupted up to a timestep, and denoised from there."""
        with gr.Tab("Reconstruct", id="reconstruct") as tab:
            self.noise = gr.Slider(
                0.02, 1, 0.4, step=0.01, label="Noise", info="Share of all timesteps.", elem_id="noise"
            )
            with gr.Column(**self.first["text_reconstruction"]) as self.text_reconstruction:
                self.text = gr.Textbox(label="Text", lines=2, elem_id="text", **self.first["text"])
                self.run_with("Corrupt and reconstruct", actions.reconstruct, [self.text, self.noise], "text")
            with gr.Column(**self.first["image_reconstruction"]) as self.image_reconstruction:
                self.picture = self.upload("picture", **self.first["picture"])
                self.run_with("Corrupt and reconstruct", actions.reconstruct, [self.picture, self.noise], "image")
        return tab

    def build_compare(self):
        """Even and optimal timesteps side by side."""
        with gr.Tab("Timesteps", id="compare", **self.first["comparison"]) as self.comparison:
            gr.HTML(
                '<p class="d3pm-about">The same number of steps and the same seed, at evenly spaced timesteps and at those with the '
                "lowest bound.</p>"
            )
            self.number = gr.Dropdown(
                label="Numbers of steps with timesteps of their own", elem_id="number", **self.first["number"]
            )
            self.run_with("Compare", actions.compare, [self.number], "compare")
        return self.comparison

    def build_noise(self) -> None:
        """The matrix of every family, and its noise on a text or a picture."""
        families = [name for name, family in transition_families().items() if not family.needs_elements]
        with gr.Row():
            family = gr.Dropdown(families, value="absorbing", label="Process", elem_id="family")
            schedule = gr.Dropdown(
                list(schedule_names()), value=schedule_names()[0], label="Schedule", elem_id="schedule"
            )
            kind = gr.Radio(["text", "picture"], value="text", label="Noise on", elem_id="kind")
        text = gr.Textbox(NOISE_TEXT, label="Your text", lines=2, elem_id="noise-text")
        picture = self.upload("noise-picture", visible=False, value=noise_picture())
        result = gr.HTML(elem_id="noise-result")

        def show(request: gr.Request, family, schedule, kind, text, picture) -> Iterator[str]:
            data = text if kind == "text" else picture
            moments = show_process(family, schedule, data, 0, kind == "text", self.limits)
            yield from request.request.state.visitor.watch(moments)

        inputs = [family, schedule, kind, text, picture]
        kind.change(
            lambda kind: [gr.update(visible=kind == "text"), gr.update(visible=kind == "picture")],
            kind,
            [text, picture],
            **PRIVATE,
        )
        # Now, and whenever one of them changes.
        gr.on(None, show, inputs, result, trigger_mode="always_last", **PRIVATE)

    def upload(self, name: str, **options):
        """A field for a picture."""
        sources = ["upload", "clipboard"]
        return gr.Image(type="pil", sources=sources, height=260, show_label=False, elem_id=name, **options)

    def run_with(self, title: str, action, inputs: list, name: str, **options):
        """A button that runs an action with the settings, one that stops it, and the place of its result, which is returned.

        Args:
            title: What the button says.
            action: `action(checkpoint, *inputs, settings, limits)` yields HTML.
            inputs: Components beside the checkpoint and the settings.
            name: Start of the ids of the elements.
            options: Options of the place of the result.
        """
        with gr.Row():
            button = gr.Button(title, variant="primary", scale=4, min_width=180, elem_id=f"{name}-run")
            stop = gr.Button("Stop", scale=1, min_width=80, elem_id=f"{name}-stop")
        result = gr.HTML(elem_id=f"{name}-result", **options)

        def run(request: gr.Request, checkpoint_name, *values) -> Iterator[Any]:
            checkpoint = self.checkpoints.get(checkpoint_name) if isinstance(checkpoint_name, str) else None
            if checkpoint is None:
                names = ", ".join(self.checkpoints)
                yield render_error(f"there is no checkpoint of this name here: choose one of {names}"), gr.skip()
                return
            own, randomize, settings = values[: len(inputs)], values[len(inputs)], Settings(*values[len(inputs) + 1 :])
            seed: Any = gr.skip()
            if randomize is True:
                seed = secrets.randbelow(MAX_SEED)
                settings = replace(settings, seed=seed)
            for moment in request.request.state.visitor.watch(action(checkpoint, *own, settings, self.limits)):
                yield moment, seed
                seed = gr.skip()

        self.buttons.append((button, stop, run, inputs, result))
        return result

    def connect(self, blocks) -> None:
        """The events of the buttons, and what belongs to a checkpoint when the page opens and when another one is chosen."""
        components = [getattr(self, name) for name in self.first]
        results = [result for *_, result in self.buttons if result is not self.sample]

        def fit(name) -> Iterator[list[Any]]:
            checkpoint = self.checkpoints[check_name("the checkpoint", name, self.checkpoints)]
            example = self.examples.get(checkpoint.name)
            now = self.fit_to(checkpoint, example)
            yield [*(gr.update(**now[name]) for name in self.first), *[""] * len(results)]
            if example is None:
                then = self.fit_to(
                    checkpoint, self.examples.get(checkpoint.name, len(self.checkpoints) * START_SECONDS)
                )
                changes = [gr.update(**then[name]) if then[name] != now[name] else gr.skip() for name in self.first]
                yield [*changes, *[gr.skip()] * len(results)]

        # Visitors who come before a sample is drawn wait for it side by side.
        options = {**PRIVATE, "concurrency_limit": None}
        fits = [self.name.change(fit, self.name, [*components, *results], **options)]
        fits[0].then(None, None, None, js="() => d3pm.keepTab()", **PRIVATE)
        if self.opening is None:
            fits.append(blocks.load(fit, self.name, [*components, *results], **options))
        events = []
        for button, stop, run, inputs, result in self.buttons:
            values = [self.name, *inputs, self.randomize, *self.settings]
            event = button.click(run, values, [result, self.seed], cancels=fits, **COMPUTES)
            stop.click(None, None, None, cancels=[event], **PRIVATE)
            events.append(event)
        self.name.change(None, None, None, cancels=events, **PRIVATE)

    def fit_to(self, checkpoint: Checkpoint, example: Example | None) -> dict[str, dict[str, Any]]:
        """The options of the components that depend on the checkpoint and its example, if it is drawn, by the name of each."""
        is_text, settings = checkpoint.is_text, example_settings(checkpoint, self.limits)
        numbers = [number for number in checkpoint.chosen_numbers if number <= self.limits.max_steps]
        has_classes = checkpoint.num_class_labels is not None
        classes = [EACH_CLASS, *map(str, range(checkpoint.num_class_labels or 0))]
        if checkpoint.can_guide or not has_classes:
            classes = [NO_CLASS, *classes]
        most = min(self.limits.max_steps, checkpoint.num_timesteps)
        page = render_status("The first sample is being drawn ...") if example is None else example.page
        example = example or Example(gaps=checkpoint.card.example[: self.limits.max_characters])
        picture, for_text, for_images = example.picture, {"visible": is_text}, {"visible": not is_text}
        return {
            "about": {"value": describe(checkpoint)},
            "steps": {"maximum": most, "value": settings.steps, "interactive": not checkpoint.takes_all_steps},
            "sampler": {"choices": [DEFAULT_SAMPLER, *checkpoint.samplers], "value": settings.sampler},
            "seed": {"value": settings.seed},
            "samples": {"value": settings.samples},
            "temperature": {"value": settings.temperature},
            "classes": {"visible": has_classes},
            "label": {"choices": classes, "value": settings.class_label},
            "scale": {"visible": checkpoint.can_guide, "value": settings.guidance_scale},
            "comparison": {"visible": True if numbers else "hidden"},
            "number": {
                "choices": [str(number) for number in numbers],
                "value": str(min(numbers, key=lambda number: abs(number - 10))) if numbers else None,
            },
            "text_infilling": for_text,
            "image_infilling": for_images,
            "text_reconstruction": for_text,
            "image_reconstruction": for_images,
            "sample": {"value": page},
            "gaps": {"value": example.gaps},
            "text": {"value": example.text},
            # The editor misses a picture that comes right after none.
            "canvas": {"value": {"background": picture, "layers": [], "composite": picture}} if picture else {},
            "picture": {"value": picture} if picture else {},
        }
