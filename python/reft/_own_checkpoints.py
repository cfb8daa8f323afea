"""Tells whether a script has loaded a checkpoint of its own that is newer than reft's snapshot.

A script that saves by itself loads its file at its start, before reft puts the snapshot back. Usually the snapshot is
newer, and wins. It is not if the snapshot is left over from before: then what the script loaded has to stay. Optimizers and
schedulers count their steps; the count that is ahead is the newer state. An optimizer without a count (plain SGD) and
without a scheduler tells nothing, and the snapshot wins.

Threads: the training thread. Errors: none; a count that cannot be read is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Counts = dict[str, float]


def counts(optimizers: Iterable[Any], schedulers: Iterable[Any]) -> Counts:
    """Reads how many steps optimizers and schedulers have counted. Cheap: one number of each.

    Args:
        optimizers: `torch.optim.Optimizer` objects in the order in which both processes know them.
        schedulers: Learning rate schedulers, likewise.

    Returns:
        Count by name; optimizers that do not count are absent.
    """
    found: Counts = {}
    for index, optimizer in enumerate(optimizers):
        count = _steps_of(optimizer)
        if count is not None:
            found[f"optimizer {index}"] = count
    for index, scheduler in enumerate(schedulers):
        last = getattr(scheduler, "last_epoch", None)
        if isinstance(last, (int, float)):
            found[f"scheduler {index}"] = float(last)
    return found


def newer(live: Counts, saved: Counts) -> str | None:
    """Says why the live state is newer than the saved one.

    Args:
        live: `counts` at the first program point of the restarted script, after its first optimizer step.
        saved: `counts` at the program point of the snapshot.

    Returns:
        None if the snapshot is at least as new, or nothing can be compared. One step is what the restarted script has
        taken since it loaded its file: only more than that is ahead. At the same count the snapshot wins, because it has the
        random state and the place in the loop too.
    """
    ahead = [name for name, count in saved.items() if name in live and live[name] > count + 1]
    behind = [name for name, count in saved.items() if name in live and live[name] < count]
    if not ahead or behind:
        return None  # undecided: the snapshot is whole, a mixture of both would not be
    name = ahead[0]
    return f"{name} counts {live[name]:.0f} steps after the script's own checkpoint, {saved[name]:.0f} in the snapshot"


def _steps_of(optimizer: Any) -> float | None:
    for state in getattr(optimizer, "state", {}).values():
        step = state.get("step") if isinstance(state, dict) else None
        if step is None:
            continue
        try:
            return float(step)
        except (TypeError, ValueError, RuntimeError):
            return None
    return None
