"""Writes captured values back into the live objects of a restarted process.

`Decoder` walks the nodes (`nodes`) beside the live graph: each node finds its live counterpart (by
the place where the object stood at the process's first program point, else by the same path), and
the differences become *writes*. Nothing live is touched until `Decoder.apply`. Objects that have an
owner are never written.

Threads: the training thread. Errors: `Lost`; what else cannot be put back is reported, not raised.
"""

from __future__ import annotations

import functools
import io
import re
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

from . import handles, hooks, iterators, loaders, memory
from .births import MEMBER
from .bytecode import analyse
from .encode import mutable_defaults
from .modules import tree_of
from .nodes import (
    ATOMS,
    KEEP,
    MISSING,
    Report,
    find_named,
    find_type,
    loads,
    name_of_key,
    native,
    type_name,
)
from .rng import new_object, set_object_state

_EXITS = frozenset({"__exit__", "__aexit__"})
_RANK = re.compile(r"(?:^|[ :._])rank$")
GeneratorPlan = Callable[["Decoder", Any, Any, str], Any]


class Lost(Exception):
    """A node that the loop cannot do without has no live counterpart."""


def _set_default(function: FunctionType, name: str, value: Any) -> None:
    """Gives a default argument another value."""
    if function.__kwdefaults__ is not None and name in function.__kwdefaults__:
        function.__kwdefaults__[name] = value
        return
    defaults = list(function.__defaults__ or ())
    names = function.__code__.co_varnames[: function.__code__.co_argcount][-len(defaults) :]
    defaults[names.index(name)] = value
    function.__defaults__ = tuple(defaults)


