"""Objects of torch, NumPy, the standard library and other packages that keep state: which of them
may be captured, and whether one has changed.

What keeps all of its state in attributes (a Sobol engine, a parser, an averager) is captured as an
object of the script's own, once it has changed since the first program point: until then, the
restarted script has made the same. What belongs to the process (loggers, threads, process groups)
is never looked at. An object that is written in C is only observed, where that can be done.

Threads: the training thread. Cost: a walk of up to some hundred values for each such object and
step. Errors: none; what cannot be read counts as unchanged.
"""

from __future__ import annotations

import functools
import struct
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from reft._state.own import is_own
from reft._state.raw import bytes_of

from .rng import is_random, object_state

_HEAP_TYPE = 1 << 9
_POINTER = struct.calcsize("P")
_MOST_VISITS = 1024
_DEEPEST = 12
_WHOLE_BYTES = 1 << 14  # of a tensor or array that is read in full
_SAMPLED = 64
_LOCK = type(threading.Lock())
_IMMUTABLE = frozenset({int, float, bool, str, bytes, complex, type(None), type(Ellipsis)})

TRACKERS = frozenset(
    {"wandb", "tensorboard", "tensorboardX", "mlflow", "comet_ml", "neptune", "aim"}
)
"""Packages whose objects tell of this run: their threads write while the script trains."""
# Packages, and modules of packages, whose objects belong to the process.
_CLOSED = frozenset(
    {
        *TRACKERS,
        *("_thread", "abc", "ast", "asyncio", "atexit", "builtins", "cProfile", "code", "codecs"),
        *("codeop", "concurrent", "contextvars", "ctypes", "dbm", "dis", "doctest", "faulthandler"),
        *("gc", "ftplib", "http", "imaplib", "importlib", "inspect", "io", "logging", "mmap"),
        *("multiprocessing", "nntplib", "os", "pdb", "pkgutil", "poplib", "posix", "profile", "pty"),
        *("queue", "re", "reft", "resource", "runpy", "select", "selectors", "shelve", "signal"),
        *("site", "smtplib", "socket", "socketserver", "sqlite3", "ssl", "subprocess", "sys"),
        *("sysconfig", "syslog", "telnetlib", "tempfile", "threading", "tkinter", "trace"),
        *("traceback", "tracemalloc", "triton", "typing", "unittest", "urllib", "warnings"),
        *("weakref", "xmlrpc", "zipimport"),
    }
)
_CLOSED_IN_TORCH = frozenset(
    {
        *("amp", "autograd", "backends", "compiler", "cpu", "cuda", "distributed", "export", "fx"),
        *("futures", "hub", "jit", "library", "mps", "multiprocessing", "mtia", "nested", "nn", "onnx"),
        *("ops", "overrides", "package", "profiler", "storage", "testing", "xpu"),
    }
)
_CLOSED_PLACES = (
    "torch.utils._",
    "torch.utils.benchmark",
    "torch.utils.checkpoint",
    "torch.utils.cpp_extension",
    "torch.utils.data._utils",
    "torch.utils.hooks",
    "torch.utils.tensorboard",
)


def _is_open(kind: type) -> bool:
    return not is_closed(kind.__module__) and is_plain_class(kind)


is_open: Callable[[type], bool] = functools.cache(_is_open)
"""Whether objects of a class keep all of their state in attributes that may be copied."""


def is_closed(module: str) -> bool:
    """Whether the objects of a module's classes belong to the process."""
    root, _, rest = module.partition(".")
    if root == "torch":
        part = rest.partition(".")[0]
        return part.startswith("_") or part in _CLOSED_IN_TORCH or module.startswith(_CLOSED_PLACES)
    return root in _CLOSED


def is_of_c(kind: type) -> bool:
    """Whether a class is written in C, and part of Python or of a module in C."""
    return not kind.__flags__ & _HEAP_TYPE


def is_plain_class(kind: type) -> bool:
    """Whether all state of a class's objects is in attributes: no base is written in C."""
    bases = kind.__mro__[:-1]
    return _has_no_more_room(kind) and all(
        not is_of_c(base) and not isinstance(base.__dict__.get("__new__"), BuiltinFunctionType)
        for base in bases
    )


