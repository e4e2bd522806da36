# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""States over time as HTML with a slider. Everything that comes from outside is escaped here.

The HTML shows the last frame as it is. `SCRIPT` and `STYLE` stand in the head of the page once: the slider then shows the other
frames without a request. The script writes text as text, never as HTML.
"""

import base64
import html
import io
import json
import math
from dataclasses import dataclass

from PIL import Image

from ..visualization.trajectory import MASK_SIGN


@dataclass(frozen=True)
class TextPanel:
    """A text over time.

    Args:
        title (`str`): Heading.
        frames (`list[list[str]]`): The tokens of each frame, all of the same number.
        labels (`list[str]`, *optional*): What is written beside the heading at each frame.
        columns (`int`, *optional*): Number of columns of a text that is a grid, with a token in each cell.
    """

    title: str
    frames: list[list[str]]
    labels: list[str] | None = None
    columns: int | None = None

    def render(self) -> str:
        last = max(len(self.frames) - 1, 1)
        spans = [render_token(history, last, len(self.frames) - 1) for history in histories(self.frames)]
        if self.columns:
            cells = "".join(render_cell(span, i, self.columns) for i, span in enumerate(spans))
            return f'<p class="d3pm-text d3pm-grid" style="--columns: {self.columns}">{cells}</p>'
        words = ["".join(spans[begin:end]) for begin, end in find_words(self.frames[-1])]
        return f'<p class="d3pm-text">{"".join(f"<span>{word}</span>" for word in words)}</p>'


@dataclass(frozen=True)
class ImagePanel:
    """Pictures over time, all of one size; small ones are enlarged.

    Args:
        title (`str`): Heading.
        frames (`list[PIL.Image.Image]`): The picture of each frame.
        labels (`list[str]`, *optional*): What is written beside the heading at each frame.
        description (`str`, defaults to `"picture"`): What the picture shows, for readers of the screen.
        max_scale (`int`, defaults to 28): The largest factor to enlarge by.
        signs (`str`, defaults to `""`): One sign for each row and each column of pixels, to be written beside them.
    """

    title: str
    frames: list[Image.Image]
    labels: list[str] | None = None
    description: str = "picture"
    max_scale: int = 28
    signs: str = ""

    def render(self) -> str:
        width, height = self.frames[0].size
        number = len(self.frames)
        scale = max(1, min(self.max_scale, 700 // width, 400 // height))
        style = (
            f"background-image: url({to_address(stack(self.frames))}); background-size: 100% {100 * number}%; "
            f"background-position: 0 100%; aspect-ratio: {width} / {height}; width: min(100%, {width * scale}px)"
        )
        frames = (
            f'<div class="d3pm-frames" role="img" aria-label="{escape(self.description)}" data-number="{number}" '
            f'style="{style}"></div>'
        )
        if not self.signs:
            return frames
        axis = "".join(f"<span>{escape(sign)}</span>" for sign in self.signs)
        size = f"--sign: {min(scale, 13)}px; --side: {width * scale}px"
        return f'<div class="d3pm-axes" style="{size}"><b></b><div>{axis}</div><div>{axis}</div>{frames}</div>'


def find_words(tokens: list[str]) -> list[tuple[int, int]]:
    """The words of some tokens, as a beginning and an end each. Lines end between words, at all frames at the same places.

    A word begins at a token that has a space in front, and after one that ends in a space. A mask stands alone.
    """
    begins = [0]
    for i, (before, token) in enumerate(zip(tokens, tokens[1:]), 1):
        if MASK_SIGN in (before, token) or before[-1:].isspace() or (token[:1].isspace() and not token.isspace()):
            begins.append(i)
    return list(zip(begins, begins[1:] + [len(tokens)]))


def histories(frames: list[list[str]]) -> list[list[tuple[int, str]]]:
    """For each position the frames at which its token changes, from the first one on, and the token from there on."""
    found: list[list[tuple[int, str]]] = [[(0, token)] for token in frames[0]]
    for i, frame in enumerate(frames[1:], 1):
        for history, token in zip(found, frame):
            if token != history[-1][1]:
                history.append((i, token))
    return found


def render_token(history: list[tuple[int, str]], last: int, shown: int) -> str:
    """A token at the frame `shown`, which the script changes to any other. Its color tells when it was written."""
    frame, token = history[-1]
    kind = "mask" if token == MASK_SIGN else "" if frame == 0 else "written"
    kind += " new" if frame == shown and frame else ""
    times = json.dumps(history, separators=(",", ":"), ensure_ascii=False)
    return f'<span class="{kind.strip()}" style="--age: {frame / last:.3f}" data-history="{escape(times)}">{escape(token)}</span>'


def render_cell(span: str, number: int, columns: int) -> str:
    """A cell of a grid. A grid of n x n columns has thicker lines around its boxes."""
    side, place = math.isqrt(columns), divmod(number, columns)
    edges = [name for name, i in zip(("below", "right"), place) if side * side == columns and (i + 1) % side == 0]
    return f'<span class="{" ".join(edges)}">{span}</span>'


def render_player(panels: list[TextPanel | ImagePanel], labels: list[str], status: str = "", notes: str = "") -> str:
    """Panels side by side and below each other, with one slider for all of them.

    Args:
        panels: Panels with one number of frames.
        labels: What is written beside the slider at each frame.
        status: A line below the panels.
        notes: HTML behind the panels, which is shown as it is.
    """
    figures = "".join(render_figure(panel) for panel in panels)
    last, bar = len(labels) - 1, ""
    if last:
        bar = (
            '<div class="d3pm-bar"><button type="button" onclick="d3pm.play(this)" aria-label="play">&#9654;</button>'
            f'<input type="range" min="0" max="{last}" value="{last}" aria-label="time" oninput="d3pm.move(this)">'
            f"<output>{escape(labels[-1])}</output></div>"
        )
    return (
        f'<div class="d3pm-player" data-labels="{escape(json.dumps(labels))}">{bar}'
        f'<div class="d3pm-panels">{figures}</div>{notes}{render_status(status)}</div>'
    )


def render_figure(panel: TextPanel | ImagePanel) -> str:
    """A panel with its heading."""
    kind = "d3pm-wide" if isinstance(panel, TextPanel) else ""
    label = ""
    if panel.labels:
        times = escape(json.dumps(panel.labels))
        label = f'<span class="d3pm-label" data-labels="{times}">{escape(panel.labels[-1])}</span>'
    heading = f"<figcaption>{escape(panel.title)} {label}</figcaption>" if panel.title or label else ""
    return f'<figure class="{kind}">{heading}{panel.render()}</figure>'


def render_status(status: str) -> str:
    """A line that says what has been done."""
    return f'<p class="d3pm-status">{escape(status)}</p>' if status else ""


def render_error(message: str) -> str:
    """One sentence about what is wrong with a request."""
    sentence = message[:1].upper() + message[1:]
    return f'<p class="d3pm-error" role="alert">{escape(sentence)}</p>'


def render_ticks(rows: dict[str, list[int]], num_timesteps: int) -> str:
    """Rows of timesteps as marks on a line from the noise on the left to the data on the right."""
    lines = []
    for title, timesteps in rows.items():
        places = [1 - (t + 1) / num_timesteps for t in timesteps]
        marks = "".join(f'<i style="left: {100 * place:.2f}%"></i>' for place in places)
        lines.append(f'<div class="d3pm-ticks"><span>{escape(title)}</span><div>{marks}</div></div>')
    ends = '<div class="d3pm-ticks d3pm-ends"><span></span><div><b>noise</b><b>data</b></div></div>'
    return f'<div class="d3pm-rows">{"".join(lines)}{ends}</div>'


def escape(text: str) -> str:
    """A text that is safe inside an element and inside a quoted attribute."""
    return html.escape(text, quote=True)


def stack(frames: list[Image.Image]) -> Image.Image:
    """Pictures of one size below each other."""
    width, height = frames[0].size
    whole = Image.new("RGB", (width, height * len(frames)))
    for i, frame in enumerate(frames):
        whole.paste(frame, (0, i * height))
    return whole


def to_address(picture: Image.Image) -> str:
    """A picture as an address that holds it, for a style or an `<img>`."""
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=picture.width * picture.height < 100_000)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


SCRIPT = """
window.d3pm = {
  show(player, frame) {
    const output = player.querySelector("output");
    if (output) output.textContent = JSON.parse(player.dataset.labels)[frame];
    player.querySelectorAll(".d3pm-label").forEach(label => {
      label.textContent = JSON.parse(label.dataset.labels)[frame];
    });
    const last = Math.max(JSON.parse(player.dataset.labels).length - 1, 1);
    player.querySelectorAll("span[data-history]").forEach(span => {
      const history = JSON.parse(span.dataset.history);
      const [since, token] = history.filter(([from]) => from <= frame).pop();
      span.textContent = token;
      span.className = token === "MASK_SIGN" ? "mask" : since ? "written" : "";
      if (since && since === frame) span.classList.add("new");
      span.style.setProperty("--age", since / last);
    });
    player.querySelectorAll(".d3pm-frames").forEach(frames => {
      frames.style.backgroundPosition = "0 " + 100 * frame / Math.max(frames.dataset.number - 1, 1) + "%";
    });
  },
  keepTab() {  // the tab that was open may be gone
    const tabs = [...document.querySelectorAll("[role=tab]")];
    if (!tabs.some(tab => tab.getAttribute("aria-selected") === "true")) tabs[0].click();
  },
  showSettings(shown) {  // the tab Noise has settings of its own
    document.getElementById("settings").style.display = shown ? "" : "none";
  },
  move(slider) {
    const player = slider.closest(".d3pm-player");
    d3pm.pause(player);
    d3pm.show(player, +slider.value);
  },
  pause(player) {
    clearInterval(player.d3pmTimer);
    player.d3pmTimer = null;
    player.querySelector("button").innerHTML = "&#9654;";
  },
  play(button) {
    const player = button.closest(".d3pm-player"), slider = player.querySelector("input");
    if (player.d3pmTimer) return d3pm.pause(player);
    if (slider.value === slider.max) slider.value = 0;
    button.innerHTML = "&#10074;&#10074;";
    d3pm.show(player, +slider.value);
    player.d3pmTimer = setInterval(() => {
      if (!player.isConnected || slider.value === slider.max) return d3pm.pause(player);
      slider.value = +slider.value + 1;
      d3pm.show(player, +slider.value);
    }, Math.min(220, 4500 / slider.max));
  },
};
""".replace("MASK_SIGN", MASK_SIGN)

# Colors are those of the theme of Gradio.
STYLE = """
.gradio-container { max-width: 1080px !important; width: 100%; margin: 0 auto !important; }
#d3pm-title h1 { font-size: 1.55rem; margin: .2rem 0 0; letter-spacing: -.01em; }
#d3pm-title p { color: var(--body-text-color); opacity: .7; margin: .25rem 0 0; }
#d3pm-title a, .d3pm-about a { padding: 0; margin: 0; }
.d3pm-about { color: var(--body-text-color); opacity: .7; font-size: .85rem; margin: 0; }
#about { background: var(--block-background-fill); padding: 0 var(--block-padding) .5rem !important; }
.d3pm-player { display: flex; flex-direction: column; gap: .8rem; min-width: 0; }
.d3pm-bar { display: flex; align-items: center; gap: .75rem; }
.d3pm-bar button { width: 2.4rem; height: 2.4rem; flex: none; border-radius: 50%; color: white; font-size: .85rem;
  background: var(--button-primary-background-fill, #4f46e5); cursor: pointer; }
.d3pm-bar input { flex: 1; min-width: 0; accent-color: #4f46e5; }
.d3pm-bar output { min-width: 7.5rem; text-align: right; font-variant-numeric: tabular-nums; font-size: .9rem; }
.d3pm-panels { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; align-items: flex-start; }
.d3pm-panels figure { margin: 0; flex: 0 1 auto; min-width: 0; max-width: 100%; }
.d3pm-panels figure:has(.d3pm-frames) { flex: 1 1 300px; }
.d3pm-panels figure.d3pm-wide { flex: 1 1 22rem; }
.d3pm-panels figcaption { font-size: .85rem; font-weight: 600; margin-bottom: .35rem; }
.d3pm-label { font-weight: 400; color: var(--body-text-color); opacity: .7; font-variant-numeric: tabular-nums; }
.d3pm-text { font: 1.02rem/1.85 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; margin: 0; padding: .7rem .9rem;
  border: 1px solid var(--border-color-primary); border-radius: .6rem; background: var(--background-fill-primary);
  white-space: pre-wrap; overflow-wrap: anywhere; }
.d3pm-text > span { display: inline-block; max-width: 100%; }
.d3pm-text span span { border-radius: .22em; padding: .12em 0; color: var(--body-text-color); transition: background-color .2s; }
.d3pm-text span.mask { color: #b3b3c0; }
.d3pm-text span.written { background: hsl(calc(255 - 225 * var(--age)) 85% 62% / .3); }
.d3pm-text span.new { background: hsl(calc(255 - 225 * var(--age)) 90% 55% / .75); font-weight: 700; }
.d3pm-grid { display: grid; grid-template-columns: repeat(var(--columns), 2em); width: max-content; max-width: 100%; }
.d3pm-grid > span { display: block; text-align: center; border-right: 1px solid var(--border-color-primary);
  border-bottom: 1px solid var(--border-color-primary); }
.d3pm-grid > span.right { border-right: 2px solid var(--body-text-color); }
.d3pm-grid > span.below { border-bottom: 2px solid var(--body-text-color); }
.d3pm-grid span span { display: block; border-radius: 0; }
.d3pm-frames { image-rendering: pixelated; border-radius: .35rem; background-repeat: no-repeat; }
.d3pm-axes { display: grid; grid-template-columns: max-content minmax(0, var(--side));
  font: var(--sign)/1 ui-monospace, "DejaVu Sans Mono", monospace; gap: 3px 4px; }
.d3pm-axes > div:nth-child(2), .d3pm-axes > div:nth-child(3) { display: flex; opacity: .7; }
.d3pm-axes > div:nth-child(3) { flex-direction: column; }
.d3pm-axes > div > span { flex: 1 1 0; display: flex; align-items: center; justify-content: center; min-width: 0; min-height: 0;
  overflow: hidden; }
.d3pm-status { color: var(--body-text-color); opacity: .7; font-size: .85rem; margin: 0; font-variant-numeric: tabular-nums; }
.d3pm-error { border-left: 4px solid #dc2626; background: rgb(220 38 38 / .1); color: var(--body-text-color); margin: 0;
  padding: .7rem .9rem; border-radius: .3rem; overflow-wrap: anywhere; }
.d3pm-rows { display: flex; flex-direction: column; gap: .3rem; }
.d3pm-ticks { display: flex; gap: .75rem; align-items: center; font-size: .85rem; }
.d3pm-ticks > span { width: 4.5rem; flex: none; }
.d3pm-ticks > div { position: relative; flex: 1; height: 1.1rem; border-bottom: 1px solid var(--border-color-primary); }
.d3pm-ticks i { position: absolute; width: 2px; height: 100%; background: #4f46e5; border-radius: 1px; }
.d3pm-ends > div { border: 0; display: flex; justify-content: space-between; }
.d3pm-ends b { font-weight: 400; color: var(--body-text-color); opacity: .7; }
.d3pm-scale { display: inline-block; width: 6rem; height: .7rem; border-radius: .2rem; vertical-align: -1px; }
.dark .d3pm-text span.mask { color: #6d6d7d; }
@media (max-width: 640px) {
  .gradio-container { padding: .5rem !important; }
  .d3pm-bar output { min-width: 5.5rem; font-size: .8rem; }
  .d3pm-text { font-size: .95rem; padding: .55rem .6rem; }
}
"""
