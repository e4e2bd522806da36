# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What the output of a network says about x_0, for fused losses that read it piece by piece: logits, or a logistic."""

import math

import torch

from ...schedulers.logistic import MAX_LOG_INVERSE_SCALE, logistic_logits, standardize


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

    x = (near - far) / s has a part `near` of the bin, and a part `far` of the row: see [`~schedulers.logistic.standardize`].

    Args:
        num_classes (`int`): K.
    """

    def __init__(self, num_classes: int):
        self.num_classes = num_classes

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        location, log_scale = output.unbind(-1)
        return logistic_logits(location, log_scale, self.num_classes)

    def probabilities(self, output: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        near, far, inverse_scale = standardize(output[..., :1], output[..., 1:], self.num_classes)
        bits = near.mul_(inverse_scale * math.log2(math.e))
        power = bits.clamp_(-MAX_EXPONENT, MAX_EXPONENT).exp2_()  # exp(near / s), faster
        half_width, distance = inverse_scale / (self.num_classes - 1), inverse_scale * far
        fits = half_width.masked_fill(half_width > MAX_HALF_WIDTH, torch.nan)
        # 2 cosh x and 2 cosh h, times exp(-|far| / s)
        rising, falling = (torch.exp(-2 * (sign * distance).clamp(min=0)) for sign in (1, -1))
        torch.div(falling, power, out=out).addcmul_(power, rising).add_(2 * fits.cosh() * torch.exp(-distance.abs()))
        return out.reciprocal_().div_(out.sum(-1, keepdim=True))

    def pull_back(self, gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        near, far, inverse_scale = standardize(output[..., :1], output[..., 1:], self.num_classes)
        half_width, side, distance = inverse_scale / (self.num_classes - 1), far.sign(), inverse_scale * far
        near = near.mul_(inverse_scale)  # x = near - distance
        # dlogits / dx = above - below, and -dlogits / dh = -(above + below), times the gradient. The gradient of a row sums to
        # zero, so that those of them that are close to one in all bins may be less by one: 1 - sigmoid(a) = sigmoid(-a).
        up, down = (torch.where(sign * side > 0, -1.0, 1.0).to(near.dtype) for sign in (1, -1))
        above = torch.addcmul(up * (distance - half_width), near, -up).sigmoid_().mul_(gradient)
        below = torch.addcmul(-down * (distance + half_width), near, down).sigmoid_().mul_(gradient)
        both = up * above.sum(-1, keepdim=True) + down * below.sum(-1, keepdim=True)
        slope = above.mul_(up).addcmul_(below, down, value=-1)
        total = slope.sum(-1, keepdim=True)
        log_scale = distance * total - near.mul_(slope.addcmul_(gradient, side)).sum(-1, keepdim=True)
        log_scale = log_scale.addcmul_(half_width, both, value=-1)
        is_free = 2 - output[..., 1:] <= MAX_LOG_INVERSE_SCALE
        return torch.cat([-inverse_scale * total, torch.where(is_free, log_scale, 0)], -1)
