"""Functions of the script that it has registered with packages: implementations of its operators,
how its classes are taken apart, copied or put into batches. Often nothing else holds them, and
their closures keep state.

Looked at are registries of Python dicts and lists. What is registered in C++
(`torch.library.Library.impl`), or in C, leaves nothing to look at.

Threads: the training thread. Cost: the identities of the entries at each step; the entries only
when these have changed. Errors: none.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

from reft._state.own import is_own

from . import hooks
from .births import reference
from .nodes import type_name

PLACE = "registered"  # in reports
# By module: names of dicts and lists in it, or of attributes of a class in it.
_REGISTRIES = (
    ("copyreg", "dispatch_table"),
    ("gc", "callbacks"),
    ("multiprocessing.reduction", "ForkingPickler._extra_reducers"),
    ("torch._library.custom_ops", "OPDEFS"),
    ("torch.distributions.kl", "_KL_REGISTRY"),
    ("torch.serialization", "_package_registry"),
    ("torch.utils._pytree", "SUPPORTED_NODES"),
    ("torch.utils._pytree", "SUPPORTED_SERIALIZED_TYPES"),
    ("torch.utils.data._utils.collate", "default_collate_fn_map"),
)
_PATHS = [(module, name.split(".")) for module, name in _REGISTRIES]
# Attributes of the definition of an operator that are functions, or dicts of them.
_OF_OPERATORS = (
    "_init_fn",
    "_backend_fns",
    "_abstract_fn",
    "_setup_context_fn",
    "_backward_fn",
    "_torch_dispatch_fns",
    "_vmap_fn",
)
_DEEPEST = 3


class Registries:
    """Entries of registries, as they were found last."""

    def __init__(self) -> None:
        self._entries: list[list[int]] = []  # their identities, by registry
        self._own: list[tuple[str, Callable[[], Any]]] = []  # entries, which are not kept alive

    def own(self) -> hooks.Hooks:
        """Gives what is the script's, by its place, the same in every process."""
        there = [_find(module, names) for module, names in _PATHS]
        now = [list(map(id, _held(one))) for one in there]
        if now != self._entries:
            self._entries = now
            named = zip(_REGISTRIES, there, strict=True)
            self._own = [
                (place, reference(entry) or partial(_itself, entry))
                for (module, name), registry in named
                for place, entry in _entries(f"{module}.{name}", registry)
                if any(True for _ in _functions(place, entry, 0))
            ]
        numbers: Counter[str] = Counter()
        found: hooks.Hooks = []
        for called, entry in self._own:
            for place, function in _functions(called, entry(), 0):
                numbers[place] += 1
                again = f"#{numbers[place]}" if numbers[place] > 1 else ""
                found.append((f"{place}{again}", function))
        return found


def _held(registry: Any) -> Iterable[Any]:
    """What changes with the entries: of a dict of weak references, these, which are cheap."""
    if type(registry) is WeakValueDictionary:
        registry = registry.data  # type: ignore[attr-defined]
    found: Iterable[Any] = registry.values() if isinstance(registry, Mapping) else registry
    return found


def _itself(entry: Any) -> Any:
    """Stands for a reference to what no weak one can follow, as a tuple."""
    return entry


def _find(module: str, names: list[str]) -> Any:
    value: Any = sys.modules.get(module)
    for name in names:
        value = getattr(value, name, None)
    return () if value is None else value


def _entries(place: str, registry: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(registry, (list, tuple)):
        return [(place, entry) for entry in registry]
    return [(f"{place}[{_called(key)}]", entry) for key, entry in list(registry.items())]


def _called(key: Any) -> str:
    if isinstance(key, type):
        return type_name(key)
    return ", ".join(map(_called, key)) if isinstance(key, tuple) else str(key)


def _functions(place: str, entry: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """The script's functions, methods and objects that are called, in an entry."""
    if depth > _DEEPEST or entry is None or isinstance(entry, (type, str)):
        return
    if isinstance(entry, tuple):
        names = getattr(type(entry), "_fields", range(len(entry)))
        for name, item in zip(names, entry, strict=True):
            yield from _functions(f"{place}.{name}", item, depth + 1)
    elif type(entry) is dict:
        for key, item in list(entry.items()):
            yield from _functions(f"{place}[{_called(key)}]", item, depth + 1)
    elif type(entry).__name__ == "CustomOpDef":
        for name in _OF_OPERATORS:
            yield from _functions(f"{place}.{name}", getattr(entry, name, None), depth + 1)
    elif _is_own(entry):
        yield place, entry


def _is_own(entry: Any) -> bool:
    called = hooks.behind(entry)
    if type(called) is MethodType:
        return is_own(type(called.__self__).__module__) or _is_own(called.__func__)
    if type(called) is FunctionType:
        return is_own(called.__module__) or is_own(called.__globals__.get("__name__"))
    held = entry.args if type(entry) is partial else ()
    return callable(called) and (is_own(type(called).__module__) or any(map(_is_own, held)))
