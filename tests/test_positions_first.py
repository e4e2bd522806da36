# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Drawing first when a position is revealed: the distribution of the plain loop, with fewer calls of the network."""

import families
import pytest
import torch
from toy import ExactDenoiser, ancestral_law, indices, joint

from d3pm_hf import D3PMScheduler, D3PMTextPipeline, create_text_model
from d3pm_hf.samplers import ancestral, first_hitting, positions_first
from d3pm_hf.samplers.positions_first import draw_steps, order_calls, reveals_once


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
T, LENGTH = 1000, 256


def toy(betas=(0.2, 0.5, 0.3, 1.0), num_classes=4, length=3):
    family = families.build("absorbing", num_classes, list(betas))
    return family, ExactDenoiser(family, joint(family, length))


def network(denoiser):
    return lambda x_t, timestep: denoiser(x_t, torch.as_tensor(timestep).expand(len(x_t)))[0]


@pytest.mark.parametrize("timesteps", [[3, 2, 1, 0], [3, 1], [3]], ids=str)
def test_the_law_is_that_of_the_plain_loop(timesteps):
    family, denoiser = toy()
    scheduler, count = family.scheduler(), 60_000
    x_T = torch.full((count, 3), family.mask)
    drawn = positions_first(scheduler, network(denoiser), x_T, timesteps, generator=torch.Generator().manual_seed(0))
    assert_law(drawn, ancestral_law(family, denoiser, timesteps))


def test_the_law_given_known_elements():
    family, denoiser = toy()
    scheduler, count = family.scheduler(), 40_000
    known = torch.tensor([[0, 2, 0]]).expand(count, -1)
    is_known = torch.tensor([[False, True, False]]).expand(count, -1)
    laws = []
    for sampler in (positions_first, ancestral):
        drawn = sampler(
            *(scheduler, network(denoiser), torch.full((count, 3), family.mask), [3, 2, 1, 0]),
            known=known,
            is_known=is_known,
            generator=torch.Generator().manual_seed(1),
        )
        assert (drawn[:, 1] == 2).all()
        laws.append(torch.bincount(indices(drawn, 4), minlength=64) / count)
    assert (laws[0] - laws[1]).abs().sum() / 2 < 0.015


def exact_law_of_steps(scheduler, timesteps):
    """Probability of each step to reveal a position, by the matrices of the process."""
    mask, probability, left = scheduler.mask_token_id, [], 1.0
    for t, s in zip(timesteps, [*timesteps[1:], -1]):
        posterior = scheduler.posterior_logits(
            torch.zeros(1, 1, scheduler.config.num_classes), t, torch.tensor([[mask]]), s
        )
        stays = posterior[0, 0, mask].double().exp().item()
        probability.append(left * (1 - stays))
        left *= stays
    return torch.tensor(probability, dtype=torch.float64)


