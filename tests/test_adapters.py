# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""LoRA: trained, saved, resumed and loaded, for text and images; and files that are not what they seem."""

import hashlib
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_causal_lm
import test_masked_lm
import torch
from hub_server import LoopbackHub
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sharded_run import Letters, Pictures
from sharded_run import make_pipeline as make_sharded_pipeline
from test_sharding import TEXT, resumed, start
from training_run import Sentences
from training_run import make_pipeline as make_text_pipeline
from transformers import AutoModelForCausalLM, LlamaConfig

from d3pm_hf import (
    D3PMDiT,
    D3PMDiTConfig,
    D3PMImagePipeline,
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    create_text_model,
    create_unet,
    export,
)
from d3pm_hf.hub.adapters import adapter_configs, add_adapter, base_parameters
from d3pm_hf.training import D3PMTrainingArguments, train


TESTS = Path(__file__).parent
SETTINGS = {
    "max_train_steps": 4,
    "train_batch_size": 4,
    "lr_warmup_steps": 1,
    "learning_rate": 2e-2,
    "checkpointing_steps": 2,
    "validation_steps": 0,
    "num_samples": 0,
    "ema_inv_gamma": 0.5,
}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}


class Words(Sentences):
    """Sentences of the tokens of a causal language model."""

    def __getitem__(self, item):
        return super().__getitem__(item)[: test_causal_lm.NUM_TOKENS] % len(test_causal_lm.LETTERS) + 1


