"""Tells whether a script has loaded a checkpoint of its own that is newer than reft's snapshot.

A script that saves by itself loads its file at its start, before reft puts the snapshot back.
Usually the snapshot is newer, and wins. It is not if the snapshot is left over from before: then
what the script loaded has to stay. Optimizers and schedulers count their steps; the count that is
ahead is the newer state. An optimizer without a count (plain SGD) and without a scheduler tells
nothing, and the snapshot wins.

Threads: the training thread. Errors: none; a count that cannot be read is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from reft._continuation.device_parts import DeviceParts, contents

Counts = dict[str, float]
Later = tuple[str, tuple[int, int]]  # dtype, and what DeviceParts.take() returned


def counts(
    optimizers: Iterable[Any], schedulers: Iterable[Any], parts: DeviceParts | None = None
) -> dict[str, float | Later]:
    """Reads how many steps optimizers and schedulers have counted. Cheap: one number of each.

    Args:
        optimizers: `torch.optim.Optimizer` objects in the order in which both processes know them.
        schedulers: Learning rate schedulers, likewise.
        parts: Takes counts that lie on a device, for which the host would wait; without it, the
            host does.

    Returns:
        Count by name, for `arrived` where it was taken by `parts`; optimizers that do not count are
        absent.
    """
    found: dict[str, float | Later] = {}
    for index, optimizer in enumerate(optimizers):
        count = _steps_of(optimizer, parts)
        if count is not None:
            found[f"optimizer {index}"] = count
    for index, scheduler in enumerate(schedulers):
        last = getattr(scheduler, "last_epoch", None)
        if isinstance(last, (int, float)):
            found[f"scheduler {index}"] = float(last)
    return found


def arrived(saved: dict[str, float | Later], room: bytes) -> Counts:
    """Gives the counts with those that have come into the room of `parts`."""
    return {name: count if isinstance(count, float) else _read(*count, room) for name, count in saved.items()}


def newer(live: Counts, saved: Counts) -> str | None:
    """Says why the live state is newer than the saved one.

    Args:
        live: `counts` at the first program point of the restarted script, after its first optimizer
            step.
        saved: `counts` at the program point of the snapshot.

    Returns:
        None if the snapshot is at least as new, or nothing can be compared. One step is what the
        restarted script has taken since it loaded its file: only more than that is ahead. At the
        same count the snapshot wins, because it has the random state and the place in the loop too.
    """
    ahead = [name for name, count in saved.items() if name in live and live[name] > count + 1]
    behind = [name for name, count in saved.items() if name in live and live[name] < count]
    if not ahead or behind:
        return None  # undecided: the snapshot is whole, a mixture of both would not be
    name = ahead[0]
    return f"{name} counts {live[name]:.0f} steps after the script's own checkpoint, {saved[name]:.0f} in the snapshot"


def _read(dtype: str, place: tuple[int, int], room: bytes) -> float:
    return float(torch.frombuffer(bytearray(contents(place, room)), dtype=getattr(torch, dtype)).item())


def _steps_of(optimizer: Any, parts: DeviceParts | None) -> float | Later | None:
    for state in getattr(optimizer, "state", {}).values():
        step = state.get("step") if isinstance(state, dict) else None
        if step is None:
            continue
        try:
            if (
                isinstance(step, torch.Tensor)
                and step.numel() == 1
                and parts is not None
                and (place := parts.take(step.detach()))
            ):
                return str(step.dtype)[6:], place
            return float(step)
        except (TypeError, ValueError, RuntimeError):
            return None
    return None
