# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`D3PMTrainer`: the steps of `train` in the `Trainer` of transformers."""

import json
import math
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from datasets import Dataset
from hub_server import LoopbackHub
from huggingface_hub import HfApi
from peft import LoraConfig, get_peft_model
from safetensors.torch import load
from sharded_run import Pictures
from test_sharding import start
from training_run import Sentences, make_pipeline, texts
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments
from transformers.hyperparameter_search import ALL_HYPERPARAMETER_SEARCH_BACKENDS, HyperParamSearchBackendBase
from transformers.trainer_utils import BestRun, HPSearchBackend

from d3pm_hf import D3PMImagePipeline, D3PMPipeline, D3PMScheduler, create_unet, evaluate_bound
from d3pm_hf.data import DataCollatorForD3PM
from d3pm_hf.data.batches import evaluation_batches
from d3pm_hf.training import D3PMTrainer, D3PMTrainingArguments, train
from d3pm_hf.training.step_batches import IndexedExamples
from d3pm_hf.training.trainer import check_not_sharded


pytestmark = pytest.mark.usefixtures("fresh_accelerator")


def arguments(folder, **settings):
    common = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "learning_rate": 2e-3, "use_cpu": True}
    return TrainingArguments(str(folder), per_device_train_batch_size=4, **{**common, "max_steps": 6, **settings})


def create(folder, pipeline=None, train_dataset=None, settings=None, **options):
    pipeline = pipeline or make_pipeline()
    options = {"eval_dataset": texts(8, seed=1), "num_eval_timesteps": 4, **options}
    return D3PMTrainer(pipeline, arguments(folder, **(settings or {})), train_dataset or texts(), **options)


def weights(pipeline):
    return pipeline.text_model.state_dict()


@pytest.mark.parametrize("kind", ["texts", "tensors", "causal"])
def test_fifty_steps_are_those_of_train(tmp_path, kind):
    """Several epochs, two batches for each step, a loss mask, a schedule of the learning rate: the same weights to 1e-5."""
    scheduler = {"transition": "autoregressive", "num_train_timesteps": 16} if kind == "causal" else {}

    def pipeline():
        made = make_pipeline(**scheduler)
        if kind == "causal":
            from d3pm_hf import create_text_model

            torch.manual_seed(0)
            made.text_model = create_text_model("tiny", 28, is_decoder=True, timestep_conditioning=False)
        return made

    data = texts() if kind == "texts" else Sentences(60)
    settings = {
        "max_steps": 50,
        "gradient_accumulation_steps": 2,
        "warmup_steps": 5,
        "lr_scheduler_type": "cosine",
        "seed": 3,
    }
    options = {} if kind == "causal" else {"loss": "hybrid", "hybrid_coeff": 0.1}
    trainer = create(tmp_path / "trainer", pipeline(), data, settings, eval_dataset=None, **options)
    trainer.train()
    own = D3PMTrainingArguments(
        str(tmp_path / "train"),
        max_train_steps=50,
        train_batch_size=4,
        gradient_accumulation_steps=2,
        lr_warmup_steps=5,
        lr_scheduler="cosine",
        learning_rate=2e-3,
        seed=3,
        use_ema=False,
        validation_steps=0,
        num_samples=0,
        **options,
    )
    trained, start = train(own, pipeline(), data), weights(pipeline())
    for name, value in weights(trained).items():
        torch.testing.assert_close(weights(trainer.pipeline)[name], value, atol=1e-5, rtol=0)
    assert any((value - start[name]).abs().max() > 1e-2 for name, value in weights(trained).items())


@pytest.mark.slow
def test_two_processes(tmp_path):
    """They share the batches of a step and the examples of an evaluation, as those of `train` do."""
    own = {"max_train_steps": 4, "train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    own |= {
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        "use_ema": False,
        "num_samples": 0,
        "validation_steps": 0,
    }
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
    }
    settings |= {"lr_scheduler_type": "constant", "seed": 0}
    start(tmp_path, {"train": {**own, "evaluate": False}, "trainer": {"trainer": settings}})
    expected, found = (D3PMPipeline.from_pretrained(tmp_path / name) for name in ("train", "trainer"))
    for name, value in weights(expected).items():
        torch.testing.assert_close(weights(found)[name], value, atol=1e-5, rtol=0)
    metrics = [json.loads((tmp_path / f"trainer/metrics-{rank}.json").read_text()) for rank in (0, 1)]
    assert metrics[0]["eval_loss"] == metrics[1]["eval_loss"] > 0


