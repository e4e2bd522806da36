# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Processes of elements that differ: each has its own number of states, and may have its own family."""

from typing import Any, NamedTuple

import torch

from ..utils.checks import check_int, check_type, describe
from ..utils.names import TRANSITIONS
from .base import Transition
from .family import BY_ELEMENT, register_transition


class Part(NamedTuple):
    """A process that some elements of a sample share.

    Fields:
        transition: The process over the k states of these elements.
        elements: Their places in a sample, `[n]`.
        states: The states of the whole, in 0 .. K-1, that the k states of the part stand for, `[k]`.
    """

    transition: Transition
    elements: list[int]
    states: list[int]

    @property
    def process(self) -> Transition:
        """The transition with its kernel, if it has one."""
        return self.transition.kernel() or self.transition


def _check_part(part: Any, num_classes: int) -> Part:
    """`(transition, elements, states)` as a [`Part`], after checks of its types and sizes."""
    if not isinstance(part, (list, tuple)) or len(part) != 3 or not isinstance(part[0], Transition):
        raise ValueError(f"an entry of parts is {describe(part)}: it must be (transition, elements, states)")
    transition, elements, states = part
    for name, values, high in (("elements", elements, None), ("states", states, num_classes - 1)):
        check_type(f"{name} of an entry of parts", values, (list, tuple), "a list of integers")
        for value in values:
            check_int(f"an entry of {name} of parts", value, 0, high)
    if len(set(states)) != transition.num_classes or len(states) != transition.num_classes:
        raise ValueError(
            f"a transition over {transition.num_classes} states has {len(states)} states of the whole: pass as many, all different"
        )
    return Part(transition, list(elements), list(states))


