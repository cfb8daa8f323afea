"""Detects whether a script has loaded a checkpoint of its own that is newer than reft's snapshot.

A script that saves its own checkpoints loads its file at startup, before reft restores the
snapshot. Usually the snapshot is newer, and wins. If the snapshot is left over from an earlier run,
the state that the script loaded must stay. Optimizers and schedulers count their steps; the state
with the higher count is newer. An optimizer without a count (plain SGD) and without a scheduler
gives no evidence, and the snapshot wins.

Threads: the training thread. Errors: none; a count that cannot be read is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from reft._state.constructions import of_process
from reft._state.device_parts import DeviceParts, contents

Counts = dict[str, float]
Later = tuple[str, tuple[int, int]]  # dtype, and result of DeviceParts.take()


def counts(
    optimizers: Iterable[Any], schedulers: Iterable[Any], parts: DeviceParts | None = None
) -> dict[str, float | Later]:
    """Reads the step counts of optimizers and schedulers. Cheap: one number each.

    Args:
        optimizers: `torch.optim.Optimizer` objects, in the same order in both processes.
        schedulers: Learning rate schedulers.
        parts: Collects counts in device memory, so that the host does not wait for the device. If
            None, the host waits.

    Returns:
        Counts by name. `arrived` resolves those that `parts` has collected. Optimizers without a
        count are absent.
    """
    found: dict[str, float | Later] = {}
    for index, optimizer in enumerate(optimizers):
        count = _steps_of(optimizer, parts)
        if count is not None:
            found[f"optimizer {index}"] = count
    known = list(schedulers)
    for scheduler in known:
        last = getattr(scheduler, "last_epoch", None)
        key = of_process.key_of(scheduler) or ("0" if len(known) == 1 else "")
        if key and isinstance(last, (int, float)):  # without a key it may be any of several
            found[f"scheduler {key}"] = float(last)
    return found


def arrived(saved: dict[str, float | Later], room: bytes) -> Counts:
    """Returns the counts, with those that `parts` has collected read from `room`."""
    return {name: count if isinstance(count, float) else _read(*count, room) for name, count in saved.items()}


def newer(live: Counts, saved: Counts, taken: int = 1) -> str | None:
    """Explains why the live state is newer than the saved one, if it is.

    Args:
        live: `counts` of the restarted script when it is to be put back.
        saved: `counts` at the program point of the snapshot.
        taken: steps that the restarted script has taken until then.

    Returns:
        None if the snapshot is at least as new, or nothing can be compared. The restarted script
        has taken steps since it loaded its file, so only a lead of more steps counts. At equal
        counts the snapshot wins, because it also has the random state and the place in the loop.
    """
    ahead = [name for name, count in saved.items() if name in live and live[name] > count + taken]
    behind = [name for name, count in saved.items() if name in live and live[name] < count]
    if not ahead or behind:
        return None  # not newer, or contradictory: the snapshot is consistent
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
