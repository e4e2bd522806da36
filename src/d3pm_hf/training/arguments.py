# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The settings of a run, by the names that diffusers' `train_unconditional.py` has given them."""

from dataclasses import dataclass, field

from ..utils.checks import check_choice, check_float, check_int, check_path, check_positive


LOSSES = ("vb", "hybrid", "hybrid_denoising")
LR_SCHEDULERS = ("inverse_sqrt", "constant_with_warmup", "constant", "cosine", "linear")
PRECISIONS = ("no", "fp16", "bf16")
# The smallest value of each integer, and the range of each number.
LEAST_INTEGERS = {
    **dict.fromkeys(("seed", "dataloader_num_workers", "lr_warmup_steps", "validation_steps", "num_samples"), 0),
    **dict.fromkeys(("max_train_steps", "train_batch_size", "gradient_accumulation_steps", "checkpointing_steps"), 1),
    **dict.fromkeys(("logging_steps", "eval_batch_size", "max_eval_samples", "num_eval_timesteps"), 1),
    "num_inference_steps": 1,
}
FLOAT_RANGES = {
    **dict.fromkeys(("hybrid_coeff", "adam_weight_decay", "ema_power"), (0, None)),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "ema_max_decay"), (0, 1)),
}


@dataclass
class D3PMTrainingArguments:
    """How a network is trained. Every field is a flag of the examples: `--learning_rate 5e-4`."""

    output_dir: str = field(default="d3pm-model", metadata={"help": "Where the checkpoints and the pipeline go."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Start anew in a folder that holds a run."})
    seed: int = field(default=0, metadata={"help": "Of the weights, the order of the data, timesteps and noise."})
    max_train_steps: int = field(default=1_000_000, metadata={"help": "How often the weights are updated."})
    train_batch_size: int = field(default=512, metadata={"help": "Per process and accumulation step."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Batches that one update is made of."})
    dataloader_num_workers: int = field(default=0, metadata={"help": "Processes that load data."})

    loss: str = field(
        default="hybrid",
        metadata={
            "help": "vb: L_vb. hybrid: L_lambda, the cross-entropy being that of the raw output, as in the paper. "
            "hybrid_denoising: the cross-entropy is that of the denoising posterior.",
            "choices": LOSSES,
        },
    )
    hybrid_coeff: float = field(default=0.01, metadata={"help": "lambda, the weight of the cross-entropy."})

    learning_rate: float = field(default=5e-4, metadata={"help": "At its peak."})
    lr_scheduler: str = field(
        default="inverse_sqrt",
        metadata={
            "help": "What becomes of it after the warm-up.",
            "choices": LR_SCHEDULERS,
        },
    )
    lr_warmup_steps: int = field(default=10_000, metadata={"help": "Steps until the learning rate is at its peak."})
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_weight_decay: float = 0.0
    adam_epsilon: float = 1e-8
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients that are longer are shortened to it."})
    mixed_precision: str | None = field(
        default=None,
        metadata={
            "help": "fp16 or bf16; by default what `accelerate config` says.",
            "choices": PRECISIONS,
        },
    )

    use_ema: bool = field(default=True, metadata={"help": "Evaluate and save an average of the weights over time."})
    ema_inv_gamma: float = field(default=1.0, metadata={"help": "Of the warm-up of the average."})
    ema_power: float = field(default=3 / 4, metadata={"help": "Of the warm-up of the average."})
    ema_max_decay: float = field(default=0.9999, metadata={"help": "Of the average, after its warm-up."})

    checkpointing_steps: int = field(default=10_000, metadata={"help": "Steps between two checkpoints."})
    checkpoints_total_limit: int | None = field(default=None, metadata={"help": "How many are kept; all by default."})
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "A folder, or `latest`: the newest of output_dir, or a fresh start without one."},
    )

    logging_steps: int = field(default=100, metadata={"help": "Steps between two lines of the log."})
    report_to: str | None = field(
        default=None, metadata={"help": "Trackers beside log.jsonl, as in `tensorboard` or `tensorboard,wandb`."}
    )
    logging_dir: str = field(default="logs", metadata={"help": "Of the trackers, inside output_dir."})
    validation_steps: int = field(default=10_000, metadata={"help": "Steps between two evaluations; 0 for none."})
    eval_batch_size: int = field(default=64, metadata={"help": "Of the evaluation and of the samples."})
    max_eval_samples: int = field(default=256, metadata={"help": "Examples whose bound is measured."})
    num_eval_timesteps: int = field(default=50, metadata={"help": "Terms of the bound looked at per example."})
    num_samples: int = field(default=16, metadata={"help": "Drawn at each evaluation; 0 for none."})
    num_inference_steps: int = field(default=100, metadata={"help": "Of those samples."})

    push_to_hub: bool = field(default=False, metadata={"help": "Push the pipeline when the run ends."})
    hub_model_id: str | None = field(default=None, metadata={"help": "Where to; the name of output_dir by default."})
    hub_token: str | None = field(default=None, metadata={"help": "For the push; the one of `hf auth login` if none."})
    hub_private_repo: bool = field(default=False, metadata={"help": "Whether a new repository is private."})

    def __post_init__(self):
        for name, least in LEAST_INTEGERS.items():
            check_int(name, getattr(self, name), least)
        for name, (low, high) in FLOAT_RANGES.items():
            check_float(name, getattr(self, name), low, high)
        for name in ("learning_rate", "adam_epsilon", "max_grad_norm", "ema_inv_gamma"):
            check_positive(name, getattr(self, name))
        for name in ("output_dir", "logging_dir"):
            check_path(name, getattr(self, name))
        check_choice("loss", self.loss, LOSSES)
        check_choice("lr_scheduler", self.lr_scheduler, LR_SCHEDULERS)
        if self.mixed_precision is not None:
            check_choice("mixed_precision", self.mixed_precision, PRECISIONS)
        if self.checkpoints_total_limit is not None:
            check_int("checkpoints_total_limit", self.checkpoints_total_limit, 1)
        for name in ("resume_from_checkpoint", "report_to", "hub_model_id", "hub_token"):
            if getattr(self, name) is not None:
                check_path(name, getattr(self, name))
