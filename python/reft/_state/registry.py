"""Objects that scripts register by name: state that no optimizer or module leads to."""

from __future__ import annotations

from typing import Any

objects: dict[str, Any] = {}
generation = 0  # moves whenever `objects` changes, so that the plan is made anew


def register(name: str, obj: Any) -> None:
    """See :func:`reft.register`."""
    global generation
    if not name:
        raise ValueError("name is empty; allowed: any text that is the same on every run")
    objects[name] = obj
    generation += 1
