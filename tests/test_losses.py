# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The loss and its parts against the dense reference, its gradients, and the special cases that the paper names."""

import math
from contextlib import nullcontext

import families
import pytest
import reference as ref
import torch
import torch.nn.functional as F
from families import NUM_STEPS, SHAPES, without_fused_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from d3pm_hf import D3PMScheduler
from d3pm_hf.losses import d3pm_loss, prior_loss
from d3pm_hf.schedulers.logistic import logistic_logits


# These processes need not end near their prior, of which the scheduler warns.
pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
PAIRS = torch.tensor([(s, t) for s in range(NUM_STEPS) for t in range(s + 1, NUM_STEPS + 1)])  # steps behind, s < t
FIRST, LAST = 0, NUM_STEPS - 1  # public timesteps
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
MEANINGS = pytest.mark.parametrize("x0_posterior", ["leave_one_out", "denoising"])
RECONSTRUCTIONS = pytest.mark.parametrize("reconstruction", ["posterior", "raw"])
AUXILIARIES = pytest.mark.parametrize("auxiliary", ["raw", "denoising"])
FAMILIES = pytest.mark.parametrize("name", families.NAMES)


def draw_logits(shape, num_classes, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, num_classes, generator=generator, dtype=torch.float64)


def case(family, pairs, shape="text", seed=0):
    """x_0, x_t and logits, one sample for each pair of times."""
    x_0 = family.data((len(pairs), *SHAPES[shape][1:]), seed)
    x_t = family.corrupt(x_0, pairs[:, 1], seed)
    return x_0, x_t, draw_logits(x_0.shape, family.num_classes, seed)


def expected_parts(family, logits, x_0, x_t, pairs, meaning="leave_one_out", reconstruction="posterior", aux="raw"):
    (s, t), logits = pairs.unbind(-1), ref.forbid(logits, family.mask)
    options = {"x0_posterior": meaning, "reconstruction": reconstruction}
    vb = ref.variational(family.matrices, logits, x_0, x_t, s, t, **options)
    return vb, ref.cross_entropy(family.matrices, logits, x_0, x_t, t, aux, meaning)


