# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Wrong input is refused where it enters, in words that name the value and the way out."""

import json
import shutil

import families
import pytest
import torch
from diffusers import DDPMScheduler
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from d3pm_hf import D3PMScheduler, d3pm_loss, evaluate_bound
from d3pm_hf.transitions import dense, rank_one
from d3pm_hf.transitions import rates as rate_module


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
T, K = families.NUM_STEPS, 5
# One of each implementation.
NAMES = ("absorbing", "uniform", "gaussian", "rate-sparse", "autoregressive")
RATES = families.build("rate").kwargs["rate_matrix"]
EACH = pytest.mark.parametrize("name", NAMES)


def case(name, **kwargs):
    """A scheduler, x_0, and an output of the network for it."""
    family = families.build(name)
    scheduler = family.scheduler(**kwargs)
    x = family.data((4, T))
    return scheduler, x, torch.randn(*x.shape, K, generator=torch.Generator().manual_seed(0))


# States


@EACH
@pytest.mark.parametrize("token", [-1, K])
def test_token_outside_the_vocabulary(name, token):
    scheduler, x, output = case(name)
    scheduler.set_timesteps(T)
    wrong = x.clone()
    wrong[2, 3] = token
    for call in (
        lambda: scheduler.add_noise(wrong, 0),
        lambda: scheduler.step(output, 3, wrong),
        lambda: scheduler.posterior_logits(output, 3, wrong),
        lambda: d3pm_loss(scheduler, output, wrong, x, 3),
        lambda: d3pm_loss(scheduler, output, x, wrong, 3),
        lambda: evaluate_bound(scheduler, lambda x_t, t: output, [wrong], progress_bar=False),
    ):
        with pytest.raises(ValueError, match=rf"token {token} at position \(2, 3\) is outside the vocabulary of {K}"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.uint8], ids=str)
def test_states_that_are_not_tokens(dtype):
    scheduler, x, output = case("uniform")
    for call in (
        lambda: scheduler.add_noise(x.to(dtype), 0),
        lambda: d3pm_loss(scheduler, output, x.to(dtype), x, 3),
        lambda: d3pm_loss(scheduler, output, x, x.to(dtype), 3),
    ):
        with pytest.raises(ValueError, match=rf"{dtype}.*long"):
            call()


# Timesteps


@EACH
@pytest.mark.parametrize("t", [-1, T, 1000])
def test_timestep_outside_the_process(name, t):
    scheduler, x, output = case(name)
    each = torch.tensor([0, 1, t, 2])
    for call in (
        lambda: scheduler.add_noise(x, t),
        lambda: scheduler.add_noise(x, each),
        lambda: d3pm_loss(scheduler, output, x, x, t),
        lambda: d3pm_loss(scheduler, output, x, x, each),
        lambda: scheduler.posterior_logits(output, t, x),
    ):
        with pytest.raises(ValueError, match=rf"timestep {t} is outside 0 .. {T - 1}"):
            call()


@EACH
def test_timesteps_of_another_batch(name):
    scheduler, x, output = case(name)
    for wrong in (torch.tensor([1, 2]), torch.tensor([1, 2, 3]), torch.tensor([[1], [2], [3], [4]])):
        for call in (lambda: scheduler.add_noise(x, wrong), lambda: d3pm_loss(scheduler, output, x, x, wrong)):
            with pytest.raises(ValueError, match=r"shape \([\d, ]+\).*batch of 4"):
                call()


