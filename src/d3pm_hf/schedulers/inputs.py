# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checks of what the methods of a scheduler take: states, outputs of networks, logits."""

from typing import Any

import torch

from ..transitions.base import Transition
from ..utils.checks import check_tensor, check_type, values_are_known


class InputChecksMixin:
    """Checks of the states and of the outputs of networks that [`D3PMScheduler`] takes."""

    config: Any
    transition: Transition

    def check_states(self, x: torch.Tensor) -> None:
        """Checks that `x` holds states in 0 .. K-1. Values are checked where they are known: see [`values_are_known`]."""
        check_type("the tensor of states", x, torch.Tensor, "a `torch.LongTensor`")
        if x.dtype != torch.long:
            raise ValueError(f"states have the dtype {x.dtype}: pass tokens as `x.long()`")
        if not x.numel():
            raise ValueError(f"states of shape {tuple(x.shape)} hold no element: pass at least one")
        if not values_are_known(x):
            return
        low, high = (v.item() for v in x.aminmax())
        if low < 0 or high >= self.config.num_classes:
            wrong = ((x < 0) | (x >= self.config.num_classes)).nonzero()[0].tolist()
            raise ValueError(
                f"token {x[tuple(wrong)].item()} at position {tuple(wrong)} is outside the vocabulary of "
                f"{self.config.num_classes}: check that the tokenizer and the scheduler agree on num_classes"
            )

    def check_model_output(self, model_output: torch.Tensor, sample: torch.Tensor) -> None:
        """Checks that `sample` holds valid states and that `model_output` has shape `[*sample.shape, K]`, or `[..., 2]`."""
        self.check_states(sample)
        last = 2 if self.config.prediction_type == "logistic" else self.config.num_classes
        check_tensor("the network's output", model_output)
        if model_output.shape != (*sample.shape, last):
            raise ValueError(
                f"the network's output has the shape {tuple(model_output.shape)}, and states {tuple(sample.shape)} with "
                f"prediction_type={self.config.prediction_type!r} need {(*sample.shape, last)}, classes last"
            )

    @staticmethod
    def _check_logits(logits: torch.Tensor) -> None:
        """Checks that no logit is NaN or infinite, and that each row leaves at least one state possible.

        Where the values are not known, samplers check what they have seen once per call.
        """
        if not values_are_known(logits):
            return
        low, top = logits.aminmax()
        if low.isfinite() & top.isfinite():
            return
        if not top < torch.inf:
            raise ValueError("the network's output holds NaN or infinity: look at its weights and its input")
        excluded = logits.amax(-1) == -torch.inf
        if excluded.any():
            position = tuple(excluded.nonzero()[0].tolist())
            raise ValueError(f"all logits at position {position} are -inf: leave at least one state possible")

    def check_possible(self, undefined: torch.Tensor, logits: torch.Tensor, sample: torch.Tensor, t) -> None:
        """Checks that the logits of the `undefined` elements `[B, ...]` allow an x_0 that leads to x_t."""
        if not undefined.any():
            return
        self._check_logits(self.transition.forbid(logits.where(undefined[..., None], 0)))
        excluded = undefined & self.transition.excludes_state(logits, sample, t)
        if excluded.any():
            position = tuple(excluded.nonzero()[0].tolist())
            raise ValueError(
                f"the logits at position {position} rule out every x_0 that can lead to x_t = {sample[position].item()}: "
                "leave at least one of them above -inf"
            )
