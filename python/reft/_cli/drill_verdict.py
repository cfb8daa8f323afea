"""Decides the result of a drill from the events that the ranks of its runs have written
(`reft._session.drill`). Reads and runs nothing.

A drill has up to three runs: an undisturbed one, a disturbed one, and the undisturbed one again.
What differs between two undisturbed runs (the disturbed one counts as such before the kill) is the
script's own doing. What differs only after a resume is what reft does not restore.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

INPUT = "input"
DATA = "data order"
RANDOM = "random state"
VARIABLE = "variable"
TENSOR = "tensor"
# What is told first: what comes later in this list often follows from what comes before.
_ORDER = [INPUT, DATA, RANDOM, VARIABLE, TENSOR]
# If two undisturbed runs differ in these, they have trained differently. Other values that differ
# have had no effect: the time, a path, a generator that nobody has seeded and nobody uses.
_TRAINED = {INPUT, TENSOR}

EXACT = "exact"
NOT_EXACT = "not exact"
NOT_DETERMINISTIC = "not deterministic"
NOT_RESUMED = "not resumed"

Event = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """One value that differs.

    Attributes:
        kind: `INPUT` (of a model), `DATA`, `RANDOM`, `VARIABLE` or `TENSOR` (of the training state).
        where: its place in the program.
        why: how it differs where it was first seen.
        step: at which it was first seen.
        ranks: on which.
        restored: it differed right after the resume already.
        at_end: how it differs at the last step at which it does.
    """

    kind: str
    where: str
    why: str
    step: int
    ranks: tuple[int, ...]
    restored: bool = False
    at_end: str = ""


@dataclass(frozen=True)
class Kill:
    """One kill, and what it cost.

    Attributes:
        step: that the rank was computing.
        resumed_at: None if nothing was resumed.
        seconds: from the kill until all ranks had completed that step.
    """

    rank: int
    step: int
    resumed_at: int | None
    seconds: float | None

    @property
    def lost(self) -> int | None:
        """Completed steps that were computed again."""
        return None if self.resumed_at is None else self.step - 1 - self.resumed_at


@dataclass(frozen=True)
class Verdict:
    """The result of a drill.

    Attributes:
        outcome: `EXACT`, `NOT_EXACT`, `NOT_DETERMINISTIC` or `NOT_RESUMED`.
        reason: why nothing was resumed, or how the run differs although no value does; else "".
        differences: what reft has not restored, likely causes first.
        unsteady: what differs between undisturbed runs.
        steps: first and last step that were compared after a resume; None if none was.
    """

    outcome: str
    reason: str = ""
    differences: list[Finding] = field(default_factory=list)
    unsteady: list[Finding] = field(default_factory=list)
    steps: tuple[int, int] | None = None

    @property
    def trained_alike(self) -> bool:
        """Whether tensors and inputs of models are the same in all steps that were compared: what
        differs has had no effect yet."""
        return self.steps is not None and not _trains_differently(
            [*self.differences, *self.unsteady]
        )


class Run:
    """The events of one run, by rank."""

    def __init__(self, events: dict[int, list[Event]]) -> None:
        self.events = events

    @property
    def world(self) -> int:
        """Number of ranks; 0 if none has started."""
        return max((int(one["world"]) for _, one in self.all("started")), default=0)

    @property
    def last_step(self) -> int:
        """The last one that every rank has recorded; 0 if there is none."""
        last = [
            max((int(e["step"]) for e in self.of(rank, "step")), default=0)
            for rank in range(self.world)
        ]
        return min(last, default=0)

    def of(self, rank: int, *kinds: str) -> Iterator[Event]:
        return (one for one in self.events.get(rank, []) if one["event"] in kinds)

    def all(self, *kinds: str) -> Iterator[tuple[int, Event]]:
        return ((rank, one) for rank in sorted(self.events) for one in self.of(rank, *kinds))

    def errors(self) -> list[str]:
        """What went wrong with the recording."""
        return [
            f"rank {rank}, step {one['step']}: {one['what']}" for rank, one in self.all("error")
        ]


def judge(reference: Run, disturbed: Run, repeat: Run | None = None) -> Verdict:
    """Decides.

    Args:
        reference: the undisturbed run.
        disturbed: the run with kills.
        repeat: the undisturbed run once more, if it was made.
    """
    kills = kills_of(disturbed)
    unresumed = [kill for kill in kills if kill.resumed_at is None]
    if unresumed:
        kill = unresumed[0]
        return Verdict(NOT_RESUMED, f"nothing was resumed after the kill at step {kill.step}")
    unsteady = _merged(_before_the_kills(reference, disturbed))
    if repeat is not None:
        unsteady = _merged([*unsteady, *_found(reference, repeat, 0)])
    again = list(_found(reference, disturbed, 1))
    own = {(one.kind, one.where) for one in unsteady}
    put_back = list(_not_put_back(disturbed))
    found = _merged([*put_back, *(one for one in again if (one.kind, one.where) not in own)])
    steps = sorted({int(e["step"]) for _, e in disturbed.all("step") if e["attempt"] > 0})
    span = (steps[0], steps[-1]) if steps else None
    trains_differently = _trains_differently(unsteady)
    if put_back or (found and not trains_differently):
        return Verdict(NOT_EXACT, "", found, unsteady, span)
    if trains_differently:
        return Verdict(NOT_DETERMINISTIC, "", [], unsteady, span)
    reason = _gap(reference, disturbed)
    if reason:
        return Verdict(NOT_EXACT, reason, [], unsteady, span)
    return Verdict(EXACT, "", [], unsteady, span)


def is_repeat_needed(reference: Run, disturbed: Run) -> bool:
    """Whether `judge` needs another undisturbed run to decide."""
    unsteady = _merged(_before_the_kills(reference, disturbed))
    if _trains_differently(unsteady) or any(k.resumed_at is None for k in kills_of(disturbed)):
        return False  # known already
    own = {(one.kind, one.where) for one in unsteady}
    return any((one.kind, one.where) not in own for one in _found(reference, disturbed, 1))


def kills_of(disturbed: Run) -> list[Kill]:
    """The kills that happened, in their order."""
    found = []
    for rank, kill in sorted(disturbed.all("kill"), key=lambda one: float(one[1]["at"])):
        later = int(kill["attempt"]) + 1
        resumes = [
            int(e["step"]) for _, e in disturbed.all("resumed") if int(e["attempt"]) == later
        ]
        done = [
            min(
                (
                    float(e["at"])
                    for e in disturbed.of(r, "step", "timed")
                    if e["attempt"] >= later and e["step"] >= kill["step"]
                ),
                default=None,
            )
            for r in range(disturbed.world)
        ]
        seconds = None
        if done and all(at is not None for at in done):
            seconds = max(at for at in done if at is not None) - float(kill["at"])
        at_step = min(resumes) if len(resumes) == disturbed.world else None
        found.append(Kill(rank, int(kill["step"]), at_step, seconds))
    return found


def step_cost(reference: Run) -> tuple[float, float] | None:
    """Seconds of a step, and the seconds of it that snapshots took on the training thread, for the
    rank on which they took most. None if no step was timed."""
    costs = []
    for rank in range(reference.world):
        timed = list(reference.of(rank, "timed"))
        if len(timed) < 3:
            continue
        taken = int(timed[-1]["spent_ns"]) - int(timed[0]["spent_ns"])
        costs.append(
            (taken * 1e-9 / (len(timed) - 1), statistics.median(float(e["sec"]) for e in timed[1:]))
        )
    if not costs:
        return None
    spent, step = max(costs)
    return step, spent


def most_different(found: Iterable[Finding]) -> Finding | None:
    """The tensor with the largest difference at the end, None if there is no tensor."""
    tensors = [one for one in found if one.kind == TENSOR]
    return max(tensors, key=_distance, default=None)


def _distance(one: Finding) -> float:
    found = re.search(r"max \|Δ\| (\S+)$", one.at_end)
    return float(found[1]) if found else -1.0


def _trains_differently(found: Iterable[Finding]) -> bool:
    return any(one.kind in _TRAINED for one in found)


def _gap(reference: Run, disturbed: Run) -> str:
    """Why some step was not compared, "" if all were."""
    if disturbed.last_step < reference.last_step:
        return (
            f"the run ended after step {disturbed.last_step}, the undisturbed one after step"
            f" {reference.last_step}"
        )
    for rank, event in disturbed.all("step", "resumed"):
        if event.get("differences") is None:
            return f"rank {rank} has nothing to compare step {event['step']} with"
    return ""


def _before_the_kills(reference: Run, disturbed: Run) -> Iterator[Finding]:
    return (one for one in _found(reference, disturbed, 0, 0))


def _found(reference: Run, run: Run, first: int, last: int = 1 << 30) -> Iterator[Finding]:
    """Differences with the reference, in the attempts from `first` to `last`."""
    fed = {(rank, int(e["step"])): e["fed"] for rank, e in reference.all("step")}
    known = {(rank, digest): step for (rank, step), calls in fed.items() for *_, digest in calls}
    for rank, event in run.all("step"):
        if not first <= int(event["attempt"]) <= last:
            continue
        step = int(event["step"])
        expected = fed.get((rank, step))
        if expected is not None:
            steps = {digest: at for (r, digest), at in known.items() if r == rank}
            yield from _fed(expected, event["fed"], step, rank, steps)
        for kind, where, why, _ in event.get("differences") or []:
            yield Finding(kind, where, why, step, (rank,))


def _fed(
    expected: Sequence[Sequence[str]],
    calls: Sequence[Sequence[str]],
    step: int,
    rank: int,
    known: dict[str, int],
) -> Iterator[Finding]:
    """The first call of a model in one step that had other arguments."""
    for (name, shapes, digest), call in zip(expected, calls, strict=False):
        if call[2] and (digest != call[2] or name != call[0]):
            there = known.get(call[2])
            why = f"was fed other values ({call[1]})"
            if call[1] != shapes:
                why = f"was fed {shapes}, is fed {call[1]}"
            elif there is not None and there != step:
                why = f"is fed what step {there} was fed in the undisturbed run"
            yield Finding(INPUT, f"input of {call[0]}", why, step, (rank,))
            return
    if len(expected) != len(calls):
        why = f"models were called {len(expected)} times, are called {len(calls)} times"
        yield Finding(INPUT, "calls of models", why, step, (rank,))


def _not_put_back(disturbed: Run) -> Iterator[Finding]:
    """What differed right after a resume from what the killed process had at that step."""
    for rank, event in disturbed.all("resumed"):
        for kind, where, why, _ in event["differences"] or []:
            yield Finding(kind, where, why, int(event["step"]), (rank,), restored=True)


def _merged(found: Iterable[Finding]) -> list[Finding]:
    """One finding for each place, as it was first seen, with all its ranks."""
    first: dict[tuple[str, str], Finding] = {}
    last: dict[tuple[str, str], Finding] = {}
    ranks: dict[tuple[str, str], set[int]] = {}
    for one in sorted(found, key=lambda one: (not one.restored, one.step)):
        place = (one.kind, one.where)
        first.setdefault(place, one)
        ranks.setdefault(place, set()).update(one.ranks)
        if place not in last or last[place].step < one.step:
            last[place] = one
    result = [
        replace(
            one, ranks=tuple(sorted(ranks[place])), at_end=last[place].at_end or last[place].why
        )
        for place, one in first.items()
    ]
    return sorted(result, key=lambda one: (not one.restored, one.step, _ORDER.index(one.kind)))
