# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A `Trainer` of transformers over the losses and the bound of this package."""

import inspect
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate.utils import parse_flag_from_env
from huggingface_hub import ModelCard
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy, speed_metrics

from ..data.batches import evaluation_batches
from ..hub.adapters import choose_adapter, has_adapters, read_adapter, remember_base
from ..hub.layout import CARD_NAME
from ..likelihood import Bound, evaluate_bound
from ..likelihood.causal import scores_in_one_pass
from ..models.denoisers import Denoiser
from ..pipelines import D3PMPipeline
from ..utils.checks import check_int, check_type, describe
from .objective import count_scored, diffusion_loss, one_pass_loss
from .results import check_can_be_kept, check_noise, create_run_card, save_trained
from .step_batches import IndexedExamples, StepBatches, check_examples, create_collator, is_stream
from .training_args import D3PMTrainingArguments


# Settings of `TrainingArguments` that are listed on the card.
CARD_SETTINGS = (
    *("max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "seed"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_grad_norm"),
)
# Settings of `TrainingArguments` that have no effect on a denoiser, or the wrong one.
REFUSED = {
    "fsdp": "shard the weights with `d3pm_hf.training.train` and FSDP2, which saves them whole",
    "gradient_checkpointing": "call `gradient_checkpointing_enable()` of the network of the pipeline instead",
    "label_smoothing_factor": "leave it out, as the loss is a bound and not a cross-entropy of labels",
    "neftune_noise_alpha": "leave it out, as the process itself adds the noise",
}


