# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Lookup of classes by name among those that the running program has imported."""

from typing import TypeVar


Base = TypeVar("Base")


def subclasses(base: type[Base]) -> list[type[Base]]:
    """Returns `base` and all classes that derive from it, directly or indirectly, in the order of their definition."""
    found = [base]
    for cls in found:
        found += type.__subclasses__(cls)
    return list(dict.fromkeys(found))


def find_subclass(base: type[Base], name: str, module: str | None = None) -> type[Base] | None:
    """Returns the class called `name` among [`subclasses`], or `None`.

    If there are several, a class from `module` is preferred, then the one defined last: a cell of a notebook that is run
    again defines its class again.
    """
    found = None
    for cls in subclasses(base):
        if cls.__name__ == name and (found is None or cls.__module__ == module or found.__module__ != module):
            found = cls
    return found
