"""Objects around others: weak references and containers, proxies and views of dicts, exceptions,
semaphores, suspended coroutines; modules and loggers, which have names; signatures.

Threads: the training thread. Errors: none; what cannot be put back is reported to the walk.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from types import GetSetDescriptorType, MappingProxyType, MemberDescriptorType
from typing import TYPE_CHECKING, Any

from reft._state.own import is_made

from ..foreign import is_of_c
from ..nodes import KEEP, MISSING, At, Named, Node, kind, type_name
from .containers import encode_key, live_key
from .objects import OWNED, Owned, capture_foreign

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

_DISPATCHED = ":dispatch_cache"  # of the closure of what `singledispatch` makes
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_LATER = "holds an object made after the first step"
_CALLS_BACK = "a weak reference with a callback that was made after the first step"


@kind
class WeakContainer(Node):
    """A weak dict or set: its pairs, or members with None. Others hold what lies in it."""

    pairs: list[tuple[Any, Any]]

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        is_set = isinstance(value, weakref.WeakSet)
        found = [(member, None) for member in value] if is_set else list(value.items())
        if place.endswith(_DISPATCHED):
            return OWNED if walk.note_births else Dispatched()
        if not walk.take(16 * len(found)):
            return walk.no_room(value, place, 16 * len(found))
        pairs = [
            (
                encode_key(key, f"{place}<key {i}>", depth, walk),
                walk.encode(item, f"{place}[{i}]", depth + 1),
            )
            for i, (key, item) in enumerate(found)
        ]
        walk.keep_alive(found)
        return cls(pairs)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING:
            return walk.came_later(at)
        is_set = isinstance(target, weakref.WeakSet)
        there = list(target) if is_set else list(target.keys())
        items = []
        for i, (encoded, item) in enumerate(self.pairs):
            key = live_key(encoded, there, i, at.place, walk)
            current = MISSING if is_set or key is KEEP else target.get(key, MISSING)
            value = walk.resolve(item, current, f"{at.place}[{i}]")
            value = current if value is KEEP else value
            if key is KEEP or value is MISSING:
                return walk.problem(at, _LATER)
            items.append((key, value))
        walk.keep_alive(items)

        def write() -> None:
            target.clear()
            if is_set:
                target.update(key for key, _ in items)
            else:
                target.update(items)

        walk.contents.append(write)
        return target


@kind
class Dispatched(Node):
    """What a `functools.singledispatch` function has looked up by class: it does so again."""

    is_live_only = True

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING:
            return walk.came_later(at)
        walk.contents.append(target.clear)
        return target


@kind
class WeakReference(Node):
    """A weak reference, a weak method or a weak proxy, and what it leads to."""

    referent: Any

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        there = _referent(value)
        if there is None:
            return OWNED
        if _calls_back(value):
            if walk.note_births:
                walk.births.pin(value, place)
            elif walk.births.place(value) is None:
                return walk.lost(place, type_name(type(value)), _CALLS_BACK)
        return cls(walk.encode(there, f"{place}()", depth + 1))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        is_same = type_name(type(live)) == at.type_name
        there = _referent(live) if is_same else None
        known = MISSING if there is None else there
        value = walk.resolve(self.referent, known, f"{at.place}()")
        if value is KEEP or value is there:
            return live if there is not None else walk.problem(at, _LATER)
        if is_same and _calls_back(live):
            return walk.problem(at, "a weak reference with a callback: leads elsewhere")
        made = _WEAK_REFERENCES[at.type_name](value)
        walk.leads_weakly(at, functools.partial(_referent, made))
        return made

    def leads_to(self) -> Any:
        return self.referent


def _calls_back(reference: Any) -> bool:
    """Whether a weak reference calls something once what it leads to has gone."""
    if issubclass(type(reference), weakref.WeakMethod):  # has its own, which calls the script's
        callback: Any = reference.__callback__
        names, cells = callback.__code__.co_freevars, callback.__closure__
        return cells[names.index("callback")].cell_contents is not None
    # A proxy passes on everything but its type, so it cannot be asked.
    return type(reference) in WEAK_REFERENCES and bool(gc.get_referents(reference))


def _referent(reference: Any) -> Any:
    """What a weak reference leads to; None if that is gone."""
    try:
        if type(reference) in (weakref.ProxyType, weakref.CallableProxyType):
            return reference.__init__.__self__  # a proxy passes on everything but its type
        return reference()
    except ReferenceError:
        return None


_WEAK_REFERENCES: dict[str, Callable[[Any], Any]] = {
    type_name(weakref.ReferenceType): weakref.ref,
    type_name(weakref.WeakMethod): weakref.WeakMethod,
    type_name(weakref.ProxyType): weakref.proxy,
    type_name(weakref.CallableProxyType): weakref.proxy,
}
WEAK_REFERENCES = (
    weakref.ReferenceType,
    weakref.WeakMethod,
    weakref.ProxyType,
    weakref.CallableProxyType,
)


@kind
class Proxy(Node):
    """A `types.MappingProxyType`: the dict behind it may have no other name."""

    behind: Any

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        there = _behind(value)
        return OWNED if there is None else cls(walk.encode(there, f"{place}.copy()", depth + 1))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        there = _behind(live) if type(live) is MappingProxyType else None
        if there is not None:
            walk.fix(there)  # holders of the proxy see what is written to it
        current = MISSING if there is None else there
        behind = walk.resolve(self.behind, current, f"{at.place}.copy()")
        if behind is KEEP or behind is there:
            return KEEP if live is not MISSING else walk.problem(at, _LATER)
        return MappingProxyType(behind)


@kind
class DictView(Node):
    """What `keys`, `values` or `items` of a dict return; the dict may have no other name."""

    behind: Any

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        there = _behind(value)
        if there is None:
            return OWNED
        # A large dict that has not changed is not copied.
        return cls(walk.encode_data(there, f"{place}.mapping", depth + 1))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        there = _behind(live) if type_name(type(live)) == at.type_name else None
        if there is not None:
            walk.fix(there)  # holders of the view see what is written to it
        current = MISSING if there is None else there
        behind = walk.resolve(self.behind, current, f"{at.place}.mapping")
        if behind is KEEP or behind is there:
            return KEEP if there is not None else walk.problem(at, _LATER)
        method = at.type_name.rpartition("_")[2]  # builtins.dict_keys
        return getattr(dict, method)(behind)


DICT_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def _behind(proxy: Any) -> Any:
    """The dict behind a proxy or a view; None if it is that of a class or module."""
    for held in gc.get_referents(proxy):
        if isinstance(held, dict) and "__module__" not in held and "__builtins__" not in held:
            return held
    return None


@kind
class Raised(Node):
    """An exception that a script keeps: its arguments and attributes, not where it was raised."""

    arguments: list[Any]
    attributes: Named
    members: Named
    """What its class keeps in C, as `errno` of an OSError."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if walk.note_births:
            walk.births.pin(value, place)
        arguments = walk.encode_all(value.args, f"{place}.args", depth)
        members = [
            (name, walk.encode(member, f"{place}.{name}", depth + 1))
            for name in _members_of(type(value))
            if (member := _member(value, name)) is not MISSING
        ]
        return cls(arguments, walk.attributes(value, place, depth), members)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        arguments: list[Any] | None = None
        if target is MISSING:
            found = walk.type_of(at, live)
            if found is None or not issubclass(found, BaseException):
                return walk.problem(at, "class not found")
            # One of the classes in C: that of the script may want to be given something.
            base: Any = next(filter(is_of_c, found.__mro__))
            if issubclass(found, BaseExceptionGroup):  # only there, it is given what it is of
                arguments = walk.children(self.arguments, [], f"{at.place}.args")
                if arguments is None:
                    return walk.problem(at, _LATER)
            target = base.__new__(found, *(arguments or ()))
        walk.stands(at, target)
        if arguments is None:
            arguments = walk.children(self.arguments, list(target.args), f"{at.place}.args")
        if arguments is None:
            return walk.problem(at, _LATER)
        walk.contents.append(functools.partial(setattr, target, "args", tuple(arguments)))
        for name, item in self.members:
            there = _member(target, name)
            value = walk.resolve(item, there, f"{at.place}.{name}")
            if value is not KEEP and value is not there:
                walk.contents.append(functools.partial(setattr, target, name, value))
        walk.put_all_attributes(self.attributes, target, at.place)
        return target


