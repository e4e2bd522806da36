# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Everything on another device, without one: tensors that say where they are, compute on the CPU and refuse to mix."""

from contextlib import nullcontext

import families
import pytest
import torch
from accelerate import Accelerator
from away import AWAY, Away, counting, without_float64
from comparison import assert_same_draws

from d3pm_hf import d3pm_loss, evaluate_bound, prior_loss
from d3pm_hf.likelihood.strides import evaluate_strides
from d3pm_hf.numerics import uniforms, wide_dtype
from d3pm_hf.samplers import registered_samplers
from d3pm_hf.training.progress import MAX_PENDING, Progress


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")


DEVICES = [str(AWAY), f"{AWAY} without float64", *[f"cuda:{i}" for i in range(torch.cuda.device_count())][:1]]


@pytest.fixture(params=DEVICES)
def device(request):
    name, _, lacks = request.param.partition(" ")
    with Away() if name == str(AWAY) else nullcontext(), without_float64() if lacks else nullcontext():
        yield torch.device(name)


def skip_half(device, reading, reconstruction="posterior"):
    """What the output means is computed alike on all devices; half of the cases are enough on one without float64."""
    if wide_dtype(device) != torch.float64 and (reading == "denoising") != (reconstruction == "raw"):
        pytest.skip("tested with float64")


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
    assert_same(prior_loss(scheduler, x_0.to(device)), prior_loss(scheduler, x_0).to(wide_dtype(device)), device)


@pytest.mark.parametrize(
    "meaning, reconstruction",
    [
        ("leave_one_out", "posterior"),
        ("denoising", "raw"),
        pytest.param("leave_one_out", "raw", marks=pytest.mark.slow),
        pytest.param("denoising", "posterior", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", families.NAMES)
def test_loss_and_gradient(name, meaning, reconstruction, device):
    skip_half(device, meaning, reconstruction)
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


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_other_bounds(name, device):
    """In continuous time, and of all steps between the timesteps of a grid."""
    family = families.build(name, betas="end")
    scheduler = family.scheduler()
    x_0, _, _, logits = case(family)
    options = {"model": lambda x_t, t: logits.to(x_t.device)[: len(x_t)], "progress_bar": False}
    expected, got = (
        evaluate_bound(scheduler, batches=x_0.to(d), continuous_time=True, **options) for d in ("cpu", device)
    )
    assert got.total == pytest.approx(expected.total, rel=1e-4)
    expected, got = (evaluate_strides(scheduler, batches=x_0.to(d), grid=3, **options) for d in ("cpu", device))
    torch.testing.assert_close(got.costs, expected.costs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampler", [name for name in registered_samplers() if name != "left_to_right"])
def test_samplers(sampler, device):
    family = families.build("absorbing", betas="end")
    scheduler = family.scheduler()
    *_, logits = case(family)
    samples = []
    for where in ("cpu", device):
        x_T = scheduler.sample_prior((4, families.NUM_STEPS), seeded(), where)
        denoiser = lambda x_t, t: logits.to(x_t.device)[: len(x_t)]  # noqa: E731
        options = {"num_particles": 2} if sampler == "particle_filter" else {}
        samples.append(
            registered_samplers()[sampler](scheduler, denoiser, x_T, [5, 3, 0], generator=seeded(), **options)
        )
    assert samples[1].device == device
    assert_same_draws(samples[1].cpu(), samples[0])


def test_sums_of_losses(device):
    """They have the digits of float64, and no batch waits for the device."""
    progress = Progress(Accelerator(cpu=True))
    losses = torch.randn(MAX_PENDING - 1, 3, generator=seeded()) + 1e4
    with counting() as counts:
        for row in losses.to(device):
            progress.add(*row)
    assert counts.waits == 0
    assert torch.equal(progress.state_dict()["sums"][0], losses.double().sum(0))
    progress.add(*losses[0].to(device))
    progress.check_finite([torch.ones(3, device=device)])
    assert progress.log_line(10, 0.1)["loss"] == (losses[:, 0].double().sum() + losses[0, 0].double()) / MAX_PENDING
    progress.add(*torch.full((3,), torch.nan).to(device))
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        progress.check_finite([torch.empty(0, device=device)])  # a process without a shard


def test_uniforms_without_float64():
    """They are below one, and as fine near zero as float32 can be, from a generator of any device."""
    with Away(), without_float64():
        for u in (uniforms((1 << 22,), seeded(), AWAY), uniforms((1 << 22,), None, AWAY)):
            assert u.dtype == torch.float32
            u = u.cpu().double()
            assert 0 <= u.min() and u.max() < 1
            small = u[u < 2**-14] * 2**14  # 256 of them, which the grid of 2^-24 would put on 1024 places
            assert abs(len(small) - 256) < 64 and len(small.unique()) > 0.98 * len(small)
            assert (small * 1024 % 1 != 0).double().mean() > 0.9
