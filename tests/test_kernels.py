# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Kernels have the numbers of the definitions, and belong to the classes that they were derived for."""

import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import families
import pytest
import reference as ref
import torch
import toy

from d3pm_hf import D3PMScheduler, d3pm_loss, evaluate_bound
from d3pm_hf.kernels import Kernel, kernels_disabled, register_kernel
from d3pm_hf.kernels.dense_tables import DenseKernel
from d3pm_hf.likelihood.causal import scores_in_one_pass
from d3pm_hf.pipelines.pipeline_d3pm import default_sampler
from d3pm_hf.samplers import ancestral, left_to_right, registered_samplers
from d3pm_hf.transitions import (
    AutoregressiveTransition,
    DenseRateTransition,
    MatrixTransition,
    SparseRateTransition,
    Transition,
)
from d3pm_hf.transitions.kernel import _kernels
from d3pm_hf.transitions.rank_one import AbsorbingTransition, RankOneTransition, UniformTransition
from d3pm_hf.transitions.toeplitz import GaussianTransition, ToeplitzTransition


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
K = 4
STATES = torch.arange(K)


# The rule


class Plain(Transition):
    def __init__(self):
        super().__init__()
        self.num_classes, self.num_steps, self.log_prior = 2, 1, torch.tensor([0.5, 0.5]).log()

    def log_marginal(self, x, s, t, dtype=torch.float32):
        return torch.zeros(*x.shape, 2)

    def log_likelihood(self, x_t, s, t, dtype=torch.float32):
        return torch.zeros(*x_t.shape, 2)

    def matrix(self, s, t):
        return "plain"

    def define(self):
        return self.matrix(0, 1), self.prepared if hasattr(self, "prepared") else None


@register_kernel(Plain)
class Fast(Kernel):
    derived_from = ("log_marginal",)

    def prepare(self):
        self.prepared = True

    def matrix(self, s, t):
        return "fast"


@families.needs_kernels
def test_who_has_a_kernel():
    class Same(Plain):
        def other(self):
            return 3

    class Changed(Same):
        def log_marginal(self, x, s, t, dtype=torch.float32):
            return super().log_marginal(x, s, t, dtype)

    class Below(Changed):
        pass

    class Replaced(Plain):
        def matrix(self, s, t):
            return "own"

    class Mixin:
        def log_marginal(self, x, s, t, dtype=torch.float32):
            return torch.ones(*x.shape, 2)

    class Mixed(Mixin, Plain):
        pass

    class Registered(Changed):
        pass

    register_kernel(Registered)(Fast)
    for cls in (Plain, Same, Registered):
        assert cls().kernel().define() == ("fast", True)
    for cls in (Changed, Below, Mixed, Replaced):
        assert cls().kernel() is None
    assert Replaced().define() == ("own", None)


@families.needs_kernels
def test_a_transition_and_its_kernel_are_one():
    transition = Plain()
    fast = transition.kernel()
    assert fast is transition.kernel() is fast.kernel() and isinstance(fast, Plain) and type(fast).__name__ == "Plain"
    fast.log_prior = torch.zeros(2)
    assert transition.log_prior is fast.log_prior and transition.define()[0] == "plain"
    for one in (transition, fast):
        again = pickle.loads(pickle.dumps(one))
        assert again.handle != transition.handle and again.kernel().define() == ("fast", True)
        assert (again.define()[0] == "fast") == (one is fast)


@families.needs_kernels
def test_threads_share_one_kernel():
    class Counted(Plain):
        pass

    prepared = []

    @register_kernel(Counted)
    class Slow(Fast):
        def prepare(self):
            prepared.append(self)
            time.sleep(0.05)

    transition = Counted()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: transition.kernel(), range(4)))
    assert len(prepared) == 1 and all(kernel is prepared[0] for kernel in found)


