# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from .configuration_d3pm_text import D3PMTextConfig
from .denoisers import Denoiser
from .image_denoiser import ImageDenoiser, predict_image
from .modeling_d3pm_text import D3PMTextModel
from .presets import create_text_model, create_unet
from .text_denoisers import CausalLMDenoiser, TextDenoiser


# Registered here and not beside the class, so that the copy of the class in an exported checkpoint does not replace it.
AutoConfig.register("d3pm_text", D3PMTextConfig, exist_ok=True)
AutoModel.register(D3PMTextConfig, D3PMTextModel, exist_ok=True)
AutoModelForMaskedLM.register(D3PMTextConfig, D3PMTextModel, exist_ok=True)

__all__ = [
    "CausalLMDenoiser",
    "D3PMTextConfig",
    "D3PMTextModel",
    "Denoiser",
    "ImageDenoiser",
    "TextDenoiser",
    "create_text_model",
    "create_unet",
    "predict_image",
]
