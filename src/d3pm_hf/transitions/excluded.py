# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""States that data never hold: the mask, special tokens, rows of an output layer that no token has."""

from collections.abc import Iterable

import torch


# A set of more stretches than this is written by an index.
MAX_STRETCHES = 8


class ExcludedStates:
    """A set of states whose logits are minus infinity, whatever the network says.

    Sets are few stretches of the vocabulary, such as the special tokens at its start: a stretch is a slice, which is faster than
    an index and is made on the device.

    Args:
        states (`Iterable[int]`): The states.
        num_classes (`int`): K.
    """

    def __init__(self, states: Iterable[int], num_classes: int):
        self.states, self.num_classes = tuple(states), num_classes
        distinct = set(self.states)
        # The first state of each stretch, and the state after its last one.
        starts = [state for state in sorted(distinct) if state - 1 not in distinct]
        ends = [state + 1 for state in sorted(distinct) if state + 1 not in distinct]
        self.stretches = list(zip(starts, ends))
        # The same for the states that are not in the set.
        self.others = [(end, start) for end, start in zip([0, *ends], [*starts, num_classes]) if end < start]
        self._indices: dict[torch.device, torch.Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.states)

    def index(self, device: torch.device) -> torch.Tensor:
        """The states as a tensor on `device`, made once."""
        if device not in self._indices:
            self._indices[device] = torch.tensor(self.states, dtype=torch.long, device=device)
        return self._indices[device]

    def fill_(self, values: torch.Tensor, number: float) -> torch.Tensor:
        """Writes `number` to the states of the set in `values` `[..., K]`."""
        if len(self.stretches) > MAX_STRETCHES:
            return values.index_fill_(-1, self.index(values.device), number)
        for start, end in self.stretches:
            values[..., start:end] = number
        return values

    def fill(self, values: torch.Tensor, number: float) -> torch.Tensor:
        """`values` `[..., K]` with `number` at the states of the set; a copy unless the set is empty."""
        return values.index_fill(-1, self.index(values.device), number) if self else values

    def largest_other(self, values: torch.Tensor) -> torch.Tensor:
        """The maximum of `values` `[..., K]` over the states that are not in the set, `[..., 1]`."""
        if len(self.stretches) > MAX_STRETCHES:
            return self.fill(values, -torch.inf).amax(-1, keepdim=True)
        tops = [values[..., start:end].amax(-1, keepdim=True) for start, end in self.others]
        return tops[0] if len(tops) == 1 else torch.cat(tops, -1).amax(-1, keepdim=True)

    def contain(self, x: torch.Tensor) -> torch.Tensor:
        """Whether each of the states `x` is in the set."""
        if not self:
            return torch.zeros_like(x, dtype=torch.bool)
        if len(self.states) == 1:
            return x == self.states[0]
        return torch.isin(x, self.index(x.device))
