# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The training loop, through Accelerate."""

import dataclasses
import math
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration
from diffusers.training_utils import EMAModel
from huggingface_hub import upload_file
from torch.utils.data import DataLoader, default_collate
from tqdm.auto import tqdm
from transformers import get_scheduler

from ..hub.cards import bound_results, create_model_card
from ..likelihood import check_causal, evaluate_bound, evaluating, possible_steps, scores_in_one_pass
from ..losses.variational import autoregressive_loss, d3pm_loss
from ..models.denoisers import Denoiser
from ..pipelines import D3PMPipeline
from ..utils.checks import check_dataset, check_type
from ..visualization.pictures import image_grid
from .arguments import D3PMTrainingArguments
from .batches import CheckedExamples, SeededExamples, StepBatches, noise_generators
from .state import clear_run, find_checkpoint, load_checkpoint, save_checkpoint
from .tracking import JSONLinesTracker


LOG_NAME = "log.jsonl"
# Settings that may differ between the runs before and after a checkpoint: they do not decide what the weights become.
FREE = (
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "report_to", "logging_dir", "max_train_steps"),
    *("checkpointing_steps", "checkpoints_total_limit", "dataloader_num_workers", "train_batch_size"),
    *("gradient_accumulation_steps", "validation_steps", "eval_batch_size", "max_eval_samples", "num_eval_timesteps"),
    *("num_samples", "num_inference_steps", "push_to_hub", "hub_model_id", "hub_token", "hub_private_repo"),
)


class AveragedWeights(EMAModel):
    """diffusers' average of the weights, in one pass over them: its own step makes a copy of all weights first."""

    @torch.no_grad()
    def step(self, parameters: list) -> None:
        self.optimization_step += 1
        self.cur_decay_value = self.get_decay(self.optimization_step)
        torch._foreach_lerp_(self.shadow_params, parameters, 1 - self.cur_decay_value)


