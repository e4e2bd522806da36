# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Products of matrices of probabilities, in logarithms, to rounding."""

import math

import torch

from ..numerics import safe_log, with_float64


# Below this a sum of products of two probabilities in float64, which are taken as zero below 1e-154, may have lost a term.
LARGE_ENOUGH = 1e-130
# A product of matrices is repeated with other scales at most so many times before single entries are added up.
MAX_TILTS = 12
# Terms that are added up in logarithms at once: as many as stay in a cache.
TERMS_AT_ONCE = 1 << 18


def probabilities(log_p: torch.Tensor, squared: bool = False) -> torch.Tensor:
    """exp(log_p) without denormal numbers; `squared`: nor will the product of two results be one."""
    smallest = torch.finfo(log_p.dtype).tiny ** (0.5 if squared else 1)
    return log_p.masked_fill(log_p < math.log(smallest), -torch.inf).exp_()


@with_float64
def log_matmul(log_a: torch.Tensor, log_b: torch.Tensor, log_floor: torch.Tensor | None = None) -> torch.Tensor:
    """log (A B) to rounding, however small the probabilities are: float64 (float32 on a device without), `[b, n, m]`.

    Each row of A and each column of B is divided by its maximum, and the product is an ordinary one. The entries that
    are so small that terms of their sums may have been lost are added up in logarithms.

    Args:
        log_a: log A, `[b, n, K]`.
        log_b: log B, `[b, K, m]` or `[1, K, m]`.
        log_floor: Entries below this are not needed and may come out as any number below it, `[b, n, m]`.
    """
    log_a, log_b = log_a.double(), log_b.double()
    product, log_scale = _scaled_product(log_a, log_b)
    result = safe_log(product) + log_scale
    small = product < LARGE_ENOUGH
    if log_floor is not None:
        small &= log_scale + math.log(LARGE_ENOUGH) > log_floor
    if small.any():
        possible_a, possible_b = ((log > -torch.inf).float() for log in (log_a, log_b))
        small &= possible_a @ (possible_b[0] if len(log_b) == 1 else possible_b) > 0
        if len(log_a) == 1:
            result, small = _tilted_products(log_a, log_b, result, small)
        where = small.nonzero(as_tuple=True)
        result = result.index_put(where, _log_sums(log_a, log_b, *where))
    return result


def _scaled_product(log_a: torch.Tensor, log_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A B with the rows of A and the columns of B divided by their maxima, and the logarithms of what that left out."""
    top_a, top_b = log_a.amax(-1, keepdim=True), log_b.amax(-2, keepdim=True)
    top_a, top_b = (top.masked_fill(top == -torch.inf, 0) for top in (top_a, top_b))
    a, b = probabilities(log_a - top_a, squared=True), probabilities(log_b - top_b, squared=True)
    return a @ (b[0] if len(b) == 1 else b), top_a + top_b


def _tilted_products(log_a: torch.Tensor, log_b: torch.Tensor, result: torch.Tensor, small: torch.Tensor):
    """Finds many of the `small` entries of `result`, `[1, n, m]`, in other ordinary products; returns it, and the rest.

    A_ik exp(theta k) and B_kj exp(-theta k) have the same product. If states are levels on a line, entries at about the
    same distance have their largest terms where A falls as fast as B rises, and a theta of that slope makes them large.
    """
    states = torch.arange(log_a.shape[-1], dtype=log_a.dtype, device=log_a.device)
    for _ in range(MAX_TILTS):
        rows, columns = small[0].nonzero(as_tuple=True)
        if len(rows) < small.numel() / 32 or len(states) < 3:
            break
        row, column = rows[len(rows) // 2], columns[len(rows) // 2]
        best = (log_a[0, row] + log_b[0, :, column]).argmax().clamp(1, len(states) - 2)
        theta = (log_b[0, best + 1, column] - log_b[0, best - 1, column]) / 2
        if not theta.isfinite():
            break
        tilt = theta * (states - best)
        product, log_scale = _scaled_product(log_a + tilt, log_b - tilt[:, None])
        found = small & (product >= LARGE_ENOUGH)
        if not found.any():
            break
        result, small = torch.where(found, safe_log(product) + log_scale, result), small & ~found
    return result, small


def _log_sums(log_a: torch.Tensor, log_b: torch.Tensor, sample, row, column) -> torch.Tensor:
    """log sum_k A_ik B_kj of the entries (i, j) of some samples, `[entries]`, in logarithms."""
    columns = log_b.mT  # [b, m, K]
    # A step of a band-diagonal process reaches few states from each: the others need not be looked at.
    num_terms = max(1, int((columns > -torch.inf).sum(-1).max()))
    terms = columns.topk(num_terms).indices if num_terms < columns.shape[-1] // 4 else None
    columns = columns.contiguous() if terms is None else columns.gather(-1, terms)
    sums = []
    for part in zip(*(v.split(max(1, TERMS_AT_ONCE // num_terms)) for v in (sample, row, column))):
        sample, row, column = part
        which = sample if len(columns) > 1 else torch.zeros_like(sample)
        if terms is None:
            factors = log_a[sample, row]
        else:
            factors = log_a[sample[:, None], row[:, None], terms[which, column]]
        sums.append((factors + columns[which, column]).logsumexp(-1))
    return torch.cat(sums) if sums else log_a.new_empty(0)
