# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What a scheduler's files may ask for: values of the right type, and no more memory or time than is allowed."""

import json
import runpy
import warnings

import families
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    character_tokenizer,
    create_text_model,
    create_unet,
)
from d3pm_hf.transitions import TransitionSettings, get_family
from d3pm_hf.transitions import family as family_module


K, T = 5, families.NUM_STEPS


def edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# Types and ranges


WRONG = [
    ("num_classes", "28", "an integer of at least 2"),
    ("num_classes", 28.5, "an integer of at least 2"),
    ("num_classes", None, "an integer of at least 2"),
    ("num_classes", True, "an integer of at least 2"),
    ("num_classes", {"n": 28}, "an integer of at least 2"),
    ("num_classes", -4, "an integer of at least 2"),
    ("num_train_timesteps", 0, "an integer of at least 1"),
    ("num_train_timesteps", True, "an integer of at least 1"),
    ("num_train_timesteps", "6", "an integer of at least 1"),
    ("num_train_timesteps", 1e9, "an integer of at least 1"),
    ("bandwidth", 0, "an integer of at least 1"),
    ("bandwidth", -3, "an integer of at least 1"),
    ("bandwidth", 1.5, "an integer of at least 1"),
    ("num_neighbors", 0, "an integer of at least 1"),
    ("num_neighbors", None, "an integer of at least 1"),
    ("mask_token_id", "4", "an integer in 0 .. 4"),
    ("mask_token_id", 1.0, "an integer in 0 .. 4"),
    ("mask_token_id", True, "an integer in 0 .. 4"),
    ("mask_in_data", "no", "True or False"),
    ("mask_in_data", 1, "True or False"),
    ("mask_fraction", 1.5, "a finite number in 0 .. 1"),
    ("mask_fraction", float("nan"), "a finite number in 0 .. 1"),
    ("mask_fraction", "half", "a finite number in 0 .. 1"),
    ("mask_rate", -1, "a finite number of at least 0"),
    ("mask_rate", float("inf"), "a finite number of at least 0"),
    ("beta_start", "small", "a finite number of at least 0"),
    ("beta_end", float("nan"), "a finite number of at least 0"),
    ("transition", {"name": "absorbing"}, "one of absorbing, uniform"),
    ("transition", {}, "one of absorbing, uniform"),
    ("prior", None, "one of stationary, fitted"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG, ids=lambda v: str(v)[:24])
def test_an_argument_of_the_wrong_type(tmp_path, name, value, words):
    sentence = rf"{name} is .*: it must be {words}"
    with pytest.raises(ValueError, match=f"^{sentence}"):
        D3PMScheduler(**{"num_classes": K, "num_train_timesteps": T, name: value})
    D3PMScheduler(K, T).save_pretrained(tmp_path)
    edit(tmp_path / "scheduler_config.json", **{name: value})
    with pytest.raises(ValueError, match=f"^{tmp_path}/scheduler_config.json: {sentence}"):
        D3PMScheduler.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("betas", "words"),
    [
        (["0.1"] * T, "beta_1 of trained_betas is '0.1': it must be a number"),
        ([0.1] * (T - 1) + [None], f"beta_{T} of trained_betas is None: it must be a number"),
        ([0.1, True] + [0.1] * (T - 2), "beta_2 of trained_betas is True"),
        ([[0.1]] * T, r"beta_1 of trained_betas is \[0.1\]"),
        ("0.1, 0.2", f"trained_betas is '0.1, 0.2': pass a list of {T} numbers"),
        (0.1, f"trained_betas is 0.1: pass a list of {T} numbers"),
        ({"0": 0.1}, f"trained_betas is .*: pass a list of {T} numbers"),
        ([0.1], f"got 1 betas for {T} timesteps"),
    ],
)
def test_betas_of_the_wrong_type(tmp_path, betas, words):
    with pytest.raises(ValueError, match=words):
        D3PMScheduler(K, T, trained_betas=betas)
    D3PMScheduler(K, T).save_pretrained(tmp_path)
    edit(tmp_path / "scheduler_config.json", trained_betas=betas)
    with pytest.raises(ValueError, match=f"^{tmp_path}/scheduler_config.json: {words}"):
        D3PMScheduler.from_pretrained(tmp_path)


def test_numpy_s_numbers_are_numbers():
    import numpy as np

    scheduler = D3PMScheduler(np.int64(K), T, transition="uniform", trained_betas=np.full(T, 0.5))
    expected = D3PMScheduler(K, T, transition="uniform", trained_betas=[0.5] * T)
    torch.testing.assert_close(scheduler.transition.matrix(0, T), expected.transition.matrix(0, T), rtol=0, atol=1e-15)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, f'{{"num_classes": {"9" * 5000}}}', "[1]", "null"])