def _member(error: BaseException, name: str) -> Any:
    try:
        return getattr(error, name)
    except (AttributeError, TypeError):  # not set yet, as some classes say it
        return MISSING


def _find_members(kind: type) -> tuple[str, ...]:
    of_all = vars(BaseException)
    return tuple(
        name
        for base in filter(is_of_c, kind.__mro__)
        for name, one in vars(base).items()
        if name not in of_all
        and isinstance(one, (MemberDescriptorType, GetSetDescriptorType))
        and not (issubclass(base, BaseExceptionGroup) or name.startswith("__"))
    )


_members_of: Callable[[type], tuple[str, ...]] = functools.cache(_find_members)
"""Names of what the classes in C keep that can be written, besides what any exception has."""


@kind
class Semaphore(Node):
    """A `threading.Semaphore`: its waiters are the restarted script's."""

    value: int

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        return OWNED if walk.note_births else cls(value._value)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING:
            if at.type_name != "threading.Semaphore":
                return walk.came_later(at)
            target = threading.Semaphore()
        walk.contents.append(functools.partial(setattr, target, "_value", self.value))
        return target


def capture_coroutine(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures a coroutine: one that is on the path by its frame, one that is suspended not."""
    if walk.note_births or inspect.getcoroutinestate(value) != inspect.CORO_SUSPENDED:
        return OWNED
    return walk.lost(place, type_name(type(value)), "a suspended coroutine: use a generator")


@kind
class Imported(Node):
    """A module that a variable refers to only since the first step."""

    name: str

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        found = sys.modules.get(self.name)
        return walk.problem(at, f"{self.name} was imported later") if found is None else found

    def is_made_anew(self) -> bool:
        return True


@kind
class Logger(Node):
    """A logger that a variable refers to only since the first step."""

    name: str

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        is_known = value is logging.root or value.manager.loggerDict.get(value.name) is value
        if walk.note_births or walk.births.place(value) is not None or not is_known:
            return capture_foreign(value, place, depth, walk)
        return cls(value.name)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        return logging.getLogger(self.name)

    def is_made_anew(self) -> bool:
        return True


@kind
class Signature(Node):
    """The signature of a function, which the restarted script takes from it again."""

    is_live_only = True
    text: str

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        return OWNED if walk.note_births else cls(str(value))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        for candidate in (walk.born(at.birth), live):
            if isinstance(candidate, inspect.Signature) and str(candidate) == self.text:
                return candidate
        return walk.came_later(at)


def capture_module(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures a module: what a script has put into one that it has made by itself."""
    if not is_made(value):
        born = walk.note_births or walk.births.place(value) is not None
        return OWNED if born else Imported(value.__name__)
    own = [(name, item) for name, item in list(vars(value).items()) if not name.startswith("__")]
    attributes = walk.encode_named(own, place, depth)
    return Owned(attributes, None) if attributes else OWNED
