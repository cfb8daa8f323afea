"""What a rank did in its newest steps: iterations, gaps, copies in them; and the same as a trace
that Perfetto loads.

Pure: from what `_C.timeline_of` read out of a vault. Times are CLOCK_MONOTONIC nanoseconds of the
host, so ranks of one node share their axis.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

TIERS = ("at once", "gap", "compute", "communication", "gate")


@dataclass(frozen=True)
class Interval:
    """Something that took from `begin` to `end`; `details` are for readers."""

    begin: int
    end: int
    name: str
    details: str = ""
    bytes: int = 0


@dataclass
class Step:
    """One iteration, between two program points; its copies are of the snapshot at its begin."""

    number: int
    begin: int
    end: int
    gap_ns: int = 0
    capture_ns: int = 0
    gate_ns: int = 0
    seal_ns: int = 0
    copied: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    copied_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.number,
            "begin_ns": self.begin,
            "end_ns": self.end,
            "gap_ns": self.gap_ns,
            "capture_ns": self.capture_ns,
            "gate_ns": self.gate_ns,
            "seal_ns": self.seal_ns,
            "copied_bytes": {tier.replace(" ", "_"): count for tier, count in self.copied.items()},
            "copied_ns": {tier.replace(" ", "_"): count for tier, count in self.copied_ns.items()},
        }


@dataclass
class Rank:
    """The timeline of one rank, oldest first in every list."""

    rank: int
    steps: list[Step]
    ops: list[Interval]  # in flight; on a device, only while the host enqueues them
    gaps: list[Interval]  # the host waits for an op, or the device does; never overlapping
    copies: dict[str, list[Interval]]  # by tier
    captures: list[Interval]
    gates: list[Interval]
    seals: list[Interval]
    cost: dict[str, int] = field(
        default_factory=dict
    )  # what snapshots cost, as counters of the vault
    device: bool = False  # steps, gaps, copies and gates are a device's, by its own clock

    @property
    def waits(self) -> str:
        """What is idle in a gap."""
        return "device" if self.device else "host"

    def cut(self, begin: int, end: int, steps: int) -> Rank:
        """The intervals that overlap the window, and the newest steps that ended in it; all whole."""

        def part(intervals: Iterable[Interval]) -> list[Interval]:
            return [it for it in intervals if it.end > begin and it.begin < end]

        return Rank(
            self.rank,
            [step for step in self.steps if step.end > begin and step.end <= end][-steps:],
            part(self.ops),
            part(self.gaps),
            {tier: part(copies) for tier, copies in self.copies.items()},
            part(self.captures),
            part(self.gates),
            part(self.seals),
            self.cost,
            self.device,
        )


def _op(
    entry: dict[str, Any],
    groups: Sequence[tuple[str, int, int]],
    call_sites: dict[int, str],
    device: bool = False,
) -> Interval:
    index = int(entry["group"])
    group = groups[index][0] if index < len(groups) else str(index)
    words = [f"{entry['op']} of group {group}, seq {entry['seq']}", f"{entry['bytes']:,} bytes"]
    if entry["peer"] >= 0:
        words.insert(1, f"peer {entry['peer']}")
    if entry["call_site"] in call_sites:
        words.append(f"called at {call_sites[entry['call_site']]}")
    if entry["failed"]:
        words.append("failed")
    end = int(entry["done_ns"] or entry["wait_end_ns"] or entry["begin_ns"])
    if device:  # ProcessGroupNCCL's watchdog looks every 100 ms whether they are done
        end = int(entry.get("enqueued_ns") or entry["begin_ns"])
    return Interval(
        int(entry["begin_ns"]), end, str(entry["op"]), ", ".join(words), int(entry["bytes"])
    )


def _spans(read: dict[str, Any]) -> dict[str, list[tuple[Interval, int, str]]]:
    """Spans that have ended, by what they are: with their step and tier."""
    kinds = ("capture", "copy", "gate", "seal", "device step", "device wait", "device gate")
    spans: dict[str, list[tuple[Interval, int, str]]] = {kind: [] for kind in kinds}
    for span in read["spans"]:
        what, tier = str(span["what"]), str(span["tier"] or "")
        if not span["end_ns"] or what not in spans:
            continue
        name, details = what, f"step {span['step']}"
        if what == "copy":
            details += f", {span['bytes']:,} bytes, {tier}"
        elif what == "device wait":
            name = str(span["op"])
            details += f", the device waits for it, {span['bytes']:,} bytes"
            details += ": its link is busy too" if tier == "communication" else ""
        interval = Interval(
            int(span["begin_ns"]), int(span["end_ns"]), name, details, int(span["bytes"])
        )
        spans[what].append((interval, int(span["step"]), tier))
    return spans


def _without_overlap(waits: list[Interval]) -> list[Interval]:
    """A wait inside of another one is a part of it."""
    result: list[Interval] = []
    for wait in sorted(waits, key=lambda it: (it.begin, -it.end)):
        if not result or wait.begin >= result[-1].end:
            result.append(wait)
        elif wait.end > result[-1].end:
            last = result[-1]
            result[-1] = Interval(last.begin, wait.end, last.name, last.details, last.bytes)
    return result


def _inside(intervals: Sequence[Interval], begin: int, end: int) -> int:
    """Nanoseconds between the two instants of intervals that are in order and do not overlap."""
    first = bisect_right(intervals, begin, key=lambda it: it.end)
    behind = bisect_left(intervals, end, key=lambda it: it.begin)
    return sum(min(it.end, end) - max(it.begin, begin) for it in intervals[first:behind])


def of_vault(read: dict[str, Any]) -> Rank:
    """From what `_C.timeline_of` returned."""
    groups, call_sites = read["groups"], read["call_sites"]
    marks = [
        (int(entry["seq"]), int(entry["begin_ns"]))
        for entry in read["ops"]
        if entry["op"] == "step"
    ]
    entries = [entry for entry in read["ops"] if entry["op"] != "step"]
    waits = [
        Interval(
            int(entry["wait_begin_ns"]),
            int(entry["wait_end_ns"]),
            str(entry["op"]),
            f"waits for {_op(entry, groups, call_sites).details}",
        )
        for entry in entries
        if entry["wait_begin_ns"] and entry["wait_end_ns"] > entry["wait_begin_ns"]
    ]
    spans = _spans(read)
    waits_of_device, gates_of_device, steps_of_device = (
        spans.pop(f"device {what}") for what in ("wait", "gate", "step")
    )
    if steps_of_device:
        # The host runs ahead of its device: what it waits for says nothing.
        waits = [it for it, _, _ in waits_of_device]
        spans["gate"] = gates_of_device
    copies: dict[str, list[Interval]] = {tier: [] for tier in TIERS}
    for interval, _, tier in spans["copy"]:
        if tier in copies:
            copies[tier].append(interval)
    gaps = _without_overlap(waits)
    of_step: dict[int, list[tuple[Interval, str, str]]] = {}
    for what, found in spans.items():
        for interval, number, tier in found:
            of_step.setdefault(number, []).append((interval, what, tier))
    # (program point before it, begin, number, end); not those of which it is not known any more
    # what was copied in them.
    if steps_of_device:
        # Told in the order in which they ended, one or two steps after what the host did in them.
        iterations = [(n, it.begin, n + 1, it.end) for it, n, _ in steps_of_device]
        if int(read["spans_from_step"]) >= 0:
            iterations = [it for it in iterations if it[0] > int(read["spans_from_step"]) + 1]
    else:
        iterations = [(*first, *second) for first, second in zip(marks, marks[1:], strict=False)]
        iterations = [it for it in iterations if it[1] >= int(read["spans_from_ns"])]
    steps = []
    for before, begin, number, end in iterations:
        step = Step(number, begin, end, gap_ns=_inside(gaps, begin, end))
        for it, what, tier in of_step.get(before, []):
            spent = it.end - it.begin
            step.capture_ns += spent if what == "capture" else 0
            step.gate_ns += spent if what == "gate" else 0
            step.seal_ns += spent if what == "seal" else 0
            if what == "copy" and tier in step.copied:
                step.copied[tier] += it.bytes
                step.copied_ns[tier] += spent
        steps.append(step)
    return Rank(
        int(read["rank"]),
        steps,
        [_op(entry, groups, call_sites, bool(steps_of_device)) for entry in entries],
        gaps,
        copies,
        [it for it, _, _ in spans["capture"]],
        [it for it, _, _ in spans["gate"]],
        [it for it, _, _ in spans["seal"]],
        {name: int(value) for name, value in read.get("cost", {}).items()},
        bool(steps_of_device),
    )


_STALE_NS = 60 * 10**9


def newest(ranks: Sequence[Rank], steps: int) -> tuple[int, int, list[Rank]]:
    """The ranks cut to the time of the newest steps that all of them have ended, and that time; no
    ranks if there is none.

    Leaves out ranks whose newest step is a minute older than that of another one: they no longer
    run.
    """
    ended = [rank for rank in ranks if rank.steps]
    if not ended:
        return 0, 0, []
    latest = max(rank.steps[-1].end for rank in ended)
    ended = [rank for rank in ended if rank.steps[-1].end > latest - _STALE_NS]
    # Numbers of steps may differ between ranks (who steps only every other time), instants do not.
    end = min(rank.steps[-1].end for rank in ended)
    by_then = [[step for step in rank.steps if step.end <= end][-steps:] for rank in ended]
    begin = min((newest[0].begin for newest in by_then if newest), default=end)
    cut = [rank.cut(begin, end, steps) for rank in ended]
    return begin, end, [rank for rank in cut if rank.steps]


def lanes(intervals: Iterable[Interval]) -> list[list[Interval]]:
    """The same intervals in rows without overlaps, as few as possible."""
    rows: list[list[Interval]] = []
    for interval in sorted(intervals, key=lambda it: it.begin):
        row = next((row for row in rows if row[-1].end <= interval.begin), None)
        if row is None:
            rows.append([interval])
        else:
            row.append(interval)
    return rows


def trace(ranks: Sequence[Rank], job: str) -> dict[str, Any]:
    """Chrome's trace events, for ui.perfetto.dev: a process for each rank, microseconds."""
    return {"traceEvents": list(_events(ranks, job)), "displayTimeUnit": "ms"}


