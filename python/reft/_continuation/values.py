"""Copies plain values out of live objects and writes them back into the live objects of a restarted process.

`Encoder` turns a graph of objects into a list of nodes made of builtin values only; one object is one node, so aliases
stay aliases. `Decoder` walks the nodes beside the live graph: each node finds its live counterpart (by the place where
the object stood at the process's first program point, else by the same path), and the differences become *writes*.
Nothing live is touched until `Decoder.apply`.

Objects that have an owner (optimizers, process groups, files, threads, classes, weights that an optimizer updates) are
never copied and never written. Of a module everything else is (`modules`), of a function its cells, of a loader its
samplers and position (`loaders`).

Threads: the training thread. Errors: a value that cannot be captured is reported, not raised.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import io
import pickle
import re
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any

from . import handles, iterators, loaders, memory
from .bytecode import analyse
from .modules import tree_of
from .rng import new_object, object_state, set_object_state

ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), type(Ellipsis)})
KEEP: Any = ("keep",)
UNBOUND: Any = ("unbound",)

MISSING = object()
_MEMBER = "<member>"
_MAX_DEPTH = 12
_MAX_NODES = 50_000

# Things with an owner, or without state of their own.
_OWNED_TYPES: tuple[type, ...] = (
    ModuleType,
    MethodWrapperType,
    WrapperDescriptorType,
    MemberDescriptorType,
    GetSetDescriptorType,
    MappingProxyType,
    GenericAlias,
    CodeType,
    FrameType,
    TracebackType,
    CellType,
    CoroutineType,
    type,
    property,
    staticmethod,
    classmethod,
    weakref.ReferenceType,
    weakref.ProxyType,
    weakref.CallableProxyType,
    BaseException,
)

# Values that pickle as names of these modules and plain arguments.
_PICKLED_MODULES = frozenset({"datetime", "decimal", "fractions", "uuid", "pathlib", "zoneinfo"})
_PICKLED_NAMES = frozenset({("builtins", "range"), ("builtins", "slice"), ("builtins", "complex")})
# Of those, modules whose values never change: scripts hold a few paths and dates for their whole life. (`decimal` has contexts.)
_CONSTANT_MODULES = frozenset({"datetime", "pathlib"})
# The pickles of such values by identity, with what keeps the identity.
_pickles: dict[int, tuple[Any, bytes]] = {}
_MAX_PICKLES = 256

_OPTIMIZERS_OWN = frozenset({"defaults", "param_groups", "state"})
# What torch and its schedulers hang on each optimizer, besides its hooks.
_OPTIMIZERS_PRIVATE = frozenset(
    {"_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called", "_step_supports_amp_scaling", "step"}
)
_STATEFUL_STDLIB = frozenset({"argparse", "types", "dataclasses", "collections", "random", "contextlib"})
_QUEUES = frozenset({"queue", "_queue", "asyncio.queues", "multiprocessing.queues"})
_FOREIGN_ROOTS = frozenset({"torch", "reft", "numpy", "triton"})
# Loggers and their like: what they hold lives outside of the process.
_OWN_OUTSIDE = frozenset({"wandb", "tensorboard", "tensorboardX", "mlflow", "comet_ml", "neptune", "aim"})

_SMALL_ITEMS = 256  # lists and dicts of a dataset up to this are always looked at
Report = list[tuple[str, str, str]]
GeneratorCapture = Callable[["Encoder", Any, str], Any]
GeneratorPlan = Callable[["Decoder", Any, Any, str], Any]


def type_name(kind: type) -> str:
    """Gives a type's full name, the same in every process of one script."""
    known = _type_names.get(kind)
    if known is None:
        known = _type_names[kind] = f"{kind.__module__}.{kind.__qualname__}"
    return known  # one string each time: pickle writes it once


_type_names: dict[type, str] = {}


class Births:
    """Where objects stood at the first program point of this process: names that two processes share."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[weakref.ref[Any], str]] = {}
        # Lists, dicts and the like, which no weak reference can follow, by identity. One that is gone may leave its identity to
        # another: that one is then put where the first stood, which is no harm, because nobody holds it any more.
        self._unfollowed: dict[int, str] = {}
        self._held: dict[str, Any] | None = None
        self._at: dict[str, int] = {}
        self._ambiguous: set[str] = set()
        self.recorded = False
        self.bulky: dict[str, tuple[int, int, int]] = {}
        """Identity, size and version of a dataset's large attributes by place."""
        self.handles: dict[str, Any] = {}
        """Numbers by place that were descriptors, processes, threads or addresses then; see `handles`."""
        self.constants: dict[str, Any] = {}
        """Numbers and strings by place outside of frames; see `statics`."""
        self.named: dict[str, Any] = {}
        """Functions and classes by place: what means another one later is captured by name."""

    def note(self, value: Any, place: str) -> None:
        """Remembers the first place of an object.

        Members of a set have none either: their order is another one in each process. A place that two objects have is no name.
        """
        known = self._places.get(id(value))
        if _MEMBER in place or (known is not None and known[0]() is value):
            return
        try:
            self._places[id(value)] = (weakref.ref(value), place)
        except TypeError:
            if self._at.setdefault(place, id(value)) != id(value):
                self._ambiguous.add(place)
            self._unfollowed.setdefault(id(value), place)
            if self._held is not None:
                self._held.setdefault(place, value)
            return
        other = self._places.get(self._at.get(place, 0), (lambda: None, ""))[0]()
        if other is not None and other is not value:
            self._ambiguous.add(place)
        self._at[place] = id(value)

    def place(self, value: Any) -> str | None:
        """Gives the place an object was born at, if it was there."""
        found = self._places.get(id(value))
        if found is not None and found[0]() is value:
            place: str | None = found[1]
        else:
            place = self._unfollowed.get(id(value))
        return None if place in self._ambiguous else place

    def hold(self) -> None:
        """Keeps every object that is noted from now on: `by_place` gives them all."""
        self._held = {}

    def release(self) -> None:
        """Ends what `hold` began."""
        self._held = None

    def by_place(self) -> dict[str, Any]:
        """Gives the objects that are still alive, by their place."""
        pairs = ((place, reference()) for reference, place in self._places.values() if place not in self._ambiguous)
        found = {place: value for place, value in pairs if value is not None}
        found.update((place, value) for place, value in (self._held or {}).items() if place not in self._ambiguous)
        return found


births = Births()


