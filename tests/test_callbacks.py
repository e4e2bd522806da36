# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What the caller of `train` brings: optimizers, schedules of the learning rate, callbacks, and options of Accelerate."""

import pytest
import torch
from accelerate.utils import AutocastKwargs
from training_run import Sentences, make_pipeline
from transformers import EarlyStoppingCallback, TrainerCallback, get_scheduler

from d3pm_hf import D3PMPipeline
from d3pm_hf.training import D3PMTrainingArguments, read_log, train


pytestmark = pytest.mark.usefixtures("fresh_accelerator")


def run(folder, pipeline=None, given=None, **settings):
    settings = {
        **{
            "max_train_steps": 6,
            "train_batch_size": 4,
            "learning_rate": 1e-2,
            "lr_warmup_steps": 0,
            "lr_scheduler": "constant",
        },
        **{
            "logging_steps": 2,
            "validation_steps": 2,
            "checkpointing_steps": 3,
            "num_samples": 0,
            "max_eval_samples": 8,
        },
        **{"num_eval_timesteps": 3, "use_ema": False},
        **settings,
    }
    pipeline = pipeline or make_pipeline()
    arguments = D3PMTrainingArguments(str(folder), **settings)
    return train(arguments, pipeline, Sentences(40), Sentences(8, seed=1), **(given or {}))


def weights(pipeline):
    return pipeline.text_model.state_dict()


def assert_same(first, second):
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(first).items())


def polynomial(optimizer):
    return get_scheduler("polynomial", optimizer, 1, 6)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_the_default_optimizer_can_be_made_outside(tmp_path):
    expected = run(tmp_path / "default")
    made = make_pipeline()
    optimizer = torch.optim.AdamW(made.text_model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    assert_same(run(tmp_path / "made", made, {"optimizer": optimizer, "lr_scheduler": schedule}), expected)

    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0, fused=True)

    assert_same(run(tmp_path / "function", given={"optimizer": adam}), expected)


def test_another_optimizer_and_schedule_are_resumed(tmp_path):
    """To the last bit. The rates in the log are those of the schedule."""
    given = {"optimizer": sgd, "lr_scheduler": polynomial, "kwargs_handlers": [AutocastKwargs(enabled=True)]}
    whole = run(tmp_path / "run", given=given)
    rates = [line["learning_rate"] for line in read_log(tmp_path / "run/log.jsonl") if "loss" in line]
    assert rates == pytest.approx([0.08, 0.04, 0.0], abs=1e-6) and any(
        (value - weights(make_pipeline())[name]).abs().max() > 1e-4 for name, value in weights(whole).items()
    )
    resumed = run(tmp_path / "run", given=given, resume_from_checkpoint=str(tmp_path / "run/checkpoint-3"))
    assert_same(resumed, whole)
    with pytest.raises(ValueError, match="optimizer is None and was 'SGD'"):
        run(tmp_path / "run", resume_from_checkpoint="latest")


class Record(TrainerCallback):
    """Writes down its events, stops the run after a step, and asks for a checkpoint after another one."""

    def __init__(self, stop_at=None, save_at=None):
        self.events, self.stop_at, self.save_at = [], stop_at, save_at

    def on_step_end(self, args, state, control, model, optimizer, lr_scheduler, **kwargs):
        control.should_training_stop = control.should_training_stop or state.global_step == self.stop_at
        control.should_save = control.should_save or state.global_step == self.save_at
        self.events.append(("step", state.global_step, state.max_steps))


for event in ("train_begin", "train_end", "log", "evaluate", "save"):

    def remember(self, args, state, control, event=event, **kwargs):
        self.events.append((event, state.global_step))

    setattr(Record, f"on_{event}", remember)


