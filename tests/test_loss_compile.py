# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`torch.compile` of a training step: the numbers of the step that is not compiled."""

from contextlib import nullcontext

import families
import pytest
import torch
from families import NUM_STEPS, without_fused_loss

from d3pm_hf.losses import d3pm_loss


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def create_step(scheduler, x_0, adds_noise):
    """A network, and a function of its x_t that makes one step with a loss and a gradient."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Embedding(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
    timesteps = torch.arange(len(x_0))

    def step(x_t, generator):
        if adds_noise:
            x_t = scheduler.add_noise(x_0, timesteps, generator=generator)
        output = d3pm_loss(scheduler, network(x_t), x_0, x_t, timesteps, hybrid_coeff=0.1, loss_mask=x_0 != 3)
        loss = (output.loss * 2).mean()
        loss.backward()
        return loss.detach(), output.vb

    return network, step


@pytest.mark.parametrize(
    "name, has_fused_loss, backend, adds_noise",
    [
        ("absorbing", True, "eager", True),
        ("absorbing", True, "aot_eager", False),
        ("gaussian", True, "eager", False),
        ("gaussian", True, "aot_eager", True),
        ("uniform", False, "eager", False),
        ("uniform", False, "aot_eager", False),
    ],
)
def test_a_compiled_step_has_the_same_numbers(name, has_fused_loss, backend, adds_noise):
    family = families.build(name)
    scheduler = family.scheduler()
    x_0 = family.data((NUM_STEPS, 4))
    x_t = family.corrupt(x_0, torch.arange(1, NUM_STEPS + 1))
    results = []
    for compiler in (lambda step: step, lambda step: torch.compile(step, backend=backend)):
        network, step = create_step(scheduler, x_0, adds_noise)
        with nullcontext() if has_fused_loss else without_fused_loss(scheduler.transition):
            loss, vb = compiler(step)(x_t, torch.Generator().manual_seed(0))
        results.append([loss, vb, *(parameter.grad for parameter in network.parameters())])
    for compiled, expected in zip(*results[::-1]):
        torch.testing.assert_close(compiled, expected, atol=1e-6, rtol=1e-5)


def test_one_graph_is_refused_with_the_reason():
    """The loss looks at values, which one graph cannot: the error says so."""
    family = families.build("uniform")
    x_0 = family.data((NUM_STEPS, 4))
    _, step = create_step(family.scheduler(), x_0, adds_noise=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the losses of d3pm_hf check values"):
        torch.compile(step, backend="eager", fullgraph=True)(x_0, None)
