# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Samplers that change the distribution of a model on purpose: what they draw, and what they keep."""

import itertools

import families
import pytest
import reference as ref
import torch
import toy

from d3pm_hf import D3PMScheduler
from d3pm_hf.samplers import ancestral, confidence, remasking
from d3pm_hf.samplers.confidence import masked_shares, measure_confidence
from d3pm_hf.samplers.remasking import reveal_and_mask


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
K, LENGTH, MASK = 4, 3, 3
SIX = [1 / 6, 1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def build(betas=SIX, length=LENGTH, seed=0):
    family = families.build("absorbing", K, betas)
    probs = toy.joint(family, length, seed)
    return family, family.scheduler(), probs, toy.ExactFunction(family, probs)


def draw(sampler, scheduler, predict, timesteps, count=6000, seed=0, **options):
    x_T = torch.full((count, LENGTH), MASK)
    return sampler(scheduler, predict, x_T, timesteps, generator=seeded(seed), **options)


# Remasking


@pytest.mark.parametrize("timesteps", [[5, 4, 3, 2, 1, 0], [5, 2]], ids=str)
def test_remasking_nothing_is_ancestral(timesteps):
    _, scheduler, _, predict = build()
    seen = []
    for sampler in (lambda *args, **kwargs: remasking(*args, eta=0.0, **kwargs), ancestral):
        states = []
        draw(sampler, scheduler, predict, timesteps, callback=lambda step: states.append(step.prev_sample))
        seen.append(torch.stack(states))
    assert torch.equal(*seen)


@pytest.mark.parametrize("eta", [0.1, 0.5, 1.0])
def test_remasking_keeps_the_forward_process(eta):
    """q(x_s | x_0) of the steps that mask again is that of the process, and no probability is outside of [0, 1]."""
    for betas in (SIX, *families.BETAS.values()):
        scheduler = families.build("absorbing", K, betas).scheduler()
        for t, s in itertools.product(range(6), range(-1, 5)):
            if s >= t:
                continue
            a_t, a_s = (scheduler.transition.log_survival(0, n + 1, torch.empty(1)).exp().item() for n in (t, s))
            p_reveal, p_mask = reveal_and_mask(scheduler, t, s, eta)
            assert 0 <= p_reveal <= 1 and 0 <= p_mask <= eta
            assert a_t * (1 - p_mask) + (1 - a_t) * p_reveal == pytest.approx(a_s, abs=1e-12)
            assert p_mask == 0 or s >= 0


def remasking_step(scheduler, predict, t, s, eta, states):
    """Probabilities `[n, N, K]` of each position at s, for each of `states` at t."""
    p_reveal, p_mask = reveal_and_mask(scheduler, t, s, eta)
    is_mask, at_mask = (states == MASK)[..., None], torch.nn.functional.one_hot(torch.tensor(MASK), K).double()
    from_mask = p_reveal * predict(states, t).softmax(-1) + (1 - p_reveal) * at_mask
    from_token = (1 - p_mask) * torch.nn.functional.one_hot(states, K).double() + p_mask * at_mask
    return torch.where(is_mask, from_mask, from_token)


def test_remasking_keeps_the_distribution_of_each_position():
    """With an exact denoiser, after a step from q(x_t). That of all positions together is kept no better than by a plain step."""
    family, scheduler, probs, predict = build()
    for t, s, eta in ((4, 3, 0.3), (3, 1, 1.0), (2, -1, 1.0), (5, 2, 0.5)):
        law, states = toy.noisy_law(family, probs, t + 1), ref.states(K, LENGTH)
        rows = remasking_step(scheduler, predict, t, s, eta, states)
        expected = toy.noisy_law(family, probs, s + 1).reshape([K] * LENGTH)
        for i in range(LENGTH):
            others = [j for j in range(LENGTH) if j != i]
            torch.testing.assert_close(law @ rows[:, i], expected.sum(others), rtol=0, atol=1e-9)


@pytest.mark.parametrize("eta", [0.2, 1.0])
def test_the_law_of_remasking(eta):
    _, scheduler, _, predict = build()
    timesteps, states = [5, 3, 1], ref.states(K, LENGTH)
    law = (states == MASK).all(1).double()
    for t, s in zip(timesteps, [*timesteps[1:], -1]):
        rows = remasking_step(scheduler, predict, t, s, eta, states)
        law = law @ torch.stack([rows[:, i, states[:, i]] for i in range(LENGTH)]).prod(0)
    drawn = draw(remasking, scheduler, predict, timesteps, eta=eta)
    assert ref.fit(toy.indices(drawn, K)[:, None], law[None]) > 1e-3


def test_remasking_masks_tokens_but_not_known_ones():
    _, scheduler, _, predict = build()
    states = []
    known = torch.tensor([[2, 0, 0]]).expand(2000, -1)
    is_known = torch.tensor([[True, False, False]]).expand(2000, -1)
    x_0 = draw(
        *(remasking, scheduler, predict, [5, 4, 3, 2, 1, 0], 2000),
        eta=1.0,
        known=known,
        is_known=is_known,
        callback=lambda step: states.append(step.prev_sample),
    )
    pairs = list(zip(states, states[1:]))
    assert all(((a != MASK) & (b == MASK)).any() for a, b in pairs[:-1])
    assert all((x[:, 0] == 2).all() for x in states) and (x_0 != MASK).all()


# Confidence


def one_by_one(betas):
    """The timesteps of a process, in steps so small that each reveals at most one of the positions."""
    return list(range(len(betas) - 1, -1, -1))


@pytest.mark.parametrize("measure", ["probability", "margin", "entropy", "left_to_right"])
@pytest.mark.parametrize("choice_temperature", [0.0, 3.0])
def test_one_position_after_the_other_has_the_law_of_the_data(measure, choice_temperature):
    """Any order is exact for an exact network, if it depends on what has been revealed alone."""
    _, scheduler, probs, predict = build()
    options = {"measure": measure, "choice_temperature": choice_temperature}
    drawn = draw(confidence, scheduler, predict, one_by_one(SIX), 20_000, **options)
    assert ref.fit(toy.indices(drawn, K)[:, None], probs.reshape(1, -1)) > 1e-3


def confident_law(predict, timesteps, left, state, score):
    """The exact law of the samples from one state: the masks that the network is most certain of are drawn together."""
    states, law = ref.states(K, LENGTH), torch.zeros(K**LENGTH, dtype=torch.float64)
    current = {tuple(state): 1.0}
    for t, s in zip(timesteps, [*timesteps[1:], -1]):
        following = {}
        for x, weight in current.items():
            p = predict(torch.tensor([x]), t)[0].softmax(-1)  # [N, K]
            masks = sorted((i for i in range(LENGTH) if x[i] == MASK), key=lambda i: -score(p[i]))
            chosen = masks[: max(0, len(masks) - left[s])]
            for tokens in itertools.product(range(K), repeat=len(chosen)):
                new, chance = list(x), weight
                for i, token in zip(chosen, tokens):
                    new[i], chance = token, chance * p[i, token].item()
                following[tuple(new)] = following.get(tuple(new), 0.0) + chance
        current = following
    for x, weight in current.items():
        law[toy.indices(torch.tensor([x]), K)] += weight
    assert len(law) == len(states)
    return law


SCORES = {
    "probability": lambda p: p.max().item(),
    "margin": lambda p: (p.topk(2).values[0] - p.topk(2).values[1]).item(),
    "entropy": lambda p: torch.special.xlogy(p, p).sum().item(),
    "left_to_right": lambda p: 0.0,  # the reference takes the left one of equal scores
}


@pytest.mark.parametrize("measure", list(SCORES))
def test_the_law_of_confidence(measure):
    _, scheduler, _, predict = build(seed=4)
    timesteps = [5, 2]  # two at once, and then the third one
    left = {s: int(LENGTH * share + 1e-6) for s, share in masked_shares(scheduler, timesteps).items()}
    assert left == {5: 3, 2: 1, -1: 0}
    law = confident_law(predict, timesteps, left, [MASK] * LENGTH, SCORES[measure])
    drawn = draw(confidence, scheduler, predict, timesteps, measure=measure)
    assert ref.fit(toy.indices(drawn, K)[:, None], law[None]) > 1e-3


def test_measures():
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [1.0, 0.0, 0.0]]).double().log()
    assert measure_confidence(logits, "probability").exp().tolist() == pytest.approx([0.5, 0.4, 1.0])
    assert measure_confidence(logits, "margin").exp().tolist() == pytest.approx([0.2, 0.0, 1.0])
    assert measure_confidence(logits, "entropy").tolist() == pytest.approx([-1.0296530, -1.0549202, 0.0])
    assert measure_confidence(logits, "margin").isfinite().all()


