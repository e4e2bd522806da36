# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""exp(a R) as matrices, for vocabularies of up to a few hundred states (appendix A.5 of the paper).

    exp(a R) = sum_k Poisson(k; q a) P^k,   P = I + R / q,   q = the fastest rate of leaving a state

Nothing cancels, and the series goes on until what is left out is below the rounding of the smallest entry: every
probability keeps its relative precision, and its logarithm can be trusted.
"""

import math
from functools import cached_property

import torch
from tqdm.auto import tqdm

from ..numerics import with_float64
from ..schedules import check_exponents
from .dense import DenseTransition
from .rate_matrices import check_rates, stationary_distribution


# What may be left out of a series, relative to the result: its logarithm.
LOG_PRECISION = math.log(1e-14)


class DenseRateTransition(DenseTransition):
    """exp(a R) as matrices: for vocabularies of up to a few hundred states.

    Examples:
        ```python
        import torch
        from d3pm_hf.transitions import DenseRateTransition

        rates = torch.tensor([[-1.0, 1.0], [1.0, -1.0]]).to_sparse()
        process = DenseRateTransition(rates, exponents=torch.tensor([0.1, 0.2, torch.inf]))
        assert torch.allclose(process.matrix(0, 3), torch.full((2, 2), 0.5).double())  # all is forgotten
        ```
    """

    def __init__(self, rates: torch.Tensor, exponents: torch.Tensor):
        rates, exponents = check_rates(rates), check_exponents(exponents)
        super().__init__(len(rates), len(exponents))
        self.stationary = stationary_distribution(rates)
        self.log_prior = self.log_stationary = self.stationary.log()
        self.rates, self.exponents = rates.to_dense(), exponents.double()
        self.fastest = -self.rates.diagonal().min().item()

    @cached_property
    def log_powers(self) -> torch.Tensor:
        """log P^0, ..., log P^N, `[N+1, K, K]`, for as many terms as exp(a R) needs in any entry, if q a <= 1.

        An entry that d jumps lead to is at least Poisson(d) [P^d]_ij, and all that comes after N is at most Poisson(N+1) e.
        """
        identity = torch.eye(self.num_classes, dtype=torch.float64)
        log_chances = (self.rates / self.fastest + identity).clamp(min=0).log()
        powers = [identity.log()]
        reached = powers[0] > -torch.inf
        log_needed = -LOG_PRECISION + 1  # of N!
        with tqdm(desc="powers of the rate matrix", delay=2, leave=False) as progress:
            while True:
                power = self.multiply(powers[-1][None], log_chances[None])[0]
                log_factorial = math.lgamma(len(powers) + 1)
                new = (power > -torch.inf) & ~reached
                if new.any():
                    log_needed = max(log_needed, -LOG_PRECISION + 1 + log_factorial - power[new].min().item())
                elif log_factorial >= log_needed:
                    return torch.stack(powers)
                reached |= new
                powers.append(power)
                progress.update()

    def log_exponentials(self, exponents: torch.Tensor) -> torch.Tensor:
        """log exp(a R) for each exponent a in [0, inf], float64, `[n, K, K]`: a series for q a <= 1, then squarings."""
        forgets = torch.isinf(exponents)
        mean = self.fastest * exponents.masked_fill(forgets, 0)  # [n]
        squarings = mean.clamp(min=1).log2().ceil()
        log_powers = self.table("log_powers", exponents.device)
        k = torch.arange(len(log_powers), dtype=torch.float64, device=exponents.device)
        scaled = (mean / 2**squarings)[:, None]
        log_weights = torch.special.xlogy(k, scaled) - scaled - torch.lgamma(k + 1)  # [n, N+1]
        total = self.multiply(log_weights[None], log_powers.flatten(1)[None]).view(-1, *log_powers.shape[1:])
        for n in range(int(squarings.max())):
            again = squarings > n
            total[again] = self.multiply(total[again], total[again])
        total = total - total.logsumexp(-1, keepdim=True)
        return torch.where(forgets[:, None, None], self.table("log_stationary", exponents.device), total)

    @with_float64
    def log_step_matrices(self, t):
        return self.log_exponentials(self.table("exponents", t.device)[t - 1])