def test_evaluate_measures_the_bound(tmp_path):
    trainer = create(tmp_path)
    metrics = trainer.evaluate()
    pipeline = make_pipeline()
    batches = evaluation_batches(IndexedExamples(texts(8, seed=1)), 8, 8, torch.device("cpu"), trainer.run_collator)
    bound = evaluate_bound(pipeline.scheduler, pipeline.denoiser, batches, num_eval_timesteps=4, progress_bar=False)
    assert metrics["eval_loss"] == pytest.approx(bound.total, rel=1e-5)
    assert metrics["eval_bits_per_dim"] == pytest.approx(bound.bits_per_dim, rel=1e-5)
    assert metrics["eval_standard_error"] == pytest.approx(bound.bits_per_dim_standard_error, rel=1e-3)
    several = trainer.evaluate({"one": texts(4, seed=1), "two": texts(4, seed=2)})
    assert {"eval_one_loss", "eval_two_standard_error"} < several.keys()


def test_what_is_saved_is_a_pipeline(tmp_path):
    trainer = create(tmp_path, data_collator=DataCollatorForD3PM(make_pipeline().tokenizer))
    trainer.train()
    bits = trainer.evaluate()["eval_bits_per_dim"]
    trainer.save_model()
    loaded = D3PMPipeline.from_pretrained(tmp_path)
    assert all(torch.equal(value, weights(trainer.pipeline)[name]) for name, value in weights(loaded).items())
    card = (tmp_path / "README.md").read_text()
    assert "library_name: d3pm_hf" in card and f"{bits:.4f}" in card and "| max_steps | 6 |" in card
    trainer.create_model_card(language="en")
    assert "language: en" in (tmp_path / "README.md").read_text()


class Counts(TrainerCallback):
    def __init__(self, stop_at=None):
        self.events, self.stop_at = [], stop_at

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(state.global_step)
        control.should_training_stop = control.should_training_stop or state.global_step == self.stop_at

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.events.append(metrics["eval_bits_per_dim"])


