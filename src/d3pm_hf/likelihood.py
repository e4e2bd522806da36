# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The variational bound on the negative log-likelihood of a data set, with its error."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import DiffusionPipeline
from scipy.special import stdtrit
from tqdm.auto import tqdm

from .losses.variational import autoregressive_loss, d3pm_loss, prior_loss
from .schedulers import D3PMScheduler
from .utils.checks import check_int, check_type


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
        skewness: of the examples about `total`: positive where few examples cost much more than the others.
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
    skewness: float = 0.0

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

    def confidence_interval(self, level: float = 0.95) -> tuple[float, float]:
        """An interval that covers L_vb, in nats per element, with probability `level`: see [`skewed_interval`].

        It is to be trusted from 100 examples on; with fewer, or with two terms of single elements, it covers less often.
        """
        if not 0 < level < 1:
            raise ValueError(f"level is {level}: it must lie between 0 and 1, such as 0.95")
        low, high = skewed_interval(self.total, self.standard_error, self.skewness, self.num_examples, level)
        return float(low), float(high)

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


# Rows of the data on which a network that is said to be causal is checked.
NUM_PROBES = 8


def scores_in_one_pass(scheduler: D3PMScheduler, network: torch.nn.Module) -> bool:
    """Whether [`autoregressive_loss`] gives all terms of the bound of this network in one pass over the data.

    The process must be autoregressive, and its reverse steps must use logits of x_0 as they are. The network must be causal
    (`network.is_causal`: the logits of a position depend on the tokens before it alone) and must not read the timestep. Any
    other network, such as a bidirectional one, would be shown the token that it is asked for.
    """
    config = scheduler.config
    return (
        config.transition == "autoregressive"
        and (config.prediction_type, config.reconstruction) == ("x0", "posterior")
        and getattr(network, "is_causal", False)
        and not getattr(network.config, "timestep_conditioning", False)
    )


def possible_steps(scheduler: D3PMScheduler, network: torch.nn.Module, num_inference_steps: int) -> int:
    """`num_inference_steps`, or T if that is less or if the model cannot skip timesteps.

    A network that predicts x_{t-1} directly has no longer steps, and a causal network takes one token at a time.
    """
    config = scheduler.config
    takes_all = config.prediction_type == "previous" or (
        config.transition == "autoregressive" and getattr(network, "is_causal", False)
    )
    return len(scheduler) if takes_all else min(num_inference_steps, len(scheduler))


