# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The particle filter draws from p(x_0 | known) of the model itself, whatever its network says, and estimates p(known)."""

import families
import pytest
import reference as ref
import torch
import toy
from test_guidance import total_variation
from test_scheduler import reshaped

from d3pm_hf import ClassifierGuidance
from d3pm_hf.samplers import ClassifierGuidedScheduler, particle_filter


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose information")
T, LENGTH, TOKEN = 6, 2, 1
WARPED = [{"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.8}, {"temperature": 2.0, "top_k": 2, "top_p": 0.9}]
REWARDS = torch.randn(4**LENGTH, generator=torch.Generator().manual_seed(5))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Table:
    """A process, and a network that is an arbitrary table: logits `[T, K ** N, N, K]`, nothing like those of any data."""

    def __init__(self, name, num_steps=T, **options):
        K = 4 if name.startswith("absorbing") or name in families.BY_POSITION else 3
        steps = range(num_steps)
        betas = [1 / (num_steps - t) for t in steps] if name in RANK_ONE else [0.5 for _ in steps]
        self.family = families.build(name, K, [0.5] * (LENGTH - 1) + [1] if name in families.BY_POSITION else betas)
        self.scheduler, self.num_classes = self.family.scheduler(**options), K
        self.states = ref.states(K, LENGTH)
        size = (len(self.scheduler), K**LENGTH, LENGTH, K)
        self.logits = torch.randn(size, generator=seeded(3))
        if self.family.mask is not None:
            self.logits[..., self.family.mask] = -torch.inf

    def __call__(self, x_t, timestep):
        return self.logits[int(timestep), toy.indices(x_t, self.num_classes)]

    def law(self, timesteps, **warping):
        """Probabilities `[K ** N]` of x_0, by enumeration of the chain in float64."""
        law = self.scheduler.transition.log_prior.double().exp()[self.states].prod(-1)
        for t, s in zip(timesteps, [*timesteps[1:], -1]):
            reached = law > 0  # the others may have no posterior
            logits = reshaped(self.logits[t], **warping).log()[reached]
            rows = ref.reverse(self.family.matrices, logits, self.states[reached], s + 1, t + 1)  # [n, N, K]
            law = law[reached] @ torch.stack([rows[:, i, self.states[:, i]] for i in range(LENGTH)]).prod(0)
        return law

    def given(self, law):
        """p(x_0 | known), and p(known)."""
        law = torch.where(self.states[:, 0] == TOKEN, law, 0)
        return law / law.sum(), law.sum()

    def draw(self, batch_size, num_particles, timesteps, scheduler=None, **options):
        """Frequencies `[K ** N]` of samples given `TOKEN` at position 0, and the estimates of p(known)."""
        num_rows, report, scheduler = batch_size * num_particles, {}, scheduler or self.scheduler
        x_0 = particle_filter(
            scheduler,
            self,
            scheduler.sample_prior((num_rows, LENGTH), seeded(1)),
            timesteps,
            known=torch.tensor([[TOKEN, 0]]).expand(num_rows, -1),
            is_known=torch.tensor([[True, False]]).expand(num_rows, -1),
            generator=seeded(),
            num_particles=num_particles,
            report=report,
            **options,
        )
        counts = toy.indices(x_0, self.num_classes).bincount(minlength=self.num_classes**LENGTH)
        return counts / batch_size, report["log_normalizer"].double().exp()


RANK_ONE = ("uniform", "absorbing", "absorbing_uniform", "absorbing_in_data", "stationary")
FAST = ["uniform", "absorbing", "gaussian", "matrix"]
SLOW = [name for name in families.NAMES if name not in FAST and not name.endswith("-sparse")]
ALL = list(range(T - 1, -1, -1))
FEW = [T - 1, 2, 0]


def assert_unbiased(estimates, value):
    ratios = estimates / value
    assert (ratios.mean() - 1).abs() < 3 * ratios.std() / len(ratios) ** 0.5 + 1e-5


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_any_network(name):
    table = Table(name)
    timesteps = list(range(len(table.scheduler) - 1, -1, -1))
    target, p_known = table.given(table.law(timesteps))
    frequencies, estimates = table.draw(1000, 64, timesteps)
    assert total_variation(frequencies, target) < 0.045  # 1000 exact draws are about 0.02 away
    assert_unbiased(estimates, p_known)
    assert_unbiased(table.draw(20000, 2, timesteps)[1], p_known)


@pytest.mark.parametrize("options", WARPED, ids=str)
@pytest.mark.parametrize("name", ["uniform", "gaussian"])
def test_options_of_a_step(name, options):
    table = Table(name)
    target, p_known = table.given(table.law(FEW, **options))
    plain = table.given(table.law(FEW))[0]
    frequencies, estimates = table.draw(1000, 128, FEW, **options)
    assert total_variation(frequencies, target) < 0.045
    assert total_variation(plain, target) > 0.05  # the option matters here
    assert_unbiased(estimates, p_known)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}], ids=str)
@pytest.mark.parametrize("name", ["uniform", "absorbing"])
def test_skipped_steps_and_a_reward(name, options):
    table, timesteps = Table(name), FEW
    given, p_known = table.given(table.law(timesteps, **options))
    weights = REWARDS[: len(given)].double().exp()
    target = given * weights / (given * weights).sum()
    frequencies, estimates = table.draw(
        1000, 64, timesteps, reward_fn=lambda x_0: REWARDS[toy.indices(x_0, table.num_classes)], **options
    )
    assert total_variation(frequencies, target) < 0.045
    assert total_variation(given, target) > 0.1
    assert_unbiased(estimates, p_known * (given * weights).sum())


@pytest.mark.parametrize("options", [{"x0_posterior": "denoising"}, {"prediction_type": "previous"}], ids=str)
def test_other_outputs_of_the_network(options):
    table = Table("uniform", **options)
    target, p_known = table.given(toy.step_law(table.scheduler, table, ALL, LENGTH))
    frequencies, estimates = table.draw(1000, 64, ALL)
    assert total_variation(frequencies, target) < 0.045
    assert_unbiased(estimates, p_known)


def test_a_classifier():
    table = Table("uniform")
    guidance = ClassifierGuidance(lambda x, timestep: (x == 2).float().sum(-1), scale=2.0)
    scheduler = ClassifierGuidedScheduler(table.scheduler, guidance)
    target, p_known = table.given(toy.step_law(scheduler, table, ALL, LENGTH))
    frequencies, estimates = table.draw(500, 64, ALL, scheduler)
    assert total_variation(frequencies, target) < 0.06
    assert total_variation(table.given(table.law(ALL))[0], target) > 0.1
    assert_unbiased(estimates, p_known)
