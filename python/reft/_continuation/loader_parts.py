"""The samplers and datasets of a DataLoader, and those of their attributes that decide what it
yields.

Copied are numbers, strings, generators and small tensors; of what is replayed, samplers and
iterable datasets, small arrays and lists of plain values, too.

Threads: the training thread. Errors: `ValueError` for a loader that has other parts than the
captured one.
"""

from __future__ import annotations

import functools
import math
import pickle
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from reft._state import names
from reft._state.raw import bytes_of

from . import plain
from .nodes import type_name
from .reach import reach
from .rng import is_random, is_random_kind, new_object, object_state, set_object_state

Captured = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""Numbers and strings by part; states of generators; contents of lists and arrays."""

WHOSE = ("rank", "num_replicas")
"""Names of a sampler's attributes that never move to another rank."""
_PLAIN = (int, float, bool, str, type(None))
_PLAIN_TYPES = frozenset(_PLAIN)
_SMALL_ELEMENTS = 4096
_LARGE_ELEMENTS = 65536  # of integers, at the beginning of an epoch
_SAMPLED = 64
_NESTING = frozenset({list, dict, deque, defaultdict, set, Counter, OrderedDict})
_NESTED = (names.CONTAINERS, names.ARRAYS, plain.TENSORS)


_INNER = ("batch_sampler", "sampler", "_sampler", "base_sampler", "dataset", "_dataset", "datasets")
_MOST_CHAINED = 64


class Parts:
    """What decides the items of a loader, as `reach` finds it.

    Args:
        roots: As of `reach`.
        read_elsewhere: Whether workers read it, who get a copy when the loader's iterator is made.

    Attributes:
        cut: As of `Reached`: what comes later is not followed.
    """

    __slots__ = ("_known", "_loose", "_parts", "_read_elsewhere", "cut")

    def __init__(self, *roots: tuple[str, Any, bool], read_elsewhere: bool = False) -> None:
        found = reach(*roots)
        self._parts, self.cut = found.parts, found.cut
        self._read_elsewhere = read_elsewhere
        # Kept: a sampler may make its generator when it is first used, and before that it has none.
        self._known = {
            f"{part.path}.{name}": value
            for part in self._parts
            for name, value in part.value.__dict__.items()
            if is_random(value)
        }
        # Those in lists, closures and modules: they have no name to be replaced under.
        self._loose = [(path, value) for path, value in found.generators if path not in self._known]

    def capture(self, nested: bool = False) -> Captured:
        """Copies attributes, generators, small tensors, arrays and lists: each by its path.

        Args:
            nested: For a replay, which begins there: containers of containers or tensors, larger
                lists, and numbers of all parts. Otherwise only what no walk through the script's
                variables copies.
        """
        numbers, generators, contents = {}, {}, {}
        for part in self._parts:
            items = list(part.value.__dict__.items())
            if nested or _is_structure(part.value):
                numbers[part.path] = plain_attributes(part.value)
            drawn = self._read_elsewhere or part.is_drawn
            most = _LARGE_ELEMENTS if nested and part.is_drawn else _SMALL_ELEMENTS
            for name, value in items:
                if type(value) in _PLAIN_TYPES or (not drawn and _is_other(type(value))):
                    continue  # most are: a dataset may have hundreds of parts
                path = f"{part.path}.{name}"
                if is_random(value):
                    generators[path] = _state_of(value)
                    continue
                copy = _contents_of(value, drawn, most) or _nested(value, nested and drawn)
                if copy is not None:
                    contents[path] = copy
        for path, value in self._loose:
            generators[path] = _state_of(value)
        return numbers, generators, contents

    def epochs(self) -> dict[str, Any]:
        """What `set_epoch` has set, by part."""
        return {
            part.path: part.value.__dict__["epoch"]
            for part in self._parts
            if type(part.value.__dict__.get("epoch")) in (int, float)
        }

    def set_epochs(self, epochs: dict[str, Any]) -> None:
        """Sets what `epochs` gave."""
        for part in self._parts:
            if part.path in epochs:
                part.value.__dict__["epoch"] = epochs[part.path]

    def is_resized(self, captured: Captured) -> bool:
        """Whether a batch size has changed since `captured`: a replay would take other batches."""
        return any(
            "batch_size" in numbers
            and part.value.__dict__.get("batch_size") != numbers["batch_size"]
            for part in self._parts
            if part.is_drawn and (numbers := captured[0].get(part.path)) is not None
        )

    def changed_in_place(self) -> dict[str, Any]:
        """Samples the items of lists and arrays that are too large to copy and that drawing may
        change."""
        return {
            f"{part.path}.{name}": sample
            for part in self._parts
            if part.is_drawn
            for name, value in list(part.value.__dict__.items())
            if (sample := _sample_of(value)) is not None
        }

    def objects(self) -> dict[str, Any]:
        """Generators, lists and arrays that drawing may replace, by path."""
        return {
            f"{part.path}.{name}": value
            for part in self._parts
            if part.is_drawn
            for name, value in list(part.value.__dict__.items())
            if type(value) in _NESTING or _is_array(value) or is_random(value)
        }

    def put_objects(self, objects: dict[str, Any]) -> None:
        """Has attributes refer to these objects, as `objects` gave them."""
        for part in self._parts:
            for name in list(part.value.__dict__):
                path = f"{part.path}.{name}"
                if path in objects:
                    part.value.__dict__[name] = objects[path]

    def containers(self) -> list[Any]:
        """Lists and dicts that a suspended sampler may hold."""
        return [
            inner
            for part in self._parts
            if part.is_drawn
            for value in list(part.value.__dict__.values())
            for inner in containers_in(value)
        ]

    def write(self, captured: Captured, resized: bool = False) -> list[str]:
        """Writes back what `capture` gave.

        Args:
            resized: another number of ranks goes on: numbers that follow from it keep their live
                values, and a walk through the objects puts back what has changed.

        Returns:
            Paths of parts that drawing may change and that do not exist now.
        """
        numbers, generators, contents = captured
        holders = {part.path: part.value.__dict__ for part in self._parts}
        for path, values in numbers.items():
            if path in holders and not resized:
                holders[path].update(values)
        loose = dict(self._loose)
        missing = [path for path in numbers if path not in holders]
        for path, (kind, state) in generators.items():
            place, _, name = path.rpartition(".")
            if path in loose:
                generator = loose[path]
            elif place in holders:
                # One that a replay has made is the one that the replayed sampler draws from.
                there = holders[place].get(name)
                generator = there if is_random(there) else self._known.get(path)
            else:
                missing.append(path)
                continue
            if generator is None or type_name(type(generator)) != kind:
                generator = new_object(kind, state)
            else:
                set_object_state(generator, state)
            if path not in loose:
                holders[place][name] = generator
        for path, copy in contents.items():
            place, _, name = path.rpartition(".")
            if place not in holders:
                continue
            there = holders[place].get(name)
            if _fits(there, copy):
                _fill(there, copy)
            else:
                holders[place][name] = _anew(copy)
        return missing


