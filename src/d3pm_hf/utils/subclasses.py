# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Classes by name, among those that the running program has imported."""


def subclasses(base: type) -> list[type]:
    """`base` and all classes that derive from it, directly or not, in the order of their definition."""
    found = [base]
    for cls in found:
        found += [derived for derived in type.__subclasses__(cls) if derived not in found]
    return found


def find_subclass(base: type, name: str, module: str | None = None) -> type | None:
    """The class called `name` among [`subclasses`], or `None`.

    Of several classes of that name the one from `module` is preferred, then the last one, as when a notebook's cell has
    been run again.
    """
    named = [cls for cls in subclasses(base) if cls.__name__ == name]
    return ([cls for cls in named if cls.__module__ == module] or named or [None])[-1]
