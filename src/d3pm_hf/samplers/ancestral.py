# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Ancestral sampling.

A sampler is a function of a [`Walk`], the record of one call; `as_sampler` makes a function of it that takes the arguments of
[`Sampler`] and checks them. A walk has the steps that samplers are made of:

    walk.predict(x_t, t)                  the output of the denoiser
    walk.step(model_output, x_t, t, s)    x_s drawn from p(x_s | x_t), by `scheduler.step`
    walk.show_known(x, t)                 x with the known elements in place of its own
    walk.progress(steps)                  the steps with a progress bar, which may end them early
"""

from collections.abc import Callable

import torch

from ..utils.modules import finish_graph
from .sampler import as_sampler, register_sampler
from .walk import SamplerStep, Walk


@register_sampler("ancestral")
@as_sampler
def ancestral(walk: Walk) -> torch.Tensor:
    """Draws x_0 by ancestral sampling, with one call of the denoiser per timestep. The arguments are those of [`Sampler`].

        x_s ~ p(x_s | x_t)        (eq. 4 of the paper) for each t of `timesteps` and the s that follows it

    At known positions, x_t shows the data wherever the process can have kept them until t. For absorbing processes the
    result is a sample given the known data if the network is exact. For every process and network, [`particle_filter`] draws
    from p(x_0 | known) in the limit of many particles.

    With `temperature=0`, x_s is drawn from q(x_s | x_t, x_0) for the most likely x_0 of the prediction.
    """
    return take_steps(walk, walk.step)


def take_steps(walk: Walk, step: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Draws x_0 by one `step(model_output, x_t, t, s)` for each timestep, which gives x_s."""
    x_t = walk.x_t
    finish_graph(x_t.device)  # on XLA, so that each step is the same graph
    for i, (t, s) in enumerate(walk.progress(walk.steps)):  # s = -1 stands for the data
        x_t = walk.show_known(x_t, t)  # as far as the process can have kept it
        model_output = walk.predict(x_t, t)
        x_s = walk.show_known(step(model_output, x_t, t, s), s)
        if walk.callback is not None:
            changed = walk.callback(SamplerStep(i, t, s, x_t, model_output, x_s))
            x_s = x_s if changed is None else changed
        x_t = x_s
        finish_graph(x_t.device)
    return x_t
