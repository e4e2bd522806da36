# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Everything on another device, without one: tensors that say where they are, compute on the CPU and refuse to mix."""

from contextlib import nullcontext

import families
import pytest
import torch
from away import AWAY, Away

from d3pm_hf import d3pm_loss, evaluate_bound, prior_loss


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")


@pytest.fixture(params=[AWAY, *[torch.device("cuda", i) for i in range(torch.cuda.device_count())][:1]], ids=str)
def device(request):
    with Away() if request.param == AWAY else nullcontext():
        yield request.param


def seeded():
    """On the CPU, so that every device sees the same numbers."""
    return torch.Generator().manual_seed(0)


def assert_same(got, expected, device, tolerance=1e-5):
    """The result of the CPU, of the same shape and dtype, on the device."""
    assert got.device == device
    torch.testing.assert_close(got.detach().cpu(), expected.detach(), rtol=tolerance, atol=tolerance)


def case(family, seed=0):
    x_0 = family.data((4, families.NUM_STEPS), seed=seed)
    t = torch.tensor([0, 1, 3, 5])
    logits = 2 * torch.randn(*x_0.shape, family.num_classes, generator=torch.Generator().manual_seed(seed))
    return x_0, family.corrupt(x_0, t + 1), t, logits


def test_devices_do_not_mix():
    with Away():
        x, y = torch.zeros(3, device=AWAY), torch.ones(3)
        assert x.device == (x + 1).device == x.log_softmax(-1).device == AWAY
        with pytest.raises(RuntimeError, match="on the CPU"):
            x + y
        with pytest.raises(RuntimeError, match="on the CPU"):
            y[torch.zeros(1, dtype=torch.long, device=AWAY)]
        assert (x + y.to(AWAY)).cpu().tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", families.NAMES)
def test_noise(name, device):
    family = families.build(name)
    scheduler = family.scheduler()
    x_0, _, t, _ = case(family)
    for times in (t, 3):
        there = times.to(device) if torch.is_tensor(times) else times
        x_t = scheduler.add_noise(x_0.to(device), there, seeded())
        assert_same(x_t, scheduler.add_noise(x_0, times, seeded()), device)
    generators = [torch.Generator().manual_seed(i) for i in range(4)]
    assert scheduler.add_noise(x_0.to(device), t.to(device), generators).device == device
    assert scheduler.add_noise(x_0.to(device), t.to(device)).device == device  # the device's own generator
    assert_same(scheduler.sample_prior((4, 3), seeded(), device), scheduler.sample_prior((4, 3), seeded()), device)
    assert_same(prior_loss(scheduler, x_0.to(device)), prior_loss(scheduler, x_0), device)


@pytest.mark.parametrize("reconstruction", ["posterior", "raw"])
@pytest.mark.parametrize("meaning", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", families.NAMES)
def test_loss_and_gradient(name, meaning, reconstruction, device):
    family = families.build(name)
    scheduler = family.scheduler(x0_posterior=meaning, reconstruction=reconstruction)
    x_0, x_t, t, logits = case(family)
    logits[0, :, :-1] -= 60  # so sure of something else that float32 needs its second look
    results = []
    for where in ("cpu", device):
        output = logits.to(where).requires_grad_()
        states = [v.to(where) for v in (x_0, x_t, t)]
        previous = states[-1] // 2 - 1
        for s in (None, previous):
            loss = d3pm_loss(scheduler, output, *states, hybrid_coeff=0.1, auxiliary="denoising", previous_timesteps=s)
            (gradient,) = torch.autograd.grad(loss.loss[loss.loss < torch.inf].sum(), output)
            results.append((loss.loss, loss.vb, loss.cross_entropy, gradient))
    for expected, got in zip(results[:2], results[2:]):
        for a, b in zip(got, expected):
            assert_same(a, b, device)


@pytest.mark.parametrize("meaning", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", families.NAMES)
def test_steps(name, meaning, device):
    family = families.build(name)
    scheduler = family.scheduler(x0_posterior=meaning)
    scheduler.set_timesteps(timesteps=[5, 3, 2])
    x_0, _, _, logits = case(family)
    for t in scheduler.timesteps:
        x_t = family.corrupt(x_0, int(t) + 1)
        expected = scheduler.step(logits, t, x_t, top_k=3, generator=seeded())
        got = scheduler.step(logits.to(device), t, x_t.to(device), top_k=3, generator=seeded())
        for name in ("prev_sample", "pred_logits"):
            assert_same(getattr(got, name), getattr(expected, name), device)
        preview = scheduler.predict_original_sample(logits.to(device), t, x_t.to(device))
        assert_same(preview, scheduler.predict_original_sample(logits, t, x_t), device)
        posterior = scheduler.posterior_logits(logits.to(device), t, x_t.to(device), 0)
        assert_same(posterior, scheduler.posterior_logits(logits, t, x_t, 0), device)
    assert scheduler.step(logits.to(device), 2, x_t.to(device)).prev_sample.device == device


@pytest.mark.parametrize("head", ["logistic", "previous"])
def test_other_heads(head, device):
    family = families.build("gaussian")
    scheduler = family.scheduler(prediction_type=head)
    x_0, x_t, t, output = case(family)
    output = output[..., :2].contiguous() if head == "logistic" else output
    there = [v.to(device) for v in (output, x_0, x_t, t)]
    assert_same(d3pm_loss(scheduler, *there).loss, d3pm_loss(scheduler, output, x_0, x_t, t).loss, device)
    scheduler.set_timesteps(6, device=device)
    assert scheduler.timesteps.device == device
    expected = scheduler.step(output, 3, x_t, generator=seeded()).prev_sample
    for t in (3, scheduler.timesteps[2]):
        assert_same(scheduler.step(there[0], t, there[2], generator=seeded()).prev_sample, expected, device)


@pytest.mark.parametrize("name", ["absorbing", "gaussian", "rate-sparse"])
def test_bound(name, device):
    family = families.build(name, betas="end")
    scheduler = family.scheduler()
    x_0, _, _, logits = case(family)
    mask = torch.ones_like(x_0)
    mask[:, -2:] = 0
    expected, got = (
        evaluate_bound(scheduler, lambda x_t, t: logits.to(x_t.device), [(x_0.to(d), mask.to(d))], progress_bar=False)
        for d in ("cpu", device)
    )
    assert 0 < expected.total < torch.inf
    assert got.total == pytest.approx(expected.total, rel=1e-5)
