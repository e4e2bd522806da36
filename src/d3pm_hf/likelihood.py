# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The variational bound on the negative log-likelihood of a data set, with its error."""

import math
from dataclasses import dataclass
from typing import Callable, Iterable

import numpy as np
import torch
from tqdm.auto import tqdm

from .losses import autoregressive_loss, d3pm_loss, prior_loss
from .schedulers import D3PMScheduler


@dataclass(frozen=True)
class Bound:
    """An upper bound on -log p(x_0), in nats per element, and how it was measured. Bounds of two protocols do not mix.

    Args:
        prior, diffusion, reconstruction: L_T, the sum of the L_t between, and L_0. They add up to `total`.
        standard_error: of `total`, from the spread between examples. It covers the choice of examples, of timesteps and
            of noise.
        timesteps: those at which the process was looked at, ascending.
        per_timestep: the average term of each, `[num_inference_steps]`; NaN for one that was never drawn.
        num_examples, num_elements: what was averaged over.
        num_evaluated_timesteps: per example. Fewer than `num_inference_steps` means a stratified sample of the terms.
    """

    prior: float
    diffusion: float
    reconstruction: float
    standard_error: float
    timesteps: list[int]
    per_timestep: torch.Tensor
    num_examples: int
    num_elements: int
    num_inference_steps: int
    num_evaluated_timesteps: int
    num_train_timesteps: int
    seed: int

    @property
    def total(self) -> float:
        """L_vb, in nats per element."""
        return self.prior + self.diffusion + self.reconstruction

    @property
    def bits_per_dim(self) -> float:
        """L_vb in bits per element; for characters this is bits per character."""
        return self.total / math.log(2)

    bits_per_char = bits_per_dim

    @property
    def bits_per_dim_standard_error(self) -> float:
        """The standard error of `bits_per_dim`."""
        return self.standard_error / math.log(2)

    @property
    def perplexity(self) -> float:
        """exp(L_vb), per token."""
        return math.exp(self.total)

    def word_perplexity(self, num_words: float) -> float:
        """exp of the nats per word, for a data set of `num_words` words (the paper counts one EOS per sentence too)."""
        return math.exp(self.total * self.num_elements / num_words)

    @property
    def protocol(self) -> str:
        """How the number came about, in one line."""
        terms = "all terms"
        if self.num_evaluated_timesteps < self.num_inference_steps:
            terms = f"{self.num_evaluated_timesteps} stratified terms per example"
        return (
            f"{self.num_examples} examples, {self.num_elements} elements, {self.num_inference_steps} of "
            f"{self.num_train_timesteps} steps, {terms}, seed {self.seed}"
        )

    def __str__(self) -> str:
        return f"{self.bits_per_dim:.4f} ± {self.bits_per_dim_standard_error:.4f} bits/dim ({self.protocol})"


