# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The bound in continuous time: its rate against the sum over jumps, its integral against ever shorter steps.

The references are dense and in float64: q(x_t | x_0) = A [x_t = x_0] + (1 - A) pi(x_t), Bayes, and sums over all states.
"""

import itertools
import math

import families
import numpy as np
import pytest
import reference as ref
import torch

from d3pm_hf import D3PMScheduler, d3pm_loss, evaluate_bound, prior_loss
from d3pm_hf.likelihood.continuous_time import create_clock
from d3pm_hf.losses.continuous import divergence_rate, predict_data, unchanged_integral, unchanged_rate


pytestmark = [
    pytest.mark.filterwarnings("ignore:after .* steps q"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract"),  # the error of an infinite bound
]
NAMES = ("absorbing", "uniform", "absorbing_uniform", "stationary", "absorbing_in_data")
SCHEDULES = ("reciprocal", "cosine", "linear", "mutual_information")
T, K, LENGTH = 5, 3, 2


def bound(scheduler, model, batches, **kwargs):
    return evaluate_bound(scheduler, model, batches, continuous_time=True, progress_bar=False, **kwargs)


def create(name, schedule="reciprocal", num_classes=K, num_steps=T, **kwargs):
    kwargs["mask_in_data"] = name == "absorbing_in_data"
    if name == "stationary":
        kwargs["stationary_probs"] = families.stochastic(num_classes, seed=1)
    if schedule == "mutual_information":
        frequencies = families.stochastic(num_classes, seed=4)
        if name.startswith("absorbing") and not kwargs["mask_in_data"]:
            frequencies[-1] = 0
        kwargs["unigram_probs"] = ref.normalize(frequencies)
    return D3PMScheduler(num_classes, num_steps, name.removesuffix("_in_data"), schedule, **kwargs)


def survivals(scheduler):
    """A of the data and of each timestep, by the betas of the schedule: `[T + 1]`."""
    steps = [scheduler.transition.matrix(t, t + 1)[..., 0, 0].item() for t in range(len(scheduler))]
    pi = scheduler.transition.stationary[0].item()  # (1 - beta) + beta pi
    return np.cumprod([1, *((a - pi) / (1 - pi) for a in steps)]).clip(0)


def toy(scheduler, length=LENGTH, seed=0):
    """Probabilities of all x_0, `[K ** L]`, without states that data never hold."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand([scheduler.config.num_classes] * length, generator=generator).double() ** 3
    for axis, state in itertools.product(range(length), scheduler.never_data):
        probs.index_fill_(axis, torch.tensor([state]), 0)
    return (probs / probs.sum()).flatten()


def tables(scheduler, length=LENGTH, seed=1):
    """Logits of a network that reads everything, x_t and the timestep: `[T, K ** L, L, K]`."""
    generator = torch.Generator().manual_seed(seed)
    size = scheduler.config.num_classes
    return 1.5 * torch.randn(len(scheduler), size**length, length, size, generator=generator, dtype=torch.float64)


def lookup(table):
    """The network that looks its answer up."""

    def model(x_t, timesteps):
        size = table.shape[-1]
        return table[timesteps, (x_t * size ** torch.arange(x_t.shape[1] - 1, -1, -1)).sum(-1)]

    return model


def leave_one_out(scheduler, logits, x_t, shown_a):
    """p(x_0) by the reading of the scheduler, at the survival that the network is shown."""
    probs = ref.forbid(logits, scheduler.never_data).softmax(-1)
    if scheduler.config.x0_posterior == "leave_one_out":
        return probs
    pi = scheduler.transition.stationary
    column = shown_a * torch.nn.functional.one_hot(x_t, len(pi)).double() + (1 - shown_a) * pi[x_t][..., None]
    column = torch.where(column.sum(-1, keepdim=True) > 0, column, torch.nn.functional.one_hot(x_t, len(pi)))
    return ref.normalize(torch.where(column > 0, probs / torch.where(column > 0, column, 1), 0))


