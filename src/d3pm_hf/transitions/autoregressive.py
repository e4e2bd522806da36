# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The deterministic left-to-right mask, which makes autoregressive models a special case of diffusion."""

import torch

from ..numerics import wide_dtype
from ..utils.checks import check_int
from ..utils.names import TRANSITIONS
from .base import expand_time
from .family import register_transition
from .kernel import keeps
from .rank_one import STEP_DEFINITION, RankOneTransition, absorbing_distribution


@register_transition("autoregressive", TRANSITIONS["autoregressive"])
class AutoregressiveTransition(RankOneTransition):
    """Step t masks position N - t of a sequence of length N = T, and nothing else.

    It is an absorbing process whose survival depends on the position and is either zero or one:
    [x_t]_i = [x_0]_i if i < N - t else mask (section 4 of the paper).

    Examples:
        ```python
        import torch
        from d3pm_hf.transitions import AutoregressiveTransition

        process = AutoregressiveTransition(num_classes=5, length=4, mask_token_id=4)
        assert process.sample(torch.tensor([[0, 1, 2, 3]]), 2).tolist() == [[0, 1, 4, 4]]
        ```
    """

    formula = "I, but 1 e_m' at position N - t"
    has_mask = True
    has_schedule = False
    is_exponential = False
    is_autoregressive = True
    options = ("mask_token_id", "mask_in_data")

    @property
    def reveals_in_order(self):
        return keeps(type(self), AutoregressiveTransition, (*STEP_DEFINITION, "log_survival", "sample_previous"))

    @classmethod
    def create(cls, settings):
        return cls(settings.num_classes, settings.num_steps, settings.mask_token_id)

    def __init__(self, num_classes: int, length: int, mask_token_id: int):
        check_int("num_classes", num_classes, 2)
        check_int("length", length, 1)
        check_int("mask_token_id", mask_token_id, 0, num_classes - 1)
        exponents = torch.full((length,), torch.inf, dtype=torch.float64)
        super().__init__(absorbing_distribution(num_classes, mask_token_id), exponents)

    def log_survival(self, s, t, x):
        if x.ndim > 1 and x.shape[1:] != (self.num_steps,):
            raise ValueError(
                f"got sequences of shape {tuple(x.shape[1:])}: the autoregressive mask takes one step per position, "
                f"so num_train_timesteps ({self.num_steps}) must equal the length of the sequence"
            )
        position = torch.arange(self.num_steps, device=x.device)
        s, t = (expand_time(n, x) for n in (t - 1 if s is None else s, t))
        masked = (position >= self.num_steps - t) & (position < self.num_steps - s)
        zeros = torch.zeros(masked.shape, dtype=wide_dtype(x.device), device=x.device)
        return zeros.masked_fill(masked, -torch.inf)

    def reveal(self, x_0, t):
        """x_0 at the positions before the mask. Networks of this process have never seen a token behind it."""
        return self.sample(x_0, t)

    def matrix(self, s, t):
        """Q_{s..t} of each position, `[N, K, K]`."""
        states = torch.arange(self.num_classes)[:, None].expand(-1, self.num_steps)
        return self.log_marginal(states, s, t, torch.float64).exp().transpose(0, 1)
