# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Classifier guidance: the distribution that it draws, by enumeration, and what it asks of the classifier."""

import copy
import functools

import families
import pytest
import reference as ref
import torch
import toy
from test_guidance import CLASS_PROBS, K, T, build, schedules, sparse_options, tilted, total_variation

from d3pm_hf import ClassifierGuidance, D3PMImagePipeline, D3PMScheduler, D3PMTextPipeline, create_unet
from d3pm_hf.samplers import ClassifierGuidedScheduler, ancestral, particle_filter


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose information")
CLEAN = {"input": "pred_original_sample"}


def exact_classifier(family, probs, class_probs, label):
    """log p(c | x) of states at any timestep, by Bayes."""

    @functools.cache
    def table(timestep):  # [K ** N]
        likelihood = ref.toy_likelihood(family.matrices, probs.ndim - 1, 0, timestep + 1).prod(-1)  # [x_0, x_n]
        joint = class_probs[:, None] * (probs.flatten(1) @ likelihood)  # [C, x_n]
        return (joint[label] / joint.sum(0)).log()

    return lambda x, timestep: table(timestep)[toy.indices(x, family.num_classes)]


def guided_law(family, probs, class_probs, label, timesteps, scale=1.0, **options):
    """The law of samples of a network without classes, under the exact classifier."""
    network = toy.ClassDenoiser(family, probs, class_probs)
    guidance = ClassifierGuidance(exact_classifier(family, probs, class_probs, label), scale, **options)
    scheduler = ClassifierGuidedScheduler(family.scheduler(), guidance)
    null = torch.tensor(network.null_class)
    return toy.step_law(scheduler, network, timesteps, probs.ndim - 1, class_labels=null)


