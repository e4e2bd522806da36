# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Python code beside the weights, where diffusers looks for it with `trust_remote_code=True`."""

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline

from ..schedules import beta_schedules
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


def user_definitions(pipeline: DiffusionPipeline) -> dict[str, Any]:
    """Returns the classes and functions of a pipeline that must be imported before it is loaded, by their role.

    These are the classes of the pipeline and its components, the transition family and the noise schedule, unless they
    come with d3pm_hf, diffusers or transformers, or with the checkpoint itself.
    """
    roles: dict[str, Any] = {
        "pipeline" if name == "_class_name" else name: cls for name, cls in pipeline_classes(pipeline).items()
    }
    roles["transition"] = pipeline.scheduler.family
    schedule = beta_schedules().get(pipeline.scheduler.config.beta_schedule)
    if schedule is not None:
        roles["beta_schedule"] = schedule
    libraries = (PACKAGE, *TRUSTED_LIBRARIES, DYNAMIC_MODULES)
    return {role: used for role, used in roles.items() if used.__module__.split(".")[0] not in libraries}


def full_name(definition: Any) -> str:
    """Returns module and name of a class or function; an object that is called like one goes by its class."""
    return f"{definition.__module__}.{getattr(definition, '__qualname__', type(definition).__qualname__)}"


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
