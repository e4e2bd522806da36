# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Names in a checkpoint: which classes its index may name, and which files its settings may name.

diffusers looks up the class of a component as an attribute of a module, and the way to load it by the base classes that
it finds in the same module. Modules of users rarely contain those, so that their classes are looked up here: the
attribute `"module.Class"` of this module is that class, if the running program has imported it. Nothing is imported
because a checkpoint names it.
"""

import inspect
import os
import sys
from pathlib import Path

from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin  # noqa: F401
from transformers import PreTrainedModel, PreTrainedTokenizer, PreTrainedTokenizerFast

from ..hub.layout import INDEX_NAME, PACKAGE, TRUSTED_LIBRARIES, list_components
from ..schedulers.scheduling_d3pm import D3PMScheduler
from ..utils.checks import describe, shorten
from ..utils.subclasses import find_subclass


NAMESPACE = __name__
COMPONENT_BASES = (D3PMScheduler, ModelMixin, PreTrainedModel, PreTrainedTokenizer, PreTrainedTokenizerFast)
DISTRUST = "do not trust this checkpoint"
# Settings in which early versions of transformers saved where the author's files were. They are never read.
UNREAD = ("special_tokens_map_file", "tokenizer_file")


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


def find_component(value: list[str]) -> type | None:
    """Returns the class of a component `[library, class]`, or `None` if it is not a trusted class."""
    library, class_name = value
    if library == PACKAGE:
        return find_own(class_name)
    if library == NAMESPACE and "." in class_name:
        return find_imported(*class_name.rsplit(".", 1))
    found = getattr(sys.modules.get(library), class_name, None) if library in TRUSTED_LIBRARIES else None
    return found if isinstance(found, type) else None


def check_index(
    index: dict, folder: str, pipeline_class: type[DiffusionPipeline], given: dict, trust_remote_code: bool
) -> None:
    """Checks the components that an index names.

    Every component that is neither optional nor `given` by the caller must be there. Without `trust_remote_code`, all of them
    must be classes of this package, diffusers or transformers, or imported by the program.
    """
    path, components = f"{folder}/{INDEX_NAME}", list_components(index)
    for name, parameter in inspect.signature(pipeline_class.__init__).parameters.items():
        optional = name in pipeline_class._optional_components
        is_setting = name == "self" or (parameter.default is not parameter.empty and not optional)
        if is_setting or name in given or (optional and name not in index):
            continue
        if not isinstance(index.get(name), list):
            raise ValueError(
                f"{path} gives {name} as {describe(index.get(name))}: it must be a list of a library and a class"
            )
    if trust_remote_code:
        return
    for name, value in index.items():
        if value == {}:
            raise ValueError(f"{path} gives {name} as {{}}, which diffusers cannot read: remove the entry")
        if not isinstance(value, list) or name.startswith("_") or value == [None, None]:
            continue
        if name not in components:
            raise ValueError(f"{path} gives {name} as {describe(value)}: it must be a list of a library and a class")
        if find_component(value) is None:
            raise ValueError(
                f"{path} names {shorten('.'.join(value))} as the {name}, which is not a class of d3pm_hf, diffusers or "
                "transformers and not a component that this program has imported: import it first, or pass "
                "`trust_remote_code=True` if its code is in the repository and you have read it"
            )


def check_file_names(path: Path, values: dict, variant: str | None) -> None:
    """Checks the files that `values`, the content of the JSON file `path`, lead to.

    Settings must not lead out of their folder, and an index of safetensors shards must name existing safetensors files
    only.
    """
    names = []
    for key, value in values.items():
        if key.endswith(("_file", "_files")) and key not in UNREAD:
            names += [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]
    weights = values.get("transformers_weights")
    if weights is not None and not str(weights).endswith((".safetensors", ".safetensors.index.json")):
        raise ValueError(
            f"{path} points to {describe(weights)} for its weights, which is no safetensors file: {DISTRUST}"
        )
    names += [] if weights is None else [weights]
    if ".index." in path.name:
        shards = values.get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise OSError(f"{path} does not name a file for each tensor: download or save the checkpoint again")
        names += shards.values()
    is_index = ".safetensors.index." in path.name
    is_read = path.name.endswith(".index.json" if variant is None else f".index.{variant}.json")
    for name in names:
        if os.path.basename(name) != name:
            raise ValueError(f"{path} points to {describe(name)}, outside its folder: {DISTRUST}")
        if is_index and not name.endswith(".safetensors"):
            raise ValueError(
                f"{path} points to {describe(name)}, which is not a safetensors file and could run code: {DISTRUST}"
            )
        if is_index and is_read and not (path.parent / name).is_file():
            raise OSError(f"{path.parent / name} is missing: the checkpoint is incomplete; download or save it again")
