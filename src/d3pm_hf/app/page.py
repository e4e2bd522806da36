# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The layout of the page in Gradio. What its buttons do stands in `actions` and `processes`.

No component holds a state on the server: a request brings everything that it needs, and visitors share nothing but the networks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import gradio as gr

from ..schedules import schedule_names
from ..transitions.registry import transition_families
from . import actions
from .checkpoints import Checkpoint
from .examples import CANVAS_SIDE, example_picture, example_steps, example_text, noise_picture
from .limits import Limits, check_name
from .player import SCRIPT, escape, render_error
from .processes import show_process
from .runs import DEFAULT_SAMPLER, NO_CLASS, Settings
from .style import STYLE


TITLE = "Discrete diffusion, step by step"
ABOUT = (
    "Watch a D3PM write text and paint pictures, from noise to data. Move the slider to go back in time; the color of a token tells "
    "when it was written, from violet to orange."
)
NOISE_TEXT = (
    "the quick brown fox jumps over the lazy dog, and a transition matrix says what becomes of each of its letters"
)
# The largest file that a visitor may upload.
MAX_FILE_SIZE = "4mb"
# Requests that wait for their turn; more are refused.
MAX_WAITING = 32
# Events are those of the page itself: they are no interface for programs.
PRIVATE: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
# Requests that call a network share one limit.
COMPUTES: dict[str, Any] = {**PRIVATE, "concurrency_id": "networks"}


def create_page(checkpoints: Mapping[str, Checkpoint], limits: Limits):
    """The page for some checkpoints by their names, as a `gradio.Blocks`."""
    page = Page(checkpoints, limits)
    with gr.Blocks(title=TITLE, analytics_enabled=False) as blocks:
        gr.HTML(f"<h1>{TITLE}</h1><p>{ABOUT}</p>", elem_id="d3pm-title")
        page.build()
    return blocks


