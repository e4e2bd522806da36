# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checkpoints that carry their own code, for plain diffusers with `trust_remote_code=True`."""

import ast
import importlib
import inspect
import os
from pathlib import Path

from ..pipelines.checkpoint import (
    CARD_NAME,
    PUSH_ARGUMENTS,
    TRUSTED_LIBRARIES,
    CheckpointMixin,
    add_code,
    create_repository,
    downloaded_source,
    push_folder,
    staged,
)
from ..utils.checks import check_path, check_type
from .cards import EXPORT_NOTE, LOADING_NOTE, create_model_card


# The first lines of every file of ours.
LICENCE = "# Copyright 2026 The d3pm-hf authors.\n# Licensed under the Apache License, Version 2.0.\n"
PACKAGE = __name__.partition(".")[0]
# The modules that define what diffusers must be able to load.
MODULES = {
    "D3PMScheduler": ".schedulers.scheduling_d3pm",
    "D3PMTextModel": ".models.modeling_d3pm_text",
    "D3PMTextPipeline": ".pipelines.pipeline_d3pm_text",
    "D3PMImagePipeline": ".pipelines.pipeline_d3pm_image",
}


def export(
    pipeline, save_directory: str | os.PathLike, push_to_hub: bool = False, repo_id: str | None = None, **kwargs
):
    """Saves a pipeline together with the code that it needs, one file to a class.

    `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)` then loads it where this package is not installed
    (torch, diffusers, transformers and scipy are). Where it is, `D3PMPipeline.from_pretrained` loads the same folder and
    does not run the code in it.

    Args:
        pipeline ([`D3PMPipeline`]): what to save.
        save_directory (`str` or `os.PathLike`): the folder.
        push_to_hub (`bool`, defaults to `False`): whether to push the folder as well, to `repo_id`.
        kwargs: `variant`, `max_shard_size`; arguments of `push_to_hub`.
    """
    check_type("pipeline", pipeline, CheckpointMixin, "a `D3PMPipeline`")
    check_path("save_directory", save_directory)
    push = {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs}
    target = Path(save_directory)
    repo_id = create_repository(target, push_to_hub, {**push, "repo_id": repo_id})
    push.pop("private", None)
    with staged(target) as staging:
        card = create_model_card(pipeline, repo_id)
        card.content = card.content.replace(LOADING_NOTE, EXPORT_NOTE)
        card.save(staging / CARD_NAME)
        pipeline.save_pretrained(staging, **kwargs)
        if (target / CARD_NAME).exists():
            (staging / CARD_NAME).unlink()
        add_code(pipeline, staging, find_source)
    if push_to_hub:
        return push_folder(target, repo_id, **push)


def find_source(cls: type) -> tuple[str, str] | None:
    """Name and text of the one file that defines a class; `None` for classes of diffusers and transformers."""
    if cls.__module__.split(".")[0] in TRUSTED_LIBRARIES:
        return None
    if MODULES.get(cls.__name__) != cls.__module__.removeprefix(PACKAGE):
        source = downloaded_source(cls)
        if source is None:
            raise ValueError(
                f"the code of {cls.__module__}.{cls.__name__} cannot be exported, only that of {', '.join(MODULES)}: use "
                "`save_pretrained`, and import the class where the checkpoint is loaded"
            )
        return source
    module = importlib.import_module(cls.__module__)
    return module.__name__.rpartition(".")[2], flatten(module)


def flatten(module) -> str:
    """The source of a module and of all that it imports from this package, in one file.

    Imports of the package go, everything else stays as it is. It works because each module of ours imports names, not
    modules, and because no two of them give one name to two things, which is checked.
    """
    sources: dict[str, str] = {}
    owners: dict[str, str] = {}
    _collect(module, sources, owners)
    name = module.__name__.rpartition(".")[2]
    head = f"{LICENCE}# Written by d3pm_hf's `export`: {name} and what it needs, in one file.\n\n"
    return head + "\n\n".join(f"# {name}\n{source.strip()}\n" for name, source in sources.items())


def _collect(module, sources: dict[str, str], owners: dict[str, str]) -> None:
    """Adds a module to `sources`, after those that it imports; `owners` says which module defines a name."""
    if module.__name__ in sources:
        return
    source = inspect.getsource(module)
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            imported = importlib.import_module("." * node.level + (node.module or ""), module.__package__)
            if hasattr(imported, "__path__"):
                raise ValueError(f"{module.__name__} imports from the package {imported.__name__}: name the module")
            _collect(imported, sources, owners)
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
        for name in _defined(node):
            if owners.setdefault(name, module.__name__) != module.__name__:
                raise ValueError(f"{name} is defined in {owners[name]} and in {module.__name__}: rename one of them")
    sources[module.__name__] = "\n".join(lines).removeprefix(LICENCE)


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
