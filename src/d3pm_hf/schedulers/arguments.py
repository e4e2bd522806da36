# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checks of the arguments of a scheduler, whether they come from a program or from a file."""

from collections.abc import Mapping
from typing import Any

from ..schedules import MUTUAL_INFORMATION, beta_schedules
from ..transitions.family import (
    BY_ELEMENT,
    TransitionFamily,
    TransitionSettings,
    check_memory,
    get_family,
    transition_families,
)
from ..utils.checks import check_choice, check_float, check_int, check_str, check_type, describe, is_number
from ..utils.names import CHOICES


DEFAULT_NUM_TIMESTEPS = 1000
# The smallest value of each integer.
COUNTS = {"num_classes": 2, "num_train_timesteps": 1, "bandwidth": 1, "num_neighbors": 1}
# The ends of the range of each number.
NUMBERS = {"mask_fraction": (0, 1), "mask_rate": (0, None)}
# The largest finite exponent: with more squarings of a matrix, rounding would grow to the size of its entries.
MAX_EXPONENT = 1e12
# The largest integer of a tensor.
LARGEST = 2**63 - 1
OPTIONAL_NUMBERS = ("beta_start", "beta_end")
# The largest number of timesteps in `inference_timesteps`: those of every number of steps up to 360.
MAX_INFERENCE_TIMESTEPS = 2**16


def check_config(config: Mapping[str, Any], family: type[TransitionFamily]) -> None:
    """Checks the types and the ranges of all arguments.

    Args:
        config: The arguments by name.
        family: The family of the transition.
    """
    for name, choices in CHOICES.items():
        check_choice(name, config[name], choices)
    if config["beta_schedule"] != MUTUAL_INFORMATION:
        beta_schedules().find("beta_schedule", config["beta_schedule"])
    for name, least in COUNTS.items():
        check_int(name, config[name], least)
        check_int(name, config[name], high=LARGEST)
    for name, (low, high) in NUMBERS.items():
        check_float(name, config[name], low, high)
    for name in OPTIONAL_NUMBERS:
        if config[name] is not None:
            check_float(name, config[name], 0)
    check_type("mask_in_data", config["mask_in_data"], bool, "True or False")
    if config["mask_token_id"] is not None:
        check_int("mask_token_id", config["mask_token_id"], 0, config["num_classes"] - 1)
    suppressed = config.get("suppress_tokens")
    if suppressed is not None:
        check_type("suppress_tokens", suppressed, (list, tuple), "a list of tokens")
        for state in suppressed:
            check_int("an entry of suppress_tokens", state, 0, config["num_classes"] - 1)
        if config["num_classes"] - len(set(suppressed)) < 2:
            raise ValueError(
                f"suppress_tokens has {len(set(suppressed))} of {config['num_classes']} states: leave at least two others"
            )
    if config["transition_kwargs"] is not None:
        check_type("transition_kwargs", config["transition_kwargs"], dict, "a dictionary of options of the transition")
        for name in config["transition_kwargs"]:
            if name not in family.options:
                known = f"it takes {', '.join(family.options)}" if family.options else "it takes none"
                raise ValueError(f"transition_kwargs has {name!r}, which is no option of {family.name!r}: {known}")
    if config.get("element_classes") is not None:
        _check_elements(config, family)
    elif family.needs_elements:
        raise ValueError(
            f"transition is {family.name!r}, and num_classes is {config['num_classes']}: pass num_classes and transition as "
            "lists, the number of states and the family of each element"
        )
    if config["trained_betas"] is not None:
        _check_betas(config["trained_betas"], config["num_train_timesteps"])
    if config["trained_exponents"] is not None:
        _check_exponents(config, family)
    sizes = config["num_classes"], config["num_train_timesteps"]
    check_memory(config["transition"], family.min_bytes(*sizes), *sizes)


