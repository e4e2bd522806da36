# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Which pipelines can be saved, and staging folders: a checkpoint is written beside its folder and moved there when it is complete."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES
from safetensors import SafetensorError

from ..utils.modules import without_compilation
from .adapters import bare_network, has_adapters
from .layout import INDEX_NAME, weights_patterns


def check_can_be_saved(pipeline, with_adapters: bool = False) -> None:
    """Checks that the components fit each other and can be saved; diffusers would leave out those that cannot.

    The network of a pipeline that is saved by itself must not have adapters of PEFT.
    """
    pipeline.check_components()
    pipeline.scheduler.check_saveable()
    for name, component in pipeline.components.items():
        component = bare_network(component)
        if not with_adapters and isinstance(component, torch.nn.Module) and has_adapters(component):
            raise ValueError(
                f"{name} has adapters of PEFT, which are no part of a pipeline: save them with `save_lora_weights`, or merge them into "
                "the weights with `fuse_lora` and `unload_lora_weights` first"
            )
        if component is not None and not is_saved_by_diffusers(component):
            fault = "diffusers does not save" if hasattr(component, "save_pretrained") else "has no `save_pretrained`"
            raise ValueError(
                f"{name} is a {type(component).__name__}, which {fault}: derive it from `ModelMixin` and `ConfigMixin` of "
                "diffusers, or from `PreTrainedModel` of transformers"
            )


def is_saved_by_diffusers(component: object) -> bool:
    """Whether `DiffusionPipeline.save_pretrained` saves a component. It leaves out all others with a warning."""
    component = without_compilation(component)
    return any(
        isinstance(component, getattr(sys.modules[library], name, ()))
        for library, names in LOADABLE_CLASSES.items()
        if library in sys.modules
        for name in names
    )


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target`. Its files replace those of `target` at the end of the block.

    If the block raises, the staging folder is removed and `target` stays as it was.
    """
    prefix, parent = f".{target.name}-", target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(".partial", prefix, parent, ignore_cleanup_errors=True) as staging:
            yield Path(staging)
            move_into_place(Path(staging), target)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the pipeline could not be saved to {target} ({error}): free some space or choose a folder that you may write "
            "to; what was there before is untouched"
        ) from error


def move_into_place(staging: Path, target: Path) -> None:
    """Moves every file of a complete checkpoint to `target`, the index last, and deletes weights that it supersedes."""
    if not target.exists():
        mask = os.umask(0)  # permissions that new files do not get; it can only be read by setting it
        os.umask(mask)
        staging.chmod(0o777 & ~mask)
        os.replace(staging, target)
        return
    patterns = weights_patterns(staging)
    written = [path.relative_to(staging) for path in staging.rglob("*") if path.is_file()]
    for name in sorted(written, key=lambda name: (name.name == INDEX_NAME, name)):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / name, target / name)
    for pattern in patterns:
        for path in target.glob(pattern):
            if path.relative_to(target) not in written:
                path.unlink()
