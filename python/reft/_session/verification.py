"""Checks a resume before it counts: computes a step again and compares the results.

`recomputation.py` decides which step, `step_comparison.py` compares. A restarted script is put back
at the step before it first, which is read back and compared. It then computes the step again, and
at its program point everything is compared with what was saved of it. What a restore has missed (an
object that nobody saved, a generator that nobody knows) shows there, whatever its kind. Then the
newest committed step is put back, whatever the outcome.

If a part of the step after the newest one is there instead, the newest one is put back, training
goes on, and the step that it computes next is compared with that part. It cannot be put back once
more then: a snapshot leaves out what has not changed since the first step, so it must not be put
back over a later step.

Numbers that a clock gives differ each time, and so do the results of kernels that are not
deterministic. So a step that differs is computed a second time: what differs between the two
computations as well is no fault of the restore.

A comparison that fails costs the verification alone: the rank tells the others in the round in
which all ranks meet next. The vault says meanwhile that a step is computed again: should the job
end over it, the next attempt resumes without. No snapshot is taken before the newest step is put
back, so all of them stay.

Threads: the training thread. Errors: as `Resumer.write`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from types import FrameType
from typing import Any, cast

import torch

from reft import __version__, _voice
from reft._continuation import comparison
from reft._continuation.comparison import Difference
from reft._link import agent_protocol, gather, job_identity
from reft._link.trusted_store import TrustedStore
from reft._resume import restorer
from reft._session import notes, startup, step_comparison
from reft._session.boundary import Boundary
from reft._session.recomputation import Recomputation
from reft._session.resumer import Ready, Resumed, Resumer
from reft._session.saved import Saved
from reft._session.small_state import finder_in, opened
from reft._session.step_comparison import Capture, Finding, SavedStep
from reft._state import discovery
from reft._state.own import is_own

_TIMELY = " (differs; a clock may be why)"
_SHOWN = 3  # differences in one line
_SENT = 20  # of one rank, to the others
_LONGEST = 160
_ROUNDS_LEFT = 8  # more than a verification can still have
# What is told first: what comes later in this list often follows from what comes before.
_ORDER = [comparison.DATA, comparison.RANDOM, comparison.VARIABLE, comparison.TENSOR]


class Verdict(Enum):
    """What a verification has found; the numbers are those of `resume_verdict` in the vault."""

    NONE = 0
    IDENTICAL = 1
    DIFFERS = agent_protocol.RESUME_DIFFERS


def circumstances() -> str:
    """A digest of what a verified resume was verified under: the script's own modules, Python,
    torch, reft and the host."""
    digest = hashlib.sha256()
    for name in sorted(name for name in list(sys.modules) if is_own(name)):
        digest.update(repr(name).encode())
        try:
            file = getattr(sys.modules[name], "__file__", None)
            if file:
                with open(file, "rb") as source:
                    digest.update(source.read())
        except Exception:  # noqa: BLE001  # a module may be any object
            digest.update(b"?")
    versions = (sys.version, torch.__version__, __version__, platform.node())
    digest.update(repr(versions).encode())
    return digest.hexdigest()[:16]


class _Stage(Enum):
    FIRST = auto()  # nothing was restored yet
    COMPUTING = auto()  # the step is computed again
    COMPUTING_TWICE = auto()  # and once more, because it differed


@dataclass(frozen=True)
class _Outcome:
    """What all ranks have found.

    Attributes:
        found: differences with their ranks, the most telling ones first.
        share: of the tensors' bytes of all ranks that was compared. Small state counts as a byte: a
            step without tensors to compare is still compared.
        small: whether the small state of every rank was compared.
        lost: places of values that were left out because they are not restored, by name, with one
            of their ranks; the first ones.
        fault: why nothing may be claimed, "" if something may.
    """

    found: list[tuple[int, Difference]]
    share: float
    small: bool
    lost: dict[str, int]
    fault: str


class VerifiedResume:
    """The resume of one session, with its verification where there is one.

    Args:
        job: identity of the rank.
        store: keys that no other attempt sees.
        newest: restores the step that training goes on from.
        base: restores the step from which the other is computed; None: the resume is not verified.
        recomputed: what is computed again.
        unverified: why nothing is; "" says nothing.
        longest_sec: how long a verification may take.
        capture: takes the small state of a step.
        mark: keeps the step that is computed again where the next attempt finds it.
        found: collects what was found wrong, for the agent.

    Attributes:
        compares_next: whether the next step, of a resume that is over, is to be given to
            `compare_next`.
        verdict: what the verification has found.
        outcome: the same in words; "" while nothing was restored, or if nothing is to be said.
    """

    def __init__(
        self,
        job: job_identity.Job,
        store: TrustedStore,
        newest: Resumer,
        base: Resumer | None,
        recomputed: Recomputation | None,
        unverified: str,
        longest_sec: float,
        capture: Capture,
        mark: Callable[[int], None],
        found: notes.Notes,
    ) -> None:
        self.newest, self._base, self._unverified = newest, base, unverified
        self._recomputed, self._longest_sec = recomputed, longest_sec
        self._job, self._store, self._capture, self._notes = job, store, capture, found
        self._mark = mark
        self._stage = _Stage.FIRST
        self._has_begun = False
        self._step = 0
        self._rounds = 0
        self._began = 0.0
        self._has_place = False  # as the step before was put back
        self._restore_faults: list[Difference] = []
        self._finding = Finding()
        self._not_compared: list[str] = []  # places of what a clock may have changed
        self._fault = ""  # why what was put back could not be compared
        self.compares_next = False
        self.verdict = Verdict.NONE
        self.outcome = ""

    @property
    def awaited(self) -> Resumer | None:
        """What the script is put back to first; None once it was."""
        return self.newest if self._stage is _Stage.FIRST else None

    def point(self, frame: FrameType, boundary: Boundary) -> tuple[bool, Resumed | None]:
        """A program point of the restarted script.

        Args:
            frame: frame of the optimizer step whose end it is.
            boundary: as for `Resumer.prepare`.

        Returns:
            Whether the resume is over, and what was restored then; None if training starts from its
            beginning.
        """
        self._has_begun = True
        if self._stage is _Stage.FIRST:
            return self._first_point(frame, boundary)
        self._step += 1
        assert self._recomputed is not None and self._base is not None
        if self._step < self._recomputed.step:
            return False, None
        finding = self._compare(self._saved_step(), self._base, frame, boundary)
        if self._stage is _Stage.COMPUTING_TWICE:
            first = self._finding
            if finding.fault:
                self._leave_out_time(first)
            else:
                found, timely = step_comparison.steady(first, finding, frame)
                first.differences, self._not_compared = found, timely
            return self._finish(frame, boundary)
        finding.fault = self._fault or finding.fault
        self._finding = finding
        if self._agree_to_compute_twice():
            problem = self._base.why_not_at(frame)
            ready = self._base.prepare(
                boundary, self._round(), again=True, problem=problem, frame=frame
            )
            if ready is not None:
                self._put_base_back(frame, ready)
                self._stage = _Stage.COMPUTING_TWICE
                return False, None
            self._leave_out_time(finding)
        return self._finish(frame, boundary)

    def _leave_out_time(self, finding: Finding) -> None:
        """What a clock may be the cause of speaks neither for the resume nor against it."""
        self._not_compared = [one.where for one in finding.differences if one.may_be_time]
        finding.differences = _no_time(finding.differences)

    def left(self, has_stepped: bool) -> None:
        """The script has left its loop, or ends. Ranks that are still in it do not wait for this
        one.

        Args:
            has_stepped: whether this process has been in its loop.
        """
        if self._stage is _Stage.FIRST:
            gather.refuse(self._job, self._store, startup.MATCH, "has left the loop")
            if self._job.rank == 0 and has_stepped and not self._has_begun:
                _voice.warn(
                    f"step {self.newest.plan.step} was not resumed: the script left its loop before"
                    " the place of the snapshot"
                )
            return
        if self._recomputed is None:
            return
        step, newest = self._recomputed.step, self.newest.plan.step
        if self._job.rank == 0 and not self.compares_next:
            self._warn_left(step, newest)
        for _ in range(_ROUNDS_LEFT if self._job.world > 1 else 0):
            gather.refuse(self._job, self._store, self._round(), "has left the loop")

    def _warn_left(self, step: int, newest: int) -> None:
        lost = f"; what it saves now is step {self._step}, not {newest}" if self._step < newest else ""
        _voice.warn(
            f"the resume is not verified: the script left its loop after step {self._step},"
            f" before it had computed step {step} again{lost}"
        )

    # -- stages

    def _first_point(self, frame: FrameType, boundary: Boundary) -> tuple[bool, Resumed | None]:
        ready = self.newest.prepare(boundary, startup.MATCH)
        if ready is None:
            return True, None
        if self._base is None or self._recomputed is None:
            return True, self._go_on(frame, ready)
        if not self._recomputed.whole:
            return True, self._go_on_to_compare(frame, boundary, ready)
        self._began = time.monotonic()
        self._mark(self._recomputed.step)
        ready.missing.unmake()
        # Of both: what is written here is written over there, and never with the loop elsewhere.
        problem = self._base.why_not_at(frame) or self.newest.why_not_at(frame)
        if self._base.position["first"] != self.newest.position["first"]:
            problem = problem or "its names are those of another step"
        base = self._base.prepare(
            boundary, self._round(), again=True, problem=problem, frame=frame
        )
        if base is None:
            self._unverified = f"step {self._base.plan.step} cannot be put back: {self._base.why_not}"
            ready = self.newest.prepare(boundary, self._round(), again=True)
            return True, None if ready is None else self._go_on(frame, ready)
        fault = ""
        try:
            self._put_base_back(frame, base)
            self._restore_faults, self._fault = self._read_back(self._base, frame, boundary)
        except Exception as error:  # noqa: BLE001  # the others wait for this rank
            fault = f"step {self._base.plan.step} could not be put back: {error}"
        self._all_at_base(fault)
        self._stage = _Stage.COMPUTING
        self._announce()
        return False, None

    def _announce(self) -> None:
        assert self._recomputed is not None
        if self._job.rank == 0:
            step = self._recomputed.step
            several = step > self._step + 1
            steps = f"steps {self._step + 1} to {step} are" if several else f"step {step} is"
            _voice.say(
                f"verifying the resume: {steps} computed again, and what it prints is repeated"
            )

    def _go_on_to_compare(self, frame: FrameType, boundary: Boundary, ready: Ready) -> Resumed:
        """Restores the newest step, and waits for the next one."""
        assert self._recomputed is not None
        resumed = self.newest.write(ready, frame)
        self._restore_faults, self._fault = self._read_back(self.newest, frame, boundary)
        self._stage, self._step, self.compares_next = _Stage.COMPUTING, resumed.step, True
        step = self._recomputed.step
        self.newest.report(resumed, f"step {step} will be compared with what had been copied of it")
        return resumed

    def compare_next(self, frame: FrameType, boundary: Boundary) -> None:
        """The step after the newest one has been computed, and no snapshot of it begun.

        It is not computed twice, so only what neither a clock nor kernels can be the cause of
        speaks against the resume. Nor was it copied to its end, when writes to what was not copied
        yet are found.
        """
        assert self._recomputed is not None
        self.compares_next = False
        finding, fault = self._compare(self._saved_step(), self.newest, frame, boundary), ""
        self._leave_out_time(finding)
        found = finding.differences
        cause = "" if self._restore_faults else _other_cause(found)
        if cause:
            fault = (
                f"tensors differ ({found[0].where}: {found[0].why}), of which {cause} may be the"
                " cause, or state that no snapshot has"
            )
            found = []
        finding.differences = found
        finding.fault = self._fault or finding.fault or fault
        self._finding = finding
        outcome, newest = self._all_found(), self.newest.plan.step
        step = self._recomputed.step
        again = f"step {step} was computed from it and"
        if outcome.found:
            self.verdict = Verdict.DIFFERS
            self.outcome = f"{again} DIFFERS"
        elif outcome.fault:
            self.outcome = f"not verified: {outcome.fault}"
        elif outcome.share == 0:
            self.outcome = f"not verified: nothing of step {step} had been copied"
        elif not outcome.small:
            # Variables, random state and data order of a rank were not looked at.
            self.outcome = f"not verified: not every rank had begun to copy step {step}"
        else:
            self.verdict = Verdict.IDENTICAL
            self.outcome = f"{again} is bit-identical{self._of_what(outcome)}"
        self._notes.add(notes.RESUME, [(f"step {newest}", "", self.outcome)])
        if self._job.rank == 0:
            speak = _voice.warn if outcome.fault and not outcome.found else _voice.say
            speak(f"the resume at step {newest}: {self.outcome}")
        if outcome.found:
            self._tell(step, outcome.found)

    def _of_what(self, outcome: _Outcome) -> str:
        part = ""
        if outcome.share < 1:
            # Rounded down: 100% would be all of it.
            percent = int(100 * outcome.share)
            part = f" to what had been copied of it, {percent}% of its bytes"
        if not outcome.lost:
            return part
        named = [
            f"{where.removesuffix(_TIMELY)} on rank {rank}{_TIMELY * where.endswith(_TIMELY)}"
            for where, rank in outcome.lost.items()
        ]
        more = ", and more" if len(named) > _SHOWN else ""
        return f"{part} but for {', '.join(named[:_SHOWN])}{more}"

    def _left_out(self) -> list[str]:
        """Places of values that this rank cannot restore, or that a clock may have changed. Before
        the newest step is put back, that is what the other one and its own capture tell."""
        lost = [*self.newest.lost]
        if self._recomputed is not None and self._recomputed.whole and self._base is not None:
            frames = cast(dict[str, Any], self.newest.saved).get("frames", {})
            lost = [*self._base.lost, *frames.get("uncaptured", [])]
        timely = [f"{where}{_TIMELY}" for where in self._not_compared]
        return [str(where)[:_LONGEST] for where, _, _ in lost] + timely

    def _go_on(self, frame: FrameType, ready: Ready) -> Resumed:
        """Restores the newest step without a verification."""
        resumed = self.newest.write(ready, frame)
        self._report(resumed, f"not verified: {self._unverified}" if self._unverified else "")
        return resumed

    def _report(self, resumed: Resumed, outcome: str, hint: str = "") -> None:
        self.outcome = outcome
        if outcome:
            self._notes.add(notes.RESUME, [(f"step {resumed.step}", "", outcome)])
        self.newest.report(resumed, outcome + hint)

    def _put_base_back(self, frame: FrameType, ready: Ready) -> None:
        """Restores the step before."""
        assert self._base is not None
        self._has_place = self._base.write(ready, frame).has_place
        self._step = self._base.plan.step

    def _finish(self, frame: FrameType, boundary: Boundary) -> tuple[bool, Resumed | None]:
        """Puts the newest step back, whatever was found, and says what."""
        assert self._recomputed is not None and self._base is not None
        step = self._recomputed.step
        outcome = self._all_found()
        problem = self.newest.why_not_at(frame)
        ready = self.newest.prepare(
            boundary, self._round(), again=True, problem=problem, silent=True, frame=frame
        )
        if ready is None:
            # The state that was computed is that of a step of this script, if not of the one before.
            is_known = "DIFFERS" if outcome.found else "is not verified"
            why = self.newest.why_not
            self.outcome = f"step {step} was computed again, {is_known} and cannot be put back: {why}"
            self._notes.add(notes.RESUME, [(f"step {step}", "", self.outcome)])
            if self._job.rank == 0:
                _voice.warn(
                    f"resumed at step {self._base.plan.step}. Step {step} was computed again, and the"
                    f" saved one does not fit where the script is now ({why}): training continues"
                    " with the computed one"
                )
            if outcome.found:
                self.verdict = Verdict.DIFFERS
                self._tell(step, outcome.found)
            state = discovery.discover(boundary.optimizers)
            return True, Resumed(self._step, state, [], 0, True, "state", 0)
        resumed = self.newest.write(ready, frame)
        if not resumed.has_place:
            # The loop stands at the computed step: the next attempt resumes without computing it.
            raise RuntimeError("the place in the loop is not restored")
        again = f"step {step} was computed again from step {self._base.plan.step} and"
        if outcome.found:
            self.verdict = Verdict.DIFFERS
            self._report(resumed, f"{again} DIFFERS", ", see below")
            self._tell(step, outcome.found)
        elif outcome.fault:
            self._report(resumed, f"not verified: {outcome.fault}")
        else:
            self.verdict = Verdict.IDENTICAL
            self._report(resumed, f"{again} is bit-identical{self._of_what(outcome)}")
        return True, resumed

    # -- comparisons

    def _compare(
        self, there: SavedStep, base: Resumer, frame: FrameType, boundary: Boundary
    ) -> Finding:
        """Compares the live state with a saved step; what `base` could not restore is left out."""
        lost = [where for where, _, _ in base.lost]
        return step_comparison.compare(there, frame, boundary, self._capture, lost)

    def _read_back(
        self, base: Resumer, frame: FrameType, boundary: Boundary
    ) -> tuple[list[Difference], str]:
        """Compares what was restored with what was saved: the differences, and why there is no
        comparison. A clock cannot excuse a difference here: no time has passed for what comes out
        of a snapshot."""
        there = SavedStep(base.plan.step, base.compare, base.saved_anew)
        finding = self._compare(there, base, frame, boundary)
        found = [
            Difference(one.kind, one.where, f"{one.why} (not put back)")
            for one in finding.differences
        ]
        return found, finding.fault

    def _saved_step(self) -> SavedStep:
        """What was saved of the step that is computed again."""
        again, newest = self._recomputed, self.newest
        assert again is not None
        if again.whole:
            return SavedStep(again.step, newest.compare, newest.saved_anew)

        def small_state(state: discovery.State) -> Saved | None:
            saved = again.unfinished_small_state()
            return None if saved is None else opened(cast(Saved, saved), finder_in(state))

        unfinished = again.unfinished
        compare = None if unfinished is None else partial(restorer.compare_unfinished, unfinished)
        return SavedStep(again.step, compare, small_state, partly=True)

    # -- agreement and messages

    def _round(self) -> str:
        self._rounds += 1
        return f"{startup.MATCH}/{self._rounds}"

    def _gather(self, answer: dict[str, Any], merge: gather.Merge) -> dict[str, Any]:
        """A round of the verification. A rank that does not take part is a fault."""
        gathered = gather.gather(self._job, self._store, self._round(), json.dumps(answer), merge)
        merged: dict[str, Any] = gather.parsed(gathered.text or "{}")
        if gathered.refusals:
            rank = min(gathered.refusals)
            merged["fault"] = f"rank {rank} {gathered.refusals[rank]}"
        return merged

    def _by_rank(self, fault: str) -> str:
        return fault and f"rank {self._job.rank}: {fault}"

    def _all_at_base(self, fault: str) -> None:
        """All ranks stand where the loop stood at the step before.

        Raises:
            RuntimeError: a rank does not. Then none can compute the step, and the newest one must
                not be put back over this one: the next attempt resumes at it.
        """
        if not self._has_place:
            fault = fault or "the place in the loop is not restored"
        merged = self._gather({"fault": self._by_rank(fault)}, _worst)
        if merged["fault"]:
            raise RuntimeError(f"the resume cannot be verified: {merged['fault']}")

    def _agree_to_compute_twice(self) -> bool:
        """Whether a rank has found differences that a restore need not be the cause of."""
        finding = self._finding
        differs = bool(finding.differences) and not self._restore_faults
        spent = time.monotonic() - self._began
        # Settings may differ between ranks, so each answers for itself and all decide the same.
        too_long = 2 * spent > self._longest_sec
        answer = {"fault": finding.fault, "differs": differs, "too_long": too_long}
        merged = self._gather(answer, _worst)
        if merged["fault"]:
            # Kernels that are not deterministic may be the cause, too, and nothing can tell.
            finding.differences = _no_cause_but_restore(finding.differences)
            return False
        if not merged["differs"]:
            return False
        if merged["too_long"]:
            finding.differences = _no_time(finding.differences)
            return False
        return True

    def _all_found(self) -> _Outcome:
        """What all ranks have found."""
        first: dict[str, Difference] = {}
        finding = self._finding
        for one in [*self._restore_faults, *finding.differences]:
            first.setdefault(one.where, one)
        found = sorted(first.values(), key=lambda one: _ORDER.index(one.kind))
        self._notes.add(notes.NOT_VERIFIED, [(one.where, one.kind, one.why) for one in found])
        rows = [[one.kind, one.where[:_LONGEST], one.why[:_LONGEST]] for one in found[:_SENT]]
        answer = {
            "fault": self._by_rank(finding.fault),
            "rows": {self._job.rank: rows} if rows else {},
            "compared": finding.compared + (finding.saved is not None),
            "left_out": finding.left_out,
            "small": finding.saved is not None,
            "lost": dict.fromkeys(sorted(set(self._left_out()))[: _SHOWN + 1], self._job.rank),
        }
        merged = self._gather(answer, _together)
        everything = [
            (int(rank), Difference(kind, where, why))
            for rank, rows in merged.get("rows", {}).items()
            for kind, where, why in rows
        ]
        everything.sort(key=lambda one: _ORDER.index(one[1].kind))
        compared, left_out = merged.get("compared", 0), merged.get("left_out", 0)
        return _Outcome(
            everything,
            compared / max(1, compared + left_out),
            bool(merged.get("small")),
            merged.get("lost", {}),
            str(merged.get("fault", "")),
        )

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
        kernels = (
            "its kernels are not deterministic (torch.use_deterministic_algorithms), or "
            if comparison.TENSOR in kinds
            else ""
        )
        advice = (
            "the step gives another result each time it is computed:"
            f" {kernels}it uses something that no snapshot has"
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


def _is_deterministic() -> bool:
    """Whether a step that is computed again gives the same tensors. On the CPU, it does with one
    thread: several may add to an item in any order."""
    demanded = bool(torch.are_deterministic_algorithms_enabled())
    if not torch.accelerator.is_available():
        return demanded or torch.get_num_threads() == 1
    strict = not torch.is_deterministic_algorithms_warn_only_enabled()
    chosen = bool(torch.backends.cudnn.benchmark)  # kernels by a measurement
    return demanded and strict and not chosen


def _other_cause(found: list[Difference]) -> str:
    """What else than the resume may be the cause of all differences; "" if that cannot be."""
    if not found or any(one.kind != comparison.TENSOR for one in found):
        return ""
    causes = [] if _is_deterministic() else ["kernels that are not deterministic"]
    if all(one.may_be_later for one in found):
        causes.append("writes of the script between its optimizer step and the copy")
    return " or ".join(causes)


def _no_time(found: list[Difference]) -> list[Difference]:
    """Without those that a clock may be the cause of."""
    return [one for one in found if not one.may_be_time]


def _no_cause_but_restore(found: list[Difference]) -> list[Difference]:
    """Without those that a clock or kernels may be the cause of."""
    return [one for one in _no_time(found) if one.kind != comparison.TENSOR]


def _worst(texts: list[str]) -> str:
    """A fault, any wish or hindrance, the longest time; "" if no rank takes part."""
    answers = [gather.parsed(text) for text in texts]
    keys = answers[0] if answers else {}
    return json.dumps({key: max(one[key] for one in answers) for key in keys}) if keys else ""


def _together(texts: list[str]) -> str:
    """What several ranks have found; bounded, whatever the number of ranks."""
    answers = [gather.parsed(text) for text in texts]
    if not answers:
        return ""
    rows: dict[str, Any] = {}
    lost: dict[str, int] = {}
    for one in answers:
        rows |= one["rows"]
        lost = one["lost"] | lost
    return json.dumps(
        {
            "fault": max(one["fault"] for one in answers),
            "rows": {rank: rows[rank] for rank in sorted(rows, key=int)[:_SENT]},
            "compared": sum(one["compared"] for one in answers),
            "left_out": sum(one["left_out"] for one in answers),
            "small": all(one["small"] for one in answers),
            "lost": {where: lost[where] for where in sorted(lost)[: _SHOWN + 1]},
        }
    )
