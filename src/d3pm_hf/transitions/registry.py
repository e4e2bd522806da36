# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The table of transition families: what the scheduler, the model cards, `--help` and the docs know of each of them."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from ..utils.checks import check_str
from ..utils.registry import Registry, is_built_in
from .family import TransitionFamily


Family = TypeVar("Family", bound=type[TransitionFamily])

_families: Registry[type[TransitionFamily]] = Registry("transition", "register_transition")


def register_transition(name: str, description: str | None = None) -> Callable[[Family], Family]:
    """Class decorator that makes a family known as `D3PMScheduler(transition=name)`.

    ```python
    @register_transition("noisy_keyboard", "characters turn into those on adjacent keys")
    class KeyboardTransition(DenseTransition): ...
    ```

    Registering a name again replaces the family, as when a cell of a notebook is run a second time; the names of this
    package are reserved for it.

    Args:
        name (`str`): Name of the family, as it stands in `scheduler_config.json`.
        description (`str`, *optional*): What the process does to a token, for model cards and tables.
    """
    check_str("name", name)
    if description is not None:
        check_str("description", description)

    def register(family: Family) -> Family:
        if not (isinstance(family, type) and issubclass(family, TransitionFamily)):
            raise ValueError(
                f"register_transition got {family!r}: it must be a class that derives from `Transition` or "
                "`TransitionFamily`"
            )
        _families.add(name, family)
        family.name = name
        if description is not None:
            family.description = description
        return family

    return register


def transition_families() -> Mapping[str, type[TransitionFamily]]:
    """All registered families by name, in the order of their registration."""
    return _families


def get_family(name: str) -> type[TransitionFamily]:
    """The family registered as `name`."""
    return _families.find("transition", name)


def family_table() -> str:
    """The registered families of this package as a Markdown table, as it stands in the docs."""
    lines = ["| `transition` | what it does | `Q_t` | options | tensors |", "| --- | --- | --- | --- | --- |"]
    for name, family in _families.items():
        if is_built_in(family):
            shown = [f"`{name}`", family.description, f"`{family.formula}`"]
            shown += [
                ", ".join(f"`{option}`" for option in names) for names in (family.options, family.input_tensors())
            ]
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)
