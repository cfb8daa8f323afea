"""Positions of Python's own iterators.

An iterator is described by the parts that its `__reduce__` names, and made again from them: that
holds for every supported interpreter and touches no memory layout. A new iterator takes the old
one's place wherever reft found it. Iterators of dicts and sets are moved by advancing the live one,
because their `__reduce__` copies what is left.

Threads: any, with the GIL. Errors: `TypeError` where an iterator cannot be described.
"""

from __future__ import annotations

import builtins
import itertools
import sys
import warnings
from typing import Any

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
for _name in ("count", "islice", "chain", "cycle", "repeat", "starmap", "product", "zip_longest", "accumulate"):
    _REDUCED[getattr(itertools, _name)] = _name


class _Sequence:
    def __getitem__(self, index: int) -> int:
        raise IndexError(index)


_REDUCED[type(iter(_Sequence()))] = "sequence"
CALLABLE = type(iter(int, 1))
_REDUCED[CALLABLE] = "callable"

# Moved by advancing the live iterator to the same number of items left.
ADVANCED: frozenset[type] = frozenset(
    {
        type(iter({})),
        type(iter({}.values())),
        type(iter({}.items())),
        type(reversed({})),
        type(reversed({}.values())),
        type(reversed({}.items())),
        type(iter(set())),
    }
)

_CALLABLES: dict[str, Any] = {"iter": iter, "reversed": reversed}
_CALLABLES.update({name: getattr(builtins, name) for name in ("enumerate", "zip", "map", "filter")})
for _kind, _label in _REDUCED.items():
    if _kind.__module__ == "itertools":
        _CALLABLES[_label] = _kind

NO_STATE = object()
_WARNS = sys.version_info >= (3, 12)  # that iterators of itertools will not be taken apart some day


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
    if name not in _CALLABLES:
        raise TypeError(f"{type(iterator).__name__} is made by {name}")
    return name, tuple(parts[1]), parts[2] if len(parts) > 2 and parts[2] is not None else NO_STATE


def build(name: str, arguments: tuple[Any, ...]) -> Any:
    """Makes an iterator from what `reduce` gave; its state is set with `set_state`."""
    return _CALLABLES[name](*arguments)


def set_state(iterator: Any, state: Any) -> None:
    """Sets the position of a newly built iterator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        iterator.__setstate__(state)


def items_left(iterator: Any) -> int:
    """Gives the number of items that a dict's or set's iterator still yields."""
    return int(iterator.__length_hint__())


def advance(iterator: Any, items: int) -> None:
    """Drops items from the front of a dict's or set's iterator."""
    for _ in range(items):
        next(iterator)