@pytest.mark.cover
@pytest.mark.parametrize("shape", SHAPES)
@AUXILIARIES
@RECONSTRUCTIONS
@MEANINGS
@FAMILIES
def test_parts_and_gradients(name, x0_posterior, reconstruction, auxiliary, shape):
    """The fused and the plain form against the reference, in both precisions: values and gradients.

    Every pair of times at once, then one step at a time.
    """
    if not families.can_take(name, shape=shape):
        pytest.skip("an order of text")
    family = families.build(name)
    scheduler = family.scheduler(x0_posterior=x0_posterior, reconstruction=reconstruction)
    for dtype, tolerance in TOLERANCE.items():
        for pairs, skips in [(PAIRS, True), (PAIRS[PAIRS[:, 1] == PAIRS[:, 0] + 1], False)]:
            if name.endswith("sparse"):  # series for each vector: slow by the plain form
                pairs = pairs[::5]
            x_0, x_t, logits = case(family, pairs, shape)
            logits = logits.to(dtype)
            truth = logits.double().requires_grad_()
            vb, ce = expected_parts(family, truth, x_0, x_t, pairs, x0_posterior, reconstruction, auxiliary)
            weights = torch.rand(x_0.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
            ((vb + 0.3 * ce) * weights).sum().backward()
            previous = {"previous_timesteps": pairs[:, 0] - 1} if skips else {}
            options = {"hybrid_coeff": 0.3, "auxiliary": auxiliary, **previous}
            close = {"atol": tolerance, "rtol": tolerance}
            forms = [nullcontext()]
            if skips == (dtype == torch.float64):  # to save time, in one precision each
                forms.append(without_fused_loss(scheduler.transition))
            for form in forms:
                given_logits = logits.detach().clone().requires_grad_()
                with form:
                    out = d3pm_loss(scheduler, given_logits, x_0, x_t, pairs[:, 1] - 1, **options)
                assert out.loss.dtype == dtype and not out.vb.requires_grad and not out.cross_entropy.requires_grad
                torch.testing.assert_close(out.vb.double(), vb.detach(), **close)
                torch.testing.assert_close(out.cross_entropy.double(), ce.detach(), **close)
                torch.testing.assert_close(out.loss.detach().double(), (vb + 0.3 * ce).detach(), **close)
                (out.loss * weights.to(dtype)).sum().backward()
                torch.testing.assert_close(given_logits.grad.double(), truth.grad, **close)


@pytest.mark.cover
@pytest.mark.parametrize("scale", [300.0, 3000.0])
@AUXILIARIES
@RECONSTRUCTIONS
@MEANINGS
@FAMILIES
def test_networks_that_are_sure_of_something_wrong(name, x0_posterior, reconstruction, auxiliary, scale):
    """Probabilities like exp(-3000) are what a sharp logistic says of a far level: no power of two holds them."""
    family = families.build(name)
    scheduler = family.scheduler(x0_posterior=x0_posterior, reconstruction=reconstruction)
    x_0, x_t, logits = case(family, PAIRS)
    s, t = PAIRS.unbind(-1)
    for dtype, tolerance in TOLERANCE.items():
        given = (scale * logits).to(dtype).requires_grad_()
        truth = given.detach().double().requires_grad_()
        allowed = ref.forbid(truth, family.mask)
        options = {"x0_posterior": x0_posterior, "reconstruction": reconstruction}
        vb = ref.log_variational(family.matrices, allowed, x_0, x_t, s, t, **options)
        ce = ref.log_cross_entropy(family.matrices, allowed, x_0, x_t, t, auxiliary, x0_posterior)
        options = {"hybrid_coeff": 0.3, "auxiliary": auxiliary, "previous_timesteps": s - 1}
        out = d3pm_loss(scheduler, given, x_0, x_t, t - 1, **options)
        close = {"atol": tolerance * scale, "rtol": tolerance}
        torch.testing.assert_close(out.vb.double(), vb.detach(), **close)
        torch.testing.assert_close(out.cross_entropy.double(), ce.detach(), **close)
        out.loss.sum().backward()
        (vb + 0.3 * ce).sum().backward()
        torch.testing.assert_close(given.grad.double(), truth.grad, atol=tolerance * scale, rtol=tolerance)


@pytest.mark.cover
@pytest.mark.parametrize("betas", ["end", "middle"])
@pytest.mark.parametrize("num_classes", [2, 3, 8])
@MEANINGS
@FAMILIES
def test_steps_that_forget_everything(name, x0_posterior, num_classes, betas):
    if not families.can_take(name, num_classes):
        pytest.skip("too few tokens")
    family = families.build(name, num_classes, betas)
    scheduler = family.scheduler(x0_posterior=x0_posterior)
    x_0, x_t, logits = case(family, PAIRS)
    truth = logits.clone().requires_grad_()
    with without_fused_loss(scheduler.transition):
        options = {"hybrid_coeff": 1.0, "timesteps": PAIRS[:, 1] - 1, "previous_timesteps": PAIRS[:, 0] - 1}
        plain = d3pm_loss(scheduler, truth, x_0, x_t, **options)
    plain.loss.sum().backward()
    vb, ce = expected_parts(family, logits, x_0, x_t, PAIRS, x0_posterior)
    for dtype, tolerance in TOLERANCE.items():
        given_logits = logits.clone().to(dtype).requires_grad_()
        out = d3pm_loss(scheduler, given_logits, x_0, x_t, **options)
        torch.testing.assert_close(out.vb.double(), vb, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(out.loss.double(), vb + ce, atol=2 * tolerance, rtol=tolerance)
        out.loss.sum().backward()
        torch.testing.assert_close(given_logits.grad.double(), truth.grad, atol=2 * tolerance, rtol=tolerance)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_logits(data):
    """Confident, flat and wild networks at any shape, schedule and pair of times."""
    name = data.draw(st.sampled_from([n for n in families.NAMES if n not in families.BY_POSITION]))
    betas = data.draw(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5))
    family = families.build(name, data.draw(st.integers(3, 6)), betas)
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    t = data.draw(st.lists(st.integers(1, len(betas)), min_size=shape[0], max_size=shape[0]))
    pairs = torch.tensor([(data.draw(st.integers(0, n - 1)), n) for n in t])
    meaning = data.draw(st.sampled_from(["leave_one_out", "denoising"]))
    x_0 = family.data(shape, seed=len(t))
    x_t = family.corrupt(x_0, pairs[:, 1], seed=len(betas))
    logits = draw_logits(x_0.shape, family.num_classes, seed=1, scale=data.draw(st.sampled_from([0.0, 1.0, 10.0])))
    vb, _ = expected_parts(family, logits, x_0, x_t, pairs, meaning)
    scheduler = family.scheduler(x0_posterior=meaning)
    out = d3pm_loss(scheduler, logits, x_0, x_t, pairs[:, 1] - 1, previous_timesteps=pairs[:, 0] - 1)
    torch.testing.assert_close(out.loss, vb, atol=1e-9, rtol=1e-9)


@pytest.mark.cover
@pytest.mark.parametrize("shape", SHAPES)
@RECONSTRUCTIONS
@MEANINGS
@FAMILIES
def test_posterior_logits(name, x0_posterior, reconstruction, shape):
    """Eq. 4 itself, normalized, for every s < t."""
    if not families.can_take(name, shape=shape):
        pytest.skip("an order of text")
    family = families.build(name, betas="middle")
    options = {"x0_posterior": x0_posterior, "reconstruction": reconstruction}
    scheduler = family.scheduler(**options)
    for s, t in PAIRS.tolist():
        x_0, x_t, logits = case(family, torch.tensor([[s, t]] * 4), shape, seed=t)
        expected = ref.reverse(family.matrices, ref.forbid(logits, family.mask), x_t, s, t, **options)
        for dtype, tolerance in TOLERANCE.items():
            got = scheduler.posterior_logits(logits.to(dtype), t - 1, x_t, previous_timestep=s - 1)
            torch.testing.assert_close(got.double().exp(), expected, atol=tolerance, rtol=tolerance)
            assert torch.equal(got == -torch.inf, expected == 0)


@pytest.mark.cover
@RECONSTRUCTIONS
@MEANINGS
@FAMILIES
def test_posterior_logits_far_apart(name, x0_posterior, reconstruction):
    """Where the network says exp(-3000), so does the reverse step."""
    family = families.build(name)
    options = {"x0_posterior": x0_posterior, "reconstruction": reconstruction}
    scheduler = family.scheduler(**options)
    for s, t in PAIRS.tolist():
        _, x_t, logits = case(family, torch.tensor([[s, t]] * 4), seed=t)
        for dtype, tolerance in TOLERANCE.items():
            given = (1000 * logits).to(dtype)
            expected = ref.log_reverse(family.matrices, ref.forbid(given, family.mask), x_t, s, t, **options)
            got = scheduler.posterior_logits(given, t - 1, x_t, previous_timestep=s - 1).double()
            possible = expected > -1e29
            assert torch.equal(got > -torch.inf, possible)
            torch.testing.assert_close(got[possible], expected[possible], atol=1000 * tolerance, rtol=tolerance)


def test_gradcheck_entry_by_entry():
    """The slow check, on the two closed forms."""
    for name in ("uniform", "absorbing"):
        family = families.build(name, 3)
        pairs = torch.tensor([(0, 1), (2, 5)])
        x_0, x_t, logits = case(family, pairs)
        scheduler = family.scheduler()

        def loss(logits):
            times = {"timesteps": pairs[:, 1] - 1, "previous_timesteps": pairs[:, 0] - 1}
            return d3pm_loss(scheduler, logits, x_0, x_t, hybrid_coeff=0.1, **times).loss

        assert torch.autograd.gradcheck(loss, (logits.requires_grad_(),))


@pytest.mark.cover
@DTYPES
@MEANINGS
@FAMILIES
def test_a_perfect_network_pays_nothing(name, x0_posterior, dtype):
    family = families.build(name)
    scheduler = family.scheduler(x0_posterior=x0_posterior)
    x_0, x_t, _ = case(family, PAIRS)
    times = {"timesteps": PAIRS[:, 1] - 1, "previous_timesteps": PAIRS[:, 0] - 1}
    truth = F.one_hot(x_0, family.num_classes).to(dtype)
    for sure in (truth.log(), 1e3 * truth):
        out = d3pm_loss(scheduler, sure, x_0, x_t, hybrid_coeff=1.0, **times)
        torch.testing.assert_close(out.vb, torch.zeros_like(out.vb), atol=TOLERANCE[dtype] / 5, rtol=0)
        torch.testing.assert_close(out.loss, torch.zeros_like(out.loss), atol=TOLERANCE[dtype] / 5, rtol=0)


@DTYPES
@FAMILIES
def test_prior_loss(name, dtype):
    for betas in families.BETAS:
        family = families.build(name, betas=betas)
        scheduler = family.scheduler()
        for shape in SHAPES:
            if families.can_take(name, shape=shape):
                x_0 = family.data(SHAPES[shape])
                expected = ref.prior_kl(family.matrices, x_0, scheduler.transition.log_prior.exp())
                got = prior_loss(scheduler, x_0).double()
                torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
                assert name != "absorbing" or betas != "plain" or (got == torch.inf).all()


def test_fitted_prior():
    """What the data itself has become by T, for processes that stop short of their stationary distribution."""
    family = families.build("gaussian", betas=[0.05] * 4)
    unigram = families.stochastic(5, seed=4)
    scheduler = family.scheduler(prior="fitted", unigram_probs=unigram)
    prior = unigram @ ref.stretch(family.matrices, 0, 4)[0]
    torch.testing.assert_close(scheduler.transition.log_prior.exp(), prior, atol=1e-10, rtol=0)
    x_0 = torch.arange(5)[None]
    expected = ref.prior_kl(family.matrices, x_0, prior)
    torch.testing.assert_close(prior_loss(scheduler, x_0).double(), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["uniform", "absorbing", "gaussian"])
def test_previous_state_predicted_directly(name):
    """prediction_type="previous": the network's softmax is p(x_{t-1} | x_t)."""
    family = families.build(name)
    pairs = torch.tensor([(n - 1, n) for n in range(2, NUM_STEPS + 1)])
    x_0, x_t, logits = case(family, pairs)
    expected = ref.kl(ref.posterior(family.matrices, x_0, x_t, *pairs.unbind(-1)), logits.softmax(-1))
    scheduler = family.scheduler(prediction_type="previous")
    out = d3pm_loss(scheduler, logits, x_0, x_t, pairs[:, 1] - 1)
    torch.testing.assert_close(out.loss, expected, atol=1e-10, rtol=1e-10)


# --- large vocabularies ----------------------------------------------------------------------------------------------
def rank_one_divergence(survival_s, survival_t, pi, logits, x_0, x_t, epsilon=0.0):
    """KL(q || p) of one element from the vectors of length K alone, in float64."""
    K, step = len(pi), survival_t / survival_s
    column = (1 - step) * pi[x_t] + step * F.one_hot(x_t, K) + epsilon
    q = ref.normalize(column * ((1 - survival_s) * pi + survival_s * F.one_hot(x_0, K) + epsilon))
    p = ref.normalize(column * ((1 - survival_s) * pi + survival_s * logits.double().softmax(-1) + epsilon))
    return ref.kl(q, p).item()


@pytest.mark.cover
@pytest.mark.parametrize("num_classes", [8192, 50258])
@pytest.mark.parametrize("name", ["uniform", "absorbing", "stationary"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_large_vocabularies(name, num_classes, dtype):
    """The value that float64 gives, with finite gradients, from logits of a modest network."""
    K, T = num_classes, 1000
    laws = {"uniform": ref.stationary_mix(K), "absorbing": ref.stationary_mix(K, K - 1)}
    pi = laws.get(name, families.stochastic(K))
    kwargs = {"stationary_probs": pi} if name == "stationary" else {}
    scheduler = D3PMScheduler(K, T, transition=name, beta_schedule="cosine", **kwargs)
    survival = torch.cat([torch.ones(1).double(), (1 - ref.cosine_betas(T)).cumprod(0)])
    timesteps = torch.tensor([0, 1, 499, 998, 999])
    x_0 = torch.tensor([[5, 6, 7]]).expand(5, 3)
    replaced = K - 1 if name == "absorbing" else 11
    x_t = torch.tensor([5, replaced, replaced]).repeat(5, 1)
    x_t[-1, 0] = replaced  # at T nothing is left unmasked
    logits = draw_logits(x_0.shape, K).to(dtype)
    logits[..., :12] += 4
    logits.requires_grad_()
    out = d3pm_loss(scheduler, logits, x_0, x_t, timesteps, hybrid_coeff=0.01)
    seen = ref.forbid(logits.detach(), K - 1 if name == "absorbing" else None)
    for b, t in enumerate(timesteps.tolist()):
        for i in range(3):
            args = (survival[t], survival[t + 1], pi, seen[b, i], x_0[b, i], x_t[b, i])
            assert out.vb[b, i].item() == pytest.approx(rank_one_divergence(*args), rel=2e-4, abs=2e-6), (t, i)
    out.loss.sum().backward()
    assert logits.grad.dtype == dtype and logits.grad.isfinite().all()


def test_no_epsilon():
    """At K = 8192 a floor of 1e-6 under the probabilities triples this term; float64 says what it is."""
    K, survival = 8192, (0.502, 0.5)
    pi, x_0, x_t = ref.stationary_mix(K), torch.tensor(3), torch.tensor(4)
    logits = draw_logits((), K, scale=1.0).float()
    exact = rank_one_divergence(*survival, pi, logits, x_0, x_t)
    floored = rank_one_divergence(*survival, pi, logits, x_0, x_t, epsilon=1e-6)
    assert floored > 2.5 * exact
    betas = [1 - survival[0], 1 - survival[1] / survival[0]]
    scheduler = D3PMScheduler(K, 2, transition="uniform", trained_betas=betas)
    out = d3pm_loss(scheduler, logits[None, None], x_0[None, None], x_t[None, None], torch.tensor([1]))
    assert out.loss.item() == pytest.approx(exact, rel=1e-4)


@families.needs_kernels
@pytest.mark.parametrize("name", ["uniform", "absorbing", "gaussian"])
def test_every_timestep_is_finite(name):
    """A hundred steps, the first and the last included, in float32 with extreme logits."""
    scheduler = D3PMScheduler(16, 100, transition=name, beta_schedule="cosine")
    timesteps = torch.arange(100)
    x_0 = torch.randint(15, (100, 40), generator=torch.Generator().manual_seed(0))
    x_t = scheduler.add_noise(x_0, timesteps, generator=torch.Generator().manual_seed(1))
    for scale in (1.0, 50.0):
        logits = draw_logits(x_0.shape, 16, scale=scale).float().requires_grad_()
        out = d3pm_loss(scheduler, logits, x_0, x_t, timesteps, hybrid_coeff=0.01)
        assert out.loss.isfinite().all() and (out.vb >= -1e-5).all()
        out.loss.mean().backward()
        assert logits.grad.isfinite().all()


# --- what the paper says the bound turns into ------------------------------------------------------------------------
def test_bert_is_one_step():
    """One step that masks 10 % and randomises 5 %: L_vb - L_T is BERT's loss, -log p(x_0 | x_1)."""
    K = 7
    options = {"transition": "absorbing_uniform", "trained_betas": [0.15], "mask_fraction": 2 / 3}
    x_0 = torch.randint(K - 1, (8, 5), generator=torch.Generator().manual_seed(0))
    logits = draw_logits(x_0.shape, K)
    target = F.cross_entropy(logits[..., : K - 1].flatten(0, 1), x_0.flatten(), reduction="none").view_as(x_0)
    for meaning in ({"x0_posterior": "denoising"}, {"reconstruction": "raw"}):
        scheduler = D3PMScheduler(K, 1, **options, **meaning)
        Q = scheduler.transition.matrix(0, 1)
        assert Q[0, K - 1].item() == pytest.approx(0.1 + 0.05 / K) and Q[0, 1].item() == pytest.approx(0.05 / K)
        x_1 = scheduler.add_noise(x_0, torch.zeros(8, dtype=torch.long), generator=torch.Generator().manual_seed(2))
        out = d3pm_loss(scheduler, logits, x_0, x_1, torch.zeros(8, dtype=torch.long))
        torch.testing.assert_close(out.loss, target)


def test_left_to_right_is_a_language_model():
    """The terms of all timesteps add up to the cross-entropy of a causal model, and nothing else is paid."""
    K, N, mask = 6, 5, 5
    scheduler = D3PMScheduler(K, N, transition="autoregressive")
    x_0 = torch.randint(K - 1, (3, N), generator=torch.Generator().manual_seed(0))
    table = draw_logits((N, K), K)  # a causal model: logits of position i are a sum over the tokens before it

    def language_model(x):
        per_token = table[torch.arange(N), x]  # [B, N, K]
        return per_token.cumsum(1) - per_token

    total = torch.zeros(3).double()
    for t in range(N):
        timesteps = torch.full((3,), t)
        x_t = scheduler.add_noise(x_0, timesteps)
        assert torch.equal(x_t == mask, (torch.arange(N) >= N - t - 1).expand(3, N))
        # masked tokens must not be read, and causality sees to it: position i only reads tokens that are not masked
        loss = d3pm_loss(scheduler, language_model(x_t), x_0, x_t, timesteps).loss
        assert (loss[:, torch.arange(N) != N - t - 1] == 0).all()
        total += loss.sum(-1)
    logits = language_model(x_0)[..., :mask]
    expected = F.cross_entropy(logits.transpose(1, 2), x_0, reduction="none").sum(-1)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("schedule", ["reciprocal", "mutual_information"])
def test_absorbing_is_a_reweighted_masked_language_model(schedule):
    """KL_t = (1/t) CE on the masked positions with beta_t = 1 / (T - t + 1), zero elsewhere."""
    K, T = 6, 10
    scheduler = D3PMScheduler(K, T, transition="absorbing", beta_schedule=schedule)
    x_0 = torch.randint(K - 1, (T, 40), generator=torch.Generator().manual_seed(0))
    timesteps = torch.arange(T)
    x_t = scheduler.add_noise(x_0, timesteps, generator=torch.Generator().manual_seed(1))
    masked = x_t == K - 1
    logits = draw_logits(x_0.shape, K)
    ce = F.cross_entropy(logits[..., : K - 1].flatten(0, 1), x_0.flatten(), reduction="none").view_as(x_0)
    expected = torch.where(masked, ce / (timesteps[:, None] + 1), 0)
    for meaning in ("leave_one_out", "denoising"):
        scheduler = D3PMScheduler(K, T, transition="absorbing", beta_schedule=schedule, x0_posterior=meaning)
        out = d3pm_loss(scheduler, logits, x_0, x_t, timesteps)
        torch.testing.assert_close(out.loss, expected, atol=1e-9, rtol=1e-6)
        assert (out.loss[~masked].abs() < 1e-12).all()


# --- the discretized truncated logistic ------------------------------------------------------------------------------
@pytest.mark.parametrize("num_classes", [2, 16, 256])
def test_logistic_values(num_classes):
    loc, log_scale = torch.meshgrid(torch.linspace(-1.2, 1.2, 7), torch.linspace(-8.0, 6.0, 8), indexing="ij")
    for dtype in TOLERANCE:
        got = logistic_logits(loc.to(dtype), log_scale.to(dtype), num_classes)
        assert got.shape == (7, 8, num_classes) and got.dtype == dtype
        expected = ref.logistic_logits(loc.to(dtype), log_scale.to(dtype), num_classes).log_softmax(-1)
        got = got.log_softmax(-1).double()
        torch.testing.assert_close(got.exp().sum(-1), torch.ones(7, 8).double(), atol=1e-5, rtol=0)
        # Far out the logarithm itself is large, and a sharp scale magnifies the rounding of the location.
        rounding = 8 * torch.finfo(dtype).eps * (1 + expected.abs() + torch.exp(2 - log_scale.double())[..., None])
        assert ((got - expected).abs() <= rounding + 1e-10).all()


def test_logistic_tails_are_symmetric():
    """Mirrored locations give mirrored distributions, in the far tails too."""
    loc, log_scale = torch.tensor([0.0, 0.3, 0.9, 2.0]), torch.tensor([-9.0, -2.0, 0.0, 3.0])
    got = logistic_logits(loc, log_scale, 256)
    mirrored = logistic_logits(-loc, log_scale, 256).flip(-1)
    torch.testing.assert_close(got, mirrored, rtol=1e-4, atol=1e-4)
    assert (got.isfinite()).all() and got[0].min() < -1000  # the tail goes on falling: no floor


def test_logistic_gradients_at_extreme_scales():
    axes = torch.tensor([-3.0, -1.0, 0.1, 1.0]), torch.tensor([-20.0, -7, 0, 7, 20])
    loc, log_scale = torch.meshgrid(*axes, indexing="ij")
    loc, log_scale = loc.clone().requires_grad_(), log_scale.clone().requires_grad_()
    logits = logistic_logits(loc, log_scale, 256)
    assert logits.isfinite().all()
    logits.log_softmax(-1)[..., 100].sum().backward()
    assert loc.grad.isfinite().all() and log_scale.grad.isfinite().all()


def test_logistic_gradients_are_right():
    loc, log_scale = draw_logits((3,), 2, scale=0.5).unbind(-1)
    args = (loc.requires_grad_(), log_scale.requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: logistic_logits(a, b, 9).log_softmax(-1), args)


def far_outputs(num_rows, length, dtype):
    """Locations and log-scales from the middle of the levels to far outside of them, `[num_rows, length, 2]`."""
    locations = torch.tensor([0.3, 0.999, 1.0, 1.003, 1.1, 3.0, 1e3, 1e6, 1e30]).to(dtype)
    locations = torch.cat([locations, -locations]).repeat(num_rows, length // 18 + 1)[:, :length]
    log_scales = torch.tensor([-2.0, 0.0, 1.0, 6.0, 12.0]).to(dtype).repeat(num_rows, length // 5 + 1)[:, :length]
    return torch.stack([locations, log_scales], -1)


@pytest.mark.parametrize("num_classes, length", [(5, 90), (128, 180)])  # the second with factors of low rank
@pytest.mark.parametrize("x0_posterior", ["leave_one_out", "denoising"])
def test_logistic_locations_far_away(num_classes, length, x0_posterior):
    """A location of 1e3 says which level is the likeliest, with the digits of float32, in values and in gradients."""
    options = {"prediction_type": "logistic", "x0_posterior": x0_posterior}
    scheduler = D3PMScheduler(num_classes, 50, transition="gaussian", beta_schedule="linear", beta_end=1.0, **options)
    matrices = ref.gaussian(ref.linear_betas(50, 1e-4, 1.0), num_classes)
    generator, t = torch.Generator().manual_seed(0), torch.tensor([10, 30, 49])
    x_0 = torch.randint(0, num_classes, (3, length), generator=generator)
    x_t = scheduler.add_noise(x_0, t, generator)
    given = far_outputs(3, length, torch.float32)
    truth = given.double().requires_grad_()
    logits = ref.logistic_logits(*truth.unbind(-1), num_classes)
    logits = torch.where(truth[..., :1].abs() < 1e9, logits, 0)  # beyond, float64 has no digits left either
    vb = ref.variational(matrices, logits, x_0, x_t, t, t + 1, x0_posterior=x0_posterior)
    counts = truth[..., 0].abs() < 1e9
    (expected,) = torch.autograd.grad(vb[counts].sum(), truth)
    for loss_of in (nullcontext(), without_fused_loss(scheduler.transition)):
        output = given.clone().requires_grad_()
        with loss_of:
            out = d3pm_loss(scheduler, output, x_0, x_t, t)
        out.loss.sum().backward()
        assert out.vb.isfinite().all() and output.grad.isfinite().all()
        torch.testing.assert_close(out.vb.double()[counts], vb[counts].detach(), atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(output.grad.double()[counts], expected[counts], atol=1e-4, rtol=1e-4)
        # At an infinite distance nothing depends on the location, and all is as at a large one.
        same = output.grad[..., 1][given[..., 0].abs() == 1e6], output.grad[..., 1][given[..., 0].abs() == 1e30]
        assert same[0].abs().max() > 0.1 and (output.grad[..., 0][~counts] == 0).all()


@pytest.mark.parametrize("num_classes", [2, 5])  # as many as location and log-scale, and more
@pytest.mark.parametrize("name", ["gaussian", "uniform"])
def test_logistic_head(name, num_classes):
    """prediction_type="logistic": location and log-scale last, where the classes would be."""
    family = families.build(name, num_classes)
    x_0, x_t, _ = case(family, PAIRS, "image")
    given = draw_logits(x_0.shape, 2, scale=0.7).requires_grad_()
    truth = given.detach().clone().requires_grad_()
    logits = ref.logistic_logits(*truth.unbind(-1), num_classes)
    vb, ce = expected_parts(family, logits, x_0, x_t, PAIRS)
    scheduler = family.scheduler(prediction_type="logistic")
    times = {"timesteps": PAIRS[:, 1] - 1, "previous_timesteps": PAIRS[:, 0] - 1}
    out = d3pm_loss(scheduler, given, x_0, x_t, hybrid_coeff=0.5, **times)
    torch.testing.assert_close(out.vb, vb.detach(), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(out.loss, vb + 0.5 * ce, atol=1e-10, rtol=1e-10)
    assert math.isfinite(out.loss.sum().item())
    out.loss.sum().backward()
    (vb + 0.5 * ce).sum().backward()
    torch.testing.assert_close(given.grad, truth.grad, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("timestep", [900, 998])
def test_many_states_that_noise_never_leads_to(timestep):
    """Late in the process, states of probability zero under pi share a gradient that is small beside all others."""
    num_classes = 5000
    frequencies = torch.zeros(num_classes)
    frequencies[:10] = 0.1
    options = {"transition": "stationary", "stationary_probs": frequencies, "beta_schedule": "cosine"}
    scheduler = D3PMScheduler(num_classes, 1000, **options)
    generator = torch.Generator().manual_seed(0)
    x_0, t = torch.randint(10, (1, 8), generator=generator), torch.tensor([timestep])
    x_t = scheduler.add_noise(x_0, t, generator)
    logits = torch.randn(1, 8, num_classes, generator=generator)
    logits[..., 10:] -= 15
    gradients = []
    for context, dtype in ((nullcontext(), torch.float32), (without_fused_loss(scheduler.transition), torch.float64)):
        own = logits.to(dtype, copy=True).requires_grad_()
        with context:
            d3pm_loss(scheduler, own, x_0, x_t, t).loss.sum().backward()
        gradients.append(own.grad[..., 10:].double())
    fused, plain = gradients
    assert (fused - plain).abs().max() < 1e-5 * plain.abs().max()
