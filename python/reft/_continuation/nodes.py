"""What captured values are made of.

A node is one captured object: an instance of one of the classes of `kinds`. `Graph` holds the nodes
and, beside each, where its object stood at the first program point and the name of its class. A
value inside a node is an atom as itself, a reference to another node (`ref`), or a mark (`KEEP`,
`UNBOUND`, a handle, an identity).

A graph travels as plain tuples: the name of the kind, then its fields. No class of this package is
named in a pickle, so the reader (`plain.loads`) has none to allow.

Threads: any. Errors: `pickle.UnpicklingError` for packed nodes that this version does not write.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import attrgetter
from types import BuiltinFunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from .restore_walk import RestoreWalk

ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), type(Ellipsis)})
_SIGNED = frozenset({float, complex})
KEEP: Any = ("keep",)
UNBOUND: Any = ("unbound",)
MISSING = object()
Report = list[tuple[str, str, str]]
Named = list[tuple[str, Any]]
"""Encoded values by name."""
# Names with two underscores on both sides that Python, or a decorator of its library, sets. Other
# ones are a script's.
_PYTHONS = frozenset(
    f"__{name}__"
    for name in ["all", "annotate", "annotate_func", "annotations", "annotations_cache", "builtins", "cached", "classcell", "conditional_annotations", "dataclass_fields", "dataclass_params", "dict", "dir", "doc", "file", "final", "firstlineno", "getattr", "loader", "match_args", "module", "name", "orig_bases", "package", "parameters", "path", "qualname", "slots", "spec", "static_attributes", "type_params", "warningregistry", "weakref", "version"]
)
_MOST_PARTS = 64  # that `Graph.needs_live` looks at
_REF = "r"
_HANDLE = "handle"
_IDENTITY = "id"


def ref(index: int) -> Any:
    """Encodes a reference to a node."""
    return (_REF, index)


def index_of(encoded: Any) -> int | None:
    """Returns the index of the node that a value refers to; None if it refers to none."""
    match encoded:
        case ("r", index) if type(encoded) is tuple:
            return int(index)
    return None


def is_pythons(name: str) -> bool:
    """Whether a name of a module or class is set by Python, not by a script."""
    return name in _PYTHONS


def handle(value: Any) -> Any:
    """Encodes a number of this process, which the next one replaces by its own."""
    return (_HANDLE, value)


def handle_in(encoded: Any) -> Any:
    """Returns the number that `handle` encoded; MISSING for anything else."""
    match encoded:
        case ("handle", value) if type(encoded) is tuple:
            return value
    return MISSING


def identity(place: str, is_hash: bool) -> Any:
    """Encodes what `id` gave of the object of a place, or `hash`, which follows from that."""
    return (_IDENTITY, place, is_hash)


def identity_in(encoded: Any) -> tuple[str, bool] | None:
    """Returns the place that `identity` encoded, and which of the two; None for anything else."""
    match encoded:
        case ("id", place, is_hash) if type(encoded) is tuple:
            return place, is_hash
    return None


def is_same_atom(one: Any, other: Any) -> bool:
    """Whether two atoms are of one class and equal, a zero with its sign."""
    return (
        type(one) is type(other)
        and one == other
        and (one != 0 or type(one) not in _SIGNED or repr(one) == repr(other))
    )


LATER = "made after the first step"
"""Why an object is not restored, as reports name it."""


class Refusal(Exception):
    """The place in the loop cannot be put back."""


class Stray(Refusal):
    """The loop cannot do without a node that has no live counterpart; nothing was written."""


@dataclass(slots=True)
class At:
    """The place of a node in a restore."""

    index: int
    """Position in the graph."""
    birth: str | None
    """Place of the object at the first program point; None if the object came later."""
    type_name: str
    """Full name of the object's class."""
    place: str
    """Place where the restore has found the node, for reports."""


class Node:
    """One captured object.

    A kind of node is a class with the decorator `kind`, a class method `capture(value, place,
    depth, walk)`, and `restore`. `kinds.table` chooses the capture by the object's class.
    """

    __slots__ = ()
    tag: ClassVar[str]
    """Name of the kind in a pickle."""
    field_values: ClassVar[Callable[[Any], tuple[Any, ...]]]
    is_position: ClassVar[bool] = False
    """Whether it is a position in a loop."""
    is_live_only: ClassVar[bool] = False
    """Whether `needs_live` holds for all objects of the kind."""

    def restore(self, at: At, live: Any, walk: RestoreWalk) -> Any:
        """Plans the writes that give the live object its captured value.

        Args:
            at: Place of this node.
            live: Object that stands at the same place now; MISSING if none does.
            walk: Collects the writes.

        Returns:
            The object that stands for the node; KEEP to leave what is there.
        """
        raise NotImplementedError

    def leads_to(self) -> Any:
        """The encoded value that is all it takes to make the object: its own parts may lead back to
        it before it is made. None for most kinds."""
        return None

    def is_made_anew(self) -> bool:
        """Whether the object can be built from the node and its parts alone."""
        return False

    def needs_live(self, type_name: str) -> bool:
        """Whether it is restored only into an object that stood there at the first program point.

        Args:
            type_name: Full name of the object's class.
        """
        return self.is_live_only

    def parts(self) -> Collection[Any]:
        """Encoded values that a new object is built from."""
        return ()


