"""Lists, tuples, dicts, sets and buffers of bytes.

Threads: the training thread. Errors: none; what cannot be put back is reported to the walk.
"""

from __future__ import annotations

import array
import sys
from collections import OrderedDict, defaultdict, deque
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..as_they_are import items_of, length_of
from ..births import MEMBER
from ..handles import LEAST_IDENTITY
from ..nodes import (
    ATOMS,
    KEEP,
    MISSING,
    At,
    Named,
    Node,
    identity_in,
    index_of,
    kind,
    name_of_key,
    native,
    plain_key,
    type_name,
)
from .objects import OWNED

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

_INDISTINCT = frozenset({int, str, bytes, bool, type(None)})
NUMBERS = frozenset({int, float, bool, type(None)})
_HOLDS_A_LATER = "holds an object made after the first step"
_FIXED_HASH = {int, float, bool, complex} | (
    {str, bytes} if not sys.flags.hash_randomization else set()
)


@kind
class List(Node):
    """A list, or an object of a class that extends it."""

    items: list[Any]
    attributes: Named

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        size = 8 * length_of(value)
        if not walk.take(size):
            return walk.no_room(value, place, size)
        return cls(walk.encode_all(value, place, depth), walk.attributes(value, place, depth))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.container(at, live)
        is_new = target is MISSING
        if is_new:
            target = walk.made(at, list, live)
            if target is MISSING:
                return walk.problem(at, "its class is not found")
        walk.stands(at, target)
        there = items_of(live) if isinstance(live, list) else []
        items = walk.children(self.items, there, at.place)
        if items is None:
            return walk.problem(at, _HOLDS_A_LATER)
        if is_new:
            list.extend(target, items)  # it may be a dataset, whose length its loader asks for
        walk.contents.append(lambda: list.__setitem__(target, slice(None), items))
        walk.put_all_attributes(self.attributes, target, at.place)
        return target

    def is_made_anew(self) -> bool:
        return True

    def parts(self) -> list[Any]:
        return [*self.items, *(item for _, item in self.attributes)]


@kind
class Deque(Node):
    """A `collections.deque`."""

    items: list[Any]
    maxlen: int | None

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        size = 8 * length_of(value)
        if not walk.take(size):
            return walk.no_room(value, place, size)
        return cls(walk.encode_all(value, place, depth), value.maxlen)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.container(at, live)
        if target is not MISSING and target.maxlen != self.maxlen:
            target = MISSING
        if target is MISSING:
            if at.type_name != "collections.deque":
                return walk.came_later(at)
            target = deque(maxlen=self.maxlen)
        walk.stands(at, target)
        there = [] if target is MISSING else list(items_of(target))
        if not there and isinstance(live, deque):
            there = list(items_of(live))
        items = walk.children(self.items, there, at.place)
        if items is None:
            return walk.problem(at, _HOLDS_A_LATER)
        walk.contents.append(target.clear)
        walk.contents.append(lambda: target.extend(items))
        return target

    def is_made_anew(self) -> bool:
        return True

    def parts(self) -> list[Any]:
        return self.items


@kind
class Tuple(Node):
    """A tuple, a named tuple, or what C functions return in their place."""

    items: list[Any]
    attributes: Named

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        size = 8 * length_of(value)
        if not walk.take(size):
            return walk.no_room(value, place, size)
        attributes = [] if type(value) is tuple else walk.attributes(value, place, depth)
        return cls(walk.encode_all(value, place, depth), attributes)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        there = list(items_of(live)) if isinstance(live, tuple) else []
        items = walk.children(self.items, there, at.place)
        if items is None:
            return walk.problem(at, _HOLDS_A_LATER)
        if at.type_name == "builtins.tuple":
            return tuple(items)
        found = walk.type_of(at, live)
        if found is None or not issubclass(found, tuple):
            return walk.problem(at, "class not found")
        try:
            made = tuple.__new__(found, items)  # the class's own may want other arguments
        except TypeError:
            made = found(items)  # of C
        walk.stands(at, made)
        walk.put_attributes(self.attributes, made, at.place)
        return made

    def is_made_anew(self) -> bool:
        return True

    def parts(self) -> list[Any]:
        return [*self.items, *(item for _, item in self.attributes)]


def _is_of_module(namespace: dict[str, Any]) -> bool:
    """Whether it is that of an imported module, not one that `exec` or `runpy` has run in."""
    module = sys.modules.get(str(dict.get(namespace, "__name__")))
    return isinstance(module, ModuleType) and module.__dict__ is namespace


