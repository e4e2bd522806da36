# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Runs on two processes over gloo, sharded by FSDP2, beside the same runs replicated by DDP."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file
from sharded_run import SETTINGS, Hostile, make_evaluation_set, make_pipeline, measure, whole_shards
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from d3pm_hf import D3PMPipeline, evaluate_bound
from d3pm_hf.data.batches import evaluation_batches
from d3pm_hf.training import read_log
from d3pm_hf.training.state_files import find_damaged_shard, load_states


TESTS = Path(__file__).parent
CONFIGS = TESTS.parent / "examples/accelerate_configs"


def launch(config, runs, processes=2):
    """The runs of sharded_run.py, one after the other, in processes that Accelerate starts from one of our files.

    A process has been seen to end with SIGABRT, which Python code does not raise, once; 150 further runs did not repeat
    it. So such an end is reported as a warning, with the stacks of the threads, and the runs are started once more.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIGS / config]
    command += ["--num_processes", processes, "--main_process_port", "0", "--mixed_precision", "no"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    command += [TESTS / "sharded_run.py", json.dumps(runs)]
    for is_last in (False, True):
        result = subprocess.run(
            list(map(str, command)),
            env={**environment, "PYTHONFAULTHANDLER": "1"},
            capture_output=True,
            text=True,
        )
        if is_last or "(SIGABRT)" not in result.stderr:
            break
        stacks = result.stderr.find("Fatal Python error")
        warnings.warn(f"a process was aborted, and the runs are started again: {result.stderr[stacks:][:4000]}")
        for run in runs:
            shutil.rmtree(run["output_dir"], ignore_errors=True)
    assert result.returncode == 0, result.stderr


def plugin_of(config):
    """The environment variables that `accelerate launch` makes of the `fsdp_config` of a file."""
    arguments = launch_command_parser().parse_args(["--config_file", str(CONFIGS / config), "script.py"])
    environment = prepare_multi_gpu_env(_validate_launch_command(arguments)[0])
    return {name: value for name, value in environment.items() if name.startswith("FSDP_")}


TEXT = {"fsdp": plugin_of("fsdp.yaml")}
UNWRAPPED = {"fsdp": {**TEXT["fsdp"], "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}}
# What `accelerate launch --use_fsdp` sets, and the checkpointing of activations, for a model without and with dropout.
MEMORY = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true"}
ESM = {"kind": "esm", "evaluate": False, "num_samples": 0}
# Logits of the masks only, and of three rows at a time.
VB = {"loss": "vb", "max_train_steps": 3, "gradient_accumulation_steps": 2, "train_batch_size": 2}
SOME = {**VB, "few_states": 0, "piece_bytes": 3 * 4 * 28}


def start(folder, runs):
    """Runs in a folder, by the names of their own folders. They are started at once, as a start takes longer than a run."""
    launch("fsdp.yaml", [{"output_dir": str(folder / name), **settings} for name, settings in runs.items()])


def resumed(folder, name):
    return {"copy_of": str(folder / name), "resume_from_checkpoint": str(folder / f"{name}-resumed/checkpoint-3")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of all runs."""
    folder = tmp_path_factory.mktemp("sharded")
    finished = {"copy_of": str(folder / "text"), "resume_from_checkpoint": "latest"}
    untied = {**UNWRAPPED["fsdp"], **MEMORY, "FSDP_ACTIVATION_CHECKPOINTING": "false"}
    version = {"FSDP_VERSION": "1", "FSDP_SYNC_MODULE_STATES": "false", "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD"}
    runs = {
        "text-replicated": {},
        "text": TEXT,
        "text-resumed": {**TEXT, **resumed(folder, "text")},
        "finished": {**TEXT, **finished},
        "untied": {"kind": "tied", "fsdp": untied, "refused": True},
        "all-replicated": VB,
        "some-replicated": SOME,
        "some": {**TEXT, **SOME},
        "esm-replicated": ESM,
        "version-one": {"fsdp": {**TEXT["fsdp"], **version}, "refused": True},
        "mixed": {**finished, "refused": True},
        "damaged": {**TEXT, **finished, "damage": "checkpoint-4/optimizer_0/__1_0.distcp", "refused": True},
        "hostile": {**TEXT, **finished, "hostile": "checkpoint-4/optimizer_0/.metadata", "refused": True},
        "full": {**TEXT, "largest_file": 60_000, "validation_steps": 0, "refused": True},
    }
    start(folder, runs)
    return folder


