"""Compares two captures of one program point: that of the process that died, and that of the
process that has computed the same step again.

Only what both captures hold is compared. What one of them leaves to the restarted script (`KEEP`,
`Owned`, a constant that had not changed) says nothing about the other. Addresses, and the order of
sets, differ between processes and are not compared.

Threads: any. Errors: `pickle.UnpicklingError` for captures that this version does not write.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from reft._state import names
from reft._state.raw import bytes_of

from . import plain
from .bytecode import Unsupported, analyse
from .kinds.constants import Pickled
from .kinds.containers import List, Mapping, Set
from .kinds.files import File, TextInMemory
from .kinds.iterators import Advanced, FinishedGenerator, Generator, Iterator, RunningGenerator
from .kinds.loaders import Loader, LoaderIterator
from .kinds.modules import Module
from .kinds.objects import Instance, Lost, Owned, Pending
from .kinds.randoms import Random, SeedSequence
from .kinds.tensors import Array, Tensor
from .nodes import (
    KEEP,
    MISSING,
    UNBOUND,
    Graph,
    Node,
    find_named,
    function_in,
    handle_in,
    identity_in,
    index_of,
)
from .restore_walk import put_in

DATA = "data order"
RANDOM = "random state"
VARIABLE = "variable"
TENSOR = "tensor"

_MOST = 200
_LONGEST = 60  # characters of a value in a message
# Nodes that leave their object to the restarted script, or say nothing of its state.
_LEFT_ALONE = (Owned, Lost, Pending, RunningGenerator)
# Of memory, which is another one in each process.
_ADDRESSES = {Tensor: {"storage", "offset", "strides"}, Array: {"storage", "address", "strides"}}
# Packages whose objects show progress: what they hold follows the time that has passed.
_DISPLAYS = frozenset({"tqdm"})
_HASHES = frozenset({"indices_drawn", "last_batch"})  # of a `LoaderIterator`
# Of loaders and samplers that came after the first program point: a resume may have given their
# place to one that stood there.
_OF_LATER = frozenset({"made_of", "whose"})
# Of loaders and their iterators: what is known of them, and no state.
_KNOWN_OF = frozenset({"look", "is_mixed"})
# Of which fields are pickles. Bytes of others may look like one.
_PICKLES = (Pickled, LoaderIterator)
_POSITIONS = (Iterator, Advanced, Generator, FinishedGenerator, File, TextInMemory, Loader,
              LoaderIterator)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """One value that is not what it was.

    Attributes:
        kind: `DATA`, `RANDOM`, `VARIABLE` or `TENSOR`.
        where: its place in the program, such as `train:epoch`.
        why: both values, or how they differ.
        may_be_time: it is a number with a fraction, or a date: what a clock gives is another value
            each time.
        may_be_later: it is a tensor that the script may have written to between the program point
            and the copy.
    """

    kind: str
    where: str
    why: str
    may_be_time: bool = False
    may_be_later: bool = False


def frames(
    saved: tuple[bytes, bytes], live: tuple[bytes, bytes], names: Callable[[int], list[str]]
) -> list[Difference]:
    """Compares what `capture` returned under "frames".

    Args:
        saved: of the process that died, and the contents of its room for device memory.
        live: of this process, likewise.
        names: gives the names of a frame's slots, by its position among the frames of the script.
    """
    there, here = plain.loads(saved[0]), plain.loads(live[0])
    _, _, old_path, old_outside, old_settings, old_graph, _ = there
    _, _, new_path, new_outside, new_settings, new_graph, _ = here
    old, new = Graph.unpacked(old_graph), Graph.unpacked(new_graph)
    put_in(old, saved[1])
    put_in(new, live[1])
    walk = _Walk(old, new)
    there_at, here_at = ([frame["name"] for frame in path] for path in (old_path, new_path))
    if there_at != here_at:
        why = f"was in {' > '.join(there_at)}, is in {' > '.join(here_at)}"
        return [Difference(DATA, "place in the program", why)]
    for position, (one, other) in enumerate(zip(old_path, new_path, strict=True)):
        if one["user"] and other["user"]:
            walk.frame(one, other, one["name"], names(position))
    walk.outside(old_outside, new_outside)
    walk.plain(old_settings, new_settings, "settings of torch", VARIABLE)
    return walk.found


def values(saved: Any, live: Any, where: str, kind: str) -> list[Difference]:
    """Compares plain values: numbers, strings, tensors, and containers of them."""
    walk = _Walk(Graph(), Graph())
    walk.plain(saved, live, where, kind)
    return walk.found


class _Walk:
    """Goes through two graphs side by side."""

    def __init__(self, old: Graph, new: Graph) -> None:
        self._old, self._new = old, new
        self._seen: set[tuple[int, int]] = set()
        self.found: list[Difference] = []

    # -- frames and modules

    def frame(self, old: dict[str, Any], new: dict[str, Any], where: str, slots: list[str]) -> None:
        """Compares the records of one frame."""
        if old["offset"] != new["offset"]:
            self._add(DATA, where, "stood in another call")
            return
        other = dict(new["fast"])
        for index, value in old["fast"]:
            name = slots[index] if index < len(slots) else str(index)
            self._pair(value, other.get(index, KEEP), f"{where}:{name}")
        self._named(old["names"], new["names"], f"{where}:")
        self._named(old["globals"], new["globals"], "global ")
        for i, (a, b) in enumerate(zip(old["stack"], new["stack"], strict=True)):
            self._pair(a, b, f"{where}<stack {i}>")

    def outside(self, old: Any, new: Any) -> None:
        """Compares the state of the script's own modules."""
        others = {name: rest for name, *rest in new}
        for name, old_names, classes, functions in old:
            if name not in others:
                continue
            new_names, new_classes, new_functions = others[name]
            self._named(old_names, new_names, f"{name}:")
            of_class = dict(new_classes)
            for qualname, attributes in classes:
                self._named(attributes, of_class.get(qualname, []), f"{name}:{qualname}.")
            self._named(functions, new_functions, f"{name}:")

    def _named(self, old: Any, new: Any, prefix: str) -> None:
        others = dict(new)
        for name, value in old:
            if name in others:
                self._pair(value, others[name], f"{prefix}{name}")

    # -- encoded values

    def _pair(self, old: Any, new: Any, where: str) -> None:
        if len(self.found) >= _MOST:
            return
        if old == KEEP or new == KEEP:
            return
        if handle_in(old) is not MISSING or handle_in(new) is not MISSING:
            return
        if (identity_in(old) is None) != (identity_in(new) is None):
            return
        i, j = index_of(old), index_of(new)
        if i is None and j is None:
            self._atoms(old, new, where, VARIABLE)
            return
        if i is None or j is None:
            one, other = self._old.node(old), self._new.node(new)
            # The restore cannot make a loader that the script has not made yet, and has named it.
            left = (*_LEFT_ALONE, Loader)
            if not isinstance(one, left) and not isinstance(other, left):
                self._add(VARIABLE, where, f"was {self._text(old)}, is {self._text(new)}")
            return
        if (i, j) in self._seen:
            return
        self._seen.add((i, j))
        types = (self._old.types[i], self._new.types[j])
        self._nodes(self._old.nodes[i], self._new.nodes[j], where, types)

    def _nodes(self, old: Node, new: Node, where: str, types: tuple[str, str]) -> None:
        if isinstance(old, _LEFT_ALONE) or isinstance(new, _LEFT_ALONE):
            return
        if types[0].partition(".")[0] in _DISPLAYS and isinstance(old, Instance):
            return
        if types[0] != types[1]:
            self._add(VARIABLE, where, f"was a {types[0]}, is a {types[1]}")
            return
        if type(old) is not type(new):
            return  # one of them stood at the first program point, and is captured in another way
        match old:
            case Tensor() | Array():
                self._contents(old, new, where)
            case Random():
                self.plain(old.state, new.state, where, RANDOM)  # type: ignore[attr-defined]
            case SeedSequence():
                pass  # its restore makes another one; see the class
            case Mapping():
                assert isinstance(new, Mapping)
                self._mapping(old, new, where)
            case Set():
                assert isinstance(new, Set)
                self._set(old, new, where)
            case Generator():
                self._generator(old, new, where)
            case Module():
                assert isinstance(new, Module)
                self._module(old, new, where)
            case Iterator(maker="cycle"):
                assert isinstance(new, Iterator)
                self._cycle(old, new, where)
            case _:
                kind = DATA if isinstance(old, _POSITIONS) else VARIABLE
                for one in dataclasses.fields(old):  # type: ignore[arg-type]
                    a, b = getattr(old, one.name), getattr(new, one.name)
                    if one.name in _KNOWN_OF:
                        continue
                    if one.name in _HASHES and 0 in (a, b):
                        continue  # one of the processes did not take it
                    if one.name in _OF_LATER and not (a and b):
                        continue
                    if isinstance(old, _PICKLES) and type(a) is type(b) is bytes:
                        self._pickles(a, b, where, one.name, kind)
                    else:
                        self._field(a, b, where, one.name, kind)

    def _field(self, old: Any, new: Any, where: str, name: str, kind: str) -> None:
        """Compares a field of two nodes, whatever it holds."""
        if _is_named(old) and _is_named(new):
            self._named(old, new, f"{where}.")
        elif isinstance(old, list) and isinstance(new, list):
            if len(old) != len(new):
                self._add(kind, where, f"had {len(old)} items, has {len(new)}")
                return
            for i, (a, b) in enumerate(zip(old, new, strict=True)):
                self._field(a, b, f"{where}[{i}]", "", kind)
        elif _is_encoded(old) and _is_encoded(new):
            before = len(self.found)
            self._pair(old, new, where)
            if kind == DATA:
                self._as_data(before, where, name)
        else:
            self.plain(old, new, where, kind)

    def _as_data(self, before: int, where: str, name: str) -> None:
        """An atom inside a position is a position, too."""
        for at in range(before, len(self.found)):
            one = self.found[at]
            if one.where == where:
                what = f"{name} " if name else ""
                self.found[at] = Difference(DATA, where, f"{what}{one.why}")

    def _contents(self, old: Any, new: Any, where: str) -> None:
        skip = _ADDRESSES[type(old)]
        for one in dataclasses.fields(old):
            a, b = getattr(old, one.name), getattr(new, one.name)
            if one.name in skip or one.name in ("data", "tags"):
                continue
            if a != b and one.name not in ("is_owned", "device"):
                self._add(TENSOR, where, f"{one.name} was {_short(a)}, is {_short(b)}")
                return
        if old.data != new.data and isinstance(old.data, bytes) and isinstance(new.data, bytes):
            self._add(TENSOR, where, _delta(old.data, new.data, old.dtype))
        if hasattr(old, "tags"):
            self._named(old.tags, new.tags, f"{where}.")

    def _mapping(self, old: Mapping, new: Mapping, where: str) -> None:
        if len(old.items) != len(new.items):
            self._add(VARIABLE, where, f"had {len(old.items)} items, has {len(new.items)}")
            return
        plain_keys = all(_is_plain_key(key) for key, _ in (*old.items, *new.items))
        if plain_keys:
            others = {_frozen(key): value for key, value in new.items}
            for key, value in old.items:
                if _frozen(key) not in others:
                    self._add(VARIABLE, where, f"the key {_short(key)} is missing")
                    return
                self._pair(value, others[_frozen(key)], f"{where}[{_short(key)}]")
        else:
            for i, ((_, a), (_, b)) in enumerate(zip(old.items, new.items, strict=True)):
                self._pair(a, b, f"{where}[{i}]")
        self._named(old.attributes, new.attributes, f"{where}.")

    def _set(self, old: Set, new: Set, where: str) -> None:
        if all(map(_is_plain_key, (*old.members, *new.members))):
            a, b = set(map(_frozen, old.members)), set(map(_frozen, new.members))
            if a != b:
                self._add(VARIABLE, where, f"{len(a ^ b)} members are in one alone")
        elif len(old.members) != len(new.members):
            self._add(VARIABLE, where, f"had {len(old.members)} members, has {len(new.members)}")

    def _cycle(self, old: Iterator, new: Iterator, where: str) -> None:
        """A cycle at the end of its items is the same as one at their beginning."""
        one, other = self._place_in_list(old, self._old), self._place_in_list(new, self._new)
        if one is not None and other is not None and one != other:
            self._add(DATA, where, f"was at item {one} of a cycle, is at {other}")

    @staticmethod
    def _place_in_list(cycle: Iterator, graph: Graph) -> int | None:
        inner = graph.node(cycle.arguments[0])
        if not isinstance(inner, Iterator) or not inner.arguments:
            return None
        items = graph.node(inner.arguments[0])
        if not isinstance(items, List) or not items.items or type(inner.state) is not int:
            return None
        return inner.state % len(items.items)

    def _module(self, old: Module, new: Module, where: str) -> None:
        for name in ("count", "training", "requires_grad"):
            a, b = getattr(old, name), getattr(new, name)
            if a != b:
                self._add(VARIABLE, where, f"{name} of its modules differs")
        others = {(index, name): value for index, name, value in new.attributes}
        for index, name, value in old.attributes:
            if (index, name) in others:
                self._pair(value, others[index, name], f"{where}.{name}")
        self._named(old.tensors, new.tensors, f"{where}.")
        self._named(old.hooks, new.hooks, f"{where}.")

    def _generator(self, old: Any, new: Any, where: str) -> None:
        if tuple(old.record["position"]) != tuple(new.record["position"]):
            self._add(DATA, where, "is suspended at another place")
            return
        module = str(old.record.get("module", ""))
        if module.partition(".")[0] not in _DISPLAYS:
            self.frame(old.record, new.record, where, _slots_of(module, old.record["name"]))

    def _pickles(self, old: bytes, new: bytes, where: str, name: str, kind: str) -> None:
        """Equal values may have unequal pickles."""
        if old == new:
            return
        try:
            one, other = _loaded(old), _loaded(new)
        except (pickle.UnpicklingError, ValueError, EOFError, IndexError, KeyError):
            self._add(kind, where, f"{name} differs")
            return
        self.plain(one, other, where, kind)

    # -- plain values

    def plain(self, old: Any, new: Any, where: str, kind: str) -> None:
        """Compares values that are captured as themselves."""
        if len(self.found) >= _MOST:
            return
        if isinstance(old, dict) and isinstance(new, dict):
            for key in old:
                if key not in new:
                    self._add(kind, where, f"the key {_short(key)} is missing")
                else:
                    self.plain(old[key], new[key], f"{where}[{_short(key)}]", kind)
            for key in new.keys() - old.keys():
                self._add(kind, where, f"the key {_short(key)} is new")
            return
        if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
            if len(old) != len(new):
                self._add(kind, where, f"had {len(old)} items, has {len(new)}")
                return
            for i, (a, b) in enumerate(zip(old, new, strict=True)):
                self.plain(a, b, f"{where}[{i}]", kind)
            return
        if hasattr(old, "untyped_storage") and hasattr(new, "untyped_storage"):
            a, b = bytes_of(old), bytes_of(new)
            if a != b:
                self._add(TENSOR, where, _delta(a, b, str(old.dtype)[6:]))
            return
        if isinstance(old, bytes) and isinstance(new, bytes):
            if old != new:
                self._add(kind, where, f"{len(old)} bytes differ")
            return
        if hasattr(old, "__array_interface__") and hasattr(new, "__array_interface__"):
            self._arrays(old, new, where)
            return
        if type(old) is type(new) and not _has_equality(old):
            # Two copies of one object are never equal.
            self.plain(getattr(old, "__dict__", {}), getattr(new, "__dict__", {}), where, kind)
            return
        self._atoms(old, new, where, kind)

    def _arrays(self, old: Any, new: Any, where: str) -> None:
        parts = [(old, new)]
        if hasattr(old, "mask") and hasattr(new, "mask"):
            parts = [(old.data, new.data), (old.mask, new.mask)]
        if any(a.dtype != b.dtype or a.tobytes() != b.tobytes() for a, b in parts):
            self._add(TENSOR, where, "items of an array differ")

    def _atoms(self, old: Any, new: Any, where: str, kind: str) -> None:
        try:
            same = type(old) is type(new) and (old == new or _both_nan(old, new))
            if isinstance(old, float) and isinstance(new, float) and old == new:
                same = math.copysign(1, old) == math.copysign(1, new)
            same = bool(same)
        except Exception as error:  # noqa: BLE001  # values of a script's own compare as they like
            self._add(kind, where, f"cannot be compared: {type(error).__name__}: {error}")
            return
        if not same:
            timely = isinstance(old, float) and isinstance(new, float)
            timely = timely or _is_clock(old, new) or _is_date(old)
            self._add(kind, where, f"was {_short(old)}, is {_short(new)}", may_be_time=timely)

    def _text(self, encoded: Any) -> str:
        return _short(encoded) if index_of(encoded) is None else "an object"

    def _add(self, kind: str, where: str, why: str, may_be_time: bool = False) -> None:
        if len(self.found) < _MOST:
            self.found.append(Difference(kind, where, why, may_be_time))


