"""Where objects stood at the first program point of a process: names that the restarted process
shares with the one that was killed.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import pickle
import sys
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

from . import plain
from .as_they_are import items_of, length_of
from .bulk import Bulk, MappedArray
from .foreign import Fingerprint
from .nodes import name_of_key

MEMBER = "<member>"  # in places: below it, no place is a name
_MOST_ITEMS = 4096
_MOST_FIRST = 1 << 14  # numbers and strings of the first program point
_LONGEST_FIRST = 256
_LONGEST_BUFFER = 1 << 16
_LONGEST_PACKED = 1 << 24
_FEW = 64
FULL = ""
"""Where `first_packed` says that there were more."""
_STEPS = frozenset(".[(:")  # what leads from an object to a part of it, in a place
_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})


@cache
def _never_cleared() -> tuple[type, ...]:
    """Kinds whose deallocation does not clear weak references (torch 2.11): one that outlives them
    leads to freed memory, and the collector crashes."""
    torch: Any = sys.modules.get("torch")
    return () if torch is None else (torch.Stream, torch.Event)


def is_light(value: Any, depth: int = 0) -> bool:
    """Whether a value is worth keeping for its identity: a small container of plain values."""
    kind = type(value)
    if kind in _PLAIN or issubclass(type(value), _never_cleared()):
        return True
    if kind not in (list, tuple, dict) or depth > 3 or len(value) > _MOST_ITEMS:
        return False
    if kind is dict:
        return all(
            type(key) in _PLAIN and is_light(item, depth + 1) for key, item in value.items()
        )
    return all(is_light(item, depth + 1) for item in value)


def _is_array(value: Any) -> bool:
    """Whether it is an array of NumPy's, which cannot be resized while it has weak references."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def reference(value: Any) -> weakref.ref[Any] | None:
    """Gives a weak reference; None if there can be none."""
    if issubclass(type(value), _never_cleared()):
        return None
    try:
        return weakref.ref(value)
    except TypeError:
        return None


@dataclass(frozen=True, slots=True)
class Stateless:
    """Of some names, those that meant modules, functions and classes without state at the last
    capture, and what these were."""

    names: list[str]
    values: list[Any]
    others: tuple[str, ...]
    """The other names, in their order."""


