# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Builds the pages of docs/source/en into a site that opens from disk: `make docs` writes outputs/docs/index.html.

The pages have the layout of doc-builder: `_toctree.yml` is the navigation, and `[[autodoc]] name` stands for the documentation of an
object, with or without a list of its methods. Sphinx reads neither. This script writes both in its words, with pictures and links
to files of the repository where the site finds them; docstrings are Markdown, as the pages are. A warning, such as that of a link to
nowhere, is an error.
"""

import argparse
import dataclasses
import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

import d3pm_hf


DOCS = Path(__file__).parent
SOURCE = DOCS / "source" / "en"
NOTEBOOK = DOCS.parent / "examples" / "quick_tour.ipynb"
REPOSITORY = "https://github.com/d3pm-hf/d3pm-hf/blob/main"

AUTODOC = re.compile(r"^\[\[autodoc\]\] ([\w.]+)\n((?:    - \w+\n)*)", re.MULTILINE)
LINK = re.compile(r"(\]\(|<img src=\")((?:\.\./)+)([^)\s\"]+)")
REFERENCE = re.compile(r"\[`([~\w.]+)`\]")
# Characters of a line of code on a page.
COLUMN = 97
PROPERTIES = (property, functools.cached_property)
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Examples?):$")


def public_modules() -> list:
    """The modules that users import from: the package, its parts that have an `__all__`, the metrics, and the model of lm-eval."""
    parts = [module.name for module in pkgutil.iter_modules(d3pm_hf.__path__) if module.ispkg]
    # The last two are no part of `evaluation` itself because they need the packages of an extra.
    parts += ["evaluation.metrics", "evaluation.lm_harness"]
    modules = [importlib.import_module(f"d3pm_hf.{part}") for part in parts]
    return [d3pm_hf, *(module for module in modules if hasattr(module, "__all__"))]


def public_objects() -> dict[str, object]:
    """The objects in `__all__` of the public modules, by their shortest name, such as `data.tokenize`."""
    objects: dict[str, object] = {}
    for module in public_modules():
        path = module.__name__.removeprefix("d3pm_hf").lstrip(".")
        for name in module.__all__:
            if not any(known is getattr(module, name) for known in objects.values()):
                objects[f"{path}.{name}".lstrip(".")] = getattr(module, name)
    return objects


def find(name: str):
    """The object that `[[autodoc]] name` stands for."""
    path, _, last = f"d3pm_hf.{name}".rpartition(".")
    return getattr(importlib.import_module(path), last)


def documented_members(cls: type) -> list[str]:
    """Methods and properties with a docstring of this package, without those that a documented base class has already."""
    owners = [owner for owner in reversed(cls.__mro__) if owner.__module__.startswith("d3pm_hf")]
    bases = [base for base in cls.__mro__[1:] if base in public_objects().values()]
    inherited = {owner for base in bases for owner in base.__mro__}
    names = []
    for owner in owners:
        for name, member in vars(owner).items():
            is_public = not name.startswith("_") or name == "__call__"
            is_new = owner not in inherited
            function = getattr(member, "__func__", member)
            is_member = isinstance(function, PROPERTIES) or inspect.isfunction(function)
            if is_public and is_new and is_member and function.__doc__ and name not in names:
                names.append(name)
    return names


# Docstrings


def reference(match: re.Match, known: set[str]) -> str:
    """A link to a documented object for [`name`] of a docstring, or the name as code."""
    name = match[1].lstrip("~").removeprefix("d3pm_hf.")
    for candidate in (name, name.rpartition(".")[2]):
        found = [full for full in known if full == candidate or full.endswith(f".{candidate}")]
        if len(found) == 1:
            return f"{{py:obj}}`{name.rpartition('.')[2] if '~' in match[1] else name} <d3pm_hf.{found[0]}>`"
    return f"`{name}`"


def fit_column(text: str) -> str:
    """Python blocks with lines that are too long for a page, formatted anew. Docstrings have longer lines, as the code has."""

    def format_block(match: re.Match) -> str:
        if max(map(len, match[1].splitlines())) <= COLUMN:
            return match[0]
        command = [sys.executable, "-m", "ruff", "format", "--isolated", f"--line-length={COLUMN}", "-"]
        return f"```python\n{subprocess.run(command, input=match[1], capture_output=True, text=True, check=True).stdout}```"

    return re.sub(r"^```python\n(.*?)^```", format_block, text, flags=re.M | re.S)


def render_docstring(text: str, known: set[str]) -> str:
    """A docstring as Markdown: its sections as lists under a title."""
    lines, result = text.splitlines(), []
    while lines:
        line = lines.pop(0)
        section = SECTION.match(line)
        if not section:
            result.append(line)
            continue
        block = []
        while lines and (not lines[0].strip() or lines[0].startswith("    ")):
            block.append(lines.pop(0)[4:])
        if section[1] in ("Args", "Attributes", "Raises"):
            block = render_items(block)
        elif section[1].startswith("Example") and not any(part.startswith("```") for part in block):
            block = ["```python", *block, "```"]
        result += ["", f"**{section[1]}**", "", *block]
        result.append("")
    return REFERENCE.sub(lambda match: reference(match, known), fit_column("\n".join(result)))


def render_items(block: list[str]) -> list[str]:
    """The lines of a section as list items: `name (type): text` has no indentation, what continues it has one."""
    items = []
    for line in block:
        head = re.match(r"([\w, *]+?)( \(.*?\))?: (?=\S)|([\w, *]+?)( \(.*\)):$", line) if line[:1].strip() else None
        if head:
            names, kind = head[1] or head[3], head[2] or head[4] or ""
            names = ", ".join(f"**{name.strip()}**" for name in names.split(","))
            items.append(f"- {names}{kind}: {line[head.end() :]}".rstrip())
        else:
            items.append(f"- {line}" if line[:1].strip() else f"  {line.strip()}" if line.strip() else "")
    return items


def signature(function) -> str:
    """The arguments of a function and what it returns, without `self` and with `...` for defaults that have no literal.

    Of a function that passes some on, "all other arguments are those of", only its own are shown.
    """
    parameters, text = [], inspect.getdoc(function) or ""
    passes_on = "All other arguments are those of" in text
    for parameter in inspect.signature(function).parameters.values():
        if (
            parameter.name in ("self", "cls")
            or passes_on
            and not re.search(rf"^    .*\b{parameter.name}\b", text, re.M)
        ):
            continue
        if parameter.default is not parameter.empty and not isinstance(
            parameter.default, (int, float, str, tuple, list, dict, type(None))
        ):
            parameter = parameter.replace(default=...)
        parameters.append(parameter)
    returns = inspect.signature(function).return_annotation
    if inspect.isclass(function) or "Callable" in str(returns):  # the types of a decorator are longer than its name
        returns = inspect.Signature.empty
    text = str(inspect.Signature(parameters, return_annotation=returns)).replace("Ellipsis", "...")
    text = re.sub(r"(: |-> )'([A-Z]\w+)'", r"\1\2", text)
    return re.sub(r"\b((?:[a-z_]\w*\.)+)(?=[A-Z])", shorten_module, text)


def shorten_module(match: re.Match) -> str:
    """The modules before the name of a class as its users know them: `torch.nn.`, `torch.`, or none."""
    return "torch.nn." if match[1].startswith("torch.nn.") else "torch." if match[1].startswith("torch.") else ""


def render_member(cls: type, name: str, known: set[str]) -> str:
    """A method or a property of a class, as a directive of Sphinx."""
    static = inspect.getattr_static(cls, name)
    if isinstance(static, PROPERTIES):
        head, text = f"::::{{py:property}} {name}", inspect.getdoc(static)
    else:
        options = f"\n:{type(static).__name__}:" if isinstance(static, (classmethod, staticmethod)) else ""
        method = getattr(cls, name)
        head, text = f"::::{{py:method}} {name}{signature(method)}{options}", inspect.getdoc(method)
    return f"{head}\n\n{render_docstring(text or '', known)}\n::::\n"


def described_fields(subject) -> str:
    """The fields of a dataclass whose descriptions are its metadata `help`, as `Args` of its docstring."""
    fields = dataclasses.fields(subject) if dataclasses.is_dataclass(subject) else ()
    lines = []
    for field in fields:
        kind = str(getattr(field.type, "__name__", field.type)).removesuffix(" | None")
        default = "*optional*" if field.default is None else f"defaults to `{field.default!r}`"
        if "help" in field.metadata:
            lines.append(f"    {field.name} (`{kind}`, {default}): {field.metadata['help']}")
    return "\n".join(["", "Args:", *lines, ""]) if lines else ""


def render_object(name: str, methods: list[str], known: set[str]) -> str:
    """The documentation of a class or a function, as a directive of Sphinx."""
    subject, text = find(name), inspect.getdoc(find(name)) or ""
    path, _, last = f"d3pm_hf.{name}".rpartition(".")
    if inspect.isclass(subject):
        members = [render_member(subject, member, known) for member in methods or documented_members(subject)]
        is_ours = str(getattr(subject.__init__, "__module__", "")).startswith("d3pm_hf")
        arguments = signature(subject) if is_ours else ""
        head = f":::::{{py:class}} {last}{arguments}"
    else:
        members, head = [], f":::::{{py:function}} {last}{signature(subject)}"
    text = re.sub(r"(?=\nExamples:\n)", lambda _: described_fields(subject), text)
    body = "\n".join([render_docstring(text, known), *members])
    return f"{head}\n:module: {path}\n\n{body}\n:::::\n"


# Pages


def pages_of(sections: list[dict]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The title of each section of `_toctree.yml`, and the titles and the names of its pages."""
    for section in sections:
        yield section["title"], [(page["title"], page["local"]) for page in section["sections"]]


