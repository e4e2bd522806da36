# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
from .configuration_d3pm_text import D3PMTextConfig
from .modeling_d3pm_text import D3PMTextModel
from .presets import create_text_model, create_unet
from .unet import predict_image


__all__ = ["D3PMTextConfig", "D3PMTextModel", "create_text_model", "create_unet", "predict_image"]
