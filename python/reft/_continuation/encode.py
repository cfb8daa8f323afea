"""Copies plain values out of live objects.

`Encoder` turns a graph of objects into a list of nodes (`nodes`) made of builtin values only; one
object is one node, so aliases stay aliases. Objects that have an owner (optimizers, process groups,
files, threads, classes, weights that an optimizer updates) are never copied. Of a module everything
else is (`modules`), of a function its cells, of a loader its samplers and position (`loaders`).

Threads: the training thread. Errors: a value that cannot be captured is reported, not raised.
"""

from __future__ import annotations

import enum
import functools
import io
import pickle
import re
import sys
import threading
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

from . import attachments, births, handles, hooks, iterators, loaders, memory
from .births import MEMBER
from .bytecode import analyse
from .device_parts import DeviceParts
from .modules import tree_of
from .nodes import (
    ATOMS,
    KEEP,
    MISSING,
    PICKLED_MODULES,
    PICKLED_NAMES,
    Report,
    find_named,
    is_bound,
    name_of_key,
    native,
    plain_key,
    type_name,
)
from .rng import object_state

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
# Of those, modules whose values never change: scripts hold a few paths and dates for their whole
# life. (`decimal` has contexts.)
_CONSTANT_MODULES = frozenset({"datetime", "pathlib"})
# The pickles of such values by identity, with what keeps the identity.
_pickles: dict[int, tuple[Any, bytes]] = {}
_MAX_PICKLES = 256
_OPTIMIZERS_OWN = frozenset({"defaults", "param_groups", "state"})
# What torch and its schedulers hang on each optimizer, besides its hooks.
_OPTIMIZERS_PRIVATE = frozenset(
    {
        "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured",
        "_opt_called",
        "_step_supports_amp_scaling",
        "step",
    }
)
_STATEFUL_STDLIB = frozenset({"argparse", "types", "dataclasses", "collections", "random", "contextlib"})
_QUEUES = frozenset({"queue", "_queue", "asyncio.queues", "multiprocessing.queues"})
# A `with` block's object and what else an expression in progress holds: the restarted script stands
# in the same expression.
_OFF_THE_STACK = re.compile(r"<stack|\.__self__|<partial>|<\w+>\[")
_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel"})
_COMMUNICATE = frozenset({"ProcessGroup", "DeviceMesh"})
_HOOKS_STATE = "torch.distributed.algorithms."  # of PowerSGD and the like
_DISTRIBUTIONS = "torch.distributions."
_FOREIGN_ROOTS = frozenset({"torch", "reft", "numpy", "triton"})
# Loggers and their like: what they hold lives outside of the process.
_OWN_OUTSIDE = frozenset({"wandb", "tensorboard", "tensorboardX", "mlflow", "comet_ml", "neptune", "aim"})
_LEAST_ADDRESS = 1 << 20
_STANDING = (ModuleType, type)
_SMALL_ITEMS = 256  # lists and dicts of a dataset up to this are always looked at
GeneratorCapture = Callable[["Encoder", Any, str], Any]


