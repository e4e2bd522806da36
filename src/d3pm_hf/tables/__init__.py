# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Tables: frames as states, and a pipeline that is fitted to a frame, draws rows, imputes and scores them."""

from .pipeline_d3pm_table import D3PMTablePipeline
from .schema import TableSchema


__all__ = ["D3PMTablePipeline", "TableSchema"]
