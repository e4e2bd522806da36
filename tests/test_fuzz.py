# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Random configurations of every family against a float64 reference in logarithms, with logits up to 1e4 and `-inf`."""

from contextlib import nullcontext
from dataclasses import replace

import families
import pytest
import reference as ref
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3pm_hf.losses import d3pm_loss, prior_loss


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose")
NAMES = (
    # The matrices of blockwise noise hold survivals of 1e-24 beside one, which the reference does not.
    *(name for name in families.NAMES if name != "blockwise"),
    *("absorbing_uniform_in_data", "autoregressive_in_data", "stationary_with_zeros"),
)
MATRICES = ("gaussian", "band_diagonal", "matrix", "rate", "nearest_neighbor", "absorbing_nearest_neighbor")
# Rounding of the numbers that come in and of the sums that are made of them; the second is that of the gradient. In float64
# it is that of the chance to move in a short step after long ones, for which the process takes a difference of sums.
TOLERANCE = {torch.float64: (2e-7, 2e-7), torch.float32: (2e-5, 2e-5)}
TOLERANCE |= {torch.float16: (2e-5, 1e-3), torch.bfloat16: (2e-5, 8e-3)}
# Logits of minus infinity are this for the reference, so that autograd has a derivative, and a probability of exactly zero
# is the other: -inf is the limit of ever lower logits, and what the process rules out stays ruled out.
EXCLUDED, NEVER = -1e7, -1e30


def build(name, num_classes, betas):
    """A family of the table, or one of those with the mask among the data or with states that noise never leads to."""
    if name == "stationary_with_zeros":
        family = families.build("stationary", num_classes, betas)
        pi = family.prior * (torch.arange(num_classes) % 2)
        pi, betas = pi / pi.sum(), torch.tensor(betas, dtype=torch.float64)
        kwargs = {**family.kwargs, "stationary_probs": pi}
        return replace(family, matrices=ref.rank_one(betas, pi), prior=pi, kwargs=kwargs)
    if name.endswith("_in_data") and name not in families.NAMES:
        family = families.build(name.removesuffix("_in_data"), num_classes, betas)
        return replace(family, mask=None, kwargs={**family.kwargs, "mask_in_data": True})
    return families.build(name, num_classes, betas)


@st.composite
def processes(draw, name):
    """A family and its scheduler's arguments: a schedule by name, or betas that include 0, 1 and what is next to them."""
    num_steps = draw(st.integers(1, 6))
    num_classes = draw(st.integers(3 if name.startswith("absorbing_nearest") else 2, 6))
    smooth = name.startswith(("gaussian", "band_diagonal"))
    likely = st.floats(0.05, 0.95)
    edges = [1e-8, 1e-3, 0.01] if smooth else [0.0, 1e-8, 1e-3, 1 - 1e-8, 1.0]
    beta = st.one_of(likely, st.sampled_from(edges[name.startswith("gaussian") :]))
    betas = draw(st.lists(beta, min_size=num_steps, max_size=num_steps))
    schedule = draw(st.sampled_from(["trained", "linear", "cosine", "reciprocal", "mutual_information"]))
    if smooth and schedule in ("cosine", "reciprocal") or name.startswith(("matrix", "autoregressive")):
        schedule = "trained"
    if schedule == "mutual_information":
        num_classes = max(num_classes, 3)  # two tokens beside a mask: data of one token have no information
    named = {"cosine": ref.cosine_betas, "reciprocal": ref.reciprocal_betas}
    named["linear"] = lambda n: ref.linear_betas(n, 0.1, 0.9)
    if schedule in named:
        betas = named[schedule](num_steps).tolist()
    family = build(name, num_classes, betas)
    options = {}
    if schedule != "trained":
        options = {"beta_schedule": schedule, "trained_betas": None}
        options |= {"beta_start": 0.1, "beta_end": 0.9} if schedule == "linear" else {}
    if draw(st.booleans()) or schedule == "mutual_information":
        unigram = families.stochastic(num_classes, seed=draw(st.integers(0, 99)))
        if family.mask is not None:
            unigram[family.mask] = 0
        options["unigram_probs"] = unigram / unigram.sum()
        fits = not name.startswith("autoregressive")
        options["prior"] = draw(st.sampled_from(["stationary", "fitted"] if fits else ["stationary"]))
    if schedule == "mutual_information":  # the schedules have tests of their own: here the steps are what they came to
        transition = family.scheduler(**options).transition
        steps = torch.stack([transition.matrix(n, n + 1) for n in range(num_steps)])
        family = replace(family, matrices=steps[:, None])
    return family, options