@pytest.mark.parametrize("name", families.NAMES)
def test_one_position(name):
    """A noisy classifier gives p(x | c), and one of data the tilted law for every scale; for every number of steps."""
    family = build(name, 1)
    probs = sparse_options(family)
    for timesteps in schedules(family.scheduler())[: 2 if name.endswith("-sparse") else 3]:
        law = guided_law(family, probs, CLASS_PROBS, 1, timesteps)
        torch.testing.assert_close(law, probs[1], atol=1e-5, rtol=0)
        for scale in (0.0, 3.0):
            law = guided_law(family, probs, CLASS_PROBS, 1, timesteps, scale, **CLEAN)
            torch.testing.assert_close(law, tilted(probs, CLASS_PROBS, 1, scale), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian"])
def test_positions_with_labels_of_their_own(name):
    """log p(c | x) is a sum over positions: then it does not matter what a classifier reads at the others."""
    family = build(name, 2)
    one = torch.stack([toy.joint(family, 1, seed) for seed in range(3)])
    probs = torch.einsum("ak,bl->abkl", one, one).flatten(0, 1)
    class_probs = torch.outer(CLASS_PROBS, CLASS_PROBS).flatten()
    law = guided_law(family, probs, class_probs, 5, [T - 1, 9, 2])
    torch.testing.assert_close(law, probs[5].flatten(), atol=1e-5, rtol=0)
    law = guided_law(family, probs, class_probs, 5, [T - 1, 9, 2], 2.0, **CLEAN)
    torch.testing.assert_close(law, tilted(probs, class_probs, 5, 2.0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_dependent_positions(name):
    """A noisy classifier at scale 1 converges to p(x | c) with the number of steps, and one of data does not."""

    def distance(num_steps, scale=1.0, **options):
        family = build(name, 2, num_steps)
        probs = torch.stack([toy.joint(family, 2, seed) for seed in range(3)])
        law = guided_law(family, probs, CLASS_PROBS, 2, range(num_steps - 1, -1, -1), scale, **options)
        return total_variation(law, tilted(probs, CLASS_PROBS, 2, scale))

    assert distance(64) < 0.55 * distance(32) < 0.01
    assert distance(16, 2.0) > 0.02 and distance(16, **CLEAN) > 0.1


def additive(table):
    """log p(c | x) = sum_i f_i(x^i), of states and of one-hot states."""

    def log_prob(x, timestep):
        one_hot = x if x.is_floating_point() else torch.nn.functional.one_hot(x, K).float()
        return (one_hot * table).flatten(1).sum(-1)

    return log_prob


@pytest.mark.parametrize("options", [{}, CLEAN])
def test_the_gradient_is_exact_for_sums_over_positions(options):
    torch.manual_seed(0)
    scheduler, x_t = D3PMScheduler(K, 10, transition="uniform", beta_schedule="cosine"), torch.randint(0, K, (5, 3))
    logits, log_prob = torch.randn(5, 3, K), additive(torch.randn(3, K))
    posteriors = [
        ClassifierGuidedScheduler(
            scheduler, ClassifierGuidance(log_prob, 2.0, method=method, **options)
        ).posterior_logits(logits, 6, x_t, 3)
        for method in ("substitution", "gradient")
    ]
    torch.testing.assert_close(*posteriors)
    assert not torch.allclose(posteriors[0], scheduler.posterior_logits(logits, 6, x_t, 3), atol=0.1)


@pytest.mark.parametrize("sampler", [ancestral, particle_filter])
def test_samplers_draw_the_law(sampler):
    family = build("uniform", 1)
    probs, network = sparse_options(family), toy.ClassDenoiser(family, sparse_options(family), CLASS_PROBS)
    guidance = ClassifierGuidance(exact_classifier(family, probs, CLASS_PROBS, 1))
    scheduler = ClassifierGuidedScheduler(family.scheduler(), guidance)
    x_T = scheduler.sample_prior((4000, 1), torch.Generator().manual_seed(1))
    condition = {"class_labels": torch.full((4000,), 3)}
    generator = torch.Generator().manual_seed(0)
    samples = sampler(scheduler, network, x_T, [T - 1, 9, 2], condition=condition, generator=generator)
    assert ref.fit(samples, probs[1][None]) > 1e-3


def test_temperature_is_that_of_the_network():
    torch.manual_seed(0)
    scheduler, x_t = D3PMScheduler(K, 10, transition="uniform", beta_schedule="cosine"), torch.zeros(20000, 1).long()
    logits, guidance = torch.randn(K).expand(20000, 1, K), ClassifierGuidance(additive(torch.randn(1, K)))
    guided = ClassifierGuidedScheduler(scheduler, guidance)
    out = guided.step(logits, 6, x_t, previous_timestep=3, temperature=0.5, generator=torch.Generator().manual_seed(0))
    law = guided.posterior_logits(logits[:1] / 0.5, 6, x_t[:1], 3).exp()
    assert ref.fit(out.prev_sample, law[0]) > 1e-3
    torch.testing.assert_close(out.pred_logits, logits / 0.5)


def test_only_what_is_possible_is_evaluated():
    """A token that an absorbing process has revealed stays, and the classifier is not asked."""
    rows, scheduler = [], D3PMScheduler(K, 10)

    def log_prob(x, timestep):
        rows.append((len(x), timestep))
        return torch.zeros(len(x))

    x_t = torch.tensor([[0, K - 1, K - 1], [0, 1, 2]])  # two masks
    guided = ClassifierGuidedScheduler(scheduler, ClassifierGuidance(log_prob, batch_size=5))
    guided.posterior_logits(torch.zeros(2, 3, K), 6, x_t, 3)
    assert rows == [(5, 3), (3, 3)]
    assert len(guided) == 10 and guided.config is scheduler.config and copy.copy(guided).mask_token_id == K - 1


def test_an_image_pipeline_follows_a_classifier_of_data():
    """Brightness through the one-hot gradient, with logistic outputs, guidance of classes and a known half."""
    torch.manual_seed(0)
    unet = create_unet("tiny", 8, 4, 1, "logistic", num_class_labels=2)
    scheduler = D3PMScheduler(8, 20, transition="gaussian", beta_schedule="cosine", prediction_type="logistic")
    pipeline = D3PMImagePipeline(unet, scheduler, num_class_labels=2)
    pipeline.set_progress_bar_config(disable=True)
    bright = ClassifierGuidance(
        lambda x, t: (x @ torch.arange(8.0)).flatten(1).sum(-1), scale=2.0, method="gradient", **CLEAN
    )
    image, mask_image = torch.zeros(1, 1, 4, 4).long(), torch.zeros(1, 1, 4, 4)
    mask_image[..., :2] = 1
    options = {
        "image": image,
        "mask_image": mask_image,
        "class_labels": [0, 1],
        "guidance_scale": 2.0,
        "num_particles": 2,
    }
    for known_path, least in (("clamped", 6), ("noised", 5)):  # 3.5 without the classifier
        options["sampler_kwargs"] = {"known_path": known_path}
        options["generator"] = torch.Generator().manual_seed(0)
        levels = pipeline(classifier=bright, num_inference_steps=5, output_type="latent", **options).images
        assert (levels[..., 2:] == 0).all() and levels[..., :2].float().mean() > least


def test_a_prompt_is_seen_by_the_classifier():
    family = build("uniform", 1)
    model = toy.ClassDenoiser(family, torch.stack([toy.joint(family, 3, seed) for seed in range(2)]), CLASS_PROBS[:2])
    pipeline, seen = D3PMTextPipeline(model, family.scheduler(), sequence_length=3), []
    pipeline.set_progress_bar_config(disable=True)

    def log_prob(x, timestep):
        seen.append(x)
        return torch.zeros(len(x))

    states = pipeline.sample_states(
        2,
        (3,),
        given=torch.tensor([[2, 0, 0]]),
        is_given=torch.tensor([[True, False, False]]),
        num_inference_steps=3,
        condition={"class_labels": torch.tensor([0, 1])},
        classifier=ClassifierGuidance(log_prob),
    )
    assert (torch.cat(seen)[:, 0] == 2).all() and (states[:, 0] == 2).all()
    assert [len(x) for x in seen] == [2 * 2 * K] * 3


def test_sentences():
    scheduler, x_t, logits = D3PMScheduler(K, 10), torch.full((2, 3), K - 1), torch.zeros(2, 3, K)

    def complain(log_prob, **options):
        guided = ClassifierGuidedScheduler(scheduler, ClassifierGuidance(log_prob, **options))
        return guided.posterior_logits(logits, 6, x_t, 3)

    with pytest.raises(ValueError, match=r"log_prob_fn returned .* for 24 rows: return one log-probability per row"):
        complain(lambda x, t: torch.zeros(len(x), 2))
    with pytest.raises(
        ValueError, match="the classifier gives NaN or infinity at timestep 3: log_prob_fn must return"
    ):
        complain(lambda x, t: torch.full((len(x),), torch.nan))
    with pytest.raises(ValueError, match="the classifier excludes every state of a position at timestep 3: leave at"):
        complain(lambda x, t: torch.full((len(x),), -torch.inf))
    with pytest.raises(ValueError, match="log_prob_fn has no gradient with respect to the one-hot states: compute it"):
        complain(lambda x, t: torch.zeros(len(x)), method="gradient")
    previous = D3PMScheduler(K, 10, prediction_type="previous")
    with pytest.raises(ValueError, match="prediction_type is 'previous': there is no x_0 for the classifier to read;"):
        ClassifierGuidedScheduler(previous, ClassifierGuidance(len, **CLEAN))
