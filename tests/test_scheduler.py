# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The contract of a diffusers scheduler, with categorical samples: files, timesteps, outputs, generators, options."""

import copy
import inspect
import json
import math
import pickle

import families
import numpy as np
import pytest
import reference as ref
import torch
from comparison import assert_same_draws
from safetensors.torch import load_file

from d3pm_hf import D3PMScheduler, D3PMSchedulerOutput, d3pm_loss, logistic_logits
from d3pm_hf.transitions import SparseRateTransition, toeplitz
from d3pm_hf.transitions import rates as rate_module
from d3pm_hf.utils import files as files_module


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose information")
T, K = families.NUM_STEPS, 5
UNIGRAM = families.stochastic(K, seed=7)
NO_MASK = torch.where(torch.arange(K) == K - 1, 0, UNIGRAM)
RATES = families.build("rate").kwargs["rate_matrix"]
# What the table of families leaves out.
OPTIONS = {
    "defaults": {},
    "linear": {"transition": "uniform", "beta_schedule": "linear", "beta_start": 0.1, "beta_end": 0.9},
    "linear_gaussian": {"transition": "gaussian", "beta_schedule": "linear"},
    "cosine": {"transition": "uniform", "beta_schedule": "cosine"},
    "reciprocal": {"transition": "stationary", "beta_schedule": "reciprocal", "stationary_probs": UNIGRAM},
    "information_absorbing": {"unigram_probs": NO_MASK},
    "information_absorbing_in_data": {"unigram_probs": UNIGRAM, "mask_in_data": True, "mask_token_id": 2},
    "information_uniform": {"transition": "uniform", "unigram_probs": UNIGRAM},
    "information_gaussian": {"transition": "gaussian", "unigram_probs": UNIGRAM},
    "information_band": {"transition": "band_diagonal", "bandwidth": 2, "unigram_probs": UNIGRAM},
    "information_rate": {"transition": "rate", "rate_matrix": RATES, "unigram_probs": UNIGRAM},
    "information_neighbors": {
        **{"transition": "absorbing_nearest_neighbor", "embeddings": families.embeddings(K - 1), "num_neighbors": 2},
        **{"mask_rate": 1.5, "unigram_probs": NO_MASK},
    },
    "fitted": {"transition": "uniform", "beta_schedule": "linear", "beta_end": 0.1, "prior": "fitted"},
    "one_matrix": {"transition": "matrix", "transition_matrices": families.stochastic(K, K)},
    "matrix_with_prior": {
        **{"transition": "matrix", "transition_matrices": families.stochastic(T, K, K)},
        **{"stationary_probs": UNIGRAM},
    },
    "sparse_rates": {"transition": "rate", "rate_matrix": RATES.to_sparse_coo(), "beta_schedule": "cosine"},
    "float32_tensors": {"transition": "stationary", "stationary_probs": UNIGRAM.float(), "beta_schedule": "cosine"},
    "frequencies": {"transition": "uniform", "unigram_probs": torch.tensor([3, 1, 4, 1, 5])},
    "denoising": {"transition": "uniform", "beta_schedule": "cosine", "x0_posterior": "denoising"},
    "raw": {"transition": "uniform", "beta_schedule": "cosine", "reconstruction": "raw"},
    "logistic": {"transition": "gaussian", "beta_schedule": "linear", "prediction_type": "logistic"},
    "previous": {"transition": "gaussian", "beta_schedule": "linear", "prediction_type": "previous"},
}
OPTIONS["fitted"]["unigram_probs"] = UNIGRAM


def make(name):
    return families.build(name).scheduler() if name in families.NAMES else D3PMScheduler(K, T, **OPTIONS[name])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def output_for(scheduler, shape, seed=0):
    """What a network might say."""
    classes = 2 if scheduler.config.prediction_type == "logistic" else scheduler.config.num_classes
    return torch.randn(*shape, classes, generator=seeded(seed))