def test_kernels_can_be_disabled():
    transition, scheduler = Plain(), D3PMScheduler(K, 5)
    with kernels_disabled():
        assert transition.kernel() is None and scheduler.transition.fused_loss is None
        with kernels_disabled():
            pass
        assert transition.kernel() is None
    if os.environ.get("D3PM_HF_KERNELS") != "0":
        assert transition.kernel() is not None and scheduler.transition.fused_loss == "absorbing"
    command = "from d3pm_hf import D3PMScheduler; assert D3PMScheduler(4).transition.kernel() is None"
    subprocess.run([sys.executable, "-c", command], check=True, env={**os.environ, "D3PM_HF_KERNELS": "0"})


@families.needs_kernels
@pytest.mark.parametrize(
    "module",
    [
        "d3pm_hf.schedulers",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("d3pm_hf.transitions", "d3pm_hf.samplers", "d3pm_hf")
        ),
    ],
)
def test_kernels_do_not_depend_on_what_is_imported(module):
    command = (
        f"import {module}; from d3pm_hf.schedulers import D3PMScheduler; assert D3PMScheduler(4).transition.kernel()"
    )
    subprocess.run([sys.executable, "-c", command], check=True)


def test_every_kernel_replaces_what_there_is():
    for owner, kernels in _kernels.items():
        for kernel in kernels:
            assert all(hasattr(owner, name) for name in kernel.derived_from), (owner, kernel)


@families.needs_kernels
@pytest.mark.parametrize("name", families.NAMES)
def test_a_kernel_has_the_numbers_of_its_definition(name):
    """All that is derived from q(x_t | x_s), for every pair of times: with kernels and without."""
    family = families.build(name, 5)
    scheduler, generator = family.scheduler(), torch.Generator().manual_seed(0)
    pairs = torch.tensor([(s, t) for t in range(1, families.NUM_STEPS + 1) for s in range(t)])
    s, t = pairs.unbind(-1)
    x_0 = family.data((len(pairs), families.NUM_STEPS))
    x_t = scheduler.add_noise(x_0, t - 1, generator)
    logits = torch.randn(*x_0.shape, 5, generator=generator, dtype=torch.float64)

    def everything():
        process = scheduler.transition
        return {
            "log_marginal": process.log_marginal(x_0, 0, t, torch.float64),
            "log_likelihood": process.log_likelihood(x_t, s, t, torch.float64),
            "log_posterior": process.log_posterior(x_0, x_t, s, t, torch.float64),
            "posterior_logits": process.posterior_logits(logits, x_t, s, t).log_softmax(-1),
            "prior_divergence": process.prior_divergence(x_0),
            "excludes_state": process.excludes_state(logits, x_t, t),
            "most_likely_data": process.most_likely_data(logits, x_t, t),
            "reveal": torch.stack([process.reveal(x_0, n) for n in range(families.NUM_STEPS + 1)]),
            "leads": torch.tensor([name in families.BY_POSITION or process.leads_everywhere(n) for n in range(1, 4)]),
            "loss": d3pm_loss(scheduler, logits, x_0, x_t, t - 1, previous_timesteps=s - 1).vb,
        }

    fast = everything()
    with kernels_disabled():
        plain = everything()
    for key, value in fast.items():
        torch.testing.assert_close(value, plain[key], rtol=1e-9, atol=1e-9, msg=lambda text: f"{key}: {text}")


# Noise that depends on the position