@EACH
@pytest.mark.parametrize("s", [3, 4, -2])
def test_previous_timestep_is_not_before(name, s):
    scheduler, x, output = case(name)
    for call in (
        lambda: scheduler.posterior_logits(output, 3, x, s),
        lambda: d3pm_loss(scheduler, output, x, x, 3, previous_timesteps=s),
        lambda: d3pm_loss(scheduler, output, x, x, 3, previous_timesteps=torch.tensor([0, 1, s, 2])),
    ):
        with pytest.raises(ValueError, match=rf"{s}.*-1 .. t - 1"):
            call()


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({}, "num_inference_steps=None and timesteps=None"),
        ({"num_inference_steps": 2, "timesteps": [1, 0]}, r"num_inference_steps=2 and timesteps=\[1, 0\]"),
        ({"num_inference_steps": 0}, f"num_inference_steps is 0: it must be an integer in 1 .. {T}"),
        ({"num_inference_steps": -3}, "num_inference_steps is -3"),
        ({"num_inference_steps": T + 1}, f"num_inference_steps is {T + 1}.* 1 .. {T}"),
        ({"num_inference_steps": 2.5}, "num_inference_steps is 2.5: it must be an integer"),
        ({"num_inference_steps": "2"}, "num_inference_steps is '2': it must be an integer"),
        ({"timesteps": []}, f"range {T - 1} .. 0"),
        ({"timesteps": [0, 3]}, "`timesteps` must be strictly decreasing, got 3 after 0"),
        ({"timesteps": [5, 3, 3, 0]}, "`timesteps` must be strictly decreasing, got 3 after 3"),
        ({"timesteps": [5, 2.5, 0]}, r"timesteps is \[5, 2.5, 0\]: pass a list of integers"),
        ({"timesteps": 3}, "timesteps is 3: pass a list of integers"),
        ({"timesteps": [T, 2]}, rf"\[{T}\] .. \[2\].* {T - 1} .. 0"),
        ({"timesteps": [2, -1]}, rf"\[2\] .. \[-1\].* {T - 1} .. 0"),
    ],
)
def test_set_timesteps(kwargs, words):
    scheduler = D3PMScheduler(K, T)
    with pytest.raises(ValueError, match=words):
        scheduler.set_timesteps(**kwargs)
    assert scheduler.num_inference_steps is None  # and nothing has changed


def test_step_elsewhere():
    scheduler, x, output = case("uniform")
    scheduler.set_timesteps(2)
    with pytest.raises(ValueError, match="timestep 4 is not one"):
        scheduler.step(output, 4, x)


# The network's output


@EACH
def test_output_of_another_shape(name):
    scheduler, x, output = case(name)
    scheduler.set_timesteps(T)
    for wrong in (output[..., :-1], output[:, :-1], output[:1], output.mT, output[..., 0]):
        for call in (
            lambda: scheduler.step(wrong, 3, x),
            lambda: scheduler.posterior_logits(wrong, 3, x),
            lambda: d3pm_loss(scheduler, wrong, x, x, 3),
        ):
            with pytest.raises(
                ValueError, match=rf"shape \({', '.join(map(str, wrong.shape))}\).*\(4, {T}, {K}\), classes last"
            ):
                call()


@pytest.mark.parametrize("head, needed", [("logistic", 2), ("previous", K)])
def test_output_of_another_head(head, needed):
    scheduler, x, output = case("gaussian", prediction_type=head)
    scheduler.set_timesteps(T)
    for call in (lambda o: scheduler.step(o, 3, x), lambda o: d3pm_loss(scheduler, o, x, x, 3)):
        with pytest.raises(ValueError, match=rf"prediction_type='{head}' need \(4, {T}, {needed}\)"):
            call(output[..., :3])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("reconstruction", ["posterior", "raw"])
@EACH
def test_output_that_is_not_a_number(name, reconstruction, value):
    scheduler, x, output = case(name, reconstruction=reconstruction)
    scheduler.set_timesteps(T)
    output[1, 2, 3] = value
    for t in (3, 0):
        with pytest.raises(ValueError, match="NaN or inf"):
            scheduler.step(output, t, x)


def test_output_that_contradicts_the_process():
    """One step along a band of width 1 cannot lead from 4 to 0, whatever the network says."""
    scheduler = D3PMScheduler(K, T, transition="band_diagonal", trained_betas=[0.5] * T)
    scheduler.set_timesteps(T)
    x, output = torch.zeros(1, 2, dtype=torch.long), torch.tensor([0.0, 0, 0, 0, 9]).expand(1, 2, K)
    assert (scheduler.step(output, 0, x).prev_sample < 2).all()
    with pytest.raises(ValueError, match="no state is possible.*top_k.*x_t"):
        scheduler.step(output, 0, x, top_k=1)