class Encoder:
    """Copies values into nodes.

    Args:
        limit_bytes: Most bytes to copy in all; what does not fit is reported.
        owned_tensors: Ids of tensors that are saved elsewhere (parameters, optimizer state), and of the optimizers.
        owned_storages: Where their memory lies.
        capture_frame: Encodes the frame of a suspended generator.
        note_births: Only note where objects stand: this is the first program point of the process.
    """

    def __init__(
        self,
        limit_bytes: int,
        owned_tensors: Iterable[int] = (),
        capture_frame: GeneratorCapture | None = None,
        note_births: bool = False,
        owned_storages: frozenset[int] = frozenset(),
    ) -> None:
        self.nodes: list[Any] = []
        self.uncaptured: Report = []
        self.graphs: list[tuple[Any, str]] = []  # tensors that were computed from others, and where they stand
        self._left = limit_bytes
        self._owned = owned_tensors if isinstance(owned_tensors, (set, frozenset)) else frozenset(owned_tensors)
        self._owned_storages = owned_storages
        self._capture_frame = capture_frame
        self.note_births = note_births
        self._handles = handles.now() if note_births else frozenset[int]()
        self._own: Collection[str] | None = None
        self._inside_data = 0  # how many datasets are around what is being encoded
        self._index: dict[int, int] = {}
        self._objects: list[Any] = []  # of each node; an id means something only while its object lives
        self._alive: list[Any] = []

    def encode(self, value: Any, place: str, depth: int = 0) -> Any:
        """Encodes one value: an atom as itself, everything else as a reference to a node.

        Args:
            value: The value.
            place: Its name, for reports.
            depth: How many containers are around it.
        """
        kind = type(value)
        if kind in ATOMS:
            if (kind is str or kind is bytes) and not self._take(len(value)):
                return self._give_up(value, place, no_room(len(value)))
            # Not in containers: an item that is left alone cannot be told from one that has been moved there.
            if kind is int and (self.note_births or births.handles) and place[-1:] != "]" and self._is_handle(value, place):
                return ("handle", value)  # of this process; the next one has its own
            return value
        if kind is tuple and len(value) == 2 and set(map(type, value)) == {int} and self._is_handle(value, place):
            return ("handle", value)  # what os.pipe() gives
        known = self._index.get(id(value))
        if known is not None:
            return ("r", known)
        handler = _handler_of(kind)
        index = len(self.nodes)
        if index >= _MAX_NODES or depth > _MAX_DEPTH:
            return self._give_up(value, place, "too many objects" if index >= _MAX_NODES else "too deep")
        self.nodes.append(KEEP)
        self._index[id(value)] = index
        self._objects.append(value)
        birth = None
        if handler not in _UNBORN:
            if self.note_births:
                births.note(value, place)
            birth = births.place(value)
        # Below an object that stood somewhere at the first point, places are the same however it is reached now.
        place = birth or place
        try:
            if self._inside_data and (self._is_foreign(kind, handler) or not self._moves(value, place)):
                node = ("owned",)
            else:
                node = handler(self, value, place, depth)
        except (
            Exception
        ) as error:  # a user's object may do anything when it is looked at; the others are still worth having
            node = self.lost(place, type_name(kind), f"looking at it failed: {type(error).__name__}: {error}")
        self.nodes[index] = (node[0], birth, type_name(kind), *node[1:])
        return ("r", index)

    def begin_outside(self, own: Collection[str]) -> None:
        """From here on values are outside of the frames.

        Lists, dicts and arrays that are large and have not changed their size are left out, as are objects of installed
        packages: trackers, tokenizers, what a decorator hangs on a function.

        Args:
            own: Names of the script's own modules.
        """
        self._inside_data += 1
        self._own = own

    def end_outside(self) -> None:
        """Ends what `begin_outside` began."""
        self._inside_data -= 1
        self._own = None

    def _is_foreign(self, kind: type, handler: Any) -> bool:
        """Whether an object outside of the frames is an installed package's."""
        if self._own is None or handler not in (Encoder._instance, Encoder._unknown) or hasattr(kind, "__next__"):
            return False
        return kind.__module__ not in self._own and kind.__module__.partition(".")[0] not in _STATEFUL_STDLIB

    def _is_handle(self, value: Any, place: str) -> bool:
        """Whether a number, or a pair, was a handle of this process at the first program point and has not changed."""
        if self.note_births:
            if handles.is_handle(value, self._handles):
                births.handles.setdefault(place, value)
            return False
        return bool(births.handles) and births.handles.get(place) == value

    def encode_all(self, values: Collection[Any], place: str, depth: int) -> list[Any]:
        """Encodes the items of a sequence."""
        if type(values) in (list, tuple) and set(map(type, values)) <= _NUMBERS:
            items = list(values)
            if self._take(9 * len(items)):
                return items
        if isinstance(values, list):  # as it is, whatever its class yields
            values = list.__getitem__(values, slice(None))
        return [self.encode(value, f"{place}[{i}]", depth + 1) for i, value in enumerate(values)]

    def lost(self, place: str, name: str, reason: str) -> tuple[Any, ...]:
        """Reports a value that cannot be captured and makes its node."""
        if len(self.uncaptured) < 200:
            self.uncaptured.append((place, name, reason))
        return ("lost", reason)

    def lost_position(self, encoded: Any) -> str | None:
        """Says why a loop's position is not known, if `encoded` is an iterator that could not be captured."""
        if type(encoded) is not tuple or encoded[0] != "r" or self.nodes[encoded[1]][0] != "lost":
            return None
        value = self._objects[encoded[1]]
        position = hasattr(value, "__next__") or hasattr(value, "__anext__")
        return str(self.nodes[encoded[1]][3]) if position else None

    def _give_up(self, value: Any, place: str, reason: str) -> Any:
        self.lost(place, type_name(type(value)), reason)
        return KEEP

    def _take(self, size: int) -> bool:
        if size > self._left:
            return False
        self._left -= size
        return True

    def _no_room(self, value: Any, place: str, size: int) -> tuple[Any, ...]:
        return self.lost(place, type_name(type(value)), no_room(size))

    def _sequence(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        kind = type(value)
        if not self._take(8 * len(value)):
            return self._no_room(value, place, 8 * len(value))
        items = self.encode_all(value, place, depth)
        if issubclass(kind, deque):
            return ("deque", items, value.maxlen)
        if issubclass(kind, tuple):
            return ("tuple", items)
        return ("list", items, self._attributes(value, place, depth))

    def _attributes(self, value: Any, place: str, depth: int) -> list[tuple[str, Any]]:
        """Encodes what a subclass of a container keeps beside its items."""
        attributes = getattr(value, "__dict__", None)
        if not attributes:
            return []
        return [(name, self.encode(item, f"{place}.{name}", depth + 1)) for name, item in list(attributes.items())]

    def _key(self, key: Any, place: str, depth: int) -> Any:
        """A key or member: itself if it is plain, else its encoded form as a list, which no key can be."""
        return key if _plain_key(key) else list(self.encode(key, place, depth + 1))

    def _mapping(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if "__builtins__" in value:
            return ("owned",)  # the globals of a module
        if not self._take(16 * len(value)):
            return self._no_room(value, place, 16 * len(value))
        items = [
            (
                key if type(key) in ATOMS else self._key(key, f"{place}<key {i}>", depth),
                item if type(item) in _NUMBERS else self.encode(item, f"{place}[{_name_of_key(key, i)}]", depth + 1),
            )
            for i, (key, item) in enumerate(list(dict.items(value)))  # as it is, whatever its class yields
        ]
        factory = getattr(value, "default_factory", None)
        return (
            "dict",
            items,
            self._attributes(value, place, depth),
            type_name(factory) if isinstance(factory, type) else None,
        )

    def _set(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if not self._take(16 * len(value)):
            return self._no_room(value, place, 16 * len(value))
        members = [self._key(item, place + _MEMBER, depth) for item in value]
        return ("set", members, self._attributes(value, place, depth))

    def _bytearray(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if not self._take(len(value)):
            return self._no_room(value, place, len(value))
        return ("bytearray", bytes(value))

    def _owned_object(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        return ("owned",)

    def _optimizer(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        """Encodes what an optimizer class of the script's own keeps besides state and groups, which are saved elsewhere."""
        saved = _OPTIMIZERS_OWN if id(value) in self._owned else frozenset()
        own = [
            (name, item)
            for name, item in vars(value).items()
            if name not in saved and name not in _OPTIMIZERS_PRIVATE and not name.startswith("_optimizer_")
        ]
        return ("shallow", [(name, self.encode(item, f"{place}.{name}", depth + 1)) for name, item in own])

    def _named(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        """Encodes a function or a class: the restarted script has it, but may mean another one here."""
        if is_bound(value):
            return self._bound(value, place, depth)
        if not self.is_switched(value, place):
            return ("owned",)
        for name in (value.__qualname__, value.__name__):
            if find_named(value.__module__, name) is value:
                return ("named", value.__module__, name)
        if place in births.named:
            why = f"another one than after the first step, and {value.__qualname__} cannot be found by its name"
            return self.lost(place, type_name(type(value)), why)
        return ("owned",)

    def _bound(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        """Encodes a method that is written in C, of an object that may be held by nothing else."""
        return ("method", value.__name__, self.encode(value.__self__, f"{place}.__self__", depth + 1))

    def is_switched(self, value: Any, place: str) -> bool:
        """Whether a function or a class is not what stood there at the first program point, which is noted."""
        if self.note_births:
            births.named[place] = value
            return False
        return births.named.get(place, MISSING) is not value

    def _shallow(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        """Encodes a dataset or sampler: all but the data itself, which is large and stays as it is."""
        attributes: list[tuple[str, Any]] = []
        for name, item in list(getattr(value, "__dict__", {}).items()):
            if name in loaders.WHOSE:
                continue
            self._inside_data += 1
            try:
                attributes.append((name, self.encode(item, f"{place}.{name}", depth + 1)))
            finally:
                self._inside_data -= 1
        return ("shallow", attributes)

    def _moves(self, item: Any, place: str) -> bool:
        """Says whether a part of a dataset is no list, dict or array, or a small one, or has changed since the first point."""
        nbytes = getattr(item, "nbytes", None)
        if nbytes is None and not isinstance(item, _CONTAINERS):
            return True
        size = len(item) if nbytes is None else nbytes // 8
        if size <= _SMALL_ITEMS:
            return True
        mark = (id(item), size, getattr(item, "_version", 0))
        if self.note_births:
            births.bulky[place] = mark
        return births.bulky.get(place) != mark

    def _loader(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        parts = [
            (name, self.encode(part, f"{place}.{name}", depth + 1))
            for name in ("batch_sampler", "sampler", "dataset")
            if (part := getattr(value, name, None)) is not None
        ]
        if self.note_births:
            return ("owned",)
        iterator = getattr(value, "_iterator", None)
        return (
            "loader",
            loaders.parts_of_loader(value).capture(),
            self.encode(iterator, f"{place}._iterator", depth + 1) if value.persistent_workers else None,
            parts,
        )

    def _function(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        root = (value.__module__ or "").partition(".")[0]
        foreign = root in _FOREIGN_ROOTS or (root in sys.stdlib_module_names and root not in _STATEFUL_STDLIB)
        if foreign or not has_state(value):
            return self._named(value, place, depth)
        cells: list[Any] = []
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                cells.append(self.encode(cell.cell_contents, f"{place}:{name}", depth + 1))
            except ValueError:
                cells.append(KEEP)  # empty
        defaults = [(name, self.encode(item, f"{place}({name})", depth + 1)) for name, item in _mutable_defaults(value)]
        which = f"{value.__qualname__} {analyse(value.__code__).digest.hex()}"
        return ("function", which, cells, self._attributes(value, place, depth), defaults)

    def _method(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        return ("method", value.__func__.__name__, self.encode(value.__self__, f"{place}.__self__", depth + 1))

    def _partial(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        parts = [value.func, list(value.args), dict(value.keywords)]
        self._alive.append(parts)
        return ("partial", [self.encode(part, f"{place}<partial>", depth + 1) for part in parts])

    def _module(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if self.note_births:
            return self._note_module(value, place, depth)
        if births.place(value) is None:
            return self._instance(value, place, depth)
        tree = tree_of(value)
        unowned = [i for i, tensor in enumerate(tree.tensors) if not self._is_owned(tensor)]
        tensors: list[tuple[str, Any]] = []
        if unowned and tree.has_changed(unowned):
            size = sum(tree.tensors[i].nbytes for i in unowned)
            if size > self._left:
                self.lost(
                    place,
                    type_name(type(value)),
                    f'weights of no optimizer, {no_room(size)}; or reft.register("name", it)',
                )
            else:
                tensors = [
                    (tree.names[i], self.encode(tree.tensors[i], f"{place}.{tree.names[i]}", depth)) for i in unowned
                ]
        attributes = [(i, name, self.encode(item, f"{place}.{name}", depth + 1)) for i, name, item in tree.attributes()]
        return ("module", len(tree.modules), tree.training(), tree.requires_grad(), attributes, tensors)

    def _note_module(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        tree = tree_of(value)
        tree.sample_all()
        for prefix, module in value.named_modules():
            births.note(module, f"{place}.{prefix}")
        for name, tensor in zip(tree.names, tree.tensors, strict=True):
            births.note(tensor, f"{place}.{name}")
        for _, name, item in tree.attributes():
            self.encode(item, f"{place}.{name}", depth + 1)
        return ("owned",)

    def _is_owned(self, tensor: Any) -> bool:
        return id(tensor) in self._owned or id(getattr(tensor, "_local_tensor", None)) in self._owned

    def _dtensor(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if self.note_births or self._is_owned(value):
            return ("owned",)
        layout = f"{tuple(value.shape)} {value.placements}"
        return ("dtensor", layout, self.encode(value._local_tensor, f"{place}._local_tensor", depth + 1))

    def _tensor_subclass(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if self.note_births or self._is_owned(value):
            return ("owned",)
        return self.lost(place, type_name(type(value)), "tensor of a class that is not known")

    def _instance(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        attributes = [
            (name, self.encode(item, f"{place}.{name}", depth + 1))
            for name, item in list(getattr(value, "__dict__", {}).items())
        ]
        slots = [
            (name, self.encode(getattr(value, name), f"{place}.{name}", depth + 1))
            for name in _slot_names(type(value))
            if hasattr(value, name)
        ]
        return ("instance", attributes, slots)

    def _constant(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if isinstance(value, enum.Enum):
            return ("enum", value.name, value.value if type(value.value) in ATOMS else None)
        return ("torch_constant", str(value))

    def _pickled(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if type(value).__module__.partition(".")[0] not in _CONSTANT_MODULES:
            return ("pickled", pickle.dumps(value, protocol=5))
        known = _pickles.get(id(value))
        if known is None or known[0] is not value:
            if len(_pickles) >= _MAX_PICKLES:
                _pickles.clear()
            known = _pickles[id(value)] = (value, pickle.dumps(value, protocol=5))
        return ("pickled", known[1])

    def _unknown(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if hasattr(value, "__next__"):
            return self.lost(place, type_name(type(value)), "iterator of unknown kind")
        if hasattr(value, "__anext__"):
            return self.lost(place, type_name(type(value)), "asynchronous generator: use a `for` loop over a plain one")
        return self.lost(place, type_name(type(value)), "unknown type")

    def _file(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if self.note_births or value.closed or not value.readable() or value.writable():
            return ("owned",)
        if not value.seekable():
            return self.lost(place, type_name(type(value)), "what is read from it only moves forward")
        try:
            position = value.tell()
        except OSError:  # of text that a `for` loop reads
            return self.lost(
                place, type_name(type(value)), "file that a `for` loop reads: use readline(), or list(file)"
            )
        return ("file", position, str(getattr(value, "name", "")))

    def _buffer(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if value.closed:
            return ("owned",)
        contents = value.getvalue()
        if not self._take(len(contents)):
            return self._no_room(value, place, len(contents))
        return ("buffer", contents, value.tell())

    def _queue(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if not self.note_births and not value.empty():
            return self.lost(
                place, type_name(type(value)), "queue: what is in it stays as it is; a list or deque comes back"
            )
        return ("owned",)

    def _future(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if self.note_births:
            return ("owned",)
        return self.lost(place, type_name(type(value)), "what another thread computes is the restarted script's")

    def _reduced(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        try:
            name, arguments, state = iterators.reduce(value)
        except (TypeError, AttributeError) as error:
            return self.lost(place, type_name(type(value)), str(error))
        self._alive.append((arguments, state))
        # A position is a number of its own, whatever else that number may be in this process.
        encoded = [
            part if type(part) is int else self.encode(part, f"{place}<{name}>", depth + 1) for part in arguments
        ]
        for part in encoded:
            reason = self.lost_position(part)
            if reason is not None:
                return ("lost", reason)  # reported where it was found
        has_state = state is not iterators.NO_STATE
        if has_state and type(state) is not int:
            state = self.encode(state, place, depth + 1)
        return ("iterator", name, encoded, has_state, state if has_state else None)

    def _advanced(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        return ("advanced", iterators.items_left(value))

    def _generator(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if value.gi_running:
            return ("owned",)  # its frame is on the path
        if value.gi_frame is None:
            return ("finished_generator",)
        if self._capture_frame is None:
            return self.lost(place, "generator", "generators are not captured here")
        try:
            record = self._capture_frame(self, value, f"{place}()")
        except Exception as error:
            return self.lost(place, "generator", str(error))
        for part in record["stack"]:
            reason = self.lost_position(part)
            if reason is not None:
                return ("lost", reason)
        return ("generator", record)

    def _loader_iterator(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        why = loaders.unrestorable(value)
        if why is not None:
            return self.lost(place, type_name(type(value)), why)
        if self.note_births:
            self.encode(loaders.loader_of(value), f"{place}.loader", depth + 1)
            return ("owned",)
        remark = loaders.remark(value)
        if remark is not None:
            self.lost(place, type_name(type(value)), remark)
        return (
            "loader_iterator",
            self.encode(loaders.loader_of(value), f"{place}.loader", depth + 1),
            loaders.describe(value),
        )

    def _tensor(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        torch: Any = sys.modules["torch"]
        if value.grad_fn is not None:
            self.graphs.append((value, place))
        if id(value) in self._owned:
            return ("owned",)
        if self.note_births:
            return ("owned",)  # only its place matters
        name = type_name(type(value))
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            return self.lost(place, name, f"tensor of layout {value.layout} on {value.device}")
        size = value.numel() * value.element_size()
        if not self._take(size):
            return self._no_room(value, place, size)
        return (
            "tensor",
            str(value.dtype)[6:],
            tuple(value.shape),
            str(value.device),
            _tensor_bytes(torch, value),
            value.requires_grad and value.is_leaf,
            memory.memory_of_tensor(value, self._owned_storages),
        )

    def _array(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if self.note_births:
            return ("owned",)
        if value.dtype.hasobject or value.dtype.names is not None:
            return self.lost(place, type_name(type(value)), f"array of {value.dtype}")
        if not self._take(value.nbytes):
            return self._no_room(value, place, value.nbytes)
        return ("array", value.dtype.str, tuple(value.shape), value.tobytes(), memory.memory_of_array(value))

    def _random(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        return ("random", object_state(value))


def _tensor_bytes(torch: Any, tensor: Any) -> bytes:
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)  # as below, at a third of the cost
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return b"" if flat.numel() == 0 else bytes(flat.view(torch.uint8).numpy().tobytes())


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in _PICKLED_MODULES and (module, name) not in _PICKLED_NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")
        return super().find_class(module, name)


def loads(data: bytes) -> Any:
    """Unpickles builtin values; anything that names other classes is refused.

    Raises:
        pickle.UnpicklingError: The data names a class that is no plain value.
    """
    return _Unpickler(io.BytesIO(data)).load()


def no_room(size: int) -> str:
    """Says that a value of `size` bytes is left out, and what would make room for it."""
    return f"{size} bytes are more than what is left of the limit REFT_RESUME_FRAME_BYTES"


def has_state(function: FunctionType) -> bool:
    """Says whether a function keeps anything between its calls: a closure, attributes, defaults that can change."""
    if function.__dict__ or (function.__closure__ and function.__code__.co_freevars != ("__class__",)):
        return True
    return bool((function.__defaults__ or function.__kwdefaults__) and _mutable_defaults(function))


def _mutable_defaults(function: FunctionType) -> list[tuple[str, Any]]:
    """Gives the default arguments that can change, by name."""
    defaults = function.__defaults__ or ()
    code = function.__code__
    named = list(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))
    named += (function.__kwdefaults__ or {}).items()
    fixed = (tuple, frozenset)
    return [(name, item) for name, item in named if type(item) not in fixed and _handler_of(type(item)) in _MUTABLE]


def _set_default(function: FunctionType, name: str, value: Any) -> None:
    """Gives a default argument another value."""
    if function.__kwdefaults__ is not None and name in function.__kwdefaults__:
        function.__kwdefaults__[name] = value
        return
    defaults = list(function.__defaults__ or ())
    names = function.__code__.co_varnames[: function.__code__.co_argcount][-len(defaults) :]
    defaults[names.index(name)] = value
    function.__defaults__ = tuple(defaults)


def _name_of_key(key: Any, position: int) -> str:
    """What an item is called: two keys are never called alike."""
    return repr(key) if _plain_key(key) else f"{type(key).__name__} {position}"


def _plain_key(key: Any) -> bool:
    return type(key) in ATOMS or (type(key) is tuple and all(map(_plain_key, key)))


def _slot_names(kind: type) -> tuple[str, ...]:
    found = _slots.get(kind)
    if found is None:
        names: list[str] = []
        for base in kind.__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else tuple(slots):
                if name.startswith("__") and not name.endswith("__"):
                    name = f"_{base.__name__.lstrip('_')}{name}"
                if name not in ("__dict__", "__weakref__"):
                    names.append(name)
        found = _slots[kind] = tuple(names)
    return found


_slots: dict[type, tuple[str, ...]] = {}
_CONTAINERS = (list, tuple, dict, set, frozenset, bytearray, deque)
_NUMBERS = frozenset({int, float, bool, type(None)})

_Handler = Callable[[Encoder, Any, str, int], tuple[Any, ...]]
# Handlers whose objects have no identity worth keeping across processes.
_UNBORN: frozenset[Any] = frozenset(
    {Encoder._pickled, Encoder._reduced, Encoder._method, Encoder._partial}
)


# Of default arguments, those that can change in place.
_MUTABLE: frozenset[Any] = frozenset(
    {
        Encoder._sequence,
        Encoder._mapping,
        Encoder._set,
        Encoder._bytearray,
        Encoder._instance,
        Encoder._tensor,
        Encoder._array,
        Encoder._random,
        Encoder._generator,
        Encoder._reduced,
    }
)


def is_bound(function: Any) -> bool:
    """Says whether a function that is written in C is a method of some object."""
    owner = getattr(function, "__self__", None)
    return type(function) is BuiltinFunctionType and owner is not None and not isinstance(owner, (ModuleType, type))


def find_named(module: str | None, qualname: str) -> Any:
    """The function or class of that name, None if there is none."""
    value: Any = sys.modules.get(module or "")
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value


def _handler_of(kind: type) -> _Handler:
    handler = _handlers.get(kind)
    if handler is None:
        handler = _handlers[kind] = _classify(kind)
    return handler


def _classify(kind: type) -> _Handler:
    """Chooses how values of a type are encoded. The result is cached per type."""
    root = kind.__module__.partition(".")[0]
    if iterators.is_reduced(kind):
        return Encoder._reduced
    if kind in iterators.ADVANCED:
        return Encoder._advanced
    if kind is GeneratorType:
        return Encoder._generator
    if kind is AsyncGeneratorType:
        return Encoder._unknown
    if issubclass(kind, enum.Enum):
        return Encoder._constant
    if kind is FunctionType:
        return Encoder._function
    if kind is BuiltinFunctionType or issubclass(kind, type):
        return Encoder._named
    if kind is MethodType:
        return Encoder._method
    if kind is MethodWrapperType:
        return Encoder._bound
    if kind is functools.partial:
        return Encoder._partial
    if issubclass(kind, _OWNED_TYPES):
        return Encoder._owned_object
    if issubclass(kind, io.IOBase):
        return Encoder._buffer if kind in (io.BytesIO, io.StringIO) else Encoder._file
    if kind.__module__ == "concurrent.futures._base" and kind.__qualname__ == "Future":
        return Encoder._future
    if kind.__module__ in _QUEUES:
        return Encoder._queue if hasattr(kind, "empty") else Encoder._owned_object
    handler = _classify_torch(kind, root)
    if handler is not None:
        return handler
    if root == "numpy":
        return _classify_numpy(kind)
    if kind is deque or issubclass(kind, (list, tuple)):
        return Encoder._sequence
    if issubclass(kind, dict):
        return Encoder._mapping
    if kind is frozenset or issubclass(kind, set):
        return Encoder._set
    if kind is bytearray:
        return Encoder._bytearray
    if root in _PICKLED_MODULES or (kind.__module__, kind.__qualname__) in _PICKLED_NAMES:
        return Encoder._pickled
    if kind.__module__ == "random" and kind.__qualname__ == "Random":
        return Encoder._random
    if root in _OWN_OUTSIDE:
        return Encoder._owned_object
    if root in _FOREIGN_ROOTS or (root in sys.stdlib_module_names and root not in _STATEFUL_STDLIB):
        return Encoder._unknown if hasattr(kind, "__next__") else Encoder._owned_object
    return Encoder._instance if _is_plain_class(kind) else Encoder._unknown


def _classify_torch(kind: type, root: str) -> _Handler | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn"):
        return None
    if issubclass(kind, torch.Tensor):
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return Encoder._tensor
        return Encoder._dtensor if kind.__name__ == "DTensor" and root == "torch" else Encoder._tensor_subclass
    if kind is torch.Generator:
        return Encoder._random
    if kind in (torch.dtype, torch.device, torch.memory_format, torch.layout):
        return Encoder._constant
    if kind is torch.Size:
        return Encoder._sequence
    data: Any = sys.modules.get("torch.utils.data")
    if data is not None:
        base: Any = sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter
        if issubclass(kind, base):
            return Encoder._loader_iterator
        if issubclass(kind, (data.Sampler, data.Dataset)):
            return Encoder._shallow
        if issubclass(kind, data.DataLoader):
            return Encoder._loader
    if issubclass(kind, torch.nn.Module):
        return Encoder._module
    if issubclass(kind, torch.optim.Optimizer) and root != "torch":
        return Encoder._optimizer
    owners = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    if issubclass(kind, owners) or root == "torch":
        return Encoder._owned_object
    scaler: Any = getattr(torch.amp, "GradScaler", None)
    return Encoder._owned_object if scaler is not None and issubclass(kind, scaler) else None


def _classify_numpy(kind: type) -> _Handler:
    numpy: Any = sys.modules["numpy"]
    if kind is numpy.ndarray or issubclass(kind, numpy.generic):
        return Encoder._array
    if kind in (numpy.random.Generator, numpy.random.RandomState):
        return Encoder._random
    return Encoder._owned_object


def _is_plain_class(kind: type) -> bool:
    """Says whether all state of a class's instances is in attributes: no base is written in C."""
    return all(
        base.__flags__ & (1 << 9) and not isinstance(base.__dict__.get("__new__"), BuiltinFunctionType)
        for base in kind.__mro__[:-1]
    )


_handlers: dict[type, _Handler] = {
    list: Encoder._sequence,
    tuple: Encoder._sequence,
    dict: Encoder._mapping,
    OrderedDict: Encoder._mapping,
    defaultdict: Encoder._mapping,
    Counter: Encoder._mapping,
    SimpleNamespace: Encoder._instance,
}


_EXITS = frozenset({"__exit__", "__aexit__"})
_RANK = re.compile(r"(?:^|[ :._])rank$")


class Lost(Exception):
    """A node that the loop cannot do without has no live counterpart."""


class Decoder:
    """Plans the writes that give live objects their captured values.

    Args:
        nodes: From `Encoder.nodes`.
        born: Live objects by the place where they stood at the first program point.
        plan_generator: Plans the writes to a suspended generator, or to a new one if there is none (MISSING), and gives it.
        foreign: The nodes are another rank's: what is called a rank keeps its live value.
        owned_storages: As of `Encoder`, of this process.
    """

    def __init__(
        self,
        nodes: list[Any],
        born: dict[str, Any],
        plan_generator: GeneratorPlan,
        foreign: bool = False,
        owned_storages: frozenset[int] = frozenset(),
    ) -> None:
        self._owned_storages = owned_storages
        self._foreign = foreign
        self._handles: frozenset[int] | None = None
        self._memory = memory.Memory(nodes, self._lasting, owned_storages)
        self._fixed: set[int] = set()  # ids of live tensors that are written where they stand: parts of a module
        self.problems: Report = []
        self._nodes = nodes
        self._born = born
        self._plan_generator = plan_generator
        self._done: dict[int, Any] = {}
        self._claimed: set[int] = set()
        self._alive: list[Any] = []
        self._contents: list[Callable[[], Any]] = []
        self._positions: list[Callable[[], Any]] = []
        self._last: list[Callable[[], Any]] = []

    def write(self, action: Callable[[], Any]) -> None:
        """Adds a write to a frame or namespace: these come after all objects have their contents."""
        self._last.append(action)

    def apply(self) -> None:
        """Does all writes. A write that fails is reported and the others go on."""
        for action in (*self._contents, *self._positions, *self._last):
            try:
                action()
            except Exception as error:
                self.problems.append(("write", type(error).__name__, str(error)))

    def resolve(self, encoded: Any, live: Any, place: str) -> Any:
        """Gives the object that stands for an encoded value, or `KEEP` for: leave what is there.

        Args:
            encoded: From `Encoder.encode`.
            live: What is at the same place now.
            place: The place, for reports.
        """
        if self._foreign and _RANK.search(place):
            return KEEP
        if type(encoded) is not tuple:
            return encoded
        if encoded[0] == "handle":
            # A counter may only have happened to have a descriptor's number: then what is live is none.
            if self._handles is None:
                self._handles = handles.now()
            return KEEP if live is MISSING or handles.is_handle(live, self._handles) else encoded[1]
        if encoded[0] != "r":
            return KEEP
        index = encoded[1]
        if index in self._done:
            return self._done[index]
        node = self._nodes[index]
        if node[0] == "keep":
            return KEEP
        self._done[index] = KEEP  # a cycle through an immutable value ends here
        result = getattr(self, f"_{node[0]}")(index, node, live, place)
        self._done[index] = result
        return result

    def is_lost_iterator(self, encoded: Any) -> str | None:
        """Says why a position could not be captured, if `encoded` is one."""
        if type(encoded) is tuple and encoded[0] == "r" and self._nodes[encoded[1]][0] == "lost":
            return str(self._nodes[encoded[1]][3])
        return None

    def is_iterator(self, encoded: Any) -> bool:
        """Says whether `encoded` is a position in a loop."""
        kinds = ("iterator", "advanced", "generator", "finished_generator", "loader_iterator", "file")
        return type(encoded) is tuple and encoded[0] == "r" and self._nodes[encoded[1]][0] in kinds

    def other_block(self, encoded: Any, live: Any) -> str | None:
        """Says so if a `with` block, known by the `__exit__` on the value stack, is of another class than the live one."""
        if getattr(live, "__name__", "") not in _EXITS or type(encoded) is not tuple or encoded[0] != "r":
            return None
        node = self._nodes[encoded[1]]
        here, there = type_name(type(live)), node[2]
        if node[0] == "method" and node[4][0] == "r":
            here, there = type_name(type(live.__self__)), self._nodes[node[4][1]][2]
        return None if here == there else f"a `with` block of {there} stands around the loop, in the restarted script one of {here}"

    def _container(self, node: Any) -> Any:
        """As `_target`, for what can as well be made anew: only what has lived since the first program point.

        What else stands at the same place may be an item of the data that the variable does not mean any more.
        """
        return self._target(node, MISSING)

    def _target(self, node: Any, live: Any) -> Any:
        """The live object that a node is: its birth place first, else what is at the same place now."""
        for candidate in (self._born.get(node[1], MISSING) if node[1] is not None else MISSING, live):
            if candidate is MISSING or type_name(type(candidate)) != node[2] or id(candidate) in self._claimed:
                continue
            self._claimed.add(id(candidate))
            self._alive.append(candidate)
            return candidate
        return MISSING

    def _problem(self, place: str, node: Any, reason: str) -> Any:
        self.problems.append((place, node[2], reason))
        return KEEP

    def _children(self, items: list[Any], live: list[Any], place: str) -> list[Any] | None:
        result: list[Any] = []
        for i, item in enumerate(items):
            there = live[i] if i < len(live) else MISSING
            value = self.resolve(item, there, f"{place}[{i}]") if type(item) is tuple else item
            if value is KEEP:
                if there is MISSING:
                    return None
                value = there
            result.append(value)
        return result

    def _owned(self, index: int, node: Any, live: Any, place: str) -> Any:
        born = self._born.get(node[1], MISSING) if node[1] is not None else MISSING
        for candidate in (born, live):
            if candidate is not MISSING and type_name(type(candidate)) == node[2]:
                return candidate
        return KEEP if live is not MISSING else self._problem(place, node, "made after the first step")

    def _lost(self, index: int, node: Any, live: Any, place: str) -> Any:
        return KEEP

    def _made(self, node: Any, base: type) -> Any:
        """A new, empty object of a container's class; MISSING if the class is not there."""
        kind = _find_type(node[2])
        return kind.__new__(kind) if kind is not None and issubclass(kind, base) else MISSING

    def _put_attributes(self, attributes: list[tuple[str, Any]], target: Any, place: str) -> None:
        for name, item in attributes:
            value = self.resolve(item, target.__dict__.get(name, MISSING), f"{place}.{name}")
            if value is not KEEP:
                self._contents.append(functools.partial(target.__dict__.__setitem__, name, value))

    def _key(self, key: Any, there: list[Any], at: int, place: str) -> Any:
        """The live key of a dict's or set's item; KEEP if it cannot be found."""
        if type(key) is not list:
            return key
        if key[0] != "r":
            return KEEP
        node = self._nodes[key[1]]
        candidate = there[at] if at < len(there) and type_name(type(there[at])) == node[2] else MISSING
        return self.resolve(tuple(key), candidate, f"{place}<key>")

    def _list(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._container(node)
        if target is MISSING:
            target = self._made(node, list)
            if target is MISSING:
                return self._problem(place, node, "its class is not found")
        self._done[index] = target
        items = self._children(node[3], live if isinstance(live, list) else [], place)
        if items is None:
            return self._problem(place, node, "holds an object made after the first step")
        self._contents.append(lambda: list.__setitem__(target, slice(None), items))
        self._put_attributes(node[4], target, place)
        return target

    def _deque(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._container(node)
        if target is not MISSING and target.maxlen != node[4]:
            target = MISSING
        if target is MISSING:
            if node[2] != "collections.deque":
                return self._problem(place, node, "made after the first step")
            target = deque(maxlen=node[4])
        self._done[index] = target
        items = self._children(node[3], list(target or (live if isinstance(live, deque) else ())), place)
        if items is None:
            return self._problem(place, node, "holds an object made after the first step")
        self._contents.append(target.clear)
        self._contents.append(lambda: target.extend(items))
        return target

    def _tuple(self, index: int, node: Any, live: Any, place: str) -> Any:
        items = self._children(node[3], list(live) if isinstance(live, tuple) else [], place)
        if items is None:
            return self._problem(place, node, "holds an object made after the first step")
        if node[2] == "builtins.tuple":
            return tuple(items)
        kind = _find_type(node[2])
        if kind is None or not issubclass(kind, tuple):
            return self._problem(place, node, "class not found")
        return kind._make(items) if hasattr(kind, "_make") else kind(items)

    def _dict(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._container(node)
        if target is MISSING:
            target = self._made(node, dict)
            if target is MISSING:
                return self._problem(place, node, "its class is not found")
            if isinstance(target, defaultdict) and node[5] is not None:
                target.default_factory = _find_type(node[5])
        self._done[index] = target
        there = target if target else live if isinstance(live, dict) else {}
        keys = list(there)
        items: dict[Any, Any] = {}
        for at, (encoded, item) in enumerate(node[3]):
            key = self._key(encoded, keys, at, place)
            if key is KEEP:
                return self._problem(place, node, "one of its keys was made after the first step")
            current = there.get(key, MISSING)
            name = _name_of_key(key, at)
            value = self.resolve(item, current, f"{place}[{name}]") if type(item) is tuple else item
            if value is KEEP:
                if current is MISSING:
                    return self._problem(place, node, f"item {name} was made after the first step")
                value = current
            items[key] = value

        def write() -> None:
            base: Any = OrderedDict if isinstance(target, OrderedDict) else dict
            base.clear(target)
            for key, value in items.items():
                base.__setitem__(target, key, value)

        self._contents.append(write)
        self._put_attributes(node[4], target, place)
        return target

    def _set(self, index: int, node: Any, live: Any, place: str) -> Any:
        items = [self._key(item, [], at, place) for at, item in enumerate(node[3])]
        if any(item is KEEP for item in items):
            return self._problem(place, node, "holds an object made after the first step")
        if node[2] == "builtins.frozenset":
            return frozenset(items)
        target = self._container(node)
        if target is MISSING:
            target = self._made(node, set)
            if target is MISSING:
                return self._problem(place, node, "its class is not found")
        # Not the class's own methods: they may look at what is not there yet.
        self._contents.append(lambda: set.clear(target))
        self._contents.append(lambda: set.update(target, items))
        self._put_attributes(node[4], target, place)
        return target

    def _bytearray(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._container(node)
        if target is MISSING:
            return bytearray(node[3])
        self._contents.append(lambda: target.__setitem__(slice(None), node[3]))
        return target

    def _enum(self, index: int, node: Any, live: Any, place: str) -> Any:
        kind = _find_type(node[2])
        member = getattr(kind, "__members__", {}).get(node[3])
        if member is None and kind is not None and node[4] is not None:
            member = kind(node[4])  # a combination of flags
        return member if member is not None else self._problem(place, node, f"member {node[3]} not found")

    def _torch_constant(self, index: int, node: Any, live: Any, place: str) -> Any:
        torch: Any = sys.modules["torch"]
        return torch.device(node[3]) if node[2] == "torch.device" else getattr(torch, node[3].rpartition(".")[2])

    def _pickled(self, index: int, node: Any, live: Any, place: str) -> Any:
        return loads(node[3])

    def _shallow(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        if target is MISSING:
            return KEEP if live is not MISSING else self._problem(place, node, "made after the first step")
        self._done[index] = target
        for name, item in node[3]:
            value = self.resolve(item, target.__dict__.get(name, MISSING), f"{place}.{name}")
            if value is not KEEP:
                self._contents.append(functools.partial(target.__dict__.__setitem__, name, value))
        return target

    def _loader(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        if target is MISSING:
            return KEEP if live is not MISSING else self._problem(place, node, "made after the first step")
        self._done[index] = target
        # After the iterators' replay, which needs older states.
        self._positions.append(lambda: loaders.parts(target).write(node[3]))
        for name, part in node[5]:
            self.resolve(part, getattr(target, name, MISSING), f"{place}.{name}")
        if node[4] is not None:
            there = getattr(target, "_iterator", None)
            iterator = self.resolve(node[4], MISSING if there is None else there, f"{place}._iterator")
            if iterator is not KEEP and iterator is not there:
                self._positions.append(lambda: target.__dict__.__setitem__("_iterator", iterator))
        return target

    def _function(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        if target is MISSING:
            return self._problem(place, node, "function made after the first step")
        if f"{target.__qualname__} {analyse(target.__code__).digest.hex()}" != node[3]:
            return self._problem(place, node, "another function than after the first step")
        self._done[index] = target
        for name, cell, item in zip(target.__code__.co_freevars, target.__closure__ or (), node[4], strict=True):
            try:
                current = cell.cell_contents
            except ValueError:
                current = MISSING
            value = self.resolve(item, current, f"{place}:{name}")
            if value is not KEEP:
                self._contents.append(functools.partial(setattr, cell, "cell_contents", value))
        self._put_attributes(node[5], target, place)
        defaults = dict(_mutable_defaults(target))
        for name, item in node[6]:
            value = self.resolve(item, defaults.get(name, MISSING), f"{place}({name})")
            if value is not KEEP and value is not defaults.get(name, MISSING):  # an iterator is made anew
                self._contents.append(functools.partial(_set_default, target, name, value))
        return target

    def _file(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        if target is MISSING or target.closed or str(getattr(target, "name", "")) != node[4]:
            return self._problem(place, node, f"file {node[4]} was opened after the first step")
        self._positions.append(lambda: target.seek(node[3]))
        return target

    def _buffer(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        if target is MISSING or target.closed:
            target = io.BytesIO() if node[2] == "_io.BytesIO" else io.StringIO()

        def write() -> None:
            target.seek(0)
            target.truncate()
            target.write(node[3])
            target.seek(node[4])

        self._contents.append(write)
        return target

    def _method(self, index: int, node: Any, live: Any, place: str) -> Any:
        there = getattr(live, "__self__", MISSING)
        owner = self.resolve(node[4], there, f"{place}.__self__")
        if owner is KEEP or (owner is there and getattr(live, "__name__", "") == node[3]):
            return KEEP if live is not MISSING else self._problem(place, node, "made after the first step")
        return getattr(owner, node[3], KEEP)

    def _named(self, index: int, node: Any, live: Any, place: str) -> Any:
        found = find_named(node[3], node[4])
        return self._problem(place, node, f"{node[4]} not found") if found is None else found

    def _partial(self, index: int, node: Any, live: Any, place: str) -> Any:
        there: list[Any] = []
        if type(live) is functools.partial:
            there = [live.func, list(live.args), dict(live.keywords)]
            self._alive.append(there)
        parts = self._children(node[3], there, f"{place}<partial>")
        if parts is None:
            return self._problem(place, node, "holds an object made after the first step")
        if there:
            return live
        return functools.partial(parts[0], *parts[1], **parts[2])

    def _module(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        if target is MISSING:
            return KEEP if live is not MISSING else self._problem(place, node, "made after the first step")
        self._done[index] = target
        count, training, grads, attributes, tensors = node[3:]
        tree = tree_of(target)
        if len(tree.modules) != count or len(tree.tensors) != len(grads):
            return self._problem(place, node, "has other parts than the saved one")
        tree.changed = tree.changed or bool(tensors)  # what is written now is not what this process began with
        tensor_of = dict(zip(tree.names, tree.tensors, strict=True))
        self._fixed.update(map(id, tree.tensors))
        for name, item in tensors:
            if self.resolve(item, tensor_of.get(name, MISSING), f"{place}.{name}") is not tensor_of.get(name, MISSING):
                self.problems.append((f"{place}.{name}", node[2], "has another shape, type or device"))
        for i, name, item in attributes:
            holder = tree.modules[i].__dict__
            value = self.resolve(item, holder.get(name, MISSING), f"{place}.{name}")
            if value is not KEEP:
                self._contents.append(functools.partial(holder.__setitem__, name, value))

        def modes() -> None:
            for module, mode in zip(tree.modules, training, strict=True):
                module.training = bool(mode)
            for tensor, grad in zip(tree.tensors, grads, strict=True):
                if tensor.requires_grad != bool(grad):
                    tensor.requires_grad_(bool(grad))

        self._contents.append(modes)
        return target

    def _dtensor(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        if target is MISSING or f"{tuple(target.shape)} {target.placements}" != node[3]:
            return self._problem(place, node, "made after the first step, or laid out differently")
        self._done[index] = target
        local = target._local_tensor
        self._fixed.add(id(local))
        value = self.resolve(node[4], local, f"{place}._local_tensor")
        if value is not KEEP and value is not local:
            self._contents.append(lambda: setattr(target, "_local_tensor", value))
        return target

    def _instance(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._container(node) if self._is_plain(index) else self._target(node, live)
        if target is MISSING:
            kind = _find_type(node[2])
            if kind is None:
                return self._problem(place, node, "class not found")
            target, made = (kind() if kind is SimpleNamespace else object.__new__(kind)), True
        else:
            made = False
        self._done[index] = target
        before = dict(getattr(target, "__dict__", {}))
        after: dict[str, Any] = {}
        for name, item in node[3]:
            current = before.get(name, MISSING)
            value = self.resolve(item, current, f"{place}.{name}") if type(item) is tuple else item
            if value is KEEP:
                if current is MISSING:
                    if made:  # half an object is worse than none
                        return self._problem(place, node, f"made after the first step, and so was its {name}")
                    self._problem(f"{place}.{name}", node, "made after the first step")
                    continue
                value = current
            after[name] = value

        def write() -> None:
            for name in before:
                if name not in after:
                    target.__dict__.pop(name, None)
            if after:
                target.__dict__.update(after)

        self._contents.append(write)
        for name, item in node[4]:
            value = self.resolve(item, getattr(target, name, MISSING), f"{place}.{name}")
            if value is not KEEP:
                self._contents.append(functools.partial(object.__setattr__, target, name, value))
        return target

    def _lasting(self, node: Any) -> Any:
        """The live tensor or array that has lived since the first program point as the captured one has; None if none fits.

        Only what stands at that place is not enough: it may be an item of the data that the variable does not mean any more.
        """
        candidate = self._born.get(node[1]) if node[1] is not None else None
        if candidate is None or type_name(type(candidate)) != node[2]:
            return None
        return candidate if _can_take(candidate, node) and not self._memory.is_owned(candidate) else None

    def _is_plain(self, index: int) -> bool:
        """Whether an object can be made anew from its node: nothing in it is left to the restarted script."""
        seen, left = {index}, [index]
        while left:
            node = self._nodes[left.pop()]
            if node[0] not in _MADE_ANEW or (node[0] == "tensor" and node[8][3]):
                return False
            for part in _parts(node):
                if type(part) is tuple:
                    if part[0] != "r":
                        return False
                    if part[1] not in seen:
                        seen.add(part[1])
                        left.append(part[1])
        return True

    def _tensor(self, index: int, node: Any, live: Any, place: str) -> Any:
        torch: Any = sys.modules["torch"]
        dtype, shape, device, data, requires_grad, where = node[3:]
        if where[3] and data:
            target = self._target(node, live)
            here = () if target is MISSING else memory.memory_of_tensor(target, self._owned_storages)
            if here[1:] == where[1:] and tuple(target.shape) == shape:
                return target  # another name for a weight's memory, which is put back as the weight's
            self._problem(place, node, "view of a weight, and comes back as a copy of its own")
        target = self._lasting(node)
        if target is None and id(live) in self._fixed and id(live) not in self._claimed and _can_take(live, node):
            target = live
        if target is not None:
            self._claimed.add(id(target))
        kind = getattr(torch, dtype)
        saved = (torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)).reshape(shape)
        if memory.has_memory(node):
            made = self._memory.tensor(index, target)
            self._contents.append(lambda: memory.fill(made, saved))
        else:
            made = saved.to(device) if target is None else target
        if made is target:
            return target
        if node[2] == "torch.nn.parameter.Parameter":
            return torch.nn.Parameter(made, requires_grad)
        return made.requires_grad_() if requires_grad else made

    def _array(self, index: int, node: Any, live: Any, place: str) -> Any:
        import numpy

        dtype, shape, data, _ = node[3:]
        saved = numpy.frombuffer(data, dtype=dtype).reshape(shape)
        if node[2] != "numpy.ndarray":
            return saved[()]
        target = self._lasting(node)
        if not memory.has_memory(node):
            return saved.copy() if target is None else target
        made = self._memory.array(index, target)
        self._contents.append(lambda: numpy.copyto(made, saved))
        return made

    def _random(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        if target is MISSING:
            return new_object(node[2], node[3])
        # After the loaders' samplers, whose replay needs the generators' older states.
        self._positions.append(lambda: set_object_state(target, node[3]))
        return target

    def _iterator(self, index: int, node: Any, live: Any, place: str) -> Any:
        name, arguments, has_state, state = node[3:]
        there: list[Any] = []
        live_state: Any = MISSING
        if live is not MISSING and type_name(type(live)) == node[2]:
            _, parts, live_state = iterators.reduce(live)
            there = list(parts)
            self._alive.append((parts, live_state))
            if live_state is iterators.NO_STATE:
                live_state = MISSING
        for i, argument in enumerate(arguments):
            if self.is_iterator(argument):
                inner = self.resolve(argument, there[i] if i < len(there) else MISSING, f"{place}<{name}>[{i}]")
                if inner is KEEP:
                    return self._problem(place, node, "the iterator inside cannot be put back")
        built = self._children(arguments, there, f"{place}<{name}>")
        if built is None:
            return self._problem(place, node, "its source was made after the first step")
        iterator = iterators.build(name, tuple(built))
        if has_state:
            value = self.resolve(state, live_state, place)
            # Positions are clipped to the sequence's length, so they wait for its contents.
            self._positions.append(lambda: iterators.set_state(iterator, value))
        return iterator

    def _advanced(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        if target is MISSING:
            return self._problem(place, node, "made after the first step")
        steps = iterators.items_left(target) - node[3]
        if steps < 0:
            raise Lost(f"{place}: {node[3]} items were left, the live iterator has {iterators.items_left(target)}")
        # First: a change of the dict's size would end its iterators.
        self._contents.insert(0, lambda: iterators.advance(target, steps))
        return target

    def _generator(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        if target is not MISSING and (target.gi_frame is None or target.gi_running):
            target = MISSING
        made = self._plan_generator(self, node[3], target, f"{place}()")
        if made is None:
            return self._problem(place, node, "generator made after the first step")
        return made

    def _finished_generator(self, index: int, node: Any, live: Any, place: str) -> Any:
        return iter(())

    def _loader_iterator(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        live_loader = loaders.loader_of(target) if target is not MISSING else MISSING
        loader = self.resolve(node[3], live_loader, f"{place}.loader")
        if loader is KEEP:
            loader = live_loader
        if loader is MISSING:
            return self._problem(place, node, "its DataLoader was made after the first step")
        fresh = loaders.rebuild(loader, node[4])
        if target is MISSING:
            if (
                fresh is not None
                and "_iterator" in loader.__dict__
                and (loader.persistent_workers or node[4]["kind"] == "stateful")
            ):
                self._positions.append(lambda: loader.__dict__.__setitem__("_iterator", fresh))
            return iter(()) if fresh is None else fresh
        if fresh is None:
            self._positions.append(lambda: loaders.finish(target))
        else:
            # First, because parts of the loader are written after it.
            self._positions.insert(0, lambda: loaders.swap(target, fresh))
        return target


_MADE_ANEW = frozenset(
    {"list", "deque", "tuple", "dict", "set", "bytearray", "instance", "tensor", "array", "pickled", "enum", "torch_constant", "random", "named"}
)


def _parts(node: Any) -> list[Any]:
    """What a node of `_MADE_ANEW` is made of."""
    if node[0] == "instance":
        return [item for _, item in (*node[3], *node[4])]
    if node[0] == "dict":
        keys = [tuple(key) for key, _ in node[3] if type(key) is list]
        return [*keys, *(item for _, item in node[3]), *(item for _, item in node[4])]
    if node[0] == "set":
        return [*(tuple(key) for key in node[3] if type(key) is list), *(item for _, item in node[4])]
    if node[0] == "list":
        return [*node[3], *(item for _, item in node[4])]
    return list(node[3]) if node[0] in ("deque", "tuple") else []


def _can_take(live: Any, node: Any) -> bool:
    """Whether a live tensor or array has the dtype, shape and device of a captured one, and may be written."""
    if tuple(live.shape) != tuple(node[4]):
        return False
    if node[0] == "array":
        return bool(live.dtype.str == node[3] and live.flags.writeable)
    if str(live.dtype)[6:] != node[3] or str(live.device) != node[5] or live.is_inference():
        return False
    return all(stride != 0 or size <= 1 for stride, size in zip(live.stride(), live.shape, strict=True))


def _find_type(name: str) -> type | None:
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
