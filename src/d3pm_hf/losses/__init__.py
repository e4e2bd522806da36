# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""L_vb and L_lambda, in nats per element: their plain definition, and fused losses with the same numbers."""

from ..kernels.fused import register_fused_loss
from ..transitions.kernel import Options
from .network import logits_to_keep, network_loss
from .plain import plain_terms
from .variational import D3PMLossOutput, autoregressive_loss, d3pm_loss, prior_loss


__all__ = [
    "D3PMLossOutput",
    "Options",
    "autoregressive_loss",
    "d3pm_loss",
    "logits_to_keep",
    "network_loss",
    "plain_terms",
    "prior_loss",
    "register_fused_loss",
]