@pytest.fixture(scope="module")
def further_runs(folder):
    """Other networks, other ways to shard them, and what else is resumed."""
    efficient = {"fsdp": {**TEXT["fsdp"], **MEMORY}}
    sharded_esm = {**ESM, "fsdp": {**efficient["fsdp"], "FSDP_TRANSFORMER_CLS_TO_WRAP": "EsmLayer"}}
    # The bias of a key has no gradient but for rounding, which Adam would scale up.
    images = {"kind": "images", "evaluate": False, "adam_epsilon": 1e-4}
    runs = {
        "text-replicated-resumed": resumed(folder, "text-replicated"),
        "bfloat16": {**TEXT, "mixed_precision": "bf16", "max_train_steps": 2},
        "images-replicated": images,
        "images": {**images, "fsdp": plugin_of("fsdp_unet.yaml")},
        "table-replicated": {"kind": "table"},
        "table": {"kind": "table", **UNWRAPPED},
        "some-efficient": {**efficient, **SOME},
        "efficient": efficient,
        "efficient-resumed": {**efficient, **resumed(folder, "efficient")},
        "esm-replicated-resumed": {**ESM, **resumed(folder, "esm-replicated")},
        "esm": sharded_esm,
        "esm-resumed": {**sharded_esm, **resumed(folder, "esm")},
        "longformer": {**ESM, "kind": "longformer"},
        "big_bird": {**ESM, "kind": "big_bird"},
    }
    start(folder, runs)


@pytest.fixture(autouse=True)
def start_further_runs(request):
    """Tests that are marked as slow look at the further runs, too."""
    if request.node.get_closest_marker("slow"):
        request.getfixturevalue("further_runs")


def first_and_slow(first, *others):
    return [first, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]


def saved_weights(folder):
    """The weights of the pipeline that the run has saved."""
    names = "text_model/model.safetensors", "unet/diffusion_pytorch_model.safetensors"
    return load_file(next(folder / name for name in names if (folder / name).exists()))


def averages(folder, step=4):
    return load_states(folder / f"checkpoint-{step}", ["ema"])["ema"]["shadow_params"]


def raw_weights(folder, step=4):
    """The weights in training, put together from the shards of the processes."""
    return whole_shards(folder / f"checkpoint-{step}/pytorch_model_fsdp_0")["model"]


@pytest.mark.parametrize("kind", first_and_slow("text", "images", "table", "efficient", "esm"))
def test_sharded_as_replicated(folder, kind):
    """Losses, bounds, samples, weights in training and their average, with evaluations between the steps."""
    sharded, replicated = folder / kind, folder / f"{'text' if kind == 'efficient' else kind}-replicated"
    lines, expected = read_log(sharded / "log.jsonl"), read_log(replicated / "log.jsonl")
    assert len(lines) == len(expected) == (2 if kind in ("images", "esm") else 4)
    for line, other in zip(lines, expected):
        assert line == pytest.approx(other, abs=1e-6)
    tolerance = {"atol": 1e-6, "rtol": 0}
    torch.testing.assert_close(saved_weights(sharded), saved_weights(replicated), **tolerance)
    torch.testing.assert_close(averages(sharded), averages(replicated), **tolerance)
    raw = raw_weights(sharded)
    for name, value in load_file(replicated / "checkpoint-4/model.safetensors").items():
        torch.testing.assert_close(raw[name], value, **tolerance)
    names = sorted(path.name for path in replicated.glob("samples/*"))
    assert len(names) == (0 if kind == "esm" else 3)
    for name in names:
        assert (sharded / "samples" / name).read_bytes() == (replicated / "samples" / name).read_bytes()


@pytest.mark.parametrize("kind", ["some-replicated", "some", pytest.param("some-efficient", marks=pytest.mark.slow)])
def test_logits_only_where_they_count(folder, kind):
    """Losses, bounds and weights are those of all logits: on two processes, accumulated, sharded, and with recomputed layers."""
    lines, expected = read_log(folder / kind / "log.jsonl"), read_log(folder / "all-replicated/log.jsonl")
    assert len(lines) == len(expected) == 4
    assert lines[0]["cross_entropy"] < expected[0]["cross_entropy"]  # that of the masks alone
    for line, other in zip(lines, expected):
        line, other = ({k: v for k, v in values.items() if k != "cross_entropy"} for values in (line, other))
        assert line == pytest.approx(other, abs=2e-6)
    torch.testing.assert_close(
        saved_weights(folder / kind), saved_weights(folder / "all-replicated"), atol=2e-6, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "esm"])
def test_embedding_and_head_are_trained_if_the_first_process_distributes_the_weights(folder, kind):
    """They are one tensor, which Accelerate takes apart and `tie_weights` puts together."""
    run = folder / ("efficient" if kind == "text" else kind)
    network = make_pipeline(kind).text_model
    weight = network.get_output_embeddings().weight
    names = [name for name, value in network.named_parameters(remove_duplicate=False) if value is weight]
    assert weight is network.get_input_embeddings().weight and len(names) >= 2
    for process in range(2):
        returned = torch.load(run / f"returned-{process}.pt")
        assert (returned[names[0]] - weight).abs().max() > 1e-3
        for name in names:
            torch.testing.assert_close(returned[name], returned[names[0]], atol=0, rtol=0)


