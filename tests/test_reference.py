# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The reference against itself: identities that hold whatever the formulas are."""

import itertools
import math

import families
import pytest
import reference as ref
import torch


@pytest.fixture(params=families.NAMES)
def family(request):
    return families.build(request.param)


def test_rows_sum_to_one_and_are_not_negative(family):
    torch.testing.assert_close(family.matrices.sum(-1), torch.ones(family.matrices.shape[:-1]).double())
    assert (family.matrices >= 0).all()


def test_prior_is_stationary(family):
    if family.name not in ("matrix", "autoregressive"):  # the first has no one law, the last moves one position only
        for Q in family.matrices[:, 0]:
            torch.testing.assert_close(family.prior @ Q, family.prior)


@pytest.mark.parametrize("s, t", [(0, 1), (0, 6), (2, 3), (1, 5)])
def test_bayes(family, s, t):
    x_0 = family.data(families.SHAPES["text"])
    K, Q = family.num_classes, family.matrices
    # averaging q(x_s | x_t, x_0) over q(x_t | x_0) gives q(x_s | x_0)
    average = torch.zeros(*x_0.shape, K).double()
    for k in range(K):
        x_t = torch.full_like(x_0, k)
        weight = ref.marginal(Q, x_0, 0, t)[..., k, None]
        average += torch.where(weight > 0, weight * ref.posterior(Q, x_0, x_t, s, t), 0)
    torch.testing.assert_close(average, ref.marginal(Q, x_0, 0, s))
    # two legs make the whole way
    middle = (s + t) // 2
    whole = ref.marginal(Q, ref.marginal(Q, x_0, s, middle), middle, t)
    torch.testing.assert_close(whole, ref.marginal(Q, x_0, s, t))


def test_reverse_step_of_a_sure_network_is_the_posterior(family):
    x_0 = family.data(families.SHAPES["text"])
    x_t = family.corrupt(x_0, 5)
    sure = torch.nn.functional.one_hot(x_0, family.num_classes).double().log()
    for meaning in ("leave_one_out", "denoising"):
        p = ref.reverse(family.matrices, sure, x_t, 2, 5, x0_posterior=meaning)
        torch.testing.assert_close(p, ref.posterior(family.matrices, x_0, x_t, 2, 5))


@pytest.mark.parametrize("name", ["uniform", "absorbing", "gaussian", "nearest_neighbor"])
def test_one_position_reaches_the_entropy(name):
    """With one variable and its own law as the prediction, the bound is H(p_0) once x_T has forgotten x_0."""
    family = families.build(name, betas="end" if name != "gaussian" else [0.5] * 40)
    law = families.stochastic(family.num_classes, seed=7)
    if family.mask is not None:
        law[family.mask] = 0
    law = law / law.sum()
    bound = ref.best_bound(family.matrices, law, family.prior, range(len(family.matrices) + 1))
    assert bound == pytest.approx(ref.entropy(law).item(), abs=1e-6)


def test_logistic_is_a_difference_of_cdfs():
    loc, log_scale = torch.tensor([0.3, -0.9]).double(), torch.tensor([0.5, 1.5]).double()
    edges = torch.linspace(-1 - 1 / 15, 1 + 1 / 15, 17).double()
    cdf = torch.sigmoid((edges - loc[:, None]) / torch.exp(log_scale[:, None] - 2))
    torch.testing.assert_close(ref.logistic_logits(loc, log_scale, 16).exp(), cdf.diff(dim=-1))


def test_information():
    independent = torch.outer(families.stochastic(3), families.stochastic(4, seed=1))
    assert ref.mutual_information(independent).item() == pytest.approx(0, abs=1e-12)
    assert ref.mutual_information(torch.eye(4).double() / 4).item() == pytest.approx(math.log(4))


def test_a_cover_shows_every_pair_of_values():
    """`make test` runs a part of the products of parameters: each family with each shape that it can take, and so on."""
    names = {"name": families.NAMES, "shape": ["text", "image"], "num_classes": [2, 3, 5], "dtype": ["wide", "narrow"]}
    cases = [dict(zip(names, values)) for values in itertools.product(*names.values())]
    possible = [case for case in cases if families.can_take(case["name"], case["num_classes"], case["shape"])]
    chosen = [cases[index] for index in families.cover(cases)]
    assert all(case in possible for case in chosen) and len(chosen) < len(possible) / 2
    for one, other in itertools.combinations(names, 2):
        assert {(case[one], case[other]) for case in chosen} == {(case[one], case[other]) for case in possible}
