"""Objects of the script's own classes, and what belongs to somebody else.

Objects that have an owner (optimizers, process groups, files, threads, classes, weights that an
optimizer updates) are never copied: the restarted script has its own.

Threads: the training thread. Errors: none; what cannot be put back is reported to the walk.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .. import attachments, foreign, hooks
from ..nodes import KEEP, MISSING, At, Named, Node, kind, type_name

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

# A `with` block's object and what else an expression in progress holds: the restarted script stands
# in the same expression.
_OFF_THE_STACK = re.compile(r"<stack|\.__self__|<partial>|<\w+>\[")
_COMMUNICATE = frozenset({"ProcessGroup", "DeviceMesh"})


@kind
class Pending(Node):
    """An object whose capture has begun and not ended: a cycle leads back to it."""

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        return KEEP


@kind
class Lost(Node):
    """An object that could not be captured; it has been reported."""

    reason: str

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        return KEEP


@kind
class Owned(Node):
    """An object that is not copied: the restarted script has its own."""

    attributes: Named
    """Values that the script has attached to it."""
    hooks: Named | None
    """States of an optimizer's hooks; None for anything but an optimizer."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        return OWNED

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        for candidate in (walk.born(at.birth), live):
            if candidate is not MISSING and type_name(type(candidate)) == at.type_name:
                walk.stands(at, candidate)
                walk.put_attributes(self.attributes, candidate, at.place)
                if self.hooks is not None:
                    walk.put_hooks(self.hooks, hooks.of_optimizer(candidate), at.place)
                return candidate
        return walk.problem(at, "made after the first step")

    def needs_live(self, type_name: str) -> bool:
        return True


OWNED = Owned([], None)
PENDING = Pending()


def capture_foreign(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures an object of torch, NumPy or the standard library.

    The restarted script has made its own, as it was at the first program point: one that has
    changed since is captured as an object of the script's own if its attributes are all there is to
    it, else reported. One that did not live then stands for another one, unless it can be captured.
    """
    if walk.note_births:
        walk.births.pin(value, place)
    if foreign.is_open(type(value)):
        return capture_changed(value, place, depth, walk)
    if walk.note_births:
        if foreign.is_observed(type(value)):
            walk.births.looks[place] = foreign.Fingerprint(value)
        return _left_with_attributes(value, place, depth, walk)
    if foreign.is_silent(type(value)):
        return walk.lost(place, type_name(type(value)), "nothing can be read of its state")
    if walk.births.place(value) is not None:
        first = walk.births.looks.get(place)
        if first is not None and first != foreign.Fingerprint(value):
            why = "has changed since the first step, and its state cannot be restored"
            return walk.lost(place, type_name(type(value)), why)
        return _left_with_attributes(value, place, depth, walk)
    if walk.is_outside or _OFF_THE_STACK.search(place):
        return OWNED
    name = type(value).__name__
    if name in _COMMUNICATE and value is not sys.modules["torch"].distributed.group.WORLD:
        walk.refuse(f"{place}: a {name} that was made after the first step")
    why = "refers to another object than after the first step, of a kind that reft does not copy"
    return walk.lost(place, type_name(type(value)), why)


def _left_with_attributes(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Leaves an object of a package to the restarted script, but for what was attached to it."""
    attached = encode_attached(value, place, depth, walk)
    return Owned(attached, None) if attached else OWNED


def encode_attached(value: Any, place: str, depth: int, walk: CaptureWalk) -> Named:
    """Encodes what a script has attached to an object of the standard library."""
    root = type(value).__module__.partition(".")[0]
    if root not in sys.stdlib_module_names or type(getattr(value, "__dict__", None)) is not dict:
        return []
    return walk.encode_named(attachments.attributes(value, frozenset({root})), place, depth)


def capture_changed(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures an object of a package's plain class, unless it is as at the first program point."""
    if walk.note_births:
        look = foreign.Fingerprint(value)
        if look.is_whole:
            walk.births.looks[place] = look
        Instance.capture(value, place, depth, walk)  # notes where its parts stand
        return OWNED
    first = walk.births.looks.get(place)
    if (
        first is not None
        and walk.births.place(value) is not None
        and first == foreign.Fingerprint(value)
    ):
        return OWNED
    return Instance.capture(value, place, depth, walk)


def capture_stream(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures a stream of a device: what it writes is copied behind it."""
    walk.device_parts.written_by(value)
    return capture_foreign(value, place, depth, walk)


def capture_unknown(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Reports an object whose state this package cannot read."""
    if hasattr(value, "__next__"):
        why = "iterator of unknown kind"
    elif hasattr(value, "__anext__"):
        why = "asynchronous generator: use a `for` loop over a plain one"
    else:
        why = "unknown type"
    return walk.lost(place, type_name(type(value)), why)


@kind
class Instance(Node):
    """An object of a class that is written in Python."""

    attributes: Named
    slots: Named

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        own = list(getattr(value, "__dict__", {}).items())
        attributes = walk.encode_named(own, place, depth)
        return cls(attributes, encode_slots(value, place, depth, walk))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        plain = walk.is_made_anew(at.index)
        target = walk.container(at, live) if plain else walk.target(at, live)
        made = target is MISSING
        if made:
            found = walk.type_of(at, live)
            if found is None:
                return walk.problem(at, "class not found")
            target = found() if found is SimpleNamespace else object.__new__(found)
        walk.stands(at, target)
        before = dict(getattr(target, "__dict__", {}))
        after: dict[str, Any] = {}
        for name, item in self.attributes:
            current = before.get(name, MISSING)
            value = item
            if type(item) is tuple:
                value = walk.resolve(item, current, f"{at.place}.{name}")
            if value is KEEP:
                if current is MISSING:
                    if made:  # half an object is worse than none
                        return walk.problem(at, f"made after the first step, and so was its {name}")
                    walk.problem(at, "made after the first step", f"{at.place}.{name}")
                    continue
                value = current
            after[name] = value

        def write() -> None:
            for name in before:
                if name not in after:
                    target.__dict__.pop(name, None)
            if after:
                target.__dict__.update(after)

        writes = [write]
        for name, item in self.slots:
            value = walk.resolve(item, getattr(target, name, MISSING), f"{at.place}.{name}")
            if value is not KEEP:
                writes.append(functools.partial(object.__setattr__, target, name, value))
        filled = {name for name, _ in self.slots}
        for name in foreign.slot_names(type(target)):
            if name not in filled and hasattr(target, name):  # deleted
                writes.append(functools.partial(object.__delattr__, target, name))
        if made:
            # Nobody has seen it yet. It may be a key, whose hash is made of its attributes.
            for action in writes:
                action()
        else:
            walk.contents += writes
        return target

    def is_made_anew(self) -> bool:
        return True

    def parts(self) -> list[Any]:
        return [item for _, item in (*self.attributes, *self.slots)]


@kind
class Event(Node):
    """A `threading.Event`: whoever waits for it is the restarted script's."""

    is_set: bool
    attributes: Named

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        attached = encode_attached(value, place, depth, walk)
        return OWNED if walk.note_births else cls(value.is_set(), attached)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        target = threading.Event() if target is MISSING else target
        walk.contents.append(target.set if self.is_set else target.clear)
        walk.put_attributes(self.attributes, target, at.place)
        return target


def encode_slots(value: Any, place: str, depth: int, walk: CaptureWalk) -> Named:
    """Encodes what an object keeps in `__slots__`."""
    names = foreign.slot_names(type(value))
    filled = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return walk.encode_named(filled, place, depth)
