"""Pickles of plain values, read back with nothing but a closed list of names.

A snapshot comes out of shared memory or over the network. Whoever can write there must not be able
to run code here, so a reader resolves exact pairs of module and name, looks each up with one
`getattr`, and refuses everything else, dotted names among it.

Threads: any. Errors: `pickle.UnpicklingError` for a name that is not on the list;
`pickle.PicklingError` for a value that could not be read back.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Collection
from types import BuiltinFunctionType, FunctionType
from typing import Any

from reft._state import names
from reft._state.names import Names
from reft._state.raw import bytes_of

TENSORS: Names = names.of("reft._continuation.plain", "tensor_of")


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Names) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")
        return getattr(importlib.import_module(module), name)


class _Pickler(pickle.Pickler):
    """Writes what `loads` reads with the same list."""

    def __init__(self, stream: io.BytesIO, allowed: Names) -> None:
        super().__init__(stream, protocol=5)
        self._allowed = allowed

    def reducer_override(self, value: Any) -> Any:
        if value is Ellipsis:
            return NotImplemented
        kind = value if isinstance(value, type) else type(value)
        if kind.__name__ == "ZoneInfo" and kind.__module__ == "zoneinfo" and kind is not value:
            return kind, (value.key,)
        torch: Any = sys.modules.get("torch")
        if torch is not None and kind is torch.Tensor and kind is not value:
            return _reduced(value)
        if isinstance(value, (FunctionType, BuiltinFunctionType)):
            pair = (str(value.__module__), value.__qualname__)
        elif kind.__module__.partition(".")[0] == "numpy":
            return NotImplemented  # the reader knows which of its names are plain
        else:
            pair = (kind.__module__, kind.__qualname__)
        if pair not in self._allowed:
            raise pickle.PicklingError(f"{pair[0]}.{pair[1]} is not a plain value")
        return NotImplemented


def dumps(value: Any, *lists: Names) -> bytes:
    """Pickles a value for `loads` with the same lists.

    Raises:
        pickle.PicklingError: The value holds an object whose class is not on the lists.
    """
    stream = io.BytesIO()
    _Pickler(stream, _joined(lists)).dump(value)
    return stream.getvalue()


def loads(data: bytes, *lists: Names) -> Any:
    """Unpickles builtin values and objects whose names are on `lists`, by default `names.VALUES`.

    Raises:
        pickle.UnpicklingError: The data names something else.
    """
    return _Unpickler(data, _joined(lists)).load()


def _joined(lists: Collection[Names]) -> Names:
    return frozenset().union(*lists) if lists else names.VALUES


def tensor_of(dtype: str, shape: tuple[int, ...], contents: bytes) -> Any:
    """Makes a tensor of the host from what `_reduced` took."""
    torch: Any = sys.modules["torch"]
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise pickle.UnpicklingError(f"torch.{dtype} is not a dtype")
    flat = torch.frombuffer(bytearray(contents), dtype=kind) if contents else torch.empty(0)
    return flat.to(kind).reshape(shape)


def _reduced(tensor: Any) -> Any:
    torch: Any = sys.modules["torch"]
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.requires_grad:
        raise pickle.PicklingError(f"tensor of layout {tensor.layout} on {tensor.device}")
    contents = bytes_of(tensor.detach().resolve_conj().resolve_neg())
    return tensor_of, (str(tensor.dtype)[6:], tuple(tensor.shape), contents)
