# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Elements outside of the process: a prompt, special tokens, padding. The denoiser always sees them, without noise.

What is known is part of the data of the process: x_t shows it as the process can have kept it, and the particle filter
weighs it. What is given is a condition, as it is in training where only a part of each example is noised.
"""

from collections.abc import Callable

import torch

from ..utils.checks import describe


def show_given(x: torch.Tensor, given: torch.Tensor | None, is_given: torch.Tensor | None) -> torch.Tensor:
    """States `[B, ...]` with the given elements in place of their own."""
    return x if given is None or is_given is None else torch.where(is_given, given, x)


def see_given(
    denoiser: Callable[..., torch.Tensor], given: torch.Tensor, is_given: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """A denoiser that sees the given elements. They are two more entries of its condition, with one row per row of x_t.

    Samplers draw x_s at the given positions too, and nothing depends on it. The output is zero there, so that every
    state is possible, whatever the network makes of a prompt or of padding.

    Args:
        denoiser (`Callable`): `denoiser(x_t, timestep, **condition)`.
        given (`torch.LongTensor` of shape `[B, ...]`): The elements, for a call without the two entries.
        is_given (`torch.BoolTensor` of shape `[B, ...]`): Where they are.
    """

    def denoise(x_t, timestep, *, given=given, is_given=is_given, **condition):
        model_output = denoiser(show_given(x_t, given, is_given), timestep, **condition)  # [B, ..., K]
        return model_output.masked_fill(is_given[..., None], 0)

    return denoise


def hide_given(scheduler, x_t: torch.Tensor, timestep: int, is_given: torch.Tensor) -> torch.Tensor:
    """x_t with a state of the process at the given positions: latents may show tokens there that are none, such as `[CLS]`."""
    never_data = set(scheduler.never_data)
    token = next(state for state in range(scheduler.config.num_classes) if state not in never_data)
    return torch.where(is_given, scheduler.reveal(torch.full_like(x_t, token), timestep), x_t)


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
