# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Exact likelihoods of samplers that reveal positions in an order: of a data set, and of continuations given contexts."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from tqdm.auto import tqdm

from ..numerics import uniforms, wide_dtype
from ..samplers.confidence import masked_shares
from ..utils.checks import check_int, check_type
from .bound import Likelihood, summarize
from .measure import as_batches, content_generators, count_known, evaluating, read_scored, repeatable
from .orders import Order, block_calls, check_has_orders, get_order, reveal_data, step_calls
from .texts import Row, as_token_rows, check_length, is_texts, text_batches, whole_texts


def evaluate_likelihood(
    pipeline: DiffusionPipeline,
    data,
    *,
    order: str | Order = "left_to_right",
    block_length: int = 1,
    num_inference_steps: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
    progress_bar: bool = True,
) -> Likelihood:
    """Measures -log p(x_0) of a sampler that reveals an absorbing process in an order, exactly and not by a bound.

        log p(x_0) = sum over calls i of sum over j in B_i of log p(x_0^j | what is revealed before call i)

    The blocks of positions B_1, B_2, .. are a function of what is revealed, so that the probabilities of all x_0 add up to 1.
    Positions of one block are drawn independently of each other. With `order="left_to_right"`, `"confidence"`, `"margin"` or
    `"entropy"` this is the distribution of `pipeline(sampler="confidence", sampler_kwargs={"measure": ...})` with the measure
    `"left_to_right"`, `"probability"`, `"margin"` or `"entropy"`, at `temperature=1`, given the same elements outside of the process, with the timesteps of
    [`~likelihood.block_timesteps`] (of `num_inference_steps`, if this is passed). At `block_length=1` these are the timesteps of a
    call without `num_inference_steps`, if the process has enough of them that no step reveals two positions. The network is
    called once per block for all rows of a batch.

    Args:
        pipeline ([`D3PMPipeline`]): Pipeline with an absorbing process. Its network is put into eval mode, and back into its own
            mode afterwards.
        data: Batches as in [`evaluate_bound`], or a list of texts for a pipeline with a tokenizer. What is not scored is
            given: the network sees it, and the likelihood is that of the rest.
        order (`str` or `Callable`, defaults to `"left_to_right"`): Which positions come first: `"left_to_right"` (images row by
            row); `"confidence"`, those whose most likely state is most probable; `"margin"`, those with the largest difference
            between their two most likely states; `"entropy"`, those with the lowest entropy; or a function `order(logits, is_hidden)`
            of the logits of x_0 `[n, N, K]` and the positions that are hidden `[n, N]`, which gives scores `[n, N]`, largest
            first. Of equal scores, positions that are far apart come first. `"random"` draws one order per example: the average over
            orders is the bound of infinitely many steps (of a network that reads no timestep), and the result is an estimate
            of it and not a likelihood.
        block_length (`int`, defaults to 1): Number of positions that each call reveals. The last one reveals what is left.
        num_inference_steps (`int`, *optional*): Number of steps of the sampler, in place of `block_length`: the numbers of positions
            that it reveals are those of `pipeline(sampler="confidence", num_inference_steps=...)`.
        batch_size (`int`, defaults to 64): Number of texts in a batch. Other data come in batches.
        seed (`int`, defaults to 0): Seed of random orders. An example draws by `seed` and its content, whatever its place.
        progress_bar (`bool`, defaults to `True`): Whether to show a progress bar.

    Examples:
        ```python
        from d3pm_hf import D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model, evaluate_likelihood

        pipeline = D3PMTextPipeline(create_text_model("tiny", 28), D3PMScheduler(28), character_tokenizer(), sequence_length=16)
        print(evaluate_likelihood(pipeline, ["some words", "more words"], order="margin", progress_bar=False))
        ```
    """
    check_pipeline(pipeline)
    check_int("batch_size", batch_size, 1)
    places: Any = slice(None)
    if is_texts(data):
        data, places = text_batches(pipeline, whole_texts(pipeline, "data", data), batch_size)
    options = block_length, num_inference_steps, seed, progress_bar
    revealed = reveal_batches(pipeline, as_batches(data), order, *options)
    return Likelihood(
        **summarize(np.array(revealed.nats)[places], np.array(revealed.elements)[places]),
        order=order if isinstance(order, str) else getattr(order, "__name__", type(order).__name__),
        block_length=block_length if num_inference_steps is None else None,
        num_inference_steps=num_inference_steps,
        num_calls=revealed.num_calls,
        num_known=revealed.num_known,
        conditions=tuple(sorted(revealed.conditions - {"attention_mask"})),
        seed=seed,
    )


