# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Correctors: moves that keep the distribution of x_t, and samplers with them."""

from dataclasses import replace
from functools import partial

import families
import pytest
import reference as ref
import torch
import toy

from d3pm_hf import (
    ClassifierGuidance,
    D3PMImagePipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    character_tokenizer,
    create_text_model,
    create_unet,
)
from d3pm_hf.samplers import predictor_corrector
from d3pm_hf.samplers.predictor_corrector import conditional_logits, find_question, forward_backward, gibbs
from d3pm_hf.samplers.walk import Walk


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
K, LENGTH = 4, 3
NAMES = [name for name in families.NAMES if name not in families.BY_POSITION]
READINGS = ["leave_one_out", "denoising"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def gibbs_kernel(scheduler, predict, t, states):
    """Probabilities `[n, K ** N]` of what one position, chosen at random, leads to from each of `states` `[n, N]`."""
    num_classes, length = scheduler.config.num_classes, states.shape[1]
    kernel = torch.zeros(len(states), num_classes**length, dtype=torch.float64)
    for i in range(length):
        asked, (state, is_everywhere) = states.clone(), find_question(scheduler, t, states.shape)
        asked[:, i] = states[:, i] if state is None else state
        p = conditional_logits(scheduler, predict(asked, t), asked, t, is_everywhere)[:, i].exp()  # [n, K]
        for k in range(num_classes):
            moved = states.clone()
            moved[:, i] = k
            kernel.scatter_add_(1, toy.indices(moved, num_classes)[:, None], p[:, k : k + 1] / length)
    return kernel


@pytest.mark.parametrize("x0_posterior", READINGS)
@pytest.mark.parametrize("betas", ["plain", "middle"])
@pytest.mark.parametrize("name", [*NAMES, "blockwise"])
def test_gibbs_keeps_the_distribution(name, betas, x0_posterior):
    betas = families.BETAS[betas][:LENGTH] if name == "blockwise" else betas
    family = families.build(name, K, betas)
    probs, scheduler = toy.joint(family, LENGTH), family.scheduler(x0_posterior=x0_posterior)
    predict = toy.ExactFunction(family, probs, x0_posterior)
    for t in (0, 1, 2) if name == "blockwise" else (0, 1, 3, 5):
        law = toy.noisy_law(family, probs, t + 1)
        reached = law > 0
        kernel = gibbs_kernel(scheduler, predict, t, ref.states(K, LENGTH)[reached])
        torch.testing.assert_close(kernel.sum(1), torch.ones_like(kernel[:, 0]), rtol=0, atol=1e-6)
        torch.testing.assert_close(law[reached] @ kernel, law, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gibbs_moves_wherever_the_process_does(name):
    """One position after the other reaches every state that noise can lead to, also under an absorbing process."""
    family = families.build(name, K, [0.6] * 4)
    probs, scheduler = toy.joint(family, 2), family.scheduler()
    t, predict = 3, toy.ExactFunction(family, probs)
    law = toy.noisy_law(family, probs, t + 1)
    kernel = gibbs_kernel(scheduler, predict, t, ref.states(K, 2))
    start = torch.zeros_like(law)
    start[law.argmax()] = 1
    for _ in range(60):
        start = start @ kernel
    assert (start - law).abs().sum() / 2 < 0.02


@pytest.mark.parametrize("name", NAMES)
def test_forward_backward_keeps_the_distribution_of_one_position(name):
    family = families.build(name, K)
    probs, scheduler = toy.joint(family, 1), family.scheduler()
    predict, states = toy.ExactFunction(family, probs), ref.states(K, 1)
    for t, s in ((0, -1), (3, 2), (5, -1), (5, 1)):
        law = toy.noisy_law(family, probs, t + 1)
        kernel = forward_backward_kernel(scheduler, predict, t, s, states[law > 0])
        torch.testing.assert_close(law[law > 0] @ kernel, law, rtol=0, atol=1e-6)


def forward_backward_kernel(scheduler, predict, t, s, states):
    """Probabilities `[n, K ** N]` of what a step to s and back leads to from each of `states` `[n, N]`."""
    every = ref.states(scheduler.config.num_classes, states.shape[1])
    down = scheduler.posterior_logits(predict(states, t), t, states, s).double()  # [n, N, K]
    up = scheduler.transition.log_marginal(every, s + 1, t + 1, torch.float64)  # [K ** N, N, K]
    down, up = (
        torch.stack([rows[:, i, every[:, i]] for i in range(every.shape[1])]).sum(0).exp() for rows in (down, up)
    )
    return down @ up


@pytest.mark.parametrize("name", ["absorbing", "uniform", "absorbing_uniform", "nearest_neighbor"])
def test_the_error_of_forward_backward_is_of_second_order(name):
    errors = []
    for num_steps in (16, 32, 64):
        betas = [1 - 0.25 ** (1 / num_steps)] * num_steps  # the same noise at the end
        family = families.build(name, 3, betas)
        probs, scheduler = toy.joint(family, 2, seed=1), family.scheduler()
        t = num_steps // 2 - 1
        law = toy.noisy_law(family, probs, t + 1)
        kernel = forward_backward_kernel(scheduler, toy.ExactFunction(family, probs), t, t - 1, ref.states(3, 2))
        errors.append((law @ kernel - law).abs().sum() / 2)
    assert 1e-5 < errors[0] < 0.01
    assert 3.4 < errors[0] / errors[1] < 4.8 and 3.6 < errors[1] / errors[2] < 4.4


@pytest.mark.parametrize(
    "name", ["absorbing", "absorbing_in_data", "uniform", "gaussian", "band_diagonal", "matrix", "blockwise"]
)
def test_draws_of_correctors(name):
    family = families.build(name, K, families.BETAS["plain"][:LENGTH] if name == "blockwise" else "plain")
    probs, scheduler = toy.joint(family, LENGTH), family.scheduler()
    predict, t, count = toy.ExactFunction(family, probs), 2, 4000
    law = toy.noisy_law(family, probs, t + 1)
    start = torch.multinomial(law, 1, generator=seeded(3))[0]
    x_t = ref.states(K, LENGTH)[start].expand(count, -1)
    drawn = gibbs(Walk(scheduler, predict, x_t, [t], generator=seeded()), x_t, t)
    right = gibbs_kernel(scheduler, predict, t, x_t[:1])
    assert ref.fit(toy.indices(drawn, K)[:, None], right) > 1e-3
    drawn = forward_backward(Walk(scheduler, predict, x_t, [t], generator=seeded()), x_t, t, 0)
    right = forward_backward_kernel(scheduler, predict, t, 0, x_t[:1])
    assert ref.fit(toy.indices(drawn, K)[:, None], right) > 1e-3


def test_gibbs_draws_free_positions_only():
    family = families.build("uniform", K)
    scheduler, predict = family.scheduler(), toy.ExactFunction(family, toy.joint(family, LENGTH))
    x_t = torch.zeros(500, LENGTH, dtype=torch.long)
    is_fixed = torch.zeros_like(x_t, dtype=torch.bool)
    is_fixed[:, 1] = True
    is_fixed[:10] = True
    walk = Walk(scheduler, predict, x_t, [5], generator=seeded())
    drawn = gibbs(replace(walk, known=x_t, is_known=is_fixed), x_t, 5, num_positions=5)
    changed = drawn != x_t
    assert not changed[is_fixed].any() and changed[10:, 0].any() and changed[10:, 2].any()
    assert ((gibbs(walk, x_t, 5) != x_t).sum(1) <= 1).all()


def corrected_law(scheduler, predict, timesteps, kernel_of, correct_steps):
    """Exact probabilities of what `predictor_corrector` draws from the prior."""
    states = ref.states(K, LENGTH)
    law = scheduler.transition.log_prior.double().exp()[states].prod(-1)
    for t, s, r in zip(timesteps, [*timesteps[1:], -1], [*timesteps[2:], -1, -1]):
        reached = law > 1e-300
        log_p = scheduler.posterior_logits(predict(states[reached], t), t, states[reached], s)
        law = law[reached] @ torch.stack([log_p[:, i, states[:, i]] for i in range(LENGTH)]).sum(0).exp()
        for _ in range(correct_steps if s >= 0 else 0):
            reached = law > 1e-300
            law = law[reached] @ kernel_of(s, r, states[reached])
    return law


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
@pytest.mark.parametrize("corrector", ["gibbs", "forward_backward"])
def test_correctors_bring_samples_closer_to_the_data(name, corrector):
    family = families.build(name, K, "end")
    probs, scheduler = toy.joint(family, LENGTH, seed=2), family.scheduler()
    predict, timesteps = toy.ExactFunction(family, probs), [5, 3, 1, 0]
    if corrector == "gibbs":
        kernel_of = lambda t, s, x: gibbs_kernel(scheduler, predict, t, x)  # noqa: E731
    else:
        kernel_of = lambda t, s, x: forward_backward_kernel(scheduler, predict, t, s, x)  # noqa: E731
    distances = {}
    for correct_steps in (0, 3):
        law = corrected_law(scheduler, predict, timesteps, kernel_of, correct_steps)
        x_T = scheduler.sample_prior((6000, LENGTH), seeded(1))
        options = {"corrector": corrector, "correct_steps": correct_steps}
        drawn = predictor_corrector(scheduler, predict, x_T, timesteps, generator=seeded(), **options)
        assert ref.fit(toy.indices(drawn, K)[:, None], law[None]) > 1e-3
        distances[correct_steps] = (law - probs.flatten()).abs().sum() / 2
    assert distances[3] < (0.7 if corrector == "gibbs" else 0.9) * distances[0]


@pytest.mark.parametrize("name", families.NAMES)
def test_where_noise_leads(name):
    for betas in families.BETAS:
        family = families.build(name, K, betas)
        transition = family.transition
        data = [k for k in range(K) if k != family.mask]
        rounding = 1e-13 if "rate" in name or "neighbor" in name else 0
        for n in range(7):
            rows = ref.stretch(family.matrices, 0, n)[:, data] > rounding  # [P, x_0, x_n]
            assert transition.leads_everywhere(n) == bool((rows.all(1) | ~rows.any(1)).all())


def test_where_noise_leads_in_a_large_vocabulary():
    steps = {"trained_betas": [0.3, 0.4]}
    embeddings = torch.randn(5000, 8, generator=seeded())
    connected = D3PMScheduler(5000, 2, "nearest_neighbor", embeddings=embeddings, num_neighbors=8, **steps)
    assert connected.transition.leads_everywhere(2) and not connected.transition.leads_everywhere(0)


# In a pipeline

CALLS = [
    ("predictor_corrector", {}),
    ("predictor_corrector", {"corrector": "gibbs", "correct_steps": 2}),
    ("predictor_corrector", {"corrector": "gibbs", "num_positions": 4}),
    ("remasking", {"eta": 0.5}),
    ("confidence", {}),
    ("confidence", {"measure": "entropy", "choice_temperature": 2.0}),
]
calls = pytest.mark.parametrize(("sampler", "options"), CALLS, ids=str)


def make(transition="absorbing", num_class_labels=None, **options):
    torch.manual_seed(0)
    classes = {} if num_class_labels is None else {"num_class_labels": num_class_labels}
    model = create_text_model("tiny", 28, initializer_range=0.5, **classes).eval()
    scheduler = D3PMScheduler(28, 20, transition, "cosine", **options)
    pipeline = D3PMTextPipeline(model, scheduler, character_tokenizer(), sequence_length=8, **classes)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@calls
def test_a_sample_is_the_same_alone(sampler, options):
    pipeline = make()
    arguments = {"sampler": sampler, "sampler_kwargs": options, "num_inference_steps": 5}
    batch = pipeline(batch_size=3, generator=[seeded(i) for i in range(3)], **arguments).texts
    assert batch == [pipeline(generator=seeded(i), **arguments).texts[0] for i in range(3)]
    prompts = ["abcd", "ab", "abcdefgh"]
    arguments |= {"max_new_tokens": 5, "temperature": 2.0}
    batch = pipeline(prompts, generator=[seeded(i) for i in range(3)], **arguments).texts
    assert batch == [pipeline(one, generator=seeded(i), **arguments).texts[0] for i, one in enumerate(prompts)]
    assert all(text.startswith(prompt) for text, prompt in zip(batch, prompts))
    arguments.pop("max_new_tokens")
    prompts = ["a[MASK][MASK]d", "[MASK]bcdefg[MASK]", "hh[MASK]"]
    batch = pipeline(prompts, generator=[seeded(i) for i in range(3)], **arguments).texts
    assert batch == [pipeline(one, generator=seeded(i), **arguments).texts[0] for i, one in enumerate(prompts)]
    assert batch[0][0] + batch[0][3] == "ad" and batch[1][1:7] == "bcdefg" and batch[2][:2] == "hh"


@calls
def test_callbacks_see_the_steps_and_can_end_them(sampler, options):
    pipeline, seen = make(), []

    def watch(pipeline, index, timestep, tensors):
        seen.append((index, int(timestep), tensors["latents"]))
        pipeline._interrupt = index == 2

    arguments = {"sampler": sampler, "sampler_kwargs": options, "num_inference_steps": 5, "output_type": "latent"}
    ended = pipeline(batch_size=2, generator=seeded(), callback_on_step_end=watch, **arguments).sequences
    assert [index for index, _, _ in seen] == [0, 1, 2] and torch.equal(seen[-1][2], ended)
    whole = pipeline(batch_size=2, generator=seeded(), **arguments).sequences
    assert (whole != 27).all() and not torch.equal(whole, ended)
    fill = lambda pipeline, index, timestep, tensors: {"latents": torch.zeros_like(tensors["latents"])}  # noqa: E731
    assert (pipeline(batch_size=2, callback_on_step_end=fill, **arguments).sequences == 0).all()


@calls
def test_guided_samples(sampler, options):
    pipeline = make(num_class_labels=3)
    rows = []
    pipeline.text_model.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    arguments = {"sampler": sampler, "sampler_kwargs": options, "num_inference_steps": 4, "guidance_scale": 3.0}
    labels = [2, 0]
    batch = pipeline(class_labels=labels, generator=[seeded(i) for i in range(2)], **arguments).texts
    assert set(rows) == {4}
    assert batch == [pipeline(class_labels=c, generator=seeded(i), **arguments).texts[0] for i, c in enumerate(labels)]


@pytest.mark.parametrize("options", [options for name, options in CALLS if name == "predictor_corrector"], ids=str)
def test_calls_of_the_network(options):
    pipeline, rows = make("uniform"), []
    pipeline.text_model.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    pipeline(batch_size=3, sampler="predictor_corrector", sampler_kwargs=options, num_inference_steps=5)
    assert rows == [3] * (5 + 4 * options.get("correct_steps", 1))
    ancestral = pipeline(batch_size=3, generator=seeded(), sampler="ancestral").texts
    none = {**options, "correct_steps": 0}
    assert (
        pipeline(batch_size=3, generator=seeded(), sampler="predictor_corrector", sampler_kwargs=none).texts
        == ancestral
    )


@pytest.mark.parametrize("corrector", ["gibbs", "forward_backward"])
@pytest.mark.parametrize("prediction_type", ["x0", "logistic"])
def test_images(corrector, prediction_type):
    torch.manual_seed(0)
    unet = create_unet("tiny", 8, 8, 1, prediction_type)
    scheduler = D3PMScheduler(8, 6, "gaussian", "linear", prediction_type=prediction_type)
    pipeline = D3PMImagePipeline(unet, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    image, mask = torch.full((1, 1, 8, 8), 5), torch.zeros(1, 1, 8, 8)
    mask[..., 4:] = 1
    states = pipeline(
        batch_size=2,
        image=image,
        mask_image=mask,
        sampler="predictor_corrector",
        sampler_kwargs={"corrector": corrector},
        output_type="latent",
    ).images
    assert states.shape == (2, 1, 8, 8) and (states[..., :4] == 5).all()


def test_a_classifier_is_followed_forward_and_backward():
    pipeline = make("uniform")
    classifier = ClassifierGuidance(lambda x, timestep: 30.0 * (x == 3).float().mean(-1), scale=4.0)
    arguments = {"sampler": "predictor_corrector", "classifier": classifier, "num_inference_steps": 5, "batch_size": 4}
    states = pipeline(output_type="latent", generator=seeded(), **arguments).sequences
    assert (states == 3).float().mean() > 0.5
    with pytest.raises(ValueError, match="corrector is 'gibbs', which does not follow a classifier: leave out the"):
        pipeline(sampler_kwargs={"corrector": "gibbs"}, **arguments)


def test_sentences():
    pipeline = make()
    draw = partial(pipeline, sampler="predictor_corrector", num_inference_steps=2)
    with pytest.raises(ValueError, match="num_positions is 2, and corrector is 'forward_backward', which moves all"):
        draw(sampler_kwargs={"num_positions": 2})
    with pytest.raises(
        ValueError, match="sampler_kwargs holds 'steps', and the sampler takes corrector, correct_steps"
    ):
        draw(sampler_kwargs={"steps": 2})
    with pytest.raises(ValueError, match="sampler_kwargs holds 'eta', and the sampler takes no options: leave it out"):
        pipeline(sampler_kwargs={"eta": 0.5})
    network, process = create_text_model("tiny", 28), D3PMScheduler(28, 8, "autoregressive")
    with pytest.raises(ValueError, match="the process is 'autoregressive', whose tokens no corrector can change"):
        D3PMTextPipeline(network, process)(sampler="predictor_corrector")
    pipeline = D3PMTextPipeline(network, D3PMScheduler(28, 8, "uniform", "cosine", prediction_type="previous"))
    with pytest.raises(ValueError, match="prediction_type is 'previous', which says nothing about x_0: choose"):
        pipeline(sampler="predictor_corrector", sampler_kwargs={"corrector": "gibbs"})
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(sampler="predictor_corrector", output_type="latent", sequence_length=4).sequences.shape == (1, 4)
