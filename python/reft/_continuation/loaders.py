"""Remembers how each single-process DataLoader iterator came to be, so that it can be made again and advanced.

The order of the items follows from the random state when the iterator was made, and from the state when its sampler
drew the first index (a sampler is a generator function, so that is later). Both are recorded once per epoch. Map-style
positions advance at the sampler and read no data; an IterableDataset is read and its items are thrown away.

Limits: multi-worker iterators are not restored; a sampler that draws from a global generator at each batch, rather than
once per epoch, is replayed from its first draw only.

Threads: the training thread. Errors: what the user's sampler or dataset raise while it is replayed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from .rng import capture_rng, generator_state, restore_rng, state_tensor

_ORIGIN = "_reft_origin"
_PLAIN = (int, float, bool, str, type(None))


class _Origin:
    """How one iterator was made."""

    __slots__ = ("attributes", "created", "first_draw", "generators", "loader")

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.created = capture_rng(cuda=False)
        self.first_draw: dict[str, Any] | None = None
        parts = _parts(loader)
        self.attributes = [plain_attributes(part) for part in parts]
        self.generators = [generator_state(generator) for generator in _generators(loader)]


class _FirstDraw:
    """Stands in for a sampler's iterator until the first index is drawn, then takes itself out."""

    __slots__ = ("_inner", "_owner")

    def __init__(self, inner: Iterator[Any], owner: Any) -> None:
        self._inner = inner
        self._owner = owner

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        owner, inner = self._owner, self._inner
        origin = getattr(owner, _ORIGIN, None)
        if origin is not None and origin.first_draw is None:
            origin.first_draw = capture_rng(cuda=False)
        if owner is not None and owner._sampler_iter is self:
            owner._sampler_iter = inner
        self._owner = None
        return next(inner)


def install() -> None:
    """Makes new single-process DataLoader iterators remember their origin. Calling it again does nothing.

    Cost: one copy of the host's random states per epoch, nothing per batch.
    """
    from torch.utils.data import DataLoader

    original: Callable[[Any], Any] = DataLoader.__iter__
    if getattr(original, "_reft_original", None) is not None:
        return

    def __iter__(self: Any) -> Any:
        if self.num_workers != 0:
            return original(self)
        try:
            origin = _Origin(self)
        except Exception:
            return original(self)  # an observer may go blind, it may not break training
        iterator = original(self)
        if type(iterator).__name__ == "_SingleProcessDataLoaderIter":
            setattr(iterator, _ORIGIN, origin)
            iterator._sampler_iter = _FirstDraw(iterator._sampler_iter, iterator)
        return iterator

    __iter__.__doc__ = original.__doc__
    __iter__._reft_original = original  # type: ignore[attr-defined]
    patched: Any = DataLoader
    patched.__iter__ = __iter__


def uninstall() -> None:
    """Puts the original `DataLoader.__iter__` back."""
    from torch.utils.data import DataLoader

    original = getattr(DataLoader.__iter__, "_reft_original", None)
    if original is not None:
        patched: Any = DataLoader
        patched.__iter__ = original


def unrestorable(iterator: Any) -> str | None:
    """Says why this DataLoader iterator's position cannot be restored, or None if it can."""
    if type(iterator).__name__ != "_SingleProcessDataLoaderIter":
        return "multi-worker DataLoader iterator: not restored yet"
    if getattr(iterator, _ORIGIN, None) is None:
        return "DataLoader iterator made before reft was there"
    return None


def loader_of(iterator: Any) -> Any:
    """Gives the DataLoader that made this iterator."""
    return getattr(iterator, _ORIGIN).loader


def describe(iterator: Any) -> dict[str, Any]:
    """Gives the position of a single-process iterator as plain values.

    Args:
        iterator: An iterator for which `unrestorable` gives None.
    """
    origin: _Origin = getattr(iterator, _ORIGIN)
    return {
        "loader": _fingerprint(origin.loader),
        "yielded": int(iterator._num_yielded),
        "started": not isinstance(iterator._sampler_iter, _FirstDraw),
        "iterable": iterator._dataset_kind != 0,
        "created": origin.created,
        "first_draw": origin.first_draw,
        "attributes": origin.attributes,
        "generators": origin.generators,
        "attributes_now": [plain_attributes(part) for part in _parts(origin.loader)],
        "generators_now": [generator_state(generator) for generator in _generators(origin.loader)],
    }


