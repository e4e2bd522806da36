# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Draws the pictures of the page on concepts: each family as a matrix and as noise, the schedules, and the two posteriors of x_0.

    python examples/concepts.py --output_dir outputs/concepts

takes about half a minute, and downloads nothing: the text and the photograph come with Python and with scikit-learn.
"""

import argparse
import string
from pathlib import Path


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--output_dir", type=Path, default=Path("outputs/concepts"), help="Folder for the pictures.")
if __name__ == "__main__":
    parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_sample_image

from d3pm_hf import D3PMScheduler
from d3pm_hf.data import cooccurrence_embeddings, encode_characters, python_prose, unigram_probs
from d3pm_hf.schedules import information


ALPHABET = string.ascii_lowercase + " "  # that of python_prose
SENTENCE = "each letter of a sentence is a state of its own here"
LEVELS, SIZE = 32, 48  # of the photograph
STEPS = 100
DPI = 150
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the T steps
MASK_SIGN = "·"
# The options of each family; embeddings of characters and of levels are added where they are needed.
FAMILIES = {
    "uniform": {},
    "absorbing": {},
    "absorbing_uniform": {},
    "stationary": {},
    "gaussian": {},
    "band_diagonal": {"bandwidth": 8},
    "nearest_neighbor": {"num_neighbors": 4},
    "absorbing_nearest_neighbor": {"num_neighbors": 4, "mask_rate": 0.5},
    "autoregressive": {},
}


def photograph() -> torch.Tensor:
    """A gray photograph of 48 x 48 pixels with 32 levels, `[1, N]`."""
    pixels = torch.from_numpy(load_sample_image("flower.jpg").mean(-1))[:420, 60:480]  # [420, 420]
    small = torch.nn.functional.interpolate(pixels[None, None], size=(SIZE, SIZE), mode="area")[0, 0]
    return (small / 256 * LEVELS).long().reshape(1, -1)


def create_scheduler(family: str, data: torch.Tensor, num_states: int, frequencies, embeddings) -> D3PMScheduler:
    """The process over `num_states` states of data and, where the family has one, a mask after them."""
    has_mask = "absorbing" in family or family == "autoregressive"
    options = dict(FAMILIES[family])
    if family == "stationary":
        options["stationary_probs"] = frequencies
    if "neighbor" in family:
        options["embeddings"] = embeddings
    if family != "autoregressive":
        options["unigram_probs"] = torch.cat([frequencies, frequencies.new_zeros(1)]) if has_mask else frequencies
    steps = data.shape[1] if family == "autoregressive" else STEPS
    return D3PMScheduler(num_states + has_mask, steps, transition=family, **options)


def noisy_states(scheduler: D3PMScheduler, data: torch.Tensor) -> list[torch.Tensor]:
    """x_t after a quarter, a half, three quarters and all of the steps."""
    generator = torch.Generator().manual_seed(0)
    return [scheduler.transition.sample(data, round(share * len(scheduler)), generator)[0] for share in SHARES]


def draw_family(family: str, corpus, output_dir: Path) -> None:
    """Qbar of the levels after half of the steps and the photograph under the noise; below them, the sentence."""
    image, text = photograph(), torch.as_tensor(encode_characters(SENTENCE)).long()[None]
    levels = torch.linspace(-1, 1, LEVELS)[:, None].double()
    frequencies = torch.bincount(image[0], minlength=LEVELS).double() + 1
    image_process = create_scheduler(family, image, LEVELS, frequencies / frequencies.sum(), levels)
    embeddings = cooccurrence_embeddings(corpus) if "neighbor" in family else None
    text_process = create_scheduler(family, text, 27, unigram_probs(corpus), embeddings)

    figure = Figure(figsize=(7.4, 3), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.8, 1.2])
    panels, writing = upper.subplots(1, 5), lower.subplots()
    if family == "autoregressive":  # each position has a matrix of its own: show which are kept
        kept = torch.arange(100)[None] < torch.arange(100, 0, -1)[:, None]
        panels[0].imshow(~kept, cmap="Greys", vmin=0, vmax=2)
        panels[0].set(xlabel="position", ylabel="step t")
        panels[0].set_title("masked at t", fontsize=10)
    else:
        matrix = image_process.transition.matrix(0, STEPS // 2)
        panels[0].imshow(matrix**0.35, cmap="Greys", vmin=0)
        panels[0].set(xlabel="level after T/2 steps", ylabel="level of the data")
        panels[0].set_title(r"$\overline{Q}_{T/2}$", fontsize=10)
    for panel, share, state in zip(panels[1:], SHARES, noisy_states(image_process, image)):
        gray = (state.double() / (LEVELS - 1)).clamp(max=1)
        pixels = gray[:, None].expand(-1, 3).clone()
        pixels[state == LEVELS] = torch.tensor([0.85, 0.35, 0.25], dtype=torch.double)  # the mask
        panel.imshow(pixels.reshape(SIZE, SIZE, 3), interpolation="nearest")
        panel.set_title(f"t = {share:g} T", fontsize=10)
    for panel in panels:
        panel.set(xticks=[], yticks=[])
        panel.xaxis.label.set_fontsize(8.5)
        panel.yaxis.label.set_fontsize(8.5)
    alphabet = ALPHABET + MASK_SIGN
    lines = [("$x_0$", text[0])] + [
        (f"{share:g} T", state) for share, state in zip(SHARES, noisy_states(text_process, text))
    ]
    for row, (label, state) in enumerate(lines):
        for column, token in enumerate(state.tolist()):
            changed = row and token != text[0, column]
            color = "0.6" if token == 27 else "tab:red" if changed else "0.1"
            writing.text(column, row, alphabet[token], color=color, fontsize=10, family="monospace", va="center")
        writing.text(-1, row, label, ha="right", va="center", fontsize=9)
    writing.set(xlim=(-5, len(SENTENCE)), ylim=(4.6, -0.6))
    writing.axis("off")
    figure.savefig(output_dir / f"family_{family}.png", dpi=DPI)


def draw_schedules(corpus, output_dir: Path) -> None:
    """beta_t, the survival of a state and the information that is lost, of uniform noise on characters."""
    steps, frequencies = 1000, unigram_probs(corpus)
    figure = Figure(figsize=(8.6, 2.9), layout="constrained")
    panels = figure.subplots(1, 3)
    entropy = torch.special.entr(frequencies).sum()
    for name in ("linear", "cosine", "reciprocal", "mutual_information"):
        scheduler = D3PMScheduler(27, steps, transition="uniform", beta_schedule=name, unigram_probs=frequencies)
        times = torch.arange(1, steps + 1)
        survival = scheduler.transition.log_survival(0, times, torch.zeros(1)).exp()
        betas = -torch.expm1(scheduler.transition.log_survival(times - 1, times, torch.zeros(1)))
        chosen = range(0, steps + 1, 20)
        lost = [1 - information(frequencies, scheduler.transition.matrix(0, t)) / entropy for t in chosen]
        panels[0].plot(times / steps, betas, label=name)
        panels[1].plot(times / steps, survival)
        panels[2].plot([t / steps for t in chosen], lost)
    panels[0].set(yscale="log", ylim=(3e-4, 1.3), title=r"noise of one step, $\beta_t$")
    panels[1].set(title=r"never drawn anew, $\prod (1 - \beta)$")
    panels[2].set(title="share of the information lost")
    panels[0].legend(frameon=False, fontsize=9)
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.title.set_fontsize(10.5)
        panel.set_xlabel("t / T")
    figure.savefig(output_dir / "schedules.png", dpi=DPI)


def draw_posteriors(corpus, output_dir: Path) -> None:
    """What "th?" says of its last letter, what the noisy letter itself says, both together, and the step that follows."""
    triples = "".join(ALPHABET[token] for token in torch.as_tensor(corpus.tokens[:2_000_000]).tolist())
    counts = torch.tensor([triples.count(f" th{letter}") for letter in ALPHABET], dtype=torch.float64)
    leave_one_out = (counts / counts.sum()).log().clamp(min=-20)
    scheduler = D3PMScheduler(27, 100, transition="uniform", beta_schedule="cosine")
    seen, t, s = torch.tensor([[ALPHABET.index("a")]]), 80, 30
    process = scheduler.transition
    column = process.log_likelihood(seen, 0, t, torch.float64)[0, 0]
    denoising = (leave_one_out + column).log_softmax(-1)
    right = process.posterior_logits(leave_one_out[None, None], seen, s, t)[0, 0].softmax(-1)
    wrong = process.posterior_logits(denoising[None, None], seen, s, t)[0, 0].softmax(-1)
    figure = Figure(figsize=(8, 4), layout="constrained")
    panels = figure.subplots(2, 2).flatten()
    bars = (
        (leave_one_out.exp(), '1. leave-one-out: what " th" says', "C0"),
        (column.exp(), r"2. times the likelihood $q(x_{80} = a \mid x_0)$", "C1"),
        (denoising.exp(), "3. is the denoising posterior", "C2"),
    )
    for panel, (heights, title, color) in zip(panels, bars):
        panel.bar(range(27), heights, color=color)
        panel.set_title(title, fontsize=10)
    panels[3].bar([i - 0.2 for i in range(27)], right, width=0.4, color="C0", label="from leave-one-out: right")
    panels[3].bar([i + 0.2 for i in range(27)], wrong, width=0.4, color="C3", label="from denoising: counted twice")
    panels[3].set_title(r"4. the step of eq. 4, $p(x_{30} \mid x_{80} = a)$", fontsize=10)
    panels[3].legend(frameon=False, fontsize=9)
    for panel in panels:
        panel.set_xticks(range(27), labels=[*ALPHABET[:26], "_"], fontsize=8)
        panel.set_yticks([])
    figure.savefig(output_dir / "leave_one_out.png", dpi=DPI)


if __name__ == "__main__":
    options = parser.parse_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    prose, _ = python_prose(64)
    for name in FAMILIES:
        draw_family(name, prose, options.output_dir)
    draw_schedules(prose, options.output_dir)
    draw_posteriors(prose, options.output_dir)
