# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What the output of a network says about x_0, for fused losses that read it piece by piece: logits, or a logistic."""

import math

import torch

from ...schedulers.logistic import MAX_LOG_INVERSE_SCALE, logistic_logits


# Powers of two with exponents beyond this do not fit into float32.
MAX_EXPONENT = 125.0
# If half a bin is wider than so many scales, probabilities in float32 underflow before those that matter do.
MAX_HALF_WIDTH = 7.0


class LogitsHead:
    """The output is logits, `[..., K]`."""

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Logits of x_0 `[..., K]`."""
        return output

    def probabilities(self, output: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """p(x_0), float32 `[n, K]`, written to `out`; NaN in rows that float32 does not hold."""
        return torch.softmax(output, -1, out=out)

    def pull_back(self, gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """The gradient with respect to the output, from that with respect to the logits."""
        return gradient


class LogisticHead:
    """The output is location and log-scale of a discretized, truncated logistic, `[..., 2]`; see [`logistic_logits`].

    With x = (c - mu) / s at the bin around c, and h = w / 2s, the logits are log sigmoid(h + x) + log sigmoid(h - x), and

        p ~ 1 / (cosh x + cosh h)

    Args:
        num_classes (`int`): K.
    """

    def __init__(self, num_classes: int):
        self.num_classes = num_classes

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        location, log_scale = output.unbind(-1)
        return logistic_logits(location, log_scale, self.num_classes)

    def probabilities(self, output: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        bits, half_width, _ = self._standardized(output, math.log2(math.e))
        power = bits.clamp_(-MAX_EXPONENT, MAX_EXPONENT).exp2_()  # exp(x), faster
        fits = half_width.masked_fill(half_width > MAX_HALF_WIDTH, torch.nan)
        torch.reciprocal(power, out=out).add_(power).add_(2 * fits.cosh()).reciprocal_()
        return out.div_(out.sum(-1, keepdim=True))

    def pull_back(self, gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        x, half_width, inverse_scale = self._standardized(output)
        # dlogits / dx = above - below, and -dlogits / dh = -(above + below), times the gradient
        above = torch.sub(-half_width, x).sigmoid_().mul_(gradient)
        below = torch.sub(x, half_width).sigmoid_().mul_(gradient)
        both = above.sum(-1, keepdim=True).add_(below.sum(-1, keepdim=True))
        slope = above.sub_(below)
        location = -inverse_scale * slope.sum(-1, keepdim=True)
        log_scale = -x.mul_(slope).sum(-1, keepdim=True).addcmul_(half_width, both)
        is_free = 2 - output[..., 1:] <= MAX_LOG_INVERSE_SCALE
        return torch.cat([location, torch.where(is_free, log_scale, 0)], -1)

    def _standardized(
        self, output: torch.Tensor, factor: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x times a factor, `[..., K]`, h and 1 / s, `[..., 1]`."""
        location, log_scale = output[..., :1], output[..., 1:]
        inverse_scale = torch.exp((2 - log_scale).clamp(max=MAX_LOG_INVERSE_SCALE))
        centers = torch.linspace(-1, 1, self.num_classes, dtype=output.dtype, device=output.device)
        x = (centers - location).mul_(factor * inverse_scale)
        return x, inverse_scale / (self.num_classes - 1), inverse_scale