class D3PMTrainer(Trainer):
    """A `Trainer` of transformers that trains the network of a pipeline.

    Examples, timesteps and noise of a step are those of [`train`], and so is the loss: with equal settings both give the same
    weights up to rounding. Callbacks, early stopping, hyperparameter search and trackers are those of transformers. There is no average of the
    weights (EMA), and a resumed run is not promised to be the same bit for bit: [`train`] has both.

    `evaluate` measures the bound: `eval_loss` in nats per element, `eval_bits_per_dim`, and `eval_standard_error` of the latter.
    `save_model` and the checkpoints write a pipeline, or a LoRA if the network has one.

    Args:
        pipeline ([`D3PMPipeline`] or `Callable`): Pipeline whose network is trained. A function of no argument, or of the trial,
            makes a new one for each run, as `model_init` of `Trainer` does: for `hyperparameter_search`.
        args (`TrainingArguments`, *optional*): Settings of transformers.
        train_dataset (*optional*): Examples with a length, as [`train`] takes them; no stream.
        eval_dataset (*optional*): Examples whose bound is measured, or a dictionary of several by name.
        data_collator (`Callable`, *optional*): Makes a batch of a list of examples. Defaults to a
            [`~d3pm_hf.data.DataCollatorForD3PM`] with the tokenizer of the pipeline.
        loss, hybrid_coeff, auxiliary, timestep_sampling, logit_mean, logit_std, condition_dropout, label_column (*optional*): As in
            [`D3PMTrainingArguments`].
        num_eval_timesteps (`int`, defaults to 50): Number of terms of the bound that are evaluated per example.
        card (`dict`, *optional*): Further arguments of [`create_model_card`]; `dataset_name` and `split` of the evaluation data.
        callbacks, optimizers, optimizer_cls_and_kwargs (*optional*): As in `Trainer`.

    Examples:
        ```python
        from transformers import TrainingArguments
        from d3pm_hf import D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model
        from d3pm_hf.data import DataCollatorForD3PM
        from d3pm_hf.training import D3PMTrainer

        tokenizer = character_tokenizer()
        pipeline = D3PMTextPipeline(create_text_model("tiny", 28), D3PMScheduler(28, 100), tokenizer, sequence_length=16)
        texts = [{"input_ids": tokenizer(text).input_ids} for text in ["a quiet day", "the river"] * 16]
        trainer = D3PMTrainer(
            pipeline=pipeline,
            args=TrainingArguments("with-trainer", max_steps=2, report_to="none", save_strategy="no"),
            train_dataset=texts,
            eval_dataset=texts[:4],
            data_collator=DataCollatorForD3PM(tokenizer),
            num_eval_timesteps=4,
        )
        trainer.train()
        bits = trainer.evaluate()["eval_bits_per_dim"]
        trainer.save_model()  # D3PMPipeline.from_pretrained("with-trainer")
        ```
    """

    model: Denoiser
    control: Any

    def __init__(
        self,
        pipeline: D3PMPipeline | Callable,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable | None = None,
        *,
        num_eval_timesteps: int = 50,
        card: dict | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        **objective: Any,
    ):
        given = pipeline if isinstance(pipeline, D3PMPipeline) else None
        if given is None:
            check_type("pipeline", pipeline, Callable, "a `D3PMPipeline`, or a function that makes one")
        if args is not None:
            check_type("args", args, TrainingArguments, "a `TrainingArguments` of transformers")
        if card is not None:
            check_type("card", card, dict, "a dictionary")
        if callbacks is not None:
            check_type("callbacks", callbacks, list, "a list of `TrainerCallback`")
        for name, pair in (("optimizers", optimizers), ("optimizer_cls_and_kwargs", optimizer_cls_and_kwargs)):
            if pair is not None and (not isinstance(pair, tuple) or len(pair) != 2):
                raise ValueError(f"{name} is {describe(pair)}: it must be a pair, as for `Trainer` of transformers")
        args = args or TrainingArguments("tmp_trainer")
        for name, fix in REFUSED.items():
            if getattr(args, name):
                raise ValueError(f"args.{name} is set: {fix}")
        check_not_sharded(args)
        if args.n_gpu > 1:
            raise ValueError(
                f"this process has {args.n_gpu} GPUs, between which `Trainer` would split each batch: start one process per GPU with "
                "`accelerate launch`, or set CUDA_VISIBLE_DEVICES=0"
            )
        check_int("num_eval_timesteps", num_eval_timesteps, 1)
        self.num_eval_timesteps, self.card = num_eval_timesteps, card or {}
        self.bound: Bound | None = None  # of the latest evaluation, after `bound_step` steps
        self.bound_step = 0
        self.loss_settings = create_objective(args, objective)  # `objective` is that of a search of hyperparameters
        self._make, self._given_collator = pipeline, data_collator
        if given is not None:
            self._set_pipeline(given)
        super().__init__(
            model=None if given is None else given.denoiser,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            model_init=self._create_denoiser if given is None else None,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self.model_accepts_loss_kwargs = False  # the losses of a step are averaged by `get_batch_samples`
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            for part in dataset.values() if isinstance(dataset, dict) else [dataset]:
                if part is not None:
                    self._check_dataset(name, part)

    def _set_pipeline(self, pipeline: D3PMPipeline) -> None:
        """Takes a pipeline, if what is trained can be saved."""
        check_type("pipeline", pipeline, D3PMPipeline, "a `D3PMPipeline`")
        check_can_be_kept(self.loss_settings, pipeline)
        self.pipeline, network = pipeline, pipeline.bare_network
        if has_adapters(network):
            remember_base(network)  # some biases of it may be trained
        self.run_collator = create_collator(self.loss_settings, pipeline, self._given_collator)

    def _create_denoiser(self, trial: Any = None) -> Denoiser:
        """Makes the pipeline of a run, and returns its denoiser."""
        make: Any = self._make
        self._set_pipeline(make(trial) if inspect.signature(make).parameters else make())
        return self.pipeline.denoiser

    def _check_dataset(self, name: str, dataset: Any) -> dict:
        """Checks a data set, and returns the batch of its first example."""
        if is_stream(dataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"{name} is a stream, which has no length: train on it with `d3pm_hf.training.train`, or pass a list"
            )
        _, first = check_examples(name, dataset, self.run_collator, None if name == "train_dataset" else len(dataset))
        check_noise(self.pipeline.scheduler, first)
        return first

    # The steps of `train`.

    def get_train_dataloader(self) -> DataLoader:
        """The batches of an epoch, which are those of [`train`] with the same seed."""
        if self.train_dataset is None:
            raise ValueError("there is no train_dataset: pass one to `D3PMTrainer`")
        args, scheduler = self.args, self.pipeline.scheduler
        loader: DataLoader = DataLoader(
            IndexedExamples(self.train_dataset),
            batch_sampler=EpochBatches(
                lambda: self.state.global_step,
                len(self.train_dataset),
                self._train_batch_size,
                args.gradient_accumulation_steps * args.world_size,
                len(scheduler),
                args.seed if args.data_seed is None else args.data_seed,
                range(0),
                self.loss_settings.timestep_law,
            ),
            collate_fn=self.run_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        )
        return self.accelerator.prepare(loader)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: Any) -> tuple[list, None]:
        """The batches of a step, each with the number of elements that are scored in the step."""
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return [], None
        return list(count_scored(batches, self.accelerator, len(batches), self.model.drop_condition)), None

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None) -> Any:
        """L_vb or L_lambda of a batch, as in [`train`]."""
        scheduler = self.pipeline.scheduler
        compute = one_pass_loss if scores_in_one_pass(scheduler, self.model) else diffusion_loss
        loss, vb, _ = compute(scheduler, model, inputs, self.loss_settings)
        return (loss, {"vb": vb}) if return_outputs else loss

    def train(self, *args, **kwargs) -> Any:
        """Trains as `Trainer.train` does. The pipeline then has the trained weights."""
        output = super().train(*args, **kwargs)
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)  # a network that is a `Denoiser` itself
        self.model.eval()
        return output

    # The bound.

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measures the bound on a data set: its loss in nats and in bits per element, and the standard error of the bits."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise ValueError("there is no eval_dataset: pass one to `evaluate`, or to `D3PMTrainer`")
        if isinstance(dataset, dict):
            parts = [self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}") for name, part in dataset.items()]
            self.bound = None  # a card has one data set
            return {key: value for part in parts for key, value in part.items()}
        self._check_dataset("eval_dataset", dataset)
        start, scheduler = time.time(), self.pipeline.scheduler
        batch_size = self.args.per_device_eval_batch_size * self.args.world_size
        bound = evaluate_bound(
            scheduler,
            self.model,
            evaluation_batches(
                IndexedExamples(dataset), batch_size, len(dataset), self.args.device, self.run_collator
            ),
            num_eval_timesteps=min(self.num_eval_timesteps, len(scheduler)),
            is_causal=scores_in_one_pass(scheduler, self.model),
            progress_bar=not self.args.disable_tqdm and self.is_world_process_zero(),
            accelerator=self.accelerator,
        )
        self.bound, self.bound_step = bound, self.state.global_step
        values = {"loss": bound.total, "bits_per_dim": bound.bits_per_dim}
        values["standard_error"] = bound.bits_per_dim_standard_error
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        metrics |= speed_metrics(metric_key_prefix, start, num_samples=len(dataset))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def hyperparameter_search(
        self, hp_space: Callable | None = None, compute_objective: Callable | None = None, *args, **kwargs
    ) -> Any:
        """Searches hyperparameters as `Trainer.hyperparameter_search` does. By default the objective is the bound in bits."""
        return super().hyperparameter_search(hp_space, compute_objective or bound_of, *args, **kwargs)

    def predict(self, *args, **kwargs) -> Any:
        """Raises an error: a pipeline has samples in place of predictions."""
        raise ValueError(
            "a diffusion model has no predictions of examples: sample with `trainer.pipeline(...)`, or call `evaluate`"
        )

    # Files.

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes the pipeline of a checkpoint during training. `Trainer` copies files of transformers alone."""
        if self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END:
            self._save()
        super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(
        self,
        language: Any = None,
        license: str | None = None,
        dataset: Any = None,
        finetuned_from: Any = None,
        **kwargs,
    ) -> None:
        """Writes the card of the pipeline, that of [`d3pm_hf.create_model_card`], to `output_dir`."""
        if self.is_world_process_zero():
            given = {"language": language, "license": license, "datasets": dataset, "base_model": finetuned_from}
            self._create_card(**given).save(Path(self.args.output_dir) / CARD_NAME)

    def _create_card(self, **given: Any) -> ModelCard:
        options = {**self.card, **{key: value for key, value in given.items() if value is not None}}
        bound = self.bound if self.bound_step == self.state.global_step else None  # of the weights that are saved
        training = {key: getattr(self.args, key) for key in CARD_SETTINGS}
        training |= {key: getattr(self.loss_settings, key) for key in ("loss", "hybrid_coeff", "auxiliary")}
        return create_run_card(self.pipeline, self.hub_model_id, training, bound, options)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Saves the pipeline and its card, or the LoRA and its card."""
        save_trained(self.pipeline, Path(output_dir or self.args.output_dir), self._create_card())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_weights(self.state.best_model_checkpoint)

    def _load_weights(self, folder: str) -> None:
        """Loads the weights of a folder that `_save` has written into the network that is trained."""
        self.bound = None
        network = self.pipeline.bare_network
        if has_adapters(network):
            from peft.functional import set_peft_model_state_dict

            set_peft_model_state_dict(network, read_adapter(Path(folder))[1], choose_adapter(network))
        else:
            loaded = D3PMPipeline.from_pretrained(folder)
            network.load_state_dict(getattr(loaded, loaded.network_name).state_dict())


