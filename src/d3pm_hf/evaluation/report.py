# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""All that is measured of a checkpoint: bounds, sampling times, samples; as JSON, as a table, and on the model card."""

import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from huggingface_hub import EvalResult, ModelCard
from torch.utils.data import default_collate

from ..hub.cards import escape_markdown, metric_arguments, single_line
from ..likelihood import Bound, evaluate_bound, evaluating, possible_steps, scores_in_one_pass
from ..pipelines import D3PMPipeline
from ..utils.checks import check_dataset, check_int, check_str, check_type
from ..utils.files import write_text_atomically
from .images import INCEPTION, ClassifierFeatures, image_scores
from .text import token_entropy, word_statistics


@dataclass
class StepResult:
    """What was measured at one number of inference steps.

    Args:
        bits_per_dim, standard_error: the bound, per character, piece or pixel.
        perplexity, perplexity_standard_error: per token.
        word_perplexity, word_perplexity_standard_error: per word, where the words of the data were counted.
        protocol: how the bound came about.
        seconds, seconds_deviation: to draw one sample, and their spread between samples; `None` if none was timed.
    """

    num_inference_steps: int
    bits_per_dim: float
    standard_error: float
    perplexity: float
    perplexity_standard_error: float
    word_perplexity: float | None
    word_perplexity_standard_error: float | None
    protocol: str
    seconds: float | None = None
    seconds_deviation: float | None = None