def _slots_of(module: str, qualname: str) -> list[str]:
    """Names of the slots of a function's frames; none if the function is not found."""
    found = function_in(find_named(module, qualname))
    code = getattr(found, "__code__", None)
    try:
        return [] if code is None else list(analyse(code).slot_names)
    except Unsupported:
        return []


def _has_equality(value: Any) -> bool:
    return any("__eq__" in vars(one) for one in type(value).__mro__[:-1])


def _is_encoded(value: Any) -> bool:
    return (
        index_of(value) is not None
        or value in (KEEP, UNBOUND)
        or handle_in(value) is not MISSING
        or identity_in(value) is not None
        or isinstance(value, (int, float, str, complex, type(None)))
    )


def _is_named(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in value
        )
        and not all(index_of(one) is not None or handle_in(one) is not MISSING for one in value)
    )


def _is_plain_key(key: Any) -> bool:
    return isinstance(key, (int, float, str, bytes, bool, complex, type(None)))


def _frozen(key: Any) -> Any:
    return (type(key).__name__, key)


def _both_nan(old: Any, new: Any) -> bool:
    return isinstance(old, float) and math.isnan(old) and math.isnan(new)


def _is_clock(old: Any, new: Any) -> bool:
    """Whether two whole numbers are readings of a clock in nanoseconds or seconds."""
    if type(old) is not int or type(new) is not int:
        return False
    wall, steady = time.time_ns(), time.monotonic_ns()
    readings = ((wall, 10**9), (steady, 10**9), (wall // 10**9, 1))
    month = 30 * 86400
    return any(
        now - month * unit < old <= now and now - month * unit < new <= now and old > 10**9
        for now, unit in readings
    )


def _is_date(value: Any) -> bool:
    return type(value).__module__ == "datetime"


def _loaded(data: bytes) -> Any:
    lists = (names.VALUES, names.ARRAYS, names.MASKED_ARRAYS, names.CONTAINERS, plain.TENSORS)
    return plain.loads(data, *lists)


def _delta(old: bytes, new: bytes, dtype: str) -> str:
    """How two contents of a tensor or an array differ."""
    if len(old) != len(new) or not old:
        return f"{len(old)} bytes were saved, {len(new)} are there"
    try:
        before, now = _items(old, dtype), _items(new, dtype)
    except (TypeError, ValueError, RuntimeError):  # of no type that torch has
        return f"{len(old)} bytes differ"
    return delta(before, now) or "bytes differ"


def _items(data: bytes, dtype: str) -> Any:
    """A 1-D tensor of the contents of a tensor, or of an array, whose types have other names."""
    import torch

    kind = getattr(torch, dtype, None)
    if isinstance(kind, torch.dtype):
        return torch.frombuffer(bytearray(data), dtype=kind)
    import numpy

    return torch.from_numpy(numpy.frombuffer(data, dtype=dtype).copy())


def delta(before: Any, now: Any) -> str:
    """How two tensors of one shape and type differ, "" if only in the bits of equal values."""
    import torch

    differs = before != now
    differs &= ~((before != before) & (now != now))  # noqa: PLR0124  # NaN is not another value
    count = int(differs.sum())
    if not count:
        return ""
    items = f"{count} of {before.numel()} items differ"
    if before.dtype is torch.bool or before.dtype.is_complex:
        return items
    wide = torch.float64 if before.dtype.is_floating_point else torch.int64
    most = (before.to(wide) - now.to(wide)).abs()[differs].max()
    return f"{items}, max |Δ| {float(most):.3g}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def places(found: Iterable[Difference]) -> set[str]:
    """Where the differences are."""
    return {one.where for one in found}
