# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Processes that keep a state or draw it anew: Q_t = a_t I + (1 - a_t) 1 pi'.

The product of two such matrices is a third, so that any stretch of time costs O(1) per element and O(K) of storage.
Uniform, absorbing, BERT's mix of the two and any other stationary distribution differ in pi alone.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields
from numbers import Integral

import torch

from ..numerics import (
    count_up_to,
    divergence_terms,
    draw,
    in_pieces,
    log1mexp,
    logaddexp,
    safe_logaddexp,
    scalar_tensor,
    softmax_weights,
    uniforms,
    wide_dtype,
)
from ..schedules import accumulate, entropy, mutual_information_exponents
from ..utils.checks import check_distributions, check_tensor
from .base import LOSS_DEFINITION, STEP_DEFINITION, Transition, at_times, expand_time
from .registry import register_transition


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


def rank_one_information_exponents(stationary: torch.Tensor, unigram: torch.Tensor, num_steps: int) -> torch.Tensor:
    """The mutual-information schedule of the process with this stationary distribution."""
    return mutual_information_exponents(
        lambda exponents: lost_information(stationary, unigram, exponents), num_steps, in_survival=True
    )


@dataclass(frozen=True)
class Proposal:
    """Where a reverse step may replace x_t, and by what: all `[B, ...]`, drawn before the network is asked.

    Args:
        may_change: whether x_t may be replaced.
        from_data: whether its replacement is a draw from p(x_0), or else from pi.
        u_state: uniforms of the replacement, where `may_change`.
        u_accept: uniforms that decide whether it is accepted.
        log_odds: less log p(x_t), the log-odds that it is accepted.
    """

    may_change: torch.Tensor
    from_data: torch.Tensor
    u_state: torch.Tensor
    u_accept: torch.Tensor
    log_odds: torch.Tensor

    def take(self, rows: torch.Tensor) -> "Proposal":
        """The proposals of some rows."""
        return Proposal(*(getattr(self, field.name)[rows] for field in fields(self)))


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
    fused_loss = "rank_one"
    is_alike = has_proposals = has_continuous_time = True
    shortcuts = {
        "fused_loss": (*LOSS_DEFINITION, "log_survival"),
        "is_alike": ("log_marginal", "log_likelihood", "log_survival"),
        "has_proposals": (*STEP_DEFINITION, "sample_previous"),
        "has_continuous_time": (*LOSS_DEFINITION, "log_survival", "sample", "replace"),
        "sample": ("log_marginal",),
        "sample_previous": STEP_DEFINITION,
        "posterior_logits": ("log_marginal", "log_likelihood"),
        "excludes_state": ("log_likelihood",),
        "prior_divergence": ("log_marginal",),
        "reveal": ("log_marginal",),
        "leads_everywhere": ("log_marginal", "log_likelihood"),
    }

    @classmethod
    def create(cls, settings):
        """The transition with the stationary distribution of `cls.stationary_of`."""
        pi = cls.stationary_of(settings)

        def from_information(unigram: torch.Tensor) -> torch.Tensor:
            return rank_one_information_exponents(pi, unigram, settings.num_steps)

        return cls(pi, settings.exponents(from_information))

    @staticmethod
    def stationary_of(settings) -> torch.Tensor:
        """pi, `[K]`, float64."""
        raise NotImplementedError("a registered family of rank-one transitions defines `stationary_of`")

    def __init__(self, stationary: torch.Tensor, exponents: torch.Tensor):
        super().__init__()
        check_tensor("stationary", stationary, None)
        check_tensor("exponents", exponents, None)
        stationary = stationary.double()
        if not (stationary >= 0).all() or abs(stationary.sum().item() - 1) > 1e-6:
            raise ValueError(
                f"stationary has the sum {stationary.sum().item():.6g} and the minimum "
                f"{stationary.min().item():.6g}: pass non-negative probabilities that sum to one"
            )
        if not (exponents >= 0).all():
            raise ValueError("the schedule has a beta outside [0, 1]: every beta must be a probability")
        self.num_classes, self.num_steps = len(stationary), len(exponents)
        self.stationary = stationary / stationary.sum()
        self.log_stationary = self.log_prior = self.stationary.log()
        self.cumulative_stationary = self.stationary.cumsum(0) / self.stationary.sum()
        # The state of a distribution that has only one: sums over the classes then have one term.
        self.absorbing_state = int(self.stationary.argmax()) if self.stationary.max() == 1 else None
        if self.absorbing_state is not None and self.fused_loss == "rank_one":
            self.fused_loss = "absorbing"
        self.is_uniform = bool(self.stationary.min() == self.stationary.max())
        self.cumulative_exponents, self.num_forgotten = accumulate(exponents)  # [T+1]
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
        a_t, f_t = (expand_time(at_times(v, t), x) for v in (exponents, forgotten))
        a_s, f_s = (expand_time(at_times(v, s), x) for v in (exponents, forgotten))
        return (a_s - a_t).masked_fill(f_s != f_t, -torch.inf)

    def draw_stationary(self, u: torch.Tensor) -> torch.Tensor:
        """A state from pi for each uniform."""
        if self.absorbing_state is not None:
            return torch.full_like(u, self.absorbing_state, dtype=torch.long)
        if self.is_uniform:
            return (u * self.num_classes).long().clamp_(0, self.num_classes - 1)
        states = count_up_to(self.table("cumulative_stationary", u.device), u)
        return states.clamp_(max=self.num_classes - 1)

    def sample(self, x_0, t, generator=None):
        return self.replace(x_0, -torch.expm1(self.log_survival(0, t, x_0)), generator)

    def replace(self, x_0: torch.Tensor, probability: torch.Tensor, generator=None) -> torch.Tensor:
        """x_0 with each element drawn anew from pi with this probability, which broadcasts over the elements."""
        u = uniforms(x_0.shape, generator, x_0.device)
        if self.absorbing_state is not None:
            return x_0.masked_fill(u < probability, self.absorbing_state)
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
        log_noise = log1mexp(log_a) + self.table("log_stationary", x_t.device)[x_t]
        column = log_noise.to(dtype)[..., None].expand(*x_t.shape, self.num_classes)
        return _add_at(column, x_t, log_a.to(dtype)[..., None])

    def prior_divergence(self, x_0):
        log_a = self.log_survival(0, self.num_steps, x_0)
        log_pi, log_prior = self.table("log_stationary", x_0.device), self.table("log_prior", x_0.device)
        log_noise = log1mexp(log_a)[..., None] + log_pi  # [K], or [N, K] where survival depends on the position
        # q(x_T | x_0) is noise, plus the survivors at x_0.
        noise = divergence_terms(log_noise, log_prior)
        own = divergence_terms(logaddexp(log_a[..., None], log_noise), log_prior)
        return noise.sum(-1) + (own - noise).expand(*x_0.shape, -1).gather(-1, x_0[..., None]).squeeze(-1)

    def reveal(self, x_0, t):
        """x_0 itself. Noise cannot lead to a state of probability zero under pi, so that one that is seen is the data."""
        return x_0

    def leads_everywhere(self, t):
        is_noise = (self.stationary > 0) | self.excluded.contain(torch.arange(self.num_classes))  # [K]
        log_a = self.log_survival(0, t, is_noise)
        return bool(((log_a == -torch.inf) | ((log_a < 0) & is_noise.all())).all())

    def log_odds_of_staying(self, x_t: torch.Tensor, t) -> torch.Tensor:
        """log q(x_t | x_0 = x_t) - log q(x_t | x_0 = other), by which the two readings of x_0 logits differ.

        Zero where no other state leads to x_t: there x_0 = x_t for any output of the network.
        """
        log_a = self.log_survival(0, t, x_t)
        log_noise = log1mexp(log_a) + self.table("log_stationary", x_t.device)[x_t]
        return torch.where(log_noise > -torch.inf, logaddexp(log_a - log_noise, log_a.new_zeros(())), 0)

    def is_certain(self, x_t: torch.Tensor, t) -> torch.Tensor:
        """Whether noise cannot lead to x_t, so that x_0 = x_s = x_t for any output of the network."""
        return log1mexp(self.log_survival(0, t, x_t)) + self.table("log_stationary", x_t.device)[x_t] == -torch.inf

    def excludes_state(self, x0_logits, x_t, t):
        excluded = self.forbid(x0_logits).amax(-1) == -torch.inf
        return excluded & ~self.is_certain(x_t, t)

    def posterior_logits(self, x0_logits, x_t, s, t):
        certain = torch.full_like(x0_logits, -torch.inf).scatter_(-1, x_t[..., None], 0)
        posterior = super().posterior_logits(x0_logits, x_t, s, t)
        return torch.where(self.is_certain(x_t, t)[..., None], certain, posterior)

    def sample_previous(self, x0_logits, x_t, s, t, generator=None, denoising=False):
        """Draws x_s from p(x_s | x_t) (eq. 4) exactly, and reads the network's output only where the state may change.

        p(x_s | x_t) is a mixture: x_s = x_t, or with probability (1 - a) pi(x_t) / Z a fresh draw from p(x_0) (with
        probability A_s) or from pi, where Z = A_t p(x_t) + (1 - A_t) pi(x_t). As p(x_t) >= 0, that probability is at
        most (1 - a) / (1 - A_t) for any output of the network: propose with the bound, then accept on the few rows.
        """
        proposal = self.propose_previous(x_t, s, t, generator)
        return self.accept_previous(x0_logits, x_t, t, proposal, denoising)

    def propose_previous(self, x_t, s, t, generator=None) -> "Proposal":
        """Draws where and from what a step from t to s may replace x_t, which does not depend on the network."""
        moved = -torch.expm1(self.log_survival(s, t, x_t))  # 1 - a
        log_a_t = self.log_survival(0, t, x_t)
        log_pi = self.table("log_stationary", x_t.device)[x_t]
        a_s = self.log_survival(0, s, x_t).exp()
        bound = torch.where((moved > 0) & (log_pi > -torch.inf), moved / -torch.expm1(log_a_t), 0)
        u = uniforms((*x_t.shape, 1 if self.always_accepts else 2), generator, x_t.device)
        proposed = u[..., 0] < bound
        u_source = u[..., 0] / bound  # uniform, given that the proposal was made
        from_data = u_source < a_s
        u_state = torch.where(from_data, u_source / a_s, (u_source - a_s) / (1 - a_s))
        may_change = proposed & from_data if self.always_accepts else proposed
        # (1 - A_t) pi / (A_t p + (1 - A_t) pi) is the logistic function of this, less log p.
        log_odds = (log1mexp(log_a_t) + log_pi - log_a_t).expand(x_t.shape)
        return Proposal(may_change, from_data, u_state, u[..., -1], log_odds)

    @property
    def always_accepts(self) -> bool:
        """Whether each proposal is accepted: without the mask among the data p(x_t = mask) is zero, and the bound is exact."""
        return self.absorbing_state in self.never_data

    def accept_previous(self, x0_logits, x_t, t, proposal: "Proposal", denoising: bool = False) -> torch.Tensor:
        """x_s, for the proposals of [`propose_previous`] and the output of the network."""
        may_change, from_data, u_state = proposal.may_change, proposal.from_data, proposal.u_state
        u_accept, log_odds, always_accepted = proposal.u_accept, proposal.log_odds, self.always_accepts
        flat_logits, flat_x_t = x0_logits.reshape(-1, self.num_classes), x_t.flatten()
        shift = self.log_odds_of_staying(x_t, t).expand(x_t.shape) if denoising else torch.zeros_like(u_state)

        def piece(logits, x_t, u_state, from_data, shift, log_odds, u_accept):
            """The new states of rows of logits `[r, K]`, a copy in float32."""
            self.excluded.fill_(logits, -torch.inf)
            if denoising:
                logits.scatter_add_(-1, x_t[:, None], -shift[:, None].float())
            weights, top = softmax_weights(logits)
            draws = draw(weights, u_state)
            if always_accepted:
                return draws
            draws = torch.where(from_data, draws, self.draw_stationary(u_state))
            log_p = (logits.gather(-1, x_t[:, None]) - top - weights.sum(-1, keepdim=True).log()).squeeze(-1)
            return torch.where(u_accept < torch.sigmoid(log_odds - log_p), draws, x_t)

        if x_t.device.type != "cpu":
            # Which rows may change is not known to the host: to draw all of them is faster than to wait for it.
            elements = [x_t, torch.where(may_change, u_state, 0), from_data, shift, log_odds, u_accept]
            draws = in_pieces(
                lambda logits, *rest: piece(logits.to(torch.float32, copy=True), *rest),
                self.num_classes,
                flat_logits,
                *(v.flatten() for v in elements),
            )
            return torch.where(may_change, draws.view_as(x_t), x_t)
        rows = may_change.flatten().nonzero().squeeze(-1)
        draws = in_pieces(
            lambda rows, *rest: piece(flat_logits[rows].float(), *rest),
            self.num_classes,
            rows,
            *(v.flatten()[rows] for v in (x_t, u_state, from_data, shift, log_odds, u_accept)),
        )
        return flat_x_t.index_put((rows,), draws).view_as(x_t)


