# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Draws the paper's figures from our own runs. Each name is one picture.

    python examples/reproduce/figures.py mask_weighting
    python examples/reproduce/figures.py noise_schedules --checkpoints outputs/reproduce

Curves are drawn from docs/results, samples from the checkpoints of run.py in outputs/reproduce. `make figure1` draws Figure 1, the
swiss roll.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import networkx
import numpy as np
import torch
from diffusers.utils import make_image_grid
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from scipy.optimize import curve_fit
from tqdm.auto import tqdm

from d3pm_hf import D3PMPipeline, D3PMScheduler, Trajectory
from d3pm_hf.data import cooccurrence_embeddings, load_text8
from d3pm_hf.training.script_arguments import HOUR_TEXT
from d3pm_hf.transitions.rates import nearest_neighbor_rates


ROOT = Path(__file__).parents[2]
LABELS = {
    "uniform": "uniform",
    "nearest_neighbor": "nearest neighbors",
    "absorbing": "absorbing",
    "autoregressive": "autoregressive",
}
COLORS = {"uniform": "C0", "nearest_neighbor": "C1", "absorbing": "C2", "autoregressive": "0.35"}
TIMED_STEPS = (5, 10, 20, 64, 256, 1000)
MASK_COLOR, CHANGED_COLOR = "0.65", "tab:red"


# ---------------------------------------------------------------------------------------------------------------------
# Curves


def scaling(options) -> None:
    """The bound against the number of inference steps, of characters and of word pieces."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    panels = (
        ("text", "bits_per_dim", "standard_error", "bits per character (upper bound)"),
        ("pieces", "word_perplexity", "word_perplexity_standard_error", "perplexity per word (upper bound)"),
    )
    for ax, (table, value, error, label) in zip(figure.subplots(1, 2), panels):
        for name, title in LABELS.items():
            rows = json.loads((options.results_dir / f"{table}-{name}-0.json").read_text())["steps"]
            if name == "autoregressive":
                ax.axhline(rows[0][value], color=COLORS[name], linestyle="--", label=title)
                continue
            steps, values, errors = zip(*((row["num_inference_steps"], row[value], row[error]) for row in rows))
            ax.errorbar(steps, values, errors, fmt="o-", capsize=2, color=COLORS[name], label=title)
        ax.set(xscale="log", xlabel="inference steps", ylabel=label)
        ax.set_xticks([5, 10, 20, 64, 256, 1000], labels=["5", "10", "20", "64", "256", "1000"])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.28))
    save(figure, options, "scaling")


def power_law(tokens, limit, factor, exponent):
    """Bits per character after a number of tokens."""
    return limit + factor * tokens**-exponent


def tokens_seen(options) -> None:
    """The bound on the validation text against the number of characters seen in training, with a power law through it."""
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    ax = figure.subplots()
    per_step = HOUR_TEXT["train_batch_size"] * HOUR_TEXT["sequence_length"]
    for name, title in LABELS.items():
        path = options.results_dir / f"text8-{name}-0.json"
        if not path.is_file():
            continue
        lines = json.loads(path.read_text())["validation"]
        millions = np.array([line["step"] for line in lines]) * per_step / 1e6
        values, errors = (
            np.array([line[f"eval_{key}"] for line in lines]) for key in ("bits_per_dim", "standard_error")
        )
        fit, _ = curve_fit(power_law, millions, values, p0=(values[-1] - 0.2, 1.0, 0.5), bounds=(0, np.inf))
        print(f"{title}: {fit[0]:.2f} + {fit[1]:.2f} M^-{fit[2]:.2f} bits per character after M million characters")
        ax.errorbar(millions, values, errors, fmt="o", markersize=3, color=COLORS[name])
        label = f"{title}, exponent {fit[2]:.2f}"
        ax.plot(millions, power_law(millions, *fit), color=COLORS[name], linewidth=1, label=label)
    ax.set(xscale="log", xlabel="characters seen, in millions", ylabel="bits per character (validation)")
    ax.set_xticks([2, 5, 10, 20, 30], labels=["2", "5", "10", "20", "30"])
    ax.minorticks_off()
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    save(figure, options, "tokens_seen")


def inference_time(options) -> None:
    """Seconds to draw one sample against the number of steps, and those of the autoregressive model; measured again."""
    pipelines = {name: load(options, f"text-{name}-0") for name in LABELS}
    length = pipelines["absorbing"].config.sequence_length
    points = [(name, steps) for steps in TIMED_STEPS for name in LABELS if name != "autoregressive"]
    points.append(("autoregressive", length))
    seconds = {point: [] for point in points}
    for round_number in tqdm(range(1 + 5), desc="rounds"):  # the first does not count
        for name, steps in points:
            begin = time.perf_counter()
            pipelines[name](num_inference_steps=steps, generator=torch.Generator().manual_seed(round_number))
            seconds[name, steps].append(time.perf_counter() - begin)
    rows = [
        {
            "run": f"text-{name}",
            "num_inference_steps": steps,
            "seconds": statistics.mean(times[1:]),
            "seconds_deviation": statistics.stdev(times[1:]),
        }
        for (name, steps), times in seconds.items()
    ]
    protocol = (
        f"one sample of {length} characters at a time, mean and deviation of 5, {torch.get_num_threads()} threads"
    )
    result = {"protocol": protocol, "rows": rows}
    (options.results_dir / "inference_time.json").write_text(json.dumps(result, indent=2) + "\n")

    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    ax = figure.subplots()
    for name, title in LABELS.items():
        own = [row for row in rows if row["run"] == f"text-{name}"]
        times, steps = [row["seconds"] for row in own], [row["num_inference_steps"] for row in own]
        if name == "autoregressive":
            ax.axhline(times[0], color=COLORS[name], linestyle="--", label=f"{title}, {steps[0]} tokens")
        else:
            ax.errorbar(
                steps, times, [row["seconds_deviation"] for row in own], fmt="o-", color=COLORS[name], label=title
            )
    ax.set(xscale="log", yscale="log", xlabel="inference steps", ylabel="seconds per sample")
    ax.grid(alpha=0.3, which="both")
    ax.legend(frameon=False)
    save(figure, options, "inference_time")


def mask_weights(num_tokens: int, num_steps: int) -> torch.Tensor:
    """alpha(k) of the paper's appendix: how likely k tokens are masked at a random time, `[num_tokens + 1]`."""
    scheduler = D3PMScheduler(2, num_train_timesteps=num_steps, transition="absorbing", beta_schedule="reciprocal")
    steps, data = torch.arange(1, num_steps + 1), torch.zeros(num_steps, 1, dtype=torch.long)
    masked = scheduler.transition.log_marginal(data, 0, steps, torch.float64)[:, 0, 1].exp()  # [T]
    counts = torch.arange(num_tokens + 1)
    return torch.distributions.Binomial(num_tokens, masked[:, None]).log_prob(counts.double()).exp().mean(0)


