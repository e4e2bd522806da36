# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Uploads of checkpoint folders to the Hub."""

import inspect
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitInfo, auth_check, create_repo, file_exists, upload_folder
from huggingface_hub.errors import HfHubHTTPError

from .layout import CARD_NAME, weights_patterns


# Keyword arguments of `save_pretrained` that belong to the upload.
PUSH_ARGUMENTS = ("repo_id", "commit_message", "private", "token", "create_pr")


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
    """Replaces the error of a token that must not write to `repo_id` by a sentence."""
    try:
        yield
    except HfHubHTTPError as error:
        if getattr(error.response, "status_code", None) not in (401, 403):
            raise
        raise OSError(
            f"this token must not write to {repo_id!r}: pass a `token` (or set HF_TOKEN) with write access, or log in again"
        ) from error
