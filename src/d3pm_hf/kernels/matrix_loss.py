# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Transitions without a closed form: one product with Qbar_s each way."""

import math

import torch

from ..numerics import chunk_rows, compute_dtype, to_device, to_float64
from ..schedulers.logistic import MAX_LOG_INVERSE_SCALE, logistic_logits, standardize
from ..transitions import DenseTransition, SparseRateTransition
from ..transitions.kernel import Options
from .fused import register_fused_loss
from .low_rank import LowRankTerms
from .pieces import Walk


# The walk uses several buffers of the size of its piece; together they should fit into a cache.
NUM_BUFFERS = 4
# A derivative above the first, an evidence of x_t below the second, or a log p(x_0) below the third means that an intermediate
# result may have underflowed.
LIMITS = {torch.float32: (1e13, 1e-12, -80.0), torch.float64: (1e100, 1e-100, -500.0)}
# Weights of the posterior, and parts of a gradient, below exp of this do not count.
MIN_LOG_WEIGHT = -100.0
# Powers of two with exponents beyond this do not fit into float32.
MAX_EXPONENT = 125.0
# If half a bin is wider than so many scales, probabilities in float32 underflow before those that matter do.
MAX_HALF_WIDTH = 7.0


@register_fused_loss("matrix", reads_logistic=True)
def matrix_terms(
    transition: DenseTransition | SparseRateTransition,
    x_0: torch.Tensor,
    x_t: torch.Tensor,
    s,
    t,
    options: Options,
    loss_mask: torch.Tensor | None = None,
) -> Walk:
    """KL(q(x_s | x_t, x_0) || p(x_s | x_t)), eq. 1 with eq. 3 and 4, for any transition with products by Qbar_s.

    `transition.operators` gives the products. With row = q(x_s | x_0), column = q(x_t | x_s), m = p Qbar_s,
    Z_0 = <row, column>, Z = <column, m> and w = row column / Z_0, which is eq. 3,

        KL = <w, log(row / m)> + log Z - log Z_0
    """
    return _Walk(transition, x_0, x_t, s, t, options, loss_mask)