def test_callbacks_and_early_stopping(tmp_path):
    """A learning rate that spoils the network ends the run, which goes back to its best checkpoint."""
    counts = Counts()
    settings = {"max_steps": 40, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings |= {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_bits_per_dim",
        "greater_is_better": False,
    }
    trainer = create(
        tmp_path,
        settings={**settings, "learning_rate": 1.0, "lr_scheduler_type": "constant"},
        callbacks=[counts, EarlyStoppingCallback(2)],
    )
    trainer.train()
    assert trainer.state.global_step < 40 and trainer.state.global_step in counts.events
    best = D3PMPipeline.from_pretrained(trainer.state.best_model_checkpoint)
    assert all(torch.equal(value, weights(trainer.pipeline)[name]) for name, value in weights(best).items())


def test_resume(tmp_path):
    """A run that is continued in the middle of its second epoch has the weights of one that was not stopped."""
    settings = {"max_steps": 20, "save_strategy": "steps", "save_steps": 18, "lr_scheduler_type": "constant"}
    whole = create(tmp_path / "whole", settings=settings)
    whole.train()
    stopped = create(tmp_path / "stopped", settings=settings, callbacks=[Counts(stop_at=18)])
    stopped.train()
    resumed = create(tmp_path / "stopped", settings=settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 20
    for name, value in weights(whole.pipeline).items():
        torch.testing.assert_close(weights(resumed.pipeline)[name], value, atol=1e-6, rtol=0)


def test_lora(tmp_path):
    make_pipeline().save_pretrained(tmp_path / "base")

    def pipeline():
        made = D3PMPipeline.from_pretrained(tmp_path / "base")
        torch.manual_seed(1)
        made.text_model.add_adapter(LoraConfig(r=2, target_modules="all-linear"))
        return made

    settings = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
    trainer = create(tmp_path / "run", pipeline(), settings=settings)
    trainer.train()
    trainer.save_model()
    assert json.loads((tmp_path / "run/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "base"
    )
    x_t, loaded = Sentences(3).rows, D3PMPipeline.from_pretrained(tmp_path / "run")
    expected = trainer.pipeline.denoiser(x_t, 5)
    torch.testing.assert_close(loaded.denoiser.eval()(x_t, 5), expected, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="holds a whole network .*: save the LoRA to another folder"):
        create(tmp_path / "base", pipeline())
    pushed = pipeline()
    pushed.register_to_config(_name_or_path="org/base")
    with pytest.raises(ValueError, match="'org/base' is the base of the LoRA"):
        create(tmp_path / "new", pushed, settings={"hub_model_id": "org/base"})
    resumed = create(tmp_path / "run", pipeline(), settings=settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-3"))
    torch.testing.assert_close(resumed.pipeline.denoiser(x_t, 5), expected, atol=1e-6, rtol=0)


def test_images(tmp_path):
    """A U-Net with a LoRA around it, and a tracker of transformers."""
    scheduler = D3PMScheduler(5, 100, transition="uniform", beta_schedule="cosine")
    D3PMImagePipeline(create_unet("tiny", 5, 8, 1), scheduler).save_pretrained(tmp_path / "base")
    pipeline = D3PMPipeline.from_pretrained(tmp_path / "base")
    pipeline.unet = get_peft_model(pipeline.unet, LoraConfig(r=2, target_modules="all-linear"))
    settings = {"report_to": "tensorboard", "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3}
    trainer = create(tmp_path / "run", pipeline, Pictures(), settings, eval_dataset=Pictures())
    trainer.train()
    trainer.save_model()
    assert [*(tmp_path / "run/runs").rglob("events.*")]
    x_t, loaded = Pictures()[0][None], D3PMPipeline.from_pretrained(tmp_path / "run")
    with torch.no_grad():
        expected = trainer.pipeline.denoiser(x_t, 5)
        torch.testing.assert_close(loaded.denoiser.eval()(x_t, 5), expected, atol=1e-6, rtol=0)


def test_a_new_pipeline_for_each_run(tmp_path):
    """For a search of hyperparameters, whose trials set the arguments."""
    made = []

    def make():
        made.append(make_pipeline())
        return made[-1]

    trainer, start = create(tmp_path, make), weights(make_pipeline())
    for rate in (1e-6, 1e-2):
        trainer.args.learning_rate = rate
        trainer.train()
        moved = max((value - start[name]).abs().max().item() for name, value in weights(made[-1]).items())
        assert trainer.pipeline is made[-1] and rate < moved < 10 * rate
    assert len(made) == 3


class Trial:
    def __init__(self, number):
        self.number, self.params = number, {}


class Search(HyperParamSearchBackendBase):
    """A search that tries given learning rates, and asks a trainer for the same as Optuna does."""

    name = "optuna"
    rates = (1e-6, 1e-2)

    @staticmethod
    def is_available():
        return True

    def run(self, trainer, n_trials, direction):
        found = []
        for number in range(n_trials):
            trainer.objective = None
            trainer.train(trial=Trial(number))
            if trainer.objective is None:  # nothing was evaluated
                trainer.objective = trainer.compute_objective(trainer.evaluate())
            found.append(trainer.objective)
        assert direction == "minimize"
        best = found.index(min(found))
        return BestRun(str(best), found[best], {"learning_rate": self.rates[best]})


@pytest.mark.parametrize("eval_strategy", ["no", "steps"])
def test_a_search_of_hyperparameters(tmp_path, monkeypatch, eval_strategy):
    """The objective is the bound in bits, and not the sum of all metrics, which is the default of `Trainer`."""
    monkeypatch.setitem(ALL_HYPERPARAMETER_SEARCH_BACKENDS, HPSearchBackend.OPTUNA, Search)
    optuna = SimpleNamespace(trial=SimpleNamespace(BaseTrial=Trial), __spec__=ModuleSpec("optuna", None))
    monkeypatch.setitem(sys.modules, "optuna", optuna)
    bits = []

    class Keep(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            bits.append(metrics.get("eval_bits_per_dim"))

    settings = {"max_steps": 4, "eval_strategy": eval_strategy, "eval_steps": 4}
    trainer = create(tmp_path, lambda: make_pipeline(), settings=settings, callbacks=[Keep()])
    options = {"hp_space": lambda trial: {"learning_rate": Search.rates[trial.number]}, "backend": "optuna"}
    best = trainer.hyperparameter_search(n_trials=2, **options)
    assert len(bits) == 2 and best.objective == min(bits) < max(bits)
    assert best.hyperparameters == {"learning_rate": Search.rates[bits.index(min(bits))]}
    best = trainer.hyperparameter_search(n_trials=1, compute_objective=lambda metrics: 3.0, **options)
    assert best.objective == 3.0
    trainer.eval_dataset = {"one": texts(4, seed=1), "two": texts(4, seed=2)}
    with pytest.raises(ValueError, match="eval_dataset has several parts, .*: pass `compute_objective`"):
        trainer.hyperparameter_search(n_trials=1, **options)


def test_pushes_are_pipelines(tmp_path, monkeypatch):
    """During training too, at each checkpoint. The last one has the card with the bound."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    settings = {"push_to_hub": True, "hub_model_id": "org/run", "hub_token": "hf_default", "hub_always_push": True}
    settings |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    with LoopbackHub() as hub:
        monkeypatch.setattr("transformers.utils.hub._hf_api", HfApi(endpoint=hub.url))
        trainer = create(tmp_path / "run", settings=settings)
        trainer.train()
        trainer._finish_current_push()
        found = load(hub.files("org/run")["text_model/model.safetensors"])
        assert found and all(torch.equal(weights(trainer.pipeline)[name], value) for name, value in found.items())
        trainer.evaluate()
        trainer.push_to_hub()
        commits, card = hub.repository("org/run").commits.values(), hub.files("org/run")["README.md"].decode()
    pushed = [set(files) for files in commits if "training_args.bin" in files]
    assert len(pushed) == 3 and all({"model_index.json", "text_model/model.safetensors"} < files for files in pushed)
    assert not any(name.startswith("checkpoint-") for files in pushed for name in files)
    assert "library_name: d3pm_hf" in card and "model-index" in card


def test_a_card_has_the_bound_of_the_weights_that_are_saved(tmp_path):
    trainer = create(tmp_path)
    bits = f"{trainer.evaluate()['eval_bits_per_dim']:.4f}"
    trainer.save_model()
    assert bits in (tmp_path / "README.md").read_text()
    trainer.train()
    trainer.save_model()
    assert "model-index" not in (tmp_path / "README.md").read_text()
    trainer.evaluate({"one": texts(4, seed=1), "two": texts(4, seed=2)})
    trainer.save_model()
    assert "model-index" not in (tmp_path / "README.md").read_text()


def test_ways_to_start_it_that_would_be_wrong(tmp_path, monkeypatch):
    """Several GPUs in one process, whose batches would be split without their indices, and weights that are sharded."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="this process has 2 GPUs, .* start one process per GPU"):
        create(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="accelerate launch has chosen FSDP: shard the weights with"):
        create(tmp_path)
    monkeypatch.undo()
    for stage in (2, 3):
        settings = arguments(tmp_path)
        settings.deepspeed_plugin = SimpleNamespace(
            hf_ds_config=HfDeepSpeedConfig({"zero_optimization": {"stage": stage}})
        )
        if stage == 3:
            with pytest.raises(ValueError, match="DeepSpeed shards the weights .*: use stage 1 or 2, or"):
                D3PMTrainer(make_pipeline(), settings, texts())
        else:
            check_not_sharded(settings)


def test_what_is_refused_is_said_in_a_sentence(tmp_path):
    rows = Dataset.from_list([{"words": [1, 2, 3]}] * 8)
    for options, sentence in (
        ({"train_dataset": rows}, "x_0|input_ids"),
        ({"eval_dataset": rows}, "x_0|input_ids"),
        (
            {"data_collator": lambda rows: {"x_0": rows[0]["x"]}},
            "data_collator reads the column 'x', and .* columns 'input_ids'",
        ),
        ({"train_dataset": texts().to_iterable_dataset()}, "is a stream, which has no length: train on it with"),
        ({"loss": "mse"}, "loss is 'mse'"),
        ({"ema": True}, "got 'ema', which is no argument of `D3PMTrainer`"),
        ({"settings": {"label_smoothing_factor": 0.1}}, "label_smoothing_factor is set: leave it out"),
        ({"settings": {"gradient_checkpointing": True}}, "call `gradient_checkpointing_enable"),
        ({"num_eval_timesteps": 0}, "num_eval_timesteps"),
        ({"card": "mine"}, "card"),
        ({"pipeline": make_pipeline().text_model.state_dict()}, "pipeline"),
        ({"train_dataset": [{"input_ids": [1, 99]}] * 8}, "token 99 at position"),
    ):
        with pytest.raises(ValueError, match=sentence):
            create(tmp_path / "run", **options)
    with pytest.raises(ValueError, match="no train_dataset"):
        D3PMTrainer(make_pipeline(), arguments(tmp_path)).train()
    with pytest.raises(ValueError, match="no eval_dataset"):
        create(tmp_path, eval_dataset=None).evaluate()
    with pytest.raises(ValueError, match="sample with `trainer.pipeline"):
        create(tmp_path).predict(texts())
    with pytest.raises(ValueError, match="60 examples, and a step takes 100"):
        create(tmp_path, settings={"gradient_accumulation_steps": 25}).train()
    assert not math.isnan(create(tmp_path).evaluate()["eval_loss"])