@kind
class Mapping(Node):
    """A dict, or an object of a class that extends it."""

    items: list[tuple[Any, Any]]
    attributes: Named
    factory: Any
    """Makes the missing items of a defaultdict."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        size = dict.__len__(value)  # of the class itself: the script's own may count its calls
        has = dict.__contains__
        is_globals = has(value, "__builtins__") and has(value, "__name__")
        if (is_globals and _is_of_module(value)) or id(value) in walk.owned_groups:
            return OWNED
        if not walk.take(16 * size):
            return walk.no_room(value, place, 16 * size)
        below = depth + 1
        # As it is, whatever its class yields. The order of an OrderedDict is not its dict's.
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        items = [
            (
                key
                if type(key) in ATOMS and type(key) is not int
                else encode_key(key, f"{place}<key {i}>", depth, walk),
                item
                if type(item) in NUMBERS and (type(item) is not int or item < LEAST_IDENTITY)
                else walk.encode(item, f"{place}[{name_of_key(key, i)}]", below),
            )
            for i, (key, item) in enumerate(list(base.items(value)))
            # `exec` has put it into a namespace of the script's.
            if type(key) is not str or key != "__builtins__"
        ]
        if walk.note_births:
            walk.births.note_first_items(dict(base.items(value)), place)
        attributes = walk.attributes(value, place, depth)
        factory = value.default_factory if isinstance(value, defaultdict) else None
        if factory is not None:
            factory = walk.encode(factory, f"{place}<factory>", below)
        return cls(items, attributes, factory)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        place = at.place
        target: Any = walk.container(at, live)
        is_made = target is MISSING
        if is_made:
            target = walk.made(at, dict, live)
            if target is MISSING:
                return walk.problem(at, "its class is not found")
        walk.stands(at, target)  # first: its factory may be a method of its own
        if is_made and isinstance(target, defaultdict) and self.factory is not None:
            before: Any = live.default_factory if isinstance(live, defaultdict) else MISSING
            factory = walk.resolve(self.factory, before, f"{place}<factory>")
            if factory is KEEP and before in (MISSING, None):
                return walk.problem(at, "its default_factory was made after the first step")
            target.default_factory = before if factory is KEEP else factory
        is_alive = dict.__len__(target) or not isinstance(live, dict)
        there: dict[Any, Any] = dict(dict.items(target if is_alive else live))
        keys = list(there)
        pairs: list[tuple[Any, Any]] = []  # in a dict, keys that are not back yet may be equal
        for position, (encoded, item) in enumerate(self.items):
            key = live_key(encoded, keys, position, place, walk)
            if key is KEEP:
                return walk.problem(at, "one of its keys was made after the first step")
            current = there.get(key, MISSING)
            name = name_of_key(key, position)
            value = item
            if type(item) is tuple or walk.resized is not None:
                value = walk.resolve(item, current, f"{place}[{name}]")
            if value is KEEP:
                if current is MISSING:
                    return walk.problem(at, f"item {name} was made after the first step")
                value = current
            pairs.append((key, value))

        base: Any = OrderedDict if isinstance(target, OrderedDict) else dict

        def write() -> None:
            base.clear(target)
            for key, value in pairs:
                base.__setitem__(target, key, value)

        def write_changed() -> None:
            # Its iterators count entries that were deleted, which a new dict has not.
            if not _are_same(list(base.items(target)), pairs):
                write()

        if not is_made:
            walk.contents.append(write_changed)
        else:
            write()  # at once: nothing refers to it yet, and an iterator of it needs its items
            if not all(plain_key(key) for key, _ in pairs):
                walk.contents.append(write)  # its keys have their hashes when they are back
        walk.put_all_attributes(self.attributes, target, place)
        return target

    def is_made_anew(self) -> bool:
        return True

    def parts(self) -> list[Any]:
        keys = [tuple(key) for key, _ in self.items if type(key) is list]
        values = (item for _, item in self.items)
        return [*keys, *values, *(item for _, item in self.attributes)]


def _are_same(there: list[tuple[Any, Any]], saved: list[tuple[Any, Any]]) -> bool:
    """Whether these are the same objects in the same order, or equal ones that nothing can tell
    apart."""
    return len(there) == len(saved) and all(
        a is b or (type(a) is type(b) and type(a) in _INDISTINCT and a == b)
        for pair, other in zip(there, saved, strict=True)
        for a, b in zip(pair, other, strict=True)
    )


@kind
class Set(Node):
    """A set or a frozenset."""

    members: list[Any]
    attributes: Named
    layout: Any
    """Order in which it yields its members, where their hashes are the same in each process."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        items = items_of(value)
        if not walk.take(16 * len(items)):
            return walk.no_room(value, place, 16 * len(items))
        members = [encode_key(item, place + MEMBER, depth, walk) for item in items]
        layout = native().set_layout(value) if all(map(_has_fixed_hash, items)) else None
        return cls(members, walk.attributes(value, place, depth), layout)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        items = [
            live_key(item, [], position, at.place, walk)
            for position, item in enumerate(self.members)
        ]
        if any(item is KEEP for item in items):
            return walk.problem(at, _HOLDS_A_LATER)
        layout = self.layout
        if at.type_name == "builtins.frozenset":
            frozen = frozenset(items)
            if layout is not None:
                walk.contents.append(lambda: native().set_put_layout(frozen, list(items), *layout))
            return frozen
        target = walk.container(at, live)
        if target is MISSING:
            target = walk.made(at, set, live)
            if target is MISSING:
                return walk.problem(at, "its class is not found")
        # Not the class's own methods: they may look at what is not there yet.
        walk.contents.append(lambda: set.clear(target))
        walk.contents.append(lambda: set.update(target, items))
        if layout is not None:
            walk.contents.append(lambda: native().set_put_layout(target, list(items), *layout))
        walk.put_all_attributes(self.attributes, target, at.place)
        return target

    def is_made_anew(self) -> bool:
        return True

    def parts(self) -> list[Any]:
        keys = (tuple(key) for key in self.members if type(key) is list)
        return [*keys, *(item for _, item in self.attributes)]


