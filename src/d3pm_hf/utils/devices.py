# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What XLA (TPU) needs to be told, as it records operations and runs them later."""

import torch


def finish_graph(device: torch.device) -> None:
    """Runs the operations that XLA has recorded since the last call, as one graph. Does nothing on other devices.

    Called after each step of a loop, the graph is the same each time and is compiled once. A number that is read without it
    would run parts of the graph twice.
    """
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()
