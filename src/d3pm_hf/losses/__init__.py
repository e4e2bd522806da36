# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""L_vb and L_lambda, in nats per element."""

from .variational import D3PMLossOutput, autoregressive_loss, d3pm_loss, prior_loss


__all__ = ["D3PMLossOutput", "autoregressive_loss", "d3pm_loss", "prior_loss"]
