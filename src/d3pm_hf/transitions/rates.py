# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Continuous-time processes, Q_{s..t} = exp((abar_t - abar_s) R): nearest neighbors, and the user's own rates.

A small vocabulary gets matrices (`dense_rates`); a large one keeps R sparse and applies the exponential to the vectors of
a batch (`sparse_rates`).
"""

from typing import Any, ClassVar

import torch
from tqdm.auto import tqdm

from ..schedules import NUM_EXPONENTS, check_exponents, entropy, information, mutual_information_exponents
from ..utils.checks import check_tensor
from ..utils.names import TRANSITIONS
from .base import Transition
from .dense_rates import DenseRateTransition
from .family import TransitionFamily, register_transition
from .rate_matrices import add_absorbing_state, check_rates, nearest_neighbor_rates
from .sparse_rates import SparseRateTransition


# Bytes of the matrices that are made at once.
STEP_BYTES = 1 << 23
# A table of Qbar_t in float32 up to this size is kept; beyond it R stays sparse.
MAX_TABLE_BYTES = 1 << 28
# So is that of a sparse R whose T products of matrices take up to this many multiplications, which is a few seconds.
MAX_TABLE_PRODUCTS = 1 << 33
# States x_0 over which the entropy of x_t is averaged for the schedule of a large vocabulary.
NUM_INFORMATION_STATES = 512


@register_transition("rate", TRANSITIONS["rate"])
class RateFamily(TransitionFamily):
    """Matrix exponentials of the rates `rate_matrix`, dense or sparse (appendix A.5 of the paper).

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler

        rates = torch.tensor([[-1.0, 1.0, 0.0], [0.5, -1.0, 0.5], [0.0, 1.0, -1.0]])  # rows sum to zero
        scheduler = D3PMScheduler(3, 20, transition="rate", rate_matrix=rates, beta_schedule="cosine")
        x_t = scheduler.add_noise(torch.tensor([[0, 1, 2]]), 10)
        ```
    """

    formula = "exp(a R)"
    is_exponential = True
    required_tensors = ("rate_matrix",)

    @classmethod
    def create(cls, settings):
        rates = cls.rates_of(settings)

        def from_information(unigram: torch.Tensor) -> torch.Tensor:
            return rate_information_exponents(rates, unigram, settings.num_steps)

        return rate_transition(rates, settings.exponents(from_information))

    @staticmethod
    def rates_of(settings) -> torch.Tensor:
        """R, `[K, K]`."""
        return settings.tensors["rate_matrix"]

    @classmethod
    def tensor_shapes(cls, num_classes, num_steps):
        return {"rate_matrix": [(num_classes, num_classes)]}

    @classmethod
    def check_tensors(cls, tensors):
        if "rate_matrix" in tensors:
            check_rates(tensors["rate_matrix"])


@register_transition("nearest_neighbor", TRANSITIONS["nearest_neighbor"])
class NearestNeighborFamily(RateFamily):
    """Moves along the graph of nearest neighbors in `embeddings` (appendix A.2.4 of the paper)."""

    formula = "exp(a R), R of the neighbors"
    options: ClassVar[tuple[str, ...]] = ("num_neighbors",)

    @classmethod
    def input_tensors(cls):
        return ("embeddings",)

    @classmethod
    def prepare_tensors(cls, tensors, settings):
        """The rates of the nearest neighbors in `embeddings`, in their place."""
        embeddings = tensors.get("embeddings")
        if embeddings is None:
            return tensors
        if tensors.get("rate_matrix") is not None:
            raise ValueError("got embeddings and rate_matrix: embeddings define the rates; pass one of the two")
        check_tensor("embeddings", embeddings, None, None)
        if not embeddings.isfinite().all():
            raise ValueError("embeddings hold NaN or infinity: pass finite vectors")
        rates = nearest_neighbor_rates(embeddings, settings.option("num_neighbors"))
        return {**tensors, "embeddings": None, "rate_matrix": rates}


@register_transition("absorbing_nearest_neighbor", TRANSITIONS["absorbing_nearest_neighbor"])
class AbsorbingNearestNeighborFamily(NearestNeighborFamily):
    """Moves to nearest neighbors over all tokens but the mask, to which every token moves at the rate `mask_rate`."""

    formula = "exp(a R), R of the neighbors and the mask"
    has_mask = True
    options = ("num_neighbors", "mask_rate", "mask_token_id", "mask_in_data")

    @staticmethod
    def rates_of(settings):
        rates = settings.tensors["rate_matrix"]
        return add_absorbing_state(rates, settings.option("mask_rate"), settings.mask_token_id)

    @classmethod
    def tensor_shapes(cls, num_classes, num_steps):
        return {"rate_matrix": [(num_classes - 1, num_classes - 1)]}


def rate_transition(rates: torch.Tensor, exponents: torch.Tensor) -> Transition:
    """The process with the rate matrix `[K, K]` (dense or sparse): as matrices where they are soon made, else sparse."""
    rates = check_rates(rates)
    num_classes, num_steps = len(rates), len(check_exponents(exponents))
    fits = (num_steps + 1) * num_classes**2 * 4 <= MAX_TABLE_BYTES
    is_sparse = rates.values().numel() < num_classes**2 / 8
    is_soon = num_steps * num_classes**3 <= MAX_TABLE_PRODUCTS
    return (DenseRateTransition if fits and (is_soon or not is_sparse) else SparseRateTransition)(rates, exponents)


def rate_information_exponents(rates: torch.Tensor, unigram: torch.Tensor, num_steps: int) -> torch.Tensor:
    """The mutual-information schedule of the process with this rate matrix (appendix A.7 of the paper)."""
    enough = 1 - 0.5 / num_steps
    if len(rates) <= NUM_INFORMATION_STATES:
        return mutual_information_exponents(lambda a: _lost_by_matrices(rates, unigram, a, enough), num_steps)
    return mutual_information_exponents(
        lambda a: _lost_by_vectors(rates, unigram, a, enough), num_steps, num_exponents=NUM_EXPONENTS // 4
    )


def _lost_by_matrices(
    rates: torch.Tensor, unigram: torch.Tensor, exponents: torch.Tensor, enough: float = torch.inf
) -> torch.Tensor:
    """1 - I(x_t; x_0) / H(x_0) after the cumulative exponents `[n]`, ascending; once `enough` is lost, 1."""
    definition = DenseRateTransition(rates, torch.zeros(1, dtype=torch.float64))
    process: Any = definition.kernel() or definition
    lost = torch.ones_like(exponents)
    parts = torch.arange(len(exponents)).split(max(1, STEP_BYTES // (8 * len(rates) ** 2)))
    for part in tqdm(parts, desc="mutual-information schedule", delay=2, leave=False):
        matrices = process.log_exponentials(exponents[part]).exp()
        lost[part] = 1 - information(unigram, matrices) / entropy(unigram)
        if lost[part[-1]] > enough:
            break
    return lost


def _lost_by_vectors(
    rates: torch.Tensor, unigram: torch.Tensor, exponents: torch.Tensor, enough: float
) -> torch.Tensor:
    """1 - I(x_t; x_0) / H(x_0) for a large vocabulary: H(x_t) is exact, H(x_t | x_0) an average over some x_0.

    The most frequent half of those count with their weight. The others stand for equal shares of all the rest, ordered by
    how fast a state is left, which is what its entropy depends on most. The vectors are carried from one exponent to the
    next, until `enough` is lost; what comes after counts as all.
    """
    definition = SparseRateTransition(rates, torch.zeros(1, dtype=torch.float64))
    process: Any = definition.kernel() or definition
    half = NUM_INFORMATION_STATES // 2
    order = unigram.argsort(descending=True)
    head, tail = order[:half], order[half:]
    (rows, columns), values = process.rates.indices(), process.rates.values()
    tail = tail[values[rows == columns][tail].argsort()]
    shares = (torch.arange(half, dtype=torch.float64) + 0.5) / half
    picked = torch.searchsorted(unigram[tail].cumsum(0) / unigram[tail].sum(), shares).clamp_(max=len(tail) - 1)
    weights = torch.cat([unigram[head], (unigram[tail].sum() / half).expand(half)])
    vectors = torch.cat([unigram[None].float(), process._one_hot(torch.cat([head, tail[picked]]), torch.float32)])
    lost = torch.ones_like(exponents)
    before = 0.0
    for i, exponent in enumerate(tqdm(exponents.tolist(), desc="mutual-information schedule", delay=2, leave=False)):
        vectors = process.apply(vectors, torch.full((len(vectors),), exponent - before).double(), transposed=False)
        before = exponent
        entropies = entropy(vectors.double())
        lost[i] = 1 - (entropies[0] - weights @ entropies[1:]) / entropy(unigram)
        if lost[i] > enough:
            break
    return lost
