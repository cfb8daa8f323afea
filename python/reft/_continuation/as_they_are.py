"""Items and lengths of built-in containers as they are, whatever a class of the script that extends
one yields, and without running code of that class.

Threads: any. Errors: none for lists, tuples, deques, sets and frozensets, and for what extends them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

_SEQUENCES: tuple[Any, ...] = (list, tuple)
_BASES: tuple[Any, ...] = (*_SEQUENCES, deque, set, frozenset)
_BARE = frozenset(_BASES)


def items_of(value: Any) -> Any:
    """The items of a container: itself if its class is a built-in one."""
    kind = type(value)
    if kind in _BARE:
        return value
    base = next(base for base in _BASES if issubclass(kind, base))
    if base in _SEQUENCES:
        found: Sequence[Any] = base.__getitem__(value, slice(None))
        return found
    return list(base.__iter__(value))


def length_of(value: Any) -> int:
    """How many items a container has; also of a dict or a bytearray."""
    kind = type(value)
    for base in (*_BASES, dict, bytearray):
        if issubclass(kind, base):
            return int(base.__len__(value))
    return len(value)
