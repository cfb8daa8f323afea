"""Captures the place of a training loop, and puts a restarted script back there.

Both calls are made at the same program point, inside the optimizer's step post-hook.

Threads: the training thread. Errors: `FrameMismatch`, always before the first write.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from reft._state.device_parts import DeviceParts

from . import collector, comparison, finalizers, frames, plain
from .births import FULL, Births
from .bytecode import Unsupported, analyse
from .capture_walk import CaptureWalk
from .dealing import Resized
from .frames import FrameMismatch
from .graphs import GraphWatch, refusal
from .kinds.loaders import Loader, reads_container
from .kinds.temporaries import Moved
from .nodes import Graph, Report, Stray
from .restore_walk import RestoreWalk, put_in
from .settings import Settings
from .statics import Statics, report_threads
from .waiting import Waiting

_VERSION = 27
_OBSERVE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did."""

    frames: int
    """User frames that were written."""
    problems: Report = field(default_factory=list)
    """(where, type, reason) of each value that could not be put back."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A restore that nothing speaks against."""

    _walk: RestoreWalk
    _births: Births
    _frames: int

    @property
    def dealt(self) -> list[int]:
        """As of `Resized`; empty if as many ranks go on."""
        return [] if self._walk.resized is None else self._walk.resized.dealt

    def drop(self) -> None:
        """Leaves everything as it is."""
        self._walk.end()

    def write(self) -> RestoreReport:
        """Does it, once."""
        held = finalizers.held()
        self._walk.apply()
        self._births.restored(self._walk.written())
        problems = self._walk.end()
        finalizers.take_off_discarded(held)
        return RestoreReport(frames=self._frames, problems=problems)