def run(scheduler, num_inference_steps=T, **kwargs):
    """Noise, a whole sampling run and a loss: everything in which two schedulers can differ."""
    x = scheduler.sample_prior((3, T), seeded())
    output, states = output_for(scheduler, x.shape), [x]
    scheduler.set_timesteps(num_inference_steps)
    for t in scheduler.timesteps:
        states.append(scheduler.step(output, t, states[-1], generator=seeded(int(t)), **kwargs).prev_sample)
    x_0 = states[-1]
    x_t = scheduler.add_noise(x_0, torch.tensor([0, 2, 5]), seeded())
    loss = d3pm_loss(scheduler, output, x_0, x_t, torch.tensor([0, 2, 5])).loss
    return torch.stack([*states, x_t]), loss


def assert_same_run(got, expected):
    (states, loss), (expected_states, expected_loss) = run(got), run(expected)
    assert_same_draws(states, expected_states)
    torch.testing.assert_close(loss, expected_loss)


def public(config):
    return {name: value for name, value in config.items() if not name.startswith("_")}


def files(folder):
    return sorted(path.name for path in folder.iterdir())


# On disk


@pytest.mark.parametrize("name", [*families.NAMES, *OPTIONS])
def test_round_trip(name, tmp_path, monkeypatch):
    if name.endswith("-sparse"):
        monkeypatch.setattr(rate_module, "MAX_TABLE_BYTES", 0)
    scheduler = make(name)
    scheduler.save_pretrained(tmp_path / "first")
    again = D3PMScheduler.from_pretrained(tmp_path / "first")
    assert public(again.config) == public(scheduler.config)
    assert type(again.transition) is type(scheduler.transition)
    assert_same_run(again, scheduler)
    for n in (1, T):
        torch.testing.assert_close(again.transition.matrix(0, n), scheduler.transition.matrix(0, n))

    again.save_pretrained(tmp_path / "second")
    assert files(tmp_path / "first") == files(tmp_path / "second")
    assert set(files(tmp_path / "first")) <= {"scheduler_config.json", "transition.safetensors"}
    if "transition.safetensors" in files(tmp_path / "first"):
        first, second = (load_file(tmp_path / f / "transition.safetensors") for f in ("first", "second"))
        assert first.keys() == second.keys()
        for key, tensor in first.items():
            assert tensor.dtype in (torch.float64, torch.int64)
            assert torch.equal(tensor, second[key]), f"{key} has changed"


@pytest.mark.parametrize("name", families.NAMES)
def test_copies(name):
    scheduler = make(name)
    for again in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))):
        assert_same_run(again, scheduler)


def test_configuration_is_small_and_readable(tmp_path):
    make("information_neighbors").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "scheduler_config.json").read_text())
    assert config["_class_name"] == "D3PMScheduler"
    assert not any(isinstance(value, (list, dict)) for value in config.values())


def test_the_loaded_schedule_is_not_computed_again(tmp_path, monkeypatch):
    make("information_gaussian").save_pretrained(tmp_path)
    monkeypatch.setattr(toeplitz, "information_betas", None)
    D3PMScheduler.from_pretrained(tmp_path).transition.matrix(0, 1)


def test_stale_tensors_are_removed(tmp_path):
    make("stationary").save_pretrained(tmp_path)
    assert "transition.safetensors" in files(tmp_path)
    make("uniform").save_pretrained(tmp_path)
    assert files(tmp_path) == ["scheduler_config.json"]
    assert D3PMScheduler.from_pretrained(tmp_path).config.transition == "uniform"


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    old, new = (make("stationary") for _ in range(2))
    new._set_tensors({"stationary_probs": families.stochastic(K, seed=9)})
    old.save_pretrained(tmp_path)

    def write_half(tensors, filename, metadata=None):
        with open(filename, "wb") as file:
            file.write(b"\x40\0\0")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files_module, "save_file", write_half)
        with pytest.raises(OSError, match="no space"):
            new.save_pretrained(tmp_path)
    loaded = D3PMScheduler.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.transition.log_prior, old.transition.log_prior)
    new.save_pretrained(tmp_path)
    assert files(tmp_path) == ["scheduler_config.json", "transition.safetensors"]
    torch.testing.assert_close(D3PMScheduler.from_pretrained(tmp_path).transition.log_prior, new.transition.log_prior)


