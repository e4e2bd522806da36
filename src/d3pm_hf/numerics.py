# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Seeds, exact categorical draws, and logarithms of probabilities. Nothing else in the package draws.

Every draw spends float64 uniforms: on the 2^-24 grid of float32 an event of probability 1e-8 never happens, and a
large vocabulary over many steps is made of such events.
"""

from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from .utils.checks import check_int, check_type, values_are_known


# Bytes of float32 weights that are alive at once on a CPU, so that they stay in its cache.
CHUNK_BYTES = 1 << 22
# The same on an accelerator, where a piece is a handful of kernel launches.
ACCELERATOR_CHUNK_BYTES = 1 << 28
# Types of devices that have no float64. What needs it there is computed on the CPU, or in float32 where that is enough.
WITHOUT_FLOAT64 = {"mps"}
# A logit of -inf is differentiated as one that is so much lower than all others of its row: exp of it is zero in float64.
FAR_BELOW = 1e6


def derive_seed(*numbers: int, bits: int = 63) -> int:
    """A seed below 2^bits that depends on all `numbers` and on their order, such as (seed, step, process).

    Seeds of different numbers are independent of each other, which those of `seed + step` are not: run 0 would see at
    step 1 what run 1 sees at step 0.

    Args:
        numbers (`int`): Integers of at least 0.
        bits (`int`, defaults to 63): Size of the seed, at most 64.
    """
    words = np.uint32 if bits <= 32 else np.uint64
    state = np.random.SeedSequence(numbers).generate_state(1, words)[0]
    return int(state) >> (8 * state.itemsize - bits)


def wide_dtype(device) -> torch.dtype:
    """float64, except on devices that have none."""
    return torch.float32 if torch.device(device).type in WITHOUT_FLOAT64 else torch.float64


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, on its device, or on the CPU if that has none."""
    return tensor.double() if wide_dtype(tensor.device) == torch.float64 else tensor.cpu().double()


def with_float64(function):
    """`function` of tensors, computed on the CPU if they are on a device without float64. The result is moved back."""

    @wraps(function)
    def wrapped(*args, **kwargs):
        values = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        devices = [v.device for v in values if wide_dtype(v.device) != torch.float64]
        if not devices:
            return function(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.cpu, (args, kwargs))
        return to_device(function(*args, **kwargs), devices[0])

    return wrapped


def compute_dtype(logits: torch.Tensor) -> torch.dtype:
    """float32, unless the logits are float64."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def scalar_tensor(value: float, dtype: torch.dtype, device) -> torch.Tensor:
    """A tensor of no dimension, made on `device`: copying a number from the host would synchronize with the device.

    XLA compiles each number that a kernel is made with anew, and 0, 1 and numbers that occur twice also if they are copied
    by themselves. There it is a copy of a vector, which does not wait.
    """
    device = torch.device(device)
    if device.type == "xla":
        return torch.full((1,), value, dtype=dtype).to(device).reshape(())
    return torch.full((), value, dtype=dtype, device=device)


def safe_log(p: torch.Tensor) -> torch.Tensor:
    """log p, with a gradient of zero where p = 0, which would be NaN once it meets a weight of zero."""
    if not p.requires_grad:
        return p.log()
    return torch.where(p == 0, -torch.inf, torch.where(p == 0, 1, p).log())


def logaddexp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """log(exp(a) + exp(b)), of tensors on any device."""
    return composed_logaddexp(a, b) if a.device.type == "xla" else torch.logaddexp(a, b)


def composed_logaddexp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`torch.logaddexp` for XLA, which has none and would compute it on the host."""
    top = torch.maximum(a, b)
    distance = torch.where(top.isinf(), 0, a - b).abs()
    return top + torch.log1p(torch.exp(-distance))


def safe_logaddexp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """log(exp(a) + exp(b)), with derivatives of zero at -inf and far below the other; those of `torch.logaddexp` are NaN."""
    if not (a.requires_grad or b.requires_grad):
        return logaddexp(a, b)
    top = torch.maximum(a, b).detach()
    top = top.masked_fill(top == -torch.inf, 0)
    return safe_log((a - top).exp() + (b - top).exp()) + top