@torch.no_grad()
def evaluate_bound(
    scheduler: D3PMScheduler,
    model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    batches: Iterable,
    *,
    num_inference_steps: int | None = None,
    num_evaluated_timesteps: int | None = None,
    is_causal: bool = False,
    seed: int = 0,
    progress_bar: bool = True,
) -> Bound:
    """L_vb = L_T + sum_t L_{t-1} + L_0 on a data set (the paper's eq. 1).

    Example `i` draws its timesteps and its noise from a generator seeded by `(seed, i)`: the result does not depend on how
    the examples are batched.

    Args:
        scheduler: the process.
        model: `model(x_t, timesteps)` gives the network's output for `timesteps` `[B]`.
        batches: tensors x_0 `[B, ...]`, or pairs of those and a mask of the elements that count (1) or not (0).
        num_inference_steps (`int`, *optional*): the bound of the model that samples with so many steps; T by default.
        num_evaluated_timesteps (`int`, *optional*): how many terms are looked at per example; all by default. Else L_0 is
            one, and the rest are drawn one each from stretches of time, the shorter the nearer to the data. Each stands for
            its stretch, which leaves the sum unbiased.
        is_causal (`bool`, defaults to `False`): the process is autoregressive, and its network sees only the tokens before
            each: one pass over the data gives all terms, without noise, and the bound is -log p(x_0) itself.
        seed (`int`, defaults to 0): of timesteps and noise.
        progress_bar (`bool`, defaults to `True`): whether to show one.
    """
    num_inference_steps = len(scheduler) if num_inference_steps is None else num_inference_steps
    timesteps = scheduler.spaced_timesteps(num_inference_steps)[::-1]  # ascending
    count = len(timesteps)
    if is_causal and (scheduler.config.transition != "autoregressive" or count < len(scheduler)):
        raise ValueError(
            "a causal network takes one token at a time, in an autoregressive process of one step to a token"
        )
    strata = _strata(count, count if num_evaluated_timesteps is None or is_causal else num_evaluated_timesteps)
    examples = []  # [prior, diffusion, reconstruction, elements] of each
    sums, visits = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)

    bar = tqdm(desc="bound", disable=not progress_bar, unit="term")
    for batch in batches:
        x_0, mask = batch if isinstance(batch, (tuple, list)) else (batch, torch.ones_like(batch))
        scheduler.check_states(x_0.cpu())
        elements = mask.reshape(len(mask), -1).sum(-1).cpu().double()  # [B]
        generators = [_example_generator(seed, len(examples) + i) for i in range(len(x_0))]
        nats = torch.zeros(len(x_0), 3, dtype=torch.float64)
        nats[:, 0] = _per_example(prior_loss(scheduler, x_0), mask)
        if is_causal:
            terms = _causal_terms(scheduler, model, x_0, mask)
        else:
            terms = _sampled_terms(scheduler, model, x_0, mask, timesteps, strata, generators)
        for index, size, term in terms:
            nats[:, 2 if index[0] == 0 else 1] += size * term
            sums.index_add_(0, index, term)
            visits.index_add_(0, index, elements)
            bar.update()
        if nats.isnan().any():
            raise ValueError("the bound is NaN: the network's output holds NaN; look at its weights and its input")
        examples.extend(torch.cat([nats, elements[:, None]], -1).tolist())
    bar.close()
    if not examples:
        raise ValueError("there is nothing to evaluate: `batches` is empty")

    *parts, elements = np.array(examples).T
    nats, total = np.sum(parts, 0), elements.sum()
    if not total:
        raise ValueError("there is nothing to evaluate: no element counts, every mask is zero")
    residual = nats - nats.sum() / total * elements
    spread = math.sqrt((residual**2).sum() * len(nats) / max(len(nats) - 1, 1)) / total
    prior, diffusion, reconstruction = (float(part.sum() / total) for part in parts)
    return Bound(
        prior=prior,
        diffusion=diffusion,
        reconstruction=reconstruction,
        standard_error=spread if len(nats) > 1 else math.nan,
        timesteps=timesteps,
        per_timestep=sums / visits,
        num_examples=len(nats),
        num_elements=int(total),
        num_inference_steps=count,
        num_evaluated_timesteps=len(strata),
        num_train_timesteps=len(scheduler),
        seed=seed,
    )


def _sampled_terms(scheduler, model, x_0, mask, timesteps: list[int], strata, generators):
    """For each stretch of time, which of `timesteps` an example drew `[B]`, for how many it stands, and its term `[B]`."""
    previous = [-1, *timesteps[:-1]]
    one_step = len(timesteps) == len(scheduler)
    for first, size in strata:
        index = torch.tensor([first + int(torch.rand((), generator=g) * size) for g in generators])  # [B]
        t = torch.tensor(timesteps)[index].to(x_0.device)
        s = None if one_step else torch.tensor(previous)[index].to(x_0.device)
        x_t = scheduler.add_noise(x_0, t, generators)
        output = d3pm_loss(scheduler, model(x_t, t), x_0, x_t, t, previous_timesteps=s)
        yield index, size, _per_example(output.vb, mask)


def _causal_terms(scheduler, model, x_0, mask):
    """The same for each position of a causal network, the last first, as the process reveals them in reverse."""
    first_step = torch.zeros(len(x_0), dtype=torch.long, device=x_0.device)
    terms = autoregressive_loss(scheduler, model(x_0, first_step), x_0)  # [B, N]
    for t in range(len(scheduler)):
        position = slice(len(scheduler) - 1 - t, len(scheduler) - t)
        yield torch.full((len(x_0),), t), 1, _per_example(terms[:, position], mask[:, position])


def _strata(count: int, evaluated: int) -> list[tuple[int, int]]:
    """(first, size) of the stretches that 0 .. count-1 is cut into: one for L_0, then longer and longer ones.

    The ends lie at (count-1) (i/n)^1.5: equal lengths would miss Gaussian noise, half of whose bound stands in the first steps,
    and squares would be coarse in the middle, where uniform noise has its own.
    """
    fewest = min(2, count)
    if not fewest <= evaluated <= count:
        raise ValueError(f"num_evaluated_timesteps is {evaluated}: it must lie in {fewest} .. {count}")
    n = evaluated - 1
    edges = [0] + [1 + max(i, int((count - 1) * (i / max(n, 1)) ** 1.5)) for i in range(n + 1)]
    return [(first, end - first) for first, end in zip(edges, edges[1:])]


def _example_generator(seed: int, index: int) -> torch.Generator:
    state = np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def _per_example(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of the elements that count, `[B]`, float64, on the CPU."""
    return torch.where(mask.bool(), values, 0).reshape(len(values), -1).double().sum(-1).cpu()
