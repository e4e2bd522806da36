# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The site of `make docs`: its navigation, the completeness of its API, the examples of docstrings, and the build itself."""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "docs" / "source" / "en"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def load_script():
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


site = load_script()
CLASSES = {name: subject for name, subject in site.public_objects().items() if inspect.isclass(subject)}


def test_the_navigation_names_every_page_once():
    sections = site.pages_of(yaml.safe_load((SOURCE / "_toctree.yml").read_text(encoding="utf-8")))
    named = [local for _, pages in sections for _, local in pages]
    written = [page.relative_to(SOURCE).with_suffix("").as_posix() for page in SOURCE.rglob("*.md")]
    assert sorted(named) == sorted(written)


def test_the_titles_of_the_navigation_are_those_of_the_pages():
    for _, pages in site.pages_of(yaml.safe_load((SOURCE / "_toctree.yml").read_text(encoding="utf-8"))):
        for title, local in pages:
            assert (SOURCE / f"{local}.md").read_text(encoding="utf-8").startswith(f"# {title}\n"), local


def test_the_api_has_every_public_name_and_no_other():
    text = "".join(page.read_text(encoding="utf-8") for page in SOURCE.rglob("*.md"))
    named = [match[1] for match in site.AUTODOC.finditer(text)]
    assert sorted(named) == sorted(site.public_objects())


# What scripts of examples/ take from inside the package: command lines, what they build from flags, measurements of the training loop, and drawings.
NOT_PUBLIC = {
    "app.command_line.main",
    "data.batches.evaluation_batches",
    "data.sources.choose_split",
    "data.sources.dataset_title",
    "data.sources.load_splits",
    "data.characters.TEXT8_ALPHABET",
    "models.text_denoisers.num_positions",
    "schedules.information",
    "training.script_arguments.CPU_IMAGES",
    "training.script_arguments.CPU_TEXT",
    "training.script_arguments.EARLIER_CPU_TEXT",
    "training.script_arguments.HOUR_TEXT",
    "training.script_arguments.ImageModelArguments",
    "training.script_arguments.LanguageModelArguments",
    "training.script_arguments.LoraArguments",
    "training.script_arguments.ProcessArguments",
    "training.script_arguments.TextModelArguments",
    "training.script_arguments.answer_help",
    "training.script_arguments.parse_arguments",
    "training.script_parts.add_lora",
    "training.script_parts.create_image_parts",
    "training.script_parts.create_language_pipeline",
    "training.script_parts.create_text_parts",
    "training.script_parts.is_pipeline",
    "training.script_parts.load_pipeline",
    "training.step_batches.IndexedExamples",
    "training.step_batches.StepBatches",
    "training.step_batches.RunCollator",
    "training.objective.diffusion_loss",
    "transitions.rates.nearest_neighbor_rates",
    "utils.checks.check_int",
    "utils.scripts.run_script",
    "visualization.grids.enlarge",
    "visualization.grids.image_grid",
}


def imported_names(code: str) -> set[str]:
    """What a program imports from the package, such as `data.tokenize`."""
    return {
        f"{node.module}.{alias.name}".removeprefix("d3pm_hf.")
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("d3pm_hf.")
        for alias in node.names
    }


