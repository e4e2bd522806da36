# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Downloads from the Hub, only of files that are needed, and uploads to it. Errors name the fix."""

import inspect
import os
import posixpath
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitInfo, auth_check, create_repo, file_exists, snapshot_download, upload_folder
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..schedulers.scheduling_d3pm import TENSORS_NAME
from .layout import (
    ADAPTER_NAME,
    ADAPTER_WEIGHTS_NAME,
    CARD_NAME,
    INDEX_NAME,
    PICKLED_WEIGHTS,
    SAFE_WEIGHTS,
    read_json,
    weights_files,
    weights_patterns,
)


# Keyword arguments of `save_pretrained` that belong to the upload.
PUSH_ARGUMENTS = ("repo_id", "commit_message", "private", "token", "create_pr")
# Keyword arguments of `from_pretrained` that belong to the download.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
# Endings of the settings and tokenizer files of a network of transformers.
TEXT_ENDINGS = ("json", "txt", "model", "jinja", "spm", "tiktoken", "codes", "bpe")


def download(repo_id: str, patterns: list[str], ignored: list[str] | None = None, **hub_arguments) -> str:
    """Downloads the files of a repository that match one of `patterns` and none of `ignored`; returns the folder of the snapshot.

    An error of the Hub becomes an `OSError` that names the repository and the fix.
    """
    try:
        return snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=ignored, **hub_arguments)
    except HFValidationError as error:
        raise OSError(f"{repo_id!r} is neither a folder nor a valid repository id, such as 'name/model'") from error
    except GatedRepoError as error:
        raise OSError(f"the repository {repo_id!r} is gated: ask for access on its page, then pass `token`") from error
    except RevisionNotFoundError as error:
        raise OSError(
            f"the repository {repo_id!r} has no revision {hub_arguments.get('revision')!r}: pass one of its branches, tags or commits"
        ) from error
    except RepositoryNotFoundError as error:
        raise OSError(
            f"there is no folder and no repository {repo_id!r}: check the name, and pass `token` if it is private"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError) as error:
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            raise OSError(
                f"this token does not have read access to {repo_id!r}: check `token` (and HF_TOKEN), or log in again"
            ) from error
        raise OSError(
            f"{repo_id!r} is not in the cache and the Hub cannot be reached: check the connection (and HF_HUB_OFFLINE), or "
            "pass a local folder"
        ) from error


def download_index(repo_id: str, **hub_arguments) -> str:
    """Downloads the index, the card and the settings of a LoRA of a checkpoint and returns the folder of the snapshot."""
    return download(repo_id, [INDEX_NAME, CARD_NAME, ADAPTER_NAME], **hub_arguments)


def download_components(
    repo_id: str,
    components: list[str],
    variant: str | None = None,
    trust_remote_code: bool = False,
    pickled: bool = False,
    **hub_arguments,
) -> str:
    """Downloads the files of some components, which are folders of the repository, and returns the folder of the snapshot."""
    endings, ignored = ["json", "txt", "model"], []
    for ending in ("safetensors", "bin") if pickled else ("safetensors",):
        if variant is None:
            endings.append(ending)
            ignored.append(f"*/*.*.{ending}")  # weights of variants
        else:
            endings += [f"{variant}.{ending}", f"{variant}-*.{ending}"]
    patterns = [f"{component}/*.{ending}" for component in components for ending in endings]
    patterns += [INDEX_NAME, CARD_NAME, ADAPTER_NAME, ADAPTER_WEIGHTS_NAME, f"*/{TENSORS_NAME}"]
    patterns += ["*.py"] * trust_remote_code
    return download(repo_id, patterns, ignored, **hub_arguments)


def download_texts(repo_id: str, subfolder: str = "", trust_remote_code: bool = False, **hub_arguments) -> str:
    """Downloads the settings and the tokenizer of a network of transformers, and returns the folder of the snapshot."""
    endings = (*TEXT_ENDINGS, "py") if trust_remote_code else TEXT_ENDINGS
    patterns = [posixpath.join(subfolder, f"*.{ending}") for ending in endings]
    return download(repo_id, patterns, [posixpath.join(subfolder, "*/*")], **hub_arguments)


def download_network(
    repo_id: str, subfolder: str, variant: str | None, trust_remote_code: bool, pickled: bool, **hub_arguments
) -> str:
    """Downloads a network of transformers, with its tokenizer or processor, and returns the folder of the snapshot."""
    folder = download_texts(repo_id, subfolder, trust_remote_code, **hub_arguments)
    single, _, index = weights_files(*(PICKLED_WEIGHTS if pickled else SAFE_WEIGHTS)[-1], variant)
    path = Path(folder, subfolder, index)
    shards = read_json(path).get("weight_map") if path.is_file() else None
    listed = shards.values() if isinstance(shards, dict) else []
    names = {single, index, *(name for name in listed if isinstance(name, str))}
    return download(repo_id, [posixpath.join(subfolder, name) for name in sorted(names)], **hub_arguments)


def create_repository(repo_id: str, private: bool | None = None, token: str | None = None) -> str:
    """Creates a repository unless it exists, and returns its id with the namespace."""
    with explain_refusal(repo_id):
        return create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id


def check_write_access(repo_id: str, token: str | None = None) -> None:
    """Checks that a token may write to a repository that exists, which `create_repository` accepts either way."""
    if "write" not in inspect.signature(auth_check).parameters:
        return  # an earlier version of huggingface_hub, which checks read access only
    try:
        with explain_refusal(repo_id):
            auth_check(repo_id, token=token, write=True)
    except HfHubHTTPError:
        pass  # a mirror of the Hub that does not answer this question


def upload_command(folder: str | os.PathLike, repo_id: str, exclude: list[str]) -> str:
    """The command line that uploads a folder without the files that match a pattern in `exclude`."""
    patterns = [part for pattern in exclude for part in ("--exclude", pattern)]
    return shlex.join(["hf", "upload", repo_id, str(folder), ".", *patterns])


def push_folder(
    folder: str | os.PathLike,
    repo_id: str,
    commit_message: str | None = None,
    token: str | None = None,
    create_pr: bool = False,
    new_card: bool = False,
) -> CommitInfo:
    """Uploads a checkpoint folder as one commit and returns the commit, a `str` that is its address.

    Weights of an older commit are deleted where they would be read in place of the new ones. The card of the repository
    is kept, unless `new_card` is set or there is none.
    """
    with explain_refusal(repo_id):
        return upload_folder(
            repo_id=repo_id,
            folder_path=Path(folder),
            token=token,
            commit_message=commit_message or "Upload a D3PM pipeline",
            create_pr=create_pr,
            delete_patterns=weights_patterns(Path(folder)),
            ignore_patterns=None if new_card or not file_exists(repo_id, CARD_NAME, token=token) else [CARD_NAME],
        )


@contextmanager
def explain_refusal(repo_id: str) -> Iterator[None]:
    """Replaces the error of a token without write access to `repo_id` by a sentence."""
    try:
        yield
    except HfHubHTTPError as error:
        if getattr(error.response, "status_code", None) not in (401, 403):
            raise
        raise OSError(
            f"This token does not have write access to {repo_id!r}: pass a `token` (or set HF_TOKEN) with write access, or log "
            "in again"
        ) from error
