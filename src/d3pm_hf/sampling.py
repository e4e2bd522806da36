# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Exact categorical draws. Nothing else in the package draws.

Every draw spends float64 uniforms: on the 2^-24 grid of float32 an event of probability 1e-8 never happens, and a
large vocabulary over many steps is made of such events.
"""

import torch


# The inverse CDF looks at the sums of blocks of this many states first, then inside one block.
BLOCK = 256
# Bytes of float32 weights that are alive at once on a CPU, so that they stay in its cache.
CHUNK_BYTES = 1 << 22


def wide_dtype(device) -> torch.dtype:
    """float64, except on devices that have none."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def uniforms(shape, generator=None, device="cpu") -> torch.Tensor:
    """Float64 uniforms in [0, 1).

    With a list of generators, one per sample, sample `i` gets the numbers that it would get alone. A generator of
    another device than `device` draws where it lives, and the result is moved.
    """
    shape = tuple(shape)
    if isinstance(generator, (list, tuple)):
        if len(generator) != shape[0]:
            raise ValueError(
                f"got {len(generator)} generators for a batch of {shape[0]}: pass one generator, or one per sample"
            )
        return torch.cat([uniforms((1, *shape[1:]), one, device) for one in generator])
    origin = device if generator is None else generator.device
    return torch.rand(shape, generator=generator, dtype=wide_dtype(origin), device=origin).to(device)


def invert_cdf(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The state at which the cumulative sum of each row first exceeds `u` times the row's total.

    A state of weight zero is never returned.

    Args:
        weights: non-negative, not necessarily normalised, `[n, K]`.
        u: uniforms in [0, 1), `[n]`.
    """
    cumulative = weights.to(u.dtype).cumsum(-1)  # [n, K]
    total = cumulative[:, -1:]
    target = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # `right`: the first state whose cumulative sum is strictly larger, which skips states of weight zero.
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def categorical(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """One state per row from softmax(logits), exactly, from one uniform per row.

    Args:
        logits: `[n, K]`; `-inf` marks an impossible state.
        u: uniforms in [0, 1), `[n]`.
    """
    rows_at_once = max(1, CHUNK_BYTES // (4 * logits.shape[-1]))
    if logits.device.type != "cpu" or len(logits) <= rows_at_once:
        return _categorical(logits, u)
    return torch.cat([_categorical(*part) for part in zip(logits.split(rows_at_once), u.split(rows_at_once))])


def _categorical(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    num_classes = logits.shape[-1]
    weights = logits.new_zeros(len(logits), -(-num_classes // BLOCK) * BLOCK, dtype=torch.float32)
    logits = logits.float()
    torch.sub(logits, logits.amax(-1, keepdim=True), out=weights[:, :num_classes]).exp_()
    if num_classes <= 2 * BLOCK:
        return invert_cdf(weights, u)
    blocks = weights.view(len(weights), -1, BLOCK)  # [n, K / BLOCK, BLOCK]
    sums = blocks.sum(-1).to(u.dtype)
    block = invert_cdf(sums, u)[:, None]  # [n, 1]
    inside = sums.gather(-1, block)
    before = sums.cumsum(-1).gather(-1, block) - inside
    # Where `u` falls inside its block is uniform again; rounding may put it a hair outside.
    u_inside = ((u[:, None] * sums.sum(-1, keepdim=True) - before) / inside).clamp(0, 1).squeeze(-1)
    states = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK)).squeeze(1)  # [n, BLOCK]
    return block.squeeze(-1) * BLOCK + invert_cdf(states, u_inside)