def _has_no_more_room(kind: type) -> bool:
    """Whether objects have no room beside that for attributes, slots and weak references: a type of
    C keeps its state there."""
    count = sum(len(own_slots(base)) for base in kind.__mro__)
    count += (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ <= object.__basicsize__ + count * _POINTER


def own_slots(kind: type) -> tuple[str, ...]:
    """Names in a class's `__slots__`, as they are written there."""
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _slot_names(kind: type) -> tuple[str, ...]:
    return tuple(
        f"_{base.__name__.lstrip('_')}{name}"
        if name.startswith("__") and not name.endswith("__")
        else name
        for base in kind.__mro__
        for name in own_slots(base)
    )


slot_names: Callable[[type], tuple[str, ...]] = functools.cache(_slot_names)
"""Attributes that objects of a class keep in `__slots__`, as `getattr` takes them."""


class Fingerprint:
    """What an object looks like now: equal fingerprints of one object, taken in one process, mean
    that nothing that was looked at has changed.

    Attributes:
        is_whole: whether all of the object was looked at.
    """

    __slots__ = ("_left", "_seen", "_value", "is_whole")

    def __init__(self, value: Any) -> None:
        self.is_whole = True
        self._left = _MOST_VISITS
        self._seen: dict[int, int] = {}
        try:
            self._value = self._look(value, 0)
        except Exception:  # foreign code may raise anything
            self._value = None
        del self._seen, self._left

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and bool(self._value == other._value)

    __hash__ = None  # type: ignore[assignment]

    def _look(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _IMMUTABLE:
            return repr(value) if kind is float else (kind is bool, value)  # nan, 1 == True
        if (known := self._seen.get(id(value))) is not None:
            return ("again", known)
        if self._left <= 0 or depth > _DEEPEST:
            self.is_whole = False
            return None
        self._left -= 1
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, dict):
            pairs = [*islice(plain_iterator(value), self._left + 1)]
            self.is_whole = self.is_whole and len(pairs) == len(value)
            return [
                len(value),
                *self._all("keys", [key for key, _ in pairs], depth),
                *self._all("values", [item for _, item in pairs], depth),
                *self._attributes(value, depth),
            ]
        if isinstance(value, (list, tuple, deque, set, frozenset)):
            items = [*islice(plain_iterator(value), self._left + 1)]
            self.is_whole = self.is_whole and len(items) == len(value)
            found = [kind.__name__, len(value), *self._all("items", items, depth)]
            return [*found, *self._attributes(value, depth)]
        if _is_plain_object(kind):
            return [kind.__qualname__, *self._attributes(value, depth)]
        if is_random(value):
            return repr(object_state(value))
        if (contents := contents_of_memory(value)) is not None:
            return contents
        if kind is MethodType:
            return [value.__func__.__qualname__, self._look(value.__self__, depth + 1)]
        if kind is FunctionType and is_own(value.__module__):
            return [id(value), *self._kept_by(value, depth)]
        if isinstance(value, (FunctionType, BuiltinFunctionType, ModuleType, type)):
            return id(value)
        if kind is functools.partial:
            parts = [value.func, *value.args, *value.keywords.values()]
            return [kind.__qualname__, *self._all("parts", parts, depth)]
        if depth and kind is _LOCK:
            return kind.__qualname__  # another thread may hold it for a moment
        if (probe := _probe_of(kind)) is not None:
            return probe(value)
        if is_closed(kind.__module__) or _is_saved_elsewhere(value):
            return kind.__qualname__
        return [kind.__qualname__, *self._attributes(value, depth)]

    def _all(self, name: str, items: Any, depth: int) -> list[Any]:
        found = [name, len(items)]
        for item in items:
            if self._left <= 0:
                self.is_whole = False
                break
            kind = type(item)
            if kind is str or kind is int:
                self._left -= 1
                found.append((False, item))
                continue
            if kind in _IMMUTABLE:
                self._left -= 1
            found.append(self._look(item, depth + 1))
        return found

    def _kept_by(self, function: FunctionType, depth: int) -> list[Any]:
        """What a function of the script's keeps between its calls."""
        kept: list[Any] = []
        for cell in function.__closure__ or ():
            try:
                kept.append(cell.cell_contents)
            except ValueError:
                kept.append(None)  # empty
        kept += function.__defaults__ or ()
        kept += (function.__kwdefaults__ or {}).values()
        return [*self._all("kept", kept, depth), *self._attributes(function, depth)]

    def _attributes(self, value: Any, depth: int) -> list[Any]:
        there = getattr(value, "__dict__", None)
        found = [] if type(there) is not dict else self._all("attributes", [*there.values()], depth)
        for name in slot_names(type(value)):
            found.append(self._look(getattr(value, name, None), depth + 1))
        return found


def contents_of_memory(value: Any, whole: int = _WHOLE_BYTES) -> Any:
    """The contents of a tensor or array, or samples of one of more bytes than `whole`; None for
    anything else."""
    torch: Any = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        version = 0 if value.is_inference() else value._version
        mark = [id(value), version, tuple(value.shape)]
        if value.device.type != "cpu" or value.layout is not torch.strided or not value.numel():
            return mark
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_quantized:
            return mark
        # An in-place write through `.data` leaves the version.
        is_flat = value.is_contiguous() or value.nbytes <= whole  # else the whole would be copied
        flat = (value.detach() if is_flat else value.detach()[:1]).reshape(-1)
        if flat.nbytes > whole:
            flat = flat[:: flat.numel() // _SAMPLED]
        return [*mark[1:], bytes_of(flat)]
    kind = type(value)
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(kind, "nbytes"):
        if kind.__name__ == "memmap":
            return None  # its file may have become shorter: to read it would end the process
        flat = value.flat
        if value.nbytes > whole:
            flat = flat[:: max(1, value.size // _SAMPLED)]
        elif value.flags.f_contiguous:
            flat = value.T.reshape(-1)
        else:
            flat = value.reshape(-1)
        if value.dtype.hasobject:
            return [value.shape, list(map(id, flat.tolist()))]
        return [value.shape, str(value.dtype), flat.tobytes()]
    return None


def is_object_array(value: Any) -> bool:
    """Whether it is a NumPy array of Python objects."""
    kind = type(value)
    return (kind.__module__, kind.__name__) == ("numpy", "ndarray") and value.dtype.hasobject


def plain_iterator(container: Any, backwards: bool = False) -> Iterator[Any]:
    """Iterates over a container as it is, whatever its class yields: a script's subclass is not
    run. Gives the pairs of a dict.

    Args:
        backwards: From the end; for dicts and deques.
    """
    if isinstance(container, dict):
        ordered: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        pairs = ordered.items(container)
        return reversed(pairs) if backwards else iter(pairs)
    base = next(base for base in _PLAIN_BASES if isinstance(container, base))
    items: Iterator[Any] = (
        base.__reversed__(container) if backwards else base.__iter__(container)
    )
    return items


_PLAIN_BASES: tuple[Any, ...] = (list, tuple, deque, set, frozenset)


def _has_only_attributes(kind: type) -> bool:
    """Whether a fingerprint is all of the attributes of objects of a class."""
    torch: Any = sys.modules["torch"]
    nodes = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, MethodType, FunctionType)
    schedulers = (torch.optim.lr_scheduler.LRScheduler, BuiltinFunctionType, ModuleType, type)
    return (
        is_open(kind)
        and kind.__module__.partition(".")[0] not in ("random", "numpy")
        and not issubclass(kind, (*nodes, *schedulers))
        and _probe_of(kind) is None
    )


_is_plain_object: Callable[[type], bool] = functools.cache(_has_only_attributes)


def _is_saved_elsewhere(value: Any) -> bool:
    torch: Any = sys.modules["torch"]
    elsewhere = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    return isinstance(value, elsewhere)


def _find_probe(kind: type) -> Callable[[Any], Any] | None:
    module, name = kind.__module__.lstrip("_"), kind.__qualname__
    if hasattr(kind, "hexdigest") and hasattr(kind, "update"):
        return lambda value: value.hexdigest()  # a running hash
    if module == "mmap":
        return lambda value: None if value.closed else (value.tell(), _small_contents(value))
    if module == "ctypes" or any(base.__module__ == "_ctypes" for base in kind.__mro__):
        return lambda value: bytes(memoryview(value).cast("B")[:_WHOLE_BYTES])
    if (module, name) == ("contextvars", "ContextVar"):
        return lambda value: value.get(None)
    if (module, name) == ("contextvars", "Context"):
        return lambda value: {one: id(there) for one, there in value.items()}
    if (module, name) == ("decimal", "Context"):
        return repr
    if kind is _LOCK:
        # Another thread may hold it for a moment.
        return lambda value: value.locked() and threading.active_count() == 1
    if module.partition(".")[0] == "numpy" and hasattr(kind, "__array_finalize__"):
        # A subclass of arrays. Of mapped files, `MappedArray` tells.
        return None if kind.__name__ == "memmap" else contents_of_memory
    if (module, name) == ("sqlite3", "Connection"):
        return _changes_in_memory
    if (module, name) == ("xml.etree.ElementTree", "Element"):
        return lambda value: [(one.tag, one.text, one.tail, one.items()) for one in value.iter()]
    return None


def _small_contents(value: Any) -> bytes:
    return bytes(value[:]) if len(value) <= _WHOLE_BYTES else b""


def _changes_in_memory(connection: Any) -> int:
    """How many rows a database that lies in memory has changed."""
    files = [row[2] for row in connection.execute("pragma database_list")]
    return 0 if any(files) else int(connection.total_changes)


# Written in C, and they tell nothing of their state.
_SILENT = frozenset(
    {
        *(("zlib", "Compress"), ("zlib", "Decompress"), ("bz2", "BZ2Compressor")),
        *(("bz2", "BZ2Decompressor"), ("lzma", "LZMACompressor"), ("lzma", "LZMADecompressor")),
    }
)


def is_silent(kind: type) -> bool:
    """Whether objects of a class change with each use and show nothing of it."""
    return (kind.__module__.lstrip("_"), kind.__qualname__) in _SILENT


_probe_of: Callable[[type], Callable[[Any], Any] | None] = functools.cache(_find_probe)
"""Gives what tells of an object written in C whether it has changed; None if nothing does."""


def is_observed(kind: type) -> bool:
    """Whether a change of such an object, which cannot be captured, is seen."""
    return _probe_of(kind) is not None
