# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The bound of each document of a list, with an error for each."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import DiffusionPipeline
from tqdm.auto import trange

from ..numerics import derive_seed, to_device, uniforms
from ..schedulers import D3PMScheduler
from ..utils.checks import check_int
from .bound import bits
from .exact import check_pipeline
from .measure import content_generators, evaluate_bound, evaluating, read_scored, repeatable
from .orders import block_timesteps, has_orders, predict_log_probs
from .terms import stratify
from .texts import text_batches, whole_texts


@dataclass(frozen=True)
class DocumentBounds:
    """An upper bound on -log p(x_0) of each document, in nats, and how it was measured.

    Args:
        nats (`torch.Tensor` of shape `[D]`): Bound of each whole document: the mean of its estimates.
        standard_errors (`torch.Tensor` of shape `[D]`): Standard error of each bound, from the spread between the estimates of the
            document. It covers the noise and the timesteps of this document, and no choice of documents.
        num_elements (`torch.Tensor` of shape `[D]`): Number of scored tokens of each document.
        num_estimates (`int`): Number of estimates per document.
        protocol (`str`): How each estimate was measured.

    Examples:
        ```python
        from d3pm_hf import D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model, evaluate_documents

        pipeline = D3PMTextPipeline(create_text_model("tiny", 28), D3PMScheduler(28), character_tokenizer(), sequence_length=16)
        bounds = evaluate_documents(pipeline, ["some words", "a word"], num_eval_timesteps=4, progress_bar=False)
        for nats, error in zip(bounds.nats, bounds.standard_errors):
            print(f"{nats:.1f} ± {error:.1f} nats")
        ```
    """

    nats: torch.Tensor
    standard_errors: torch.Tensor
    num_elements: torch.Tensor
    num_estimates: int
    protocol: str

    @property
    def bits_per_token(self) -> torch.Tensor:
        """Bound of each document in bits per token, `[D]`."""
        return self.nats / self.num_elements * bits(1)

    @property
    def bits_per_token_standard_errors(self) -> torch.Tensor:
        """Standard error of each of `bits_per_token`, `[D]`."""
        return self.standard_errors / self.num_elements * bits(1)


@torch.no_grad()
def evaluate_documents(
    pipeline: DiffusionPipeline,
    documents,
    *,
    num_estimates: int = 8,
    num_eval_timesteps: int = 16,
    num_inference_steps: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
    progress_bar: bool = True,
) -> DocumentBounds:
    """Measures the bound of each document of a list, of any lengths, with an error for each.

    A document has `num_estimates` independent estimates of `num_eval_timesteps` terms each, and calls the network once per term. It
    draws its timesteps and its noise by `seed` and its tokens: its bound is the same alone, in any list and at any place in it, but
    for the rounding of the network.

    For an absorbing process this is the bound of infinitely many steps, the average of -log p(x_0) over all orders of its n tokens:

        sum over l = 1 .. n of E[ 1/l sum over masks j of -log p(x_0^j | the other n - l tokens) ],   l masks at random places

    Each term draws l from a stretch of its own and then the places. [`evaluate_bound`] in continuous time draws a time, at which the number of
    masks is random too, and has a larger variance.

    Args:
        pipeline ([`D3PMTextPipeline`]): Pipeline with any process.
        documents (`str`, `list[str]`, `torch.LongTensor` of shape `[n]` or `[B, n]`, or a list of tokens): The documents.
        num_estimates (`int`, defaults to 8): Number of estimates per document, at least 2.
        num_eval_timesteps (`int`, defaults to 16): Number of terms per estimate, at least 2, and at most one for each step or token.
        num_inference_steps (`int`, *optional*): Number of reverse steps of the model whose bound is measured, by
            [`evaluate_bound`]. Defaults to infinitely many for an absorbing process, and to T for any other.
        batch_size (`int`, defaults to 64): Number of documents in a batch.
        seed (`int`, defaults to 0): Seed for the timesteps and the noise.
        progress_bar (`bool`, defaults to `True`): Whether to show a progress bar.
    """
    check_pipeline(pipeline)
    check_int("num_estimates", num_estimates, 2)
    check_int("num_eval_timesteps", num_eval_timesteps, 2)
    check_int("batch_size", batch_size, 1)
    check_int("seed", seed, 0)
    scheduler, denoiser = pipeline.scheduler, pipeline.denoiser
    timesteps = scheduler.sampling_timesteps(num_inference_steps)
    batches, places = text_batches(pipeline, whole_texts(pipeline, "documents", documents), batch_size)
    batches = [{name: value.to(pipeline.device) for name, value in batch.items()} for batch in batches]
    by_counts = num_inference_steps is None and has_orders(scheduler)
    steps = "infinitely many steps" if by_counts else f"{len(timesteps)} of {len(scheduler)} steps"
    num_terms = num_eval_timesteps if by_counts else min(num_eval_timesteps, len(timesteps))
    predict, estimates = repeatable(denoiser), []
    for i in trange(num_estimates, desc="documents", disable=not progress_bar, unit="estimate"):
        own_seed = derive_seed(seed, i)
        if by_counts:
            with evaluating(denoiser):
                parts = [count_nats(scheduler, predict, batch, num_terms, own_seed) for batch in batches]
            estimates.append(torch.cat(parts))
        else:
            bound = evaluate_bound(
                scheduler,
                denoiser,
                batches,
                num_inference_steps=num_inference_steps,
                num_eval_timesteps=num_terms,
                seed=own_seed,
                seed_by="content",
                progress_bar=False,
            )
            estimates.append(torch.as_tensor(bound.nats_per_example))
    nats = torch.stack(estimates)[:, places]  # [num_estimates, D]
    if nats.isnan().any():
        raise ValueError("a bound is NaN: the output of the network holds NaN; check its weights and its input")
    elements = torch.cat([read_scored(scheduler, batch)[1].sum(1).cpu() for batch in batches])
    return DocumentBounds(
        nats=nats.mean(0),
        standard_errors=nats.std(0) / num_estimates**0.5,
        num_elements=elements[places],
        num_estimates=num_estimates,
        protocol=f"{num_estimates} estimates per document, {steps}, {num_terms} stratified terms per estimate, seed {seed} and tokens",
    )


