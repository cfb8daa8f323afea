"""What captured values are made of, for those who write them (`encode`) and those who read them
(`decode`).

A node is a tuple of builtin values: kind of node, place where the object stood at the first program
point (None: it was not there), full name of its class, and what the kind needs. A value inside a
node is an atom as itself, or a tuple whose first item says what it
is: `("r", i)` another node.

Threads: any. Errors: `pickle.UnpicklingError` for what is no plain value.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from types import BuiltinFunctionType, MethodType, ModuleType
from typing import Any

ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), type(Ellipsis)})
KEEP: Any = ("keep",)
UNBOUND: Any = ("unbound",)
MISSING = object()
Report = list[tuple[str, str, str]]
# Values that pickle as names of these modules and plain arguments.
PICKLED_MODULES = frozenset({"datetime", "decimal", "fractions", "uuid", "pathlib", "zoneinfo"})
PICKLED_NAMES = frozenset({("builtins", "range"), ("builtins", "slice"), ("builtins", "complex")})
_MASKED_ARRAYS = frozenset(
    {
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy.ma", "MaskedArray"),
        ("numpy.ma.core", "MaskedArray"),
        ("numpy.ma.core", "_mareconstruct"),
    }
)


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
    return type(key) in ATOMS or (type(key) is tuple and all(map(plain_key, key)))


def name_of_key(key: Any, position: int) -> str:
    """What an item is called: two keys are never called alike."""
    return repr(key) if plain_key(key) else f"{type(key).__name__} {position}"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in PICKLED_MODULES and (module, name) not in PICKLED_NAMES | _MASKED_ARRAYS:
            raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")
        return super().find_class(module, name)


def loads(data: bytes) -> Any:
    """Unpickles builtin values; anything that names other classes is refused.

    Raises:
        pickle.UnpicklingError: The data names a class that is no plain value.
    """
    return _Unpickler(io.BytesIO(data)).load()


def function_in(member: Any) -> Any:
    """The function behind a method, class method or property; not by asking objects of the script's own, which may answer anything."""
    if isinstance(member, (classmethod, staticmethod, MethodType)):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def is_bound(function: Any) -> bool:
    """Says whether a function that is written in C is a method of some object."""
    owner = getattr(function, "__self__", None)
    return isinstance(function, BuiltinFunctionType) and owner is not None and not isinstance(owner, (ModuleType, type))


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