def serve(blocks, host: str | None, port: int | None, max_requests: int) -> None:
    """Serves the page until it is interrupted. It loads nothing from other servers, and tells none of its use."""
    theme = gr.themes.Soft(
        primary_hue="indigo", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    blocks.queue(default_concurrency_limit=max_requests, max_size=MAX_WAITING, api_open=False)
    _, address, _ = blocks.launch(
        server_name=host,
        server_port=port,
        share=False,
        ssr_mode=False,
        enable_monitoring=False,
        mcp_server=False,
        pwa=False,
        max_file_size=MAX_FILE_SIZE,
        footer_links=[],
        theme=theme,
        css=STYLE,
        head=f"<script>{SCRIPT}</script>",
        quiet=True,
        prevent_thread_lock=True,
    )
    print(f"The page is at {address} and stays there until Ctrl+C.", flush=True)
    blocks.block_thread()


class Page:
    """Builds the components, and says what each event does.

    Args:
        checkpoints: The checkpoints by name.
        limits ([`Limits`]): The largest requests.
    """

    def __init__(self, checkpoints: Mapping[str, Checkpoint], limits: Limits):
        self.checkpoints, self.limits = checkpoints, limits
        self.examples = {name: self.draw_examples(checkpoint) for name, checkpoint in checkpoints.items()}

    def draw_examples(self, checkpoint: Checkpoint) -> tuple[Any, Any]:
        """What the fields hold for a checkpoint: a text and one with gaps, or a picture twice."""
        if checkpoint.is_text:
            return example_text(checkpoint)
        picture = example_picture(checkpoint)
        return picture, picture

    def build(self) -> None:
        """All components and events of the page."""
        if not self.checkpoints:
            gr.HTML(
                '<p class="d3pm-about">No checkpoint is loaded: the operator can name some when starting the page.</p>'
            )
            self.build_noise()
            return
        self.first = self.fit_to(next(iter(self.checkpoints.values())))
        with gr.Group() as group:
            self.build_settings()
        with gr.Tabs():
            tabs = [self.build_generate(), self.build_infill(), self.build_reconstruct(), self.build_compare()]
            with gr.Tab("Noise", id="noise") as noise:
                self.build_noise()
        for tab in tabs:
            tab.select(lambda: gr.update(visible=True), None, group, **PRIVATE)
        noise.select(lambda: gr.update(visible=False), None, group, **PRIVATE)
        self.follow_checkpoint()

    def build_settings(self) -> None:
        """The choice of a checkpoint, and the settings of a call."""
        limits, names = self.limits, list(self.checkpoints)
        with gr.Row():
            self.name = gr.Dropdown(names, value=names[0], label="Checkpoint", elem_id="checkpoint")
            self.steps = gr.Slider(1, step=1, label="Steps", elem_id="steps", **self.first["steps"])
            self.sampler = gr.Dropdown(label="Sampler", elem_id="sampler", **self.first["sampler"])
        self.about = gr.HTML(elem_id="about", **self.first["about"])
        with gr.Row(**self.first["classes"]) as self.classes:
            self.label = gr.Dropdown(label="Class", elem_id="label", **self.first["label"])
            self.scale = gr.Slider(0, 10, 2, step=0.1, label="Guidance", elem_id="guidance", **self.first["scale"])
        with gr.Accordion("More settings", open=False), gr.Row():
            self.samples = gr.Slider(
                1, limits.max_samples, step=1, label="Samples", elem_id="samples", **self.first["samples"]
            )
            self.temperature = gr.Slider(
                0.05, 2, step=0.05, label="Temperature", elem_id="temperature", **self.first["temperature"]
            )
            self.particles = gr.Slider(1, limits.max_particles, 1, step=1, label="Particles", elem_id="particles")
            self.seed = gr.Number(0, precision=0, minimum=0, label="Seed", elem_id="seed")
        # In the order of `Settings`.
        self.settings = [self.steps, self.sampler, self.temperature, self.seed, self.samples, self.particles]
        self.settings += [self.label, self.scale]

    def build_generate(self):
        """Samples from noise to data."""
        with gr.Tab("Generate", id="generate") as tab:
            self.run_with("Generate", actions.generate, [], "generate")
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
        with gr.Tab("Timesteps", id="compare") as tab:
            gr.HTML(
                '<p class="d3pm-about">The same number of steps and the same seed, at evenly spaced timesteps and at those with the '
                "lowest bound.</p>"
            )
            self.number = gr.Dropdown(
                label="Numbers of steps with timesteps of their own", elem_id="number", **self.first["number"]
            )
            self.run_with("Compare", actions.compare, [self.number], "compare")
        return tab

    def build_noise(self) -> None:
        """The matrix of every family, and its noise on a text or a picture."""
        families = list(transition_families())
        with gr.Row():
            family = gr.Dropdown(families, value="absorbing", label="Process", elem_id="family")
            schedule = gr.Dropdown(
                list(schedule_names()), value=schedule_names()[0], label="Schedule", elem_id="schedule"
            )
            kind = gr.Radio(["text", "picture"], value="text", label="Noise on", elem_id="kind")
        text = gr.Textbox(NOISE_TEXT, label="Your text", lines=2, elem_id="noise-text")
        picture = self.upload("noise-picture", visible=False, value=noise_picture())
        result = gr.HTML(elem_id="noise-result")

        def show(family, schedule, kind, text, picture) -> Iterator[str]:
            data = text if kind == "text" else picture
            yield from show_process(family, schedule, data, 0, kind == "text", self.limits)

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

    def run_with(self, title: str, action, inputs: list, name: str) -> None:
        """A button that runs an action with the settings, one that stops it, and the place of its result.

        Args:
            title: What the button says.
            action: `action(checkpoint, *inputs, settings, limits)` yields HTML.
            inputs: Components beside the checkpoint and the settings.
            name: Start of the ids of the elements.
        """
        with gr.Row():
            button = gr.Button(title, variant="primary", scale=4, min_width=180, elem_id=f"{name}-run")
            stop = gr.Button("Stop", scale=1, min_width=80, elem_id=f"{name}-stop")
        result = gr.HTML(elem_id=f"{name}-result")

        def run(checkpoint_name, *values) -> Iterator[str]:
            checkpoint = self.checkpoints.get(checkpoint_name) if isinstance(checkpoint_name, str) else None
            if checkpoint is None:
                yield render_error(
                    f"there is no checkpoint of this name here: choose one of {', '.join(self.checkpoints)}"
                )
                return
            own, settings = values[: len(inputs)], Settings(*values[len(inputs) :])
            yield from action(checkpoint, *own, settings, self.limits)

        event = button.click(run, [self.name, *inputs, *self.settings], result, **COMPUTES)
        stop.click(None, None, None, cancels=[event], **PRIVATE)

    def follow_checkpoint(self) -> None:
        """Shows what belongs to the checkpoint whenever another one is chosen."""
        names = list(self.first)

        def fit(name) -> list[Any]:
            checkpoint = self.checkpoints[check_name("the checkpoint", name, self.checkpoints)]
            options = self.fit_to(checkpoint)
            return [gr.update(**options[name]) for name in names]

        self.name.change(fit, self.name, [getattr(self, name) for name in names], **PRIVATE)

    def fit_to(self, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
        """The options of the components that depend on the checkpoint, by the name of each."""
        is_text = checkpoint.is_text
        numbers = [number for number in checkpoint.chosen_numbers if number <= self.limits.max_steps]
        has_classes = checkpoint.num_class_labels is not None
        classes = [str(label) for label in range(checkpoint.num_class_labels or 0)]
        if checkpoint.can_guide or not has_classes:
            classes = [NO_CLASS, *classes]
        most = min(self.limits.max_steps, checkpoint.num_timesteps)
        steps = {"maximum": most, "value": min(most, example_steps(checkpoint))}
        whole, gapped = self.examples[checkpoint.name]
        for_text, for_images = {"visible": is_text}, {"visible": not is_text}
        return {
            "about": {"value": f'<p class="d3pm-about">{escape(checkpoint.description)}</p>'},
            "steps": {**steps, "interactive": not checkpoint.takes_all_steps},
            "sampler": {"choices": [DEFAULT_SAMPLER, *checkpoint.samplers], "value": DEFAULT_SAMPLER},
            "samples": {"value": min(4 if is_text else 8, self.limits.max_samples)},
            # A small model of text spreads its probability over many tokens: a temperature below 1 takes the likelier ones.
            "temperature": {"value": 0.8 if is_text else 1.0},
            "classes": {"visible": has_classes},
            "label": {"choices": classes, "value": classes[0]},
            "scale": {"visible": checkpoint.can_guide},
            "number": {
                "choices": [str(number) for number in numbers],
                "value": str(min(numbers, key=lambda number: abs(number - 10))) if numbers else None,
                "visible": bool(numbers),
            },
            "text_infilling": for_text,
            "image_infilling": for_images,
            "text_reconstruction": for_text,
            "image_reconstruction": for_images,
            "gaps": {"value": gapped if is_text else ""},
            "text": {"value": whole if is_text else ""},
            "canvas": {"value": None if is_text else {"background": gapped, "layers": [], "composite": gapped}},
            "picture": {"value": None if is_text else whole},
        }
