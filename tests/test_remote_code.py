# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Code of a repository runs only if the caller asks for it: transformers would ask on the terminal, and "y" runs it."""

import ast
import json
from pathlib import Path

import pytest
from test_masked_lm import tiny_model, tiny_tokenizer

from d3pm_hf import D3PMTextPipeline
from d3pm_hf.evaluation import ClassifierFeatures


ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("src", "examples", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py"))
LOADERS = ("from_pretrained", "from_config")
# Classes with `from_pretrained` that run no code of a repository, unless they are told to: those of this package and of
# diffusers. `cls` and `target` are such classes, or get the argument from `load_pretrained` by `kwargs`.
SAFE = ("D3PM", "super", "cls", "target")
# Functions that run code of a repository and have no way to say that they must not.
FORBIDDEN = ("evaluate.load", "torch.hub.load", "hub.load")


def calls(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_call_says_whether_code_is_trusted(path):
    for call in calls(path):
        name = ast.unparse(call.func)
        where = f"{path.relative_to(ROOT)}:{call.lineno}: {name}"
        assert name not in FORBIDDEN, where
        if name.rpartition(".")[2] in LOADERS and not name.removeprefix("d3pm_hf.").startswith(SAFE):
            assert any(keyword.arg == "trust_remote_code" for keyword in call.keywords), where


def test_the_calls_are_found():
    names = [ast.unparse(call.func) for path in FILES for call in calls(path)]
    for name in ("AutoTokenizer.from_pretrained", "AutoImageProcessor.from_pretrained", "cls.from_pretrained"):
        assert name in names


CODE = """
from pathlib import Path

from transformers import PreTrainedConfig

Path({marker!r}).write_text("this must not run")

class Mine(PreTrainedConfig):
    model_type = "mine"
"""


@pytest.mark.parametrize(
    "load",
    [D3PMTextPipeline.from_masked_lm, D3PMTextPipeline.from_causal_lm, ClassifierFeatures],
    ids=lambda load: load.__name__,
)
def test_nobody_is_asked(tmp_path, monkeypatch, load):
    tiny_model("bert").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    marker = tmp_path / "marker"
    (tmp_path / "mine.py").write_text(CODE.format(marker=str(marker)))
    settings = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    with pytest.raises(ValueError, match="do not describe a component .*custom code"):
        load(tmp_path)
    assert not marker.exists()
