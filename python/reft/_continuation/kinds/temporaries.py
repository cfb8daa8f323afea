"""Temporary files and directories (`tempfile`). A restarted script has made others of other names:
what a script keeps of a name is put back where that still exists, else the new name stays.

Threads: the training thread. Errors: none; what cannot be put back is reported to the walk.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ..nodes import LATER, MISSING, At, Node, kind, type_name
from .objects import OWNED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

_WRITTEN = "a temporary file: what was written or read since the first step is not restored"
_OF_FILE = ".<file>"  # ends the places of names of files


@kind
class TemporaryDirectory(Node):
    """A `tempfile.TemporaryDirectory`."""

    is_live_only = True
    name: str

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if walk.note_births:
            walk.births.pin(value, place)
            walk.births.note_first(value.name, f"{place}.name")
            return OWNED
        if walk.births.place(value) is None:
            return walk.lost(place, type_name(type(value)), LATER)
        return cls(str(value.name))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING:
            return walk.came_later(at)
        if target.name == self.name or walk.moved.knows(self.name):
            return target
        if not os.path.isdir(self.name):
            return walk.problem(at, f"{self.name} is gone")
        walk.contents.append(partial(_give_directory, target, self.name))
        return target


def _give_directory(target: Any, name: str) -> None:
    """Has a temporary directory be the one of the process before."""
    target.name = name
    # The finalizer of the restarted script's own directory stays, too: files there may be open.
    _, clean_up, (_, *more), options = target._finalizer.peek()
    target._finalizer = weakref.finalize(target, clean_up, name, *more, **options)


def capture_file(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures what `NamedTemporaryFile` returns: one that is as it was at the first point."""
    if walk.note_births:
        walk.births.note_first(value.name, f"{place}{_OF_FILE}")
    return capture_without_name(value, place, walk)


def capture_without_name(value: Any, place: str, walk: CaptureWalk) -> Node:
    """Captures a temporary file, which goes with the process."""
    if walk.note_births:
        walk.births.pin(value, place)
        walk.births.files[place] = _state_of(value)
        return OWNED
    if value.closed:
        return OWNED
    born = walk.births.place(value)
    if born is None:
        return walk.lost(place, type_name(type(value)), LATER)
    first = walk.births.files.get(born)
    if first is not None and first == _state_of(value):
        return OWNED
    return walk.lost(place, type_name(type(value)), _WRITTEN)


def has_no_name(file: Any) -> bool:
    """Whether an open file is in no directory."""
    try:
        return os.fstat(file.fileno()).st_nlink == 0
    except (OSError, ValueError):  # in memory, or closed
        return False


def _state_of(file: Any) -> tuple[int, ...] | None:
    """Of an open file: bytes, time of the last write, position; None if it has none of these."""
    try:
        position = int(file.tell())  # which writes what is in the buffer of a text
        status = os.fstat(file.fileno())
        return status.st_size, status.st_mtime_ns, position
    except (OSError, ValueError):
        return None


@kind
class Spooled(Node):
    """A `SpooledTemporaryFile`: the buffer in memory, or the file, behind it."""

    is_live_only = True
    inner: Any

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if walk.note_births:
            walk.births.pin(value, place)
        return cls(walk.encode(value._file, f"{place}._file", depth + 1))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING:
            return walk.came_later(at)
        walk.stands(at, target)
        walk.resolve(self.inner, target._file, f"{at.place}._file")
        return target


class Moved:
    """Temporary places of the process before that are gone, and those that the restarted script has
    instead.

    Args:
        before: numbers and strings by place, of the first program point of that process.
        now: of this one.

    Attributes:
        gone: (place, reason) of each.
    """

    def __init__(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        self._root = os.path.join(tempfile.gettempdir(), "")
        self.gone: list[tuple[str, str]] = []
        self._instead: dict[str, str] = {}
        for place, old in before.items():
            there, here = self._top(old), self._top(now.get(place))
            if there == here or not there or not here or there in self._instead:
                continue
            # A file stays with the object that has it open; what was in it is reported by that.
            is_file = place.endswith(_OF_FILE)
            if os.path.exists(here) and (is_file or not os.path.lexists(there)):
                self._instead[there] = here
                why = f"{there} is gone: the restarted script's {here} stays, as it is"
                self.gone += [] if is_file else [(place, why)]

    def __bool__(self) -> bool:
        return bool(self._instead)

    def knows(self, path: str) -> bool:
        """Whether there is something instead of a path."""
        return self._top(path) in self._instead

    def _top(self, value: Any) -> str:
        """What lies in the directory of temporary files and holds a path; "" if nothing does."""
        if type(value) is not str or not value.startswith(self._root):
            return ""
        return self._root + value[len(self._root) :].partition(os.sep)[0]

    def __call__(self, value: Any) -> Any:
        """A value of builtin types, with the paths of this process."""
        if type(value) is str:
            instead = self._instead.get(self._top(value))
            return value if instead is None else instead + value[len(self._top(value)) :]
        if type(value) in (list, tuple):
            return type(value)(map(self, value))
        if type(value) is dict:
            return {self(key): self(item) for key, item in value.items()}
        return value

    def path(self, value: Any) -> Any:
        """Likewise of a path object; anything else as it is."""
        is_moved = bool(self) and isinstance(value, PurePath)
        return type(value)(self(str(value))) if is_moved else value
