# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Noise schedules: pure functions that return the paper's beta_t or alpha_t for t = 1 .. T, in float64.

beta_t is the chance that step t replaces a state (for the discretized Gaussian: its variance). Processes that are
matrix exponentials, Q_t = exp(alpha_t R), take the exponents alpha_t; the two are tied by beta_t = 1 - exp(-alpha_t).
"""

import inspect
import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.interpolate import PchipInterpolator
from scipy.special import logit

from .utils.checks import check_float, check_int, check_str, check_tensor, check_type
from .utils.registry import Registry


# The exponents at which the paper measures mutual information, and how many.
EXPONENT_RANGE = (1e-4, 1e5)
NUM_EXPONENTS = 256

# The schedule that a family solves for, given the frequencies of the states. All others are functions of T.
MUTUAL_INFORMATION = "mutual_information"

BetaSchedule = Callable[..., torch.Tensor]
_schedules: Registry[BetaSchedule] = Registry("schedule", "register_schedule", reserved=(MUTUAL_INFORMATION,))


def register_schedule(name: str) -> Callable[[BetaSchedule], BetaSchedule]:
    """Decorator that makes a schedule known as `D3PMScheduler(beta_schedule=name)`.

    ```python
    @register_schedule("quadratic")
    def quadratic_betas(num_steps, beta_start=1e-3, beta_end=1.0):
        return torch.linspace(beta_start**0.5, beta_end**0.5, num_steps, dtype=torch.float64) ** 2
    ```

    The function takes the number of steps T and returns beta_1 .. beta_T, `[T]`. If it has parameters `beta_start` and
    `beta_end`, it gets those of the scheduler; where they have no default either, it gets the ends of the transition family.

    Args:
        name (`str`): Name of the schedule, as it stands in `scheduler_config.json`.
    """
    check_str("name", name)

    def register(schedule: BetaSchedule) -> BetaSchedule:
        check_type("the schedule", schedule, Callable, "a function of the number of steps")
        return _schedules.add(name, schedule)

    return register


def beta_schedules() -> Registry[BetaSchedule]:
    """All registered schedules by name. `"mutual_information"` is not among them: each family solves for its own."""
    return _schedules


def schedule_names() -> tuple[str, ...]:
    """The names that `beta_schedule` may have."""
    return MUTUAL_INFORMATION, *_schedules


def create_betas(
    name: str,
    num_steps: int,
    ends: tuple[float | None, float | None],
    default_ends: tuple[float, float],
) -> torch.Tensor:
    """beta_1 .. beta_T of a registered schedule, `[T]`, float64.

    Args:
        ends: `beta_start` and `beta_end` as the user has given them.
        default_ends: Their values for a schedule that has no default of its own.
    """
    check_int("num_steps", num_steps, 1)
    schedule = _schedules.find("name", name)
    parameters = inspect.signature(schedule).parameters
    arguments = {}
    for parameter, given, default in zip(("beta_start", "beta_end"), ends, default_ends):
        if parameter in parameters:
            needs_value = parameters[parameter].default is inspect.Parameter.empty
            if given is not None or needs_value:
                arguments[parameter] = default if given is None else given
    betas = schedule(num_steps, **arguments)
    if not isinstance(betas, torch.Tensor) or betas.shape != (num_steps,):
        shape = f"a tensor of shape {tuple(betas.shape)}" if isinstance(betas, torch.Tensor) else repr(betas)
        raise ValueError(
            f"the schedule {name!r} returned {shape}: it must return one beta for each of the {num_steps} steps"
        )
    return betas.double()


@register_schedule("linear")
def linear_betas(num_steps: int, beta_start: float, beta_end: float) -> torch.Tensor:
    """beta_t, linear from `beta_start` to `beta_end`, both included (section 3.2 of the paper)."""
    check_int("num_steps", num_steps, 1)
    check_float("beta_start", beta_start)
    check_float("beta_end", beta_end)
    return torch.linspace(beta_start, beta_end, num_steps, dtype=torch.float64)


@register_schedule("cosine")
def cosine_betas(num_steps: int, offset: float = 0.008) -> torch.Tensor:
    """beta_t = 1 - f(t) / f(t-1), f(t) = cos((t/T + offset) / (1 + offset) * pi/2) (section 3.2 of the paper).

    The cumulative survival f(t) / f(0) ends at exactly zero: f is evaluated as the sine of what is missing to pi/2.
    """
    check_int("num_steps", num_steps, 1)
    check_float("offset", offset, 0)
    left = torch.arange(num_steps, -1, -1, dtype=torch.float64) / num_steps  # 1 - t/T for t = 0 .. T
    f = torch.sin(left / (1 + offset) * (torch.pi / 2))
    return 1 - f[1:] / f[:-1]


@register_schedule("reciprocal")
def reciprocal_betas(num_steps: int) -> torch.Tensor:
    """beta_t = 1 / (T - t + 1), by which a share t/T of the elements is replaced after t steps (appendix A.6 of the paper)."""
    check_int("num_steps", num_steps, 1)
    return 1 / torch.arange(num_steps, 0, -1, dtype=torch.float64)


def exponents_from_betas(betas: torch.Tensor) -> torch.Tensor:
    """alpha_t = -log(1 - beta_t), infinite where beta_t = 1 (appendix A.6 of the paper)."""
    check_tensor("betas", betas)
    if not ((betas >= 0) & (betas <= 1)).all():
        raise ValueError(f"betas are between {betas.min():.6g} and {betas.max():.6g}: they must lie in 0 .. 1")
    return -torch.log1p(-betas)


def check_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Checks that the exponents alpha_1 .. alpha_T lie in [0, inf], and returns them."""
    check_tensor("exponents", exponents, None)
    if not (exponents >= 0).all():
        raise ValueError(
            f"exponents are between {exponents.min():.6g} and {exponents.max():.6g}: none may be negative or NaN"
        )
    return exponents