@pytest.mark.parametrize("schedule", ["reciprocal", "cosine", "linear"])
def test_when_positions_are_revealed(schedule):
    scheduler = D3PMScheduler(4, 50, beta_schedule=schedule)
    timesteps = scheduler.sampling_timesteps(20)
    u = torch.rand(400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    steps = draw_steps(scheduler, timesteps, u)
    law = exact_law_of_steps(scheduler, timesteps)
    assert law.sum().item() == pytest.approx(1, abs=1e-5)
    assert (torch.bincount(steps, minlength=20) / len(u) - law).abs().max() < 0.004


def test_calls_of_a_row():
    steps = torch.tensor([[3, 1, 3, 9], [9, 9, 9, 9], [0, 8, 4, 2]])
    assert order_calls(steps, 9).tolist() == [[1, 0, 1, -1], [-1, -1, -1, -1], [0, 3, 2, 1]]


def assert_law(drawn, law, num_classes=4):
    """Samples `[n, N]` are from `law` `[K ** N]`: a chi-squared test."""
    counts, expected = torch.bincount(indices(drawn, num_classes), minlength=len(law)).double(), law * len(drawn)
    possible = expected > 0
    assert (counts[~possible] == 0).all()
    statistic, freedom = (
        ((counts - expected)[possible] ** 2 / expected[possible]).sum().item(),
        int(possible.sum()) - 1,
    )
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


class Counted:
    """A network without knowledge that counts its calls and the rows of each."""

    def __init__(self, num_classes=5):
        self.num_classes, self.rows, self.times = num_classes, [], []

    def __call__(self, x_t, timestep):
        self.rows.append(len(x_t))
        self.times.append(timestep)
        return torch.zeros(*x_t.shape, self.num_classes)


@pytest.mark.parametrize("batch_size", [1, 16])
def test_calls_of_the_network(batch_size):
    """226 of 1000 steps reveal something of 256 tokens: T (1 - (1 - 1/T)^N)."""
    scheduler, model = D3PMScheduler(5, T, beta_schedule="reciprocal"), Counted()
    runs = 8 if batch_size == 1 else 1
    for seed in range(runs):
        x_T = torch.full((batch_size, LENGTH), 4)
        x_0 = positions_first(
            scheduler, model, x_T, list(range(T - 1, -1, -1)), generator=torch.Generator().manual_seed(seed)
        )
        assert (x_0 < 4).all()
    expected = T * (1 - (1 - 1 / T) ** LENGTH)
    assert sum(model.rows) / (runs * batch_size) == pytest.approx(
        expected, abs=6
    )  # its deviation is about 10 per sample
    assert len(model.rows) / runs < 260
    assert model.rows == sorted(model.rows, reverse=True) or runs > 1
    # Each row goes back in time.
    assert all((a[: len(b)] > b).all() for a, b in zip(model.times, model.times[1:]) if runs == 1)


def make_pipeline(**scheduler):
    torch.manual_seed(0)
    text_model = create_text_model("tiny", 28, initializer_range=0.5)
    pipeline = D3PMTextPipeline(text_model, D3PMScheduler(28, 50, **scheduler), sequence_length=12)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_pipelines_draw_positions_first():
    pipeline = make_pipeline()
    calls = []
    pipeline.text_model.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    seeded = lambda: [torch.Generator().manual_seed(i) for i in range(4)]  # noqa: E731
    options = {"batch_size": 4, "output_type": "latent"}
    together = pipeline(generator=seeded(), **options).sequences
    assert len(calls) <= 12 and sum(calls) <= 48
    named = pipeline(generator=seeded(), sampler="positions_first", **options).sequences
    assert torch.equal(together, named)
    for row in (0, 3):
        alone = pipeline(generator=seeded()[row : row + 1], output_type="latent").sequences
        assert torch.equal(alone[0], together[row])
    calls.clear()
    pipeline(generator=seeded(), sampler="ancestral", **options)
    assert len(calls) == 50
    calls.clear()
    seen = []
    pipeline(generator=seeded(), callback_on_step_end=lambda *step: seen.append(step[1]), **options)
    assert len(calls) == len(seen) == 50  # a callback sees all steps


def test_a_prompt_costs_no_calls():
    pipeline, calls = make_pipeline(), []
    pipeline.text_model.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    tokens = torch.arange(12)[None]
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[0, 7:9] = True
    out = pipeline(input_ids=tokens, mask=mask, output_type="latent").sequences
    assert len(calls) <= 2 and torch.equal(out[~mask], tokens[~mask])


def test_warping():
    pipeline = make_pipeline()
    generator = torch.Generator().manual_seed(0)
    cold = pipeline(generator=generator, top_k=1, output_type="latent", batch_size=3).sequences
    generator = torch.Generator().manual_seed(0)
    one = pipeline(generator=generator, temperature=1e-6, output_type="latent", batch_size=3).sequences
    assert torch.equal(cold, one)


def test_an_interrupted_call_returns_what_it_has():
    pipeline, calls = make_pipeline(), []

    def interrupt(module, args):
        calls.append(None)
        pipeline._interrupt = len(calls) == 3

    handle = pipeline.text_model.register_forward_pre_hook(interrupt)
    x = pipeline(output_type="latent").sequences
    assert len(calls) == 3 and (x == 27).any() and (x != 27).any()
    handle.remove()
    assert (pipeline(output_type="latent").sequences != 27).all()


def test_what_is_not_a_number_is_noticed():
    pipeline, calls = make_pipeline(), []

    def poison(module, args, output):
        calls.append(None)
        return (output[0] * (torch.nan if len(calls) == 3 else 1), *output[1:])

    handle = pipeline.text_model.register_forward_hook(poison)
    with pytest.raises(ValueError, match="the network's output holds NaN or infinity"):
        pipeline(output_type="latent")
    handle.remove()
    assert (pipeline(output_type="latent").sequences != 27).all()


@pytest.mark.parametrize(
    "options",
    [
        {"transition": "uniform", "beta_schedule": "cosine"},
        {"transition": "absorbing_uniform", "beta_schedule": "cosine", "mask_in_data": True},
        {"transition": "absorbing_uniform", "beta_schedule": "cosine", "reconstruction": "raw"},
        {"mask_in_data": True, "beta_schedule": "cosine"},
        {"reconstruction": "raw"},
        {"prediction_type": "previous"},
    ],
    ids=str,
)
def test_where_it_does_not_apply(options):
    scheduler = D3PMScheduler(5, 10, **options)
    assert not reveals_once(scheduler)
    with pytest.raises(ValueError, match="sampler is 'positions_first', and the process is .*; choose 'ancestral'"):
        positions_first(scheduler, Counted(), torch.zeros(1, 2, dtype=torch.long), list(range(9, -1, -1)))


# Masks and other noise: the draws are those of the plain loop, so that the law is


@pytest.mark.parametrize("x0_posterior", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("timesteps", [range(49, -1, -1), [49, 30, 4], [49]], ids=str)
def test_mixed_processes_draw_what_the_plain_loop_draws(timesteps, x0_posterior):
    scheduler = D3PMScheduler(6, 50, "absorbing_uniform", "reciprocal", x0_posterior=x0_posterior)
    weights = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
    rows = []

    def network(x_t, timestep, bias):
        """Each position is predicted from the one before."""
        rows.append(len(x_t))
        return weights[x_t.roll(1, -1)] + bias[:, None]

    x_T = scheduler.sample_prior((7, 5), torch.Generator().manual_seed(0))
    known, is_known = torch.full((7, 5), 2), torch.zeros(7, 5, dtype=torch.bool)
    is_known[:, 1] = True
    for options in ({}, {"known": known, "is_known": is_known}, {"temperature": 0.5, "top_k": 3}):
        condition = {"bias": torch.randn(7, 6, generator=torch.Generator().manual_seed(4))}
        drawn, counts = [], []
        for sampler in (positions_first, ancestral):
            seeds = [torch.Generator().manual_seed(i) for i in range(7)]
            rows.clear()
            drawn.append(sampler(scheduler, network, x_T, timesteps, generator=seeds, condition=condition, **options))
            counts.append(sum(rows))
        assert torch.equal(*drawn) and counts[0] <= counts[1]
        assert len(timesteps) < 50 or counts[0] < 0.5 * counts[1]


def expected_steps(T, N, mask_fraction, K=28):
    """Steps that need a call, and steps that change something if the network knows x_0, for the schedule 1/(T-t+1)."""
    t = torch.arange(1, T + 1, dtype=torch.float64)
    A_t, A_s = 1 - t / T, 1 - (t - 1) / T
    pi_token = (1 - mask_fraction) / K
    pi_mask = mask_fraction + pi_token
    moved, bound = 1 - A_t / A_s, (1 - A_t / A_s) / (1 - A_t)
    mask, kept = (1 - A_t) * pi_mask, A_t + (1 - A_t) * pi_token  # P(x_t = mask), P(x_t = x_0)
    # A call is needed for a mask that is replaced by data, and for a token that may be replaced.
    needed = bound * (mask * A_s + 1 - mask)
    changed = mask * bound * (1 - (1 - A_s) * pi_mask)
    changed = changed + (1 - mask - kept) * bound * (1 - (1 - A_s) * pi_token)
    changed = changed + moved * pi_token * (1 - A_s) * (1 - pi_token)
    return [round((1 - (1 - p) ** N).sum().item()) for p in (needed, changed)]


def test_calls_of_a_mixed_process():
    """702 of 1000 steps may change something of 256 tokens; docs/source/en/fewer_calls.md has these numbers."""
    assert expected_steps(1000, 256, mask_fraction=2 / 3) == [702, 412]
    assert expected_steps(256, 256, mask_fraction=2 / 3) == [251, 206]
    scheduler, x_0 = D3PMScheduler(28, T, "absorbing_uniform", "reciprocal"), torch.arange(LENGTH) % 27
    logits, rows = torch.full((LENGTH, 28), -30.0).scatter_(-1, x_0[:, None], 0.0), []

    def network(x_t, timestep):
        rows.append(len(x_t))
        return logits.expand(len(x_t), -1, -1)

    generator = torch.Generator().manual_seed(0)
    x_T = scheduler.sample_prior((16, LENGTH), generator)
    drawn = positions_first(scheduler, network, x_T, range(T - 1, -1, -1), generator=generator)
    assert (drawn == x_0).all() and sum(rows) / 16 == pytest.approx(702, abs=15)  # its deviation is 11 per sample


def test_a_pipeline_of_a_mixed_process():
    pipeline, calls = make_pipeline(transition="absorbing_uniform", beta_schedule="cosine"), []
    pipeline.text_model.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    seeded = lambda: [torch.Generator().manual_seed(i) for i in range(4)]  # noqa: E731
    options = {"batch_size": 4, "output_type": "latent"}
    together = pipeline(generator=seeded(), **options).sequences
    assert sum(calls) < 4 * 50
    assert torch.equal(together, pipeline(generator=seeded(), sampler="ancestral", **options).sequences)
    alone = pipeline(generator=seeded()[2:3], output_type="latent").sequences
    assert torch.equal(alone[0], together[2])


@pytest.mark.parametrize("timesteps", [[3, 2, 1, 0], [3]], ids=str)
def test_one_position_after_the_other_has_the_law_of_the_data(timesteps):
    """An exact network makes no error, whatever its clock: there is nothing to discretize."""
    family, denoiser = toy()
    drawn = first_hitting(
        *(family.scheduler(), network(denoiser), torch.full((60_000, 3), family.mask), timesteps),
        generator=torch.Generator().manual_seed(2),
    )
    assert_law(drawn, joint(family, 3).flatten())


def test_one_position_after_the_other():
    scheduler, model = D3PMScheduler(5, 20), Counted()
    x_T = torch.full((3, 8), 4)
    x_T[1, :5] = 2
    timesteps = list(range(19, -1, -1))
    seeded = lambda: [torch.Generator().manual_seed(i) for i in range(3)]  # noqa: E731
    x_0 = first_hitting(scheduler, model, x_T, timesteps, generator=seeded())
    assert model.rows == [3] * 3 + [2] * 5 and (x_0 < 4).all() and (x_0[1, :5] == 2).all()
    assert all((a[: len(b)] >= b).all() for a, b in zip(model.times, model.times[1:]))
    for row in range(3):
        alone = first_hitting(scheduler, model, x_T[row : row + 1], timesteps, generator=seeded()[row : row + 1])
        assert torch.equal(alone[0], x_0[row])
    with pytest.raises(ValueError, match="sampler='first_hitting' has no steps to call it after: choose 'ancestral'"):
        first_hitting(scheduler, model, x_T, timesteps, callback=print)
    with pytest.raises(ValueError, match="sampler is 'first_hitting', and the process is 'uniform'"):
        first_hitting(D3PMScheduler(5, 20, "uniform", "cosine"), model, x_T, timesteps)
    assert make_pipeline()(sampler="first_hitting", output_type="latent", num_inference_steps=5).sequences.shape == (
        1,
        12,
    )


def test_steps_of_your_own_are_taken_one_by_one():
    class Mine(D3PMScheduler):
        def step(self, *args, **kwargs):
            return super().step(*args, **kwargs)

    assert reveals_once(D3PMScheduler(5, 10)) and not reveals_once(Mine(5, 10))
