# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The results of an evaluation: as JSON, as a table, and on the model card."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from ..hub.cards import NO_RESULTS, RESULTS_HEADING, escape_markdown, eval_result, single_line
from ..likelihood.bound import with_error
from ..utils.files import write_text_atomically


# What the card says of the FID besides its value.
FID_SETTINGS = ("feature_extractor", "num_samples", "num_reference", "num_inference_steps")


@dataclass
class StepResult:
    """The results at one number of inference steps.

    Args:
        num_inference_steps (`int`, *optional*): Number of reverse steps; `None` for the bound in continuous time.
        bits_per_dim, standard_error (`float`): Bound per character, token or pixel, and its standard error.
        perplexity, perplexity_standard_error (`float`): Perplexity per token.
        protocol (`str`): How the bound was measured.
        word_perplexity, word_perplexity_standard_error (`float`, *optional*): Perplexity per word, if the words of the
            data were counted.
        seconds, seconds_deviation (`float`, *optional*): Time to draw one sample, and its standard deviation between
            samples.

    Examples:
        ```python
        from d3pm_hf.evaluation import StepResult

        result = StepResult(20, bits_per_dim=2.85, standard_error=0.01, perplexity=7.2, perplexity_standard_error=0.05, protocol="...")
        ```
    """

    num_inference_steps: int | None
    bits_per_dim: float
    standard_error: float
    perplexity: float
    perplexity_standard_error: float
    protocol: str
    word_perplexity: float | None = None
    word_perplexity_standard_error: float | None = None
    seconds: float | None = None
    seconds_deviation: float | None = None


@dataclass
class LikelihoodResult:
    """The exact likelihood of a sampler that reveals one position per call in an order. It is no bound, and no row among bounds.

    Args:
        order (`str`): Order in which positions are revealed.
        bits_per_dim, standard_error (`float`): -log2 p(x_0) per character, token or pixel, and its standard error.
        perplexity, perplexity_standard_error (`float`): Perplexity per token.
        protocol (`str`): How it was measured.

    Examples:
        ```python
        from d3pm_hf.evaluation import LikelihoodResult

        result = LikelihoodResult("margin", bits_per_dim=2.29, standard_error=0.02, perplexity=4.9, perplexity_standard_error=0.07, protocol="...")
        ```
    """

    order: str
    bits_per_dim: float
    standard_error: float
    perplexity: float
    perplexity_standard_error: float
    protocol: str