@st.composite
def model_outputs(draw, family, shape, prediction):
    """float64 numbers that float16 and bfloat16 hold as well."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    if prediction == "logistic":
        return (0.7 * torch.randn(*shape, 2, generator=generator)).bfloat16().double()
    scale = draw(st.sampled_from([0.0, 1.0, 30.0, 1e3, 1e4]))
    logits = (scale * torch.randn(*shape, family.num_classes, generator=generator)).clamp(-6e4, 6e4)
    logits = logits.bfloat16().double()
    fraction = draw(st.sampled_from([0.0, 0.3, 0.9]))
    excluded = torch.rand(*shape, family.num_classes, generator=generator) < fraction
    allowed = family.data(shape, seed=draw(st.integers(0, 99)))[..., None]  # one state stays possible
    return logits.masked_fill(excluded.scatter(-1, allowed, False), -torch.inf)


# --- the reference ---------------------------------------------------------------------------------------------------
def log_of(probs):
    return torch.where(probs > 0, torch.where(probs > 0, probs, 1).log(), NEVER)


def log_normalize(logits):
    """log_softmax that leaves what can never be where it is."""
    return torch.where(logits > NEVER / 2, logits.log_softmax(-1), NEVER)


def log_steps(family, betas):
    """log Q_t, [T, P, K, K]; those of a Gaussian reach further than probabilities in float64."""
    if family.name != "gaussian" or betas is None:
        return log_of(family.matrices)
    i, n = torch.arange(family.num_classes).double(), torch.arange(1 - family.num_classes, family.num_classes).double()
    widths = -4 / ((family.num_classes - 1) ** 2 * torch.tensor(betas, dtype=torch.float64)[:, None, None])
    kernel = widths * (i[:, None] - i) ** 2 - (widths * n**2).logsumexp(-1, keepdim=True)
    diagonal = log_of(family.matrices).diagonal(dim1=-2, dim2=-1)[:, 0]
    return kernel.diagonal_scatter(diagonal, dim1=-2, dim2=-1)[:, None]


def log_between(steps, s, t, shape):
    """log (Q_{s+1} ... Q_t) for every element of states of this shape, [B, ..., K, K] up to broadcasting."""
    out = []
    for first, last in zip(s.tolist(), t.tolist()):
        product = log_of(torch.eye(steps.shape[-1]).double()).expand(steps.shape[1:])
        for step in steps[first:last]:
            product = (product.unsqueeze(-1) + step.unsqueeze(-3)).logsumexp(-2)
        out.append(torch.where(product > NEVER / 2, product, NEVER))
    inner = shape[1:] if steps.shape[1] > 1 else [1] * len(shape[1:])
    return torch.stack(out).reshape(shape[0], *inner, *steps.shape[2:])


def row(matrices, x):
    """The rows x of matrices that broadcast over them."""
    return (
        matrices.expand(*x.shape, *matrices.shape[-2:])
        .gather(-2, x[..., None, None].expand(*x.shape, 1, matrices.shape[-1]))
        .squeeze(-2)
    )


def log_posterior_of(steps, x_0, x_t, s, t):
    """log q(x_s | x_t, x_0)."""
    rows, columns = row(log_between(steps, 0 * s, s, x_t.shape), x_0), row(log_between(steps, s, t, x_t.shape).mT, x_t)
    return log_normalize(rows + columns)


def truth(family, steps, logits, x_0, x_t, s, t, meaning, reconstruction, auxiliary):
    """log p(x_s | x_t), vb, cross-entropy, and where the logits rule out every x_0 that leads to x_t."""
    never = torch.arange(family.num_classes) == (-1 if family.mask is None else family.mask)
    raw = log_normalize(torch.where(never, NEVER, logits))
    log_column = row(log_between(steps, 0 * s, t, x_t.shape).mT, x_t)
    leads = (log_column > NEVER / 2) & ~never
    log_p = raw if meaning == "leave_one_out" else log_normalize(torch.where(leads, raw - log_column, NEVER))
    terms = log_p.unsqueeze(-1) + log_between(steps, 0 * s, s, x_t.shape)  # [B, ..., x_0, x_s]
    log_m = torch.where(terms > NEVER / 2, terms, NEVER).logsumexp(-2)
    step = log_m + row(log_between(steps, s, t, x_t.shape).mT, x_t)
    log_posterior = log_normalize(torch.where(step > NEVER / 2, step, NEVER))
    if reconstruction == "raw":
        log_posterior = torch.where((s == 0).reshape(-1, *[1] * x_t.ndim), raw, log_posterior)
    vb = divergence(log_posterior_of(steps, x_0, x_t, s, t), log_posterior)
    log_p_0 = raw
    if auxiliary == "denoising" and meaning == "leave_one_out":
        log_p_0 = log_normalize(torch.where(leads, raw + log_column, NEVER))
    cross_entropy = -log_p_0.gather(-1, x_0.unsqueeze(-1)).squeeze(-1)
    refused = ~(leads & (raw > EXCLUDED / 2)).any(-1)
    return log_posterior, vb, infinite(cross_entropy), refused


def divergence(log_q, log_p, smallest=-100.0):
    """KL(q || p), without states whose log q is below `smallest`: where p is zero, they alone would make it infinite."""
    counts = log_q > smallest
    vb = torch.where(counts, log_q.exp() * (log_q - torch.where(counts, log_p, 0)), 0).sum(-1)
    return vb + torch.where((counts & (log_p < EXCLUDED / 2)).any(-1), torch.inf, 0)


def infinite(cross_entropy):
    return cross_entropy + torch.where(cross_entropy > -EXCLUDED / 2, torch.inf, 0)


# --- the tests -------------------------------------------------------------------------------------------------------
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("name", NAMES)
def test_any_configuration(name, data):
    check(name, data.draw)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("name", NAMES)
def test_more_configurations(name, data):
    check(name, data.draw)


def check(name, draw):
    """One configuration: the reverse step, a draw from it, the loss with its gradient, and the last term of the bound."""
    family, options = draw(processes(name))
    num_steps = len(family.matrices)
    meaning = draw(st.sampled_from(["leave_one_out", "denoising"]))
    reconstruction = draw(st.sampled_from(["posterior", "raw"]))
    prediction = draw(st.sampled_from(["x0", "x0", "x0", "logistic", "previous"]))
    shape = [draw(st.integers(1, 4)), num_steps] if name.startswith("autoregressive") else None
    shape = shape or draw(st.sampled_from([(3, 4), (2, 1, 3, 2), (5,)]))
    times = draw(st.lists(st.integers(1, num_steps), min_size=shape[0], max_size=shape[0]))
    before = [n - 1 if prediction == "previous" or draw(st.booleans()) else draw(st.integers(0, n - 1)) for n in times]
    s, t = torch.tensor(before), torch.tensor(times)
    x_0 = family.data(shape, seed=draw(st.integers(0, 99)))
    x_t = family.corrupt(x_0, t, seed=draw(st.integers(0, 99)))
    output = draw(model_outputs(family, shape, prediction))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    hybrid = 0.0 if prediction == "previous" else draw(st.sampled_from([0.0, 0.3]))
    auxiliary = draw(st.sampled_from(["raw", "denoising"]))
    counted = torch.rand(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.7
    counted = draw(st.sampled_from([None, counted]))
    settings = {"x0_posterior": meaning, "reconstruction": reconstruction, "prediction_type": prediction}
    scheduler = family.scheduler(**options, **settings)

    # The reference
    betas = None if options.get("beta_schedule") == "mutual_information" else family.kwargs.get("trained_betas")
    steps = log_steps(family, betas)
    given_output = output.clone().to(dtype).requires_grad_()
    exact = output.masked_fill(output == -torch.inf, EXCLUDED).requires_grad_()
    if prediction == "previous":
        log_posterior = exact.log_softmax(-1)
        smallest = -745.0 if dtype == torch.float64 else -103.9  # the logarithm of what the dtype holds
        vb = divergence(log_posterior_of(steps, x_0, x_t, s, t), log_posterior, smallest)
        cross_entropy, refused = torch.zeros_like(vb), torch.zeros_like(x_t, dtype=torch.bool)
    else:
        logits = exact
        if prediction == "logistic":
            logits = ref.logistic_logits(*exact.unbind(-1), family.num_classes)
        parts = truth(family, steps, logits, x_0, x_t, s, t, meaning, reconstruction, auxiliary)
        log_posterior, vb, cross_entropy, refused = parts
    counts = torch.ones_like(refused) if counted is None else counted
    close = dict(zip(("atol", "rtol"), 2 * TOLERANCE[dtype][:1]))
    size = output[output > -torch.inf].abs().max().item()
    if dtype != torch.float64:
        size += steps[steps > NEVER / 2].abs().max().item()  # logarithms of tables in float32
    close["atol"] *= 1 + size

    # log p(x_s | x_t)
    by_matrices = name.startswith(MATRICES)
    refused &= by_matrices
    raw_step = (s == 0).reshape(-1, *[1] * (x_t.ndim - 1)) & (reconstruction == "raw")
    if (refused & ~raw_step).any():
        with pytest.raises(ValueError, match="rule out every x_0 that can lead to x_t"):
            scheduler.posterior_logits(given_output, t - 1, x_t, previous_timestep=s - 1)
    else:
        got = scheduler.posterior_logits(given_output, t - 1, x_t, previous_timestep=s - 1).double()
        possible = log_posterior > EXCLUDED / 2
        assert torch.equal(got > -torch.inf, possible)
        torch.testing.assert_close(got[possible], log_posterior[possible].detach(), **close)

    # A draw from it, for the first sample
    step = {"timestep": times[0] - 1, "previous_timestep": before[0] - 1, "sample": x_t[:1]}
    if (refused & ~raw_step)[0].any():
        with pytest.raises(ValueError, match="rule out every x_0 that can lead to x_t"):
            scheduler.step(given_output[:1].detach(), **step)
    else:
        drawn = scheduler.step(given_output[:1].detach(), **step).prev_sample
        assert (log_posterior[:1].gather(-1, drawn[..., None]) > EXCLUDED / 2).all()

    # The loss, fused and plain, and its gradient for some weights
    previous = None if (s == t - 1).all() and draw(st.booleans()) else s - 1
    arguments = {"hybrid_coeff": hybrid, "auxiliary": auxiliary, "previous_timesteps": previous, "loss_mask": counted}
    if prediction == "previous":
        arguments |= {"auxiliary": "raw"}
    undefined = refused & counts & (~raw_step | ((auxiliary == "denoising") & (meaning == "leave_one_out")))
    if undefined.any():
        with pytest.raises(ValueError, match="rule out every x_0 that can lead to x_t"):
            d3pm_loss(scheduler, given_output, x_0, x_t, t - 1, **arguments)
        return
    vb, cross_entropy = (torch.where(counts, part, 0) for part in (vb, cross_entropy))
    loss = vb + hybrid * cross_entropy if hybrid else vb
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    weights = (2.0 ** draw(st.integers(-10, 10)) * weights).float().double()
    loss.backward(weights)
    rtol = TOLERANCE[dtype][1]
    atol = close["atol"] * weights.max().item() + (1e-7 if dtype == torch.float16 else 0)
    forms = [nullcontext(), families.without_fused_loss(scheduler.transition)]
    for form in forms[: 1 + draw(st.booleans())]:
        given_output.grad = None
        with form:
            out = d3pm_loss(scheduler, given_output, x_0, x_t, t - 1, **arguments)
        torch.testing.assert_close(out.vb.double(), vb.detach(), **close)
        torch.testing.assert_close(out.loss.detach().double(), loss.detach(), **close)
        if prediction != "previous":
            torch.testing.assert_close(out.cross_entropy.double(), cross_entropy.detach(), **close)
        out.loss.backward(weights.to(out.loss.dtype))
        torch.testing.assert_close(given_output.grad.double(), exact.grad, atol=atol, rtol=rtol)
        assert (given_output.grad[~counts] == 0).all()

    # The last term of the bound
    got = prior_loss(scheduler, x_0).double()
    expected = ref.prior_kl(family.matrices, x_0, scheduler.transition.log_prior.exp())
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
