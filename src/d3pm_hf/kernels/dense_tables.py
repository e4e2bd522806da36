# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Tables of products of matrices, and draws and losses that read them.

What is stored is log Qbar_t, once, in the precision of the logits that it meets. Where the noise has made all entries of one size,
factors of low rank take the place of the matrix (`cumulative.py`): the table of the paper's Gaussian at K = 256 and T = 1000 has
65 MB in float32, in place of 262. The matrix of one step is rebuilt for each batch, which costs a fraction of one product.
"""

import threading
from typing import ClassVar

import torch
from tqdm.auto import tqdm

from ..numerics import (
    ShortRow,
    categorical,
    check_generators,
    count_up_to,
    divergence_terms,
    draw,
    in_pieces,
    to_device,
    uniforms,
    wide_dtype,
)
from ..transitions.base import Transition, at_times, expand_time
from ..transitions.dense import DenseTransition
from ..transitions.dense_rates import DenseRateTransition
from ..transitions.kernel import Kernel, register_kernel
from ..transitions.rank_one import STEP_DEFINITION
from ..transitions.toeplitz import ToeplitzTransition
from ..utils.checks import values_are_known
from .cumulative import CumulativeProducts, flat_basis, is_flat
from .log_matmul import LARGE_ENOUGH, log_matmul, probabilities
from .low_rank import Factors, FactorTable
from .matrix_loss import matrix_terms  # noqa: F401  (registers it)
from .operators import DenseOperators


# Products over longer stretches of time are kept for the next step or batch, up to this size.
MAX_STRETCH_BYTES = 1 << 28
# The matrices of as many steps as this are made at once.
STEP_BYTES = 1 << 23
# For so few states the distribution of x_T is carried through all steps; more are read off the table.
FEW_STATES = 32
# A table is built by one thread, and the others wait for it.
_building = threading.RLock()
# A float32 sum of probabilities below this may have lost some of its terms.
FAR = 1e-25


def sample_rows(transition: "Transition", x_0: torch.Tensor, t, generators) -> torch.Tensor:
    """`transition.sample` of each row with its own generator, a [`ShortRow`] without its padding, which stays as it is."""
    check_generators(generators, len(x_0))
    parts = []
    for x, time, one in zip(x_0.split(1), torch.as_tensor(t).expand(len(x_0)).split(1), generators):
        if isinstance(one, ShortRow):
            drawn = transition.sample(x[:, : one.length], time, one.generator)
            parts.append(torch.cat([drawn, x[:, one.length :]], dim=1))
        else:
            parts.append(transition.sample(x, time, one))
    return torch.cat(parts)


@register_kernel(DenseTransition)
class DenseKernel(Kernel, DenseTransition):
    """Tables of log Qbar_t for [`DenseTransition`], and draws and losses from them."""

    derived_from: ClassVar[tuple[str, ...]] = (*STEP_DEFINITION, "_gather_rows")
    fused_loss = "matrix"
    min_rows = 1
    is_centrosymmetric = False  # whether row K-1-i of every matrix is row i read backwards
    is_doubly_stochastic = False  # whether columns of every matrix sum to one, too

    def prepare(self):
        self._times = torch.arange(self.num_steps + 1)
        self._cumulative: dict[tuple, CumulativeProducts] = {}
        self._stretches: dict[tuple, torch.Tensor] = {}
        self._log_total: torch.Tensor | None = None  # log Qbar_T, float64, [K, K]
        self._factors = FactorTable()

    def multiply(self, log_a, log_b):
        return log_matmul(log_a, log_b)

    def log_stretch(self, s: int, t: int) -> torch.Tensor:
        """log Q_{s..t} = log (Q_{s+1} ... Q_t), float64, `[K, K]`."""
        for product in self._log_products(s, t):
            pass  # only the last one is wanted, and T of them would not fit
        return product

    def _log_products(self, s: int, t: int):
        """log Q_{s..s}, log Q_{s..s+1}, ..., log Q_{s..t}."""
        num_rows = (self.num_classes + 1) // 2 if self.is_centrosymmetric else self.num_classes
        yield torch.eye(self.num_classes, dtype=torch.float64).log()
        if s < t:
            first = self.log_step_matrices(torch.tensor([s + 1]))[0, :num_rows]
            for rows in self._log_carried(first, s + 1, t):
                yield torch.cat([rows, rows[: self.num_classes - num_rows].flip(0, 1)])

    def step_matrices(self, t: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Q_t for each of the times `[b]`, `[b, K, K]`; the product of two entries is no denormal number."""
        return probabilities(self.log_step_matrices(t).to(dtype), squared=True)

    def step_columns(self, s, t, dtype: torch.dtype, device) -> torch.Tensor:
        """q(x_t | x_s) for times `[b]`, `[b, x_t, x_s]`; the product of two entries is no denormal number."""
        return probabilities(self.log_matrices(s, t, dtype, device), squared=True).mT.contiguous()

    def _log_carried(self, rows: torch.Tensor, s: int, t: int):
        """log of the distributions exp(rows), `[n, K]`, after s, s + 1, ..., t steps, if they are those after s.

        Once all probabilities are large enough, products of probabilities lose none of their terms, and need no logarithms.
        """
        yield rows
        size = max(1, STEP_BYTES // (8 * self.num_classes**2))
        times = (torch.arange(n, min(n + size, t + 1)) for n in range(s + 1, t + 1, size))
        carried = _if_large(rows.exp())
        with tqdm(total=t - s, desc="products of transition matrices", delay=2, leave=False) as progress:
            for part in times:
                steps = log_steps = None
                for n in range(len(part)):
                    if carried is not None:
                        steps = self.step_matrices(part) if steps is None else steps
                        carried = _if_large(carried @ steps[n])
                    if carried is not None:
                        rows = carried.log()
                    else:
                        log_steps = self.log_step_matrices(part) if log_steps is None else log_steps
                        rows = log_matmul(rows[None], log_steps[n : n + 1])[0]
                        carried = _if_large(rows.exp())
                    progress.update()
                    yield rows

    def _log_after_all(self, log_p: torch.Tensor) -> torch.Tensor:
        """log of the distributions exp(log_p), `[n, K]`, of x_0 after all T steps."""
        for rows in self._log_carried(log_p, 0, self.num_steps):
            pass
        return rows

    def log_cumulative(self, dtype: torch.dtype, device) -> CumulativeProducts:
        """log Qbar_0 .. log Qbar_T, multiplied in float64 and stored as `dtype` on `device`."""
        key = torch.device(device), dtype
        with _building:
            if key not in self._cumulative:
                self._cumulative[key] = self._multiply(dtype).to(device)
        return self._cumulative[key]

    def _multiply(self, dtype: torch.dtype) -> CumulativeProducts:
        """`log_cumulative` on the CPU."""
        table = torch.empty(self.num_steps + 1, self.num_classes, self.num_classes, dtype=dtype)
        next_try = 1
        for n, product in enumerate(self._log_products(0, self.num_steps)):
            table[n] = product
            if not self.is_doubly_stochastic:
                continue
            self._factors.add(n, product.exp)
            if next_try <= n < self.num_steps and is_flat(product):
                left, next_try = flat_basis(product.exp()), 2 * n
                if left is not None:
                    right = self._carry_factor(left, left.T @ product.exp(), n)
                    self._log_total = (left @ right[-1]).log()
                    return CumulativeProducts(table[:n].clone(), left, right)
        self._log_total = product
        return CumulativeProducts(table)

    def _carry_factor(self, left: torch.Tensor, right: torch.Tensor, n: int) -> torch.Tensor:
        """The right factors of Qbar_n = left right, Qbar_{n+1}, ..., Qbar_T, `[T + 1 - n, r, K]`."""
        factors = [right]
        for m in range(n + 1, self.num_steps + 1):
            factors.append(factors[-1] @ self.step_matrices(torch.tensor([m]))[0])
            self._factors.add(m, lambda: left @ factors[-1])
        return torch.stack(factors)

    def factors(self, n: int) -> Factors | None:
        """Qbar_n as a product of low rank, float32 on the CPU; `None` if it is not."""
        table = self.log_cumulative(torch.float32, "cpu")
        return self._factors.find(n, lambda: table.probabilities(n, torch.float64)[0])

    def step_reach(self, s, t, most: float) -> int:
        """A distance |x_t - x_s| beyond which q(x_t | x_s) sums up to `most` or less, for times `[1]`."""
        return self.num_classes - 1

    def log_matrices(self, s, t, dtype: torch.dtype, device) -> torch.Tensor:
        """log Q_{s..t}, one per sample, `[B, K, K]`, or `[1, K, K]` where the times are integers."""
        if s is None or (isinstance(s, int) and isinstance(t, int) and s == t - 1):
            return self.log_step_matrices(at_times(self.table("_times", device), t)).to(dtype)
        if isinstance(s, int) and s == 0:
            return self.log_cumulative(dtype, device).matrices(t)
        s, t = torch.broadcast_tensors(torch.as_tensor(s).reshape(-1).cpu(), torch.as_tensor(t).reshape(-1).cpu())
        stretches = [self._kept_stretch(*pair, torch.device(device)) for pair in zip(s.tolist(), t.tolist())]
        if not stretches:
            return torch.empty(0, self.num_classes, self.num_classes, dtype=dtype, device=device)
        return torch.stack(stretches).to(dtype)

    def _kept_stretch(self, s: int, t: int, device: torch.device) -> torch.Tensor:
        """`log_stretch` on a device, computed and moved once.

        Other threads may replace the dictionary at any time, but never empty it.
        """
        stretch = self._stretches.get((s, t, device))
        return self._keep_stretch(s, t, self.log_stretch(s, t), device) if stretch is None else stretch

    def _keep_stretch(self, s: int, t: int, stretch: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Moves a stretch to a device and keeps it there, in place of all others if those are many."""
        kept = self._stretches
        if len(kept) * 8 * self.num_classes**2 >= MAX_STRETCH_BYTES:
            kept = self._stretches = {}
        kept[s, t, device] = stretch = stretch.to(device, wide_dtype(device))
        return stretch

    def prepare_stretches(self, times, t, device):
        device, after = torch.device(device), t
        if (len(self._stretches) + 2 * len(times)) * 8 * self.num_classes**2 >= MAX_STRETCH_BYTES:
            self._stretches = {}  # what is made here must not be lost halfway
        for s in sorted((s for s in times if s < t), reverse=True):
            first = self._kept_stretch(s, after, device)  # all t share it
            if after < t and (s, t, device) not in self._stretches:
                rest = self._kept_stretch(after, t, device)
                self._keep_stretch(s, t, log_matmul(first[None], rest[None])[0], device)
            after = s

    def sample(self, x_0, t, generator=None):
        # The search in the rows of a whole matrix needs float64.
        is_small = self._is_small(x_0) or wide_dtype(x_0.device) != torch.float64
        if isinstance(generator, (list, tuple)) and not is_small:
            lengths = [one.length for one in generator if isinstance(one, ShortRow)]
            if min(lengths, default=self.num_classes) < self.num_classes:  # a row that is small without its padding
                return sample_rows(self, x_0, t, generator)
        u = uniforms(x_0.shape, generator, x_0.device)
        if is_small:
            weights = probabilities(self.log_marginal(x_0, 0, t)).flatten(0, -2)
            return draw(weights, u.flatten()).view_as(x_0)
        cumulative = self.log_cumulative(torch.float32, x_0.device)
        is_little = 8 * len(x_0) * self.num_classes**2 < STEP_BYTES // 4
        if is_little or not values_are_known(x_0) or not isinstance(t, torch.Tensor) or t.numel() == 1:
            return self._draw(cumulative.probabilities(t, u.dtype), x_0, u)
        # One after the other, tables stay in a cache.
        parts = zip(t.reshape(-1).tolist(), x_0.split(1), u.split(1))
        return torch.cat([self._draw(cumulative.probabilities(n, u.dtype), *part) for n, *part in parts])

    def _draw(self, rows: torch.Tensor, x_0: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """A state from row x_0 of the matrix of each sample, or of the only one, `[b, K, K]`, for each uniform."""
        # The running sum over all rows of a matrix is one ascending sequence, in which row i is about [i, i + 1].
        ladder = rows.new_empty(len(rows), 1 + self.num_classes**2)
        ladder[:, 0] = 0
        torch.cumsum(rows.flatten(1), -1, out=ladder[:, 1:])
        states, u = (v.reshape(len(ladder), -1) for v in (x_0, u))
        edges = ladder[:, :: self.num_classes]
        start, end = edges.gather(-1, states), edges[:, 1:].gather(-1, states)
        found = count_up_to(ladder, end.sub_(start).mul_(u).add_(start)).sub_(states, alpha=self.num_classes).sub_(1)
        return found.clamp_(0, self.num_classes - 1).view_as(x_0)

    def _is_small(self, x: torch.Tensor) -> bool:
        """Whether samples have fewer elements than states: then rows of a matrix are cheaper than the matrix."""
        return x.numel() < len(x) * self.num_classes

    def sample_previous(self, x0_logits, x_t, s, t, generator=None, denoising=False):
        u = uniforms((*x_t.shape, 2), generator, x_t.device).flatten(0, -2)
        log_column = self.log_matrices(0, t, torch.float32, x_t.device)[0].T.contiguous()
        log_step = self.log_matrices(s, t, torch.float32, x_t.device)[0].T.contiguous()
        log_cumulative = self.log_matrices(0, s, torch.float32, x_t.device)[0]
        on_cpu = x_t.device.type == "cpu"
        if on_cpu:
            step, cumulative = probabilities(log_step), probabilities(log_cumulative)

        def piece(logits, x_t, u_0, u_s):
            """Draws x_0 from the denoising posterior, then x_s from q(x_s | x_t, x_0), for rows of logits `[r, K]`."""
            x_0 = categorical(self._with_column(logits, log_column.index_select(0, x_t), denoising), u_0)
            if s == 0:
                return x_0
            if not on_cpu:  # which rows underflow is not known to the host
                return categorical(log_step.index_select(0, x_t) + log_cumulative.index_select(0, x_0), u_s)
            weights = step.index_select(0, x_t).mul_(cumulative.index_select(0, x_0))
            x_s = draw(weights, u_s)
            # A network may predict an x_0 from which q(x_t | x_s) q(x_s | x_0) underflows in float32: those rows need logarithms.
            far = (weights.sum(-1) < FAR).nonzero().squeeze(-1)
            return x_s.index_put((far,), categorical(log_step[x_t[far]] + log_cumulative[x_0[far]], u_s[far]))

        return in_pieces(piece, self.num_classes, x0_logits.flatten(0, -2), x_t.flatten(), *u.unbind(-1)).view_as(x_t)

    def operators(self, s, t, dtype: torch.dtype, device) -> DenseOperators:
        """Products with Q and Qbar used by the matrix losses, for times `[b]`, from the tables of `dtype`."""
        return DenseOperators(self, s, t, dtype, device)

    def fit_prior(self, unigram):
        self.log_prior = self._log_after_all(unigram.log()[None])[0]

    def prior_divergence(self, x_0):
        tokens, inverse = x_0.unique(return_inverse=True)
        if self._log_total is None and len(tokens) > FEW_STATES:
            self.log_cumulative(torch.float32, x_0.device)  # sets it
        if self._log_total is None:
            rows = self._log_after_all(torch.eye(self.num_classes, dtype=torch.float64)[tokens.cpu()].log())
        else:
            rows = self._log_total[tokens.cpu()]
        return to_device(divergence_terms(rows, self.log_prior).sum(-1), x_0.device)[inverse]

    def log_marginal(self, x, s, t, dtype=torch.float32):
        if not x.is_floating_point() and isinstance(s, int) and s == 0:
            return self.log_cumulative(dtype, x.device).rows(t, x)
        return super().log_marginal(x, s, t, dtype)


def _if_large(p: torch.Tensor) -> torch.Tensor | None:
    """The probabilities, if their products with others lose no term."""
    return p if p.min() > LARGE_ENOUGH else None


@register_kernel(ToeplitzTransition)
class ToeplitzKernel(DenseKernel, ToeplitzTransition):
    """Matrices of the steps read off the kernels of [`ToeplitzTransition`], which are symmetric."""

    derived_from = (*DenseKernel.derived_from, "log_step_matrices")
    is_centrosymmetric = is_doubly_stochastic = True

    def prepare(self):
        super().prepare()
        self._bands: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}
        kernels = torch.nn.functional.pad(self.log_kernels[:, 1:].exp(), (0, 1))
        # The chances of a step beyond each distance on both sides, [T, K].
        self._tails = 2 * kernels.flip(-1).cumsum(-1).flip(-1)

    def step_matrices(self, t, dtype=torch.float64):
        key = t.device, dtype
        if key not in self._bands:
            logs = (self.table(name, t.device).to(dtype) for name in ("log_kernels", "log_diagonals"))
            kernels, diagonals = (probabilities(log, squared=True) for log in logs)
            self._bands[key] = self._both_sides(kernels), diagonals
        return self._spread(*(table.index_select(0, t - 1) for table in self._bands[key]))

    def step_columns(self, s, t, dtype, device):
        if s is not None:
            return super().step_columns(s, t, dtype, device)
        return self.step_matrices(t.to(device), dtype)  # which are symmetric

    def step_reach(self, s, t, most):
        return super().step_reach(s, t, most) if s is not None else int((self._tails[int(t) - 1] > most).sum())

    def log_likelihood(self, x_t, s, t, dtype=torch.float32):
        if s is not None or not self._is_small(x_t):
            return super().log_likelihood(x_t, s, t, dtype)
        # Q_t is symmetric: its columns are its rows, and those can be read off the kernel.
        at = x_t[..., None]
        distance = (torch.arange(self.num_classes, device=x_t.device) - at).abs()  # [B, ..., K]
        time = (expand_time(t, x_t) - 1).expand(x_t.shape)
        kernels, diagonals = (self.table(name, x_t.device, dtype) for name in ("log_kernels", "log_diagonals"))
        return kernels[time[..., None], distance].scatter_(-1, at, diagonals[time, x_t][..., None])


@register_kernel(DenseRateTransition)
class DenseRateKernel(DenseKernel, DenseRateTransition):
    """Stretches of [`DenseRateTransition`] as one exponential."""

    derived_from = (*DenseKernel.derived_from, "log_step_matrices", "log_exponentials")

    def log_stretch(self, s, t):
        return self.log_exponentials(self.exponents[s:t].sum()[None])[0]

    def _log_after_all(self, log_p):
        return self.multiply(log_p[None], self.log_stretch(0, self.num_steps)[None])[0]