class Progress:
    """Where a run is: the step, and the sums of the losses since the last line of the log."""

    def __init__(self):
        self.step, self.sums, self.count = 0, torch.zeros(3, dtype=torch.float64), 0

    def add(self, *losses: torch.Tensor) -> None:
        self.sums = self.sums.to(losses[0].device) + torch.stack([loss.detach().double() for loss in losses])
        self.count += 1

    def averages(self, accelerator: Accelerator) -> list[float]:
        """Of all processes; begins anew."""
        result = accelerator.reduce(self.sums / self.count, reduction="mean").tolist()
        self.sums, self.count = torch.zeros_like(self.sums), 0
        return result

    def state_dict(self) -> dict:
        return {"step": self.step, "sums": self.sums.cpu(), "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.step, self.sums, self.count = state["step"], state["sums"], state["count"]


def train(arguments: D3PMTrainingArguments, pipeline, train_dataset, eval_dataset=None, card: dict | None = None):
    """Trains the network of a pipeline, and returns the pipeline with the weights that were saved.

    One process or many, killed and resumed or not: the same seed sees the same examples, timesteps and noise, and makes the
    same weights.

    Args:
        arguments ([`D3PMTrainingArguments`]): the settings.
        pipeline ([`D3PMPipeline`]): the network, with fresh weights or others, and the process.
        train_dataset: `train_dataset[index, seed]` is x_0, a tensor of states, augmented as the seed decides.
        eval_dataset (*optional*): `eval_dataset[index]` is x_0. Its bound is measured, and written on the card.
        card (`dict`, *optional*): further arguments of [`create_model_card`]; `dataset_name` and `split` of the evaluation.
    """
    check_type("arguments", arguments, D3PMTrainingArguments, "a `D3PMTrainingArguments`")
    check_type("pipeline", pipeline, D3PMPipeline, "a `D3PMPipeline`")
    check_dataset("train_dataset", train_dataset)
    if eval_dataset is not None:
        check_dataset("eval_dataset", eval_dataset)
    if card is not None:
        check_type("card", card, dict, "a dictionary")
    pipeline.check_components()
    of_process = pipeline.scheduler.config.num_classes, pipeline.scheduler.transition.never_data
    train_dataset = CheckedExamples(train_dataset, *of_process)
    eval_dataset = None if eval_dataset is None else CheckedExamples(eval_dataset, *of_process)
    output_dir = Path(arguments.output_dir)
    start, folder = find_checkpoint(output_dir, arguments.resume_from_checkpoint, arguments.overwrite_output_dir)
    log = JSONLinesTracker(output_dir / LOG_NAME, start)
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=arguments.gradient_accumulation_steps, sync_with_dataloader=False
        ),
        mixed_precision=arguments.mixed_precision,
        log_with=[log, *_trackers(arguments.report_to)],
        project_config=ProjectConfiguration(str(output_dir), str(output_dir / arguments.logging_dir)),
    )
    if accelerator.is_main_process:
        output_dir.mkdir(parents=True, exist_ok=True)
        if folder is None:
            clear_run(output_dir)
    accelerator.wait_for_everyone()
    accelerator.init_trackers("d3pm", config={k: v for k, v in vars(arguments).items() if k != "hub_token"})

    scheduler, denoiser = pipeline.scheduler, pipeline.denoiser.train()
    in_one_pass = scores_in_one_pass(scheduler, denoiser)
    if in_one_pass:  # what it says of itself is checked before anything is trained on it
        with evaluating(denoiser):
            check_causal(scheduler, denoiser, train_dataset[0, 0][None].to(pipeline.device))
    batches = StepBatches(
        len(train_dataset),
        arguments.train_batch_size,
        accelerator.num_processes * arguments.gradient_accumulation_steps,
        len(scheduler),
        arguments.seed,
        range(start, arguments.max_train_steps),
    )
    loader = DataLoader(
        SeededExamples(train_dataset),
        batch_sampler=batches,
        num_workers=arguments.dataloader_num_workers,
        pin_memory=accelerator.device.type == "cuda",
    )
    optimizer = torch.optim.AdamW(
        denoiser.parameters(),
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        weight_decay=arguments.adam_weight_decay,
        eps=arguments.adam_epsilon,
        fused=accelerator.device.type != "xla",  # several times as fast on a CPU
    )
    # The learning rate goes by updates, on any number of processes: it is not Accelerate's to multiply.
    lr_scheduler = get_scheduler(
        arguments.lr_scheduler, optimizer, arguments.lr_warmup_steps, arguments.max_train_steps
    )
    model, optimizer, loader = accelerator.prepare(denoiser, optimizer, loader)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ema = None
    if arguments.use_ema:
        ema = AveragedWeights(
            parameters,
            decay=arguments.ema_max_decay,
            use_ema_warmup=True,
            inv_gamma=arguments.ema_inv_gamma,
            power=arguments.ema_power,
        )
        ema.to(accelerator.device)
    progress = Progress()
    accelerator.register_for_checkpointing(progress, lr_scheduler, *([ema] if ema else []))
    settings = _settings(arguments, batches.global_batch_size, len(train_dataset), pipeline)
    if folder is not None:
        load_checkpoint(accelerator, folder, settings)
        accelerator.step = 0  # it counts batches, whose number per step may have changed
        if ema:
            ema.to(accelerator.device)

    averaged = _averaged(ema, parameters, denoiser)
    compute_loss = _autoregressive if in_one_pass else _diffusion
    bound = None
    bar = tqdm(
        total=arguments.max_train_steps,
        initial=start,
        desc="training",
        unit="step",
        disable=not accelerator.is_main_process,
        smoothing=0.05,
    )
    clock = Clock(start)
    for micro_step, batch in enumerate(clock.waiting(loader), start * arguments.gradient_accumulation_steps):
        # Dropout: another one at each step and process, the same one when the step is done again.
        torch.manual_seed(_mix(arguments.seed, micro_step, accelerator.process_index))
        with accelerator.accumulate(model):
            loss, vb, cross_entropy = compute_loss(scheduler, model, batch, arguments)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(parameters, arguments.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        progress.add(loss, vb, cross_entropy)
        if not accelerator.sync_gradients:
            continue
        lr_scheduler.step()
        if ema:
            ema.step(parameters)
        progress.step += 1
        step, is_last = progress.step, progress.step == arguments.max_train_steps
        bar.update()
        if step % arguments.logging_steps == 0 or is_last:
            values = _log_line(progress, accelerator, scheduler, lr_scheduler)
            accelerator.log(values, step=step)
            clock.lap(step, batches.global_batch_size)
            bar.set_postfix_str(f"loss {values['loss']:.4g}, {values['bits']:.3f} bits, {clock.rate:.3g} samples/s")
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(
                    f"the loss is {values['loss']} at step {step}: begin a new run with a lower learning_rate or max_grad_norm"
                )
        if arguments.validation_steps and (step % arguments.validation_steps == 0 or is_last):
            with averaged():
                bound = _validate(arguments, accelerator, pipeline, denoiser, eval_dataset, step)
        if step % arguments.checkpointing_steps == 0 or is_last:
            save_checkpoint(accelerator, output_dir, step, settings, arguments.checkpoints_total_limit)
    bar.close()

    if ema:
        ema.copy_to(parameters)
    denoiser.eval()
    samples = draw_samples(arguments, pipeline) if arguments.num_samples else None
    with _whole_network(accelerator, model, pipeline):
        if accelerator.is_main_process:
            _save_pipeline(arguments, pipeline, bound, samples, card or {})
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return pipeline


# The parts of a step


def _mix(*numbers: int) -> int:
    """One seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _diffusion(scheduler, model, batch: dict, arguments: D3PMTrainingArguments):
    """The loss of a batch at one timestep each, and its two parts."""
    x_0, timesteps = batch["x_0"], batch["timestep"]
    x_t = scheduler.add_noise(x_0, timesteps, noise_generators(batch["seed"]))
    output = d3pm_loss(
        scheduler,
        model(x_t, timesteps),
        x_0,
        x_t,
        timesteps,
        hybrid_coeff=0.0 if arguments.loss == "vb" else arguments.hybrid_coeff,
        auxiliary="denoising" if arguments.loss == "hybrid_denoising" else "raw",
    )
    vb = output.vb.mean()
    return output.loss.mean(), vb, vb if output.cross_entropy is None else output.cross_entropy.mean()


def _autoregressive(scheduler, model, batch: dict, arguments: D3PMTrainingArguments):
    """The loss of all timesteps at once: a causal network reads the data, and answers for each position."""
    x_0 = batch["x_0"]
    loss = autoregressive_loss(scheduler, model(x_0, batch["timestep"]), x_0).mean()
    return loss, loss / len(scheduler), loss


def _log_line(progress: Progress, accelerator: Accelerator, scheduler, lr_scheduler) -> dict:
    loss, vb, cross_entropy = progress.averages(accelerator)
    return {
        "loss": loss,
        "vb": vb,
        "cross_entropy": cross_entropy,
        # The terms were drawn evenly: T times their average estimates the bound, but for the constant L_T.
        "bits": vb * len(scheduler) / math.log(2),
        "learning_rate": lr_scheduler.get_last_lr()[0],
    }


class Clock:
    """How fast the loop is, and how much of its time it waits for data."""

    def __init__(self, step: int):
        self.started = self.last = time.perf_counter()
        self.waited, self.rate, self._last_step = 0.0, math.nan, step

    def waiting(self, loader):
        """The batches of a loader; the time that each took to come is counted."""
        batches = iter(loader)
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - begin
            if batch is None:
                return
            yield batch

    def lap(self, step: int, batch_size: int) -> None:
        """Updates the rate, in samples per second, since the lap before."""
        now = time.perf_counter()
        self.rate = (step - self._last_step) * batch_size / (now - self.last)
        self.last, self._last_step = now, step

    @property
    def share_waited(self) -> float:
        return self.waited / (time.perf_counter() - self.started)


def _averaged(ema: EMAModel | None, parameters: list, denoiser: Denoiser):
    """A context in which the network has its averaged weights and does not drop out."""

    @contextmanager
    def context():
        denoiser.eval()
        if ema:
            ema.store(parameters)
            ema.copy_to(parameters)
        try:
            yield
        finally:
            if ema:
                ema.restore(parameters)
            denoiser.train()

    return context


# Evaluation and the end


@contextmanager
def _whole_network(accelerator: Accelerator, model, pipeline):
    """A context in which the pipeline of the main process has all weights, wherever the processes keep their parts."""
    if accelerator.num_processes == 1:
        yield
        return
    name = pipeline.network_name
    shared = getattr(pipeline, name)
    prefix = "" if pipeline.denoiser is shared else "network."  # of the weights in the state of the denoiser
    state = accelerator.get_state_dict(model)  # all processes take part
    if accelerator.is_main_process:
        create = getattr(type(shared), "from_config", type(shared))
        whole = create(shared.config)
        whole.load_state_dict({key.removeprefix(prefix): value for key, value in state.items()})
        setattr(pipeline, name, whole.eval())
    yield
    setattr(pipeline, name, shared)


def _validate(arguments: D3PMTrainingArguments, accelerator: Accelerator, pipeline, denoiser, dataset, step: int):
    """Measures the bound and draws samples. Every process does the same, so that none waits for another."""
    bound = None
    if dataset is not None:
        bound = evaluate_bound(
            pipeline.scheduler,
            denoiser,
            _eval_batches(dataset, arguments, accelerator.device),
            num_evaluated_timesteps=min(arguments.num_eval_timesteps, len(pipeline.scheduler)),
            is_causal=scores_in_one_pass(pipeline.scheduler, denoiser),
            progress_bar=accelerator.is_main_process,
        )
        values = {"eval_bits_per_dim": bound.bits_per_dim, "eval_standard_error": bound.bits_per_dim_standard_error}
        accelerator.log(values, step=step)
    if arguments.num_samples:
        samples = draw_samples(arguments, pipeline)
        if accelerator.is_main_process:
            save_samples(samples, Path(arguments.output_dir) / "samples" / f"step-{step}")
    return bound


def _eval_batches(dataset, arguments: D3PMTrainingArguments, device):
    """The first examples, or as many spread over the data set as are asked for, in batches."""
    count = min(arguments.max_eval_samples, len(dataset))
    indices = [i * len(dataset) // count for i in range(count)]
    for first in range(0, count, arguments.eval_batch_size):
        yield default_collate([dataset[i] for i in indices[first : first + arguments.eval_batch_size]]).to(device)


def draw_samples(arguments: D3PMTrainingArguments, pipeline):
    """The samples of a run, from the same noise each time: images, or lines of text."""
    showing = dict(getattr(pipeline, "_progress_bar_config", {}))
    pipeline.set_progress_bar_config(**{**showing, "disable": True})
    steps = possible_steps(pipeline.scheduler, pipeline.denoiser, arguments.num_inference_steps)
    generator = torch.Generator().manual_seed(arguments.seed)
    options = {"num_inference_steps": steps, "generator": generator}
    is_text = pipeline.task == "text-generation"
    is_tokens = is_text and pipeline.tokenizer is None
    output = pipeline(batch_size=arguments.num_samples, **options, **({"output_type": "seq"} if is_tokens else {}))
    pipeline.set_progress_bar_config(**showing)
    if not is_text:
        return output.images
    return [" ".join(map(str, row)) for row in output.sequences.tolist()] if is_tokens else output.texts


def save_samples(samples: list, path: Path) -> Path:
    """Writes lines of text, or one picture of all images; returns the path with its ending."""
    path.parent.mkdir(exist_ok=True)
    if isinstance(samples[0], str):
        path = path.with_suffix(".txt")
        path.write_text("\n".join(samples) + "\n", encoding="utf-8")
    else:
        path = path.with_suffix(".png")
        image_grid(samples).save(path)
    return path


def _save_pipeline(arguments: D3PMTrainingArguments, pipeline, bound, samples: list | None, card: dict) -> None:
    """Writes the pipeline, its card and its samples, and pushes them if asked to."""
    output_dir = Path(arguments.output_dir)
    card = dict(card)
    dataset_name, split = card.pop("dataset_name", "the evaluation data"), card.pop("split", "validation")
    is_text = pipeline.task == "text-generation"
    if samples is not None:
        path = save_samples(samples, output_dir / "samples" / "final")
        card["sample"] = samples[0] if is_text else str(path.relative_to(output_dir))
    if bound is not None:
        card["eval_results"] = bound_results(bound, dataset_name, split=split, task=pipeline.task)
    names = ("max_train_steps", "train_batch_size", "gradient_accumulation_steps", "loss", "hybrid_coeff", "seed")
    names += ("learning_rate", "lr_scheduler", "lr_warmup_steps", "max_grad_norm", "mixed_precision", "ema_max_decay")
    training = {name: getattr(arguments, name) for name in names}
    repo_id = arguments.hub_model_id or output_dir.name
    readme = create_model_card(pipeline, repo_id if arguments.push_to_hub else None, training=training, **card)
    pipeline.save_pretrained(output_dir)
    readme.save(output_dir / "README.md")
    if arguments.push_to_hub:
        pipeline.push_to_hub(
            repo_id, private=arguments.hub_private_repo or None, token=arguments.hub_token, card=readme
        )
        if samples is not None:
            upload_file(
                path_or_fileobj=path, path_in_repo=f"samples/{path.name}", repo_id=repo_id, token=arguments.hub_token
            )


def _settings(arguments: D3PMTrainingArguments, global_batch_size: int, num_examples: int, pipeline) -> dict:
    """All that decides what the weights become."""
    settings = {name: value for name, value in dataclasses.asdict(arguments).items() if name not in FREE}
    if arguments.lr_scheduler in ("cosine", "linear"):
        settings["max_train_steps"] = arguments.max_train_steps
    config = getattr(getattr(pipeline, pipeline.network_name), "config", {})
    config = config.to_diff_dict() if hasattr(config, "to_diff_dict") else dict(config)
    return {
        **settings,
        "global_batch_size": global_batch_size,
        "num_examples": num_examples,
        "scheduler": {k: v for k, v in pipeline.scheduler.config.items() if not k.startswith("_")},
        "network": {k: list(v) if isinstance(v, tuple) else v for k, v in config.items() if not k.startswith("_")},
    }


def _trackers(report_to: str | None) -> list[str]:
    """The names in `report_to`, if what they need is installed."""
    names = [name.strip() for name in (report_to or "").split(",") if name.strip()]
    available = [str(tracker.value) for tracker in get_available_trackers()]
    for name in names:
        if name not in available:
            raise ValueError(
                f"report_to names {name!r}, which is not installed: run `pip install {name}`, or leave it out"
            )
    return names
