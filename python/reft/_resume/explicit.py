"""The explicit form of resuming: named values that a script keeps beside its tensors.

Threads: the training thread. Errors: `ValueError` for a name that cannot be an attribute of its
    own.
"""

from __future__ import annotations

from typing import Any

from reft._state import registry

NAME = "reft.resume"


class Resumed:
    """Values by name, as attributes; what they are at the end of a step is saved with the step's snapshot."""

    def __init__(self) -> None:
        self.__dict__: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Gives the values, for the snapshot."""
        return dict(self.__dict__)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Takes the values of the snapshot."""
        self.__dict__.update(values)

    def __repr__(self) -> str:
        return f"Resumed({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


def resume(defaults: dict[str, Any], saved: dict[str, Any]) -> Resumed:
    """See :func:`reft.resume`.

    Args:
        defaults: Values for names that no snapshot has.
        saved: What the snapshot to resume from has registered, by name; empty if there is none.
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