def step_bound(scheduler, data, logits, clock, count):
    """The bound of `count` steps between any two timesteps, summed over all x_0 and x_t; eq. 1 without the prior.

    The steps are equal in the angle of A = cos^2. All of them between two timesteps have the logits of the later one.
    """
    pi, eye = scheduler.transition.stationary, torch.eye(logits.shape[-1]).double()
    x = ref.states(logits.shape[-1], logits.shape[-2])  # [n, L]
    angles, total = np.arccos(np.sqrt(clock)), 0.0

    def matrix(a):
        return a[:, None, None] * eye + (1 - a)[:, None, None] * pi  # [S, K, K]

    for t, (first, last) in enumerate(itertools.pairwise(angles)):
        a = torch.from_numpy(np.cos(np.linspace(first, last, count + 1)) ** 2)
        a = torch.where(a < 1e-30, 0, a)
        a[0] = clock[t]
        rows, columns = matrix(a[:-1]), matrix(a[1:] / a[:-1]).transpose(1, 2)  # q(x_s | x_0), q(x_t | x_s)
        p = leave_one_out(scheduler, logits[t], x, clock[t + 1])  # [n, L, K]
        weights = matrix(a[1:])[:, x[:, None], x].prod(-1) * data[:, None]  # [S, x_0, x_t]
        for i in range(x.shape[1]):
            given = rows[:, x[:, i]][:, :, None] * columns[:, x[:, i]][:, None]  # [S, x_0, x_t, K]
            predicted = (p[:, i] @ rows) * columns[:, x[:, i]]  # [S, x_t, K]
            norm = given.sum(-1, keepdim=True)
            given = torch.where(norm > 0, given / torch.where(norm > 0, norm, 1), 0)
            # Where x_0 cannot lead to x_t, nothing is given, and the weight is zero.
            predicted = predicted / predicted.sum(-1, keepdim=True)
            terms = ref.kl(given, predicted[:, None].expand_as(given))
            total += torch.where(weights > 0, weights * terms, 0).sum().item()
    return total


def limit_of_steps(*arguments, count):
    """The bound of infinitely many steps, from those of `count`, 2 `count` and 4 `count` (Richardson)."""
    values = [step_bound(*arguments, count * 2**i) for i in range(3)]
    first, second = (2 * b - a for a, b in itertools.pairwise(values))
    return (4 * second - first) / 3


def integral(scheduler, data, logits, num_nodes=40):
    """The library's rate, integrated by Gauss-Legendre between timesteps and summed over all x_0 and x_t."""
    return sum(integrals(scheduler, data, logits, num_nodes))


def integrals(scheduler, data, logits, num_nodes=40):
    """The same for each timestep, `[T]`."""
    transition, size = scheduler.transition, logits.shape[-1]
    x = ref.states(size, logits.shape[-2])
    angles = create_clock(scheduler, 2).angles.numpy()
    nodes, node_weights = np.polynomial.legendre.leggauss(num_nodes)
    index_0, index_t = torch.cartesian_prod(torch.nonzero(data > 0)[:, 0], torch.arange(len(x))).unbind(-1)
    x_0, x_t, totals = x[index_0], x[index_t], np.zeros(len(angles) - 1)
    for t, (first, last) in enumerate(itertools.pairwise(angles)):
        for node, weight in zip(nodes, node_weights * (last - first) / 2):
            angle = (first + last) / 2 + node * (last - first) / 2
            log_a, log_noise = (2 * torch.tensor(v).log() for v in (math.cos(angle), math.sin(angle)))
            rate = rate_of(scheduler, logits[t][index_t], x_0, x_t, t, log_a, log_noise)
            q = log_noise.exp() * transition.stationary[x_t] + log_a.exp() * (x_t == x_0)
            terms = data[index_0] * q.prod(-1) * rate.sum(-1)
            totals[t] += 2 * math.tan(angle) * weight * terms.sum().item()
    return totals


def rate_of(scheduler, logits, x_0, x_t, t, log_a, log_noise):
    timesteps, counts = torch.full((len(x_t),), t), torch.ones_like(x_t, dtype=torch.bool)
    prediction = predict_data(scheduler, logits, x_0, x_t, timesteps, log_a - log_noise, counts)
    return divergence_rate(scheduler.transition, prediction, x_0, x_t, log_a, log_noise)


