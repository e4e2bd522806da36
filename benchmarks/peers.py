# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Other libraries on the tensors of `bench_core.py`. Each is optional: where it cannot run, a sentence says why.

Each function gives the work as a call without arguments, ready to be timed, or that sentence.
"""

from typing import Callable

import torch
from diffusers import AmusedScheduler, DiscreteDDIMScheduler, VQDiffusionScheduler


NUM_STEPS = 1000
# bionemo-moco keeps four tables [T, K, K] in float32. Over 1000 steps its products drift until it refuses them at K = 256;
# what a call costs does not depend on their number.
MOCO_STEPS, MOCO_MAX_CLASSES = 100, 256
OTHER_PROCESS = "other process"


def loss_peers(family: str, logits: torch.Tensor, x_0: torch.Tensor, t: torch.Tensor) -> dict[str, Callable | str]:
    """Corrupt, loss and gradient, on logits `[B, N, K]`, data `[B, N]` and timesteps `[B]`."""
    return {
        "moco": _moco_loss(family, logits, x_0, t),
        "flow_matching": _flow_matching_loss(family, logits, x_0, t),
    }


def step_peers(family: str, logits: torch.Tensor, x_t: torch.Tensor, t: int) -> dict[str, Callable | str]:
    """One step from x_t `[B, N]`, at the timestep t of 1000 or as near to it as the peer's own clock comes."""
    return {
        "moco": _moco_step(family, logits, x_t, t),
        "VQDiffusion": _vq_diffusion_step(family, logits, x_t, t),
        "DiscreteDDIM": _discrete_ddim_step(family, logits, x_t, t),
        "Amused": _amused_step(family, logits, x_t, t),
    }


def _moco(family: str, num_classes: int):
    """NVIDIA's D3PM; it knows rank-one processes only."""
    if family not in ("absorbing", "uniform"):
        return OTHER_PROCESS
    if num_classes > MOCO_MAX_CLASSES:
        return f"{4 * 4 * MOCO_STEPS * num_classes**2 / 1e9:,.0f} GB of tables"
    try:
        from bionemo.moco.distributions.prior import DiscreteMaskedPrior, DiscreteUniformPrior
        from bionemo.moco.distributions.time import UniformTimeDistribution
        from bionemo.moco.interpolants import D3PM
        from bionemo.moco.schedules.noise.discrete_noise_schedules import DiscreteLinearNoiseSchedule
    except ImportError:
        return "not installed"
    prior = DiscreteMaskedPrior(num_classes) if family == "absorbing" else DiscreteUniformPrior(num_classes)
    time = UniformTimeDistribution(discrete_time=True, nsteps=MOCO_STEPS)
    return D3PM(time, prior, DiscreteLinearNoiseSchedule(MOCO_STEPS))


def _moco_loss(family, logits, x_0, t):
    process = _moco(family, logits.shape[-1])
    if isinstance(process, str):
        return process
    times = t * MOCO_STEPS // NUM_STEPS

    def run():
        logits.grad = None
        x_t = process.interpolate(x_0, times)
        process.loss(logits, x_0, x_t, times, vb_scale=1.0).mean().backward()

    return run


def _moco_step(family, logits, x_t, t):
    process = _moco(family, logits.shape[-1])
    if isinstance(process, str):
        return process
    times = torch.full((len(x_t),), t * MOCO_STEPS // NUM_STEPS)
    return lambda: process.step(logits, times, x_t)


def _flow_matching_loss(family, logits, x_0, t):
    """Meta's generalized KL, which is the continuous-time bound of a mixture with masks or with uniform noise."""
    if family not in ("absorbing", "uniform"):
        return OTHER_PROCESS
    try:
        from flow_matching.loss import MixturePathGeneralizedKL
        from flow_matching.path import MixtureDiscreteProbPath
        from flow_matching.path.scheduler import PolynomialConvexScheduler
    except ImportError:
        return "not installed"
    path = MixtureDiscreteProbPath(PolynomialConvexScheduler(n=1.0))
    loss, num_classes, clean = MixturePathGeneralizedKL(path), logits.shape[-1], 1 - (t + 1) / (NUM_STEPS + 1)

    def run():
        logits.grad = None
        noise = torch.full_like(x_0, num_classes - 1)
        if family == "uniform":
            noise = torch.randint_like(x_0, num_classes)
        loss(logits, x_0, path.sample(noise, x_0, clean).x_t, clean).backward()

    return run


def _vq_diffusion_step(family, logits, x_t, t):
    if family != "absorbing":
        return OTHER_PROCESS
    scheduler = VQDiffusionScheduler(logits.shape[-1], num_train_timesteps=NUM_STEPS)
    data_logits = logits[..., :-1].mT.contiguous()  # [B, K-1, N], its own layout
    return lambda: scheduler.step(data_logits.log_softmax(1), torch.tensor(t), x_t)


def _discrete_ddim_step(family, logits, x_t, t):
    if family != "uniform":
        return OTHER_PROCESS
    scheduler = DiscreteDDIMScheduler(num_inference_steps=20)
    step_index = 20 - round(20 * (t + 1) / NUM_STEPS)  # its clock runs the other way
    return lambda: scheduler.step(logits, step_index, x_t, temperature=1.0)


def _amused_step(family, logits, x_t, t):
    if family != "absorbing":
        return OTHER_PROCESS
    mask_token_id = logits.shape[-1] - 1
    scheduler = AmusedScheduler(mask_token_id, masking_schedule="linear")
    scheduler.set_timesteps(20)
    return lambda: scheduler.step(logits, round(20 * (t + 1) / NUM_STEPS) - 1, x_t)
