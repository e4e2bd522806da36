# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Export of checkpoints with their code, for plain diffusers with `trust_remote_code=True`."""

import ast
import importlib
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType

from ..utils.checks import check_path
from .cards import EXPORT_NOTE, LOADING_NOTE, check_pipeline, create_model_card
from .code import add_code, downloaded_source, full_name, user_definitions
from .layout import CARD_NAME, PACKAGE, TRUSTED_LIBRARIES
from .staging import check_can_be_saved, staged
from .upload import PUSH_ARGUMENTS, create_repository, push_folder


# First lines of every file of this package.
LICENSE_HEADER = "# Copyright 2026 The d3pm-hf authors.\n# Licensed under the Apache License, Version 2.0.\n"


def export(
    pipeline, save_directory: str | os.PathLike, push_to_hub: bool = False, repo_id: str | None = None, **kwargs
):
    """Saves a pipeline together with the code that it needs, one file per class.

    `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)` loads the folder where this package is not
    installed (torch, diffusers, transformers and scipy must be). `D3PMPipeline.from_pretrained` loads it as well and does
    not run the code in it.

    Args:
        pipeline ([`D3PMPipeline`]): Pipeline to save. Its classes, its transition family and its noise schedule must be
            part of this package, diffusers or transformers.
        save_directory (`str` or `os.PathLike`): Folder of the checkpoint.
        push_to_hub (`bool`, defaults to `False`): Whether to push the folder to the repository `repo_id` as well.
        repo_id (`str`, *optional*): Id of the repository. Defaults to the name of the folder.
        kwargs: `variant` and `max_shard_size`, and arguments of `push_to_hub`.
    """
    check_pipeline(pipeline)
    check_path("save_directory", save_directory)
    check_can_be_saved(pipeline)
    check_definitions(pipeline)
    push = {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs}
    target, private = Path(save_directory), push.pop("private", None)
    if push_to_hub:
        repo_id = create_repository(repo_id or target.name, private, push.get("token"))
    with staged(target) as staging:
        card = create_model_card(pipeline, repo_id)
        card.content = card.content.replace(LOADING_NOTE, EXPORT_NOTE)
        card.save(staging / CARD_NAME)
        pipeline.save_pretrained(staging, **kwargs)
        if (target / CARD_NAME).exists():
            (staging / CARD_NAME).unlink()
        add_code(pipeline, staging, find_source)
    if repo_id is not None and push_to_hub:
        return push_folder(target, repo_id, **push)


def check_definitions(pipeline) -> None:
    """Checks that all classes and functions that a pipeline uses can be exported with it."""
    for role, used in user_definitions(pipeline).items():
        raise ValueError(
            f"the {role} is {full_name(used)}, which cannot be exported because it is not part of {PACKAGE}: use "
            "`save_pretrained`, and import it before the checkpoint is loaded"
        )


def find_source(cls: type) -> tuple[str, str] | None:
    """Returns name and source of a single file that defines `cls`; `None` for classes of installed libraries."""
    library = cls.__module__.split(".")[0]
    if library in TRUSTED_LIBRARIES:
        return None
    if library == PACKAGE:
        return cls.__module__.rpartition(".")[2], flatten(sys.modules[cls.__module__])
    return downloaded_source(cls)


def flatten(module: ModuleType) -> str:
    """Returns the source of a module and of all modules of this package that it imports, as one file.

    Imports from this package and imports for type checkers are dropped, everything else stays as it is. For this to work,
    modules must import names (`from .module import name`), and no two modules may define the same name; both are checked.
    """
    sources: dict[str, str] = {}
    owners: dict[str, str] = {}
    _collect(module, sources, owners)
    name = module.__name__.rpartition(".")[2]
    head = f"{LICENSE_HEADER}# Written by `d3pm_hf.export`: {name} and the modules that it imports, in one file.\n\n"
    return head + "\n\n".join(f"# {name}\n{source.strip()}\n" for name, source in sources.items())


def _collect(module: ModuleType, sources: dict[str, str], owners: dict[str, str]) -> None:
    """Adds a module to `sources`, after the modules that it imports. `owners` maps each name to the module defining it."""
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
            _blank(lines, node)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            _blank(lines, node)  # diffusers would look for the imported modules beside the file
        for name in _defined(node):
            if owners.setdefault(name, module.__name__) != module.__name__:
                raise ValueError(f"{name} is defined in {owners[name]} and in {module.__name__}: rename one of them")
    sources[module.__name__] = "\n".join(lines).removeprefix(LICENSE_HEADER)


def _blank(lines: list[str], node: ast.stmt) -> None:
    """Replaces the lines of a statement by empty ones."""
    end = node.end_lineno or node.lineno
    lines[node.lineno - 1 : end] = [""] * (end - node.lineno + 1)


def _defined(node: ast.stmt) -> list[str]:
    """Returns the names that a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = (
        node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    )
    names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return [name.id for name in names if isinstance(name.ctx, ast.Store)]