def test_a_subfolder_and_overrides(tmp_path):
    make("stationary").save_pretrained(tmp_path / "scheduler")
    loaded = D3PMScheduler.from_pretrained(tmp_path, subfolder="scheduler", x0_posterior="denoising")
    assert loaded.config.x0_posterior == "denoising"
    torch.testing.assert_close(loaded.transition.log_prior, make("stationary").transition.log_prior)
    loaded, unused = D3PMScheduler.from_pretrained(tmp_path / "scheduler", return_unused_kwargs=True, nothing=1)
    assert unused["nothing"] == 1 and loaded.transition is not None


@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian", "band_diagonal", "autoregressive", "cosine"])
def test_swap_by_configuration(name):
    scheduler = make(name)
    swapped = D3PMScheduler.from_config(scheduler.config)
    assert public(swapped.config) == public(scheduler.config)
    assert_same_run(swapped, scheduler)


@pytest.mark.parametrize(
    "name, needed",
    [
        ("stationary", ["stationary_probs"]),
        ("matrix", ["transition_matrices"]),
        ("rate", ["rate_matrix"]),
        ("nearest_neighbor", ["embeddings"]),
        ("information_uniform", ["unigram_probs"]),
        ("information_gaussian", ["unigram_probs"]),
        ("information_rate", ["rate_matrix", "unigram_probs"]),
        ("fitted", ["unigram_probs"]),
    ],
)
def test_swap_names_missing_tensors_and_takes_them(name, needed):
    scheduler = make(name)
    kwargs = families.build(name).kwargs if name in families.NAMES else OPTIONS[name]
    swapped = D3PMScheduler.from_config(scheduler.config)
    with pytest.raises(ValueError) as error:
        swapped.add_noise(torch.zeros(1, T, dtype=torch.long), 0)
    for tensor in needed:
        assert ("rate_matrix" if tensor == "embeddings" else tensor) in str(error.value)
    swapped = D3PMScheduler.from_config(scheduler.config, **{tensor: kwargs[tensor] for tensor in needed})
    assert_same_run(swapped, scheduler)


# Timesteps


@pytest.mark.parametrize("num_train_timesteps", [1, 7, 12, 100])
def test_every_number_of_steps(num_train_timesteps):
    scheduler = D3PMScheduler(K, num_train_timesteps)
    for n in range(1, num_train_timesteps + 1):
        scheduler.set_timesteps(n)
        timesteps = scheduler.timesteps.tolist()
        assert scheduler.num_inference_steps == len(timesteps) == n
        assert timesteps[0] == num_train_timesteps - 1
        gaps = [a - b for a, b in zip(timesteps, [*timesteps[1:], -1])]  # down to the data
        assert min(gaps) >= 1 and max(gaps) - min(gaps) <= (num_train_timesteps % n > 0)


def test_timesteps_before_and_after():
    scheduler = D3PMScheduler(K, 10)
    assert scheduler.timesteps.tolist() == list(range(9, -1, -1)) and scheduler.num_inference_steps is None
    scheduler.set_timesteps(5)
    assert scheduler.timesteps.tolist() == [9, 7, 5, 3, 1] and scheduler.timesteps.dtype == torch.int64
    scheduler.set_timesteps(timesteps=torch.tensor([8, 3, 2]))
    assert scheduler.timesteps.tolist() == [8, 3, 2] and scheduler.num_inference_steps == 3
    # What a call would use, without setting it.
    assert scheduler.sampling_timesteps() == list(range(9, -1, -1)) and scheduler.sampling_timesteps(2) == [9, 4]
    assert scheduler.sampling_timesteps(2, start_timestep=5) == [5, 2]
    assert scheduler.sampling_timesteps(timesteps=[7, 0]) == [7, 0] and scheduler.timesteps.tolist() == [8, 3, 2]


def test_the_next_timestep_is_the_next_entry():
    scheduler = D3PMScheduler(K, 100)
    scheduler.set_timesteps(timesteps=[99, 50, 49, 7])
    assert [scheduler.previous_timestep(t) for t in scheduler.timesteps] == [50, 49, 7, -1]
    scheduler.set_timesteps(3)
    timesteps = scheduler.timesteps.tolist()
    assert [scheduler.previous_timestep(t) for t in timesteps] == [*timesteps[1:], -1]
    with pytest.raises(ValueError, match="timestep 50 is not one"):
        scheduler.previous_timestep(50)