def log_likelihood(
    pipeline: DiffusionPipeline,
    context,
    continuation,
    *,
    order: str | Order = "left_to_right",
    block_length: int = 1,
    batch_size: int = 64,
    progress_bar: bool = False,
) -> torch.Tensor:
    """log p(continuation | context) in nats, `[n]`, exactly, of the sampler of an order ([`evaluate_likelihood`]).

    The context is outside of the process, as a prompt with `max_new_tokens` is: the network sees it in every call. Context and
    continuation are encoded one by one, and the length of the continuation is given. The special tokens of a pipeline with
    `add_special_tokens` stand around both.

    Args:
        pipeline ([`D3PMTextPipeline`]): Pipeline with an absorbing process.
        context (`str`, `list[str]`, `torch.LongTensor` of shape `[n]` or `[B, n]`, or a list of tokens): What is given; one for
            all continuations, or one for each. `""` gives nothing.
        continuation (`str`, `list[str]`, `torch.LongTensor` of shape `[n]` or `[B, n]`, or a list of tokens): What is scored.
        order (`str` or `Callable`, defaults to `"left_to_right"`): Order in which the continuation is revealed. `"random"` has no
            likelihood.
        block_length (`int`, defaults to 1): Number of positions that each call of the network reveals.
        batch_size (`int`, defaults to 64): Number of pairs in a batch.
        progress_bar (`bool`, defaults to `False`): Whether to show a progress bar.

    Returns:
        `torch.Tensor` of shape `[n]`, float64: log p of each continuation, minus infinity where the model excludes it.

    Examples:
        ```python
        from d3pm_hf import D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model, log_likelihood

        pipeline = D3PMTextPipeline(create_text_model("tiny", 28), D3PMScheduler(28), character_tokenizer(), sequence_length=16)
        print(log_likelihood(pipeline, "the quick ", ["brown fox", "dog"], order="confidence"))
        ```
    """
    check_pipeline(pipeline)
    if isinstance(order, str) and order == "random":
        raise ValueError(
            "order is 'random', whose average over orders is a bound and no likelihood: choose another one"
        )
    check_int("batch_size", batch_size, 1)
    contexts = as_token_rows(pipeline, "context", context)
    continuations = as_token_rows(pipeline, "continuation", continuation)
    if len(contexts) == 1:
        contexts = contexts * len(continuations)
    if len(contexts) != len(continuations):
        raise ValueError(
            f"got {len(contexts)} contexts and {len(continuations)} continuations: pass one context for all, or one for each"
        )
    if not all(continuations):
        raise ValueError(f"continuation {continuations.index([])} has no tokens: write some, or leave it out")
    rows: list[Row] = [(given, scored, []) for given, scored in zip(contexts, continuations)]
    return score_continuations(pipeline, rows, order, block_length, batch_size, progress_bar)[0]


