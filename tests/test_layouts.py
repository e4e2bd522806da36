# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Logits and states of any layout in memory: transposed, expanded and sliced ones have the numbers of a contiguous copy."""

from unittest.mock import patch

import families
import pytest
import torch
from comparison import assert_same_draws
from families import NUM_STEPS

from d3pm_hf import d3pm_loss, numerics
from d3pm_hf.losses import autoregressive_loss
from d3pm_hf.pipelines.pipeline_d3pm import default_sampler
from d3pm_hf.samplers import ancestral


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")


def transposed(values):
    """As of `conv(x).transpose(1, 2)`: classes first in memory."""
    return values.movedim(-1, 1).contiguous().movedim(1, -1)


def batch_last(values):
    return values.movedim(0, -1).contiguous().movedim(-1, 0)


def sliced(values):
    """A part of a larger tensor, with gaps in every dimension."""
    larger = values.new_full([2 * size + 1 for size in values.shape], 7)
    part = larger[tuple(slice(1, None, 2) for _ in values.shape)]
    return part.copy_(values)


def expanded(values):
    """One row for all elements."""
    return values[(slice(1),) * (values.ndim - 1)].expand(values.shape)


LAYOUTS = [transposed, batch_last, sliced, expanded]


def compare_losses(scheduler, logits, x_0, x_t, t, layouts=LAYOUTS, compiled=lambda loss: loss, **options):
    """Loss, terms and gradient of each layout, beside those of a contiguous copy."""

    def loss(given):
        return d3pm_loss(scheduler, given, x_0, x_t, t, hybrid_coeff=0.1, **options)

    weights = torch.rand(x_0.shape, generator=torch.Generator().manual_seed(0))
    for layout in layouts:
        given, results = layout(logits), []
        copy = given.clone(memory_format=torch.contiguous_format)
        for function, one in ((compiled(loss), given), (loss, copy)):
            one = one.detach().requires_grad_()
            output = function(one)
            (gradient,) = torch.autograd.grad((output.loss * weights).sum(), one)
            results.append((output.loss.detach(), output.vb, output.cross_entropy, gradient))
        for got, expected in zip(*results):
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def case(family, num_rows=NUM_STEPS, shape=(NUM_STEPS,)):
    t = torch.arange(NUM_STEPS)[-num_rows:]
    x_0 = family.data((num_rows, *shape))
    logits = 2 * torch.randn(*x_0.shape, family.num_classes, generator=torch.Generator().manual_seed(0))
    return logits, x_0, family.corrupt(x_0, t + 1), t


@pytest.mark.parametrize("shape", [(NUM_STEPS,), (2, 3, 4)], ids=["text", "image"])
@pytest.mark.parametrize("x0_posterior", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", families.NAMES)
def test_losses(name, x0_posterior, shape):
    if not families.can_take(name, shape="text" if len(shape) == 1 else "image"):
        pytest.skip("an order of text")
    family = families.build(name)
    compare_losses(family.scheduler(x0_posterior=x0_posterior), *case(family, shape=shape), auxiliary="denoising")


@pytest.mark.parametrize("num_classes", [5, 70])  # short rows, and long ones
@pytest.mark.parametrize("num_rows", [1, NUM_STEPS])  # a single sample is a view of all rows
@pytest.mark.parametrize("name", ["absorbing", "absorbing_in_data", "uniform", "gaussian", "autoregressive"])
def test_losses_in_pieces(name, num_rows, num_classes):
    family = families.build(name, num_classes)
    mask = {"loss_mask": torch.arange(num_rows * NUM_STEPS).view(num_rows, NUM_STEPS) % 3 > 0}
    for options in ({}, mask):
        compare_losses(family.scheduler(), *case(family, num_rows), **options)
        with patch.object(numerics, "CHUNK_BYTES", 8 * 4 * num_classes):
            compare_losses(family.scheduler(), *case(family, num_rows), **options)


@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian"])
def test_compiled_losses(name):
    family = families.build(name)
    torch.compiler.reset()

    def compiled(loss):
        return torch.compile(loss, backend="aot_eager", fullgraph=True)

    compare_losses(family.scheduler(), *case(family), [transposed], compiled)
    torch.compiler.reset()


def test_the_loss_in_one_pass():
    family = families.build("autoregressive")
    scheduler = family.scheduler()
    logits, x_0, *_ = case(family)
    for layout in LAYOUTS:
        got, expected = (
            autoregressive_loss(scheduler, one, x_0) for one in (layout(logits), layout(logits).contiguous())
        )
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("x0_posterior", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", families.NAMES)
def test_steps_and_noise(name, x0_posterior):
    """Draws, posteriors and previews, for states of any layout, too."""
    family = families.build(name)
    scheduler = family.scheduler(x0_posterior=x0_posterior)
    logits, x_0, *_ = case(family)
    for layout in LAYOUTS:
        data = layout(x_0)
        noisy, again = (scheduler.add_noise(x, 3, torch.Generator().manual_seed(1)) for x in (data, data.contiguous()))
        assert_same_draws(noisy, again)
        states = layout(family.corrupt(x_0, 5))
        pairs = [(layout(logits), states), (layout(logits).contiguous(), states.contiguous())]
        steps = [
            scheduler.step(a, 4, x, previous_timestep=2, generator=torch.Generator().manual_seed(2)) for a, x in pairs
        ]
        assert_same_draws(*(step.prev_sample for step in steps))
        torch.testing.assert_close(*(scheduler.posterior_logits(a, 4, x, 2) for a, x in pairs))
        assert_same_draws(*(scheduler.predict_original_sample(a, 4, x) for a, x in pairs))


@pytest.mark.parametrize("name", families.NAMES)
def test_sampling(name):
    family = families.build(name)
    scheduler = family.scheduler()
    logits, *_ = case(family)
    timesteps = list(range(NUM_STEPS - 1, -1, -1))
    for layout in LAYOUTS:
        x_T = layout(scheduler.sample_prior((NUM_STEPS, NUM_STEPS), torch.Generator().manual_seed(0)))
        pairs = [(layout(logits), x_T), (layout(logits).contiguous(), x_T.contiguous())]
        for sampler in {ancestral, default_sampler(scheduler, None, timesteps, {})}:
            samples = [
                sampler(
                    scheduler,
                    lambda x_t, t, given=given: given[: len(x_t)],
                    x,
                    timesteps,
                    generator=torch.Generator().manual_seed(3),
                )
                for given, x in pairs
            ]
            assert_same_draws(*samples)
