"""Optimizers, schedulers and gradient scalers in the order in which the script made them.

A restarted script makes the same objects in the same order, so their places tell them apart. Those
made before `watch` are found by the collector only.

Threads: any. Errors: none of its own.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
_WATCHED = (torch.optim.Optimizer, *SCHEDULERS, torch.amp.GradScaler)


class Constructions:
    """What one process has made.

    Attributes:
        count: constructions so far. One that is made in mid-run may replace another.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._places = itertools.count()
        self._watching = False
        # Modules that `gc.freeze` hides from the collector, by id.
        self._frozen: dict[int, weakref.ref[Any]] = {}
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
        known = [obj for _, obj in sorted(self._made.items()) if isinstance(obj, cls)]
        others = [obj for obj in instances if all(obj is not k for k in known)]
        return sorted(others, key=lambda obj: type(obj).__qualname__) + known

    def add(self, obj: Any) -> None:
        """Notes a construction. An object whose class calls the constructor of its base counts
        twice and has one place."""
        self.count += 1
        if all(known is not obj for known in self._made.values()):
            self._made[next(self._places)] = obj

    def frozen(self, cls: type[Any] | tuple[type[Any], ...]) -> list[Any]:
        """Instances of `cls` that the collector does not list any more."""
        found = [reference() for reference in self._frozen.values()]
        return [obj for obj in found if isinstance(obj, cls)]

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


of_process = Constructions()
