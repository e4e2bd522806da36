# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Transition: the contract of every forward process, with a default for all that follows from two methods."""

from abc import ABC, abstractmethod
from numbers import Integral

import torch

from ..numerics import (
    categorical,
    count_up_to,
    divergence_terms,
    lower_excluded,
    scalar_tensor,
    uniforms,
    wide_dtype,
)
from .excluded import ExcludedStates
from .family import TransitionFamily
from .kernel import create_handle, find_kernel


def expand_time(n, x: torch.Tensor) -> torch.Tensor:
    """Step counts, an integer or one per sample, as a tensor that broadcasts over the elements of `x`."""
    if isinstance(n, Integral):
        return scalar_tensor(int(n), torch.long, x.device)
    n = torch.as_tensor(n, device=x.device)
    return n.reshape(n.shape + (1,) * (x.ndim - n.ndim)) if n.ndim else n


def at_times(table: torch.Tensor, n) -> torch.Tensor:
    """The entries `n` of a table over time `[T+1, ...]`: `[B, ...]`, or `[1, ...]` for an integer.

    No index is read back from the device, as it is for `table[n]` if `n` has no dimension. An integer is a slice, except on XLA,
    which would compile each of them anew.
    """
    if isinstance(n, Integral) and table.device.type != "xla":
        return table[int(n) : int(n) + 1]
    n = scalar_tensor(int(n), torch.long, table.device) if isinstance(n, Integral) else n.to(table.device)
    return table.index_select(0, n.reshape(-1))


