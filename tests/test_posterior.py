# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Eq. 3, q(x_s | x_t, x_0), and the methods of `Transition` that follow from log_marginal, against the dense reference."""

import families
import pytest
import reference as ref
import torch
from families import NUM_STEPS, SHAPES

from d3pm_hf.transitions import Transition


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
PAIRS = torch.tensor([(s, t) for s in range(NUM_STEPS) for t in range(s + 1, NUM_STEPS + 1)])  # s < t
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
FAMILIES = pytest.mark.parametrize("name", families.NAMES)


def any_states(family, shape, seed):
    """One sample for each pair of times, with states that the process may rule out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(family.num_classes, (len(PAIRS), *shape[1:]), generator=generator)


@pytest.mark.parametrize("betas", families.BETAS)
@FAMILIES
def test_log_posterior(name, betas):
    """Every pair s < t, possible and impossible pairs of states, text and images, both precisions."""
    family = families.build(name, betas=betas)
    transition, (s, t) = family.transition, PAIRS.unbind(-1)
    for shape in SHAPES:
        if not families.can_take(name, shape=shape):
            continue
        x_0 = any_states(family, SHAPES[shape], seed=0)
        for x_t in (family.corrupt(x_0, t), any_states(family, SHAPES[shape], seed=1)):
            expected = ref.posterior(family.matrices, x_0, x_t, s, t).nan_to_num(0)  # 0 / 0 where x_t is impossible
            for dtype, tolerance in TOLERANCE.items():
                got = transition.log_posterior(x_0, x_t, s, t, dtype)
                assert got.dtype == dtype and torch.equal(got == -torch.inf, expected == 0)
                torch.testing.assert_close(got.double().exp(), expected, atol=tolerance, rtol=tolerance)


@FAMILIES
def test_one_step_is_the_default(name):
    family = families.build(name)
    x_0 = family.data((NUM_STEPS, NUM_STEPS))
    t = torch.arange(1, NUM_STEPS + 1)
    x_t = family.corrupt(x_0, t)
    expected = family.transition.log_posterior(x_0, x_t, t - 1, t)
    torch.testing.assert_close(family.transition.log_posterior(x_0, x_t, None, t), expected)
    one = family.transition.log_posterior(x_0[2:3], x_t[2:3], 2, 3)  # times as integers
    torch.testing.assert_close(one, expected[2:3])


@pytest.mark.parametrize("name", ["absorbing", "absorbing_in_data", "band_diagonal", "matrix", "autoregressive"])
def test_a_state_that_x_0_cannot_lead_to_has_no_posterior(name):
    """All entries are -inf, not NaN, and a sample beside it is not affected."""
    family = families.build(name)
    Q = ref.stretch(family.matrices, 0, 1)[-1]  # the last position is the one that an autoregressive step masks
    i, j = (Q == 0).nonzero()[0].tolist()
    x_0, x_t = torch.full((2, NUM_STEPS), i), torch.full((2, NUM_STEPS), j)
    x_t[1] = family.corrupt(x_0[1:], 1)
    got = family.transition.log_posterior(x_0, x_t, 0, 1)
    assert (got[0, -1] == -torch.inf).all()
    torch.testing.assert_close(got[1].exp().sum(-1), torch.ones(NUM_STEPS))


@FAMILIES
def test_defaults_of_the_base_class(name):
    """`matrix` and `prior_divergence` from `log_marginal` alone; families may have faster ones of their own."""
    family = families.build(name, betas="end")
    transition = family.transition
    if name not in families.BY_POSITION:  # their matrices depend on the position
        for s, t in [(0, 0), (0, 1), (2, 5), (0, NUM_STEPS)]:
            got = Transition.matrix(transition, s, t)
            torch.testing.assert_close(got, ref.stretch(family.matrices, s, t)[0], atol=1e-10, rtol=0)
    x_0 = family.data((2, NUM_STEPS))
    expected = ref.prior_kl(family.matrices, x_0, transition.log_prior.exp())
    torch.testing.assert_close(Transition.prior_divergence(transition, x_0), expected, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(transition.prior_divergence(x_0), expected, atol=1e-8, rtol=1e-8)
