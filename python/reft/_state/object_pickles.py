"""Pickles of what objects of the script keep: schedulers, registered objects, values of optimizers.

They are read back in another process, out of a vault or the job's store, so a pickle must not be
able to run what it likes. The reader resolves a closed list of names, what the script has told
torch to trust (`torch.serialization.add_safe_globals`), and classes and functions that the
script's own modules define. The writer refuses what the reader would, so that it is reported
before a restart needs it. Tensors are written by torch, and read with `weights_only`.

Threads: the training thread. Errors: `pickle.PicklingError` for a value that could not be read
back, `pickle.UnpicklingError` for a name that is not to be resolved.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from reft._state import names
from reft._state.own import is_own

References = dict[int, tuple[Any, Any]]  # by id: what stands for the object in a pickle
Find = Callable[[str, Any], Any]  # the object that a reference stands for

_READ = (
    names.VALUES
    | names.ARRAYS
    | names.MASKED_ARRAYS
    | names.CONTAINERS
    | names.SETTINGS
    | names.GENERATORS
    | names.of("reft._state.object_pickles", "tensor_of constant_of")
)
_CALLABLE = (type, FunctionType, BuiltinFunctionType)
# torch pickles these by their names, and pickle guesses the module.
_CONSTANTS = (torch.dtype, torch.memory_format, torch.layout)


def dumps(value: Any, references: References) -> bytes:
    """Pickles a value by itself: one that cannot be pickled, or read back, spoils no other."""
    stream = io.BytesIO()
    _Pickler(stream, references).dump(value)
    return stream.getvalue()


def loads(data: bytes, find: Find) -> Any:
    """Reads what `dumps` wrote."""
    return _Unpickler(data, find).load()


def tensor_of(data: bytes) -> torch.Tensor:
    """The tensor that torch has written."""
    made = torch.load(io.BytesIO(data), weights_only=True)
    if not isinstance(made, torch.Tensor):
        raise pickle.UnpicklingError(f"{type(made).__name__} is not a tensor")
    return made


def constant_of(name: str) -> Any:
    """The dtype, layout or memory format of that name."""
    made = getattr(torch, name, None)
    if not isinstance(made, _CONSTANTS):
        raise pickle.UnpicklingError(f"torch.{name} is not a constant")
    return made


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, references: References) -> None:
        super().__init__(stream, protocol=5)
        self._references = references

    def persistent_id(self, obj: Any) -> Any:
        return self._references.get(id(obj))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _CALLABLE):
            module = pickle.whichmodule(value, value.__qualname__)  # type: ignore[attr-defined]
            _resolve(module, value.__qualname__, pickle.PicklingError)
        elif isinstance(value, _CONSTANTS):
            return constant_of, (str(value).removeprefix("torch."),)
        elif isinstance(value, torch.Tensor):
            stream = io.BytesIO()
            torch.save(value, stream)
            data = stream.getvalue()
            tensor_of(data)  # of a class that torch does not read back
            return tensor_of, (data,)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, find: Find) -> None:
        super().__init__(io.BytesIO(data))
        self._find = find

    def persistent_load(self, pid: Any) -> Any:
        return self._find(*pid)

    def find_class(self, module: str, name: str) -> Any:
        return _resolve(module, name, pickle.UnpicklingError)


def _resolve(module: str, name: str, error: type[Exception]) -> Any:
    """What a name stands for, of those that are read."""
    if (module, name) in _READ:
        return getattr(importlib.import_module(module), name)
    for trusted in torch.serialization.get_safe_globals():
        # A pair says under which name a pickle has it.
        made, full = trusted if isinstance(trusted, tuple) else (trusted, _full_name(trusted))
        if full == f"{module}.{name}":
            return made
    if "." not in name and is_own(module):
        value = vars(sys.modules[module]).get(name)
        # Not what the module has imported from others.
        if isinstance(value, (type, FunctionType)) and value.__module__ == module:
            return value
    raise error(
        f"{module}.{name} is not read back: it is neither the script's nor known to hold values."
        " torch.serialization.add_safe_globals declares it"
    )


def _full_name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