@register_transition("absorbing", "tokens turn into a mask and stay one")
class AbsorbingTransition(RankOneTransition):
    """D3PM-absorbing (appendix A.2.2 of the paper): Q_t = (1 - beta_t) I + beta_t 1 e_m'."""

    formula = "(1-b) I + b 1 e_m'"
    has_mask = True
    loses_by_masking = True
    options = ("mask_token_id", "mask_in_data")

    @staticmethod
    def stationary_of(settings):
        return absorbing_distribution(settings.num_classes, settings.mask_token_id)


@register_transition("uniform", "tokens are replaced by uniform ones")
class UniformTransition(RankOneTransition):
    """D3PM-uniform (appendix A.2.1 of the paper): Q_t = (1 - beta_t) I + beta_t 1 1' / K."""

    formula = "(1-b) I + b 1 1' / K"

    @staticmethod
    def stationary_of(settings):
        return uniform_distribution(settings.num_classes, settings.suppressed)


@register_transition("absorbing_uniform", "tokens are masked or replaced by uniform ones, as in BERT")
class AbsorbingUniformTransition(RankOneTransition):
    """BERT's corruption (section 4 and appendix A.2.6 of the paper): a share `mask_fraction` of the noise is the mask, the rest uniform."""

    formula = "(1-b) I + b 1 (f e_m + (1-f) 1 / K)'"
    has_mask = True
    options = ("mask_token_id", "mask_in_data", "mask_fraction")

    @staticmethod
    def stationary_of(settings):
        fraction = settings.option("mask_fraction")
        return absorbing_distribution(settings.num_classes, settings.mask_token_id, fraction, settings.suppressed)


@register_transition("stationary", "tokens are replaced by draws from a given distribution")
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