def element_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a scheduler that was given a list, with K as `num_classes` and a name as `transition`.

    A list as `num_classes` counts the data states of each element, and a list as `transition` names the family of each. A mask is
    one more state, the last one, which all elements with a masking family share.
    """
    sizes, names, options = config["num_classes"], config["transition"], {}
    if not isinstance(sizes, (list, tuple)):
        raise ValueError(
            f"transition is a list of {len(names)} names, and num_classes is {describe(sizes)}: pass num_classes as a list, too, "
            "the number of states of each element"
        )
    if isinstance(names, (list, tuple)):
        options = {"transition": BY_ELEMENT, "transition_kwargs": {"transitions": list(names)}}
        if config["transition_kwargs"] is not None:
            raise ValueError(
                "got a list of transitions and transition_kwargs, which are options of one family: leave one out"
            )
    if not sizes:
        raise ValueError("num_classes is an empty list: pass the number of states of each element")
    for size in sizes:
        check_int("an entry of num_classes", size, 2, LARGEST - 1)
    families = [get_family(name) for name in (names if isinstance(names, (list, tuple)) else [names])]
    has_mask = any(family.has_mask for family in families)
    return {**options, "num_classes": int(max(sizes)) + has_mask, "element_classes": [int(size) for size in sizes]}


def _check_elements(config: Mapping[str, Any], family: type[TransitionFamily]) -> None:
    """Checks the arguments of a scheduler whose elements differ, as [`element_options`] returns them."""
    sizes = config["element_classes"]
    check_type("element_classes", sizes, (list, tuple), "a list of numbers of states")
    for size in sizes:
        check_int("an entry of element_classes", size, 2, LARGEST - 1)
    settings = TransitionSettings(family, config, {})
    check_type("transitions", settings.option("transitions", []), (list, tuple), "a list of names")
    names = settings.element_families
    for name in names:
        check_str("an entry of transitions", name)
    if len(names) != len(sizes):
        raise ValueError(f"got {len(names)} transitions for {len(sizes)} elements: pass one for each")
    for name in dict.fromkeys(names):
        one = get_family(name)
        if one.is_autoregressive or one.needs_elements or set(one.required_tensors) - {"stationary_probs"}:
            raise ValueError(
                f"the transition {name!r} is defined for elements that all have the same states: choose another one, such as "
                "'absorbing', 'uniform', 'stationary' or 'gaussian', or pass num_classes as one number"
            )
    num_classes = max(sizes, default=0) + any(get_family(name).has_mask for name in names)
    if config["num_classes"] != num_classes:
        raise ValueError(
            f"num_classes is {config['num_classes']}, and elements of up to {max(sizes, default=0)} states need {num_classes}: pass "
            "the list of their numbers as num_classes"
        )
    is_last = config["mask_token_id"] in (None, num_classes - 1)
    if not is_last or config["mask_in_data"] or config.get("suppress_tokens"):
        raise ValueError(
            "elements with their own numbers of states have the states 0, 1, .. and the mask as the last one: leave out "
            "mask_token_id, mask_in_data and suppress_tokens"
        )
    if config["prediction_type"] != "x0":
        raise ValueError(
            f"prediction_type is {config['prediction_type']!r}, which is defined for elements that all have the same states: choose 'x0'"
        )
    if settings.has_parts:
        num_steps, parts = config["num_train_timesteps"], [own for _, _, own in settings.parts()]
        needed = sum(own.family.min_bytes(own.num_classes, num_steps) for own in parts)
        check_memory(config["transition"], needed, num_classes, num_steps)


def named_options(config: Mapping[str, Any], family: type[TransitionFamily]) -> dict[str, Any]:
    """The entries of `transition_kwargs` that are arguments of the scheduler, as such, and what is left of `transition_kwargs`.

    So there is one place for each of them, where it is checked and read.
    """
    options = config["transition_kwargs"]
    if not isinstance(options, dict):
        return {}
    named = {name: value for name, value in options.items() if name in family.options and name in config}
    return named and {**named, "transition_kwargs": {k: v for k, v in options.items() if k not in named} or None}


def _check_betas(betas: Any, num_steps: int) -> None:
    """Checks that there is one number for each step; which numbers they may be depends on the transition."""
    if not hasattr(betas, "__len__") or isinstance(betas, (str, dict)):
        raise ValueError(f"trained_betas is {describe(betas)}: pass a list of {num_steps} numbers")
    if len(betas) != num_steps:
        raise ValueError(f"got {len(betas)} betas for {num_steps} timesteps: pass one per step")
    for step, beta in enumerate(betas, 1):
        if not is_number(beta):
            raise ValueError(f"beta_{step} of trained_betas is {describe(beta)}: it must be a number")


def check_inference_timesteps(chosen: Any, config: Mapping[str, Any], family: type[TransitionFamily]) -> None:
    """Checks that `inference_timesteps` has n timesteps for each number n: T - 1 first, and strictly decreasing."""
    check_type("inference_timesteps", chosen, Mapping, "a dictionary of lists of timesteps by their number")
    if config["prediction_type"] == "previous" or family.is_autoregressive:
        raise ValueError(
            "got inference_timesteps, and a model that predicts x_{t-1} or one token at a time takes all steps: leave them out"
        )
    for number, timesteps in chosen.items():
        if not str(number).isascii() or not str(number).isdecimal():
            raise ValueError(f"inference_timesteps has the key {describe(number)}: it must be a number of steps")
        check_type(f"inference_timesteps[{number}]", timesteps, (list, tuple), f"a list of {number} timesteps")
        if str(len(timesteps)) != str(number):
            raise ValueError(
                f"inference_timesteps[{number}] has {len(timesteps)} timesteps: pass as many as the key says"
            )
    if sum(map(len, chosen.values())) > MAX_INFERENCE_TIMESTEPS:
        raise ValueError(
            f"inference_timesteps has more than {MAX_INFERENCE_TIMESTEPS} timesteps: keep fewer numbers of steps"
        )
    for number, timesteps in chosen.items():
        before = last = config["num_train_timesteps"]
        for t in timesteps:
            check_int(f"an entry of inference_timesteps[{number}]", t, 0, last - 1)
            if t >= before:
                raise ValueError(f"inference_timesteps[{number}] must be strictly decreasing, got {t} after {before}")
            before = t
        if not timesteps or timesteps[0] != last - 1:
            raise ValueError(
                f"inference_timesteps[{number}] starts at {describe(timesteps[0]) if timesteps else None}: the first one must "
                f"be T - 1 = {last - 1}"
            )


def _check_exponents(config: Mapping[str, Any], family: type[TransitionFamily]) -> None:
    """Checks that there is one exponent for each step of a process that is a matrix exponential."""
    exponents, num_steps = config["trained_exponents"], config["num_train_timesteps"]
    if config["trained_betas"] is not None:
        raise ValueError("got trained_betas and trained_exponents: pass one of the two")
    if not family.is_exponential:
        exponentials = [name for name, other in transition_families().items() if other.is_exponential]
        raise ValueError(
            f"transition={family.name!r} has no exponents: pass trained_betas, or one of the transitions "
            f"{', '.join(exponentials)}"
        )
    if not isinstance(exponents, (list, tuple)) or len(exponents) != num_steps:
        raise ValueError(f"trained_exponents must be a list of {num_steps} numbers, one per timestep")
    for step, exponent in enumerate(exponents, 1):
        if exponent != "inf" and not (
            is_number(exponent) and (0 <= exponent <= MAX_EXPONENT or exponent == float("inf"))
        ):
            raise ValueError(
                f"alpha_{step} of trained_exponents is {describe(exponent)}: it must be a number in 0 .. 1e12, or 'inf' for a step "
                "that forgets everything"
            )