def large(captured: Captured) -> Captured:
    """The contents that are too large for a step's capture."""

    def is_large(kind: str, layout: Any) -> bool:
        return kind == "integers" or (
            kind in ("array", "tensor") and math.prod(layout[1]) > _SMALL_ELEMENTS
        )

    return {}, {}, {path: copy for path, copy in captured[2].items() if is_large(*copy[:2])}


def _is_structure(part: Any) -> bool:
    """Whether a part is a sampler, dataset or loader by its class."""
    data: Any = sys.modules["torch.utils.data"]
    return isinstance(part, (data.Sampler, data.Dataset, data.DataLoader))


def _state_of(generator: Any) -> tuple[str, Any]:
    return type_name(type(generator)), object_state(generator)


def is_drawn(part: Any) -> bool:
    """Whether a part is one that iterating over a loader changes, by its class."""
    data: Any = sys.modules["torch.utils.data"]
    return isinstance(part, (data.Sampler, data.IterableDataset))


def _contents_of(value: Any, is_drawn: bool, most: int) -> Any:
    """Copies a small tensor, array or list of numbers and strings, or a larger one of integers.

    Args:
        most: Elements of a tensor, an array or a list of integers.

    Returns:
        (kind, type and shape, contents); None for anything else.
    """
    torch: Any = sys.modules["torch"]
    kind = type(value)
    if kind is torch.Tensor:
        if (
            value.numel() > (most if is_drawn else _SMALL_ELEMENTS)
            or value.device.type != "cpu"
            or value.layout is not torch.strided
            or value.is_quantized
        ):
            return None
        return "tensor", (str(value.dtype), tuple(value.shape)), bytes_of(value)
    if not is_drawn:
        return None
    if kind is list:
        if len(value) > most:
            return None
        kinds = set(map(type, value))
        if len(value) <= _SMALL_ELEMENTS:
            return ("list", None, list(value)) if kinds <= _PLAIN_TYPES else None
        try:
            return ("integers", None, array("q", value).tobytes()) if kinds == {int} else None
        except OverflowError:
            return None
    if _is_array(value):
        small = value.size <= most and not value.dtype.hasobject and value.dtype.names is None
        return ("array", (value.dtype.str, value.shape), value.tobytes()) if small else None
    return None


