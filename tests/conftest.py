# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState


# The tests run on as many processes as there are cores; more threads than that would wait for each other.
torch.set_num_threads(1)


@pytest.fixture
def fresh_accelerator():
    """Accelerate keeps its state for the whole process; a test that trains shall not leave it to the next."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
