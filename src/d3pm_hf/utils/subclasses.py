# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Classes by name, among those that the running program has imported."""


def subclasses(base: type) -> list[type]:
    """`base` and all classes that derive from it, directly or not, in the order of their definition."""
    found: list[type] = [base]
    for cls in found:
        derived: list[type] = type.__subclasses__(cls)
        found += [one for one in derived if one not in found]
    return found


def find_subclass(base: type, name: str, module: str | None = None) -> type | None:
    """The class called `name` among [`subclasses`], or `None`.

    Of several classes of that name the one from `module` is preferred, then the last one, as when a notebook's cell has
    been run again.
    """
    named = [cls for cls in subclasses(base) if cls.__name__ == name]
    preferred = [cls for cls in named if cls.__module__ == module] or named
    return preferred[-1] if preferred else None