def test_a_step_goes_to_the_next_entry():
    """Uniform noise at 1 of 4 elements per step: the longer the step, the more elements change."""
    scheduler = D3PMScheduler(64, 40, transition="uniform", trained_betas=[0.25] * 40)
    x_0, x_t = torch.zeros(1, 20000, dtype=torch.long), torch.ones(1, 20000, dtype=torch.long)
    sure = torch.nn.functional.one_hot(x_0, 64) * 60.0
    for timesteps in ([19, 18], [19, 9], [19, 2], [19]):
        scheduler.set_timesteps(timesteps=timesteps)
        s = [*timesteps, -1][1] + 1
        Q = ref.rank_one([0.25] * 20, ref.stationary_mix(64))
        expected = ref.posterior(Q, x_0[:, :1], x_t[:, :1], s, 20)[0, 0, 0].item()
        x_s = scheduler.step(sure, 19, x_t, generator=seeded()).prev_sample
        assert (x_s == 0).double().mean().item() == pytest.approx(expected, abs=0.015)


# The rest of diffusers' contract


def test_public_attributes():
    scheduler = make("uniform")
    assert scheduler.order == 1 and scheduler.init_noise_sigma == 1.0 and len(scheduler) == T
    x = scheduler.sample_prior((2, 3), seeded())
    assert scheduler.scale_model_input(x) is x and scheduler.scale_model_input(x, 3) is x
    assert x.dtype == torch.int64 and x.shape == (2, 3)
    assert scheduler.compatibles == []


HEADS = ["absorbing", "gaussian", "raw", "logistic", "previous"]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("t", [T - 1, 0])
def test_dict_and_tuple(name, t):
    scheduler = make(name)
    scheduler.set_timesteps(T)
    x = scheduler.sample_prior((2, T), seeded())
    output = output_for(scheduler, x.shape)
    as_dict = scheduler.step(output, t, x, generator=seeded())
    prev_sample, pred_logits = scheduler.step(output, t, x, generator=seeded(), return_dict=False)
    assert list(as_dict) == ["prev_sample", "pred_logits"] and len(as_dict.to_tuple()) == 2
    for i, (name, expected) in enumerate((("prev_sample", prev_sample), ("pred_logits", pred_logits))):
        for got in (as_dict[name], as_dict[i], getattr(as_dict, name), dict(as_dict)[name]):
            assert torch.equal(got, expected)
    assert torch.equal(pred_logits, scheduler.logits(output))  # nothing has reshaped them
    assert prev_sample.shape == x.shape and prev_sample.dtype == x.dtype


@pytest.mark.parametrize("name", HEADS)
def test_outputs_are_data(name):
    """An output goes through pickle, a deep copy, a file of torch and a pytree."""
    scheduler = make(name)
    x = scheduler.sample_prior((2, T), seeded())
    output = scheduler.step(output_for(scheduler, x.shape), 3, x, generator=seeded())
    leaves, structure = torch.utils._pytree.tree_flatten(output)
    copies = [pickle.loads(pickle.dumps(output)), copy.deepcopy(output), copy.copy(output)]
    for again in (*copies, torch.utils._pytree.tree_unflatten(leaves, structure)):
        assert isinstance(again, D3PMSchedulerOutput) and list(again) == list(output)
        assert all(torch.equal(again[key], output[key]) for key in output)


@pytest.mark.parametrize("name", [*families.NAMES, *HEADS[2:]])
def test_step_takes_any_integer_for_a_timestep(name):
    """An int, a tensor and a NumPy integer, by `timesteps` or by `previous_timestep`, make the same step."""
    scheduler = make(name)
    scheduler.set_timesteps(T)
    x = scheduler.sample_prior((2, T), seeded())
    output = output_for(scheduler, x.shape)
    for i, t in enumerate(range(T - 1, -1, -1)):
        expected = scheduler.step(output, t, x, generator=seeded()).prev_sample
        assert expected.shape == x.shape
        for timestep in (scheduler.timesteps[i], np.int64(t), torch.tensor(t, dtype=torch.int32)):
            assert torch.equal(scheduler.step(output, timestep, x, generator=seeded()).prev_sample, expected)
        given = {"previous_timestep": torch.tensor(t - 1), "generator": seeded()}
        assert torch.equal(make(name).step(output, t, x, **given).prev_sample, expected)


