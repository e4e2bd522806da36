# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Pipelines on disk and on the Hub: what is fetched, what is trusted, and what is said when something is wrong."""

import inspect
import json
import os
import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import diffusers
from diffusers import ModelMixin, SchedulerMixin
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME as DIFFUSERS_WEIGHTS_NAME
from huggingface_hub import ModelCard, create_repo, file_exists, snapshot_download, upload_folder
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_NAME as TRANSFORMERS_WEIGHTS_NAME

from ..hub.cards import create_model_card
from ..schedulers.scheduling_d3pm import TENSORS_NAME
from ..utils.subclasses import find_subclass, subclasses
from .imported import NAMESPACE, find_imported


INDEX_NAME = "model_index.json"
CARD_NAME = "README.md"
PACKAGE = "d3pm_hf"
OUR_COMPONENTS = ("D3PMScheduler", "D3PMTextModel")
TRUSTED_LIBRARIES = ("diffusers", "transformers")
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
# The file without which a component is not there.
CONFIG_NAMES = {
    SchedulerMixin: "scheduler_config.json",
    PreTrainedTokenizerBase: "tokenizer_config.json",
    ModelMixin: "config.json",
    PreTrainedModel: "config.json",
}
# What libraries raise for settings that they do not expect.
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, StrictDataclassError, TypeError, ValueError)
# The package in which diffusers puts code that comes with a checkpoint.
DYNAMIC_MODULES = "diffusers_modules"
TOKENIZER_PATTERNS = ("tokenizer.json", "*.model", "vocab.*")