def mask_weighting(options) -> None:
    """How likely k of 50 tokens are masked under an absorbing process of 50 steps: alpha(k) of the paper's appendix."""
    num_tokens = 50
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    ax = figure.subplots()
    ax.bar(
        range(num_tokens + 1),
        mask_weights(num_tokens, num_steps=50),
        width=0.8,
        color=COLORS["absorbing"],
        label="absorbing, T = 50",
    )
    ax.axhline(1 / num_tokens, color="0.3", linestyle="--", label="the same for all k > 0")
    ax.set(xlabel="masked tokens k of 50", ylabel="probability")
    ax.legend(frameon=False, loc="upper center")
    save(figure, options, "mask_weighting")


def neighbor_graph(options) -> None:
    """The symmetrized 5-NN graph of characters, by which of them stand beside which in the training text."""
    alphabet = "abcdefghijklmnopqrstuvwxyz␣"
    embeddings = cooccurrence_embeddings(load_text8("train", dataset_path=options.text_path))
    rates = nearest_neighbor_rates(embeddings, 5).to_dense()
    graph = networkx.Graph((i, j) for i, j in (rates > 0).nonzero().tolist())
    places = networkx.spring_layout(graph, seed=3, iterations=500)

    figure = Figure(figsize=(6, 5.4), layout="constrained")
    ax = figure.subplots()
    for i, j in graph.edges:
        mutual = rates[i, j] > 0.15  # each is among the five of the other
        ax.plot(
            *zip(places[i], places[j]), color="0.45" if mutual else "0.8", linewidth=1.4 if mutual else 0.8, zorder=1
        )
    vowels = [i for i in graph if alphabet[i] in "aeiou"]
    for i, (x, y) in places.items():
        ax.scatter(
            x, y, s=340, color="#ffd9a0" if i in vowels else "#cfe3f5", edgecolor="0.4", linewidth=0.8, zorder=2
        )
        ax.text(x, y, alphabet[i], ha="center", va="center", fontsize=11, zorder=3)
    ax.set_axis_off()
    save(figure, options, "neighbor_graph")


# ---------------------------------------------------------------------------------------------------------------------
# Text. A picture of it has blocks with a title and rows; a row has a label and pieces of text, each with a color.

FONT_SIZE, DPI = 8, 150
CELL, LINE = 10 / DPI, 25 / DPI  # of a monospaced character of this size, in inches


