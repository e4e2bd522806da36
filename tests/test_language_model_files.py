# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Files of language models of transformers, for `from_masked_lm` and `from_causal_lm`: broken ones raise one sentence."""

import json
import pickle
import shutil

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from test_causal_lm import tiny_model as causal_model
from test_causal_lm import tiny_tokenizer as causal_tokenizer
from test_checkpoints import MakesFolder, edit
from test_masked_lm import tiny_model, tiny_tokenizer
from transformers import AutoModel, AutoModelForSequenceClassification

from d3pm_hf import D3PMTextPipeline


def save_parts(folder, network, tokenizer):
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A masked and a causal language model on disk."""
    folder = tmp_path_factory.mktemp("saved")
    save_parts(folder / "masked", tiny_model("bert"), tiny_tokenizer())
    save_parts(folder / "causal", causal_model("gpt2"), causal_tokenizer())
    return folder


LOADERS = {"masked": D3PMTextPipeline.from_masked_lm, "causal": D3PMTextPipeline.from_causal_lm}
EACH = pytest.mark.parametrize("kind", LOADERS)


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of both models, for a test to damage."""
    return shutil.copytree(saved, tmp_path / "copy")


def refuse(kind, folder, error, words, **options):
    with pytest.raises(error, match=words) as raised:
        LOADERS[kind](folder, **options)
    assert "\n" not in str(raised.value)


# Weights


@EACH
def test_missing_tensors(folder, kind):
    """They would be initialized at random, saved, and loaded as those of a good checkpoint."""
    path = folder / kind / "model.safetensors"
    whole = load_file(path)
    first = sorted(whole)[0]
    lost = {name: tensor for name, tensor in whole.items() if name != first}
    save_file(lost, path, metadata={"format": "pt"})
    words = (
        rf"lack 1 tensor \({first}\) of a .*: choose a checkpoint with all of them, or load the network with AutoModel"
    )
    refuse(kind, folder / kind, ValueError, words)
    save_file({}, path, metadata={"format": "pt"})
    refuse(kind, folder / kind, ValueError, r"lack \d+ tensors")


def test_other_heads(tmp_path):
    """The folder of a classifier, or of an encoder alone, has no head of a language model."""
    config = tiny_model("bert").config
    for auto_class in (AutoModelForSequenceClassification, AutoModel):
        save_parts(tmp_path, auto_class.from_config(config), tiny_tokenizer())
        refuse("masked", tmp_path, ValueError, r"lack 6 tensors \(cls.predictions.bias, .* of a BertForMaskedLM: ")
    save_parts(tmp_path / "gpt2", AutoModel.from_config(causal_model("llama").config), causal_tokenizer())
    refuse("causal", tmp_path / "gpt2", ValueError, r"lack 1 tensor \(lm_head.weight\) of a LlamaForCausalLM: ")


def test_further_tensors_are_allowed(folder, capfd):
    """Checkpoints of the Hub hold heads that a language model does not use."""
    path = folder / "masked/model.safetensors"
    save_file({**load_file(path), "cls.seq_relationship.weight": torch.ones(2, 16)}, path, metadata={"format": "pt"})
    pipeline = D3PMTextPipeline.from_masked_lm(folder / "masked")
    assert torch.equal(pipeline.text_model.cls.predictions.bias, tiny_model("bert").cls.predictions.bias)
    assert capfd.readouterr().err.count("LOAD REPORT") <= 1  # of the weights that are loaded for good


@EACH
def test_shapes(folder, kind):
    edit(folder / kind / "config.json", vocab_size=40)
    refuse(
        kind,
        folder / kind,
        ValueError,
        r"the tensor .* has the shape \(\d+, 16\), and a .* needs \(40, 16\): download",
    )
    edit(folder / kind / "config.json", vocab_size=10**7)
    refuse(kind, folder / kind, ValueError, "describes a network that is much larger than its weights")
    edit(folder / kind / "config.json", vocab_size=10**12)
    refuse(
        kind, folder / kind, ValueError, r"config.json has vocab_size=1000000000000, and the weights beside it hold"
    )


@EACH
def test_more_layers_than_tensors(folder, kind):
    name = {"masked": "num_hidden_layers", "causal": "n_layer"}[kind]
    edit(folder / kind / "config.json", **{name: 10**12})
    refuse(kind, folder / kind, ValueError, f"config.json has {name}=1000000000000, and the weights beside it hold")


@EACH
def test_truncated_weights(folder, kind):
    path = folder / kind / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    refuse(kind, folder / kind, OSError, "model.safetensors is truncated or not a safetensors file")