class CheckpointMixin:
    """`from_pretrained`, `save_pretrained` and `push_to_hub` of a pipeline, over diffusers' own."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs):
        """Loads a pipeline from a folder or from the Hub; on the base class, the subclass that the index names.

        Weights are read from safetensors files alone, unless you pass `use_safetensors=False`. No code of the repository
        is run, unless you pass `trust_remote_code=True`.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): a folder, or the id of a repository on the Hub.
            revision, token, cache_dir, force_download, local_files_only (*optional*): of the download.
            variant (`str`, *optional*): of the weights, as in `model.ema.safetensors`.
            dtype (`torch.dtype`, *optional*): of the network.
            kwargs: components to use in place of the saved ones, and whatever `DiffusionPipeline.from_pretrained` takes.
        """
        source = os.fspath(pretrained_model_name_or_path)
        hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
        trust, variant = kwargs.get("trust_remote_code", False), kwargs.get("variant")
        kwargs.setdefault("use_safetensors", True)
        folder = source
        if not os.path.isdir(source):
            pickled = kwargs["use_safetensors"] is False
            folder = cls.download(source, variant=variant, trust_remote_code=trust, pickled=pickled, **hub)
        index = cls.load_config(folder)
        target = find_pipeline(cls, index["_class_name"], folder)
        check_components_are_named(target, index, kwargs, folder)
        if not trust:
            check_index(index, folder)
        given = [name for name in index if name in kwargs]
        loaded = {name: value for name, value in index.items() if name not in given}
        check_files(Path(folder), loaded, variant, kwargs["use_safetensors"])
        pipeline = super(CheckpointMixin, target).from_pretrained(folder, **kwargs)
        pipeline.register_to_config(_name_or_path=source)
        return pipeline

    def register_to_config(self, **kwargs):
        """Names the classes of this package by the package alone in the index, so that files may move inside it."""
        for name, value in kwargs.items():
            if isinstance(value, tuple) and len(value) == 2 and str(value[0]).split(".")[0] == PACKAGE:
                kwargs[name] = (PACKAGE, value[1])
        super().register_to_config(**kwargs)

    @classmethod
    def load_config(cls, pretrained_model_name_or_path, **kwargs):
        """The index of a checkpoint, `model_index.json`. One that was exported with its code names our classes again."""
        if not kwargs and not os.path.isfile(os.path.join(pretrained_model_name_or_path, INDEX_NAME)):
            raise OSError(
                f"{pretrained_model_name_or_path} holds no {INDEX_NAME}: it is not the folder of a pipeline; pass the one "
                "that `save_pretrained` wrote"
            )
        if not kwargs:
            read_json(Path(pretrained_model_name_or_path, INDEX_NAME))
        index = super().load_config(pretrained_model_name_or_path, **kwargs)
        if isinstance(index, tuple):  # the caller has asked for more than the index
            return index
        if not isinstance(index, dict) or "_class_name" not in index:
            raise ValueError(
                f"{pretrained_model_name_or_path}/{INDEX_NAME} names no pipeline: it is not the index of one"
            )
        if isinstance(index.get("_class_name"), list):
            index["_class_name"] = index["_class_name"][-1]
        for name, value in components(index):
            if value[1] in OUR_COMPONENTS:
                index[name] = [PACKAGE, value[1]]
            elif value[0] not in TRUSTED_LIBRARIES and find_imported(*value) is not None:
                index[name] = [NAMESPACE, ".".join(value)]
        return index

    @classmethod
    def download(cls, pretrained_model_name, *, variant=None, trust_remote_code=False, pickled=False, **kwargs) -> str:
        """Fetches a checkpoint from the Hub, or finds it in the cache, and returns its folder.

        Only the index, configurations, tokenizer files and safetensors of the variant asked for are fetched.
        """
        kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        try:
            folder = snapshot_download(pretrained_model_name, allow_patterns=[INDEX_NAME, CARD_NAME], **kwargs)
            parts = [name for name, _ in components(cls.load_config(folder)) if name.isidentifier()]
            patterns, ignored = wanted_files(parts, variant, trust_remote_code, pickled)
            return snapshot_download(pretrained_model_name, allow_patterns=patterns, ignore_patterns=ignored, **kwargs)
        except HFValidationError as error:
            raise OSError(f"{pretrained_model_name!r} is neither a folder nor the id of a repository") from error
        except GatedRepoError as error:
            raise OSError(
                f"the repository {pretrained_model_name!r} is gated: ask for access on its page, then pass `token`"
            ) from error
        except RevisionNotFoundError as error:
            raise OSError(
                f"the repository {pretrained_model_name!r} has no revision {kwargs.get('revision')!r}: pass a branch, a "
                "tag or a commit that it has"
            ) from error
        except RepositoryNotFoundError as error:
            raise OSError(
                f"there is no folder and no repository {pretrained_model_name!r}: check the name, and pass `token` if it "
                "is private"
            ) from error
        except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError) as error:
            if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
                raise OSError(
                    f"the Hub refuses {pretrained_model_name!r} to this token: check `token` (and HF_TOKEN), or log in again"
                ) from error
            raise OSError(
                f"{pretrained_model_name!r} is not in the cache and the Hub cannot be reached: check the connection (and "
                "HF_HUB_OFFLINE), or pass a local folder"
            ) from error

    def save_pretrained(
        self, save_directory: str | os.PathLike, safe_serialization: bool = True, push_to_hub: bool = False, **kwargs
    ):
        """Writes the pipeline and, where there is none, a model card.

        Everything is written beside the folder and moved in when it is complete: what was saved there before is lost
        neither to a full disk nor to a run that is killed.

        Args:
            save_directory (`str` or `os.PathLike`): the folder.
            safe_serialization (`bool`, defaults to `True`): safetensors; `False` pickles.
            push_to_hub (`bool`, defaults to `False`): whether to push it as well, to `repo_id`.
            kwargs: `variant`, `max_shard_size`; arguments of `push_to_hub`.
        """
        self.check_components()  # what is saved can be loaded
        target = Path(save_directory)
        hub = {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs}
        repo_id = create_repository(target, push_to_hub, hub)
        with staged(target) as staging:
            super().save_pretrained(staging, safe_serialization=safe_serialization, **kwargs)
            add_code(self, staging, downloaded_source)
            if not (target / CARD_NAME).exists():
                create_model_card(self, repo_id).save(staging / CARD_NAME)
        if push_to_hub:
            return push_folder(target, repo_id, **hub)

    def push_to_hub(
        self,
        repo_id: str,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        create_pr: bool = False,
        safe_serialization: bool = True,
        variant: str | None = None,
        card: ModelCard | None = None,
    ) -> str:
        """Uploads the pipeline to a repository on the Hub, which is made if there is none.

        Args:
            repo_id (`str`): as in `"your-name/d3pm-text8"`.
            variant (`str`, *optional*): of the weights, as in `model.ema.safetensors`.
            card (`ModelCard`, *optional*): the README. By default that of the repository is kept, and where it has none
                one is written by [`create_model_card`].
        """
        repo_id = create_repository(Path(repo_id), True, {"repo_id": repo_id, "private": private, "token": token})
        with tempfile.TemporaryDirectory() as folder:
            (card or create_model_card(self, repo_id)).save(os.path.join(folder, CARD_NAME))
            self.save_pretrained(folder, safe_serialization=safe_serialization, variant=variant)
            return push_folder(folder, repo_id, commit_message, token, create_pr, new_card=card is not None)


def wanted_files(
    parts: list[str], variant: str | None, trust_remote_code: bool, pickled: bool
) -> tuple[list[str], list[str]]:
    """Patterns of the files of some components that are fetched, and of those that are not."""
    endings = ["json", "txt", "model"]
    ignored = []
    for ending in ("safetensors", "bin") if pickled else ("safetensors",):
        if variant is None:
            endings.append(ending)
            ignored.append(f"*/*.*.{ending}")  # those of variants
        else:
            endings += [f"{variant}.{ending}", f"{variant}-*.{ending}"]
    patterns = [f"{part}/*.{ending}" for part in parts for ending in endings]
    return [*patterns, INDEX_NAME, CARD_NAME, f"*/{TENSORS_NAME}", *["*.py"] * trust_remote_code], ignored


PUSH_ARGUMENTS = ("repo_id", "commit_message", "private", "token", "create_pr")


def create_repository(target: Path, push_to_hub: bool, hub: dict) -> str | None:
    """Makes the repository that a folder is to be pushed to, and returns its id, with the namespace."""
    name, private = hub.pop("repo_id", None) or target.name, hub.pop("private", None)
    if not push_to_hub:
        return None
    with explain_refusal(name):
        return create_repo(name, private=private, token=hub.get("token"), exist_ok=True).repo_id


@contextmanager
def explain_refusal(repo_id: str):
    """Says in a sentence that the Hub does not let this token write to a repository."""
    try:
        yield
    except HfHubHTTPError as error:
        if getattr(error.response, "status_code", None) not in (401, 403):
            raise
        raise OSError(
            f"the Hub does not let this token write to {repo_id!r}: pass a `token` (or HF_TOKEN) that may, or log in again"
        ) from error


def push_folder(folder, repo_id, commit_message=None, token=None, create_pr=False, new_card=False) -> str:
    """Uploads a folder to a repository, and returns the address of the commit.

    Weights of an older commit that would be read in place of the new ones (shards, or one file) are deleted.

    The card of the repository is kept, unless there is a `new_card`.
    """
    with explain_refusal(repo_id):
        return upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            token=token,
            commit_message=commit_message or "Upload a D3PM pipeline",
            create_pr=create_pr,
            delete_patterns=stale_weights(Path(folder)),
            ignore_patterns=None if new_card or not file_exists(repo_id, CARD_NAME, token=token) else [CARD_NAME],
        )


def stale_weights(folder: Path) -> list[str]:
    """Patterns of all forms that the weights in a folder may have had before: one file, or shards and their index."""
    patterns = set()
    for path in folder.glob("*/*.safetensors"):
        stem, *variant = re.sub(r"-\d{5}-of-\d{5}", "", path.name).removesuffix(".safetensors").split(".")
        if f"{stem}.safetensors" in (DIFFUSERS_WEIGHTS_NAME, TRANSFORMERS_WEIGHTS_NAME):
            name, part = ".".join([stem, *variant]), path.parent.name
            index = ".".join([stem, "safetensors", "index", *variant, "json"])
            patterns |= {f"{part}/{name}.safetensors", f"{part}/{name}-*-of-*.safetensors", f"{part}/{index}"}
    return sorted(patterns)


def downloaded_source(cls: type) -> tuple[str, str] | None:
    """Name and text of the module of a class whose code came with a checkpoint; `None` for classes that are installed."""
    if cls.__module__.split(".")[0] != DYNAMIC_MODULES:
        return None
    return cls.__module__.rpartition(".")[2], inspect.getsource(sys.modules[cls.__module__])


def add_code(pipeline, folder: Path, find_source) -> None:
    """Writes the code of a pipeline's classes into its folder, and names it in the index where diffusers looks for it.

    Args:
        find_source: gives name and text of the module to write for a class, or `None` if nothing is to be written.
    """
    index = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
    classes = {name: type(getattr(pipeline, name)) for name, _ in components(index)}
    for name, cls in {**classes, "_class_name": type(pipeline)}.items():
        source = find_source(cls)
        if source is not None:
            place = folder if name == "_class_name" else folder / name
            (place / f"{source[0]}.py").write_text(source[1], encoding="utf-8")
            index[name] = [source[0], cls.__name__]
            # diffusers takes any safetensors for weights of a network, which a scheduler has none of, and then fetches
            # none.
            index["_ignore_files"] = [f"scheduler/{path.name}" for path in folder.glob("scheduler/*.safetensors")]
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@contextmanager
def staged(target: Path):
    """A new folder beside `target`, whose files are moved there when the block ends well and are dropped when it fails."""
    staging = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".partial", dir=target.parent))
        yield staging
        move_into_place(staging, target)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the pipeline could not be saved to {target} ({error}): free some space or choose a folder that you may write "
            "to; what was there before is untouched"
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def move_into_place(staging: Path, target: Path) -> None:
    """Moves every file of a complete checkpoint over those of an older one, the index last."""
    if not target.exists():
        staging.chmod(0o777 & ~_umask())
        os.replace(staging, target)
        return
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    patterns = stale_weights(staging)
    for path in sorted(files, key=lambda path: path.name == INDEX_NAME):
        place = target / path.relative_to(staging)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)
    # Weights in another form (one file, or shards) that the new checkpoint does not have would be read in its place.
    new = [path.relative_to(staging) for path in files]
    for stale in [path for pattern in patterns for path in target.glob(pattern)]:
        if stale.relative_to(target) not in new:
            stale.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# What is trusted


def components(index: dict) -> list[tuple[str, list[str]]]:
    """The components in an index, each with its library and its class."""
    return [
        (name, value)
        for name, value in index.items()
        if isinstance(value, list)
        and not name.startswith("_")
        and len(value) == 2
        and all(isinstance(part, str) for part in value)
    ]


def find_pipeline(cls, class_name: str, folder: str):
    """The imported pipeline class of that name, if `cls` may load it; `cls` itself if it derives from that class."""
    base = next(c for c in cls.__mro__ if CheckpointMixin in c.__bases__)
    found = find_subclass(base, class_name)
    if found is None and class_name in dir(diffusers):
        ours = " or ".join(derived.__name__ for derived in subclasses(base) if derived is not base)
        raise ValueError(
            f"{folder} is a checkpoint of the pipeline {class_name!r}, not of {ours}: load it with "
            "`diffusers.DiffusionPipeline`"
        )
    if found is None:
        raise ValueError(
            f"{folder} is a checkpoint of the pipeline {class_name!r}, which this program has not imported: import that "
            "class first, or load it with `diffusers.DiffusionPipeline` and `trust_remote_code=True` if its code is in "
            "the repository and you have read it"
        )
    if issubclass(found, cls):
        return found
    if issubclass(cls, found):
        return cls
    raise ValueError(f"{folder} is a checkpoint of {class_name}, not of {cls.__name__}: load it with {class_name}")


def check_components_are_named(pipeline_class: type, index: dict, given: dict, folder: str) -> None:
    """Refuses an index that lacks a component of the pipeline, unless it is optional or the caller has given one."""
    for name, parameter in inspect.signature(pipeline_class.__init__).parameters.items():
        optional = name in pipeline_class._optional_components
        is_setting = name == "self" or (parameter.default is not parameter.empty and not optional)
        if is_setting or name in given or (optional and name not in index):
            continue
        if not isinstance(index.get(name), list):
            raise ValueError(
                f"{folder}/{INDEX_NAME} gives {name} as {index.get(name)!r}: it must be a library and a class"
            )


def check_index(index: dict, folder: str) -> None:
    """Refuses an index that names classes which are not of this package, of diffusers, of transformers, nor imported."""
    sound = dict(components(index))
    for name, value in index.items():
        if not isinstance(value, list) or name.startswith("_") or value == [None, None]:
            continue
        if name not in sound:
            raise ValueError(f"{folder}/{INDEX_NAME} gives {name} as {value}: it must be a library and a class")
        if find_component(value) is None:
            raise ValueError(
                f"{folder}/{INDEX_NAME} names {'.'.join(value)} as the {name}, which is no class of d3pm_hf, diffusers or "
                "transformers, and none that this program has imported: import it first, or pass "
                "`trust_remote_code=True` if its code is in the repository and you have read it"
            )


def find_component(value: list[str]) -> type | None:
    """The class of a component, given as a library and a class; `None` if it is not one of those that are trusted."""
    library, class_name = value
    if library in TRUSTED_LIBRARIES or (library == PACKAGE and class_name in OUR_COMPONENTS):
        return getattr(sys.modules.get(library), class_name, None)
    if library == NAMESPACE and "." in class_name:
        return find_imported(*class_name.rsplit(".", 1))
    return None


def check_files(folder: Path, index: dict, variant: str | None, use_safetensors: bool) -> None:
    """Refuses a checkpoint with a file missing, cut short, or read from elsewhere, or with weights that do not fit."""
    for name, value in components(index):
        part, cls = folder / name, find_component(value)
        for path in sorted(part.glob("*.json")):
            check_names(path, read_json(path), variant)
        for path in part.glob("*.safetensors"):
            check_safetensors(path)
        kind = next((base for base in CONFIG_NAMES if cls is not None and issubclass(cls, base)), None)
        if kind is None:  # the code of the repository, which is trusted, knows what it needs
            continue
        if not (part / CONFIG_NAMES[kind]).is_file():
            raise OSError(
                f"{part / CONFIG_NAMES[kind]} is missing: the checkpoint is incomplete; download or save it again"
            )
        if kind is PreTrainedTokenizerBase and not any([*part.glob(pattern)] for pattern in TOKENIZER_PATTERNS):
            raise OSError(
                f"{part / 'tokenizer.json'} is missing: the checkpoint is incomplete; download or save it again"
            )
        if kind is PreTrainedTokenizerBase:
            check_tokenizer(part, cls)
        if kind in (ModelMixin, PreTrainedModel):
            if use_safetensors:
                check_has_weights(part, variant)
            check_weights(part, cls, variant, use_safetensors)


def read_json(path: Path) -> dict:
    """The settings in a JSON file, or a sentence about what is wrong with it."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise OSError(f"{path} is no JSON ({error}): download or save the checkpoint again") from error
    if not isinstance(values, dict):
        raise OSError(f"{path} holds no settings: download or save the checkpoint again")
    return values


