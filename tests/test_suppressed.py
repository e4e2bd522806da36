# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""States besides the mask that data never hold: special tokens, and rows of an output layer without a token."""

from dataclasses import replace

import families
import pytest
import reference as ref
import torch
from families import NUM_STEPS, without_fused_loss

from d3pm_hf import D3PMScheduler, d3pm_loss
from d3pm_hf.data import DataCollatorForD3PM
from d3pm_hf.training.step_batches import RunCollator
from d3pm_hf.transitions.excluded import ExcludedStates


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
K, MASK = 40, 39
TIMES = torch.arange(1, NUM_STEPS + 1)  # steps behind
# One stretch, several, and so many that they are written by an index.
SETS = {"one": [0, 1, 2], "several": [0, 5, 6, 38], "many": list(range(0, 36, 2))}


def build(name, suppressed):
    """A family of the table whose data, and whose uniform noise, leave out the suppressed states."""
    family = families.build(name, K)
    betas = torch.tensor(families.BETAS["plain"], dtype=torch.float64)
    pi = torch.ones(K, dtype=torch.float64)
    pi[suppressed] = 0
    pi = pi / pi.sum()
    if name == "uniform":
        family = replace(family, matrices=ref.rank_one(betas, pi), prior=pi)
    if name == "absorbing_uniform":
        pi = 0.3 * pi
        pi[MASK] += 0.7
        family = replace(family, matrices=ref.rank_one(betas, pi), prior=pi)
    return replace(family, kwargs={**family.kwargs, "suppress_tokens": suppressed})


def case(family, suppressed, x0_posterior="leave_one_out"):
    """Data without the states that are excluded, x_t, logits, and the states that are never data."""
    never = sorted({*suppressed, *([] if family.mask is None else [family.mask])})
    tokens = torch.tensor([k for k in range(K) if k not in never])
    generator = torch.Generator().manual_seed(0)
    x_0 = tokens[torch.randint(len(tokens), (NUM_STEPS, 8), generator=generator)]
    logits = 2 * torch.randn(*x_0.shape, K, generator=generator, dtype=torch.float64)
    logits[..., never] += 30  # the network is sure of what cannot be
    return x_0, family.corrupt(x_0, TIMES), logits, never


@pytest.mark.parametrize("size", SETS)
@pytest.mark.parametrize("name", ["absorbing", "absorbing_in_data", "uniform", "absorbing_uniform", "gaussian"])
def test_losses_and_posteriors(name, size):
    """Fused loss, plain loss and posterior are those of a network that rules the states out itself."""
    family = build(name, SETS[size])
    scheduler = family.scheduler()
    x_0, x_t, logits, never = case(family, SETS[size])
    assert scheduler.never_data == tuple(never)
    allowed = ref.forbid(logits, never)
    truth = logits.clone().requires_grad_()
    masked = ref.forbid(truth, never)
    expected = ref.variational(family.matrices, masked, x_0, x_t, TIMES - 1, TIMES)
    expected = expected + 0.3 * ref.cross_entropy(family.matrices, masked, x_0, x_t, TIMES)
    expected.sum().backward()
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        given = logits.clone().to(dtype).requires_grad_()
        loss = d3pm_loss(scheduler, given, x_0, x_t, TIMES - 1, hybrid_coeff=0.3).loss
        loss.sum().backward()
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(given.grad.double(), truth.grad, rtol=tolerance, atol=tolerance)
        assert (given.grad[..., never] == 0).all()
    with without_fused_loss(scheduler.transition):
        plain = d3pm_loss(scheduler, logits, x_0, x_t, TIMES - 1, hybrid_coeff=0.3).loss
    torch.testing.assert_close(plain, expected.detach(), rtol=1e-9, atol=1e-9)
    posterior = scheduler.posterior_logits(logits, TIMES - 1, x_t, -1).exp()
    law = ref.reverse(family.matrices, allowed, x_t, torch.zeros_like(TIMES), TIMES)
    torch.testing.assert_close(posterior, law, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["absorbing", "uniform", "absorbing_uniform"])
