"""Puts a restarted script back at the program point of a snapshot that all ranks agreed on.

This runs at the first program point of the script: everything exists by then. All ranks compare
their live state with the snapshot first (`prepare`), and resume (`write`) only if it matches on
every rank.

Threads: the training thread. Errors: whatever is raised after the ranks have agreed leaves the
state half restored; the rank must end then.
"""

from __future__ import annotations

import gc
import json
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import torch

from reft import _C, _continuation, _voice
from reft._link import gather, job_identity
from reft._link.trusted_store import TrustedStore
from reft._resume import arrangement, own_checkpoints, restorer
from reft._session import notes, small_state, startup
from reft._session.boundary import Boundary
from reft._session.saved import Saved
from reft._state import discovery
from reft._state.constructions import of_process
from reft._state.optimizers import not_yet_stepped, signature

_PROBLEMS, _PARTS = "problems", "parts"  # of a rank's answer
_NEWER = "the script has loaded a newer checkpoint of its own, which is kept"


@dataclass(frozen=True)
class Resumed:
    """Where the script stands after a resume.

    Attributes:
        step: number of the step that was restored.
        state: the live state.
        uncaptured: values that the snapshot has not.
        nanoseconds: how long it took.
        has_place: whether the place in the loop was restored.
        what: what was restored, in words.
        written: bytes.
        waiting: optimizers that are still to step with gradients which the snapshot has not.
        reshaped: `Saved.reshaped`.
        sources: bytes that this rank has read for itself and others from vaults in memory, and from
            vaults on storage; bytes that came from other nodes.
    """

    step: int
    state: discovery.State
    uncaptured: list[notes.Note]
    nanoseconds: int
    has_place: bool
    what: str
    written: int
    waiting: list[torch.optim.Optimizer] = field(default_factory=list)
    reshaped: dict[str, list[int]] = field(default_factory=dict)
    sources: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Ready:
    """A script that has built what the snapshot holds.

    Attributes:
        state: the live state, with what optimizers make at their first step.
        missing: what of that was made for the restore.
        boundary: learns where the script is.
    """

    state: discovery.State
    missing: arrangement.Arrangement
    boundary: Boundary


