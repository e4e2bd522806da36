# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`--push_to_hub`: the repository is there before the first step, and a push that fails leaves the command that repeats it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from forked_runs import ForkedRun, train_text
from hub_server import READ_TOKEN, WRONG_TOKEN, LoopbackHub

from d3pm_hf.training import read_log


SHORT = {"max_train_steps": 2, "validation_steps": 2, "num_inference_steps": 4, "train_batch_size": 4}
PUSHED = {"README.md", "model_index.json", "text_model/model.safetensors", "samples/final.txt"}


class AtHub:
    """Prepares a run whose processes take a loopback server for the Hub, although huggingface_hub was imported before.

    Args:
        environment: That of [`LoopbackHub.environment`].
    """

    def __init__(self, environment: dict[str, str]):
        self.endpoint, self.home, self.token = (environment[name] for name in ("HF_ENDPOINT", "HF_HOME", "HF_TOKEN"))

    def __call__(self, rank: int) -> None:
        from huggingface_hub import constants, hf_api

        os.environ |= {"HF_TOKEN": self.token, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        constants.ENDPOINT = self.endpoint
        constants.HF_HUB_DISABLE_XET = True
        hf_api.api.endpoint = self.endpoint


def push(hub, tmp_path, count=1, name="run", **settings):
    """A run that pushes to the hub; its folder, its exit codes and what it wrote to stderr."""
    settings = {**SHORT, "push_to_hub": True, **settings}
    prepare = AtHub(hub.environment(tmp_path / "home"))
    folder = tmp_path / name
    with ForkedRun(train_text, folder, count, prepare, **settings) as pushed:
        return folder, pushed.wait(), pushed.output()


def commits(hub):
    return [request.path for request in hub.requests if "/commit/" in request.path]


def test_push_to_hub(tmp_path):
    with LoopbackHub() as hub:
        folder, codes, errors = push(hub, tmp_path, hub_model_id="org/run")
        assert codes == [0], errors
        files = hub.files("org/run", "main")
    assert PUSHED <= set(files) and not any("checkpoint-" in name for name in files)
    card = files["README.md"].decode()
    assert 'D3PMPipeline.from_pretrained("org/run")' in card and "bits_per_dim" in card


def test_the_card_names_the_namespace(tmp_path):
    """Which a repository without one in its name gets from the token."""
    with LoopbackHub() as hub:
        folder, codes, errors = push(hub, tmp_path, name="my-model")
        assert codes == [0], errors
        assert 'from_pretrained("user/my-model")' in hub.files("user/my-model")["README.md"].decode()


@pytest.mark.parametrize(
    ("wrong", "count", "words"),
    [
        ({"hub_token": WRONG_TOKEN}, 1, "This token does not have write access to 'org/run'"),
        ({"hub_token": READ_TOKEN}, 2, "This token does not have write access to 'org/run'"),
        ({"hub_model_id": "org/a run!"}, 1, "'org/a run!' is not the name of a repository"),
        ({"hub_model_id": "a/b/c"}, 2, "'a/b/c' is not the name of a repository"),
    ],
)
def test_a_push_that_cannot_succeed_is_refused_before_the_first_step(tmp_path, wrong, count, words):
    """On every process, also if the repository exists, which its owner alone may write to."""
    with LoopbackHub() as hub:
        hub.create("org/run")
        folder, codes, errors = push(hub, tmp_path, count, **{"hub_model_id": "org/run", **wrong})
        assert codes == [1] * count and errors.count(f"Error: {words}") == count, errors
    assert "training:" not in errors and not folder.exists()


def test_a_hub_that_does_not_answer(tmp_path):
    with LoopbackHub() as hub:
        pass  # its server has ended
    folder, codes, errors = push(hub, tmp_path, hub_model_id="org/run")
    assert codes == [1] and "OSError: the repository 'org/run' cannot be created" in errors and not folder.exists()


@pytest.mark.parametrize("count", [1, 2])
def test_a_push_that_fails_leaves_the_command_that_repeats_it(tmp_path, count):
    with LoopbackHub() as hub:
        hub.takes_commits = False
        folder, codes, errors = push(hub, tmp_path, count, hub_model_id="org/run", validation_steps=1)
        assert codes == [1] * count, errors
        assert (folder / "README.md").exists() and len(read_log(folder / "log.jsonl")) >= 2
        found = re.findall(
            r"OSError: the pipeline is saved in .*, but could not be pushed .*: push it with `(.*)`", errors
        )
        assert len(found) == count and "bits_per_dim" in (folder / "README.md").read_text()
        hub.takes_commits = True
        program, *arguments = shlex.split(found[0])
        assert program == "hf"
        (folder / ".lock").touch()
        command = [str(Path(sys.executable).with_name("hf")), *arguments]
        environment = hub.environment(tmp_path / "home")
        uploaded = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert uploaded.returncode == 0, uploaded.stderr
        by_command = hub.files("org/run")
        # The run itself, started again, trains no further and pushes the same files.
        hub.put("org/other", {})
        before = read_log(folder / "log.jsonl")
        again = {"hub_model_id": "org/other", "resume_from_checkpoint": "latest", "validation_steps": 1}
        _, codes, errors = push(hub, tmp_path, count, **again)
        assert codes == [0] * count and read_log(folder / "log.jsonl") == before
        by_run = hub.files("org/other")
    assert PUSHED <= set(by_command) and set(by_command) == set(by_run)
    assert {name for name in by_run if by_command[name] != by_run[name]} <= {"README.md"}  # it names the repository