def test_events(tmp_path):
    record = Record(save_at=1)
    run(tmp_path, given={"callbacks": [record]}, max_train_steps=3)
    assert record.events == [
        ("train_begin", 0),
        *[("step", 1, 3), ("save", 1)],
        *[("step", 2, 3), ("log", 2), ("evaluate", 2)],
        *[("step", 3, 3), ("log", 3), ("save", 3), ("evaluate", 3), ("save", 3)],
        ("train_end", 3),
    ]
    assert (tmp_path / "checkpoint-1").is_dir()
    assert_same(run(tmp_path / "without", max_train_steps=3), D3PMPipeline.from_pretrained(tmp_path))


def test_a_callback_stops_the_run(tmp_path, capsys):
    """It is evaluated and saved as at its last step, and stays stopped when it is resumed."""
    stopped = run(tmp_path, given={"callbacks": [Record(stop_at=3)]}, max_train_steps=20)
    assert "Trained for 3 steps." in capsys.readouterr().out and (tmp_path / "checkpoint-3").is_dir()
    lines = read_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines if "eval_bits_per_dim" in line] == [2, 3]
    assert "| max_train_steps | 3 |" in (tmp_path / "README.md").read_text()
    record = Record(stop_at=3)
    resumed = run(tmp_path, given={"callbacks": [record]}, max_train_steps=20, resume_from_checkpoint="latest")
    assert_same(resumed, stopped)
    assert not any(event[0] == "step" for event in record.events)


def test_a_run_that_began_without_callbacks_is_resumed_with_some(tmp_path):
    """They start anew, and it is resumed without them as well."""
    whole = run(tmp_path / "run")
    resume = {"resume_from_checkpoint": str(tmp_path / "run/checkpoint-3")}
    for given in ({"callbacks": [EarlyStoppingCallback(30)]}, {}):
        assert_same(run(tmp_path / "run", given=given, **resume), whole)


def test_early_stopping(tmp_path):
    """A learning rate that spoils the network; the patience of a resumed run goes on where it was."""
    settings = {"learning_rate": 3.0, "max_train_steps": 40, "checkpointing_steps": 2, "max_grad_norm": 1e6}
    whole, again = EarlyStoppingCallback(3), EarlyStoppingCallback(3)
    trained = run(tmp_path / "run", given={"callbacks": [whole]}, **settings)
    steps = [line["step"] for line in read_log(tmp_path / "run/log.jsonl") if "eval_bits_per_dim" in line]
    assert steps[-1] < 40 and whole.early_stopping_patience_counter == 3
    resume = {"resume_from_checkpoint": str(tmp_path / f"run/checkpoint-{steps[-2]}")}
    resumed = run(tmp_path / "run", given={"callbacks": [again]}, **settings, **resume)
    assert_same(resumed, trained)
    assert again.early_stopping_patience_counter == 3
    with pytest.raises(ValueError, match="a callback refuses this run .*: set validation_steps"):
        run(tmp_path / "new", given={"callbacks": [EarlyStoppingCallback(3)]}, validation_steps=0)
    assert not (tmp_path / "new").exists()


def test_what_is_refused_is_said_in_a_sentence(tmp_path):
    other = make_pipeline()
    foreign = torch.optim.SGD(other.text_model.parameters(), lr=0.1)
    for given, sentence in (
        ({"optimizer": foreign}, "optimizer holds weights that are not those of the network"),
        ({"optimizer": 3}, "optimizer is 3"),
        ({"optimizer": lambda parameters: 3}, r"optimizer\(parameters\) is 3"),
        ({"lr_scheduler": polynomial(foreign)}, "lr_scheduler belongs to another optimizer"),
        ({"lr_scheduler": "cosine"}, "lr_scheduler is 'cosine'"),
        (
            {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)},
            "ReduceLROnPlateau",
        ),
        ({"callbacks": [3]}, "callbacks holds 3"),
        ({"callbacks": EarlyStoppingCallback()}, "callbacks is"),
        ({"kwargs_handlers": [3]}, "kwargs_handlers"),
    ):
        with pytest.raises(ValueError, match=sentence):
            run(tmp_path / "run", given=given)
        assert not (tmp_path / "run").exists()
