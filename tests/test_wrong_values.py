# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Every public function is called with each kind of wrong value for each of its arguments, the others being right.

It must refuse the value in a sentence of its own: a `ValueError`, `TypeError` or `OSError` that a `raise` of this package
raises, and that names the argument. An error that comes out of torch, numpy, diffusers, transformers or the interpreter
fails, and so does a public function without a row in `ROWS`.
"""

import dataclasses
import importlib
import inspect
import linecache
import traceback
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from diffusers import DDPMScheduler
from PIL import Image
from test_convert import save_peer, words
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, TrainingArguments

import d3pm_hf
from d3pm_hf import (
    D3PMImagePipeline,
    D3PMScheduler,
    D3PMTablePipeline,
    D3PMTextPipeline,
    character_tokenizer,
    create_text_model,
    create_unet,
    data,
    evaluate_bound,
    training,
)


PACKAGE = Path(d3pm_hf.__file__).parent
MODULES = (
    "d3pm_hf",
    "d3pm_hf.convert",
    "d3pm_hf.data",
    "d3pm_hf.evaluation",
    "d3pm_hf.evaluation.metrics",
    "d3pm_hf.samplers",
    "d3pm_hf.schedules",
    "d3pm_hf.tables",
    "d3pm_hf.training",
    "d3pm_hf.transitions",
)
K, T, B, N = 4, 5, 2, 3  # classes, timesteps, batch, length
# What has no row: records of results, whose fields we fill ourselves; bases; and what transformers or evaluate checks.
EXEMPT = {
    *("d3pm_hf.Bound", "d3pm_hf.DocumentBounds", "d3pm_hf.Likelihood"),
    *("d3pm_hf.D3PMLossOutput", "d3pm_hf.D3PMSchedulerOutput", "d3pm_hf.D3PMTextPipelineOutput"),
    "d3pm_hf.D3PMImagePipelineOutput",
    *(
        "d3pm_hf.evaluation.Evaluation",
        "d3pm_hf.evaluation.JudgedSamples",
        "d3pm_hf.evaluation.LikelihoodResult",
        "d3pm_hf.evaluation.StepResult",
        "d3pm_hf.D3PMPipeline",
        "d3pm_hf.Denoiser",
        "d3pm_hf.samplers.Sampler",
        "d3pm_hf.samplers.SamplerStep",
        "d3pm_hf.D3PMTextConfig",
        "d3pm_hf.D3PMDiTConfig",
        "d3pm_hf.D3PMDiT",
    ),
    *("d3pm_hf.transitions.Transition", "d3pm_hf.transitions.DenseTransition", "d3pm_hf.D3PMTextModel"),
    *("d3pm_hf.Transition", "d3pm_hf.transitions.TransitionFamily", "d3pm_hf.transitions.RateFamily"),
    "d3pm_hf.transitions.TransitionSettings",
    *(f"d3pm_hf.evaluation.metrics.{name}" for name in ("BitsPerDim", "Perplexity", "WordPerplexity")),
}
NAN, INF = float("nan"), float("inf")


def optional(kind: tuple) -> tuple:
    return tuple(value for value in kind if value is not None)


# Wrong values by kind of argument; an optional argument takes None.
NEVER_A_NUMBER = ("3", [], [1, 2], torch.zeros(2), NAN, INF)
INT = (None, *NEVER_A_NUMBER, 2.5, -INF)
INT_FROM_0 = (*INT, -1)
INT_FROM_1 = (*INT_FROM_0, 0)
FLOAT = (None, *NEVER_A_NUMBER, -INF)
FLOAT_FROM_0 = (*FLOAT, -0.5)
POSITIVE = (*FLOAT_FROM_0, 0.0)
SHARE = (*FLOAT_FROM_0, 1.5)
STRING = (None, 3, 2.5, [], ["a"], NAN, torch.zeros(2))
NAME = (*STRING, "")
CHOICE = (*NAME, "nonsense")
PATH = CHOICE
NEW_PATH = NAME
FUNCTION = (None, 3, "f", [])
TOKENS = (None, 3, "ab", [], [0, 1], np.zeros(0, np.uint8), np.zeros((), np.uint8), np.zeros((4, 4)), np.full((4, 4), -1),
          np.full((4, 4), 3))  # fmt: skip
BETAS = (
    None,
    3,
    "ab",
    [],
    [0.5],
    torch.zeros(0),
    torch.zeros(3).long(),
    torch.tensor([0.5, NAN]),
    torch.tensor([-0.5]),
)
PROBABILITIES = (None, 3, "ab", [], torch.zeros(0), torch.zeros(3).long())


def states(fill, *shape, dtype=torch.long):
    return torch.full(shape or (B, N), fill, dtype=dtype)


NO_TENSOR = (None, 3, 2.5, "ab", [], [0, 1], np.zeros((B, N), np.int64))
STATES = (
    *NO_TENSOR,
    states(0, dtype=torch.float),
    states(0, dtype=torch.bool),
    states(0, 0, N),
    states(-1),
    states(K),
)
LOGITS = (*NO_TENSOR, torch.zeros(B, N), torch.zeros(B, N, K + 1), torch.zeros(B, N, K).long(), torch.zeros(0, N, K))
NAN_LOGITS = torch.full((B, N, K), NAN)
ONE_TIMESTEP = (None, "3", [], 2.5, NAN, INF, -1, T, torch.tensor(0.5), torch.tensor([0.5, 1.5]))
TIMESTEPS = (*ONE_TIMESTEP, torch.zeros(3).long(), torch.tensor([0, T]), torch.zeros(0).long(), np.zeros(2))
PREVIOUS = ("3", [], 2.5, NAN, -2, T, torch.zeros(2), torch.zeros(3).long())  # -1 stands for the data
TIMESTEP_LIST = ("3", 3, 2.5, [], [2.5, 0], ["a"], [0, 1], [T, 0], [1, -1], [None], [[1, 0]])
GENERATOR = (3, "a", 2.5, [1, 2], [torch.Generator()] * 3, torch.zeros(2))
SHAPE = (None, "ab", 3, 2.5, [2.5], [-1, 3], ["a"], [0, 2], torch.zeros(2))
DEVICE = ("nonsense", 2.5, [])
FREQUENCIES = (
    3,
    "ab",
    [],
    [0.25] * K,
    torch.zeros(K),
    torch.ones(K - 1),
    torch.full((K,), NAN),
    torch.tensor([1.0, 1, 1, -1]),
)
DISTRIBUTION = (*FREQUENCIES, torch.ones(K))
MATRICES = (3, "ab", [], torch.zeros(K, K), torch.eye(K - 1), torch.full((K, K), NAN), torch.full((K, K), 2.0))
RATES = (3, "ab", [], torch.ones(K, K), torch.zeros(K, K - 1), torch.full((K, K), NAN), -torch.ones(K, K))
EMBEDDINGS = (3, "ab", [], torch.zeros(K), torch.zeros(K - 1, 2), torch.full((K, 2), NAN), torch.zeros(0, 2))
PICTURES = (
    3,
    2.5,
    "a",
    [],
    [3],
    {},
    torch.zeros(1, 3, 5, 5),
    torch.zeros(3),
    np.zeros((1, 5, 5, 3)),
    np.full((1, 4, 4, 3), 9.0),
)
SIZES = (None, 3, "ab", [], [1], [2.5], ["a"])
FRAMES = (None, 3, "ab", [], np.zeros((2, 3)), pd.DataFrame(), pd.DataFrame(index=[0]))
TEMPERATURE, TOP_K, TOP_P = FLOAT_FROM_0, optional(INT_FROM_1), (*optional(FLOAT_FROM_0), 1.5)
LOSS_MASK = (*optional(NO_TENSOR), torch.ones(B, 1), torch.full((B, N), 255), torch.full((B, N), NAN))
KEPT = (
    *optional(NO_TENSOR),
    torch.ones(B, 1, dtype=torch.bool),
    torch.zeros(2),
    torch.zeros(2, 2).long(),
    torch.zeros(B + 1).long(),
)
DATASET = (None, 3, "text", [], [1], np.zeros((2, 3)), torch.zeros(2, 3))
OTHER = (None, 3, "a", [], {}, torch.zeros(2))  # in place of a component of ours
CLASSES = (*optional(INT_FROM_1), 7)  # of networks with two classes, or with none
BOOL = ()  # every value has a truth value


@dataclasses.dataclass
class Row:
    """A public function.

    Args:
        valid: makes the arguments of a call that works, from the fixture `world`.
        kinds: the wrong values of each argument, by name; those that are missing in `valid` have defaults.
        words: what errors call an argument other than by its name.
    """

    valid: Callable
    kinds: dict[str, tuple]
    words: dict[str, str] = dataclasses.field(default_factory=dict)


def absorbing(w):
    return {"self": w.scheduler}


SAMPLING = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P, "generator": GENERATOR, "return_dict": BOOL}
SCHEDULER_OPTIONS = {
    "num_classes": (*INT_FROM_1, 1),
    "num_train_timesteps": INT_FROM_1,
    **dict.fromkeys(
        ("transition", "beta_schedule", "prior", "prediction_type", "x0_posterior", "reconstruction"), CHOICE
    ),
    **dict.fromkeys(("beta_start", "beta_end"), optional(FLOAT_FROM_0)),
    "trained_betas": (3, "ab", [], [0.5], [NAN] * T, ["a"] * T, [-0.5] * T, [None] * T, 2.5),
    "trained_exponents": (3, "ab", [], [0.5], [NAN] * T, ["a"] * T, [-0.5] * T, [None] * T, 2.5),
    "mask_token_id": (*optional(INT_FROM_0), K),
    "mask_in_data": BOOL,
    "mask_fraction": SHARE,
    **dict.fromkeys(("bandwidth", "num_neighbors"), INT_FROM_1),
    "mask_rate": FLOAT_FROM_0,
    "unigram_probs": FREQUENCIES,
    **dict.fromkeys(("stationary_probs", "transition_matrices", "rate_matrix", "embeddings"), (3, "ab", [])),
    "transition_kwargs": (3, "ab", [], {"nonsense": 1}),
    "inference_timesteps": (
        3,
        "ab",
        [1],
        {"a": [T - 1]},
        {2: [T - 1]},
        {1: [0]},
        {1: [2.5]},
        {2: [T - 1, T]},
        {1: None},
    ),
    "suppress_tokens": (3, "ab", [-1], [10**9], {"a": 1}),
    "transition_tensors": (3, "ab", []),
    "element_classes": (3, "ab", [1], ["a"], [2.5]),
}


def scheduler_row(transition, **kinds):
    """A scheduler of another process, whose tensors are checked in full."""
    tensors = {
        "stationary": {"stationary_probs": torch.ones(K) / K},
        "matrix": {"transition_matrices": torch.full((K, K), 1 / K)},
        "rate": {"rate_matrix": torch.ones(K, K) - K * torch.eye(K)},
        "nearest_neighbor": {"embeddings": torch.arange(float(K))[:, None].expand(K, 2), "num_neighbors": 2},
    }[transition]
    valid = {
        "num_classes": K,
        "num_train_timesteps": T,
        "transition": transition,
        "beta_schedule": "cosine",
        **tensors,
    }
    words = {"stationary_probs": "stationary", "transition_matrices": "transition matri|transition_matri", "rate_matrix": "rate",
             "embeddings": "embeddings|rate_matrix"}  # fmt: skip
    return row(lambda w: valid, words, **{**dict.fromkeys(SCHEDULER_OPTIONS, ()), **kinds})


CALL = {
    **dict.fromkeys(("batch_size", "num_particles"), INT_FROM_1),
    "num_inference_steps": (*optional(INT_FROM_1), T + 1),
    "timesteps": TIMESTEP_LIST,
    "start_timestep": optional(ONE_TIMESTEP),
    "spacing": CHOICE,
    "latents": (*optional(STATES), states(0, 7, 7)),
    "output_type": CHOICE,
    "sampler": (3, 2.5, [], "nonsense", states(0)),
    "condition": (3, "ab", [1], states(0)),
    "sampler_kwargs": (3, "ab", [1], states(0), {"nonsense": 3}, {"generator": None}),
    "reward_fn": (3, "ab", [], len),  # there is one particle
    "reward_scale": (),  # checked beside a reward
    "classifier": (3, "ab", [], len),
    "guidance_scale": (*FLOAT, 2.0),  # there is no condition
    "class_labels": (2.5, "3", [], [2.5], -1, 2, [0, 2], torch.zeros(2), states(0), NAN),
    "callback_on_step_end": optional(FUNCTION),
    "callback_on_step_end_tensor_inputs": (3, "latents", ["nonsense"], [3], None),
    **SAMPLING,
}
WALK = {
    **dict.fromkeys(("scheduler", "denoiser"), OTHER),
    "x_t": STATES,
    "timesteps": (None, *TIMESTEP_LIST),
    "known": (*optional(STATES), states(0, 7, 7)),
    "is_known": (*optional(NO_TENSOR), states(0), states(0, 7, 7) == 0),
    "generator": GENERATOR,
    "condition": CALL["condition"],
    **dict.fromkeys(("callback", "progress_bar"), optional(FUNCTION)),
}
WALK_WORDS = {"x_t": "x_t|states|token", "known": "known|states|token"}


def walk(w):
    """The arguments of a sampler."""
    known = {"known": states(0), "is_known": states(0) == 0}
    return {
        "scheduler": w.scheduler,
        "denoiser": w.text_pipeline.denoiser,
        "x_t": states(0),
        "timesteps": [3, 0],
        **known,
    }


def walk_in_order(w):
    """The arguments of a sampler of an autoregressive process, whose network keeps its keys and values."""
    settings = {"is_decoder": True, "timestep_conditioning": False}
    network = d3pm_hf.create_text_model("tiny", K, max_position_embeddings=N, backbone="bert", **settings)
    return {
        "scheduler": d3pm_hf.D3PMScheduler(K, N, transition="autoregressive"),
        "denoiser": d3pm_hf.TextDenoiser(network),
        "x_t": states(K - 1),
        "timesteps": [2, 1, 0],
        "known": states(0),
        "is_known": states(0) == 0,
    }


def row(valid, words=None, **kinds) -> Row:
    return Row(valid, kinds, words or {})


SOURCE = {
    "dataset_name": (),
    "cache_dir": optional(NEW_PATH),
}  # a path stands in for the Hub, and its name is not read
LENGTHS = {"length": INT_FROM_1}

ROWS = {
    "d3pm_hf.data.Rows": row(
        lambda w: {"tokens": np.zeros((4, 3), np.uint8), "num_tokens": 3},
        {"tokens": "token"}, tokens=TOKENS, num_tokens=INT_FROM_1, random_flip=BOOL, num_words=optional(INT_FROM_0),
        labels=(3, "ab", [0, 1, 2, 3], np.zeros(3, int), np.zeros(4), np.full(4, -1)),
    ),
    "d3pm_hf.data.TextCrops": row(
        lambda w: {"tokens": np.zeros(9, np.uint8), "length": 3, "num_tokens": 3},
        {"tokens": "token"}, tokens=TOKENS, num_tokens=INT_FROM_1, length=(*INT_FROM_1, 10),
    ),
    "d3pm_hf.data.character_tokenizer": row(lambda w: {}, alphabet=(*NAME, "aa"), mask_token=(*NAME, "a")),
    "d3pm_hf.data.cooccurrence_embeddings": row(lambda w: {"dataset": w.crops}, dataset=DATASET, dim=INT_FROM_1),
    "d3pm_hf.data.encode_characters": row(lambda w: {"text": "a"}, text=(*STRING, "A"), alphabet=(*NAME, "bb")),
    "d3pm_hf.data.digits": row(lambda w: {}, labels=(None, 3, "yes")),
    "d3pm_hf.data.load_cifar10": row(
        lambda w: {"dataset_path": w.images, "cache_dir": w.cache}, {"label_column": "label_column|column"},
        split=CHOICE, dataset_path=optional(NEW_PATH), random_flip=BOOL, resolution=INT_FROM_1, label_column=optional(CHOICE), **SOURCE,
    ),
    "d3pm_hf.data.load_images": row(
        lambda w: {"path_or_name": w.images, "cache_dir": w.cache}, {"label_column": "label_column|column"},
        path_or_name=NEW_PATH, split=CHOICE, resolution=optional(INT_FROM_1), num_levels=(*INT, 1, 257), random_flip=BOOL,
        grayscale=BOOL, cache_dir=optional(NEW_PATH), label_column=optional(CHOICE),
    ),
    "d3pm_hf.data.load_lm1b": row(
        lambda w: {"split": "train", "tokenizer": w.pieces, "dataset_path": w.lines, "length": 8, "cache_dir": w.cache},
        {"dataset_path": "path"}, split=CHOICE, tokenizer=(*DATASET, data.character_tokenizer()),
        dataset_path=optional(PATH), length=INT_FROM_1, max_examples=optional(INT_FROM_1), **SOURCE,
    ),
    "d3pm_hf.data.load_sentencepiece": row(lambda w: {"path": w.sentencepiece}, path=PATH),
    "d3pm_hf.data.load_sentences": row(
        lambda w: {"split": "train", "dataset_path": w.lines, "cache_dir": w.cache}, {"dataset_path": "path"},
        split=CHOICE, dataset_path=optional(PATH), max_examples=optional(INT_FROM_1), **SOURCE,
    ),
    "d3pm_hf.data.load_text": row(
        lambda w: {"path": w.text, "length": 8, "cache_dir": w.cache},
        path=PATH, split=CHOICE, length=(*INT_FROM_1, 10**9), cache_dir=optional(NEW_PATH),
    ),
    "d3pm_hf.data.load_text8": row(
        lambda w: {"dataset_path": w.text, "length": 8}, {"dataset_path": "path"},
        split=CHOICE, dataset_path=optional(PATH), length=INT_FROM_1, dataset_name=(), cache_dir=(),
    ),
    "d3pm_hf.data.python_prose": row(lambda w: {}, length=INT_FROM_1),
    "d3pm_hf.data.text8_normalize": row(lambda w: {"text": "a"}, text=STRING),
    "d3pm_hf.data.train_piece_tokenizer": row(
        lambda w: {"texts": w.sentences, "vocab_size": 60}, {"texts": "texts"},
        texts=(None, 3, "text", [], [1, 2], [None], torch.zeros(2)), vocab_size=(*INT_FROM_1, 2),
    ),
    "d3pm_hf.data.tokenize": row(
        lambda w: {"dataset": w.documents, "tokenizer": w.text_pipeline.tokenizer, "max_length": 4},
        dataset=(None, 3, "ab", [], ["ab"]), tokenizer=OTHER, text_column=CHOICE, max_length=(*optional(INT_FROM_1), 1), packing=BOOL,
        truncation=BOOL, add_special_tokens=BOOL, append_eos=BOOL, num_proc=optional(INT_FROM_1),
    ),
    "d3pm_hf.data.DataCollatorForD3PM": row(
        lambda w: {}, tokenizer=(3, "a", [], torch.nn.Linear(1, 1)), padding=CHOICE, max_length=optional(INT_FROM_1),
        pad_to_multiple_of=optional(INT_FROM_1), fill_with_eos=BOOL, label_column=optional(NAME),
    ),
    "d3pm_hf.data.unigram_probs": row(lambda w: {"dataset": w.crops}, dataset=DATASET),
    "d3pm_hf.schedules.accumulate": row(lambda w: {"exponents": torch.ones(3)}, exponents=BETAS),
    "d3pm_hf.schedules.check_exponents": row(lambda w: {"exponents": torch.ones(3)}, exponents=BETAS),
    "d3pm_hf.schedules.cosine_betas": row(lambda w: {"num_steps": 3}, num_steps=INT_FROM_1, offset=FLOAT_FROM_0),
    "d3pm_hf.schedules.entropy": row(lambda w: {"p": torch.ones(2) / 2}, p=PROBABILITIES),
    "d3pm_hf.schedules.exponents_from_betas": row(
        lambda w: {"betas": torch.ones(3)}, betas=(*BETAS, torch.tensor([1.5]))
    ),
    "d3pm_hf.schedules.linear_betas": row(
        lambda w: {"num_steps": 3, "beta_start": 0.1, "beta_end": 0.2},
        num_steps=INT_FROM_1, beta_start=FLOAT, beta_end=FLOAT,
    ),
    "d3pm_hf.schedules.mutual_information_exponents": row(
        lambda w: {"lost_information": lambda exponents: -torch.expm1(-exponents), "num_steps": 3},
        lost_information=FUNCTION, num_steps=INT_FROM_1, num_exponents=(*INT_FROM_1, 1), in_survival=BOOL,
    ),
    "d3pm_hf.schedules.reciprocal_betas": row(lambda w: {"num_steps": 3}, num_steps=INT_FROM_1),
    "d3pm_hf.training.D3PMTrainingArguments": row(
        lambda w: {},
        **dict.fromkeys(("output_dir", "logging_dir"), NEW_PATH),
        **dict.fromkeys(("resume_from_checkpoint", "report_to", "hub_model_id", "hub_token", "label_column"), optional(NEW_PATH)),
        **dict.fromkeys(
            ("overwrite_output_dir", "use_ema", "merge_lora", "push_to_hub", "hub_private_repo", "disable_tqdm"), BOOL
        ),
        **dict.fromkeys(("seed", "dataloader_num_workers", "lr_warmup_steps", "validation_steps", "num_samples"), INT_FROM_0),
        **dict.fromkeys(("max_train_steps", "train_batch_size", "gradient_accumulation_steps"), INT_FROM_1),
        **dict.fromkeys(("checkpointing_steps", "logging_steps", "eval_batch_size", "max_eval_samples"), INT_FROM_1),
        **dict.fromkeys(("num_eval_timesteps", "num_inference_steps"), INT_FROM_1),
        checkpoints_total_limit=optional(INT_FROM_1), loss=CHOICE, auxiliary=CHOICE, lr_scheduler=CHOICE, mixed_precision=optional(CHOICE),
        timestep_sampling=CHOICE, logit_mean=FLOAT,
        **dict.fromkeys(("learning_rate", "adam_epsilon", "max_grad_norm", "ema_inv_gamma", "logit_std"), POSITIVE),
        **dict.fromkeys(("adam_beta1", "adam_beta2", "ema_max_decay", "condition_dropout"), SHARE),
        **dict.fromkeys(("hybrid_coeff", "adam_weight_decay", "ema_power"), FLOAT_FROM_0),
    ),
    "d3pm_hf.training.D3PMTrainer": row(
        lambda w: {"pipeline": w.plain_pipeline, "args": w.trainer_arguments(), "train_dataset": w.crops},
        {"train_dataset": "train_dataset|example|shapes", "eval_dataset": "eval_dataset|example|shapes"},
        pipeline=OTHER, args=(3, "a", []), train_dataset=optional(DATASET), eval_dataset=optional(DATASET), data_collator=optional(FUNCTION),
        num_eval_timesteps=INT_FROM_1, card=(3, "a", []), callbacks=(3, "a"), optimizers=(3, "a", []), optimizer_cls_and_kwargs=(3, "a", []),
    ),
    "d3pm_hf.training.read_log": row(lambda w: {"path": w.log}, path=PATH),
    "d3pm_hf.training.train": row(
        lambda w: {"arguments": w.training_arguments(), "pipeline": w.plain_pipeline, "train_dataset": w.crops},
        {"train_dataset": "train_dataset|example|shapes", "eval_dataset": "eval_dataset|example|shapes"},
        arguments=OTHER, pipeline=OTHER, train_dataset=DATASET, eval_dataset=optional(DATASET), card=(3, "a", []),
        data_collator=optional(FUNCTION), optimizer=(3, "a", []), lr_scheduler=(3, "a", []), callbacks=(3, "a", [3]), kwargs_handlers=(3, "a", [3]),
    ),
    "d3pm_hf.D3PMScheduler": row(
        lambda w: {"num_classes": K, "num_train_timesteps": T},
        {"trained_betas": "trained_betas|betas|beta_", "trained_exponents": "exponent"}, **SCHEDULER_OPTIONS
    ),
    "d3pm_hf.D3PMScheduler stationary": scheduler_row("stationary", stationary_probs=DISTRIBUTION),
    "d3pm_hf.D3PMScheduler matrix": scheduler_row("matrix", transition_matrices=MATRICES),
    "d3pm_hf.D3PMScheduler rate": scheduler_row("rate", rate_matrix=RATES),
    "d3pm_hf.D3PMScheduler nearest_neighbor": scheduler_row("nearest_neighbor", embeddings=EMBEDDINGS, num_neighbors=(*INT_FROM_1, K)),
    "d3pm_hf.D3PMScheduler.check_saveable": row(absorbing),
    "d3pm_hf.D3PMScheduler.num_steps_behind": row(lambda w: {"timestep": 0}, timestep=()),
    "d3pm_hf.D3PMScheduler.spaced_timesteps": row(
        lambda w: {**absorbing(w), "num_inference_steps": 2}, num_inference_steps=(*INT_FROM_1, T + 1), start=optional(ONE_TIMESTEP)
    ),
    "d3pm_hf.D3PMScheduler.sampling_timesteps": row(
        absorbing, num_inference_steps=(*optional(INT_FROM_1), T + 1), timesteps=TIMESTEP_LIST, start_timestep=optional(ONE_TIMESTEP),
        spacing=CHOICE,
    ),
    "d3pm_hf.D3PMScheduler.register_inference_timesteps": row(
        lambda w: {"self": D3PMScheduler(K, T), "timesteps": {2: [T - 1, 0]}}, {"timesteps": "timesteps"}, timesteps=SCHEDULER_OPTIONS["inference_timesteps"]
    ),
    "d3pm_hf.D3PMScheduler.chosen_timesteps": row(lambda w: {**absorbing(w), "num_inference_steps": 2}, num_inference_steps=()),
    "d3pm_hf.D3PMScheduler.set_timesteps": row(
        lambda w: {**absorbing(w), "num_inference_steps": T}, num_inference_steps=(*INT_FROM_1, T + 1), device=DEVICE, timesteps=TIMESTEP_LIST,
        spacing=CHOICE,
    ),
    "d3pm_hf.D3PMScheduler.check_spacing": row(lambda w: {**absorbing(w), "timesteps": [1, 0]}, timesteps=()),
    "d3pm_hf.D3PMScheduler.previous_timestep": row(lambda w: {**absorbing(w), "timestep": 3}, timestep=ONE_TIMESTEP),
    "d3pm_hf.D3PMScheduler.scale_model_input": row(lambda w: {**absorbing(w), "sample": 1}, sample=(), timestep=()),
    "d3pm_hf.D3PMScheduler.add_noise": row(
        lambda w: {**absorbing(w), "original_samples": states(0), "timesteps": 3}, {"original_samples": "states|token"},
        original_samples=STATES, timesteps=TIMESTEPS, generator=GENERATOR,
    ),
    "d3pm_hf.D3PMScheduler.reveal": row(
        lambda w: {**absorbing(w), "original_samples": states(0), "timestep": 3}, {"original_samples": "states|token"},
        original_samples=STATES, timestep=PREVIOUS,
    ),
    "d3pm_hf.D3PMScheduler.sample_prior": row(
        lambda w: {**absorbing(w), "shape": (B, N)}, shape=SHAPE, generator=GENERATOR, device=DEVICE
    ),
    "d3pm_hf.D3PMScheduler.step_logits": row(
        lambda w: {**absorbing(w), "model_output": torch.zeros(B, N, K)}, {"model_output": "output"},
        model_output=(None, 3, "ab", [], torch.zeros(B, N, K + 1), torch.zeros(B, N, K).long(), NAN_LOGITS),
        **{name: values for name, values in SAMPLING.items() if name in ("temperature", "top_k", "top_p")},
    ),
    "d3pm_hf.D3PMScheduler.logits": row(lambda w: {**absorbing(w), "model_output": torch.zeros(B, N, K)}, {"model_output": "output"},
                                        model_output=(None, 3, "ab", [], torch.zeros(B, N, K + 1), torch.zeros(B, N, K).long()), elements=()),
    "d3pm_hf.D3PMScheduler.restrict": row(
        lambda w: {"self": D3PMScheduler([3] * N, T), "logits": torch.zeros(B, N, K)}, logits=(torch.zeros(B, N + 1, K), torch.zeros(B, N, K + 1)),
        elements=(),
    ),
    "d3pm_hf.D3PMScheduler.check_data_states": row(
        lambda w: {"self": D3PMScheduler([3] * N, T), "x_0": states(0)}, {"x_0": "state"}, x_0=(states(K - 1),), loss_mask=()
    ),
    "d3pm_hf.D3PMScheduler.posterior_logits": row(
        lambda w: {**absorbing(w), "model_output": torch.zeros(B, N, K), "timestep": 3, "sample": states(K - 1)},
        {"model_output": "output", "sample": "states|token", "previous_timestep": "previous timestep"},
        model_output=LOGITS, timestep=TIMESTEPS, sample=STATES, previous_timestep=PREVIOUS,
        **{name: values for name, values in SAMPLING.items() if name in ("temperature", "top_k", "top_p")},
    ),
    "d3pm_hf.D3PMScheduler.predict_original_sample": row(
        lambda w: {**absorbing(w), "model_output": torch.zeros(B, N, K), "timestep": 3, "sample": states(K - 1)},
        {"model_output": "output", "sample": "states|token"}, model_output=LOGITS, timestep=TIMESTEPS, sample=STATES,
    ),
    "d3pm_hf.D3PMScheduler.step": row(
        lambda w: {**absorbing(w), "model_output": torch.zeros(B, N, K), "timestep": 3, "sample": states(K - 1)},
        {"model_output": "output", "sample": "states|token", "previous_timestep": "previous_timestep|previous timestep"},
        model_output=(*LOGITS, NAN_LOGITS), timestep=ONE_TIMESTEP, sample=STATES, previous_timestep=PREVIOUS, **SAMPLING,
    ),
    "d3pm_hf.D3PMScheduler.check_states": row(lambda w: {**absorbing(w), "x": states(0)}, {"x": "states|token"}, x=STATES),
    "d3pm_hf.D3PMScheduler.check_timesteps": row(
        lambda w: {**absorbing(w), "timesteps": 3, "sample": states(0)}, timesteps=TIMESTEPS, sample=(), previous=PREVIOUS
    ),
    "d3pm_hf.D3PMScheduler.check_model_output": row(
        lambda w: {**absorbing(w), "model_output": torch.zeros(B, N, K), "sample": states(0)},
        {"model_output": "output", "sample": "states|token"}, model_output=LOGITS, sample=STATES, elements=(),
    ),
    "d3pm_hf.D3PMScheduler.check_possible": row(None, undefined=(), logits=(), sample=(), t=()),
    "d3pm_hf.D3PMScheduler.save_pretrained": row(
        lambda w: {**absorbing(w), "save_directory": w.folder / "scheduler"}, save_directory=NEW_PATH, push_to_hub=BOOL
    ),
    "d3pm_hf.D3PMScheduler.from_config": row(
        lambda w: {"config": w.scheduler.config}, {"config": "config|num_classes"}, config=(3, "a", [], {}, {"num_classes": "3"}), return_unused_kwargs=BOOL
    ),
    "d3pm_hf.D3PMScheduler.load_config": row(
        lambda w: {"pretrained_model_name_or_path": w.saved}, pretrained_model_name_or_path=NEW_PATH
    ),
    "d3pm_hf.D3PMScheduler.from_pretrained": row(
        lambda w: {"pretrained_model_name_or_path": w.saved}, pretrained_model_name_or_path=NEW_PATH,
        subfolder=(3, []), return_unused_kwargs=BOOL,
    ),
    "d3pm_hf.autoregressive_loss": row(
        lambda w: {"scheduler": w.autoregressive, "model_output": torch.zeros(B, N, K), "x_0": states(0)},
        {"model_output": "output", "x_0": "states|token"},
        scheduler=OTHER, model_output=LOGITS, x_0=STATES, loss_mask=LOSS_MASK,
    ),
    "d3pm_hf.d3pm_loss": row(
        lambda w: {"scheduler": w.scheduler, "model_output": torch.zeros(B, N, K), "x_0": states(0), "x_t": states(K - 1), "timesteps": 3},
        {"model_output": "output", "x_0": "states|token", "x_t": "states|token", "previous_timesteps": "previous",
         "logits_to_keep": "logits_to_keep|output"},
        scheduler=OTHER, model_output=LOGITS, x_0=STATES, x_t=STATES, timesteps=TIMESTEPS, hybrid_coeff=FLOAT_FROM_0,
        auxiliary=CHOICE, previous_timesteps=PREVIOUS, loss_mask=LOSS_MASK, logits_to_keep=KEPT, output_layer=optional(OTHER),
    ),
    "d3pm_hf.logits_to_keep": row(
        lambda w: {"scheduler": w.scheduler, "x_t": states(K - 1), "timesteps": 3},
        {"x_t": "states|token", "previous_timesteps": "previous"},
        scheduler=OTHER, x_t=STATES, timesteps=TIMESTEPS, hybrid_coeff=FLOAT_FROM_0, auxiliary=CHOICE,
        previous_timesteps=PREVIOUS, loss_mask=LOSS_MASK,
    ),
    "d3pm_hf.network_loss": row(
        lambda w: {"scheduler": w.scheduler, "model": lambda x, t: torch.zeros(*x.shape, K), "x_0": states(0), "x_t": states(K - 1),
                   "timesteps": torch.tensor([3, 4])},
        {"x_0": "states|token", "x_t": "x_t|states|token|output"},
        scheduler=OTHER, model=FUNCTION, x_0=STATES, x_t=STATES, timesteps=TIMESTEPS, condition=(3, "a", [1]),
    ),
    "d3pm_hf.prior_loss": row(
        lambda w: {"scheduler": w.scheduler, "x_0": states(0)}, {"x_0": "states|token"}, scheduler=OTHER, x_0=STATES
    ),
    "d3pm_hf.evaluate_bound": row(
        lambda w: {"scheduler": w.scheduler, "model": lambda x, t: torch.zeros(*x.shape, K), "batches": [states(0)], "progress_bar": False},
        {"batches": "batch|states|token"}, scheduler=OTHER, model=FUNCTION,
        batches=(None, 3, "ab", [], [None], [states(K)], [states(0).float()], [{}]),
        num_inference_steps=(*optional(INT_FROM_1), T + 1), num_eval_timesteps=(*optional(INT_FROM_1), T + 1),
        continuous_time=BOOL, is_causal=BOOL, seed=INT_FROM_0, seed_by=CHOICE, progress_bar=BOOL, accelerator=optional(OTHER), spacing=CHOICE,
    ),
    "d3pm_hf.evaluate_bound continuous": row(
        lambda w: {"scheduler": w.scheduler, "model": lambda x, t: torch.zeros(*x.shape, K), "batches": [states(0)], "progress_bar": False,
                   "continuous_time": True},
        {"batches": "batch|states|token"}, scheduler=OTHER, model=FUNCTION, batches=(None, 3, "ab", [], [None], [states(K)], [{}]),
        num_inference_steps=(2, *optional(INT_FROM_1)), num_eval_timesteps=(1, *optional(INT_FROM_1)),
        continuous_time=BOOL, is_causal=(True,), seed=INT_FROM_0, seed_by=CHOICE, progress_bar=BOOL, accelerator=optional(OTHER), spacing=CHOICE,
    ),
    "d3pm_hf.evaluate_likelihood": row(
        lambda w: {"pipeline": w.plain_pipeline, "data": [states(0)], "progress_bar": False},
        {"data": "data|batch|states|token|prompt"}, pipeline=OTHER,
        data=(None, 3, "", [], [None], ["a", ""], [states(K)], [states(0).float()], [{}]),
        order=(*optional(FUNCTION), None, "nonsense"), block_length=INT_FROM_1, num_inference_steps=(*optional(INT_FROM_1), T + 1),
        batch_size=INT_FROM_1, seed=INT_FROM_0, progress_bar=BOOL,
    ),
    "d3pm_hf.log_likelihood": row(
        lambda w: {"pipeline": w.plain_pipeline, "context": "ab", "continuation": ["c", "ab"]},
        {"context": "context|prompt", "continuation": "continuation|prompt"}, pipeline=OTHER,
        context=(None, 3, [], [None], [2.5], states(0).float(), ["a", 3]), continuation=(None, 3, "", [], [None], states(0).float(), ["a", ""]),
        order=(*optional(FUNCTION), None, "nonsense", "random"), block_length=INT_FROM_1, batch_size=INT_FROM_1, progress_bar=BOOL,
    ),
    "d3pm_hf.evaluate_documents": row(
        lambda w: {"pipeline": w.plain_pipeline, "documents": ["c", "ab"], "num_eval_timesteps": 2, "progress_bar": False},
        {"documents": "documents|prompt"}, pipeline=OTHER, documents=(None, 3, "", [], [None], states(0).float(), ["a", ""]),
        num_estimates=(*INT_FROM_1, 1), num_eval_timesteps=(*INT_FROM_1, 1), num_inference_steps=(*optional(INT_FROM_1), T + 1),
        batch_size=INT_FROM_1, seed=INT_FROM_0, progress_bar=BOOL,
    ),
    "d3pm_hf.bound_results": row(
        lambda w: {"bound": w.bound, "dataset_name": "text", "task": "text-generation"}, bound=OTHER, dataset_name=NAME,
        dataset_type=optional(NAME), split=NAME, task=CHOICE,
    ),
    "d3pm_hf.character_tokenizer": row(lambda w: {}, alphabet=(), mask_token=()),  # that of d3pm_hf.data
    "d3pm_hf.create_model_card": row(
        lambda w: {"pipeline": w.text_pipeline}, pipeline=OTHER, repo_id=optional(STRING), training=(3, "a", [1]), eval_results=(3, "a", [1]),
        sample=optional(STRING), datasets=(3, 2.5, [3]), license=optional(STRING),
        language=(3, 2.5, [3]), base_model=(3, 2.5, [3]),
    ),
    "d3pm_hf.create_text_model": row(
        lambda w: {"preset": "tiny", "vocab_size": K}, preset=CHOICE, vocab_size=INT_FROM_1, num_class_labels=optional(INT_FROM_1)
    ),
    "d3pm_hf.create_unet": row(
        lambda w: {"preset": "tiny", "num_classes": K, "sample_size": 4}, preset=CHOICE, num_classes=(*INT_FROM_1, 1),
        sample_size=(None, "4", 2.5, [], [4], [4, 0], -1, 0, [4.5, 4]), in_channels=INT_FROM_1, prediction_type=CHOICE,
        num_class_labels=optional(INT_FROM_1),
    ),
    "d3pm_hf.export": row(
        lambda w: {"pipeline": w.text_pipeline, "save_directory": w.folder / "exported"}, pipeline=OTHER, save_directory=NEW_PATH,
        push_to_hub=BOOL, repo_id=(),
    ),
    "d3pm_hf.convert.convert_checkpoint": row(
        lambda w: {"model": save_peer(w.folder / "peer", "mdlm"), "tokenizer": words()}, model=NEW_PATH, tokenizer=(3, 2.5, [], {}, torch.zeros(2), ""),
        num_train_timesteps=INT_FROM_1, parameterization=optional(CHOICE),
    ),
    "d3pm_hf.logistic_logits": row(
        lambda w: {"location": torch.zeros(B, N), "log_scale": torch.zeros(B, N), "num_classes": K},
        location=(None, 3, "ab", [], states(0)), log_scale=(None, 3, "ab", [], states(0), torch.zeros(7, 7)), num_classes=(*INT_FROM_1, 1),
    ),
    "d3pm_hf.predict_image": row(
        lambda w: {"unet": w.plain_unet, "x_t": states(0, 1, 3, 4, 4), "timestep": 0, "num_classes": K, "prediction_type": "x0"},
        unet=OTHER, x_t=(*NO_TENSOR, states(0, 1, 3, 4, 4).float(), states(0, 1, 2, 4, 4), states(K, 1, 3, 4, 4)),
        timestep=(None, "3", [], 2.5, NAN, torch.zeros(1), torch.zeros(3).long()), num_classes=(*INT_FROM_1, 1), prediction_type=CHOICE,
    ),
    "d3pm_hf.ImageDenoiser": row(
        lambda w: {"network": w.unet, "num_classes": K}, network=OTHER, num_classes=(*INT_FROM_1, 1), prediction_type=CHOICE,
        num_class_labels=CLASSES,
    ),
    "d3pm_hf.TextDenoiser": row(
        lambda w: {"network": w.text_pipeline.text_model}, network=OTHER, num_classes=optional((*INT_FROM_1, 1)),
        num_class_labels=CLASSES,
    ),
    "d3pm_hf.CausalLMDenoiser": row(
        lambda w: {"network": w.causal_lm}, network=OTHER, num_classes=optional((*INT_FROM_1, 1))
    ),
    "d3pm_hf.UnitTimeScheduler": row(
        lambda w: {"scheduler": w.scheduler}, scheduler=OTHER, temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P
    ),
    "d3pm_hf.MaskedLMDenoiser": row(
        lambda w: {"network": w.causal_lm}, network=OTHER, num_classes=optional((*INT_FROM_1, 1)), shift_logits=(None, 3, "a"),
        expand_attention_mask=(None, 3, "a"),
    ),
    "d3pm_hf.register_sampler": row(lambda w: {"name": "rows"}, name=NAME),
    "d3pm_hf.samplers.register_sampler": row(lambda w: {"name": "rows"}, name=NAME),
    **dict.fromkeys(
        ("d3pm_hf.ClassifierGuidance", "d3pm_hf.samplers.ClassifierGuidance"),
        row(lambda w: {"log_prob_fn": len}, log_prob_fn=FUNCTION, scale=FLOAT, input=CHOICE, method=CHOICE, batch_size=INT_FROM_1),
    ),
    "d3pm_hf.samplers.ClassifierGuidedScheduler": row(
        lambda w: {"scheduler": w.scheduler, "guidance": d3pm_hf.ClassifierGuidance(len)}, scheduler=OTHER, guidance=OTHER, given=(), is_given=()
    ),
    "d3pm_hf.samplers.guide": row(
        lambda w: {"scheduler": w.scheduler, "denoiser": w.text_pipeline.denoiser, "guidance_scale": 2.0},
        scheduler=OTHER, denoiser=OTHER, guidance_scale=FLOAT,
        drops_given=(None, 3, "a"),
    ),
    "d3pm_hf.samplers.get_sampler": row(lambda w: {"sampler": "ancestral"}, sampler=(None, *CALL["sampler"])),
    "d3pm_hf.samplers.registered_samplers": row(lambda w: {}),
    "d3pm_hf.samplers.ancestral": row(walk, WALK_WORDS, **WALK),
    "d3pm_hf.samplers.left_to_right": row(walk_in_order, WALK_WORDS, **WALK),
    "d3pm_hf.samplers.positions_first": row(walk, WALK_WORDS, **WALK),
    "d3pm_hf.samplers.first_hitting": row(walk, WALK_WORDS, **WALK),
    "d3pm_hf.samplers.confidence": row(walk, WALK_WORDS, **WALK, measure=CHOICE, choice_temperature=FLOAT_FROM_0, block_length=optional(INT_FROM_1)),
    "d3pm_hf.samplers.predictor_corrector": row(
        walk, WALK_WORDS, **WALK, corrector=CHOICE, correct_steps=INT_FROM_0, num_positions=(*optional(INT_FROM_1), 1)
    ),
    "d3pm_hf.samplers.predictor_corrector gibbs": row(
        lambda w: {**walk(w), "corrector": "gibbs"}, WALK_WORDS, **WALK, corrector=(), correct_steps=(), num_positions=optional(INT_FROM_1)
    ),
    "d3pm_hf.samplers.remasking": row(walk, WALK_WORDS, **WALK, eta=(*FLOAT, -0.1, 1.1)),
    "d3pm_hf.samplers.particle_filter": row(
        walk, {**WALK_WORDS, "reward_fn": "reward_fn"}, **WALK, num_particles=INT_FROM_1, known_path=CHOICE, reward_fn=(*optional(FUNCTION), len),
        reward_scale=(), report=(3, "ab", []),
    ),
    "d3pm_hf.samplers.particle_filter reward": row(
        lambda w: {**walk(w), "num_particles": 2, "reward_fn": lambda x: x.float().sum(-1)}, reward_scale=FLOAT, num_particles=(1,),
        **dict.fromkeys([*WALK, "report", "known_path"], ()), reward_fn=(lambda x: 3, lambda x: x.float(), lambda x: x[:, 0], lambda x: x.sum(-1) * NAN, 3),
    ),
    "d3pm_hf.Trajectory": row(lambda w: {}, predictions=BOOL),
    "d3pm_hf.D3PMTextPipeline": row(
        lambda w: {"text_model": w.text_pipeline.text_model, "scheduler": w.scheduler}, text_model=OTHER, scheduler=(*OTHER, DDPMScheduler()),
        tokenizer=optional(OTHER), sequence_length=optional(INT_FROM_1), add_special_tokens=BOOL, num_class_labels=CLASSES, ends_with_eos=(None, 3, "a", True),
    ),
    "d3pm_hf.D3PMTextPipeline.from_masked_lm": row(
        lambda w: {"model": w.masked_lm, "tokenizer": w.text_pipeline.tokenizer, "add_special_tokens": False}, model=(None, 3, [], {}, torch.zeros(2), ""),
        tokenizer=OTHER, num_train_timesteps=INT_FROM_1, sequence_length=optional(INT_FROM_1), add_special_tokens=(None, 3, "a"),
        scheduler_kwargs=(3, "a", [], {"nonsense": 3}, {"transition": "uniform"}), trust_remote_code=(None, 3, "a"), use_safetensors=(3, "a"),
    ),
    "d3pm_hf.D3PMTextPipeline.from_causal_lm": row(
        lambda w: {"model": w.causal_lm, "tokenizer": w.text_pipeline.tokenizer}, model=(None, 3, [], {}, torch.zeros(2), ""),
        tokenizer=OTHER, process=CHOICE, num_train_timesteps=(*optional(INT_FROM_1), 10),
        sequence_length=(*optional(INT_FROM_1), 10), scheduler_kwargs=(3, "a", [], {"nonsense": 3}, {"transition": "uniform"}),
        trust_remote_code=(None, 3, "a"), use_safetensors=(3, "a"),
    ),
    "d3pm_hf.D3PMTextPipeline.encode": row(
        lambda w: {"self": w.text_pipeline, "prompt": "ab"}, prompt=(None, 3, 2.5, [], [3], "", "z", states(0)), sequence_length=optional(INT_FROM_1)
    ),
    "d3pm_hf.D3PMTextPipeline.decode": row(
        lambda w: {"self": w.text_pipeline, "sequences": states(0)}, {"sequences": "sequences|states|token"}, sequences=STATES
    ),
    "d3pm_hf.D3PMTextPipeline.__call__": row(
        lambda w: {"self": w.text_pipeline, "input_ids": states(0)}, {"input_ids": "input_ids|states|token", "latents": "latents|token"},
        prompt=(3, 2.5, [], [3], ""), num_return_sequences=INT_FROM_1, sequence_length=optional(INT_FROM_1),
        input_ids=optional(STATES), mask=(3, "ab", [], torch.ones(7, 7)), max_new_tokens=optional(INT_FROM_1), return_full_text=BOOL,
        attention_mask=(3, "ab", [], states(1, B, N + 1), states(2), states(0), torch.tensor([[0, 1, 1]] * B)), **CALL,
    ),
    "d3pm_hf.D3PMTableMLP": row(
        lambda w: {"num_categories": [3, 2], "hidden_size": 8}, {"is_ordered": "is_ordered", "frequent_states": "frequent_states"}, num_categories=SIZES, is_ordered=(3, "ab", [], [True]),
        frequent_states=(3, "ab", [], [3, 4], [[3], []]), has_mask=(None, 3, "yes"), hidden_size=INT_FROM_1, num_layers=INT_FROM_1,
        embedding_size=INT_FROM_1, num_frequencies=INT_FROM_1, dropout=SHARE, num_timesteps=optional(INT_FROM_1),
    ),
    "d3pm_hf.D3PMTableTransformer": row(
        lambda w: {"num_categories": [3, 2], "hidden_size": 8}, {"is_ordered": "is_ordered", "frequent_states": "frequent_states"}, num_categories=SIZES, is_ordered=(3, "ab", [], [True]),
        frequent_states=(3, "ab", [], [3, 4], [[3], []]), has_mask=(None, 3, "yes"), hidden_size=(*INT_FROM_1, 7), num_layers=INT_FROM_1,
        num_heads=(*INT_FROM_1, 3), num_frequencies=INT_FROM_1, dropout=SHARE, num_timesteps=optional(INT_FROM_1),
    ),
    "d3pm_hf.D3PMTablePipeline": row(
        lambda w: {"table_model": w.table_pipeline.table_model, "scheduler": w.table_pipeline.scheduler, "schema": w.table_pipeline.config.schema},
        {"schema": "schema|columns", "scheduler": "scheduler"}, table_model=OTHER, scheduler=(*OTHER, DDPMScheduler(), D3PMScheduler(K, T)),
        schema=(None, 3, "ab", [], {}, {"columns": 3}, {"columns": [3]}),
    ),
    "d3pm_hf.D3PMTablePipeline.__call__": row(
        lambda w: {"self": w.table_pipeline, "num_inference_steps": 2},
        num_rows=INT_FROM_1, given=(3, "ab", [], {"c": 1}), batch_size=INT_FROM_1,
        **{name: CALL[name] for name in ("num_inference_steps", "generator", "temperature", "top_k", "top_p", "sampler", "sampler_kwargs")},
        num_particles=INT_FROM_1, output_type=CHOICE, return_dict=BOOL,
        callback_on_step_end=CALL["callback_on_step_end"], callback_on_step_end_tensor_inputs=CALL["callback_on_step_end_tensor_inputs"],
    ),
    "d3pm_hf.D3PMTablePipeline.fit": row(
        lambda w: {"frame": w.frame, "max_train_steps": 1, "network": {"hidden_size": 8}, "progress_bar": False},
        {"output_dir": "output_dir", "eval_frame": "frame"}, frame=FRAMES, eval_frame=optional(FRAMES), schema=(3, "ab", [], {}),
        categorical=(3, "ab", ["c"]), num_bins=(*optional(INT_FROM_1), 1), transition=(None, 3, [], "nonsense", {"c": "uniform"}),
        num_train_timesteps=optional(INT_FROM_1), network=(None, 3, [], "nonsense", {"name": "nonsense"}), output_dir=(),
        seed=INT_FROM_0, progress_bar=(None, 3, "yes"),
    ),
    "d3pm_hf.D3PMTablePipeline.impute": row(
        lambda w: {"self": w.table_pipeline, "frame": w.frame, "num_inference_steps": 2}, frame=FRAMES, num_samples=optional(INT_FROM_1),
        num_inference_steps=CALL["num_inference_steps"], batch_size=INT_FROM_1, generator=CALL["generator"], temperature=TEMPERATURE,
        num_particles=INT_FROM_1,
    ),
    "d3pm_hf.D3PMTablePipeline.log_likelihood": row(
        lambda w: {"self": w.table_pipeline, "frame": w.frame}, frame=FRAMES, order=(3, "nonsense", []), batch_size=INT_FROM_1,
        num_eval_timesteps=(), seed=INT_FROM_0, progress_bar=(None, 3, "yes"),
    ),
    "d3pm_hf.D3PMTablePipeline.plot": row(
        lambda w: {"self": w.table_pipeline, "frame": w.frame, "num_rows": 2}, {"rows": "frame"}, frame=FRAMES, rows=optional(FRAMES),
        num_rows=INT_FROM_1, max_columns=INT_FROM_1, generator=CALL["generator"],
    ),
    "d3pm_hf.tables.D3PMTablePipeline": row(None, table_model=(), scheduler=(), schema=()),
    "d3pm_hf.tables.TableSchema": row(
        lambda w: {"columns": w.table_pipeline.config.schema["columns"]}, {"columns": "column"},
        columns=(None, 3, "ab", [], [3], [{"name": "a"}], [{"name": "a", "kind": "b"}]),
    ),
    "d3pm_hf.D3PMImagePipeline": row(
        lambda w: {"unet": w.unet, "scheduler": w.scheduler}, unet=OTHER, scheduler=(*OTHER, DDPMScheduler()), num_class_labels=CLASSES,
    ),
    "d3pm_hf.D3PMImagePipeline.encode": row(
        lambda w: {"self": w.image_pipeline, "image": Image.new("RGB", (4, 4))}, {"image": "image|states|token"},
        image=(None, *PICTURES, states(K, 1, 3, 4, 4)),
    ),
    "d3pm_hf.D3PMImagePipeline.encode_mask": row(
        lambda w: {"self": w.image_pipeline, "mask_image": Image.new("L", (4, 4))}, mask_image=(None, *PICTURES[:-1])
    ),
    "d3pm_hf.D3PMImagePipeline.decode": row(
        lambda w: {"self": w.image_pipeline, "states": states(0, 1, 3, 4, 4)}, {"states": "states|token"},
        states=(*STATES, states(0, 3, 4, 4)), output_type=CHOICE,
    ),
    "d3pm_hf.D3PMImagePipeline.__call__": row(
        lambda w: {"self": w.image_pipeline, "image": states(0, 1, 3, 4, 4), "mask_image": torch.ones(1, 1, 4, 4)},
        {"image": "image|states|token", "latents": "latents|token"}, num_images_per_prompt=INT_FROM_1, image=PICTURES, mask_image=PICTURES[:-1], **CALL,
    ),
    "d3pm_hf.evaluation.ClassifierFeatures": row(None, name_or_path=NAME),
    "d3pm_hf.evaluation.evaluate_pipeline": row(
        lambda w: {"pipeline": w.plain_pipeline, "dataset": w.crops, "num_inference_steps": (2,), "num_timed_samples": 0,
                   "num_samples": 0, "progress_bar": False, "max_eval_samples": 2},
        pipeline=OTHER, dataset=DATASET, dataset_name=NAME, split=NAME,
        num_inference_steps=(None, 3, "ab", [], [0], [2.5], ["a"], [-1]),
        max_eval_samples=optional(INT_FROM_1), num_eval_timesteps=optional(INT_FROM_1), num_timed_samples=INT_FROM_0, num_samples=INT_FROM_0,
        continuous_time=BOOL, likelihood=(None, 3, "margin", ["nonsense"], ["random"], [3]),
        num_sample_steps=INT_FROM_1, batch_size=INT_FROM_1, feature_extractor=(3, 2.5, []), seed=INT_FROM_0, progress_bar=BOOL,
    ),
    "d3pm_hf.evaluation.image_scores": row(
        lambda w: {"samples": torch.rand(4, 3, 4, 4), "reference": torch.rand(4, 3, 4, 4), "feature_extractor": Brightness()},
        samples=(None, 3, "ab", [], torch.zeros(3), torch.zeros(0, 3, 4, 4), states(0, 4, 3, 4, 4)),
        reference=(None, 3, "ab", [], torch.zeros(3), torch.zeros(0, 3, 4, 4), states(0, 4, 3, 4, 4)),
        feature_extractor=(None, 3, 2.5, []),
    ),
    "d3pm_hf.evaluation.judge_samples": row(
        lambda w: {"judge": w.judge, "sequences": states(0)}, {"sequences": "sequences|states|token"}, judge=OTHER,
        sequences=(*STATES, states(K - 1), states(0, B, N + 1), states(0, N)), ngram_size=(*INT_FROM_1, N + 1), batch_size=INT_FROM_1,
    ),
    "d3pm_hf.evaluation.ngram_entropy": row(
        lambda w: {"sequences": states(0)}, sequences=(*NO_TENSOR, states(0).float(), states(0, 0, N), states(0, N)), ngram_size=(*INT_FROM_1, N + 1),
    ),
    "d3pm_hf.evaluation.optimize_timesteps": row(
        lambda w: {"pipeline": w.plain_pipeline, "dataset": w.crops, "num_examples": 2, "grid": 2, "progress_bar": False},
        {"grid": "grid|timesteps"}, pipeline=OTHER, dataset=DATASET, num_examples=INT_FROM_1,
        grid=(None, "3", 2.5, NAN, 0, -1, [], [2.5], [0], [0, T - 1], [T]), batch_size=INT_FROM_1, seed=INT_FROM_0, progress_bar=BOOL,
    ),
    "d3pm_hf.evaluation.time_sampling": row(
        lambda w: {"pipeline": w.text_pipeline, "num_inference_steps": 2}, pipeline=OTHER, num_inference_steps=(*INT_FROM_1, T + 1),
        num_timed_samples=INT_FROM_1,
    ),
    "d3pm_hf.evaluation.token_entropy": row(
        lambda w: {"sequences": states(0)}, sequences=(*NO_TENSOR, states(0).float(), states(0, 0, N), states(0, N))
    ),
    "d3pm_hf.evaluation.word_statistics": row(
        lambda w: {"texts": ["a b c"], "reference": ["a b c"]}, texts=(None, 3, "ab", [3], [None]), reference=(None, 3, "ab", [3], [None])
    ),
    "d3pm_hf.register_schedule": row(lambda w: {"name": "mine"}, name=NAME),
    "d3pm_hf.register_transition": row(lambda w: {"name": "mine"}, name=NAME, description=optional(NAME)),
    "d3pm_hf.schedules.register_schedule": row(lambda w: {"name": "mine"}, name=NAME),
    "d3pm_hf.schedules.beta_schedules": row(lambda w: {}),
    "d3pm_hf.schedules.schedule_names": row(lambda w: {}),
    "d3pm_hf.schedules.create_betas": row(
        lambda w: {"name": "linear", "num_steps": T, "ends": (None, None), "default_ends": (0.1, 1.0)}, name=CHOICE, num_steps=INT_FROM_1,
        ends=(), default_ends=(),
    ),
    "d3pm_hf.schedules.information": row(
        lambda w: {"unigram": torch.full((K,), 1 / K), "matrix": torch.eye(K)}, unigram=PROBABILITIES, matrix=PROBABILITIES
    ),
    "d3pm_hf.transitions.register_transition": row(lambda w: {"name": "mine"}, name=NAME, description=optional(NAME)),
    "d3pm_hf.transitions.transition_families": row(lambda w: {}),
    "d3pm_hf.transitions.get_family": row(lambda w: {"name": "uniform"}, {"name": "transition"}, name=CHOICE),
    "d3pm_hf.transitions.rate_transition": row(
        lambda w: {"rates": torch.ones(K, K) - K * torch.eye(K), "exponents": torch.ones(T)}, {"rates": "rate"}, rates=(None, *RATES), exponents=BETAS
    ),
    "d3pm_hf.transitions.AutoregressiveTransition": row(
        lambda w: {"num_classes": K, "length": N, "mask_token_id": 0}, num_classes=(*INT_FROM_1, 1), length=INT_FROM_1,
        mask_token_id=(*INT_FROM_0, K),
    ),
    "d3pm_hf.transitions.DenseRateTransition": row(
        lambda w: {"rates": torch.ones(K, K) - K * torch.eye(K), "exponents": torch.ones(T)}, {"rates": "rate"}, rates=(None, *RATES), exponents=BETAS
    ),
    "d3pm_hf.transitions.SparseRateTransition": row(
        lambda w: {"rates": (torch.ones(K, K) - K * torch.eye(K)).double().to_sparse(), "exponents": torch.ones(T).double()}, {"rates": "rate"},
        rates=(None, *RATES), exponents=BETAS,
    ),
    "d3pm_hf.transitions.ByElementTransition": row(
        lambda w: {"parts": [(w.scheduler.transition, [0, 1], list(range(K)))], "num_classes": K}, {"parts": "parts|element|states"},
        parts=(None, 3, [], [3], [(3, [0], [1])]), num_classes=(*INT_FROM_1, 1),
    ),
    "d3pm_hf.transitions.MatrixTransition": row(
        lambda w: {"matrices": torch.full((K, K), 1 / K), "num_steps": T}, {"matrices": "matri", "prior": "prior|stationary"},
        matrices=(None, *(value for value in MATRICES if not torch.is_tensor(value) or len(value) == K), torch.ones(2, 3)), num_steps=INT_FROM_1,
        prior=DISTRIBUTION,
    ),
    "d3pm_hf.transitions.ToeplitzTransition": row(
        lambda w: {"log_kernels": (torch.ones(T, K) / (2 * K)).log()},
        log_kernels=(None, 3, "ab", [], torch.zeros(K), torch.full((T, K), NAN), torch.zeros(T, K), torch.zeros(T, 0)),
    ),
    "d3pm_hf.transitions.RankOneTransition": row(
        lambda w: {"stationary": torch.ones(K) / K, "exponents": torch.ones(T).double()}, {"exponents": "exponents|schedule"},
        stationary=(None, *(value for value in DISTRIBUTION)), exponents=BETAS,
    ),
}  # fmt: skip


class Brightness(torch.nn.Module):
    """The simplest extractor of features."""

    num_features = 3

    def forward(self, images):
        return images.float().mean((2, 3))


pytestmark = pytest.mark.usefixtures("fresh_accelerator")


class World:
    """Files and components of a size that costs nothing."""

    def __init__(self, folder: Path):
        self.folder, self.cache = folder, folder / "cache"
        text = data.text8_normalize(" ".join(topics[name] for name in sorted(topics)[:3]))
        self.sentences = text.split(" the ")
        self.text, self.lines, self.log = folder / "text.txt", folder / "lines.txt", folder / "log.jsonl"
        self.text.write_text("abc " * 100)
        self.lines.write_text("\n".join(self.sentences))
        self.log.write_text('{"step": 1}\n')
        self.images = folder / "images"
        self.images.mkdir()
        Image.new("RGB", (4, 4)).save(self.images / "0.png")
        self.scheduler, self.autoregressive = D3PMScheduler(K, T), D3PMScheduler(K, N, transition="autoregressive")
        self.scheduler.set_timesteps(T)
        self.text_pipeline = D3PMTextPipeline(
            create_text_model("tiny", K, num_class_labels=2),
            D3PMScheduler(K, T),
            character_tokenizer("abc"),
            sequence_length=9,
            num_class_labels=2,
        )
        self.plain_pipeline = D3PMTextPipeline(
            create_text_model("tiny", K), D3PMScheduler(K, T), character_tokenizer("abc"), sequence_length=9
        )
        causal = create_text_model("tiny", K, is_decoder=True, timestep_conditioning=False)
        self.judge = D3PMTextPipeline(causal, self.autoregressive, sequence_length=N)
        self.frame = pd.DataFrame({"a": [1.5, 2.5, 3.5] * 4, "b": ["x", "y", "y"] * 4})
        self.table_pipeline = D3PMTablePipeline.create(
            self.frame, num_train_timesteps=T, network={"hidden_size": 8, "num_layers": 1}
        )
        self.documents = Dataset.from_dict({"text": ["ab", "abc"]})
        self.masked_lm = BertForMaskedLM(
            BertConfig(vocab_size=K, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
        )
        self.causal_lm = GPT2LMHeadModel(
            GPT2Config(vocab_size=K, n_embd=8, n_layer=1, n_head=1, n_positions=9, bos_token_id=0)
        )
        self.plain_unet = create_unet("tiny", K, 4)
        self.unet = create_unet("tiny", K, 4, num_class_labels=2)
        self.image_pipeline = D3PMImagePipeline(self.unet, D3PMScheduler(K, T), num_class_labels=2)
        for pipeline in (self.text_pipeline, self.image_pipeline):
            pipeline.set_progress_bar_config(disable=True)
        self.saved = folder / "saved"
        self.scheduler.save_pretrained(self.saved)
        model = lambda x, t: torch.zeros(*x.shape, K)  # noqa: E731
        self.bound = evaluate_bound(self.scheduler, model, [states(0)], progress_bar=False)
        self.crops = data.TextCrops(np.random.default_rng(0).integers(0, 3, 99, np.uint8), 9, 3)
        self.pieces = data.train_piece_tokenizer(self.sentences, 60)
        self.sentencepiece = folder / "pieces.model"
        self.sentencepiece.write_bytes(sentencepiece_model())

    def training_arguments(self):
        settings = {"max_train_steps": 1, "train_batch_size": 2, "validation_steps": 0, "num_samples": 0}
        return training.D3PMTrainingArguments(str(self.folder / "run"), overwrite_output_dir=True, **settings)

    def trainer_arguments(self):
        return TrainingArguments(
            str(self.folder / "trainer"), max_steps=1, report_to="none", save_strategy="no", use_cpu=True
        )


def sentencepiece_model() -> bytes:
    proto = importlib.import_module("transformers.convert_slow_tokenizer").import_protobuf().ModelProto()
    for piece in ("<unk>", "</s>", "a", "b"):
        proto.pieces.add(piece=piece, score=0.0)
    proto.trainer_spec.model_type, proto.trainer_spec.unk_id = proto.trainer_spec.UNIGRAM, 0
    proto.trainer_spec.eos_id, proto.trainer_spec.bos_id = 1, -1
    return proto.SerializeToString()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


def find(name: str):
    """The function or the method of a row; what follows a space tells apart rows of one function."""
    *path, attribute = name.split(" ")[0].split(".")
    owner = importlib.import_module(".".join(part for part in path if part[0].islower()))
    for part in path:
        owner = getattr(owner, part) if part[0].isupper() else owner
    return getattr(owner, attribute)


def public_names() -> set[str]:
    """All that `__all__` of the modules names, or that a module without it defines; and methods of the main classes."""
    names = set()
    for module in map(importlib.import_module, MODULES):
        own = [name for name, value in vars(module).items()
               if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"]  # fmt: skip
        names |= {f"{module.__name__}.{name}" for name in getattr(module, "__all__", own)}
    methods = {name: value for base in D3PMScheduler.__mro__ if base.__module__.startswith("d3pm_hf.") for name, value in vars(base).items()}  # fmt: skip
    names |= {f"d3pm_hf.D3PMScheduler.{name}" for name, value in methods.items()
              if name[0] != "_" and (inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod)))}  # fmt: skip
    calls = {D3PMTextPipeline: ("from_masked_lm", "from_causal_lm", "encode", "decode", "__call__"), D3PMImagePipeline: ("encode", "encode_mask", "decode", "__call__"), D3PMTablePipeline: ("__call__", "fit", "impute", "log_likelihood", "plot")}  # fmt: skip
    return names | {f"d3pm_hf.{owner.__name__}.{method}" for owner, methods in calls.items() for method in methods}


def test_every_public_function_has_a_row():
    assert public_names() - EXEMPT == {name.split(" ")[0] for name in ROWS}
    for name, entry in ROWS.items():
        named = {parameter.name for parameter in inspect.signature(find(name)).parameters.values()
                 if parameter.kind is not parameter.VAR_KEYWORD}  # fmt: skip
        assert named - {"self"} == set(entry.kinds), name


@pytest.mark.parametrize("name", [name for name, entry in ROWS.items() if entry.valid is not None])
def test_right_values(name, world):
    """The calls that the wrong values are put into are right by themselves."""
    if name == "d3pm_hf.data.python_prose":
        pytest.skip("takes seconds, and has its own test")
    call(name, world)


def call(name, world, /, **changes):
    arguments = {**(ROWS[name].valid(world) if ROWS[name].valid else {}), **changes}
    owner = (arguments.pop("self"),) if "self" in arguments else ()
    return find(name)(*owner, **arguments)


@pytest.mark.parametrize(
    "name, argument", [(name, argument) for name, entry in ROWS.items() for argument in entry.kinds if entry.kinds[argument]]
)  # fmt: skip
def test_wrong_values(name, argument, world):
    complaints = []
    for value in ROWS[name].kinds[argument]:
        try:
            call(name, world, **{argument: value})
        except Exception as error:  # whatever it is, it is judged
            words = ROWS[name].words.get(argument, argument)
            complaints += [f"{value!r}: {complaint}" for complaint in judge(error, words)]
        else:
            complaints.append(f"{value!r} is accepted")
    assert not complaints, "\n".join(complaints)


def judge(error: Exception, words: str) -> list[str]:
    """What is wrong with an error: its type, where it comes from, or what it says."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    shown = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
    if not isinstance(error, (ValueError, TypeError, OSError)):
        return [f"raw {shown}"]
    line = linecache.getline(frame.filename, frame.lineno).strip()
    if PACKAGE not in Path(frame.filename).parents or not line.startswith("raise "):
        return [f"not raised by this package: {shown}"]
    return [] if any(word in str(error) for word in words.split("|")) else [f"does not name {words}: {shown}"]
