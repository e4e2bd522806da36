# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The machine room: kernels compute the numbers of `transitions/` and `losses/` faster. Nothing needs them to be right.

Importing them registers them. `D3PM_HF_KERNELS=0` and [`kernels_disabled`] switch all of them off.
"""

from ..transitions.kernel import Kernel, kernels_disabled, register_kernel
from .absorbing_loss import absorbing_terms
from .dense_tables import DenseKernel, DenseRateKernel, ToeplitzKernel
from .matrix_loss import matrix_terms
from .rank_one_loss import rank_one_terms
from .rank_one_steps import AbsorbingKernel, RankOneKernel
from .sparse_series import SparseRateKernel


__all__ = [
    "AbsorbingKernel",
    "DenseKernel",
    "DenseRateKernel",
    "Kernel",
    "RankOneKernel",
    "SparseRateKernel",
    "ToeplitzKernel",
    "absorbing_terms",
    "kernels_disabled",
    "matrix_terms",
    "rank_one_terms",
    "register_kernel",
]
