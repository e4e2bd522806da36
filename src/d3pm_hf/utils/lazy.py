# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Packages that import their public names when these are first used (PEP 562), as those of transformers and diffusers do."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec


def lazy_names(package: str, modules: Mapping[str, list[str]]) -> tuple[Callable, Callable]:
    """Returns `__getattr__` and `__dir__` of a package.

    Args:
        package (`str`): Name of the package.
        modules (`Mapping`): The names that the package takes from each module. Its own modules begin with a dot.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def get_name(name: str):
        if name in places:
            value = getattr(import_module(places[name], package), name)
        elif name.isidentifier() and not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return get_name, lambda: sorted({*vars(sys.modules[package]), *places})