def jump_rates(scheduler, probs, x_0, x_t, a):
    """sum over z != x_t of r log(r / r') - r + r', of the rates r of eq. 3 and r' of eq. 4, `[B]`."""
    pi = scheduler.transition.stationary
    q = a * torch.nn.functional.one_hot(x_0, len(pi)).double() + (1 - a) * pi  # [B, K]
    m = a * probs + (1 - a) * pi
    result = torch.zeros(len(x_t)).double()
    for row, (y, q_row, m_row) in enumerate(zip(x_t.tolist(), q, m)):
        for z in range(len(pi)):
            true, model = pi[y] * q_row[z] / q_row[y], pi[y] * m_row[z] / m_row[y]
            if z != y and pi[y] > 0:
                result[row] += model - true + (true * (true / model).log() if true > 0 else 0)
    return result


@pytest.mark.parametrize("x0_posterior", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2, 5])
def test_the_rate_is_the_sum_over_jumps(name, x0_posterior, size):
    suppressed = [1] if size == 5 and name != "stationary" else None
    scheduler = create(name, num_classes=size, x0_posterior=x0_posterior, suppress_tokens=suppressed)
    tokens = torch.tensor([k for k in range(size) if k not in scheduler.never_data])
    generator = torch.Generator().manual_seed(0)
    x_0 = tokens[torch.randint(len(tokens), (40,), generator=generator)]
    logits = 2 * torch.randn(40, size, generator=generator, dtype=torch.float64)
    logits[:5, tokens[0]] = -torch.inf
    logits[5:10, tokens[0]] = -50
    for a in (1 - 1e-9, 0.9, 0.5, 0.1, 1e-3):
        log_a, log_noise = torch.tensor(a).double().log(), torch.tensor(1 - a).double().log()
        x_t = scheduler.transition.replace(x_0, torch.tensor(0.6).double(), torch.Generator().manual_seed(1))
        possible = (x_t == x_0) | (scheduler.transition.stationary[x_t] > 0)
        if len(tokens) == 1:  # -inf leaves nothing
            logits[:5] = 0
        shown = survivals(scheduler)[2]
        got = rate_of(scheduler, logits[:, None], x_0[:, None], x_t[:, None], 1, log_a, log_noise)[:, 0]
        want = jump_rates(scheduler, leave_one_out(scheduler, logits, x_t, shown), x_0, x_t, a)
        assert possible.all()
        # The rate of a jump is 1 / (1 - A), and rounding grows with it; the angle weights it by 2 sqrt(1 - A).
        torch.testing.assert_close(got, want, rtol=1e-7, atol=max(1e-9, 1e-15 / (1 - a)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_the_integral_is_the_limit_of_short_steps(name, schedule):
    scheduler = create(name, schedule)
    data, logits = toy(scheduler), tables(scheduler)
    want = limit_of_steps(scheduler, data, logits, survivals(scheduler), count=64)
    assert integral(scheduler, data, logits) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("x0_posterior", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", NAMES)
def test_the_integral_of_every_family_and_reading(name, x0_posterior):
    scheduler = create(name, x0_posterior=x0_posterior)
    data, logits = toy(scheduler), tables(scheduler)
    want = limit_of_steps(scheduler, data, logits, survivals(scheduler), count=64)
    assert integral(scheduler, data, logits) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_it_is_the_limit_of_the_discrete_bound(name):
    """T = 10, 1000 and 100,000 steps of a network that reads no timestep: the gap falls as 1 / T."""
    size = 3 if name == "absorbing" else 2
    scheduler = create(name, num_classes=size, num_steps=1)
    data, logits = toy(scheduler), tables(scheduler)
    limit = integral(scheduler, data, logits, num_nodes=200)
    gaps = [
        discrete_bound(create(name, num_classes=size, num_steps=n), data, logits[0]) - limit
        for n in (10, 1000, 100_000)
    ]
    assert 5e-3 < abs(gaps[0]) < 0.5 and abs(gaps[2]) < 2e-5
    assert gaps[0] / gaps[1] == pytest.approx(100, rel=0.3)
    assert gaps[1] / gaps[2] == pytest.approx(100, rel=0.05)


def discrete_bound(scheduler, data, logits, chunk=20_000):
    """Eq. 1 by the library's loss, summed over all x_0 and x_t at all timesteps, for data that end in their prior."""
    transition, x, total = scheduler.transition, ref.states(logits.shape[-1], logits.shape[-2]), 0.0
    index_0, index_t = torch.cartesian_prod(torch.nonzero(data > 0)[:, 0], torch.arange(len(x))).unbind(-1)
    noise = torch.special.expm1(-transition.cumulative_exponents[1:]).neg()
    noise[transition.num_forgotten[1:] > 0] = 1
    for t in torch.arange(len(scheduler)).split(chunk):
        q = noise[t][:, None, None] * transition.stationary[x[index_t]]
        q = (q + (1 - noise[t])[:, None, None] * (x[index_0] == x[index_t])).prod(-1) * data[index_0]  # [t, pairs]
        row, pair = (q > 0).nonzero().unbind(-1)
        states_0, states_t = x[index_0[pair]], x[index_t[pair]]
        loss = d3pm_loss(scheduler, logits[index_t[pair]], states_0, states_t, t[row]).vb
        total += (q[row, pair] * loss.sum(-1)).sum().item()
    return total


@pytest.mark.parametrize(
    "name, x0_posterior", [*((name, "leave_one_out") for name in NAMES), ("uniform", "denoising")]
)
def test_a_data_set_gives_the_integral(name, x0_posterior):
    """Within the standard error; so do its parts, and the integral between any two timesteps."""
    scheduler = create(name, x0_posterior=x0_posterior)
    data, logits = toy(scheduler), tables(scheduler)
    want = integrals(scheduler, data, logits) / LENGTH
    drawn = torch.multinomial(data, 2000, True, generator=torch.Generator().manual_seed(0))
    got = bound(scheduler, lookup(logits), ref.states(K, LENGTH)[drawn].split(1000), num_eval_timesteps=15)
    error = got.standard_error
    assert 0 < error < 0.05 and abs(got.total - want.sum()) < 4 * error
    assert got.reconstruction == pytest.approx(want[0], abs=4 * error)
    assert got.diffusion == pytest.approx(want[1:].sum(), abs=4 * error)
    np.testing.assert_allclose(got.per_timestep, want, atol=4 * error)
    assert got.timesteps == list(range(T)) and got.num_inference_steps is None and got.continuous_time
    assert got.protocol.endswith("continuous time read on 5 timesteps, 15 stratified times per example, seed 0")


def test_an_absorbing_process_with_the_exact_network_reaches_the_entropy():
    """Positions are revealed one at a time, and nothing is lost; T = 4 steps lose something."""
    family = families.build("absorbing", 4, [0.2, 0.5, 0.3, 1.0])
    scheduler = family.scheduler()
    data = toy(scheduler, length=3)
    joint = data.reshape(4, 4, 4)
    # What the unmasked positions say does not depend on the time.
    logits = ref.exact_prediction(family.matrices, joint, 1, "leave_one_out").log().expand(4, -1, -1, -1)
    entropy = ref.entropy(data).item()
    assert integral(scheduler, data, logits) == pytest.approx(entropy, rel=1e-6)
    drawn = torch.multinomial(data, 3000, True, generator=torch.Generator().manual_seed(0))
    x_0 = ref.states(4, 3)[drawn]
    got = bound(scheduler, lookup(logits), [x_0])
    assert got.standard_error < 0.02 and abs(3 * got.total - entropy) < 3 * 4 * got.standard_error
    steps = evaluate_bound(scheduler, lookup(logits), [x_0], progress_bar=False)
    assert steps.total > got.total + 0.02


def test_a_finer_clock_brings_a_uniform_process_to_the_entropy():
    """The exact network of uniform noise depends on the time, which it is shown on T timesteps."""
    gaps = []
    for steps in (3, 24):
        betas = ref.reciprocal_betas(steps)
        family = families.build("uniform", 2, betas.tolist())
        data = toy(family.scheduler())
        joint = data.reshape(2, 2)
        exact = [ref.exact_prediction(family.matrices, joint, t, "leave_one_out") for t in range(1, steps + 1)]
        gaps.append(integral(family.scheduler(), data, torch.stack(exact).log(), 20) - ref.entropy(data).item())
    assert 0 < gaps[1] < gaps[0] / 6


@pytest.mark.parametrize("name", ["uniform", "absorbing_uniform", "absorbing_in_data"])
@pytest.mark.parametrize("nats", [3.0, 60.0, 400.0])
def test_a_network_that_is_sure_of_something_else(name, nats):
    """One variable, and a network that gives it exp(-nats): the bound is `nats`, in any number of steps.

    All of it lies next to the data, where no draw would find it.
    """
    scheduler = create(name, num_steps=1000)
    logits = torch.tensor([-nats, 0.0, -torch.inf])
    got = bound(
        scheduler,
        lambda x_t, t: logits.expand(*x_t.shape, -1),
        [torch.zeros(500, 4).long()],
        num_eval_timesteps=40,
    )
    want = -logits.log_softmax(-1)[0].item()
    assert abs(got.total - want) < 4 * got.standard_error < 0.3 * want
    logits = torch.tensor([-torch.inf, 0.0, 0.0])
    got = bound(
        scheduler, lambda x_t, t: logits.expand(*x_t.shape, -1), [torch.zeros(2, 4).long()], num_eval_timesteps=4
    )
    assert got.total == torch.inf


def test_the_closed_form_is_the_integral():
    """Of A pi / m over the first timestep, for all sizes of p(x_0) / pi(x_0)."""
    log_pi = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.25, 1e-6, 0.0]).double().log()
    log_p = torch.tensor([0.25, 0.9, 1e-3, 1e-12, 0.2500001, 0.9, 0.5]).double().log()
    for last_a in (0.0, 0.3, 0.95):
        low = math.log(last_a / (1 - last_a)) if last_a else -60.0
        log_odds = torch.linspace(low, 60, 40_001, dtype=torch.float64)[:, None]
        log_a, log_noise = (torch.nn.functional.logsigmoid(v) for v in (log_odds, -log_odds))
        rate = unchanged_rate(log_p, log_pi, log_a, log_noise)
        want = torch.trapezoid(rate * log_noise.exp(), log_odds, dim=0)  # dL = (1 - A) d log-odds
        torch.testing.assert_close(unchanged_integral(log_p, log_pi, last_a), want, rtol=1e-6, atol=1e-12)
    assert want[-1] == 0


@pytest.mark.parametrize("betas", [[0.2] * 4, [0.0, 0.3, 1.0, 0.2], [1.0], [0.0, 0.0, 0.5]], ids=str)
@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_schedules_of_ones_own(name, betas):
    """Some do not end in the prior, some forget in the middle, some begin without noise. One variable: the bound is known.

    It is KL(q(x_T | x_0) || p(x_T)) + KL(q_0 || p_0) - KL(q_T || p_T), where p_T is the prediction after T steps.
    """
    scheduler = D3PMScheduler(3, len(betas), name, trained_betas=betas)
    log_p = torch.tensor([0.5, 2.0, -torch.inf if name == "absorbing" else 0.0]).double().log_softmax(-1)
    x_0, pi, a = torch.arange(1200)[:, None] % 2, scheduler.transition.stationary, math.prod(1 - b for b in betas)
    q = a * torch.eye(3).double()[:2] + (1 - a) * pi
    left = ref.kl(q, (a * log_p.exp() + (1 - a) * pi).expand(2, 3))
    prior = ref.kl(q, pi.expand(2, 3))
    got = bound(scheduler, lambda x_t, t: log_p.expand(*x_t.shape, -1), [x_0], num_eval_timesteps=30)
    want = (prior - log_p[:2] - left).mean().item()
    if prior.isinf().any():
        assert got.total == torch.inf
    else:
        assert abs(got.total - want) < 4 * got.standard_error < 0.3
    assert got.prior == pytest.approx(prior.mean().item(), abs=1e-12)
    rest = (-log_p[:2] - left).mean().item()
    assert got.diffusion + got.reconstruction == pytest.approx(rest, abs=0.2)


def test_no_noise_at_all():
    scheduler = D3PMScheduler(3, 2, "uniform", trained_betas=[0.0, 0.0])
    got = bound(scheduler, lambda x_t, t: torch.zeros(*x_t.shape, 3), [torch.zeros(2, 4).long()])
    assert got.total == got.prior == pytest.approx(math.log(3))


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_what_the_network_is_shown(name):
    """The timestep in whose stretch the noise of x_t is; what is not scored as it is."""
    scheduler, shown = create(name, num_steps=10), []

    def model(x_t, timesteps, attention_mask):
        assert (x_t[:, :10] == 0).all() and attention_mask.shape == x_t.shape
        shown.extend(zip(timesteps.tolist(), (x_t[:, 10:] != 0).double().mean(1).tolist()))
        return torch.zeros(*x_t.shape, K)

    x_0 = torch.zeros(4, 4010, dtype=torch.long)
    loss_mask = torch.ones_like(x_0)
    loss_mask[:, :10] = 0
    batch = {"x_0": x_0, "loss_mask": loss_mask, "attention_mask": torch.ones_like(x_0)}
    got = bound(scheduler, model, [batch], num_eval_timesteps=30)
    assert got.num_known == 40 and got.num_elements == 16000
    changed = 1 if name == "absorbing" else 1 - 1 / K
    assert {t for t, _ in shown} == set(range(10))
    for t, share in shown[8:]:  # after the two calls that are compared
        assert t / 10 - 0.03 < share / changed < (t + 1) / 10 + 0.03


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_a_padded_text_has_the_bound_of_the_text(name):
    scheduler = create(name, num_classes=5)
    embedding = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))

    def model(x_t, timesteps, attention_mask):
        return embedding[x_t] + (embedding[x_t] * attention_mask[..., None]).sum(1, keepdim=True)

    texts = [torch.randint(4, (1, n), generator=torch.Generator().manual_seed(n)) for n in (3, 7)]
    alone = [{"input_ids": text, "attention_mask": torch.ones_like(text)} for text in texts]
    padded = torch.zeros(2, 7, dtype=torch.long)
    mask = torch.zeros(2, 7, dtype=torch.long)
    for row, text in enumerate(texts):
        padded[row, : text.shape[1]], mask[row, : text.shape[1]] = text[0], 1
    one, many = (
        bound(scheduler, model, alone),
        bound(scheduler, model, [{"input_ids": padded, "attention_mask": mask}]),
    )
    torch.testing.assert_close(one.nats_per_example, many.nats_per_example, rtol=1e-6, atol=1e-6)
    assert many.elements_per_example.tolist() == [3, 7]


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_batches_and_seeds(name):
    scheduler = create(name)
    logits = tables(scheduler)
    x_0 = ref.states(K, LENGTH)[torch.multinomial(toy(scheduler), 12, True)]
    whole, *others = (bound(scheduler, lookup(logits), x_0.split(size), seed=3) for size in (12, 5, 1))
    for other in others:
        torch.testing.assert_close(other.nats_per_example, whole.nats_per_example, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(other.per_timestep, whole.per_timestep, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert bound(scheduler, lookup(logits), [x_0], seed=3).total == whole.total
    assert bound(scheduler, lookup(logits), [x_0], seed=4).total != whole.total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_short_dtypes_are_computed_in_float64(name, dtype):
    scheduler = create(name)
    logits = tables(scheduler)[0].to(dtype)
    x_t = ref.states(K, LENGTH)
    x_0 = torch.zeros_like(x_t)
    log_a, log_noise = torch.tensor(0.7).double().log(), torch.tensor(0.3).double().log()
    got, want = (rate_of(scheduler, v, x_0, x_t, 0, log_a, log_noise) for v in (logits, logits.double()))
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_a_large_vocabulary(name):
    """A network that knows nothing: log K nats for any data."""
    size = 50_000
    scheduler = create(name, num_classes=size, num_steps=100)
    x_0 = torch.randint(size - 1, (4, 16), generator=torch.Generator().manual_seed(0))
    got = bound(scheduler, lambda x_t, t: torch.zeros(1).expand(*x_t.shape, size), [x_0], num_eval_timesteps=12)
    want = math.log(size - (name == "absorbing"))
    assert got.standard_error < 2 and abs(got.total - want) < 4 * got.standard_error


def test_logistic_outputs():
    logistic = create("uniform", prediction_type="logistic")
    output = torch.tensor([0.2, -1.0])
    logits = logistic.logits(output)
    x_0 = torch.arange(K).expand(5, -1)
    got = bound(logistic, lambda x_t, t: output.expand(*x_t.shape, 2), [x_0])
    want = bound(create("uniform"), lambda x_t, t: logits.expand(*x_t.shape, K), [x_0])
    assert got.total == pytest.approx(want.total, rel=1e-9)


@pytest.mark.parametrize("name", ["gaussian", "band_diagonal", "matrix", "rate", "nearest_neighbor", "autoregressive"])
def test_other_families_have_none(name):
    family = families.build(name)
    x_0 = family.data((2, families.NUM_STEPS))
    with pytest.raises(
        ValueError, match=f"keeps a state or draws it anew .*, and this one is '{name}': pass continuous_time=False"
    ):
        bound(family.scheduler(), lambda x_t, t: torch.zeros(*x_t.shape, 5), [x_0])


@pytest.mark.parametrize(
    "config, arguments, words",
    [
        ({"prediction_type": "previous"}, {}, "has 'previous' and 'posterior': pass continuous_time=False"),
        ({"reconstruction": "raw"}, {}, "has 'x0' and 'raw': pass continuous_time=False"),
        ({}, {"num_inference_steps": 3}, "which has no steps, and num_inference_steps=3: leave one of the two out"),
        ({}, {"is_causal": True}, "which has no steps, and is_causal=True: leave one of the two out"),
        ({}, {"num_eval_timesteps": 1}, "num_eval_timesteps is 1: it must be .*2"),
        ({}, {"num_eval_timesteps": 2.5}, "num_eval_timesteps is 2.5"),
        ({}, {"spacing": "odd"}, "spacing is 'odd'"),
    ],
)
def test_what_cannot_be_measured(config, arguments, words):
    with pytest.raises(ValueError, match=words):
        bound(
            create("uniform", **config),
            lambda x_t, t: torch.zeros(*x_t.shape, K),
            [torch.zeros(2, 4).long()],
            **arguments,
        )


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
@pytest.mark.parametrize(
    "logits, words",
    [
        (torch.full((K,), torch.nan), "output of the network holds NaN"),
        (torch.full((K,), -torch.inf), "all logits at position .* are -inf: leave at least one state possible"),
        (torch.zeros(K + 1), "the network's output has the shape"),
    ],
    ids=["nan", "-inf", "shape"],
)
def test_outputs_that_say_nothing(name, logits, words):
    with pytest.raises(ValueError, match=words):
        bound(create(name), lambda x_t, t: logits.expand(*x_t.shape, -1), [torch.zeros(2, 4).long()])


def test_masks_in_the_data():
    with pytest.raises(ValueError, match="is the mask token 2, which data never hold: exclude padding with loss_mask"):
        bound(create("absorbing"), lambda x_t, t: torch.zeros(*x_t.shape, K), [torch.full((2, 4), 2)])


def test_the_prior_is_that_of_the_steps():
    scheduler = D3PMScheduler(3, 4, "uniform", trained_betas=[0.2] * 4)
    x_0 = torch.arange(3).expand(2, -1)
    got = bound(scheduler, lambda x_t, t: torch.zeros(*x_t.shape, K), [x_0])
    assert got.prior == pytest.approx(prior_loss(scheduler, x_0).mean().item()) and got.prior > 0.01
