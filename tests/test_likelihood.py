# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The bound on a data set against its exact value, on one variable whose best denoiser is known.

A single variable with the law p_0 has no neighbors to learn from: the leave-one-out posterior is p_0 itself, and the
bound of the network that says so is H(p_0), for any process that ends in its prior.
"""

import itertools
import math
import runpy
from pathlib import Path

import families
import numpy as np
import pytest
import reference as ref
import scipy.stats
import torch
from transformers import BatchEncoding

from d3pm_hf import Bound, D3PMScheduler, d3pm_loss, evaluate_bound, prior_loss
from d3pm_hf.likelihood.bound import perplexity, perplexity_standard_error, skewed_interval
from d3pm_hf.likelihood.strides import evaluate_strides
from d3pm_hf.likelihood.terms import stratify


# Processes that forget everything; one of each implementation.
NAMES = ("uniform", "absorbing", "stationary", "rate", "nearest_neighbor-sparse")
T = families.NUM_STEPS


def toy(name, betas="end", num_classes=5):
    """The scheduler, the law p_0 and the network that knows it."""
    family = families.build(name, num_classes, betas)
    law = families.stochastic(num_classes, seed=3) ** 3
    if family.mask is not None:
        law[family.mask] = 0
    law = ref.normalize(law)
    return family, family.scheduler(), law, lambda x_t, t: law.log().float().expand(*x_t.shape, -1)


def data(law, size, length=8, seed=0):
    return torch.multinomial(law, size * length, True, generator=torch.Generator().manual_seed(seed)).view(
        size, length
    )


def bound(scheduler, model, batches, **kwargs):
    return evaluate_bound(scheduler, model, batches, progress_bar=False, **kwargs)


def exact_terms(family, scheduler, logits, x_0, timesteps):
    """The expectation over x_t of every term of the bound for these x_0 [n], by enumeration: [n] and [steps, n]."""
    terms = []
    for s, t in itertools.pairwise([-1, *timesteps]):
        x_t = torch.arange(family.num_classes).repeat(len(x_0), 1)  # [n, K]
        weights = ref.marginal(family.matrices, x_0[:, None], 0, t + 1)[:, 0]  # [n, K]
        first = x_0[:, None].expand_as(x_t)
        nats = d3pm_loss(scheduler, logits.expand(*x_t.shape, -1), first, x_t, t, previous_timesteps=s).vb.double()
        terms.append(torch.where(weights > 0, weights * nats, 0).sum(-1))
    return prior_loss(scheduler, x_0[:, None])[:, 0], torch.stack(terms)


@pytest.mark.parametrize("name", NAMES)
def test_the_best_network_reaches_the_entropy(name):
    family, scheduler, law, model = toy(name)
    result = bound(scheduler, model, [data(law, 300)])
    assert result.prior == pytest.approx(0, abs=1e-9)
    assert 0 < result.standard_error < 0.1
    assert abs(result.total - ref.entropy(law).item()) < 3.5 * result.standard_error
    # Exactly, once the noise and the data are summed over.
    states = law.nonzero().squeeze(-1)
    prior, terms = exact_terms(family, scheduler, law.log().float(), states, range(T))
    assert (law[states] @ (prior + terms.sum(0))).item() == pytest.approx(ref.entropy(law).item(), abs=1e-5)


@pytest.mark.parametrize("num_inference_steps", [T, 3, 1])
@pytest.mark.parametrize("betas", [[0.2] * T, "end"], ids=["unfinished", "end"])
@pytest.mark.filterwarnings("ignore:after .* steps q")
def test_each_part_is_the_exact_one(betas, num_inference_steps):
    """On average over noise, and for a network that is wrong; an unfinished process leaves something to the prior."""
    family, scheduler, law, _ = toy("uniform", betas)
    logits = torch.randn(5, generator=torch.Generator().manual_seed(5))
    x_0 = torch.arange(5).repeat(400, 4)
    result = bound(
        scheduler, lambda x_t, t: logits.expand(*x_t.shape, -1), [x_0], num_inference_steps=num_inference_steps
    )
    timesteps = scheduler.spaced_timesteps(num_inference_steps)[::-1]
    prior, terms = exact_terms(family, scheduler, logits, torch.arange(5), timesteps)
    assert result.timesteps == timesteps and result.num_inference_steps == num_inference_steps
    assert result.prior == pytest.approx(prior.mean().item(), rel=1e-6)
    assert (result.prior > 1e-2) == (betas != "end")
    error = 4 * result.standard_error + 1e-6
    assert result.reconstruction == pytest.approx(terms[0].mean().item(), abs=error)
    assert result.diffusion == pytest.approx(terms[1:].sum(0).mean().item(), abs=error)
    torch.testing.assert_close(result.per_timestep, terms.mean(-1), rtol=0.05, atol=5e-3)
    assert result.total == result.prior + result.diffusion + result.reconstruction
    assert result.per_timestep.sum().item() + result.prior == pytest.approx(result.total, rel=1e-9)


def test_fewer_steps_cost_more():
    """For data whose elements tell of each other; here the network is told the truth about half of them."""
    _, scheduler, law, _ = toy("absorbing")
    x_0 = data(law, 200, length=2)
    x_0[:, 1] = x_0[:, 0]  # twins
    logits = law.log().float()
    mask = scheduler.mask_token_id

    def model(x_t, t):
        twin = x_t.flip(-1)
        sure = torch.nn.functional.one_hot(twin, 5).float().log()
        return torch.where((twin == mask)[..., None], logits.expand(*x_t.shape, -1), sure)

    results = [bound(scheduler, model, [x_0], num_inference_steps=n) for n in (1, 3, T)]
    assert results[0].total > results[1].total + 0.1 > results[2].total + 0.1
    assert results[0].total == pytest.approx(ref.entropy(law).item(), abs=4 * results[0].standard_error)
    assert results[2].total > ref.entropy(law).item() / 2  # nats per element of a pair of twins


@pytest.mark.parametrize("name", ["absorbing", "uniform", "nearest_neighbor-sparse"])
@pytest.mark.parametrize("num_evaluated", [None, 3])
def test_batches_do_not_show(name, num_evaluated):
    _, scheduler, law, model = toy(name)
    x_0 = data(law, 12)
    whole, *others = (
        bound(scheduler, model, x_0.split(size), seed=4, num_eval_timesteps=num_evaluated) for size in (12, 5, 1)
    )
    for other in others:
        for part in ("prior", "diffusion", "reconstruction", "standard_error"):
            assert getattr(other, part) == pytest.approx(getattr(whole, part), rel=1e-6, abs=1e-12)
        torch.testing.assert_close(other.per_timestep, whole.per_timestep, rtol=1e-6, atol=1e-9, equal_nan=True)
    assert bound(scheduler, model, [x_0], seed=5).total != whole.total


@pytest.mark.parametrize("count", [1, 2, 3, 20, 64, 1000])
def test_strata_are_a_partition(count):
    """Every timestep is in one stretch, L_0 alone in the first; none is longer by more than one than those after it."""
    for evaluated in range(min(2, count), count + 1):
        firsts, sizes = zip(*stratify(count, evaluated))
        assert len(sizes) == evaluated and sizes[0] == 1 and min(sizes) >= 1
        assert firsts == tuple(sum(sizes[:i]) for i in range(evaluated)) and sum(sizes) == count
        assert all(a <= b + 1 for a, b in zip(sizes, sizes[1:]))


@pytest.mark.parametrize("num_evaluated", [2, 4])
def test_strata_are_unbiased(num_evaluated):
    _, scheduler, law, model = toy("uniform")
    x_0 = data(law, 40)
    full = [bound(scheduler, model, [x_0], seed=seed) for seed in range(12)]
    some = [bound(scheduler, model, [x_0], seed=seed, num_eval_timesteps=num_evaluated) for seed in range(40)]
    assert some[0].num_eval_timesteps == num_evaluated and f"{num_evaluated} stratified" in some[0].protocol
    mean_full, mean_some = (torch.tensor([b.total for b in bounds]) for bounds in (full, some))
    error = math.sqrt(mean_full.var() / len(full) + mean_some.var() / len(some))
    assert abs(mean_full.mean() - mean_some.mean()) < 3.5 * error
    # The error that one run claims covers data, timesteps and noise: at least what timesteps and noise alone make.
    assert mean_some.std() < 1.5 * some[0].standard_error
    within = [abs(b.total - ref.entropy(law).item()) < 3.5 * b.standard_error for b in some]
    assert sum(within) >= 0.9 * len(within)


@pytest.mark.parametrize(("num_inference_steps", "sizes"), [(T, (1, 1, 4)), (4, (1, 1, 2))])
@pytest.mark.parametrize("name", ["uniform", "absorbing"])
def test_a_term_stands_for_its_stretch(name, num_inference_steps, sizes):
    """The sum of the drawn terms, each times the size of its stretch: by the reference, from what the network was shown."""
    family, scheduler, law, model = toy(name)
    x_0, seen = data(law, 30), []

    def spy(x_t, t):
        seen.append((x_t, t))
        return model(x_t, t)

    steps = {"num_inference_steps": num_inference_steps, "num_eval_timesteps": 3}
    result = bound(scheduler, spy, [x_0], **steps)
    timesteps = result.timesteps
    logits = law.log().expand(1, 8, -1)
    terms = torch.zeros(3, 30, dtype=torch.float64)
    for i, (x_t, t) in enumerate(seen[1:]):  # the first call comes twice
        for j, now in enumerate(t.tolist()):
            before = [-1, *timesteps][timesteps.index(now)]
            terms[i, j] = ref.variational(
                family.matrices, logits, x_0[j : j + 1], x_t[j : j + 1], before + 1, now + 1
            ).sum()
    weighted = (terms.sum(1) * torch.tensor(sizes)) / x_0.numel()
    assert result.reconstruction == pytest.approx(weighted[0].item(), rel=1e-5)
    assert result.diffusion == pytest.approx(weighted[1:].sum().item(), rel=1e-5)


# Intervals


def test_error_and_skewness_are_those_of_the_examples():
    """By hand, from the cost of each example alone (the others are masked out)."""
    _, scheduler, law, model = toy("uniform")
    x_0 = data(law, 7)
    mask = torch.arange(8) < torch.tensor([8, 1, 3, 5, 2, 8, 6])[:, None]
    options = {"num_eval_timesteps": 2}
    result = bound(scheduler, model, [(x_0, mask)], **options)
    nats = []
    for i in range(7):
        alone = mask & (torch.arange(7) == i)[:, None]
        one = bound(scheduler, model, [(x_0, alone)], **options)
        nats.append(one.total * one.num_elements)
    residual = np.array(nats) - result.total * mask.sum(1).numpy()
    assert sum(nats) == pytest.approx(result.total * 33, rel=1e-9)
    assert result.standard_error == pytest.approx(np.std(residual, ddof=1) * math.sqrt(7) / 33, rel=1e-6)
    assert result.skewness == pytest.approx(scipy.stats.skew(residual), rel=1e-6)
    low, high = skewed_interval(result.total, result.standard_error, result.skewness, 7, 0.9)
    assert result.confidence_interval(0.9) == (low, high) and low < result.total < high


def test_limits_of_an_interval():
    """Student's t without skewness; else the farther of it and of Hall's, whose transformation gives the quantile back."""
    for count, level in ((5, 0.95), (200, 0.5)):
        expected = scipy.stats.t.interval(level, count - 1, loc=2.0, scale=0.3)
        assert skewed_interval(2.0, 0.3, 0.0, count, level) == pytest.approx(expected, rel=1e-12)
    for skewness in (-3.0, 1e-9, 0.5, 6.0):
        low, high = skewed_interval(2.0, 0.3, skewness, 20, 0.95)
        student = scipy.stats.t.interval(0.95, 19, loc=2.0, scale=0.3)
        q, a = scipy.stats.t.ppf(0.975, 19), skewness / math.sqrt(20)
        on_hall = []
        for limit, y, of_student in ((low, q, student[0]), (high, -q, student[1])):
            x = (2.0 - limit) / 0.3
            on_hall.append(x + a * (x**2 / 3 + 1 / 6) + a**2 * x**3 / 27 == pytest.approx(y, rel=1e-9))
            assert on_hall[-1] or limit == pytest.approx(of_student, rel=1e-12)
        assert any(on_hall) and low <= student[0] + 1e-12 and high >= student[1] - 1e-12
    _, scheduler, law, model = toy("uniform")
    one = bound(scheduler, model, [data(law, 1)])
    assert all(math.isnan(limit) for limit in one.confidence_interval())
    for level in (0, 1, 95):
        with pytest.raises(ValueError, match=f"level is {level}: it must lie between 0 and 1, such as 0.95"):
            one.confidence_interval(level)


def test_intervals_cover():
    """Gaussian noise with two terms per example, most of which are cheap: 1.96 standard errors cover 0.7 and 0.87."""
    script = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "coverage.py"))
    examples = script["population"]("gaussian", 8, 2, count=3000)
    for num_examples, least in ((20, 0.88), (100, 0.93)):
        normal, interval = script["coverage"](*examples, num_examples, trials=2000)
        assert normal < 0.9 and least < interval < 0.98


def test_the_error_is_the_spread_between_runs():
    """With fresh data each time, the standard error is the standard deviation of the result."""
    _, scheduler, law, model = toy("uniform")
    runs = [bound(scheduler, model, [data(law, 30, seed=seed)], seed=seed) for seed in range(60)]
    spread = torch.tensor([b.total for b in runs]).std().item()
    claimed = sum(b.standard_error for b in runs) / len(runs)
    assert claimed == pytest.approx(spread, rel=0.3)


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_padding_does_not_count(name):
    """Elements that are masked out change nothing: not their tokens, not what the network says of them."""
    _, scheduler, law, model = toy(name)
    x_0 = data(law, 40)
    mask = (torch.arange(8) < torch.randint(1, 9, (40, 1), generator=torch.Generator().manual_seed(1))).long()
    other = torch.where(mask.bool(), x_0, (x_0 + 2) % 5 if name == "uniform" else 0)

    def blind(x_t, t):
        logits = model(x_t, t).clone()
        logits[mask[: len(x_t)] == 0] = torch.nan
        return logits

    result = bound(scheduler, model, [(x_0, mask)])
    assert result.num_elements == mask.sum() and result.num_examples == 40
    assert result.per_timestep.sum().item() + result.prior == pytest.approx(result.total, rel=1e-9)
    for batches, network in (([(other, mask)], model), ([[x_0, mask.bool()]], model), ([(x_0, mask)], blind)):
        again = bound(scheduler, network, batches)
        assert (again.total, again.standard_error) == pytest.approx((result.total, result.standard_error), rel=1e-9)
    assert abs(result.total - ref.entropy(law).item()) < 3.5 * result.standard_error
    assert bound(scheduler, model, [(x_0, torch.ones_like(x_0))]).total == bound(scheduler, model, [x_0]).total


@pytest.mark.parametrize("name", NAMES)
def test_any_shape(name):
    """Text, images, and one element per example."""
    _, scheduler, law, model = toy(name)
    x_0 = data(law, 20, length=12)
    flat, image = (bound(scheduler, model, [x.clone()]) for x in (x_0, x_0.view(20, 3, 2, 2)))
    assert image.total == pytest.approx(flat.total, rel=1e-6) and image.num_elements == 240
    single, column = (bound(scheduler, model, [x]) for x in (x_0[:, 0], x_0[:, :1]))
    assert single.total == pytest.approx(column.total, rel=1e-6) and single.num_elements == 20


def test_the_network_sees_the_timesteps():
    """x_t and one timestep per example, each from its stretch of time; L_0 always."""
    _, scheduler, law, model = toy("uniform")
    seen = []

    def spy(x_t, t):
        assert t.shape == (6,) and x_t.shape == (6, 8) and not torch.is_grad_enabled()
        seen.append(t)
        return model(x_t, t)

    bound(scheduler, spy, [data(law, 6)], num_eval_timesteps=3)
    assert len(seen) == 4  # the first twice, to see that the network does not drop out
    for t, (first, size) in zip(seen, ((0, 1), (0, 1), (1, 1), (2, 4))):
        assert ((t >= first) & (t < first + size)).all()


# What a batch may be


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_named_columns(name):
    """A dictionary is read by its names, whatever else it holds."""
    _, scheduler, law, model = toy(name)
    x_0 = data(law, 20)
    mask = (torch.arange(8) < torch.randint(1, 9, (20, 1), generator=torch.Generator().manual_seed(1))).long()
    pair, plain = bound(scheduler, model, [(x_0, mask)]), bound(scheduler, model, [x_0])
    ones = torch.ones_like(x_0)
    seen = []

    def attentive(x_t, t, attention_mask=None):
        seen.append(attention_mask)
        return model(x_t, t)

    for batch in (
        {"x_0": x_0, "loss_mask": mask},
        {"x_0": x_0, "loss_mask": mask.float(), "attention_mask": ones},
        {"x_0": x_0, "labels": torch.where(mask == 1, x_0, -100)},
        {"input_ids": x_0, "attention_mask": ones, "labels": torch.where(mask == 1, x_0, -100), "text": ["a"] * 20},
    ):
        result = bound(scheduler, attentive, [batch])
        assert (result.total, result.num_elements) == (pytest.approx(pair.total, rel=1e-12), int(mask.sum()))
        assert result.num_known == int((1 - mask).sum()) and f"given {result.num_known} known ones" in result.protocol
        assert all((given is None) == ("attention_mask" not in batch) for given in seen)
        seen.clear()
    padded = bound(scheduler, attentive, [BatchEncoding({"attention_mask": mask, "input_ids": x_0})])
    assert padded.num_elements == int(mask.sum()) and padded.num_known == 0 and "known" not in padded.protocol
    assert seen and all(torch.equal(given, mask) for given in seen)
    for batch in ({"x_0": x_0, "labels": mask[:, 0]}, {"input_ids": x_0, "loss_mask": ones}):
        assert bound(scheduler, model, [batch]).total == pytest.approx(plain.total, rel=1e-12)


def test_labels_are_no_mask():
    """A network that knows nothing costs log2(8192) = 13 bits, and no second tensor makes it cost less."""
    scheduler = D3PMScheduler(8192, num_train_timesteps=5, transition="uniform", beta_schedule="cosine")
    x_0 = torch.randint(1, 8192, (4, 6), generator=torch.Generator().manual_seed(0))

    def model(x_t, t):
        return torch.zeros(*x_t.shape, 8192)

    fix = "; classes are a column with a name of their own"
    for second, sentence in (
        (x_0, f"loss_mask holds {x_0[0, 0]}: pass booleans, or 1 where an element counts and 0 elsewhere{fix}"),
        (255 * (x_0 > 4000), "loss_mask holds 255: pass booleans, or 1 where"),
        (torch.full((4, 6), 0.5), "loss_mask holds 0.5: pass booleans"),
        (x_0[:, :1], rf"loss_mask has the shape \(4, 1\), and x_0 \(4, 6\): pass one value per element{fix}"),
        (x_0[:, 0] > 0, r"loss_mask has the shape \(4,\), and x_0 \(4, 6\)"),
        ([1, 0, 1, 1], r"loss_mask is \[1, 0, 1, 1\], and x_0 \(4, 6\)"),
    ):
        with pytest.raises(ValueError, match=sentence):
            bound(scheduler, model, [(x_0, second)])
    with pytest.raises(ValueError, match="attention_mask holds 7: pass booleans"):
        bound(scheduler, model, [{"input_ids": x_0, "attention_mask": torch.full_like(x_0, 7)}])
    with pytest.raises(
        ValueError, match="labels differ from input_ids where they are not -100: pass the data themselves"
    ):
        bound(scheduler, model, [{"input_ids": x_0, "labels": x_0 - 1}])
    result = bound(scheduler, model, [{"input_ids": x_0, "labels": x_0}])
    assert abs(result.bits_per_dim - 13) < 4 * result.bits_per_dim_standard_error


def test_a_tensor_is_one_batch():
    """Its rows are the examples, as in a list of it."""
    scheduler = D3PMScheduler(5, 6)
    data = torch.randint(0, 4, (3, 4), generator=torch.Generator().manual_seed(0))

    def model(x_t, timesteps, attention_mask=None):
        return torch.zeros(*x_t.shape, 5)

    expected = evaluate_bound(scheduler, model, [data], progress_bar=False)
    for batches in (data, {"x_0": data}, {"input_ids": data, "attention_mask": torch.ones_like(data)}):
        bound = evaluate_bound(scheduler, model, batches, progress_bar=False)
        assert (bound.num_examples, bound.num_elements, bound.total) == (3, 12, expected.total)
    one, same = (evaluate_strides(scheduler, model, batches, grid=3, progress_bar=False) for batches in (data, [data]))
    assert one.num_examples == 3 and torch.equal(one.costs, same.costs)


def test_a_batch_that_is_none():
    _, scheduler, law, model = toy("uniform")
    x_0 = data(law, 4)
    forms = "pass a tensor x_0, a dictionary with the column 'x_0' or 'input_ids' \\(and 'loss_mask'\\), or a pair"
    for batch, name in ((x_0.tolist(), "list"), ([x_0], "list"), ((x_0, None, x_0), "tuple"), ("text", "str")):
        with pytest.raises(ValueError, match=f"a batch is a {name} with no tensor of states: {forms}"):
            bound(scheduler, model, [batch])
    for columns in ({"image": x_0, "label": x_0}, {"x_0": x_0, "input_ids": x_0}):
        names = ", ".join(map(repr, columns))
        with pytest.raises(ValueError, match=f"the columns {names}: it needs the data in one column named 'x_0' or"):
            bound(scheduler, model, [columns])
    with pytest.raises(ValueError, match="dtype torch.float32: pass tokens as `x.long\\(\\)`"):
        bound(scheduler, model, [x_0.float()])


# The mode of the network


class Dropping(torch.nn.Module):
    """The network of `toy` behind a layer that drops out, and one that never does because it is frozen in eval mode."""

    def __init__(self, law):
        super().__init__()
        self.register_buffer("logits", law.log().float())
        self.dropout, self.frozen = torch.nn.Dropout(0.3), torch.nn.Dropout(0.3).eval()

    def forward(self, x_t, t):
        return self.frozen(self.dropout(self.logits.expand(*x_t.shape, -1)))


def test_a_network_is_measured_in_eval_mode():
    _, scheduler, law, model = toy("uniform")
    x_0, network = data(law, 20), Dropping(law).train()
    network.frozen.eval()
    expected = bound(scheduler, model, [x_0]).total
    for measured in (network, network.forward):
        assert bound(scheduler, measured, [x_0]).total == pytest.approx(expected, rel=1e-9)
    assert (network.training, network.dropout.training, network.frozen.training) == (True, True, False)
    with pytest.raises(ValueError, match="nothing to evaluate"):  # put back after an error, too
        bound(scheduler, network, [])
    assert network.dropout.training
    with pytest.raises(
        ValueError, match="two calls of `model` with the same input differ: .* call `.eval\\(\\)` on it"
    ):
        bound(scheduler, lambda x_t, t: network(x_t, t), [x_0])
    network.eval()
    assert bound(scheduler, lambda x_t, t: network(x_t, t), [x_0]).total == pytest.approx(expected, rel=1e-9)


def test_previous_steps_are_not_skipped():
    """What sampling refuses has no bound, and is refused in the same sentence."""
    family = families.build("uniform")
    scheduler = family.scheduler(prediction_type="previous")
    x_0, model = family.data((4, 8)), lambda x_t, t: torch.zeros(*x_t.shape, 5)
    assert bound(scheduler, model, [x_0]).num_inference_steps == T
    for steps in (1, 3):
        with pytest.raises(ValueError) as sampling:
            scheduler.set_timesteps(steps)
        with pytest.raises(
            ValueError, match="a network that predicts x_{t-1} directly has no prediction of x_0"
        ) as scoring:
            bound(scheduler, model, [x_0], num_inference_steps=steps)
        assert str(scoring.value) == str(sampling.value)


def test_units():
    parts = {"prior": 0.1, "diffusion": 1.2, "reconstruction": 0.3, "standard_error": 0.02}
    result = Bound(
        **parts,
        **{"timesteps": [0, 1], "per_timestep": torch.tensor([0.3, 1.2]), "num_examples": 10, "num_elements": 1000},
        **{"num_inference_steps": 2, "num_eval_timesteps": 2, "num_train_timesteps": 4, "seed": 7},
    )
    assert result.total == pytest.approx(1.6)
    assert result.bits_per_dim == result.bits_per_char == pytest.approx(1.6 / math.log(2))
    assert result.bits_per_dim_standard_error == pytest.approx(0.02 / math.log(2))
    assert result.perplexity == pytest.approx(math.exp(1.6))
    assert result.word_perplexity(250) == pytest.approx(math.exp(1.6 * 4))
    assert perplexity(800.0) == perplexity_standard_error(800.0, 0.5) == math.inf  # beyond the range of a float
    assert result.protocol == "10 examples, 1000 elements, 2 of 4 steps (even), all terms, seed 7"
    assert str(result) == f"2.3083 ± 0.0289 bits/dim ({result.protocol})"


def test_errors():
    _, scheduler, law, model = toy("uniform")
    x_0 = data(law, 4)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        bound(scheduler, model, [])
    with pytest.raises(ValueError, match="NaN"):
        bound(scheduler, lambda x_t, t: model(x_t, t) * torch.nan, [x_0])
    for wrong in (1, T + 1, -2):
        with pytest.raises(ValueError, match=f"num_eval_timesteps is {wrong}.* 2 .. {T}"):
            bound(scheduler, model, [x_0], num_eval_timesteps=wrong)
    for wrong in (T + 1, -1):
        with pytest.raises(ValueError, match=f"num_inference_steps is {wrong}.* 1 .. {T}"):
            bound(scheduler, model, [x_0], num_inference_steps=wrong)
    for name in ("num_inference_steps", "num_eval_timesteps"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            bound(scheduler, model, [x_0], **{name: 0})
    with pytest.raises(ValueError, match="no element"):
        bound(scheduler, model, [(x_0, torch.zeros_like(x_0))])
    assert math.isnan(bound(scheduler, model, [x_0[:1]]).standard_error)  # one example says nothing of the spread


def test_bounds_as_text():
    scheduler, x_0 = D3PMScheduler(5, 4), torch.tensor([[0, 1, 2], [2, 1, 0]])
    one, two = (bound(scheduler, lambda x_t, t: torch.zeros(*x_t.shape, 5), [x_0[:n]]) for n in (1, 2))
    assert str(one).startswith(f"{one.bits_per_dim:.4f} bits/dim (1 examples")
    assert str(two).startswith(f"{two.bits_per_dim:.4f} ± {two.bits_per_dim_standard_error:.4f} bits/dim (2 examples")
    excludes = torch.tensor([0, -torch.inf, 0, 0, 0])
    infinite = bound(scheduler, lambda x_t, t: excludes.expand(*x_t.shape, 5), [x_0])
    assert infinite.total == math.inf
    assert str(infinite).startswith("infinite bits/dim, as the model excludes some of the data (")
