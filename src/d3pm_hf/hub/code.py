# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Python code beside the weights, where diffusers looks for it with `trust_remote_code=True`."""

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path

from diffusers import DiffusionPipeline

from ..utils.files import write_text_atomically
from .layout import INDEX_NAME, PACKAGE, TRUSTED_LIBRARIES, list_components, read_json


# Package in which diffusers puts code that it has loaded from a checkpoint.
DYNAMIC_MODULES = "diffusers_modules"


def pipeline_classes(pipeline: DiffusionPipeline) -> dict[str, type]:
    """Returns the class of each component by its name, and the class of the pipeline as `"_class_name"`."""
    components = {name: component for name, component in pipeline.components.items() if component is not None}
    # A compiled network is saved as the network that it was compiled from.
    classes = {name: type(getattr(component, "_orig_mod", component)) for name, component in components.items()}
    return {**classes, "_class_name": type(pipeline)}


def is_installed_with(cls: type) -> bool:
    """Whether a class comes with d3pm_hf, diffusers or transformers, or with the checkpoint itself."""
    return cls.__module__.split(".")[0] in (PACKAGE, *TRUSTED_LIBRARIES, DYNAMIC_MODULES)


def downloaded_source(cls: type) -> tuple[str, str] | None:
    """Returns name and source of the module of a class that was loaded from a checkpoint, `None` for installed classes."""
    if cls.__module__.split(".")[0] != DYNAMIC_MODULES:
        return None
    return cls.__module__.rpartition(".")[2], inspect.getsource(sys.modules[cls.__module__])


def add_code(
    pipeline: DiffusionPipeline,
    folder: Path,
    find_source: Callable[[type], tuple[str, str] | None] = downloaded_source,
) -> None:
    """Writes the code of a pipeline's classes into its folder and names the modules in the index.

    Args:
        pipeline (`DiffusionPipeline`): Pipeline that was saved to `folder`.
        folder (`Path`): Folder of the checkpoint.
        find_source (`Callable`): Returns name and source of the module to write for a class, or `None` for no module.
    """
    index = read_json(folder / INDEX_NAME)
    classes = pipeline_classes(pipeline)
    for name in [*dict(list_components(index)), "_class_name"]:
        cls = classes[name]
        source = find_source(cls)
        if source is not None:
            place = folder if name == "_class_name" else folder / name
            (place / f"{source[0]}.py").write_text(source[1], encoding="utf-8")
            index[name] = [source[0], cls.__name__]
            # diffusers takes every safetensors file for weights of a model. Next to a scheduler, which has no weights,
            # such a file would keep it from downloading any safetensors.
            index["_ignore_files"] = [f"scheduler/{path.name}" for path in folder.glob("scheduler/*.safetensors")]
    write_text_atomically(folder / INDEX_NAME, json.dumps(index, indent=2) + "\n")
