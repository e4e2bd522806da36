# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Structured denoising diffusion models in discrete state-spaces (D3PM) for the HuggingFace ecosystem."""

from typing import TYPE_CHECKING

from .utils.lazy import lazy_names


if TYPE_CHECKING:
    # diffusers looks these names up beside our classes, to find out how each of them is loaded.
    from diffusers import ModelMixin, SchedulerMixin  # noqa: F401
    from transformers import PreTrainedModel  # noqa: F401

    from .data import character_tokenizer
    from .hub.cards import bound_results, create_model_card
    from .hub.export import export
    from .likelihood import (
        Bound,
        DocumentBounds,
        Likelihood,
        evaluate_bound,
        evaluate_documents,
        evaluate_likelihood,
        log_likelihood,
    )
    from .losses.network import logits_to_keep, network_loss
    from .losses.variational import D3PMLossOutput, autoregressive_loss, d3pm_loss, prior_loss
    from .models import (
        CausalLMDenoiser,
        D3PMDiT,
        D3PMDiTConfig,
        D3PMTableMLP,
        D3PMTableTransformer,
        D3PMTextConfig,
        D3PMTextModel,
        Denoiser,
        ImageDenoiser,
        MaskedLMDenoiser,
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
    from .schedulers import D3PMScheduler, D3PMSchedulerOutput, UnitTimeScheduler
    from .schedulers.logistic import logistic_logits
    from .schedules import register_schedule
    from .tables import D3PMTablePipeline
    from .transitions import Transition, register_transition

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "diffusers": ["ModelMixin", "SchedulerMixin"],
        "transformers": ["PreTrainedModel"],
        ".data": ["character_tokenizer"],
        ".hub.cards": ["bound_results", "create_model_card"],
        ".hub.export": ["export"],
        ".likelihood": [
            "Bound",
            "DocumentBounds",
            "Likelihood",
            "evaluate_bound",
            "evaluate_documents",
            "evaluate_likelihood",
            "log_likelihood",
        ],
        ".losses.network": ["logits_to_keep", "network_loss"],
        ".losses.variational": ["D3PMLossOutput", "autoregressive_loss", "d3pm_loss", "prior_loss"],
        ".models": [
            "CausalLMDenoiser",
            "D3PMDiT",
            "D3PMDiTConfig",
            "D3PMTableMLP",
            "D3PMTableTransformer",
            "D3PMTextConfig",
            "D3PMTextModel",
            "Denoiser",
            "ImageDenoiser",
            "MaskedLMDenoiser",
            "TextDenoiser",
            "create_text_model",
            "create_unet",
            "predict_image",
        ],
        ".pipelines": [
            "D3PMImagePipeline",
            "D3PMImagePipelineOutput",
            "D3PMPipeline",
            "D3PMTextPipeline",
            "D3PMTextPipelineOutput",
            "Trajectory",
        ],
        ".samplers": ["ClassifierGuidance", "register_sampler"],
        ".schedulers": ["D3PMScheduler", "D3PMSchedulerOutput", "UnitTimeScheduler"],
        ".schedulers.logistic": ["logistic_logits"],
        ".schedules": ["register_schedule"],
        ".tables": ["D3PMTablePipeline"],
        ".transitions": ["Transition", "register_transition"],
    },
)

__version__ = "0.1.0.dev0"

__all__ = [
    "Bound",
    "CausalLMDenoiser",
    "ClassifierGuidance",
    "D3PMDiT",
    "D3PMDiTConfig",
    "D3PMImagePipeline",
    "D3PMImagePipelineOutput",
    "D3PMLossOutput",
    "D3PMPipeline",
    "D3PMScheduler",
    "D3PMSchedulerOutput",
    "D3PMTableMLP",
    "D3PMTablePipeline",
    "D3PMTableTransformer",
    "D3PMTextConfig",
    "D3PMTextModel",
    "D3PMTextPipeline",
    "D3PMTextPipelineOutput",
    "Denoiser",
    "DocumentBounds",
    "ImageDenoiser",
    "Likelihood",
    "MaskedLMDenoiser",
    "TextDenoiser",
    "Trajectory",
    "Transition",
    "UnitTimeScheduler",
    "autoregressive_loss",
    "bound_results",
    "character_tokenizer",
    "create_model_card",
    "create_text_model",
    "create_unet",
    "d3pm_loss",
    "evaluate_bound",
    "evaluate_documents",
    "evaluate_likelihood",
    "export",
    "log_likelihood",
    "logistic_logits",
    "logits_to_keep",
    "network_loss",
    "predict_image",
    "prior_loss",
    "register_sampler",
    "register_schedule",
    "register_transition",
]
