# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Subclasses of the user are saved and loaded like the classes of the package, which have correct modules."""

import inspect
import io
import json
import pickle
import sys

import pytest
import torch
from diffusers import DiffusionPipeline, UNet2DModel
from diffusers.configuration_utils import register_to_config
from transformers import BertConfig, BertForMaskedLM

import d3pm_hf
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
from d3pm_hf.hub.cards import EXPORT_NOTE, LOADING_NOTE
from d3pm_hf.transitions import transition_families
from d3pm_hf.utils.registry import is_built_in


OURS = (D3PMScheduler, D3PMTextModel, D3PMPipeline, D3PMImagePipeline, D3PMTextPipeline)


class MyPipeline(D3PMTextPipeline):
    """A subclass that adds nothing."""


class MyScheduler(D3PMScheduler):
    """A subclass with an argument of its own."""

    @register_to_config
    def __init__(self, num_classes: int = 28, num_train_timesteps: int = 50, sharpness: float = 1.0):
        super().__init__(num_classes=num_classes, num_train_timesteps=num_train_timesteps)


class MyModel(D3PMTextModel):
    """A subclass that doubles the logits."""

    def forward(self, *args, return_dict=True, **kwargs):
        output = super().forward(*args, return_dict=True, **kwargs)
        output.logits = 2 * output.logits
        return output if return_dict else output.to_tuple()


class MyMaskedLM(BertForMaskedLM):
    """A network derived from one of transformers."""


class MyUNet(UNet2DModel):
    """A network derived from one of diffusers."""


def make(pipeline=D3PMTextPipeline, model=D3PMTextModel, scheduler=None):
    torch.manual_seed(0)
    network = model(create_text_model("tiny", 28).config)
    return pipeline(network, scheduler or D3PMScheduler(28, 50), character_tokenizer(), sequence_length=16)


def sample(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(num_inference_steps=4, generator=torch.Generator().manual_seed(0), output_type="seq")[0]


def index_of(folder):
    return json.loads((folder / "model_index.json").read_text())


# Subclasses


def test_subclasses_come_back(tmp_path):
    pipeline = make(MyPipeline, MyModel, MyScheduler(sharpness=3.0))
    pipeline.save_pretrained(tmp_path)
    index = index_of(tmp_path)
    assert index["_class_name"] == "MyPipeline"
    assert index["scheduler"] == [__name__, "MyScheduler"] and index["text_model"] == [__name__, "MyModel"]
    for base in (D3PMPipeline, D3PMTextPipeline, MyPipeline):
        loaded = base.from_pretrained(tmp_path)
        assert type(loaded) is MyPipeline and type(loaded.text_model) is MyModel
        assert type(loaded.scheduler) is MyScheduler and loaded.scheduler.config.sharpness == 3.0
        assert torch.equal(sample(loaded), sample(pipeline))
    loaded.save_pretrained(tmp_path / "again")
    assert index_of(tmp_path / "again") == {**index, "_name_or_path": str(tmp_path)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_networks_that_are_not_ours(tmp_path, dtype):
    config = BertConfig(
        vocab_size=28, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    text = D3PMTextPipeline(MyMaskedLM(config), D3PMScheduler(28, 50), character_tokenizer(), sequence_length=16)
    unet = MyUNet.from_config(create_unet("tiny", 17, 8, 1).config)
    image = D3PMImagePipeline(unet, D3PMScheduler(17, transition="uniform", beta_schedule="cosine"))
    for pipeline, name, cls in ((text, "text_model", MyMaskedLM), (image, "unet", MyUNet)):
        pipeline.save_pretrained(tmp_path / name)
        loaded = getattr(D3PMPipeline.from_pretrained(tmp_path / name, dtype=dtype), name)
        assert type(loaded) is cls and loaded.dtype == dtype
        for key, value in getattr(pipeline, name).state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value.to(loaded.state_dict()[key].dtype)), key


def test_a_subclass_loads_the_checkpoint_of_its_base(tmp_path):
    make().save_pretrained(tmp_path)
    loaded = MyPipeline.from_pretrained(tmp_path)
    assert type(loaded) is MyPipeline and type(loaded.scheduler) is D3PMScheduler
    with pytest.raises(
        ValueError, match="checkpoint of D3PMTextPipeline, not of D3PMImagePipeline: load it with D3PMT"
    ):
        D3PMImagePipeline.from_pretrained(tmp_path)


def test_a_class_inside_a_function(tmp_path):
    class Local(D3PMScheduler):
        pass

    class LocalPipeline(MyPipeline):
        pass

    make(LocalPipeline, scheduler=Local(28, 20)).save_pretrained(tmp_path)
    loaded = D3PMPipeline.from_pretrained(tmp_path)
    assert type(loaded) is LocalPipeline and type(loaded.scheduler) is Local


def test_schedulers_by_themselves(tmp_path):
    base, mine = D3PMScheduler(28, 30), MyScheduler(sharpness=2.0)
    swapped = MyScheduler.from_config(base.config, sharpness=5.0)
    assert type(swapped) is MyScheduler and len(swapped) == 30 and swapped.config.sharpness == 5.0
    assert type(D3PMScheduler.from_config(mine.config)) is D3PMScheduler  # as diffusers swaps schedulers
    mine.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "scheduler_config.json").read_text())["_class_name"] == "MyScheduler"
    for cls in (D3PMScheduler, MyScheduler):
        loaded = cls.from_pretrained(tmp_path)
        assert type(loaded) is MyScheduler and loaded.config.sharpness == 2.0 and len(loaded) == 50
    base.save_pretrained(tmp_path / "base")
    assert type(MyScheduler.from_pretrained(tmp_path / "base")) is MyScheduler


