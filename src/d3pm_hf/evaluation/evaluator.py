# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Measures a pipeline: bounds, sampling times, and statistics of samples."""

import os
import statistics
import time

import torch

from ..data.batches import evaluation_batches
from ..data.collator import DataCollatorForD3PM, read_example
from ..likelihood import Bound, Likelihood
from ..likelihood.causal import possible_steps, scores_in_one_pass
from ..likelihood.exact import evaluate_likelihood
from ..likelihood.measure import evaluate_bound, evaluating
from ..likelihood.orders import check_has_orders
from ..pipelines import D3PMPipeline
from ..pipelines.drawing import draw_samples
from ..utils.checks import check_choice, check_dataset, check_int, check_str, check_type
from ..utils.names import EXACT_ORDERS
from .fid import INCEPTION, ClassifierFeatures, image_scores
from .report import Evaluation, LikelihoodResult, StepResult
from .text_statistics import token_entropy, word_statistics


def evaluate_pipeline(
    pipeline: D3PMPipeline,
    dataset,
    dataset_name: str = "data",
    split: str = "test",
    num_inference_steps: tuple[int, ...] = (1000, 256, 64, 20, 10),
    max_eval_samples: int | None = None,
    num_eval_timesteps: int | None = None,
    continuous_time: bool = False,
    likelihood: tuple[str, ...] = (),
    num_timed_samples: int = 3,
    num_samples: int = 64,
    num_sample_steps: int = 20,
    batch_size: int = 64,
    feature_extractor: torch.nn.Module | str | None = None,
    seed: int = 0,
    progress_bar: bool = True,
) -> Evaluation:
    """Measures the bound and the sampling time of a pipeline at several numbers of steps, and statistics of its samples.

    Args:
        pipeline ([`D3PMPipeline`]): Pipeline to measure.
        dataset: `dataset[i]` is x_0, as for training; for a network with classes, a dictionary of `x_0` and `label`. If it
            has `num_words`, the perplexity per word is reported.
        dataset_name, split (`str`): Names that are written beside each number.
        num_inference_steps (`tuple[int]`): Numbers of steps. Those above the number of timesteps of the process are
            replaced by that number. A causal network and one that predicts x_{t-1} directly take all steps.
        max_eval_samples (`int`, *optional*): Number of examples, spread over the data set. Defaults to all of them.
        num_eval_timesteps (`int`, *optional*): Number of terms of the bound per example. Defaults to all of them.
        continuous_time (`bool`, defaults to `False`): Whether to measure the bound of infinitely many steps as well, see
            [`evaluate_bound`].
        likelihood (`tuple[str]`): Orders whose exact likelihoods are measured as well, see [`evaluate_likelihood`].
        num_timed_samples (`int`, defaults to 3): Number of samples that are timed at each number of steps, one at a
            time; 0 disables the timing.
        num_samples (`int`, defaults to 64): Number of samples for statistics; 0 disables them.
        num_sample_steps (`int`, defaults to 20): Number of steps for these samples.
        batch_size (`int`, defaults to 64): Batch size of everything that is not timed.
        feature_extractor (`torch.nn.Module` or `str`, *optional*): Feature extractor for the FID, see [`image_scores`].
            Samples are compared with the whole data set.
        seed (`int`, defaults to 0): Seed for the timesteps, the noise and the samples.
        progress_bar (`bool`, defaults to `True`): Whether to show progress bars.
    """
    check_type("pipeline", pipeline, D3PMPipeline, "a `D3PMPipeline`")
    check_dataset("dataset", dataset)
    check_str("dataset_name", dataset_name)
    check_str("split", split)
    check_type("num_inference_steps", num_inference_steps, (tuple, list), "a tuple of integers")
    if not num_inference_steps:
        raise ValueError("num_inference_steps is empty: pass at least one number of steps")
    for number in num_inference_steps:
        check_int("an entry of num_inference_steps", number, 1)
    check_type("likelihood", likelihood, (tuple, list), "a tuple of orders")
    for order in likelihood:
        check_choice("an entry of likelihood", order, EXACT_ORDERS)
    if likelihood:
        check_has_orders(pipeline.scheduler)
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
        feature_extractor = ClassifierFeatures(feature_extractor)  # an error comes before anything is measured

    scheduler, denoiser = pipeline.scheduler, pipeline.denoiser
    num_words = getattr(dataset, "num_words", None)
    words_per_element = None if num_words is None else num_words / (len(dataset) * dataset[0].numel())
    has_classes = denoiser.num_class_labels is not None
    collator = DataCollatorForD3PM(getattr(pipeline, "tokenizer", None), label_column="label" if has_classes else None)
    rows, samples, likelihoods = [], {}, []
    with evaluating(denoiser):
        counts = sorted({possible_steps(scheduler, denoiser, n) for n in num_inference_steps}, reverse=True)
        runs: list[int | None] = [*counts, *([None] if continuous_time else [])]  # `None` is continuous time
        for steps in runs:
            num_terms = num_eval_timesteps
            if num_terms is not None and steps is not None:
                num_terms = min(num_terms, steps)
            bound = evaluate_bound(
                scheduler,
                denoiser,
                evaluation_batches(dataset, batch_size, max_eval_samples, pipeline.device, collator),
                num_inference_steps=steps,
                num_eval_timesteps=num_terms,
                continuous_time=steps is None,
                is_causal=steps is not None and scores_in_one_pass(scheduler, denoiser),
                seed=seed,
                progress_bar=progress_bar,
            )
            row = StepResult(steps, *figures_of(bound))
            if words_per_element is not None:
                row.word_perplexity = bound.word_perplexity(words_per_element * bound.num_elements)
                row.word_perplexity_standard_error = row.word_perplexity * bound.standard_error / words_per_element
            if num_timed_samples and steps is not None:
                row.seconds, row.seconds_deviation = time_sampling(pipeline, steps, num_timed_samples)
            rows.append(row)
        for order in likelihood:
            batches = evaluation_batches(dataset, batch_size, max_eval_samples, pipeline.device, collator)
            exact = evaluate_likelihood(pipeline, batches, order=order, progress_bar=progress_bar)
            likelihoods.append(LikelihoodResult(order, *figures_of(exact)))
        if num_samples:
            steps = possible_steps(scheduler, denoiser, num_sample_steps)
            samples = describe_samples(pipeline, dataset, num_samples, steps, batch_size, feature_extractor, seed)
    count = len(dataset) if max_eval_samples is None else min(max_eval_samples, len(dataset))
    protocol = [f"{'all' if count == len(dataset) else count} of {len(dataset)} examples"]
    if has_classes:
        protocol.append(f"samples have the {denoiser.num_class_labels} classes in turn")
    if hasattr(dataset, "layout"):
        protocol.append(dataset.layout)
    if words_per_element is not None:
        protocol.append(
            f"a word of the whole split is {1 / words_per_element:.3f} tokens, its ends of sentences counted"
        )
    if num_timed_samples:
        threads = f", {torch.get_num_threads()} threads" if pipeline.device.type == "cpu" else ""
        protocol.append(f"{num_timed_samples} samples timed, one at a time, on {pipeline.device.type}{threads}")
    return Evaluation(dataset_name, split, rows, samples, "; ".join(protocol), likelihoods, task=pipeline.task)