def accumulate(exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of the finite alpha_1 .. alpha_n and the number of infinite ones, both `[T+1]`, from n = 0.

    A step with an infinite exponent forgets its state. Counted apart, such steps leave the stretch between any two
    times a difference of finite sums: infinite if the counts differ.
    """
    check_exponents(exponents)
    forgets = torch.isinf(exponents)
    sums = exponents.masked_fill(forgets, 0).cumsum(0)
    return torch.cat([sums.new_zeros(1), sums]), torch.cat([forgets.new_zeros(1), forgets]).cumsum(0)


def entropy(p: torch.Tensor) -> torch.Tensor:
    """-sum p log p over the last axis, in nats."""
    check_tensor("p", p)
    return torch.special.entr(p).sum(-1)


def information(unigram: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """I(x_t; x_0) in nats for x_0 distributed as `unigram` and q(x_t | x_0) = `matrix`, `[..., K, K]`."""
    check_tensor("unigram", unigram, None)
    check_tensor("matrix", matrix)
    return entropy(unigram @ matrix) - entropy(matrix) @ unigram


def mutual_information_exponents(
    lost_information: Callable[[torch.Tensor], torch.Tensor],
    num_steps: int,
    *,
    num_exponents: int = NUM_EXPONENTS,
    in_survival: bool = False,
) -> torch.Tensor:
    """Exponents alpha_t of Q_t = exp(alpha_t R) such that a share t/T of the information about x_0 is lost by t.

    Solves 1 - I(x_t; x_0) / H(x_0) = t/T (appendix A.7 of the paper) for the cumulative exponent by monotone cubic interpolation. The last
    cumulative exponent is infinite: nothing is left.

    Args:
        lost_information: The share lost, `[n]`, after the cumulative exponents `[n]`, ascending. Called once.
        num_steps: T.
        in_survival: Interpolate the survival exp(-exponent) instead of the exponent's logarithm. An absorbing
            process loses exactly 1 - survival, so that it comes out as 1 / (T - t + 1) to rounding.
    """
    check_type("lost_information", lost_information, Callable, "a function")
    check_int("num_steps", num_steps, 1)
    check_int("num_exponents", num_exponents, 2)
    low, high = map(math.log10, EXPONENT_RANGE)
    exponents = torch.logspace(low, high, num_exponents, dtype=torch.float64)
    lost, grid = lost_information(exponents).numpy(), exponents.numpy()
    rising = np.concatenate([[True], lost[1:] > np.maximum.accumulate(lost)[:-1] + 1e-12])
    lost, grid = lost[rising & (lost < 1)], grid[rising & (lost < 1)]
    if not len(lost) or lost[-1] < 1 - 1 / num_steps:
        raise ValueError(
            f"an exponent of {EXPONENT_RANGE[1]:g} loses only {lost.max(initial=0):.6f} of the information about "
            f"x_0, and {num_steps} steps need {1 - 1 / num_steps:.6f}: increase `num_neighbors` or connect the graph"
        )
    targets = np.arange(1, num_steps) / num_steps
    if in_survival:
        survival = PchipInterpolator(np.r_[0.0, lost, 1.0], np.r_[1.0, np.exp(-grid), 0.0])(targets)
        cumulative = -np.log(survival)
    else:
        # Log-odds against logarithm: straight lines where almost nothing, and almost everything, is lost.
        cumulative = np.exp(PchipInterpolator(logit(lost), np.log(grid), extrapolate=True)(logit(targets)))
    return torch.from_numpy(np.append(np.diff(cumulative, prepend=0.0), np.inf))