UNKNOWN = "elsewhere.Unknown"


def test_classes_that_are_not_imported(tmp_path):
    make().save_pretrained(tmp_path)
    path = tmp_path / "model_index.json"
    index = index_of(tmp_path)
    path.write_text(json.dumps({**index, "scheduler": UNKNOWN.split(".")}))
    with pytest.raises(
        ValueError,
        match="model_index.json names elsewhere.Unknown as the scheduler, which is not a class of d3pm_hf, diffusers or "
        "transformers and not a component that this program has imported: import it first, or pass `trust_remote_code=True`",
    ):
        D3PMPipeline.from_pretrained(tmp_path)
    path.write_text(json.dumps({**index, "_class_name": "Unknown"}))
    with pytest.raises(
        ValueError, match="of the pipeline 'Unknown', which this program has not imported: import that"
    ):
        D3PMPipeline.from_pretrained(tmp_path)
    path.write_text(json.dumps(index))
    path = tmp_path / "scheduler/scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "_class_name": "Unknown"}))
    with pytest.raises(
        ValueError, match="configuration of a Unknown, not of a D3PMScheduler.*import the class of its"
    ):
        D3PMPipeline.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "value",
    [
        ["d3pm_hf.pipelines.trust", "subprocess.Popen"],
        ["subprocess", "Popen"],
        ["json", "tool"],
        ["d3pm_hf", "D3PMPipeline"],
        ["diffusers", "utils"],
        ["transformers", "pipeline"],
        ["diffusers", "NoSuchScheduler"],
    ],
    ids=".".join,
)
def test_what_is_imported_but_no_component(tmp_path, value):
    make().save_pretrained(tmp_path)
    (tmp_path / "model_index.json").write_text(json.dumps({**index_of(tmp_path), "scheduler": value}))
    with pytest.raises(ValueError, match=f"names {value[0]}.{value[1]} as the scheduler, which is not a class of"):
        D3PMPipeline.from_pretrained(tmp_path)


# Modules of the classes


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_the_source_of_a_class(cls):
    assert inspect.getsource(cls).startswith(f"class {cls.__name__}(")
    assert getattr(sys.modules[cls.__module__], cls.__name__) is cls is getattr(d3pm_hf, cls.__name__)


def test_pickles(tmp_path):
    scheduler = D3PMScheduler(5, 10, transition="uniform", unigram_probs=torch.arange(1.0, 6))
    file = io.BytesIO()
    torch.save(scheduler, file)
    file.seek(0)
    for copy in (pickle.loads(pickle.dumps(scheduler)), torch.load(file, weights_only=False)):
        assert torch.equal(copy.transition.matrix(0, 4), scheduler.transition.matrix(0, 4))


def test_the_index_names_the_package(tmp_path):
    pipeline = make()
    pipeline.scheduler = D3PMScheduler(28, 20)  # an assignment names the class again
    pipeline.save_pretrained(tmp_path)
    index = index_of(tmp_path)
    assert index["scheduler"] == ["d3pm_hf", "D3PMScheduler"] and index["text_model"] == ["d3pm_hf", "D3PMTextModel"]
    assert pipeline.config.scheduler == ("d3pm_hf", "D3PMScheduler")


