# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The cost of every stride against enumeration, the best timesteps against all others, and what stored timesteps change."""

import itertools
import json
from unittest.mock import patch

import families
import numpy as np
import pytest
import reference as ref
import torch

from d3pm_hf import D3PMImagePipeline, D3PMScheduler, create_unet, d3pm_loss, evaluate_bound
from d3pm_hf.evaluation import optimize_timesteps
from d3pm_hf.likelihood import OptimalTimesteps, evaluate_strides
from d3pm_hf.likelihood.strides import cheapest_paths, finer_grid, first_grid, grid_timesteps, stride_terms


# These processes need not end near their prior, of which the scheduler warns.
pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
NAMES = ("absorbing", "uniform", "gaussian")
SIZE = 2000


def toy(name, seed=11, size=SIZE):
    """A process, two dependent positions, the network that knows them, and draws from them."""
    betas = [0.4] * 6 if name == "gaussian" else families.BETAS["end"]
    family = families.build(name, 4, betas)
    generator = torch.Generator().manual_seed(seed)
    joint = torch.randn(4, 4, generator=generator, dtype=torch.float64).mul(1.5).exp()
    if family.mask is not None:
        joint[family.mask] = joint[:, family.mask] = 0
    joint = joint / joint.sum()
    times = range(1, len(family.matrices) + 1)
    tables = torch.stack([ref.exact_prediction(family.matrices, joint, n, "leave_one_out") for n in times]).log()

    def model(x_t, timesteps):
        return tables[timesteps, x_t[:, 0] * 4 + x_t[:, 1]]

    x_0 = ref.states(4, 2)[torch.multinomial(joint.flatten(), size, True, generator=generator)]
    return family, joint, model, x_0


def enumerated_cost(family, joint, s, t):
    """The expectation of the term of a step from t to s (-1: the data) over every x_0 and x_t, in nats per element."""
    x_0, x_t, index, weights = ref.toy_terms(family.matrices, joint, t + 1)
    logits = ref.exact_prediction(family.matrices, joint, t + 1, "leave_one_out")[index].log()
    terms = ref.variational(family.matrices, logits, x_0, x_t, s + 1, t + 1)
    return (weights * terms.sum(-1)).sum().item() / 2


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_the_enumerated_one(name):
    family, joint, model, x_0 = toy(name)
    result = evaluate_strides(family.scheduler(), model, x_0.split(700), grid=len(family.matrices), progress_bar=False)
    T = len(family.matrices)
    assert result.grid == list(range(T)) and (result.num_examples, result.num_elements) == (SIZE, 2 * SIZE)
    assert result.costs.shape == result.standard_errors.shape == (T, T + 1)
    for t, column in itertools.product(range(T), range(T + 1)):
        cost, error = result.costs[t, column].item(), result.standard_errors[t, column].item()
        if column > t:
            assert cost == torch.inf and np.isnan(error)
        else:
            assert abs(cost - enumerated_cost(family, joint, column - 1, t)) < 4.5 * error + 1e-9 and error < 0.05


