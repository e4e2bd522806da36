# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checkpoints on disk: broken or foreign ones raise one clear sentence, and a failed save loses nothing."""

import base64
import json
import os
import pickle
import shutil
from functools import partial, wraps

import pytest
import torch
from comparison import assert_same_draws
from diffusers import (
    DDPMPipeline,
    DDPMScheduler,
    DiffusionPipeline,
    DiTTransformer2DModel,
    UNet2DModel,
)
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextModel,
    D3PMTextPipeline,
    character_tokenizer,
    create_text_model,
    create_unet,
    export,
)
from d3pm_hf.pipelines.loading import load_component
from d3pm_hf.pipelines.tokenizer_files import text_growth


LENGTH = 16


def make_text(seed=0):
    torch.manual_seed(seed)
    scheduler = D3PMScheduler(28, unigram_probs=torch.cat([torch.rand(27), torch.zeros(1)]))
    return D3PMTextPipeline(create_text_model("tiny", 28), scheduler, character_tokenizer(), sequence_length=LENGTH)


def make_image():
    return D3PMImagePipeline(create_unet("tiny", 17, 8, 1), D3PMScheduler(17, transition="uniform"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A text pipeline on disk."""
    folder = tmp_path_factory.mktemp("saved") / "text"
    make_text().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the saved pipeline, for a test to damage."""
    return shutil.copytree(saved, tmp_path / "copy")


def edit(path, **values):
    """Changes entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def sample(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(num_inference_steps=4, generator=torch.Generator().manual_seed(0)).sequences


# Files of a checkpoint


def test_files(saved):
    files = sorted(str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file())
    assert files == [
        *["README.md", "model_index.json", "scheduler/scheduler_config.json", "scheduler/transition.safetensors"],
        *["text_model/config.json", "text_model/model.safetensors"],
        *["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"],
    ]
    index = json.loads((saved / "model_index.json").read_text())
    assert index["_class_name"] == "D3PMTextPipeline" and index["sequence_length"] == LENGTH
    assert index["scheduler"] == ["d3pm_hf", "D3PMScheduler"] and index["text_model"] == ["d3pm_hf", "D3PMTextModel"]
    assert [path.name for path in saved.parent.iterdir()] == ["text"]  # nothing is left beside it
    (saved.parent / "other").mkdir()
    assert saved.stat().st_mode == (saved.parent / "other").stat().st_mode  # as any other folder


# Broken checkpoints


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
@pytest.mark.parametrize("name", ["text_model/model.safetensors", "scheduler/transition.safetensors"])
def test_truncated_weights(folder, name, keep):
    path = folder / name
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(OSError, match=f"{name} is truncated or not a safetensors file .* download it again"):
        D3PMPipeline.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model_index.json", "has no model_index.json, so it is not the folder of a pipeline"),
        (
            "scheduler/scheduler_config.json",
            "scheduler/scheduler_config.json is missing: the checkpoint is incomplete",
        ),
        ("scheduler/transition.safetensors", None),
        ("text_model/config.json", "text_model/config.json is missing: the checkpoint is incomplete"),
        ("text_model/model.safetensors", r"text_model has no weights \(\*.safetensors\)"),
        ("tokenizer/tokenizer_config.json", "tokenizer/tokenizer_config.json is missing"),
        ("tokenizer/tokenizer.json", "tokenizer/tokenizer.json is missing"),
    ],
)
def test_missing_files(folder, name, message):
    (folder / name).unlink()
    if message is None:  # an absorbing process is defined without its tensors
        D3PMPipeline.from_pretrained(folder)
        return
    with pytest.raises(OSError, match=message):
        D3PMPipeline.from_pretrained(folder)


JSON_FILES = (
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_model/config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
)


@pytest.mark.parametrize("name", JSON_FILES)
def test_json_that_cannot_be_read(folder, name):
    path = folder / name
    content = path.read_text()
    contents = {
        "is not valid JSON": [content[:40], "", "[" * 100_000, '{"a":' * 100_000, f'{{"a": {"9" * 5000}}}', "\udcff"],
        "does not contain a JSON object": ["[1]", "null", '"text"'],
    }
    for words, wrong in contents.items():
        for text in wrong:
            path.write_bytes(text.encode("utf-8", "surrogateescape"))
            with pytest.raises(OSError, match=f"{name} {words}.*: download or save the checkpoint again") as error:
                D3PMPipeline.from_pretrained(folder)
            assert "\n" not in str(error.value)


def test_shapes_of_another_network(folder):
    edit(folder / "text_model/config.json", intermediate_size=48)
    with pytest.raises(
        ValueError,
        match=r"the tensor backbone\.encoder\.layer\.0\.intermediate\.dense\.bias in .*text_model has the shape \(64,\), "
        r"and a D3PMTextModel with this config\.json needs \(48,\): download or save",
    ):
        D3PMPipeline.from_pretrained(folder)


def masked_language_model():
    config = BertConfig(
        vocab_size=28, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    return D3PMTextPipeline(BertForMaskedLM(config), D3PMScheduler(28), character_tokenizer(), sequence_length=LENGTH)


NETWORKS = {
    "text": (make_text, "text_model", "backbone.embeddings.LayerNorm.bias"),
    "t5": (
        lambda: D3PMTextPipeline(create_text_model("tiny", 28, backbone="t5"), D3PMScheduler(28)),
        "text_model",
        "backbone.encoder.block.0.layer.0.SelfAttention.k.weight",
    ),
    "masked": (masked_language_model, "text_model", "bert.embeddings.LayerNorm.bias"),
    "image": (make_image, "unet", "conv_in.bias"),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_weights_that_do_not_fit(tmp_path, kind):
    """Missing tensors would be initialized at random otherwise."""
    make, part, first = NETWORKS[kind]
    pipeline = make()
    pipeline.save_pretrained(tmp_path)
    (path,) = (tmp_path / part).glob("*.safetensors")
    whole = load_file(path)
    cls = type(getattr(pipeline, part)).__name__
    half = {name: whole[name] for name in sorted(whole)[1::2]}
    reshaped = {**whole, first: torch.ones(3, 5)}
    for tensors, words in (
        (
            {},
            rf"lack \d+ tensors \({first}, [^,]*, [^,]* and \d+ more\) of a {cls} with this config.json: download or save",
        ),
        (half, rf"lack \d+ tensors \({first}, "),
        (
            {name: whole[name] for name in whole if name != first},
            rf"lack 1 tensor \({first}\) of a {cls} with this config.json: download",
        ),
        (
            {**whole, "surprise": torch.ones(2)},
            rf"hold 1 tensor \(surprise\), which a {cls} with this config.json does not",
        ),
        (reshaped, rf"{first} (in .* has the shape|expected shape).*3, 5.*: download or save"),
    ):
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=words) as error:
            D3PMPipeline.from_pretrained(tmp_path)
        assert "\n" not in str(error.value) and str(tmp_path / part) in str(error.value)
    save_file(whole, path, metadata={"format": "pt"})
    loaded = getattr(D3PMPipeline.from_pretrained(tmp_path), part)
    assert all(
        torch.equal(value, loaded.state_dict()[name]) for name, value in getattr(pipeline, part).state_dict().items()
    )


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("text_model/config.json", {"vocab_size": "28"}, "'vocab_size' expected int, got str"),
        ("text_model/config.json", {"hidden_size": 1.5}, "'hidden_size' expected int, got float"),
        ("text_model/config.json", {"backbone": "gpt"}, "backbone is 'gpt': it must be one of bert, t5"),
        ("text_model/config.json", {"dtype": "float31"}, "AttributeError.*float31"),
        (
            "text_model/config.json",
            {"pad_token_id": 4000},
            "AssertionError: Padding_idx must be within num_embeddings",
        ),
        ("tokenizer/tokenizer.json", {"model": 3}, "did not match any variant"),
        ("tokenizer/tokenizer.json", {"added_tokens": None}, "TypeError"),
        ("tokenizer/tokenizer_config.json", {"mask_token": 3}, "Special token mask_token"),
    ],
    ids=str,
)
def test_settings_that_other_libraries_do_not_expect(folder, name, values, words):
    edit(folder / name, **values)
    with pytest.raises(
        ValueError, match=f"{(folder / name).parent} .*({words}).*: download or save the checkpoint"
    ) as error:
        D3PMPipeline.from_pretrained(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_labels"])
def test_more_layers_than_tensors(folder, name):
    """A configuration must not decide how long loading takes: a list of so many labels or layers would take hours."""
    edit(folder / "text_model/config.json", **{name: 10**12})
    with pytest.raises(
        ValueError,
        match=f"text_model/config.json has {name}=1000000000000, and the weights beside it hold 45 tensors: download or",
    ):
        D3PMPipeline.from_pretrained(folder)


def test_counts_in_nested_settings(folder):
    edit(folder / "text_model/config.json", encoder={"num_layers": [2, 20_000]}, label2id={"num_labels": 20_000})
    with pytest.raises(ValueError, match="text_model/config.json has num_layers=20000, and the weights"):
        D3PMPipeline.from_pretrained(folder)


def test_numbers_beyond_the_weights(folder):
    for value in (10**12, 10**400):
        edit(folder / "text_model/config.json", vocab_size=value)
        with pytest.raises(
            ValueError, match=r"config.json has vocab_size=1000.*, and the weights beside it hold \d+ numbers"
        ):
            D3PMPipeline.from_pretrained(folder)
    edit(folder / "text_model/config.json", vocab_size=28, num_hidden_layers=1_000)
    with pytest.raises(ValueError, match="has num_hidden_layers=1000, and the weights beside it hold 45 tensors"):
        D3PMPipeline.from_pretrained(folder)


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize(
    "values", [{"vocab_size": 10**7}, {"hidden_size": 10**5}, {"intermediate_size": 10**7}], ids=str
)
def test_a_network_that_is_larger_than_its_weights(folder, values, has_weights):
    """It is refused before it takes memory, which is up to 80 GB here, and is not filled with random numbers."""
    if not has_weights:
        save_file({"a": torch.zeros(2)}, folder / "text_model/model.safetensors", metadata={"format": "pt"})
    edit(folder / "text_model/config.json", **values)
    words = r"text_model/config.json describes a network that is much larger than its weights, which hold \d+ numbers: down"
    with pytest.raises(ValueError, match=words):
        D3PMPipeline.from_pretrained(folder)


def test_every_network_and_tokenizer_is_built_once(saved, tmp_path, monkeypatch):
    built = []
    for cls in (D3PMTextModel, UNet2DModel, type(character_tokenizer())):
        create = cls.__init__

        @wraps(create)
        def count(self, *args, create=create, **kwargs):
            built.append(type(self))
            create(self, *args, **kwargs)

        monkeypatch.setattr(cls, "__init__", count)
    pipeline = D3PMPipeline.from_pretrained(saved)
    assert built == [type(pipeline.text_model), type(pipeline.tokenizer)]
    make_image().save_pretrained(tmp_path)
    built.clear()
    D3PMPipeline.from_pretrained(tmp_path)
    assert built == [UNet2DModel]


def test_buffers_that_are_not_part_of_the_weights(tmp_path):
    """The positions of a transformer are computed from the size of its images, and take 14,901 GiB here."""
    network = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=1, norm_num_groups=4, num_embeds_ada_norm=3,
        in_channels=1, out_channels=5, sample_size=8, patch_size=2,
    )  # fmt: skip
    network.save_pretrained(tmp_path / "unet")
    load = partial(load_component, tmp_path / "unet", DiTTransformer2DModel, {"use_safetensors": True})
    assert isinstance(load(), DiTTransformer2DModel)
    edit(tmp_path / "unet/config.json", sample_size=10**6)
    with pytest.raises(ValueError, match=r"unet do not describe a component \((Runtime|Memory)Error: .*\): download"):
        load()


def test_the_loading_bar_is_shown_once(saved, capfd):
    D3PMPipeline.from_pretrained(saved)
    assert capfd.readouterr().err.count("Loading weights:   0%") == 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("sample_size", 1.5, "sample_size of the network is 1.5: it must be an integer in 1 .. 16384"),
        ("sample_size", [8, -1], "sample_size of the network is -1: it must be an integer in 1 .. 16384"),
        ("sample_size", [8], r"sample_size of the network is \[8\]: it must be an integer, or height and width"),
        ("time_embedding_type", "x", r"unet do not describe a component \(UnboundLocalError: .*\): download or save"),
        (
            "layers_per_block",
            10**12,
            "unet/config.json has layers_per_block=1000000000000, and the weights beside it hold",
        ),
    ],
)
def test_settings_of_an_image_network(tmp_path, name, value, words):
    make_image().save_pretrained(tmp_path)
    edit(tmp_path / "unet/config.json", **{name: value})
    with pytest.raises(ValueError, match=words):
        D3PMPipeline.from_pretrained(tmp_path)


@pytest.mark.parametrize("value", [None, 1.5, "x", True, {}])
@pytest.mark.parametrize("name", ["text_model", "scheduler", "tokenizer"])
def test_an_index_without_a_component(folder, name, value):
    edit(folder / "model_index.json", **{name: value})
    with pytest.raises(
        ValueError, match=f"model_index.json gives {name} as {value!r}: it must be a list of a library and a class"
    ):
        D3PMPipeline.from_pretrained(folder)


def test_a_component_that_the_index_lacks_may_be_given(folder):
    path = folder / "model_index.json"
    index = json.loads(path.read_text())
    del index["text_model"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model_index.json gives text_model as None"):
        D3PMPipeline.from_pretrained(folder)
    model = create_text_model("tiny", 28)
    loaded = D3PMPipeline.from_pretrained(folder, text_model=model, tokenizer=None)
    assert loaded.text_model is model and loaded.tokenizer is None


def test_a_network_given_by_the_caller_is_not_looked_for(folder):
    save_file({}, folder / "text_model/model.safetensors", metadata={"format": "pt"})
    model = create_text_model("tiny", 28)
    assert D3PMPipeline.from_pretrained(folder, text_model=model).text_model is model


def test_a_tokenizer_of_another_vocabulary(folder):
    shutil.rmtree(folder / "tokenizer")
    character_tokenizer("abc").save_pretrained(folder / "tokenizer")
    with pytest.raises(
        ValueError, match="tokenizer has a vocabulary of 4 and the scheduler one of 28: load the tokenizer"
    ):
        D3PMPipeline.from_pretrained(folder)


def test_a_scheduler_of_another_vocabulary(folder):
    shutil.rmtree(folder / "scheduler")
    D3PMScheduler(30).save_pretrained(folder / "scheduler")
    with pytest.raises(ValueError, match="the network has a vocabulary of 28 and the scheduler one of 30"):
        D3PMPipeline.from_pretrained(folder)


def test_no_such_folder():
    with pytest.raises(OSError, match="'a/b/c/d' is neither a folder nor a valid repository id"):
        D3PMPipeline.from_pretrained("a/b/c/d")


# Foreign checkpoints


def test_a_pipeline_of_diffusers(tmp_path):
    unet = UNet2DModel(sample_size=8, block_out_channels=(8,), down_block_types=("DownBlock2D",),
                       up_block_types=("UpBlock2D",), norm_num_groups=4)  # fmt: skip
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained(tmp_path)
    for loader in (D3PMPipeline, D3PMImagePipeline):
        with pytest.raises(ValueError, match="'DDPMPipeline', not of D3PMImagePipeline or D3PMTextPipeline"):
            loader.from_pretrained(tmp_path)


def test_the_other_pipeline_of_ours(saved):
    with pytest.raises(ValueError, match="a checkpoint of D3PMTextPipeline, not of D3PMImagePipeline"):
        D3PMImagePipeline.from_pretrained(saved)


@pytest.mark.parametrize("value", [["os", "system"], ["d3pm_hf", "export"], ["evil", "Scheduler"]])
def test_an_index_that_names_other_code(folder, value):
    edit(folder / "model_index.json", scheduler=value)
    (folder / "scheduler/evil.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(ValueError, match=rf"names {value[0]}\.{value[1]} as the scheduler, which is not a class of"):
        D3PMPipeline.from_pretrained(folder)


@pytest.mark.parametrize("value", [["d3pm_hf"], [1, 2]])
def test_an_index_that_makes_no_sense(folder, value):
    edit(folder / "model_index.json", scheduler=value)
    with pytest.raises(ValueError, match="gives scheduler as .* it must be a list of a library and a class"):
        D3PMPipeline.from_pretrained(folder)


@pytest.mark.parametrize("value", [None, [], 3, [3]])
def test_an_index_without_a_pipeline(folder, value):
    edit(folder / "model_index.json", _class_name=value)
    with pytest.raises(
        ValueError, match=r"model_index.json has _class_name=(None|\[\]|3), so it is not the index of a pipeline: pass"
    ):
        D3PMPipeline.from_pretrained(folder)


def test_an_empty_setting(folder):
    edit(folder / "model_index.json", sequence_length={})
    with pytest.raises(ValueError, match="model_index.json gives sequence_length as {}, which diffusers cannot read"):
        D3PMPipeline.from_pretrained(folder)


@pytest.mark.parametrize("target", ["../../secret.safetensors", "/etc/passwd"])
def test_shards_outside_the_folder(folder, target):
    index = {"metadata": {}, "weight_map": {"lm_head.weight": target}}
    (folder / "text_model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"points to '{target}', outside its folder: do not trust this checkpoint"):
        D3PMPipeline.from_pretrained(folder)


class MakesFolder:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    ("shards", "kind", "words"),
    [
        (
            {"lm_head.weight": "x.bin"},
            ValueError,
            "points to 'x.bin', which is not a safetensors file and could run code",
        ),
        (
            {"lm_head.weight": "x.safetensors"},
            OSError,
            "text_model/x.safetensors is missing: the checkpoint is incomplete",
        ),
        ({"lm_head.weight": 3}, OSError, "index.json does not name a file for each tensor"),
        (["x.safetensors"], OSError, "index.json does not name a file for each tensor"),
    ],
)
def test_shards_that_are_none(folder, shards, kind, words):
    """An index of safetensors must not lead to `torch.load`."""
    (folder / "text_model/x.bin").write_bytes(pickle.dumps(MakesFolder(str(folder / "evil"))))
    (folder / "text_model/model.safetensors").rename(folder / "text_model/model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": shards}
    (folder / "text_model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(kind, match=words):
        D3PMPipeline.from_pretrained(folder)
    assert not (folder / "evil").exists()


def test_links_are_followed(folder, tmp_path):
    """The cache of the Hub consists of symbolic links."""
    weights = folder / "text_model/model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(folder)
    assert_same_draws(sample(D3PMPipeline.from_pretrained(tmp_path / "link")), sample(make_text()))


def test_a_tokenizer_file_outside_the_folder(folder):
    edit(folder / "tokenizer/tokenizer_config.json", vocab_file="/etc/passwd")
    with pytest.raises(ValueError, match="points to '/etc/passwd', outside its folder"):
        D3PMPipeline.from_pretrained(folder)


@pytest.mark.parametrize("value", [None, True])
def test_safetensors_by_default(saved, value):
    """`use_safetensors=None` is the default of diffusers."""
    loaded = D3PMPipeline.from_pretrained(saved, use_safetensors=value)
    assert_same_draws(sample(loaded), sample(make_text()))


def test_use_safetensors_is_a_flag(saved):
    with pytest.raises(ValueError, match="use_safetensors is 'no': it must be True, False or None"):
        D3PMPipeline.from_pretrained(saved, use_safetensors="no")


# Tokenizers that would end the process: a panic is no `Exception`, and running out of memory is an abort


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLE = replace({"String": "a"}, "aa")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
LONG_MAP = base64.b64encode(b"\0\0\0\0" + b"a" * 200 + b"\0").decode()
GROWING = {
    "replace": ("normalizer", {"type": "Sequence", "normalizers": [DOUBLE] * 40}),
    "nested": ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [DOUBLE] * 5}] * 8}),
    "empty": ("normalizer", {"type": "Sequence", "normalizers": [replace({"String": ""}, "a")] * 40}),
    "between": ("normalizer", {"type": "Sequence", "normalizers": [replace({"Regex": "(?=a)"}, "a")] * 40}),
    "long": ("normalizer", replace({"String": "a"}, "a" * 20_000)),
    "bytes": ("normalizer", {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}),
    "map": ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": LONG_MAP}] * 3}),
    "words": ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTES] * 40}),
    "decoder": ("decoder", {"type": "Sequence", "decoders": [DOUBLE] * 40}),
    "suffix": ("decoder", {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 40}),
}  # fmt: skip


@pytest.mark.parametrize("case", GROWING)
def test_tokenizers_that_make_texts_grow(folder, case):
    name, step = GROWING[case]
    edit(folder / "tokenizer/tokenizer.json", **{name: step})
    with pytest.raises(
        ValueError, match=r"tokenizer.json can make a text \S+ times longer to (en|de)code it, .* 10000"
    ):
        D3PMPipeline.from_pretrained(folder)


def test_usual_steps_of_tokenizers():
    """The normalizers of T5, XLNet and ALBERT, Llama's, and a map like that of sentencepiece are far from the limit."""
    usual_map = base64.b64encode(b"\0\0\0\0" + b"a" * 33 + b"\0").decode()
    steps = [
        *(replace({"String": "``"}, '"'), replace({"String": "''"}, '"'), {"type": "NFKD"}, {"type": "StripAccents"}),
        *({"type": "Precompiled", "precompiled_charsmap": usual_map}, replace({"Regex": " {2,}"}, "\u2581")),
        *({"type": "Prepend", "prepend": "\u2581"}, replace({"String": " "}, "\u2581"), {"type": "ByteLevel"}),
    ]
    assert text_growth({"type": "Sequence", "normalizers": steps}) == 33 * 2 * 2
    assert text_growth(None) == text_growth({"type": "Lowercase"}) == 1


def test_tokenizers_that_panic(folder, saved):
    """The regular expression takes exponential time, which tokenizers ends with a panic."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    edit(folder / "tokenizer/tokenizer.json", pre_tokenizer=split)
    pipeline = D3PMPipeline.from_pretrained(folder)
    with pytest.raises(
        ValueError, match=r"the tokenizer fails on this text \(.*retry-limit.*\): use another checkpoint"
    ):
        pipeline("a" * 40 + "b", num_inference_steps=1)


def test_panics_while_loading(folder, monkeypatch):
    panic = type("PanicException", (BaseException,), {})

    def fail(*args, **kwargs):
        raise panic("index out of bounds")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.from_pretrained", fail)
    with pytest.raises(
        ValueError, match="do not describe a component .PanicException: index out of bounds.: download"
    ):
        D3PMPipeline.from_pretrained(folder)


def test_pickles_are_read_only_when_asked_for(tmp_path):
    pipeline = make_image()
    pipeline.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    with pytest.raises(
        OSError, match="unet has pickled weights only, which can run code: pass `use_safetensors=False`"
    ):
        D3PMPipeline.from_pretrained(tmp_path / "pickled")
    loaded = D3PMPipeline.from_pretrained(tmp_path / "pickled", use_safetensors=False)
    assert torch.equal(loaded.unet.conv_in.weight, pipeline.unet.conv_in.weight)


@pytest.mark.parametrize("variant", [None, "ema"])
def test_weights_of_another_format_are_not_left_beside_new_ones(tmp_path, variant):
    """A library reads one of the formats, which may be that of the weights that were there before."""
    pipeline = make_image()
    pipeline.save_pretrained(tmp_path, variant="other")
    for is_safe in (True, False, True):
        torch.nn.init.normal_(pipeline.unet.conv_in.weight)
        pipeline.save_pretrained(tmp_path, safe_serialization=is_safe, variant=variant)
        loaded = D3PMPipeline.from_pretrained(tmp_path, variant=variant, use_safetensors=is_safe)
        assert torch.equal(loaded.unet.conv_in.weight, pipeline.unet.conv_in.weight)
        with pytest.raises(OSError):
            D3PMPipeline.from_pretrained(tmp_path, variant=variant, use_safetensors=not is_safe)
    D3PMPipeline.from_pretrained(tmp_path, variant="other")


# Variants and shards


def test_variants(tmp_path):
    raw, ema = make_text(0), make_text(1)
    raw.save_pretrained(tmp_path / "both")
    ema.save_pretrained(tmp_path / "both", variant="ema")
    for variant, pipeline in ((None, raw), ("ema", ema)):
        loaded = D3PMPipeline.from_pretrained(tmp_path / "both", variant=variant)
        assert torch.equal(loaded.text_model.lm_head.weight, pipeline.text_model.lm_head.weight)
    with pytest.raises(OSError, match="text_model has no weights of the variant 'fp16': leave out `variant`"):
        D3PMPipeline.from_pretrained(tmp_path / "both", variant="fp16")


def test_shards_give_way_to_a_single_file(tmp_path):
    old, new = make_text(0), make_text(1)
    old.save_pretrained(tmp_path / "checkpoint", max_shard_size="20KB")
    assert (tmp_path / "checkpoint/text_model/model.safetensors.index.json").exists()
    loaded = D3PMPipeline.from_pretrained(tmp_path / "checkpoint")
    assert torch.equal(loaded.text_model.lm_head.weight, old.text_model.lm_head.weight)
    new.save_pretrained(tmp_path / "checkpoint")
    loaded = D3PMPipeline.from_pretrained(tmp_path / "checkpoint")
    assert torch.equal(loaded.text_model.lm_head.weight, new.text_model.lm_head.weight)


# Failed saves


def read_only(tmp_path):
    """A folder that the user of the tests, root included, may not write to."""
    if os.geteuid() == 0:
        return "/sys/kernel"
    tmp_path.chmod(0o555)
    return tmp_path


def test_a_read_only_folder(tmp_path):
    target = os.path.join(read_only(tmp_path), "checkpoint")
    for save in (make_text().save_pretrained, lambda folder: export(make_text(), folder)):
        with pytest.raises(OSError, match=f"could not be saved to {target} .*choose a folder that you may write to"):
            save(target)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "checkpoint").write_text("precious")
    with pytest.raises(OSError, match="could not be saved to .*checkpoint"):
        make_text().save_pretrained(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    old, new = make_text(0), make_text(1)
    old.save_pretrained(tmp_path / "checkpoint")
    before = load_file(tmp_path / "checkpoint/text_model/model.safetensors")

    def full(self, folder, **kwargs):
        os.makedirs(folder)
        with open(os.path.join(folder, "model.safetensors"), "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(new.text_model), "save_pretrained", full)
    with pytest.raises(
        OSError, match="No space left on device.*: free some space .* what was there before is untouched"
    ):
        new.save_pretrained(tmp_path / "checkpoint")
    after = load_file(tmp_path / "checkpoint/text_model/model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


# Code beside the weights


def test_export(tmp_path):
    pipeline = make_text()
    export(pipeline, tmp_path / "exported")
    index = json.loads((tmp_path / "exported/model_index.json").read_text())
    assert index["_class_name"] == ["pipeline", "D3PMTextPipeline"]
    assert index["scheduler"] == ["scheduler", "D3PMScheduler"]
    # With the package, the code beside the weights is not run.
    for path in (tmp_path / "exported").rglob("*.py"):
        path.write_text("raise SystemExit('this must not run')")
    loaded = D3PMPipeline.from_pretrained(tmp_path / "exported")
    assert_same_draws(sample(loaded), sample(pipeline))
    with pytest.raises(ValueError, match="trust_remote_code"):
        DiffusionPipeline.from_pretrained(tmp_path / "exported")
    # What was loaded from an export is saved as any other.
    loaded.save_pretrained(tmp_path / "again")
    assert_same_draws(sample(D3PMPipeline.from_pretrained(tmp_path / "again")), sample(pipeline))
