# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Every family, every question it answers, against the dense reference, for all pairs of times."""

import math
import weakref

import families
import pytest
import reference as ref
import torch
from families import NUM_STEPS, SHAPES
from hypothesis import given, settings
from hypothesis import strategies as st

from d3pm_hf.transitions import dense, rank_one, toeplitz
from d3pm_hf.transitions import rates as rate_module


# These processes need not end near their prior, of which the scheduler warns.
pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
NEIGHBORS = ["nearest_neighbor", "nearest_neighbor-sparse", "absorbing_nearest_neighbor-sparse"]
PAIRS = torch.tensor([(s, t) for s in range(NUM_STEPS + 1) for t in range(s, NUM_STEPS + 1)])  # s = t included
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
CASES = [
    pytest.param(name, num_classes, betas, id=f"{name}-{num_classes}-{betas}")
    for name in families.NAMES
    for num_classes, betas in [(2, "plain"), (3, "end"), (5, "middle"), (5, "plain"), (8, "end")]
    if families.can_take(name, num_classes)
]


def assert_probs(log_probs, expected, dtype):
    """Close in probability, and -inf exactly where the reference says impossible."""
    assert log_probs.dtype == dtype and log_probs.shape == expected.shape
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(log_probs.double().exp(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(log_probs == -torch.inf, expected == 0)


def states_at_all_pairs(family, shape, seed=0):
    """One sample for each pair of times."""
    return torch.randint(
        family.num_classes, (len(PAIRS), *SHAPES[shape][1:]), generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.cover
@pytest.mark.parametrize("name, num_classes, betas", CASES)
@pytest.mark.parametrize("shape", SHAPES)
@DTYPES
def test_log_marginal_of_states(name, num_classes, betas, shape, dtype):
    if not families.can_take(name, num_classes, shape):
        pytest.skip("an order of text")
    family = families.build(name, num_classes, betas)
    x, (s, t) = states_at_all_pairs(family, shape), PAIRS.unbind(-1)
    got = family.transition.log_marginal(x, s, t, dtype)
    assert_probs(got, ref.marginal(family.matrices, x, s, t), dtype)


@pytest.mark.cover
@pytest.mark.parametrize("name, num_classes, betas", CASES)
@pytest.mark.parametrize("shape", SHAPES)
@DTYPES
def test_log_marginal_of_distributions(name, num_classes, betas, shape, dtype):
    if not families.can_take(name, num_classes, shape):
        pytest.skip("an order of text")
    family = families.build(name, num_classes, betas)
    (s, t), size = PAIRS.unbind(-1), (len(PAIRS), *SHAPES[shape][1:], num_classes)
    log_probs = 3 * torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_probs[..., 0] = -torch.inf  # impossible states go in
    log_probs = log_probs.log_softmax(-1).to(dtype)
    got = family.transition.log_marginal(log_probs, s, t)
    assert_probs(got, ref.marginal(family.matrices, log_probs.double().exp(), s, t), dtype)


@pytest.mark.cover
@pytest.mark.parametrize("name, num_classes, betas", CASES)
@pytest.mark.parametrize("shape", SHAPES)
@DTYPES
def test_log_likelihood(name, num_classes, betas, shape, dtype):
    if not families.can_take(name, num_classes, shape):
        pytest.skip("an order of text")
    family = families.build(name, num_classes, betas)
    transition = family.transition
    x_t, (s, t) = states_at_all_pairs(family, shape), PAIRS.unbind(-1)
    assert_probs(transition.log_likelihood(x_t, s, t, dtype), ref.likelihood(family.matrices, x_t, s, t), dtype)
    x_t, t = x_t[t > 0], t[t > 0]
    expected = ref.likelihood(family.matrices, x_t, t - 1, t)
    assert_probs(transition.log_likelihood(x_t, None, t, dtype), expected, dtype)


@pytest.mark.parametrize("name", families.NAMES)
def test_times_are_integers_or_tensors(name):
    family = families.build(name)
    transition, x = family.transition, states_at_all_pairs(family, "text")[:3]
    many = torch.full((3,), 4)
    for s, t in [(2, 4), (torch.full((3,), 2), 4), (2, many), (torch.tensor(2), torch.tensor(4))]:
        got = transition.log_marginal(x, s, t, torch.float64)
        assert_probs(got, ref.marginal(family.matrices, x, 2, 4), torch.float64)
        got = transition.log_likelihood(x, s, t, torch.float64)
        assert_probs(got, ref.likelihood(family.matrices, x, 2, 4), torch.float64)
    for t in (4, many):
        got = transition.log_likelihood(x, None, t, torch.float64)
        assert_probs(got, ref.likelihood(family.matrices, x, 3, 4), torch.float64)


@pytest.mark.parametrize("name, num_classes, betas", CASES)
def test_matrix(name, num_classes, betas):
    family = families.build(name, num_classes, betas)
    transition = family.transition
    for s, t in PAIRS.tolist():
        got = transition.matrix(s, t)
        expected = ref.stretch(family.matrices, s, t)
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, expected.reshape(got.shape), atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(got.sum(-1), torch.ones(got.shape[:-1]).double(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name, num_classes, betas", CASES)
def test_prior_is_stationary(name, num_classes, betas):
    family = families.build(name, num_classes, betas)
    transition = family.transition
    prior = transition.log_prior.exp()
    assert prior.dtype == torch.float64
    assert prior.sum().item() == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(prior, family.prior, atol=1e-10, rtol=0)
    if name not in ("matrix", *families.BY_POSITION):  # the first has no one law
        for n in range(1, NUM_STEPS + 1):
            torch.testing.assert_close(prior @ transition.matrix(n - 1, n), prior, atol=1e-10, rtol=0)


def test_one_matrix_for_all_steps():
    from d3pm_hf import D3PMScheduler

    Q = families.stochastic(4, 4)
    transition = D3PMScheduler(4, 5, transition="matrix", transition_matrices=Q).transition
    assert transition.num_steps == 5
    torch.testing.assert_close(transition.matrix(1, 4), Q @ Q @ Q, atol=1e-12, rtol=0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_any_times(data):
    """The shapes, times and schedules that nobody thought of."""
    name = data.draw(st.sampled_from([n for n in families.NAMES if n not in families.BY_POSITION]))
    betas = data.draw(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=5))
    family = families.build(name, data.draw(st.integers(3, 7)), betas)
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    t = torch.tensor(data.draw(st.lists(st.integers(0, len(betas)), min_size=shape[0], max_size=shape[0])))
    s = torch.tensor([data.draw(st.integers(0, n)) for n in t.tolist()])
    x = torch.randint(family.num_classes, shape, generator=torch.Generator().manual_seed(len(betas)))
    transition = family.transition
    for got, expected in [
        (transition.log_marginal(x, s, t, torch.float64), ref.marginal(family.matrices, x, s, t)),
        (transition.log_likelihood(x, s, t, torch.float64), ref.likelihood(family.matrices, x, s, t)),
    ]:
        torch.testing.assert_close(got.exp(), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["uniform", "absorbing", "stationary"])
def test_logarithms_keep_their_digits(name):
    """Steps of 1e-12, and a survival of 1e-54, to ten digits of the logarithm: no epsilon, no 1 - (1 - x)."""
    family = families.build(name, 4, [1e-12, 1e-9])
    pi, x = family.prior, torch.zeros(1, 1, dtype=torch.long)
    row = family.transition.log_marginal(x, 0, 2, torch.float64)[0, 0]
    expected = math.log(1e-12 + 1e-9 - 1e-21) + pi.log()
    torch.testing.assert_close(row[1:], expected[1:], rtol=1e-10, atol=0)
    family = families.build(name, 4, [1 - 2**-30] * 6)
    log_survival = -180 * math.log(2)
    column = family.transition.log_likelihood(x, 0, 6, torch.float64)[0, 0]
    if name == "absorbing":
        assert column[0].item() == pytest.approx(log_survival, rel=1e-10) and column[1] == -torch.inf
    else:
        torch.testing.assert_close(column, pi[:1].log().expand(4), rtol=1e-10, atol=0)


@families.needs_kernels
@pytest.mark.parametrize("name", ["uniform", "absorbing", "gaussian", "band_diagonal", "rate", *NEIGHBORS])
def test_300_states(name):
    family = families.build(name, 300, [0.02, 0.5, 0.9])
    x = torch.tensor([[0, 299, 150], [7, 128, 298]])
    s, t = torch.tensor([0, 1]), torch.tensor([2, 3])
    transition = family.transition
    for dtype in TOLERANCE:
        assert_close = torch.testing.assert_close
        tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        got = transition.log_marginal(x, s, t, dtype).double().exp()
        assert_close(got, ref.marginal(family.matrices, x, s, t), **tolerance)
        got = transition.log_likelihood(x, s, t, dtype).double().exp()
        assert_close(got, ref.likelihood(family.matrices, x, s, t), **tolerance)


@pytest.mark.parametrize(
    "name",
    [
        "absorbing",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("uniform", "absorbing_uniform", "stationary")),
    ],
)
def test_a_vocabulary_of_50258(name):
    """Rows by hand, in memory of the order of T + K."""
    K, T = 50258, 1000
    exponents = torch.full((T,), 0.002, dtype=torch.float64)
    pi = {
        "uniform": ref.stationary_mix(K),
        "absorbing": ref.stationary_mix(K, K - 1),
        "absorbing_uniform": ref.stationary_mix(K, K - 1, 0.25),
        "stationary": families.stochastic(K),
    }[name]
    transition = rank_one.RankOneTransition(pi, exponents)
    x, s, t = torch.tensor([[3], [K - 1]]), torch.tensor([0, 400]), torch.tensor([500, 1000])
    survival = torch.exp(-0.002 * (t - s).double())[:, None, None]
    own = torch.nn.functional.one_hot(x, K) * survival
    tolerance = {"atol": 1e-12, "rtol": 1e-10}
    row = transition.log_marginal(x, s, t, torch.float64).exp()
    torch.testing.assert_close(row, own + (1 - survival) * pi, **tolerance)
    column = transition.log_likelihood(x, s, t, torch.float64).exp()
    torch.testing.assert_close(column, own + (1 - survival) * pi[x][..., None], **tolerance)
    drawn = transition.sample(x.expand(2, 1000), t, generator=torch.Generator().manual_seed(0))
    stayed = (drawn[0] == 3).double().mean().item()
    assert stayed == pytest.approx(math.exp(-1), abs=0.06)
    tensors = [v for v in vars(transition).values() if torch.is_tensor(v)]
    tensors += [v for d in vars(transition).values() if isinstance(d, dict) for v in d.values() if torch.is_tensor(v)]
    assert tensors and sum(v.numel() for v in tensors) <= 12 * (T + K)


@pytest.mark.parametrize("num_tokens", [4, 27, 64])
def test_neighbor_graph_is_brute_force(num_tokens):
    vectors = families.embeddings(num_tokens, seed=num_tokens)
    got = rate_module.nearest_neighbor_rates(vectors, 3)
    got = got.to_dense() if got.layout != torch.strided else got
    torch.testing.assert_close(got.double(), ref.neighbor_rates(vectors, 3), atol=1e-7, rtol=0)


def test_twins_are_each_others_neighbors():
    """Equal embeddings: a token is never its own neighbor, so that every row of the graph has k entries."""
    vectors = families.embeddings(6).repeat_interleave(3, 0)
    rates = rate_module.nearest_neighbor_rates(vectors, 2)
    rates = rates.to_dense() if rates.layout != torch.strided else rates
    twins = torch.arange(18) // 3
    expected = (twins[:, None] == twins).double() - 3 * torch.eye(18).double()  # two twins each, A = (G + G') / 2k
    torch.testing.assert_close(rates.double(), expected / 2, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", families.NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_draws_follow_the_marginal(name, shape):
    if not families.can_take(name, shape=shape):
        pytest.skip("an order of text")
    family = families.build(name)
    x_0 = family.data((1, *SHAPES[shape][1:]), seed=1)
    source = torch.Generator().manual_seed(0)
    for t in (1, 3, NUM_STEPS):
        x_t = family.transition.sample(x_0.expand(4000, *x_0.shape[1:]), t, generator=source)
        assert x_t.dtype == torch.int64
        assert ref.fit(x_t, ref.marginal(family.matrices, x_0, 0, t)[0]) > 1e-3


@families.needs_kernels
@pytest.mark.parametrize("name", families.NAMES)
def test_draws_at_a_time_of_their_own(name):
    family = families.build(name)
    x_0 = family.data((1, NUM_STEPS), seed=2)
    t = torch.arange(NUM_STEPS + 1).repeat(1000)
    x_t = family.transition.sample(x_0.expand(len(t), -1), t, generator=torch.Generator().manual_seed(1))
    for n in range(NUM_STEPS + 1):
        assert ref.fit(x_t[t == n], ref.marginal(family.matrices, x_0, 0, n)[0]) > 1e-3
    assert (x_t[t == 0] == x_0).all()


@pytest.mark.parametrize("name", ["uniform", "stationary", "gaussian", "nearest_neighbor"])
def test_images_are_corrupted_too(name):
    """At the last step an image has forgotten x_0: it agrees with it as often as chance has it, and no more."""
    family = families.build(name, 8, [0.5] * 30 + [1.0])
    x_0 = family.data((40, 3, 5, 4))
    x_T = family.transition.sample(x_0, 31, generator=torch.Generator().manual_seed(0))
    chance = ref.marginal(family.matrices, x_0, 0, 31).gather(-1, x_0[..., None]).mean().item()
    assert chance < 0.2
    assert (x_T == x_0).double().mean().item() == pytest.approx(chance, abs=4 * math.sqrt(chance / x_0.numel()))


@pytest.mark.parametrize("denoising", [False, True], ids=["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", families.NAMES)
def test_reverse_draws_follow_eq_4(name, denoising):
    family = families.build(name)
    transition = family.transition
    meaning = "denoising" if denoising else "leave_one_out"
    x_0 = family.data((1, NUM_STEPS), seed=3)
    logits = torch.randn(1, NUM_STEPS, family.num_classes, generator=torch.Generator().manual_seed(4))
    source = torch.Generator().manual_seed(5)
    for s, t in [(0, 1), (0, 4), (2, 3), (1, 5), (3, 6)]:
        x_t = family.corrupt(x_0, t, seed=t)
        expected = ref.reverse(family.matrices, ref.forbid(logits, family.mask), x_t, s, t, x0_posterior=meaning)
        count = 1000 if name.endswith("-sparse") else 4000  # a row costs more there
        many = [v.expand(count, *v.shape[1:]) for v in (logits, x_t)]
        x_s = transition.sample_previous(*many, s, t, generator=source, denoising=denoising)
        assert ref.fit(x_s, expected[0]) > 1e-3, (s, t)


@pytest.mark.parametrize("name", families.NAMES)
def test_prior_draws(name):
    family = families.build(name)
    transition = family.transition
    x_T = transition.sample_prior((2000, 2, 3), generator=torch.Generator().manual_seed(0))
    assert x_T.shape == (2000, 2, 3)
    assert ref.fit(x_T.reshape(-1, 1), transition.log_prior.exp()[None]) > 1e-3


def test_bad_matrices_are_refused():
    rows = families.stochastic(3, 3)
    with pytest.raises(ValueError, match="row 0 .* sums to 1.1"):
        dense.MatrixTransition(rows * 1.1, 4)
    with pytest.raises(ValueError):
        dense.MatrixTransition(rows - torch.eye(3).double() * rows.max() * 2, 4)


@families.needs_kernels
def test_one_long_product_does_not_keep_the_others(monkeypatch):
    """A product over many steps holds a few matrices at a time, not one for each step."""
    process = toeplitz.ToeplitzTransition(
        toeplitz.gaussian_log_kernels(8, torch.full((200,), 0.1, dtype=torch.float64))
    ).kernel()
    alive, most = [], 0
    products = process._log_products

    def watched(s, t):
        nonlocal most
        for product in products(s, t):
            alive.append(weakref.ref(product))
            most = max(most, sum(one() is not None for one in alive))
            yield product

    monkeypatch.setattr(process, "_log_products", watched)
    process.log_stretch(0, 200)
    assert most <= 3