def rebuild(loader: Any, description: dict[str, Any]) -> tuple[Any, list[Callable[[], None]]]:
    """Makes an iterator at the described position; leaves the loader and all random states as they were.

    Args:
        loader: The live DataLoader.
        description: From `describe` in the process that ended.

    Returns:
        The iterator, and the writes that give the loader's samplers their captured attributes and generators.

    Raises:
        ValueError: The loader has other parts than the captured one.
    """
    if _fingerprint(loader) != description["loader"]:
        raise ValueError(f"DataLoader was {description['loader']}, is {_fingerprint(loader)}")
    parts, generators = _parts(loader), _generators(loader)
    if len(parts) != len(description["attributes"]) or len(generators) != len(description["generators"]):
        raise ValueError("samplers of the DataLoader differ")
    rng = capture_rng(cuda=False)
    attributes_before = [plain_attributes(part) for part in parts]
    generators_before = [generator_state(generator) for generator in generators]
    try:
        _write(parts, description["attributes"], generators, description["generators"])
        restore_rng(description["created"])
        iterator = iter(loader)
        if description["started"]:
            if description["first_draw"] is not None:
                restore_rng(description["first_draw"])
            for _ in range(description["yielded"]):
                if description["iterable"]:
                    iterator._next_data()
                else:
                    iterator._next_index()
        iterator._num_yielded = description["yielded"]
        origin: _Origin = getattr(iterator, _ORIGIN)
        origin.created = description["created"]
        origin.first_draw = description["first_draw"]
    finally:
        _write(parts, attributes_before, generators, generators_before)
        restore_rng(rng)
    now, states = description["attributes_now"], description["generators_now"]
    return iterator, [lambda: _write(parts, now, generators, states)]


def swap(live: Any, fresh: Any) -> None:
    """Gives `live` the state of `fresh`, so that every reference to `live` sees the new position."""
    state = dict(fresh.__dict__)
    pending = state.get("_sampler_iter")
    if isinstance(pending, _FirstDraw):
        pending._owner = live
    live.__dict__.clear()
    live.__dict__.update(state)


def plain_attributes(part: Any) -> dict[str, Any]:
    """Gives the numbers and strings among an object's attributes, but not whose it is: a sampler's rank never moves."""
    found = getattr(part, "__dict__", {}).items()
    return {name: value for name, value in found if type(value) in _PLAIN and name not in ("rank", "num_replicas")}


def _parts(loader: Any) -> list[Any]:
    """The objects whose attributes decide the order of items: samplers, outermost first."""
    parts: list[Any] = []
    for name in ("batch_sampler", "sampler"):
        part = getattr(loader, name, None)
        while part is not None and all(part is not known for known in parts):
            parts.append(part)
            part = getattr(part, "sampler", None)
    return parts


def _fingerprint(loader: Any) -> str:
    """What two DataLoaders must share to yield the same items: an object that only stands at the same place does not."""
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    parts = [type(part).__qualname__ for part in _parts(loader)]
    return f"{type(loader.dataset).__qualname__} of {size}, batch {loader.batch_size}, {loader.drop_last}, {parts}"


def _generators(loader: Any) -> list[Any]:
    torch: Any = sys.modules["torch"]
    found: list[Any] = []
    for holder in (loader, *_parts(loader)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not known for known in found):
            found.append(generator)
    return found


def _write(parts: list[Any], attributes: list[dict[str, Any]], generators: list[Any], states: list[bytes]) -> None:
    for part, values in zip(parts, attributes, strict=True):
        if hasattr(part, "__dict__"):
            part.__dict__.update(values)
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state_tensor(state))
