# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Export of checkpoints for `DiffusionPipeline` of diffusers, which finds our classes through files beside the weights."""

import json
import os
from pathlib import Path

from ..utils.checks import check_path
from ..utils.files import write_text_atomically
from .cards import EXPORT_NOTE, LOADING_NOTE, check_pipeline, create_model_card, full_name, user_definitions
from .layout import CARD_NAME, INDEX_NAME, PACKAGE, list_components, read_json
from .staging import check_can_be_saved, staged
from .transfers import PUSH_ARGUMENTS, create_repository, push_folder


# Module of the pipeline, under the name that diffusers looks for in a `custom_pipeline`.
PIPELINE_MODULE = "pipeline"
# Text of the module of each class. diffusers does not look for the packages of imports inside `try`.
MODULE = """# Written by `d3pm_hf.export`, for `DiffusionPipeline.from_pretrained(..., trust_remote_code=True)`.
try:
    from d3pm_hf import {name}
except ImportError as error:
    raise ImportError("this checkpoint needs the package d3pm_hf: install it with `pip install d3pm-hf`") from error
"""


def export(
    pipeline, save_directory: str | os.PathLike, push_to_hub: bool = False, repo_id: str | None = None, **kwargs
):
    """Saves a pipeline together with short files that import its classes from this package.

    `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)` of diffusers then loads the folder, if this package is
    installed, and says how to install it otherwise. `D3PMPipeline.from_pretrained` loads it as well and does not run the files.

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
    for role, used in user_definitions(pipeline).items():
        raise ValueError(
            f"the {role} is {full_name(used)}, which cannot be exported because it is not part of {PACKAGE}: use "
            "`save_pretrained`, and import it before the checkpoint is loaded"
        )
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
        index = read_json(staging / INDEX_NAME)
        own = {
            name: class_name for name, (library, class_name) in list_components(index).items() if library == PACKAGE
        }
        for name, class_name in {**own, "_class_name": type(pipeline).__name__}.items():
            place, module = (staging, PIPELINE_MODULE) if name == "_class_name" else (staging / name, name)
            (place / f"{module}.py").write_text(MODULE.format(name=class_name), encoding="utf-8")
            index[name] = [module, class_name]
        # diffusers takes every safetensors file for weights of a model. Next to a scheduler, which has no weights, such a file
        # would keep it from downloading any safetensors.
        index["_ignore_files"] = [f"scheduler/{path.name}" for path in staging.glob("scheduler/*.safetensors")]
        write_text_atomically(staging / INDEX_NAME, json.dumps(index, indent=2) + "\n")
    if repo_id is not None and push_to_hub:
        return push_folder(target, repo_id, **push)