def count_nats(scheduler: D3PMScheduler, model: Callable, batch: dict, num_terms: int, seed: int) -> torch.Tensor:
    """An estimate of the bound of infinitely many steps of each text of a batch in nats, `[B]`, float64.

    Args:
        scheduler, model: An absorbing process and the network.
        batch: Texts, with `"x_0"`.
        num_terms: Number of terms of each text, at most one for each of its scored tokens.
        seed: Seed of the counts and the places.
    """
    x_0, mask, condition = read_scored(scheduler, batch)  # [B, N]
    generators = content_generators(seed, x_0, mask, condition)
    numbers = mask.sum(1).tolist()
    strata = [stratify(n, min(num_terms, n)) for n in numbers]
    times = {n: block_timesteps(scheduler, n) for n in set(numbers) if n}  # by n - l
    nats = torch.zeros(len(x_0), dtype=torch.float64)
    for i in range(max(map(len, strata))):
        rows = [row for row, stretches in enumerate(strata) if len(stretches) > i]
        first, size = torch.tensor([strata[row][i] for row in rows]).unbind(1)  # [n] each
        sources = [generators[row] for row in rows]
        count = first + 1 + (uniforms((len(rows),), sources) * size).long()
        t = torch.tensor([times[numbers[row]][numbers[row] - int(number)] for row, number in zip(rows, count)])
        scores = uniforms((len(rows), x_0.shape[1]), sources, x_0.device)
        places = scores.masked_fill(~mask[rows], -1).argsort(dim=1, descending=True).argsort(1)
        is_masked = places < to_device(count, x_0.device)[:, None]
        x_t = x_0[rows].masked_fill(is_masked, scheduler.mask_token_id)
        given = {name: value[rows] for name, value in condition.items()}
        log_p = predict_log_probs(scheduler, model, x_t, to_device(t, x_0.device), given, is_masked)  # [r, K]
        row, position = is_masked.nonzero().unbind(1)
        log_p = log_p.gather(1, x_0[rows][row, position, None].to(log_p.device)).squeeze(1).cpu()
        nats[rows] -= size / count * torch.zeros(len(rows), dtype=torch.float64).index_add_(0, row.cpu(), log_p)
    return nats
