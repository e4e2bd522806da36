# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The settings of a run, by the names that diffusers' `train_unconditional.py` has given them."""

from dataclasses import dataclass, field


LOSSES = ("vb", "hybrid", "hybrid_denoising")


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
            "choices": ("inverse_sqrt", "constant_with_warmup", "constant", "cosine", "linear"),
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
            "choices": ("no", "fp16", "bf16"),
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
        for name in ("max_train_steps", "train_batch_size", "gradient_accumulation_steps", "logging_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.loss not in LOSSES:
            raise ValueError(f"loss is {self.loss!r}: it must be one of {', '.join(LOSSES)}")
        if self.checkpoints_total_limit is not None and self.checkpoints_total_limit < 1:
            raise ValueError(f"checkpoints_total_limit is {self.checkpoints_total_limit}: it must be at least 1")
