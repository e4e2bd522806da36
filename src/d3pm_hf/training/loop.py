# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The training loop, through Accelerate."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    KwargsHandler,
    ProjectConfiguration,
    send_to_device,
)
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm
from transformers import TrainerCallback

from ..data.batches import condition_of
from ..hub.adapters import has_adapters, remember_base
from ..likelihood.causal import check_causal, scores_in_one_pass
from ..likelihood.measure import evaluating
from ..numerics import derive_seed
from ..pipelines import D3PMPipeline
from ..utils.checks import check_int, check_type
from ..utils.modules import copy_module, finish_graph, move_module, tied_names
from .callbacks import RunCallbacks, check_callbacks
from .distributed import end_run, run_on_all, run_on_main, separate_state
from .interruption import Interruption
from .objective import count_scored, diffusion_loss, one_pass_loss
from .optimization import AveragedWeights, averaged_weights, create_lr_scheduler, create_optimizer
from .progress import JSONLinesTracker, Progress, loss_error, tracker_names
from .results import (
    check_can_be_kept,
    check_noise,
    draw_decoded,
    known_of,
    prepare_repository,
    save_pipeline,
    validate,
)
from .run_network import (
    check_distribution,
    check_ties,
    drop_weights,
    freeze_unused,
    load_weights,
    repeat_dropout,
    reshard,
    seed_device,
    whole_network,
)
from .run_state import (
    LOG_NAME,
    clear_run,
    find_checkpoint,
    load_checkpoint,
    locked_folder,
    run_settings,
    save_checkpoint,
)
from .step_batches import RunCollator, check_examples, create_collator, create_loader
from .training_args import D3PMTrainingArguments