def draw_text(blocks: list, options, name: str, num_columns: int, label_width: int = 9) -> None:
    lines = []  # (row of the picture, column, text, style)
    row = 0
    for title, rows in blocks:
        lines.append((row, 0, title, {"weight": "bold"}))
        row += 1
        for label, pieces in rows:
            lines.append((row, 0, label, {"color": "0.5"}))
            column = 0
            for text, color in pieces:
                if column + len(text) > num_columns:
                    row, column, text = row + 1, 0, text.lstrip(" ")
                lines.append((row, label_width + column, text, {"color": color}))
                column += len(text)
            row += 1
        row += 1
    width, height = (num_columns + label_width + 2) * CELL, row * LINE
    figure = Figure(figsize=(width, height))
    ax = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    ax.set_axis_off()
    for row, column, text, style in lines:
        place = ((column + 1) * CELL, (row + 0.7) * LINE)
        ax.text(*place, text, family="monospace", fontsize=FONT_SIZE, va="center", parse_math=False, **style)
    save(figure, options, name, dpi=DPI)


def show_tokens(pipeline, states, before=None) -> list[tuple[str, str]]:
    """The tokens of a sample with their colors: masks pale, and those that differ from `before` marked."""
    tokens = pipeline.tokenizer.convert_ids_to_tokens(states.tolist())
    changed = [False] * len(tokens) if before is None else (states != before).tolist()
    pieces = []
    for token, is_new in zip(tokens, changed):
        is_mask = token == pipeline.tokenizer.mask_token
        text = ("·" if pipeline.scheduler.config.num_classes < 100 else " [M]") if is_mask else token.replace("▁", " ")
        pieces.append((text, MASK_COLOR if is_mask else CHANGED_COLOR if is_new else "black"))
    return pieces


def noise_schedules(options) -> None:
    """Two processes at work on text: BERT's mask and uniform noise above, nearest neighbors below; changed pieces in red."""
    pipeline = load(options, "pieces-nearest_neighbor-0")
    words = "great efforts from all sides of the government were made to keep peace in the world that spring"
    x_0 = torch.tensor([pipeline.tokenizer(words, add_special_tokens=False).input_ids])
    neighbors = pipeline.scheduler
    mixed = D3PMScheduler(
        len(pipeline.tokenizer),
        transition="absorbing_uniform",
        beta_schedule="reciprocal",
        mask_token_id=pipeline.tokenizer.mask_token_id,
    )
    blocks = []
    for title, scheduler in (("mask and uniform noise", mixed), ("nearest neighbors", neighbors)):
        rows = [("data", show_tokens(pipeline, x_0[0]))]
        for n in times(scheduler, 0.1, 0.25, 0.5, 0.75, 1):
            x_t = scheduler.add_noise(x_0, n - 1, torch.Generator().manual_seed(1))
            rows.append((f"t = {n}", show_tokens(pipeline, x_t[0], x_0[0])))
        blocks.append((title, rows))
    title = "where nearest neighbors take _government, and how likely"
    blocks.append((title, [row_of(pipeline, neighbors, "▁government", *times(neighbors, 0.25))]))
    draw_text(blocks, options, "noise_schedules", num_columns=112)


def row_of(pipeline, scheduler, token: str, n: int, count: int = 8) -> tuple[str, list]:
    """The largest entries of a row of Qbar_n."""
    number = torch.tensor([[pipeline.tokenizer.convert_tokens_to_ids(token)]])
    best = scheduler.transition.log_marginal(number, 0, torch.tensor([n]))[0, 0].exp().topk(count)
    names = pipeline.tokenizer.convert_ids_to_tokens(best.indices.tolist())
    entries = zip(names, best.values.tolist())
    return f"{n} steps", [(f" {name.replace('▁', '_')} {value:.3f}  ", "black") for name, value in entries]


def generations(options) -> None:
    """How texts come about: the first sample of each character model at ten times between noise and data."""
    blocks = []
    for name in ("absorbing", "uniform", "nearest_neighbor"):
        pipeline, trajectory = load(options, f"text-{name}-0"), Trajectory()
        pipeline(generator=torch.Generator().manual_seed(0), callback_on_step_end=trajectory)
        rows, before = [], None
        for i in trajectory.frames(11):
            n, states = trajectory.timesteps[i] + 1, trajectory.states[i][0]
            rows.append((f"t = {n}" if n else "sample", show_tokens(pipeline, states, before)))
            before = states
        blocks.append((LABELS[name], rows))
    draw_text(blocks, options, "generations", num_columns=70)


