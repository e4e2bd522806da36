# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Limits on the size of a network: a configuration of a few bytes must not take hours, or all memory.

Every layer of a network has tensors, and the weights hold them. A configuration that asks for many more layers than the
weights hold tensors is wrong, and is refused before the layers are built.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..hub.layout import read_json


# Settings that count what is built one by one: `num_hidden_layers`, `layers_per_block`, `depth`, `num_labels`, ...
COUNTED = re.compile(r"^(num|n)_.*(layer|block|stage|expert|label)|layers|depth")
# Counts up to this number are allowed for weights of any size.
SMALLEST_LIMIT = 5_000
# Registrations of modules and parameters per tensor of the weights. Unmodified networks need about 3.
REGISTRATIONS_PER_TENSOR = 20


def check_counts(path: Path, num_tensors: int) -> None:
    """Checks that no count in a configuration, such as `num_hidden_layers`, exceeds the number of tensors by far.

    Some configurations make a list with an entry per layer or label, which happens before [`limit_modules`] can act.
    """
    limit = max(SMALLEST_LIMIT, num_tensors)
    settings = list(read_json(path).items())
    for name, value in settings:
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            settings += value.items()
        values = value if isinstance(value, list) else [value]
        too_large = [count for count in values if isinstance(count, (int, float)) and count > limit]
        if too_large and COUNTED.search(name):
            raise ValueError(
                f"{path} has {name}={too_large[0]}, and the weights beside it hold {num_tensors} tensors: download or save "
                "the checkpoint again"
            )


@contextmanager
def limit_modules(part: Path, num_tensors: int | None) -> Iterator[None]:
    """Stops the construction of a network that grows far beyond the number of tensors in its weights.

    Args:
        part (`Path`): Folder of the network, for the error.
        num_tensors (`int`, *optional*): Number of tensors in the weights; `None` for no limit.
    """
    thread, count = threading.get_ident(), 0

    def register(module: nn.Module, name: str, value) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if num_tensors is not None and count > SMALLEST_LIMIT + REGISTRATIONS_PER_TENSOR * num_tensors:
            raise ValueError(
                f"{part / 'config.json'} describes a network with many more layers than its weights hold tensors "
                f"({num_tensors})"
            )

    hooks = [
        register_module_module_registration_hook(register),
        register_module_parameter_registration_hook(register),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