@kind
class ByteArray(Node):
    """A bytearray."""

    data: bytes

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if not walk.take(len(value)):
            return walk.no_room(value, place, len(value))
        if value and not walk.note_births:
            walk.note_buffer(value, place)
        return cls(bytes(value))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.container(at, live)
        if target is MISSING:
            return bytearray(self.data)
        walk.contents.append(lambda: target.__setitem__(slice(None), self.data))
        return target

    def is_made_anew(self) -> bool:
        return True


@kind
class Numbers(Node):
    """An `array.array`."""

    typecode: str
    data: bytes

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        size = len(value) * value.itemsize
        if not walk.take(size):
            return walk.no_room(value, place, size)
        return cls(value.typecode, value.tobytes())

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        saved = array.array(self.typecode, self.data)
        target = walk.container(at, live)
        if target is MISSING or target.typecode != self.typecode:
            return saved
        walk.contents.append(lambda: target.__setitem__(slice(None), saved))
        return target

    def is_made_anew(self) -> bool:
        return True


@kind
class MemoryView(Node):
    """A memoryview of a whole buffer."""

    buffer: Any
    format: str
    shape: Any
    is_readonly: bool

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if walk.note_births:
            return OWNED
        if not value.c_contiguous or value.nbytes != memoryview(value.obj).nbytes:
            return walk.lost(place, type_name(type(value)), "view of a part of a buffer")
        buffer = walk.encode(value.obj, f"{place}.obj", depth + 1)
        return cls(buffer, value.format, value.shape, value.readonly)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        same = isinstance(live, memoryview)
        buffer = walk.resolve(self.buffer, live.obj if same else MISSING, f"{at.place}.obj")
        if buffer is KEEP:
            return KEEP if same else walk.problem(at, "its buffer was made after the first step")
        if same and live.obj is buffer:
            return live
        view = memoryview(buffer)
        view = view.toreadonly() if self.is_readonly else view
        if (view.format, view.shape) == (self.format, self.shape):
            return view
        return view.cast("B").cast(self.format, self.shape)  # type: ignore[call-overload]


def encode_key(key: Any, place: str, depth: int, walk: CaptureWalk) -> Any:
    """Encodes a key or member: a plain one as itself, else a list, which no key can be."""
    if type(key) is int:
        found = walk.identity_of(key) if key >= LEAST_IDENTITY else None
        return key if found is None else list(found)
    if plain_key(key) and not _has_identity(key, walk):
        return key
    return list(walk.encode(key, place, depth + 1))


def _has_identity(key: Any, walk: CaptureWalk) -> bool:
    """Whether a tuple, or one in it, has what `id` gave."""
    if type(key) is tuple:
        return any(_has_identity(part, walk) for part in key)
    return type(key) is int and key >= LEAST_IDENTITY and walk.identity_of(key) is not None


def live_key(key: Any, there: list[Any], position: int, place: str, walk: RestoreWalk) -> Any:
    """Returns the live key of a dict's or set's item; KEEP if it cannot be found."""
    if type(key) is not list:
        return key
    if identity_in(tuple(key)) is not None:
        return walk.resolve(tuple(key), MISSING, f"{place}<key>")
    index = index_of(tuple(key))
    if index is None:
        return KEEP
    candidate = there[position] if position < len(there) else MISSING
    if candidate is not MISSING and type_name(type(candidate)) != walk.graph.types[index]:
        candidate = MISSING
    return walk.resolve(tuple(key), candidate, f"{place}<key>")


def _has_fixed_hash(member: Any) -> bool:
    """Whether an object has the same hash in every process."""
    found = type(member)
    return found in _FIXED_HASH or (found is tuple and all(map(_has_fixed_hash, member)))
