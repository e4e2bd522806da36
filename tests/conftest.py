# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
import torch


# The tests run on as many processes as there are cores; more threads than that would wait for each other.
torch.set_num_threads(1)