@with_float64
def log_matmul(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """log (A B) = log sum_k A_ik B_kj, float64 `[b, n, m]`, from log A `[b, n, K]` and log B `[b, K, m]` or `[1, K, m]`.

    An entry that is zero is -inf, with a gradient of zero.
    """

    def row(log_row):  # [b, K]
        terms = log_row[..., None] + log_b.double()  # [b, K, m]
        top = terms.detach().amax(-2, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0)
        return safe_log((terms - top).exp().sum(-2)) + top.squeeze(-2)

    return torch.stack([row(log_row) for log_row in log_a.double().unbind(-2)], -2)


class _Replace(torch.autograd.Function):
    """`values` in place of -inf, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, logits, values):
        return torch.where(logits == -torch.inf, values, logits)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def lower_excluded(logits: torch.Tensor) -> torch.Tensor:
    """Logits `[..., K]` with finite numbers in place of -inf, far below all others of their row.

    What is differentiated through them is the limit for ever lower logits; at -inf itself most gradients are NaN.
    """
    lowest = logits.detach().masked_fill(logits == -torch.inf, torch.inf).amin(-1, keepdim=True)
    return _Replace.apply(logits, lowest - FAR_BELOW)


@contextmanager
def autocast_disabled(*values):
    """Outside of `torch.autocast`, which would round products to 16 bits, on the devices of all tensors among `values`."""
    with ExitStack() as stack:
        for value in values:
            device = value.device.type if isinstance(value, torch.Tensor) else None
            if device and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def without_autocast(function):
    """`function`, computed in the precision of its own choice inside `torch.autocast` too."""

    @wraps(function)
    def wrapped(*args, **kwargs):
        if torch.compiler.is_compiling():  # which does not trace a stack of contexts
            devices = [v.device.type for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
            with torch.autocast(devices[0], enabled=False):
                return function(*args, **kwargs)
        with autocast_disabled(*args, *kwargs.values()):
            return function(*args, **kwargs)

    return wrapped


def log1mexp(log_a: torch.Tensor) -> torch.Tensor:
    """log(1 - a) from log a, exact to rounding at both ends."""
    return torch.where(log_a > -0.6931, torch.log(-torch.expm1(log_a)), torch.log1p(-torch.exp(log_a)))


def divergence_terms(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """The summands q (log q - log p) of KL(q || p). Where q is zero in its dtype so is the term, whatever p is."""
    q = log_q.exp()
    return torch.where(q > 0, q * (log_q - log_p), 0)


@dataclass(frozen=True)
class ShortRow:
    """An entry of a list of generators, for a row `[N]` whose last elements are padding.

    Such a row draws the numbers that it would draw without its padding, where all numbers are 0.

    Args:
        generator (`torch.Generator`): Source of the random numbers of the row.
        length (`int`): Number of elements in front of the padding.
    """

    generator: torch.Generator
    length: int

    def __post_init__(self):
        check_type("generator", self.generator, torch.Generator, "a `torch.Generator`")
        check_int("length", self.length, 1)


def check_generators(generators: Sequence, batch_size: int) -> None:
    """Checks that there is one generator per sample."""
    if len(generators) != batch_size:
        raise ValueError(
            f"got {len(generators)} generators for a batch of {batch_size}: pass one generator, or one per sample"
        )


def uniforms(shape, generator=None, device="cpu") -> torch.Tensor:
    """Float64 uniforms in [0, 1); float32 on a device without float64, where small ones are as fine as float32 can be.

    With a list of generators, one per sample, sample `i` gets the numbers that it would get alone. A [`ShortRow`] in the
    list draws for the first elements of the second axis, and the others are 0. A generator of another device than `device`
    draws where it lives, and the result is moved, all samples at once.
    """
    shape = tuple(shape)
    if isinstance(generator, (list, tuple)):
        check_generators(generator, shape[0])
        drawn = torch.cat([_uniforms_of_row((1, *shape[1:]), device, one) for one in generator])
    elif generator is None and torch.compiler.is_compiling():
        drawn = _compiled_uniforms(shape, device)
    else:
        drawn = _wide_uniforms(shape, device, generator)
    if drawn.dtype != wide_dtype(device):  # a generator of another kind of device; float64 may be rounded up to one
        narrow = drawn.float().clamp(max=1 - 2**-24)
        return to_device(narrow, device).to(wide_dtype(device))
    return to_device(drawn, device)


def _uniforms_of_row(shape: tuple[int, ...], device, generator: torch.Generator | ShortRow) -> torch.Tensor:
    """Uniforms of one sample, `[1, ...]`. One number for the sample as a whole, `[1]`, has no padding."""
    if not isinstance(generator, ShortRow):
        return _wide_uniforms(shape, device, generator)
    if len(shape) == 1:
        return _wide_uniforms(shape, device, generator.generator)
    padding = shape[1] - generator.length
    if padding < 0:
        raise ValueError(
            f"a ShortRow has the length {generator.length}, and the rows {shape[1]}: make it at most that"
        )
    drawn = _wide_uniforms((1, generator.length, *shape[2:]), device, generator.generator)
    return torch.cat([drawn, drawn.new_zeros(1, padding, *shape[2:])], dim=1)


def _wide_uniforms(shape: Sequence[int], device, generator: torch.Generator | None = None) -> torch.Tensor:
    """Uniforms on the device of the generator; on `device` if there is none."""
    if generator is not None:
        check_type("generator", generator, torch.Generator, "a `torch.Generator`, or a list of one per sample")
        device = generator.device
    dtype = wide_dtype(device)
    if dtype == torch.float64:
        return torch.rand(shape, generator=generator, dtype=dtype, device=device)
    # On the grid of 2^-24 that `torch.rand` has in float32 an event of probability 1e-8 would never happen.
    coarse, fine = torch.rand((2, *shape), generator=generator, dtype=dtype, device=device)
    return coarse.add_(fine, alpha=2**-24).clamp_(max=1 - 2**-24)


# An operator of its own inside `torch.compile`, whose default backend would draw float32 uniforms and convert them.
_compiled_uniforms = torch.library.custom_op(
    "d3pm_hf::uniforms",
    lambda shape, device: _wide_uniforms(shape, device),
    mutates_args=(),
    schema="(SymInt[] shape, Device device) -> Tensor",
    tags=[torch.Tag.nondeterministic_seeded],
)


@_compiled_uniforms.register_fake
def _(shape, device):
    return torch.empty(shape, dtype=wide_dtype(device), device=device)


def to_device(tensor: torch.Tensor, device) -> torch.Tensor:
    """The tensor on `device`, in float32 where that has no float64.

    A copy to a GPU goes through pinned memory, so that the host does not wait for it.
    """
    if tensor.dtype == torch.float64:
        tensor = tensor.to(wide_dtype(device))
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def invert_cdf(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The state at which the cumulative sum of each row first exceeds `u` times the row's total.

    A state of weight zero is never returned.

    Args:
        weights: Non-negative, not necessarily normalized, `[n, K]`.
        u: Uniforms in [0, 1), `[n]`.
    """
    cumulative = weights.to(u.dtype).cumsum(-1)  # [n, K]
    total = cumulative[:, -1:]
    target = u[:, None] * total
    if u.device.type == "xla":  # which has no `torch.nextafter`
        states = torch.minimum(count_up_to(cumulative, target), count_below(cumulative, total))
    else:
        states = count_up_to(cumulative, torch.minimum(target, torch.nextafter(total, torch.zeros_like(total))))
    return states.squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def count_below(ends: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The first index at which the cumulative sums `[n, K]` reach their total, `[n, 1]`: the last that `u` < 1 can draw."""
    return (ends < total).sum(-1, keepdim=True)


def count_up_to(ends: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """How many of the sorted `ends` are at most each value: the first index whose end is strictly larger.

    For cumulative sums of probabilities, this skips the states of probability zero.

    Args:
        ends: Sorted, `[K]`, or `[n, K]` with a row for each row of `values`.
        values: Numbers of any shape, or `[n, m]`.
    """
    if values.device.type == "xla":
        return count_by_bisection(ends, values)
    return torch.searchsorted(ends, values, right=True)


def count_by_bisection(ends: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[`count_up_to`] for XLA, which has no `torch.searchsorted` and would compute it on the host."""
    size = ends.shape[-1]
    count = torch.zeros_like(values, dtype=torch.long)  # grows by powers of two, the largest first
    for bit in reversed(range(size.bit_length())):
        larger = count + (1 << bit)
        index = (larger - 1).clamp(max=size - 1)
        end = ends[index] if ends.ndim == 1 else ends.gather(-1, index)
        count = torch.where((larger <= size) & (end <= values), larger, count)
    return count


def draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """One state per row by inverting its cumulative distribution, in two levels: a column of a grid of the states, then its row.

    Only sums over columns touch all of `weights`; what is accumulated in float64 is about 2 sqrt(K) numbers per row.

    Args:
        weights: Non-negative, not necessarily normalized, `[n, K]`.
        u: Uniforms in [0, 1), `[n]`.
    """
    num_classes = weights.shape[-1]
    if num_classes <= 64:
        return invert_cdf(weights, u)
    width = 1 << (num_classes.bit_length() // 2)
    if num_classes % width:
        weights = torch.nn.functional.pad(weights, (0, -num_classes % width))
    grid = weights.unflatten(-1, (-1, width))  # [n, K / width, width]
    sums = grid.sum(1).to(u.dtype)
    column = invert_cdf(sums, u)[:, None]  # [n, 1]
    inside = sums.gather(-1, column)
    before = sums.cumsum(-1).gather(-1, column) - inside
    # Where `u` falls inside its column is uniform again; rounding may put it a hair outside.
    u_inside = ((u[:, None] * sums.sum(-1, keepdim=True) - before) / inside).clamp(0, 1).squeeze(-1)
    states = grid.gather(2, column[..., None].expand(-1, grid.shape[1], 1)).squeeze(-1)  # [n, K / width]
    return invert_cdf(states, u_inside) * width + column.squeeze(-1)


def softmax_weights(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(logits - top), float32, and top, the maximum of each row."""
    logits = logits.float()
    top = logits.amax(-1, keepdim=True)
    if values_are_known(top) and not (top > -torch.inf).all():
        raise ValueError(
            "no state is possible: the logits, after top_k and top_p, rule out every x_0 that can lead to x_t; leave at "
            "least one of them above -inf"
        )
    return (logits - top).exp_(), top


def categorical(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """One state per row from softmax(logits), exactly, from one uniform per row.

    Args:
        logits: `[n, K]`; `-inf` marks an impossible state.
        u: Uniforms in [0, 1), `[n]`.
    """

    def piece(logits, u):
        return draw(softmax_weights(logits)[0], u)

    return in_pieces(piece, logits.shape[-1], logits, u)


def spread(rows: torch.Tensor, index: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`rows` `[n, ...]` at the elements `index` of `shape`, and zeros at all others: `[*shape, ...]`."""
    zeros = rows.new_zeros(shape.numel(), *rows.shape[1:])
    return zeros.index_copy(0, index, rows).view(*shape, *rows.shape[1:])


def chunk_rows(num_classes: int, device: torch.device) -> int:
    """Number of rows of K numbers that are worked on at once; on a CPU they stay in its cache."""
    limit = CHUNK_BYTES if device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
    return max(1, limit // (4 * num_classes))


def in_pieces(function, num_classes: int, *rows: torch.Tensor) -> torch.Tensor:
    """`function` of rows of all its arguments, of as many at a time as [`chunk_rows`] says."""
    size = chunk_rows(num_classes, rows[0].device)
    if len(rows[0]) <= size:
        return function(*rows)
    return torch.cat([function(*part) for part in zip(*(v.split(size) for v in rows))])
