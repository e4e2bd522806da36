# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The arguments of a scheduler: what each of them may be, whether it comes from a program or from a file."""

import math
from numbers import Integral, Real

import torch


CHOICES = {
    "transition": (
        "absorbing",
        "uniform",
        "absorbing_uniform",
        "stationary",
        "gaussian",
        "band_diagonal",
        "matrix",
        "rate",
        "nearest_neighbor",
        "absorbing_nearest_neighbor",
        "autoregressive",
    ),
    "beta_schedule": ("mutual_information", "linear", "cosine", "reciprocal"),
    "prior": ("stationary", "fitted"),
    "prediction_type": ("x0", "logistic", "previous"),
    "x0_posterior": ("leave_one_out", "denoising"),
    "reconstruction": ("posterior", "raw"),
}
# The smallest value of each integer.
COUNTS = {"num_classes": 2, "num_train_timesteps": 1, "bandwidth": 1, "num_neighbors": 1}
# The ends of the range of each number.
NUMBERS = {"mask_fraction": (0.0, 1.0), "mask_rate": (0.0, math.inf)}
OPTIONAL_NUMBERS = ("beta_start", "beta_end")


def is_integer(value) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_arguments(config: dict) -> None:
    """Refuses arguments of a wrong type, and values outside their range."""
    for name, choices in CHOICES.items():
        if config[name] not in choices:
            raise ValueError(f"{name} is {config[name]!r}: it must be one of {', '.join(choices)}")
    for name, least in COUNTS.items():
        if not is_integer(config[name]) or config[name] < least:
            raise ValueError(f"{name} is {config[name]!r}: it must be an integer of at least {least}")
    for name, (low, high) in NUMBERS.items():
        if not is_number(config[name]) or not low <= config[name] <= high:
            raise ValueError(f"{name} is {config[name]!r}: it must be a number between {low:g} and {high:g}")
    for name in OPTIONAL_NUMBERS:
        if config[name] is not None and not (is_number(config[name]) and config[name] >= 0):
            raise ValueError(
                f"{name} is {config[name]!r}: it must be a number of at least 0, or None for the paper's value"
            )
    if not isinstance(config["mask_in_data"], bool):
        raise ValueError(f"mask_in_data is {config['mask_in_data']!r}: it must be True or False")
    mask, last = config["mask_token_id"], config["num_classes"] - 1
    if mask is not None and not (is_integer(mask) and 0 <= mask <= last):
        raise ValueError(
            f"mask_token_id is {mask!r}: it must be an integer between 0 and {last}, or None for the last"
        )
    _check_betas(config["trained_betas"], config["num_train_timesteps"])


def _check_betas(betas, num_steps: int) -> None:
    """Refuses betas that are not one number for each step; which numbers they may be depends on the transition."""
    if betas is None:
        return
    if not hasattr(betas, "__len__") or isinstance(betas, (str, dict)):
        raise ValueError(f"trained_betas is {betas!r}: pass a list of {num_steps} numbers")
    if len(betas) != num_steps:
        raise ValueError(f"got {len(betas)} betas for {num_steps} timesteps: pass one per step")
    for step, beta in enumerate(betas, 1):
        if not isinstance(beta, Real) or isinstance(beta, bool):
            raise ValueError(f"beta_{step} of trained_betas is {beta!r}: it must be a number")


def check_distributions(name: str, rows: torch.Tensor | None) -> None:
    """Refuses probabilities `[..., K]` that are negative or do not sum to one."""
    if rows is not None and not ((rows >= 0).all() and ((rows.double().sum(-1) - 1).abs() <= 1e-5).all()):
        raise ValueError(
            f"{name} has the minimum {rows.min().item():.4g} and a sum of {rows.double().sum(-1).max().item():.4g}: every "
            "row must be a probability distribution"
        )
