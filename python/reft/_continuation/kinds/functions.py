"""Functions, their closures and defaults, methods and partial calls.

Threads: the training thread. Errors: none; what cannot be put back is reported to the walk.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from reft._state.own import is_made

from ..bytecode import analyse
from ..nodes import (
    ATOMS,
    KEEP,
    MISSING,
    UNBOUND,
    At,
    Named,
    Node,
    find_named,
    function_in,
    is_bound,
    is_same_atom,
    kind,
    type_name,
)
from .objects import OWNED, capture_foreign

if TYPE_CHECKING:
    from ..capture_walk import CaptureWalk
    from ..restore_walk import RestoreWalk

_FIRST_PARTS, _MOST_DEPTH = slice(64), 4  # of defaults in defaults
FOREIGN_ROOTS = frozenset({"torch", "reft", "numpy", "triton"})
STATEFUL_STDLIB = frozenset(
    {"argparse", "types", "dataclasses", "collections", "random", "contextlib"}
)


def is_foreign(root: str) -> bool:
    """Says whether a top-level module's functions and objects are not looked into."""
    return root in FOREIGN_ROOTS or (
        root in sys.stdlib_module_names and root not in STATEFUL_STDLIB
    )


def _is_of_package(function: FunctionType) -> bool:
    """Says whether a function is not looked into. One of the script's that `functools.wraps` calls
    after a package's, which it replaces there, is."""
    if not is_foreign((function.__module__ or "").partition(".")[0]):
        return False
    return is_foreign(str(function.__globals__.get("__name__")).partition(".")[0])


@kind
class Function(Node):
    """A function that keeps something between its calls."""

    is_live_only = True
    which: str
    """Name and digest of its code."""
    cells: list[Any]
    attributes: Named
    defaults: Named
    """Default arguments that can change."""

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if _is_of_package(value) or not has_state(value, walk):
            return NamedObject.capture(value, place, depth, walk)
        cells: list[Any] = []
        closure = value.__closure__ or ()
        for name, cell in zip(value.__code__.co_freevars, closure, strict=True):
            try:
                cells.append(walk.encode(cell.cell_contents, f"{place}:{name}", depth + 1))
            except ValueError:
                cells.append(UNBOUND)  # empty
        defaults = [
            (name, walk.encode(item, f"{place}({name})", depth + 1))
            for name, item in mutable_defaults(value, walk)
        ]
        return cls(_which(value), cells, walk.attributes(value, place, depth), defaults)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.target(at, live)
        if target is MISSING:
            return walk.problem(at, "function made after the first step")
        if _which(target) != self.which:
            return walk.problem(at, "refers to another function than after the first step")
        walk.stands(at, target)
        closure = target.__closure__ or ()
        for name, cell, item in zip(target.__code__.co_freevars, closure, self.cells, strict=True):
            try:
                current = cell.cell_contents
            except ValueError:
                current = MISSING
            if item == UNBOUND:
                if current is not MISSING:
                    walk.contents.append(functools.partial(delattr, cell, "cell_contents"))
                continue
            value = walk.resolve(item, current, f"{at.place}:{name}")
            if value is not KEEP:
                walk.contents.append(functools.partial(setattr, cell, "cell_contents", value))
        walk.put_all_attributes(self.attributes, target, at.place)
        defaults = dict(mutable_defaults(target, walk))
        for name, item in self.defaults:
            there = defaults.get(name, MISSING)
            value = walk.resolve(item, there, f"{at.place}({name})")
            if value is not KEEP and value is not there:  # an iterator is made anew
                walk.contents.append(functools.partial(_set_default, target, name, value))
        return target


@kind
class NamedObject(Node):
    """A function or a class that a variable has come to mean after the first step."""

    module: str
    name: str

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        if is_bound(value):
            return capture_bound(value, place, depth, walk)
        is_known = walk.note_births or walk.births.place(value) is not None
        if isinstance(value, type) and is_known and is_made(value):
            return MadeClass.capture(value, place, depth, walk)
        if not walk.is_switched(value, place):
            return OWNED
        for name in (value.__qualname__, value.__name__):
            if find_named(value.__module__, name) is value:
                return cls(value.__module__, name)
        if type(value) is FunctionType and not value.__closure__:
            return Code(_which(value))  # one made anew is as good
        if place in walk.births.named:
            return walk.lost(place, type_name(type(value)), _not_by_name(value.__qualname__))
        return OWNED

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        found = find_named(self.module, self.name)
        return walk.problem(at, f"{self.name} not found") if found is None else found

    def is_made_anew(self) -> bool:
        return True