def test_the_numbers_of_blockwise_noise():
    """The loss, and the share of the second half that the first of two steps reveals, with every sampler."""
    family = families.build("blockwise", K, [0.5, 1.0])
    scheduler, x_0 = family.scheduler(), family.data((2, 2))
    x_t = torch.full((2, 2), family.mask)
    logits = torch.randn(2, 2, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = ref.variational(family.matrices, ref.forbid(logits, family.mask), x_0, x_t, 1, 2)
    torch.testing.assert_close(d3pm_loss(scheduler, logits, x_0, x_t, 1).vb, expected)
    with kernels_disabled():
        torch.testing.assert_close(d3pm_loss(scheduler, logits, x_0, x_t, 1).vb, expected)

    right = 1 - ref.reverse(family.matrices, ref.forbid(logits, family.mask), x_t, 1, 2)[0, :, family.mask]  # [2]
    seen = []

    def denoiser(x_t, t):
        seen.append(x_t)
        return logits[:1].float().expand(len(x_t), -1, -1)

    timesteps = [1, 0]
    assert default_sampler(scheduler, denoiser, timesteps, {}) is ancestral
    x_T = torch.full((20_000, 2), family.mask)
    ancestral(scheduler, denoiser, x_T, timesteps, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close((seen[1] != family.mask).double().mean(0), right, atol=0.015, rtol=0)
    for name in ("positions_first", "first_hitting", "confidence", "remasking"):
        with pytest.raises(
            ValueError, match=f"sampler is '{name}', and the process is 'blockwise': it must be an abso"
        ):
            registered_samplers()[name](scheduler, denoiser, x_T[:2], timesteps)


def test_blockwise_noise_has_no_continuous_time():
    scheduler = families.build("blockwise", K, "end").scheduler()
    with pytest.raises(ValueError, match="continuous_time=True needs a process that keeps a state"):
        evaluate_bound(
            scheduler, lambda x, t: torch.zeros(*x.shape, K), [torch.zeros(1, 6).long()], continuous_time=True
        )


def test_uniform_noise_by_position():

    class Blockwise(UniformTransition):
        def log_survival(self, s, t, x):
            return torch.where(torch.arange(x.shape[-1]) < 3, 1, 3) * super().log_survival(s, t, x)

    betas = torch.tensor(families.BETAS["plain"], dtype=torch.float64)
    exponents, pi = -torch.log1p(-betas), ref.stationary_mix(K)
    halves = [ref.rank_one(-torch.expm1(-factor * exponents), pi) for factor in (1, 3)]
    matrices = torch.cat([halves[0]] * 3 + [halves[1]] * 3, 1)  # [T, 6, K, K]
    transition = Blockwise(pi, exponents)
    assert not transition.is_alike and not transition.has_continuous_time
    x_0, t = torch.randint(0, K, (6, 6), generator=torch.Generator().manual_seed(0)), torch.arange(6)
    x_t = torch.randint(0, K, (6, 6), generator=torch.Generator().manual_seed(1))
    logits = torch.randn(6, 6, K, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for context in (nullcontext(), kernels_disabled()):
        with context:
            vb = d3pm_loss(D3PMScheduler(transition=transition), logits, x_0, x_t, t).vb
            torch.testing.assert_close(vb, ref.variational(matrices, logits, x_0, x_t, t, t + 1))


def test_another_order_than_from_the_left():
    class FromTheRight(AutoregressiveTransition):
        def log_survival(self, s, t, x):
            return super().log_survival(s, t, x).flip(-1)

    class Causal(toy.ExactFunction):
        is_causal, reads_timestep = True, False

        def start_cache(self, condition):
            return {}

    network = Causal.__new__(Causal)
    right, left = (cls(K, 3, K - 1) for cls in (FromTheRight, AutoregressiveTransition))
    for transition, is_left in ((left, True), (right, False)):
        transition.never_data = (K - 1,)
        scheduler = D3PMScheduler(transition=transition)
        assert (default_sampler(scheduler, network, [2, 1, 0], {}) is left_to_right) == is_left
        assert scores_in_one_pass(scheduler, network) == is_left
        assert transition.reveals_in_order == is_left
    assert right.sample(torch.tensor([[0, 1, 2]]), 1).tolist() == [[3, 1, 2]]
    with pytest.raises(ValueError, match="is_causal=True needs an autoregressive process"):
        evaluate_bound(scheduler, network, [torch.zeros(1, 3).long()], is_causal=True)


# Other matrices under the name of a family


def tilted(matrix, t):
    """Another process: what moves goes to state 0 in part."""
    share = (0.1 * t)[:, None, None] if isinstance(t, torch.Tensor) else 0.1 * t
    return (1 - share) * matrix + share * torch.eye(K, dtype=torch.float64)[0]


def dense(base):
    """A subclass of `base` with steps that are tilted."""

    class Tilted(base):
        def log_step_matrices(self, t):
            return tilted(super().log_step_matrices(t).exp(), t).log()

    return Tilted


def by_marginals(base):
    """A subclass of `base` that defines q(x_t | x_s) anew, from the matrices of `steps`."""

    class Other(base):
        steps: torch.Tensor  # [T, K, K]

        def log_stretches(self, s, t, x):
            times = zip(*(torch.as_tensor(n).expand(len(x)).tolist() for n in (s, t)))
            eye = torch.eye(K, dtype=torch.float64)
            products = [torch.linalg.multi_dot([eye, eye, *self.steps[a:b]]) for a, b in times]
            return torch.stack(products).log().reshape(len(x), *[1] * (x.ndim - 1), K, K)

        def log_marginal(self, x, s, t, dtype=torch.float32):
            if x.is_floating_point():
                return (x[..., None] + self.log_stretches(s, t, x[..., 0]).to(x.dtype)).logsumexp(-2)
            at = x[..., None, None].expand(*x.shape, 1, K)
            return self.log_stretches(s, t, x).expand(*x.shape, K, K).gather(-2, at).squeeze(-2).to(dtype)

        def log_likelihood(self, x_t, s, t, dtype=torch.float32):
            at = x_t[..., None, None].expand(*x_t.shape, K, 1)
            stretches = self.log_stretches(t - 1 if s is None else s, t, x_t)
            return stretches.expand(*x_t.shape, K, K).gather(-1, at).squeeze(-1).to(dtype)

    return Other


NUM_STEPS = 5
BETAS = torch.tensor([0.05, 0.1, 0.2, 0.3, 0.2], dtype=torch.float64)
RATES = torch.full((K, K), 0.25, dtype=torch.float64) - torch.eye(K, dtype=torch.float64)
MATRIX = families.stochastic(K, K, seed=4)


def create(base, cls):
    """An object of a subclass of `base`."""
    exponents, pi = -torch.log1p(-BETAS), ref.stationary_mix(K)
    if issubclass(base, ToeplitzTransition):
        return cls(base.log_kernels_of(BETAS, type("Settings", (), {"num_classes": K})))
    if base is MatrixTransition:
        return cls(MATRIX, NUM_STEPS)
    return cls(RATES, exponents) if base in (DenseRateTransition, SparseRateTransition) else cls(pi, exponents)


def compare(transition, matrices):
    """Everything that is derived from q(x_t | x_s), beside the reference of the matrices `[T, 1, K, K]`."""
    scheduler = D3PMScheduler(transition=transition)
    generator = torch.Generator().manual_seed(0)
    pairs = torch.tensor([(s, t) for t in range(1, NUM_STEPS + 1) for s in range(t)])
    s, t = pairs.unbind(-1)
    x_0, x_t = torch.randint(0, K, (2, len(pairs), 3), generator=generator)
    logits = torch.randn(len(pairs), 3, K, generator=generator, dtype=torch.float64)
    exact = {"atol": 1e-9, "rtol": 1e-9}
    for n in (s, t - 1):
        expected = ref.variational(matrices, logits, x_0, x_t, n, t)
        got = d3pm_loss(scheduler, logits, x_0, x_t, t - 1, previous_timesteps=None if n is not s else s - 1).vb
        torch.testing.assert_close(got, expected, **exact)
    expected = torch.stack(
        [ref.reverse(matrices, logits[i : i + 1], x_t[i : i + 1], *pair)[0] for i, pair in enumerate(pairs.tolist())]
    )
    torch.testing.assert_close(transition.posterior_logits(logits, x_t, s, t).softmax(-1), expected, **exact)
    torch.testing.assert_close(transition.matrix(1, 4), ref.stretch(matrices, 1, 4)[0], **exact)
    prior = transition.log_prior.exp()
    torch.testing.assert_close(transition.prior_divergence(x_0), ref.prior_kl(matrices, x_0, prior), **exact)
    many = STATES.expand(2000, K)
    drawn = transition.sample(many, 3, torch.Generator().manual_seed(1))
    assert ref.fit(drawn[:, None], ref.marginal(matrices, STATES[None], 0, 3)) > 1e-4
    for s, t in ((0, 2), (2, 4)):
        rows = logits[:1, :1].expand(1, K, -1)
        x_s = transition.sample_previous(
            rows.float().expand(2000, -1, -1), many, s, t, torch.Generator().manual_seed(2)
        )
        assert ref.fit(x_s[:, None], ref.reverse(matrices, rows, STATES[None], s, t)) > 1e-4
    transition.fit_prior(prior)
    torch.testing.assert_close(
        transition.log_prior.exp().double(), prior @ ref.stretch(matrices, 0, NUM_STEPS)[0], atol=1e-6, rtol=1e-5
    )


@families.needs_kernels
@pytest.mark.parametrize("base", [GaussianTransition, MatrixTransition, DenseRateTransition])
def test_other_steps(base):
    """Kernels, symmetries, factors and exponentials of the family are no longer those of the process."""
    cls = dense(base)
    plain = create(base, base)
    for one in (plain, plain.kernel()):
        compare(one, torch.stack([plain.matrix(n, n + 1) for n in range(NUM_STEPS)])[:, None])
    original, times = create(base, base), torch.arange(1, NUM_STEPS + 1)
    matrices = tilted(original.log_step_matrices(times).exp(), times)
    transition = create(base, cls)
    fast = transition.kernel()
    assert type(fast).__mro__[1] is DenseKernel  # by the matrices of the steps, as any process of matrices
    compare(transition, matrices[:, None])
    compare(fast, matrices[:, None])


@pytest.mark.parametrize(
    "base",
    [
        UniformTransition,
        RankOneTransition,
        GaussianTransition,
        MatrixTransition,
        DenseRateTransition,
        SparseRateTransition,
    ],
)
def test_other_marginals(base):
    cls = by_marginals(base)
    cls.steps = tilted(families.stochastic(NUM_STEPS, K, K, seed=5), torch.arange(NUM_STEPS))
    transition = create(base, cls)
    assert transition.kernel() is None and not transition.is_alike
    compare(transition, cls.steps[:, None])


def test_a_step_of_your_own():
    class Scheduler(D3PMScheduler):
        def step(self, *args, **kwargs):
            return super().step(*args, **kwargs)

    class Step(AbsorbingTransition):
        def sample_previous(self, *args, **kwargs):
            return super().sample_previous(*args, **kwargs)

    assert D3PMScheduler(K, 5).has_plain_steps and not Scheduler(K, 5).has_plain_steps
    assert not Step(ref.stationary_mix(K, 0), BETAS).has_rank_one_steps
    for scheduler in (Scheduler(K, 5), D3PMScheduler(transition=Step(ref.stationary_mix(K, 0), BETAS))):
        assert default_sampler(scheduler, None, [4, 2], {}) is ancestral


@families.needs_kernels
def test_a_subclass_that_changes_nothing_is_fast():
    class Mine(AbsorbingTransition):
        def stationary_entropy(self):
            return 0.0

    transition = Mine(ref.stationary_mix(K, K - 1), BETAS)
    transition.never_data = (K - 1,)
    scheduler = D3PMScheduler(transition=transition)
    assert scheduler.transition.fused_loss == "absorbing" and transition.has_continuous_time
    assert default_sampler(scheduler, None, [4, 2], {}) is registered_samplers()["positions_first"]


def test_a_subclass_names_its_own_fused_loss():
    class Mine(AbsorbingTransition):
        fused_loss = "mine"

    assert Mine(ref.stationary_mix(K, K - 1), BETAS).fused_loss == "mine"
