# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`torch.compile` of a training step: the numbers of the step that is not compiled."""

import gc
import pickle
from contextlib import nullcontext

import families
import pytest
import torch
from families import NUM_STEPS, without_fused_loss

from d3pm_hf import D3PMScheduler
from d3pm_hf.losses import d3pm_loss
from d3pm_hf.transitions.kernel import transition_of


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


OPTIONS = {
    "plain": {},
    "mask": {"loss_mask": torch.arange(36).view(6, 6) % 3 > 0, "auxiliary": "denoising"},
    "skipping": {"previous_timesteps": torch.arange(6) // 2 - 1},
    "one timestep": {"timesteps": 3},
}


def compare_in_one_graph(name, backend, options, autocast=None, **settings):
    """Loss and gradients of network and loss in one graph, beside the same without a compiler."""
    family = families.build(name)
    scheduler = family.scheduler(**settings)
    x_0 = family.data((NUM_STEPS, NUM_STEPS))
    arguments = {"timesteps": torch.arange(NUM_STEPS), "hybrid_coeff": 0.1, **options}
    times = arguments.pop("timesteps")
    x_t = family.corrupt(x_0, times + 1)
    torch.manual_seed(0)
    num_outputs = 2 if settings.get("prediction_type") == "logistic" else 5
    network = torch.nn.Sequential(torch.nn.Embedding(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, num_outputs))

    def loss(x_t):
        output = d3pm_loss(scheduler, network(x_t), x_0, x_t, times, **arguments)
        return output.loss.mean(), output.vb, output.cross_entropy

    results = []
    for function in (loss, torch.compile(loss, backend=backend, fullgraph=True)):
        network.zero_grad()
        with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
            total, vb, cross_entropy = function(x_t)
        assert not vb.requires_grad and not cross_entropy.requires_grad
        total.backward()
        results.append([total, vb, cross_entropy, *(parameter.grad.clone() for parameter in network.parameters())])
    for compiled, expected in zip(*results[::-1]):
        torch.testing.assert_close(compiled, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in families.NAMES if name != "blockwise"])  # which has no fused loss
def test_one_graph(name):
    compare_in_one_graph(name, "aot_eager", {})


def recording(targets):
    """A backend that writes down what the graph calls, and runs it as it is."""

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    return backend


@pytest.mark.parametrize("name, operator", [("absorbing", False), ("uniform", False), ("gaussian", True)])
def test_what_is_traced(name, operator):
    """The losses of short rows are in the graph as operations that a compiler can join, those that look at values as one operator."""
    scheduler, targets = families.build(name).scheduler(), []
    compiled = torch.compile(d3pm_loss, backend=recording(targets), fullgraph=True)
    for batch_size in (2, 3):  # the second graph has symbols in place of sizes
        x_0 = torch.zeros(batch_size, 4, dtype=torch.long)
        logits = torch.randn(batch_size, 4, 5, requires_grad=True)
        arguments = scheduler, logits, x_0, x_0, torch.arange(batch_size)
        torch.testing.assert_close(compiled(*arguments).loss, d3pm_loss(*arguments).loss, atol=1e-6, rtol=1e-6)
    assert ("d3pm_hf.fused_loss.default" in targets) == operator


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_noise_in_a_graph(name):
    """A compiled `add_noise` draws the float64 uniforms of one that is not; inductor's own have the grid of float32."""
    scheduler, targets = D3PMScheduler(5, 10, name, beta_schedule="cosine"), []

    def draw_twice(x_0):
        return scheduler.add_noise(x_0, timesteps), scheduler.add_noise(x_0, timesteps)

    timesteps = torch.full((8,), 3)
    x_0, results = torch.ones(8, 16, dtype=torch.long), []
    for function in (draw_twice, torch.compile(draw_twice, backend=recording(targets), fullgraph=True)):
        torch.manual_seed(0)
        results.append(function(x_0))
    assert all(torch.equal(*pair) for pair in zip(*results)) and not torch.equal(*results[1])
    assert targets.count("d3pm_hf.uniforms.default") == 2


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian"])
def test_one_graph_with_options(name, option):
    compare_in_one_graph(
        name, "eager", OPTIONS[option], x0_posterior="denoising" if option == "skipping" else "leave_one_out"
    )


def test_one_graph_of_a_logistic_head_in_autocast():
    compare_in_one_graph("gaussian", "eager", {}, autocast=torch.bfloat16, prediction_type="logistic")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian"])
def test_one_graph_of_inductor(name):
    compare_in_one_graph(name, "inductor", {})


def test_the_plain_loss_is_refused_with_the_reason():
    """The plain loss looks at values, which one graph cannot: the error says so."""
    family = families.build("uniform")
    x_0 = family.data((NUM_STEPS, 4))
    scheduler = family.scheduler()
    _, step = create_step(scheduler, x_0, adds_noise=False)
    with without_fused_loss(scheduler.transition):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="use a transition with a fused loss"):
            torch.compile(step, backend="eager", fullgraph=True)(x_0, None)


def test_handles():
    """A transition is found by its handle as long as it lives; a copy from another process gets one of its own."""
    transition = families.build("uniform").transition
    assert transition_of(transition.handle).kernel() is transition.kernel()
    copy = pickle.loads(pickle.dumps(transition))
    assert copy.handle != transition.handle and transition_of(copy.handle).kernel() is copy.kernel()
    handle = copy.handle
    del copy
    gc.collect()
    with pytest.raises(ValueError, match=f"no transition with the handle {handle}"):
        transition_of(handle)
