"""Positions of Python's own iterators and of generators.

An iterator is described by the parts that its `__reduce__` names, and made again from them: that
holds for every supported interpreter and touches no memory layout. A new iterator takes the old
one's place wherever reft found it. Iterators of dicts and sets are moved by advancing the live one,
because their `__reduce__` copies what is left; of small ones it does, for the next items, which a
resume compares. An iterator of another dict than the live one's is made again from that dict.

Threads: the training thread. Errors: `Stray` for a position that cannot be reached.
"""

from __future__ import annotations

import builtins
import gc
import itertools
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..births import is_light
from ..nodes import KEEP, MISSING, At, Node, Stray, is_bound, kind, plain_key, type_name
from .objects import Lost

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

# Described by __reduce__: (callable, arguments[, state]). None of these advances the iterator.
_REDUCED: dict[type, str] = {
    type(iter(range(0))): "range",
    type(iter(range(1 << 70))): "longrange",
    type(iter([])): "list",
    type(iter(())): "tuple",
    type(iter("")): "str",
    type(iter("é")): "str",
    type(iter(b"")): "bytes",
    type(iter(bytearray())): "bytearray",
    type(reversed([])): "list_reverse",
    reversed: "reversed",
    enumerate: "enumerate",
    zip: "zip",
    map: "map",
    filter: "filter",
}
for _name in (
    "count",
    "islice",
    "chain",
    "cycle",
    "repeat",
    "starmap",
    "product",
    "zip_longest",
    "accumulate",
):
    _REDUCED[getattr(itertools, _name)] = _name


class _Sequence:
    def __getitem__(self, index: int) -> int:
        raise IndexError(index)


_REDUCED[type(iter(_Sequence()))] = "sequence"
_CALLABLE = type(iter(int, 1))
_REDUCED[_CALLABLE] = "callable"

_OF_A_DICT: tuple[Callable[[Any], Any], ...] = (
    dict.__iter__,
    lambda source: iter(dict.values(source)),
    lambda source: iter(dict.items(source)),
    dict.__reversed__,
    lambda source: reversed(dict.values(source)),
    lambda source: reversed(dict.items(source)),
)
# How the iterators of a dict are made.
_VIEWS = {type_name(type(make({}))): make for make in _OF_A_DICT}
# Moved by advancing the live iterator to the same number of items left, or made again.
ADVANCED = frozenset({*(type(make({})) for make in _OF_A_DICT), type(iter(set()))})

_MAKERS: dict[str, Any] = {"iter": iter, "reversed": reversed}
_MAKERS.update({name: getattr(builtins, name) for name in ("enumerate", "zip", "map", "filter")})
for _kind, _label in _REDUCED.items():
    if _kind.__module__ == "itertools":
        _MAKERS[_label] = _kind

NO_STATE = object()
_IN_ANOTHER = "the training loop runs in another generator than in the first iteration"
_AHEAD = 4
_MOST_COPIED = 1024  # items, in every step
_WARNS = sys.version_info >= (3, 12)  # that iterators of itertools will not be taken apart some day


@kind
class Iterator(Node):
    """An iterator that is made again from its parts."""

    is_position = True
    maker: str
    arguments: list[Any]
    has_state: bool
    state: Any

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        try:
            name, arguments, state = reduce(value)
        except (TypeError, AttributeError) as error:
            return walk.lost(place, type_name(type(value)), str(error))
        walk.keep_alive((arguments, state))
        # A position is a number of its own, whatever else that number may be in this process.
        encoded = [
            part if type(part) is int else walk.encode(part, f"{place}<{name}>", depth + 1)
            for part in arguments
        ]
        if type(value) is _CALLABLE and _calls_what_is_left_alone(arguments[0], walk):
            return walk.lost(place, type_name(type(value)), "iterator of unknown kind")
        for part in encoded:
            reason = walk.lost_position(part)
            if reason is not None:
                return Lost(reason)  # reported where it was found
        if state is NO_STATE:
            return cls(name, encoded, False, None)
        if type(state) is not int:
            state = walk.encode(state, place, depth + 1)
        return cls(name, encoded, True, state)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        place = f"{at.place}<{self.maker}>"
        there: list[Any] = []
        live_state: Any = MISSING
        if live is not MISSING and type_name(type(live)) == at.type_name:
            _, parts, live_state = reduce(live)
            there = list(parts)
            walk.keep_alive((parts, live_state))
            if live_state is NO_STATE:
                live_state = MISSING
        for i, argument in enumerate(self.arguments):
            if walk.is_position(argument):
                current = there[i] if i < len(there) else MISSING
                if walk.resolve(argument, current, f"{place}[{i}]") is KEEP:
                    return walk.problem(at, "the iterator inside it cannot be restored")
        built = walk.children(self.arguments, there, place)
        if built is None:
            return walk.problem(at, "its source was made after the first step")
        iterator = _MAKERS[self.maker](*built)
        if self.has_state:
            value = walk.resolve(self.state, live_state, at.place)
            # Positions are clipped to the sequence's length, so they wait for its contents.
            walk.positions.append(lambda: _set_state(iterator, value))
        return iterator


