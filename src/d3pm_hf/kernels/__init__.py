# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The machine room: kernels compute the numbers of `transitions/` and `losses/` faster. Nothing needs them to be right.

Importing them registers them. `D3PM_HF_KERNELS=0` and [`kernels_disabled`] switch all of them off.
"""

from ..transitions.kernel import Kernel, kernels_disabled, register_kernel
from . import absorbing_loss, by_element_loss, dense_tables, rank_one_steps, sparse_series  # noqa: F401  (registers them)


__all__ = ["Kernel", "kernels_disabled", "register_kernel"]
