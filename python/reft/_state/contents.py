"""State of any shape: what optimizers keep, taken apart and put together again.

`optimizer.state` and `param_groups` may hold tensors and anything else, in containers of any depth.
Tensors are copied by the engine, as regions. The rest is small state: `encode` gives plain values
in which a mark stands for each tensor, and `Builder` makes the containers of a restarted script
equal to them, with its own tensors in the places of the marks, or with new ones where it has none
yet.

An encoded value is a number or text as itself, or a tuple whose first item says what it is: see
`encode`.

Threads: the training thread. Errors: `encode` names what it leaves out; `Builder` raises KeyError
for a parameter that does not exist.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from reft._state import object_pickles
from reft._state.object_pickles import Find, References

PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})
KEEP: Any = ("keep",)
_DICTS = (dict, OrderedDict, defaultdict)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_DEEPEST = 12

Place = tuple[Any, Any]  # container, key


def tensors_in(
    value: Any, name: str, place: Place, label: Callable[[Any], str], depth: int = 0
) -> Iterator[tuple[str, torch.Tensor, Place]]:
    """(name, tensor, place) of each tensor in `value`, which stands at `place`.

    Args:
        label: gives what a key is called.
    """
    if isinstance(value, torch.Tensor):
        yield name, value, place
    elif depth < _DEEPEST:
        kind = type(value)
        if kind in _DICTS:
            for called, key in sorted(((label(key), key) for key in value), key=_first_item):
                yield from tensors_in(
                    value[key], below(name, called), (value, key), label, depth + 1
                )
        elif kind in (list, tuple, deque):
            for i, item in enumerate(value):
                yield from tensors_in(item, f"{name}.{i}", (value, i), label, depth + 1)


def below(name: str, label: str) -> str:
    """What an item of a container is called; `label` is that of its key."""
    return f"{name}{label}" if label[:1] == "[" else f"{name}.{label}"


def _first_item(pair: tuple[str, Any]) -> str:
    return pair[0]


def shape_of(value: Any, depth: int = 0) -> Any:
    """Changes with the keys and sizes of the containers in `value`, not with what stands in them."""
    kind = type(value)
    if kind in _DICTS:
        if set(map(type, value.values())) <= _LEAVES:
            return len(value)
        inner = [shape_of(item, depth + 1) for item in value.values()] if depth < _DEEPEST else []
        return (len(value), *inner)
    if kind in (list, tuple, deque) and depth < _DEEPEST:
        return (-len(value), *(shape_of(item, depth + 1) for item in value))
    return 1 if kind is torch.Tensor else 0


_LEAVES = {torch.Tensor}


class Encoder:
    """Encodes values.

    Args:
        saved: names of the tensors that are saved.
        references: what stands for parameters, modules and optimizers.
        label: as for `tensors_in`.

    Attributes:
        left_out: (place, class, why) of what is not saved.
    """

    def __init__(
        self, saved: Collection[str], references: References, label: Callable[[Any], str]
    ) -> None:
        self._saved, self._references, self._label = saved, references, label
        self.left_out: list[tuple[str, str, str]] = []

    def encode(self, value: Any, name: str, depth: int = 0) -> Any:
        """Encodes a value: itself; ("tensor", name, device type); ("object", kind, key) for what a
        restarted script has, too; ("dict" or "list" or "tuple" or "deque", items); ("pickle",
        bytes); or KEEP."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if id(value) in self._references:
            return ("object", *self._references[id(value)])
        if isinstance(value, torch.Tensor):
            return ("tensor", name, value.device.type) if name in self._saved else KEEP
        if depth < _DEEPEST:
            if kind in _DICTS:
                items = [self._item(pair, name, depth + 1) for pair in value.items()]
                return ("dict", [item for item in items if item is not None])
            if kind in (list, tuple, deque):
                items = [
                    self.encode(item, f"{name}.{i}", depth + 1) for i, item in enumerate(value)
                ]
                return (kind.__name__, items)
        return self._pickled(value, name)

    def _item(self, pair: tuple[Any, Any], name: str, depth: int) -> tuple[Any, Any] | None:
        key, item = pair
        called = below(name, self._label(key))
        encoded = self.encode(key, called, depth)
        if encoded == KEEP:
            self.left_out.append((called, type(key).__name__, "its key cannot be saved"))
            return None
        return encoded, self.encode(item, called, depth)

    def _pickled(self, value: Any, name: str) -> Any:
        if isinstance(value, _FUNCTIONS):
            return KEEP  # code, which the restarted script has
        try:
            return ("pickle", object_pickles.dumps(value, self._references))
        except Exception as error:
            kind = type(value)
            why = f"cannot be pickled: {error}"
            self.left_out.append((name, f"{kind.__module__}.{kind.__qualname__}", why))
            return KEEP


def is_fixed(encoded: Any) -> bool:
    """Whether an encoded value has nothing but marks: it changes with its structure only."""
    if type(encoded) is not tuple:
        return False
    kind, *rest = encoded
    if kind == "dict":
        return all(is_fixed(item) for _, item in rest[0])
    if kind in ("list", "tuple", "deque"):
        return all(map(is_fixed, rest[0]))
    return kind in ("tensor", "object", "keep")


class Builder:
    """Makes live containers equal to encoded ones, and can undo that.

    Args:
        tensor: gives the tensor for a mark: (name, device type, what stands there now).
        find: gives the live object for (kind, key).
    """

    def __init__(self, tensor: Callable[[str, str, Any], Any], find: Find) -> None:
        self._tensor, self._find = tensor, find
        self._undo: list[Callable[[], None]] = []

    def put(self, encoded: Any, live: Any) -> Any:
        """The value; containers of the same kind that stand there are written to."""
        if type(encoded) is not tuple:
            return encoded
        kind, *rest = encoded
        if kind == "tensor":
            return self._tensor(rest[0], rest[1], live)
        if kind == "object":
            return self._find(rest[0], rest[1])
        if kind == "pickle":
            return object_pickles.loads(rest[0], self._find)
        if kind == "dict":
            return self.put_items(rest[0], live if type(live) in _DICTS else {})
        if kind == "keep":
            return live
        before = list(live) if type(live) in (list, tuple, deque) else []
        before += [None] * (len(rest[0]) - len(before))
        items = [self.put(item, now) for item, now in zip(rest[0], before, strict=False)]
        if kind == "tuple":
            return tuple(items)
        if type(live).__name__ != kind:
            return deque(items) if kind == "deque" else items
        self.note(live)
        live.clear()
        live.extend(items)
        return live

    def put_items(self, encoded: list[tuple[Any, Any]], live: Any, keep: Any = ()) -> Any:
        """As `put`, for a dict.

        Args:
            keep: keys that stay as they are.
        """
        made = {}
        for key, item in encoded:
            key = self.put(key, None)
            now = live.get(key)
            if item == KEEP and key not in live:
                continue
            made[key] = self.put(item, now)
        self.note(live)
        kept = {key: live[key] for key in keep if key in live}
        live.clear()
        live.update(kept)
        live.update(made)
        return live

    def note(self, live: Any) -> None:
        """Remembers what a container holds now."""
        if isinstance(live, dict):
            items = dict(live)

            def undo() -> None:
                live.clear()
                live.update(items)
        else:
            values = list(live)

            def undo() -> None:
                live.clear()
                live.extend(values)

        self._undo.append(undo)

    def on_undo(self, call: Callable[[], None]) -> None:
        self._undo.append(call)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