def _is_neither(kind: type) -> bool:
    torch: Any = sys.modules["torch"]
    return kind is not torch.Tensor and not is_random_kind(kind)


_is_other: Callable[[type], bool] = functools.cache(_is_neither)
"""Whether objects of a class are neither tensors nor generators: all that is copied of a part that
is not drawn from."""


def _is_array(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__qualname__ == "ndarray"


def _sample_of(value: Any) -> Any:
    """Some items of a list or array that `_contents_of` does not take; None for another value."""
    if type(value) is list and len(value) > _LARGE_ELEMENTS:
        items = value[:: len(value) // _SAMPLED]
        return items if set(map(type, items)) <= _PLAIN_TYPES else None
    if _is_array(value) and value.size > _LARGE_ELEMENTS and value.flags.c_contiguous:
        plain_items = not value.dtype.hasobject and value.dtype.names is None
        return value.reshape(-1)[:: value.size // _SAMPLED].tobytes() if plain_items else None
    return None


def _nested(value: Any, wanted: bool) -> Any:
    """Copies a small container of containers and tensors: batches that are not full yet."""
    if not wanted or type(value) not in _NESTING or _count(value, _SMALL_ELEMENTS) is None:
        return None
    try:
        return ("nested", type(value).__name__, plain.dumps(value, *_NESTED))
    except pickle.PicklingError:
        return None


def _count(value: Any, most: int) -> int | None:
    """Counts the numbers and strings in a container.

    Returns None if there are more than `most`, or anything else.
    """
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return 1
    torch: Any = sys.modules["torch"]
    if kind is torch.Tensor:
        simple = (
            value.device.type == "cpu" and value.layout is torch.strided and not value.requires_grad
        )
        return int(value.numel()) if simple and value.numel() <= most else None
    if kind.__module__ == "numpy" and kind.__qualname__ == "ndarray":
        return int(value.size) if value.size <= most and not value.dtype.hasobject else None
    if kind not in _NESTING and kind not in (tuple, set):
        return None
    total = 1
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    for item in items:
        count = _count(item, most - total)
        if count is None or (total := total + count) > most:
            return None
    return total


def _fits(value: Any, contents: tuple[Any, ...]) -> bool:
    """Whether a live value can take what `_contents_of` copied."""
    kind, layout, _ = contents
    if kind in ("list", "integers"):
        return type(value) is list
    if kind == "nested":
        return bool(type(value).__name__ == layout)
    if kind == "array":
        return hasattr(value, "dtype") and (
            getattr(value.dtype, "str", None),
            tuple(value.shape),
        ) == (
            layout[0],
            tuple(layout[1]),
        )
    return hasattr(value, "dtype") and (str(value.dtype), tuple(value.shape)) == (
        layout[0],
        tuple(layout[1]),
    )


def _fill_nested(live: Any, saved: Any) -> None:
    """Gives a container the saved items.

    Containers in it stay the same objects: a generator's variables may mean them.
    """
    if isinstance(saved, dict):
        pairs = {key: _merged(live.get(key), item) for key, item in saved.items()}
        live.clear()
        live.update(pairs)
    elif isinstance(saved, set):
        live.clear()
        live.update(saved)
    else:
        there = list(live)
        items = [
            _merged(there[i] if i < len(there) else None, item) for i, item in enumerate(saved)
        ]
        live.clear()
        live.extend(items)


def _merged(live: Any, saved: Any) -> Any:
    if type(live) is not type(saved) or type(live) not in _NESTING:
        return saved
    _fill_nested(live, saved)
    return live


def containers_in(value: Any, depth: int = 0) -> list[Any]:
    """Gives a list, dict or deque and those in it, if they are few."""
    if type(value) not in _NESTING or len(value) > _SMALL_ELEMENTS:
        return []
    items = value.values() if isinstance(value, dict) else value
    return [
        value,
        *(inner for item in items if depth < 3 for inner in containers_in(item, depth + 1)),
    ]


def _anew(contents: tuple[Any, ...]) -> Any:
    """Makes what `_contents_of` copied."""
    kind, layout, data = contents
    if kind in ("list", "integers"):
        return list(data if kind == "list" else array("q", data))
    if kind == "nested":
        return plain.loads(data, *_NESTED)
    if kind == "array":
        import numpy

        return numpy.frombuffer(data, dtype=layout[0]).reshape(layout[1]).copy()
    return plain.tensor_of(layout[0].rpartition(".")[2], layout[1], data)


def _fill(value: Any, contents: tuple[Any, ...]) -> None:
    kind, layout, data = contents
    if kind in ("list", "integers"):
        value[:] = data if kind == "list" else array("q", data)
    elif kind == "nested":
        _fill_nested(value, plain.loads(data, *_NESTED))
    elif kind == "array":
        import numpy

        numpy.copyto(value, numpy.frombuffer(data, dtype=layout[0]).reshape(layout[1]))
    elif data:
        torch: Any = sys.modules["torch"]
        value.data.copy_(torch.frombuffer(bytearray(data), dtype=value.dtype).reshape(layout[1]))


def parts(loader: Any) -> Parts:
    """Gives the parts of a DataLoader."""
    data: Any = sys.modules["torch.utils.data"]
    iterable = isinstance(loader.dataset, data.IterableDataset)
    roots: list[tuple[str, Any, bool]] = [
        ("generator", loader.generator, True),
        ("base_dataloader", loader.__dict__.get("base_dataloader"), True),
        ("batch_sampler", loader.batch_sampler, True),
        ("sampler", loader.sampler, True),
        ("dataset", loader.dataset, iterable),
    ]
    if loader.num_workers == 0:  # workers have copies of their own
        roots.append(("collate_fn", loader.collate_fn, iterable))
    return Parts(*roots, read_elsewhere=loader.num_workers > 0)


def parts_of_loader(loader: Any) -> Parts:
    """Gives the parts of a DataLoader; found once, because every step asks."""
    found = _parts_cache.get(id(loader))
    if found is None or found[0] is not loader or found[1] is not loader.dataset:
        if len(_parts_cache) > 64:
            _parts_cache.clear()
        found = _parts_cache[id(loader)] = (loader, loader.dataset, parts(loader))
    return found[2]


_parts_cache: dict[int, tuple[Any, Any, Parts]] = {}


def plain_attributes(part: Any) -> dict[str, Any]:
    """Returns the numbers and strings among an object's attributes.

    Whose it is stays out: a sampler's rank never moves.
    """
    found = getattr(part, "__dict__", {}).items()
    return {name: value for name, value in found if type(value) in _PLAIN and name not in WHOSE}


def fingerprint(loader: Any) -> str:
    """Describes what two DataLoaders must share to yield the same items."""
    try:
        size = len(loader.dataset)
    except TypeError:  # a ChainDataset has a length only if all in it have one
        size = None
    kinds = [type(part).__qualname__ for part in chain(loader)]
    return (
        f"{type(loader.dataset).__qualname__} of {size}, batch {loader.batch_size},"
        f" {loader.drop_last}, {kinds}, "
        f"{loader.num_workers} workers"
    )


def chain(loader: Any) -> list[Any]:
    """The loader's sampler and dataset, and those inside them."""
    found: list[Any] = []
    work = [loader.batch_sampler, loader.sampler, loader.dataset]
    while work and len(found) < _MOST_CHAINED:
        part = work.pop(0)
        attributes = getattr(part, "__dict__", None)
        if part is None or type(attributes) is not dict or any(part is known for known in found):
            continue
        found.append(part)
        for name in _INNER:
            inner = attributes.get(name)
            work += inner if name == "datasets" and isinstance(inner, (list, tuple)) else [inner]
    return found