class Births:
    """Where objects stood at the first program point: names that two processes share."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[weakref.ref[Any], str]] = {}
        # Lists, dicts and the like, which no weak reference can follow, by identity. They are kept,
        # so that no later one has it; therefore only small ones of plain values.
        self._unfollowed: dict[int, str] = {}
        self._pinned: list[Any] = []
        # Arrays of NumPy's, by identity alone: one that has the identity of another one, which is
        # gone, may as well be restored in that one's place.
        self._arrays: dict[int, str] = {}
        self._held: dict[int, Any] = {}  # these, until `let_go`
        self.resizes = False
        """Whether the script may resize arrays."""
        self._at: dict[str, int] = {}
        self._ambiguous: set[str] = set()
        self.recorded = False
        self._first: dict[str, Any] = {}
        self._first_packed = b""
        self.files: dict[str, tuple[int, ...] | None] = {}
        """How temporary files were, by place."""
        self.looks: dict[str, Fingerprint] = {}
        """What objects of packages looked like, by place."""
        self.bulky: dict[str, Bulk] = {}
        """Large attributes of datasets, by place."""
        self.too_large: dict[str, tuple[int, str]] = {}
        """By the place of a container that had no room: how many items it had, and why."""
        self.mapped: dict[str, MappedArray] = {}
        """Mapped files that the process may write, by place."""
        self.handles: dict[str, Any] = {}
        """Numbers by place that were descriptors, processes, threads or addresses then."""
        self.constants: dict[str, Any] = {}
        """Numbers and strings by place outside of frames; see `statics`."""
        self.attached: dict[str, tuple[str, ...]] = {}
        """Names of what a script had attached to an object of others, by place."""
        self.tagged: dict[str, frozenset[str]] = {}
        """Names of the tensors of a module tree that had attributes of the script's, by place."""
        self.fingerprints: dict[str, str] = {}
        """Fingerprints of datasets of the package `datasets`, by place."""
        self.variables: set[str] = set()
        """Places of the variables of frames that had a value."""
        self._stood: set[tuple[str, type]] = set()
        self._same: dict[str, str] = {}  # a further place of an object: its first one
        self.stateless: dict[tuple[str, frozenset[str]], Stateless] = {}
        """By the place of a namespace and the names that are captured of it."""
        self.named: dict[str, Any] = {}
        """Functions and classes by place: what means another one later is captured by name."""
        self.hung: dict[str, weakref.ref[Any]] = {}
        """Modules by the place of an attribute of another module of their tree."""
        self.trained: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models of that point whose parameters an optimizer has had at a capture."""
        self.first_trained: dict[str, list[Any]] = {}
        """Shapes of those whose parameters one had at the first capture, by place."""
        self.running: dict[CodeType, weakref.WeakSet[Any]] = {}
        """Generators whose frames were on the path, by their function's code."""

    def note_first(self, value: Any, place: str) -> None:
        """Remembers a number or a string of the first program point: that of a variable or an
        attribute."""
        if place[-1:] != "]":
            self._note_first(value, place)

    def note_first_items(self, items: Any, place: str) -> None:
        """Remembers those of a dict, or a list or tuple as a whole, if they are few."""
        if length_of(items) > _FEW:
            return
        if isinstance(items, dict):
            for i, (key, item) in enumerate(dict.items(items)):
                if type(item) in _PLAIN:
                    self._note_first(item, f"{place}[{name_of_key(key, i)}]")
        elif (there := items_of(items)) and all(type(item) in _PLAIN for item in there):
            self._note_first(list(there), f"{place}[]")

    def _note_first(self, value: Any, place: str) -> None:
        if type(value) in (str, bytes) and len(value) > _LONGEST_FIRST:
            return
        if len(self._first) < _MOST_FIRST:
            self._first.setdefault(place, value)
        else:
            self._first[FULL] = True

    @property
    def first(self) -> dict[str, Any]:
        """What `note_first` was given, by place."""
        return self._first

    def first_packed(self) -> bytes:
        """What `note_first` was given, by place: packed once, and small, for each step copies it."""
        if not self._first_packed:
            self._first_packed = zlib.compress(pickle.dumps(self._first, protocol=5))
        return self._first_packed

    @staticmethod
    def first_unpacked(packed: bytes) -> dict[str, Any]:
        """What `first_packed` packed.

        Raises:
            pickle.UnpicklingError: it is not that.
        """
        reader = zlib.decompressobj()
        try:
            first = plain.loads(reader.decompress(packed, _LONGEST_PACKED))
        except zlib.error as error:
            raise pickle.UnpicklingError(str(error)) from error
        return dict(first)

    def note(self, value: Any, place: str) -> None:
        """Remembers the first place of an object; of one that no weak reference can follow, if it
        is light enough to be kept.

        Members of a set have none: their order is another one in each process. A place that two
        objects have is no name.
        """
        known = self._places.get(id(value))
        if MEMBER in place or (known is not None and known[0]() is value):
            return
        if self.resizes and _is_array(value):
            self._note_array(value, place)
            return
        followed = reference(value)
        if followed is None:
            # What `exec` runs in is that of the functions that it has made, too.
            if is_light(value) or (type(value) is dict and "__builtins__" in value):
                self.pin(value, place)
            elif type(value) is bytearray and len(value) <= _LONGEST_BUFFER:
                self.pin(value, place)  # a tensor may lie in its memory
            return
        self._places[id(value)] = (followed, place)
        other = self._places.get(self._at.get(place, 0), (lambda: None, ""))[0]()
        if other is not None and other is not value:
            self._ambiguous.add(place)
        self._at[place] = id(value)

    def _note_array(self, value: Any, place: str) -> None:
        if id(value) not in self._held:
            self._arrays[id(value)], self._held[id(value)] = place, value
            if self._at.setdefault(place, id(value)) != id(value):
                self._ambiguous.add(place)

    def without_references(self, values: list[Any]) -> Callable[[], None]:
        """Drops the weak references to some objects, and returns what makes them again."""
        places = [self.place(value) for value in values]
        for value in values:
            self._places.pop(id(value), None)

        def again() -> None:
            for value, place in zip(values, places, strict=True):
                if place is not None:
                    self._places[id(value)] = weakref.ref(value), place

        return again

    def let_go(self) -> None:
        """The script goes on, and may resize its arrays."""
        self._held.clear()

    def stands(self, place: str, kind: type, first: str | None = None) -> None:
        """Notes that an object of that type stands at a place, and which place it had before."""
        self._stood.add((place, kind))
        if first is not None and first != place:
            self._same[place] = first

    def stood(self, place: str, kind: type) -> bool:
        """Says whether an object of that type stood at a place, by whichever path it is named."""
        if (place, kind) in self._stood:
            return True
        for end in range(len(place) - 1, 0, -1):
            first = self._same.get(place[:end]) if place[end] in _STEPS else None
            if first is not None and (first + place[end:], kind) in self._stood:
                return True
        return False

    def place(self, value: Any) -> str | None:
        """Gives the place an object was born at, if it was there."""
        found = self._places.get(id(value))
        if found is not None and found[0]() is value:
            place: str | None = found[1]
        elif self.resizes and _is_array(value):
            place = self._arrays.get(id(value))
        else:
            place = self._unfollowed.get(id(value))
        return None if place in self._ambiguous else place

    def pin(self, value: Any, place: str) -> None:
        """Keeps an object that no weak reference can follow: no later one gets its identity."""
        known = self._places.get(id(value))
        if id(value) in self._unfollowed or (known is not None and known[0]() is value):
            return
        if self._at.setdefault(place, id(value)) != id(value):
            self._ambiguous.add(place)
        self._unfollowed[id(value)] = place
        self._pinned.append(value)

    def place_of_identity(self, identity: int) -> str | None:
        """Returns the place of the object with that `id`; None if it is gone or came later."""
        found = self._places.get(identity)
        if found is None:
            place = self._unfollowed.get(identity)
        else:
            place = found[1] if found[0]() is not None else None
        return None if place in self._ambiguous else place

    def run(self, generator: Any) -> None:
        """Notes that a generator's frame is on the path."""
        self.running.setdefault(generator.gi_code, weakref.WeakSet()).add(generator)

    def runs_in_place_of_another(self, generator: Any) -> bool:
        """Says whether a generator stood still, while another one of its function was running: a
        restarted script is in the other one when it gets there."""
        others = self.running.get(generator.gi_code)
        return others is not None and generator not in others and self.place(generator) is not None

    def restored(self, written: list[Any]) -> None:
        """A resume has given these objects the contents that they had when they were captured: they
        have changed since the first program point."""
        at = {id(live) for live in written}
        for bulk in self.bulky.values():
            bulk.restored(at)

    def by_place(self) -> dict[str, Any]:
        """Gives the objects that are still alive, by their place."""
        followed = ((place, reference()) for reference, place in self._places.values())
        found = {place: value for place, value in followed if value is not None}
        found.update((self._unfollowed[id(value)], value) for value in self._pinned)
        found.update((self._arrays[identity], value) for identity, value in self._held.items())
        return {place: value for place, value in found.items() if place not in self._ambiguous}
