# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Every Python block of the README and of docs/ runs, in the order of its page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import LoopbackHub
from test_architecture import LAYERS


pytestmark = pytest.mark.usefixtures("fresh_accelerator")
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page, tmp_path, monkeypatch):
    blocks = python_blocks(page)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if any("push_to_hub" in block for block in blocks):
        run_with_hub("\n".join(blocks), tmp_path)
        return
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)


def run_with_hub(code, folder):
    """Runs code in a process of its own, whose Hub is on this machine."""
    with LoopbackHub() as hub:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **hub.environment(folder / "home")}
        run = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_have_folders_of_their_own(page):
    """Whoever runs one after the other would be told that the folder holds a run."""
    commands = page.read_text(encoding="utf-8").replace("\\\n", " ")
    folders = re.findall(r"accelerate launch .*--output_dir (\S+)", commands)
    assert len(folders) == len(set(folders))


def anchors(page):
    """The fragments that headings of a page can be linked by, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *sorted({*ROOT.glob("*.md")} - {*PAGES})], ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)|<img src=\"([^\"]+)", text):
        target = "".join(target)
        path, _, fragment = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not fragment or fragment in anchors(linked), target


def test_the_notebook_is_the_quick_tour():
    """`python docs/build_site.py --notebook` writes it, so that its cells are the blocks that run above."""
    notebook = json.loads((ROOT / "examples/quick_tour.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    blocks = python_blocks(ROOT / "docs/source/en/quicktour.md")
    assert cells == [block.strip("\n").replace('"examples/', '"') for block in blocks]
    text = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    for target in re.findall(r"(?:\]\((?!https?://|#)|<img src=\")([^)#\s\"]+)", text):
        assert (ROOT / "examples" / target).exists(), target


def test_architecture_lists_the_layers():
    """The table of the page on the architecture has the layers, and what each may import, of test_architecture.py."""
    text = (ROOT / "docs/source/en/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*?) ?\|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == [*LAYERS]
    for i, (name, allowed) in enumerate(rows):
        named = set(re.findall(r"`(\w+)`", allowed))
        if allowed.startswith("all above"):
            named = {above for above, _ in rows[:i]} - named
        assert named - {"pipelines"} == LAYERS[name] - {name, "pipelines"}, name


def test_conformance_names_tests_that_exist():
    """The tables of checks whose last column is "test of ours"."""
    defined = {
        name for path in ROOT.glob("tests/*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    tables = re.split(r"\n\n", (ROOT / "docs/source/en/conformance.md").read_text(encoding="utf-8"))
    rows = [row for table in tables if "| test of ours |" in table for row in table.strip().splitlines()[2:]]
    assert rows
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split("|")[-2])
        assert named and defined.issuperset(named), row