@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian", "previous"])
def test_step_before_set_timesteps_goes_one_timestep(name):
    """As in DDPM; the law is that of eq. 4 with s = t - 1."""
    scheduler = make(name)
    x_t = torch.tensor([[1, 0, 3]])
    logits = output_for(scheduler, x_t.shape)
    for t in (T - 1, 2, 0):
        assert scheduler.num_inference_steps is None and scheduler.previous_timestep(t) == t - 1
        many = [v.expand(4000, *v.shape[1:]) for v in (logits, x_t)]
        x_s = scheduler.step(many[0], t, many[1], generator=seeded()).prev_sample
        if name == "previous":
            law = logits[0].softmax(-1)
        else:
            family = families.build(name)
            law = ref.reverse(family.matrices, ref.forbid(logits, family.mask), x_t, t, t + 1)[0]
        assert ref.fit(x_s, law) > 1e-4
    with pytest.raises(ValueError, match=f"timestep {T} is outside 0 .. {T - 1}"):
        scheduler.previous_timestep(T)


def test_a_step_with_previous_timestep_does_not_look_at_the_scheduler():
    family = families.build("uniform")
    scheduler = family.scheduler()
    x_t = torch.tensor([[1, 0, 3]])
    logits = output_for(scheduler, x_t.shape)
    many = [v.expand(4000, *v.shape[1:]) for v in (logits, x_t)]
    scheduler.set_timesteps(2)
    for t, s in [(5, 4), (5, 0), (4, 1), (3, -1)]:
        x_s = scheduler.step(many[0], t, many[1], previous_timestep=s, generator=seeded()).prev_sample
        law = ref.reverse(family.matrices, logits, x_t, s + 1, t + 1)[0]
        assert ref.fit(x_s, law) > 1e-4
    with pytest.raises(
        ValueError, match="timestep 4 is not one of those that `set_timesteps` chose: .*previous_timestep"
    ):
        scheduler.step(logits, 4, x_t)
    for s in (3, 5, -2):
        with pytest.raises(ValueError, match=f"previous timestep {s} of t = 3 is not in -1 .. t - 1"):
            scheduler.step(logits, 3, x_t, previous_timestep=s)
    direct = make("previous")
    for call in (direct.step, direct.posterior_logits):
        with pytest.raises(ValueError, match="has no prediction of x_0.*num_inference_steps=6"):
            call(logits, 3, x_t, previous_timestep=1)


@pytest.mark.parametrize("name", families.NAMES)
@pytest.mark.parametrize("meaning", ["leave_one_out", "denoising"])
def test_preview_is_the_mode_of_the_denoising_posterior(name, meaning):
    family = families.build(name)
    scheduler = family.scheduler(x0_posterior=meaning)
    scheduler.set_timesteps(T)
    x_0 = family.data((8, T))
    logits = 3 * output_for(scheduler, x_0.shape)
    for t in range(T):
        x_t = family.corrupt(x_0, t + 1)
        allowed = ref.forbid(logits, family.mask)
        law = ref.denoising(family.matrices, allowed, x_t, t + 1, meaning)
        possible = ref.likelihood(family.matrices, x_t, 0, t + 1) > 0  # what q rules out is not a preview
        best = torch.where(possible, law, 0).argmax(-1)
        assert torch.equal(scheduler.predict_original_sample(logits, t, x_t), best)
    each = torch.arange(8) % T
    x_t = torch.cat([family.corrupt(x_0[i : i + 1], int(t) + 1) for i, t in enumerate(each)])
    together = scheduler.predict_original_sample(logits, each, x_t)
    single = [scheduler.predict_original_sample(logits[[i]], int(t), x_t[[i]]) for i, t in enumerate(each)]
    assert torch.equal(together, torch.cat(single))