@kind
class MadeClass(Node):
    """A class that was made at run time and has no name to find it by: its own attributes."""

    name: str
    attributes: Named

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        own = [
            (name, item)
            for name, item in list(vars(value).items())
            if not (
                name.startswith(("__", "_abc_"))
                or isinstance(item, (FunctionType, type))
                or hasattr(type(item), "__get__")
            )
        ]
        attributes = walk.encode_named(own, place, depth)
        return cls(value.__qualname__, attributes)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        target = walk.born(at.birth, live)
        if not isinstance(target, type) or target.__qualname__ != self.name:
            return walk.problem(at, _not_by_name(self.name))
        walk.stands(at, target)
        for name, item in self.attributes:
            there = vars(target).get(name, MISSING)
            value = walk.resolve(item, there, f"{at.place}.{name}")
            if value is not KEEP and value is not there:
                walk.contents.append(functools.partial(setattr, target, name, value))
        return target


@kind
class Code(Node):
    """A function that cannot be found by its name and keeps nothing."""

    is_live_only = True
    which: str

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        if type(live) is FunctionType and _which(live) == self.which:
            return live
        return walk.problem(at, _not_by_name(self.which.partition(" ")[0]))


@kind
class Method(Node):
    """A method with the object that it is bound to."""

    holder: str
    """Class whose own method it is; "" if it is no method of a class."""
    name: str
    """Of the method in its class, or of a function in its module; "" if it has none."""
    module: str
    owner: Any

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        owner = walk.encode(value.__self__, f"{place}.__self__", depth + 1)
        function = value.__func__
        holder, name = _where_it_is(value.__self__, function)
        if name:
            return cls(holder, name, "", owner)
        module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
        if find_named(module, name) is function:
            return cls("", name, module, owner)
        if walk.is_switched(function, f"{place}.__func__"):
            return walk.lost(place, "method", _not_by_name(name))
        return cls("", "", "", owner)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        there = getattr(live, "__self__", MISSING)
        owner = walk.resolve(self.owner, there, f"{at.place}.__self__")
        function = getattr(live, "__func__", None)
        if self.holder:
            function = _method_of(there if owner is KEEP else owner, self.holder, self.name)
        elif self.name:
            function = find_named(self.module, self.name)
        if owner is KEEP or function is None:
            return KEEP if live is not MISSING else walk.came_later(at)
        if owner is there and function is getattr(live, "__func__", None):
            return KEEP
        return MethodType(function, owner)

    def leads_to(self) -> Any:
        return self.owner


def _where_it_is(owner: Any, function: Any) -> tuple[str, str]:
    """(class, name in it) of a method of `owner`; ("", "") if it is none."""
    bases = _bases(owner)
    name = getattr(function, "__name__", "")
    for base in bases:
        if function_in(vars(base).get(name)) is function:
            return type_name(base), name
    for base in bases:  # a decorator has given it another name, or Python has: `self.__busy`
        for name, member in vars(base).items():
            if function_in(member) is function:
                return type_name(base), name
    return "", ""


def _method_of(owner: Any, holder: str, name: str) -> Any:
    members = (vars(base).get(name) for base in _bases(owner) if type_name(base) == holder)
    return next((function_in(member) for member in members), None)


def _bases(owner: Any) -> tuple[type, ...]:
    return owner.__mro__ if isinstance(owner, type) else type(owner).__mro__


@kind
class BoundBuiltin(Node):
    """A method that is written in C, with its object."""

    name: str
    owner: Any

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        there = getattr(live, "__self__", MISSING)
        owner = walk.resolve(self.owner, there, f"{at.place}.__self__")
        if owner is KEEP or (owner is there and getattr(live, "__name__", "") == self.name):
            if live is not MISSING:
                return KEEP
            return walk.came_later(at)
        return getattr(owner, self.name, KEEP)