_KINDS: dict[str, type[Node]] = {}
_Kind = TypeVar("_Kind", bound=type[Node])


@dataclass_transform(eq_default=False, frozen_default=True)
def kind(made: _Kind) -> _Kind:
    """Makes a class a frozen dataclass, and one of the kinds of nodes.

    The type checker refuses writes to its fields. At run time the class is not frozen: a frozen
    `__init__` takes twice as long, and a capture makes hundreds of nodes on the training thread.
    """
    node: Any = dataclass(slots=True, eq=False)(made)
    names = [one.name for one in fields(node)]
    if len(names) > 1:
        node.field_values = attrgetter(*names)
    elif names:
        only = attrgetter(names[0])
        node.field_values = staticmethod(lambda one: (only(one),))
    else:
        node.field_values = staticmethod(lambda one: ())
    node.tag = made.__name__
    _KINDS[node.tag] = node
    return node  # type: ignore[no-any-return]


@dataclass(slots=True)
class Graph:
    """Captured objects; position i of each list tells of one object."""

    nodes: list[Node] = field(default_factory=list)
    births: list[str | None] = field(default_factory=list)
    """Places at the first program point; None for an object that came later."""
    types: list[str] = field(default_factory=list)
    """Full names of the objects' classes."""

    def packed(self) -> tuple[Any, ...]:
        """Returns the graph as plain values."""
        nodes = [(node.tag, *type(node).field_values(node)) for node in self.nodes]
        return (self.births, self.types, nodes)

    @classmethod
    def unpacked(cls, packed: Any) -> Graph:
        """Returns the graph that `packed` was called on.

        Raises:
            pickle.UnpicklingError: A kind or the number of its fields is unknown.
        """
        births, types, nodes = packed
        made: list[Node] = []
        for tag, *values in nodes:
            try:
                made.append(_KINDS[tag](*values))
            except (KeyError, TypeError) as error:
                raise pickle.UnpicklingError(
                    f"{tag!r} with {len(values)} fields: {error}"
                ) from error
        if not len(births) == len(types) == len(made):
            raise pickle.UnpicklingError("the lists of a graph differ in length")
        return cls(made, births, types)

    def needs_live(self, encoded: Any) -> bool:
        """Says whether a value can be restored only where it stood at the first program point; it
        did not. Looks at the first of its parts only, since captures ask at each step."""
        left, seen = [encoded], 0
        while left and seen < _MOST_PARTS:
            index = index_of(left.pop())
            seen += 1
            if index is None or self.births[index] is not None:
                continue
            node = self.nodes[index]
            if node.needs_live(self.types[index]):
                return True
            left += [part for part in islice(node.parts(), _MOST_PARTS) if type(part) is tuple]
        return False

    def node(self, encoded: Any) -> Node | None:
        """Returns the node that an encoded value refers to; None if it refers to none."""
        index = index_of(encoded)
        return None if index is None else self.nodes[index]


def type_name(kind: type) -> str:
    """Gives a type's full name, the same in every process of one script."""
    known = _type_names.get(kind)
    if known is None:
        known = _type_names[kind] = f"{kind.__module__}.{kind.__qualname__}"
    return known  # one string each time: pickle writes it once


_type_names: dict[type, str] = {}


def native() -> Any:
    """The extension module; the rest of this package can be read without it."""
    global _native
    if _native is None:
        _native = importlib.import_module("reft._C")
    return _native


_native: Any = None


def plain_key(key: Any) -> bool:
    """Says whether a key of a dict, or a member of a set, is captured as itself."""
    return type(key) in ATOMS or (type(key) is tuple and all(map(plain_key, key)))


def name_of_key(key: Any, position: int) -> str:
    """What an item is called: two keys are never called alike."""
    return repr(key) if plain_key(key) else f"{type(key).__name__} {position}"


def function_in(member: Any) -> Any:
    """The function behind a method, class method, partial method or property.

    Objects of the script's own are not asked: they may answer anything.
    """
    kind = type(member)
    if issubclass(kind, (classmethod, staticmethod, MethodType)):
        return member.__func__
    if kind is functools.partialmethod:
        return function_in(member.func)
    return member.fget if issubclass(kind, property) else member


def is_bound(function: Any) -> bool:
    """Says whether a function that is written in C is a method of some object."""
    if not isinstance(function, BuiltinFunctionType):
        return False
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, (ModuleType, type)):
        return False
    # What a binding to C++ keeps of a function itself.
    return type(owner).__module__ != "pybind11_builtins" and type(owner).__name__ != "PyCapsule"


def find_named(module: str | None, qualname: str) -> Any:
    """The function or class of that name, None if there is none."""
    value: Any = sys.modules.get(module or "")
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value


def find_type(name: str) -> type | None:
    """Finds a class that the script has already imported, by its full name."""
    module, found, rest = name, None, ""
    while found is None and module:
        module, _, last = module.rpartition(".")
        rest = f"{last}.{rest}" if rest else last
        found = sys.modules.get(module)
    value: Any = found
    for part in rest.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, type) else None
