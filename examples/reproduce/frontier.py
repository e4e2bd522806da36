# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Compares the samplers of text side by side: what a sample costs, and a frontier of likelihood and entropy over temperatures.

    python examples/reproduce/frontier.py --text_path text8
    python examples/reproduce/tables.py

The checkpoints have the names of run.py: text-absorbing-0, text-uniform-0 and text-autoregressive-0, and as the judge
text-autoregressive-1, which has not drawn any of the samples. docs/source/en/fewer_calls.md says how those of the page were trained.
All samplers take turns in one run. The numbers are written to docs/results/frontier.json, from which tables.py fills in
docs/source/en/fewer_calls.md, and the picture to docs/images/frontier.png.
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm

from d3pm_hf import D3PMPipeline
from d3pm_hf.data import load_text8
from d3pm_hf.evaluation import judge_samples, optimize_timesteps
from d3pm_hf.likelihood import OptimalTimesteps


ROOT = Path(__file__).parents[2]
TEMPERATURES = (0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Setting:
    """A sampler of one model, with a number of steps: a curve over temperatures.

    Args:
        title: Its name in tables and in the legend.
        run: The run of run.py whose checkpoint it samples from.
        steps: Number of inference steps, all of them if `None`.
        arguments: Further arguments of the pipeline.
        chosen: Whether the timesteps are the cheapest ones of `optimize_timesteps`, or else evenly spaced.
        temperatures: Temperatures of the curve.
        turns: Number of batches, that of the command line if `None`.
        style: Color and marker of the curve.
    """

    title: str
    run: str
    steps: int | None
    arguments: dict
    chosen: bool = False
    temperatures: tuple[float, ...] = TEMPERATURES
    turns: int | None = None
    style: str = "C0o"


ABSORBING, UNIFORM, AUTOREGRESSIVE = "text-absorbing-0", "text-uniform-0", "text-autoregressive-0"
PLAIN = {"sampler": "ancestral"}
FORWARD_BACKWARD, GIBBS = (
    {"sampler": "predictor_corrector", "sampler_kwargs": {"corrector": name}} for name in ("forward_backward", "gibbs")
)
# The first one is what the others are compared with at equal entropy, so that it has more temperatures. The plain loops of most steps
# take most of the time: they have one temperature and one batch.
SETTINGS = (
    Setting("absorbing, 1000 even, positions first", ABSORBING, None, {"sampler": "positions_first"},
            temperatures=(0.5, *TEMPERATURES, 1.2), style="kd"),
    Setting("absorbing, 1000 even", ABSORBING, None, PLAIN, temperatures=(1.0,), turns=1, style="kx"),
    Setting("absorbing, first hitting", ABSORBING, None, {"sampler": "first_hitting"}, style="C2o"),
    Setting("absorbing, 64 even", ABSORBING, 64, PLAIN, style="C0o"),
    Setting("absorbing, 32 even", ABSORBING, 32, PLAIN, style="C0s"),
    Setting("absorbing, 16 even", ABSORBING, 16, PLAIN, style="C0^"),
    Setting("absorbing, 16 chosen", ABSORBING, 16, PLAIN, chosen=True, style="C1^"),
    Setting("absorbing, 32 even, forward-backward", ABSORBING, 32, FORWARD_BACKWARD, style="C5s"),
    Setting("absorbing, 32 even, Gibbs", ABSORBING, 32, GIBBS, style="C6s"),
    Setting("absorbing, 64 even, remasking", ABSORBING, 64, {"sampler": "remasking"}, style="C8o"),
    Setting("absorbing, 64 even, confidence", ABSORBING, 64, {"sampler": "confidence"}, style="C9o"),
    Setting("absorbing, 16 even, confidence", ABSORBING, 16, {"sampler": "confidence"}, style="C9^"),
    Setting("uniform, 256 even", UNIFORM, 256, PLAIN, temperatures=(1.0,), turns=1, style="C4x"),
    Setting("uniform, 64 even", UNIFORM, 64, PLAIN, style="C4o"),
    Setting("uniform, 32 even", UNIFORM, 32, PLAIN, temperatures=(1.0,), style="C4s"),
    Setting("uniform, 32 chosen", UNIFORM, 32, PLAIN, chosen=True, temperatures=(1.0,), style="C4D"),
    Setting("uniform, 32 even, forward-backward", UNIFORM, 32, FORWARD_BACKWARD, temperatures=(1.0,), style="C4<"),
    Setting("uniform, 32 even, Gibbs", UNIFORM, 32, GIBBS, temperatures=(1.0,), style="C4>"),
    Setting("autoregressive, left to right", AUTOREGRESSIVE, None, {"sampler": "left_to_right"}, style="C3o"),
)  # fmt: skip


class Rows:
    """Counts the rows that a network reads."""

    def __init__(self, network: torch.nn.Module):
        self.count = 0
        network.register_forward_pre_hook(self.add, with_kwargs=True)

    def add(self, network, arguments, named) -> None:
        self.count += len(arguments[0] if arguments else named["input_ids"])


def measure(settings: tuple[Setting, ...], options) -> list[dict]:
    """Draws `options.turns` batches at each temperature of each setting, in turns, and judges them: one row each."""
    pipelines, judge = {setting.run: load(options, setting.run) for setting in settings}, load(options, options.judge)
    chosen = {run: choose_timesteps(pipelines[run], options) for run in {each.run for each in settings if each.chosen}}
    counters = {run: Rows(pipeline.text_model) for run, pipeline in pipelines.items()}
    points = [(setting, temperature) for setting in settings for temperature in setting.temperatures]
    samples: dict = {(setting.title, temperature): [] for setting, temperature in points}
    seconds = {point: [] for point in samples}
    calls = {point: [] for point in samples}
    alone: dict = {setting.title: [] for setting in settings}

    def draw(setting: Setting, temperature: float, batch_size: int, seed: int) -> tuple[torch.Tensor, float, float]:
        """Samples, seconds per sample, and rows that the network read per sample."""
        pipeline, counter = pipelines[setting.run], counters[setting.run]
        counter.count, begin = 0, time.perf_counter()
        steps: dict = {"num_inference_steps": setting.steps, "spacing": "even"}
        if setting.chosen:
            steps = {"timesteps": chosen[setting.run].cheapest_timesteps(setting.steps)}
        generator = torch.Generator().manual_seed(seed)
        arguments = {**steps, **setting.arguments, "temperature": temperature, "generator": generator}
        out = pipeline(batch_size=batch_size, output_type="latent", **arguments)
        return out.sequences, (time.perf_counter() - begin) / batch_size, counter.count / batch_size

    for setting in {setting.run: setting for setting in settings}.values():
        draw(setting, 1.0, 1, 0)  # the first call of a network takes longer
    with tqdm(desc="draws") as bar:
        for turn in range(options.turns):
            due = [setting for setting in settings if setting.turns is None or turn < setting.turns]
            for setting in due:
                alone[setting.title].append(draw(setting, 1.0, 1, turn)[1])
                bar.update()
            for setting, temperature in [point for point in points if point[0] in due]:
                drawn, time_per_sample, rows = draw(setting, temperature, options.batch_size, turn)
                for record, value in ((samples, drawn), (seconds, time_per_sample), (calls, rows)):
                    record[setting.title, temperature].append(value)
                bar.update()

    rows = []
    for setting, temperature in points:
        point = setting.title, temperature
        numbers = {"calls": statistics.mean(calls[point]), "seconds": statistics.median(seconds[point])}
        numbers["seconds_alone"] = statistics.median(alone[setting.title])
        judged = asdict(judge_samples(judge, torch.cat(samples[point])))
        text = pipelines[setting.run].decode(samples[point][0][:1])[0]
        row = {"sampler": setting.title, "run": setting.run, "temperature": temperature, **numbers, **judged}
        rows.append({**row, "text": text})
    test = load_text8("test", dataset_path=options.text_path, length=len(judge.scheduler))
    count = options.turns * options.batch_size
    data = torch.stack([test[i * len(test) // count] for i in range(count)])
    return [*rows, {"sampler": "test text", "run": None, "temperature": None, **asdict(judge_samples(judge, data))}]


def choose_timesteps(pipeline: D3PMPipeline, options) -> OptimalTimesteps:
    """Chooses timesteps on validation text."""
    length = pipeline.config.sequence_length
    validation = load_text8("validation", dataset_path=options.text_path, length=length)
    return optimize_timesteps(pipeline, validation, num_examples=options.num_examples)


def add_gaps(rows: list[dict], reference: str) -> None:
    """Adds to each row its distance above the curve of `reference` at equal entropy, in bits, and its standard error.

    The curve is linear between its temperatures. A row whose entropy it does not reach has no gap, nor has a row with fewer
    samples at equal entropy of n-grams, which grows with their number.
    """
    for name in ("entropy", "ngram_entropy"):
        curve = sorted((row for row in rows if row["sampler"] == reference), key=lambda row: row[name])
        x = np.array([row[name] for row in curve])
        for row in rows:
            row[f"gap_at_{name}"] = row[f"gap_at_{name}_standard_error"] = None
            right = int(np.searchsorted(x, row[name]))
            is_small = name == "ngram_entropy" and row["num_samples"] < curve[0]["num_samples"]
            if row["sampler"] == reference or is_small or not 0 < right < len(x):
                continue
            a, b = curve[right - 1], curve[right]
            share = (row[name] - a[name]) / (b[name] - a[name])
            slope = (b["nll"] - a["nll"]) / (b[name] - a[name])
            # Errors of a point of the curve along both axes, as one error of its height.
            errors = [
                math.hypot(point["nll_standard_error"], slope * point[f"{name}_standard_error"])
                for point in (row, a, b)
            ]
            row[f"gap_at_{name}"] = row["nll"] - (1 - share) * a["nll"] - share * b["nll"]
            row[f"gap_at_{name}_standard_error"] = math.hypot(errors[0], (1 - share) * errors[1], share * errors[2])


def draw_frontier(rows: list[dict], settings: tuple[Setting, ...]) -> Figure:
    """Likelihood against both entropies, a curve for each sampler."""
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    labels = {
        "entropy": "entropy of the characters of a sample",
        "ngram_entropy": "entropy of the trigrams of all samples",
    }
    for ax, (name, label) in zip(figure.subplots(1, 2, sharey=True), labels.items()):
        for setting in settings:
            if name == "ngram_entropy" and setting.turns is not None:
                continue  # with fewer samples it is lower
            own = [row for row in rows if row["sampler"] == setting.title]
            x, y = [row[name] for row in own], [row["nll"] for row in own]
            errors = [[row[f"{axis}_standard_error"] for row in own] for axis in (name, "nll")]
            style = {"fmt": f"{setting.style[-1]}-", "color": setting.style[:-1], "markersize": 5, "linewidth": 1}
            ax.errorbar(x, y, errors[1], errors[0], elinewidth=0.6, label=setting.title, **style)
        (test,) = (row for row in rows if row["sampler"] == "test text")
        ax.plot(test[name], test["nll"], "*", color="tab:red", markersize=13, label="test text")
        ax.set(xlabel=f"{label}, bits")
        ax.grid(alpha=0.3)
    figure.axes[0].set(ylabel="negative log-likelihood under the judge, bits per character")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    return figure


def load(options, name: str) -> D3PMPipeline:
    pipeline = D3PMPipeline.from_pretrained(options.checkpoints / name)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text_path", help="Text in the alphabet of text8, as for run.py.")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("outputs/reproduce"), help="Folder of the checkpoints of run.py."
    )
    parser.add_argument("--judge", default="text-autoregressive-1", help="Name of the judge in that folder.")
    parser.add_argument("--turns", type=int, default=2, help="Number of batches of each sampler and temperature.")
    parser.add_argument("--batch_size", type=int, default=32, help="Number of samples of a batch.")
    parser.add_argument("--num_examples", type=int, default=64, help="Examples that timesteps are chosen on.")
    parser.add_argument("--results_dir", type=Path, default=ROOT / "docs" / "results", help="Folder of results.")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "docs" / "images", help="Folder for the picture.")
    options = parser.parse_args()
    rows = measure(SETTINGS, options)
    add_gaps(rows, SETTINGS[0].title)
    protocol = (
        f"{options.turns} batches of {options.batch_size} samples, {torch.get_num_threads()} threads; judge {options.judge}; "
        "seconds per sample are medians of turns"
    )
    result = {"protocol": protocol, "rows": rows}
    (options.results_dir / "frontier.json").write_text(json.dumps(result, indent=2) + "\n")
    draw_frontier(rows, SETTINGS).savefig(options.output_dir / "frontier.png", dpi=110)
    print(
        f"the numbers are {options.results_dir / 'frontier.json'}, the picture is {options.output_dir / 'frontier.png'}"
    )


if __name__ == "__main__":
    main()
