# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The terms of [`matrix_terms`] for a sample whose Qbar_s is of low rank, and whose steps reach few states.

    m = p Qbar_s = (p left) right

is needed only at the states x_s from which a step leads to x_t. Rows are sorted by x_t, so that those that are worked on at once
need it at one stretch of states. Beside that, only p has K numbers per row, and the gradient in its place.
"""

from collections.abc import Callable

import torch

from ..plain import Options


# Bytes of the numbers that are worked on at once. There are up to three buffers of this size.
PIECE_BYTES = 1 << 18
# The terms and gradients of a row are within this of the exact ones, in nats; other rows are computed with Qbar_s itself.
TOLERANCE = 1e-5
# Steps that are less likely than this are left out.
MIN_STEP = 1e-12
# A log p(x_0) below this may have underflowed.
MIN_LOG_P = -80.0


def low_rank_terms(
    operators, options: Options, predict: Callable, finish: Callable | None, x_0: torch.Tensor, x_t: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """vb, the cross-entropy, and whether they may be off by more than `TOLERANCE`, `[N]`, of one sample.

    Args:
        operators: Those of the transition for this sample, with `factors`.
        predict: `rows -> p`, float32 `[n, K]`, of a slice of the rows.
        finish: `(rows, slope) -> None` of a slice of the rows is told p dL/dp = p slope, but for -log p(x_0); `None` if no
            gradient is wanted.
        x_0, x_t: `[N]`.
    """
    left, right, truncation, rounding = operators.factors
    rank, num_rows, num_classes = len(right) - 1, len(x_t), right.shape[1]
    size = max(1, PIECE_BYTES // (4 * num_classes))
    pieces = [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]
    inside, p_0 = left.new_empty(rank, num_rows), left.new_empty(num_rows)
    for piece in pieces:
        p = predict(piece)
        torch.mm(left[:-1], p.T, out=inside[:, piece])
        p_0[piece] = p.gather(-1, x_0[piece, None]).squeeze(-1)

    columns, (x_t, order) = operators.columns[0], x_t.sort()
    evidence = (right[:-1] @ columns.T).index_select(1, x_t)  # right q(x_t | x_s = .), [r, N]
    inside, x_0 = inside.index_select(1, order), x_0.index_select(0, order)
    z, error = (inside * evidence).sum(0), inside.square().sum(0).sqrt_().mul_(rounding).add_(truncation)
    z_0, kl, back, unreached = _summed(operators, inside.T, x_0, x_t)
    log_evidence = (z / z_0).log_()
    vb = kl.div_(z_0).add_(log_evidence)
    is_good = (back[-1] * error < TOLERANCE * z_0) & (error.div_(TOLERANCE) < z) & (z_0 > 10 * unreached / TOLERANCE)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(num_rows))
    vb, log_evidence, is_good = (v.index_select(0, inverse) for v in (vb, log_evidence, is_good))
    if finish is not None:
        converted = options.hybrid_coeff if options.convert_auxiliary else 0.0
        back.div_(-z_0)
        back[:-1].addcmul_(evidence, (1 + converted) / z)
        back[-1] = options.hybrid_coeff - converted
        back = back.index_select(1, inverse)
        for piece in pieces:
            finish(piece, back[:, piece].T @ left)
    log_p_0 = p_0.log_()
    cross_entropy = log_evidence - log_p_0 if options.convert_auxiliary else -log_p_0
    return vb, cross_entropy, ~(is_good & (log_p_0 > MIN_LOG_P))


def _summed(operators, inside: torch.Tensor, x_0: torch.Tensor, x_t: torch.Tensor):
    """Z_0 and sum_j w_j log(row_j / m_j), `[N]`, right (w / m), `[r + 1, N]`, and what has been left out of Z_0 at most.

    Where w = row column, m = inside right, and inside is `[N, r]`. x_t is sorted.
    """
    right, truncation, num_rows = operators.factors.right, operators.factors.truncation, len(x_t)
    rows = operators.rows[0].clamp_(min=torch.finfo(right.dtype).tiny ** 0.5)  # no logarithm of zero
    columns, (reach, unreached) = operators.columns[0], operators.reach(MIN_STEP)
    z_0, kl, back = right.new_empty(num_rows), right.new_empty(num_rows), right.new_empty(len(right), num_rows)
    ends, first = x_t.tolist(), 0
    while first < num_rows:
        low, last = max(0, ends[first] - reach), first + max(1, PIECE_BYTES // (4 * min(2 * reach + 1, len(columns))))
        last = min(last, num_rows)
        high = min(len(columns), ends[last - 1] + reach + 1)
        piece, states, first = slice(first, last), slice(low, high), last
        m, ratio, slope = right.new_empty(3, len(x_t[piece]), high - low)
        torch.mm(inside[piece], right[:-1, states], out=m).clamp_(min=truncation)
        torch.index_select(rows[:, states], 0, x_0[piece], out=ratio).div_(m)
        torch.index_select(columns[:, states], 0, x_t[piece], out=slope).mul_(ratio)  # w / m
        torch.sum(m.mul_(slope), -1, out=z_0[piece])
        torch.sum(m.mul_(ratio.log_()), -1, out=kl[piece])
        torch.mm(right[:, states], slope.T, out=back[:, piece])
    return z_0, kl, back, unreached