class Resumer:
    """Restores one step.

    Args:
        job: identity of the rank.
        store: keys that no other attempt sees.
        source: what is restored.
        exact: whether the place in the loop is restored too.
        found: collects what is not restored.
        quiet: whether another `Resumer` reports what cannot be restored.

    Attributes:
        saved: its small state; what the script's objects have pickled is read by `prepare`.
        lost: what `write` could not restore.
        why_not: what `prepare` found last.
        exact: whether the place in the loop is restored too.
        waits: whether the script waits for the place of then, and for optimizers that it makes
            later.
    """

    def __init__(
        self,
        job: job_identity.Job,
        store: TrustedStore,
        source: startup.Source,
        exact: bool,
        found: notes.Notes,
        quiet: bool = False,
    ) -> None:
        self.plan, self._restorer = source.plan, source.restorer
        self._packed = self.saved = cast(Saved, source.saved)
        self._job, self._store, self._notes = job, store, found
        self._quiet, self._rounds = quiet, 0
        self.lost: list[notes.Note] = []
        self.why_not = ""
        self.exact, self.waits = exact, True

    @property
    def position(self) -> dict[str, Any]:
        """From `Boundary.position`."""
        return self.saved["boundary"]

    @property
    def _wanted(self) -> list[tuple[str, str]]:
        """Optimizers, as `not_yet_stepped` wants them."""
        return list(zip(self.saved["optimizers"], self.saved["keys"]["optimizers"], strict=True))

    @property
    def expected_at(self) -> int:
        """The optimizer step of this process at which it is restored, if nothing comes between."""
        position = self.position
        place = position["at"] if self.exact and self.waits else 0
        return int(max(position["first"], place, position["complete"] if self.waits else 0))

    @property
    def most_optimizers(self) -> int:
        """How many were saved."""
        return len(self.saved["optimizers"])

    def has_optimizers(self, known: list[torch.optim.Optimizer]) -> bool:
        """Whether the script has made all that were saved.

        Args:
            known: those that have stepped.
        """
        missing = self._wanted[len(known) :]
        if missing:
            gc.collect()  # so that all ranks see the same ones
        return len(not_yet_stepped(known, missing, by_key=True)) == len(missing)

    def why_not_at(self, frame: FrameType) -> str:
        """Why the place in the loop could not be restored at this program point; "" if nothing is
        known against it. Never raises: the other ranks wait for the answer."""
        if not self._has_frames:
            return "the place in the loop was not saved"
        try:
            return _continuation.why_not_here(frame, self.saved["frames"])
        except Exception as error:  # noqa: BLE001
            return f"the saved place cannot be read: {type(error).__name__}: {error}"

    def prepare(
        self,
        boundary: Boundary,
        name: str,
        again: bool = False,
        problem: str = "",
        silent: bool = False,
        frame: FrameType | None = None,
    ) -> Ready | None:
        """Looks whether the script has built on all ranks what the snapshot holds.

        Args:
            boundary: learns of optimizers that have not stepped yet in this process.
            name: of the round in which the ranks agree, used once.
            again: the script has been looked at before: what it has loaded was not newer, and a
                step that it has computed since may be.
            problem: what else is known against the restore on this rank.
            silent: the caller reports why it cannot be restored.
            frame: as of `write`, if the place in the loop is to be looked at, too.

        Returns:
            None if it has not, or a rank knows of a problem (`why_not`), and nothing was written.
        """
        known, wanted = boundary.optimizers, self._wanted
        boundary.know(not_yet_stepped(known, wanted[len(known) :]))
        state = discovery.discover(boundary.optimizers)
        parts = self._deal_rows(state)
        live = own_checkpoints.arrived(
            own_checkpoints.counts(state.optimizers, state.schedulers), b""
        )
        find = small_state.finder_in(state)
        self.saved = small_state.opened(self._packed, find)
        foreign = self._job.rank in self.plan.donor
        made = arrangement.Arrangement(self._restorer.regions, self.saved, find, foreign)
        try:
            if foreign:
                _check_donor(state, self._taken, self._restorer.regions, self.saved)
            _check_groups(self.saved["groups"], state)
            state = made.make(state, boundary.optimizers)
            restorer.check(self._restorer, state)
            self._check_role(state)
            _check_optimizers(wanted, known)
            if frame is not None and not problem:
                self._check_place(frame, state)
        except (_NotOfThisRank, _NoPlace) as error:
            problem = str(error)
        except Exception as error:
            problem = f"the script has changed: {str(error) or type(error).__name__}"
        else:
            problem = problem or ("" if again else self._newer(live, boundary.steps_waited + 1))
        if not self._all_match(problem, name, silent, parts):
            made.unmake()
            return None
        return Ready(state, made, boundary)

    def write(self, ready: Ready, frame: FrameType) -> Resumed:
        """Restores everything. From here on a failure ends this rank: others have resumed, and a
        rank that has not would train something else.

        Args:
            frame: frame of the optimizer step whose end is the program point.
        """
        plan, saved, job, state = self.plan, self.saved, self._job, ready.state
        began = time.monotonic_ns()
        state.wait_for_devices()  # streams of other optimizers may still write
        written = restorer.restore(self._restorer, state, job.nodes)
        _C.fault_point("restore_copy", plan.step)
        self._report_lost(small_state.restore_strided(saved, state))
        self._report_lost([(name, "", why) for name, why in saved["missed"]])
        keys = saved["keys"]
        self._restore_state_dicts(
            "scheduler", state.schedulers, saved["schedulers"], keys["schedulers"]
        )
        self._restore_state_dicts(
            "gradient scaler", state.scalers, saved["scalers"], keys["scalers"]
        )
        self._report_lost(small_state.restore_registered(saved, self._other_parts()))
        has_place, what = self._restore_frames(frame, state)
        _continuation.graphs.forget()  # those of the discarded iteration
        # What the discarded iteration leaves runs its `finally` now, not in the middle of training.
        gc.collect()
        state.wait_for_devices()  # other streams may read before this one has written
        _continuation.restore_rng(saved["rng"])
        ready.boundary.put_back(self.position, has_place)
        spent = time.monotonic_ns() - began
        _C.fault_point("restore_done", plan.step)
        uncaptured = saved["frames"]["uncaptured"] if self._has_frames else []
        everything = of_process.in_order([], torch.optim.Optimizer)
        waiting = [o for o in everything if of_process.key_of(o) in saved["waiting"]]
        return Resumed(
            int(saved["step"]),
            state,
            uncaptured,
            spent,
            has_place,
            what,
            written,
            waiting,
            saved["reshaped"],
            self._restorer.sources,
        )

    def report(self, resumed: Resumed, verified: str) -> None:
        """Says that the step was restored.

        Args:
            verified: what is known about it, "" for nothing.
        """
        if self._job.rank != 0:
            return
        donors = ""
        if self._was is not None:
            there, now = self.plan.saved_by, self._job.world
            donors = f"; {_voice.plural(there, 'rank')} saved it, {now} go on"
            donors += (
                f": what ranks from {now} up kept for themselves (sums, lists) is gone"
                if now < there
                else f": ranks from {there} up have copies of what those below kept for themselves"
                " (sums, lists, random state, buffers)"
            )
        if self.plan.replaced:
            lost = _voice.ranks(self.plan.replaced)
            donors += f"; without the vaults of {lost}, whose small state is that of replicas"
        _voice.say(
            f"resumed at step {self.plan.step}: {resumed.what},"
            f" {_voice.size(resumed.written)} per rank in {resumed.nanoseconds / 1e6:.0f}"
            f" ms{donors}{'; ' if verified else ''}{verified}"
        )

    def compare(self, state: discovery.State) -> tuple[int, int, list[Any]]:
        """Compares the live tensors with what this rank's vault holds of the step: bytes compared,
        bytes left out, differing pieces."""
        return restorer.compare(self._restorer, self._job.rank, state)

    def saved_anew(self, state: discovery.State) -> Saved:
        """The small state as it was saved: what `write` has given to objects is theirs (CyclicLR
        takes keys out of it).

        Args:
            state: of the script that reads it.
        """
        return small_state.opened(self._packed, small_state.finder_in(state))

    @property
    def _was(self) -> tuple[int, int] | None:
        """As of `_continuation.plan`."""
        if self.plan.saved_by == self._job.world:
            return None
        return self.plan.saved_by, self.plan.owner(self._job.rank)

    @property
    def _taken(self) -> str:
        """Whose snapshot this rank takes, and why, for messages."""
        if self._was is not None:
            return f"{self.plan.saved_by} ranks saved the step, and rank {self._was[1]} of them"
        donor = self.plan.donor[self._job.rank]
        return f"the vault of this rank is lost, and rank {donor}, which stands in for it,"

    @property
    def _has_frames(self) -> bool:
        return self.exact and "frames" in self.saved

    def _restore_frames(
        self, frame: FrameType, state: discovery.State
    ) -> tuple[bool, str]:
        """Restores the place in the loop, on all ranks or on none. Returns whether it could, and
        what was restored in all, for the terminal."""
        if not self.exact:
            return False, "state"
        planned, problem = None, ""
        try:
            planned = self._planned(frame, state)
        except Exception as error:  # noqa: BLE001  (the other ranks wait for the answer)
            problem = str(error) or type(error).__name__
        self._rounds += 1
        name = f"place/{self.plan.step}/{self._rounds}"
        if self._was is not None:
            problem = self._dealt_unlike(planned, name) or problem
        problems = _problems_in(self._gathered(problem, name))
        if planned is None or problems:
            if self._job.rank == 0 and not self._quiet:
                why = problems[min(problems)]
                _voice.say(
                    f"{_voice.ranks(problems)}: place in the loop not restored ({why}); tensors,"
                    " optimizer, schedulers and random state are restored on all ranks. Loop"
                    " counters start again"
                )
            return False, "state"
        uncaptured: list[notes.Note] = self.saved["frames"]["uncaptured"]
        done = planned.write()
        there = {where for where, _, _ in done.problems}
        lost = [*done.problems, *(note for note in uncaptured if note[0] not in there)]
        self._report_lost(lost)
        exceptions = f" except {_voice.plural(len(self.lost), 'value')}" if self.lost else ""
        return True, f"state and place in the loop{exceptions}"

    def _planned(self, frame: FrameType, state: discovery.State) -> Any:
        """The place in the loop, ready to be written.

        Raises:
            FrameMismatch: It is another one, or was not saved.
        """
        if not self._has_frames:
            raise _continuation.FrameMismatch("it was not saved")
        frames = self.saved["frames"]
        self._notes.add(notes.NOT_RESTORABLE, frames["uncaptured"])  # reported before the restart
        return _continuation.plan(
            frame,
            frames,
            self._job.rank in self.plan.donor,
            small_state.storages_of(state),
            self.saved["room"],
            self._was,
            self._other_parts(),
        )

    def _deal_rows(self, state: discovery.State) -> int:
        """Finds into how many parts the ranks deal the rows of tensors, of which another number of
        ranks has saved theirs. Returns 0 if it did not, or if this rank has none of them in turn."""
        splits = set(self._restorer.splits)
        if not splits:
            return 0
        rank, world = self._job.rank, self._job.world
        found = state.rows(splits)
        parts = max((count for count, _ in found), default=0)
        if parts < 1 or found != {(parts, rank % parts)} or world % parts:
            return 0  # as many as ranks, then: what this rank has will not match
        self._restorer.deal_rows(parts)
        return parts

    def _check_role(self, state: discovery.State) -> None:
        """Raises:
        _NotOfThisRank: another part of the model than the one that this rank has would be taken.
        """
        whole, among_some = self.saved["role"]
        if self._was is None:
            if state.role() != whole:
                raise _NotOfThisRank(
                    "the snapshot has another part of the model than this rank: its DTensors were"
                    " placed otherwise"
                )
            return
        if not (names := set(self._restorer.parted)):
            return
        if not among_some or among_some.endswith("?") or state.role(names) != among_some:
            raise _NotOfThisRank(
                f"{self._taken} had another part of the model, or one of which it is not known where"
                f" it belongs: start {self.plan.saved_by} ranks to resume from it"
            )

    def _other_parts(self) -> frozenset[tuple[str, tuple[int, ...]]]:
        """Types and shapes of what the rank whose place is taken had of tensors of which this one
        has other rows."""
        return frozenset(
            (str(arrangement.DTYPES[dtype])[6:], tuple(shape))
            for dtype, shape in self._restorer.other_parts
            if dtype in arrangement.DTYPES
        )

    def _check_place(self, frame: FrameType, state: discovery.State) -> None:
        """Raises:
        _NoPlace: the place in the loop cannot be put back.
        """
        try:
            self._planned(frame, state).drop()
        except _continuation.OtherCode as error:
            raise _NoPlace(f"the script has changed: {error}") from error
        except Exception as error:
            why = str(error) or type(error).__name__
            raise _NoPlace(f"the place in the loop cannot be put back: {why}") from error

    def _restore_state_dicts(
        self,
        kind: str,
        objects: list[Any],
        saved: list[tuple[str, dict[str, Any]]],
        keys: list[str],
    ) -> None:
        """Objects that the script makes after its first step do not exist yet: they start anew."""
        if len(objects) != len(saved) and self._job.rank == 0:
            _voice.say(
                f"{kind}s: saved {len(saved)}, found {len(objects)}; the rest is not restored"
            )
        self._report_lost(small_state.restore_state_dicts(kind, objects, saved, keys))

    def _report_lost(self, lost: list[notes.Note]) -> None:
        if not lost:
            return
        self.lost += lost
        self._notes.add(notes.NOT_RESTORED, lost)
        if self._job.rank == 0 and not self._quiet:
            _voice.say(f"not restored: {notes.line(lost)}")

    def _all_match(self, problem: str, name: str, silent: bool, parts: int) -> bool:
        """Whether every rank can restore its snapshot: all ranks resume or none.

        Args:
            problem: why this one cannot, "" if it can.
            parts: from `_deal_rows`.
        """
        job = self._job
        gathered = self._gathered(problem, name, parts)
        problems = _problems_in(gathered)
        if not problems and len(gather.parsed(gathered.text)[_PARTS]) > 1:
            problems = {0: "the ranks have rows of the same tensors in different numbers of parts"}
        if not problems:
            return True
        first = min(problems)
        self.why_not = f"rank {first}: {problems[first]}"
        # A rank that gave up before this has reported it already.
        present = (rank for rank in range(job.world) if rank not in gathered.refusals)
        if self._quiet or silent:
            return False
        if job.rank == (next(present) if first in gathered.refusals else first):
            why = problems[first]
            end = "" if why.startswith(_NEWER) else ". Training starts from its beginning"
            _voice.say(f"rank {first}: step {self.plan.step} is not resumed, {why}{end}")
        return False

    def _dealt_unlike(self, planned: Any, name: str) -> str:
        """Why the rest of an epoch cannot be dealt to another number of ranks: these do not agree on
        it. "" if they do."""
        text = json.dumps([] if planned is None else planned.dealt)
        found = gather.gather(self._job, self._store, f"{name}/dealt", text, _same_or_none)
        if planned is None or found.refusals or found.text == text:
            return ""
        return "the ranks do not agree on what is left of the epoch: they had drawn other items"

    def _gathered(self, problem: str, name: str, *parts: int) -> gather.Gathered:
        problems = {self._job.rank: problem} if problem else {}
        answer = json.dumps({_PROBLEMS: problems, _PARTS: parts})
        return gather.gather(self._job, self._store, name, answer, _merge_answers)

    def _newer(self, live: own_checkpoints.Counts, taken: int) -> str:
        """Why what the script has loaded is kept, "" if it is not."""
        saved = self.saved
        there = own_checkpoints.arrived(saved["counts"], saved["room"])
        newer = own_checkpoints.newer(live, there, taken)
        if newer:
            return f"{_NEWER}: {newer}"
        return ""