class _Walk:
    """The walk of [`matrix_terms`] over samples, and over positions if a sample does not fit a cache."""

    def __init__(self, transition, x_0, x_t, s, t, options: Options, loss_mask):
        self.transition, self.shape = transition, x_t.shape
        self.x_0, self.x_t = (x.reshape(len(x), -1) for x in (x_0, x_t))  # [B, N]
        self.t = torch.as_tensor(t, device=x_t.device).expand(len(x_t))
        self.s = s if s is None else torch.as_tensor(s, device=x_t.device).expand(len(x_t))
        # The last step of the authors' image code takes the network's output as it is, without q(x_t | x_0).
        self.is_raw = (self.t - 1 if self.s is None else self.s).eq(0) & options.raw_reconstruction  # [B]
        self.rows = _Rows(transition, options)
        self.is_logistic = options.logistic
        self.counts = None if loss_mask is None else loss_mask.reshape(self.x_t.shape)

    def __call__(self, output, want_gradient):
        shape, device = self.x_t.shape, output.device
        output = output.reshape(*shape, -1)
        dtype, num_classes = compute_dtype(output), self.transition.num_classes
        gradient = output.new_empty(output.shape, dtype=dtype) if want_gradient else None
        vb, cross_entropy = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        doubtful = torch.empty(shape, dtype=torch.bool, device=device)

        size = max(chunk_rows(num_classes, device) // NUM_BUFFERS, self.transition.min_rows)
        num_samples = max(1, size // max(shape[1], num_classes))  # with their matrices
        size = max(size, shape[1]) if num_samples > 1 else size
        low_rank: LowRankTerms | None = None
        for first in range(0, len(output), num_samples):
            samples = slice(first, first + num_samples)
            operators = self.operators(samples, dtype, device)
            if num_samples == 1 and self.has_factors(operators):
                low_rank = low_rank or LowRankTerms(self.rows.options, num_classes, self.x_0, self.x_t)
                out = None if gradient is None else gradient[first]
                self.add_low_rank(low_rank, first, operators, output[first], out)
                continue
            for position in range(0, shape[1], size):
                part = samples, slice(position, position + size)
                out = None if gradient is None else gradient[part]
                vb[part], cross_entropy[part], doubtful[part] = self.compute(
                    output[part].to(dtype), part, operators, out
                )

        if low_rank is not None:
            vb[low_rank.samples], cross_entropy[low_rank.samples], doubtful[low_rank.samples] = low_rank.read()
            for part in self.parts(doubtful.clone(), low_rank.samples):  # which is written to
                out = None if gradient is None else torch.empty_like(gradient[part])
                operators = self.operators(part[0], dtype, device)
                vb[part], cross_entropy[part], doubtful[part] = self.compute(
                    output[part].to(dtype), part, operators, out
                )
                if gradient is not None:
                    gradient[part] = out

        for part in self.parts(doubtful):
            *terms, slope = self.compute_in_logarithms(output[part], part, dtype, want_gradient)
            vb[part], cross_entropy[part] = (to_device(v.to(dtype), device) for v in terms)
            if gradient is not None:
                gradient[part] = to_device(slope.to(dtype), device)
        gradient = None if gradient is None else gradient.view(*self.shape, -1)
        return vb.view(self.shape), cross_entropy.view(self.shape), gradient

    def parts(self, chosen: torch.Tensor, samples: list[int] | None = None):
        """The `chosen` rows that count, a part for each sample. This synchronizes with the device."""
        chosen = chosen if self.counts is None else chosen & self.counts
        for i in chosen.any(-1).cpu().nonzero().flatten().tolist():
            if samples is None or i in samples:
                yield slice(i, i + 1), chosen[i]

    def operators(self, samples: slice, dtype: torch.dtype, device):
        """Products with Q and Qbar for some samples."""
        s = None if self.s is None else self.s[samples].to(device)
        return self.transition.operators(s, self.t[samples].to(device), dtype, device)

    def compute(self, output, part, operators, out):
        """vb, cross-entropy, and whether a product may have underflowed, of some rows; writes their gradient to `out`."""
        logits, samples = self.logits(output), part[0]
        # The gradient of logits is written where it belongs.
        slope = torch.empty_like(logits) if self.is_logistic and out is not None else out
        states = self.x_0[part], self.x_t[part], self.t[samples], self.is_raw[samples]
        terms = self.rows(logits, *states, operators, slope)
        if out is not slope:
            out.copy_(logistic_gradient(slope, output))
        return terms

    def has_factors(self, operators) -> bool:
        """Whether the loss of one sample can be computed with factors of Qbar_s."""
        suits = not self.rows.options.denoising and not (self.is_logistic and self.transition.excluded)
        return suits and getattr(operators, "factors", None) is not None

    def add_low_rank(self, low_rank: LowRankTerms, i: int, operators, output, gradient) -> None:
        """Adds sample `i` to the terms that are computed with factors; writes its gradient to `gradient`."""

        def predict(given, out):
            """Writes p(x_0), float32 `[n, K]`, to `out`."""
            given = given.to(out.dtype)
            if self.is_logistic:
                logistic_probabilities(given, out)
            else:
                torch.softmax(self.transition.forbid(given), -1, out=out)

        p = None if self.is_logistic else gradient
        p = output.new_empty(len(output), self.transition.num_classes, dtype=torch.float32) if p is None else p
        low_rank.add(i, operators, predict, output, p, gradient is not None)
        if self.is_logistic and gradient is not None:
            size = chunk_rows(self.transition.num_classes, output.device) // NUM_BUFFERS
            for out, slope, given in zip(gradient.split(size), p.split(size), output.split(size)):
                out.copy_(logistic_gradient(slope, given.to(out.dtype)))

    def compute_in_logarithms(self, output, part, dtype, want_gradient):
        """vb, cross-entropy and gradient, in float64, of rows of one sample whose products may have underflowed."""
        output = to_float64(output)
        device, one = output.device, part[0]
        logits, operators = self.logits(output), self.operators(one, dtype, device)
        slope = torch.empty_like(logits) if want_gradient else None
        states = [v.to(device) for v in (self.x_0[part], self.x_t[part], self.t[one], self.is_raw[one])]
        terms = self.rows.in_logarithms(logits, states, operators, dtype, slope)
        return *terms, logistic_gradient(slope, output) if self.is_logistic and slope is not None else slope

    def logits(self, output):
        """Logits of x_0 `[..., K]` from logits, or from location and log-scale of a logistic `[..., 2]`."""
        return (
            logistic_logits(output[..., 0], output[..., 1], self.transition.num_classes)
            if self.is_logistic
            else output
        )


def logistic_probabilities(output: torch.Tensor, out: torch.Tensor) -> None:
    """Writes p(x_0), float32 `[n, K]`, of location and log-scale `[n, 2]` to `out`; NaN in rows that float32 does not hold.

    p ~ 1 / (cosh x + cosh h), as in [`logistic_gradient`], with one power of two for each bin.
    """
    num_classes = out.shape[-1]
    near, far, inverse_scale = standardize(output[..., :1], output[..., 1:], num_classes)
    bits = near.mul_(inverse_scale * math.log2(math.e))
    power = bits.clamp_(-MAX_EXPONENT, MAX_EXPONENT).exp2_()  # exp(near / s), faster
    half_width, distance = inverse_scale / (num_classes - 1), inverse_scale * far
    fits = half_width.masked_fill(half_width > MAX_HALF_WIDTH, torch.nan)
    # 2 cosh x and 2 cosh h, times exp(-|far| / s)
    rising, falling = (torch.exp(-2 * (sign * distance).clamp(min=0)) for sign in (1, -1))
    torch.div(falling, power, out=out).addcmul_(power, rising).add_(2 * fits.cosh() * torch.exp(-distance.abs()))
    out.reciprocal_().div_(out.sum(-1, keepdim=True))


def logistic_gradient(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The gradient with respect to location and log-scale `[..., 2]`, from that with respect to [`logistic_logits`] `[..., K]`.

    With x = (c - mu) / s at the bin around c, and h = w / 2s, the logits are log sigmoid(h + x) + log sigmoid(h - x), and

        p ~ 1 / (cosh x + cosh h)

    x = (near - far) / s has a part `near` of the bin, and a part `far` of the row: see [`~schedulers.logistic.standardize`].
    """
    num_classes = gradient.shape[-1]
    near, far, inverse_scale = standardize(output[..., :1], output[..., 1:], num_classes)
    half_width, side, distance = inverse_scale / (num_classes - 1), far.sign(), inverse_scale * far
    near = near.mul_(inverse_scale)  # x = near - distance
    # dlogits / dx = above - below, and -dlogits / dh = -(above + below), times the gradient. The gradient of a row sums to
    # zero, so that those of them that are close to one in all bins may be less by one: 1 - sigmoid(a) = sigmoid(-a).
    up, down = (torch.where(sign * side > 0, -1.0, 1.0).to(near.dtype) for sign in (1, -1))
    above = torch.addcmul(up * (distance - half_width), near, -up).sigmoid_().mul_(gradient)
    below = torch.addcmul(-down * (distance + half_width), near, down).sigmoid_().mul_(gradient)
    both = up * above.sum(-1, keepdim=True) + down * below.sum(-1, keepdim=True)
    slope = above.mul_(up).addcmul_(below, down, value=-1)
    total = slope.sum(-1, keepdim=True)
    log_scale = distance * total - near.mul_(slope.addcmul_(gradient, side)).sum(-1, keepdim=True)
    log_scale = log_scale.addcmul_(half_width, both, value=-1)
    is_free = 2 - output[..., 1:] <= MAX_LOG_INVERSE_SCALE
    return torch.cat([-inverse_scale * total, torch.where(is_free, log_scale, 0)], -1)


class _Rows:
    """vb, cross-entropy and gradient of logits `[b, N, K]`; see `matrix_terms` for the formula."""

    def __init__(self, transition: DenseTransition | SparseRateTransition, options: Options):
        self.transition, self.options = transition, options
        # The weights of the converted cross-entropy and of the raw one.
        self.converted = options.hybrid_coeff if options.convert_auxiliary else 0.0
        self.raw = options.hybrid_coeff - self.converted

    def in_logarithms(self, logits, states, operators, table_dtype, gradient):
        """vb and cross-entropy in float64 for probabilities of any size; writes the gradient to `gradient`.

        Z = <p, q(x_t | x_0 = .)> needs no product, and log m is needed only at states x_s that count in the posterior.
        """
        x_0, x_t, t, is_raw = states
        at_0 = x_0[..., None]
        log_p = raw_log_p = self.transition.forbid(logits).log_softmax(-1)
        log_likelihood = self.transition.log_likelihood(x_t, 0, t, table_dtype).double()  # of each x_0
        if self.options.denoising:
            log_p = torch.where(log_likelihood > -torch.inf, logits - log_likelihood, -torch.inf)
            log_p = self.transition.forbid(log_p).log_softmax(-1)
        raw_log_p_0, log_p_0 = (log.gather(-1, at_0).squeeze(-1) for log in (raw_log_p, log_p))

        log_row, log_column = operators.log_row(x_0), operators.log_column(x_t)
        log_w = (log_row + log_column).log_softmax(-1)
        counts = log_w > MIN_LOG_WEIGHT
        w = torch.where(counts, log_w.exp(), 0)
        log_m = operators.log_forward(log_p, torch.where(counts, -torch.inf, torch.inf))
        log_ours = log_p + log_likelihood
        log_z = log_ours.logsumexp(-1, keepdim=True)
        log_evidence = (log_z - log_likelihood.gather(-1, at_0)).squeeze(-1)  # log Z - log Z_0
        vb = (w * torch.where(counts, log_row - log_m, 0)).sum(-1) + log_evidence
        vb = torch.where(is_raw[:, None], -raw_log_p_0, vb)
        cross_entropy = log_evidence - log_p_0 if self.options.convert_auxiliary else -raw_log_p_0
        if gradient is None:
            return vb, cross_entropy

        is_raw = is_raw[:, None, None]
        raw = self.raw + is_raw.to(w.dtype)
        lost = counts & (log_m == -torch.inf) & ~is_raw  # x_s that only excluded x_0 lead to: the KL is infinite

        def posterior(log_p, log_m, where):
            """The posterior of x_0 given x_s, p q(x_s | x_0) / m, averaged over the x_s of w: p dlog / dp."""
            log_slope = torch.where(where, log_w - log_m, -torch.inf)
            return (log_p + operators.log_backward(log_slope, MIN_LOG_WEIGHT - log_p)).exp()

        ours, theirs = (log_ours - log_z).exp(), posterior(log_p, log_m, counts & (log_m > -torch.inf))
        if lost.any():  # the gradient is its limit for logits that fall alike
            excluded = torch.where(logits == -torch.inf, torch.zeros_like(logits), -torch.inf)
            if self.options.denoising:
                excluded = torch.where(log_likelihood > -torch.inf, excluded - log_likelihood, -torch.inf)
            excluded = self.transition.forbid(excluded)
            log_m = operators.log_forward(excluded, torch.where(lost, -torch.inf, torch.inf))
            theirs = theirs + posterior(excluded, log_m, lost)
        torch.mul(raw_log_p.exp(), raw, out=gradient)
        gradient.add_(torch.where(is_raw, 0, ours - theirs))
        if self.converted:
            gradient.add_(ours, alpha=self.converted)
        gradient.scatter_add_(-1, at_0, (-raw - self.converted).expand(at_0.shape))
        return vb, cross_entropy

    def _softmax(self, logits: torch.Tensor, at_0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """p, and log p(x_0). A row whose log p(x_0) underflows is computed again in logarithms."""
        p = self.transition.forbid(logits).softmax(-1)
        return p, p.gather(-1, at_0).squeeze(-1).log()

    def __call__(self, logits, x_0, x_t, t, is_raw, operators, gradient):
        at_0 = x_0[..., None]
        raw_p, raw_log_p_0 = p, log_p_0 = self._softmax(logits, at_0)
        if self.options.denoising:
            p, log_p_0 = self._softmax(self.transition.to_leave_one_out(logits, x_t, t), at_0)

        row, column, m, is_inexact = operators.products(p, x_0, x_t)
        smallest = torch.finfo(p.dtype).tiny
        z = (column * m).sum(-1)
        w = row * column
        z_0 = w.sum(-1)
        ratio = row.div_(m.clamp_(min=smallest)).clamp_(min=smallest)  # where row = 0 so is w
        slope = column * ratio  # w / m, but for Z_0
        max_slope, min_evidence, min_log_p = LIMITS[p.dtype]
        doubtful = ~(slope.amax(-1) < max_slope) | ~(torch.minimum(z, z_0) > min_evidence)
        doubtful |= ~(torch.minimum(log_p_0, raw_log_p_0) > min_log_p)
        doubtful = doubtful if is_inexact is None else doubtful | is_inexact
        log_evidence = (z / z_0).log()
        vb = w.mul_(ratio.log_()).sum(-1).div_(z_0).add_(log_evidence)
        vb = torch.where(is_raw[:, None], -raw_log_p_0, vb)
        cross_entropy = log_evidence - log_p_0 if self.options.convert_auxiliary else -raw_log_p_0
        if gradient is None:
            return vb, cross_entropy, doubtful

        # dL/dm, then p dL/dp. The rows of Qbar_s sum to one: what is added to all of dL/dm is added to all of dL/dp.
        slope.mul_(-1 / z_0[..., None]).addcmul_(column, 1 / z[..., None])
        if self.options.raw_reconstruction:
            slope = torch.where(is_raw[:, None, None], 0, slope)
        if self.converted:
            slope.addcmul_(column, self.converted / z[..., None])
        raw = self.raw + is_raw[:, None, None].to(p.dtype)  # of -log p(x_0) as the network has it
        slope = operators.backward(slope)
        if self.options.denoising:
            torch.mul(slope, p, out=gradient).addcmul_(raw_p, raw)
        else:
            torch.mul(slope.add_(raw), p, out=gradient)
        gradient.scatter_add_(-1, at_0, (-raw - self.converted).expand(at_0.shape))
        return vb, cross_entropy, doubtful
