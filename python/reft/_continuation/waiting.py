"""What the main thread does while another thread trains. A restart puts the loop of the training
thread back, and no other: so the main thread may wait for it, and nothing else.

It is known to have gone on if a variable of the script's frames on its stack means another object.
Where it stands is not compared: it may look now and then whether the other thread lives.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from reft._state.own import is_own

from .bytecode import CO_OPTIMIZED, analyse, global_names
from .nodes import ATOMS, UNBOUND, native

_MOST_VARIABLES = 256
_GOES_ON = "the main thread goes on while another thread trains"

Held = tuple[str, Any]  # a variable, and what it means: an atom, a weak reference or an id


class Waiting:
    """The main thread as it was at the first program point, or at the first snapshot after it: it
    may still be on its way to where it waits."""

    def __init__(self) -> None:
        self._thread = weakref.ref(threading.current_thread())
        self._held: list[Held] | None = None
        self._looks = 0
        self._why: str | None = None

    def why_not(self) -> str | None:
        """Says why the place of the loop that trains is not all of the script's place; None if it
        is. Once it is not, it stays so."""
        if self._why is not None:
            return self._why
        here, main = threading.current_thread(), threading.main_thread()
        if here is not self._thread():
            self._why = "training runs in another thread than in the first iteration"
        elif here is not main:
            self._why = self._moved(main)
        return self._why

    def _moved(self, main: threading.Thread) -> str | None:
        frame = sys._current_frames().get(main.ident or 0)
        now = list(_variables(frame))
        before, self._held = self._held, now
        self._looks += 1
        if self._looks <= 2 or before is None:  # noqa: PLR2004
            return None
        for (name, then), (other, there) in zip(before, now, strict=False):
            if name != other or not _is_same(then, there):
                return f"{_GOES_ON} ({other})"
        return _GOES_ON if len(before) != len(now) else None


def _is_same(then: Any, now: Any) -> bool:
    if then is now:  # an object that lives has one weak reference
        return True
    return type(then) is type(now) and not isinstance(then, weakref.ref) and bool(then == now)


def _variables(frame: FrameType | None) -> Iterator[Held]:
    left = _MOST_VARIABLES
    while frame is not None and left > 0:
        if is_own(str(frame.f_globals.get("__name__", ""))):
            for name, value in _of_frame(frame):
                yield f"{frame.f_code.co_qualname}:{name}", _held(value)
                left -= 1
        frame = frame.f_back


def _of_frame(frame: FrameType) -> list[tuple[str, Any]]:
    """The variables that the frame's own code alone sets: those that functions share with it may be
    set by the thread that trains."""
    code = frame.f_code
    if code.co_flags & CO_OPTIMIZED:
        analysis = analyse(code)
        slots = native().frame_slots(frame, analysis.slot_count, UNBOUND)
        return [
            (name, value)
            for name, value in zip(analysis.slot_names, slots, strict=False)
            if name not in analysis.cells and value is not UNBOUND
        ]
    _, shared = global_names(code)
    names, namespace = sorted({*code.co_names} - shared), frame.f_globals
    return [(name, namespace[name]) for name in names if name in namespace]


def _held(value: Any) -> Any:
    if type(value) in ATOMS:
        return value
    try:
        return weakref.ref(value)
    except TypeError:
        return id(value)
