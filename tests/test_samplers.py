# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Samplers: what they draw without a pipeline, and what a pipeline makes of them."""

import inspect
from functools import partial, wraps

import families
import pytest
import reference as ref
import torch
import toy

from d3pm_hf import D3PMScheduler, D3PMTextPipeline, TextDenoiser, create_text_model
from d3pm_hf.samplers import (
    Sampler,
    SamplerStep,
    ancestral,
    get_sampler,
    particle_filter,
    register_sampler,
    registered_samplers,
)
from d3pm_hf.samplers import sampler as samplers_base


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose information")
T, LENGTH, K = 6, 2, 4


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def build(name):
    """A process, its scheduler and the exact denoiser of data that can be enumerated."""
    betas = [0.3] * T if name in ("gaussian", "band_diagonal", "matrix") else [1 / (T - t) for t in range(T)]
    family = families.build(name, K, betas)
    return family, family.scheduler(), toy.ExactDenoiser(family, toy.joint(family, LENGTH))


@pytest.mark.parametrize("name", ["absorbing", "uniform", "absorbing_uniform", "gaussian", "nearest_neighbor"])
def test_ancestral_draws_its_law(name):
    family, scheduler, network = build(name)
    timesteps = [5, 3, 0]
    x_T = scheduler.sample_prior((4000, LENGTH), seeded(1))
    samples = ancestral(scheduler, TextDenoiser(network), x_T, timesteps, generator=seeded())
    law = toy.ancestral_law(family, network, timesteps)
    assert law.sum() == pytest.approx(1, abs=1e-6)
    assert ref.fit(toy.indices(samples, K)[:, None], law[None]) > 1e-3


@pytest.mark.parametrize("num_particles", [1, 8])
def test_a_particle_filter_without_a_pipeline(num_particles):
    """The distribution given a token at position 0 is the conditional one with particles, and not without."""
    betas = [1 / (64 - t) for t in range(64)]
    family = families.build("uniform", 3, betas)
    probs, scheduler = toy.joint(family, LENGTH, seed=1), family.scheduler()
    denoiser = TextDenoiser(toy.ExactDenoiser(family, probs))
    x_T = scheduler.sample_prior((2000 * num_particles, LENGTH), seeded(1))
    known = torch.tensor([[0, 0]]).expand_as(x_T)
    options = {"known": known, "is_known": torch.tensor([[True, False]]).expand_as(x_T), "generator": seeded()}
    samples = particle_filter(scheduler, denoiser, x_T, range(63, -1, -1), num_particles=num_particles, **options)
    assert samples.shape == (2000, LENGTH) and (samples[:, 0] == 0).all()
    right = probs[0] / probs[0].sum()
    distance = (samples[:, 1].bincount(minlength=3) / 2000 - right).abs().sum() / 2
    assert (distance < 0.03) if num_particles > 1 else (distance > 0.1)


def make():
    torch.manual_seed(0)
    model = create_text_model("tiny", K, initializer_range=0.5)
    pipeline = D3PMTextPipeline(model, D3PMScheduler(K, 20), sequence_length=LENGTH)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline, **options):
    return pipeline(**{"batch_size": 3, "generator": seeded(), "output_type": "latent", **options}).sequences


@families.needs_kernels
def test_a_pipeline_calls_its_sampler():
    pipeline = make()
    generator, scheduler = seeded(), pipeline.scheduler
    x_T = scheduler.sample_prior((3, LENGTH), generator)
    timesteps = scheduler.sampling_timesteps(7)
    alone = ancestral(scheduler, pipeline.denoiser, x_T, timesteps, generator=generator, temperature=0.5)
    for sampler in (None, "ancestral", ancestral):
        assert torch.equal(draw(pipeline, num_inference_steps=7, temperature=0.5, sampler=sampler), alone)
    few = draw(pipeline, num_inference_steps=7, num_particles=4)
    assert torch.equal(draw(pipeline, num_inference_steps=7, num_particles=4, sampler="particle_filter"), few)
    given = partial(particle_filter, num_particles=4)
    x_T = scheduler.sample_prior((12, LENGTH), generator := seeded())
    assert torch.equal(given(scheduler, pipeline.denoiser, x_T, timesteps, generator=generator), few)


def test_all_samplers_take_their_arguments_in_one_order():
    *shared, last = list(inspect.signature(Sampler.__call__).parameters)[1:]
    ours = [sampler for sampler in registered_samplers().values() if (sampler.__module__ or "").startswith("d3pm_hf.")]
    assert len(ours) == 8
    for sampler in ours:
        names = list(inspect.signature(sampler).parameters)
        assert names[: len(shared)] == shared and names[-1] == last
        assert sampler.__doc__ and sampler.__name__ in vars(inspect.getmodule(sampler))


