# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The classes of other modules that a checkpoint may name as components.

diffusers looks up a component's class as an attribute of a module, and how to load it by the base classes that it finds
in the same module. Modules of users rarely hold those, so their classes are looked up here: this module's attribute
`"module.Class"` is that class, provided that the running program has imported it. Nothing is imported by name.
"""

from diffusers import ModelMixin, SchedulerMixin  # noqa: F401
from transformers import PreTrainedModel, PreTrainedTokenizer, PreTrainedTokenizerFast  # noqa: F401

from ..schedulers.scheduling_d3pm import D3PMScheduler
from ..utils.subclasses import find_subclass


NAMESPACE = __name__
COMPONENT_BASES = (D3PMScheduler, ModelMixin, PreTrainedModel, PreTrainedTokenizer, PreTrainedTokenizerFast)


def find_imported(module: str, class_name: str) -> type | None:
    """The imported component class of that name, preferably from `module`."""
    found = [find_subclass(base, class_name, module) for base in COMPONENT_BASES]
    return next((cls for cls in found if cls is not None), None)


def __getattr__(name: str) -> type:
    module, _, class_name = name.rpartition(".")
    found = find_imported(module, class_name) if module else None
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
