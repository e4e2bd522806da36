# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A fault in the middle of a call leaves the pipeline usable: the next call is that of a new pipeline."""

import gc
import io
from unittest.mock import patch

import pytest
import torch
from tqdm import tqdm

from d3pm_hf import D3PMScheduler, D3PMTextPipeline, create_text_model
from d3pm_hf.samplers import sampler as samplers_base


T, K, N, B = 8, 6, 8, 3  # an autoregressive process has a timestep for each position
FAULTY_CALL = 3  # of the network, from 1
SAMPLERS = {
    "ancestral": {},
    "positions_first": {},
    "first_hitting": {},
    "left_to_right": {},
    "particle_filter": {"num_particles": 2, "reward_fn": lambda x_0: (x_0 == 1).float().sum(-1)},
    "predictor_corrector": {},
    "confidence": {},
    "remasking": {"sampler_kwargs": {"eta": 0.5}},
}
GIBBS = {"sampler_kwargs": {"corrector": "gibbs", "correct_steps": 2}}
CALLS = [*SAMPLERS.items(), ("predictor_corrector", GIBBS)]
each = pytest.mark.parametrize(("sampler", "options"), CALLS, ids=[*SAMPLERS, "gibbs"])


def make(sampler):
    torch.manual_seed(0)
    is_causal = sampler == "left_to_right"
    causal = {"is_decoder": True, "timestep_conditioning": False, "backbone": "bert"} if is_causal else {}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = create_text_model("tiny", K, initializer_range=0.5, max_position_embeddings=N, **sizes, **causal)
    scheduler = D3PMScheduler(K, T, "autoregressive") if is_causal else D3PMScheduler(K, T)
    return D3PMTextPipeline(model.eval(), scheduler, sequence_length=N)


def draw(pipeline, sampler, options, **others):
    seeds = [torch.Generator().manual_seed(i) for i in range(B)]
    arguments = {"batch_size": B, "sampler": sampler, "generator": seeds, "output_type": "latent"}
    return pipeline(**arguments, **options, **others).sequences


def attributes(pipeline):
    """What a pipeline keeps between calls, besides what every call sets."""
    return {name: value for name, value in vars(pipeline).items() if name not in ("_interrupt", "_num_timesteps")}


@pytest.fixture
def pipeline(monkeypatch, sampler, options):
    """A pipeline before the fault, and checks of what is left of the fault behind it."""
    pipeline, fresh = make(sampler), make(sampler)
    before, bars = attributes(pipeline), []

    def progress_bar(self, steps):
        bars.append(tqdm(steps, file=io.StringIO()))
        return bars[-1]

    monkeypatch.setattr(D3PMTextPipeline, "progress_bar", progress_bar)
    with patch.object(D3PMTextPipeline, "maybe_free_model_hooks") as free:
        yield pipeline
    assert free.call_count == 1
    if not all(bar.disable for bar in bars):
        gc.collect()  # the traceback may still hold the loop
    assert all(bar.disable for bar in bars)  # as they are once closed
    assert attributes(pipeline) == before and torch.is_grad_enabled()
    assert not pipeline.text_model.training and not pipeline.text_model._forward_hooks
    for others in ({}, {} if sampler == "left_to_right" else {"num_inference_steps": 3}):
        again = draw(pipeline, sampler, options, **others)
        assert torch.equal(again, draw(fresh, sampler, options, **others)) and not pipeline.interrupt
    assert vars(pipeline.scheduler).keys() == vars(fresh.scheduler).keys()


def at_call(pipeline, act):
    """Calls `act(output)` in the call `FAULTY_CALL` of the network; what it returns replaces the output."""
    calls = []

    def hook(module, args, output):
        calls.append(len(args))
        return act(output) if len(calls) == FAULTY_CALL else None

    return pipeline.text_model.register_forward_hook(hook)


def test_all_samplers_are_here():
    registered = samplers_base._samplers._entries  # those of other tests may have no module
    ours = {name for name, sampler in registered.items() if (sampler.__module__ or "").startswith("d3pm_hf.")}
    assert set(SAMPLERS) == ours


@each
def test_a_callback_that_raises(pipeline, sampler, options):
    def fail(pipe, index, timestep, tensors):
        if index == 2:
            raise RuntimeError("stop here")

    expected = (ValueError, "no steps to call it after") if sampler == "first_hitting" else (RuntimeError, "stop here")
    with pytest.raises(expected[0], match=expected[1]):
        draw(pipeline, sampler, options, callback_on_step_end=fail)


@each
def test_outputs_that_are_not_numbers(pipeline, sampler, options):
    def poison(output):
        output[0][..., 0] = torch.nan

    handle = at_call(pipeline, poison)
    with pytest.raises(ValueError, match="the network's output holds NaN or infinity"):
        draw(pipeline, sampler, options)
    handle.remove()


@each
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_network_that_is_interrupted(pipeline, sampler, options, error):
    def fail(output):
        raise error("in the network")

    handle = at_call(pipeline, fail)
    with pytest.raises(error):
        draw(pipeline, sampler, options)
    handle.remove()


@each
def test_a_call_that_is_ended(pipeline, sampler, options):
    def end(output):
        pipeline._interrupt = True

    handle = at_call(pipeline, end)
    reached = draw(pipeline, sampler, options)
    handle.remove()
    assert reached.shape == (B, N) and pipeline.interrupt


@pytest.mark.parametrize(("sampler", "options"), [("particle_filter", SAMPLERS["particle_filter"])])
def test_a_reward_that_raises(pipeline, sampler, options):
    calls = []

    def reward(x_0):
        calls.append(len(x_0))
        if len(calls) == 9:
            raise RuntimeError("no reward")
        return x_0.float().sum(-1)

    with pytest.raises(RuntimeError, match="no reward"):
        draw(pipeline, sampler, {**options, "reward_fn": reward})


@pytest.mark.parametrize("sampler", ["ancestral", "positions_first"])
def test_offloading_after_a_fault(sampler):
    """The network is offloaded again, and the next call loads it."""
    pipeline = make(sampler)
    pipeline.enable_model_cpu_offload(device="cpu")
    hooks = pipeline._all_hooks

    def fail(output):
        raise RuntimeError("in the network")

    handle = at_call(pipeline, fail)
    with pytest.raises(RuntimeError, match="in the network"):
        draw(pipeline, sampler, {})
    handle.remove()
    assert pipeline._all_hooks is not hooks and len(pipeline._all_hooks) == len(hooks)
    assert torch.equal(draw(pipeline, sampler, {}), draw(make(sampler), sampler, {}))