@dataclass
class Evaluation:
    """The results of [`evaluate_pipeline`].

    Args:
        dataset, split: the names of the data and the split.
        steps: one entry per number of steps.
        samples: statistics of the samples, and how they were drawn.
        protocol: what the numbers have in common: how much of the data, what counts as a word, what was timed.
    """

    dataset: str
    split: str
    steps: list[StepResult]
    samples: dict = field(default_factory=dict)
    protocol: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def to_markdown(self) -> str:
        """A table in the paper's layout: a row per number of steps."""
        has_words = any(row.word_perplexity is not None for row in self.steps)
        was_timed = any(row.seconds is not None for row in self.steps)
        head = ["steps", "bits/dim (bound)", "perplexity per token", *["per word"] * has_words]
        head += ["seconds per sample"] * was_timed
        lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
        for row in self.steps:
            cells = [
                str(row.num_inference_steps),
                f"{row.bits_per_dim:.3f} ± {row.standard_error:.3f}",
                f"{row.perplexity:.2f} ± {row.perplexity_standard_error:.2f}",
                *([f"{row.word_perplexity:.1f} ± {row.word_perplexity_standard_error:.1f}"] if has_words else []),
                *([f"{row.seconds:.3g} ± {row.seconds_deviation:.1g}"] if was_timed else []),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        protocol = f"Measured on {self.dataset}, {self.split}: {self.protocol}; {self.steps[0].protocol}"
        described = [f"{name}: {value}" for name, value in self.samples.items()]
        return "\n".join([*lines, "", *map(escape_markdown, [protocol, *described])])

    def eval_results(self, is_text: bool) -> list[EvalResult]:
        """For the `model-index` of a card, each with its protocol."""
        task = "text-generation" if is_text else "unconditional-image-generation"
        common = {
            "task_type": task,
            "dataset_type": single_line(self.dataset),
            "dataset_name": single_line(self.dataset),
            "dataset_split": single_line(self.split),
        }
        results = [
            EvalResult(
                metric_type="bits_per_dim",
                metric_name=f"Bits per dimension (upper bound, {row.num_inference_steps} steps)",
                metric_value=round(row.bits_per_dim, 4),
                metric_args=metric_arguments(row.protocol, row.standard_error),
                **common,
            )
            for row in self.steps
        ]
        if "fid" in self.samples:
            keys = ("feature_extractor", "num_samples", "num_reference", "num_inference_steps")
            arguments = {name: self.samples[name] for name in keys}
            value = round(self.samples["fid"], 3)
            results.append(
                EvalResult(metric_type="fid", metric_name="FID", metric_value=value, metric_args=arguments, **common)
            )
        return results

    def write_to_card(self, folder: str | os.PathLike, is_text: bool) -> None:
        """Puts the results in the card of a checkpoint's folder, in place of older ones of the same data."""
        path = Path(folder) / "README.md"
        card = ModelCard.load(path)
        results = self.eval_results(is_text)
        measured = {(result.dataset_name, result.dataset_split) for result in results}
        older = [r for r in card.data.eval_results or [] if (r.dataset_name, r.dataset_split) not in measured]
        card.data.model_name = card.data.model_name or Path(folder).name
        card.data.eval_results = older + results
        where = single_line(f"{self.dataset}, {self.split}").replace("<", "%3C").replace(">", "%3E")
        begin, end = (f"<!-- {word}: {where} -->" for word in ("measured", "end of measured"))
        text, table = card.text, f"{begin}\n\n{self.to_markdown()}\n\n{end}"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if found and closed:
            card.text = before + table + after
        else:
            card.text = text.rstrip() + f"\n\n## Measured\n\n{table}\n"
        write_text_atomically(path, str(card))


def evaluate_pipeline(
    pipeline,
    dataset,
    dataset_name: str = "data",
    split: str = "test",
    num_inference_steps: tuple[int, ...] = (1000, 256, 64, 20, 10),
    max_eval_samples: int | None = None,
    num_eval_timesteps: int | None = None,
    num_timed_samples: int = 3,
    num_samples: int = 64,
    num_sample_steps: int = 20,
    batch_size: int = 64,
    feature_extractor: torch.nn.Module | str | None = None,
    seed: int = 0,
    progress_bar: bool = True,
) -> Evaluation:
    """Measures a pipeline: the bound and the sampling time at several numbers of steps, and what samples are like.

    Args:
        pipeline ([`D3PMPipeline`]): what to measure.
        dataset: `dataset[i]` is x_0, as for training. Its `num_words`, where it has them, give a perplexity per word.
        dataset_name, split (`str`): written beside every number.
        num_inference_steps (`tuple[int]`): those above the process's own number of timesteps are left out, and that
            number is put in their place. A causal network and one that predicts x_{t-1} directly have no other.
        max_eval_samples (`int`, *optional*): how many examples, spread over the data set; all by default.
        num_eval_timesteps (`int`, *optional*): terms of the bound per example; all by default.
        num_timed_samples (`int`, defaults to 3): samples to time at each number of steps, one after the other; 0 for none.
        num_samples (`int`, defaults to 64): samples to look at; 0 for none.
        num_sample_steps (`int`, defaults to 20): their number of steps.
        batch_size (`int`, defaults to 64): of all that is not timed.
        feature_extractor (`torch.nn.Module` or `str`, *optional*): see [`image_scores`]; without one images get no FID. The
            whole data set is what samples are compared with.
        seed (`int`, defaults to 0): of timesteps, noise and samples.
    """
    check_type("pipeline", pipeline, D3PMPipeline, "a `D3PMPipeline`")
    check_dataset("dataset", dataset)
    check_str("dataset_name", dataset_name)
    check_str("split", split)
    check_type("num_inference_steps", num_inference_steps, (tuple, list), "a tuple of integers")
    if not num_inference_steps:
        raise ValueError("num_inference_steps is empty: pass at least one number of steps")
    for steps in num_inference_steps:
        check_int("an entry of num_inference_steps", steps, 1)
    for name, value in (("max_eval_samples", max_eval_samples), ("num_eval_timesteps", num_eval_timesteps)):
        if value is not None:
            check_int(name, value, 1)
    for name, value in (("num_timed_samples", num_timed_samples), ("num_samples", num_samples), ("seed", seed)):
        check_int(name, value, 0)
    for name, value in (("num_sample_steps", num_sample_steps), ("batch_size", batch_size)):
        check_int(name, value, 1)
    if feature_extractor is not None:
        kinds = (torch.nn.Module, str, os.PathLike)
        check_type("feature_extractor", feature_extractor, kinds, "a module, or the name of one")
    if isinstance(feature_extractor, str) and feature_extractor != INCEPTION:
        feature_extractor = ClassifierFeatures(
            feature_extractor
        )  # now: a wrong name should not be found out at the end
    count = min(len(dataset), max_eval_samples or len(dataset))
    indices = [i * len(dataset) // count for i in range(count)]
    scheduler, words_per_element = pipeline.scheduler, _words_per_element(dataset)
    rows, samples, denoiser = [], {}, pipeline.denoiser
    with evaluating(denoiser):
        for steps in sorted({possible_steps(scheduler, denoiser, n) for n in num_inference_steps}, reverse=True):
            bound = evaluate_bound(
                scheduler,
                denoiser,
                _batches(dataset, indices, batch_size, pipeline.device),
                num_inference_steps=steps,
                num_evaluated_timesteps=None if num_eval_timesteps is None else min(num_eval_timesteps, steps),
                is_causal=scores_in_one_pass(scheduler, denoiser),
                seed=seed,
                progress_bar=progress_bar,
            )
            row = _step_result(bound, words_per_element)
            if num_timed_samples:
                row.seconds, row.seconds_deviation = time_sampling(pipeline, steps, num_timed_samples)
            rows.append(row)
        if num_samples:
            steps = possible_steps(scheduler, denoiser, num_sample_steps)
            samples = describe_samples(pipeline, dataset, num_samples, steps, batch_size, feature_extractor, seed)
    protocol = [f"{'all' if count == len(dataset) else count} of {len(dataset)} examples"]
    if hasattr(dataset, "layout"):
        protocol.append(dataset.layout)
    if words_per_element is not None:
        protocol.append(
            f"a word of the whole split is {1 / words_per_element:.3f} tokens, its ends of sentences counted"
        )
    if num_timed_samples:
        threads = f", {torch.get_num_threads()} threads" if pipeline.device.type == "cpu" else ""
        protocol.append(f"{num_timed_samples} samples timed, one at a time, on {pipeline.device.type}{threads}")
    return Evaluation(dataset_name, split, rows, samples, "; ".join(protocol))


def time_sampling(pipeline, num_inference_steps: int, num_timed_samples: int = 3) -> tuple[float, float]:
    """Seconds to draw one sample, and their standard deviation (0 of one); one more comes first and does not count."""
    check_type("pipeline", pipeline, D3PMPipeline, "a `D3PMPipeline`")
    check_int("num_inference_steps", num_inference_steps, 1)
    check_int("num_timed_samples", num_timed_samples, 1)
    showing = dict(getattr(pipeline, "_progress_bar_config", {}))
    pipeline.set_progress_bar_config(**{**showing, "disable": True})
    seconds = []
    for i in range(1 + num_timed_samples):
        begin = time.perf_counter()
        _draw(pipeline, 1, num_inference_steps, i)
        seconds.append(time.perf_counter() - begin)
    pipeline.set_progress_bar_config(**showing)
    return statistics.mean(seconds[1:]), statistics.stdev(seconds[1:]) if num_timed_samples > 1 else 0.0


def describe_samples(pipeline, dataset, num_samples, steps, batch_size, feature_extractor, seed) -> dict:
    """Statistics of samples, beside those of the data."""
    sizes = [min(batch_size, num_samples - first) for first in range(0, num_samples, batch_size)]
    states = torch.cat([_draw(pipeline, size, steps, seed + i) for i, size in enumerate(sizes)])
    described = {"num_samples": num_samples, "num_inference_steps": steps, "seed": seed}
    if pipeline.task == "text-generation":
        reference = _sequences(dataset)
        first = reference[:: max(1, len(reference) // num_samples)][:num_samples]
        described |= {"token_entropy": token_entropy(states), "token_entropy_of_data": token_entropy(first)}
        if pipeline.tokenizer is not None:
            described |= word_statistics(pipeline.decode(states), pipeline.decode(reference))
    elif feature_extractor is not None:
        reference = pipeline.decode(_sequences(dataset), "pt")
        described |= image_scores(pipeline.decode(states, "pt").cpu(), reference, feature_extractor)
    return described


def _sequences(dataset) -> torch.Tensor:
    """All of a data set, `[n, ...]`."""
    return torch.stack([dataset[i] for i in range(len(dataset))])


def _draw(pipeline, batch_size: int, steps: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    options = {"batch_size": batch_size, "num_inference_steps": steps, "generator": generator}
    return pipeline(output_type="latent", return_dict=False, **options)[0]


def _batches(dataset, indices: list[int], batch_size: int, device):
    for first in range(0, len(indices), batch_size):
        yield default_collate([dataset[i] for i in indices[first : first + batch_size]]).to(device)


def _words_per_element(dataset) -> float | None:
    """Words to a token in the whole data set, if they were counted."""
    num_words = getattr(dataset, "num_words", None)
    return None if num_words is None else num_words / (len(dataset) * dataset[0].numel())


def _step_result(bound: Bound, words_per_element: float | None) -> StepResult:
    """Perplexities are exponentials: their relative error is the error of the nats per token, or per word."""
    words = error = None
    if words_per_element is not None:
        words = bound.word_perplexity(words_per_element * bound.num_elements)
        error = words * bound.standard_error / words_per_element
    return StepResult(
        num_inference_steps=bound.num_inference_steps,
        bits_per_dim=bound.bits_per_dim,
        standard_error=bound.bits_per_dim_standard_error,
        perplexity=bound.perplexity,
        perplexity_standard_error=bound.perplexity * bound.standard_error,
        word_perplexity=words,
        word_perplexity_standard_error=error,
        protocol=bound.protocol,
    )