@dataclass
class Evaluation:
    """The results of [`evaluate_pipeline`].

    Args:
        dataset, split (`str`): Names of the data set and of the split.
        steps (`list[StepResult]`): One entry per number of inference steps.
        samples (`dict`): Statistics of the samples, and how they were drawn.
        protocol (`str`): What all results share: the part of the data, the definition of a word, the timing.
        likelihoods (`list[LikelihoodResult]`): One entry per order.
        task (`str`): Task of the pipeline.

    Examples:
        ```python
        from d3pm_hf.evaluation import Evaluation, StepResult

        result = StepResult(20, bits_per_dim=2.85, standard_error=0.01, perplexity=7.2, perplexity_standard_error=0.05, protocol="...")
        evaluation = Evaluation("text8", "test", [result], task="text-generation")
        print(evaluation)  # a table
        ```
    """

    dataset: str
    split: str
    steps: list[StepResult]
    samples: dict = field(default_factory=dict)
    protocol: str = ""
    likelihoods: list[LikelihoodResult] = field(default_factory=list)
    task: str = field(kw_only=True)

    def to_json(self) -> str:
        """All results as JSON, in which a number that is not finite is `null`, such as the standard error of one example."""
        values = json.loads(json.dumps(asdict(self)), parse_constant=lambda constant: None)
        return json.dumps(values, indent=2)

    def to_markdown(self) -> str:
        """A table with one row per number of steps, as in the paper."""
        numbers = [row.num_inference_steps for row in self.steps]
        steps = ["continuous time" if number is None else str(number) for number in numbers]
        columns = {"steps": steps, **_units("bound", self.steps)}
        if any(row.word_perplexity is not None for row in self.steps):
            columns["per word"] = [_words(row) for row in self.steps]
        if any(row.seconds is not None for row in self.steps):
            times = [(row.seconds, row.seconds_deviation) for row in self.steps]
            columns["seconds per sample"] = [
                "" if time is None else f"{time:.3g} ± {error:.1g}" for time, error in times
            ]
        lines = _table(columns)
        if self.likelihoods:
            orders = [row.order for row in self.likelihoods]
            lines += ["", *_table({"order": orders, **_units("exact likelihood", self.likelihoods)})]
        protocol = f"Measured on {self.dataset}, {self.split}: {self.protocol}"
        results: list[Any] = [*self.steps, *self.likelihoods]
        bounds = [f"- {escape_markdown(result.protocol)}" for result in results]  # in the order of the rows
        described = [escape_markdown(f"{name}: {value}") for name, value in self.samples.items()]
        return "\n".join(
            [*lines, "", escape_markdown(protocol), "", *bounds, *(["", *described] if described else [])]
        )

    def eval_results(self) -> list[EvalResult]:
        """The entries of the `model-index` of a card, each with its protocol."""
        entry = partial(eval_result, task=self.task, dataset_name=self.dataset, split=self.split)
        results = []
        for row in self.steps:
            steps = "continuous time" if row.num_inference_steps is None else f"{row.num_inference_steps} steps"
            name = f"Bits per dimension (upper bound, {steps})"
            measured = entry(
                "bits_per_dim", name, row.bits_per_dim, protocol=row.protocol, standard_error=row.standard_error
            )
            results.append(measured)
        for exact in self.likelihoods:
            name, error = f"Bits per dimension (exact likelihood, order {exact.order})", exact.standard_error
            arguments: dict[str, Any] = {"protocol": exact.protocol, "standard_error": error, "order": exact.order}
            results.append(entry("exact_bits_per_dim", name, exact.bits_per_dim, **arguments))
        if "fid" in self.samples:
            settings = {name: self.samples[name] for name in FID_SETTINGS}
            results.append(entry("fid", "FID", self.samples["fid"], **settings))
        return results

    def write_to_card(self, folder: str | os.PathLike) -> None:
        """Writes the results to the card of a checkpoint. They replace older results of the same data."""
        path = Path(folder) / "README.md"
        card = load_card(path)
        results = self.eval_results()
        measured = {(result.dataset_name, result.dataset_split) for result in results}
        older = [r for r in card.data.eval_results or [] if (r.dataset_name, r.dataset_split) not in measured]
        card.data.model_name = card.data.model_name or Path(folder).name
        card.data.eval_results = older + results
        card.text = self.replace_results(card.text)
        write_text_atomically(path, str(card))

    def replace_results(self, text: str) -> str:
        """The text of a card with the results in its section "Results", where they replace older ones of the same data."""
        data = single_line(f"{self.dataset}, {self.split}")
        where = data.replace("<", "%3C").replace(">", "%3E")
        begin, end = (f"<!-- {word}: {where} -->" for word in ("measured", "end of measured"))
        table = f"{begin}\n\n{self.to_markdown()}\n\n{end}"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if found and closed:
            return before + table + after
        before, found, rest = f"\n{text.rstrip()}\n".partition(f"\n{RESULTS_HEADING}\n")
        section, following, after = rest.partition("\n## ")
        lines = [line for line in section.splitlines() if not line.startswith(f"| {escape_markdown(data)} |")]
        # Nothing is left of a table without rows.
        others = re.sub(r"^\|.*\n\|( --- \|)+$(?!\n\|)", "", "\n".join(lines), flags=re.MULTILINE).strip()
        kept = [] if others in ("", NO_RESULTS) else [others]
        body = "\n\n".join([before.strip(), RESULTS_HEADING, *kept, table])
        return f"\n{body}\n{following}{after}"


def load_card(path: Path) -> Any:
    """Reads a model card, whose head is YAML and may hold the results of other data."""
    try:
        return ModelCard.load(path)
    except Exception as error:  # the readers of YAML and of its `model-index` raise whatever they meet
        raise ValueError(
            f"the head of the card {path} cannot be read ({single_line(error)}): correct it, or remove the card and save the "
            "checkpoint again"
        ) from error


def _table(columns: dict[str, list[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    rows = [list(columns), ["---"] * len(columns), *zip(*columns.values())]
    return [f"| {' | '.join(row)} |" for row in rows]


def _units(kind: str, results: Sequence[StepResult | LikelihoodResult]) -> dict[str, list[str]]:
    """The columns of a table that a bound and a likelihood have in common."""
    return {
        f"bits/dim ({kind})": [with_error(row.bits_per_dim, row.standard_error, 3) for row in results],
        "perplexity per token": [with_error(row.perplexity, row.perplexity_standard_error, 2) for row in results],
    }


def _words(row: StepResult) -> str:
    """The perplexity per word as a cell of a table."""
    if row.word_perplexity is None or row.word_perplexity_standard_error is None:
        return ""
    return with_error(row.word_perplexity, row.word_perplexity_standard_error, 1)
