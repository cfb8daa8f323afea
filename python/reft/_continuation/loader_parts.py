"""The samplers and datasets of a DataLoader, and those of their attributes that decide what it
yields.

Copied are numbers, strings, generators and small tensors; of what is replayed, samplers and
iterable datasets, small arrays and lists of plain values, too.

Threads: the training thread. Errors: `ValueError` for a loader that has other parts than the
captured one.
"""

from __future__ import annotations

import pickle
import sys
from collections import defaultdict, deque
from typing import Any

from . import plain, workers
from .rng import is_random, object_state, set_object_state

WHOSE = ("rank", "num_replicas")
"""Names of a sampler's attributes that never move to another rank."""
_PLAIN = (int, float, bool, str, type(None))
_PLAIN_TYPES = frozenset(_PLAIN)
_SMALL_ELEMENTS = 4096
_NESTING = frozenset({list, dict, deque, defaultdict})
_NESTED = (plain.CONTAINERS, plain.ARRAYS, plain.TENSORS)


class Parts:
    """Samplers and datasets, whose attributes decide what a loader yields, outermost first."""

    __slots__ = ("_generators", "_parts", "_read_elsewhere")

    def __init__(self, *roots: Any, read_elsewhere: bool = False) -> None:
        self._parts = workers.parts_of(*roots)
        # By workers, who get a copy of each part when the loader's iterator is made.
        self._read_elsewhere = read_elsewhere
        # Kept: a sampler may make its generator when it is first used, and before that it has none.
        self._generators = [
            {name: value for name, value in part.__dict__.items() if is_random(value)}
            for part in self._parts
        ]

    def kinds(self) -> list[str]:
        """Names of the parts' types."""
        return [type(part).__qualname__ for part in self._parts]

    def capture(self, nested: bool = False) -> tuple[Any, ...]:
        """Copies attributes, generators, small tensors, arrays and lists: of each part, by name.

        Args:
            nested: For a replay, which begins there: containers of containers or tensors, too.
        """
        generators, contents = [], []
        for part in self._parts:
            items = part.__dict__.items()
            generators.append(
                {name: object_state(value) for name, value in items if is_random(value)}
            )
            drawn = self._read_elsewhere or is_drawn(part)
            copies = [
                (name, _contents_of(value, drawn) or _nested(value, nested and drawn))
                for name, value in items
            ]
            contents.append({name: copy for name, copy in copies if copy is not None})
        return [plain_attributes(part) for part in self._parts], generators, contents

    def epochs(self) -> list[Any]:
        """What `set_epoch` has set, of each part."""
        return [part.__dict__.get("epoch") for part in self._parts]

    def set_epochs(self, epochs: list[Any]) -> None:
        """Sets what `epochs` gave."""
        for part, epoch in zip(self._parts, epochs, strict=True):
            if "epoch" in part.__dict__:
                part.__dict__["epoch"] = epoch

    def is_resized(self, captured: tuple[Any, ...]) -> bool:
        """Whether a batch size has changed since `captured`: a replay would take other batches."""
        pairs = zip(self._parts, captured[0], strict=True)
        return any(
            "batch_size" in numbers and part.__dict__.get("batch_size") != numbers["batch_size"]
            for part, numbers in pairs
        )

    def write(self, captured: tuple[Any, ...]) -> None:
        """Writes back what `capture` gave.

        Raises:
            ValueError: There are other parts now; nothing was written.
        """
        writes = []
        if any(len(values) != len(self._parts) for values in captured):
            raise ValueError("samplers or datasets of the DataLoader differ")
        for part, known, numbers, states, contents in zip(
            self._parts, self._generators, *captured, strict=True
        ):
            # One that a replay has made is the one that the replayed sampler draws from.
            there = part.__dict__
            generators = {
                name: there[name] if is_random(there.get(name)) else known.get(name)
                for name in states
            }
            held = {name: part.__dict__.get(name) for name in contents}
            if not all(is_random(generator) for generator in generators.values()):
                raise ValueError(f"generators of the DataLoader's {type(part).__qualname__} differ")
            if not all(_fits(value, contents[name]) for name, value in held.items()):
                raise ValueError(
                    f"tensors, arrays or lists of the DataLoader's {type(part).__qualname__} differ"
                )
            writes.append((part, numbers, generators, states, held, contents))
        for part, numbers, generators, states, held, contents in writes:
            part.__dict__.update(numbers)
            for name, generator in generators.items():
                part.__dict__[name] = generator
                set_object_state(generator, states[name])
            for name, value in held.items():
                _fill(value, contents[name])


def is_drawn(part: Any) -> bool:
    """Whether iterating over a part runs its code, which may change its lists and arrays."""
    data: Any = sys.modules["torch.utils.data"]
    return isinstance(part, (data.Sampler, data.IterableDataset))


def _contents_of(value: Any, is_drawn: bool) -> Any:
    """Copies a small tensor, array or list of numbers and strings.

    Returns:
        (kind, type and shape, contents); None for anything else.
    """
    torch: Any = sys.modules["torch"]
    kind = type(value)
    if kind is torch.Tensor:
        if (
            value.numel() > _SMALL_ELEMENTS
            or value.device.type != "cpu"
            or value.layout is not torch.strided
        ):
            return None
        flat = value.detach().contiguous().reshape(-1)
        return (
            "tensor",
            (str(value.dtype), tuple(value.shape)),
            flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"",
        )
    if not is_drawn:
        return None
    if kind is list:
        return (
            ("list", None, list(value))
            if len(value) <= _SMALL_ELEMENTS and set(map(type, value)) <= _PLAIN_TYPES
            else None
        )
    if kind.__module__ == "numpy" and kind.__qualname__ == "ndarray":
        small = (
            value.size <= _SMALL_ELEMENTS
            and not value.dtype.hasobject
            and value.dtype.names is None
        )
        return ("array", (value.dtype.str, value.shape), value.tobytes()) if small else None
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
    if kind == "list":
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


def _fill(value: Any, contents: tuple[Any, ...]) -> None:
    kind, layout, data = contents
    if kind == "list":
        value[:] = data
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
    roots = [loader.batch_sampler, loader.sampler, loader.dataset]
    return Parts(
        _Holder(loader),
        *(root for root in roots if root is not None),
        read_elsewhere=loader.num_workers > 0,
    )


class _Holder:
    """Stands for the loader among its parts: its generator, none of its own attributes."""

    def __init__(self, loader: Any) -> None:
        if loader.generator is not None:
            self.generator = loader.generator
        for name in ("base_dataloader",):
            if name in loader.__dict__:
                setattr(self, name, loader.__dict__[name])


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
    kinds = parts_of_loader(loader).kinds()
    return (
        f"{type(loader.dataset).__qualname__} of {size}, batch {loader.batch_size},"
        f" {loader.drop_last}, {kinds}, "
        f"{loader.num_workers} workers"
    )
