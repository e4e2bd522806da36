# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Classifier-free guidance: the distribution that it draws, by enumeration, and what it costs."""

import families
import pytest
import torch
import toy

from d3pm_hf import D3PMImagePipeline, D3PMScheduler, D3PMTextPipeline, create_unet
from d3pm_hf.samplers import ancestral, guide, particle_filter
from d3pm_hf.samplers.guidance import combine_logits


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose information")
K, T, NUM_CLASSES = 4, 24, 3
CLASS_PROBS = torch.tensor([0.5, 0.3, 0.2]).double()
SCALES = (-1.0, 0.0, 0.5, 1.0, 4.0)
# Processes that reach their prior, so that nothing but guidance can make a difference.
BETAS = {
    **dict.fromkeys(("gaussian", "band_diagonal", "matrix"), [0.05, 0.2, 0.4, 0.6] + [1.0] * (T - 4)),
    **dict.fromkeys(("nearest_neighbor", "nearest_neighbor-sparse"), [0.02] * (T - 1) + [1.0]),
}


def build(name, length, num_train_timesteps=T):
    """A process that ends in its prior."""
    if name in families.BY_POSITION:
        return families.build(name, K, [0.5] * (length - 1) + [1])
    betas = BETAS.get(name, [1 / (num_train_timesteps - t) for t in range(num_train_timesteps)])
    return families.build(name, K, betas)


def sparse_options(family):
    """Class probabilities p(x | c) `[C, K]` of one position, some of them zero, the mask among them."""
    probs = torch.stack([toy.joint(family, 1, seed) for seed in range(NUM_CLASSES)])
    probs[1, 0] = 0
    return probs / probs.sum(-1, keepdim=True)


def tilted(probs, class_probs, label, scale):
    """p(x) p(c | x)^w / Z, flat: proportional to p(x)^(1 - w) p(x | c)^w."""
    mixture = torch.einsum("c,c...->...", class_probs, probs).flatten()
    chosen = probs[label].flatten()
    weights = torch.where((mixture > 0) & (chosen > 0), mixture ** (1 - scale) * chosen**scale, 0)
    weights = mixture if scale == 0 else weights
    return weights / weights.sum()


