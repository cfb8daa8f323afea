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
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .. import attachments, foreign, hooks
from ..nodes import KEEP, LATER, MISSING, At, Named, Node, Report, kind, type_name

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

# A `with` block's object and what else an expression in progress holds: the restarted script stands
# in the same expression.
_ATTACHED_TO = ("torch.amp.", "torch.autograd.", "torch.profiler.", "torch.utils.")
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

    is_live_only = True
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
        return walk.came_later(at)


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
    """Encodes what a script has attached to an object of the standard library, or to one of torch's
    for a `with` block or a profile, to which torch attaches nothing from outside."""
    module = type(value).__module__
    root = module.partition(".")[0]
    is_known = root in sys.stdlib_module_names or module.startswith(_ATTACHED_TO)
    if not is_known or type(getattr(value, "__dict__", None)) is not dict:
        return []
    attached = attachments.attributes(value, frozenset({root}))
    return walk.encode_attached(attached, value, place, depth)


def encode_hooks(found: hooks.Hooks, place: str, depth: int, walk: CaptureWalk) -> Named:
    """Encodes what hooks keep."""
    encoded = walk.encode_named(found, place, depth)
    if walk.note_births:
        for name, hook in found:
            # PowerSGD's state takes no weak reference.
            walk.births.pin(hook, f"{place}.{name}")
    return encoded


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
    shared: str
    """Attribute of the class that is the `__dict__` of all its objects (the Borg pattern), or ""."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        own = getattr(value, "__dict__", {})
        attributes = walk.encode_named(list(own.items()), place, depth)
        kind = type(value)
        shared = [name for name in _dicts_of(kind) if getattr(kind, name, None) is own]
        slots = encode_slots(value, place, depth, walk)
        return cls(attributes, slots, shared[0] if shared else "")

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        plain = walk.is_made_anew(at.index)
        target = walk.container(at, live) if plain else walk.target(at, live)
        made = target is MISSING
        if made:
            found = walk.type_of(at, live)
            if found is None:
                return walk.problem(at, "class not found")
            target = found() if found is SimpleNamespace else object.__new__(found)
            if self.shared and type(getattr(found, self.shared, None)) is dict:
                target.__dict__ = getattr(found, self.shared)
        walk.stands(at, target)
        before = dict(getattr(target, "__dict__", {}))
        after: dict[str, Any] = {}
        left_out: Named = []
        reports: Report = []
        for name, item in self.attributes:
            current, known = before.get(name, MISSING), len(walk.problems)
            value = item
            if type(item) is tuple or walk.resized is not None:
                value = walk.resolve(item, current, f"{at.place}.{name}")
            if value is KEEP:
                if current is MISSING:
                    if made:
                        left_out.append((name, item))
                        reports += walk.problems[known:]
                        del walk.problems[known:]
                    else:
                        walk.problem(at, "made after the first step", f"{at.place}.{name}")
                    continue
                value = current
            after[name] = value
        if left_out:
            if not _completed(target, after, left_out, at, walk):
                walk.problems += reports
                return walk.stays_half(at, left_out[0][0])
            after = dict(target.__dict__)

        def write() -> None:
            for name in before:
                if name not in after:
                    target.__dict__.pop(name, None)
            if after:
                target.__dict__.update(after)

        writes = [write]
        for name, item in self.slots:
            there, known = getattr(target, name, MISSING), len(walk.problems)
            value = walk.resolve(item, there, f"{at.place}.{name}")
            if value is not KEEP:
                writes.append(functools.partial(object.__setattr__, target, name, value))
            elif there is MISSING and len(walk.problems) == known:
                walk.problem(at, LATER, f"{at.place}.{name}")
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


def _completed(
    target: Any, attributes: dict[str, Any], left_out: Named, at: At, walk: RestoreWalk
) -> bool:
    """Lets a new object make what of it cannot be copied, as its class does for a pickle.

    A metric wraps its methods when it is made, and does so again in `__setstate__`.

    Returns:
        Whether the object has all of its attributes now.
    """
    if getattr(type(target), "__setstate__", None) is None:
        return False
    try:
        target.__setstate__(dict(attributes))
        there = target.__dict__
        whole = all(there.get(name, MISSING) is value for name, value in attributes.items())
    except Exception:  # the class expects another state
        return False
    return whole and all(
        name in there
        and walk.resolve_again(item, there[name], f"{at.place}.{name}") is there[name]
        for name, item in left_out
    )


def _dict_names(kind: type) -> tuple[str, ...]:
    return tuple(
        name for base in kind.__mro__ for name, item in vars(base).items() if type(item) is dict
    )


_dicts_of: Callable[[type], tuple[str, ...]] = functools.cache(_dict_names)
"""Names of a class's attributes that are dicts."""


def encode_slots(value: Any, place: str, depth: int, walk: CaptureWalk) -> Named:
    """Encodes what an object keeps in `__slots__`."""
    names = foreign.slot_names(type(value))
    if not names:
        return []
    filled = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return walk.encode_named(filled, place, depth)
