"""Live objects of the process, as the garbage collector lists them.

Threads: any. Errors: none.
"""

from __future__ import annotations

import gc
from typing import Any

from reft._state.constructions import of_process

_Class = type[Any] | tuple[type[Any], ...]


def live(*classes: _Class) -> list[list[Any]]:
    """Live instances of each class, in no particular order.

    One walk over the collector's heap, some ten milliseconds: for the first step and changed plans
    only.
    """
    found: list[list[Any]] = [[] for _ in classes]
    # By the id of the type: a metaclass may define what hashing and comparing its classes do.
    wanted_by: dict[int, tuple[list[Any], ...]] = {}
    for obj in gc.get_objects():
        # type(), not isinstance(): the latter asks __class__ of proxies, which may warn, compute or
        # raise.
        kind = type(obj)
        lists = wanted_by.get(id(kind))
        if lists is None:
            lists = tuple(
                instances
                for instances, cls in zip(found, classes, strict=True)
                if issubclass(kind, cls)
            )
            wanted_by[id(kind)] = lists
        if lists and not of_process.is_own(obj):
            for instances in lists:
                instances.append(obj)
    for instances, cls in zip(found, classes, strict=True):
        hidden = of_process.frozen(cls)
        if hidden:
            known = set(map(id, instances))
            instances += [obj for obj in hidden if id(obj) not in known]
    return found
