"""Follows the random state of DataLoader workers, so that augmentation inside them continues where
it was.

In a worker, `Track` stands around the collate function: when a batch has used a random generator,
the generator's new state travels back with the batch. The loader's process takes it off again and
keeps, per worker, the state after the last batch that the loop got. A worker that takes over begins
with it (`Begin` stands around the worker's init function). A worker that uses no randomness sends
its state once.

Followed: the worker's global generators of torch, Python and numpy, generators that the dataset or
the collate function reaches (`reach`: in transforms, closures, lists, modules, objects of the
script that their functions read), and the numbers and strings among the attributes of what they
reach. Other state that a dataset builds up inside a worker is not.

Workers copy the script's variables when they start. Those of a resumed job start in mid-epoch:
plain globals that functions of the dataset and the collate function read have the values of the
epoch's beginning then (`globals_read`, `with_globals`).

Threads: the worker's main thread; `globals_read` and `with_globals`: the training thread. Errors:
    none of its own; a generator that cannot be read is not followed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from operator import is_not
from typing import Any

from reft._state.own import is_own

from .births import is_light
from .foreign import slot_names
from .nodes import MISSING
from .reach import Part, reach
from .rng import capture_rng, object_state, restore_rng, set_object_state

States = dict[str, Any]
Globals = dict[tuple[str, str], Any]
"""Values by module and name."""

_PLAIN = frozenset({int, float, bool, str, type(None)})
_LONGEST = 1024  # of a string that is copied
_MOST_ITEMS = 256  # of a container
_OF_THE_PROCESS = frozenset({"pid", "_pid", "fd", "_fd", "worker_id"})


class Carried:
    """A batch, and the states of the generators that it has used."""

    __slots__ = ("data", "states")

    def __init__(self, data: Any, states: States) -> None:
        self.data = data
        self.states = states

    def pin_memory(self, device: Any = None) -> Carried:
        """Called by the loader's pinning thread."""
        from torch.utils.data._utils.pin_memory import pin_memory

        self.data = pin_memory(self.data, device)
        return self


class Track:
    """A collate function that sends changed random states along.

    Args:
        collate: The loader's own collate function.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self._last: States = {}
        self._own: _Here | None = None

    def __call__(self, batch: Any) -> Any:
        data = self.collate(batch)
        try:
            states = self._changed()
        except Exception:
            return data  # not followed; the batch is what matters
        return Carried(data, states) if states else data

    def _changed(self) -> States:
        if self._own is None:
            self._own = _Here(self.collate)
        now: States = capture_rng(cuda=False)
        now.update(self._own.states())
        changed = {name: state for name, state in now.items() if self._last.get(name) != state}
        self._last.update(changed)
        return changed


class Begin:
    """A worker's init function that gives the worker the state that its predecessor had.

    Args:
        init: The loader's own init function, or None.
        collate: Its collate function.
        states: What the predecessors' `Track` sent, by worker.
    """

    def __init__(
        self,
        init: Callable[[int], Any] | None,
        collate: Callable[[Any], Any],
        states: dict[int, States],
    ) -> None:
        self.init = init
        self.collate = collate
        self.states = states

    def __call__(self, worker: int) -> None:
        if self.init is not None:
            self.init(worker)
        states = self.states.get(worker)
        if states is None:
            return
        restore_rng({name: state for name, state in states.items() if " " not in name})
        _Here(self.collate).put(states)


class _Here:
    """What the dataset and the collate function of this worker reach."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        from torch.utils.data import get_worker_info

        info: Any = get_worker_info()
        self._roots = [
            ("dataset", None if info is None else info.dataset, True),
            ("collate_fn", collate, True),
        ]
        self._look()

    def _look(self) -> None:
        # Of objects of packages only a part would travel.
        self._found = reach(*self._roots, in_worker=True)
        self._held = self._objects()

    def _objects(self) -> list[list[Any]]:
        """The script's objects that each part holds: one may be replaced by another."""
        return [
            [value for value in part.value.__dict__.values() if _is_of_script(type(value))]
            for part in self._found.parts
        ]

    def states(self) -> States:
        if any(
            len(now) != len(before) or any(map(is_not, now, before))
            for now, before in zip(self._objects(), self._held, strict=True)
        ):
            self._look()
        found: States = {
            f"own {path}": object_state(generator) for path, generator in self._found.generators
        }
        for part in self._numbered():
            numbers = _numbers(part.value)
            if numbers:
                found[f"part {part.path}"] = numbers
        return found

    def _numbered(self) -> list[Part]:
        return [*self._found.parts, *self._found.slotted]

    def put(self, states: States) -> None:
        """Puts back what `states` gave; a generator that does not exist yet is left out."""
        for part in self._numbered():
            slots = slot_names(type(part.value))
            for name, number in states.get(f"part {part.path}", {}).items():
                if name in slots:
                    object.__setattr__(part.value, name, number)
                else:
                    part.value.__dict__[name] = number
        for path, generator in self._found.generators:
            if f"own {path}" in states:
                set_object_state(generator, states[f"own {path}"])


def globals_read(loader: Any) -> Globals:
    """Plain values of the globals that functions of the loader's dataset and collate function read.
    Its workers get a copy when they start, and a script may change them later (a counter of
    steps)."""
    roots = [("dataset", loader.dataset, True), ("collate_fn", loader.collate_fn, True)]
    found: Globals = {}
    for module, name in sorted(reach(*roots, in_worker=True).reads or ()):
        there = getattr(sys.modules.get(module), "__dict__", {})
        if name not in there:
            continue
        value = there[name]
        if type(value) in _PLAIN:
            short = type(value) is not str or len(value) <= _LONGEST
        else:
            short = type(value) in (list, dict) and len(value) <= _MOST_ITEMS and is_light(value)
        if short:
            found[module, name] = copy.deepcopy(value)
    return found


@contextlib.contextmanager
def with_globals(values: Globals) -> Iterator[None]:
    """Within this, globals have these values: workers that start copy them."""
    kept: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for (module, name), value in values.items():
            there = getattr(sys.modules.get(module), "__dict__", {})
            if name in there and type(there[name]) is type(value):
                kept.append((there, name, there[name]))
                there[name] = copy.deepcopy(value)
        yield
    finally:
        for there, name, value in kept:
            there[name] = value


def _is_own_class(kind: type) -> bool:
    return is_own(kind.__module__)


_is_of_script: Callable[[type], bool] = functools.cache(_is_own_class)
"""Whether the objects of a class are the script's."""


def _numbers(part: Any) -> dict[str, Any]:
    slots = {name: getattr(part, name, MISSING) for name in slot_names(type(part))}
    return {
        name: value
        for name, value in (getattr(part, "__dict__", {}) | slots).items()
        if type(value) in _PLAIN and name not in _OF_THE_PROCESS
    }
