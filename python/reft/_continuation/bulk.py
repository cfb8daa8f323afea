"""Large lists, dicts, sets, tensors and arrays that most jobs only read: whether one still is as it
was at the first program point. What has changed is captured from then on.

Items are compared by identity, then by value. Each capture compares all items, unless they are so
many that it would take longer than some milliseconds: then it compares samples. What changes inside
of an item is not seen. `Bulk.missed` says which change may be missed.

Threads: the training thread. Cost: 1 ns for an item of a list, up to 20 for one of a dict or set,
0.1 for a byte. Errors: none; items that cannot be compared have changed.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import chain, islice
from pathlib import PurePath
from types import BuiltinFunctionType
from typing import Any

from .foreign import contents_of_memory, is_object_array, plain_iterator
from .nodes import native

_MOST_IN_A_ROW = 1 << 21  # items of a list or tuple, whose addresses lie side by side
_MOST_IN_A_TABLE = 1 << 18  # of a dict or set
_MOST_LINKED = 1 << 16  # of a deque or an OrderedDict, which cannot be walked without its items
_MOST_BYTES = 1 << 24
_SAMPLED = 64
_DEEPEST = 4  # tuples in tuples
_LOOKED_AT = 1 << 16
_FEW_ARE_COMPARED = (
    "too large to be compared whole in each snapshot; a change of single items may be missed"
)
_INSIDE_OF_ITEMS = "a change inside one of its items is not seen"
_IMMUTABLE = (
    *(int, float, bool, complex, str, bytes, type(None), type(Ellipsis), frozenset, range, slice),
    *(type, BuiltinFunctionType, PurePath, Enum, Decimal, Fraction, date, time, timedelta),
)


class Bulk:
    """A large list, dict, deque, set, tensor or array, as it was at the first program point."""

    __slots__ = ("_first", "_identity", "_is_sampled", "_size", "_version", "missed")

    def __init__(self, item: Any) -> None:
        self._identity, self._size = id(item), _size_of(item)
        self._version = _version_of(item)
        self._is_sampled = self._size > _most_of(item)
        self._first: Any = self._copied(item)
        self.missed = ""
        """Which change is not seen, or may not be; "" if each is."""
        if self._is_sampled:
            self.missed = _FEW_ARE_COMPARED
        elif _has_mutable_items(item):
            self.missed = _INSIDE_OF_ITEMS

    def restored(self, written: set[int]) -> None:
        """A resume has written into the objects with these ids: if the item is one of them, it is
        not the restarted script's any more."""
        if self._identity in written:
            self._first = None

    def has_changed(self, item: Any) -> bool:
        """Whether something has changed; once true, always true."""
        if self._first is None:
            return True
        if self._looks_alike(item):
            return False
        self._first = None  # it may hold what the script has given up
        return True

    def _looks_alike(self, item: Any) -> bool:
        now_is = id(item), _size_of(item), _version_of(item)
        if now_is != (self._identity, self._size, self._version):
            return False
        try:
            if not self._is_sampled and _holds(item, self._first):
                return True
            now = self._copied(item)
            if not bool(now == self._first):
                return False
            self._first = now  # equal items that are others: the next look finds these
            return True
        except Exception:  # items that cannot be compared are not the same ones
            return False

    def _copied(self, item: Any) -> Any:
        return _samples_of(item) if self._is_sampled else _copy_of(item)


class MappedArray:
    """The file of a `numpy.memmap` that its process may write, as it was at the first program point.

    The file is read, never the mapping: a file that has become shorter would end the process. Of a
    very large one, the time at which it was written is compared: the kernel notes that at the first
    write to a page which has been written back.
    """

    def __init__(self, value: Any) -> None:
        self._first: Any = _look_at_file(value)

    def has_changed(self, value: Any) -> bool:
        """Whether it has been written; once true, always true."""
        if self._first is not None and _look_at_file(value) != self._first:
            self._first = None
        return self._first is None


_MOST_OF_FILE = 1 << 21


