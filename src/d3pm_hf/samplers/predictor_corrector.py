# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Ancestral sampling with correctors between its steps."""

from dataclasses import replace

import torch

from ..numerics import scalar_tensor
from ..utils.checks import check_choice, check_int
from .ancestral import ancestral, show_known
from .base import OutputCheck, SamplerStep, check_sampler_arguments, register_sampler
from .correctors import forward_backward, gibbs
from .wrapped import WrappedScheduler


CORRECTORS = ("forward_backward", "gibbs")


@register_sampler("predictor_corrector")
@torch.no_grad()
def predictor_corrector(
    scheduler,
    denoiser,
    x_t: torch.Tensor,
    timesteps: list[int],
    *,
    corrector: str = "forward_backward",
    correct_steps: int = 1,
    num_positions: int | None = None,
    generator: torch.Generator | list[torch.Generator] | None = None,
    known: torch.Tensor | None = None,
    is_known: torch.Tensor | None = None,
    condition: dict | None = None,
    callback=None,
    progress_bar=None,
    **step_arguments,
) -> torch.Tensor:
    """Draws x_0 by ancestral sampling, with steps of a corrector at each timestep that it reaches.

        x_s ~ p(x_s | x_t),   then `correct_steps` times x_s ~ C(x_s' | x_s)

    A corrector C keeps q(x_s) if the denoiser is exact, and brings x_s closer to it if the steps before had an error, such as
    that of positions which change at once. `"forward_backward"` goes one step ahead in `timesteps` and back
    ([`~samplers.correctors.forward_backward`]): all positions may change, and q(x_s) is kept up to second order in the length
    of that step. `"gibbs"` draws one position given all others ([`~samplers.correctors.gibbs`]), which keeps q(x_s) exactly.

    With `temperature=0`, steps and correctors take the most likely x_0 of the prediction. Its noise stays random.

    Over n timesteps the network is called n + (n - 1) `correct_steps` times: the data are not corrected, nor is the first
    state. The arguments are those of [`Sampler`], and:

    Args:
        corrector (`str`, defaults to `"forward_backward"`): `"forward_backward"` or `"gibbs"`.
        correct_steps (`int`, defaults to 1): Number of steps of the corrector at each timestep, one call of the network each.
            0 is ancestral sampling.
        num_positions (`int`, *optional*): Number of positions of each row that a step of `"gibbs"` draws. Defaults to 1; more
            are drawn independently of each other, which is not exact.
    """
    timesteps = check_sampler_arguments(
        scheduler, denoiser, x_t, timesteps, known, is_known, condition, callback, progress_bar
    )
    check_choice("corrector", corrector, CORRECTORS)
    check_int("correct_steps", correct_steps, 0)
    if num_positions is not None:
        check_int("num_positions", num_positions, 1)
    check_corrects(scheduler, corrector, num_positions)
    following, outputs = dict(zip(timesteps, [*timesteps[1:], -1])), OutputCheck(scheduler)
    is_fixed = (condition or {}).get("is_given")
    if is_known is not None:
        is_fixed = is_known if is_fixed is None else is_fixed | is_known

    def predict(x: torch.Tensor, t: int) -> torch.Tensor:
        model_output = denoiser(x, scalar_tensor(t, torch.long, x.device), **(condition or {}))
        outputs.add(model_output, t)
        return model_output

    def correct(step: SamplerStep) -> torch.Tensor:
        x, t = step.prev_sample, step.previous_timestep
        for _ in range(correct_steps if t >= 0 else 0):
            arguments = scheduler, predict, x, t
            if corrector == "gibbs":
                x = gibbs(*arguments, generator, num_positions or 1, is_fixed, **step_arguments)
            else:
                x = forward_backward(*arguments, following[t], generator, **step_arguments)
            x = show_known(scheduler, x, t, known, is_known)
        changed = None if callback is None else callback(replace(step, prev_sample=x))
        return x if changed is None else changed

    options: dict = {"known": known, "is_known": is_known, "generator": generator, "condition": condition}
    options |= {"callback": correct, "progress_bar": progress_bar, **step_arguments}
    x_0 = ancestral(scheduler, denoiser, x_t, timesteps, **options)
    outputs.finish()
    return x_0


def check_corrects(scheduler, corrector: str, num_positions: int | None) -> None:
    """Checks that the corrector applies to the process and to what its network predicts."""
    if num_positions is not None and corrector != "gibbs":
        raise ValueError(
            f"num_positions is {num_positions}, and corrector is {corrector!r}, which moves all positions: leave it out, or "
            "choose corrector='gibbs'"
        )
    if scheduler.family.is_autoregressive:
        raise ValueError(
            f"sampler is 'predictor_corrector', and the process is {scheduler.config.transition!r}, whose tokens no corrector "
            "can change as their order is fixed: choose 'ancestral'"
        )
    if corrector == "gibbs" and scheduler.config.prediction_type == "previous":
        raise ValueError(
            "corrector is 'gibbs', and prediction_type is 'previous', which says nothing about x_0: choose "
            "corrector='forward_backward'"
        )
    if corrector == "gibbs" and isinstance(scheduler, WrappedScheduler):
        raise ValueError(
            "corrector is 'gibbs', which does not follow a classifier: leave out the classifier, or choose "
            "corrector='forward_backward'"
        )
