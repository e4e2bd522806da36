# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Processes that keep a state or draw it anew: Q_t = a_t I + (1 - a_t) 1 pi'.

The product of two such matrices is a third, so that any stretch of time costs O(1) per element and O(K) of storage.
Uniform, absorbing, BERT's mix of the two and any other stationary distribution differ in pi alone.
"""

from collections.abc import Collection
from functools import partial
from numbers import Integral

import torch

from ..numerics import count_up_to, log1mexp, logaddexp, safe_logaddexp, scalar_tensor, uniforms, wide_dtype
from ..schedules import accumulate, entropy, mutual_information_exponents
from ..utils.checks import check_distributions, check_tensor
from ..utils.names import TRANSITIONS
from .base import Transition, at_times, expand_time
from .family import register_transition
from .kernel import keeps


def uniform_distribution(num_classes: int, suppressed: Collection[int] = ()) -> torch.Tensor:
    """pi = 1/K, D3PM-uniform: Q_t = (1 - beta_t) I + beta_t 1 1' / K. Without the `suppressed` states, where pi is zero."""
    suppressed = sorted(set(suppressed))
    pi = torch.full((num_classes,), 1 / (num_classes - len(suppressed)), dtype=torch.float64)
    pi[suppressed] = 0
    return pi


def absorbing_distribution(
    num_classes: int, mask_token_id: int, mask_fraction: float = 1.0, suppressed: Collection[int] = ()
) -> torch.Tensor:
    """pi = e_m, D3PM-absorbing: Q_t = (1 - beta_t) I + beta_t 1 e_m'.

    With `mask_fraction` below one, the rest is uniform. That is BERT's corruption, Q = alpha 1 e_m' + beta 1 1' / K +
    (1 - alpha - beta) I, with alpha / (alpha + beta) = mask_fraction.
    """
    pi = (1 - mask_fraction) * uniform_distribution(num_classes, suppressed)
    pi[mask_token_id] += mask_fraction
    return pi