def _events(ranks: Sequence[Rank], job: str) -> Iterator[dict[str, Any]]:
    for rank in ranks:
        rows: list[tuple[str, Iterable[Interval]]] = [
            (
                "steps",
                [Interval(step.begin, step.end, f"step {step.number}") for step in rank.steps],
            ),
            (f"gaps (the {rank.waits} waits)", rank.gaps),
        ]
        if rank.device:
            rows += [("device: gate", rank.gates), ("training thread: capture", rank.captures)]
        else:
            rows += [("training thread: capture, gate", [*rank.captures, *rank.gates])]
        copies = [
            Interval(it.begin, it.end, f"copy: {tier}", it.details, it.bytes)
            for tier in TIERS
            for it in rank.copies[tier]
        ]
        rows += [
            (f"copies {number}" if number else "copies", row)
            for number, row in enumerate(lanes([*copies, *rank.seals]))
        ]
        ops = "ops: enqueued" if rank.device else "ops"
        rows += [
            (f"{ops} {number}" if number else ops, row)
            for number, row in enumerate(lanes(rank.ops))
        ]
        yield {
            "ph": "M",
            "pid": rank.rank,
            "name": "process_name",
            "args": {"name": f"{job} rank {rank.rank}"},
        }
        for thread, (name, intervals) in enumerate(rows):
            yield {
                "ph": "M",
                "pid": rank.rank,
                "tid": thread,
                "name": "thread_name",
                "args": {"name": name},
            }
            for it in intervals:
                event = {
                    "ph": "X",
                    "pid": rank.rank,
                    "tid": thread,
                    "name": it.name,
                    "ts": it.begin / 1e3,
                }
                yield {
                    **event,
                    "dur": (it.end - it.begin) / 1e3,
                    "args": {"details": it.details, "bytes": it.bytes},
                }