def public_names() -> set[str]:
    """What users may import, from each place that offers it."""
    return {
        f"{module.__name__}.{name}".removeprefix("d3pm_hf.")
        for module in site.public_modules()
        for name in module.__all__
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_fits_its_column(page):
    """Longer lines would have to be scrolled on a page of the site."""
    blocks = re.findall(r"^```(?:python|bash)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert not [line for block in blocks for line in block.splitlines() if len(line) > 97]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_import_public_names_only(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert not imported_names("\n".join(blocks)) - public_names()


def test_examples_import_public_names():
    """Examples are copied: what they import is public, apart from the names in `NOT_PUBLIC`, all of which are in use."""
    scripts = (ROOT / "examples").rglob("*.py")
    names = set().union(*(imported_names(script.read_text(encoding="utf-8")) for script in scripts))
    assert names - public_names() == NOT_PUBLIC


@pytest.mark.parametrize("name", site.public_objects())
def test_docstrings_import_public_names_only(name):
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", inspect.getdoc(site.public_objects()[name]), re.M | re.S)
    assert not set().union(*(imported_names(textwrap.dedent(block)) for block in blocks)) - public_names()


@pytest.mark.parametrize("name", site.public_objects())
def test_every_argument_of_a_documented_function_is_described(name):
    """Every public function and class has a docstring, and one with a list of arguments has all of them."""
    subject = site.public_objects()[name]
    text = inspect.getdoc(subject)
    assert text
    if "\nArgs:\n" not in text or re.search(r"arguments\s+are\s+those\s+of", text):
        return  # without a list, or with a reference to another one
    described = set(re.findall(r"\w+", " ".join(re.findall(r"^    (\w[\w, *]*?)(?: \(.*|:.*)$", text, re.MULTILINE))))
    for parameter in inspect.signature(subject).parameters.values():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            assert parameter.name in described, parameter.name


@pytest.mark.parametrize("name", CLASSES)
def test_the_example_of_every_class_runs(name, tmp_path, monkeypatch):
    """Every public class has an `Examples:` block in its docstring."""
    example = re.search(r"^Examples:\n    ```python\n(.*?)^    ```", inspect.getdoc(CLASSES[name]), re.M | re.S)
    assert example, f"{name} has no `Examples:` block"
    monkeypatch.chdir(tmp_path)
    exec(compile(textwrap.dedent(example[1]), name, "exec"), {"__name__": "__main__"})


def test_a_page_in_the_words_of_sphinx():
    known = {"D3PMScheduler", "D3PMScheduler.step", "data.tokenize"}
    page = site.render_object("D3PMSchedulerOutput", [], known)
    assert ":::::{py:class} D3PMSchedulerOutput(prev_sample: torch.Tensor, pred_logits: torch.Tensor)" in page
    assert "{py:obj}`D3PMScheduler.step <d3pm_hf.D3PMScheduler.step>`" in page
    assert "- **prev_sample** (`torch.LongTensor` of shape `[B, ...]`): x_s" in page
    (example,) = re.findall(
        r"^```python\n(.*?)^```", site.render_object("evaluate_likelihood", [], known), re.M | re.S
    )
    assert max(map(len, example.splitlines())) <= 97  # longer in the docstring
    page = site.render_page(SOURCE / "results.md", known)
    assert "](/images/scaling.png)" in page and f"]({site.REPOSITORY}/docs/results)" in page


@pytest.mark.slow
def test_the_site_opens_from_disk(tmp_path):
    subprocess.run([sys.executable, ROOT / "docs" / "build_site.py", "--output_dir", tmp_path / "site"], check=True)
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list(SOURCE.rglob("*.md")))
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r'<(?:script|link|img)[^>]*?(?:src|href)="([^"]*)"', text):
            assert "//" not in target, f"{page.name} loads {target}"
            assert (page.parent / target.partition("?")[0].partition("#")[0]).exists(), f"{page.name}: {target}"
    glossary = (tmp_path / "site/glossary.html").read_text(encoding="utf-8")
    assert "<math" in glossary and "\\bar" not in glossary
    texts = (tmp_path / "site/_static/page_texts.js").read_text(encoding="utf-8")
    pages = json.loads(texts.removeprefix("const PAGE_TEXTS = ").removesuffix(";\n"))
    assert "leave-one-out posterior" in pages["glossary"] and pages.keys() >= {"index", "api/samplers"}


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[nowhere](missing.md#there)", r"$\nonsense{x}$"])
def test_a_broken_link_or_formula_is_an_error(text, tmp_path, monkeypatch):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/index.md").write_text(f"# Title\n\n{text}\n")
    (tmp_path / "source/_toctree.yml").write_text("[]")
    monkeypatch.setattr(site, "SOURCE", tmp_path / "source")
    assert site.build(tmp_path / "site") != 0
