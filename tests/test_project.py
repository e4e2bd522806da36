# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The files of the project agree with each other: setup, constraints, Makefile, workflows and hooks."""

import ast
import importlib
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from d3pm_hf.utils import names


ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def arguments():
    """What setup.py passes to setuptools."""
    with patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return setup.call_args.kwargs


@pytest.fixture(scope="module")
def pins():
    """The version of each package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "constraints.txt holds exact versions only"
    return {canonicalize_name(name): version for name, version in pairs}


def commands(workflow):
    """The shell commands of a workflow, with the values of its matrix filled in."""
    for job in workflow["jobs"].values():
        targets = job.get("strategy", {}).get("matrix", {}).get("target", [""])
        for step in job["steps"]:
            yield from (step.get("run", "").replace("${{ matrix.target }}", target) for target in targets)


def test_every_requirement_is_pinned_within_its_range(arguments, pins):
    extras = arguments["extras_require"].values()
    for line in {*arguments["install_requires"], *(line for extra in extras for line in extra)}:
        requirement = Requirement(line)
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{line} has no line in constraints.txt"
        assert requirement.specifier.contains(pinned, prereleases=True), f"{line} does not allow the pinned {pinned}"


def test_the_environment_of_xla_differs_in_torch_alone(arguments):
    pins = dict(line.split("==") for line in (ROOT / "constraints-xla.txt").read_text().split())
    assert pins.keys() == {"torch", "torch_xla"} and pins["torch"] == pins["torch_xla"]
    (torch,) = (Requirement(line) for line in arguments["install_requires"] if line.startswith("torch>"))
    assert torch.specifier.contains(pins["torch"])
    assert "grep -v '^torch==' constraints.txt | cat - constraints-xla.txt" in (ROOT / "Makefile").read_text()


def test_the_lowest_versions_are_the_bounds_of_setup(arguments, pins):
    lines = [line for line in (ROOT / "constraints-lowest.txt").read_text().splitlines() if not line.startswith("#")]
    lowest = dict(line.split("==") for line in lines)
    assert lowest["torch"] == pins["torch"]  # an older one is not tried
    extras = arguments["extras_require"]
    bounds = [*arguments["install_requires"], *extras["training"], *extras["evaluation"]]
    claimed = {r.name: str(r.specifier) for r in map(Requirement, bounds)}
    for name in (
        "accelerate",
        "datasets",
        "diffusers",
        "evaluate",
        "filelock",
        "huggingface_hub",
        "safetensors",
        "tokenizers",
        "torchmetrics",
        "transformers",
    ):
        assert claimed[name] == f">={lowest[name]}"


def test_the_package_contains_every_folder_of_the_source(arguments):
    source = ROOT / "src"
    folders = {".".join(path.relative_to(source).parts[:-1]) for path in (source / "d3pm_hf").rglob("*.py")}
    assert set(arguments["packages"]) == folders
    assert arguments["package_data"] == {"d3pm_hf": ["py.typed"]} and (source / "d3pm_hf/py.typed").exists()


def test_the_space_has_the_pinned_gradio_and_starts_the_page(arguments, pins):
    space = ROOT / "examples/space"
    metadata = yaml.safe_load((space / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert metadata["sdk"] == "gradio" and metadata["sdk_version"] == pins["gradio"]
    assert len(metadata["short_description"]) <= 60  # the Hub takes no longer one
    (requirement,) = (Requirement(line) for line in (space / "requirements.txt").read_text().splitlines())
    assert requirement.name == arguments["name"] and requirement.extras == {"app"}
    assert requirement.url == f"git+{arguments['url']}"
    with (
        patch("d3pm_hf.app.command_line.main") as main,
        patch.dict("os.environ", {"CHECKPOINTS": "me/text me/digits"}),
    ):
        runpy.run_path(str(space / metadata["app_file"]), run_name="__main__")
    main.assert_called_once_with(["me/text", "me/digits"])


def test_the_files_name_one_version_and_one_repository(arguments):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == arguments["version"]
    assert citation["repository-code"] == arguments["url"]
    assert all(address.startswith(arguments["url"]) for address in arguments["project_urls"].values())
    assert f"{arguments['url']}/security/advisories/new" in (ROOT / "SECURITY.md").read_text()


def test_workflows_run_targets_that_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {}
    for path in WORKFLOWS:
        runs = list(commands(yaml.safe_load(path.read_text())))
        used[path.stem] = {word for run in runs for word in re.findall(r"^make ([\w-]+)", run, re.MULTILINE)}
        assert used[path.stem] <= targets
    assert used == {"tests": {"test", "test-portable"}, "docs": {"test-docs", "docs"}, "release": set()}


def test_only_the_job_that_publishes_may_ask_for_an_identity():
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            assert ("id-token" in job.get("permissions", {})) == (path.stem == "release" and name == "publish")


def test_hooks_run_what_the_makefile_runs(pins):
    """The hooks use the tools of .venv, so that constraints.txt decides on their versions."""
    makefile = (ROOT / "Makefile").read_text()
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = [hook["entry"].split() for repository in config["repos"] for hook in repository["hooks"]]
    assert [Path(entry[0]).name for entry in entries] == ["ruff", "ruff", "mypy"]
    for entry in entries:
        tool = Path(entry[0])
        assert str(tool.parent) == ".venv/bin" and tool.name in pins
        assert f"$(BIN)/{' '.join([tool.name, *entry[1:2]])}" in makefile


# What is imported when


def run_python(code, *words):
    """What a program, which sees `words` as its command line, prints as JSON in its last line."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples")])}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# The modules, without those of Python itself and of the package, that a statement imports after another one.
