# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The whole bound on a toy of two positions whose exact denoiser is got by enumeration.

Eq. 4 wants the leave-one-out posterior. The denoising posterior does as well, if it is declared as such; taken for the
other it costs bits, unless the process is absorbing.
"""

import itertools
import math

import families
import pytest
import reference as ref
import torch

from d3pm_hf.likelihood import evaluate_bound
from d3pm_hf.losses import d3pm_loss, prior_loss


# These processes need not end near their prior, of which the scheduler warns.
pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
NAMES = [n for n in families.NAMES if n not in families.BY_POSITION]  # its length is its number of steps: see below
# Where x_t = m says nothing of x_0 and any other x_t says all, the two posteriors agree wherever it matters.
AGREEING = ("absorbing", "absorbing_in_data", "autoregressive")


def joint_of(family, length=2, seed=11):
    """p(x_0) with positions that tell of each other, and no mask."""
    shape = (family.num_classes,) * length
    joint = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(1.5).exp()
    if family.name.startswith("absorbing") or family.name == "autoregressive":
        mask = family.kwargs["mask_token_id"]
        for axis in range(length):
            joint.index_fill_(axis, torch.tensor([mask]), 0)
    return joint / joint.sum()


def bits_per_dim(total, joint):
    return (total / joint.ndim / math.log(2)).item()


def library_bound(family, joint, times, prediction, x0_posterior, reconstruction="posterior"):
    """The expectation of the library's loss over every x_0 and x_t, L_T included, in bits per dimension."""
    scheduler = family.scheduler(x0_posterior=x0_posterior, reconstruction=reconstruction)
    data = joint.flatten()
    x = ref.states(family.num_classes, joint.ndim)[data > 0]
    total = (data[data > 0] * prior_loss(scheduler, x).double().sum(-1)).sum()
    for s, t in itertools.pairwise(times):
        x_0, x_t, index, weights = ref.toy_terms(family.matrices, joint, t)
        logits = ref.exact_prediction(family.matrices, joint, t, prediction)[index].log()
        timesteps, previous = torch.full((len(x_0),), t - 1), torch.full((len(x_0),), s - 1)
        out = d3pm_loss(scheduler, logits, x_0, x_t, timesteps, previous_timesteps=previous)
        total += (weights * out.loss.sum(-1)).sum()
    return bits_per_dim(total, joint)


def reference_bound(family, joint, times, prediction, x0_posterior, reconstruction="posterior"):
    """The same from the reference alone."""
    options = {"x0_posterior": x0_posterior, "reconstruction": reconstruction}
    data, x = joint.flatten(), ref.states(family.num_classes, joint.ndim)
    total = (data * ref.prior_kl(family.matrices, x, family.prior).sum(-1))[data > 0].sum()
    for s, t in itertools.pairwise(times):
        x_0, x_t, index, weights = ref.toy_terms(family.matrices, joint, t)
        logits = ref.exact_prediction(family.matrices, joint, t, prediction)[index].log()
        total += (weights * ref.variational(family.matrices, logits, x_0, x_t, s, t, **options).sum(-1)).sum()
    return bits_per_dim(total, joint)


def toy(name):
    betas = [0.4] * 8 if name in ("gaussian", "band_diagonal", "matrix") else [*families.BETAS["plain"], 1.0]
    family = families.build(name, 4, betas)
    family.prior = family.transition.log_prior.exp()
    return family, joint_of(family)


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_both_meanings_reach_the_best_bound(name, stride):
    family, joint = toy(name)
    T = len(family.matrices)
    times = sorted({*range(0, T, stride), T})
    best = bits_per_dim(ref.best_bound(family.matrices, joint, family.prior, times), joint)
    for meaning in ("leave_one_out", "denoising"):
        assert library_bound(family, joint, times, meaning, meaning) == pytest.approx(best, abs=1e-10)
    assert best >= bits_per_dim(ref.entropy(joint), joint)  # no bound is below the truth


@pytest.mark.parametrize("name", NAMES)
def test_the_wrong_meaning_costs_bits(name):
    family, joint = toy(name)
    times = range(len(family.matrices) + 1)
    right = library_bound(family, joint, times, "leave_one_out", "leave_one_out")
    wrong = library_bound(family, joint, times, "denoising", "leave_one_out")
    assert wrong == pytest.approx(reference_bound(family, joint, times, "denoising", "leave_one_out"), abs=1e-10)
    if name in AGREEING:
        assert wrong == pytest.approx(right, abs=1e-10)
    else:
        assert wrong > right + 0.05


@pytest.mark.parametrize("name", ["uniform", "gaussian", "absorbing"])
def test_raw_reconstruction_wants_the_denoising_posterior(name):
    """Another model, another bound: with the raw output at the last step, only q(x_0 | x_1) reaches the best."""
    family, joint = toy(name)
    times = range(len(family.matrices) + 1)
    best = bits_per_dim(ref.best_bound(family.matrices, joint, family.prior, times), joint)
    got = library_bound(family, joint, times, "denoising", "denoising", "raw")
    assert got == pytest.approx(best, abs=1e-10)
    options = (family, joint, times, "leave_one_out", "leave_one_out", "raw")
    raw = library_bound(*options)
    assert raw > best + 0.05
    assert raw == pytest.approx(reference_bound(*options), abs=1e-10)