class Encoder:
    """Copies values into nodes.

    Args:
        limit_bytes: Most bytes to copy in all; what does not fit is reported.
        owned_tensors: Ids of tensors that are saved elsewhere (parameters, optimizer state), and of
            the optimizers.
        owned_storages: Where their memory lies.
        capture_frame: Encodes the frame of a suspended generator.
        note_births: Only note where objects stand: this is the first program point of the process.
        parts: Takes contents that lie on a device and are copied later.
    """

    def __init__(
        self,
        limit_bytes: int,
        owned_tensors: Iterable[int] = (),
        capture_frame: GeneratorCapture | None = None,
        note_births: bool = False,
        owned_storages: frozenset[int] = frozenset(),
        parts: DeviceParts | None = None,
    ) -> None:
        self.nodes: list[Any] = []
        self.uncaptured: Report = []
        self.refused: str | None = None  # why the place in the loop must not be put back: training would be another one
        self.graphs: list[tuple[Any, str]] = []  # tensors that were computed from others, and where they stand
        self._parts = parts or DeviceParts()
        self._left = limit_bytes
        self._owned = owned_tensors if isinstance(owned_tensors, (set, frozenset)) else frozenset(owned_tensors)
        self._owned_storages = owned_storages
        self._capture_frame = capture_frame
        self.note_births = note_births
        self._births = births.current
        self._handles = handles.now() if note_births else frozenset[int]()
        self._has_handles = note_births or bool(self._births.handles)
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
            # Not in containers: an item that is left alone cannot be told from one that has been
            # moved there.
            if kind is int and self._has_handles and place[-1:] != "]" and self._is_handle(value, place):
                return ("handle", value)  # of this process; the next one has its own
            if (kind is str or kind is bytes) and not self._take(len(value)):
                return self._give_up(value, place, no_room(len(value)))
            return value
        known = self._index.get(id(value))
        if known is not None:
            return ("r", known)
        if (
            kind is tuple
            and self._has_handles
            and len(value) == 2
            and set(map(type, value)) == {int}
            and self._is_handle(value, place)
        ):
            return ("handle", value)  # what os.pipe() gives
        handler = _handlers.get(kind) or _handler_of(kind)
        index = len(self.nodes)
        if index >= _MAX_NODES or depth > _MAX_DEPTH:
            return self._give_up(value, place, "too many objects" if index >= _MAX_NODES else "too deep")
        self.nodes.append(KEEP)
        self._index[id(value)] = index
        self._objects.append(value)
        birth = None
        if handler not in _UNBORN:
            if self.note_births:
                self._births.note(value, place)
            birth = self._births.place(value)
        # Below an object that stood somewhere at the first point, places are the same however it is
        # reached now.
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

    def encode_standing(self, value: Any, place: str) -> Any:
        """As `encode`, for a variable of a frame on the path: modules and classes that stood there
        at the first point are left alone, because they stand there in the restarted process,
        too."""
        if isinstance(value, _STANDING) and not self.note_births and self._births.place(value) == place:
            return KEEP
        return self.encode(value, place)

    def begin_outside(self, own: Collection[str]) -> None:
        """From here on values are outside of the frames.

        Lists, dicts and arrays that are large and have not changed their size are left out, as are
        objects of installed
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
                self._births.handles.setdefault(place, value)
            return False
        return bool(self._births.handles.get(place) == value)

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
        if attributes is value:  # items that are attributes, too
            return [(MEMBER, True)]
        return [(name, self.encode(item, f"{place}.{name}", depth + 1)) for name, item in list(attributes.items())]

    def _key(self, key: Any, place: str, depth: int) -> Any:
        """A key or member: itself if it is plain, else its encoded form as a list, which no key can be."""
        if type(key) is int and key >= _LEAST_ADDRESS and (owner := self._births.place_of_identity(key)) is not None:
            return ["id", owner]  # what `id(p)` gave
        return key if plain_key(key) else list(self.encode(key, place, depth + 1))

    def _mapping(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if "__builtins__" in value:
            return ("owned",)  # the globals of a module
        if not self._take(16 * len(value)):
            return self._no_room(value, place, 16 * len(value))
        items = [
            (
                key if type(key) in ATOMS and type(key) is not int else self._key(key, f"{place}<key {i}>", depth),
                item if type(item) in _NUMBERS else self.encode(item, f"{place}[{name_of_key(key, i)}]", depth + 1),
            )
            for i, (key, item) in enumerate(list(dict.items(value)))  # as it is, whatever its class yields
        ]
        factory = value.default_factory if isinstance(value, defaultdict) else None
        return (
            "dict",
            items,
            self._attributes(value, place, depth),
            None if factory is None else self.encode(factory, f"{place}<factory>", depth + 1),
        )

    def _set(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if not self._take(16 * len(value)):
            return self._no_room(value, place, 16 * len(value))
        members = [self._key(item, place + MEMBER, depth) for item in value]
        layout = native().set_layout(value) if all(map(_has_fixed_hash, value)) else None
        return ("set", members, self._attributes(value, place, depth), layout)

    def _bytearray(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if not self._take(len(value)):
            return self._no_room(value, place, len(value))
        return ("bytearray", bytes(value))

    def _memoryview(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if self.note_births:
            return ("owned",)
        if not value.c_contiguous or value.nbytes != memoryview(value.obj).nbytes:
            return self.lost(place, type_name(type(value)), "view of a part of a buffer")
        return (
            "memoryview",
            self.encode(value.obj, f"{place}.obj", depth + 1),
            value.format,
            value.shape,
            value.readonly,
        )

    def _weak_reference(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        there = value()
        if self.note_births or there is None or value.__callback__ is not None:
            return ("owned",)
        return ("weakref", self.encode(there, f"{place}()", depth + 1))

    def _numbers(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        """Encodes an `array.array`."""
        size = len(value) * value.itemsize
        if not self._take(size):
            return self._no_room(value, place, size)
        return ("numbers", value.typecode, value.tobytes())

    def _owned_object(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        return ("owned",)

    def _left_alone(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        """An object of torch, NumPy or the standard library that is no plain data: the restarted
        script has its own, which stands for another one if it did not live from the first program
        point on."""
        if self.note_births:
            self._births.pin(value, place)
            return ("owned",)
        if self._inside_data or self._births.place(value) is not None or _OFF_THE_STACK.search(place):
            return ("owned",)
        if type(value).__name__ in _COMMUNICATE and value is not sys.modules["torch"].distributed.group.WORLD:
            self.refused = self.refused or f"{place}: a {type(value).__name__} that was made after the first step"
        return self.lost(
            place, type_name(type(value)), "another one than after the first step, of a kind that is not copied"
        )

    def _stream(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        self._parts.written_by(value)
        return self._left_alone(value, place, depth)

    def _optimizer(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        """Encodes what an optimizer class of the script's own keeps besides state and groups, which are saved elsewhere."""
        saved = _OPTIMIZERS_OWN if id(value) in self._owned else frozenset()
        own = [
            (name, item)
            for name, item in vars(value).items()
            if name not in saved and name not in _OPTIMIZERS_PRIVATE and not name.startswith("_optimizer_")
        ]
        attributes = [(name, self.encode(item, f"{place}.{name}", depth + 1)) for name, item in own]
        return ("shallow", attributes, [], self._hooks(hooks.of_optimizer(value), place, depth))

    def _torch_optimizer(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        """Encodes the hooks of an optimizer and what a script has hung on it; all else of it is saved elsewhere."""
        return ("owned", self._hung(value, place, depth), self._hooks(hooks.of_optimizer(value), place, depth))

    def _scaler(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        """Encodes what a class of the script's own keeps beside a GradScaler's state, which is saved elsewhere."""
        return ("owned", self._hung(value, place, depth))

    def _hung(self, value: Any, place: str, depth: int) -> list[tuple[str, Any]]:
        found = [(name, item) for name, item in attachments.attributes(value) if name not in _OPTIMIZERS_PRIVATE]
        return [(name, self.encode(item, f"{place}.{name}", depth + 1)) for name, item in found]

    def _event(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        """Encodes a `threading.Event`: whoever waits for it is the restarted script's."""
        return ("owned",) if self.note_births else ("event", value.is_set())

    def _hooks(self, found: hooks.Hooks, place: str, depth: int) -> list[tuple[str, Any]]:
        encoded = [(name, self.encode(hook, f"{place}.{name}", depth + 1)) for name, hook in found]
        if self.note_births:
            for name, hook in found:
                self._births.pin(hook, f"{place}.{name}")  # PowerSGD's state takes no weak reference
        return encoded

    def _named(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        """Encodes a function or a class: the restarted script has it, but may mean another one here."""
        if is_bound(value):
            return self._bound(value, place, depth)
        if not self.is_switched(value, place):
            return ("owned",)
        for name in (value.__qualname__, value.__name__):
            if find_named(value.__module__, name) is value:
                return ("named", value.__module__, name)
        if type(value) is FunctionType and not value.__closure__:
            return ("code", f"{value.__qualname__} {analyse(value.__code__).digest.hex()}")  # one made anew is as good
        if place in self._births.named:
            why = f"another one than after the first step, and {value.__qualname__} cannot be found by its name"
            return self.lost(place, type_name(type(value)), why)
        return ("owned",)

    def _bound(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        """Encodes a method that is written in C, of an object that may be held by nothing else."""
        return ("method", value.__name__, self.encode(value.__self__, f"{place}.__self__", depth + 1))

    def is_switched(self, value: Any, place: str) -> bool:
        """Whether a function or a class is not what stood there at the first program point, which is noted."""
        if self.note_births:
            self._births.named[place] = value
            return False
        return self._births.named.get(place, MISSING) is not value

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
        return ("shallow", attributes, self._slots(value, place, depth), [])

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
            self._births.bulky[place] = mark
        return self._births.bulky.get(place) != mark

    def _loader(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        names = ["batch_sampler", "sampler", "dataset"]
        if value.num_workers == 0 and hooks.is_own_hook(value.collate_fn):
            names.append("collate_fn")  # workers have copies of their own
        parts = [
            (name, self.encode(part, f"{place}.{name}", depth + 1))
            for name in names
            if (part := getattr(value, name, None)) is not None
        ]
        own = [
            (name, self.encode(item, f"{place}.{name}", depth + 1))
            for name, item in list(value.__dict__.items())
            if name not in attachments.names_in(type(value))
            and (attachments.is_kept(item) or hasattr(item, "_next_index"))
        ]
        if self.note_births:
            return ("owned",)
        iterator = getattr(value, "_iterator", None)
        return (
            "loader",
            loaders.parts_of_loader(value).capture(),
            self.encode(iterator, f"{place}._iterator", depth + 1) if value.persistent_workers else None,
            parts,
            own,
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
        defaults = [(name, self.encode(item, f"{place}({name})", depth + 1)) for name, item in mutable_defaults(value)]
        which = f"{value.__qualname__} {analyse(value.__code__).digest.hex()}"
        return ("function", which, cells, self._attributes(value, place, depth), defaults)

    def _method(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        return ("method", value.__func__.__name__, self.encode(value.__self__, f"{place}.__self__", depth + 1))

    def _partial(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        place = f"{place}<partial>"
        arguments = [self.encode(part, f"{place}[{i}]", depth + 1) for i, part in enumerate(value.args)]
        keywords = [(name, self.encode(part, f"{place}.{name}", depth + 1)) for name, part in value.keywords.items()]
        return ("partial", self.encode(value.func, place, depth + 1), arguments, keywords)

    def _module(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if self.note_births:
            return self._note_module(value, place, depth)
        if self._births.place(value) is None:
            if type(value).__name__ not in _WRAPPERS:
                return self._instance(value, place, depth)
            return ("wrapper", tree_of(value).requires_grad(), self.encode(value.module, f"{place}.module", depth + 1))
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
        known = {name for name, _ in tensors}
        tensors += [
            (name, self.encode(tensor, f"{place}.{name}", depth))
            for name, tensor in zip(tree.names, tree.tensors, strict=True)
            if tensor.__dict__ and name not in known and tags_of(tensor)
        ]
        found = self._hooks(tree.own_hooks(), place, depth)
        return ("module", len(tree.modules), tree.training(), tree.requires_grad(), attributes, tensors, found)

    def _note_module(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        tree = tree_of(value)
        tree.sample_all()
        for prefix, module in value.named_modules():
            self._births.note(module, f"{place}.{prefix}")
        for name, tensor in zip(tree.names, tree.tensors, strict=True):
            self._births.note(tensor, f"{place}.{name}")
        for name, tensor in zip(tree.names, tree.tensors, strict=True):
            if tensor.__dict__ and tags_of(tensor):
                self.encode(tensor, f"{place}.{name}", depth)
        for _, name, item in tree.attributes():
            self.encode(item, f"{place}.{name}", depth + 1)
        self._hooks(tree.own_hooks(), place, depth)
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
        return ("instance", attributes, self._slots(value, place, depth))

    def _slots(self, value: Any, place: str, depth: int) -> list[tuple[str, Any]]:
        return [
            (name, self.encode(getattr(value, name), f"{place}.{name}", depth + 1))
            for name in _slot_names(type(value))
            if hasattr(value, name)
        ]

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
        if type(value) is iterators.CALLABLE and self._calls_what_is_left_alone(arguments[0]):
            return self.lost(place, type_name(type(value)), "iterator of unknown kind")
        for part in encoded:
            reason = self.lost_position(part)
            if reason is not None:
                return ("lost", reason)  # reported where it was found
        has_state = state is not iterators.NO_STATE
        if has_state and type(state) is not int:
            state = self.encode(state, place, depth + 1)
        return ("iterator", name, encoded, has_state, state if has_state else None)

    @staticmethod
    def _calls_what_is_left_alone(function: Any) -> bool:
        """Whether the position of `iter(function, sentinel)` lies in an object that is not copied, as that of `re.finditer`."""
        return is_bound(function) and _handler_of(type(function.__self__)) in (
            Encoder._left_alone,
            Encoder._owned_object,
            Encoder._stream,
        )

    def _advanced(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        return ("advanced", iterators.items_left(value))

    def _generator(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if value.gi_running:
            return ("running",)  # its frame is on the path
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
        if value.requires_grad and value.grad_fn is not None:
            self.graphs.append((value, place))
        if id(value) in self._owned or self.note_births:
            return ("owned", self._tags(value, place, depth))
        found = native().host_memory(value, self._left)
        if found is not None:
            size, shape, contents, is_leaf, pointer, offset, strides, *bits = found
            if contents is None:
                return self._no_room(value, place, size)
            self._left -= size
            where = (pointer, offset, strides, pointer in self._owned_storages, tuple(bits))
            tags = self._tags(value, place, depth)
            return ("tensor", str(value.dtype)[6:], shape, "cpu", contents, is_leaf, where, tags)
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
            self._contents(torch, value),
            value.requires_grad and value.is_leaf,
            memory.memory_of_tensor(value, self._owned_storages),
            self._tags(value, place, depth),
        )

    def _contents(self, torch: Any, tensor: Any) -> bytes | tuple[int, int]:
        """What lies in its memory, item by item, or where it will be."""
        if tensor.numel() == 0:
            return b""
        plain = memory.without_bits(tensor.detach())
        return self._parts.take(plain) or bytes(
            plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )

    def _tags(self, tensor: Any, place: str, depth: int) -> list[tuple[str, Any]]:
        """Encodes what a script hangs on a tensor (`p.average = …`); packages mark theirs for themselves."""
        return [(name, self.encode(item, f"{place}.{name}", depth + 1)) for name, item in tags_of(tensor)]

    def _array(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        if self.note_births:
            return ("owned",)
        if type(value).__name__ in _PICKLED_ARRAYS:
            size = 2 * value.nbytes  # with the mask, about
            return (
                ("pickled", pickle.dumps(value, protocol=5)) if self._take(size) else self._no_room(value, place, size)
            )
        if value.dtype.hasobject or value.dtype.names is not None:
            return self.lost(place, type_name(type(value)), f"array of {value.dtype}")
        if not self._take(value.nbytes):
            return self._no_room(value, place, value.nbytes)
        return (
            "array",
            value.dtype.str,
            tuple(value.shape),
            value.tobytes(),
            memory.memory_of_array(value, self._owned_storages),
        )

    def _seeds(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        """Encodes NumPy's SeedSequence: how many it has spawned cannot be written, so it comes back as a new one."""
        state = value.state
        entropy = self.encode(state["entropy"], f"{place}[entropy]", depth + 1)
        return ("seeds", entropy, tuple(state["spawn_key"]), state["pool_size"], state["n_children_spawned"])

    def _random(self, value: Any, place: str, depth: int) -> tuple[Any, ...]:
        return ("random", object_state(value))


def tags_of(tensor: Any) -> list[tuple[str, Any]]:
    """Attributes that a script may have hung on a tensor; what packages mark theirs with are flags with an underscore."""
    found = tensor.__dict__.items()
    return [(k, v) for k, v in found if not (k.startswith("_") and type(v) in _FLAGS) and attachments.is_kept(v)]


def _has_fixed_hash(member: Any) -> bool:
    """Whether an object has the same hash in every process."""
    kind = type(member)
    return kind in _FIXED_HASH or (kind is tuple and all(map(_has_fixed_hash, member)))


def no_room(size: int) -> str:
    """Says that a value of `size` bytes is left out, and what would make room for it."""
    return f"{size} bytes are more than what is left of the limit REFT_RESUME_FRAME_BYTES"


def has_state(function: FunctionType) -> bool:
    """Says whether a function keeps anything between its calls: a closure, attributes, defaults that can change."""
    if function.__dict__ or (function.__closure__ and function.__code__.co_freevars != ("__class__",)):
        return True
    return bool((function.__defaults__ or function.__kwdefaults__) and mutable_defaults(function))


def mutable_defaults(function: FunctionType) -> list[tuple[str, Any]]:
    """Gives the default arguments that can change, by name."""
    defaults = function.__defaults__ or ()
    code = function.__code__
    named = list(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))
    named += (function.__kwdefaults__ or {}).items()
    fixed = (tuple, frozenset)
    return [(name, item) for name, item in named if type(item) not in fixed and _handler_of(type(item)) in _MUTABLE]


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
_FIXED_HASH = {int, float, bool, complex} | ({str, bytes} if not sys.flags.hash_randomization else set())
_CONTAINERS = (list, tuple, dict, set, frozenset, bytearray, deque)
_FLAGS = frozenset({bool, str, type(None)})
_PICKLED_ARRAYS = frozenset({"MaskedArray"})
_NUMBERS = frozenset({int, float, bool, type(None)})
_Handler = Callable[[Encoder, Any, str, int], tuple[Any, ...]]
# Handlers whose objects have no identity worth keeping across processes.
_UNBORN: frozenset[Any] = frozenset({Encoder._pickled, Encoder._reduced, Encoder._method, Encoder._partial})
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
    if issubclass(kind, (BuiltinFunctionType, type)):
        return Encoder._named
    if kind is memoryview:
        return Encoder._memoryview
    if kind is weakref.ReferenceType:
        return Encoder._weak_reference
    if kind.__module__ == "array" and kind.__qualname__ == "array":
        return Encoder._numbers
    if kind is MethodType:
        return Encoder._method
    if kind is MethodWrapperType:
        return Encoder._bound
    if kind is functools.partial:
        return Encoder._partial
    if kind is threading.Event:
        return Encoder._event
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
    if root in PICKLED_MODULES or (kind.__module__, kind.__qualname__) in PICKLED_NAMES:
        return Encoder._pickled
    if kind.__module__ == "random" and kind.__qualname__ == "Random":
        return Encoder._random
    if root in _OWN_OUTSIDE:
        return Encoder._owned_object
    if root in _FOREIGN_ROOTS or (root in sys.stdlib_module_names and root not in _STATEFUL_STDLIB):
        return Encoder._unknown if hasattr(kind, "__next__") else Encoder._left_alone
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
    if issubclass(kind, torch.Stream):
        return Encoder._stream
    if kind in (torch.dtype, torch.device, torch.memory_format, torch.layout):
        return Encoder._constant
    if issubclass(kind, tuple):  # sizes, results of `topk` and the like, packed sequences
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
    if issubclass(kind, torch.optim.Optimizer):
        return Encoder._torch_optimizer if root == "torch" else Encoder._optimizer
    if issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        return Encoder._owned_object
    if kind.__module__.startswith((_HOOKS_STATE, _DISTRIBUTIONS)) and _is_plain_class(kind):
        return Encoder._instance
    if root == "torch":
        return Encoder._unknown if hasattr(kind, "__next__") else Encoder._left_alone
    scaler: Any = getattr(torch.amp, "GradScaler", None)
    return Encoder._scaler if scaler is not None and issubclass(kind, scaler) else None


def _classify_numpy(kind: type) -> _Handler:
    numpy: Any = sys.modules["numpy"]
    if kind is numpy.ndarray or issubclass(kind, numpy.generic):
        return Encoder._array
    if kind is numpy.ma.MaskedArray:
        return Encoder._array
    if kind is numpy.random.SeedSequence:
        return Encoder._seeds
    if kind in (numpy.random.Generator, numpy.random.RandomState):
        return Encoder._random
    return Encoder._unknown if hasattr(kind, "__next__") else Encoder._left_alone


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
