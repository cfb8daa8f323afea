"""What a DataLoader reaches from its samplers, dataset and collate function: the objects and random
generators whose state decides what it yields, whatever their classes are.

Followed are attributes, slots, small containers, closures and defaults of functions, methods,
partial calls, the generators that a script's functions read from their module, and objects of
packages whose attributes are all of their state (`foreign`). Not followed are models, tensors, and
what belongs to the process: loggers, locks, files.

Threads: the training thread, or a worker's. Cost: a walk of up to some thousand objects, for the
making of a loader's iterator, not for each step. Errors: none.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from reft._state.own import is_own

from . import foreign
from .bytecode import global_names
from .kinds.tables import format_of, is_table
from .rng import is_random

_MOST_PARTS = 512
_MOST_VISITS = 16384
_MOST_ITEMS = 256  # of a container that is looked into
_SEQUENCES = (list, tuple, deque, set, frozenset)
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict})
_LEAVES = (type, ModuleType, GeneratorType, str, bytes, bytearray, memoryview)
# Of these, and of the standard library, only what `foreign` takes for plain is followed.
_CLOSED = frozenset({"torch", "numpy", "reft", *foreign.TRACKERS})


_Reads = set[tuple[str, str]] | None


@dataclass(frozen=True, slots=True)
class Part:
    """An object whose attributes decide what a loader yields."""

    path: str
    """How it is reached, the same in every process."""
    value: Any
    is_drawn: bool
    """Whether drawing from the loader's sampler or iterable dataset may change it."""


@dataclass(slots=True)
class Reached:
    """What was reached, in the order of the walk."""

    parts: list[Part] = field(default_factory=list)
    slotted: list[Part] = field(default_factory=list)
    """Objects that have `__slots__` alone."""
    generators: list[tuple[str, Any]] = field(default_factory=list)
    """Path and generator, each once, also those that are attributes of parts."""
    cut: str = ""
    """Why the walk ended before its end, "" if it did not."""
    reads: set[tuple[str, str]] | None = None
    """Module and name of the globals that the script's functions read; None but in a worker."""


def reach(*roots: tuple[str, Any, bool], in_worker: bool = False) -> Reached:
    """Walks from the roots.

    Args:
        in_worker: Objects of torch, NumPy and the standard library are not followed; objects of the
            script that its functions read from their module are. (In the process that trains, the
            walk through variables has them.)
        roots: Path, object, and whether drawing runs its code. An object counts by the root from
            which it is reached first.
    """
    found = Reached(reads=set() if in_worker else None)
    seen: set[int] = set()
    kept: list[Any] = []  # methods and the like live no longer than their look-up
    work = deque(roots)
    while work:
        path, value, drawn = work.popleft()
        if id(value) in seen or value is None or issubclass(type(value), (int, float, complex)):
            continue
        if issubclass(type(value), _LEAVES):
            continue
        if len(seen) >= _MOST_VISITS or len(found.parts) >= _MOST_PARTS:
            many = f"{_MOST_PARTS} parts" if len(seen) < _MOST_VISITS else f"{_MOST_VISITS} objects"
            found.cut = f"{path} comes after the first {many}"
            break
        seen.add(id(value))
        kept.append(value)
        if is_random(value):
            found.generators.append((path, value))
            continue
        inner = _inner(value, found.reads)
        if inner is None:
            continue
        if type(getattr(value, "__dict__", None)) is dict and type(value) is not FunctionType:
            found.parts.append(Part(path, value, drawn))
        elif not hasattr(value, "__dict__") and foreign.slot_names(type(value)):
            found.slotted.append(Part(path, value, drawn))
        work.extend((f"{path}{name}", item, drawn) for name, item in inner)
    return found


def _inner(value: Any, reads: _Reads) -> list[tuple[str, Any]] | None:
    """Gives what is looked at next behind an object; None if the object is not looked into."""
    kind = type(value)
    if kind in _SEQUENCES:
        few = len(value) <= _MOST_ITEMS and kind not in (set, frozenset)
        return [(f"[{i}]", item) for i, item in enumerate(value)] if few else None
    if kind in _MAPPINGS:
        if len(value) > _MOST_ITEMS:
            return None
        pairs = list(value.items())
        return [(f"[{key!r}]", item) for key, item in pairs if type(key) in (str, int)]
    if kind is FunctionType:
        return None if _is_closed(value.__module__ or "") else _of_function(value, reads)
    if kind is MethodType:
        return [(".__self__", value.__self__), (".__func__", value.__func__)]
    if kind is functools.partial:
        keywords = [(f".{name}", item) for name, item in value.keywords.items()]
        return [(".func", value.func), (".args", value.args), *keywords]
    if is_table(kind):
        return [(f".{name}", item) for name, item in format_of(value)]
    if not _is_followed(value, reads):
        return None
    attributes = [(f".{name}", item) for name, item in list(getattr(value, "__dict__", {}).items())]
    slots = [
        (f".{name}", getattr(value, name))
        for name in foreign.slot_names(kind)
        if hasattr(value, name)
    ]
    return [*attributes, *slots, *_read_by_class(kind, reads)]


def _is_followed(value: Any, reads: _Reads) -> bool:
    """Whether an object, which is no container and no function, is looked into."""
    kind = type(value)
    torch: Any = sys.modules["torch"]
    if issubclass(type(value), torch.nn.Module):
        # A transform or a collator may be one; a model is saved elsewhere.
        return next(value.parameters(), None) is None
    if issubclass(type(value), (torch.Tensor, torch.optim.Optimizer, BaseException)):
        return False
    data: Any = torch.utils.data
    if issubclass(type(value), (data.Sampler, data.Dataset, data.DataLoader)):
        return True
    if _is_closed(kind.__module__):
        return reads is None and foreign.is_open(kind)
    return hasattr(value, "__dict__") or hasattr(kind, "__slots__")


def _is_closed(module: str) -> bool:
    root = module.partition(".")[0]
    return root in _CLOSED or (root in sys.stdlib_module_names and root != "__main__")


def _of_function(function: FunctionType, reads: _Reads) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            found.append((f":{name}", cell.cell_contents))
        except ValueError:
            continue  # empty
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    found += [(f"({i})", item) for i, item in enumerate(defaults)]
    found += [(f".{name}", item) for name, item in function.__dict__.items()]
    return [*found, *_read_by(function, reads)]


def _read_by(function: FunctionType, reads: _Reads) -> list[tuple[str, Any]]:
    """The generators and functions that a function of the script reads from its module; in a
    worker, objects, too."""
    if not is_own(function.__module__):
        return []
    there, names = function.__globals__, sorted(global_names(function.__code__)[0])
    if reads is not None:
        reads.update((function.__module__, name) for name in names if name in there)
    named = ((name, there.get(name)) for name in names)
    return [
        (f"<{function.__module__}:{name}>", item)
        for name, item in named
        if is_random(item)
        or type(item) is FunctionType
        or (
            reads is not None
            and is_own(type(item).__module__)
            and not issubclass(type(item), type)
        )
    ]


def _read_by_class(kind: type, reads: _Reads) -> list[tuple[str, Any]]:
    if not is_own(kind.__module__):
        return []
    found: list[tuple[str, Any]] = []
    for base in kind.__mro__[:-1]:
        for name, member in vars(base).items():
            member = getattr(member, "__func__", member)
            if type(member) is FunctionType:
                found += _read_by(member, reads)
            elif is_random(member):  # an attribute of the class
                found.append((f"<{base.__qualname__}.{name}>", member))
    return found