def test_a_configuration_that_is_none(tmp_path, text):
    (tmp_path / "scheduler_config.json").write_text(text)
    with pytest.raises(OSError, match=f"scheduler_config.json of {tmp_path} (is not JSON|does not hold a dictionary)"):
        D3PMScheduler.from_pretrained(tmp_path)


# Memory and time


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """An image pipeline of 17 levels and a text pipeline of 28 characters."""
    folder = tmp_path_factory.mktemp("checkpoints")
    image = D3PMScheduler(17, 50, transition="gaussian", beta_schedule="cosine")
    D3PMImagePipeline(create_unet("tiny", 17, 8, 1), image).save_pretrained(folder / "image")
    text = D3PMTextPipeline(create_text_model("tiny", 28), D3PMScheduler(28, 50), character_tokenizer())
    text.save_pretrained(folder / "text")
    embeddings = torch.randn(28, 4, generator=torch.Generator().manual_seed(0))
    text.scheduler = D3PMScheduler(
        28, 50, transition="nearest_neighbor", beta_schedule="cosine", embeddings=embeddings, mask_token_id=27
    )
    text.save_pretrained(folder / "neighbors")
    return folder


@pytest.mark.parametrize(
    ("kind", "values", "needed"),
    [
        ("image", {"num_classes": 5000}, 5.1e9),
        ("image", {"num_classes": 100_000}, 2e12),
        ("image", {"num_train_timesteps": 10**7}, 1.2e10),
        ("image", {"num_classes": 256, "num_train_timesteps": 10**5}, 2.6e10),
        ("image", {"transition": "band_diagonal", "num_classes": 100_000}, 2e12),
        ("image", {"transition": "matrix", "num_classes": 100_000}, 2e12),
        ("neighbors", {"num_train_timesteps": 10**8}, 1.2e10),
        ("text", {"num_train_timesteps": 10**9}, 1.2e11),
        ("text", {"num_classes": 10**9}, 1.2e11),
        ("text", {"transition": "autoregressive", "num_train_timesteps": 10**9}, 1.2e11),
    ],
    ids=str,
)
def test_a_configuration_that_asks_for_too_much(checkpoints, kind, values, needed):
    path = checkpoints / kind / "scheduler/scheduler_config.json"
    content = path.read_text()
    edit(path, **values)
    try:
        with pytest.raises(
            ValueError, match=r"scheduler_config.json: a '\w+' process over .* needs at least [\d,]+ bytes"
        ) as error:
            D3PMPipeline.from_pretrained(checkpoints / kind)
    finally:
        path.write_text(content)
    message = str(error.value)
    assert needed < int(message.split(" at least ")[1].split(" bytes")[0].replace(",", "")) < 2 * needed
    assert "more than the limit of 4,294,967,296: use fewer classes or timesteps, or raise the limit by" in message
    assert message.endswith("the environment variable D3PM_HF_MAX_PROCESS_BYTES")


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("image", {"num_train_timesteps": 10**5}),
        ("image", {"num_train_timesteps": 10**6}),
        ("text", {"num_train_timesteps": 10**6}),
    ],
    ids=str,
)
def test_loading_builds_nothing(checkpoints, kind, values):
    path = checkpoints / kind / "scheduler/scheduler_config.json"
    content = path.read_text()
    edit(path, **values)
    try:
        loaded = D3PMPipeline.from_pretrained(checkpoints / kind)
    finally:
        path.write_text(content)
    assert loaded.scheduler._transition is None and len(loaded.scheduler) == values["num_train_timesteps"]


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("image", {"num_classes": 1000}, "17.*1000|1000.*17"),
        ("text", {"num_classes": 10**6}, "the network has a vocabulary of 28 and the scheduler one of 1000000"),
    ],
    ids=["image", "text"],
)
def test_classes_are_compared_with_the_network_first(checkpoints, kind, values, words):
    path = checkpoints / kind / "scheduler/scheduler_config.json"
    content = path.read_text()
    edit(path, **values)
    try:
        with pytest.raises(ValueError, match=words):
            D3PMPipeline.from_pretrained(checkpoints / kind)
    finally:
        path.write_text(content)


