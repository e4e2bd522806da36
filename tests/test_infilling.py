# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Conditional samples: what is known stays as it is, and the rest has the right distribution given it."""

import families
import pytest
import reference as ref
import torch
import toy
from comparison import assert_same_draws

from d3pm_hf import D3PMTextPipeline
from d3pm_hf.samplers.particle_filter import effective_number, evidence, resample


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose information")
T, LENGTH = 64, 3
# The sparse forms are slow on so many tiny steps, and answer the same questions as the dense ones (test_transitions.py).
# A step of blockwise noise, which has as many steps as tokens, reveals several at once.
NAMES = [name for name in families.NAMES if not name.endswith("-sparse") and name != "blockwise"]
BETAS = {
    "gaussian": [0.02 + 0.5 * t / T for t in range(T)],
    "band_diagonal": [0.3 * t / T for t in range(T)],
    "matrix": [0.3 * t / T for t in range(T)],
    "nearest_neighbor": [0.4 * t / T for t in range(T - 1)] + [1],
    "autoregressive": [0.5] * LENGTH,
}


def build(name):
    """A process, the probabilities `[K] * 3` of its data, and a pipeline whose network knows both."""
    num_classes = 4 if name.startswith("absorbing") or name == "autoregressive" else 3
    family = families.build(name, num_classes, BETAS.get(name, [1 / (T - t) for t in range(T)]))
    probs = toy.joint(family, LENGTH)
    pipeline = D3PMTextPipeline(toy.ExactDenoiser(family, probs), family.scheduler(), sequence_length=LENGTH)
    pipeline.set_progress_bar_config(disable=True)
    return family, probs, pipeline


def conditional(probs, position, token):
    """p(the other positions | token), flat."""
    chosen = probs.select(position, token).flatten()
    return chosen / chosen.sum()


def fill_in(pipeline, position, token, batch_size, num_particles, seed=0):
    """Samples around one known token, and the number of each outcome of the others, flat."""
    tokens, mask = torch.zeros(1, LENGTH, dtype=torch.long), torch.ones(1, LENGTH, dtype=torch.bool)
    tokens[0, position], mask[0, position] = token, False
    generator = torch.Generator().manual_seed(seed)
    options = {"batch_size": batch_size, "num_particles": num_particles, "generator": generator, "output_type": "seq"}
    if num_particles > 1:
        options["sampler_kwargs"] = {"known_path": "clamped"}  # `test_particle_filter.py` has the other one
    samples = pipeline(input_ids=tokens, mask=mask, **options).sequences
    others = samples[:, [i for i in range(LENGTH) if i != position]]
    num_classes = pipeline.scheduler.config.num_classes
    counts = torch.bincount(others[:, 0] * num_classes + others[:, 1], minlength=num_classes**2)
    return samples, counts.double()


def distance(counts, probs):
    """In total variation."""
    return ((counts / counts.sum() - probs).abs().sum() / 2).item()


@pytest.mark.parametrize(
    "name, position",
    [
        pytest.param(name, position, marks=[pytest.mark.slow] * ((index + position) % 2))
        for index, name in enumerate(NAMES)
        for position in (0, 1)
    ],
)
def test_frequencies_given_a_token(name, position):
    _, probs, pipeline = build(name)
    token = int(torch.where(probs.sum([i for i in range(LENGTH) if i != position]) > 0, 1, 0).argmax())
    samples, counts = fill_in(pipeline, position, token, batch_size=1500, num_particles=12)
    assert (samples[:, position] == token).all()
    right = conditional(probs, position, token)
    assert distance(counts, right) < 0.045  # 1500 exact draws of these outcomes are 0.02 away on average
    ignored = probs.sum(position).flatten()
    assert distance(counts, right) < distance(counts, ignored) / 4


@pytest.mark.parametrize("name", ["absorbing", "absorbing_in_data"])
def test_absorbing_needs_no_particles(name):
    _, probs, pipeline = build(name)
    _, counts = fill_in(pipeline, 1, 0, batch_size=4000, num_particles=1)
    assert distance(counts, conditional(probs, 1, 0)) < 0.03


def test_particles_are_what_makes_it_exact():
    _, probs, pipeline = build("uniform")
    _, counts = fill_in(pipeline, 1, 0, batch_size=4000, num_particles=1)
    assert distance(counts, conditional(probs, 1, 0)) > 0.08


@pytest.mark.parametrize("name", families.NAMES)
def test_reveal_shows_the_data_where_it_can(name):
    family = families.build(name, betas="end" if name != "autoregressive" else "plain")
    transition = family.transition
    x_0 = family.data((3, families.NUM_STEPS))
    for n in range(families.NUM_STEPS + 1):
        shown = transition.reveal(x_0, n)
        # A draw from q(x_n | x_0) it is in any case, but for tokens that an absorbing process has left no room for.
        possible = ref.marginal(family.matrices, x_0, 0, n)
        stays = possible.gather(-1, x_0[..., None]).squeeze(-1) > 0
        assert (shown[stays] == x_0[stays]).all()
        if name not in ("absorbing", "absorbing_in_data", "blockwise"):
            assert (possible.gather(-1, shown[..., None]) > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_everything_known_comes_back(name):
    family, _, pipeline = build(name)
    tokens = family.data((5, LENGTH))
    for num_particles in (1, 3):
        result = pipeline(
            input_ids=tokens, mask=torch.zeros_like(tokens).bool(), output_type="seq", num_particles=num_particles
        )
        assert torch.equal(result.sequences, tokens)


def test_generators_of_particles():
    """A batch with one generator per sample equals single runs, particles or not."""
    family, _, pipeline = build("uniform")
    tokens, mask = family.data((3, LENGTH)), torch.tensor([[True, False, True]]).expand(3, -1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    options = {"num_particles": 4, "output_type": "seq"}
    batch = pipeline(input_ids=tokens, mask=mask, generator=generators, **options).sequences
    for i in range(3):
        alone = torch.Generator().manual_seed(i)
        single = pipeline(input_ids=tokens[i : i + 1], mask=mask[:1], generator=alone, **options).sequences
        assert_same_draws(batch[i : i + 1], single)


def test_resampling_is_proportional_to_the_weights():
    log_weights = torch.tensor([[0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]).log()
    counts = torch.zeros(3, 4)
    for u in torch.linspace(0, 0.999, 1000).double():
        taken = resample(log_weights, u.expand(3))
        counts += torch.stack([torch.bincount(row, minlength=4) for row in taken])
    torch.testing.assert_close(counts / 4000, log_weights.exp(), atol=2e-3, rtol=0)
    torch.testing.assert_close(effective_number(log_weights), torch.tensor([1 / 0.3, 1.0, 4.0]))


def test_evidence_adds_up_over_known_positions():
    log_p = torch.tensor([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]]).log()[None]
    log_p[0, 1] = torch.nan  # a state without a posterior says nothing
    x = torch.tensor([[1, 0, 0]])
    torch.testing.assert_close(evidence(log_p, x, torch.tensor([[True, True, True]])), torch.tensor([0.72]).log())
    torch.testing.assert_close(evidence(log_p, x, torch.tensor([[True, True, False]])), torch.tensor([0.8]).log())