def test_neither_noise_nor_samples_hold_them(name):
    family = build(name, SETS["several"])
    scheduler = family.scheduler()
    _, _, _, never = case(family, SETS["several"])
    tokens = torch.tensor([k for k in range(K) if k not in never])
    generator = torch.Generator().manual_seed(0)
    x_0 = tokens[torch.randint(len(tokens), (50, 100), generator=generator)]
    x_t = scheduler.add_noise(x_0, NUM_STEPS - 1, generator)
    assert not torch.isin(x_t, torch.tensor(SETS["several"])).any()
    logits = torch.zeros(50, 100, K)
    logits[..., never] = 50
    scheduler.set_timesteps(3)
    x = scheduler.sample_prior((50, 100), generator)
    for t in scheduler.timesteps:
        x = scheduler.step(logits, t, x, generator=generator).prev_sample
    assert not torch.isin(x, torch.tensor(never)).any()
    # All other states come up equally often.
    counts = torch.bincount(x.flatten(), minlength=K)[tokens].double()
    assert (
        (counts - counts.mean()) ** 2 / counts.mean()
    ).sum() < 70  # chi-square of about 35 degrees of freedom, p = 4e-4


@pytest.mark.parametrize("size", [*SETS, "none"])
def test_sets(size):
    states = SETS.get(size, [])
    excluded = ExcludedStates(states)
    assert bool(excluded) == bool(states)
    inside = torch.zeros(K, dtype=torch.bool)
    inside[states] = True
    values = torch.randn(3, 2, K, generator=torch.Generator().manual_seed(0))
    expected = values.masked_fill(inside, -5.0)
    assert torch.equal(excluded.fill(values, -5.0), expected)
    assert torch.equal(excluded.fill_(values, -5.0), expected) and torch.equal(values, expected)
    assert torch.equal(excluded.contain(torch.arange(K)), inside)


def test_saved_and_loaded(tmp_path):
    D3PMScheduler(K, 10, suppress_tokens=[3, 0], mask_token_id=MASK).save_pretrained(tmp_path)
    loaded = D3PMScheduler.from_pretrained(tmp_path)
    assert loaded.config.suppress_tokens == [3, 0] and loaded.never_data == (0, 3, MASK)
    assert loaded.gap_token_id == MASK
    assert D3PMScheduler(K, 10, transition="uniform", beta_schedule="cosine", suppress_tokens=[3]).gap_token_id is None


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"suppress_tokens": [K]}, f"an entry of suppress_tokens is {K}: it must be an integer in 0 .. {K - 1}"),
        ({"suppress_tokens": "[PAD]"}, "suppress_tokens is '\\[PAD\\]': it must be a list of tokens"),
        ({"suppress_tokens": list(range(1, K))}, "leave at least two others"),
        (
            {"suppress_tokens": [2], "unigram_probs": torch.ones(K) / K, "mask_in_data": True},
            "gives the suppressed token 2 the frequency 0.025: data must not hold it, or leave it out of suppress_tokens",
        ),
    ],
)
def test_wrong_sets(arguments, words):
    with pytest.raises(ValueError, match=words):
        D3PMScheduler(K, 10, **arguments)


def test_data_that_hold_them():
    scheduler = D3PMScheduler(K, 10, suppress_tokens=[2])
    x_0 = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"x_0 at position \(0, 1\) is the suppressed token 2, which data never hold"):
        d3pm_loss(scheduler, torch.zeros(1, 3, K), x_0, x_0, 4)
    loss = d3pm_loss(scheduler, torch.zeros(1, 3, K), x_0, x_0, 4, loss_mask=x_0 != 2).loss
    assert loss[0, 1] == 0


def test_training_data_that_hold_them():
    """They are known: special tokens stand in the text, and are not scored."""
    collate = RunCollator(DataCollatorForD3PM(), K, (2, MASK), MASK)
    batch = collate([(3, torch.tensor([1, 2])), (4, torch.tensor([2, 3]))])
    assert batch["loss_mask"].tolist() == [[True, False], [False, True]]
    with pytest.raises(ValueError, match=rf"token {MASK} at position \(0,\) of example 3 is the mask of the process"):
        collate([(3, torch.tensor([MASK, 1]))])
    with pytest.raises(ValueError, match="example 3 has no element that is scored"):
        collate([(3, torch.tensor([2, 2]))])
