"""Optimizers, schedulers and gradient scalers, and what tells one from another in every process of
a script.

A restarted script makes the same objects in the same order, so their numbers tell them apart. Those
made before `watch` are found by the collector only, whose order is another one in each process: they
are told apart by what refers to them (`place_of`), then by what they look like when they are found
first.

Threads: any. Errors: none of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
_WATCHED = (torch.optim.Optimizer, *SCHEDULERS, torch.amp.GradScaler)
_RANGE = 1 << 20


class Constructions:
    """What one process has made.

    Attributes:
        count: constructions so far. One that is made in mid-run may replace another.
        place_of: gives where the program holds an object at its first program point; None if that
            is not known.
    """

    def __init__(self) -> None:
        # Those from before `watch` have negative numbers: a range for each watched class.
        self._made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._number_of: dict[int, int] = {}  # by id, which means something while the object lives
        self._numbers = itertools.count()
        self._numbers_before = [
            itertools.count((i - len(_WATCHED)) * _RANGE) for i in range(len(_WATCHED))
        ]
        self._twins: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.place_of: Callable[[Any], str | None] = lambda obj: None
        self._watching = False
        # Modules that `gc.freeze` hides from the collector, by id.
        self._frozen: dict[int, weakref.ref[Any]] = {}
        self._own: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._is_own = False
        self.count = 0

    def watch(self) -> None:
        """Notes objects as they are constructed from now on. Idempotent."""
        if not self._watching:
            self._watching = True
            for cls in _WATCHED:
                self._watch(cls)
            if gc.get_freeze_count():
                gc.unfreeze()
                self._note_frozen()
                gc.freeze()
            self._watch_freeze()

    def in_order(
        self, instances: Iterable[Any], cls: type[Any] | tuple[type[Any], ...]
    ) -> list[Any]:
        """Those of `instances` that were made before `watch`, then all known ones of `cls`."""
        self._adopt([obj for obj in instances if self._number(obj) is None])
        return [obj for _, obj in sorted(self._made.items()) if isinstance(obj, cls)]

    def key_of(self, obj: Any) -> str:
        """What an object is called in every process of the script; "" if it is not known yet."""
        number = self._number(obj)
        return "" if number is None else str(number)

    def is_twin(self, obj: Any) -> bool:
        """Whether nothing tells an object from another one."""
        return self._twins.get(id(obj)) is obj

    def add(self, obj: Any) -> None:
        """Notes a construction. An object whose class calls the constructor of its base counts
        twice and has one number."""
        if self._is_own:
            self._own[id(obj)] = obj
            return
        self.count += 1
        if self._number(obj) is None:
            self._note(obj, self._numbers)

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """What is constructed within this is reft's own, and none of the script's."""
        self._is_own = True
        try:
            yield
        finally:
            self._is_own = False

    def is_own(self, obj: Any) -> bool:
        """Whether an object is reft's own."""
        return self._own.get(id(obj)) is obj

    def _number(self, obj: Any) -> int | None:
        number = self._number_of.get(id(obj))
        return number if number is not None and self._made.get(number) is obj else None

    def _note(self, obj: Any, numbers: Iterator[int]) -> None:
        number = self._number_of[id(obj)] = next(numbers)
        self._made[number] = obj

    def _adopt(self, others: list[Any]) -> None:
        """Numbers objects that were made before `watch`."""
        looks = [(type(obj).__qualname__, self.place_of(obj) or "", _look(obj)) for obj in others]
        pairs = sorted(zip(looks, others, strict=True), key=lambda pair: pair[0])
        for (look, obj), (before, other) in itertools.pairwise([((), None), *pairs]):
            if look == before:
                self._twins[id(obj)], self._twins[id(other)] = obj, other
        for _, obj in pairs:
            kind = next(i for i, cls in enumerate(_WATCHED) if isinstance(obj, cls))
            self._note(obj, self._numbers_before[kind])

    def frozen(self, cls: type[Any] | tuple[type[Any], ...]) -> list[Any]:
        """Instances of `cls` that the collector does not list any more."""
        found = [reference() for reference in self._frozen.values()]
        return [obj for obj in found if isinstance(obj, cls) and not self.is_own(obj)]

    def _watch_freeze(self) -> None:
        original = gc.freeze

        @functools.wraps(original)
        def freeze() -> None:
            self._note_frozen()
            self.count += 1
            original()

        gc.freeze = freeze

    def _note_frozen(self) -> None:
        """Notes what `gc.freeze` is about to hide."""
        wanted = (torch.nn.Module, *_WATCHED)
        self._frozen = {key: ref for key, ref in self._frozen.items() if ref() is not None}
        for obj in gc.get_objects():
            if issubclass(type(obj), wanted):
                self._frozen[id(obj)] = weakref.ref(obj)

    def _watch(self, cls: type[Any]) -> None:
        original = cls.__init__

        @functools.wraps(original)
        def init(obj: Any, *args: Any, **kwargs: Any) -> None:
            original(obj, *args, **kwargs)
            self.add(obj)

        cls.__init__ = init


def _look(obj: Any) -> str:
    """What of an object is the same in each process at the same point of the script."""
    optimizer = getattr(obj, "optimizer", obj)
    groups = getattr(optimizer, "param_groups", ())
    shapes = [
        sorted(() if is_lazy(p) else tuple(p.shape) for p in group["params"]) for group in groups
    ]
    settings = [
        (name, value)
        for name, value in sorted(vars(obj).items())
        if isinstance(value, (int, float, str)) or _is_numbers(value)
    ]
    return f"{type(optimizer).__qualname__} {shapes} {settings}"


def _is_numbers(value: Any) -> bool:
    return type(value) is list and all(isinstance(item, (int, float)) for item in value)


of_process = Constructions()
