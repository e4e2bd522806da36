# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Causal networks of an autoregressive process: which of them score all terms of the bound in one pass over the data."""

from collections.abc import Callable
from typing import Any

import torch

from ..schedulers import D3PMScheduler


# Number of positions at which a network is checked for causality.
NUM_PROBES = 8


def scores_in_one_pass(scheduler: D3PMScheduler, denoiser: Any) -> bool:
    """Whether [`autoregressive_loss`] gives all terms of the bound of this denoiser in one pass over the data.

    The process must be autoregressive, and its reverse steps must use the logits of x_0 as they are. The network must be
    causal (the logits of a position depend on the tokens before it alone) and must not read the timestep. Any other
    network, such as a bidirectional one, would read the token that it has to predict.

    Args:
        scheduler ([`D3PMScheduler`]): The process.
        denoiser ([`Denoiser`]): The network, with `is_causal` and `reads_timestep`.
    """
    config = scheduler.config
    return (
        scheduler.family.is_autoregressive
        and scheduler.transition.reveals_in_order
        and (config.prediction_type, config.reconstruction) == ("x0", "posterior")
        and denoiser.is_causal
        and not denoiser.reads_timestep
    )


def possible_steps(scheduler: D3PMScheduler, denoiser: Any, num_inference_steps: int) -> int:
    """`num_inference_steps`, or T if T is smaller or if the model cannot skip timesteps.

    A network that predicts x_{t-1} directly takes every step, and a causal network takes one token at a time.
    """
    config = scheduler.config
    takes_all = config.prediction_type == "previous" or (scheduler.family.is_autoregressive and denoiser.is_causal)
    return len(scheduler) if takes_all else min(num_inference_steps, len(scheduler))


def check_one_pass(scheduler: D3PMScheduler, num_inference_steps: int) -> None:
    """Checks that one pass over the data can give all terms of the process."""
    config = scheduler.config
    if not scheduler.transition.reveals_in_order or num_inference_steps < len(scheduler):
        raise ValueError(
            "is_causal=True needs an autoregressive process with one step per token, and this one is "
            f"{config.transition!r} with {num_inference_steps} of {len(scheduler)} steps: pass is_causal=False"
        )
    if (config.prediction_type, config.reconstruction) != ("x0", "posterior"):
        raise ValueError(
            f"is_causal=True needs prediction_type='x0' and reconstruction='posterior', and this scheduler has "
            f"{config.prediction_type!r} and {config.reconstruction!r}: pass is_causal=False"
        )


@torch.no_grad()
def check_causal(
    scheduler: D3PMScheduler, model: Callable, x_0: torch.Tensor, condition: dict[str, torch.Tensor] | None = None
) -> None:
    """Checks that the logits of a position are the same for x_0 and for x_t, in which it and all later ones are masked.

    Timestep t = N - 1 - i masks position i. Its term of the bound reads x_t, and the single pass reads x_0.

    Args:
        scheduler: The process.
        model: `model(x_t, timesteps, **condition)` gives logits `[B, N, K]`.
        x_0: Data `[B, N]`.
        condition: Further arguments of the model, with one row per row of x_0.
    """
    length = len(scheduler)
    t = torch.linspace(0, length - 1, min(NUM_PROBES, length)).long()  # [P]
    rows = torch.arange(len(t))
    condition = {name: value[rows % len(x_0)] for name, value in (condition or {}).items()}
    x_0 = x_0[rows % len(x_0)]  # [P, N]
    position = length - 1 - t
    t = t.to(x_0.device)
    seen, masked = (
        scheduler.transition.forbid(model(x, time, **condition))[rows, position].log_softmax(-1)  # [P, K]
        for x, time in ((x_0, torch.zeros_like(t)), (scheduler.add_noise(x_0, t), t))
    )
    for i, a, b in zip(position.tolist(), seen, masked):
        if not same_output(a, b):
            raise ValueError(
                f"is_causal is True, but the logits of position {i} change when it and the tokens after it are masked: "
                "the network reads them or the timestep, and one pass over the data would understate the bound; set "
                "is_causal to False"
            )


def same_output(a, b) -> bool:
    """Whether two outputs of a network, tensors or tuples of them, differ by rounding only: 1e-5, or 4 units of a shorter dtype."""
    if isinstance(a, tuple):
        return all(x is None or same_output(x, y) for x, y in zip(a, b))
    tolerance = max(1e-5, 4 * torch.finfo(a.dtype).eps)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
