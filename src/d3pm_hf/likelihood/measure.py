# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Measures the bound of eq. 1 of the paper on a data set."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from functools import wraps

import numpy as np
import torch
from accelerate import Accelerator
from tqdm.auto import tqdm

from ..data.batches import read_batch
from ..losses.variational import prior_loss
from ..numerics import ShortRow, derive_seed
from ..schedulers import D3PMScheduler
from ..utils.checks import check_choice, check_int, check_type
from .bound import Bound, summarize
from .causal import check_causal, check_one_pass, same_output
from .continuous_time import continuous_terms, create_clock
from .terms import causal_terms, per_example, sampled_terms, stratify


@torch.no_grad()
def evaluate_bound(
    scheduler: D3PMScheduler,
    model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    batches: Iterable,
    *,
    num_inference_steps: int | None = None,
    spacing: str = "optimized",
    num_eval_timesteps: int | None = None,
    continuous_time: bool = False,
    is_causal: bool = False,
    seed: int = 0,
    seed_by: str = "index",
    progress_bar: bool = True,
    accelerator: Accelerator | None = None,
    **kwargs,
) -> Bound:
    """Measures L_vb, the bound of eq. 1 of the paper, on a data set.

        L_vb = KL(q(x_T | x_0) || p(x_T))                                     (prior)
               + sum_{t>1} KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t))      (diffusion)
               - log p(x_0 | x_1)                                             (reconstruction)

    With `continuous_time=True`, it is the limit of infinitely many steps between the same x_0 and x_T.

    Example `i` draws its timesteps and its noise from a generator seeded with `(seed, i)`, so that the result does not
    depend on the batch size, nor on the number of processes.

    Args:
        scheduler ([`D3PMScheduler`]): The process.
        model (`Callable`): `model(x_t, timesteps, **condition)` gives the output of the network for `timesteps` of shape
            `[B]`: `pipeline.denoiser`, a module, or any function. A module is put into eval mode, and back into its own mode
            afterwards. The network behind another function must be in eval mode already: two calls with the same input
            that differ, as with dropout, raise an error.
        batches (`Iterable`): The data in batches. A single tensor or dictionary is one batch. Each batch is one of
            - a tensor x_0 `[B, ...]`, all of whose elements count;
            - a dictionary with x_0 as `"x_0"` or `"input_ids"`, and optionally `"loss_mask"` of the same shape: true
              (or 1) where an element is scored, false (or 0) elsewhere; or `"labels"` of that shape, -100 elsewhere.
              `"attention_mask"` is zero at padding, which is not scored; the model receives it. `"condition"`, a
              dictionary of tensors with one row per example, are further arguments of `model`. Other columns are not read;
            - a pair `(x_0, loss_mask)`.
            What is not scored is known: it is not noised, and the model sees it. So are the tokens that the process
            suppresses.
        num_inference_steps (`int`, *optional*): Number of reverse steps of the model whose bound is measured. Defaults
            to T.
        spacing (`str`, defaults to `"optimized"`): Timesteps of the steps, as in `scheduler.set_timesteps`: `"optimized"`, those
            stored for this number if there are any; or `"even"`, evenly spaced ones.
        num_eval_timesteps (`int`, *optional*): Number of terms per example. Defaults to all of them. Otherwise L_0
            is one, and each of the others is drawn from a stretch of time of its own, which is shorter near the data.
            Each term counts as often as its stretch has timesteps, which leaves the sum unbiased.
        continuous_time (`bool`, defaults to `False`): Whether to measure the bound of infinitely many steps, an integral over
            time ([`d3pm_hf.losses.continuous`]), for processes that keep a state or draw it anew: `"absorbing"`, `"uniform"`,
            `"absorbing_uniform"` and `"stationary"`. The network is shown the timestep whose stretch of time, from the timestep
            before it, holds the drawn time. `num_eval_timesteps` is then the number of drawn times, T by default.
        is_causal (`bool`, defaults to `False`): Whether one pass over the data gives all terms, without noise: the
            process is autoregressive, and the network reads only the tokens before each position and no timestep
            ([`scores_in_one_pass`]). The bound is then -log p(x_0) itself. A network for which this does not hold
            raises an error.
        seed (`int`, defaults to 0): Seed for the timesteps and the noise.
        seed_by (`str`, defaults to `"index"`): What an example draws by, beside `seed`: `"index"`, its place among all examples; or
            `"content"`, its elements and which of them are scored, so that its bound is the same at any place and in any data set.
        progress_bar (`bool`, defaults to `True`): Whether to show a progress bar.
        accelerator (`Accelerator`, *optional*): Shares the rows of each batch out among its processes. All of them pass
            the same batches, and get the same result. Defaults to this process alone.
        kwargs: `num_evaluated_timesteps`, the earlier name of `num_eval_timesteps`.
    """
    num_eval_timesteps = kwargs.pop("num_evaluated_timesteps", num_eval_timesteps)
    if kwargs:
        raise TypeError(f"evaluate_bound() got an unexpected keyword argument {next(iter(kwargs))!r}")
    check_type("scheduler", scheduler, D3PMScheduler, "a `D3PMScheduler`")
    check_type("model", model, Callable, "a function or a module")
    batches = as_batches(batches)
    check_int("seed", seed, 0)
    check_choice("seed_by", seed_by, ("index", "content"))
    if accelerator is not None:
        check_type("accelerator", accelerator, Accelerator, "an `Accelerator`")
        accelerator = accelerator if accelerator.num_processes > 1 else None
    if num_eval_timesteps is not None:
        check_int("num_eval_timesteps", num_eval_timesteps)
    if continuous_time and (num_inference_steps is not None or is_causal):
        given = "is_causal=True" if is_causal else f"num_inference_steps={num_inference_steps}"
        raise ValueError(f"got continuous_time=True, which has no steps, and {given}: leave one of the two out")
    num_inference_steps = len(scheduler) if num_inference_steps is None else num_inference_steps
    timesteps = scheduler.sampling_timesteps(num_inference_steps, spacing=spacing)[::-1]  # ascending
    is_optimized = spacing != "even" and scheduler.chosen_timesteps(num_inference_steps) is not None
    count = len(timesteps)
    if is_causal:
        check_one_pass(scheduler, count)
    if num_eval_timesteps is None or is_causal:
        num_eval_timesteps = count
    clock = create_clock(scheduler, num_eval_timesteps) if continuous_time else None
    strata = [] if continuous_time else stratify(count, num_eval_timesteps)
    examples: list[list[float]] = []  # [prior, diffusion, reconstruction, elements] of each
    sums, visits = torch.zeros(2, count, dtype=torch.float64)
    num_known = 0
    conditions: set[str] = set()
    predict = repeatable(model)
    with evaluating(model), tqdm(desc="bound", disable=not progress_bar, unit="term") as bar:
        for batch in batches:
            x_0, mask, condition = read_scored(scheduler, batch)
            num_known += count_known(mask, condition)
            conditions |= condition.keys()
            num_rows, rows = len(x_0), torch.arange(len(x_0))
            if accelerator is not None:
                x_0, mask, condition, rows = take_share(accelerator, x_0, mask, condition)
            if is_causal and not examples:
                check_causal(scheduler, predict, x_0, condition)
            elements = mask.reshape(len(mask), -1).sum(-1).cpu().double()  # [B]
            nats = torch.zeros(len(x_0), 3, dtype=torch.float64)
            nats[:, 0] = per_example(prior_loss(scheduler, x_0), mask)
            if is_causal:
                terms = causal_terms(scheduler, predict, x_0, mask, condition)
            else:
                if seed_by == "content":
                    generators = content_generators(seed, x_0, mask, condition)
                else:
                    generators = row_generators(seed, len(examples) + rows, condition)
                if clock is not None:
                    terms = continuous_terms(scheduler, predict, x_0, mask, clock, generators, condition)
                else:
                    terms = sampled_terms(scheduler, predict, x_0, mask, timesteps, strata, generators, condition)
            for index, size, term in terms:
                # Index 0 is the first corruption step, whose term is the reconstruction.
                nats[torch.arange(len(nats)), torch.where(index == 0, 2, 1)] += size * term
                sums.index_add_(0, index, term)
                visits.index_add_(0, index, elements)
                bar.update()
            results = torch.cat([nats, elements[:, None]], -1)  # [R, 4]
            if accelerator is not None:  # those of all processes, in the order of the batch
                results = accelerator.gather(results.to(accelerator.device)).cpu()[:num_rows]
            if results.isnan().any():
                raise ValueError(
                    "the bound is NaN: the output of the network holds NaN; check its weights and its input"
                )
            examples.extend(results.tolist())

    if accelerator is not None:
        sums, visits = (accelerator.reduce(x.to(accelerator.device), reduction="sum").cpu() for x in (sums, visits))
    *parts, sizes = np.array(examples).reshape(-1, 4).T
    summary = summarize(np.sum(parts, 0), sizes)
    prior, diffusion, reconstruction = (float(part.sum() / sizes.sum()) for part in parts)
    return Bound(
        **summary,
        prior=prior,
        diffusion=diffusion,
        reconstruction=reconstruction,
        timesteps=timesteps,
        per_timestep=sums / visits,
        num_inference_steps=None if continuous_time else count,
        num_eval_timesteps=num_eval_timesteps,
        num_train_timesteps=len(scheduler),
        seed=seed,
        num_known=num_known,
        conditions=tuple(sorted(conditions - {"attention_mask"})),
        spacing="optimized" if is_optimized else "even",
    )