def completions(options) -> None:
    """Test text, corrupted to a time, and denoised from there; what came back different is marked."""
    pipeline = load(options, "text-absorbing-0")
    dataset = load_text8("test", dataset_path=options.text_path, length=pipeline.config.sequence_length)
    blocks = []
    for index in (len(dataset) // 12, len(dataset) // 2, len(dataset) * 3 // 4):
        x_0, rows = dataset[index], [("test", show_tokens(pipeline, dataset[index]))]
        for n in times(pipeline.scheduler, 0.25, 0.5, 0.75, 0.95):
            trajectory, generator = Trajectory(), torch.Generator().manual_seed(index)
            out = pipeline(
                input_ids=x_0[None], start_timestep=n - 1, generator=generator, callback_on_step_end=trajectory
            )
            rows.append((f"t = {n}", show_tokens(pipeline, trajectory.states[0][0])))
            rows.append(("  ->", show_tokens(pipeline, out.sequences[0], x_0)))
        blocks.append((f"example {index}", rows))
    draw_text(blocks, options, "completions", num_columns=70)


# ---------------------------------------------------------------------------------------------------------------------
# Images


def progressive(options) -> None:
    """x_t from noise to data at eleven times, of the first two samples of each model: CIFAR-10 and digits, two processes."""
    rows = []
    for name in ("cifar10-absorbing", "cifar10-gaussian_logistic", "digits-absorbing", "digits-gaussian_logistic"):
        pipeline, trajectory = load(options, f"{name}-0"), Trajectory()
        generator = torch.Generator().manual_seed(0)
        pipeline(batch_size=2, generator=generator, callback_on_step_end=trajectory)
        states = [pipeline.decode(trajectory.states[i]) for i in trajectory.frames(11)]
        rows += [[images[sample] for images in states] for sample in range(2)]
    cells = [image for row in rows for image in row]
    write(make_image_grid(as_tiles(cells), rows=len(rows), cols=11), options, "progressive")


def samples(options) -> None:
    """The first twelve samples of each image model, at all of its steps, a row to a model."""
    tiles = []
    names = [
        f"{data}-{process}"
        for data in ("cifar10", "digits")
        for process in ("uniform", "absorbing", "gaussian", "gaussian_logistic")
    ]
    for name in names:
        pipeline = load(options, f"{name}-0")
        tiles += as_tiles(pipeline(batch_size=12, generator=torch.Generator().manual_seed(0)).images)
    write(make_image_grid(tiles, rows=len(names), cols=12), options, "samples")


def samples_at_full_size(options) -> None:
    """24 samples of CIFAR-10 at 32 x 32 pixels, in 100 steps."""
    pipeline = load(options, "cifar10_full-gaussian_logistic-0")
    images = pipeline(
        batch_size=24,
        num_inference_steps=min(100, len(pipeline.scheduler)),
        generator=torch.Generator().manual_seed(0),
    ).images
    write(make_image_grid(as_tiles(images), rows=2, cols=12), options, "samples_at_full_size")


def as_tiles(images: list) -> list:
    """Images of one size and one mode, with each pixel as a square, in a frame."""
    large = [image.convert("RGB").resize((96, 96), Image.Resampling.NEAREST) for image in images]
    return [ImageOps.expand(image, 2, "white") for image in large]


# ---------------------------------------------------------------------------------------------------------------------


def times(scheduler, *shares: float) -> list[int]:
    """Numbers of corruption steps, as shares of all of them."""
    return [round(share * len(scheduler)) for share in shares]


def load(options, name: str):
    pipeline = D3PMPipeline.from_pretrained(options.checkpoints / name)
    pipeline.set_progress_bar_config(leave=False, desc=name)
    return pipeline


def save(figure: Figure, options, name: str, dpi: int = 110) -> None:
    figure.savefig(options.output_dir / f"{name}.png", dpi=dpi)
    print(f"the picture is {options.output_dir / name}.png")


def write(image, options, name: str) -> None:
    image.save(options.output_dir / f"{name}.png")
    print(f"the picture is {options.output_dir / name}.png")


FIGURES = {
    function.__name__: function
    for function in (
        scaling,
        tokens_seen,
        inference_time,
        mask_weighting,
        neighbor_graph,
        noise_schedules,
        generations,
        completions,
        progressive,
        samples,
        samples_at_full_size,
    )
}


def main():
    known = "\n".join(f"  {name}: {function.__doc__.splitlines()[0]}" for name, function in FIGURES.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"figures:\n{known}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "figures", nargs="+", choices=FIGURES, metavar="FIGURE", help="Names of figures, listed below."
    )
    parser.add_argument("--text_path", help="Text in the alphabet of text8, as for run.py.")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("outputs/reproduce"), help="Folder of the checkpoints of run.py."
    )
    parser.add_argument("--results_dir", type=Path, default=ROOT / "docs" / "results", help="Folder of results.")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "docs" / "images", help="Folder for the pictures.")
    options = parser.parse_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    for name in options.figures:
        FIGURES[name](options)


if __name__ == "__main__":
    main()