@register_transition(BY_ELEMENT, TRANSITIONS[BY_ELEMENT])
class ByElementTransition(Transition):
    """A process made of parts, each for some elements of a sample `[B, N]`: Q_t of element i is that of its part.

    The states of a part are some of the K states of the whole. Those that an element does not have are never reached by noise, and
    their logits are minus infinity. Every method is that of the parts, joined.

    `D3PMScheduler(num_classes=[4, 3, 8], transition=["gaussian", "uniform", "absorbing"])` creates it.

    Args:
        parts (`list[tuple]`): `(transition, elements, states)` of each part: a transition over k states, the elements of a
            sample that it is for, and the k states of the whole that its states are. The transitions have equally many steps, and
            each element 0 .. N-1 is in one part.
        num_classes (`int`): K.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler

        scheduler = D3PMScheduler([4, 3], 100, transition=["absorbing", "uniform"], beta_schedule="cosine")
        x_t = scheduler.add_noise(torch.tensor([[3, 0]]), 60)
        assert scheduler.config.num_classes == 5 and x_t[0, 1] < 3  # state 4 is the mask of the first element
        assert (scheduler.transition.matrix(0, 50)[1, :3, 3:] == 0).all()
        ```
    """

    formula = "that of the family of each element"
    options = ("transitions",)
    needs_elements = True

    @classmethod
    def create(cls, settings):
        parts, solved = [], {}
        for number, (elements, states, own) in enumerate(settings.parts()):
            parts.append(Part(own.create(), elements, states))
            if "schedule" in own.tensors:
                solved[number] = own.tensors["schedule"]
        if solved and "schedule" not in settings.tensors:
            zeros = torch.zeros(settings.num_steps, dtype=torch.float64)  # of parts with a schedule in closed form
            settings.tensors["schedule"] = torch.stack([solved.get(number, zeros) for number in range(len(parts))])
        return cls(parts, settings.num_classes)

    def __init__(self, parts: list[Any], num_classes: int):
        super().__init__()
        check_type("parts", parts, (list, tuple), "a list of (transition, elements, states)")
        check_int("num_classes", num_classes, 2)
        self.parts, self.num_classes = [_check_part(part, num_classes) for part in parts], num_classes
        if len({part.transition.num_steps for part in self.parts}) != 1:
            raise ValueError("parts must hold at least one transition, and all of them must have equally many steps")
        self.num_steps = self.parts[0].transition.num_steps
        places = torch.tensor([element for part in self.parts for element in part.elements])
        if sorted(places.tolist()) != list(range(len(places))):
            raise ValueError(f"the parts have the elements {places.tolist()}: each of 0 .. N-1 must be in one part")
        self.num_elements, self.order = len(places), places.argsort()
        self._indices: dict[tuple, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        priors = [part.transition.log_prior.expand(1, len(part.elements), -1) for part in self.parts]
        self.log_prior = self._join_rows(priors)[0]  # [N, K]
        allowed = [part.transition.forbid(torch.zeros_like(prior)) for part, prior in zip(self.parts, priors)]
        self.is_data = self._join_rows(allowed)[0] == 0  # [N, K]

    # Between the states of the whole and those of a part

    def indices(self, number: int, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Elements `[n]` and states `[k]` of a part, and the state of the part for each state of the whole `[K]`."""
        key = number, torch.device(device)
        if key not in self._indices:
            elements, states = (torch.tensor(v, device=device) for v in self.parts[number][1:])
            numbers = torch.zeros(self.num_classes, dtype=torch.long, device=device)
            numbers[states] = torch.arange(len(states), device=device)
            self._indices[key] = elements, states, numbers
        return self._indices[key]

    def take(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """States `[B, N]`, booleans `[B, N]` or logits `[B, N, K]` as those of the elements of a part."""
        shape = (self.num_elements, self.num_classes) if x.is_floating_point() else (self.num_elements,)
        if x.shape[1 : 1 + len(shape)] != shape:
            raise ValueError(
                f"got a tensor of shape {tuple(x.shape)}: this process has {self.num_elements} elements in a sample, with "
                f"{self.num_classes} states"
            )
        elements, states, numbers = self.indices(number, x.device)
        x = x.index_select(1, elements)
        if x.is_floating_point():
            return x.index_select(-1, states)
        return x if x.dtype == torch.bool else numbers[x]

    def _each(self, method: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """The results of a method of each part. Tensors with an axis of elements are replaced by those of the part."""
        results = []
        for number, part in enumerate(self.parts):
            own = [self.take(number, v) if isinstance(v, torch.Tensor) and v.ndim > 1 else v for v in args]
            results.append(getattr(part.process, method)(*own, **kwargs))
        return results

    def _join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Values `[B, n, ...]` of the elements of each part as those of all, `[B, N, ...]`."""
        joined = torch.cat(parts, 1)
        return joined.index_select(1, self.table("order", joined.device))

    def _join_rows(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Logarithms `[B, n, k]` of each part as those of all, `[B, N, K]`, with minus infinity at all other states."""
        rows = []
        for number, part in enumerate(parts):
            empty = part.new_full((*part.shape[:2], self.num_classes), -torch.inf)
            rows.append(empty.index_copy(-1, self.indices(number, part.device)[1], part))
        return self._join(rows)

    def _join_states(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """States of each part as those of the whole, `[B, N]`."""
        return self._join([self.indices(number, x.device)[1][x] for number, x in enumerate(parts)])

    # The methods of a transition

    def log_marginal(self, x, s, t, dtype=torch.float32):
        return self._join_rows(self._each("log_marginal", x, s, t, dtype))

    def log_likelihood(self, x_t, s, t, dtype=torch.float32):
        return self._join_rows(self._each("log_likelihood", x_t, s, t, dtype))

    def log_posterior(self, x_0, x_t, s, t, dtype=torch.float32):
        return self._join_rows(self._each("log_posterior", x_0, x_t, s, t, dtype))

    def posterior_logits(self, x0_logits, x_t, s, t):
        return self._join_rows(self._each("posterior_logits", x0_logits, x_t, s, t))

    def _data_posterior(self, x0_logits, x_t, t, denoising):
        return self._join_rows(self._each("_data_posterior", x0_logits, x_t, t, denoising))

    def to_leave_one_out(self, denoising_logits, x_t, t):
        return self._join_rows(self._each("to_leave_one_out", denoising_logits, x_t, t))

    def forbid(self, x0_logits):
        return x0_logits.masked_fill(~self.table("is_data", x0_logits.device), -torch.inf)

    def sample(self, x_0, t, generator=None):
        return self._join_states(self._each("sample", x_0, t, generator))

    def sample_previous(self, x0_logits, x_t, s, t, generator=None, denoising=False):
        return self._join_states(self._each("sample_previous", x0_logits, x_t, s, t, generator, denoising))

    def reveal(self, x_0, t):
        return self._join_states(self._each("reveal", x_0, t))

    def prior_divergence(self, x_0):
        return self._join(self._each("prior_divergence", x_0))

    def prepare_stretches(self, times, t, device):
        for part in self.parts:
            part.process.prepare_stretches(times, t, device)

    def leads_everywhere(self, t):
        return all(part.process.leads_everywhere(t) for part in self.parts)

    def sample_prior(self, shape, generator=None, device="cpu"):
        """Draws x_T from the prior, `[B, N]`."""
        if tuple(shape[1:]) != (self.num_elements,):
            raise ValueError(
                f"shape is {tuple(shape)}: a sample has {self.num_elements} elements, so pass (B, {self.num_elements})"
            )
        sizes = [(shape[0], len(part.elements)) for part in self.parts]
        draws = [part.process.sample_prior(size, generator, device) for part, size in zip(self.parts, sizes)]
        return self._join_states(draws)

    def matrix(self, s, t):
        """Q_{s..t} of each element, `[N, K, K]`, with rows of zeros for the states that an element does not have."""
        matrices = torch.zeros(self.num_elements, self.num_classes, self.num_classes, dtype=torch.float64)
        for part in self.parts:
            states = torch.tensor(part.states)
            for element in part.elements:
                matrices[element, states[:, None], states] = part.process.matrix(s, t)
        return matrices
