# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""D3PMScheduler: configuration, timesteps, noising, the reverse step."""

from .scheduling_d3pm import D3PMScheduler, D3PMSchedulerOutput
from .unit_time import UnitTimeScheduler


__all__ = ["D3PMScheduler", "D3PMSchedulerOutput", "UnitTimeScheduler"]