def as_batches(batches) -> Iterable:
    """`batches` itself, or a tensor or a dictionary as the only batch: its rows are examples, and not batches."""
    check_type("batches", batches, Iterable, "an iterable of tensors or dictionaries")
    return [batches] if isinstance(batches, (torch.Tensor, Mapping)) else batches


@contextmanager
def evaluating(model: Callable):
    """A context in which the networks of `model` are in eval mode. Afterwards each module is in the mode that it was in.

    Args:
        model: A module, such as `pipeline.denoiser`, or a method of one. Other functions are left alone: they do not tell
            which networks they call.
    """
    owner = getattr(model, "__self__", model)
    modes: dict[torch.nn.Module, bool] = {}
    if isinstance(owner, torch.nn.Module):
        modes = {part: part.training for part in owner.modules()}
        owner.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def count_known(mask: torch.Tensor, condition: dict[str, torch.Tensor]) -> int:
    """Number of elements that are known and not scored. Padding does not count."""
    known = ~mask & condition["attention_mask"].bool() if "attention_mask" in condition else ~mask
    return int(known.sum())


def content_generators(
    seed: int, x_0: torch.Tensor, mask: torch.Tensor, condition: dict[str, torch.Tensor]
) -> list[torch.Generator] | list[ShortRow]:
    """[`row_generators`] by the elements of each example and by which of them are scored. Padding has no part in them."""
    attended = condition.get("attention_mask", torch.ones_like(mask)).bool()
    numbers = []
    for x, scored, kept in zip(x_0.cpu(), mask.cpu(), attended.cpu()):
        content = torch.stack([x[kept], scored[kept].long()]).numpy().astype("<i8").tobytes()
        numbers.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))
    return row_generators(seed, numbers, condition)