def score_continuations(
    pipeline: DiffusionPipeline,
    rows: list[Row],
    order: str | Order,
    block_length: int,
    batch_size: int,
    progress_bar: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of each continuation given its context `[n]`, and whether it is what the sampler draws at `temperature=0` `[n]`.

    Args:
        rows: The tokens of each context, of its continuation, and of what is given after it.
        pipeline, order, block_length, batch_size, progress_bar: As in [`log_likelihood`].
    """
    batches, places = text_batches(pipeline, rows, batch_size)
    revealed = reveal_batches(pipeline, batches, order, block_length, progress_bar=progress_bar)
    return -torch.tensor(revealed.nats, dtype=torch.float64)[places], torch.tensor(revealed.is_greedy)[places]


@dataclass
class Revealed:
    """The probability that the sampler of an order gives to the examples of a data set.

    Args:
        nats: -log p(x_0) of each example.
        elements: Number of scored elements of each example.
        is_greedy: Whether each example is what the sampler draws at `temperature=0`.
        num_calls: Largest number of calls of the network for an example.
        num_known: Number of elements that were given. Padding does not count.
        conditions: Names of the conditions.
    """

    nats: list[float] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)
    is_greedy: list[bool] = field(default_factory=list)
    num_calls: int = 0
    num_known: int = 0
    conditions: set[str] = field(default_factory=set)


@torch.no_grad()
def reveal_batches(
    pipeline: DiffusionPipeline,
    batches: Iterable,
    order: str | Order,
    block_length: int = 1,
    num_inference_steps: int | None = None,
    seed: int = 0,
    progress_bar: bool = False,
) -> Revealed:
    """Reveals each example of `batches` in an order. The arguments are those of [`evaluate_likelihood`]."""
    scheduler, denoiser, function = pipeline.scheduler, pipeline.denoiser, get_order(order)
    check_has_orders(scheduler)
    check_int("block_length", block_length, 1)
    check_int("seed", seed, 0)
    check_type("progress_bar", progress_bar, bool, "True or False")
    if num_inference_steps is not None and block_length != 1:
        raise ValueError(
            f"got block_length={block_length} and num_inference_steps={num_inference_steps}: pass one of the two"
        )
    shares = masked_shares(scheduler, scheduler.sampling_timesteps(num_inference_steps))
    predict, revealed = repeatable(denoiser), Revealed()
    with evaluating(denoiser), tqdm(desc="likelihood", disable=not progress_bar, unit="call") as bar:
        for batch in batches:
            x_0, mask, condition = read_scored(scheduler, batch)
            check_length(pipeline, x_0)
            numbers = mask.flatten(1).sum(1).tolist()
            if num_inference_steps is None:
                calls = [block_calls(shares, n, block_length) for n in numbers]
            else:
                calls = [step_calls(shares, n) for n in numbers]
            if order == "random":
                scores = uniforms(x_0.shape, content_generators(seed, x_0, mask, condition)).flatten(1)  # [B, N]
            else:  # only the order "left_to_right" reads them
                scores = -torch.arange(x_0[0].numel()).double().expand(len(x_0), -1)
            revealed.num_known += count_known(mask, condition)
            revealed.conditions |= condition.keys()
            scores = scores.to(wide_dtype(pipeline.device))
            x_0, mask, scores = (v.to(pipeline.device) for v in (x_0, mask, scores))
            condition = {name: value.to(pipeline.device) for name, value in condition.items()}
            log_p, is_greedy = reveal_data(
                scheduler, predict, x_0, mask, calls, function, scores, condition, bar.update
            )
            if log_p.isnan().any():
                raise ValueError(
                    "the likelihood is NaN: the output of the network holds NaN or infinity, or leaves no state possible; "
                    "check its weights and its input"
                )
            revealed.num_calls = max(revealed.num_calls, *map(len, calls))
            revealed.nats += (0 - log_p).tolist()
            revealed.elements += numbers
            revealed.is_greedy += is_greedy.tolist()
    return revealed


def check_pipeline(pipeline) -> None:
    """Checks that `pipeline` is one of this package, and that its components fit."""
    if not isinstance(pipeline, DiffusionPipeline) or not hasattr(type(pipeline), "check_components"):
        check_type("pipeline", pipeline, (), "a `D3PMPipeline`")
    pipeline.check_components()
