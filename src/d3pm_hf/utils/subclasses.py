# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Lookup of classes by name among those that the running program has imported."""


def subclasses(base: type) -> list[type]:
    """Returns `base` and all classes that derive from it, directly or indirectly, in the order of their definition."""
    found: list[type] = [base]
    for cls in found:
        derived: list[type] = type.__subclasses__(cls)
        found += [one for one in derived if one not in found]
    return found


def find_subclass(base: type, name: str, module: str | None = None) -> type | None:
    """Returns the class called `name` among [`subclasses`], or `None`.

    If there are several, a class from `module` is preferred, then the one defined last: a cell of a notebook that is run
    again defines its class again.
    """
    named = [cls for cls in subclasses(base) if cls.__name__ == name]
    preferred = [cls for cls in named if cls.__module__ == module] or named
    return preferred[-1] if preferred else None
