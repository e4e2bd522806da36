# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Writes the tables of docs/ and of the README from what run.py and frontier.py have measured: `python examples/reproduce/tables.py`.

A table stands between `<!-- table: name -->` and `<!-- end -->`; what is there is replaced. The paper's numbers stand here, as
the paper prints them.
"""

import argparse
import json
import re
import statistics
from pathlib import Path


ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / f"docs/source/en/{name}.md" for name in ("results", "fewer_calls", "likelihoods", "antibodies")),
    ROOT / "README.md",
)

# Rows: title, run, and the paper's numbers for the columns.
TEXT = [
    ("uniform, L_vb", "text-uniform", {1000: ("1.61 ± 0.02", "3.6"), 256: ("1.68 ± 0.01", "0.58"), 20: ("1.79 ± 0.03", "0.077")}),
    ("nearest neighbors, L_vb", "text-nearest_neighbor", {1000: ("1.59 ± 0.03", "3.1"), 256: ("1.64 ± 0.02", "0.81"), 20: ("1.75 ± 0.02", "0.11")}),
    ("absorbing, L_λ", "text-absorbing", {1000: ("1.45 ± 0.02", "3.4"), 256: ("1.47 ± 0.03", "0.60"), 20: ("1.56 ± 0.04", "0.079")}),
    ("autoregressive", "text-autoregressive", {None: ("1.23", "0.36")}),
]  # fmt: skip
TEXT8 = [(title, run.replace("text-", "text8-"), paper) for title, run, paper in TEXT]
LOSSES = [
    ("uniform, L_vb", "text-uniform", "1.61"),
    ("uniform, L_λ", "text-uniform_hybrid", "1.91"),
    ("absorbing, L_vb", "text-absorbing_vb", "1.47"),
    ("absorbing, L_λ", "text-absorbing", "1.44"),
]
SCHEDULES = [
    ("1/(T - t + 1)", "text-uniform_reciprocal", "2.37"),
    ("cosine", "text-uniform", "1.73"),
    ("mutual information", "text-uniform_mutual_information", "1.74"),
]
AUXILIARY = [
    ("L_vb alone", "text-uniform", "1.61"),
    ("cross-entropy of the raw output (the paper's)", "text-uniform_hybrid", "1.91"),
    ("the same network, read as the denoising posterior", "text-uniform_hybrid_reread", "-"),
    ("cross-entropy of the denoising posterior", "text-uniform_hybrid_denoising", "-"),
]
PIECES = [
    ("uniform, L_vb", "pieces-uniform", ("137.9 ± 2.1", "139.2 ± 1.2", "145.0 ± 1.2")),
    ("nearest neighbors, L_vb", "pieces-nearest_neighbor", ("149.5 ± 1.3", "158.6 ± 2.2", "160.4 ± 1.2")),
    ("absorbing, L_λ", "pieces-absorbing", ("76.9 ± 2.3", "80.1 ± 1.2", "83.6 ± 6.1")),
    ("uniform, L_vb, longer", "pieces_long-uniform", ("137.9 ± 2.1", "139.2 ± 1.2", "145.0 ± 1.2")),
    ("nearest neighbors, L_vb, longer", "pieces_long-nearest_neighbor", ("149.5 ± 1.3", "158.6 ± 2.2", "160.4 ± 1.2")),
    ("absorbing, L_λ, longer", "pieces_long-absorbing", ("76.9 ± 2.3", "80.1 ± 1.2", "83.6 ± 6.1")),
    ("autoregressive", "pieces-autoregressive", ("43.6", "", "")),
    ("autoregressive, longer", "pieces_long-autoregressive", ("43.6", "", "")),
]
CIFAR10 = [
    ("uniform, L_vb", "cifar10-uniform", ("5.08 ± 0.02", "51.27 ± 2.15", "5.99 ± 0.14")),
    ("uniform, L_λ", "cifar10-uniform_hybrid", ("-", "-", "-")),
    ("absorbing, L_vb", "cifar10-absorbing_vb", ("4.83 ± 0.02", "41.28 ± 0.65", "6.26 ± 0.10")),
    ("absorbing, L_λ", "cifar10-absorbing", ("4.40 ± 0.02", "30.97 ± 0.64", "6.78 ± 0.08")),
    ("Gauss, L_vb", "cifar10-gaussian_vb", ("3.966 ± 0.005", "15.30 ± 0.55", "7.75 ± 0.13")),
    ("Gauss, L_λ", "cifar10-gaussian", ("3.975 ± 0.006", "8.34 ± 0.10", "8.54 ± 0.12")),
    ("Gauss + logistic, L_vb", "cifar10-gaussian_logistic_vb", ("-", "-", "-")),
    ("Gauss + logistic, L_λ", "cifar10-gaussian_logistic", ("3.435 ± 0.007", "7.34 ± 0.19", "8.56 ± 0.10")),
]
# Title, run with L_vb, run with L_lambda.
DIGITS = [
    ("uniform", "digits-uniform", "digits-uniform_hybrid"),
    ("absorbing", "digits-absorbing_vb", "digits-absorbing"),
    ("Gauss", "digits-gaussian_vb", "digits-gaussian"),
    ("Gauss + logistic", "digits-gaussian_logistic_vb", "digits-gaussian_logistic"),
]


class Results:
    """What was measured, by run and seed."""

    def __init__(self, folder: Path):
        self.runs = {}
        for path in sorted(folder.glob("*-[0-9]*.json")):
            result = json.loads(path.read_text())
            self.runs[result["run"], result["seed"]] = result
        timed = json.loads((folder / "inference_time.json").read_text())["rows"]
        self.seconds = {(row["run"], row["num_inference_steps"]): row for row in timed}
        self.frontier = json.loads((folder / "frontier.json").read_text())["rows"]
        self.orders = {}
        for path in sorted(folder.glob("orders-*.json")):  # of benchmarks/likelihood_orders.py
            measured = json.loads(path.read_text())
            self.orders[measured["checkpoint"]] = measured

    def at(self, run: str, steps: int | None, seed: int = 0) -> dict:
        """The numbers of a run at some steps; `None` for the only ones."""
        rows = self.runs[run, seed]["steps"]
        return next(row for row in rows if steps in (None, row["num_inference_steps"]))

    def by_order(self, run: str, order: str, block_length: int | None = 1) -> dict | None:
        """The likelihood of the checkpoint of a run in an order, or `None` if it was not measured."""
        rows = self.orders.get(run, {"rows": []})["rows"]
        return next((row for row in rows if (row["order"], row.get("block_length")) == (order, block_length)), None)

    def minutes(self, run: str, seed: int = 0) -> str:
        """Processor time of the training, or its time where that was not measured."""
        result = self.runs[run, seed]
        return f"{result.get('processor_seconds', result['train_seconds']) / 60:.0f}"

    def time_of(self, run: str, steps: int) -> str:
        row = self.seconds[run, steps]
        return f"{row['seconds']:.2g} ± {row['seconds_deviation']:.1g}"


def bits(row: dict) -> str:
    return f"{row['bits_per_dim']:.3f} ± {row['standard_error']:.3f}"


def perplexity(row: dict, name: str) -> str:
    return f"{row[name]:.0f} ± {row[f'{name}_standard_error']:.0f}"


FORMULAS = {"L_vb": r"$L_\mathrm{vb}$", "L_λ": r"$L_\lambda$", "1/(T - t + 1)": "$1/(T - t + 1)$"}


def to_markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    for plain, formula in FORMULAS.items():
        text = text.replace(plain, formula)
    return text


def text_table(results: Results) -> str:
    rows = []
    for steps in (1000, 256, 20):
        for title, run, paper in TEXT[:3]:
            numbers = bits(results.at(run, steps)), results.time_of(run, steps)
            rows.append([title, str(steps), *numbers, *paper[steps], f"`{run}`", results.minutes(run)])
    title, run, paper = TEXT[3]
    row = results.at(run, None)
    steps = row["num_inference_steps"]
    numbers = bits(row), results.time_of(run, steps)
    rows.append([title, f"{steps} (paper: 256)", *numbers, *paper[None], f"`{run}`", results.minutes(run)])
    head = [
        "model",
        "steps",
        "bits/char, ours",
        "seconds, ours",
        "bits/char, paper",
        "seconds, paper",
        "run",
        "minutes",
    ]
    return to_markdown(head, rows)


def text8_table(results: Results) -> str:
    rows = []
    for steps in (1000, 256, 20, None):
        for title, run, paper in TEXT8:
            if steps in paper and (run, 0) in results.runs:
                row = results.at(run, steps)
                shown = f"{row['num_inference_steps']} (paper: 256)" if steps is None else str(steps)
                rows.append([title, shown, bits(row), paper[steps][0], f"`{run}`", results.minutes(run)])
    return to_markdown(["model", "steps", "bits/char, ours", "bits/char, paper", "run", "minutes"], rows)


def one_number_table(results: Results, entries: list, first: str) -> str:
    rows = [
        [title, bits(results.at(run, 1000)), paper, f"`{run}`", results.minutes(run)] for title, run, paper in entries
    ]
    return to_markdown([first, "bits/char, ours", "bits/char, paper", "run", "minutes"], rows)


def losses_table(results: Results) -> str:
    return one_number_table(results, LOSSES, "model")


def schedules_table(results: Results) -> str:
    return one_number_table(results, SCHEDULES, "schedule")


def auxiliary_table(results: Results) -> str:
    rows = []
    for title, run, paper in AUXILIARY:
        cells = [title]
        for steps in (1000, 20):
            values = [results.at(run, steps, seed)["bits_per_dim"] for seed in range(3)]
            cells.append(f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}")
            if steps == 1000:
                each = ", ".join(f"{value:.3f}" for value in values)
        rows.append([*cells, each, paper, f"`{run}`"])
    head = [
        "auxiliary loss",
        "bits/char, ours",
        "at 20 steps",
        "the three seeds",
        "bits/char, paper",
        "run, `--seed` 0, 1, 2",
    ]
    return to_markdown(head, rows)


def pieces_table(results: Results) -> str:
    rows = []
    for title, run, paper in PIECES:
        if (run, 0) not in results.runs:
            continue
        at = [results.at(run, steps) for steps in ((None,) if "autoregressive" in run else (1000, 128, 64))]
        words = [perplexity(row, "word_perplexity") for row in at] + [""] * (3 - len(at))
        tokens = perplexity(at[0], "perplexity")
        rows.append([title, *words, tokens, " / ".join(filter(None, paper)), f"`{run}`", results.minutes(run)])
    head = ["model", "per word, 1000 steps", "128", "64", "per piece, 1000", "per word, paper", "run", "minutes"]
    return to_markdown(head, rows)


def cifar10_table(results: Results) -> str:
    rows = []
    for title, run, paper in CIFAR10:
        samples = results.runs[run, 0]["samples"]
        numbers = [
            *(bits(results.at(run, steps)) for steps in (1000, 20)),
            f"{samples['fid']:.2f}",
            f"{samples['inception_score']:.2f}",
        ]
        rows.append([title, *numbers, *paper, f"`{run}`", results.minutes(run)])
    head = [
        "model",
        "bits/dim, ours",
        "at 20 steps",
        "FID*, ours",
        "IS*, ours",
        "bits/dim, paper",
        "FID, paper",
        "IS, paper",
        "run",
        "minutes",
    ]
    return to_markdown(head, rows)


def samples_table(results: Results) -> str:
    rows = []
    for title, run, _ in TEXT:
        samples = results.runs[run, 0]["samples"]
        numbers = [f"{samples['known_words']:.0%}", f"{samples['word_length']:.2f}", f"{samples['token_entropy']:.2f}"]
        rows.append([title, str(samples["num_inference_steps"]), *numbers, f"`{run}`"])
    rows.append(["the test set", "", "", "", f"{samples['token_entropy_of_data']:.2f}", ""])
    return to_markdown(["model", "steps", "known words", "letters to a word", "entropy of characters", "run"], rows)


def digits_table(results: Results) -> str:
    rows = []
    for title, *both in DIGITS:
        cells = [bits(results.at(name, steps)) for steps in (400, 20) for name in both]
        rows.append([title, *cells, ", ".join(f"`{name}`" for name in both), ", ".join(map(results.minutes, both))])
    head = ["model", "L_vb, 400 steps", "L_λ, 400 steps", "L_vb, 20 steps", "L_λ, 20 steps", "runs", "minutes"]
    return to_markdown(head, rows)


def short_table(results: Results) -> str:
    rows = []
    for title, run, paper in TEXT8:
        is_causal = None in paper
        numbers = [
            bits(results.at(run, None if is_causal else steps)) for steps in ((1000,) if is_causal else (1000, 20))
        ]
        exact = numbers.pop() if is_causal else ""  # from left to right, in one pass
        if margin := results.by_order(run, "margin"):
            exact = f"{bits(margin)}, margin"
        numbers += [""] * (2 * is_causal)
        rows.append([title, *numbers, exact, paper[None if is_causal else 1000][0], f"`{run}`"])
    head = ["process, loss", "bound, 1000 steps", "20 steps", "exact, by order", "paper, 1000 steps", "run"]
    return to_markdown(head, rows)


def order_rows(results: Results, run: str, unit: str) -> str:
    """The likelihoods of a checkpoint that reveals one position per call, by order."""
    rows = []
    for order in ("left_to_right", "entropy", "confidence", "margin"):
        row = results.by_order(run, order)
        rows.append([f'`"{order}"`, exact', bits(row), with_error(row, "difference", "+", 3)])
    rows.append(
        ['`"random"`, estimate of the bound of infinitely many steps', bits(results.by_order(run, "random")), ""]
    )
    bound = results.by_order(run, "bound", None)
    times = re.search(r"\d+ stratified times", bound["protocol"])[0]
    rows.append([f"the bound itself, by {times} (`evaluate_bound`)", bits(bound), ""])
    return to_markdown(["order, one position per call", f"bits per {unit}", "minus random order"], rows)


def block_table(results: Results) -> str:
    """The likelihoods of blocks of several positions, whose states are drawn independently."""
    orders = "left_to_right", "entropy", "confidence", "margin", "random"
    rows = []
    for block_length in (1, 2, 4, 8):
        found = [results.by_order("text8-absorbing", order, block_length) for order in orders]
        rows.append([str(block_length), str(found[0]["num_calls"]), *map(bits, found)])
    return to_markdown(["positions per call", "calls", *(f'`"{order}"`' for order in orders)], rows)


def side_by_side_table(results: Results) -> str:
    """What the samplers cost, and their samples at temperature 1."""
    rows = []
    for row in results.frontier:
        if row["temperature"] in (1.0, None):
            cost = (
                [f"{row['calls']:.0f}", f"{row['seconds_alone']:.2f}", f"{row['seconds']:.3f}"]
                if row["run"]
                else [""] * 3
            )
            rows.append([row["sampler"], *cost, *(with_error(row, name) for name in ("nll", "entropy"))])
    head = [
        "sampler",
        "network calls",
        "seconds, alone",
        "seconds, in a batch",
        "bits/char under the judge",
        "entropy",
    ]
    return to_markdown(head, rows)


def frontier_table(results: Results) -> str:
    """Distances above the curve of the reference at equal entropy, a column for each temperature."""
    names, temperatures = ("gap_at_entropy", "gap_at_ngram_entropy"), (0.6, 0.8, 1.0)
    gaps: dict = {}
    for row in results.frontier[:-1]:  # without the test text
        for name in names:
            cell = "" if row[name] is None else with_error(row, name, "+")
            gaps.setdefault(row["sampler"], {})[name, row["temperature"]] = cell
    rows = [
        [sampler, *(own.get((name, temperature), "") for name in names for temperature in temperatures)]
        for sampler, own in list(gaps.items())[1:]  # without the reference
    ]
    labels = ("characters", "trigrams")
    return to_markdown(["sampler", *(f"{label}, {t}" for label in labels for t in temperatures)], rows)


def with_error(row: dict, name: str, sign: str = "", digits: int = 2) -> str:
    return f"{row[name]:{sign}.{digits}f} ± {row[f'{name}_standard_error']:.{digits}f}"


TABLES = {
    "short": short_table,
    "orders_text8": lambda results: order_rows(results, "text8-absorbing", "character"),
    "orders_blocks": block_table,
    "orders_pieces": lambda results: order_rows(results, "pieces-absorbing", "piece"),
    "orders_antiberty": lambda results: order_rows(results, "antiberty-absorbing", "residue"),
    "text8": text8_table,
    "text": text_table,
    "samples": samples_table,
    "losses": losses_table,
    "schedules": schedules_table,
    "auxiliary": auxiliary_table,
    "pieces": pieces_table,
    "cifar10": cifar10_table,
    "digits": digits_table,
    "side_by_side": side_by_side_table,
    "frontier": frontier_table,
}


def fill_in(page: str, results: Results) -> str:
    """The page with its tables as they are now."""

    def write(match: re.Match) -> str:
        return f"{match[1]}\n{TABLES[match[2]](results)}\n{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->).*?(<!-- end -->)", write, page, flags=re.DOTALL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results_dir", type=Path, default=ROOT / "docs" / "results")
    options = parser.parse_args()
    results = Results(options.results_dir)
    for page in PAGES:
        page.write_text(fill_in(page.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