@pytest.mark.parametrize("name", ["absorbing", "uniform", "raw", "logistic"])
def test_preview_is_the_mode_of_one_step_to_the_data(name):
    scheduler = make(name)
    x_t = torch.tensor([[1, 0, 3], [2, 2, 1]])
    output = 3 * output_for(scheduler, x_t.shape)
    for t in range(T):
        best = scheduler.posterior_logits(output, t, x_t, previous_timestep=-1).argmax(-1)
        assert torch.equal(scheduler.predict_original_sample(output, t, x_t), best)


def test_no_preview():
    scheduler = make("previous")
    x = scheduler.sample_prior((2, T), seeded())
    with pytest.raises(ValueError, match="prediction_type is 'previous'.*no x_0 to preview; look at `prev_sample`"):
        scheduler.predict_original_sample(output_for(scheduler, x.shape), 3, x)
    scheduler = make("uniform")
    output = output_for(scheduler, x.shape)
    with pytest.raises(ValueError, match="timestep 6 is outside 0 .. 5"):
        scheduler.predict_original_sample(output, 6, x)
    with pytest.raises(ValueError, match="the network's output holds NaN or infinity"):
        scheduler.predict_original_sample(output.index_fill(-1, torch.tensor(2), torch.nan), 3, x)
    with pytest.raises(ValueError, match=r"shape \(2, 6, 4\).* need \(2, 6, 5\)"):
        scheduler.predict_original_sample(output[..., :-1], 3, x)


@pytest.mark.parametrize("as_type", [list, tuple, np.array])
def test_trained_betas(as_type, tmp_path):
    scheduler = D3PMScheduler(K, 2, transition="uniform", trained_betas=as_type([0.25, 1.0]))
    scheduler.save_pretrained(tmp_path)
    again = D3PMScheduler.from_pretrained(tmp_path)
    assert list(again.config.trained_betas) == [0.25, 1.0]
    expected = ref.rank_one([0.25, 1.0], ref.stationary_mix(K))
    torch.testing.assert_close(again.transition.matrix(0, 1), expected[0, 0])


def test_attributes_of_the_configuration():
    """diffusers' rule: what is in the configuration is read from there, and what is nowhere is an AttributeError."""
    scheduler = make("uniform")
    scheduler.register_to_config(test_attribute=5)
    scheduler.own = 7
    assert scheduler.own == 7 and scheduler.config.test_attribute == 5
    with pytest.warns(FutureWarning, match="Accessing config attribute `test_attribute` directly"):
        assert scheduler.test_attribute == 5
    with pytest.raises(AttributeError, match="'D3PMScheduler' object has no attribute 'missing'"):
        scheduler.missing
    # A constructor that took any keyword would have to list those that are deprecated.
    assert "kwargs" not in inspect.signature(D3PMScheduler.__init__).parameters and not scheduler._deprecated_kwargs


def test_configurations_with_a_class_name_and_unknown_keys():
    scheduler = make("uniform")
    config = {**scheduler.config, "_class_name": "D3PMScheduler", "_diffusers_version": "0.1.0"}
    for given in (config, {**config, "unexpected": True}):
        assert torch.equal(run(D3PMScheduler.from_config(given))[0], run(scheduler)[0])


# Temperature, top-k, top-p


def reshaped(logits, temperature=1.0, top_k=None, top_p=None):
    """The distribution by hand: the k best, or the fewest that hold the share p, of softmax(logits / temperature)."""
    probs = (logits.double() / temperature).softmax(-1)
    order = probs.argsort(-1, descending=True)
    ranked = probs.gather(-1, order)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if top_k is not None:
        keep[..., top_k:] = False
    if top_p is not None:
        keep &= ranked.cumsum(-1) - ranked < top_p
    ranked = torch.where(keep, ranked, 0)
    return torch.zeros_like(probs).scatter(-1, order, ranked / ranked.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 2}, {"top_p": 0.6}, {"temperature": 2.0, "top_k": 3}],
)
@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian", "raw"])
def test_options_reshape_what_the_network_says(name, options):
    scheduler = make(name)
    scheduler.set_timesteps(timesteps=[0] if name == "raw" else [3, 1])
    t = int(scheduler.timesteps[0])
    x_t = torch.full((1, 3), scheduler.mask_token_id) if name == "absorbing" else torch.tensor([[0, 2, 4]])
    logits = output_for(scheduler, x_t.shape)
    allowed = scheduler.transition.forbid(logits.double())
    law = scheduler.posterior_logits(reshaped(allowed, **options).log(), t, x_t, scheduler.previous_timestep(t)).exp()
    plain = scheduler.posterior_logits(logits, t, x_t, scheduler.previous_timestep(t)).exp()
    assert (law - plain).abs().max() > 0.03  # the option matters here
    many = [v.expand(6000, *v.shape[1:]) for v in (logits, x_t)]
    x_s = scheduler.step(many[0], t, many[1], generator=seeded(1), **options).prev_sample
    assert ref.fit(x_s, law[0]) > 1e-4


