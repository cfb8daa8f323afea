"""Holders of a value: context variables, variables of a thread, numbers that processes
share.

Threads: the training thread, whose context and variables these are. Errors: none; what cannot be put
back is reported to the walk.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from ..nodes import KEEP, MISSING, At, Named, Node, kind
from .objects import OWNED

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

_NUMBERS = frozenset("bBhHiIlLqQfdc?")
"""Codes of ctypes' types whose bytes mean the same in each process: no addresses."""


@kind
class ContextValue(Node):
    """A `contextvars.ContextVar` that has a value in this context."""

    value: Any

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if walk.note_births:
            walk.births.pin(value, place)
        there = value.get(MISSING)
        return OWNED if there is MISSING else cls(walk.encode(there, f"{place}.get()", depth + 1))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING:
            return walk.problem(at, "made after the first step")
        there = target.get(MISSING)
        value = walk.resolve(self.value, there, f"{at.place}.get()")
        if value is not KEEP and value is not there:
            walk.contents.append(functools.partial(target.set, value))
        return target

    def needs_live(self, type_name: str) -> bool:
        return True


@kind
class ThreadLocal(Node):
    """A `threading.local`, as the training thread sees it."""

    attributes: Named

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        return cls(walk.attributes(value, place, depth))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING:
            return walk.problem(at, "made after the first step")
        walk.stands(at, target)
        walk.put_all_attributes(self.attributes, target, at.place)
        return target

    def needs_live(self, type_name: str) -> bool:
        return True


@kind
class SharedNumbers(Node):
    """Numbers in memory that processes share (`multiprocessing.Value` and `Array`), or of ctypes."""

    data: bytes

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if walk.note_births:
            walk.births.pin(value, place)
        room = _room(value)
        if room is None:
            return OWNED
        if not walk.take(room.nbytes):
            return walk.no_room(value, place, room.nbytes)
        return cls(room.tobytes())

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        room = None if target is MISSING else _room(target)
        if room is None or room.nbytes != len(self.data):
            return walk.problem(at, "made after the first step")
        walk.contents.append(functools.partial(room.__setitem__, slice(None), self.data))
        return target

    def needs_live(self, type_name: str) -> bool:
        return True


def _room(value: Any) -> memoryview | None:
    """The memory of some numbers; None if there may be addresses in it."""
    held = value.get_obj() if hasattr(value, "get_obj") else value
    code = getattr(getattr(held, "_type_", None), "_type_", getattr(held, "_type_", None))
    if not isinstance(held, (ctypes._SimpleCData, ctypes.Array)) or code not in _NUMBERS:
        return None
    return memoryview(held).cast("B")


def is_shared_numbers(kind: type) -> bool:
    """Whether a class is one of `multiprocessing`'s for numbers, or of ctypes."""
    if kind.__module__ == "multiprocessing.sharedctypes":
        return hasattr(kind, "get_obj")
    return issubclass(kind, (ctypes._SimpleCData, ctypes.Array))
