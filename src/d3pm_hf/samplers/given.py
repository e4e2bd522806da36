# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Elements outside of the process: a prompt, special tokens, padding. The denoiser always sees them, without noise.

What is known is part of the data of the process: x_t shows it as the process can have kept it, and the particle filter
weighs it. What is given is a condition, as it is in training where only a part of each example is noised.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..utils.checks import describe
from .base import start_cache


# Logit of the states that are not drawn at given positions, beside one of zero. It is finite in float16 too.
HIDDEN_LOGIT = -1e4


def show_given(x: torch.Tensor, given: torch.Tensor | None, is_given: torch.Tensor | None) -> torch.Tensor:
    """States `[B, ...]` with the given elements in place of their own."""
    return x if given is None or is_given is None else torch.where(is_given, given, x)


class GivenDenoiser:
    """A denoiser that sees the given elements. They are two more entries of its condition, with one row per row of x_t.

    Samplers draw x_s at the given positions too, and nothing depends on it: there the output says that x_0 is the token
    of [`hide_given`], whatever the network makes of a prompt or of padding.

    Args:
        scheduler ([`D3PMScheduler`]): The process.
        denoiser (`Callable`): `denoiser(x_t, timestep, **condition)`.
        given (`torch.LongTensor` of shape `[B, ...]`): The elements, for a call without the two entries.
        is_given (`torch.BoolTensor` of shape `[B, ...]`): Where they are.
    """

    def __init__(self, scheduler, denoiser: Callable[..., torch.Tensor], given: torch.Tensor, is_given: torch.Tensor):
        self.denoiser, self.given, self.is_given = denoiser, given, is_given
        self.hidden = torch.zeros(2, device=given.device)  # location and log-scale, which leave every state possible
        if scheduler.config.prediction_type != "logistic":
            self.hidden = torch.full((scheduler.config.num_classes,), HIDDEN_LOGIT, device=given.device)
            self.hidden[hidden_token(scheduler)] = 0

    def __call__(self, x_t, timestep, *, given=None, is_given=None, **condition) -> torch.Tensor:
        given, is_given = (self.given, self.is_given) if is_given is None else (given, is_given)
        model_output = self.denoiser(show_given(x_t, given, is_given), timestep, **condition)  # [B, ..., K]
        return torch.where(is_given[..., None], self.hidden.to(model_output.dtype), model_output)

    def start_cache(self, condition: dict) -> Any:
        """The cache of the denoiser, if it keeps one."""
        others = {name: value for name, value in condition.items() if name not in ("given", "is_given")}
        return start_cache(self.denoiser, others)

    def next_logits(self, x: torch.Tensor, cache: Any, *, given=None, is_given=None, **condition) -> torch.Tensor:
        """Logits `[B, K]` of the token after `x` `[B, n]`, among which the given ones are seen."""
        given, is_given = (self.given, self.is_given) if is_given is None else (given, is_given)
        denoiser: Any = self.denoiser
        x = show_given(x, given[:, : x.shape[1]], is_given[:, : x.shape[1]])
        return denoiser.next_logits(x, cache, **condition)


def hide_given(scheduler, x_t: torch.Tensor, timestep: int, is_given: torch.Tensor) -> torch.Tensor:
    """x_t with one and the same token at the given positions, as far as the process can have kept it.

    Their own need not be states of the process, such as `[CLS]`.
    """
    hidden = torch.full_like(x_t, hidden_token(scheduler))
    return torch.where(is_given, scheduler.reveal(hidden, timestep), x_t)


def hidden_token(scheduler) -> int:
    """The first state that data can hold."""
    never_data = set(scheduler.never_data)
    return next(state for state in range(scheduler.config.num_classes) if state not in never_data)


def check_given(scheduler, given: torch.Tensor | None, is_given: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """Checks that `given` holds states and `is_given` booleans, `[n, *shape]` both, or that there is neither."""
    if given is None and is_given is None:
        return
    for name, value, dtype in (("given", given, torch.long), ("is_given", is_given, torch.bool)):
        if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.shape[1:] != shape:
            raise ValueError(
                f"{name} is {describe(value)}: pass both given ({torch.long}) and is_given ({torch.bool}), of shape "
                f"[n, {', '.join(map(str, shape))}]"
            )
    scheduler.check_states(given)