@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian"])
def test_the_best_state_alone_is_deterministic(name):
    """top_k=1 in one step from pure noise leaves nothing to chance, and the mask never takes a place."""
    family = families.build(name, betas=[0.5] * 5 + [1.0] if name != "gaussian" else [0.3] * T)
    scheduler = family.scheduler()
    scheduler.set_timesteps(1)
    x = scheduler.sample_prior((4, T), seeded())
    logits = output_for(scheduler, x.shape)
    if family.mask is not None:
        logits[..., family.mask] = 100.0
    expected = ref.forbid(logits, family.mask).argmax(-1)
    for seed in range(3):
        assert torch.equal(scheduler.step(logits, T - 1, x, top_k=1, generator=seeded(seed)).prev_sample, expected)


# One generator per sample


@pytest.mark.parametrize("name", [*families.NAMES, "raw", "logistic", "previous"])
def test_a_list_of_generators_equals_single_runs(name):
    scheduler = make(name)
    assert isinstance(scheduler.transition, SparseRateTransition) == name.endswith("-sparse")
    scheduler.set_timesteps(T)
    seeds, t = [5, 3, 8], torch.tensor([1, 3, 5])
    x = torch.where(torch.arange(T) % 2 == 0, scheduler.sample_prior((3, T), seeded()), 0)
    output = output_for(scheduler, x.shape)

    def several(call):
        return call(slice(None), [seeded(s) for s in seeds])

    def one_by_one(call):
        return torch.cat([call(slice(i, i + 1), seeded(s)) for i, s in enumerate(seeds)])

    calls = [
        lambda i, g: scheduler.add_noise(x[i], t[i], g),
        lambda i, g: scheduler.sample_prior(x[i].shape, g),
        lambda i, g: scheduler.step(output[i], 3, x[i], generator=g).prev_sample,
        lambda i, g: scheduler.step(output[i], 0, x[i], generator=g).prev_sample,
    ]
    for call in calls:
        assert_same_draws(several(call), one_by_one(call))
        assert torch.equal(several(call), several(call))


def test_generators_go_on():
    """A generator that is used twice gives other numbers the second time."""
    scheduler, g = make("uniform"), seeded()
    x_0 = torch.zeros(4, 50, dtype=torch.long)
    assert not torch.equal(scheduler.add_noise(x_0, 4, g), scheduler.add_noise(x_0, 4, g))


# Other outputs of the network


@pytest.mark.parametrize("t", [3, 0])
def test_logistic_head(t):
    """Location and log-scale go through `logistic_logits`, and then all is as for logits."""
    scheduler, plain = make("logistic"), D3PMScheduler(K, T, transition="gaussian", beta_schedule="linear")
    x_t = scheduler.sample_prior((2, T), seeded())
    output = output_for(scheduler, x_t.shape)
    logits = logistic_logits(output[..., 0], output[..., 1], K)
    got = scheduler.posterior_logits(output, t, x_t)
    torch.testing.assert_close(got, plain.posterior_logits(logits, t, x_t))
    for each in (scheduler, plain):
        each.set_timesteps(T)
    draws = [s.step(o, t, x_t, generator=seeded()).prev_sample for s, o in ((scheduler, output), (plain, logits))]
    assert_same_draws(*draws)


