"""Files that a loop reads, buffers in memory, queues and futures.

Threads: the training thread. Errors: none; what cannot be put back is reported to the walk.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from ..nodes import MISSING, At, Node, kind, type_name
from .objects import OWNED
from .temporaries import capture_without_name, has_no_name

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk


@kind
class File(Node):
    """The position in a file that is open for reading."""

    is_live_only = True
    is_position = True
    position: int
    name: str

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if value.closed:
            return OWNED
        writable = value.writable()
        if writable and has_no_name(value):
            return capture_without_name(value, place, walk)
        if walk.note_births:
            return OWNED
        name = type_name(type(value))
        if writable and walk.births.place(value) is None:
            why = "opened for writing after the first step: a restarted script has another one open"
            return walk.lost(place, name, why)
        if not value.readable():
            return OWNED
        if not value.seekable():
            why = "not seekable, so its position cannot be restored"
            return OWNED if writable else walk.lost(place, name, why)
        try:
            position = value.tell()
        except OSError:  # of text that a `for` loop reads
            why = "file that a `for` loop reads: use readline(), or list(file)"
            return walk.lost(place, name, why)
        memory = getattr(value, "buffer", None)
        if type(memory) is io.BytesIO:
            contents = memory.getvalue()
            if not walk.take(len(contents)):
                return walk.no_room(value, place, len(contents))
            return TextInMemory(contents, position)
        if writable:
            why = "read and written, and not at its end: open it for reading, or for writing, alone"
            return OWNED if _is_at_end(value, position) else walk.lost(place, name, why)
        return cls(position, str(getattr(value, "name", "")))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING or target.closed or str(getattr(target, "name", "")) != self.name:
            return walk.problem(at, f"file {self.name} was opened after the first step")
        walk.positions.append(lambda: target.seek(self.position))
        return target


def _is_at_end(file: Any, position: int) -> bool:
    """Whether a file that may be written is where its next write makes it longer, as a log is."""
    try:
        size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError):  # in memory
        return position == 0
    return size <= position < _IN_TEXT  # more than the size: not flushed yet


_IN_TEXT = 1 << 64  # positions in text that is decoded in part, and not yet read, begin here


@kind
class TextInMemory(Node):
    """A TextIOWrapper over a BytesIO."""

    is_live_only = True
    is_position = True
    data: bytes
    position: int

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING or target.closed or type(target.buffer) is not io.BytesIO:
            return walk.problem(at, "text in memory that was made after the first step")

        def write() -> None:
            target.seek(0)  # also forgets what is decoded
            target.buffer.truncate(0)
            target.buffer.write(self.data)
            target.seek(self.position)

        walk.positions.append(write)
        return target


@kind
class Buffer(Node):
    """A BytesIO or StringIO."""

    data: Any
    position: int

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if value.closed:
            return OWNED
        contents = value.getvalue()
        if not walk.take(len(contents)):
            return walk.no_room(value, place, len(contents))
        return cls(contents, value.tell())

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING or target.closed:
            target = io.BytesIO() if at.type_name == "_io.BytesIO" else io.StringIO()

        def write() -> None:
            target.seek(0)
            target.truncate()
            target.write(self.data)
            target.seek(self.position)

        walk.contents.append(write)
        return target


def capture_queue(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Leaves an empty queue alone and reports any other one."""
    if not walk.note_births and not value.empty():
        why = "the items of a queue are not restored; use a list or deque"
        return walk.lost(place, type_name(type(value)), why)
    return OWNED


def capture_future(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Reports a future: what another thread computes cannot be captured."""
    if walk.note_births:
        return OWNED
    why = "keeps the result that the restarted script computes in another thread"
    return walk.lost(place, type_name(type(value)), why)