def figures_of(result: Bound | Likelihood) -> tuple[float, float, float, float, str]:
    """The columns of a report: bits and perplexity, each with its standard error, and the protocol."""
    errors = result.bits_per_dim_standard_error, result.perplexity_standard_error
    return result.bits_per_dim, errors[0], result.perplexity, errors[1], result.protocol


def time_sampling(pipeline: D3PMPipeline, num_inference_steps: int, num_timed_samples: int = 3) -> tuple[float, float]:
    """Seconds to draw one sample, and their standard deviation between samples (0 for a single one).

    A first sample is drawn before, and not counted.
    """
    check_type("pipeline", pipeline, D3PMPipeline, "a `D3PMPipeline`")
    check_int("num_inference_steps", num_inference_steps, 1)
    check_int("num_timed_samples", num_timed_samples, 1)
    seconds = []
    for i in range(1 + num_timed_samples):
        begin = time.perf_counter()
        draw_samples(pipeline, 1, num_inference_steps, seed=i)
        seconds.append(time.perf_counter() - begin)
    return statistics.mean(seconds[1:]), statistics.stdev(seconds[1:]) if num_timed_samples > 1 else 0.0


def describe_samples(
    pipeline: D3PMPipeline,
    dataset,
    num_samples: int,
    num_inference_steps: int,
    batch_size: int,
    feature_extractor: torch.nn.Module | str | None,
    seed: int,
) -> dict:
    """Statistics of samples, and the same statistics of the data where they can be compared."""
    states = draw_samples(pipeline, num_samples, num_inference_steps, seed, batch_size)
    described: dict = {"num_samples": num_samples, "num_inference_steps": num_inference_steps, "seed": seed}
    if pipeline.task == "text-generation":
        drawn, rows = (_until_end(pipeline, part) for part in (list(states.cpu()), _all_states(dataset)))
        first = rows[:: max(1, len(rows) // num_samples)][:num_samples]
        described |= {"token_entropy": _mean_entropy(drawn), "token_entropy_of_data": _mean_entropy(first)}
        if pipeline.tokenizer is not None:
            texts, reference = (
                [text for row in part for text in pipeline.decode(row[None])] for part in (drawn, rows)
            )
            described |= word_statistics(texts, reference)
    elif feature_extractor is not None:
        reference = pipeline.decode(torch.stack(_all_states(dataset)), "pt")
        described |= image_scores(pipeline.decode(states, "pt").cpu(), reference, feature_extractor)
    return described


def _all_states(dataset) -> list[torch.Tensor]:
    """The examples of the data set, `[...]` each, without padding."""
    examples = [read_example(dataset[i]) for i in range(len(dataset))]
    states = [e["x_0"][e["attention_mask"].bool()] if "attention_mask" in e else e["x_0"] for e in examples]
    return [state for state in states if state.numel()]


def _until_end(pipeline: D3PMPipeline, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Texts `[n]` of any lengths, without the end of text and what follows it, if a sample is one text."""
    if not pipeline.config.get("ends_with_eos", False):
        return rows
    texts = [row[: int((row != pipeline.end_token_id).cumprod(0).sum())] for row in rows]
    return [text for text in texts if text.numel()]


def _mean_entropy(rows: list[torch.Tensor]) -> float:
    return statistics.mean([token_entropy(row[None]) for row in rows] or [0.0])