def schedules(scheduler):
    """Timesteps of a few steps, of some, and of all."""
    return [scheduler.spaced_timesteps(n) for n in sorted({1, (len(scheduler) + 2) // 3, len(scheduler)})]


@pytest.mark.parametrize("name", families.NAMES)
def test_one_position_is_the_tilted_law(name):
    """For every scale, and every number of steps."""
    family = build(name, 1)
    probs, scheduler = sparse_options(family), family.scheduler()
    network = toy.ClassDenoiser(family, probs, CLASS_PROBS)
    for scale in SCALES:
        stepped, guided = guide(scheduler, network, scale)
        assert stepped is scheduler
        for timesteps in schedules(scheduler)[: 2 if name.endswith("-sparse") else 3]:
            law = toy.step_law(stepped, guided, timesteps, 1, class_labels=torch.tensor(1))
            torch.testing.assert_close(law, tilted(probs, CLASS_PROBS, 1, scale), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian", "absorbing_uniform", "autoregressive"])
def test_independent_positions_are_the_tilted_law(name):
    """A label for each position: p(x) and p(x | c) are products over positions."""
    family = build(name, 2)
    one, scheduler = sparse_options(family), family.scheduler()
    probs = torch.einsum("ak,bl->abkl", one, one).flatten(0, 1)  # the label of both positions is 3 a + b
    class_probs = torch.outer(CLASS_PROBS, CLASS_PROBS).flatten()
    network = toy.ClassDenoiser(family, probs, class_probs)
    for scale in (0.5, 3.0):
        for timesteps in schedules(scheduler):
            law = toy.step_law(*guide(scheduler, network, scale), timesteps, 2, class_labels=torch.tensor(5))
            torch.testing.assert_close(law, tilted(probs, class_probs, 5, scale), atol=1e-5, rtol=0)


@pytest.mark.parametrize("x0_posterior", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian"])
def test_both_meanings_of_logits(name, x0_posterior):
    family = build(name, 1)
    probs, scheduler = sparse_options(family), family.scheduler(x0_posterior=x0_posterior)
    exact = toy.ClassDenoiser(family, probs, CLASS_PROBS)

    class Denoising(toy.ClassDenoiser):
        def forward(self, x_t, timestep, class_labels):
            logits = exact(x_t, timestep, class_labels)
            if x0_posterior == "leave_one_out":
                return logits
            return logits + scheduler.transition.log_likelihood(x_t, 0, timestep.item() + 1)

    network = Denoising(family, probs, CLASS_PROBS)
    law = toy.step_law(*guide(scheduler, network, 2.5), [T - 1, 9, 1], 1, class_labels=torch.tensor(1))
    torch.testing.assert_close(law, tilted(probs, CLASS_PROBS, 1, 2.5), atol=1e-5, rtol=0)


ENDS = {
    "absorbing": {0.0: [0.002, 0.002], 1.0: [0.002, 0.007], 2.0: [0.014, 0.037], 4.0: [0.024, 0.068]},
    "uniform": {0.0: [0.004, 0.004], 1.0: [0.007, 0.008], 2.0: [0.047, 0.077], 4.0: [0.078, 0.242]},
}


def total_variation(law, target):
    return (law - target).abs().sum().item() / 2


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_dependent_positions_are_not(name):
    """Scales of 0 and 1 are as good as steps of independent positions are; others stay away from the tilted law."""
    family = build(name, 2, num_train_timesteps=64)
    probs = torch.stack([toy.joint(family, 2, seed) for seed in range(NUM_CLASSES)])
    scheduler, network = family.scheduler(), toy.ClassDenoiser(family, probs, CLASS_PROBS)

    def distance(scale, label):
        law = toy.step_law(*guide(scheduler, network, scale), range(63, -1, -1), 2, class_labels=torch.tensor(label))
        return round(total_variation(law, tilted(probs, CLASS_PROBS, label, scale)), 3)

    # The best and the worst class, as docs/source/en/conditions.md has them.
    found = {
        scale: sorted(distance(scale, label) for label in range(NUM_CLASSES))[:: NUM_CLASSES - 1]
        for scale in ENDS[name]
    }
    for scale, ends in ENDS[name].items():
        assert found[scale] == pytest.approx(ends, abs=0.0011)


@pytest.mark.parametrize("num_classes", [2, 5])
def test_logistic_outputs_are_combined_as_logits(num_classes):
    """Two numbers per element are a location and a scale for the scheduler, and logits for its copy."""
    scheduler = D3PMScheduler(
        num_classes, 10, transition="gaussian", beta_schedule="cosine", prediction_type="logistic"
    )
    torch.manual_seed(0)
    unet = create_unet("tiny", num_classes, 4, 1, "logistic", num_class_labels=3).eval()
    pipeline = D3PMImagePipeline(unet, scheduler, num_class_labels=3)
    x_t = torch.randint(0, num_classes, (2, 1, 4, 4))
    condition = {"class_labels": torch.tensor([2, 0])}
    stepped, guided = guide(scheduler, pipeline.denoiser, 3.0)
    assert stepped.transition is scheduler.transition and stepped.config.prediction_type == "x0"
    assert scheduler.config.prediction_type == "logistic"
    with torch.no_grad():
        c, u = (
            scheduler.logits(pipeline.denoiser(x_t, torch.tensor(4), class_labels=labels)).log_softmax(-1)
            for labels in (condition["class_labels"], torch.tensor([3, 3]))
        )
        combined = guided(x_t, torch.tensor(4), **condition)
    torch.testing.assert_close(combined.log_softmax(-1), (u + 3 * (c - u)).log_softmax(-1), rtol=1e-4, atol=1e-4)
    previews = []
    pipeline.set_progress_bar_config(disable=True)
    pipeline(
        class_labels=[2, 0],
        guidance_scale=3.0,
        num_inference_steps=2,
        callback_on_step_end=lambda *args: previews.append(args[-1]["pred_original_sample"]),
        callback_on_step_end_tensor_inputs=["pred_original_sample"],
    )
    assert len(previews) == 2 and previews[0].shape == x_t.shape


def test_previous_combines_logits_of_the_previous_state():
    family = build("uniform", 1)
    probs, x0_scheduler = sparse_options(family), family.scheduler()
    exact, scheduler = toy.ClassDenoiser(family, probs, CLASS_PROBS), family.scheduler(prediction_type="previous")

    class Previous(toy.ClassDenoiser):
        def forward(self, x_t, timestep, class_labels):
            return x0_scheduler.posterior_logits(exact(x_t, timestep, class_labels), timestep.item(), x_t)

    network, timesteps = Previous(family, probs, CLASS_PROBS), range(T - 1, -1, -1)
    for scale, target in ((0.0, tilted(probs, CLASS_PROBS, 1, 0.0)), (1.0, probs[1])):
        law = toy.step_law(*guide(scheduler, network, scale), timesteps, 1, class_labels=torch.tensor(1))
        torch.testing.assert_close(law, target, atol=1e-5, rtol=0)
    law = toy.step_law(*guide(scheduler, network, 2.0), timesteps, 1, class_labels=torch.tensor(1))
    assert law.sum() == pytest.approx(1) and total_variation(law, tilted(probs, CLASS_PROBS, 1, 2.0)) > 0.005


def test_combined_logits():
    c, u = torch.tensor([1.0, -torch.inf, 2.0, -torch.inf]), torch.tensor([0.0, 1.0, -torch.inf, -torch.inf])
    for scale, value in ((3.0, 3.0), (0.25, 0.25), (-1.0, -1.0)):
        expected = torch.tensor([value, -torch.inf, -torch.inf, -torch.inf])
        torch.testing.assert_close(combine_logits(c, u, scale), expected)


@pytest.mark.parametrize("sampler", [ancestral, particle_filter])
def test_calls_and_rows_of_the_network(sampler):
    family = build("uniform", 1)
    network = toy.ClassDenoiser(family, sparse_options(family), CLASS_PROBS)
    scheduler = family.scheduler()
    x_T = scheduler.sample_prior((10, 1), torch.Generator().manual_seed(0))
    for scale, rows in ((1.0, 10), (0.0, 10), (2.0, 20)):
        network.num_calls = network.num_rows = 0
        condition = {"class_labels": torch.ones(10).long()}
        sampler(*guide(scheduler, network, scale), x_T, [20, 10, 5, 0], condition=condition)
        assert (network.num_calls, network.num_rows) == (4, 4 * rows)


def make_pipeline(name="uniform", **options):
    family = build(name, 1)
    model = toy.ClassDenoiser(family, sparse_options(family), CLASS_PROBS)
    pipeline = D3PMTextPipeline(model, family.scheduler(**options), sequence_length=1)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("num_particles", [1, 2])
def test_a_pipeline_draws_the_tilted_law(num_particles):
    pipeline, target = make_pipeline(), tilted(sparse_options(build("uniform", 1)), CLASS_PROBS, 1, 2.0)
    options = {"class_labels": 1, "guidance_scale": 2.0, "num_inference_steps": 4, "num_particles": num_particles}
    samples = pipeline(
        batch_size=4000, generator=torch.Generator().manual_seed(0), output_type="latent", **options
    ).sequences
    assert (samples.flatten().bincount(minlength=K) / 4000 - target).abs().sum() / 2 < 0.02


def test_sentences():
    pipeline = make_pipeline()
    options = {"num_inference_steps": 1, "output_type": "latent"}
    with pytest.raises(
        ValueError, match="guidance_scale is 2.0, and there is no condition to guide to: pass class_la"
    ):
        pipeline(guidance_scale=2.0, **options)
    pipeline.text_model.null_class = None
    with pytest.raises(ValueError, match="the network has no class for 'no class': train it with num_class_embeds"):
        pipeline(guidance_scale=2.0, class_labels=1, **options)
    with pytest.raises(
        ValueError, match="denoiser is a function, and guidance_scale needs one with the method drop_con"
    ):
        guide(pipeline.scheduler, lambda x_t, t: x_t, 2.0)
    with pytest.raises(
        ValueError, match="there is no value of 'text' that stands for no condition: define the method"
    ):
        pipeline(guidance_scale=2.0, condition={"text": torch.zeros(1, 3)}, **options)
