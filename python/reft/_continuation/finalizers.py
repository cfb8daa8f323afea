"""Finalizers (`weakref.finalize`) of a script: functions that are called once an object has gone.

A restarted script has made those of its first iteration. An object that came later is made without
its finalizer, so that is named; and what a resume discards of the restarted script's objects is no
death that the script knows of, so their finalizers are taken off.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from reft._state.own import is_own

from .hooks import is_own_hook
from .nodes import type_name

if TYPE_CHECKING:
    from .capture_walk import CaptureWalk

_LATER = "registered after the first step: it would not be called in a restarted script"
_MOST = 1 << 16

Held = list[tuple["weakref.finalize[..., Any]", Any]]


class Finalizers:
    """Those of one process."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._newest: Any = None
        self._later: list[Any] = []

    def note_first(self) -> None:
        """Notes which ones there are at the first program point."""
        self._seen, self._later = set(_registry()), []
        self._newest = _newest()

    def report(self, walk: CaptureWalk) -> None:
        """Reports those of the script that came later."""
        newest = _newest()
        if newest is not self._newest:
            self._newest = newest
            new = [one for one in list(_registry()) if one not in self._seen]
            self._seen = {one for one in self._seen if one.alive}.union(new)
            self._later += filter(_is_own, new)
        if self._later:
            self._later = [one for one in self._later if one.alive]
            alive = filter(None, [one.peek() for one in self._later])
            for kind in {type_name(type(value)) for value, *_ in alive}:
                walk.lost(f"finalizer of {kind}", "weakref.finalize", _LATER)


def held() -> Held:
    """The script's finalizers and, so that they live on, their objects."""
    alive = [(one, one.peek()) for one in list(_registry()) if _is_own(one)]
    return [(one, found[0]) for one, found in alive if found is not None]


def take_off_discarded(found: Held) -> None:
    """Takes off the finalizers of objects that nothing but `found` holds any more. Empties it."""
    if not found:
        return
    registry = _registry()
    away = {one: registry.pop(one) for one, _ in found if one in registry}
    found.clear()
    gc.collect()  # they may lie in cycles; what has no entry is not called
    registry.update({one: entry for one, entry in away.items() if entry.weakref() is not None})


def _registry() -> dict[Any, Any]:
    found: dict[Any, Any] = getattr(weakref.finalize, "_registry", {})
    return found if len(found) < _MOST else {}


def _newest() -> Any:
    return next(reversed(_registry()), None)


def _is_own(finalizer: Any) -> bool:
    found = finalizer.peek()
    if found is None:
        return False
    value, function, *_ = found
    return is_own_hook(function) or is_own(type(value).__module__)