def save_base(kind, folder):
    """Saves the network of a LoRA: a pipeline, or a language model of transformers."""
    if kind in ("bert", "t5"):
        torch.manual_seed(0)
        pipeline = make_text_pipeline()
        pipeline.text_model = create_text_model("tiny", 28, backbone=kind)
    elif kind == "dit":
        pipeline = make_text_pipeline()
        torch.manual_seed(0)
        pipeline.text_model = D3PMDiT(
            D3PMDiTConfig(vocab_size=28, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
        )
        with torch.no_grad():
            for parameter in pipeline.text_model.parameters():  # its output layer is zero at first
                parameter.normal_(0, 0.1)
    elif kind == "both sides":
        save_base("causal", folder / "causal")
        options = {"process": "absorbing", "sequence_length": test_causal_lm.NUM_TOKENS, "num_train_timesteps": 100}
        pipeline = D3PMTextPipeline.from_causal_lm(folder / "causal", **options)
    elif kind == "unet":
        torch.manual_seed(0)
        scheduler = D3PMScheduler(5, 100, transition="uniform", beta_schedule="cosine")
        pipeline = D3PMImagePipeline(create_unet("tiny", 5, 8, 1), scheduler)
    else:
        module, architecture = {"masked": (test_masked_lm, "bert"), "causal": (test_causal_lm, "gpt2")}[kind]
        module.tiny_model(architecture).save_pretrained(folder)
        module.tiny_tokenizer().save_pretrained(folder)
        return
    pipeline.save_pretrained(folder)


def load_base(kind, folder):
    if kind == "masked":
        return D3PMTextPipeline.from_masked_lm(folder, num_train_timesteps=100, sequence_length=16)
    if kind == "causal":
        return D3PMTextPipeline.from_causal_lm(folder, sequence_length=test_causal_lm.NUM_TOKENS)
    return D3PMPipeline.from_pretrained(folder)


def data_of(kind):
    return {"masked": Letters, "causal": Words, "both sides": Words, "unet": Pictures}.get(kind, Sentences)()


def network_of(pipeline):
    return getattr(pipeline, pipeline.network_name)


@torch.no_grad()
def logits(pipeline, kind):
    x_t = torch.stack([data_of(kind)[i] for i in range(3)])
    return pipeline.denoiser.eval()(x_t, torch.tensor([1, 5, 9]))


def with_lora(pipeline, way="add_adapter", **settings):
    """Adds a LoRA whose change is not zero."""
    config, network = LoraConfig(**{**LORA, **settings}), network_of(pipeline)
    torch.manual_seed(1)
    if way == "get_peft_model":
        setattr(pipeline, pipeline.network_name, get_peft_model(network, config))
    elif hasattr(network, "add_adapter"):
        network.add_adapter(config)
    else:
        add_adapter(network, config, "default")
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return pipeline


def train_lora(folder, pipeline, kind, **settings):
    arguments = D3PMTrainingArguments(output_dir=str(folder), **{**SETTINGS, **settings})
    return train(arguments, pipeline, data_of(kind))


def hashes(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base and a LoRA of it."""
    folder = tmp_path_factory.mktemp("adapters")
    save_base("bert", folder / "base")
    with_lora(load_base("bert", folder / "base")).save_lora_weights(folder / "lora")
    return folder


# Trained.


@pytest.mark.parametrize(
    "way, kind",
    [
        *(("add_adapter", kind) for kind in ("bert", "t5", "dit", "masked", "causal", "both sides", "unet")),
        ("get_peft_model", "bert"),
        *(
            pytest.param("get_peft_model", kind, marks=pytest.mark.slow)
            for kind in ("t5", "dit", "masked", "causal", "both sides", "unet")
        ),
    ],
)
def test_a_run_leaves_a_lora(tmp_path, kind, way):
    """It names its base, and gives the logits of the trained network with a fresh one."""
    base = tmp_path / "base"
    save_base(kind, base)
    before = logits(load_base(kind, base), kind)
    pipeline = with_lora(load_base(kind, base), way)
    start = logits(pipeline, kind)
    trained = train_lora(tmp_path / "run", pipeline, kind)
    expected = logits(trained, kind)
    assert (expected - start).nan_to_num(0).abs().max() > 1e-3 and (start - before).nan_to_num(0).abs().max() > 1e-4
    left = {name for name in names(tmp_path / "run") if not name.startswith("checkpoint-")}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "model_index.json"} < left
    assert [name for name in left if name.endswith(".safetensors") and "scheduler" not in name] == [
        "adapter_model.safetensors"
    ]
    settings = json.loads((tmp_path / "run/adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["r"], settings["lora_alpha"]) == (str(base), 2, 4)
    loaded = D3PMPipeline.from_pretrained(tmp_path / "run")
    fresh = load_base(kind, base)
    fresh.load_lora_weights(tmp_path / "run")
    for other in (loaded, fresh):
        torch.testing.assert_close(logits(other, kind), expected, atol=1e-6, rtol=0)
        trained_names = {name for name, value in network_of(other).named_parameters() if value.requires_grad}
        assert trained_names and all("lora_" in name for name in trained_names)
    loaded.unload_lora_weights()
    assert torch.equal(logits(loaded, kind), before)


@pytest.mark.parametrize(("kind", "way"), [("t5", "add_adapter"), ("unet", "get_peft_model")])
def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path, kind, way):
    """A checkpoint holds the LoRA, and no weights of the base."""
    save_base(kind, tmp_path / "base")

    def run(name, **settings):
        return train_lora(
            tmp_path / name, with_lora(load_base(kind, tmp_path / "base"), way, lora_dropout=0.1), kind, **settings
        )

    run("whole")
    shutil.copytree(
        tmp_path / "whole", tmp_path / "resumed", ignore=shutil.ignore_patterns("checkpoint-4", "adapter_*")
    )
    run("resumed", resume_from_checkpoint=str(tmp_path / "resumed/checkpoint-2"))
    for name in ("adapter_model.safetensors", "checkpoint-4/model.safetensors", "checkpoint-4/run_state.safetensors"):
        whole, resumed = (load_file(tmp_path / run_name / name) for run_name in ("whole", "resumed"))
        assert whole.keys() == resumed.keys() and all(torch.equal(whole[key], resumed[key]) for key in whole), name
    with safe_open(tmp_path / "whole/checkpoint-4/model.safetensors", framework="pt") as file:
        assert file.keys() and all("lora_" in name for name in file.keys())


def test_a_run_is_not_resumed_with_another_base(tmp_path, folder):
    train_lora(tmp_path / "run", with_lora(load_base("bert", folder / "base")), "bert")
    other = load_base("bert", folder / "base")
    with torch.no_grad():
        other.text_model.transform.dense.weight += 0.1
    with pytest.raises(ValueError, match="the weights that the LoRA is added to changed"):
        train_lora(tmp_path / "run", with_lora(other), "bert", resume_from_checkpoint="latest", max_train_steps=6)


def test_a_run_is_not_resumed_with_another_lora(tmp_path, folder):
    """Of another rank or scale, or without one. The sentence names what differs, and not all settings of PEFT."""
    train_lora(tmp_path, with_lora(load_base("bert", folder / "base")), "bert")
    for settings, sentence in (
        ({"r": 4}, r"other settings \(adapters.default.r is 4 and was 2\)"),
        ({"lora_alpha": 8}, r"other settings \(adapters.default.lora_alpha is 8 and was 4\)"),
        (None, r"other settings \(adapters is None and was .*; the weights that the LoRA is added to changed\)"),
    ):
        pipeline = load_base("bert", folder / "base")
        pipeline = pipeline if settings is None else with_lora(pipeline, **settings)
        with pytest.raises(ValueError, match=sentence) as raised:
            train_lora(tmp_path, pipeline, "bert", resume_from_checkpoint="latest", max_train_steps=6)
        assert len(str(raised.value)) < 500


def test_a_merged_run_leaves_a_whole_pipeline(tmp_path, folder):
    pipeline = with_lora(load_base("bert", folder / "base"), "get_peft_model")
    trained = train_lora(tmp_path / "run", pipeline, "bert", merge_lora=True)
    assert "adapter_config.json" not in names(tmp_path / "run")
    loaded = D3PMPipeline.from_pretrained(tmp_path / "run")
    torch.testing.assert_close(logits(loaded, "bert"), logits(trained, "bert"), atol=1e-6, rtol=0)
    assert not any("lora_" in name for name in load_file(tmp_path / "run/text_model/model.safetensors"))
    assert all(parameter.requires_grad for parameter in trained.text_model.parameters())


def test_a_loaded_lora_is_trained_further(tmp_path, folder):
    pipeline = D3PMPipeline.from_pretrained(folder / "lora")
    trained = train_lora(tmp_path / "run", pipeline, "bert")
    loaded = D3PMPipeline.from_pretrained(tmp_path / "run")
    torch.testing.assert_close(logits(loaded, "bert"), logits(trained, "bert"), atol=1e-6, rtol=0)
    assert json.loads((tmp_path / "run/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        folder / "base"
    )


def test_the_size_of_a_lora():
    """Below one percent: of a BERT of the size of the base one, in queries and values; of a Llama of 1B, in all linear layers."""
    with torch.device("meta"):
        text_model = create_text_model("paper", 28, backbone="bert")
        llama = AutoModelForCausalLM.from_config(
            LlamaConfig(
                hidden_size=2048,
                intermediate_size=8192,
                num_hidden_layers=16,
                num_attention_heads=32,
                vocab_size=32000,
            )
        )
    for network, targets in ((text_model, ["query", "value"]), (llama, "all-linear")):
        add_adapter(network, LoraConfig(r=8, lora_alpha=16, target_modules=targets), "default", is_empty=True)
        base = sum(value.numel() for _, value in base_parameters(network))
        lora = sum(value.numel() for value in network.parameters() if value.requires_grad)
        assert base + lora == sum(value.numel() for value in network.parameters()) and 0 < lora / base < 0.01


@pytest.mark.slow
def test_a_lora_on_two_processes(tmp_path):
    """Replicated by DDP and sharded by FSDP2 it is the same LoRA; a resumed run is the same to the last bit."""
    make_sharded_pipeline("text").save_pretrained(tmp_path / "base")
    run = {"lora": str(tmp_path / "base"), "evaluate": False, "num_samples": 0, "use_ema": True}
    start(
        tmp_path,
        {
            "ddp": run,
            "ddp-resumed": {**run, **resumed(tmp_path, "ddp")},
            "fsdp": {**run, **TEXT},
            "fsdp-resumed": {**run, **TEXT, **resumed(tmp_path, "fsdp")},
            "merged": {**run, **TEXT, "merge_lora": True},
        },
    )
    loras = {name: load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ddp", "fsdp")}
    assert loras["ddp"].keys() == loras["fsdp"].keys() and len(loras["ddp"]) > 10
    for key, value in loras["ddp"].items():
        torch.testing.assert_close(loras["fsdp"][key], value, atol=1e-4, rtol=1e-4)
    for name in loras:
        again = load_file(tmp_path / f"{name}-resumed" / "adapter_model.safetensors")
        assert all(torch.equal(value, loras[name][key]) for key, value in again.items())
        expected, loaded = (
            logits(D3PMPipeline.from_pretrained(tmp_path / name), "t5"),
            load_base("t5", tmp_path / "base"),
        )
        before = logits(loaded, "t5")
        loaded.load_lora_weights(tmp_path / name)
        torch.testing.assert_close(logits(loaded, "t5"), expected, atol=1e-6, rtol=0)
        assert (expected - before).abs().max() > 1e-3
        returned = torch.load(tmp_path / name / "returned-1.pt", weights_only=True)
        held = {key.replace(".default.", "."): value for key, value in returned.items() if "lora_" in key}
        assert all(
            torch.equal(held[key.removeprefix("base_model.model.")], value) for key, value in loras[name].items()
        )
    merged = D3PMPipeline.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(
        logits(merged, "t5"), logits(D3PMPipeline.from_pretrained(tmp_path / "fsdp"), "t5"), atol=1e-4, rtol=0
    )


# Loaded, added and fused.


def test_peft_and_transformers_read_the_files(folder):
    expected = logits(D3PMPipeline.from_pretrained(folder / "lora"), "bert")
    first, second = (load_base("bert", folder / "base") for _ in range(2))
    first.text_model.load_adapter(str(folder / "lora"))
    second.text_model = PeftModel.from_pretrained(second.text_model, folder / "lora")
    for pipeline in (first, second):
        torch.testing.assert_close(logits(pipeline, "bert"), expected, atol=1e-6, rtol=0)


def test_a_folder_of_peft_is_loaded(tmp_path, folder):
    """It has the LoRA alone. The pipeline comes from its base."""
    pipeline = with_lora(load_base("bert", folder / "base"), "get_peft_model")
    pipeline.text_model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    pipeline.text_model.save_pretrained(tmp_path)
    loaded = D3PMPipeline.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded, "bert"), logits(pipeline, "bert"), atol=1e-6, rtol=0)


def test_fuse_and_unfuse(tmp_path, folder):
    pipeline = D3PMPipeline.from_pretrained(folder / "lora")
    base, expected = logits(load_base("bert", folder / "base"), "bert"), logits(pipeline, "bert")
    pipeline.fuse_lora()
    torch.testing.assert_close(logits(pipeline, "bert"), expected, atol=1e-5, rtol=0)
    for call in (pipeline.fuse_lora, lambda: pipeline.save_lora_weights(tmp_path / "no")):
        with pytest.raises(ValueError, match="call `unfuse_lora` first"):
            call()
    pipeline.unfuse_lora()
    torch.testing.assert_close(logits(pipeline, "bert"), expected, atol=1e-5, rtol=0)
    pipeline.fuse_lora(lora_scale=0.5)
    half = logits(pipeline, "bert")
    pipeline.unfuse_lora()
    pipeline.set_adapters("default_0", 0.5)
    torch.testing.assert_close(logits(pipeline, "bert"), half, atol=1e-5, rtol=0)
    pipeline.set_adapters("default_0", 0.0)
    torch.testing.assert_close(logits(pipeline, "bert"), base, atol=1e-5, rtol=0)
    pipeline.set_adapters("default_0")
    pipeline.save_lora_weights(tmp_path / "again")  # the weights were rounded, and the base is still known
    torch.testing.assert_close(
        logits(D3PMPipeline.from_pretrained(tmp_path / "again"), "bert"), expected, atol=1e-6, rtol=0
    )
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    pipeline.save_pretrained(tmp_path / "whole")
    torch.testing.assert_close(
        logits(D3PMPipeline.from_pretrained(tmp_path / "whole"), "bert"), expected, atol=1e-5, rtol=0
    )


def test_two_loras_are_added(tmp_path, folder):
    """W + a B A + b B' A', which is the merged weight of both."""
    pipeline = load_base("bert", folder / "base")
    pipeline.load_lora_weights(folder / "lora", adapter_name="first")
    pipeline.load_lora_weights(folder / "lora", adapter_name="second")
    both = pipeline.text_model.transform.dense
    x = torch.randn(5, both.in_features)
    change = both.lora_B["first"](both.lora_A["first"](x)) * 2  # lora_alpha / r
    pipeline.set_adapters(["first", "second"], [0.25, 2.0])
    torch.testing.assert_close(both(x) - both.base_layer(x), 2.25 * change)
    pipeline.set_adapters("second")
    torch.testing.assert_close(both(x) - both.base_layer(x), change)
    pipeline.save_lora_weights(tmp_path, adapter_name="first")
    assert names(tmp_path) == names(folder / "lora")


@pytest.mark.parametrize(
    "settings",
    [{"modules_to_save": ["lm_head"], "target_modules": ["query"]}, {"use_dora": True}, {"bias": "lora_only"}],
)
def test_further_settings_of_lora(tmp_path, folder, settings):
    pipeline = with_lora(load_base("bert", folder / "base"), **settings)
    trained = train_lora(tmp_path / "run", pipeline, "bert")
    loaded, expected = D3PMPipeline.from_pretrained(tmp_path / "run"), logits(trained, "bert")
    torch.testing.assert_close(logits(loaded, "bert"), expected, atol=1e-6, rtol=0)
    loaded.fuse_lora()
    loaded.unload_lora_weights()
    if settings.get("bias") is None:
        torch.testing.assert_close(logits(loaded, "bert"), expected, atol=1e-5, rtol=0)


# On the command line.

TRAIN = TESTS.parent / "examples" / "train.py"
SHORT = (
    "--max_train_steps 2 --train_batch_size 4 --logging_steps 1 --validation_steps 0 --num_samples 0 --lr_warmup_steps 1 "
    "--use_peft --lora_r 2 --lora_alpha 4 --lora_target_modules all-linear"
)


def run_script(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", [str(TRAIN), *" ".join(map(str, options)).split()])
    runpy.run_path(str(TRAIN), run_name="__main__")


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("kind", ["masked", "both sides", "bert", "unet"])
def test_train_with_the_flags_of_trl(tmp_path, monkeypatch, kind):
    """A language model, a text pipeline and an image pipeline; then the LoRA is trained further, and merged."""
    save_base(kind, tmp_path / "base")
    if kind == "masked":
        (tmp_path / "words.txt").write_text("acdc\nhill\nfry\nshelve\n" * 20)
        data = f"--dataset_name {tmp_path / 'words.txt'} --max_seq_length 12 --num_train_timesteps 20"
    elif kind == "both sides":
        (tmp_path / "words.txt").write_text("fade\nbead\nhedge\n" * 20)
        data = f"--dataset_name {tmp_path / 'words.txt'} --max_seq_length {test_causal_lm.NUM_TOKENS}"
    elif kind == "bert":
        (tmp_path / "words.txt").write_text("one quiet day\nthe river bends here\n" * 20)
        data = f"--dataset_name {tmp_path / 'words.txt'} --max_seq_length 12"
    else:
        for i in range(8):
            Image.fromarray((Pictures()[i][0] * 50).byte().numpy()).save(tmp_path / f"{i}.png")
        (tmp_path / "images").mkdir()
        for path in tmp_path.glob("*.png"):
            path.rename(tmp_path / "images" / path.name)
        data = f"--dataset_path {tmp_path / 'images'}"
    run_script(monkeypatch, f"--model_name_or_path {tmp_path / 'base'} --output_dir {tmp_path / 'run'}", data, SHORT)
    first = D3PMPipeline.from_pretrained(tmp_path / "run")
    assert adapter_configs(network_of(first))["default_0"].r == 2
    further = SHORT[: SHORT.index("--use_peft")]
    model = f"--model_name_or_path {tmp_path / 'run'} --output_dir {tmp_path / 'further'}"
    if kind != "masked":
        with pytest.raises(SystemExit, match="has a LoRA already: leave out --use_peft"):
            run_script(monkeypatch, model, data, SHORT)
    run_script(monkeypatch, model, data.replace("--num_train_timesteps 20", ""), further, "--merge_lora")
    merged = D3PMPipeline.from_pretrained(tmp_path / "further")
    assert not adapter_configs(network_of(merged)) and len(merged.scheduler) == len(first.scheduler)


# On the Hub.

HUB = """
import sys
from d3pm_hf import D3PMPipeline
import test_adapters as t
base = t.load_base("bert", sys.argv[1])
base.push_to_hub("org/base")
pipeline = t.with_lora(D3PMPipeline.from_pretrained("org/base"))
trained = t.train_lora(sys.argv[2], pipeline, "bert", push_to_hub=True, hub_model_id="org/lora")
loaded = D3PMPipeline.from_pretrained("org/lora")
fresh = D3PMPipeline.from_pretrained("org/base")
fresh.load_lora_weights("org/lora")
for other in (loaded, fresh):
    assert t.torch.allclose(t.logits(other, "bert"), t.logits(trained, "bert"), atol=1e-6)
"""


def test_a_lora_on_the_hub(tmp_path, folder):
    with LoopbackHub() as hub:
        environment = {**hub.environment(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", f"import sys; sys.path += {[str(TESTS), *sys.path]!r}\n{HUB}"]
        result = subprocess.run(
            [*command, str(folder / "base"), str(tmp_path / "run")], env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        files = hub.files("org/lora")
    assert {"adapter_config.json", "adapter_model.safetensors", "scheduler/scheduler_config.json"} < set(files)
    assert not any(name.startswith(("checkpoint-", "text_model/")) for name in files)
    card = files["README.md"].decode()
    assert "base_model: org/base" in card and "base_model_relation: adapter" in card and "- lora" in card
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "org/base"


# What is refused.

WAYS = {
    "save_pretrained": lambda pipeline, folder: pipeline.save_pretrained(folder),
    "push_to_hub": lambda pipeline, folder: pipeline.push_to_hub("me/adapters"),
    "export": lambda pipeline, folder: export(pipeline, folder, push_to_hub=True, repo_id="me/adapters"),
}


@pytest.mark.parametrize("kind", ["bert", "unet"])
@pytest.mark.parametrize("way", WAYS)
def test_a_pipeline_with_a_lora_is_not_saved_whole(tmp_path, monkeypatch, kind, way):
    """Nothing is written, and no repository is created."""
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *args, **kwargs: pytest.fail("a request"))
    save_base(kind, tmp_path / "base")
    before, pipeline = hashes(tmp_path), with_lora(load_base(kind, tmp_path / "base"))
    with pytest.raises(ValueError, match="`save_lora_weights`, or merge them into the weights with `fuse_lora`"):
        WAYS[way](pipeline, tmp_path / "base")
    assert hashes(tmp_path) == before


def test_a_lora_without_a_base_is_not_trained(tmp_path):
    with pytest.raises(ValueError, match="save the pipeline, load it and add the LoRA.*--merge_lora"):
        train_lora(tmp_path / "run", with_lora(make_text_pipeline()), "bert")
    assert not (tmp_path / "run").exists()
    save_base("causal", tmp_path / "causal")
    changed = D3PMTextPipeline.from_causal_lm(tmp_path / "causal", process="absorbing", sequence_length=8)
    with pytest.raises(ValueError, match="save the pipeline, load it and add the LoRA"):  # its mask token is new
        train_lora(tmp_path / "run", with_lora(changed), "causal")
    train_lora(tmp_path / "run", with_lora(make_text_pipeline()), "bert", merge_lora=True)
    assert "text_model/model.safetensors" in names(tmp_path / "run")


def test_what_is_no_lora_is_not_trained(tmp_path, folder):
    base = load_base("bert", folder / "base")
    with pytest.raises(ValueError, match="merge_lora is True, and the network has no LoRA"):
        train_lora(tmp_path / "run", base, "bert", merge_lora=True)
    pipeline = load_base("bert", folder / "base")
    pipeline.text_model = get_peft_model(
        pipeline.text_model, IA3Config(target_modules=["query"], feedforward_modules=[])
    )
    with pytest.raises(ValueError, match="of the kind IA3"):
        train_lora(tmp_path / "run", pipeline, "bert")
    frozen = with_lora(load_base("bert", folder / "base"))
    frozen.text_model.requires_grad_(False)
    with pytest.raises(ValueError, match="no weight of the LoRA is trained"):
        train_lora(tmp_path / "run", frozen, "bert")
    pissa = with_lora(load_base("bert", folder / "base"), init_lora_weights="pissa")
    with pytest.raises(ValueError, match="'pissa', which changes the weights of the base"):
        train_lora(tmp_path / "run", pissa, "bert")
    assert not (tmp_path / "run").exists()


def rewrite(folder, **settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def change_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


BROKEN = {
    "another rank": (lambda folder: rewrite(folder, r=3), "of rank 3, and the tensors beside it have the rank 2"),
    "a huge rank": (lambda folder: rewrite(folder, r=10**12), "of rank 1000000000000, and the tensors"),
    "no rank": (lambda folder: rewrite(folder, r="many"), "does not describe a LoRA"),
    "other layers": (lambda folder: rewrite(folder, target_modules=["absent"]), "does not fit a D3PMTextModel"),
    "fewer layers": (
        lambda folder: rewrite(folder, target_modules=["query"]),
        r"hold \d+ tensors? \(.*\), which a LoRA .* does not have",
    ),
    "another kind": (lambda folder: rewrite(folder, peft_type="IA3"), "has peft_type='IA3': it must be 'LORA'"),
    "pissa": (lambda folder: rewrite(folder, init_lora_weights="pissa"), "changes the weights of the base"),
    "a tensor is missing": (
        lambda folder: change_tensors(folder, lambda t: t.pop(sorted(t)[0])),
        r"lack 1 tensor \(.*\) of a LoRA of rank",
    ),
    "a truncated file": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"{}"),
        "is truncated or not a safetensors file",
    ),
    "pickled weights": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
        "has pickled weights only, which can run code: save the LoRA again with safetensors",
    ),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "is not valid JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_lora(tmp_path, folder, name):
    """The pipeline stays as it was."""
    damage, sentence = BROKEN[name]
    shutil.copytree(folder / "lora", tmp_path / "lora")
    damage(tmp_path / "lora")
    pipeline = load_base("bert", folder / "base")
    before = logits(pipeline, "bert")
    with pytest.raises((ValueError, OSError), match=sentence):
        pipeline.load_lora_weights(tmp_path / "lora")
    assert torch.equal(logits(pipeline, "bert"), before) and all(
        p.requires_grad for p in pipeline.text_model.parameters()
    )
    with pytest.raises((ValueError, OSError), match=sentence):
        D3PMPipeline.from_pretrained(tmp_path / "lora")


def test_a_lora_of_another_base(tmp_path, folder):
    """Of the same architecture with other weights, and of another one."""
    other = load_base("bert", folder / "base")
    with torch.no_grad():
        other.text_model.transform.dense.bias += 1
    with pytest.raises(ValueError, match="is a LoRA of another base than this D3PMTextModel.*check_base=False"):
        other.load_lora_weights(folder / "lora")
    other.load_lora_weights(folder / "lora", check_base=False)
    other = D3PMPipeline.from_pretrained(folder / "base", dtype=torch.bfloat16)
    other.load_lora_weights(folder / "lora")  # whose weights cannot be compared
    save_base("t5", tmp_path / "t5")
    with pytest.raises(ValueError, match="LoRA"):
        load_base("t5", tmp_path / "t5").load_lora_weights(folder / "lora", check_base=False)


@pytest.mark.parametrize("kind", ["bert", "masked"])
def test_the_base_of_a_lora_has_the_dtype_of_its_component(tmp_path, kind):
    """Whether the base is a pipeline or a language model by itself."""
    save_base(kind, tmp_path / "base")
    with_lora(load_base(kind, tmp_path / "base")).save_lora_weights(tmp_path / "lora")
    dtype = {"text_model": torch.bfloat16, "default": torch.float32}
    assert D3PMPipeline.from_pretrained(tmp_path / "lora", dtype=dtype).text_model.dtype == torch.bfloat16
    assert (
        D3PMPipeline.from_pretrained(tmp_path / "lora", dtype={"default": torch.float16}).text_model.dtype
        == torch.float16
    )


def test_the_base_of_a_lora_must_be_known(tmp_path, folder):
    for name, base, sentence in (
        ("unknown", None, "so that its base is not known"),
        ("itself", str(tmp_path / "itself"), "is a LoRA, and the base of another one"),
        ("gone", str(tmp_path / "nowhere/base"), "neither a folder nor a valid repository id"),
    ):
        shutil.copytree(folder / "lora", tmp_path / name)
        rewrite(tmp_path / name, base_model_name_or_path=base)
        with pytest.raises((ValueError, OSError), match=sentence):
            D3PMPipeline.from_pretrained(tmp_path / name)
        (tmp_path / name / "model_index.json").unlink()
        with pytest.raises((ValueError, OSError), match=sentence):
            D3PMPipeline.from_pretrained(tmp_path / name)


def test_a_network_that_is_passed_takes_the_place_of_the_base(tmp_path, folder):
    """The base need not be there then."""
    shutil.copytree(folder / "lora", tmp_path / "lora")
    rewrite(tmp_path / "lora", base_model_name_or_path=str(tmp_path / "nowhere/base"))
    loaded = D3PMPipeline.from_pretrained(tmp_path / "lora", text_model=load_base("bert", folder / "base").text_model)
    assert torch.equal(logits(loaded, "bert"), logits(D3PMPipeline.from_pretrained(folder / "lora"), "bert"))


def test_a_lora_is_not_saved_over_a_network(tmp_path, monkeypatch, folder):
    """Neither over its base nor over another one. Nothing is written, and no repository is created."""
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *args, **kwargs: pytest.fail("a request"))
    shutil.copytree(folder / "base", tmp_path / "base")
    save_base("masked", tmp_path / "model")
    for kind, name in (("bert", "base"), ("masked", "model")):
        pipeline = with_lora(load_base(kind, tmp_path / name))
        before, sentence = hashes(tmp_path), "holds a whole network .*: save the LoRA to another folder"
        with pytest.raises(ValueError, match=sentence):
            pipeline.save_lora_weights(tmp_path / name)
        with pytest.raises(ValueError, match=sentence):
            train_lora(tmp_path / name, pipeline, kind)
        pipeline.register_to_config(_name_or_path="org/base")
        push = {"push_to_hub": True, "repo_id": "org/base"}
        for call in (
            lambda: pipeline.save_lora_weights(tmp_path / "lora", **push),
            lambda: train_lora(tmp_path / "lora", pipeline, kind, push_to_hub=True, hub_model_id="org/base"),
        ):
            with pytest.raises(
                ValueError, match="'org/base' is the base of the LoRA.*: push it to another repository"
            ):
                call()
        assert hashes(tmp_path) == before


@pytest.mark.parametrize(("kind", "safe_serialization"), [("bert", True), ("unet", True), ("unet", False)])
def test_a_pipeline_replaces_a_lora(tmp_path, kind, safe_serialization):
    """The folder is then loaded as the pipeline, and not as its base with the LoRA that was there before."""
    save_base(kind, tmp_path / "base")
    with_lora(load_base(kind, tmp_path / "base")).save_lora_weights(tmp_path / "saved")
    pipeline = load_base(kind, tmp_path / "base")
    with torch.no_grad():
        next(network_of(pipeline).parameters()).mul_(2)
    pipeline.save_pretrained(tmp_path / "saved", safe_serialization=safe_serialization)
    assert not any(name.startswith("adapter_") for name in names(tmp_path / "saved"))
    loaded = D3PMPipeline.from_pretrained(tmp_path / "saved", use_safetensors=safe_serialization)
    torch.testing.assert_close(logits(loaded, kind), logits(pipeline, kind), atol=1e-6, rtol=1e-6)


def test_a_merged_run_replaces_the_lora_of_the_run(tmp_path, folder):
    """A run that is continued with `merge_lora` leaves the pipeline alone."""
    train_lora(tmp_path, with_lora(load_base("bert", folder / "base")), "bert")
    settings = {"merge_lora": True, "resume_from_checkpoint": "latest", "max_train_steps": 6}
    trained = train_lora(tmp_path, with_lora(load_base("bert", folder / "base")), "bert", **settings)
    loaded = D3PMPipeline.from_pretrained(tmp_path)
    assert not adapter_configs(loaded.text_model)
    torch.testing.assert_close(logits(loaded, "bert"), logits(trained, "bert"), atol=1e-6, rtol=0)


def test_wrong_calls(folder):
    pipeline = load_base("bert", folder / "base")
    for call in (pipeline.fuse_lora, pipeline.unfuse_lora, lambda: pipeline.save_lora_weights("no")):
        with pytest.raises(ValueError, match="LoRA"):
            call()
    pipeline.load_lora_weights(folder / "lora", adapter_name="one")
    with pytest.raises(ValueError, match="'one', which the pipeline has already"):
        pipeline.load_lora_weights(folder / "lora", adapter_name="one")
    with pytest.raises(ValueError, match="has 'two', and the pipeline has \\['one'\\]"):
        pipeline.set_adapters("two")
    with pytest.raises(ValueError, match="got 2 adapter_weights for 1 adapter_names"):
        pipeline.set_adapters("one", [1, 2])
    with pytest.raises(ValueError, match="an argument of the download is .subfolder."):
        pipeline.load_lora_weights(folder / "lora", subfolder="x")
    with pytest.raises(OSError, match="is not the folder of a LoRA"):
        pipeline.load_lora_weights(folder / "base")


def test_a_component_that_was_taken_out_for_a_while_is_saved(tmp_path):
    """diffusers keeps `[null, null]` in the index of such a component, and would leave it out of the folder."""
    pipeline = make_text_pipeline()
    tokenizer, pipeline.tokenizer = pipeline.tokenizer, None
    pipeline.tokenizer = tokenizer
    pipeline.save_pretrained(tmp_path)
    assert D3PMPipeline.from_pretrained(tmp_path).tokenizer.get_vocab() == tokenizer.get_vocab()