@pytest.mark.filterwarnings("ignore:after .* steps q")
def test_the_limit_can_be_set(monkeypatch):
    arguments = {"num_classes": 8, "num_train_timesteps": 20, "transition": "gaussian", "beta_schedule": "cosine"}
    needed = get_family("gaussian").min_bytes(8, 20)
    monkeypatch.setattr(family_module, "MAX_PROCESS_BYTES", needed)
    D3PMScheduler(**arguments)
    monkeypatch.setattr(family_module, "MAX_PROCESS_BYTES", needed - 1)
    with pytest.raises(
        ValueError, match=f"needs at least {needed:,} bytes of memory, more than the limit of {needed - 1:,}"
    ):
        D3PMScheduler(**arguments)
    monkeypatch.setenv("D3PM_HF_MAX_PROCESS_BYTES", "12345")
    assert runpy.run_module(family_module.__name__)["MAX_PROCESS_BYTES"] == 12345


def test_what_the_paper_needs_is_within_the_limit():
    """CIFAR-10: log Qbar_t of 1,000 steps over 256 levels is 262 MB; text8 and LM1B need vectors."""
    assert 1001 * 256**2 * 4 < get_family("gaussian").min_bytes(256, 1000) < 1.1 * 1001 * 256**2 * 4
    assert get_family("gaussian").min_bytes(1024, 1000) < family_module.MAX_PROCESS_BYTES
    assert get_family("uniform").min_bytes(8192, 1000) < 2e6


# When a process is built


def test_a_process_that_is_loaded_warns_when_it_is_used(tmp_path):
    with pytest.warns(UserWarning, match="nats per element from the prior"):
        scheduler = D3PMScheduler(K, T, transition="uniform", trained_betas=[0.01] * T)
    with pytest.warns(UserWarning, match="nats per element from the prior"):
        D3PMScheduler.from_config(scheduler.config)
    scheduler.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = D3PMScheduler.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="nats per element from the prior"):
        loaded.sample_prior((1, 2))
    assert loaded.transition is loaded.transition


def test_a_process_is_built_once(tmp_path, monkeypatch):
    builds = []
    create = TransitionSettings.create
    monkeypatch.setattr(TransitionSettings, "create", lambda self: builds.append(1) or create(self))
    scheduler = D3PMScheduler(K, T, transition="uniform", unigram_probs=torch.ones(K))
    assert len(builds) == 1
    D3PMScheduler.from_config(scheduler.config, unigram_probs=torch.ones(K))
    assert len(builds) == 2
    scheduler.save_pretrained(tmp_path)
    loaded = D3PMScheduler.from_pretrained(tmp_path)
    assert len(builds) == 2
    torch.testing.assert_close(loaded.transition.matrix(0, T), scheduler.transition.matrix(0, T), rtol=0, atol=1e-15)
    assert len(builds) == 3


# Tensors


def change(folder, name, tensors):
    """A scheduler on disk with other tensors; `None` is for one that is gone."""
    families.build(name).scheduler().save_pretrained(folder)
    path = folder / "transition.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    changed = {**load_file(path), **tensors}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path, metadata=metadata)
    return path


NAN = float("nan")


@pytest.mark.filterwarnings("ignore:after .* steps q")
@pytest.mark.parametrize(
    ("name", "tensors", "words"),
    [
        ("stationary", {"schedule": torch.full((T,), NAN)}, "schedule has the entry nan: none may be below zero"),
        ("stationary", {"schedule": torch.arange(T) - 1.0}, "schedule has the entry -1: none may be below zero"),
        ("stationary", {"schedule": torch.ones(T + 1)}, "schedule has the shape"),
        (
            "stationary",
            {"stationary_probs": torch.full((K,), NAN)},
            "stationary_probs has the minimum nan .* every row",
        ),
        ("stationary", {"stationary_probs": torch.ones(K)}, "stationary_probs has the minimum 1 and a sum of 5"),
        ("stationary", {"unigram_probs": torch.full((K,), NAN)}, "unigram_probs has the minimum nan"),
        ("matrix", {"transition_matrices": -torch.eye(K)}, "transition_matrices has the minimum -1"),
        ("rate", {"rate_matrix": torch.eye(K)}, "row 0 of the rate matrix sums to 1"),
        ("rate", {"rate_matrix": torch.full((K, K), NAN)}, "rate from state 0 to state 1 is negative"),
        ("nearest_neighbor", {"rate_matrix.indices": None}, "unexpected tensor 'rate_matrix.values'"),
        (
            "nearest_neighbor",
            {"rate_matrix.indices": torch.full((2, 1), 99), "rate_matrix.values": torch.ones(1)},
            "size is inconsistent",
        ),
    ],
)
def test_tensors_that_make_no_sense(tmp_path, name, tensors, words):
    path = change(tmp_path, name, tensors)
    with pytest.raises(ValueError, match=f"^{path}: .*({words})"):
        D3PMScheduler.from_pretrained(tmp_path)
