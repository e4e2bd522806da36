# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The training scripts can be sent to another machine by themselves: their PEP 723 headers name all that they import."""

import ast
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


ROOT = Path(__file__).parents[1]
SCRIPTS = ["train.py", "train_text8.py", "train_lm1b.py", "train_cifar10.py", "train_table.py"]
# The regular expression of PEP 723.
HEADER = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")


@pytest.fixture(scope="module")
def arguments():
    """What setup.py passes to setuptools."""
    with patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return setup.call_args.kwargs


def read_header(name):
    (header,) = HEADER.finditer((ROOT / "examples" / name).read_text(encoding="utf-8"))
    assert header["type"] == "script"
    return tomllib.loads("".join(line[2:] or "\n" for line in header["content"].splitlines(keepends=True)))


def imported_packages(name):
    """The packages that a script imports, at its top and inside of functions."""
    packages = set()
    for node in ast.walk(ast.parse((ROOT / "examples" / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add(node.module.partition(".")[0])
    return packages - sys.stdlib_module_names


@pytest.mark.parametrize("name", SCRIPTS)
def test_headers_match_setup(name, arguments):
    header = read_header(name)
    assert header["requires-python"] == arguments["python_requires"]
    own, *others = map(Requirement, header["dependencies"])
    extras = arguments["extras_require"]
    assert (own.name, own.url) == (arguments["name"], f"git+{arguments['url']}")
    assert own.extras and own.extras <= extras.keys()
    known = {line for extra in extras.values() for line in extra}
    assert {str(other) for other in others} <= known


@pytest.mark.parametrize("name", SCRIPTS)
def test_headers_name_what_is_imported(name, arguments):
    """The package, what it requires with the extras of the header, what the data sets require, and nothing of examples/."""
    own, *others = map(Requirement, read_header(name)["dependencies"])
    lines = [
        *arguments["install_requires"],
        *(line for extra in own.extras for line in arguments["extras_require"][extra]),
    ]
    lines += [line for line in importlib.metadata.requires("datasets") if "extra ==" not in line]
    installed = {canonicalize_name(requirement.name) for requirement in [own, *others, *map(Requirement, lines)]}
    distributions = importlib.metadata.packages_distributions()
    for package in imported_packages(name) - {"d3pm_hf"}:
        names = {canonicalize_name(distribution) for distribution in distributions[package]}
        assert names & installed, f"{name} imports {package}, which its header does not name"


def test_a_script_trains_without_other_files_and_a_launcher(tmp_path):
    """A job has the script alone, and the package from its repository."""
    shutil.copy(ROOT / "examples" / "train.py", tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat and saw a dog " * 20)
    options = (
        "--dataset_path text.txt --sequence_length 8 --hidden_size 16 --num_hidden_layers 1 --num_attention_heads 2 "
    )
    options += "--intermediate_size 32 --max_train_steps 1 --train_batch_size 4 --validation_steps 0 --num_samples 0 "
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "train.py", *options.split(), "--output_dir", "run"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "run" / "model_index.json").is_file()
