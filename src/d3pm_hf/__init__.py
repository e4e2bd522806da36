# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Structured denoising diffusion models in discrete state-spaces (D3PM) for the HuggingFace ecosystem."""

# diffusers looks these names up beside our classes, to find out how each of them is loaded.
from diffusers import ModelMixin, SchedulerMixin  # noqa: F401
from transformers import PreTrainedModel  # noqa: F401

from .data import character_tokenizer
from .hub.cards import bound_results, create_model_card
from .hub.export import export
from .likelihood import Bound, evaluate_bound
from .losses.variational import D3PMLossOutput, autoregressive_loss, d3pm_loss, prior_loss
from .models import (
    CausalLMDenoiser,
    D3PMTextConfig,
    D3PMTextModel,
    Denoiser,
    ImageDenoiser,
    TextDenoiser,
    create_text_model,
    create_unet,
    predict_image,
)
from .pipelines import (
    D3PMImagePipeline,
    D3PMImagePipelineOutput,
    D3PMPipeline,
    D3PMTextPipeline,
    D3PMTextPipelineOutput,
    Trajectory,
)
from .samplers import ClassifierGuidance, register_sampler
from .schedulers import D3PMScheduler, D3PMSchedulerOutput
from .schedulers.logistic import logistic_logits
from .schedules import register_schedule
from .transitions import Transition, register_transition


__version__ = "0.1.0.dev0"

__all__ = [
    "Bound",
    "CausalLMDenoiser",
    "ClassifierGuidance",
    "D3PMImagePipeline",
    "D3PMImagePipelineOutput",
    "D3PMLossOutput",
    "D3PMPipeline",
    "D3PMScheduler",
    "D3PMSchedulerOutput",
    "D3PMTextConfig",
    "D3PMTextModel",
    "D3PMTextPipeline",
    "D3PMTextPipelineOutput",
    "Denoiser",
    "ImageDenoiser",
    "TextDenoiser",
    "Trajectory",
    "Transition",
    "autoregressive_loss",
    "bound_results",
    "character_tokenizer",
    "create_model_card",
    "create_text_model",
    "create_unet",
    "d3pm_loss",
    "evaluate_bound",
    "export",
    "logistic_logits",
    "predict_image",
    "prior_loss",
    "register_sampler",
    "register_schedule",
    "register_transition",
]
