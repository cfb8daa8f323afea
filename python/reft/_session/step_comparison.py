"""Compares the live state at a program point with what was saved of a step: tensors byte by byte,
random state, variables, positions of loaders, schedulers, optimizers.

Threads: the training thread. Errors: a comparison that fails is part of its result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch

from reft import _C, _continuation, _voice
from reft._continuation import comparison
from reft._continuation.comparison import Difference
from reft._session.boundary import Boundary
from reft._session.saved import Saved
from reft._session.small_state import SmallState
from reft._state import discovery

# Parts of the small state beside the frames, and what each is called.
_PARTS = [
    ("rng", "global", comparison.RANDOM),
    ("groups", "optimizer settings", comparison.VARIABLE),
    ("plain_state", "state of optimizer", comparison.VARIABLE),
    ("schedulers", "scheduler", comparison.VARIABLE),
    ("scalers", "gradient scaler", comparison.VARIABLE),
    ("strided", "tensor", comparison.TENSOR),
    ("registered", "registered object", comparison.VARIABLE),
]
_NO_CLOCK = frozenset({"groups", "plain_state", "schedulers", "scalers"})
"""Parts in which no number comes from a clock."""

Capture = Callable[[FrameType, int, discovery.State], Saved]
# Bytes compared, bytes left out, pieces that differ.
Compare = Callable[[discovery.State], tuple[int, int, list[Any]]]


@dataclass
class Finding:
    """What one rank has found.

    Attributes:
        differences: between the live state and the saved one.
        hashes: of the tensors that differ, by name.
        saved: the small state that was captured.
        compared: bytes of tensors.
        left_out: bytes of tensors that were not copied when the job died.
        fault: why the comparison failed; "" if it did not. Nothing else counts then.
    """

    differences: list[Difference] = field(default_factory=list)
    hashes: dict[str, tuple[int, int]] = field(default_factory=dict)
    saved: Saved | None = None
    compared: int = 0
    left_out: int = 0
    fault: str = ""


@dataclass(frozen=True)
class SavedStep:
    """What was saved of a step.

    Attributes:
        step: its number.
        compare: of its tensors; None if this rank has saved none.
        saved: gives the small state, for a script in this state; None if there is none.
        partly: whether the job died while it copied the step.
    """

    step: int
    compare: Compare | None
    saved: Callable[[discovery.State], Saved | None]
    partly: bool = False


def compare(
    there: SavedStep,
    frame: FrameType,
    boundary: Boundary,
    capture: Capture,
    lost: list[str],
) -> Finding:
    """Compares the live state with a saved step.

    Args:
        frame: frame of the optimizer step whose end the program point is.
        capture: takes the small state of a step.
        lost: places of values that are known to be lost; these and what is in them are left out.
    """
    finding = Finding()
    try:
        state = discovery.discover(boundary.optimizers)
        found: list[Difference] = []
        if there.compare is not None:
            finding.compared, finding.left_out, pieces = there.compare(state)
            found += _tensors(pieces, state, there.partly)
        if finding.left_out and not there.partly:
            # Damaged since it was verified: nothing may be claimed about it.
            why = f"{finding.left_out} bytes of the snapshot could not be compared"
            found.append(Difference(comparison.TENSOR, "snapshot", why))
        saved = there.saved(state)
        if there.partly:
            # What this rank had not begun to copy was not compared either.
            finding.left_out += (saved is None) + (state.bytes if there.compare is None else 0)
        if saved is not None:
            finding.saved = capture(frame, there.step, state)
            found += small_states(frame, saved, finding.saved)
        finding.differences = [one for one in found if not is_part(one.where, lost)]
        names = {one.where for one in finding.differences if one.kind == comparison.TENSOR}
        for region in state.regions:
            if region.name in names:
                finding.hashes[region.name] = _C.content_hash(region.tensor)
    except Exception as error:  # noqa: BLE001  # the resume itself is not in question
        _voice.debug(f"comparison failed: {type(error).__name__}: {error}")
        fault = f"the comparison failed: {type(error).__name__}: {error}"
        return Finding(fault=" ".join(fault.split())[:200])
    return finding


def steady(
    first: Finding, second: Finding, frame: FrameType
) -> tuple[list[Difference], list[str]]:
    """What of the differences of the first computation is no fault of clocks, as a second one has
    shown; and the places of what may be."""
    again = {one.where: one for one in second.differences}
    # What differs between the two computations of this process.
    unsteady = set()
    if first.saved is not None and second.saved is not None:
        unsteady = comparison.places(small_states(frame, first.saved, second.saved))
    result, timely = [], []
    for one in first.differences:
        if one.where in unsteady and one.may_be_time:
            timely.append(one.where)
            continue
        changes = one.where in unsteady or (
            one.where in first.hashes and first.hashes[one.where] != second.hashes.get(one.where)
        )
        if one.where not in again or changes:
            one = Difference(
                one.kind, one.where, f"{one.why}; computed twice, it differs each time"
            )
        result.append(one)
    return result, timely


def parts(saved: Saved, live: Saved) -> list[Difference]:
    """Compares the small state of two steps, but for the variables of the loop."""
    found: list[Difference] = []
    there: dict[str, Any] = dict(saved)
    here: dict[str, Any] = dict(live)
    here["schedulers"] = _in_order_of(saved, live)
    for key, name, kind in _PARTS:
        differences = comparison.values(there.get(key), here.get(key), name, kind)
        if key in _NO_CLOCK:
            differences = [replace(one, may_be_time=False) for one in differences]
        found += differences
    return found


def _in_order_of(saved: Saved, live: Saved) -> Any:
    """The live schedulers in the order of the saved ones, as a restore matches them: two processes
    may find them in another order. As they are if they cannot all be told apart."""
    rows = live.get("schedulers")
    wanted = saved.get("keys", {}).get("schedulers", [])
    there = live.get("keys", {}).get("schedulers", [])
    if rows is None or len(set(there)) != len(rows) or set(wanted) != set(there):
        return rows
    by_key = dict(zip(there, rows, strict=True))
    return [by_key[key] for key in wanted]


def small_states(frame: FrameType, saved: Saved, live: Saved) -> list[Difference]:
    """Compares the small state of two steps."""
    found = parts(saved, live)
    if "frames" in saved and "frames" in live:
        found += _continuation.compare(
            frame, (saved["frames"], saved["room"]), (live["frames"], live["room"])
        )
    return found


def capture_with(session: int, frame_bytes: int, boundary: Callable[[], Boundary]) -> Capture:
    """Gives what captures the small state of a step, apart from what snapshots use."""

    def fail(what: str, error: Exception) -> None:
        raise error

    def capture(frame: FrameType, step: int, state: discovery.State) -> Saved:
        known = boundary()
        small = SmallState(session, True, frame_bytes, fail)
        small.planned(state, known)
        return small.capture(frame, step, known, state).read()

    return capture


def is_part(where: str, lost: list[str]) -> bool:
    """Whether a place is one that is reported as not restored, or around one, or below one."""
    return any(_is_below(where, place) or _is_below(place, where) for place in lost)


def _is_below(place: str, other: str) -> bool:
    """`main:model.scale` is below `main:model`, `main:models` is not."""
    return place.startswith(other) and place[len(other) : len(other) + 1] in ("", ".", "[", "<")


def _tensors(pieces: list[Any], state: discovery.State, partly: bool) -> list[Difference]:
    """Late writes, to what is copied after the optimizer step, are looked for when all of it is
    copied: a step that was copied partly may hold their bytes."""
    live = {region.name: region.current() for region in state.regions}
    return [
        Difference(
            comparison.TENSOR,
            name,
            _how_tensors_differ(live[name], first, at, sample),
            may_be_later=partly and not certain,
        )
        for name, first, at, sample, certain in pieces
    ]


def _how_tensors_differ(tensor: torch.Tensor, first: int, at: int, sample: bytes) -> str:
    """Of a dense tensor and a sample of its saved bytes, which begins at byte `at`."""
    whole = tensor.detach()
    flat = torch.as_strided(whole, (whole.numel(),), (1,), whole.storage_offset())
    size = flat.element_size()
    count = len(sample) // size
    now = flat[at // size : at // size + count].cpu()
    before = torch.frombuffer(bytearray(sample[: count * size]), dtype=now.dtype)
    return comparison.delta(before, now) or f"differs from byte {first} on"