@EACH
def test_generators_of_another_batch(name):
    scheduler, x, output = case(name)
    scheduler.set_timesteps(T)
    three = [torch.Generator() for _ in range(3)]
    for call in (
        lambda: scheduler.add_noise(x, 3, three),
        lambda: scheduler.sample_prior((4, T), three),
        lambda: scheduler.step(output, 3, x, generator=three),
    ):
        with pytest.raises(ValueError, match="got 3 generators for a batch of 4"):
            call()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temperature": torch.inf}, "temperature.*inf"),
        ({"temperature": -1.0}, "temperature.*-1.0"),
        ({"top_k": 0}, "top_k.*0"),
        ({"top_p": 1.5}, "top_p.*1.5"),
        ({"top_p": -0.5}, "top_p.*-0.5"),
    ],
)
def test_sampling_options(options, words):
    scheduler, x, output = case("uniform")
    scheduler.set_timesteps(T)
    with pytest.raises(ValueError, match=words):
        scheduler.step(output, 3, x, **options)


# The constructor


@pytest.mark.parametrize(
    "option", ["transition", "beta_schedule", "prior", "prediction_type", "x0_posterior", "reconstruction"]
)
def test_unknown_option(option):
    with pytest.raises(ValueError, match=rf"{option} is 'nonsense'.*one of "):
        D3PMScheduler(K, T, **{option: "nonsense"})
    with pytest.raises(ValueError, match="nonsense"):
        d3pm_loss(*case("uniform")[:1], None, None, None, 0, auxiliary="nonsense")


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"num_classes": 1}, "num_classes is 1: it must be an integer of at least 2"),
        ({"num_train_timesteps": 0}, "num_train_timesteps is 0: it must be an integer of at least 1"),
        ({"mask_token_id": K}, f"mask_token_id is {K}.* 0 .. {K - 1}"),
        ({"mask_token_id": -1}, "mask_token_id is -1"),
        ({"trained_betas": [0.1, 0.2]}, f"got 2 betas for {T}"),
        ({"trained_betas": [0.1] * (T - 1) + [1.2]}, f"beta_{T} is 1.2.* 0 and 1"),
        ({"trained_betas": [-0.1] + [0.5] * (T - 1)}, "beta_1 is -0.1"),
        ({"trained_betas": [0.1, float("nan")] + [0.5] * (T - 2)}, "beta_2 is nan"),
        ({"transition": "gaussian", "trained_betas": [-0.1] + [0.5] * (T - 1)}, "beta_1 is -0.1"),
        ({"transition": "rate", "rate_matrix": RATES, "trained_betas": [0.5] * (T - 1) + [1.2]}, f"beta_{T} is 1.2"),
        ({"transition": "rate", "rate_matrix": RATES, "trained_betas": [-0.1] * T}, "beta_1 is -0.1"),
        (
            {"transition": "band_diagonal", "bandwidth": 3, "trained_betas": [2.0] * T},
            r"chance to stay.* -0\.\d+.*betas",
        ),
        ({"transition": "uniform", "beta_schedule": "linear", "beta_end": 1.5}, "is 1.[1-5].* 0 and 1"),
        ({"unigram_probs": torch.ones(K)}, f"mask token {K - 1} the frequency 1.*mask_in_data"),
        ({"transition": "uniform", "unigram_probs": torch.tensor([1.0, -2, 1, 1, 1])}, "unigram_probs.* -2"),
        ({"transition": "uniform", "unigram_probs": torch.zeros(K)}, "unigram_probs.*sum 0"),
        ({"unigram_probs": torch.eye(K)[2]}, r"all data are in state 2 \(unigram_probs\).*another beta_schedule"),
        ({"transition": "gaussian", "unigram_probs": torch.eye(K)[2]}, "all data are in state 2"),
        ({"transition": "uniform", "unigram_probs": torch.ones(K + 1)}, rf"unigram_probs .*\({K + 1},\).*\({K},\)"),
        ({"transition": "stationary", "stationary_probs": torch.ones(K), "beta_schedule": "cosine"}, "sum of 5"),
        ({"transition": "matrix", "transition_matrices": torch.eye(K + 1)}, rf"\({K + 1}, {K + 1}\)"),
        ({"transition": "matrix", "transition_matrices": torch.eye(K).repeat(T + 1, 1, 1)}, rf"\({T + 1}, {K}, {K}\)"),
        ({"transition": "rate", "rate_matrix": torch.zeros(K, K + 1)}, rf"\({K}, {K + 1}\)"),
        (
            {"embeddings": torch.eye(K)},
            "got embeddings, which the transition 'absorbing' does not take: leave it out, or choose one that does",
        ),
        (
            {"transition": "rate", "embeddings": torch.eye(K), "rate_matrix": RATES},
            r"got embeddings, which the transition 'rate' does not take: .* \(nearest_neighbor, absorbing_nearest",
        ),
        (
            {"transition": "nearest_neighbor", "embeddings": torch.eye(K), "rate_matrix": RATES},
            "got embeddings and rate_matrix",
        ),
        ({"transition": "nearest_neighbor", "embeddings": torch.eye(K), "num_neighbors": K}, f"num_neighbors is {K}"),
        ({"transition": "nearest_neighbor", "embeddings": torch.eye(K + 2), "num_neighbors": 2}, rf"{K + 2}.*{K}"),
    ],
)
def test_constructor(kwargs, words):
    with pytest.raises(ValueError, match=words):
        D3PMScheduler(**{"num_classes": K, "num_train_timesteps": T, **kwargs})