@kind
class Advanced(Node):
    """An iterator of a dict or a set."""

    is_position = True
    source: Any
    """The dict, if it is light: of one that has lived since the first program point, the place is
    known then. KEEP for others, and for a set, whose order is another one when it is made again."""
    left: int
    """Number of items that it still yields."""
    ahead: list[Any]
    """The next ones of these, if they are plain."""
    size: int
    """Number of items of the dict or set; -1 if it is at its end."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        left, source = _items_left(value), _source(value)
        size = _size(source)
        encoded = KEEP
        if isinstance(source, dict) and size <= _MOST_COPIED and is_light(source):
            encoded = walk.encode(source, f"{place}<source>", depth + 1)
        return cls(encoded, left, _ahead(value) if left <= _MOST_COPIED else [], size)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        there = MISSING if target is MISSING else _source(target)
        source = walk.resolve(self.source, there, f"{at.place}<source>")
        source = there if source is KEEP else source
        is_behind = target is MISSING or source is not there or _items_left(target) < self.left
        if is_behind and isinstance(source, dict) and len(source) == self.size:
            target = _VIEWS[at.type_name](source)
            walk.keep_alive(target)
            for _ in range(self.size - self.left):
                next(target)
        elif target is MISSING:
            return walk.came_later(at)
        else:
            self._advance(at, target, walk)

        def check() -> None:
            ahead = _ahead(target) if self.ahead else []
            if ahead != self.ahead:
                why = f"would give {ahead} next, the saved one {self.ahead}"
                walk.problem(at, why, f"items of {at.place}")

        walk.positions.append(check)
        return target

    def _advance(self, at: At, target: Any, walk: RestoreWalk) -> None:
        there = _items_left(target)
        steps = there - self.left
        if steps < 0:
            raise Stray(f"{at.place}: {self.left} items were left, the live iterator has {there}")
        size = _size(_source(target))
        if self.left and self.size != size:
            # Python ends the iterators of a dict whose size changes, and that would end the script.
            raise Stray(f"{at.place}: {self.size} items in all, the live one has {size}")

        def advance() -> None:
            for _ in range(steps):
                next(target)

        # First: a change of the dict's size would end its iterators.
        walk.contents.insert(0, advance)

    def needs_live(self, type_name: str) -> bool:
        return self.source is KEEP

    def is_made_anew(self) -> bool:
        return self.source is not KEEP

    def parts(self) -> list[Any]:
        return [self.source]


@kind
class Generator(Node):
    """A suspended generator."""

    is_position = True
    record: Any
    """Its frame; see `frames`."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if value.gi_running:  # its frame is on the path
            if walk.note_births:
                walk.births.run(value)
            elif walk.births.runs_in_place_of_another(value):
                walk.refuse(f"{place}: {_IN_ANOTHER}")
            return RunningGenerator()
        if value.gi_frame is None:
            return FinishedGenerator()
        try:
            record = walk.capture_generator(value, f"{place}()")
        except Exception as error:
            return walk.lost(place, "generator", str(error))
        for part in record["stack"]:
            reason = walk.lost_position(part)
            if reason is not None:
                return Lost(reason)
        return cls(record)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is not MISSING and (target.gi_frame is None or target.gi_running):
            target = MISSING
        made = walk.plan_generator(self.record, target, f"{at.place}()")
        if made is None:
            return walk.problem(at, "generator made after the first step")
        return made

    def needs_live(self, type_name: str) -> bool:
        return "<" in self.record["name"]  # no name finds its function


@kind
class FinishedGenerator(Node):
    """A generator that has returned."""

    is_position = True

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        # Not the live one: to end it would run what its `finally` does.
        ended = (nothing for nothing in "")
        ended.close()
        return ended


@kind
class RunningGenerator(Node):
    """A generator whose frame is on the path to the optimizer's step."""

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = live if at.birth is None else walk.born(at.birth, live)
        if not getattr(target, "gi_running", False):
            raise Stray(f"{at.place}: {_IN_ANOTHER}")
        return target


def _calls_what_is_left_alone(function: Any, walk: CaptureWalk) -> bool:
    """Whether the position of `iter(function, sentinel)` lies in an object that is not copied.

    That of `re.finditer` does.
    """
    return is_bound(function) and walk.rule_of(type(function.__self__)).is_left_alone


def is_reduced(kind: type) -> bool:
    """Says whether iterators of this type are described by `reduce`."""
    return kind in _REDUCED


def reduce(iterator: Any) -> tuple[str, tuple[Any, ...], Any]:
    """Takes an iterator apart without advancing it.

    Returns:
        Name of the callable that makes it, its arguments, and the state to set then (`NO_STATE` for
        none).

    Raises:
        TypeError: This interpreter cannot take it apart.
    """
    if _WARNS and type(iterator).__module__ == "itertools":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            parts = iterator.__reduce__()
    else:
        parts = iterator.__reduce__()
    name = parts[0].__name__
    if name not in _MAKERS:
        raise TypeError(f"{type(iterator).__name__} is made by {name}")
    return name, tuple(parts[1]), parts[2] if len(parts) > 2 and parts[2] is not None else NO_STATE


def _set_state(iterator: Any, state: Any) -> None:
    """Sets the position of a newly built iterator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        iterator.__setstate__(state)


def _items_left(iterator: Any) -> int:
    """Returns the number of items that a dict's or set's iterator still yields."""
    return int(iterator.__length_hint__())


def _ahead(iterator: Any) -> list[Any]:
    """Returns the next items of a dict's or set's iterator, of pairs the keys; [] if they are not
    plain. It stays where it is."""
    copies = iterator.__reduce__()[1][0]
    items = [item[0] if type(item) is tuple and item else item for item in copies[:_AHEAD]]
    return items if all(map(plain_key, items)) else []


def _source(iterator: Any) -> Any:
    """Returns the dict or set of an iterator; MISSING if it is at its end."""
    sources = (
        each for each in gc.get_referents(iterator) if isinstance(each, (dict, set, frozenset))
    )
    return next(sources, MISSING)


def _size(source: Any) -> int:
    return -1 if source is MISSING else len(source)
