# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Results of measuring a bound or a likelihood: their units, standard errors and confidence intervals."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import stdtrit


def bits(nats: float) -> float:
    """`nats` in bits: nats / log 2."""
    return nats / math.log(2)


def perplexity(nats: float) -> float:
    """Perplexity at `nats` per token or per word: exp(nats), infinite if it is beyond the range of a float."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def perplexity_standard_error(nats: float, standard_error: float) -> float:
    """Standard error of exp(nats), to first order: exp(nats) times the standard error of `nats`."""
    return perplexity(nats) * standard_error


def with_error(value: float, error: float, digits: int) -> str:
    """A value and its standard error as they are printed: `"2.85 ± 0.01"`, without an error that is NaN, or `"infinite"`."""
    if math.isinf(value):
        return "infinite"
    return f"{value:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


@dataclass(frozen=True, kw_only=True)
class NatsPerElement:
    """A negative log-likelihood, or a bound on it, in nats per element: its units, its interval, and what it was measured on."""

    standard_error: float
    num_examples: int
    num_elements: int
    skewness: float = 0.0
    nats_per_example: torch.Tensor | None = None
    elements_per_example: torch.Tensor | None = None
    num_known: int = 0
    conditions: tuple[str, ...] = ()
    seed: int = 0

    @property
    def total(self) -> float:
        """Nats per element."""
        raise NotImplementedError

    @property
    def protocol(self) -> str:
        """How it was measured, in one line."""
        raise NotImplementedError

    @property
    def bits_per_dim(self) -> float:
        """`total` in bits per element. For characters these are bits per character."""
        return bits(self.total)

    bits_per_char = bits_per_dim

    @property
    def bits_per_dim_standard_error(self) -> float:
        """The standard error of `bits_per_dim`."""
        return bits(self.standard_error)

    @property
    def perplexity(self) -> float:
        """The perplexity per token, exp(`total`)."""
        return perplexity(self.total)

    @property
    def perplexity_standard_error(self) -> float:
        """The standard error of `perplexity`, to first order."""
        return perplexity_standard_error(self.total, self.standard_error)

    def word_perplexity(self, num_words: float) -> float:
        """The perplexity per word of data with `num_words` words. The paper counts one EOS per sentence as a word."""
        return perplexity(self.total * self.num_elements / num_words)

    def confidence_interval(self, level: float = 0.95) -> tuple[float, float]:
        """An interval that covers the mean of all data, in nats per element, with probability `level`: see [`skewed_interval`].

        It is reliable from 100 examples on. With fewer examples, or with two terms of single elements, it covers less
        often.
        """
        if not 0 < level < 1:
            raise ValueError(f"level is {level}: it must lie between 0 and 1, such as 0.95")
        low, high = skewed_interval(self.total, self.standard_error, self.skewness, self.num_examples, level)
        return float(low), float(high)

    @property
    def scored(self) -> str:
        """The elements that were scored, and what they were given, as the protocol says it."""
        scored = f"{self.num_elements} elements"
        if self.num_known:
            scored += f" scored given {self.num_known} known ones"
        if self.conditions:
            scored += f" given {' and '.join(self.conditions)}"
        return scored

    def __str__(self) -> str:
        value = with_error(self.bits_per_dim, self.bits_per_dim_standard_error, 4)
        why = ", as the model excludes some of the data" if math.isinf(self.total) else ""
        return f"{value} bits/dim{why} ({self.protocol})"


@dataclass(frozen=True, kw_only=True)
class Bound(NatsPerElement):
    """An upper bound on -log p(x_0) in nats per element, and how it was measured.

    Bounds that were measured by different protocols cannot be compared.

    Args:
        prior (`float`): L_T of eq. 1 of the paper, KL(q(x_T | x_0) || p(x_T)).
        diffusion (`float`): The sum of L_{t-1}, KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t)), over t > 1.
        reconstruction (`float`): L_0, -log p(x_0 | x_1). In continuous time, the part of the integral up to the first timestep.
        standard_error (`float`): Standard error of `total`, from the spread between examples. It covers the choice of
            examples, of timesteps and of noise.
        timesteps (`list[int]`): Timesteps of the terms, ascending.
        per_timestep (`torch.Tensor` of shape `[len(timesteps)]`): Average term at each timestep. A timestep that
            was never drawn has NaN. In continuous time, a term is the integral between a timestep and the one before it.
        num_examples, num_elements (`int`): Number of examples and of scored elements in the average.
        num_inference_steps (`int`, *optional*): Number of reverse steps of the model whose bound this is; `None` in continuous
            time.
        num_eval_timesteps (`int`): Number of terms per example. If it is below `num_inference_steps`, the terms
            are a stratified sample.
        num_train_timesteps (`int`): T.
        seed (`int`, defaults to 0): Seed for the timesteps and the noise.
        skewness (`float`): Skewness of the examples about `total`. It is positive if few examples cost much more than
            the others.
        nats_per_example (`torch.Tensor` of shape `[num_examples]`, *optional*): Bound of each whole example, in nats.
        elements_per_example (`torch.Tensor` of shape `[num_examples]`, *optional*): Number of elements of each example.
        num_known (`int`, defaults to 0): Number of elements that were known and are not in the average, such as those of
            prompts and special tokens. Padding does not count.
        conditions (`tuple[str, ...]`, defaults to none): Names of the conditions that the bound is given, such as
            `class_labels`.
        spacing (`str`, defaults to `"even"`): `"even"`, or `"optimized"` if the timesteps are those stored in the scheduler.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler, evaluate_bound

        scheduler = D3PMScheduler(num_classes=28, num_train_timesteps=10)
        data = torch.randint(0, 27, (4, 16))
        bound = evaluate_bound(scheduler, lambda x_t, t: torch.zeros(*x_t.shape, 28), [data], progress_bar=False)
        print(bound)  # bits per dimension, standard error and protocol
        assert abs(bound.total - (bound.prior + bound.diffusion + bound.reconstruction)) < 1e-9
        ```
    """

    prior: float
    diffusion: float
    reconstruction: float
    timesteps: list[int]
    per_timestep: torch.Tensor
    num_inference_steps: int | None
    num_eval_timesteps: int
    num_train_timesteps: int
    spacing: str = "even"

    @property
    def num_evaluated_timesteps(self) -> int:
        """Earlier name of `num_eval_timesteps`."""
        return self.num_eval_timesteps

    @property
    def continuous_time(self) -> bool:
        """Whether this is the bound of infinitely many steps."""
        return self.num_inference_steps is None

    @property
    def total(self) -> float:
        """L_vb of eq. 1, in nats per element: `prior + diffusion + reconstruction`."""
        return self.prior + self.diffusion + self.reconstruction

    @property
    def protocol(self) -> str:
        """How the bound was measured, in one line."""
        if self.num_inference_steps is None:
            steps = f"continuous time read on {self.num_train_timesteps} timesteps"
            terms = f"{self.num_eval_timesteps} stratified times per example"
        else:
            steps, terms = f"{self.num_inference_steps} of {self.num_train_timesteps} steps", "all terms"
            if self.num_inference_steps < self.num_train_timesteps:
                steps += f" ({self.spacing})"
            if self.num_eval_timesteps < self.num_inference_steps:
                terms = f"{self.num_eval_timesteps} stratified terms per example"
        return f"{self.num_examples} examples, {self.scored}, {steps}, {terms}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Likelihood(NatsPerElement):
    """-log p(x_0) in nats per element, exactly, of a sampler that reveals positions in an order, and how it was measured.

    It is no bound, and is not comparable with one as if it were: it is that of another model than the process, the sampler of
    `order` and `block_length`. With `order="random"` it is an estimate of the bound of infinitely many steps, and `is_exact` is
    false.

    Args:
        order (`str`): Order in which positions are revealed.
        block_length (`int`, *optional*): Number of positions that each call of the network reveals, independently of each other.
            `None` if the number of calls was given.
        num_inference_steps (`int`, *optional*): Number of steps of the sampler, in place of `block_length`.
        num_calls (`int`): Largest number of calls of the network for an example.
        standard_error (`float`): Standard error of `total`, from the spread between examples.
        skewness (`float`): Skewness of the examples about `total`.
        num_examples, num_elements (`int`): Number of examples and of scored elements.
        nats_per_example (`torch.Tensor` of shape `[num_examples]`): -log p(x_0) of each whole example, infinite where the model
            excludes it.
        elements_per_example (`torch.Tensor` of shape `[num_examples]`): Number of scored elements of each example.
        num_known (`int`, defaults to 0): Number of elements that were given and are not scored. Padding does not count.
        conditions (`tuple[str, ...]`, defaults to none): Names of the conditions that the likelihood is given.
        seed (`int`, defaults to 0): Seed of random orders.

    Examples:
        ```python
        from d3pm_hf import D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model, evaluate_likelihood

        pipeline = D3PMTextPipeline(create_text_model("tiny", 28), D3PMScheduler(28), character_tokenizer(), sequence_length=16)
        result = evaluate_likelihood(pipeline, ["some words", "more words"], order="margin", progress_bar=False)
        print(result)  # bits per dimension, standard error and protocol
        assert result.is_exact and result.nats_per_example.shape == (2,)
        ```
    """

    order: str
    block_length: int | None
    num_inference_steps: int | None
    num_calls: int
    nats_per_example: torch.Tensor
    elements_per_example: torch.Tensor

    @property
    def is_exact(self) -> bool:
        """Whether this is the likelihood of a sampler, and not an estimate of a bound by random orders."""
        return self.order != "random"

    @property
    def total(self) -> float:
        """-log p(x_0) in nats per element."""
        return float(self.nats_per_example.sum() / self.num_elements)

    @property
    def protocol(self) -> str:
        """Whose likelihood this is, and how it was measured, in one line."""
        if self.num_inference_steps is not None:
            size = f"in {self.num_inference_steps} steps"
        else:
            size = "one position per call" if self.block_length == 1 else f"{self.block_length} positions per call"
        if self.is_exact:
            what = f"exact, of the sampler that reveals {size} in the order {self.order!r}"
        else:
            limit = "infinitely many steps" if self.block_length == 1 else f"random blocks, {size}"
            what = f"estimate of the bound of {limit}, by one random order per example, seed {self.seed}"
        return f"{what}; {self.num_examples} examples, {self.scored}, {self.num_calls} calls"


def ratio_estimate(nats: np.ndarray, elements: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ratio r = sum(nats) / sum(elements) over the examples of the last axis, its standard error, and its skewness.

    The skewness is that of the residuals `nats - r elements`. The standard error of a single example is NaN, and so is that of
    an infinite ratio.
    """
    count, total = nats.shape[-1], elements.sum(-1)
    estimate = nats.sum(-1) / total
    with np.errstate(invalid="ignore"):  # inf - inf
        residual = nats - estimate[..., None] * elements
    variance = (residual**2).mean(-1)
    error = np.sqrt(count**2 / (count - 1) * variance) / total if count > 1 else np.full_like(estimate, np.nan)
    deviation = np.sqrt(np.where(variance > 0, variance, 1))  # equal examples have no skewness
    return estimate, error, (residual**3).mean(-1) / deviation**3


def summarize(nats: np.ndarray, elements: np.ndarray) -> dict[str, Any]:
    """The fields of a result that follow from the nats and the number of scored elements of each example, `[num_examples]`."""
    if not elements.sum():
        raise ValueError("there is nothing to evaluate: the data have no batches, or no element counts")
    _, standard_error, skewness = ratio_estimate(nats, elements)
    return {
        "standard_error": float(standard_error),
        "skewness": float(skewness),
        "num_examples": len(nats),
        "num_elements": int(elements.sum()),
        "nats_per_example": torch.from_numpy(nats),
        "elements_per_example": torch.from_numpy(elements).long(),
    }


def skewed_interval(estimate, error, skewness, count: int, level: float):
    """The limits of a confidence interval: on each side the farther one of Student's t and of Hall's transformation of it.

        Student:  estimate -+ q error,   q the quantile of t with count - 1 degrees of freedom
        Hall:     estimate - g^-1(+-q) error,   g^-1(y) = 3 (y - a/6) / (1 + c + c^2),
                  c^3 = 1 + a (y - a/6),   a = skewness / sqrt(count)

    With few terms per example, most examples are cheap and few are expensive. A sample without expensive examples has
    both too low a mean and too small a standard error. Hall's limit (Annals of Statistics, 1992) lies farther out on
    the long side; Student's limit keeps the other side from coming too near.
    """
    q = stdtrit(count - 1, (1 + level) / 2) if count > 1 else np.nan
    a = np.asarray(skewness) / math.sqrt(count)

    def inverse(y):
        shifted = y - a / 6
        c = np.cbrt(1 + a * shifted)
        return 3 * shifted / (1 + c + c**2)

    return estimate - np.maximum(inverse(q), q) * error, estimate - np.minimum(inverse(-q), -q) * error