def test_embeddings_for_another_transition():
    config = D3PMScheduler(K, T, transition="rate", beta_schedule="cosine").config
    with pytest.raises(ValueError, match="got embeddings, which the transition 'rate' does not take"):
        D3PMScheduler.from_config(config, embeddings=torch.eye(K))


def test_matrices_that_are_not_stochastic():
    Q = families.stochastic(T, K, K)
    Q[3, 2] *= 1.1
    with pytest.raises(ValueError, match="row 2 of the transition matrix of step 4 sums to 1.1"):
        D3PMScheduler(K, T, transition="matrix", transition_matrices=Q)
    Q = families.stochastic(K, K)
    Q[1] = torch.tensor([1.5, -0.5, 0, 0, 0])
    with pytest.raises(ValueError, match="-0.5"):
        D3PMScheduler(K, T, transition="matrix", transition_matrices=Q)
    with pytest.raises(ValueError, match=r"\(2, 3\).*\[K, K\]"):
        dense.MatrixTransition(torch.ones(2, 3), 4)


def test_rates_that_are_not_rates():
    rates = RATES.clone()
    rates[1, 3] -= 2
    with pytest.raises(ValueError, match="rate from state 1 to state 3 is negative"):
        D3PMScheduler(K, T, transition="rate", rate_matrix=rates, beta_schedule="cosine")
    rates = RATES.clone()
    rates[2, 2] += 0.25
    with pytest.raises(ValueError, match="row 2 of the rate matrix sums to 0.25"):
        D3PMScheduler(K, T, transition="rate", rate_matrix=rates, beta_schedule="cosine")
    with pytest.raises(ValueError, match=r"\(2, 3\).*square"):
        rate_module.check_rates(torch.ones(2, 3))


def test_neighbors_that_never_meet():
    apart = torch.tensor([[0.0], [1], [2], [100], [101], [102]])
    kwargs = {"transition": "nearest_neighbor", "embeddings": apart, "beta_schedule": "cosine"}
    with pytest.raises(ValueError, match="2 groups that never mix.*num_neighbors"):
        D3PMScheduler(6, T, num_neighbors=2, **kwargs)
    D3PMScheduler(6, T, num_neighbors=3, **kwargs).transition  # as the message says


def test_exponents_of_a_process():
    with pytest.raises(ValueError, match="exponents are between -0.1 and 0.5: none may be negative"):
        rank_one.RankOneTransition(rank_one.uniform_distribution(K), torch.tensor([0.5, -0.1]).double())


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["uniform", "gaussian", "absorbing", "nearest_neighbor"])
def test_a_process_that_does_not_end_in_noise(name):
    with pytest.warns(UserWarning, match=r"after 6 steps .* nats per element from the prior .*more timesteps"):
        families.build(name, betas=[0.01] * T).scheduler()


@pytest.mark.parametrize("name", ["uniform", "absorbing", "nearest_neighbor"])
def test_a_process_that_does_is_quiet(name, recwarn):
    families.build(name, betas="end").scheduler()
    assert not [w for w in recwarn if "prior" in str(w.message)]