def documented_names() -> dict[str, str]:
    """What `[[autodoc]]` names, and on which page."""
    return {
        match[1]: page.relative_to(SOURCE).as_posix()
        for page in sorted(SOURCE.rglob("*.md"))
        for match in AUTODOC.finditer(page.read_text(encoding="utf-8"))
    }


def render_page(page: Path, known: set[str]) -> str:
    """A page in the words of Sphinx. A number stays on one line with its standard error."""

    def move_link(match: re.Match) -> str:
        target = (page.parent / match[2] / match[3].partition("#")[0]).resolve()
        if target.is_relative_to(SOURCE):
            return match[0]
        if target.is_relative_to(DOCS / "images"):
            return f"{match[1]}/{target.relative_to(DOCS).as_posix()}"
        return f"{match[1]}{REPOSITORY}/{target.relative_to(DOCS.parent).as_posix()}"

    text = LINK.sub(move_link, page.read_text(encoding="utf-8")).replace(" ± ", "\u00a0±\u00a0")
    return AUTODOC.sub(lambda match: render_object(match[1], re.findall(r"- (\w+)", match[2]), known), text)


def create_notebook(page: Path, folder: Path) -> dict:
    """A page as a notebook in `folder`: a cell for each Python block, and one for the text between two of them."""
    cells: list[dict] = []
    for i, part in enumerate(
        re.split(r"^```python\n(.*?)^```\n", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    ):
        if i % 2:
            cells.append({"cell_type": "code", "execution_count": None, "outputs": []})
            part = part.replace('"examples/', '"')  # a notebook runs in its own folder
        else:
            prefix = Path(os.path.relpath(page.parent, folder)).as_posix()
            part = re.sub(r"(\]\((?!https?://|#)|<img src=\")", rf"\g<1>{prefix}/", part)
            cells.append({"cell_type": "markdown"})
        cells[-1] |= {"id": f"cell-{i}", "metadata": {}, "source": part.strip("\n").splitlines(keepends=True)}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    cells = [cell for cell in cells if cell["source"]]
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def write_notebook() -> None:
    """Writes the quick tour to `NOTEBOOK`."""
    notebook = create_notebook(SOURCE / "quicktour.md", NOTEBOOK.parent)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def prepare(folder: Path) -> None:
    """Writes all pages to `folder`, with the navigation at the end of the first one."""
    known = set(documented_names())
    known |= {
        f"{name}.{member}"
        for name in known
        if inspect.isclass(find(name))
        for member in documented_members(find(name))
    }
    for page in SOURCE.rglob("*.md"):
        target = folder / page.relative_to(SOURCE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(render_page(page, known), encoding="utf-8")
    shutil.copytree(DOCS / "images", folder / "images")
    with open(folder / "index.md", "a", encoding="utf-8") as index:
        for title, pages in pages_of(yaml.safe_load((SOURCE / "_toctree.yml").read_text(encoding="utf-8"))):
            entries = "\n".join(f"{name} <{local}>" for name, local in pages if local != "index")
            index.write(f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n")


def build(output: Path) -> int:
    """Writes the site to `output`; zero if there was no warning."""
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as folder:
        pages, state = Path(folder, "pages"), Path(folder, "state")
        pages.mkdir()
        prepare(pages)
        options = ["--fail-on-warning", "--keep-going", "--quiet", "--fresh-env"]
        return build_main(["-b", "html", "-c", str(DOCS), "-d", str(state), *options, str(pages), str(output)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output_dir", type=Path, default=DOCS.parent / "outputs" / "docs", help="Folder of the site."
    )
    parser.add_argument(
        "--notebook", action="store_true", help="Write examples/quick_tour.ipynb instead, from the page."
    )
    options = parser.parse_args()
    if options.notebook:
        write_notebook()
        sys.exit()
    folder = options.output_dir
    shutil.rmtree(folder, ignore_errors=True)
    status = build(folder)
    print(f"{folder / 'index.html'}" if status == 0 else "The site has warnings, which are errors: see above.")
    sys.exit(status)
