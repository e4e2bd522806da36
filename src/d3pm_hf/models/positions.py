# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""How long a text a network of transformers can read."""

import torch


def num_positions(network: torch.nn.Module) -> int | None:
    """Number of positions of a network of transformers; `None` if it is not known or not limited.

    Networks in the manner of RoBERTa count positions from behind that of the padding token, and have fewer than
    `max_position_embeddings`.
    """
    config = getattr(network, "config", None)
    if getattr(config, "backbone", None) == "t5":  # its positions are relative
        return None
    for name, module in network.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return getattr(config, "max_position_embeddings", None)