def test_weights_that_accelerate_unties_are_refused(folder):
    for process in range(2):
        assert (folder / f"untied.error-{process}").read_text() == (
            "Accelerate has untied the weights table.weight and inverse.weight: set `fsdp_cpu_ram_efficient_loading: false` "
            "in its configuration, or define `tie_weights` in the denoiser"
        )
    assert not list((folder / "untied").rglob("*.safetensors"))


@pytest.mark.parametrize("kind", first_and_slow("esm-replicated", "esm", "longformer", "big_bird"))
def test_networks_with_unused_weights_are_trained_on_two_processes(folder, kind):
    """The weights that the loss does not depend on stay as they are, and can be trained after the run."""
    network = make_pipeline(kind.removesuffix("-replicated")).text_model
    unused = {"esm": "contact_head", "longformer": "pooler", "big_bird": "pooler"}[kind.removesuffix("-replicated")]
    saved, kept = saved_weights(folder / kind), []
    for name, value in network.named_parameters():
        if unused in name or "_global" in name:
            torch.testing.assert_close(saved[name], value.detach(), atol=0, rtol=0)
            kept.append(name)
        elif name in saved and value.abs().sum() > 0:
            assert not torch.equal(saved[name], value), name
    assert kept


@pytest.mark.parametrize("name", first_and_slow("text", "text-replicated", "efficient", "esm", "esm-replicated"))
def test_resumed_on_two_processes(folder, name):
    """From a checkpoint between two lines of the log. Each process gets its own part of all that is saved."""
    resumed, whole = folder / f"{name}-resumed", folder / name
    assert (resumed / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()
    torch.testing.assert_close(averages(resumed), averages(whole), atol=0, rtol=0)
    torch.testing.assert_close(saved_weights(resumed), saved_weights(whole), atol=0, rtol=0)
    if not name.endswith("-replicated"):
        torch.testing.assert_close(raw_weights(resumed), raw_weights(whole), atol=0, rtol=0)


def test_a_finished_sharded_run_is_started_again(folder):
    assert (folder / "finished/README.md").read_bytes() == (folder / "text/README.md").read_bytes()
    assert (folder / "finished/log.jsonl").read_bytes() == (folder / "text/log.jsonl").read_bytes()
    torch.testing.assert_close(saved_weights(folder / "finished"), saved_weights(folder / "text"), atol=0, rtol=0)


@pytest.mark.parametrize("kind", first_and_slow("text", "images", "table", "efficient"))
def test_every_process_returns_all_weights(folder, kind):
    """As plain tensors: the run calls the pipeline of each process once more by itself."""
    saved = saved_weights(folder / kind)
    for process in range(2):
        returned = torch.load(folder / kind / f"returned-{process}.pt")
        assert all(type(value) is torch.Tensor for value in returned.values()) and saved.keys() <= returned.keys()
        torch.testing.assert_close({name: returned[name] for name in saved}, saved, atol=0, rtol=0)


@pytest.mark.slow
def test_sharded_in_bfloat16(folder):
    losses = [line["loss"] for line in read_log(folder / "bfloat16/log.jsonl") if "loss" in line]
    expected = [line["loss"] for line in read_log(folder / "text/log.jsonl") if "loss" in line][:1]
    assert losses == pytest.approx(expected, rel=1e-2) and losses != expected
    assert {value.dtype for value in saved_weights(folder / "bfloat16").values()} == {torch.float32}


def test_version_one_is_refused_on_every_process(folder):
    for process in range(2):
        message = (folder / f"version-one.error-{process}").read_text()
        assert message == "fsdp_version is 1: set `fsdp_version: 2` in the configuration of Accelerate"
    assert not (folder / "version-one").exists()


def test_a_sharded_checkpoint_is_not_resumed_on_replicated_weights(folder):
    """Nor is it called broken."""
    for process in range(2):
        assert (folder / f"mixed.error-{process}").read_text() == (
            f"the weights of {folder / 'mixed/checkpoint-4'} are sharded by FSDP2 with fsdp_state_dict_type "
            "SHARDED_STATE_DICT, and those of this run replicated: resume with the configuration of Accelerate that the "
            "checkpoint was saved with"
        )


def test_a_damaged_file_and_a_full_disk_are_named_on_every_process(folder):
    for process in range(2):
        message = (folder / f"damaged.error-{process}").read_text()
        assert "checkpoint-4 is broken, as its file __1_0.distcp is damaged" in message
        message = (folder / f"full.error-{process}").read_text()
        assert message.startswith(
            f"checkpoint-3 could not be written to {folder / 'full'} ([Errno 27] File too large)"
        )
    assert [path.name for path in (folder / "full").iterdir() if "checkpoint" in path.name] == []


def test_shards_run_no_code(folder, tmp_path):
    """Neither the metadata nor what is no tensor, which torch reads as pickles."""
    for process in range(2):
        message = (folder / f"hostile.error-{process}").read_text()
        assert "checkpoint-4 is broken, as its file .metadata is damaged (it is cut, or holds more than" in message
    assert not (folder / "hostile.ran").exists()
    good = folder / "text/checkpoint-4/optimizer_0"
    assert find_damaged_shard(good) is None

    def damaged(change=lambda metadata: None, **attributes):
        """What is found if the metadata, or the attributes of the place of a setting of the optimizer, are changed."""
        run = shutil.copytree(good, tmp_path / "shards", dirs_exist_ok=True)
        metadata = pickle.loads((run / ".metadata").read_bytes())
        index = next(i for i, kind in metadata.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata))
        index = next(key for key in metadata.storage_data if key.fqn == index)
        part = metadata.storage_data[index]
        with (run / part.relative_path).open("ab") as file:
            start = file.tell()
            torch.save(Hostile(tmp_path / "ran"), file)
            place = {"offset": start, "length": file.tell() - start} if attributes.pop("is_hostile", False) else {}
        metadata.storage_data[index] = replace(part, **place, **attributes)
        (run / ".metadata").write_bytes(change(metadata) or pickle.dumps(metadata))
        return find_damaged_shard(run)

    assert damaged() is None
    assert damaged(is_hostile=True).endswith(".distcp")
    assert damaged(relative_path="../shards/__0_0.distcp") == ".metadata"
    assert damaged(transform_descriptors=["zstd"]) == ".metadata"
    # A pickle may change a class that it names: here, what bytes are called.
    renamed = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x14BytesStorageMetadata\x93N}\x8c\x01x\x8c\x01ys\x86b0"
    assert damaged(lambda metadata: renamed + pickle.dumps(metadata)[2:]) == ".metadata"
    assert not hasattr(BytesStorageMetadata, "x")
    for protocol in range(6):
        (tmp_path / "shards/.metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "ran"), protocol))
        assert find_damaged_shard(tmp_path / "shards") == ".metadata"
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_sharded_and_resumed_on_more_processes(folder, tmp_path):
    """The checkpoint of two processes on four, and with gradient accumulation on two."""
    split = {"fsdp": plugin_of("fsdp.yaml"), "copy_of": str(folder / "text"), "train_batch_size": 2}
    for name, processes, settings in (("four", 4, {}), ("two", 2, {"gradient_accumulation_steps": 2})):
        checkpoint = {"resume_from_checkpoint": str(tmp_path / name / "checkpoint-3")}
        launch("fsdp.yaml", [{"output_dir": str(tmp_path / name), **split, **checkpoint, **settings}], processes)
        torch.testing.assert_close(saved_weights(tmp_path / name), saved_weights(folder / "text"), atol=1e-6, rtol=0)
        for line, other in zip(
            read_log(tmp_path / name / "log.jsonl"), read_log(folder / "text/log.jsonl"), strict=True
        ):
            assert line == pytest.approx(other, abs=1e-5)


def test_every_configuration_is_used_or_says_that_it_was_not_tried():
    tests = "".join(path.read_text() for path in TESTS.glob("test_*.py"))
    paths = sorted(CONFIGS.glob("*.yaml"))
    assert len(paths) >= 6
    for path in paths:
        assert path.name in tests or "Not tried" in path.read_text(), path.name


@pytest.mark.parametrize("name", ["text", "text-replicated"])
def test_shared_evaluation_measures_what_one_process_measures(folder, name):
    """The second batch has a single example: the other process repeats it, and its result does not count."""
    pipeline = D3PMPipeline.from_pretrained(folder / name)
    expected = vars(measure(pipeline, "text"))
    for process in range(2):
        found = torch.load(folder / name / f"bound-{process}.pt")
        assert found.keys() == expected.keys()
        for field, value in expected.items():
            if isinstance(value, (str, tuple)):
                assert found[field] == value
                continue
            torch.testing.assert_close(found[field], value, rtol=1e-5, atol=1e-6, equal_nan=True, msg=field)
    bound = evaluate_bound(
        pipeline.scheduler,
        pipeline.denoiser,
        evaluation_batches(make_evaluation_set("text"), 4, SETTINGS["max_eval_samples"]),
        num_eval_timesteps=SETTINGS["num_eval_timesteps"],
        progress_bar=False,
    )
    last = read_log(folder / name / "log.jsonl")[-1]
    assert last["eval_bits_per_dim"] == pytest.approx(bound.bits_per_dim, abs=1e-5)
    assert last["eval_standard_error"] == pytest.approx(bound.bits_per_dim_standard_error, abs=1e-5)
