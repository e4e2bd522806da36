# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""States that data never hold: the mask, special tokens, rows of an output layer that no token has."""

from collections.abc import Iterable

import torch


class ExcludedStates:
    """A set of states whose logits are minus infinity, whatever the network says.

    Args:
        states (`Iterable[int]`): The states.
    """

    def __init__(self, states: Iterable[int]):
        self.states = tuple(states)
        self._indices: dict[torch.device, torch.Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.states)

    def index(self, device: torch.device) -> torch.Tensor:
        """The states as a tensor on `device`, made once."""
        if device not in self._indices:
            self._indices[device] = torch.tensor(self.states, dtype=torch.long, device=device)
        return self._indices[device]

    def fill(self, values: torch.Tensor, number: float) -> torch.Tensor:
        """`values` `[..., K]` with `number` at the states of the set; a copy unless the set is empty."""
        return values.index_fill(-1, self.index(values.device), number) if self else values

    def fill_(self, values: torch.Tensor, number: float) -> torch.Tensor:
        """Writes `number` to the states of the set in `values` `[..., K]`."""
        return values.index_fill_(-1, self.index(values.device), number) if self else values

    def contain(self, x: torch.Tensor) -> torch.Tensor:
        """Whether each of the states `x` is in the set."""
        if len(self.states) == 1:
            return x == self.states[0]
        return torch.isin(x, self.index(x.device))
