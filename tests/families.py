# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""One table of forward processes: how to ask the package for each, and what the reference says it is."""

import itertools
import os
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import pytest
import reference as ref
import torch

from d3pm_hf import D3PMScheduler, register_transition
from d3pm_hf.transitions import rates as rate_module
from d3pm_hf.transitions.rank_one import AbsorbingTransition


NUM_STEPS = 6
SHAPES = {"text": (4, NUM_STEPS), "image": (4, 1, 3, 2)}
# Steps that forget everything (beta = 1) may come last, or in the middle.
BETAS = {
    "plain": [0.05, 0.1, 0.3, 0.5, 0.7, 0.9],
    "end": [0.2, 0.02, 0.4, 0.1, 0.6, 1.0],
    "middle": [0.1, 0.3, 1.0, 0.2, 0.5, 0.8],
}
NAMES = (
    *("uniform", "absorbing", "absorbing_in_data", "absorbing_uniform", "stationary", "gaussian", "band_diagonal"),
    *("matrix", "rate", "nearest_neighbor", "absorbing_nearest_neighbor", "autoregressive"),
    *("rate-sparse", "nearest_neighbor-sparse", "absorbing_nearest_neighbor-sparse"),  # as for a large vocabulary
    "blockwise",
)
# Those whose matrices depend on the position. The table has them for sequences of as many tokens as there are steps.
BY_POSITION = ("autoregressive", "blockwise")
# How much faster than the first half of a sequence the second one is masked, in exponents.
BLOCKWISE_FACTOR = 3


