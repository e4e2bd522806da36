# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The architecture of the package, read from its source: imports go one way, without cycles."""

import ast
from pathlib import Path

import pytest


SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = "d3pm_hf"

# What each layer may import. A layer is a folder of the package, or a module beside them.
LAYERS = {
    # Checks of arguments, files and other small tools, which know nothing of diffusion.
    "utils": set(),
    # Exact draws and logarithms.
    "numerics": {"utils"},
    # How fast noise arrives.
    "schedules": {"utils", "numerics"},
    # Where noise leads: q(x_t | x_s), and the registry of families.
    "transitions": {"utils", "numerics", "schedules"},
    # The process as diffusers sees it.
    "schedulers": {"utils", "numerics", "schedules", "transitions"},
    # The machine room: what the layers above it define, faster.
    "kernels": {"utils", "numerics", "schedules", "transitions", "schedulers"},
    # The terms of the bound, over a scheduler.
    "losses": {"utils", "numerics", "schedules", "transitions", "schedulers", "kernels"},
    # Ways to walk from x_T to x_0.
    "samplers": {"utils", "numerics", "schedules", "transitions", "schedulers", "losses"},
    # Denoisers: they know nothing of schedulers.
    "models": {"utils", "numerics"},
    # Data sets and tokenizers: integers, whatever is done with them.
    "data": {"utils"},
    # Pictures of states.
    "visualization": {"utils"},
}
# The bound on a data set, out of its terms, and the likelihood of samplers. It reads the columns of batches as the data layer
# defines them.
LAYERS["likelihood"] = set(LAYERS) - {"kernels", "visualization"}
# Cards, upload and export describe everything but what is built on top of them.
LAYERS["hub"] = set(LAYERS)
# Components put together, loaded and saved: they sample, and do not measure.
LAYERS["pipelines"] = set(LAYERS) - {"losses", "likelihood"}
# Checkpoints of others as pipelines.
LAYERS["convert"] = set(LAYERS) - {"losses", "likelihood"}
# The three programs on top, which do not know of each other. The page samples, and does not measure.
LAYERS["training"] = LAYERS["evaluation"] = set(LAYERS) - {"convert"}
# Frames of pandas: a pipeline that is fitted, draws, and measures.
LAYERS["tables"] = LAYERS["training"] | {"training"}
LAYERS["app"] = LAYERS["training"] - {"losses", "likelihood"}


def read_modules(source: Path) -> dict[str, str]:
    """The text of each module of the package under `source`, by its dotted name; a package is its `__init__`."""
    modules = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return modules


def find_packages(modules: dict[str, str]) -> set[str]:
    """The names of the modules that contain others."""
    return {name.rpartition(".")[0] for name in modules} - {""}


def find_imports(modules: dict[str, str]) -> dict[str, set[str]]:
    """The modules of the package that each module imports, inside functions too."""
    packages = find_packages(modules)
    imports = {name: set() for name in modules}
    for name, text in modules.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module
                if node.level:
                    parents = name.split(".") if name in packages else name.split(".")[:-1]
                    parents = parents[: len(parents) - node.level + 1]
                    base = ".".join([*parents, node.module] if node.module else parents)
                # `from .losses import variational` imports a module, `from .losses import d3pm_loss` a name of one.
                names = (f"{base}.{alias.name}" for alias in node.names)
                targets = [target if target in modules else base for target in names]
            else:
                continue
            imports[name].update(target for target in targets if target in modules)
        imports[name].discard(name)
    return imports


def layer_of(module: str) -> str:
    """The folder or module right below the package, `""` for the package itself."""
    return module.split(".")[1] if "." in module else ""


def wrong_imports(imports: dict[str, set[str]]) -> list[str]:
    """The imports that go against `LAYERS`. The package itself imports all of them, and none of them the package."""
    return [
        f"{name} imports {target}"
        for name, targets in sorted(imports.items())
        for target in sorted(targets)
        if layer_of(name) and layer_of(target) not in {layer_of(name), *LAYERS.get(layer_of(name), ())}
    ]


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Modules each of which imports the next one, the last of which is the first; empty if there are none."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        for target in sorted(imports[name]):
            if cycle := visit(target):
                return cycle
        done.add(path.pop())
        return []

    return next((cycle for name in sorted(imports) if (cycle := visit(name))), [])


