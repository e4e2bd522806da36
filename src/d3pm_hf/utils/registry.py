# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Tables of classes and functions by name, which users extend."""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from .checks import check_str, describe


Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry], Generic[Entry]):
    """Entries by name, in the order of their registration.

    A user's entry is replaced when its name is registered again, as when a cell of a notebook is run a second time. The
    names of this package are reserved for it.

    Args:
        kind (`str`): What an entry is, for errors.
        decorator (`str`): Name of the function that registers an entry, for errors.
        reserved (`tuple[str, ...]`, defaults to `()`): Further names that cannot be registered.
    """

    def __init__(self, kind: str, decorator: str, reserved: tuple[str, ...] = ()):
        self.kind, self.decorator, self.reserved = kind, decorator, reserved
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, entry: Entry) -> Entry:
        """Registers `entry` under `name`, and returns it."""
        check_str("name", name)
        is_ours = name in self.reserved or (name in self._entries and is_built_in(self._entries[name]))
        if is_ours and not is_built_in(entry):
            raise ValueError(f"the {self.kind} {name!r} is part of the package: register yours under another name")
        self._entries[name] = entry
        return entry

    def find(self, argument: str, name: str | None) -> Entry:
        """The entry registered as `name`, which is the value of the given argument."""
        if not isinstance(name, str) or name not in self._entries:
            raise ValueError(
                f"{argument} is {describe(name)}: it must be one of {', '.join((*self.reserved, *self._entries))}; register "
                f"your own with `{self.decorator}` before it is used or loaded"
            )
        return self._entries[name]

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def is_built_in(entry) -> bool:
    """Whether a class or function is part of this package."""
    return getattr(entry, "__module__", "").split(".")[0] == __name__.split(".")[0]