def _merge_answers(texts: list[str]) -> str:
    answers = [gather.parsed(text) for text in texts]
    problems = {rank: why for one in answers for rank, why in one[_PROBLEMS].items()}
    parts = sorted({count for one in answers for count in one[_PARTS]})
    return json.dumps({_PROBLEMS: problems, _PARTS: parts})


def _same_or_none(texts: list[str]) -> str:
    return texts[0] if len(set(texts)) == 1 else "{}"


def _problems_in(gathered: gather.Gathered) -> dict[int, str]:
    """What ranks have answered to a round, and why others did not take part."""
    answers = gather.parsed(gathered.text) if gathered.text else {_PROBLEMS: {}}
    return {int(rank): text for rank, text in answers[_PROBLEMS].items()} | gathered.refusals


def _check_optimizers(
    wanted: list[tuple[str, str]], known: list[torch.optim.Optimizer]
) -> None:
    for k, ((text, _), optimizer) in enumerate(zip(wanted, known, strict=False)):
        if signature(optimizer) != text:
            raise restorer.Mismatch(
                f"optimizer {k} was another one, and is {type(optimizer).__name__} in the first"
                " iteration now"
            )


class _NoPlace(Exception):
    """The place in the loop cannot be put back."""


class _NotOfThisRank(Exception):
    """Another rank's snapshot has not all that a lost rank had."""


def _check_donor(
    state: discovery.State, taken: str, regions: list[arrangement.Row], saved: Saved
) -> None:
    """Whether another rank's snapshot may stand in for that of this rank.

    Args:
        state: of this rank, before anything is made for the restore.
        taken: whose snapshot it is, for messages.
        regions: of the snapshot.
        saved: its small state.

    Raises:
        _NotOfThisRank: it has what is a rank's own, or lacks what this one has.
    """
    there = {row[0] for row in regions} | {alias[0] for alias in saved["aliases"]}
    if own := saved["strided"].keys() - state.replaceable:
        name = min(own)
        why = "for itself alone, because it has gaps in memory"
        raise _NotOfThisRank(f"{taken} saved {name} {why}")
    for region in state.regions:
        if region.name not in there and not region.is_replaceable:
            raise _NotOfThisRank(f"{taken} has not saved {region.name}")


def _check_groups(saved: list[Any], state: discovery.State) -> None:
    before = [len(groups) for groups in saved]
    now = [len(optimizer.param_groups) for optimizer in state.optimizers]
    if before != now:
        raise restorer.Mismatch(f"optimizers had {before} parameter groups and have {now} now")