def test_left_to_right_has_no_gap():
    """One token at a time loses nothing: the bound is the entropy itself."""
    family = families.build("autoregressive", 4, [0.5] * 3)
    joint = joint_of(family, length=3)
    for meaning in ("leave_one_out", "denoising"):
        got = library_bound(family, joint, range(4), meaning, meaning)
        assert got == pytest.approx(bits_per_dim(ref.entropy(joint), joint), abs=1e-10)


@pytest.mark.parametrize("name", ["uniform", "absorbing", "nearest_neighbor"])
def test_one_position_reaches_the_entropy(name):
    """A single variable, forgotten by T: the bound is H(p_0), at any number of steps."""
    family, _ = toy(name)
    law = joint_of(family, length=1)
    for times in (range(len(family.matrices) + 1), [0, 2, len(family.matrices)], [0, len(family.matrices)]):
        got = library_bound(family, law, times, "leave_one_out", "leave_one_out")
        assert got == pytest.approx(bits_per_dim(ref.entropy(law), law), abs=1e-10)


@pytest.mark.parametrize("protocol", [{}, {"num_inference_steps": 3}, {"num_eval_timesteps": 3}], ids=str)
@pytest.mark.parametrize("name", ["uniform", "absorbing", "gaussian"])
def test_evaluated_bound_is_the_enumerated_one(name, protocol):
    """What a data set gives is, within its standard error, what enumeration gives; the error is not made large."""
    family, joint = toy(name)
    K, T = family.num_classes, len(family.matrices)
    tables = torch.stack(
        [ref.exact_prediction(family.matrices, joint, n, "leave_one_out") for n in range(1, T + 1)]
    ).log()

    def exact_model(x_t, timesteps):
        return tables[timesteps, x_t[:, 0] * K + x_t[:, 1]]

    drawn = torch.multinomial(joint.flatten(), 3000, replacement=True, generator=torch.Generator().manual_seed(0))
    batches = ref.states(K, 2)[drawn].split(1000)
    got = evaluate_bound(family.scheduler(), exact_model, batches, progress_bar=False, **protocol)
    assert got.num_examples == 3000 and got.num_elements == 6000
    times = [0, *(t + 1 for t in got.timesteps)]
    assert times[-1] == T and len(times) == 1 + protocol.get("num_inference_steps", T)
    best = bits_per_dim(ref.best_bound(family.matrices, joint, family.prior, times), joint)
    assert got.bits_per_dim_standard_error < 0.05
    assert abs(got.bits_per_dim - best) < 4 * got.bits_per_dim_standard_error


@pytest.mark.parametrize("name", ["uniform", "absorbing", "gaussian"])
def test_a_conditional_bound_is_the_enumerated_one(name):
    """Two classes with data of their own: given the class, the bound is the average of those of the classes.

    All terms of every x_0 are measured with weights that make the average exact, except for the noise.
    """
    family, _ = toy(name)
    joints = [joint_of(family, seed=seed) for seed in (11, 12)]
    K, T = family.num_classes, len(family.matrices)
    times = range(1, T + 1)
    tables = torch.stack(
        [
            torch.stack([ref.exact_prediction(family.matrices, joint, n, "leave_one_out") for n in times])
            for joint in joints
        ]
    ).log()  # [C, T, K * K, 2, K]

    def exact_model(x_t, timesteps, class_labels):
        return tables[class_labels, timesteps, x_t[:, 0] * K + x_t[:, 1]]

    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(3000) % 2
    drawn = torch.stack([torch.multinomial(joint.flatten(), 3000, True, generator=generator) for joint in joints])
    x_0 = ref.states(K, 2)[drawn[labels, torch.arange(3000)]]
    batches = [{"x_0": x, "condition": {"class_labels": c}} for x, c in zip(x_0.split(1000), labels.split(1000))]
    got = evaluate_bound(family.scheduler(), exact_model, batches, progress_bar=False)
    best = [ref.best_bound(family.matrices, joint, family.prior, [0, *times]) for joint in joints]
    best = sum(bits_per_dim(one, joint) for one, joint in zip(best, joints)) / 2
    assert abs(got.bits_per_dim - best) < 4 * got.bits_per_dim_standard_error < 0.2
    wrong = [{**batch, "condition": {"class_labels": 1 - batch["condition"]["class_labels"]}} for batch in batches]
    assert evaluate_bound(family.scheduler(), exact_model, wrong, progress_bar=False).bits_per_dim > best + 0.2


@pytest.mark.parametrize(
    "condition, words",
    [
        (
            {"class_labels": torch.tensor([1])},
            "condition\\['class_labels'\\] is a Tensor .* one row per example, 2 here",
        ),
        ({"class_labels": 3}, "condition\\['class_labels'\\] is 3: pass a tensor"),
        ([1, 2], "condition is \\[1, 2\\]: it must be a dictionary of tensors"),
    ],
)
def test_wrong_conditions(condition, words):
    family, _ = toy("absorbing")
    with pytest.raises(ValueError, match=words):
        batch = {"x_0": torch.zeros(2, 2, dtype=torch.long), "condition": condition}
        evaluate_bound(family.scheduler(), lambda x_t, t, **c: None, [batch], progress_bar=False)