@contextmanager
def evaluating(model: Callable):
    """A context in which the networks of `model` are in eval mode; afterwards each part is in the mode that it was in.

    Args:
        model: a module, or a method of a module or of a pipeline, such as `pipeline.predict`. No other function says which
            networks it calls.
    """
    owner = getattr(model, "__self__", model)
    parts = owner.components.values() if isinstance(owner, DiffusionPipeline) else [owner]
    networks = [part for part in parts if isinstance(part, torch.nn.Module)]
    modes = {part: part.training for network in networks for part in network.modules()}
    for network in networks:
        network.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


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
        model: `model(x_t, timesteps)` gives the network's output for `timesteps` `[B]`: `pipeline.predict`, a module, or any
            function. The network of a pipeline or module is put into eval mode, and back into its own mode afterwards. The
            network behind another function must be in eval mode already: dropout, with which two calls with the same
            input differ, is refused.
        batches: Each is one of
            - a tensor x_0 `[B, ...]`, all of whose elements count;
            - a dictionary with x_0 as `"x_0"` or `"input_ids"`, and optionally `"loss_mask"` of the same shape: true (or 1)
              where an element counts, false (or 0) elsewhere. Where there is none, `"attention_mask"` takes its place. Other
              columns are not read;
            - a pair `(x_0, loss_mask)`.
        num_inference_steps (`int`, *optional*): the bound of the model that samples with so many steps; T by default.
        num_evaluated_timesteps (`int`, *optional*): how many terms are looked at per example; all by default. Else L_0 is
            one, and the rest are drawn one each from stretches of time, the shorter the nearer to the data. Each stands for
            its stretch, which leaves the sum unbiased.
        is_causal (`bool`, defaults to `False`): the process is autoregressive, and its network sees only the tokens before
            each and no timestep ([`scores_in_one_pass`]): one pass over the data gives all terms, without noise, and the
            bound is -log p(x_0) itself. A network for which this does not hold is refused.
        seed (`int`, defaults to 0): of timesteps and noise.
        progress_bar (`bool`, defaults to `True`): whether to show one.
    """
    check_type("scheduler", scheduler, D3PMScheduler, "a `D3PMScheduler`")
    check_type("model", model, Callable, "a function or a module")
    check_type("batches", batches, Iterable, "an iterable of tensors or dictionaries")
    check_int("seed", seed, 0)
    if num_evaluated_timesteps is not None:
        check_int("num_evaluated_timesteps", num_evaluated_timesteps)
    num_inference_steps = len(scheduler) if num_inference_steps is None else num_inference_steps
    timesteps = scheduler.spaced_timesteps(num_inference_steps)
    scheduler.check_spacing(timesteps)
    timesteps = timesteps[::-1]  # ascending
    count = len(timesteps)
    if is_causal:
        _check_one_pass(scheduler, count)
    strata = _strata(count, count if num_evaluated_timesteps is None or is_causal else num_evaluated_timesteps)
    examples = []  # [prior, diffusion, reconstruction, elements] of each
    sums, visits = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)

    predict = _repeatable(model)
    bar = tqdm(desc="bound", disable=not progress_bar, unit="term")
    with evaluating(model):
        for batch in batches:
            x_0, mask = _read_batch(batch)
            scheduler.check_states(x_0.cpu())
            if is_causal and not examples:
                check_causal(scheduler, predict, x_0)
            elements = mask.reshape(len(mask), -1).sum(-1).cpu().double()  # [B]
            generators = [_example_generator(seed, len(examples) + i) for i in range(len(x_0))]
            nats = torch.zeros(len(x_0), 3, dtype=torch.float64)
            nats[:, 0] = _per_example(prior_loss(scheduler, x_0), mask)
            if is_causal:
                terms = _causal_terms(scheduler, predict, x_0, mask)
            else:
                terms = _sampled_terms(scheduler, predict, x_0, mask, timesteps, strata, generators)
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
    _, standard_error, skewness = ratio_estimate(nats, elements)
    prior, diffusion, reconstruction = (float(part.sum() / total) for part in parts)
    return Bound(
        prior=prior,
        diffusion=diffusion,
        reconstruction=reconstruction,
        standard_error=float(standard_error),
        timesteps=timesteps,
        per_timestep=sums / visits,
        num_examples=len(nats),
        num_elements=int(total),
        num_inference_steps=count,
        num_evaluated_timesteps=len(strata),
        num_train_timesteps=len(scheduler),
        seed=seed,
        skewness=float(skewness),
    )


def ratio_estimate(nats: np.ndarray, elements: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """r = sum(nats) / sum(elements) over the examples of the last axis, its standard error, and the skewness of `nats - r elements`.

    The standard error of one example is NaN: it says nothing of the spread.
    """
    count, total = nats.shape[-1], elements.sum(-1)
    estimate = nats.sum(-1) / total
    residual = nats - estimate[..., None] * elements
    variance = (residual**2).mean(-1)
    error = np.sqrt(count**2 / (count - 1) * variance) / total if count > 1 else np.full_like(estimate, np.nan)
    deviation = np.sqrt(np.where(variance > 0, variance, 1))  # examples that are all alike have no skewness
    return estimate, error, (residual**3).mean(-1) / deviation**3


def skewed_interval(estimate, error, skewness, count: int, level: float):
    """The limits of a confidence interval: on each side the farther one of Student's t and of Hall's transformation of it.

        Student:  estimate -+ q error,   q the quantile of t with count - 1 degrees of freedom
        Hall:     estimate - g^-1(+-q) error,   g^-1(y) = 3 (y - a/6) / (1 + c + c^2),
                  c^3 = 1 + a (y - a/6),   a = skewness / sqrt(count)

    Terms of few timesteps make examples of very different cost: a sample that happens to lack the expensive ones has both a
    mean that is too low and an error that is too small. Hall's limit (Annals of Statistics, 1992) lies farther out on the
    long side, and Student's keeps the other side from coming too near.
    """
    q = stdtrit(count - 1, (1 + level) / 2) if count > 1 else np.nan
    a = np.asarray(skewness) / math.sqrt(count)

    def inverse(y):
        shifted = y - a / 6
        c = np.cbrt(1 + a * shifted)
        return 3 * shifted / (1 + c + c**2)

    return estimate - np.maximum(inverse(q), q) * error, estimate - np.minimum(inverse(-q), -q) * error


def _read_batch(batch) -> tuple[torch.Tensor, torch.Tensor]:
    """x_0 and where it counts, both `[B, ...]`, the second boolean."""
    mask, mask_name = None, "loss_mask"
    if isinstance(batch, Mapping):
        names = [name for name in ("x_0", "input_ids") if name in batch]
        if len(names) != 1:
            raise ValueError(
                f"a batch has the columns {', '.join(map(repr, batch))}: it needs the data in one column named 'x_0' or "
                "'input_ids'"
            )
        x_0 = batch[names[0]]
        if "loss_mask" not in batch:
            mask_name = "attention_mask"
        mask = batch.get(mask_name)
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        x_0, mask = batch
    else:
        x_0 = batch
    if not isinstance(x_0, torch.Tensor):
        raise ValueError(
            f"a batch is a {type(batch).__name__} with no tensor of states: pass a tensor x_0, a dictionary with the column "
            "'x_0' or 'input_ids' (and 'loss_mask'), or a pair (x_0, loss_mask)"
        )
    if mask is None:
        return x_0, torch.ones_like(x_0, dtype=torch.bool)
    if not isinstance(mask, torch.Tensor) or mask.shape != x_0.shape:
        found = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"{mask_name} is {found} and x_0 {tuple(x_0.shape)}: pass a mask of the same shape, true where an element counts; "
            "leave out labels, or pass a dictionary with named columns"
        )
    counts = mask.bool()
    wrong = mask[counts != mask]
    if wrong.numel():
        raise ValueError(
            f"{mask_name} holds {wrong[0].item()}: pass a boolean mask, or 1 where an element counts and 0 elsewhere; leave "
            "out labels, or pass a dictionary with named columns"
        )
    return x_0, counts.to(x_0.device)


def _repeatable(model: Callable) -> Callable:
    """`model`, checked at its first call to give the same output twice: a network in train mode may drop out."""
    checked = False

    def call(x_t, timesteps):
        nonlocal checked
        output = model(x_t, timesteps)
        if not checked:
            checked = True
            if not _agree(output, model(x_t, timesteps)):
                raise ValueError(
                    "two calls of `model` with the same input differ: its network is in train mode; call `.eval()` on it, or "
                    "pass `pipeline.predict`"
                )
        return output

    return call


def _agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two outputs of a network are the same but for rounding: to 1e-5, or to 4 units of a shorter dtype."""
    tolerance = max(1e-5, 4 * torch.finfo(a.dtype).eps)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def _check_one_pass(scheduler: D3PMScheduler, num_inference_steps: int) -> None:
    """Refuses processes whose terms one pass over the data does not give."""
    config = scheduler.config
    if config.transition != "autoregressive" or num_inference_steps < len(scheduler):
        raise ValueError(
            f"is_causal=True takes one token at a time, in an autoregressive process with one step per token; this one is "
            f"{config.transition!r} with {num_inference_steps} of {len(scheduler)} steps: pass is_causal=False"
        )
    if (config.prediction_type, config.reconstruction) != ("x0", "posterior"):
        raise ValueError(
            f"is_causal=True needs prediction_type='x0' and reconstruction='posterior', and this scheduler has "
            f"{config.prediction_type!r} and {config.reconstruction!r}: pass is_causal=False"
        )