class Decoder:
    """Plans the writes that give live objects their captured values.

    Args:
        nodes: From `Encoder.nodes`.
        born: Live objects by the place where they stood at the first program point.
        plan_generator: Plans the writes to a suspended generator, or to a new one if there is none
            (MISSING), and gives it.
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
        self._fixed: set[int] = (
            set()
        )  # ids of live objects that are written where they stand: parts of modules and loaders
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
            # A counter may only have happened to have a descriptor's number: then what is live is
            # none.
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
        return (
            None
            if here == there
            else f"a `with` block of {there} stands around the loop, in the restarted script one of {here}"
        )

    def _container(self, node: Any, live: Any) -> Any:
        """As `_target`, for what can as well be made anew: only what has lived since the first
        program point.

        What else stands at the same place may be an item of the data that the variable does not
        mean any more.
        """
        return self._target(node, live if id(live) in self._fixed else MISSING)

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
                self._done[index] = candidate
                self._put_attributes(node[3] if len(node) > 3 else [], candidate, place)
                if len(node) > 4:
                    self._put_hooks(node[4], hooks.of_optimizer(candidate), place)
                return candidate
        return self._problem(place, node, "made after the first step")

    def _running(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._born.get(node[1], live) if node[1] is not None else live
        if not getattr(target, "gi_running", False):
            raise Lost(f"{place}: the training loop runs in another generator than in the first iteration")
        return target

    def _lost(self, index: int, node: Any, live: Any, place: str) -> Any:
        return KEEP

    @staticmethod
    def _type_of(node: Any, live: Any) -> type | None:
        """The class of a node; one that was made inside a function has no name to find it by, but the live object may be of it."""
        found = find_type(node[2])
        return type(live) if found is None and type_name(type(live)) == node[2] else found

    def _made(self, node: Any, base: type, live: Any) -> Any:
        """A new, empty object of a container's class; MISSING if the class is not there."""
        kind = self._type_of(node, live)
        return kind.__new__(kind) if kind is not None and issubclass(kind, base) else MISSING

    def _put_attributes(self, attributes: list[tuple[str, Any]], target: Any, place: str) -> None:
        if attributes and attributes[0][0] == MEMBER:
            target.__dict__ = target
            return
        for name, item in attributes:
            value = self.resolve(item, target.__dict__.get(name, MISSING), f"{place}.{name}")
            if value is not KEEP:
                self._contents.append(functools.partial(target.__dict__.__setitem__, name, value))

    def _put_hooks(self, saved: list[tuple[str, Any]], there: hooks.Hooks, place: str) -> None:
        """Puts back what hooks keep; which ones there are is left to the restarted script."""
        live = dict(there)
        for name, item in saved:
            if name in live:
                self.resolve(item, live.pop(name), f"{place}.{name}")
            else:
                self.problems.append((f"{place}.{name}", "hook", "registered after the first step"))
        self.problems += [(f"{place}.{name}", "hook", "removed after the first step") for name in live]

    def _key(self, key: Any, there: list[Any], at: int, place: str) -> Any:
        """The live key of a dict's or set's item; KEEP if it cannot be found."""
        if type(key) is not list:
            return key
        if key[0] == "id":
            owner = self._born.get(key[1], MISSING)
            return KEEP if owner is MISSING else id(owner)
        if key[0] != "r":
            return KEEP
        node = self._nodes[key[1]]
        candidate = there[at] if at < len(there) and type_name(type(there[at])) == node[2] else MISSING
        return self.resolve(tuple(key), candidate, f"{place}<key>")

    def _list(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._container(node, live)
        if target is MISSING:
            target = self._made(node, list, live)
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
        target = self._container(node, live)
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
        kind = self._type_of(node, live)
        if kind is None or not issubclass(kind, tuple):
            return self._problem(place, node, "class not found")
        try:
            return tuple.__new__(kind, items)  # not the class's own, which may want other arguments
        except TypeError:
            return kind(items)  # of C

    def _dict(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._container(node, live)
        if target is MISSING:
            target = self._made(node, dict, live)
            if target is MISSING:
                return self._problem(place, node, "its class is not found")
            if isinstance(target, defaultdict) and node[5] is not None:
                there = live.default_factory if isinstance(live, defaultdict) else MISSING
                factory = self.resolve(node[5], there, f"{place}<factory>")
                if factory is KEEP and there in (MISSING, None):
                    return self._problem(place, node, "what makes its missing items was made after the first step")
                target.default_factory = there if factory is KEEP else factory
        self._done[index] = target
        there = target if target else live if isinstance(live, dict) else {}
        keys = list(there)
        items: dict[Any, Any] = {}
        for at, (encoded, item) in enumerate(node[3]):
            key = self._key(encoded, keys, at, place)
            if key is KEEP:
                return self._problem(place, node, "one of its keys was made after the first step")
            current = there.get(key, MISSING)
            name = name_of_key(key, at)
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
        layout = node[5]
        if node[2] == "builtins.frozenset":
            frozen = frozenset(items)
            if layout is not None:
                self._contents.append(lambda: native().set_put_layout(frozen, list(items), *layout))
            return frozen
        target = self._container(node, live)
        if target is MISSING:
            target = self._made(node, set, live)
            if target is MISSING:
                return self._problem(place, node, "its class is not found")
        # Not the class's own methods: they may look at what is not there yet.
        self._contents.append(lambda: set.clear(target))
        self._contents.append(lambda: set.update(target, items))
        if layout is not None:
            self._contents.append(lambda: native().set_put_layout(target, list(items), *layout))
        self._put_attributes(node[4], target, place)
        return target

    def _bytearray(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._container(node, live)
        if target is MISSING:
            return bytearray(node[3])
        self._contents.append(lambda: target.__setitem__(slice(None), node[3]))
        return target

    def _enum(self, index: int, node: Any, live: Any, place: str) -> Any:
        kind = find_type(node[2])
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
            kind = self._type_of(node, live)
            if kind is None or kind.__module__.partition(".")[0] == "torch" or not self._is_plain(index):
                return self._problem(place, node, "made after the first step")
            target = object.__new__(kind)
        self._done[index] = target
        for name, item in node[4]:
            value = self.resolve(item, getattr(target, name, MISSING), f"{place}.{name}")
            if value is not KEEP:
                self._contents.append(functools.partial(object.__setattr__, target, name, value))
        is_drawn = loaders.is_drawn(target)
        for name, item in node[3]:
            there = target.__dict__.get(name, MISSING)
            if is_drawn:
                self._fixed.update(
                    map(id, loaders.containers_in(there))
                )  # its iterator, which a replay has made, may hold them
            value = self.resolve(item, there, f"{place}.{name}")
            if value is not KEEP:
                self._contents.append(functools.partial(target.__dict__.__setitem__, name, value))
        if node[5]:
            self._put_hooks(node[5], hooks.of_optimizer(target), place)
        return target

    def _loader(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        if target is MISSING:
            return KEEP if live is not MISSING else self._problem(place, node, "made after the first step")
        self._done[index] = target
        # After the iterators' replay, which needs older states.
        self._positions.append(lambda: loaders.parts(target).write(node[3]))
        for name, part in node[5]:
            there = getattr(target, name, MISSING)
            self._fixed.add(id(there))
            self.resolve(part, there, f"{place}.{name}")
        for name, item in node[6]:
            there = target.__dict__.get(name, MISSING)
            value = self.resolve(item, there, f"{place}.{name}")
            if value is not KEEP and value is not there:
                self._positions.append(functools.partial(target.__dict__.__setitem__, name, value))
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
        defaults = dict(mutable_defaults(target))
        for name, item in node[6]:
            value = self.resolve(item, defaults.get(name, MISSING), f"{place}({name})")
            if value is not KEEP and value is not defaults.get(name, MISSING):  # an iterator is made anew
                self._contents.append(functools.partial(_set_default, target, name, value))
        return target

    def _event(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        target = threading.Event() if target is MISSING else target
        self._contents.append(target.set if node[3] else target.clear)
        return target

    def _seeds(self, index: int, node: Any, live: Any, place: str) -> Any:
        import numpy

        entropy = self.resolve(node[3], getattr(live, "entropy", MISSING), f"{place}[entropy]")
        return numpy.random.SeedSequence(entropy, spawn_key=node[4], pool_size=node[5], n_children_spawned=node[6])

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
        known = type(live) is functools.partial
        func = self.resolve(node[3], live.func if known else MISSING, f"{place}<partial>")
        func = live.func if func is KEEP and known else func
        arguments = self._children(node[4], list(live.args) if known else [], f"{place}<partial>")
        before = live.keywords if known else {}
        keywords = {
            name: self.resolve(item, before.get(name, MISSING), f"{place}<partial>.{name}") for name, item in node[5]
        }
        keywords = {name: before.get(name, KEEP) if item is KEEP else item for name, item in keywords.items()}
        if arguments is None or any(item is KEEP for item in (func, *keywords.values())):
            return self._problem(place, node, "holds an object made after the first step")
        if known and func is live.func and _same(arguments, live.args) and _same(keywords, live.keywords):
            return live
        return functools.partial(func, *arguments, **keywords)

    def _code(self, index: int, node: Any, live: Any, place: str) -> Any:
        if isinstance(live, FunctionType) and f"{live.__qualname__} {analyse(live.__code__).digest.hex()}" == node[3]:
            return live
        why = f"another one than after the first step, and {node[3].partition(' ')[0]} cannot be found by its name"
        return self._problem(place, node, why)

    def _memoryview(self, index: int, node: Any, live: Any, place: str) -> Any:
        same = isinstance(live, memoryview)
        buffer = self.resolve(node[3], live.obj if same else MISSING, f"{place}.obj")
        if buffer is KEEP:
            return KEEP if same else self._problem(place, node, "its buffer was made after the first step")
        if same and live.obj is buffer:
            return live
        view = memoryview(buffer)
        view = view.toreadonly() if node[6] else view
        return view if (view.format, view.shape) == (node[4], node[5]) else view.cast("B").cast(node[4], node[5])

    def _weakref(self, index: int, node: Any, live: Any, place: str) -> Any:
        there = live() if type(live) is weakref.ReferenceType else None
        value = self.resolve(node[3], MISSING if there is None else there, f"{place}()")
        if value is KEEP or value is there:
            return KEEP if there is not None else self._problem(place, node, "made after the first step")
        return weakref.ref(value)

    def _numbers(self, index: int, node: Any, live: Any, place: str) -> Any:
        import array

        saved = array.array(node[3], node[4])
        target = self._container(node, live)
        if target is MISSING or target.typecode != node[3]:
            return saved
        self._contents.append(lambda: target.__setitem__(slice(None), saved))
        return target

    def _wrapper(self, index: int, node: Any, live: Any, place: str) -> Any:
        """A DDP that was made after the first step: the live one will do if it communicates for the same parameters."""
        if live is MISSING or type_name(type(live)) != node[2] or tree_of(live).requires_grad() != node[3]:
            raise Lost(
                f"{place}: a model was wrapped by {node[2].rpartition('.')[2]} after the first step, for other parameters"
            )
        self._done[index] = live
        self.resolve(node[4], live.module, f"{place}.module")
        return live

    def _module(self, index: int, node: Any, live: Any, place: str) -> Any:
        target = self._target(node, live)
        if target is MISSING:
            return KEEP if live is not MISSING else self._problem(place, node, "made after the first step")
        self._done[index] = target
        count, training, grads, attributes, tensors, saved_hooks = node[3:]
        tree = tree_of(target)
        if len(tree.modules) != count or len(tree.tensors) != len(grads):
            raise Lost(f"{place}: a module that has other parts than the saved one")
        # What is written now is not what this process began with.
        tree.changed = tree.changed or any(
            item[0] == "r" and self._nodes[item[1]][0] == "tensor" for _, item in tensors
        )
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

        self._put_hooks(saved_hooks, tree.own_hooks(), place)

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
        target = self._container(node, live) if self._is_plain(index) else self._target(node, live)
        if target is MISSING:
            kind = self._type_of(node, live)
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

        writes = [write]
        for name, item in node[4]:
            value = self.resolve(item, getattr(target, name, MISSING), f"{place}.{name}")
            if value is not KEEP:
                writes.append(functools.partial(object.__setattr__, target, name, value))
        if made:
            for action in writes:  # nobody has seen it; it may be a key, whose hash is made of its attributes
                action()
        else:
            self._contents += writes
        return target

    def _lasting(self, node: Any) -> Any:
        """The live tensor or array that has lived since the first program point as the captured one
        has; None if none fits.

        Only what stands at that place is not enough: it may be an item of the data that the
        variable does not mean any more.
        """
        candidate = self._born.get(node[1]) if node[1] is not None else None
        if candidate is None or type_name(type(candidate)) != node[2]:
            return None
        return candidate if _can_take(candidate, node) and not self._memory.is_owned(candidate) else None

    def _room_for(self, node: Any, live: Any) -> Any:
        """The live tensor or array that a captured one is put into; None if it is made anew."""
        lasting = self._lasting(node)
        fits = lasting is None and id(live) in self._fixed and id(live) not in self._claimed and _can_take(live, node)
        return live if fits else lasting

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
        dtype, shape, device, data, requires_grad, where, tags = node[3:]
        if where[3] and data:
            target = self._target(node, live)
            here = () if target is MISSING else memory.memory_of_tensor(target, self._owned_storages)
            if target is not MISSING:
                self._put_attributes(tags, target, place)
            if here[1:] == where[1:] and tuple(target.shape) == shape:
                return target  # another name for a weight's memory, which is put back as the weight's
            self._problem(place, node, "view of a weight, and comes back as a copy of its own")
        target = self._room_for(node, live)
        if target is not None:
            self._claimed.add(id(target))
        kind = getattr(torch, dtype)
        saved = (torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)).reshape(shape)
        if memory.has_memory(node):
            made = self._memory.tensor(index, target)
            self._contents.append(lambda: memory.fill(made, saved))
        else:
            made = saved.to(device) if target is None else target
        if made is not target:
            made = memory.with_bits(made, where[4])
            if node[2] == "torch.nn.parameter.Parameter":
                made = torch.nn.Parameter(made, requires_grad)
            elif requires_grad:
                made.requires_grad_()
        self._done[index] = made
        self._put_attributes(tags, made, place)
        return made

    def _array(self, index: int, node: Any, live: Any, place: str) -> Any:
        import numpy

        dtype, shape, data, _ = node[3:]
        saved = numpy.frombuffer(data, dtype=dtype).reshape(shape)
        if node[2] != "numpy.ndarray":
            return saved[()]
        if node[6] is not None and node[6][3] and data:
            target = self._target(node, live)
            if target is not MISSING and target.shape == shape and self._memory.is_owned(target):
                return target  # another name for a weight's memory
            self._problem(place, node, "view of a weight, and comes back as a copy of its own")
            return saved.copy()
        target = self._room_for(node, live)
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
        remarks: list[str] = []
        fresh = loaders.rebuild(loader, node[4], remarks)
        for remark in remarks:
            self._problem(place, node, remark)
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
    {
        "list",
        "deque",
        "tuple",
        "dict",
        "set",
        "bytearray",
        "instance",
        "tensor",
        "array",
        "pickled",
        "enum",
        "torch_constant",
        "random",
    }
    | {"named", "numbers", "seeds", "shallow"}
)


def _parts(node: Any) -> list[Any]:
    """What a node of `_MADE_ANEW` is made of."""
    if node[0] in ("instance", "shallow"):
        return [item for _, item in (*node[3], *node[4])]
    if node[0] == "dict":
        keys = [tuple(key) for key, _ in node[3] if type(key) is list]
        return [*keys, *(item for _, item in node[3]), *(item for _, item in node[4])]
    if node[0] == "set":
        return [*(tuple(key) for key in node[3] if type(key) is list), *(item for _, item in node[4])]
    if node[0] == "list":
        return [*node[3], *(item for _, item in node[4])]
    if node[0] == "seeds":
        return [node[3]]
    return list(node[3]) if node[0] in ("deque", "tuple") else []


def _same(one: Any, other: Any) -> bool:
    """Whether two sequences, or dicts, hold the same objects, or equal numbers and strings."""
    if isinstance(other, dict):
        return list(one) == list(other) and _same(list(one.values()), list(other.values()))
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        a is b or (type(a) is type(b) and type(a) in ATOMS and a == b) for a, b in pairs
    )


def _can_take(live: Any, node: Any) -> bool:
    """Whether a live tensor or array has the dtype, shape and device of a captured one, and may be written."""
    if tuple(live.shape) != tuple(node[4]):
        return False
    if node[0] == "array":
        return bool(live.dtype.str == node[3] and live.flags.writeable)
    if str(live.dtype)[6:] != node[3] or str(live.device) != node[5] or live.is_inference():
        return False
    if memory.bits_of(live) != tuple(node[8][4]):
        return False
    return all(stride != 0 or size <= 1 for stride, size in zip(live.stride(), live.shape, strict=True))