def test_every_transition_is_described_on_the_card(tmp_path, monkeypatch):
    families = transition_families()
    assert all(family.description for family in families.values() if is_built_in(family))
    make().save_pretrained(tmp_path / "described")
    text = (tmp_path / "described" / "README.md").read_text()
    assert "Its process is `absorbing`: tokens turn into a mask and stay one. There are 28 states" in text
    monkeypatch.setattr(families["absorbing"], "description", "")  # as with a family that has none
    make().save_pretrained(tmp_path)
    assert "Its process is `absorbing`. There are 28 states" in (tmp_path / "README.md").read_text()


# Code beside the weights


def test_only_our_own_code_is_exported(tmp_path):
    pipeline = make(scheduler=MyScheduler())
    with pytest.raises(
        ValueError,
        match="the scheduler is test_subclasses.MyScheduler, which cannot be exported because it is not part",
    ):
        export(pipeline, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_an_export_that_diffusers_loads_and_saves_again(tmp_path):
    pipeline = make(scheduler=D3PMScheduler(28, 50, unigram_probs=(torch.arange(28) < 27).double()))
    export(pipeline, tmp_path / "exported")
    assert index_of(tmp_path / "exported")["_class_name"] == ["pipeline", "D3PMTextPipeline"]
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        DiffusionPipeline.from_pretrained(tmp_path / "exported")
    loaded = DiffusionPipeline.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    assert type(loaded) is D3PMTextPipeline and torch.equal(sample(loaded), sample(pipeline))
    loaded.save_pretrained(tmp_path / "again")
    assert index_of(tmp_path / "again")["_class_name"] == "D3PMTextPipeline"
    assert torch.equal(sample(D3PMPipeline.from_pretrained(tmp_path / "again")), sample(pipeline))


def test_an_export_as_a_custom_pipeline(tmp_path):
    make().save_pretrained(tmp_path / "plain")
    export(make(), tmp_path / "exported")
    options = {"custom_pipeline": str(tmp_path / "exported"), "trust_remote_code": True}
    loaded = DiffusionPipeline.from_pretrained(tmp_path / "plain", **options)
    assert type(loaded) is D3PMTextPipeline and torch.equal(sample(loaded), sample(make()))


def test_an_export_without_the_package(tmp_path, monkeypatch):
    export(make(), tmp_path)
    code = (tmp_path / "pipeline.py").read_text()
    assert len(code.splitlines()) < 10
    monkeypatch.setitem(sys.modules, "d3pm_hf", None)
    with pytest.raises(
        ImportError, match="^this checkpoint needs the package d3pm_hf: install it with `pip install d3pm-hf`$"
    ):
        exec(code, {})


def test_an_export_with_a_file_for_each_class(tmp_path):
    """Exports named modules beside the weights once, which are not run."""
    pipeline = make()
    pipeline.save_pretrained(tmp_path)
    names = {
        "_class_name": ["pipeline_d3pm_text", "D3PMTextPipeline"],
        "scheduler": ["scheduling_d3pm", "D3PMScheduler"],
        "text_model": ["modeling_d3pm_text", "D3PMTextModel"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps({**index_of(tmp_path), **names}))
    for path in ("pipeline_d3pm_text.py", "scheduler/scheduling_d3pm.py", "text_model/modeling_d3pm_text.py"):
        (tmp_path / path).write_text("raise SystemExit('this must not run')")
    loaded = D3PMPipeline.from_pretrained(tmp_path)
    assert type(loaded) is D3PMTextPipeline and type(loaded.scheduler) is D3PMScheduler
    assert torch.equal(sample(loaded), sample(pipeline))


def test_the_card_says_how_to_load(tmp_path):
    make().save_pretrained(tmp_path / "plain")
    export(make(), tmp_path / "exported")
    plain, exported = ((tmp_path / name / "README.md").read_text() for name in ("plain", "exported"))
    assert LOADING_NOTE in plain and LOADING_NOTE not in exported
    assert EXPORT_NOTE in exported and EXPORT_NOTE not in plain
    with pytest.raises(AttributeError, match="D3PMTextPipeline"):  # what the card says
        DiffusionPipeline.from_pretrained(tmp_path / "plain")
