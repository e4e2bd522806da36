# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A D3PM process in a loop of the form that diffusers has proposed: times in (0, 1], and logits that the scheduler shapes."""

import pytest
import torch
from torch.testing import assert_close

from d3pm_hf import D3PMScheduler, UnitTimeScheduler


K, N, T = 7, 6, 40
PROCESSES = {
    "absorbing": {"transition": "absorbing"},
    "uniform": {"transition": "uniform", "beta_schedule": "reciprocal"},
    "gaussian": {"transition": "gaussian", "beta_schedule": "cosine"},
}
EACH = pytest.mark.parametrize("name", PROCESSES)
pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")


def network(x, t):
    """Logits that depend on the tokens and on a time in (0, 1]."""
    assert 0 < float(t) <= 1
    weights = torch.randn(K, K, generator=torch.Generator().manual_seed(3))
    return weights[x] + weights[(x.roll(1, -1) + x) % K] * float(t)


def denoise(scheduler, model, sample, num_inference_steps, generator):
    """The denoising loop of a discrete pipeline, which knows nothing of the process; written to the text of the proposal."""
    scheduler.set_timesteps(num_inference_steps, device=sample.device)
    shaped = []
    for t in scheduler.timesteps:
        output = scheduler.step(model(sample, t), t, sample, generator=generator, return_dict=True)
        sample = output.prev_sample
        shaped.append(output.pred_logits)
    return sample, shaped


@EACH
@pytest.mark.parametrize("shaping", [{}, {"temperature": 0.5}, {"top_k": 2}, {"temperature": 0.7, "top_p": 0.9}])
def test_the_loop_draws_what_the_process_draws(name, shaping):
    """The same random numbers give the same tokens as a loop over the timesteps of `D3PMScheduler`."""
    plain, unit = (
        D3PMScheduler(K, T, **PROCESSES[name]),
        UnitTimeScheduler(D3PMScheduler(K, T, **PROCESSES[name]), **shaping),
    )
    x_T = plain.sample_prior((5, N), torch.Generator().manual_seed(0))
    assert torch.equal(unit.sample_prior((5, N), torch.Generator().manual_seed(0)), x_T)
    got, shaped = denoise(unit, network, x_T, 9, torch.Generator().manual_seed(1))
    plain.set_timesteps(9)
    sample, generator = x_T, torch.Generator().manual_seed(1)
    for t, logits in zip(plain.timesteps, shaped, strict=True):
        output = plain.step(network(sample, (t + 1) / T), t, sample, generator=generator, **shaping)
        assert_close(logits, output.pred_logits)
        sample = output.prev_sample
    assert torch.equal(got, sample)


def test_times_fall_from_one():
    scheduler = UnitTimeScheduler(D3PMScheduler(K, T))
    scheduler.set_timesteps(8)
    assert scheduler.timesteps.tolist() == [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert scheduler.to_timestep(scheduler.timesteps).tolist() == scheduler.scheduler.timesteps.tolist()
    assert scheduler.to_timestep(torch.tensor([1e-9, 0.5, 1.0], dtype=torch.float32)).tolist() == [0, 19, 39]
    assert scheduler.config.num_classes == K and scheduler.order == 1


@EACH
def test_noise_of_a_time(name):
    plain = D3PMScheduler(K, T, **PROCESSES[name])
    x_0 = torch.randint(0, K - 1, (3, N))
    times = torch.tensor([0.025, 0.5, 1.0])
    got = UnitTimeScheduler(plain).add_noise(x_0, times, torch.Generator().manual_seed(0))
    assert torch.equal(got, plain.add_noise(x_0, torch.tensor([0, 19, 39]), torch.Generator().manual_seed(0)))


def test_wrong_times():
    scheduler = UnitTimeScheduler(D3PMScheduler(K, T))
    with pytest.raises(ValueError, match=r"time is 0.0: it must be in \(0, 1\], and 0 is the data"):
        scheduler.to_timestep(0.0)
    with pytest.raises(ValueError, match=r"time is 1.5"):
        scheduler.add_noise(torch.zeros(2, N).long(), torch.tensor([0.5, 1.5]))
    with pytest.raises(ValueError, match="time has the dtype torch.int64: pass a number in"):
        scheduler.to_timestep(torch.tensor(39))