class EpochBatches(StepBatches):
    """The batch sampler of an epoch of `Trainer`, which starts it again for each epoch.

    Args:
        get_step: Returns the number of steps that were taken.
        arguments: Those of [`StepBatches`].
    """

    def __init__(self, get_step: Callable[[], int], *arguments):
        super().__init__(*arguments)
        self.get_step = get_step

    def __len__(self) -> int:
        return self.steps_per_epoch * self.batches_per_step

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        first = self.get_step() // self.steps_per_epoch * self.steps_per_epoch
        self.steps = range(first, first + self.steps_per_epoch)
        yield from super().__iter__()


def check_not_sharded(args: TrainingArguments) -> None:
    """Checks that each process has all weights, which it saves."""
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ValueError(f"accelerate launch has chosen FSDP: {REFUSED['fsdp']}")
    plugin = args.deepspeed_plugin
    if plugin is not None and plugin.hf_ds_config.is_zero3():
        raise ValueError(f"DeepSpeed shards the weights (ZeRO stage 3): use stage 1 or 2, or {REFUSED['fsdp']}")


def bound_of(metrics: dict[str, float]) -> float:
    """The bound in bits per element of an evaluation."""
    if "eval_bits_per_dim" not in metrics:
        raise ValueError(
            "eval_dataset has several parts, and a search needs one number: pass `compute_objective`, a function of the metrics"
        )
    return metrics["eval_bits_per_dim"]


def create_objective(args: TrainingArguments, objective: dict) -> D3PMTrainingArguments:
    """The settings of the loss, by names of [`D3PMTrainingArguments`]."""
    names = (
        *("loss", "hybrid_coeff", "auxiliary", "timestep_sampling", "logit_mean", "logit_std"),
        *("condition_dropout", "label_column"),
    )
    for name in objective:
        if name not in names:
            raise ValueError(
                f"got {name!r}, which is no argument of `D3PMTrainer`: settings of the loss are {', '.join(names)}"
            )
    hub = {"push_to_hub": args.hub_model_id is not None, "hub_model_id": args.hub_model_id}
    return D3PMTrainingArguments(output_dir=args.output_dir, seed=args.seed, **hub, **objective)