def questions_of_kind(modules: dict[str, str]) -> list[str]:
    """Where the code asks what kind of pipeline it has, which `pipeline.task` and methods of the pipeline answer."""
    found = []
    for name, text in modules.items():
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or len(node.args) < 2:
                continue
            function, subject, attribute = (ast.unparse(part) for part in (node.func, *node.args[:2]))
            names_network = attribute in ("'text_model'", "'unet'")
            of_pipeline = subject.split(".")[-1] == "pipeline"
            if function == "hasattr" and (of_pipeline or names_network) or function == "getattr" and names_network:
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.fixture(scope="module")
def modules():
    return read_modules(SOURCE)


def test_every_folder_and_module_is_a_layer(modules):
    assert {layer_of(name) for name in modules} == {"", *LAYERS}


def test_imports_go_one_way(modules):
    assert wrong_imports(find_imports(modules)) == []


def test_no_module_imports_itself_through_others(modules):
    assert find_cycle(find_imports(modules)) == []


def test_nothing_asks_what_kind_of_pipeline_it_has(modules):
    assert questions_of_kind(modules) == []


# Each check, on made-up packages that break it.


def test_modules_are_read_with_their_names(tmp_path):
    (tmp_path / PACKAGE / "losses").mkdir(parents=True)
    for path in ("__init__.py", "numerics.py", "losses/__init__.py", "losses/variational.py"):
        (tmp_path / PACKAGE / path).write_text(f"# {path}")
    names = ["d3pm_hf", "d3pm_hf.losses", "d3pm_hf.losses.variational", "d3pm_hf.numerics"]
    found = read_modules(tmp_path)
    assert sorted(found) == names and found["d3pm_hf.losses"] == "# losses/__init__.py"


@pytest.mark.parametrize(
    "text",
    [
        "from ..schedulers import D3PMScheduler",
        "from .. import schedulers",
        "import d3pm_hf.schedulers",
        "from d3pm_hf.schedulers import D3PMScheduler",
        "def build():\n    from ..schedulers import D3PMScheduler",
        "if TYPE_CHECKING:\n    from ..schedulers import D3PMScheduler",
    ],
)
def test_an_import_of_a_higher_layer_is_found(text):
    made_up = {"d3pm_hf": "", "d3pm_hf.schedulers": "", "d3pm_hf.models": "", "d3pm_hf.models.unet": text}
    assert wrong_imports(find_imports(made_up)) == ["d3pm_hf.models.unet imports d3pm_hf.schedulers"]


def test_imports_of_lower_layers_and_of_other_libraries_are_allowed():
    text = "import torch\nfrom ..numerics import categorical\nfrom ..utils.checks import check_int\nfrom .unet import normalize"
    names = (
        "d3pm_hf",
        "d3pm_hf.numerics",
        "d3pm_hf.utils",
        "d3pm_hf.utils.checks",
        "d3pm_hf.models",
        "d3pm_hf.models.unet",
    )
    imports = find_imports(dict.fromkeys(names, "") | {"d3pm_hf.models.denoisers": text})
    assert imports["d3pm_hf.models.denoisers"] == {"d3pm_hf.numerics", "d3pm_hf.utils.checks", "d3pm_hf.models.unet"}
    assert wrong_imports(imports) == []


def test_an_import_of_the_package_itself_is_found():
    made_up = {"d3pm_hf": "from .numerics import uniforms", "d3pm_hf.numerics": "from . import __version__"}
    assert wrong_imports(find_imports(made_up)) == ["d3pm_hf.numerics imports d3pm_hf"]


def test_a_cycle_is_found():
    imports = {"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"e"}, "e": {"b"}}
    assert find_cycle(imports) == ["b", "d", "e", "b"]
    assert find_cycle({**imports, "e": set()}) == []


def test_a_question_of_the_kind_of_pipeline_is_found():
    asked = "if hasattr(pipeline, 'tokenizer'):\n    pass\nhasattr(self, 'text_model')\ngetattr(self.pipeline, 'unet', None)"
    assert questions_of_kind({"a": asked}) == [
        "a:1: hasattr(pipeline, 'tokenizer')",
        "a:3: hasattr(self, 'text_model')",
        "a:4: getattr(self.pipeline, 'unet', None)",
    ]
    assert questions_of_kind({"a": "pipeline.task == 'text-generation'\nhasattr(config, 'vocab_size')"}) == []
