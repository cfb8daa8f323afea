"""Checks a resume before it counts: computes a step again and compares the results.

`recomputation.py` decides which step. A restarted script is put back at the step before it first,
which is read back and compared. It then computes the step again, and at its program point
everything is compared with what was saved of it: tensors byte by byte, random state, variables,
positions of loaders, schedulers, optimizers. What a restore has missed (an object that nobody
saved, a generator that nobody knows) shows there, whatever its kind. Then the newest committed step
is put back, whatever the outcome.

Numbers that a clock gives differ each time, and so do the results of kernels that are not
deterministic. So a step that differs is computed a second time: what differs between the two
computations as well is no fault of the restore.

Threads: the training thread. Errors: as `Resumer.write`; a comparison that fails is reported as
such, and the resume goes on.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from types import FrameType
from typing import Any, cast

import torch

from reft import _C, __version__, _continuation, _voice
from reft._continuation import comparison
from reft._continuation.comparison import Difference
from reft._continuation.own import is_own
from reft._link import gather, job_identity
from reft._resume import restorer
from reft._session import notes, startup
from reft._session.boundary import Boundary
from reft._session.recomputation import Recomputation
from reft._session.resumer import Ready, Resumed, Resumer
from reft._session.small_state import Saved, SmallState, finder_in, opened
from reft._state import discovery

_SHOWN = 3  # differences in one line
_SENT = 20  # of one rank, to the others
_LONGEST = 160
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
# What is told first: what comes later in this list often follows from what comes before.
_ORDER = [comparison.DATA, comparison.RANDOM, comparison.VARIABLE, comparison.TENSOR]

Capture = Callable[[FrameType, int, discovery.State], Saved]
# Bytes compared, bytes left out, pieces that differ.
Compare = Callable[[discovery.State], tuple[int, int, list[Any]]]


def circumstances() -> str:
    """A digest of what a verified resume was verified under: the script's own modules, Python,
    torch, reft and the host."""
    digest = hashlib.sha256()
    for name in sorted(name for name in list(sys.modules) if is_own(name)):
        file = getattr(sys.modules[name], "__file__", None)
        digest.update(name.encode())
        if file:
            try:
                with open(file, "rb") as source:
                    digest.update(source.read())
            except OSError:
                digest.update(b"?")
    versions = (sys.version, torch.__version__, __version__, platform.node())
    digest.update(repr(versions).encode())
    return digest.hexdigest()[:16]


class _Stage(Enum):
    FIRST = auto()  # nothing was restored yet
    COMPUTING = auto()  # the step is computed again
    COMPUTING_TWICE = auto()  # and once more, because it differed


@dataclass
class _Finding:
    """What one rank has found.

    Attributes:
        differences: between the computed step and the saved one.
        hashes: of the tensors that differ, by name.
        saved: the small state that was captured.
        compared: bytes of tensors.
        left_out: bytes of tensors that were not copied when the job died.
    """

    differences: list[Difference]
    hashes: dict[str, tuple[int, int]] = field(default_factory=dict)
    saved: Saved | None = None
    compared: int = 0
    left_out: int = 0


class VerifiedResume:
    """The resume of one session, with its verification where there is one.

    Args:
        job: identity of the rank.
        store: keys that no other attempt sees.
        newest: restores the step that training goes on from.
        base: restores the step from which the other is computed; None: the resume is not verified.
        recomputed: what is computed again.
        unverified: why nothing is; "" says nothing.
        capture: takes the small state of a step.
        found: collects what was found wrong, for the agent.

    Attributes:
        verified: whether the step was found bit-identical.
    """

    def __init__(
        self,
        job: job_identity.Job,
        store: Any,
        newest: Resumer,
        base: Resumer | None,
        recomputed: Recomputation | None,
        unverified: str,
        capture: Capture,
        found: notes.Notes,
    ) -> None:
        self.newest, self._base, self._unverified = newest, base, unverified
        self._recomputed = recomputed
        self._job, self._store, self._capture, self._notes = job, store, capture, found
        self._stage = _Stage.FIRST
        self._step = 0
        self._rounds = 0
        self._put_back: Resumed | None = None
        self._restore_faults: list[Difference] = []
        self._finding: _Finding | None = None
        self.verified = False

    def point(self, frame: FrameType, boundary: Boundary) -> tuple[bool, Resumed | None]:
        """A program point of the restarted script.

        Args:
            frame: frame of the optimizer step whose end it is.
            boundary: as for `Resumer.prepare`.

        Returns:
            Whether the resume is over, and what was restored then; None if training starts from its
            beginning.
        """
        if self._stage is _Stage.FIRST:
            return self._first_point(frame, boundary)
        self._step += 1
        assert self._recomputed is not None
        if self._step < self._recomputed.step:
            return False, None
        if self._stage is _Stage.COMPUTING:
            self._finding = self._compare(frame, boundary)
            if self._agree_to_compute_twice(self._finding):
                assert self._base is not None
                ready = self._base.prepare(boundary, self._round())
                if ready is not None:
                    self._put_base_back(frame, ready, again=True)
                    self._stage = _Stage.COMPUTING_TWICE
                    return False, None
            return self._finish(frame, boundary, self._finding.differences)
        return self._finish(frame, boundary, self._after_second(frame, boundary))

    # -- stages

    def _first_point(self, frame: FrameType, boundary: Boundary) -> tuple[bool, Resumed | None]:
        ready = self.newest.prepare(boundary, startup.MATCH)
        if ready is None:
            return True, None
        if self._base is None:
            return True, self._go_on(frame, ready, again=False)
        ready.missing.unmake()
        base = self._base.prepare(boundary, self._round())
        if base is None:
            self._unverified = "the step before it has other state"
            ready = self.newest.prepare(boundary, self._round())
            return True, None if ready is None else self._go_on(frame, ready, again=False)
        self._put_base_back(frame, base, again=False)
        self._stage = _Stage.COMPUTING
        if self._place_is_restored():
            if self._job.rank == 0:
                assert self._recomputed is not None
                step = self._recomputed.step
                several = step > self._step + 1
                steps = f"steps {self._step + 1} to {step} are" if several else f"step {step} is"
                _voice.say(
                    f"verifying the resume: {steps} computed again, and what it prints is repeated"
                )
            return False, None
        self._unverified = "the place in the loop is not restored"
        ready = self.newest.prepare(boundary, self._round())
        if ready is None:
            raise RuntimeError("the script has changed while it was put back")
        return True, self._go_on(frame, ready, again=True)

    def _go_on(self, frame: FrameType, ready: Ready, again: bool) -> Resumed:
        """Restores the newest step without a verification."""
        resumed = self.newest.write(ready, frame, again)
        why = f"not verified: {self._unverified}" if self._unverified else ""
        self.newest.report(resumed, why)
        return resumed

    def _put_base_back(self, frame: FrameType, ready: Ready, again: bool) -> None:
        """Restores the step before, and reads it back the first time."""
        assert self._base is not None
        self._put_back = self._base.write(ready, frame, again)
        self._step = self._base.plan.step
        if not again:
            self._restore_faults = self._read_back(frame, self._put_back.state)

    def _place_is_restored(self) -> bool:
        """Whether all ranks stand where the loop stood at the step before."""
        assert self._put_back is not None
        elsewhere = "" if self._put_back.has_place else "1"
        return not gather.gather(self._job, self._store, self._round(), elsewhere, _any).text

    def _finish(
        self, frame: FrameType, boundary: Boundary, differences: list[Difference]
    ) -> tuple[bool, Resumed | None]:
        """Puts the newest step back, whatever was found, and says what."""
        assert self._recomputed is not None and self._finding is not None
        step = self._recomputed.step
        found = self._gathered([*self._restore_faults, *differences])
        share = self._share_compared(self._finding)
        ready = self.newest.prepare(boundary, self._round())
        if ready is None:
            # The state that was computed is that of a step of this script, if not of the one before.
            if self._job.rank == 0:
                _voice.warn(
                    f"step {self._step} was computed again and has other state than step"
                    f" {self.newest.plan.step}; training continues with the computed one"
                )
            state = discovery.discover(boundary.optimizers)
            return True, Resumed(self._step, state, [], 0, True, "state", 0)
        resumed = self.newest.write(ready, frame, again=True)
        self.verified = not found and share > 0
        assert self._base is not None
        again = f"step {step} was computed again from step {self._base.plan.step} and"
        if found:
            self.newest.report(resumed, f"{again} DIFFERS, see below")
        elif share == 0:
            self.newest.report(resumed, "not verified: nothing of the step after it had been copied")
        else:
            but = " but for what is named above" if self.newest.lost else ""
            part = "" if share == 1 else f" to what had been copied of it, {share:.0%} of its bytes"
            self.newest.report(resumed, f"{again} is bit-identical{part}{but}")
        if found:
            self._tell(step, found)
        return True, resumed

    # -- comparisons

    def _read_back(self, frame: FrameType, state: discovery.State) -> list[Difference]:
        """Compares what was restored with what was saved. A clock cannot excuse a difference here:
        no time has passed for what comes out of a snapshot."""
        assert self._base is not None
        found = self._differences(
            self._base.plan.step, frame, state, self._base.compare, self._base.saved
        ).differences
        return [Difference(one.kind, one.where, f"{one.why} (not put back)") for one in found]

    def _compare(self, frame: FrameType, boundary: Boundary) -> _Finding:
        again = self._recomputed
        assert again is not None
        state = discovery.discover(boundary.optimizers)
        if again.whole:
            compare: Compare | None = self.newest.compare
            saved: Saved | None = self.newest.saved
        else:
            unfinished = again.unfinished
            saved = None
            if again.saved is not None:
                saved = opened(cast(Saved, again.saved), finder_in(state))
            compare = None if unfinished is None else partial(restorer.compare_unfinished, unfinished)
        finding = self._differences(again.step, frame, state, compare, saved, not again.whole)
        names = {one.where for one in finding.differences if one.kind == comparison.TENSOR}
        for region in state.regions:
            if region.name in names:
                finding.hashes[region.name] = _C.content_hash(region.tensor)
        return finding

    def _differences(
        self,
        step: int,
        frame: FrameType,
        state: discovery.State,
        compare: Compare | None,
        saved: Saved | None,
        partly: bool = False,
    ) -> _Finding:
        """Compares the live state with what was saved of a step.

        Args:
            compare: of tensors; None if this rank has saved none.
            saved: the small state; None if there is none.
            partly: whether the job died while it copied the step.
        """
        assert self._base is not None
        finding = _Finding([])
        found: list[Difference] = []
        try:
            if compare is not None:
                finding.compared, finding.left_out, pieces = compare(state)
                found += _tensors(pieces, state)
            if finding.left_out and not partly:
                # Damaged since it was verified: nothing may be claimed about it.
                why = f"{finding.left_out} bytes of the snapshot could not be compared"
                found.append(Difference(comparison.TENSOR, "snapshot", why))
            if saved is not None:
                finding.saved = self._capture(frame, step, state)
                found += _small_state(frame, saved, finding.saved)
        except Exception as error:  # noqa: BLE001  # the resume itself is not in question
            _voice.debug(f"comparison failed: {type(error).__name__}: {error}")
            why = f"the comparison failed: {type(error).__name__}: {error}"
            found, finding.saved = [Difference(comparison.VARIABLE, "verification", why)], None
        lost = [where for where, _, _ in self._base.lost]
        finding.differences = [one for one in found if not _is_part(one.where, lost)]
        return finding

    def _share_compared(self, finding: _Finding) -> float:
        """The part of the tensors' bytes of all ranks that was compared. Small state counts as a
        byte: a step without tensors to compare is still compared."""
        mine = [finding.compared + (finding.saved is not None), finding.left_out]
        gathered = gather.gather(self._job, self._store, self._round(), json.dumps(mine), _sums)
        compared, left_out = json.loads(gathered.text)
        return float(compared / max(1, compared + left_out))

    def _after_second(self, frame: FrameType, boundary: Boundary) -> list[Difference]:
        """What of the first finding is no fault of clocks."""
        first = self._finding
        assert first is not None
        second = self._compare(frame, boundary)
        again = {one.where: one for one in second.differences}
        # What differs between the two computations of this process.
        unsteady = set()
        if first.saved is not None and second.saved is not None:
            unsteady = comparison.places(_small_state(frame, first.saved, second.saved))
        result = []
        for one in first.differences:
            if one.where in unsteady and one.may_be_time:
                continue
            changes = one.where in unsteady or (
                one.where in first.hashes
                and first.hashes[one.where] != second.hashes.get(one.where)
            )
            if one.where not in again or changes:
                one = Difference(
                    one.kind, one.where, f"{one.why}; computed twice, it differs each time"
                )
            result.append(one)
        return result

    # -- agreement and messages

    def _round(self) -> str:
        self._rounds += 1
        return f"{startup.MATCH}/{self._rounds}"

    def _agree_to_compute_twice(self, finding: _Finding) -> bool:
        """Whether a rank has found differences that a restore need not be the cause of."""
        wanted = bool(finding.differences) and not self._restore_faults
        text = "1" if wanted else ""
        return bool(gather.gather(self._job, self._store, self._round(), text, _any).text)

    def _gathered(self, differences: list[Difference]) -> list[tuple[int, Difference]]:
        """The differences of all ranks, the most telling ones first."""
        first: dict[str, Difference] = {}
        for one in differences:
            first.setdefault(one.where, one)
        found = sorted(first.values(), key=lambda one: _ORDER.index(one.kind))
        self._notes.add(notes.NOT_VERIFIED, [(one.where, one.kind, one.why) for one in found])
        rows = [[one.kind, one.where[:_LONGEST], one.why[:_LONGEST]] for one in found[:_SENT]]
        text = json.dumps({self._job.rank: rows}) if rows else ""
        merge = partial(gather.merge_by_rank, most=_SENT)  # bounded, whatever the number of ranks
        gathered = gather.gather(self._job, self._store, self._round(), text, merge)
        by_rank = {int(rank): rows for rank, rows in json.loads(gathered.text or "{}").items()}
        everything = [
            (rank, Difference(kind, where, why))
            for rank in sorted(by_rank)
            for kind, where, why in by_rank[rank]
        ]
        return sorted(everything, key=lambda one: _ORDER.index(one[1].kind))

    def _tell(self, step: int, found: list[tuple[int, Difference]]) -> None:
        if self._job.rank != 0:
            return
        ranks: dict[tuple[str, str], list[int]] = {}
        texts: dict[tuple[str, str], str] = {}
        for rank, one in found:
            ranks.setdefault((one.kind, one.where), []).append(rank)
            texts.setdefault((one.kind, one.where), one.why)
        lines = [
            f"{kind} {where} on {_voice.ranks(ranks[kind, where])}: {text}"
            for (kind, where), text in list(texts.items())[:_SHOWN]
        ]
        more = f" (and {len(texts) - _SHOWN} more)" if len(texts) > _SHOWN else ""
        kinds = {one.kind for _, one in found}
        unsteady = all("differs each time" in one.why for _, one in found)
        advice = (
            "the step gives another result each time it is computed: its kernels are not"
            " deterministic (torch.use_deterministic_algorithms), or it uses something that no"
            " snapshot has"
            if unsteady
            else "what the step read is not what it was"
            if comparison.DATA in kinds or comparison.RANDOM in kinds
            else "training may go on differently than without the restart"
        )
        _voice.warn(
            f"the resume is not exact. Step {step}, computed again, differs from the saved one:"
            f" {'; '.join(lines)}{more}. {advice[0].upper()}{advice[1:]}. Register what is missing"
            " (`reft.register`); `reft doctor` lists all differences"
        )


def _is_part(where: str, lost: list[str]) -> bool:
    """Whether a place is one that is reported as not restored, or around one, or below one."""
    return any(_is_below(where, place) or _is_below(place, where) for place in lost)


def _is_below(place: str, other: str) -> bool:
    """`main:model.scale` is below `main:model`, `main:models` is not."""
    return place.startswith(other) and place[len(other) : len(other) + 1] in ("", ".", "[", "<")


def _any(texts: list[str]) -> str:
    return texts[0] if texts else ""


def _sums(texts: list[str]) -> str:
    return json.dumps([sum(column) for column in zip(*map(json.loads, texts), strict=True)])


def _tensors(pieces: list[Any], state: discovery.State) -> list[Difference]:
    live = {region.name: region.current() for region in state.regions}
    return [
        Difference(comparison.TENSOR, name, _how_tensors_differ(live[name], first, at, sample))
        for name, first, at, sample in pieces
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


def parts(saved: Saved, live: Saved) -> list[Difference]:
    """Compares the small state of two steps, but for the variables of the loop."""
    found: list[Difference] = []
    there: dict[str, Any] = dict(saved)
    here: dict[str, Any] = dict(live)
    for key, name, kind in _PARTS:
        found += comparison.values(there.get(key), here.get(key), name, kind)
    return found


def _small_state(frame: FrameType, saved: Saved, live: Saved) -> list[Difference]:
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
        small.planned(state, known.optimizers)
        return small.capture(frame, step, known.closing_position, state).read()

    return capture