def row_generators(
    seed: int, numbers: list[int] | torch.Tensor, condition: dict[str, torch.Tensor]
) -> list[torch.Generator] | list[ShortRow]:
    """The generator of the example of each number, for its timesteps and noise. A padded text draws what it would without padding."""
    generators = [torch.Generator().manual_seed(derive_seed(seed, int(number))) for number in numbers]
    if "attention_mask" not in condition:
        return generators
    attention_mask = condition["attention_mask"]
    places = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)
    lengths = (places * attention_mask.bool()).amax(1).clamp(min=1).tolist()  # up to the last token
    return [ShortRow(generator, length) for generator, length in zip(generators, lengths)]


def repeatable(model: Callable) -> Callable:
    """`model`, with a check at the first call that two calls with the same input agree: dropout makes them differ."""
    checked = False

    @wraps(getattr(model, "forward", model))  # so that it takes the same arguments
    def call(x_t, timesteps, **condition):
        nonlocal checked
        output = model(x_t, timesteps, **condition)
        if not checked:
            checked = True
            if not same_output(output, model(x_t, timesteps, **condition)):
                raise ValueError(
                    "two calls of `model` with the same input differ: its network is in train mode; call `.eval()` on "
                    "it, or pass `pipeline.denoiser`"
                )
        return output

    return call


def read_scored(scheduler: D3PMScheduler, batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """x_0, the mask of the elements that are scored, and the condition: a suppressed token is known, and not scored."""
    x_0, mask, condition = read_batch(batch)
    scheduler.check_states(x_0.cpu())
    suppressed = [state for state in scheduler.never_data if state != scheduler.gap_token_id]
    return x_0, mask & ~torch.isin(x_0, torch.tensor(suppressed, dtype=torch.long, device=x_0.device)), condition


def take_share(
    accelerator: Accelerator, x_0: torch.Tensor, mask: torch.Tensor, condition: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """The rows of this process in x_0, in the mask and in the condition, and their indices `[R]`.

    Each process takes as many rows as the others, since all of them must call a sharded network equally often. Those
    that are left without a row repeat the last one, no element of which counts, and whose result is dropped.
    """
    share = -(-len(x_0) // accelerator.num_processes)
    index = torch.arange(share) + share * accelerator.process_index  # [R]
    rows = index.clamp(max=len(x_0) - 1).to(x_0.device)
    repeated = (index >= len(x_0)).to(mask.device)
    mask = mask[rows] & ~repeated.reshape(-1, *[1] * (mask.ndim - 1))
    return x_0[rows], mask, {name: value[rows] for name, value in condition.items()}, index