def test_a_state_without_noise_has_its_exact_cost():
    """After the last step of this process everything is masked: the cost depends on the data alone."""
    family, joint, model, x_0 = toy("absorbing")
    result = evaluate_strides(family.scheduler(), model, [x_0], grid=[5, 2], progress_bar=False)
    logits = model(x_0 * 0 + family.mask, torch.tensor(5)).double()
    masked = torch.full_like(x_0, family.mask)
    for column, s in enumerate((-1, 2)):
        terms = ref.variational(family.matrices, logits, x_0, masked, s + 1, 6)
        assert result.costs[1, column].item() == pytest.approx(terms.mean().item(), rel=1e-5)
        error = terms.sum(-1).std() / SIZE**0.5 / 2
        assert result.standard_errors[1, column].item() == pytest.approx(error.item(), rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_predicted_bound_is_the_measured_one(name):
    """The costs of the chosen steps add up to what `evaluate_bound` measures with them stored, and to the truth."""
    family, joint, model, x_0 = toy(name, size=2 * SIZE)  # so many that the choice is right to 0.02 nats
    scheduler = family.scheduler()
    result = evaluate_strides(scheduler, model, [x_0], grid=6, progress_bar=False)
    scheduler.register_inference_timesteps({n: result.cheapest_timesteps(n) for n in range(1, 7)})
    for n in (1, 2, 4):
        measured = evaluate_bound(
            scheduler, model, [x_0[: SIZE // 2]], num_inference_steps=n, seed=1, progress_bar=False
        )
        assert measured.timesteps == result.cheapest_timesteps(n)[::-1] and measured.spacing == "optimized"
        assert abs(result.bounds[n - 1] - measured.total) < 5 * measured.standard_error
        times = [0, *(t + 1 for t in measured.timesteps)]
        truth = ref.best_bound(family.matrices, joint, scheduler.transition.log_prior.double().exp(), times).item() / 2
        assert abs(result.bounds[n - 1] - truth) < 5 * measured.standard_error
    # The truth is best at the chosen timesteps too, up to the noise in the choice.
    true_costs = {(s, t): enumerated_cost(family, joint, s, t) for t in range(6) for s in range(-1, t)}
    for n in range(1, 7):
        truths = {}
        for rest in itertools.combinations(range(5), n - 1):
            path = [5, *reversed(rest)]
            truths[tuple(path)] = sum(true_costs[s, t] for t, s in zip(path, [*path[1:], -1]))
        assert truths[tuple(result.cheapest_timesteps(n))] < min(truths.values()) + 0.02


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_dynamic_program_is_the_search_of_all_subsets(size):
    for seed in range(5):
        costs = np.random.default_rng(seed).random((size, size + 1)) ** 3
        paths = cheapest_paths(costs)
        assert [len(path) for path in paths] == list(range(1, size + 1))
        for n, path in enumerate(paths, 1):
            every = ([size - 1, *reversed(rest)] for rest in itertools.combinations(range(size - 1), n - 1))
            best = min(every, key=lambda path: sum(costs[i, j + 1] for i, j in zip(path, [*path[1:], -1])))
            assert path == best


def test_impossible_steps_do_not_break_the_paths():
    costs = np.full((4, 5), np.inf)
    assert [len(set(path)) for path in cheapest_paths(costs)] == [1, 2, 3, 4]


def test_one_call_of_the_network_per_example_and_timestep():
    family, _, model, x_0 = toy("uniform")
    calls = []

    def counting(x_t, timesteps):
        calls.extend(timesteps.tolist())
        return model(x_t, timesteps)

    evaluate_strides(family.scheduler(), counting, x_0[:20].split(10), grid=[5, 3, 0], progress_bar=False)
    extra = [0] * 10  # the first call of a function is made twice, to see that its network is in eval mode
    assert sorted(calls) == sorted([0, 3, 5] * 20 + extra)


def test_no_example_has_more_calls_than_the_grid_has_timesteps():
    """Each example is a class of its own, so that the labels tell which ones the network has seen, and how often."""
    pipeline = D3PMImagePipeline(
        create_unet("tiny", 4, 4, num_class_labels=20),
        D3PMScheduler(4, 100, transition="uniform", beta_schedule="cosine"),
        num_class_labels=20,
    )
    data = [{"x_0": torch.full((3, 4, 4), i % 4), "label": i} for i in range(20)]
    seen, forward = [], type(pipeline.unet).forward

    def counting(self, *args, class_labels, **kwargs):
        seen.extend(class_labels.tolist())
        return forward(self, *args, class_labels=class_labels, **kwargs)

    with patch.object(type(pipeline.unet), "forward", counting):
        result = optimize_timesteps(pipeline, data, num_examples=17, grid=10, batch_size=20, progress_bar=False)
    assert result.num_examples == 17 and 8 <= len(result.grid) <= 10
    counts = torch.tensor(seen).bincount(minlength=20)
    assert counts.max() <= 10 and (counts > 0).sum() == 19  # two examples are for the first look


def test_batches_and_padding_do_not_show():
    family, _, model, x_0 = toy("uniform")
    options = {"grid": [5, 1], "progress_bar": False, "seed": 3}
    whole, parts = (evaluate_strides(family.scheduler(), model, x_0[:12].split(n), **options) for n in (12, 5))
    torch.testing.assert_close(whole.costs, parts.costs, rtol=1e-6, atol=0)
    torch.testing.assert_close(whole.standard_errors, parts.standard_errors, rtol=1e-6, atol=0, equal_nan=True)
    mask = torch.tensor([True, False]).expand(12, 2)
    half = evaluate_strides(family.scheduler(), model, [(x_0[:12], mask)], **options)
    assert half.num_elements == 12 and half.costs[0, 0] != whole.costs[0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_the_terms_are_those_of_the_loss(name):
    """One long sample has the terms of many short ones."""
    family, _, model, x_0 = toy(name)
    scheduler, mask = family.scheduler(), torch.tensor([True, False]).expand(SIZE, 2)
    for s, t in ((-1, 3), (1, 4), (3, 4)):
        x_t = scheduler.add_noise(x_0, t, torch.Generator().manual_seed(0))
        output = model(x_t, torch.tensor(t))
        plain = d3pm_loss(scheduler, output, x_0, x_t, t, previous_timesteps=s, loss_mask=mask).vb
        torch.testing.assert_close(stride_terms(scheduler, output, x_0, x_t, s, t, mask), plain)


@pytest.mark.parametrize("name", families.NAMES)
def test_prepared_stretches_change_nothing(name):
    """Matrices that are multiplied for all steps at once are those of single steps."""
    family = families.build(name, 4)
    plain, prepared, x_t = family.transition, family.transition, torch.arange(6)[None] % 4
    for t in (2, 5, 6):
        prepared.prepare_stretches([0, 2, 3, 5], t, "cpu")
        for s in (s for s in (0, 2, 3, 5) if s < t):
            times = torch.tensor([s]), torch.tensor([t])
            columns = (each.log_likelihood(x_t, *times, torch.float64) for each in (plain, prepared))
            torch.testing.assert_close(*columns)


def test_the_grid():
    scheduler = D3PMScheduler(4, 1000, beta_schedule="reciprocal")
    grid = grid_timesteps(scheduler, 60)
    assert len(grid) == 60 and grid[-1] == 999 and set(np.diff(grid)) == {16, 17}
    assert all(set(scheduler.spaced_timesteps(n)) <= set(grid) for n in (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60))
    assert grid_timesteps(scheduler, 1) == [999] and grid_timesteps(scheduler, 5000) == list(range(1000))
    assert grid_timesteps(scheduler, [999, 3]) == [3, 999]


@pytest.mark.parametrize("size", [1, 2, 7, 60, 64])
def test_finer_grids(size):
    scheduler = D3PMScheduler(4, 1000, beta_schedule="reciprocal")
    for grid in (first_grid(scheduler, size), finer_grid(scheduler, size, [999, 300, 200, 100, 50])):
        assert max(1, size - 3) <= len(grid) <= size and grid == sorted(set(grid), reverse=True) and grid[-1] >= 0
        assert set(scheduler.spaced_timesteps(max(1, size // 2))) <= set(grid)
    if size > 7:  # half of the others lie in two of the five stretches
        others = sorted(set(grid) - set(scheduler.spaced_timesteps(size // 2)))
        assert abs(sum(t <= 100 for t in others) / len(others) - 0.4) < 0.1
    assert first_grid(D3PMScheduler(4, 6), size)[0] == 5 and len(first_grid(D3PMScheduler(4, 6), 8)) == 6


@pytest.mark.parametrize(
    "options", [{"prediction_type": "previous"}, {"transition": "autoregressive"}], ids=["previous", "autoregressive"]
)
def test_models_that_take_all_steps(options):
    scheduler = D3PMScheduler(4, 6, **options)
    with pytest.raises(ValueError, match="takes all 6 steps"):
        evaluate_strides(scheduler, lambda x, t: None, [torch.zeros(1, 6).long()])
    with pytest.raises(ValueError, match="takes all steps: leave them out"):
        scheduler.register_inference_timesteps({1: [5]})


# Stored timesteps.


def test_stored_timesteps_are_used_and_saved(tmp_path):
    scheduler = D3PMScheduler(4, 10)
    assert scheduler.config.inference_timesteps is None and scheduler.sampling_timesteps(2) == [9, 4]
    scheduler.register_inference_timesteps({2: [9, 6], "3": (9, 2, 1)})
    scheduler.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "scheduler_config.json").read_text())["inference_timesteps"]["3"] == [9, 2, 1]
    loaded = D3PMScheduler.from_pretrained(tmp_path)
    again = D3PMScheduler.from_config(loaded.config)
    for each in (scheduler, loaded, again, D3PMScheduler(4, 10, inference_timesteps={2: [9, 6], 3: [9, 2, 1]})):
        assert each.config.inference_timesteps == {"2": [9, 6], "3": [9, 2, 1]}
        each.set_timesteps(2)
        assert each.timesteps.tolist() == [9, 6] and each.previous_timestep(9) == 6
        each.set_timesteps(2, spacing="even")
        assert each.timesteps.tolist() == [9, 4]
        assert each.sampling_timesteps(3) == [9, 2, 1] and each.sampling_timesteps(3, spacing="even") == [9, 5, 2]
        assert each.sampling_timesteps(3, spacing="chosen") == [9, 2, 1]  # the earlier name of "optimized"
        assert each.sampling_timesteps(4) == each.spaced_timesteps(4) and len(each.sampling_timesteps()) == 10
        assert each.sampling_timesteps(2, start_timestep=9) == [9, 6]
        assert each.sampling_timesteps(2, start_timestep=5) == [5, 2] == each.spaced_timesteps(2, 5)
    scheduler.sampling_timesteps(2).append(0)
    assert scheduler.sampling_timesteps(2) == [9, 6]
    scheduler.register_inference_timesteps(None)
    assert scheduler.sampling_timesteps(2) == [9, 4]


def test_a_configuration_without_stored_timesteps_loads(tmp_path):
    """Checkpoints from before have no such entry."""
    D3PMScheduler(4, 10).save_pretrained(tmp_path)
    path = tmp_path / "scheduler_config.json"
    config = json.loads(path.read_text())
    del config["inference_timesteps"]
    path.write_text(json.dumps(config))
    assert D3PMScheduler.from_pretrained(tmp_path).sampling_timesteps(2) == [9, 4]


@pytest.mark.parametrize(
    "stored, words",
    [
        ([[9, 1]], "inference_timesteps is .* it must be a dictionary"),
        ({"a": [9]}, "the key 'a': it must be a number of steps"),
        ({2: [9]}, "inference_timesteps\\[2\\] has 1 timesteps"),
        ({2: "91"}, "inference_timesteps\\[2\\] is '91': it must be a list of 2 timesteps"),
        ({2: [9, 9]}, "strictly decreasing, got 9 after 9"),
        ({2: [10, 9]}, "an entry of inference_timesteps\\[2\\] is 10: it must be an integer in 0 .. 9"),
        ({2: [9, -1]}, "is -1"),
        ({2: [9, 1.5]}, "is 1.5"),
        ({2: [8, 1]}, "starts at 8: the first one must be T - 1 = 9"),
        ({0: []}, "starts at None"),
        ({70000: [9] * 70000}, "more than 65536 timesteps"),
    ],
)
def test_wrong_stored_timesteps(stored, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        D3PMScheduler(4, 10, inference_timesteps=stored)
    scheduler = D3PMScheduler(4, 10)
    with pytest.raises(ValueError, match=words):
        scheduler.register_inference_timesteps(stored)
    assert scheduler.config.inference_timesteps is None
    scheduler.save_pretrained(tmp_path)
    path = tmp_path / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "inference_timesteps": stored}))
    with pytest.raises(ValueError, match="scheduler_config.json: "):
        D3PMScheduler.from_pretrained(tmp_path)


def test_a_pipeline_samples_with_stored_timesteps(tmp_path):
    torch.manual_seed(0)
    pipeline = D3PMImagePipeline(
        create_unet("tiny", 4, 4), D3PMScheduler(4, 12, transition="uniform", beta_schedule="cosine")
    )
    pipeline.set_progress_bar_config(disable=True)
    images = [torch.randint(4, (3, 4, 4), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    options = {"num_inference_steps": 3, "output_type": "pt"}

    def draw(pipeline, **kwargs):
        return pipeline(generator=torch.Generator().manual_seed(0), **{**options, **kwargs}).images

    before = draw(pipeline)
    result = optimize_timesteps(pipeline, images, num_examples=3, grid=4, batch_size=2, progress_bar=False)
    assert result.num_examples == 3 and {5, 11} < set(result.grid) and len(result.bounds) == len(result.grid) == 4
    assert torch.equal(draw(pipeline), before)  # nothing is stored by itself
    own = {3: [11, 2, 1]}
    pipeline.scheduler.register_inference_timesteps(own)
    pipeline.save_pretrained(tmp_path)
    loaded = D3PMImagePipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    for each in (pipeline, loaded):
        chosen = draw(each)
        assert each.scheduler.timesteps.tolist() == [11, 2, 1] and not torch.equal(chosen, before)
        assert torch.equal(chosen, draw(each, num_inference_steps=None, timesteps=own[3]))
        even = each.scheduler.spaced_timesteps(3)
        assert torch.equal(before, draw(each, num_inference_steps=None, timesteps=even))
        assert torch.equal(before, draw(each, spacing="even")) and each.scheduler.timesteps.tolist() == even
    bounds = {
        spacing: evaluate_bound(
            loaded.scheduler,
            loaded.denoiser,
            [torch.stack(images)],
            num_inference_steps=3,
            spacing=spacing,
            progress_bar=False,
        )
        for spacing in ("optimized", "even")
    }
    assert bounds["optimized"].timesteps == [1, 2, 11] and "3 of 12 steps (optimized)" in bounds["optimized"].protocol
    assert bounds["even"].timesteps == even[::-1] and "3 of 12 steps (even)" in bounds["even"].protocol
    whole = evaluate_bound(loaded.scheduler, loaded.denoiser, [torch.stack(images)], progress_bar=False)
    assert "12 of 12 steps, all terms" in whole.protocol


def synthetic(num_examples, noise, rate, grid=60, seed=0):
    """A table of costs: rate(u) times the square of the length of the step, and noise of each example."""
    times = [i * 1000 // grid - 1 for i in range(1, grid + 1)]
    t, s = np.array(times)[:, None] + 1, np.array([-1, *times])[None] + 1
    costs = np.where(s < t, rate((s + t) / 2000) * (np.maximum(t - s, 0) / 1000) ** 2, np.inf)
    draws = np.random.default_rng(seed).standard_normal((num_examples, *costs.shape)) * noise
    nats = torch.from_numpy(np.where(s < t, costs + draws * (t - s) / 1000, np.inf))
    return OptimalTimesteps(times, nats, torch.ones(num_examples, dtype=torch.float64), 0.0, 1000, 0)


def test_even_timesteps_are_kept_unless_others_are_better():
    """With a constant rate even steps are best, and no choice is stored, however much the noise would favor it."""
    for seed in range(3):
        result = synthetic(50, 0.5, lambda u: np.ones_like(u), seed=seed)
        assert (
            result.cheapest_timesteps(20) != result.even_timesteps(20) and result.bounds[19] < result.even_bounds[19]
        )
        assert result.inference_timesteps == {} and result.timesteps(20) == result.even_timesteps(20)
    result = synthetic(50, 0.05, lambda u: np.exp(-5 * u) * 5)
    assert {5, 7, 10, 20} <= set(
        result.inference_timesteps
    ) and 60 not in result.inference_timesteps  # a choice of one
    assert result.timesteps(10) == result.cheapest_timesteps(10) and np.median(result.timesteps(10)) < 400
    single = synthetic(1, 0.0, lambda u: np.exp(-5 * u))  # nothing to compare on
    assert single.inference_timesteps == {} and single.standard_errors.isnan().all()


def test_the_bound_of_even_timesteps_beside_the_grid():
    """The sum of squares of n equal steps is 1 / n, which the estimate between numbers on the grid follows."""
    result = synthetic(2, 0.0, lambda u: np.ones_like(u))
    assert result.even_numbers == [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60]
    np.testing.assert_allclose(result.even_bounds, 1 / np.arange(1, 61), rtol=2e-3)
    assert all(result.bounds[n - 1] <= result.even_bounds[n - 1] + 1e-12 for n in result.even_numbers)


def test_the_bound_of_more_even_timesteps_than_are_on_the_grid():
    fine = synthetic(2, 0.0, lambda u: np.exp(-5 * u) * 5)
    some = [i for i, t in enumerate(fine.grid) if t in fine.even_timesteps(30) or t < 200]
    nats = fine.nats_per_example[:, some][:, :, [0, *(i + 1 for i in some)]]
    coarse = OptimalTimesteps([fine.grid[i] for i in some], nats, fine.elements_per_example, 0.0, 1000, 0)
    assert coarse.even_numbers[-1] == 30 and len(coarse.even_bounds) == len(some) > 30
    np.testing.assert_allclose(coarse.even_bounds, fine.even_bounds[: len(some)], rtol=0.05)
    np.testing.assert_allclose(coarse.even_bounds[29:], fine.even_bounds[29 : len(some)], rtol=0.005)


def test_a_grid_of_your_own():
    family, _, model, x_0 = toy("uniform")
    result = evaluate_strides(family.scheduler(), model, [x_0[:50]], grid=[5, 4, 2], progress_bar=False)
    assert result.even_numbers == [1, 2] and result.even_timesteps(3) == [5, 3, 1] == result.timesteps(3)
    assert result.even_bounds[0] == result.bounds[0] == pytest.approx(result.prior + result.costs[2, 0].item())
    assert len(result.even_bounds) == len(result.bounds) == 3
    alone = evaluate_strides(family.scheduler(), model, [x_0[:50]], grid=[5, 4], progress_bar=False)
    assert alone.even_numbers == [1] and len(alone.even_bounds) == 1 and alone.inference_timesteps == {}
    with pytest.raises(ValueError, match="timesteps of the grid, from 5 down"):
        result.bound([5, 3])
    with pytest.raises(ValueError, match="num_inference_steps is 4"):
        result.cheapest_timesteps(4)
    with pytest.raises(ValueError, match="num_inference_steps is 7"):
        result.timesteps(7)
    with pytest.raises(ValueError, match="grid starts at 4"):
        evaluate_strides(family.scheduler(), model, [x_0], grid=[4, 1])
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate_strides(family.scheduler(), model, [], progress_bar=False)
    with pytest.raises(ValueError, match="costs are NaN"):
        evaluate_strides(family.scheduler(), lambda x, t: model(x, t) * torch.nan, [x_0], progress_bar=False)