@pytest.mark.parametrize(
    "kwargs, missing",
    [
        ({"transition": "uniform"}, "unigram_probs"),
        ({"transition": "gaussian"}, "unigram_probs"),
        ({"transition": "stationary", "beta_schedule": "cosine"}, "stationary_probs"),
        ({"transition": "stationary"}, "stationary_probs and unigram_probs"),
        ({"transition": "matrix"}, "transition_matrices"),
        ({"transition": "rate", "beta_schedule": "cosine"}, "rate_matrix"),
        ({"transition": "nearest_neighbor", "beta_schedule": "cosine"}, "rate_matrix"),
        ({"prior": "fitted"}, "unigram_probs"),
    ],
)
def test_missing_tensors(kwargs, missing):
    scheduler = D3PMScheduler(K, T, **kwargs)
    x = torch.zeros(1, 2, dtype=torch.long)
    for call in (lambda: scheduler.add_noise(x, 0), lambda: scheduler.sample_prior((1, 2))):
        with pytest.raises(ValueError, match=rf"'{scheduler.config.transition}' process .* needs {missing}: pass"):
            call()


def test_sequences_of_another_length():
    scheduler = D3PMScheduler(K, T, transition="autoregressive")
    with pytest.raises(ValueError, match=rf"\({T + 1},\).*num_train_timesteps \({T}\)"):
        scheduler.add_noise(torch.zeros(2, T + 1, dtype=torch.long), 0)


# Files


def save(folder, name, **kwargs):
    families.build(name, **kwargs).scheduler().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "donor, words",
    [
        (("matrix", 5), "'matrix' process over 5 classes.*'stationary' over 5"),
        (("stationary", 6), "'stationary' process over 6 classes.*'stationary' over 5"),
    ],
)
def test_files_of_two_checkpoints(tmp_path, donor, words):
    mine, other = save(tmp_path / "a", "stationary"), save(tmp_path / "b", donor[0], num_classes=donor[1])
    shutil.copy(other / "transition.safetensors", mine)
    with pytest.raises(ValueError, match=f"{mine}.*{words}.*not from the same checkpoint"):
        D3PMScheduler.from_pretrained(mine)


def test_tensors_that_are_gone(tmp_path):
    folder = save(tmp_path, "stationary")
    (folder / "transition.safetensors").unlink()
    with pytest.raises(ValueError, match="needs stationary_probs"):
        D3PMScheduler.from_pretrained(folder).sample_prior((1, 2))


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_truncated_tensors(tmp_path, share):
    path = save(tmp_path, "stationary") / "transition.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises((SafetensorError, OSError, ValueError)):
        D3PMScheduler.from_pretrained(tmp_path)


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_truncated_configuration(tmp_path, share):
    path = save(tmp_path, "uniform") / "scheduler_config.json"
    content = path.read_text()
    path.write_text(content[: int(share * len(content))])
    with pytest.raises(OSError, match=str(path)):
        D3PMScheduler.from_pretrained(tmp_path)


def test_another_library_s_scheduler(tmp_path):
    DDPMScheduler(num_train_timesteps=T).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="DDPMScheduler, not of a D3PMScheduler"):
        D3PMScheduler.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="without num_classes, not of a D3PMScheduler"):
        D3PMScheduler.from_config(DDPMScheduler().config)


def test_a_folder_without_a_scheduler(tmp_path):
    with pytest.raises(OSError, match="scheduler_config.json"):
        D3PMScheduler.from_pretrained(tmp_path)


def test_an_unknown_word_in_the_configuration(tmp_path):
    path = save(tmp_path, "uniform") / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "transition": "uniformm"}))
    with pytest.raises(ValueError, match="transition is 'uniformm'"):
        D3PMScheduler.from_pretrained(tmp_path)


def test_tensors_of_another_program(tmp_path):
    scheduler = D3PMScheduler(K, T, transition="uniform", unigram_probs=torch.ones(K))
    scheduler.save_pretrained(tmp_path)
    path = tmp_path / "transition.safetensors"
    metadata = {"format": "pt", "transition": "uniform", "num_classes": str(K)}
    save_file({**load_file(path), "surprise": torch.ones(2)}, path, metadata=metadata)
    with pytest.raises(ValueError, match="unexpected tensor 'surprise'"):
        D3PMScheduler.from_pretrained(tmp_path)