def train(
    arguments: D3PMTrainingArguments,
    pipeline: D3PMPipeline,
    train_dataset,
    eval_dataset=None,
    card: dict | None = None,
    data_collator: Callable | None = None,
    *,
    optimizer: torch.optim.Optimizer | Callable | None = None,
    lr_scheduler: LRScheduler | Callable | None = None,
    callbacks: list[TrainerCallback] | None = None,
    kwargs_handlers: list[KwargsHandler] | None = None,
) -> D3PMPipeline:
    """Trains the network of a pipeline, and returns the pipeline with the weights that were saved.

    A run with the same seed sees the same examples, timesteps and noise on any number of processes. A killed run resumes
    bit for bit. Every process returns all weights. If FSDP2 has sharded them, the pipeline of each process gets a new
    network, whole and on the CPU.

    Args:
        arguments ([`D3PMTrainingArguments`]): Settings of the run.
        pipeline ([`D3PMPipeline`]): Pipeline with the network to train, initialized or pretrained.
        train_dataset: `train_dataset[index, seed]` is an example, with the augmentation that the seed decides: x_0, a
            tensor of states, or a dictionary, see [`~d3pm_hf.data.DataCollatorForD3PM`]. Also a `datasets.Dataset` of such
            dictionaries; or a stream of them, such as a `datasets.IterableDataset`, which is read in its own order.
        eval_dataset (*optional*): `eval_dataset[index]` is an example, or a stream. Its bound is measured, and written on the
            card.
        card (`dict`, *optional*): Further arguments of [`create_model_card`]; `dataset_name` and `split` of the
            evaluation data.
        data_collator (`Callable`, *optional*): Makes a batch of a list of examples. Defaults to a
            [`~d3pm_hf.data.DataCollatorForD3PM`] with the tokenizer of the pipeline.
        optimizer (`torch.optim.Optimizer` or `Callable`, *optional*): Optimizer of the weights of the network, or a function of
            the list of trained weights that makes one. Defaults to AdamW with the settings of `arguments`.
        lr_scheduler (`LRScheduler` or `Callable`, *optional*): Schedule of that optimizer, or a function of the optimizer
            that makes one: `lambda optimizer: get_scheduler("polynomial", optimizer, 100, 1000)` of transformers. It steps
            once for each update. Defaults to that of `arguments`.
        callbacks (`list[TrainerCallback]`, *optional*): Callbacks of transformers, such as `EarlyStoppingCallback`. The metric of
            an evaluation is `eval_bits_per_dim`. Events of epochs are not called.
        kwargs_handlers (`list[KwargsHandler]`, *optional*): Options of Accelerate, such as `DistributedDataParallelKwargs`.
    """
    # 1. Check the arguments before anything is written.
    check_type("arguments", arguments, D3PMTrainingArguments, "a `D3PMTrainingArguments`")
    check_type("pipeline", pipeline, D3PMPipeline, "a `D3PMPipeline`")
    if card is not None:
        check_type("card", card, dict, "a dictionary")
    if callbacks is not None:
        check_callbacks(callbacks)
    if kwargs_handlers is not None:
        check_type("kwargs_handlers", kwargs_handlers, (list, tuple), "a list of `KwargsHandler` of Accelerate")
        for handler in kwargs_handlers:
            check_type("kwargs_handlers[...]", handler, KwargsHandler, "a `KwargsHandler` of Accelerate")
    check_can_be_kept(arguments, pipeline)  # before anything is trained
    collator = create_collator(arguments, pipeline, data_collator)
    train_dataset, first = check_examples("train_dataset", train_dataset, collator)
    if arguments.condition_dropout:
        if not first.get("condition"):
            raise ValueError(
                f"condition_dropout is {arguments.condition_dropout}, and the examples have no condition to leave out: leave "
                "condition_dropout out, or pass a network and data with classes or another condition"
            )
        pipeline.denoiser.drop_condition(first["condition"], torch.ones(1, dtype=torch.bool))
    check_noise(pipeline.scheduler, first)
    if eval_dataset is not None:
        eval_dataset, _ = check_examples("eval_dataset", eval_dataset, collator, arguments.max_eval_samples)
        if arguments.validation_steps and not scores_in_one_pass(pipeline.scheduler, pipeline.denoiser):
            # The first term of the bound is always one of those that are evaluated, with at least one of the others.
            check_int("num_eval_timesteps", arguments.num_eval_timesteps, min(2, len(pipeline.scheduler)))

    # 2. The accelerator, and the folder of the run, which no other run may write to.
    output_dir, status = Path(arguments.output_dir), None
    with separate_state():
        log = JSONLinesTracker(output_dir / LOG_NAME)
        accelerator = Accelerator(
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=arguments.gradient_accumulation_steps, sync_with_dataloader=False
            ),
            mixed_precision=arguments.mixed_precision,
            dataloader_config=DataLoaderConfiguration(non_blocking=torch.cuda.is_available()),
            log_with=[log, *tracker_names(arguments.report_to)],
            project_config=ProjectConfiguration(str(output_dir), str(output_dir / arguments.logging_dir)),
            kwargs_handlers=None if kwargs_handlers is None else list(kwargs_handlers),
        )
        check_distribution(accelerator)
        # By default the precision is that of `accelerate config`.
        arguments = replace(arguments, mixed_precision=accelerator.mixed_precision)
        try:
            with locked_folder(accelerator, output_dir), Interruption(accelerator) as interruption:
                _run(
                    arguments,
                    accelerator,
                    interruption,
                    log,
                    pipeline,
                    train_dataset,
                    eval_dataset,
                    collator,
                    first,
                    card or {},
                    optimizer,
                    lr_scheduler,
                    callbacks,
                )
        except SystemExit as ended:
            status = ended.code
        finally:
            for model in accelerator._models:  # a network that is a `Denoiser` goes on without mixed precision
                accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        end_run(accelerator)
        if status is not None:
            raise SystemExit(status)
    return pipeline