def test_previous_head():
    scheduler = make("previous")
    scheduler.set_timesteps(T)
    x_t = torch.zeros(1, 3, dtype=torch.long)
    logits = output_for(scheduler, x_t.shape)
    x_s = scheduler.step(logits.expand(4000, -1, -1), 3, x_t.expand(4000, -1), generator=seeded()).prev_sample
    assert ref.fit(x_s, logits[0].softmax(-1)) > 1e-4
    torch.testing.assert_close(scheduler.posterior_logits(logits, 3, x_t), logits.log_softmax(-1))
    scheduler.set_timesteps(timesteps=[3, 2, 1, 0])  # starting late skips nothing
    for skipping in ({"num_inference_steps": T // 2}, {"timesteps": [5, 4, 2, 1, 0]}, {"timesteps": [2, 1]}):
        with pytest.raises(ValueError, match="has no prediction of x_0.*num_inference_steps=6"):
            scheduler.set_timesteps(**skipping)


@pytest.mark.parametrize("name", ["uniform", "absorbing", "gaussian"])
def test_raw_reconstruction(name):
    """The last step alone differs: it draws from the network's output, the mask excepted."""
    family = families.build(name)
    raw, plain = family.scheduler(reconstruction="raw"), family.scheduler()
    x_t = family.corrupt(family.data((1, T)), 3)
    logits = output_for(raw, x_t.shape)
    allowed = ref.forbid(logits, family.mask)
    for s, t in [(1, 2), (0, 5)]:
        torch.testing.assert_close(raw.posterior_logits(logits, t, x_t, s), plain.posterior_logits(logits, t, x_t, s))
        many = [v.expand(1000, *v.shape[1:]) for v in (logits, x_t)]
        draws = [
            each.step(many[0], t, many[1], previous_timestep=s, generator=seeded()).prev_sample
            for each in (raw, plain)
        ]
        assert_same_draws(*draws)
    for t in (0, 2):
        got = raw.posterior_logits(logits, t, x_t, -1)
        torch.testing.assert_close(got.double(), allowed.log_softmax(-1))
        raw.set_timesteps(timesteps=[t])
        many = [v.expand(4000, *v.shape[1:]) for v in (logits, x_t)]
        x_0 = raw.step(many[0], t, many[1], generator=seeded()).prev_sample
        assert ref.fit(x_0, allowed[0].softmax(-1)) > 1e-4


def test_exponents_beyond_betas(tmp_path):
    """A rate of 0.01 for a time of 40: 1 - exp(-40) is no other beta than 1. They are saved, infinity included."""
    rates = torch.tensor([[-0.01, 0.01], [0.01, -0.01]], dtype=torch.float64)
    given = {"transition": "rate", "rate_matrix": rates, "trained_exponents": [40.0, 0.5, float("inf")]}
    scheduler = D3PMScheduler(2, 3, **given)
    for process in (
        scheduler.transition,
        rate_module.SparseRateTransition(rates, torch.tensor([40.0, 0.5, torch.inf]).double()),
    ):
        for t, time in [(1, 40.0), (2, 40.5), (3, torch.inf)]:
            stays = (1 + math.exp(-0.02 * time)) / 2
            assert process.matrix(0, t)[0, 0].item() == pytest.approx(stays, abs=1e-13)
    scheduler.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "scheduler_config.json").read_text())["trained_exponents"] == [40.0, 0.5, "inf"]
    loaded = D3PMScheduler.from_pretrained(tmp_path).transition
    torch.testing.assert_close(loaded.matrix(0, 2), scheduler.transition.matrix(0, 2), atol=0, rtol=0)
    masking = D3PMScheduler(3, 2, trained_exponents=[50.0, "inf"]).transition
    assert masking.matrix(0, 1)[0, 0].item() == pytest.approx(math.exp(-50), rel=1e-12)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"trained_exponents": [1.0]}, "trained_exponents must be a list of 2 numbers, one per timestep"),
        (
            {"trained_exponents": [1.0, -1.0]},
            "alpha_2 of trained_exponents is -1.0: it must be a number in 0 .. 1e12",
        ),
        ({"trained_exponents": [1.0, 2.0], "trained_betas": [0.1, 0.2]}, "pass one of the two"),
        ({"trained_exponents": [1.0, 2.0], "transition": "gaussian"}, "transition='gaussian' has no exponents"),
    ],
)
def test_exponents_are_checked(kwargs, message):
    with pytest.raises(ValueError, match=message):
        D3PMScheduler(4, 2, **kwargs)