def test_a_wrapper_around_a_sampler_is_called():
    """Also if it has the attributes of the sampler, as `functools.wraps` gives them, or is no function."""
    calls = []

    @wraps(ancestral)
    def logged(*args, **kwargs):
        calls.append("function")
        return ancestral(*args, **kwargs)

    class Logged:
        __hash__ = None

        def __call__(self, scheduler, denoiser, x_t, timesteps, **others):
            calls.append("object")
            return ancestral(scheduler, denoiser, x_t, timesteps, **others)

    expected = draw(make(), num_inference_steps=5, sampler="ancestral")
    for sampler in (logged, Logged()):
        assert torch.equal(draw(make(), num_inference_steps=5, sampler=sampler), expected)
    assert calls == ["function", "object"]


def test_callbacks_and_progress_of_a_sampler():
    pipeline, steps = make(), []
    scheduler, denoiser = pipeline.scheduler, pipeline.denoiser.eval()
    x_T = scheduler.sample_prior((3, LENGTH), seeded(1))

    def watch(step: SamplerStep):
        steps.append(step)
        return torch.zeros_like(step.prev_sample) if step.index == 1 else None

    x_0 = ancestral(scheduler, denoiser, x_T, [19, 9, 4, 0], generator=seeded(), callback=watch)
    assert [(step.index, step.timestep, step.previous_timestep) for step in steps] == [
        *((0, 19, 9), (1, 9, 4), (2, 4, 0), (3, 0, -1)),
    ]
    assert steps[0].sample is x_T and steps[1].sample is steps[0].prev_sample and x_0 is steps[3].prev_sample
    assert (steps[2].sample == 0).all()  # what the callback returned
    for step in steps:
        torch.testing.assert_close(step.model_output, denoiser(step.sample, torch.tensor(step.timestep)))
    reached = ancestral(
        scheduler, denoiser, x_T, [19, 9, 4, 0], generator=seeded(), progress_bar=lambda pairs: iter(pairs[:1])
    )
    assert torch.equal(reached, steps[0].prev_sample)


def test_condition_has_a_row_for_each_row():
    pipeline, seen = make(), []
    pipeline.text_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    mask = torch.tensor([[1, 1], [1, 0], [0, 1]])
    draw(pipeline, num_inference_steps=2, num_particles=2, num_return_sequences=2, condition={"attention_mask": mask})
    assert len(seen) == 2 and all(torch.equal(rows, mask.repeat_interleave(4, 0)) for rows in seen)
    draw(pipeline, num_inference_steps=1, condition={"attention_mask": mask[:1]})
    assert torch.equal(seen[-1], mask[:1].expand(3, -1))
    with pytest.raises(ValueError, match="got 2 rows of attention_mask for a batch of 3: pass one, or one per"):
        draw(pipeline, num_inference_steps=1, condition={"attention_mask": mask[:2]})


def test_registered_samplers(monkeypatch):
    monkeypatch.setattr(samplers_base._samplers, "_entries", {"ancestral": ancestral})

    def define():
        @register_sampler("mine")
        def mine(scheduler, denoiser, x_t, timesteps, **others):
            return torch.zeros_like(x_t)

        return mine

    define()
    again = define()  # as a notebook does when a cell is run again
    assert get_sampler("mine") is again and get_sampler(ancestral) is ancestral
    assert (draw(make(), sampler="mine") == 0).all()
    with pytest.raises(
        ValueError, match="the sampler 'ancestral' is part of the package: register yours under another name"
    ):
        register_sampler("ancestral")(again)
    with pytest.raises(
        ValueError,
        match="sampler is 'best': it must be one of ancestral, mine; register your own with `register_sampler`",
    ):
        draw(make(), sampler="best")


def test_sentences():
    pipeline = make()
    with pytest.raises(ValueError, match="num_particles is 3, and the sampler takes no num_particles: leave out one"):
        draw(pipeline, sampler="ancestral", num_particles=3)
    with pytest.raises(
        ValueError, match=r"states that the sampler returned have the shape \(2, 2\), .* needs \(3, 2\)"
    ):
        draw(pipeline, sampler=lambda scheduler, denoiser, x_t, timesteps, **others: x_t[:2])
    x_T = pipeline.scheduler.sample_prior((4, LENGTH))
    arguments = (pipeline.scheduler, pipeline.denoiser, x_T)
    with pytest.raises(ValueError, match="`timesteps` must be strictly decreasing, got 7 after 3"):
        ancestral(*arguments, [3, 7])
    with pytest.raises(
        ValueError,
        match=r"is_known is None: pass both known .torch.int64. and is_known .torch.bool., with the shape \(4, 2\)",
    ):
        ancestral(*arguments, [3], known=torch.zeros_like(x_T))
    with pytest.raises(
        ValueError, match="known is a Tensor of dtype torch.int64 and shape .1, 2.: pass both known .torch.int64. and"
    ):
        ancestral(*arguments, [3], known=torch.zeros_like(x_T[:1]), is_known=x_T > 0)
    with pytest.raises(ValueError, match="x_t has 4 rows: pass a multiple of num_particles=3"):
        particle_filter(*arguments, [3], num_particles=3)
