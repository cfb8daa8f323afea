"""Follows the random state of DataLoader workers, so that augmentation inside them continues where
it was.

In a worker, `Track` stands around the collate function: when a batch has used a random generator,
the generator's new state travels back with the batch. The loader's process takes it off again and
keeps, per worker, the state after the last batch that the loop got. A worker that takes over begins
with it (`Begin` stands around the worker's init function). A worker that uses no randomness sends
its state once.

Followed: the worker's global generators of torch, Python and numpy, and generators that are
attributes of the dataset or of a dataset inside it. Other state that a dataset builds up inside a
worker is not.

Threads: the worker's main thread. Errors: none of its own; a generator that cannot be read is not
    followed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .rng import capture_rng, is_random, object_state, restore_rng, set_object_state

States = dict[str, Any]

_INNER = (
    "batch_sampler",
    "sampler",
    "_sampler",
    "base_sampler",
    "base_dataloader",
    "dataset",
    "_dataset",
    "datasets",
)
_MOST = 64


def parts_of(*roots: Any) -> list[Any]:
    """Gives samplers and datasets and those inside them: the objects whose attributes decide what a
    loader yields.

    Args:
        roots: Where to start; they are part of the answer.
    """
    found: list[Any] = []
    work = list(roots)
    while work and len(found) < _MOST:
        part = work.pop(0)
        attributes = getattr(part, "__dict__", None)
        if part is None or type(attributes) is not dict or any(part is known for known in found):
            continue
        found.append(part)
        for name in _INNER:
            inner = attributes.get(name)
            if name == "datasets" and isinstance(inner, (list, tuple)):
                work += inner
            else:
                work.append(inner)
    return found


def generators_of(parts: list[Any]) -> list[Any]:
    """Returns the generators among the attributes of parts, each once, always in the same order."""
    found: list[Any] = []
    for part in parts:
        for value in list(part.__dict__.values()):
            if is_random(value) and all(value is not known for known in found):
                found.append(value)
    return found


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
        self._own: list[Any] | None = None

    def __call__(self, batch: Any) -> Any:
        data = self.collate(batch)
        try:
            states = self._changed()
        except Exception:
            return data  # not followed; the batch is what matters
        return Carried(data, states) if states else data

    def _changed(self) -> States:
        if self._own is None:
            self._own = generators_of(parts_of(_dataset_here()))
        now: States = capture_rng(cuda=False)
        now.update({f"own {i}": object_state(generator) for i, generator in enumerate(self._own)})
        changed = {name: state for name, state in now.items() if self._last.get(name) != state}
        self._last.update(changed)
        return changed


class Begin:
    """A worker's init function that gives the worker the random state that its predecessor had.

    Args:
        init: The loader's own init function, or None.
        states: Random states by worker.
    """

    def __init__(self, init: Callable[[int], Any] | None, states: dict[int, States]) -> None:
        self.init = init
        self.states = states

    def __call__(self, worker: int) -> None:
        if self.init is not None:
            self.init(worker)
        states = self.states.get(worker)
        if states is None:
            return
        restore_rng({name: state for name, state in states.items() if not name.startswith("own ")})
        for i, generator in enumerate(generators_of(parts_of(_dataset_here()))):
            if f"own {i}" in states:
                set_object_state(generator, states[f"own {i}"])


def _dataset_here() -> Any:
    from torch.utils.data import get_worker_info

    info: Any = get_worker_info()
    return None if info is None else info.dataset
