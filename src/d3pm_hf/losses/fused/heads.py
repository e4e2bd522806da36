# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What the output of a network says about x_0, for fused losses that read it piece by piece: logits, or a logistic."""

import torch

from ...schedulers.logistic import MAX_LOG_INVERSE_SCALE, logistic_logits


# Exponents beyond this do not fit into float32.
MAX_EXPONENT = 87.0
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
        x, half_width, _ = self._standardized(output)
        power = x.clamp_(-MAX_EXPONENT, MAX_EXPONENT).exp_()
        fits = half_width.masked_fill(half_width > MAX_HALF_WIDTH, torch.nan)
        torch.reciprocal(power, out=out).add_(power).add_(2 * fits.cosh()).reciprocal_()
        return out.div_(out.sum(-1, keepdim=True))

    def pull_back(self, gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        x, half_width, inverse_scale = self._standardized(output)
        above, below = torch.sigmoid(-(x + half_width)), torch.sigmoid(x - half_width)
        total = above.add(below).mul_(half_width)  # h dlogits / dh
        slope = above.sub_(below)  # dlogits / dx
        log_scale = -x.mul_(slope).add_(total).mul_(gradient).sum(-1)
        location = -slope.mul_(gradient).sum(-1) * inverse_scale.squeeze(-1)
        is_free = 2 - output[..., 1] <= MAX_LOG_INVERSE_SCALE
        return torch.stack([location, torch.where(is_free, log_scale, 0)], -1)

    def _standardized(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x `[..., K]`, h and 1 / s `[..., 1]`."""
        location, log_scale = output[..., :1], output[..., 1:]
        inverse_scale = torch.exp((2 - log_scale).clamp(max=MAX_LOG_INVERSE_SCALE))
        centers = torch.linspace(-1, 1, self.num_classes, dtype=output.dtype, device=output.device)
        return (centers - location).mul_(inverse_scale), inverse_scale / (self.num_classes - 1), inverse_scale
