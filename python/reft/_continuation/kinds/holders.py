"""Holders of a value: context variables and the contexts that `copy_context` makes, variables of a
thread, contexts of decimal numbers, numbers that processes share.

Threads: the training thread, whose context and variables these are. Errors: none; what cannot be put
back is reported to the walk.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import re
from typing import TYPE_CHECKING, Any

from ..nodes import KEEP, MISSING, At, Named, Node, kind, type_name
from .objects import OWNED

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

_NUMBERS = frozenset("bBhHiIlLqQfdc?")
"""Codes of ctypes' types whose bytes mean the same in each process: no addresses."""
_OF_DECIMALS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
_CURRENT_DECIMALS = "decimal_context"  # as Python's own variable is called
_ON_THE_STACK = re.compile(r"<stack \d+>.*")


@kind
class ContextValue(Node):
    """A `contextvars.ContextVar` that has a value in this context."""

    is_live_only = True
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
            return walk.came_later(at)
        there = target.get(MISSING)
        value = walk.resolve(self.value, there, f"{at.place}.get()")
        if value is not KEEP and value is not there:
            walk.contents.append(functools.partial(target.set, value))
        return target


@kind
class Context(Node):
    """A `contextvars.Context`: each variable that has a value in it, and the value."""

    values: list[tuple[Any, Any]]
    is_whole: bool
    """Whether these are all values; a package may have some that cannot be read."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        found: list[tuple[Any, Any]] = []
        is_whole = True
        for variable, there in list(value.items()):  # in an order of this process
            where = f"{place}[{variable.name}]"
            if type(there).__name__ != "PyCapsule":
                named = variable.name
                if named != _CURRENT_DECIMALS:
                    named = walk.encode(variable, f"{where}<variable>", depth + 1)
                found.append((named, walk.encode(there, where, depth + 1)))
                continue
            is_whole = False  # as NumPy's, for how it treats errors
            if walk.note_births:
                walk.births.pin(there, where)
            elif walk.births.place(there) is None:
                walk.lost(where, type_name(type(there)), "nothing can be read of its state")
        return cls(found, is_whole)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING:
            if not self.is_whole:
                return walk.came_later(at)
            target = contextvars.Context()
        walk.stands(at, target)
        known = set()
        for named, item in self.values:
            if named == _CURRENT_DECIMALS:
                variable = _of_decimals()
            else:
                variable = walk.resolve(named, MISSING, f"{at.place}<variable>")
            if variable is KEEP:
                continue  # it is reported
            known.add(variable)
            there = target.get(variable, MISSING)
            value = walk.resolve(item, there, f"{at.place}[{variable.name}]")
            if value is not KEEP and value is not there:
                walk.contents.append(functools.partial(_set_in, target, variable, value))
        for variable, there in target.items():
            if variable not in known and type(there).__name__ != "PyCapsule":
                walk.problem(at, "had no value", f"{at.place}[{variable.name}]")
        return target

    def needs_live(self, type_name: str) -> bool:
        return not self.is_whole


def _of_decimals() -> contextvars.ContextVar[Any]:
    _decimals().getcontext()  # gives the variable a value
    return next(one for one in contextvars.copy_context() if one.name == _CURRENT_DECIMALS)


def _set_in(
    context: contextvars.Context, variable: contextvars.ContextVar[Any], value: Any
) -> None:
    try:
        context.run(variable.set, value)
    except RuntimeError:  # the training runs in it
        token = variable.set(value)
        if context.get(variable, MISSING) is not value:
            variable.reset(token)
            raise


@kind
class DecimalContext(Node):
    """A `decimal.Context`: precision and the like, signals that were raised, and traps."""

    settings: list[Any]
    flags: list[str]
    traps: list[str]

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if walk.note_births:
            walk.births.pin(value, place)
        settings = [getattr(value, name) for name in _OF_DECIMALS]
        flags, traps = (
            [one.__name__ for one in kept if kept[one]] for kept in _signals(value)
        )
        return cls(settings, flags, traps)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING:
            target = _decimals().Context()

        def write() -> None:
            for name, value in zip(_OF_DECIMALS, self.settings, strict=True):
                setattr(target, name, value)
            for kept, names in zip(_signals(target), (self.flags, self.traps), strict=True):
                for one in kept:
                    kept[one] = one.__name__ in names

        walk.contents.append(write)
        return target

    def is_made_anew(self) -> bool:
        return True


def _decimals() -> Any:
    import decimal

    return decimal


def _signals(context: Any) -> tuple[Any, Any]:
    return context.flags, context.traps


def capture_block(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures `decimal.localcontext()`, which holds the context that its block puts back at its
    end and shows nothing of it. That of a block in which the first program point lay, too, is the
    restarted script's own."""
    if walk.note_births:
        walk.births.pin(value, place)
    if walk.note_births or walk.births.place(value) is not None:
        return OWNED
    why = "the context that comes back at its end is not restored"
    where = _ON_THE_STACK.sub("", place)
    return walk.lost(f"the `with localcontext()` block in {where}", type_name(type(value)), why)


@kind
class ThreadLocal(Node):
    """A `threading.local`, as the training thread sees it."""

    is_live_only = True
    attributes: Named

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        return cls(walk.attributes(value, place, depth))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING:
            return walk.came_later(at)
        walk.stands(at, target)
        walk.put_all_attributes(self.attributes, target, at.place)
        return target


@kind
class SharedNumbers(Node):
    """Numbers in memory that processes share (`multiprocessing.Value` and `Array`), or of ctypes."""

    is_live_only = True
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
            return walk.came_later(at)
        walk.contents.append(functools.partial(room.__setitem__, slice(None), self.data))
        return target


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