IMPORTS = """
import json, sys
exec(sys.argv[1])
before = set(sys.modules)
exec(sys.argv[2])
known = {*sys.stdlib_module_names, "d3pm_hf"}
print(json.dumps(sorted(name for name in set(sys.modules) - before if name.partition(".")[0] not in known)))
"""
# What the package takes from others, which all of its imports are made of.
BASE = """
import torch, diffusers, transformers
from diffusers import ConfigMixin, DiffusionPipeline, ModelMixin, SchedulerMixin, UNet2DModel
from transformers import AutoModelForMaskedLM, BertModel, PreTrainedModel, PreTrainedTokenizerFast, T5EncoderModel
"""


def test_importing_the_package_imports_no_other():
    assert run_python(IMPORTS, "", "import d3pm_hf") == []


def test_all_public_names_cost_what_diffusers_and_transformers_cost():
    """Beside its own modules, they need only those that draw on pictures, and one of diffusers."""
    found = run_python(IMPORTS, BASE, "from d3pm_hf import *")
    assert {name for name in found if not name.startswith("PIL.")} <= {"diffusers.callbacks"}


# The exit code and the text of `--help` of some programs, one after the other, and whether torch was imported until its end.
HELP = """
import contextlib, io, json, runpy, sys
answers = {}
for name in sys.argv[1:]:
    shown, code, sys.argv = io.StringIO(), None, [name, "--help"]
    with contextlib.redirect_stdout(shown):
        try:
            (runpy.run_path if name.endswith(".py") else runpy.run_module)(name, run_name="__main__")
        except SystemExit as end:
            code = end.code
    answers[name] = [code, shown.getvalue(), "torch" in sys.modules]
print(json.dumps(answers))
"""
SCRIPTS = [str(path) for path in sorted((ROOT / "examples").glob("*.py"))]
PROGRAMS = ["d3pm_hf.evaluation", "d3pm_hf.app", "d3pm_hf.convert", *SCRIPTS]


@pytest.fixture(scope="module")
def answers():
    return run_python(HELP, *PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS, ids=[Path(program).name for program in PROGRAMS])
def test_help_needs_no_torch(program, answers):
    code, shown, imports_torch = answers[program]
    assert code == 0 and "usage:" in shown and "--" in shown.partition("show this help")[2]
    assert not imports_torch
    name = Path(program).name
    if name.startswith("train") and name != "train_table.py":
        for family, description in names.TRANSITIONS.items():
            assert f"{family}: {description}." in " ".join(shown.split())
        assert "--learning_rate" in shown and "changes the defaults" in shown


def test_names_of_command_lines_are_those_of_the_registries():
    from d3pm_hf.schedules import schedule_names
    from d3pm_hf.transitions import transition_families
    from d3pm_hf.utils.registry import is_built_in

    families = {name: family for name, family in transition_families().items() if is_built_in(family)}
    assert [*names.TRANSITIONS.items()] == [(name, family.description) for name, family in families.items()]
    tensors = {name: family.input_tensors() for name, family in families.items()}
    assert names.INPUT_TENSORS == {name: required for name, required in tensors.items() if required}
    assert names.SCHEDULES == schedule_names()[: len(names.SCHEDULES)]


@pytest.mark.parametrize("package", ["d3pm_hf", "d3pm_hf.evaluation", "d3pm_hf.training"])
def test_a_lazy_package_is_like_any_other(package):
    """What type checkers see, what is imported on use, `__all__`, `dir`, `import *` and pickles agree."""
    module = importlib.import_module(package)
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {"." * node.level + node.module: [alias.name for alias in node.names] for node in block.body}
    (call,) = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    assert ast.literal_eval(call.args[1]) == seen
    public = {name for source, listed in seen.items() if source.startswith(".") for name in listed}
    assert set(module.__all__) == public <= set(dir(module))
    space = {}
    exec(f"from {package} import *", space)
    for name in module.__all__:
        value = getattr(module, name)
        assert space[name] is value is pickle.loads(pickle.dumps(value))
    for name in ("nothing", "subprocess.Popen", "os.path"):  # a name that a file may hold
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute '{name}'"):
            getattr(module, name)


def test_modules_of_the_package_are_attributes():
    code = "import json, d3pm_hf; print(json.dumps([d3pm_hf.training.training_args.__name__, d3pm_hf.evaluation.__name__]))"
    assert run_python(code) == ["d3pm_hf.training.training_args", "d3pm_hf.evaluation"]