def capture_bound(value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
    """Captures a method that is written in C; nothing else may hold its object."""
    owner = walk.encode(value.__self__, f"{place}.__self__", depth + 1)
    return BoundBuiltin(value.__name__, owner)


@kind
class Partial(Node):
    """A `functools.partial`."""

    func: Any
    arguments: list[Any]
    keywords: Named
    attributes: Named

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        place = f"{place}<partial>"
        arguments = [
            walk.encode(part, f"{place}[{i}]", depth + 1) for i, part in enumerate(value.args)
        ]
        keywords = walk.encode_named(value.keywords.items(), place, depth)
        attributes = walk.attributes(value, place, depth)
        return cls(walk.encode(value.func, place, depth + 1), arguments, keywords, attributes)

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        place = f"{at.place}<partial>"
        known = type(live) is functools.partial
        func = walk.resolve(self.func, live.func if known else MISSING, place)
        func = live.func if func is KEEP and known else func
        arguments = walk.children(self.arguments, list(live.args) if known else [], place)
        before = live.keywords if known else {}
        keywords: dict[str, Any] = {}
        for name, item in self.keywords:
            value = walk.resolve(item, before.get(name, MISSING), f"{place}.{name}")
            keywords[name] = before.get(name, KEEP) if value is KEEP else value
        if arguments is None or any(item is KEEP for item in (func, *keywords.values())):
            return walk.problem(at, "holds an object made after the first step")
        if (
            known
            and func is live.func
            and _same(arguments, live.args)
            and _same(keywords, live.keywords)
        ):
            target = live
        else:
            target = functools.partial(func, *arguments, **keywords)
        walk.put_all_attributes(self.attributes, target, place)
        return target


@kind
class Ufunc(Node):
    """A function of arrays that `numpy.frompyfunc` has made of a function in Python."""

    is_live_only = True
    func: Any

    @classmethod
    def capture(cls, value: Any, place: str, depth: int, walk: CaptureWalk) -> Node:
        func = _called_by(value)
        if func is None:
            return capture_foreign(value, place, depth, walk)
        if walk.note_births:
            walk.births.pin(value, place)
        return cls(walk.encode(func, f"{place}<ufunc>", depth + 1))

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        for candidate in (walk.born(at.birth), live):
            if type_name(type(candidate)) != at.type_name:
                continue
            there = _called_by(candidate)
            if there is None:
                continue
            func = walk.resolve(self.func, there, f"{at.place}<ufunc>")
            if func is KEEP or func is there:
                walk.stands(at, candidate)
                return candidate
        return walk.came_later(at)


def _called_by(ufunc: Any) -> Any:
    """What a ufunc of `numpy.frompyfunc` calls; None for one that is written in C."""
    if not ufunc.__name__.endswith(" (vectorized)"):
        return None
    held = [item for item in gc.get_referents(ufunc) if callable(item)]
    return held[0] if len(held) == 1 else None


# Functions that have had attributes: all may have been deleted since.
_attributed: weakref.WeakSet[FunctionType] = weakref.WeakSet()


def has_state(function: FunctionType, walk: CaptureWalk | RestoreWalk, depth: int = 0) -> bool:
    """Says whether a function keeps anything between its calls.

    That is a closure, attributes, or defaults that can change.
    """
    if function.__dict__:
        _attributed.add(function)
        return True
    if function.__closure__ and function.__code__.co_freevars != ("__class__",):
        return True
    if _attributed and function in _attributed:
        return True
    defaults = function.__defaults__ or function.__kwdefaults__
    return bool(defaults and mutable_defaults(function, walk, depth))


def mutable_defaults(
    function: FunctionType, walk: CaptureWalk | RestoreWalk, depth: int = 0
) -> Named:
    """Returns the default arguments that can change, by name; `depth`: of defaults around it."""
    defaults = function.__defaults__ or ()
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    named = list(zip(names, defaults, strict=True))
    named += (function.__kwdefaults__ or {}).items()
    return [(name, item) for name, item in named if _may_change(item, walk, depth)]


def _may_change(item: Any, walk: CaptureWalk | RestoreWalk, depth: int) -> bool:
    # All by the class: an object's own `__class__` may be code of the script's.
    kind = type(item)
    if kind in ATOMS or kind is frozenset or issubclass(kind, type):
        return False
    if kind is FunctionType:
        foreign = _is_of_package(item)
        return not foreign and depth < _MOST_DEPTH and has_state(item, walk, depth + 1)
    if issubclass(kind, BuiltinFunctionType):
        return is_bound(item)
    if issubclass(kind, tuple) and not kind.__dictoffset__:  # with no attributes of its own
        return depth < _MOST_DEPTH and any(
            _may_change(part, walk, depth + 1) for part in tuple.__getitem__(item, _FIRST_PARTS)
        )
    rule = walk.rule_of(kind)
    return not (rule.is_constant or rule.is_left_alone)


def _which(function: Any) -> str:
    return f"{function.__qualname__} {analyse(function.__code__).digest.hex()}"


def _not_by_name(qualname: str) -> str:
    return (
        "refers to another function or class than after the first step, and"
        f" {qualname} cannot be found by its name"
    )


def _set_default(function: FunctionType, name: str, value: Any) -> None:
    """Gives a default argument another value."""
    if function.__kwdefaults__ is not None and name in function.__kwdefaults__:
        function.__kwdefaults__[name] = value
        return
    defaults = list(function.__defaults__ or ())
    names = function.__code__.co_varnames[: function.__code__.co_argcount][-len(defaults) :]
    defaults[names.index(name)] = value
    function.__defaults__ = tuple(defaults)


def _same(one: Any, other: Any) -> bool:
    """Whether two sequences, or dicts, hold the same objects, or equal numbers and strings."""
    if isinstance(other, dict):
        return list(one) == list(other) and _same(list(one.values()), list(other.values()))
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        a is b or (type(a) in ATOMS and is_same_atom(a, b)) for a, b in pairs
    )
