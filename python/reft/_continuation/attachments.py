"""Attributes that a script has attached to an object whose class is a package's: counters on a
model, an average on a parameter.

An attribute that no code of the package's class names was put there by somebody else. Of those only
values are taken that a script would keep: numbers, strings, dates, containers of them, tensors,
arrays, random generators, iterators, objects of its own classes; modules, optimizers and
schedulers; and, under names without an underscore in front, objects of packages whose attributes
are all of their state.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from itertools import islice
from types import (
    CodeType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

from reft._state.own import is_own

from .foreign import is_open
from .nodes import ATOMS, function_in
from .rng import is_random_kind

_TORCH = frozenset({"torch", "builtins", "typing", "abc"})
_SEQUENCES = frozenset({list, tuple, set, frozenset, deque})
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_PLAIN = frozenset(
    {
        *(GeneratorType, SimpleNamespace, MappingProxyType, ModuleType, threading.Event),
        *(bytearray, memoryview, range, slice),
    }
)
# Of the standard library, the modules whose objects a package attaches as well as a script.
_SHARED = frozenset(
    {
        *("_thread", "abc", "ast", "asyncio", "builtins", "concurrent", "contextlib", "ctypes"),
        *("_ctypes", "functools", "importlib", "inspect", "logging", "multiprocessing", "threading"),
        *("types", "typing", "weakref"),
    }
)
# What holds values for a script, though its module's other objects may be a package's.
_HOLDERS = (threading.Semaphore, threading.local, ctypes._SimpleCData, ctypes.Array)
_SHARED_NUMBERS = "multiprocessing.sharedctypes"
_WEAK = frozenset({weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet})
_OF_TORCH = (
    *("torch.autograd.profiler", "torch.distributions.", "torch.quasirandom", "torch.utils.data."),
)
# Names that torch and packages give to what they put on modules, parameters and optimizers.
_MACHINERY = ("_fsdp", "_ddp", "_hf_", "_dynamo", "_compiled", "__composable_api_state_key_")
_TENSORS = frozenset({"Parameter", "DTensor"})
_LOOKED_AT = 16  # items of a container
_names: dict[tuple[type, Collection[str]], frozenset[str]] = {}


def attributes(value: Any, roots: frozenset[str] = _TORCH) -> list[tuple[str, Any]]:
    """Returns what was attached to an object, by name.

    Args:
        roots: Top-level packages whose classes keep nothing that a script would want back.
    """
    there = vars(value)
    named = names_in(type(value), roots)
    return [
        (name, item)
        for name, item in list(there.items())
        if name not in named and is_attached(name, item)
    ]


def is_attached(name: str, item: Any) -> bool:
    """Whether an attribute of an object of a package, which its class does not name, is a script's.

    Packages attach objects of theirs, too, under names with an underscore in front: of those,
    modules are taken, but no containers of them.
    """
    if is_kept(item):
        return True
    if name.startswith("_"):
        return not name.startswith(_MACHINERY) and _is_module(type(item))
    return is_kept(item, kinds=_is_state)


def names_in(kind: type, roots: frozenset[str] = _TORCH) -> frozenset[str]:
    """Returns the names that a class of `roots`, and those of its bases, mention in their code."""
    found = _names.get((kind, roots))
    if found is None:
        names: set[str] = set()
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] in roots:
                names.update(vars(base), vars(base).get("__annotations__", ()))
                for member in vars(base).values():
                    _collect(getattr(_unwrapped(function_in(member)), "__code__", None), names)
        found = _names[kind, roots] = frozenset(names)
    return found


def is_object(item: Any) -> bool:
    """Whether a value is a module, an optimizer, a scheduler or an object of an open class."""
    return _of_torch(type(item)) or is_open(type(item))


def _is_module(kind: type) -> bool:
    torch: Any = sys.modules["torch"]
    return issubclass(kind, torch.nn.Module)


def _of_torch(kind: type) -> bool:
    """Whether objects of a class are modules, optimizers or schedulers."""
    torch: Any = sys.modules["torch"]
    return _is_module(kind) or issubclass(
        kind, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    )


def _is_state(kind: type) -> bool:
    """As `_of_torch`; or parameters, or objects of an open class."""
    return _of_torch(kind) or kind.__name__ in _TENSORS or is_open(kind)


def is_kept(
    item: Any, depth: int = 0, kinds: Callable[[type], bool] = lambda kind: False
) -> bool:
    """Whether a value is one that a script keeps.

    Args:
        item: The value.
        depth: How many containers are around it.
        kinds: Whether objects of a class are kept, too.
    """
    kind = type(item)
    if kind in ATOMS:
        return True
    if kind in _SEQUENCES or kind in _MAPPINGS:
        items = item.values() if kind in _MAPPINGS else item
        return depth < 3 and all(
            is_kept(inner, depth + 1, kinds) for inner in islice(list(items), _LOOKED_AT)
        )
    if isinstance(item, type):
        return is_own(item.__module__)
    root = kind.__module__.partition(".")[0]
    if kind in _PLAIN or issubclass(kind, _HOLDERS) or kind.__module__ == _SHARED_NUMBERS:
        return True
    if kind in _WEAK or kind is weakref.ReferenceType:
        return depth < 3 and all(is_kept(inner, depth + 1, kinds) for inner in _behind(item))
    if root in sys.stdlib_module_names and root not in _SHARED:
        return True
    if is_random_kind(kind) or kind.__module__.startswith(_OF_TORCH):
        return True
    if kind.__module__ == "builtins" and hasattr(kind, "__next__"):
        return True  # a position in something
    if isinstance(item, BaseException):
        return True
    if kind is functools.partial:
        return depth < 3 and is_kept(item.func, depth + 1, kinds)
    if kind is FunctionType or kind is MethodType:
        return is_own(item.__module__)
    torch: Any = sys.modules["torch"]
    if kind is torch.Tensor or _is_of_numpy(kind) or kinds(kind):
        return True
    of_torch = (torch.nn.Module, torch.optim.Optimizer)
    return is_own(kind.__module__) and not isinstance(item, of_torch)


def _behind(weak: Any) -> list[Any]:
    """What a weak reference or container leads to; any object may be a key."""
    if type(weak) is weakref.ReferenceType:
        return [weak()]
    members = weak if type(weak) is weakref.WeakSet else weak.values()
    return list(islice(list(members), _LOOKED_AT))


def _is_of_numpy(kind: type) -> bool:
    """Whether it is an array, a number or a date of NumPy's."""
    if kind.__module__.partition(".")[0] != "numpy":
        return False
    numpy: Any = sys.modules["numpy"]
    return issubclass(kind, (numpy.ndarray, numpy.generic, numpy.random.SeedSequence))


def _unwrapped(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _collect(code: Any, names: set[str]) -> None:
    if isinstance(code, CodeType):
        names.update(code.co_names)
        for constant in code.co_consts:
            _collect(constant, names)
            if isinstance(constant, str):
                names.add(constant)  # setattr(self, "name", …)
            elif isinstance(constant, tuple):
                names.update(item for item in constant if isinstance(item, str))
