# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The arguments of a scheduler: what each of them may be, whether it comes from a program or from a file."""

from numbers import Real

import torch

from ..utils.checks import check_choice, check_float, check_int, check_type


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
# Processes that are matrix exponentials, Q_t = exp(alpha_t R).
EXPONENTIALS = (
    "absorbing",
    "uniform",
    "absorbing_uniform",
    "stationary",
    "rate",
    "nearest_neighbor",
    "absorbing_nearest_neighbor",
)
# The smallest value of each integer.
COUNTS = {"num_classes": 2, "num_train_timesteps": 1, "bandwidth": 1, "num_neighbors": 1}
# The ends of the range of each number.
NUMBERS = {"mask_fraction": (0, 1), "mask_rate": (0, None)}
OPTIONAL_NUMBERS = ("beta_start", "beta_end")


def check_arguments(config: dict) -> None:
    """Refuses arguments of a wrong type, and values outside their range."""
    for name, choices in CHOICES.items():
        check_choice(name, config[name], choices)
    for name, least in COUNTS.items():
        check_int(name, config[name], least)
    for name, (low, high) in NUMBERS.items():
        check_float(name, config[name], low, high)
    for name in OPTIONAL_NUMBERS:
        if config[name] is not None:
            check_float(name, config[name], 0)
    check_type("mask_in_data", config["mask_in_data"], bool, "True or False")
    if config["mask_token_id"] is not None:
        check_int("mask_token_id", config["mask_token_id"], 0, config["num_classes"] - 1)
    _check_betas(config["trained_betas"], config["num_train_timesteps"])
    _check_exponents(config)


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


def _check_exponents(config) -> None:
    """Refuses exponents that are not one for each step of a process that is a matrix exponential."""
    exponents, num_steps = config["trained_exponents"], config["num_train_timesteps"]
    if exponents is None:
        return
    if config["trained_betas"] is not None:
        raise ValueError("got trained_betas and trained_exponents: pass one of the two")
    if config["transition"] not in EXPONENTIALS:
        raise ValueError(
            f"transition={config['transition']!r} has no exponents: pass trained_betas, or one of the transitions "
            f"{', '.join(EXPONENTIALS)}"
        )
    if not isinstance(exponents, (list, tuple)) or len(exponents) != num_steps:
        raise ValueError(f"trained_exponents must be a list of {num_steps} numbers, one per timestep")
    for step, exponent in enumerate(exponents, 1):
        is_number = isinstance(exponent, Real) and not isinstance(exponent, bool)
        if exponent != "inf" and not (is_number and exponent >= 0):
            raise ValueError(
                f"alpha_{step} of trained_exponents is {exponent!r}: it must be a number of at least 0, or 'inf' for a step "
                "that forgets everything"
            )


def check_distributions(name: str, rows: torch.Tensor | None) -> None:
    """Refuses probabilities `[..., K]` that are negative or do not sum to one."""
    if rows is not None and not ((rows >= 0).all() and ((rows.double().sum(-1) - 1).abs() <= 1e-5).all()):
        raise ValueError(
            f"{name} has the minimum {rows.min().item():.4g} and a sum of {rows.double().sum(-1).max().item():.4g}: every "
            "row must be a probability distribution"
        )