def check_weights(part: Path, cls: type, variant: str | None, use_safetensors: bool) -> None:
    """Refuses weights that lack tensors of the network, or hold others, or tensors of another shape.

    The network is built and filled on the `meta` device, on which tensors have no values: it costs no memory.
    """
    again = "download or save the checkpoint again"
    arguments = {"variant": variant, "use_safetensors": use_safetensors, "local_files_only": True}
    if issubclass(cls, PreTrainedModel):
        arguments["ignore_mismatched_sizes"] = True  # to have them reported
    with explain_failure(part):
        _, report = cls.from_pretrained(part, device_map={"": "meta"}, output_loading_info=True, **arguments)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(f"the weights in {part} lack {_first(missing)} of a {cls.__name__}: {again}")
    if report["unexpected_keys"]:
        unexpected = sorted(report["unexpected_keys"])
        raise ValueError(
            f"the weights in {part} hold {_first(unexpected)}, which a {cls.__name__} with this config.json does not "
            f"have: {again}"
        )
    for name, found, needed in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"the tensor {name} in {part} has the shape {tuple(found)}, and a {cls.__name__} with this config.json "
            f"needs {tuple(needed)}: {again}"
        )


def check_tokenizer(part: Path, cls: type) -> None:
    """Refuses the files of a tokenizer that cannot be loaded."""
    with explain_failure(part):
        cls.from_pretrained(part, local_files_only=True)


