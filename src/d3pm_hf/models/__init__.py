# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Networks that predict x_0 from x_t, behind one signature."""

from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from .configuration_d3pm_dit import D3PMDiTConfig
from .configuration_d3pm_text import D3PMTextConfig
from .denoisers import Denoiser
from .image_denoiser import ImageDenoiser, predict_image
from .modeling_d3pm_dit import D3PMDiT
from .modeling_d3pm_text import D3PMTextModel
from .presets import create_text_model, create_unet
from .table_denoisers import D3PMTableMLP, D3PMTableTransformer
from .text_denoisers import CausalLMDenoiser, MaskedLMDenoiser, TextDenoiser


# So that the auto classes of transformers load our networks.
for _config, _model in ((D3PMTextConfig, D3PMTextModel), (D3PMDiTConfig, D3PMDiT)):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForMaskedLM.register(_config, _model, exist_ok=True)

__all__ = [
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
]