class Counted:
    """A network that is the more certain the further right a position is, and counts its calls."""

    def __init__(self, num_classes):
        self.num_classes, self.times = num_classes, []

    def __call__(self, x_t, timestep):
        self.times.append(int(timestep))
        logits = torch.zeros(*x_t.shape, self.num_classes)
        logits[..., 0] = torch.arange(x_t.shape[1]) / 10.0
        return logits


def test_steps_that_reveal_nothing_call_no_network():
    scheduler, model = D3PMScheduler(5, 1000), Counted(5)
    x_T = torch.full((2, 8), 4)
    x_T[1, :4] = 1
    x_0 = confidence(scheduler, model, x_T, list(range(999, -1, -1)), generator=seeded())
    assert len(model.times) == 8 and (x_0 != 4).all() and (x_0[1, :4] == 1).all()
    model.times.clear()
    states = []
    confidence(
        *(scheduler, model, x_T, list(range(999, -1, -1))),
        generator=seeded(),
        callback=lambda step: states.append(step.prev_sample),
    )
    assert len(model.times) == len(states) == 1000 and torch.equal(states[-1], x_0)
    # From the right, one position after the other.
    left = torch.stack(states)[:, 0] == 4
    assert (left.int().sum(1).diff() >= -1).all() and (left[:, 1:].int() <= left[:, :-1].int()).all()
    model.times.clear()
    assert torch.equal(confidence(scheduler, model, x_0, [999, 3], generator=seeded()), x_0) and not model.times


def test_a_large_choice_temperature_is_a_random_order():
    scheduler, model = D3PMScheduler(5, 4), Counted(5)
    first = []

    def note(step):
        if step.index == 0:
            first.append((step.prev_sample != 4).int().argmax(1))

    confidence(
        *(scheduler, model, torch.full((4000, 4), 4), [3, 2, 1, 0]),
        generator=seeded(),
        choice_temperature=1e6,
        callback=note,
    )
    assert ref.fit(first[0][:, None], torch.full((1, 4), 0.25)) > 1e-3


@pytest.mark.parametrize("sampler", [confidence, remasking])
def test_where_they_do_not_apply(sampler):
    for options in ({"transition": "uniform", "beta_schedule": "cosine"}, {"prediction_type": "previous"}):
        scheduler = D3PMScheduler(5, 10, **options)
        with pytest.raises(
            ValueError, match=f"sampler is '{sampler.__name__}', and the process is .*choose 'ancestral'"
        ):
            sampler(scheduler, Counted(5), torch.zeros(1, 2, dtype=torch.long), list(range(9, -1, -1)))
