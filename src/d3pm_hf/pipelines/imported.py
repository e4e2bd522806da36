# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Component classes that a checkpoint may name, among those that the running program has imported.

diffusers looks up the class of a component as an attribute of a module, and the way to load it by the base classes that
it finds in the same module. Modules of users rarely contain those, so that their classes are looked up here: the
attribute `"module.Class"` of this module is that class, if the running program has imported it. Nothing is imported
because a checkpoint names it.
"""

import sys

from diffusers import ModelMixin, SchedulerMixin  # noqa: F401
from transformers import PreTrainedModel, PreTrainedTokenizer, PreTrainedTokenizerFast  # noqa: F401

from ..hub.layout import PACKAGE
from ..schedulers.scheduling_d3pm import D3PMScheduler
from ..utils.subclasses import find_subclass


NAMESPACE = __name__
COMPONENT_BASES = (D3PMScheduler, ModelMixin, PreTrainedModel, PreTrainedTokenizer, PreTrainedTokenizerFast)


def find_own(class_name: str) -> type | None:
    """Returns the component class of that name which this package exports, or `None`."""
    found = getattr(sys.modules.get(PACKAGE), class_name, None)
    is_component = isinstance(found, type) and issubclass(found, COMPONENT_BASES)
    return found if is_component and found.__module__.split(".")[0] == PACKAGE else None


def find_imported(module: str, class_name: str) -> type | None:
    """Returns the imported component class of that name, preferably from `module`, or `None`."""
    found = [find_subclass(base, class_name, module) for base in COMPONENT_BASES]
    return next((cls for cls in found if cls is not None), None)


def __getattr__(name: str) -> type:
    module, _, class_name = name.rpartition(".")
    found = find_imported(module, class_name) if module else None
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
