# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Rewards: particles have the tilted distribution, and estimate its normalizer without bias."""

import families
import pytest
import torch
import toy
from test_guidance import total_variation

from d3pm_hf import D3PMImagePipeline, D3PMScheduler, D3PMTextPipeline, TextDenoiser, create_unet
from d3pm_hf.samplers import SamplerStep, particle_filter
from d3pm_hf.samplers.particle_filter import Reward, look_ahead


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose information")
T, LENGTH, K = 6, 2, 4
FAST = ["absorbing", "uniform", "gaussian", "autoregressive"]
SLOW = [name for name in families.NAMES if name not in FAST and not name.endswith("-sparse")]
REWARDS = torch.randn(K**LENGTH, generator=torch.Generator().manual_seed(5))  # of every state


def reward(x):
    return REWARDS[toy.indices(x, K)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def build(name, num_steps=T, **options):
    steps = range(num_steps)
    betas = [0.5 for t in steps] if name in ("gaussian", "matrix") else [1 / (num_steps - t) for t in steps]
    family = families.build(name, K, [0.5] * (LENGTH - 1) + [1] if name in families.BY_POSITION else betas)
    return family, family.scheduler(**options), toy.ExactDenoiser(family, toy.joint(family, LENGTH))


def steer(scheduler, network, batch_size, num_particles, **options):
    """Samples, and the estimates of log Z."""
    report, timesteps = {}, range(len(scheduler) - 1, -1, -1)
    x_T = scheduler.sample_prior((batch_size * num_particles, LENGTH), seeded(1))
    samples = particle_filter(
        scheduler,
        TextDenoiser(network),
        x_T,
        timesteps,
        num_particles=num_particles,
        reward_fn=reward,
        report=report,
        generator=seeded(),
        **options,
    )
    return samples, report["log_normalizer"].double()


def frequencies(samples):
    return toy.indices(samples, K).bincount(minlength=K**LENGTH) / len(samples)


def tilt(law):
    """p(x) exp(r(x)) / Z, and Z."""
    weights = law * REWARDS.double().exp()
    return weights / weights.sum(), weights.sum()


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_particles_have_the_tilted_law(name):
    family, scheduler, network = build(name)
    law = toy.ancestral_law(family, network, range(len(scheduler) - 1, -1, -1))
    target, normalizer = tilt(law)
    samples, log_normalizer = steer(scheduler, network, 4000, 64)
    assert total_variation(frequencies(samples), target) < 0.05  # 4000 exact draws are 0.02 away
    assert total_variation(frequencies(samples), law) > 0.1
    ratios = log_normalizer.exp() / normalizer
    assert (ratios.mean() - 1).abs() < 3 * ratios.std() / len(ratios) ** 0.5 and ratios.std() < 0.3


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_the_normalizer_has_no_bias_with_few_particles(name):
    family, scheduler, network = build(name)
    normalizer = tilt(toy.ancestral_law(family, network, range(T - 1, -1, -1)))[1]
    ratios = steer(scheduler, network, 20000, 3)[1].exp() / normalizer
    assert (ratios.mean() - 1).abs() < 3 * ratios.std() / len(ratios) ** 0.5


@pytest.mark.parametrize("options", [{"x0_posterior": "denoising"}, {"prediction_type": "previous"}])
def test_other_outputs_of_the_network(options):
    family, scheduler, exact = build("uniform", **options)
    plain = family.scheduler()

    class Other(toy.ExactDenoiser):
        def forward(self, input_ids, timestep, return_dict=True):
            logits = exact(input_ids, timestep)[0]
            if "prediction_type" in options:
                return (plain.posterior_logits(logits, timestep.item(), input_ids),)
            return (logits + plain.transition.log_likelihood(input_ids, 0, timestep.item() + 1),)

    network = Other(family, toy.joint(family, LENGTH))
    target, normalizer = tilt(toy.ancestral_law(family, exact, range(T - 1, -1, -1)))
    samples, log_normalizer = steer(scheduler, network, 2000, 64)
    assert total_variation(frequencies(samples), target) < 0.05
    assert log_normalizer.exp().mean() == pytest.approx(normalizer.item(), rel=0.05)


@pytest.mark.parametrize("known_path", ["noised", "clamped"])
@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_a_reward_of_samples_with_a_known_token(name, known_path):
    family, scheduler, network = build(name, num_steps=24)
    probs, num_rows = toy.joint(family, LENGTH), 600 * 32
    known = torch.tensor([[0, 0]]).expand(num_rows, -1)
    is_known = torch.tensor([[True, False]]).expand(num_rows, -1)
    options = {"known": known, "is_known": is_known, "known_path": known_path}
    samples, log_normalizer = steer(scheduler, network, 600, 32, **options)
    given = torch.where(ref_states()[:, 0] == 0, probs.flatten(), 0)
    target, normalizer = tilt(given / given.sum())
    assert (samples[:, 0] == 0).all() and total_variation(frequencies(samples), target) < 0.05
    if known_path == "noised":  # p(known) Z
        assert log_normalizer.exp().mean() == pytest.approx((given.sum() * normalizer).item(), rel=0.1)
    elif name == "absorbing":  # the path of what is known is certain
        assert log_normalizer.exp().mean() == pytest.approx(normalizer.item(), rel=0.05)


def ref_states():
    return torch.cartesian_prod(*[torch.arange(K)] * LENGTH)


def test_the_reward_is_seen_ahead():
    """What is seen of it from x_s is the mean over x_0 given x_s; at the data it is the reward itself."""
    family, scheduler, network = build("absorbing")
    x_t = torch.full((4000, LENGTH), family.mask)
    x_s = x_t.clone()
    x_s[:, 0] = 2
    logits = network(x_t, torch.tensor(4))[0]
    seen = look_ahead(scheduler, SamplerStep(0, 4, 2, x_t, logits, x_s), Reward(reward, 0.5), 1, seeded())
    p = logits[0, 1].softmax(-1).double()
    expected = (p * (0.5 * REWARDS.double().view(K, K)[2]).exp()).sum()
    assert seen.double().exp().mean() == pytest.approx(expected.item(), rel=0.02)
    alike = look_ahead(scheduler, SamplerStep(0, 4, 2, x_t, logits, x_s), Reward(reward), 4, seeded()).view(-1, 4)
    assert (alike == alike[:, :1]).all() and len(alike.unique()) > 1  # particles with the same state look alike
    x_0 = torch.zeros_like(x_t)
    assert torch.equal(look_ahead(scheduler, SamplerStep(0, 0, -1, x_t, logits, x_0), Reward(reward), 1), reward(x_0))


def make_pipelines():
    _, scheduler, network = build("uniform")
    text = D3PMTextPipeline(network, scheduler, sequence_length=LENGTH)
    torch.manual_seed(0)
    image = D3PMImagePipeline(create_unet("tiny", K, 4, 1), D3PMScheduler(K, 10))
    for pipeline in (text, image):
        pipeline.set_progress_bar_config(disable=True)
    return text, image


def test_pipelines_give_the_normalizer_back():
    text, image = make_pipelines()
    generators = [seeded(i) for i in range(4)]
    options = {"num_particles": 4, "reward_scale": 2.0, "output_type": "latent", "batch_size": 2}
    output = text(reward_fn=reward, num_return_sequences=2, generator=generators, **options)
    assert output.sequences.shape == (4, LENGTH) and output.log_normalizer.shape == (4,)
    alone = text(reward_fn=reward, generator=seeded(3), **{**options, "batch_size": 1})
    assert torch.equal(alone.sequences[0], output.sequences[3])
    torch.testing.assert_close(alone.log_normalizer[0], output.log_normalizer[3])
    output = image(reward_fn=lambda x: x.float().mean((1, 2, 3)), num_inference_steps=3, **options)
    assert output.images.shape == (2, 1, 4, 4) and output.log_normalizer.shape == (2,)
    pair = image(reward_fn=lambda x: x.float().mean((1, 2, 3)), num_inference_steps=3, return_dict=False, **options)
    assert len(pair) == 2 and pair[1].shape == (2,)
    plain = image(num_inference_steps=3, output_type="latent")
    assert plain.log_normalizer is None and len(plain.to_tuple()) == 1


def test_a_prompt_is_seen_by_the_reward():
    text, _ = make_pipelines()
    seen = []

    def watch(x):
        seen.append(x)
        return x.float().sum(-1)

    given, is_given = torch.tensor([[3, 0]]), torch.tensor([[True, False]])
    states = text.sample_states(2, (LENGTH,), given=given, is_given=is_given, reward_fn=watch, num_particles=3)
    assert (torch.cat(seen)[:, 0] == 3).all() and (states[:, 0] == 3).all()


def test_sentences():
    text, _ = make_pipelines()
    with pytest.raises(
        ValueError, match="reward_fn needs several particles to choose from: pass num_particles of at l"
    ):
        text(reward_fn=reward)
    with pytest.raises(
        ValueError, match="got reward_fn, and the sampler takes no reward_fn: leave out one of the two"
    ):
        text(reward_fn=reward, num_particles=2, sampler=lambda scheduler, *args, num_particles, **others: None)
    with pytest.raises(
        ValueError, match=r"reward_fn returned .* for 2 rows: return one number per row, a floating-poin"
    ):
        text(reward_fn=lambda x: x, num_particles=2)
    with pytest.raises(ValueError, match="reward_fn returned NaN or infinity: return finite numbers"):
        text(reward_fn=lambda x: x.sum(-1) * torch.nan, num_particles=2)