def _run(
    arguments: D3PMTrainingArguments,
    accelerator: Accelerator,
    interruption: Interruption,
    log: JSONLinesTracker,
    pipeline: D3PMPipeline,
    train_dataset,
    eval_dataset,
    collator: RunCollator,
    first: dict,
    card: dict,
    given_optimizer: torch.optim.Optimizer | Callable | None,
    given_lr_scheduler: LRScheduler | Callable | None,
    callbacks: list[TrainerCallback] | None,
) -> None:
    """The run in a folder of its own. Nothing is written to it before the first step. `first` is the batch of one example.

    It is a function of its own so that its loader is freed before `end_run`. Otherwise the process would wait for the workers
    of the loader when it ends, as they ignore signals.
    """
    output_dir = Path(arguments.output_dir)
    start, folder = run_on_main(accelerator, lambda: find_checkpoint(arguments))

    # 3. Network, loss and data.
    scheduler, denoiser = pipeline.scheduler, pipeline.denoiser.train()
    compute_loss = diffusion_loss
    if scores_in_one_pass(scheduler, denoiser):
        compute_loss = one_pass_loss
        with evaluating(denoiser):
            probe = send_to_device(first, pipeline.device)
            check_causal(scheduler, denoiser, probe["x_0"], condition_of(probe))
    global_batch_size = arguments.train_batch_size * accelerator.num_processes * arguments.gradient_accumulation_steps
    loader, stream = create_loader(arguments, accelerator, train_dataset, collator, len(scheduler), start)

    # 4. Optimizer, learning rate and average of the weights.
    if accelerator.distributed_type != DistributedType.FSDP:  # it moves the parts of the network after it has cut them
        move_module(denoiser, accelerator.device)
    optimizer = create_optimizer(arguments, given_optimizer, denoiser)
    # Accelerate would step the schedule once per process; it counts updates here, so it is not prepared.
    lr_scheduler = create_lr_scheduler(arguments, given_lr_scheduler, optimizer)
    own_settings = {} if given_optimizer is None else {"optimizer": type(optimizer).__name__}
    own_settings |= {} if given_lr_scheduler is None else {"lr_scheduler": type(lr_scheduler).__name__}
    network = pipeline.bare_network
    base_names: set[str] = set()  # weights that a checkpoint does not hold, as the run does not change them
    if has_adapters(network):
        remember_base(network)
        base_names = {
            name for name, value in denoiser.named_parameters(remove_duplicate=False) if not value.requires_grad
        }
    empty = copy_module(network, "meta") if accelerator.is_fsdp2 else None
    is_trained = [parameter.requires_grad for parameter in denoiser.parameters()]
    frozen = freeze_unused(accelerator, denoiser, first, is_dropped=arguments.condition_dropout > 0)
    ties = tied_names(denoiser)
    model, optimizer = accelerator.prepare(denoiser, optimizer, device_placement=[False, False])
    if accelerator.is_fsdp2:
        check_ties(denoiser, ties)
        repeat_dropout(denoiser)
    # Unused weights stay on the list: a checkpoint does not depend on the number of processes.
    parameters = [parameter for parameter, is_chosen in zip(model.parameters(), is_trained) if is_chosen]
    ema = None
    if arguments.use_ema:
        ema = AveragedWeights(
            parameters,
            decay=arguments.ema_max_decay,
            use_ema_warmup=True,
            inv_gamma=arguments.ema_inv_gamma,
            power=arguments.ema_power,
        )

    # 5. Resume.
    progress = Progress(accelerator)
    accelerator.register_save_state_pre_hook(partial(drop_weights, frozen=base_names))
    if accelerator.device.type == "xla" or base_names:
        accelerator.register_load_state_pre_hook(partial(load_weights, frozen=base_names))
    objects = {"model": denoiser, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "processing_class": None}
    hooks = RunCallbacks(callbacks or [], arguments, accelerator, **objects)
    parts = {"progress": progress, "lr_scheduler": lr_scheduler, "ema": ema, "stream": stream}
    parts["callbacks"] = None if callbacks is None else hooks
    parts = {name: part for name, part in parts.items() if part is not None}
    settings = {**run_settings(arguments, global_batch_size, train_dataset, collator, pipeline), **own_settings}
    # A stream that has loaded its state is read by the training steps alone.
    known = known_of(arguments, collator, train_dataset if eval_dataset is None else eval_dataset)
    if folder is not None:
        run_on_all(accelerator, lambda: load_checkpoint(accelerator, folder, settings, parts))
        accelerator.step = 0  # it counts batches, whose number per step may have changed
    hooks.begin(start)

    # 6. Train, if the pipeline can be pushed in the end.
    repo_id = run_on_main(accelerator, lambda: prepare_repository(arguments))
    if accelerator.is_main_process and folder is None:
        clear_run(output_dir)
    log.step = start
    accelerator.init_trackers("d3pm", config={k: v for k, v in vars(arguments).items() if k != "hub_token"})

    def save(limit: int | None, has_weights: bool = False) -> None:
        save_checkpoint(accelerator, output_dir, progress.step, settings, parts, limit, has_weights)
        hooks.call("on_save", progress.step)

    def evaluate() -> None:
        with averaged_weights(ema, parameters, denoiser):
            step = progress.step
            bound = validate(arguments, accelerator, pipeline, denoiser, eval_dataset, collator, known, step)
        progress.bound, progress.evaluated_step = bound, step
        hooks.evaluate(bound, step)

    if start and arguments.is_due("validation_steps", start) and progress.evaluated_step != start:
        evaluate()  # the checkpoint was saved before the evaluation, and gets its result
        save(arguments.checkpoints_total_limit)
    bar = tqdm(
        total=arguments.max_train_steps,
        initial=start,
        desc="training",
        unit="step",
        disable=arguments.disable_tqdm or not accelerator.is_main_process,
        smoothing=0.05,
    )
    interruption.start()
    steps = count_scored(loader, accelerator, arguments.gradient_accumulation_steps, denoiser.drop_condition)
    if hooks.is_stopped:  # before it was resumed
        steps = iter([])
    for micro_step, batch in enumerate(steps, start * arguments.gradient_accumulation_steps):
        if micro_step % arguments.gradient_accumulation_steps == 0:
            hooks.begin_step(progress.step)
        # Dropout differs between steps and processes, and is the same when a step is repeated after resuming.
        seed_device(derive_seed(arguments.seed, micro_step, accelerator.process_index, bits=32), accelerator.device)
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
        finish_graph(accelerator.device)
        progress.step += 1
        step = progress.step
        bar.update()
        hooks.end_step(step)
        is_logged = arguments.is_due("logging_steps", step) or hooks.control.should_log
        if is_logged:
            values = progress.log_line(len(scheduler), float(lr_scheduler.get_last_lr()[0]))
            accelerator.log(values, step=step)
            hooks.log(values, step)
            rate = (bar.format_dict["rate"] or math.nan) * global_batch_size
            bar.set_postfix_str(f"loss {values['loss']:.4g}, {values['bits']:.3f} bits, {rate:.3g} samples/s")
            if not math.isfinite(values["loss"]):
                raise loss_error(values["loss"], step)
        is_evaluated = arguments.is_due("validation_steps", step) or hooks.control.should_evaluate
        is_evaluated |= hooks.is_stopped and arguments.validation_steps > 0
        is_saved = arguments.is_due("checkpointing_steps", step) or hooks.control.should_save or hooks.is_stopped
        is_waiting = is_evaluated or is_saved or is_logged
        is_interrupted = interruption.is_agreed(is_waiting)
        if is_evaluated or is_saved or is_interrupted:
            progress.check_finite(parameters)
        is_evaluated = is_evaluated and not is_interrupted  # a resumed run makes up for it
        if is_saved or is_interrupted:
            # An evaluation that fails loses nothing. Older checkpoints stay until this one has its result.
            save(None if is_evaluated else arguments.checkpoints_total_limit)
        if is_evaluated:
            evaluate()
            is_interrupted = interruption.is_agreed(is_waiting)
            if is_saved or is_interrupted or hooks.is_stopped:
                save(arguments.checkpoints_total_limit, has_weights=is_saved)
        if is_interrupted:
            bar.close()
            interruption.end(step)
        if hooks.is_stopped:
            break
    bar.close()
    interruption.stop(progress.step)
    hooks.call("on_train_end", progress.step)
    arguments = replace(arguments, max_train_steps=progress.step)  # a callback may have stopped the run

    # 7. Save the pipeline with the averaged weights.
    if ema:
        ema.copy_to(parameters)
        reshard(denoiser, parameters)
    denoiser.eval()
    samples = draw_decoded(arguments, pipeline, denoiser, known) if arguments.num_samples else None
    for parameter in frozen:
        parameter.requires_grad_(True)
    if empty is not None:
        reshard(denoiser, parameters)
        setattr(pipeline, pipeline.network_name, whole_network(network, empty))
    if arguments.merge_lora:
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
    bound = progress.bound if progress.evaluated_step == progress.step else None  # of the weights that are saved
    run_on_main(accelerator, lambda: save_pipeline(arguments, pipeline, bound, samples, card, repo_id))
