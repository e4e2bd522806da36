# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Steps of processes that keep a state or draw it anew, which read the network's output only where a state may change."""

from dataclasses import dataclass, fields

import torch

from ..numerics import divergence_terms, draw, in_pieces, log1mexp, logaddexp, softmax_weights, uniforms
from ..transitions.kernel import Kernel, register_kernel
from ..transitions.rank_one import STEP_DEFINITION, RankOneTransition
from .rank_one_loss import rank_one_terms  # noqa: F401  (registers it)


@dataclass(frozen=True)
class Proposal:
    """Where a reverse step may replace x_t, and by what: all `[B, ...]`, drawn before the network is asked.

    Args:
        may_change: Whether x_t may be replaced.
        from_data: Whether its replacement is a draw from p(x_0), or else from pi.
        u_state: Uniforms of the replacement, where `may_change`.
        u_accept: Uniforms that decide whether it is accepted.
        log_odds: Acceptance log-odds plus log p(x_t).
    """

    may_change: torch.Tensor
    from_data: torch.Tensor
    u_state: torch.Tensor
    u_accept: torch.Tensor
    log_odds: torch.Tensor

    def take(self, rows: torch.Tensor) -> "Proposal":
        """The proposals of some rows."""
        return Proposal(*(getattr(self, field.name)[rows] for field in fields(self)))


class RankOneKernel(Kernel, RankOneTransition):
    """Draws and divergences of [`RankOneTransition`] in O(1) per element, and its fused loss."""

    derived_from = (*STEP_DEFINITION, "_data_posterior", "is_certain", "replace", "log_odds_of_staying")
    fused_loss = "rank_one"

    def sample(self, x_0, t, generator=None):
        return self.replace(x_0, -torch.expm1(self.log_survival(0, t, x_0)), generator)

    def draw_stationary(self, u):
        if self.absorbing_state is not None:
            return torch.full_like(u, self.absorbing_state, dtype=torch.long)
        if self.is_uniform:
            return (u * self.num_classes).long().clamp_(0, self.num_classes - 1)
        return super().draw_stationary(u)

    def needs_logits(self, x_t, s, t):
        """Not where x_0 = x_t is certain, nor where x_s = x_t is, because no noise was added between s and t."""
        return ~self.is_certain(x_t, t) & (self.log_survival(s, t, x_t) < 0)

    def prior_divergence(self, x_0):
        log_a = self.log_survival(0, self.num_steps, x_0)
        log_pi, log_prior = self.table("log_stationary", x_0.device), self.table("log_prior", x_0.device)
        log_noise = log1mexp(log_a)[..., None] + log_pi  # [K], or [N, K] where survival depends on the position
        # q(x_T | x_0) is noise, plus the survivors at x_0.
        noise = divergence_terms(log_noise, log_prior)
        own = divergence_terms(logaddexp(log_a[..., None], log_noise), log_prior)
        return noise.sum(-1) + (own - noise).expand(*x_0.shape, -1).gather(-1, x_0[..., None]).squeeze(-1)

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
            # The host does not know which rows may change: drawing all of them is faster than synchronizing.
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


@register_kernel(RankOneTransition)
class AbsorbingKernel(RankOneKernel):
    """The kernel of a process with an absorbing state."""

    fused_loss = "absorbing"

    @classmethod
    def applies(cls, transition):
        return transition.absorbing_state is not None


register_kernel(RankOneTransition)(RankOneKernel)
