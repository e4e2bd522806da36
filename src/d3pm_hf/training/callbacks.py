# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Callbacks of transformers in a run."""

from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..likelihood.bound import Bound
from ..utils.checks import check_type, describe
from .training_args import D3PMTrainingArguments


# The metric by which an evaluation is the best so far; less is better.
METRIC = "eval_bits_per_dim"


class CallbackArguments(TrainingArguments):
    """The settings of a run as callbacks of transformers read them. They set up no device, as the run has one."""

    def __post_init__(self):
        pass

    @property
    def device(self) -> torch.device:
        """Device of the run."""
        return self._device


class RunCallbacks:
    """Calls the callbacks of a run, and keeps what they ask for. It is part of each checkpoint.

    Their events are those of steps: `on_train_begin`, `on_step_begin`, `on_step_end`, `on_log`, `on_evaluate`, `on_save` and
    `on_train_end`. A run has no epochs.
    """

    def __init__(self, callbacks: list, arguments: D3PMTrainingArguments, accelerator: Accelerator, **objects: Any):
        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self.accelerator, self.objects, self.control = accelerator, objects, TrainerControl()
        self.args: Any = CallbackArguments(
            output_dir=arguments.output_dir,
            max_steps=arguments.max_train_steps,
            per_device_train_batch_size=arguments.train_batch_size,
            per_device_eval_batch_size=arguments.eval_batch_size,
            gradient_accumulation_steps=arguments.gradient_accumulation_steps,
            learning_rate=arguments.learning_rate,
            logging_steps=arguments.logging_steps,
            eval_strategy=IntervalStrategy.STEPS if arguments.validation_steps else IntervalStrategy.NO,
            eval_steps=arguments.validation_steps,
            save_strategy=SaveStrategy.STEPS,
            save_steps=arguments.checkpointing_steps,
            seed=arguments.seed,
            metric_for_best_model=METRIC,
            greater_is_better=False,
        )
        self.args._device = accelerator.device
        self.state = TrainerState(
            max_steps=arguments.max_train_steps,
            logging_steps=arguments.logging_steps,
            eval_steps=arguments.validation_steps,
            save_steps=arguments.checkpointing_steps,
            train_batch_size=arguments.train_batch_size,
            is_local_process_zero=accelerator.is_local_main_process,
            is_world_process_zero=accelerator.is_main_process,
        )

    def call(self, event: str, step: int, **values: Any) -> None:
        """Calls one event of all callbacks."""
        self.state.global_step = step
        for callback in self.callbacks:
            result = getattr(callback, event)(self.args, self.state, self.control, **self.objects, **values)
            self.control = self.control if result is None else result

    @property
    def is_stopped(self) -> bool:
        """Whether a callback has asked for the end of the run."""
        return self.control.should_training_stop

    def begin(self, step: int) -> None:
        """Calls `on_train_begin`. What a callback asserts is said in a sentence."""
        try:
            self.call("on_train_begin", step)
        except AssertionError as error:
            raise ValueError(
                f"a callback refuses this run ({error}): set validation_steps, or leave the callback out"
            ) from error

    def begin_step(self, step: int) -> None:
        """Forgets what was asked for at the step before."""
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        self.call("on_step_begin", step)

    def end_step(self, step: int) -> None:
        """Calls `on_step_end`. What the callbacks of any process ask for is then asked for by all."""
        self.call("on_step_end", step)
        self._agree()

    def log(self, values: dict[str, float], step: int) -> None:
        """Calls `on_log` with a line of the log."""
        self.state.log_history.append({**values, "step": step})
        self.call("on_log", step, logs=values)

    def evaluate(self, bound: Bound | None, step: int) -> None:
        """Calls `on_evaluate` with the bound. It is then the best so far if it is the least."""
        metrics = {}
        if bound is not None:
            metrics = {METRIC: bound.bits_per_dim, "eval_standard_error": bound.bits_per_dim_standard_error}
            self.state.log_history.append({**metrics, "step": step})
        self.call("on_evaluate", step, metrics=metrics)
        value, best = metrics.get(METRIC), self.state.best_metric
        if value is not None and (best is None or value < best):
            self.state.best_metric, self.state.best_global_step = value, step
        self._agree()

    def _agree(self) -> None:
        """Gives all processes what the callbacks of any of them ask for."""
        names = ("should_training_stop", "should_log", "should_evaluate", "should_save")
        if self.callbacks and self.accelerator.num_processes > 1:
            flags = torch.tensor([[getattr(self.control, name) for name in names]], device=self.accelerator.device)
            for name, flag in zip(names, self.accelerator.gather(flags.long()).amax(0).tolist()):
                setattr(self.control, name, bool(flag))

    def state_dict(self) -> dict:
        """The best evaluation, whether the run was stopped, and the attributes that callbacks export."""
        exported = [one.state()["attributes"] for one in self.callbacks if isinstance(one, ExportableState)]
        best = {"metric": self.state.best_metric, "step": self.state.best_global_step}
        return {"best": best, "is_stopped": self.control.should_training_stop, "callbacks": exported}

    def load_state_dict(self, state: dict) -> None:
        """Continues from a state."""
        self.state.best_metric, self.state.best_global_step = state["best"]["metric"], state["best"]["step"]
        self.control.should_training_stop = state["is_stopped"]
        exporting = [one for one in self.callbacks if isinstance(one, ExportableState)]
        for callback, attributes in zip(exporting, state["callbacks"]):
            for name, value in attributes.items():
                setattr(callback, name, value)


def check_callbacks(callbacks: Any) -> None:
    """Checks that `callbacks` are callbacks of transformers, or their classes."""
    check_type("callbacks", callbacks, (list, tuple), "a list of `TrainerCallback` of transformers")
    for callback in callbacks:
        is_class = isinstance(callback, type) and issubclass(callback, TrainerCallback)
        if not is_class and not isinstance(callback, TrainerCallback):
            raise ValueError(f"callbacks holds {describe(callback)}: it must hold `TrainerCallback` of transformers")
