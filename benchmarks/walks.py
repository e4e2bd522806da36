# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""How much code a reader meets: the size of the package, and the frames of five walks through it.

    python benchmarks/walks.py            # tables on standard output
    python benchmarks/walks.py --list loss  # the functions of one walk, in the order of their first call

A walk is run once, under `sys.setprofile`, with nothing cached but what importing and loading cache. Counted are the files and
functions of the package that it enters (wrappers, comprehensions and checks included), and the largest number of them on the stack
at once. The numbers are a thermometer: no test enforces them.
"""

import argparse
import ast
import contextlib
import io
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch


ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "examples" / "checkpoints" / "text8-absorbing"


def trace(call: Callable[[], object], package: Path) -> tuple[dict, int]:
    """The code objects of the package that `call` enters, in the order of their first call, and the depth of its stack."""
    prefix, entered, depth, deepest = f"{package}{os.sep}", {}, 0, 0

    def profile(frame, event, _):
        nonlocal depth, deepest
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(prefix):
            return
        depth += 1 if event == "call" else -1
        deepest = max(deepest, depth)
        entered.setdefault(frame.f_code)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered, deepest


def create_walks() -> dict[str, tuple[Callable[[], object], Path]]:
    """The walks by name: a function, and the folder of the package whose frames count."""
    import diffusers

    import d3pm_hf

    sys.path.insert(0, str(ROOT / "examples"))
    import train_text8 as script

    ours, theirs = Path(d3pm_hf.__file__).parent, Path(diffusers.__file__).parent
    pipeline = d3pm_hf.D3PMPipeline.from_pretrained(CHECKPOINT)
    pipeline.set_progress_bar_config(disable=True)
    scheduler, denoiser = pipeline.scheduler, pipeline.denoiser
    x_0 = torch.randint(0, 27, (2, 32), generator=torch.Generator().manual_seed(0))
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
    )
    ddpm = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())
    ddpm.set_progress_bar_config(disable=True)

    def loss():
        timesteps = torch.tensor([10, 900])
        x_t = scheduler.add_noise(x_0, timesteps)
        logits = denoiser(x_t, timesteps)
        d3pm_hf.d3pm_loss(scheduler, logits, x_0, x_t, timesteps).loss.mean().backward()

    return {
        "load": (lambda: d3pm_hf.D3PMPipeline.from_pretrained(CHECKPOINT), ours),
        "call": (lambda: pipeline(num_inference_steps=20), ours),
        "DDPMPipeline": (lambda: ddpm(num_inference_steps=20), theirs),
        "loss": (loss, ours),
        "bound": (lambda: d3pm_hf.evaluate_bound(scheduler, denoiser, [x_0], num_inference_steps=5), ours),
        "run": (lambda: train_text8(script.main), ours),
    }


def train_text8(main: Callable[[], object]) -> None:
    """Three steps of `examples/train_text8.py`, to a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog " * 400)
        options = [
            "--preset",
            "cpu",
            "--dataset_path",
            str(text),
            "--output_dir",
            f"{folder}/run",
            "--sequence_length",
            "32",
        ]
        options += ["--max_train_steps", "3", "--checkpointing_steps", "3", "--train_batch_size", "8"]
        argv, sys.argv = sys.argv, ["train_text8.py", *options]
        try:
            main()
        finally:
            sys.argv = argv


def package_figures(source: Path) -> dict[str, object]:
    """Figures of the source of the package, read without importing it."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    names = Counter(path.name for path in texts if not path.name.startswith("__"))
    importers = count_importers(source, trees)
    code = sum(count_code_lines(text) for text in texts.values())
    docstrings = [
        ast.get_docstring(node) or ""
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module))
    ]
    return {
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "files": len(texts),
        "modules with one importer": sum(count == 1 for count in importers.values()),
        "share of argument checks": f"{sum(map(count_check_lines, trees.values())) / code:.0%}",
        "file names that stand twice": sum(count > 1 for count in names.values()),
        "docstrings that lean on others": sum(bool(re.match("(The same|Those|As in|What)\\b", d)) for d in docstrings),
    }


def count_code_lines(text: str) -> int:
    """Lines that are neither blank nor a comment."""
    return sum(bool(re.match(r"\s*[^\s#]", line)) for line in text.splitlines())


def count_check_lines(tree: ast.Module) -> int:
    """Lines of calls of `check_...`, of functions of this name, and of `if` statements that only raise an error."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            counts = node.name.lstrip("_").startswith("check")
        elif isinstance(node, ast.If):
            counts = len(node.body) == 1 and isinstance(node.body[0], ast.Raise) and not node.orelse
        else:
            counts = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            counts = counts and ast.unparse(node.value.func).split(".")[-1].lstrip("_").startswith("check")
        if counts:
            lines.update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def count_importers(source: Path, trees: dict[Path, ast.Module]) -> dict[str, int]:
    """How many modules import each module of the package; packages do not count as modules."""
    modules = {}
    for path in trees:
        parts = path.relative_to(source.parent).with_suffix("").parts
        modules[path] = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    known, importers = set(modules.values()), Counter()
    for path, tree in trees.items():
        base = modules[path].split(".")
        package = base if path.name == "__init__.py" else base[:-1]
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                parents = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*parents, *([node.module] if node.module else [])])
                for name in node.names:
                    found.add(f"{module}.{name.name}" if f"{module}.{name.name}" in known else module)
            elif isinstance(node, ast.Import):
                found.update(name.name for name in node.names)
        importers.update(found & known - {modules[path]})
    plain = {name for path, name in modules.items() if path.name not in ("__init__.py", "__main__.py")}
    return {name: importers[name] for name in plain}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", metavar="WALK", help="Print the functions of one walk.")
    args = parser.parse_args()
    walks = create_walks()
    if args.list is not None:
        if args.list not in walks:
            parser.error(f"--list is {args.list!r}; expected one of {', '.join(walks)}")
        walks = {args.list: walks[args.list]}
    else:
        print("| figure | value |\n| --- | --- |")
        for name, value in package_figures(ROOT / "src" / "d3pm_hf").items():
            print(f"| {name} | {value} |")
        print("\n| walk | files | functions | depth |\n| --- | --- | --- | --- |")
    for name, (call, package) in walks.items():
        silence = contextlib.redirect_stdout(io.StringIO())
        with silence, contextlib.redirect_stderr(io.StringIO()):
            entered, depth = trace(call, package)
        if args.list is not None:
            for code in entered:
                print(f"{Path(code.co_filename).relative_to(package)}:{code.co_firstlineno} {code.co_qualname}")
            continue
        files = {code.co_filename for code in entered}
        print(f"| {name} | {len(files)} | {len(entered)} | {depth} |", flush=True)


if __name__ == "__main__":
    main()