@register_transition("blockwise", "tokens turn into a mask, those of the second half of a sequence faster")
class BlockwiseTransition(AbsorbingTransition):
    """A subclass of a family of the package that changes one method."""

    def log_survival(self, s, t, x):
        position = torch.arange(x.shape[-1], device=x.device)
        factor = torch.where(position < x.shape[-1] // 2, 1, BLOCKWISE_FACTOR)
        return factor * super().log_survival(s, t, x)

    def matrix(self, s, t):
        """Q_{s..t} of each position of a sequence of T tokens, `[T, K, K]`."""
        states = torch.arange(self.num_classes)[:, None].expand(-1, self.num_steps)
        return self.log_marginal(states, s, t, torch.float64).exp().transpose(0, 1)


@dataclass
class Family:
    """A forward process, twice: the scheduler's arguments, and the dense one-step matrices [T, P, K, K]."""

    name: str
    num_classes: int
    matrices: torch.Tensor
    prior: torch.Tensor  # [K]
    kwargs: dict = field(default_factory=dict)
    mask: int | None = None  # the state that x_0 never shows

    def scheduler(self, **kwargs):
        kwargs = {"num_train_timesteps": len(self.matrices), **self.kwargs, **kwargs}
        sparse = self.name.endswith("-sparse")
        with patch.object(rate_module, "MAX_TABLE_BYTES", 0 if sparse else rate_module.MAX_TABLE_BYTES):
            scheduler = D3PMScheduler(self.num_classes, **kwargs)
            assert isinstance(scheduler.transition, rate_module.SparseRateTransition) == sparse
        return scheduler

    @property
    def transition(self):
        return self.scheduler().transition

    def data(self, shape, seed=0):
        """States that data can show, [B, ...]."""
        tokens = torch.tensor([k for k in range(self.num_classes) if k != self.mask])
        return tokens[torch.randint(len(tokens), shape, generator=torch.Generator().manual_seed(seed))]

    def corrupt(self, x_0, n, seed=0):
        """x_n drawn from the reference's q(x_n | x_0)."""
        probs = ref.marginal(self.matrices, x_0, 0, n)
        generator = torch.Generator().manual_seed(seed)
        return torch.multinomial(probs.flatten(0, -2), 1, generator=generator).reshape(x_0.shape)


def stochastic(*shape, seed=0):
    """Random rows that sum to one."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(-1)


def embeddings(num_tokens, seed=0):
    vectors = torch.randn(num_tokens, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(vectors, dim=-1)  # of unit length: every metric orders neighbors alike


def build(name, num_classes=5, betas="plain"):
    """The family of this name; `betas` a key of BETAS or the values themselves."""
    if name.endswith("-sparse"):
        return replace(build(name.removesuffix("-sparse"), num_classes, betas), name=name)
    K, betas = num_classes, torch.tensor(BETAS[betas] if isinstance(betas, str) else betas, dtype=torch.float64)
    exponents = -torch.log1p(-betas)
    mask = 1 if K == 5 else K - 1
    masked = {"mask_token_id": mask}
    uniform, trained = ref.stationary_mix(K), {"trained_betas": betas.tolist()}
    only_mask = ref.stationary_mix(K, mask)
    if name == "uniform":
        return Family(name, K, ref.rank_one(betas, uniform), uniform, {"transition": name, **trained})
    if name in ("absorbing", "absorbing_in_data"):
        in_data = name == "absorbing_in_data"  # images: the mask is a gray that the data shows too
        kwargs = {"transition": "absorbing", "mask_in_data": in_data, **masked, **trained}
        return Family(name, K, ref.rank_one(betas, only_mask), only_mask, kwargs, None if in_data else mask)
    if name == "absorbing_uniform":
        pi = ref.stationary_mix(K, mask, 0.7)
        kwargs = {"transition": name, "mask_fraction": 0.7, **masked, **trained}
        return Family(name, K, ref.rank_one(betas, pi), pi, kwargs, mask)
    if name == "stationary":
        pi = stochastic(K, seed=1)
        return Family(name, K, ref.rank_one(betas, pi), pi, {"transition": name, "stationary_probs": pi, **trained})
    if name == "gaussian":
        return Family(name, K, ref.gaussian(betas, K), uniform, {"transition": name, **trained})
    if name == "band_diagonal":
        width = 2 if K > 3 else 1
        kwargs = {"transition": name, "bandwidth": width, **trained}
        return Family(name, K, ref.band_diagonal(betas, K, width), uniform, kwargs)
    if name == "matrix":
        # Nothing in common from step to step, and one impossible move in each.
        steps = stochastic(len(betas), K, K, seed=2)
        steps[:, 0, 1] = 0
        steps = steps / steps.sum(-1, keepdim=True)
        steps = (1 - betas[:, None, None]) * torch.eye(K).double() + betas[:, None, None] * steps
        prior = ref.stretch(steps[:, None], 0, len(steps))[0].mean(0)  # where uniform data end up
        return Family(name, K, steps[:, None], prior, {"transition": name, "transition_matrices": steps})
    if name == "rate":
        rates = stochastic(K, K, seed=3)
        rates = rates - torch.diag(rates.sum(-1))
        pi = ref.exponential(rates, [torch.inf])[0, 0, 0]
        kwargs = {"transition": name, "rate_matrix": rates, **trained}
        return Family(name, K, ref.exponential(rates, exponents), pi, kwargs)
    if name == "nearest_neighbor":
        vectors, k = embeddings(K), min(2 if K < 20 else 8, K - 1)  # enough to connect the graph
        rates = ref.neighbor_rates(vectors, k)
        kwargs = {"transition": name, "embeddings": vectors, "num_neighbors": k, **trained}
        return Family(name, K, ref.exponential(rates, exponents), uniform, kwargs)
    if name == "absorbing_nearest_neighbor":
        vectors, k = embeddings(K - 1), min(2, K - 2)
        rates = ref.add_absorbing_state(ref.neighbor_rates(vectors, k), 0.5, mask)
        kwargs = {"transition": name, "embeddings": vectors, "num_neighbors": k, "mask_rate": 0.5, **masked, **trained}
        return Family(name, K, ref.exponential(rates, exponents), only_mask, kwargs, mask)
    if name == "autoregressive":
        matrices = ref.autoregressive(K, len(betas), mask)
        return Family(name, K, matrices, only_mask, {"transition": name, **masked}, mask)
    if name == "blockwise":
        halves = [betas, -torch.expm1(-BLOCKWISE_FACTOR * exponents)]
        matrices = [ref.rank_one(halves[i >= len(betas) // 2], only_mask) for i in range(len(betas))]
        return Family(name, K, torch.cat(matrices, 1), only_mask, {"transition": name, **masked, **trained}, mask)
    raise KeyError(name)


# For tests of fast paths themselves, and of sizes for which the definitions take too long.
needs_kernels = pytest.mark.skipif(os.environ.get("D3PM_HF_KERNELS") == "0", reason="this is a test of kernels")


def without_fused_loss(transition):
    """A context in which the transition has no fused loss, so that the plain KL divergence is used."""
    return patch.object(transition, "fused_loss", None)


def can_take(name, num_classes=5, shape="text"):
    """A neighbor graph needs two tokens beside the mask; positions are those of text."""
    too_few = name.startswith("absorbing_nearest_neighbor") and num_classes < 3
    return not too_few and (name not in BY_POSITION or shape == "text")


def cover(cases):
    """Which cases of a product show every value of each parameter beside every value of each other one.

    Args:
        cases: The parameters of each case, by name. Those that no family can take are not chosen.

    Returns:
        Their indexes.
    """
    pairs = {}
    for index, case in enumerate(cases):
        if can_take(case.get("name", ""), case.get("num_classes", 5), case.get("shape", "text")):
            values = [(name, str(value)) for name, value in sorted(case.items())]
            pairs[index] = {*values, *itertools.combinations(values, 2)}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        best = max(pairs, key=lambda index: len(pairs[index] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
