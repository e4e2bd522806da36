# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Networks with adapters of PEFT, which a pipeline would lose: refused until they are merged."""

import hashlib
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from training_run import Sentences, make_pipeline

from d3pm_hf import D3PMImagePipeline, D3PMPipeline, D3PMScheduler, create_unet, export
from d3pm_hf.training import D3PMTrainingArguments, train


def wrapped(pipeline):
    """The network of the pipeline is a `PeftModel`."""
    pipeline.text_model = get_peft_model(pipeline.text_model, LoraConfig(r=2, target_modules="all-linear"))
    return pipeline


def injected(pipeline):
    """The network keeps its class, and has layers of PEFT."""
    pipeline.text_model.add_adapter(LoraConfig(r=2, target_modules=["query", "value"]))
    return pipeline


def compiled(pipeline):
    pipeline.text_model = torch.compile(injected(pipeline).text_model)
    return pipeline


def with_image_network(_):
    """A network of diffusers, with layers of PEFT."""
    unet = create_unet("tiny", 5, 8, 1)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["conv1"]), unet)
    return D3PMImagePipeline(unet, D3PMScheduler(5, 10, transition="uniform", beta_schedule="cosine"))


def hashes(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


WAYS = {
    "save_pretrained": lambda pipeline, folder: pipeline.save_pretrained(folder),
    "push_to_hub": lambda pipeline, folder: pipeline.push_to_hub("me/adapters"),
    "export": lambda pipeline, folder: export(pipeline, folder, push_to_hub=True, repo_id="me/adapters"),
    "train": lambda pipeline, folder: train(
        D3PMTrainingArguments(
            output_dir=str(folder), max_train_steps=1, train_batch_size=4, overwrite_output_dir=True
        ),
        pipeline,
        Sentences(16),
    ),
}


@pytest.mark.parametrize("add", [wrapped, injected, compiled, with_image_network])
@pytest.mark.parametrize("way", WAYS)
def test_adapters_are_refused_before_anything_is_written(tmp_path, monkeypatch, add, way):
    """No repository is created either."""
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *args, **kwargs: pytest.fail("a request"))
    good, new = tmp_path / "good", tmp_path / "new/folder"
    make_pipeline().save_pretrained(good)
    before, pipeline = hashes(good), add(make_pipeline())
    for folder in (good, new):
        with pytest.raises(ValueError, match=f"{pipeline.network_name} has adapters of PEFT.*`merge_and_unload"):
            WAYS[way](pipeline, folder)
    assert hashes(good) == before and [path.name for path in tmp_path.iterdir()] == ["good"]


def test_merged_adapters_are_saved_after_a_refused_save(tmp_path):
    pipeline = wrapped(make_pipeline())
    with torch.no_grad():
        for name, parameter in pipeline.text_model.named_parameters():
            if "lora_B" in name:  # zero at first
                parameter.fill_(0.1)
    x_t, timestep = Sentences(3).rows, torch.tensor([1, 5, 9])
    expected = pipeline.denoiser.eval()(x_t, timestep)
    with pytest.raises(ValueError, match="merge_and_unload"):
        pipeline.save_pretrained(tmp_path)
    pipeline.text_model = pipeline.text_model.merge_and_unload()
    pipeline.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["text_model"] == ["d3pm_hf", "D3PMTextModel"]
    loaded = D3PMPipeline.from_pretrained(tmp_path).denoiser(x_t, timestep)
    torch.testing.assert_close(loaded, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(loaded, make_pipeline().denoiser.eval()(x_t, timestep), atol=1e-2)


def test_a_component_that_was_taken_out_for_a_while_is_saved(tmp_path):
    """diffusers keeps `[null, null]` in the index of such a component, and would leave it out of the folder."""
    pipeline = make_pipeline()
    tokenizer, pipeline.tokenizer = pipeline.tokenizer, None
    pipeline.tokenizer = tokenizer
    pipeline.save_pretrained(tmp_path)
    assert D3PMPipeline.from_pretrained(tmp_path).tokenizer.get_vocab() == tokenizer.get_vocab()