@torch.no_grad()
def check_causal(scheduler: D3PMScheduler, model: Callable, x_0: torch.LongTensor) -> None:
    """Refuses a network that gives position i other logits for x_0 than for x_t, in which i and all behind it are masked.

    Timestep t = N - 1 - i has just masked position i: its term of the bound reads x_t, and the one pass reads x_0.
    """
    length = len(scheduler)
    t = torch.linspace(0, length - 1, min(NUM_PROBES, length)).long()  # [P]
    rows = torch.arange(len(t))
    x_0 = x_0[rows % len(x_0)]  # [P, N]
    position = length - 1 - t
    t = t.to(x_0.device)
    seen, masked = (
        scheduler.transition.forbid(model(x, time))[rows, position].log_softmax(-1)  # [P, K]
        for x, time in ((x_0, torch.zeros_like(t)), (scheduler.add_noise(x_0, t), t))
    )
    for i, a, b in zip(position.tolist(), seen, masked):
        if not _agree(a, b):
            raise ValueError(
                f"is_causal is True, but the logits of position {i} change when it and the tokens behind it are masked: the "
                "network reads them or the timestep, and one pass over the data would understate the bound; set "
                "is_causal to False"
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
        output = d3pm_loss(scheduler, model(x_t, t), x_0, x_t, t, previous_timesteps=s, loss_mask=mask)
        yield index, size, _per_example(output.vb, mask)


def _causal_terms(scheduler, model, x_0, mask):
    """The same for each position of a causal network, the last first, as the process reveals them in reverse."""
    first_step = torch.zeros(len(x_0), dtype=torch.long, device=x_0.device)
    terms = autoregressive_loss(scheduler, model(x_0, first_step), x_0, loss_mask=mask)  # [B, N]
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
    return torch.where(mask, values, 0).reshape(len(values), -1).double().sum(-1).cpu()
