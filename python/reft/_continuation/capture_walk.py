"""Walks the live objects of a capture and copies them into a graph of nodes.

One object is one node, so aliases stay aliases and cycles end. The walk keeps the budget of bytes,
and the report of what cannot be captured. What is done with one object is the business of its kind
(`kinds`).

Threads: the training thread. Errors: none; what cannot be captured is reported, not raised.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from types import ModuleType
from typing import Any

from reft._state.device_parts import DeviceParts
from reft._state.own import is_made

from . import handles
from .as_they_are import items_of, length_of
from .births import MEMBER, Births
from .bulk import Bulk
from .foreign import is_object_array, is_open, slot_names
from .handles import LEAST_IDENTITY
from .kinds.functions import STATEFUL_STDLIB
from .kinds.objects import OWNED, PENDING, Lost, Owned, capture_changed, encode_slots
from .kinds.table import Rule, rule_of
from .kinds.tensors import Array, Tensor
from .nodes import (
    ATOMS,
    KEEP,
    LATER,
    MISSING,
    UNBOUND,
    Graph,
    Named,
    Node,
    Report,
    handle,
    identity,
    index_of,
    ref,
    type_name,
)

_MAX_DEPTH = 24
_MAX_NODES = 50_000
_MAX_REPORTS = 200
_LARGE = 64  # items of a container, from which on it is left out as a whole where it has no room
_LEAST_SHARE = 8  # of what there is room for: what is left out has at least this part of it
_SMALL_ITEMS = 256  # lists and dicts of a dataset up to this are always looked at
_MOST_BUFFERS = 64
_APART = "shares its memory with a tensor or an array, which a resume restores as a separate copy"
_NUMBERS = frozenset({int, float, bool, type(None)})
_STILL = frozenset({float, bool, complex, type(None)})  # as they are, and of no size
_BASES: tuple[Any, ...] = (list, dict, tuple, set, frozenset, deque)
_COUNTED = frozenset(_BASES)
_CONTAINERS = (*_BASES, bytearray)
_BARE = frozenset(_CONTAINERS)  # without attributes

CaptureGenerator = Callable[["CaptureWalk", Any, str], Any]


class _NoRoom(BaseException):
    """Something in a large container has no room: the container is left out, so that what comes
    after it has. No `Exception`, which the capture of an object may swallow."""


class CaptureWalk:
    """Copies objects into nodes.

    Args:
        limit_bytes: Most bytes to copy in all; what does not fit is reported.
        births: Where objects stood at the first program point.
        capture_generator: Encodes the frame of a suspended generator.
        owned: Ids of tensors that are saved elsewhere (parameters, optimizer state), and of the
            optimizers.
        owned_storages: Addresses of their memory.
        owned_groups: Ids of the parameter groups of these optimizers.
        note_births: Only note where objects stand: this is the first program point of the process.
        device_parts: Takes contents that lie on a device and are copied later.

    Attributes:
        graph: What has been captured.
        uncaptured: What could not be captured.
        assumed: What is taken for unchanged although a change of it may not be seen.
        refused: Why the place in the loop must not be put back; None if it can be.
        graphs: Tensors that were computed from others, each with its place.
        bytes_left: What is left of the limit.
        is_outside: Whether what is walked now is a dataset's, or stands outside of the frames.
    """

    rule_of = staticmethod(rule_of)

    def __init__(
        self,
        limit_bytes: int,
        births: Births,
        capture_generator: CaptureGenerator,
        owned: Iterable[int] = (),
        owned_storages: frozenset[int] = frozenset(),
        owned_groups: frozenset[int] = frozenset(),
        note_births: bool = False,
        device_parts: DeviceParts | None = None,
    ) -> None:
        self.graph = Graph()
        self.uncaptured: Report = []
        self.assumed: Report = []
        self.refused: str | None = None
        # Places of models of the first program point that no optimizer trains any more, and of
        # those that one trains and that were made later.
        self.finished: list[str] = []
        self.successors: list[str] = []
        self.trained: dict[str, Any] = {}  # models of that point that an optimizer trains, by place
        self.graphs: list[tuple[Any, str]] = []
        self._buffers: list[tuple[int, int, Any, str]] = []
        self.bytes_left = limit_bytes
        self._limit_bytes = limit_bytes
        self._large = 0  # containers of many items around what is walked now
        self.births = births
        self.owned = owned if isinstance(owned, (set, frozenset)) else frozenset(owned)
        self.owned_storages = owned_storages
        self.owned_groups = owned_groups
        self.note_births = note_births
        self.device_parts = device_parts or DeviceParts()
        self.is_outside = 0
        self._capture_generator = capture_generator
        self._handles = handles.now() if note_births else frozenset[int]()
        self._has_handles = note_births or bool(births.handles)
        # Numbers that may be handles; None: all of them.
        self._suspects = None if note_births else frozenset(births.handles.values())
        self._own: Collection[str] | None = None
        self._index: dict[int, int] = {}
        # Of each node; an id means something only while its object lives.
        self._objects: list[Any] = []
        self._places: dict[int, str] = {}  # of the nodes of the first program point
        self._alive: list[Any] = []

    def encode(self, value: Any, place: str, depth: int = 0) -> Any:
        """Encodes one value: an atom as itself, everything else as a reference to a node.

        Args:
            value: The value.
            place: Its name, for reports.
            depth: How many containers are around it.
        """
        kind = type(value)
        if kind in ATOMS:
            if self.note_births:
                self.births.note_first(value, place)
            if kind is int:
                if value >= LEAST_IDENTITY and (found := self.identity_of(value)) is not None:
                    return found
                # Not in containers: an item that is left alone cannot be told from one that has
                # been moved there.
                if self._has_handles and place[-1:] != "]" and self._is_handle(value, place):
                    return handle(value)
                return value
            if (kind is str or kind is bytes) and not self.take(len(value)):
                if self._large:
                    raise _NoRoom(self.too_big(len(value)))
                return self._give_up(value, place, self.too_big(len(value)))
            return value
        known = self._index.get(id(value))
        if known is not None:
            if self.note_births:
                self.births.stands(place, kind, self._places.get(known))
                if self.is_outside:  # a frame that reads it now need not read it later
                    self._moves(value, self._places[known])
            return ref(known)
        if (
            kind is tuple
            and self._has_handles
            and len(value) == 2
            and set(map(type, value)) == {int}
            and self._is_handle(value, place)
        ):
            return handle(value)  # what os.pipe() gives
        rule = rule_of(kind)
        graph = self.graph
        index = len(graph.nodes)
        if index >= _MAX_NODES or depth > _MAX_DEPTH:
            if index < _MAX_NODES:
                return self._give_up(value, place, "too deep")
            if self._large:
                raise _NoRoom("too many objects")
            if not hasattr(kind, "__next__") and not hasattr(kind, "__anext__"):
                return self._give_up(value, place, "too many objects")
            # Without it, the position of a loop would be missing and not be missed.
            graph.nodes.append(self.lost(place, type_name(kind), "too many objects"))
            graph.births.append(None)
            graph.types.append(type_name(kind))
            self._objects.append(value)
            return ref(index)
        graph.nodes.append(PENDING)
        graph.births.append(None)
        graph.types.append(type_name(kind))
        self._index[id(value)] = index
        self._objects.append(value)
        if self.note_births:
            self._places[index] = place
            self.births.stands(place, kind)
        if rule.is_born:
            if self.note_births:
                self.births.note(value, place)
            birth = self.births.place(value)
            if birth is not None:
                # Below an object that stood somewhere at the first point, places are the same
                # however it is reached now.
                graph.births[index] = place = birth
        try:
            if self.is_outside and not self._moves(value, place):
                node: Node = OWNED
            elif self.is_outside and self._is_outsider(kind, rule):
                node = self._outsider(value, place, depth)
            elif (count := _count_of(value, kind)) > _LARGE:
                node = self._capture_large(rule, value, count, place, depth)
            else:
                node = rule.capture(value, place, depth, self)
        except Exception as error:
            # A user's object may do anything when it is looked at. The others are still worth
            # having.
            why = f"cannot inspect it: {type(error).__name__}: {error}"
            node = self.lost(place, type_name(kind), why)
        graph.nodes[index] = node
        if depth and graph.births[index] is None and not self.note_births:
            self._foretell(node, place, kind)
        return ref(index)

    def _foretell(self, node: Node, place: str, kind: type) -> None:
        """Reports what came later, and in a place where a restarted script has no object that could
        stand for it. Variables have reports of their own, which know whether they are read, and
        what is left to the script is its own affair, or a tensor that is saved elsewhere."""
        if isinstance(node, Owned):
            return
        if node.needs_live(type_name(kind)) and not self.births.stood(place, kind):
            self.lost(place, type_name(kind), LATER)

    def _capture_large(self, rule: Rule, value: Any, count: int, place: str, depth: int) -> Node:
        """Captures a container of many items, all of it or nothing: without some of them it is
        worth nothing, and they would take the room of what comes after it."""
        name = type_name(type(value))
        known = self.births.too_large.get(place)
        if known is not None and count >= known[0]:
            return self.lost(place, name, known[1])  # not walked again in each step
        left, nodes, reports = self.bytes_left, len(self.graph.nodes), len(self.uncaptured)
        graphs, parts = len(self.graphs), self.device_parts.mark()
        self._large += 1
        try:
            return rule.capture(value, place, depth, self)
        except _NoRoom as error:
            enough = (
                len(self.graph.nodes) - nodes > _MAX_NODES // _LEAST_SHARE
                or left - self.bytes_left > self._limit_bytes // _LEAST_SHARE
            )
            if self._large > 1 and not enough:
                raise
            for lost in self._objects[nodes:]:
                self._index.pop(id(lost), None)
            for rows in (self.graph.nodes, self.graph.births, self.graph.types, self._objects):
                del rows[nodes:]
            del self.uncaptured[reports:], self.graphs[graphs:]
            self.device_parts.forget_since(parts)
            self.bytes_left = left
            why = f"has no room with its {count} items: {error}"
            self.births.too_large[place] = count, why
            return self.lost(place, name, why)
        finally:
            self._large -= 1

    def encode_standing(self, value: Any, place: str) -> Any:
        """As `encode`, for a variable of a frame on the path.

        Modules and classes that stood there at the first point are left alone: they stand there in
        the restarted process, too.
        """
        if (
            issubclass(type(value), (ModuleType, type))
            and not is_made(value)
            and not self.note_births
            and self.births.place(value) == place
        ):
            return KEEP
        return self.encode(value, place)

    def identity_of(self, value: int) -> Any:
        """Encodes what `id` or `hash` has given of an object that stood somewhere at the first
        point; None for any other number."""
        if self.note_births:
            return None
        place = self.births.place_of_identity(value)
        if place is not None:
            return identity(place, False)
        place = self.births.place_of_identity(value << 4)  # as `object.__hash__`
        return None if place is None else identity(place, True)

    def encode_all(self, values: Collection[Any], place: str, depth: int) -> list[Any]:
        """Encodes the items of a sequence."""
        if self.note_births and isinstance(values, (list, tuple)):
            self.births.note_first_items(values, place)
        if type(values) in (list, tuple) and (kinds := set(map(type, values))) <= _NUMBERS:
            items = list(values)
            if not _may_have_identities(items, kinds) and self.take(9 * len(items)):
                return items
        items = items_of(values)
        return [self.encode(value, f"{place}[{i}]", depth + 1) for i, value in enumerate(items)]

    def encode_named(self, items: Iterable[tuple[str, Any]], place: str, depth: int) -> Named:
        """Encodes attributes of the object at a place, by name."""
        suspects = self._suspects
        if self.note_births:
            items = list(items)
            for name, item in items:
                if type(item) in _STILL:
                    self.births.note_first(item, f"{place}.{name}")
        return [
            (
                name,
                item
                if (kind := type(item)) in _STILL
                or (
                    kind is int
                    and item < LEAST_IDENTITY
                    and suspects is not None
                    and item not in suspects
                )
                else self.encode(item, f"{place}.{name}", depth + 1),
            )
            for name, item in items
        ]

    def encode_attached(self, items: Named, value: Any, place: str, depth: int) -> Named:
        """As `encode_named`, of what a script has attached to an object of others; what was there
        at the first program point and is gone is unbound."""
        attached = self.births.attached
        if self.note_births and items:
            attached[place] = tuple(name for name, _ in items)
        found = self.encode_named(self.without_still(items, place), place, depth)
        if place in attached:
            there = value.__dict__
            found += [(name, UNBOUND) for name in attached[place] if name not in there]
        return found

    def without_still(self, items: Named, place: str) -> Named:
        """Leaves out the parameters that are large and have not changed since the first point, as
        a frozen weight that a script has attached to a layer."""
        return [
            (name, item)
            for name, item in items
            if type(item).__name__ != "Parameter" or self._moves(item, f"{place}.{name}")
        ]

    def attributes(self, value: Any, place: str, depth: int) -> Named:
        """Encodes all that a function, or a subclass of a container, keeps in its `__dict__` and
        `__slots__`."""
        if type(value) in _BARE:
            return []
        slots = encode_slots(value, place, depth, self) if slot_names(type(value)) else []
        found = getattr(value, "__dict__", None)
        if found is value:  # items that are attributes, too
            return [*slots, (MEMBER, True)]
        if not found:
            return slots
        return slots + self.encode_named(list(found.items()), place, depth)

    def capture_generator(self, generator: Any, place: str) -> Any:
        """Encodes the frame of a suspended generator."""
        return self._capture_generator(self, generator, place)

    def take(self, size: int) -> bool:
        """Takes bytes off the budget; False, and nothing taken, if it has not as many."""
        if size > self.bytes_left:
            return False
        self.bytes_left -= size
        return True

    @staticmethod
    def too_big(size: int) -> str:
        """Says that a value of `size` bytes is left out, and what would make room for it."""
        return f"{size} bytes exceed what is left of the limit REFT_RESUME_FRAME_BYTES"

    def no_room(self, value: Any, place: str, size: int) -> Lost:
        """Reports a value that is larger than the budget and makes its node."""
        if self._large:
            raise _NoRoom(self.too_big(size))
        return self.lost(place, type_name(type(value)), self.too_big(size))

    def lost(self, place: str, name: str, reason: str) -> Lost:
        """Reports a value that cannot be captured and makes its node."""
        if len(self.uncaptured) < _MAX_REPORTS:
            self.uncaptured.append((place, name, reason))
        elif len(self.uncaptured) == _MAX_REPORTS:
            self.uncaptured.append(("more values", "", "they are too many to be listed"))
        return Lost(reason)

    def refuse(self, reason: str) -> None:
        """Notes that the place in the loop must not be put back: training would be another one."""
        self.refused = self.refused or reason

    def refuse_second_models(self) -> None:
        """Refuses the place in the loop if another model is trained than at the first capture. A
        restarted script trains the first one when it is put back, and the other one's weights would
        go there."""
        if self.finished and self.successors:
            self.refuse(
                f"{self.successors[0]}: a model that was made after the first step is trained, and"
                " the one that was trained before is still held"
            )
        first = self.births.first_trained
        if not first:
            first.update({place: _shapes(model) for place, model in self.trained.items()})
            return
        gone = [shapes for place, shapes in first.items() if place not in self.trained]
        for place, model in self.trained.items():
            if gone and place not in first and _shapes(model) in gone:
                self.refuse(f"{place}: another model of the same shape was trained at first")

    def lost_position(self, encoded: Any) -> str | None:
        """Says why the position of an iterator could not be captured, if `encoded` is one."""
        index = index_of(encoded)
        if index is None:
            return None
        node, value = self.graph.nodes[index], self._objects[index]
        if not isinstance(node, Lost):
            return None
        return node.reason if hasattr(value, "__next__") or hasattr(value, "__anext__") else None

    def note_buffer(self, value: bytearray, place: str) -> None:
        """Notes where the bytes of a bytearray lie: a tensor or an array may lie there, too."""
        torch: Any = sys.modules.get("torch")
        if torch is not None and len(self._buffers) < _MOST_BUFFERS:
            low = torch.frombuffer(value, dtype=torch.uint8).data_ptr()
            self._buffers.append((low, low + len(value), self.births.place(value), place))

    def report_shared_buffers(self) -> None:
        """Reports bytearrays that share memory with a tensor or an array and will not any more:
        those that were there at the first program point share it as the restarted script's do."""
        if not self._buffers:
            return
        spans = [
            (node.span(), self.graph.births[index])
            for index, node in enumerate(self.graph.nodes)
            if isinstance(node, (Tensor, Array)) and node.has_memory()
        ]
        for low, high, birth, place in self._buffers:
            for span, other in spans:
                is_inside = span.device == "cpu" and span.low < high and low < span.high
                if is_inside and (birth is None or other is None):
                    self.lost(place, "bytearray", _APART)
                    break

    def keep_alive(self, value: Any) -> None:
        """Keeps an object that nothing else holds: its id must stay its own until the end."""
        self._alive.append(value)

    def is_owned(self, tensor: Any) -> bool:
        """Says whether a tensor is saved elsewhere."""
        return id(tensor) in self.owned or id(getattr(tensor, "_local_tensor", None)) in self.owned

    def is_switched(self, value: Any, place: str) -> bool:
        """Says whether a function or a class is another one than at the first program point.

        At that point it is noted.
        """
        if self.note_births:
            self.births.named[place] = value
            return False
        return self.births.named.get(place, MISSING) is not value

    @contextlib.contextmanager
    def outside(self, own: Collection[str]) -> Iterator[None]:
        """Within this, values stand outside of the frames.

        Lists, dicts and arrays that are large and have not changed are left out, as are objects of
        installed packages that have not: trackers, tokenizers, what a decorator attaches to a
        function.

        Args:
            own: Names of the script's own modules.
        """
        self.is_outside += 1
        self._own = own
        try:
            yield
        finally:
            self.is_outside -= 1
            self._own = None

    def encode_data(self, value: Any, place: str, depth: int) -> Any:
        """As `encode`, for a part of a dataset or sampler."""
        self.is_outside += 1
        try:
            return self.encode(value, place, depth)
        finally:
            self.is_outside -= 1

    def _is_outsider(self, kind: type, rule: Rule) -> bool:
        """Whether an object outside of the frames is an installed package's."""
        if self._own is None or not rule.is_outsider or hasattr(kind, "__next__"):
            return False
        root = kind.__module__.partition(".")[0]
        return kind.__module__ not in self._own and root not in STATEFUL_STDLIB

    def _outsider(self, value: Any, place: str, depth: int) -> Node:
        if not is_open(type(value)):
            return OWNED
        return capture_changed(value, place, depth, self)

    def _moves(self, item: Any, place: str) -> bool:
        """Whether a part of a dataset is copied.

        That is one that is no list, dict or array, or is small, or has changed since the first
        point.
        """
        # Contents of a mapped file are not copied; its kind reports what the script has written.
        if type(item).__name__ == "memmap":
            return True
        # Of the class: looking at an object's own attributes may run code of the script.
        nbytes = item.nbytes if hasattr(type(item), "nbytes") else None
        if nbytes is None and not isinstance(item, _CONTAINERS):
            return True
        if (length_of(item) if nbytes is None else nbytes // 8) <= _SMALL_ITEMS:
            return True
        if self.note_births:
            self.births.bulky[place] = Bulk(item)
            return False
        known = self.births.bulky.get(place)
        if known is None or known.has_changed(item):
            return True
        if known.missed and len(self.assumed) < _MAX_REPORTS:
            self.assumed.append((place, type_name(type(item)), known.missed))
        return False

    def _is_handle(self, value: Any, place: str) -> bool:
        """Whether a number, or a pair, was a handle of this process at the first program point."""
        if self.note_births:
            if handles.is_handle(value, self._handles):
                self.births.handles.setdefault(place, value)
            return False
        return bool(self.births.handles.get(place) == value)

    def _give_up(self, value: Any, place: str, reason: str) -> Any:
        self.lost(place, type_name(type(value)), reason)
        return KEEP


def _count_of(value: Any, kind: type) -> int:
    """How many items a container has that each may be an object, or be some; 0 for anything else."""
    if kind in _COUNTED:
        return len(value)
    if issubclass(kind, _BASES):
        return length_of(value)
    return int(value.size) if is_object_array(value) else 0


def _may_have_identities(items: list[Any], kinds: set[type]) -> bool:
    """Whether one of many numbers may be what `id` gave; `kinds`: their classes."""
    if kinds == {int}:
        return bool(max(items) >= LEAST_IDENTITY)
    return int in kinds and any(type(item) is int and item >= LEAST_IDENTITY for item in items)


def _shapes(model: Any) -> list[Any]:
    return [tuple(parameter.shape) for parameter in model.parameters()]