class Transition(TransitionFamily, ABC):
    """A forward process over `num_classes` states (K) and `num_steps` steps (T).

    Time is the number of steps behind a state, 0 .. T: Qbar_0 = I. `s <= t` are integers or tensors `[B]`, one per
    sample. States are integer tensors `[B, ...]`; what has a class axis has it last. Distributions go in and come
    out as logarithms: an impossible event is `-inf`, and no epsilon is ever added.

    Attributes:
        log_prior: `[K]`, float64: the stationary distribution, or one fitted to the data.
        never_data: States that x_0 never takes, such as the mask of text models and special tokens.
        fused_loss: The name of a fused loss (`losses.register_fused_loss`), or `None` for the plain KL divergence, which works for
            every family.

    A family defines `log_marginal` and `log_likelihood`, and sets `num_classes`, `num_steps` and `log_prior`. All other methods
    follow from these. Faster forms of them are the matter of a [`Kernel`]. `matrix`, `reveal` and `leads_everywhere` follow for
    elements that are all alike: a family whose matrices depend on the position overrides them.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler

        process = D3PMScheduler(5, 100, transition="uniform", beta_schedule="cosine").transition
        x_0 = torch.tensor([[0, 1, 2, 3]])
        x_t = process.sample(x_0, 40)  # a draw from q(x_40 | x_0)
        log_q = process.log_posterior(x_0, x_t, 20, 40)  # log q(x_20 | x_40, x_0), [1, 4, 5]
        ```
    """

    num_classes: int
    num_steps: int
    log_prior: torch.Tensor
    never_data: tuple[int, ...] = ()
    fused_loss: str | None = None

    def __init__(self):
        self._tables: dict[tuple, torch.Tensor] = {}
        self._revealed: dict[tuple, torch.Tensor | None] = {}
        self._leads_everywhere: dict[int, bool] = {}
        self._excluded: ExcludedStates | None = None
        self.handle = create_handle(self)

    @property
    def is_alike(self) -> bool:
        """Whether Q_t is known to be the same for all elements of a sample."""
        return False

    @property
    def has_rank_one_steps(self) -> bool:
        """Whether a step keeps a state or draws it anew from one distribution."""
        return False

    @property
    def has_continuous_time(self) -> bool:
        """Whether the limit of infinitely many steps is that of `losses.continuous`."""
        return False

    @property
    def reveals_in_order(self) -> bool:
        """Whether each step reveals one token, from the left."""
        return False

    def kernel(self) -> "Transition | None":
        """This transition with faster forms of its methods, or `None` if there are none: see [`~kernels.Kernel`]."""
        return find_kernel(self)

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name not in ("_definition", "_kernel")}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.handle = create_handle(self)  # that of another process may be taken in this one

    def __deepcopy__(self, memo):
        return self  # it is never modified, its tables may be large, and torch cannot copy sparse ones

    def to_config(self) -> dict | None:
        """Arguments of [`D3PMScheduler`] that create this transition again, or `None` if there are none.

        A scheduler that was given a transition object can be saved if this says how: the name of a registered family as
        `transition`, its `transition_kwargs` and `transition_tensors`, and the schedule, for instance as `trained_betas`.
        """
        return None

    def sample(self, x_0: torch.Tensor, t, generator=None) -> torch.Tensor:
        """Draws x_t from q(x_t | x_0) = Cat(x_0 Qbar_t) (section 3 of the paper)."""
        u = uniforms(x_0.shape, generator, x_0.device)
        return categorical(self.log_marginal(x_0, 0, t).flatten(0, -2), u.flatten()).view_as(x_0)

    @abstractmethod
    def log_marginal(self, x: torch.Tensor, s, t, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """log (p Q_{s..t}), the distribution of x_t: `[B, ..., K]` (eq. 2 of the paper, for any stretch of time).

        Args:
            x: The states x_s (integers, `[B, ...]`), or log-probabilities of x_s (floating, `[B, ..., K]`).
            dtype: Dtype of the result for states; log-probabilities keep theirs.

        The plain loss differentiates it by autograd with respect to log-probabilities, all of them finite. A state x_t that no
        x_s leads to must get `-inf` with a gradient of zero: use `log_matmul`, `safe_log` and `safe_logaddexp` of `d3pm_hf.numerics`.
        """

    @abstractmethod
    def log_likelihood(self, x_t: torch.Tensor, s, t, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """log q(x_t | x_s = .), a column of Q_{s..t} per element: `[B, ..., K]`. `s=None` means one step, t - 1."""

    def log_posterior(
        self, x_0: torch.Tensor, x_t: torch.Tensor, s, t, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """log q(x_s | x_t, x_0), normalized, `[B, ..., K]`: the paper's eq. 3, for any s < t.

            log q(x_s | x_t, x_0) = log q(x_t | x_s) + log q(x_s | x_0) - log q(x_t | x_0)

        An impossible x_s is `-inf`. If q(x_t | x_0) = 0, no x_s is possible, and all K entries are `-inf`.

        Args:
            x_0, x_t: States `[B, ...]`.
            s, t: Numbers of steps; `s=None` means one step, t - 1.
            dtype: Dtype of the result.
        """
        log_joint = self.log_likelihood(x_t, s, t, dtype)
        log_joint = log_joint + self.log_marginal(x_0, 0, t - 1 if s is None else s, dtype)
        return torch.where(log_joint > -torch.inf, log_joint.log_softmax(-1), -torch.inf)

    def prepare_stretches(self, times: list[int], t: int, device) -> None:
        """Computes what steps from t to each of `times` need, if together they cost less than one by one."""

    def matrix(self, s: int, t: int) -> torch.Tensor:
        """Q_{s..t} as a dense matrix, float64, `[K, K]`, for tests and plots."""
        states = torch.arange(self.num_classes)[None]
        return self.log_marginal(states, s, t, torch.float64)[0].exp()

    def prior_divergence(self, x_0: torch.Tensor) -> torch.Tensor:
        """KL(q(x_T | x_0) || prior) per element, in nats and float64: L_T of the paper's eq. 1."""
        log_q = self.log_marginal(x_0, 0, self.num_steps, wide_dtype(x_0.device))
        return divergence_terms(log_q, self.table("log_prior", x_0.device)).sum(-1)

    def table(self, name: str, device, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The attribute `name`, moved to `device` (and cast) once."""
        key = name, torch.device(device), dtype
        if key not in self._tables:
            tensor = getattr(self, name)
            if tensor.is_floating_point():
                tensor = tensor.to(dtype or wide_dtype(device))
            self._tables[key] = tensor.to(device)
        return self._tables[key]

    def fit_prior(self, unigram: torch.Tensor) -> None:
        """Sets the prior to the distribution of x_T for data with the frequencies `unigram`, `[K]`."""
        self.log_prior = self.log_marginal(unigram.log()[None, None], 0, self.num_steps)[0, 0]

    def needs_logits(self, x_t: torch.Tensor, s, t) -> torch.Tensor | None:
        """Where KL(q(x_s | x_t, x_0) || p(x_s | x_t)) depends on the prediction of x_0, `[B, ...]`; `None` stands for everywhere.

        Elsewhere the divergence is zero for any prediction, and no network need be asked for one.
        """
        return None

    def reveal(self, x_0: torch.Tensor, t: int) -> torch.Tensor:
        """A state x_t for known data: x_0 itself where the process can keep it until t, else a draw from q(x_t | x_0).

        There is one draw for each state, the same each time, so that a sample does not depend on the others of its batch.
        """
        key = x_0.device, t
        if key not in self._revealed:  # whether all states stay is read back from the device once
            stays, states = self._staying_states(t, x_0.device), torch.arange(self.num_classes, device=x_0.device)
            drawn = None if stays.all() else self.sample(states[None], t, torch.Generator().manual_seed(t))[0]
            self._revealed[key] = None if drawn is None else torch.where(stays, states, drawn)
        shown = self._revealed[key]
        return x_0 if shown is None else shown[x_0]

    def _staying_states(self, t: int, device) -> torch.Tensor:
        """Whether the process can keep each state until t, `[K]`."""
        states = torch.arange(self.num_classes, device=device)[None]
        return self.log_marginal(states, 0, t)[0].diagonal() > -torch.inf

    def leads_everywhere(self, t: int) -> bool:
        """Whether q(x_t | x_0) > 0 for every x_0 that data can hold and every x_t that any of them leads to.

        Of more than 4096 states it is True only if all paths through the most likely state of the prior say so.
        """
        if t not in self._leads_everywhere:
            states = torch.arange(self.num_classes)
            is_data = ~self.excluded.contain(states)
            if self.num_classes <= 4096:
                leads = self.log_likelihood(states[None], 0, t)[0][:, is_data] > -torch.inf  # [x_t, x_0]
                self._leads_everywhere[t] = bool((leads.all(1) | ~leads.any(1)).all())
            else:
                middle = self.log_prior.argmax().reshape(1, 1)
                leads_in = self.log_likelihood(middle, 0, t // 2)[0, 0, is_data] > -torch.inf
                leads_out = self.log_marginal(middle, t // 2, t)[0, 0] > -torch.inf
                self._leads_everywhere[t] = bool(leads_in.all() & leads_out.all())
        return self._leads_everywhere[t]

    def sample_prior(self, shape, generator=None, device="cpu") -> torch.Tensor:
        """Draws x_T from the prior."""
        u = uniforms(shape, generator, device)
        cumulative = torch.cumsum(self.log_prior.exp(), 0).to(u)
        return count_up_to(cumulative / cumulative[-1], u)

    def forbid(self, x0_logits: torch.Tensor) -> torch.Tensor:
        """Logits of x_0 with minus infinity for the states that data never hold."""
        return self.excluded.fill(x0_logits, -torch.inf)

    @property
    def excluded(self) -> ExcludedStates:
        """The states of `never_data`."""
        if self._excluded is None or self._excluded.states != self.never_data:
            self._excluded = ExcludedStates(self.never_data)
        return self._excluded

    def to_leave_one_out(self, denoising_logits: torch.Tensor, x_t: torch.Tensor, t) -> torch.Tensor:
        """Logits of q(x_0^i | x_t without i) from those of q(x_0^i | x_t): subtracts log q(x_t | x_0 = .).

        A state x_0 that cannot have led to x_t stays impossible; this keeps `-inf - -inf` away.
        """
        column = self.log_likelihood(x_t, 0, t, denoising_logits.dtype)
        return torch.where(column > -torch.inf, denoising_logits - column, -torch.inf)

    def posterior_logits(self, x0_logits: torch.Tensor, x_t: torch.Tensor, s, t) -> torch.Tensor:
        """Logits of the reverse step p(x_s | x_t) (the paper's eq. 4, for any number of skipped steps).

            log p(x_s | x_t) = log q(x_t | x_s) + log sum_{x_0} q(x_s | x_0) p(x_0) + const

        Args:
            x0_logits: Leave-one-out logits of x_0, `[B, ..., K]`.
        """
        log_p = self.forbid(x0_logits).log_softmax(-1)
        log_m = self._log_prediction(log_p, t - 1 if s is None else s)
        return self.log_likelihood(x_t, s, t, log_p.dtype) + log_m

    def _log_prediction(self, log_p: torch.Tensor, s) -> torch.Tensor:
        """log sum_{x_0} q(x_s | x_0) p(x_0), which has a gradient where some p(x_0) is zero, too."""
        result = self.log_marginal(log_p, 0, s)
        if not log_p.requires_grad or not (log_p == -torch.inf).any():
            return result
        result, differentiable = result.detach(), self.log_marginal(lower_excluded(log_p), 0, s)
        return torch.where(result.isfinite(), differentiable, differentiable + result)  # -inf keeps the gradient

    def excludes_state(self, x0_logits: torch.Tensor, x_t: torch.Tensor, t) -> torch.Tensor:
        """Whether the logits exclude every x_0 that can lead to x_t, `[B, ...]`, so that eq. 4 has no value."""
        return self._data_posterior(x0_logits, x_t, t, denoising=True).amax(-1) == -torch.inf

    def most_likely_data(self, x0_logits: torch.Tensor, x_t: torch.Tensor, t, denoising: bool = False):
        """The mode of the denoising posterior q(x_0 | x_t)."""
        posterior = self._data_posterior(x0_logits, x_t, t, denoising)
        excluded = posterior.amax(-1) == -torch.inf  # then the process decides
        return torch.where(excluded, self.log_likelihood(x_t, 0, t).argmax(-1), posterior.argmax(-1))

    def _data_posterior(self, x0_logits: torch.Tensor, x_t: torch.Tensor, t, denoising: bool) -> torch.Tensor:
        """Logits of the denoising posterior q(x_0 | x_t), `[B, ..., K]`, which rule out whatever cannot lead to x_t."""
        return self._with_column(x0_logits, self.log_likelihood(x_t, 0, t), denoising)

    def _with_column(self, x0_logits: torch.Tensor, log_column: torch.Tensor, denoising: bool) -> torch.Tensor:
        """Logits of the denoising posterior, given log q(x_t | x_0 = .)."""
        if denoising:
            return self.forbid(x0_logits.masked_fill(log_column == -torch.inf, -torch.inf))
        return self.forbid(x0_logits + log_column)

    def sample_previous(self, x0_logits, x_t, s: int, t: int, generator=None, denoising: bool = False):
        """Draws x_s from p(x_s | x_t) (eq. 4) by composition, with no product of matrices.

        First x_0 from the denoising posterior, then x_s from q(x_s | x_t, x_0): together they are eq. 4.

        Args:
            x0_logits: `[B, ..., K]`, of the denoising posterior if `denoising`, else of the leave-one-out posterior.
        """
        u = uniforms((*x_t.shape, 2), generator, x_t.device).flatten(0, -2)
        logits = self._data_posterior(x0_logits, x_t, t, denoising)
        x_0 = categorical(logits.flatten(0, -2), u[:, 0]).view_as(x_t)
        if s == 0:
            return x_0
        posterior = self.log_posterior(x_0, x_t, s, t)
        return categorical(posterior.flatten(0, -2), u[:, 1]).view_as(x_t)
