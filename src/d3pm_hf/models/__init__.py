# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Networks that predict x_0 from x_t, behind one signature."""

from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from .configuration_d3pm_text import D3PMTextConfig
from .denoisers import Denoiser
from .image_denoiser import ImageDenoiser, predict_image
from .modeling_d3pm_text import D3PMTextModel
from .presets import create_text_model, create_unet
from .text_denoisers import CausalLMDenoiser, TextDenoiser


# So that the auto classes of transformers load a `D3PMTextModel`.
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