def lost_information(stationary: torch.Tensor, unigram: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """1 - I(x_t; x_0) / H(x_0) after the cumulative exponents `[n]`, for x_0 distributed as `unigram` (appendix A.7)."""
    lost = []
    for survival, moved in zip(torch.exp(-exponents), -torch.expm1(-exponents)):
        noise = moved * stationary  # [K]
        # Row i of Qbar is `noise`, plus the survivors at its own state.
        row_entropies = entropy(noise) - torch.special.entr(noise) + torch.special.entr(survival + noise)
        information = entropy(survival * unigram + noise) - unigram @ row_entropies
        lost.append(1 - information / entropy(unigram))
    return torch.stack(lost)


# The methods that define a step of eq. 4.
STEP_DEFINITION = ("log_marginal", "log_likelihood", "log_posterior", "posterior_logits", "to_leave_one_out", "forbid")


class RankOneTransition(Transition):
    """Q_{s..t} = a I + (1 - a) 1 pi', with a = exp(-(alpha_{s+1} + ... + alpha_t)) (appendix A.4 of the paper).

    Args:
        stationary: pi, `[K]`.
        exponents: alpha_1 .. alpha_T, each in [0, inf]: step t keeps a state with probability exp(-alpha_t).

    Examples:
        ```python
        import torch
        from d3pm_hf.transitions import RankOneTransition

        process = RankOneTransition(torch.tensor([0.5, 0.3, 0.2]), exponents=torch.full((10,), 0.5))
        assert torch.allclose(process.matrix(0, 4), process.matrix(0, 1) @ process.matrix(1, 4))
        ```
    """

    is_exponential = True

    @property
    def is_rank_one(self) -> bool:
        """Whether a subclass has left the closed form of Q_{s..t} as it is; survival may depend on the position."""
        return keeps(type(self), RankOneTransition, ("log_marginal", "log_likelihood"))

    @property
    def is_alike(self):
        return keeps(type(self), RankOneTransition, ("log_marginal", "log_likelihood", "log_survival"))

    @property
    def has_rank_one_steps(self):
        return keeps(type(self), RankOneTransition, (*STEP_DEFINITION, "sample_previous"))

    @property
    def has_continuous_time(self):
        return keeps(type(self), RankOneTransition, (*STEP_DEFINITION, "log_survival", "sample", "replace"))

    @classmethod
    def create(cls, settings):
        """The transition with the stationary distribution of `cls.stationary_of`."""
        pi = cls.stationary_of(settings)

        def from_information(unigram: torch.Tensor) -> torch.Tensor:
            lost = partial(lost_information, pi, unigram)
            return mutual_information_exponents(lost, settings.num_steps, in_survival=True)

        return cls(pi, settings.exponents(from_information))

    @staticmethod
    def stationary_of(settings) -> torch.Tensor:
        """pi, `[K]`, float64."""
        raise NotImplementedError("a registered family of rank-one transitions defines `stationary_of`")

    def __init__(self, stationary: torch.Tensor, exponents: torch.Tensor):
        super().__init__()
        check_tensor("stationary", stationary, None)
        check_distributions("stationary", stationary)
        self.cumulative_exponents, self.num_forgotten = accumulate(exponents)  # [T+1]
        self.num_classes, self.num_steps = len(stationary), len(exponents)
        self.stationary = stationary.double() / stationary.double().sum()
        self.log_stationary = self.log_prior = self.stationary.log()
        self.cumulative_stationary = self.stationary.cumsum(0) / self.stationary.sum()
        # The state of a distribution that has only one: sums over the classes then have one term.
        self.absorbing_state = int(self.stationary.argmax()) if self.stationary.max() == 1 else None
        self.is_uniform = bool(self.stationary.min() == self.stationary.max())
        # log a of the stretches 0..t and t-1..t, [T+1]; that of no step is zero.
        self.log_cumulative_survival = (-self.cumulative_exponents).masked_fill(self.num_forgotten > 0, -torch.inf)
        self.log_step_survival = torch.nn.functional.pad(-exponents.double(), (1, 0))

    def log_survival(self, s, t, x: torch.Tensor) -> torch.Tensor:
        """log a of the stretch s..t, in float64, broadcastable over the elements of `x`. `s=None` means one step, t - 1."""
        if s is None:
            return expand_time(at_times(self.table("log_step_survival", x.device), t), x)
        if isinstance(s, Integral) and isinstance(t, Integral):
            forgets = self.num_forgotten[s] != self.num_forgotten[t]
            log_a = -torch.inf if forgets else (self.cumulative_exponents[s] - self.cumulative_exponents[t]).item()
            return scalar_tensor(log_a, wide_dtype(x.device), x.device)
        if isinstance(s, Integral) and s == 0:
            return expand_time(at_times(self.table("log_cumulative_survival", x.device), t), x)
        exponents, forgotten = self.table("cumulative_exponents", x.device), self.table("num_forgotten", x.device)
        forgets = at_times(forgotten, s) != at_times(forgotten, t)
        return expand_time((at_times(exponents, s) - at_times(exponents, t)).masked_fill(forgets, -torch.inf), x)

    def draw_stationary(self, u: torch.Tensor) -> torch.Tensor:
        """A state from pi for each uniform."""
        states = count_up_to(self.table("cumulative_stationary", u.device), u)
        return states.clamp_(max=self.num_classes - 1)

    def replace(self, x_0: torch.Tensor, probability: torch.Tensor, generator=None) -> torch.Tensor:
        """x_0 with each element drawn anew from pi with this probability, which broadcasts over the elements."""
        u = uniforms(x_0.shape, generator, x_0.device)
        return torch.where(u < probability, self.draw_stationary(u / probability), x_0)

    def log_marginal(self, x, s, t, dtype=torch.float32):
        is_state = not x.is_floating_point()
        log_a = self.log_survival(s, t, x if is_state else x[..., 0])[..., None]
        log_noise = log1mexp(log_a) + self.table("log_stationary", x.device)
        if not is_state:
            return safe_logaddexp(x + log_a.to(x.dtype), log_noise.to(x.dtype))
        return _add_at(log_noise.to(dtype).expand(*x.shape, -1), x, log_a.to(dtype))

    def log_likelihood(self, x_t, s, t, dtype=torch.float32):
        log_a = self.log_survival(t - 1 if s is None else s, t, x_t)
        column = self._log_noise(log_a, x_t).to(dtype)[..., None].expand(*x_t.shape, self.num_classes)
        return _add_at(column, x_t, log_a.to(dtype)[..., None])

    def _data_posterior(self, x0_logits, x_t, t, denoising):
        return self._keep_certain(super()._data_posterior(x0_logits, x_t, t, denoising), x_t, t)

    def posterior_logits(self, x0_logits, x_t, s, t):
        """Logits of eq. 4, and x_s = x_t for any output of the network where noise cannot lead to x_t."""
        return self._keep_certain(super().posterior_logits(x0_logits, x_t, s, t), x_t, t)

    def _keep_certain(self, logits: torch.Tensor, x_t: torch.Tensor, t) -> torch.Tensor:
        """Logits of a step from x_t, which are replaced by certainty of x_t where noise cannot lead to it."""
        certain = torch.full_like(logits, -torch.inf).scatter_(-1, x_t[..., None], 0)
        return torch.where(self.is_certain(x_t, t)[..., None], certain, logits)

    def sample_previous(self, x0_logits, x_t, s, t, generator=None, denoising=False):
        """Draws x_s from p(x_s | x_t) (eq. 4). A state that noise cannot lead to stays as it is."""
        is_certain = self.is_certain(x_t, t)
        other = x_t.masked_fill(is_certain, int(self.stationary.argmax()))  # any state that noise leads to
        logits = x0_logits.masked_fill(is_certain[..., None], 0)
        return torch.where(is_certain, x_t, super().sample_previous(logits, other, s, t, generator, denoising))

    def is_certain(self, x_t: torch.Tensor, t) -> torch.Tensor:
        """Whether noise cannot lead to x_t, so that x_0 = x_s = x_t for any output of the network."""
        if not self.is_rank_one:
            return torch.zeros_like(x_t, dtype=torch.bool)
        return self._log_noise(self.log_survival(0, t, x_t), x_t) == -torch.inf

    def _log_noise(self, log_a: torch.Tensor, x_t: torch.Tensor) -> torch.Tensor:
        """log (1 - a) pi(x_t), the probability that noise leads to x_t."""
        return log1mexp(log_a) + self.table("log_stationary", x_t.device)[x_t]

    def reveal(self, x_0, t):
        """x_0 itself. Noise cannot lead to a state of probability zero under pi, so that one that is seen is the data."""
        return x_0 if self.is_rank_one else super().reveal(x_0, t)

    def leads_everywhere(self, t):
        is_noise = (self.stationary > 0) | self.excluded.contain(torch.arange(self.num_classes))  # [K]
        log_a = self.log_survival(0, t, is_noise)
        return bool(((log_a == -torch.inf) | ((log_a < 0) & is_noise.all())).all())

    def log_odds_of_staying(self, x_t: torch.Tensor, t) -> torch.Tensor:
        """log q(x_t | x_0 = x_t) - log q(x_t | x_0 = other), by which the two readings of x_0 logits differ.

        Zero where no other state leads to x_t: there x_0 = x_t for any output of the network.
        """
        log_a = self.log_survival(0, t, x_t)
        log_noise = self._log_noise(log_a, x_t)
        return torch.where(log_noise > -torch.inf, logaddexp(log_a - log_noise, log_a.new_zeros(())), 0)


@register_transition("absorbing", TRANSITIONS["absorbing"])
class AbsorbingTransition(RankOneTransition):
    """D3PM-absorbing (appendix A.2.2 of the paper): Q_t = (1 - beta_t) I + beta_t 1 e_m'."""

    formula = "(1-b) I + b 1 e_m'"
    has_mask = True
    loses_by_masking = True
    options = ("mask_token_id", "mask_in_data")

    @staticmethod
    def stationary_of(settings):
        return absorbing_distribution(settings.num_classes, settings.mask_token_id)


@register_transition("uniform", TRANSITIONS["uniform"])
class UniformTransition(RankOneTransition):
    """D3PM-uniform (appendix A.2.1 of the paper): Q_t = (1 - beta_t) I + beta_t 1 1' / K."""

    formula = "(1-b) I + b 1 1' / K"

    @staticmethod
    def stationary_of(settings):
        return uniform_distribution(settings.num_classes, settings.suppressed)


@register_transition("absorbing_uniform", TRANSITIONS["absorbing_uniform"])
class AbsorbingUniformTransition(RankOneTransition):
    """BERT's corruption (section 4 and appendix A.2.6 of the paper): a share `mask_fraction` of the noise is the mask, the rest uniform."""

    formula = "(1-b) I + b 1 (f e_m + (1-f) 1 / K)'"
    has_mask = True
    options = ("mask_token_id", "mask_in_data", "mask_fraction")

    @staticmethod
    def stationary_of(settings):
        fraction = settings.option("mask_fraction")
        return absorbing_distribution(settings.num_classes, settings.mask_token_id, fraction, settings.suppressed)


@register_transition("stationary", TRANSITIONS["stationary"])
class StationaryTransition(RankOneTransition):
    """Noise of any stationary distribution, such as the frequencies of the tokens: pi = `stationary_probs`."""

    formula = "(1-b) I + b 1 pi'"
    required_tensors = ("stationary_probs",)

    @staticmethod
    def stationary_of(settings):
        return settings.tensors["stationary_probs"]

    @classmethod
    def tensor_shapes(cls, num_classes, num_steps):
        return {"stationary_probs": [(num_classes,)]}

    @classmethod
    def check_tensors(cls, tensors):
        if "stationary_probs" in tensors:
            check_distributions("stationary_probs", tensors["stationary_probs"])


def _add_at(log_values: torch.Tensor, index: torch.Tensor, log_extra: torch.Tensor) -> torch.Tensor:
    """Adds exp(log_extra) to the entries `index` of exp(log_values), in logarithms."""
    index = index[..., None]
    own = logaddexp(log_values.gather(-1, index), log_extra.expand(index.shape))
    return log_values.scatter(-1, index, own)
