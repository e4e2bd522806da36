# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The settings of a run, named as in diffusers' `train_unconditional.py`."""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, get_args

from ..utils.checks import check_choice, check_float, check_int, check_path, check_positive, check_type


if TYPE_CHECKING:
    from .timestep_laws import UniformLaw

# Numbers that may be 0 or more, shares in 0 .. 1, and numbers above 0. Other integers are 1 or more.
FROM_ZERO = (
    *("seed", "dataloader_num_workers", "lr_warmup_steps", "validation_steps", "num_samples"),
    *("hybrid_coeff", "adam_weight_decay", "ema_power"),
)
SHARES = ("adam_beta1", "adam_beta2", "ema_max_decay", "condition_dropout")
POSITIVE = ("learning_rate", "adam_epsilon", "max_grad_norm", "ema_inv_gamma", "logit_std")


def flag(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field of a dataclass that `HfArgumentParser` makes a flag."""
    value: dict = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**value, metadata={"help": help, **({} if choices is None else {"choices": choices})})


@dataclass
class D3PMTrainingArguments:
    """Settings of a training run. Each field is a flag of the examples: `--learning_rate 5e-4`.

    Examples:
        ```python
        from d3pm_hf.training import D3PMTrainingArguments

        arguments = D3PMTrainingArguments(output_dir="mine", max_train_steps=1000, train_batch_size=32, learning_rate=2e-3)
        ```
    """

    output_dir: str = flag("d3pm-model", "Folder for the checkpoints, the log and the trained pipeline.")
    overwrite_output_dir: bool = flag(False, "Whether to replace a run in `--output_dir` by a new one.")
    seed: int = flag(0, "Seed for the initial weights, the order of the data, the timesteps and the noise.")
    max_train_steps: int = flag(1_000_000, "Number of updates of the weights.")
    train_batch_size: int = flag(512, "Batch size per process and gradient accumulation step.")
    gradient_accumulation_steps: int = flag(1, "Number of batches whose gradients are accumulated for one update.")
    dataloader_num_workers: int = flag(0, "Number of subprocesses for data loading; 0 loads in the main process.")

    loss: str = flag(
        "hybrid",
        "Training loss. vb: L_vb, the variational bound. hybrid: L_lambda, the bound with an auxiliary cross-entropy.",
        choices=("vb", "hybrid"),
    )
    hybrid_coeff: float = flag(0.01, "Weight lambda of the cross-entropy in L_lambda.")
    auxiliary: str = flag(
        "raw",
        "Cross-entropy in L_lambda. raw: that of the output of the network, as in the paper. denoising: that of "
        "the denoising posterior.",
        choices=("raw", "denoising"),
    )
    timestep_sampling: str = flag(
        "uniform",
        "Law of the timesteps. uniform: all alike, as in the paper. logit_normal: a bell around the middle of "
        "time. Its losses are not weighted, so that another objective than L_vb or L_lambda is minimized.",
        choices=("uniform", "logit_normal"),
    )
    logit_mean: float = flag(0.0, "Mean of the logit of t / T in logit_normal.")
    logit_std: float = flag(1.0, "Standard deviation of the logit of t / T in logit_normal.")
    label_column: str | None = flag(
        None, "Column of the class of an example, for a network with classes. Defaults to `label`."
    )
    condition_dropout: float = flag(
        0.0, "Share of the examples whose condition is left out, so that samples can be guided."
    )

    learning_rate: float = flag(5e-4, "Peak learning rate, reached after `--lr_warmup_steps`.")
    lr_scheduler: str = flag(
        "inverse_sqrt",
        "Learning rate schedule after the warmup.",
        choices=("inverse_sqrt", "constant_with_warmup", "constant", "cosine", "linear"),
    )
    lr_warmup_steps: int = flag(10_000, "Number of warmup steps of the learning rate.")
    adam_beta1: float = flag(0.9, "First beta of AdamW.")
    adam_beta2: float = flag(0.999, "Second beta of AdamW.")
    adam_weight_decay: float = flag(0.0, "Weight decay of AdamW.")
    adam_epsilon: float = flag(1e-8, "Epsilon of AdamW.")
    max_grad_norm: float = flag(1.0, "Maximum gradient norm for clipping.")
    mixed_precision: str | None = flag(
        None,
        "Mixed precision: no, fp16 or bf16. Defaults to the value of `accelerate config`.",
        choices=("no", "fp16", "bf16"),
    )

    use_ema: bool = flag(True, "Whether to evaluate and save an exponential moving average (EMA) of the weights.")
    ema_inv_gamma: float = flag(1.0, "Inverse gamma of the EMA decay during its warmup.")
    ema_power: float = flag(3 / 4, "Power of the EMA decay during its warmup.")
    ema_max_decay: float = flag(0.9999, "Maximum EMA decay, reached after its warmup.")

    checkpointing_steps: int = flag(10_000, "Number of steps between two checkpoints.")
    checkpoints_total_limit: int | None = flag(None, "Maximum number of checkpoints to keep. Defaults to all of them.")
    resume_from_checkpoint: str | None = flag(
        None,
        "Checkpoint folder to resume from, or `latest` for the newest one in `--output_dir` (a new run if "
        "there is none).",
    )

    disable_tqdm: bool = flag(False, "Whether to show no progress bar and print no summary at the end.")
    logging_steps: int = flag(100, "Number of steps between two lines of the log.")
    report_to: str | None = flag(
        None, "Trackers to use besides log.jsonl, such as `tensorboard` or `tensorboard,wandb`."
    )
    logging_dir: str = flag("logs", "Folder of the trackers inside `--output_dir`.")
    validation_steps: int = flag(10_000, "Number of steps between two evaluations; 0 disables them.")
    eval_batch_size: int = flag(64, "Batch size per process for evaluation.")
    max_eval_samples: int = flag(256, "Maximum number of examples on which the bound is measured.")
    num_eval_timesteps: int = flag(50, "Number of terms of the bound that are evaluated per example.")
    num_samples: int = flag(16, "Number of samples to draw at each evaluation; 0 disables them.")
    num_inference_steps: int = flag(100, "Number of reverse steps for these samples.")

    merge_lora: bool = flag(
        False,
        "Whether a LoRA is merged into the network in the end, and the whole pipeline saved in place of the LoRA.",
    )

    push_to_hub: bool = flag(False, "Whether to push the trained pipeline to the Hub.")
    hub_model_id: str | None = flag(None, "Repository to push to. Defaults to the name of `--output_dir`.")
    hub_token: str | None = flag(None, "Token for the push. Defaults to the one of `hf auth login`.")
    hub_private_repo: bool = flag(False, "Whether a new repository is private.")

    def __post_init__(self):
        if self.loss == "hybrid_denoising":  # the earlier name
            self.loss, self.auxiliary = "hybrid", "denoising"
        for argument in fields(self):
            name, value = argument.name, getattr(self, argument.name)
            kinds = get_args(argument.type) or (argument.type,)  # of `int | None` both
            if value is None and argument.default is None:
                continue
            if "choices" in argument.metadata:
                check_choice(name, value, argument.metadata["choices"])
            elif name in POSITIVE:
                check_positive(name, value)
            elif int in kinds:
                check_int(name, value, 0 if name in FROM_ZERO else 1)
            elif float in kinds:
                check_float(name, value, 0 if name in FROM_ZERO + SHARES else None, 1 if name in SHARES else None)
            elif str in kinds:
                check_path(name, value)
            else:
                check_type(name, value, bool, "True or False")

    @property
    def timestep_law(self) -> "UniformLaw":
        """The law of the timesteps that `timestep_sampling` names."""
        from .timestep_laws import LogitNormalLaw, UniformLaw  # with torch, which --help does not need

        return UniformLaw() if self.timestep_sampling == "uniform" else LogitNormalLaw(self.logit_mean, self.logit_std)

    def is_due(self, name: str, step: int) -> bool:
        """Whether an event is due after `step`: every `getattr(self, name)` steps, and after the last step."""
        every = getattr(self, name)
        return every > 0 and (step % every == 0 or step == self.max_train_steps)