@EACH
@pytest.mark.parametrize(
    ("shard", "error", "words"),
    [
        ("x.bin", ValueError, "points to 'x.bin', which is not a safetensors file and could run code"),
        ("../x.safetensors", ValueError, "points to '../x.safetensors', outside its folder"),
        ("x.safetensors", OSError, "x.safetensors is missing: the checkpoint is incomplete"),
        (3, OSError, "does not name a file for each tensor"),
    ],
)
def test_shards(folder, kind, shard, error, words):
    """An index of safetensors must not lead to `torch.load`, or out of the folder."""
    part = folder / kind
    (part / "x.bin").write_bytes(pickle.dumps(MakesFolder(str(folder / "evil"))))
    (part / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": {"lm_head.weight": shard}}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(kind, part, error, words)
    assert not (folder / "evil").exists()


@EACH
def test_shards_are_read(saved, tmp_path, kind):
    """Shards may have any name that the index gives them."""
    pipeline = LOADERS[kind](saved / kind)
    pipeline.text_model.save_pretrained(tmp_path, max_shard_size="5KB")
    pipeline.tokenizer.save_pretrained(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for path in tmp_path.glob("model-*.safetensors"):
        path.rename(tmp_path / path.name.replace("model-", "part-"))
    index.write_text(index.read_text().replace('"model-', '"part-'))
    loaded = LOADERS[kind](tmp_path)
    for name, tensor in pipeline.text_model.state_dict().items():
        assert torch.equal(tensor, loaded.text_model.state_dict()[name])


@EACH
@pytest.mark.parametrize("name", ["adapter_model.bin", "../model.safetensors", "sub/model.safetensors", 3])
def test_weights_named_by_the_configuration(folder, kind, name):
    (folder / kind / "adapter_model.bin").write_bytes(pickle.dumps(MakesFolder(str(folder / "evil"))))
    edit(folder / kind / "config.json", transformers_weights=name)
    refuse(kind, folder / kind, ValueError, "config.json points to .*: do not trust this checkpoint")
    assert not (folder / "evil").exists()


@EACH
def test_adapters(folder, kind):
    """Without PEFT, transformers would load the network and leave out the adapter."""
    (folder / kind / "adapter_config.json").write_text("{}")
    refuse(kind, folder / kind, ValueError, "adapter_config.json is an adapter of PEFT: .*`load_lora_weights`")


# Settings and tokenizers


@EACH
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [(b'{"a": ', "is not valid JSON"), (b"\xff", "is not valid JSON"), (b"[1]", "does not contain a JSON object")],
)
def test_json_that_cannot_be_read(folder, kind, name, content, words):
    (folder / kind / name).write_bytes(content)
    refuse(kind, folder / kind, OSError, f"{name} {words}.*: download or save the checkpoint again")


@EACH
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("config.json", {"vocab_size": "28"}),
        ("config.json", {"model_type": "no such type"}),
        ("config.json", {"model_type": None, "architectures": None}),
        ("tokenizer.json", {"model": 3}),
        ("tokenizer.json", {"added_tokens": None}),
        ("tokenizer_config.json", {"mask_token": 3}),
        ("tokenizer_config.json", {"tokenizer_class": 3}),
    ],
    ids=str,
)
def test_settings(folder, kind, name, values):
    edit(folder / kind / name, **values)
    refuse(kind, folder / kind, ValueError, r"the files in .* do not describe a component \(.*\): download or save")


@EACH
def test_missing_files(folder, kind, tmp_path):
    (folder / kind / "tokenizer.json").unlink()
    refuse(kind, folder / kind, ValueError, "the files in .* do not describe a component .*backend tokenizer")
    (folder / kind / "config.json").unlink()
    refuse(kind, folder / kind, OSError, "config.json is missing: the checkpoint is incomplete")


def test_another_kind_of_model(folder):
    edit(folder / "masked/config.json", model_type="vit")
    refuse(
        "masked", folder / "masked", ValueError, "has a configuration that AutoModelForMaskedLM does not know: choose"
    )


def test_paths_of_the_author(folder):
    """Early versions of transformers saved where the author's files were; they are not read."""
    names = {"special_tokens_map_file": "/root/special_tokens_map.json", "tokenizer_file": "/root/tokenizer.json"}
    edit(folder / "masked/tokenizer_config.json", **names)
    pipeline = D3PMTextPipeline.from_masked_lm(folder / "masked")
    assert pipeline.tokenizer("acdc").input_ids == tiny_tokenizer()("acdc").input_ids
    pipeline.save_pretrained(folder / "pipeline")
    D3PMTextPipeline.from_pretrained(folder / "pipeline")
    edit(folder / "masked/tokenizer_config.json", vocab_file="/etc/passwd")
    refuse("masked", folder / "masked", ValueError, "points to '/etc/passwd', outside its folder")


# The Hub


def test_from_the_hub(saved, tmp_path, monkeypatch):
    """Only files that are read are downloaded, and they are checked as those of a folder."""
    files = {f"part/{path.name}": path.read_bytes() for path in (saved / "masked").iterdir()}
    others = (
        "part/onnx/model.onnx",
        "part/pytorch_model.bin",
        "part/model.fp16.safetensors",
        "part/evil.py",
        "other.json",
    )
    for name, data in {**files, **dict.fromkeys(others, b"x")}.items():
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).write_bytes(data)

    def download(repo_id, allow_patterns, ignore_patterns=None, **options):
        assert repo_id == "name/model" and options == {"revision": "main"}
        names = [str(path.relative_to(tmp_path / "hub")) for path in (tmp_path / "hub").rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "hub" / name, tmp_path / "cache" / name)
        return str(tmp_path / "cache")

    monkeypatch.setattr("d3pm_hf.hub.transfers.snapshot_download", download)
    options = {"subfolder": "part", "revision": "main"}
    pipeline = D3PMTextPipeline.from_masked_lm("name/model", **options)
    assert torch.equal(pipeline.text_model.cls.predictions.bias, tiny_model("bert").cls.predictions.bias)
    assert pipeline.text_model.config._name_or_path == "name/model"  # the base model on the card
    assert {f"part/{path.name}" for path in (tmp_path / "cache/part").iterdir()} == set(files)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    (tmp_path / "hub/part/model.safetensors.index.json").write_text(json.dumps(index))
    refuse("masked", "name/model", ValueError, "points to 'pytorch_model.bin', which is not a safetensors", **options)