class Continuation:
    """The continuation of one process, and what it remembers of the first program point.

    Attributes:
        graphs: Watches the autograd graphs that a script carries over a program point.
    """

    def __init__(self) -> None:
        self.graphs = GraphWatch()
        self._births = Births()
        self._waiting = Waiting()
        self._settings = Settings()
        self._statics = Statics()
        self._finalizers = finalizers.Finalizers()

    def capture(
        self,
        start_frame: FrameType,
        limit_bytes: int,
        owned_tensors: Iterable[int] = (),
        owned_storages: frozenset[int] = frozenset(),
        parts: DeviceParts | None = None,
        owned_groups: frozenset[int] = frozenset(),
        elsewhere: str = "",
    ) -> dict[str, Any]:
        """Copies the state of the loop that calls the optimizer.

        Args:
            start_frame: The optimizer step's caller, or a frame that it called.
            limit_bytes: Most bytes of values to copy.
            owned_tensors: Ids of tensors that are saved elsewhere, and of the optimizers that own
                them.
            owned_storages: Addresses of their memory.
            parts: Takes contents that lie on a device and are copied later.
            owned_groups: Ids of the parameter groups of these optimizers.
            elsewhere: Why a restarted script cannot be put back at this step; "" if it can.

        Returns:
            A picklable dict: "frames" (bytes for `plan`), "uncaptured" (list of (where, type,
            reason)), "assumed" (the same, of what is taken for unchanged), "exact" (False if `plan`
            would refuse) and "refused" (why, if it is not for a position of a loop that is not
            known).

        Raises:
            FrameMismatch: The frames cannot be read at this point.
        """
        self.observe(start_frame)
        self._births.let_go()
        with collector.off:
            return self._captured(
                start_frame,
                limit_bytes,
                owned_tensors,
                owned_storages,
                parts,
                owned_groups,
                elsewhere,
            )

    def _captured(
        self,
        start_frame: FrameType,
        limit_bytes: int,
        owned_tensors: Iterable[int],
        owned_storages: frozenset[int],
        parts: DeviceParts | None,
        owned_groups: frozenset[int],
        elsewhere: str,
    ) -> dict[str, Any]:
        walk = CaptureWalk(
            limit_bytes,
            self._births,
            frames.capture_generator,
            owned_tensors,
            owned_storages,
            owned_groups,
            device_parts=parts,
        )
        try:
            path = frames.encode_path(walk, start_frame)
            outside = self._statics.capture(walk)
            alone = not report_threads(walk)
            walk.report_shared_buffers()
            self._finalizers.report(walk)
        except Unsupported as error:
            raise FrameMismatch(str(error)) from error
        if elsewhere:
            walk.lost("loop", "place in the loop", elsewhere)
        handled = sys.exc_info()[1]
        if handled is not None:
            why = "the exception being handled stays that of the restarted script"
            walk.lost("except block", type(handled).__name__, why)
        self.graphs.watch(walk.graphs)
        walk.refuse_second_models()
        refused = walk.refused or _others_run() or self._waiting.why_not()
        if refused is not None:
            walk.lost("loop", "place in the loop", refused)
        if (place := self.graphs.used()) is not None:
            refused = refusal(place)
            walk.lost(place, "torch.Tensor", refused)
        user = [frame for frame in path if frame["user"]]
        lost = any(
            frame["refused"] or any(map(walk.lost_position, frame["stack"])) for frame in user
        )
        python, changed = sys.version_info[:2], self._settings.capture(walk.lost, alone)
        return {
            "frames": pickle.dumps(
                (
                    *(_VERSION, python, path, outside, changed, walk.graph.packed()),
                    self._births.first_packed(),
                ),
                protocol=5,
            ),
            "uncaptured": walk.uncaptured,
            "assumed": walk.assumed,
            "exact": not lost and refused is None,
            "refused": refused,
        }

    def observe(self, start_frame: FrameType, anew: bool = False) -> None:
        """Notes where objects stand at the process's first program point, unless that is done.

        Later captures name objects by these places, so that a loop variable that means another
        object by then still finds it. The first `capture` and `plan` do this on their own; call
        it when the first step is not captured. Copies nothing.

        Args:
            anew: Forget an earlier point: it turned out not to be the one at which a restarted
                process is restored.
        """
        if anew or not self._births.recorded:
            births = Births()
            births.resizes = frames.script_mentions("resize", start_frame)
            self._note_births(start_frame, births)

    def watch_swaps(self) -> None:
        """Lets `torch.utils.swap_tensors` swap tensors that are known by their places: it refuses
        those that have weak references. Once."""
        torch: Any = sys.modules["torch"]
        original = torch.utils.swap_tensors
        if hasattr(original, "_reft_original"):
            return

        @functools.wraps(original)
        def swap_tensors(t1: Any, t2: Any) -> None:
            again = self._births.without_references([t1, t2])
            try:
                original(t1, t2)
            finally:
                again()

        swap_tensors._reft_original = original  # type: ignore[attr-defined]
        torch.utils.swap_tensors = swap_tensors

    def note_variables(self, start_frame: FrameType) -> set[str]:
        """Notes which variables have a value at another step at which a restarted script may be put
        back, and returns their places."""
        found = frames.variables_at(start_frame)
        self._births.variables |= found
        return found

    def know_variables(self, places: Iterable[str]) -> None:
        """Notes what `note_variables` returned in the process before."""
        self._births.variables.update(places)

    def leave(self) -> None:
        """A training has ended: another one of this process has a first program point of its own."""
        self._births.recorded = False
        self._statics.forget()

    def place_of(self, value: Any) -> str | None:
        """Where an object stood at the first program point; None if it did not, or stood nowhere
        that a restarted script would find again."""
        return self._births.place(value)

    def plan(
        self,
        start_frame: FrameType,
        captured: dict[str, Any],
        foreign: bool = False,
        owned_storages: frozenset[int] = frozenset(),
        room: bytes = b"",
        was: tuple[int, int] | None = None,
        parts: frozenset[tuple[str, tuple[int, ...]]] = frozenset(),
    ) -> Planned:
        """Plans the writes that put a captured loop into the live frames, and does none of them:
        ranks can agree before `Planned.write`.

        Args:
            start_frame: As for `capture`, in the restarted process. Objects are known by the places
                that they had at its first program point.
            captured: What `capture` returned.
            foreign: It was captured by another rank, whose place in the loop this one takes;
                variables and attributes called `rank` or `…_rank` keep their live values.
            owned_storages: As for `capture`, of this process.
            room: What has come into the room of `capture`'s parts.
            was: If another number of ranks goes on: how many ranks captured it, and which one of
                them this is from. `foreign` is true then.
            parts: `Resized.parts`.

        Raises:
            FrameMismatch: The live frames are not the captured ones.
        """
        path, outside, changed, packed, packed_first = _unpacked(captured)
        self.observe(start_frame)
        births, first = self._births, Births.first_unpacked(packed_first)
        moved = Moved(first, births.first)
        if moved:
            path, outside, packed = moved(path), moved(outside), moved(packed)
        graph = Graph.unpacked(packed)
        put_in(graph, room)
        resized = None if was is None else Resized(*was, first, parts)
        walk = RestoreWalk(
            graph,
            births.by_place(),
            frames.plan_generator,
            foreign,
            owned_storages,
            resized,
            moved,
        )
        births.let_go()
        walk.problems += [(place, "temporary path", why) for place, why in moved.gone]
        if resized is not None and FULL in resized.first:
            why = "too many to tell which of them follow from the number of ranks"
            walk.problems.append(("numbers and strings", "", why))
        user = self._plan_frames(walk, start_frame, path, outside)
        walk.write(lambda: walk.problems.extend(self._settings.restore(changed, foreign)))
        return Planned(walk, births, user)

    def why_not_here(self, start_frame: FrameType, captured: dict[str, Any]) -> str:
        """Why a captured loop is not the one that the live frames are in, "" if it is.

        Writes nothing. A value that `plan` cannot do without may still be missing.

        Args:
            start_frame: As for `capture`.
            captured: What `capture` returned.
        """
        try:
            path, *_ = _unpacked(captured)
            if not captured["exact"]:
                return "the position of a loop is not known"
            frames.compare_paths(path, frames.frames_from(start_frame))
        except FrameMismatch as error:
            return str(error)
        return ""

    def compare(
        self,
        start_frame: FrameType,
        saved: tuple[dict[str, Any], bytes],
        live: tuple[dict[str, Any], bytes],
    ) -> list[comparison.Difference]:
        """Compares two captures of one program point.

        Args:
            start_frame: As for `capture`; its frames name the variables.
            saved: What `capture` returned in the process that died, and its room.
            live: What it returned now, likewise.
        """
        slots = [
            list(analyse(frame.f_code).slot_names)
            for frame, _, _ in frames.frames_from(start_frame)
        ]
        return comparison.frames(
            (saved[0]["frames"], saved[1]),
            (live[0]["frames"], live[1]),
            lambda position: slots[position] if position < len(slots) else [],
        )

    def _note_births(self, start_frame: FrameType, births: Births) -> None:
        self._births = births
        self._waiting = Waiting()
        births.recorded = True
        self._settings.note_first()
        self._finalizers.note_first()
        walk = CaptureWalk(_OBSERVE_BYTES, births, frames.capture_generator, note_births=True)
        try:
            frames.encode_path(walk, start_frame)
            self._statics.capture(walk)
        except Unsupported:
            return
        self.graphs.watch(walk.graphs)

    def _plan_frames(
        self, walk: RestoreWalk, start_frame: FrameType, path: list[dict[str, Any]], outside: Any
    ) -> int:
        """Plans all writes; returns the number of user frames."""
        live = frames.frames_from(start_frame)
        frames.compare_paths(path, live)
        user = 0
        try:
            # First: the list that is a loader's dataset has no name but this.
            walk.resolve_born(Loader, reads_container)
            for record, (frame, _, _) in zip(path, live, strict=True):
                if record["user"]:
                    frames.plan_frame(walk, record, frame, record["name"])
                    user += 1
                else:
                    frames.plan_results(walk, record, frame)
            self._statics.plan(walk, outside)
        except FrameMismatch:
            raise
        except Stray as error:
            raise FrameMismatch(str(error)) from error
        except Exception as error:
            raise FrameMismatch(f"planning the restore: {type(error).__name__}: {error}") from error
        return user


def _unpacked(captured: dict[str, Any]) -> list[Any]:
    """Reads what `capture` returned: frames, state outside of them, settings, the graph, and what
    was there at first.

    Raises:
        FrameMismatch: This process cannot be put there, whatever its frames are.
    """
    if captured["refused"] is not None:
        raise FrameMismatch(captured["refused"])
    version, python, *rest = plain.loads(captured["frames"])
    here = sys.version_info[:2]
    if version != _VERSION or tuple(python) != here:
        raise FrameMismatch(
            f"captured by format {version}, Python {python}; this is {_VERSION}, {here}"
        )
    return [*rest]


def _others_run() -> str | None:
    """Says why the place is not known if more than one asyncio task runs.

    What the others have done is not captured.
    """
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return None
    if len(asyncio.all_tasks()) < 2:
        return None
    return "other asyncio tasks run beside the training loop"
