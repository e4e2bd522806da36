# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Faster forms of what a class defines, and the rule that says which subclasses may use them."""

from collections.abc import Mapping
from typing import ClassVar


class HasShortcuts:
    """A class with shortcuts: attributes that are faster forms of what other attributes define.

    A shortcut holds for the class that declares it and for subclasses that leave everything which it was derived from as it is. A
    subclass that overrides any of that gets the plain definition, which is the attribute of the next class in its method
    resolution order, until it defines the attribute itself.

    Attributes:
        shortcuts: Shortcuts of this class by name, each with the names of the methods that it was derived from.

    Examples:
        ```python
        from d3pm_hf.utils.shortcuts import HasShortcuts


        class Shape(HasShortcuts):
            def sides(self):
                return [3, 4, 5]

            def length(self):
                return sum(self.sides())


        class Square(Shape):
            shortcuts = {"length": ("sides",)}

            def sides(self):
                return [2, 2, 2, 2]

            def length(self):
                return 4 * self.sides()[0]


        class Rectangle(Square):
            def sides(self):
                return [2, 3, 2, 3]


        assert Rectangle().length() == 10
        ```
    """

    shortcuts: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    _dropped: ClassVar[frozenset[str]] = (
        frozenset()
    )  # the shortcuts in whose place this class has the plain definition

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        declared: list[Mapping[str, tuple[str, ...]]] = [vars(base).get("shortcuts", {}) for base in order]
        dropped: list[frozenset[str]] = [vars(base).get("_dropped", frozenset()) for base in order]

        def places(name: str) -> list[int]:
            return [place for place, base in enumerate(order) if name in vars(base)]

        def defined(name: str) -> int:
            """The first place with a definition of its own: a shortcut is another form of one, and so is what replaces it."""
            own = (place for place in places(name) if name not in declared[place] and name not in dropped[place])
            return next(own, len(order))

        plain = {}
        for name in {name for names in declared for name in names}:
            found = places(name)
            # The last one holds in any case: it is the definition itself.
            holds = (p for p in found[:-1] if all(defined(source) >= p for source in declared[p].get(name, ())))
            place = next(holds, found[-1])
            if place != found[0]:
                plain[name] = vars(order[place])[name]
        cls._dropped = frozenset(plain)
        for name, definition in plain.items():
            setattr(cls, name, definition)
