"""Explicit resume: named values that a script saves along with its tensors.

Threads: the training thread. Errors: `ValueError` for a name that `Resumed` reserves.
"""

from __future__ import annotations

from typing import Any

from reft._state import registry

NAME = "reft.resume"


class Resumed:
    """Named values as attributes; a step's snapshot saves their values at the end of the step."""

    def __init__(self) -> None:
        self.__dict__: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the values for the snapshot."""
        return dict(self.__dict__)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Sets the values from the snapshot."""
        self.__dict__.update(values)

    def __repr__(self) -> str:
        return f"Resumed({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


def resume(defaults: dict[str, Any], saved: dict[str, Any]) -> Resumed:
    """See :func:`reft.resume`.

    Args:
        defaults: Values for names that the snapshot does not have.
        saved: Registered state in the snapshot to resume from, by name; empty without one.
    """
    for name in defaults:
        if name.startswith("_") or hasattr(Resumed, name):
            raise ValueError(
                f"name is {name}; allowed: names without a leading underscore, other than state_dict and load_state_dict"
            )
    state = registry.objects.get(NAME)
    if not isinstance(state, Resumed):
        state = Resumed()
        registry.register(NAME, state)
    before = saved.get(NAME, {})
    for name, value in defaults.items():
        if name not in state.__dict__:
            state.__dict__[name] = before.get(name, value)
    return state