def _look_at_file(value: Any) -> tuple[Any, ...]:
    """Which file it is, and its contents, or when it was written."""
    try:
        with open(value.filename, "rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            which = (found.st_dev, found.st_ino)
            if value.nbytes > _MOST_OF_FILE:
                return (*which, found.st_mtime_ns)
            return (*which, os.pread(file.fileno(), value.nbytes, value.offset))
    except OSError:
        return ()


def _version_of(item: Any) -> int:
    """How often an op has written into a tensor; 0 for anything else."""
    try:
        return int(getattr(item, "_version", 0))
    except RuntimeError:  # of an inference tensor
        return 0


def _is_memory(item: Any) -> bool:
    return hasattr(type(item), "nbytes") or isinstance(item, bytearray)


def _size_of(item: Any) -> int:
    """Bytes of memory, else items."""
    if is_object_array(item):
        return int(item.size)
    return int(item.nbytes) if hasattr(type(item), "nbytes") else len(item)


def _most_of(item: Any) -> int:
    """The size up to which all of an item is compared."""
    if is_object_array(item):
        return _MOST_IN_A_ROW if item.flags.c_contiguous else _MOST_LINKED
    if _is_memory(item):
        return _MOST_BYTES
    if isinstance(item, (list, tuple)):
        return _MOST_IN_A_ROW
    return _MOST_LINKED if isinstance(item, (deque, OrderedDict)) else _MOST_IN_A_TABLE


def _copy_of(item: Any) -> Any:
    """The items of a container; values of a dict and its order included."""
    if is_object_array(item):
        return item.reshape(-1).tolist()
    if isinstance(item, bytearray):
        return bytes(item)
    if (contents := contents_of_memory(item, _MOST_BYTES)) is not None:
        return contents
    if isinstance(item, dict):  # not pairs, which would have to be made
        base: Any = OrderedDict if isinstance(item, OrderedDict) else dict
        return [[*base.keys(item)], [*base.values(item)]]
    return [*plain_iterator(item)]


def _holds(item: Any, first: Any) -> bool:
    """Whether it still has the very items of a copy of it. False does not say that it has changed."""
    if isinstance(item, list):
        # Compares identities before it looks at the items, which may lie anywhere.
        return list.__eq__(item, first) is True
    if isinstance(item, dict):
        return not isinstance(item, OrderedDict) and native().holds_pairs(item, *first)
    if isinstance(item, (set, frozenset)):
        return bool(native().set_holds(item, first))
    try:
        if is_object_array(item):
            return bool(native().holds_objects(item, first))
        if isinstance(item, bytearray):
            return bool(native().holds_bytes(item, first))
        memory, (*what, contents) = _memory_of(item), first
        return memory is not None and what == memory[0] and native().holds_bytes(memory[1], contents)
    except (BufferError, ValueError, TypeError, RuntimeError):  # memory that cannot be lent
        return False


def _memory_of(item: Any) -> tuple[list[Any], Any] | None:
    """Of a tensor or array whose memory can be looked at without a copy: what `contents_of_memory`
    gives of it but for the contents, and their owner."""
    torch: Any = sys.modules["torch"]
    if isinstance(item, torch.Tensor):
        if not item.is_contiguous() or type(item) not in (torch.Tensor, torch.nn.Parameter):
            return None
        flat = item.detach().reshape(-1).view(torch.uint8)
        return [_version_of(item), tuple(item.shape)], flat.numpy()
    if not hasattr(type(item), "nbytes") or not hasattr(item, "dtype"):
        return None
    return [item.shape, str(item.dtype)], item


def _has_mutable_items(item: Any) -> bool:
    """Whether something inside of an item may change. Members of sets and keys of dicts may not."""
    if isinstance(item, (set, frozenset)) or (_is_memory(item) and not is_object_array(item)):
        return False
    if is_object_array(item):
        values: Iterable[Any] = item.flat
    else:
        values = dict.values(item) if isinstance(item, dict) else plain_iterator(item)
    # Of many, a part, at even distances: items of a list are of one kind, as a rule.
    items = [*islice(values, None, None, 1 + _size_of(item) // _LOOKED_AT)]
    numpy: Any = sys.modules.get("numpy")
    immutable = _IMMUTABLE if numpy is None else (*_IMMUTABLE, numpy.generic)
    for _ in range(_DEEPEST):
        kinds = set(map(type, items))
        if not all(kind is tuple or issubclass(kind, immutable) for kind in kinds):
            return True
        if tuple not in kinds:
            return False
        items = [*chain.from_iterable(one for one in items if type(one) is tuple)]
    return True


def _samples_of(item: Any) -> Any:
    if is_object_array(item):
        return item.flat[:: item.size // _SAMPLED].tolist()
    if isinstance(item, bytearray):
        return bytes(memoryview(item)[:: len(item) // _SAMPLED])
    if (contents := contents_of_memory(item)) is not None:
        return contents
    if isinstance(item, (list, tuple)):
        base: Any = list if isinstance(item, list) else tuple
        return base.__getitem__(item, slice(None, None, len(item) // _SAMPLED))
    few = [*islice(plain_iterator(item), _SAMPLED)]
    if isinstance(item, (set, frozenset)):
        return few
    return [*few, *islice(plain_iterator(item, backwards=True), _SAMPLED)]
