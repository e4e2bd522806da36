# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The output of a network as logits of x_0, for fused losses that read it piece by piece: logits, or a logistic."""

import torch

from ..schedulers.logistic import MAX_LOG_INVERSE_SCALE, logistic_logits, standardize


class LogitsHead:
    """The output is logits, `[..., K]`."""

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Logits of x_0 `[..., K]`."""
        return output

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