@contextmanager
def explain_failure(part: Path):
    """Says in a sentence that a library cannot make its component of the files in a folder."""
    try:
        yield
    except Exception as error:
        # The last is tokenizers': it has no class of its own.
        if not isinstance(error, FAILURES) and type(error) is not Exception:
            raise
        reason = " ".join(str(error).split()).split(". ")[0]
        raise ValueError(
            f"the files in {part} do not describe a component ({type(error).__name__}: {reason}): download or save the "
            "checkpoint again"
        ) from error


def _first(names: list[str], count: int = 3) -> str:
    """The first few of some names of tensors, and how many there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:count])}{more})"


def check_has_weights(part: Path, variant: str | None) -> None:
    """Refuses a network without safetensors of the variant that is asked for."""
    stems = [name.removesuffix(".safetensors") for name in (DIFFUSERS_WEIGHTS_NAME, TRANSFORMERS_WEIGHTS_NAME)]
    suffix = "" if variant is None else f".{variant}"
    if any([*part.glob(f"{stem}{suffix}.safetensors"), *part.glob(f"{stem}{suffix}-*.safetensors")] for stem in stems):
        return
    if variant is not None:
        raise OSError(
            f"{part} has no weights of the variant {variant!r}: leave out `variant`, or pass one that it has"
        )
    if [*part.glob("*.bin")]:
        raise OSError(
            f"{part} has pickled weights only, which can run code: pass `use_safetensors=False` if you trust them"
        )
    raise OSError(
        f"{part} has no weights (*.safetensors): the checkpoint is incomplete, or has pickled ones only, which can run "
        "code: pass `use_safetensors=False` if you trust them"
    )


def check_safetensors(path: Path) -> None:
    """Refuses a file that is cut short; its header says how long it must be."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise OSError(
            f"{path} is truncated or no safetensors file ({error}): download it again with `force_download=True`, or save "
            "it again"
        ) from error


def check_names(path: Path, values: dict, variant: str | None) -> None:
    """Refuses settings that point to another folder, and a shard index that names other files than safetensors."""
    names = [value for key, value in values.items() if key.endswith("_file") and isinstance(value, str)]
    if ".index." in path.name:
        shards = values.get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise OSError(f"{path} names no file for each tensor: download or save the checkpoint again")
        names += shards.values()
    is_index = ".safetensors.index." in path.name
    is_read = path.name.endswith(".index.json" if variant is None else f".index.{variant}.json")
    for name in names:
        if os.path.basename(name) != name:
            raise ValueError(f"{path} points to {name!r}, outside its folder: do not trust this checkpoint")
        if is_index and not name.endswith(".safetensors"):
            raise ValueError(
                f"{path} points to {name!r}, which is no safetensors file and could run code: do not trust this checkpoint"
            )
        if is_index and is_read and not (path.parent / name).is_file():
            raise OSError(f"{path.parent / name} is missing: the checkpoint is incomplete; download or save it again")
