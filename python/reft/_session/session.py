"""One rank in one attempt: start, first plan, program points, end.

The parts do the work, `Session` only sequences them: `startup` finds the agent and agrees on what
to resume from, `Boundary` finds the program points, `Planner` lays out the vault, `SmallState`
captures what is pickled, the engine (C++) copies, `Resumer` puts a restarted script back, and
`Announcer` reports.

Threads: everything here runs on the training thread. Errors: nothing raises into training; a
failure is reported once, and training continues without snapshots, unless REFT_STRICT=1.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from reft import _C, _continuation, _voice
from reft._continuation import module_tree
from reft._link import agreement, folders, hang_replies, host_memory, job_identity, vault_place
from reft._link.last_words import LastWords
from reft._link.mesh import Copies
from reft._link.trusted_store import TrustedStore
from reft._session import drill, notes, resumption, startup
from reft._session.announcer import Announcer
from reft._session.boundary import Boundary
from reft._session.memory_watch import MemoryWatch
from reft._session.planner import Planner
from reft._session.restore_ways import Begun, Way
from reft._session.resumer import Resumed, Resumer
from reft._session.script_watch import ScriptWatch
from reft._session.small_state import Captured, SmallState, registered_values
from reft._session.step_comparison import Capture, capture_with
from reft._session.verification import Verdict, VerifiedResume, circumstances
from reft._state import discovery, gradients, heap
from reft._state.constructions import of_process

_FOR_GOOD = (_C.Unavailable, _C.SystemError)  # errors of a snapshot that will not go away
_DRAIN_MS = 2000  # how long the end waits for the last snapshot


class RestoreFailed(RuntimeError):
    """A restore failed after all ranks had agreed on it: this rank must end and start again."""


class Session:
    """One rank under one default process group.

    Args:
        env: settings, as `settings.read()` gives them.
        agreed: identity of the rank, and what else all ranks have agreed on.
        store: keys that no other attempt sees.
        number: how many default process groups this process has made, this one included. A script
            may train one model after the other; a snapshot belongs to one of them.

    Attributes:
        step: number of program points so far, those before a restart included.
        enabled: whether snapshots are taken; measurements switch them off and on.
        engine: the snapshot engine, None before `start` and after `stop`.
        planner: what its vault has a table for, likewise.
    """

    def __init__(
        self, env: dict[str, Any], agreed: agreement.Agreed, store: TrustedStore, number: int
    ) -> None:
        self.env, self.job, self.number = env, agreed.job, number
        self._incarnation, self._overhead_percent = agreed.incarnation, agreed.overhead_percent
        self.step = 0
        self.enabled = True
        self.client: _C.AgentClient | None = None
        self.engine: _C.Rank | None = None
        self.planner: Planner | None = None
        self._store, self._exact = store, env["resume"] == "exact"
        self._snapshots = bool(env["snapshot"])  # off for good after an error that will not go away
        self._small_state = SmallState(
            number, self._exact, int(env["resume_frame_bytes"]), self.failed
        )
        self._memory: MemoryWatch | None = None
        self._copies: Copies | None = None
        self._begun, self._way = Begun(), Way.NEWEST
        self._boundary: Boundary | None = None
        self._announcer: Announcer | None = None
        self._resume: VerifiedResume | None = None
        self._circumstances = ""
        self._watch: ScriptWatch | None = None
        self._comparing: VerifiedResume | None = None  # until the first step after the resume
        self._at_end = ""  # what is known about the resume of this attempt
        self._evidence: _C.EvidenceExchange | None = None
        self._last_words: LastWords | None = None
        self._numbered = False  # whether a compiled step has had the optimizers numbered
        self._streams_known = False  # whether the engine has seen on which streams optimizers step
        self._crossing_graph: str | None = None
        self._drill = drill.of_session(env, self.job, number, self._capture_small_state())

    @property
    def resuming_at(self) -> int | None:
        """Step that the first program point restores, None if training starts anew."""
        return None if self._resume is None else self._resume.newest.plan.step

    @property
    def registered(self) -> dict[str, Any]:
        """Registered objects of the snapshot that is yet to be restored, by name."""
        return {} if self._resume is None else registered_values(self._resume.newest.saved)

    # -- start

    def start(self) -> None:
        """Connects, agrees on what to resume from, and hooks the optimizers."""
        hello = startup.hello(self.job, self._incarnation, self._store.secret)
        self.client = startup.connect(self.env, self.job, self._store, hello)
        found = notes.Notes(self.client)
        self._copies = Copies(self.env, self.job, self._store, self.client, self._snapshots)
        agreed = startup.agree(self.env, self.job, self._store, self.client, self.number)
        try:
            if agreed.newest is not None:
                if self.env["resume_verify"] != "off":  # reads the script's files
                    self._circumstances = circumstances()
                self._resume, self._small_state.verified = resumption.agree(
                    self.env,
                    self.job,
                    self._store,
                    self.client,
                    agreed,
                    self._circumstances,
                    self._capture_small_state(),
                    self._mark_recomputing,
                    found,
                )
                self._report_origin(agreed.newest.plan.step)
            self.engine = self._make_engine(agreed)
            elsewhere = startup.vault_elsewhere(self.env, self.job, agreed.own_fd)
            self._begun, self._way = agreed.begun, agreed.way
            self._begun.keep(self.engine)
        finally:
            if agreed.own_fd >= 0:
                os.close(agreed.own_fd)
        self._answer_hangs()
        self._announcer = Announcer(self.env, self.job, found, self._store)
        self._watch = ScriptWatch(self._announcer)
        if self._snapshots:
            self.planner = Planner(self.env, self.job, self._store, self.engine, self._copies)
            self._memory = MemoryWatch(
                self.env, self.job, self.engine, agreed.oom_kills, self._copies
            )
            in_memory = vault_place.in_memory(self.env["vault_dir"])
            if in_memory and not self.env["snapshot_host_bytes"]:
                self.engine.ask_room(host_memory.has_room)
            of_process.watch()
            gradients.of_process.watch()
            if self._exact:
                of_process.place_of = _continuation.place_of
                try:
                    _continuation.install(self.env["resume_verify"] != "off")
                except Exception as error:
                    self.failed("data loaders", error)
            self._boundary = Boundary(self, self._exact)
        after = 1 if self._resume is None else self._resume.newest.expected_at
        self._announcer.started(self.resuming_at, elsewhere, after)
        if self._drill is not None:
            self._drill.started(self._store.raw, self.resuming_at)
        _voice.debug(
            f"rank {self.job.rank} started session {self.number} of attempt {self.job.attempt},"
            f" incarnation {self._incarnation:016x}, resuming at {self.resuming_at}"
        )

    def _report_origin(self, step: int) -> None:
        """Nobody has said that this start continues an earlier one: it only has the same command."""
        if self.job.rank == 0 and self.job.origin is job_identity.Origin.COMMAND:
            _voice.say(
                f"continues job {self.job.id} at step {step}: an earlier start of the same command"
                " did not end cleanly. REFT_RESUME=off starts anew"
            )

    def _make_engine(self, agreed: startup.Agreed) -> _C.Rank:
        env, job = self.env, self.job
        path = ""
        if env["vault_dir"]:
            path = startup.vault_path(env, job, job.rank)
            folders.make_private(Path(path).parent)
        assert self.client is not None
        return _C.Rank(
            client=self.client,
            job=job.id,
            rank=job.rank,
            world=job.world,
            node=job.node,
            nodes=job.nodes,
            domain_of=job.layout.domain_of,
            attempt=job.attempt,
            incarnation=self._incarnation,
            overhead_percent=self._overhead_percent,
            store=self._store.raw,
            seal=self._store.seal,
            path=path,
            adopt_fd=agreed.own_fd,
            plan=None if agreed.newest is None else agreed.newest.plan,
        )

    def _mark_recomputing(self, step: int) -> None:
        """Keeps in the vault which step is computed again, 0 for none."""
        assert self.engine is not None
        self.engine.set_recomputing(step)

    def _capture_small_state(self) -> Capture:
        """What takes the small state of a step, apart from what snapshots use."""

        def boundary() -> Boundary:
            assert self._boundary is not None
            return self._boundary

        return capture_with(self.number, int(self.env["resume_frame_bytes"]), boundary)

    def _answer_hangs(self) -> None:
        """Lets the agent ask for stacks, and other nodes for this node's evidence."""
        job = self.job
        assert self.client is not None
        try:
            hang_replies.install(self.client, job.rank, self.env["hang_device_marks"])
            self._last_words = LastWords(self.client) if self.env["crash_verdict"] else None
        except Exception as error:
            self.failed("stack dumps", error)
        if job.nodes > 1 and job.local_rank < _C.evidence_carriers:
            try:
                self._evidence = _C.EvidenceExchange(
                    self.client,
                    self._store.raw,
                    self._store.seal,
                    job.node,
                    job.nodes,
                    self._incarnation,
                )
            except Exception as error:
                self.failed("evidence of hangs for other nodes", error)

    # -- every step: what `Boundary` calls

    def gate(self, optimizer: Optimizer | None = None) -> None:
        """Before an optimizer writes: the copy of the last snapshot must be finished."""
        if self._drill is not None and self._resume is None:
            self._drill.gate(self.step + 1)
        if self.engine is not None:
            if optimizer is not None and self._watch is not None:
                self._watch.about_to_step(optimizer, self.step)
            self.engine.gate()

    def program_point(self, frame: FrameType, gated: bool = True) -> None:
        """The last optimizer step of an iteration has returned.

        Args:
            frame: frame of the step.
            gated: whether `gate` is called before the state is written again.
        """
        if self._resume is not None:
            self._resume_at(self._resume, frame)
            return
        assert self.engine is not None and self._announcer is not None
        self.step += 1
        if self._comparing is not None:
            self._compare_next(self._comparing, frame)
        _C.log_step(0, self.step)
        due = self.engine.begin_point(self.step)
        try:
            self._observe(frame)
            if self._watch is not None and self._boundary is not None:
                self._watch.look_at_groups()
                self._watch.look_at_gradients(self.step, self.optimizers_now(), self._boundary)
            if self._memory is not None and self._snapshots:
                self._memory.point()
            if self._memory is not None and self._memory.given_up:
                if due:  # the other ranks wait for a vote
                    self.engine.pass_over(self.step, self._memory.given_up, False)
                if self.planner is not None:
                    self.planner.forget()
            elif due and self.enabled and self._snapshots:
                try:
                    self._snapshot(frame, gated)
                except _FOR_GOOD as error:
                    self.engine.pass_over(self.step, str(error), False)
                    raise
        finally:
            self.engine.end_point()
        gradients.of_process.resumed_at = 0
        gradients.of_process.stepped(self.optimizers_now())
        self._announcer.stepped(self.step, *self.engine.cadence)
        if self._drill is not None:
            self._record(self._drill, frame)

    def explicit_point(self, frame: FrameType) -> None:
        """See :func:`reft.step`."""
        self.gate()
        if self._boundary is not None:
            self._boundary.explicit_point(frame)
        else:
            self.program_point(frame, gated=False)

    def _observe(self, frame: FrameType) -> None:
        """At the first program point, before the first plan: plans ask where the program holds its
        objects."""
        if not self._exact:
            return
        try:
            _continuation.observe(frame)
            if self._watch is not None and self._boundary is not None:
                self._watch.look_for_reads(frame, self._boundary.optimizers)
        except Exception as error:
            self.failed("loop state", error)

    def optimizers_now(self) -> list[Optimizer]:
        """Those of the script, also ones that have not stepped yet."""
        known = [] if self._boundary is None else self._boundary.optimizers
        everything = [*known, *of_process.in_order([], Optimizer)]
        return list({id(o): o for o in everything}.values())

    def possible_point(self, frame: FrameType) -> None:
        """A restarted script would be put back at this step, should it be the first that ends an
        iteration."""
        if self._exact:
            _continuation.observe(frame, anew=True)

    def compiled_step(self, is_seen: bool) -> None:
        """Reports, once, that an optimizer steps inside a function given to torch.compile."""
        if self._announcer is not None:
            self._announcer.compiled_step(is_seen)
        ended = self._memory is not None and self._memory.given_up
        if not is_seen or self._numbered or ended or not self._snapshots:
            return
        # Those that were made before the process group have no number yet. Once: this is a walk of
        # the heap.
        self._numbered = True
        of_process.in_order(heap.live(Optimizer)[0], Optimizer)

    def failed(self, what: str, error: Exception) -> None:
        """A part of reft failed; training continues."""
        if self.env["strict"] or isinstance(error, RestoreFailed):
            raise error
        if isinstance(error, _FOR_GOOD) and what == "step":
            if self._memory is not None:
                self._memory.end(f"error in a snapshot: {error}")
            else:
                self._snapshots = False
        _voice.warn_once(
            f"{what} {type(error).__name__}", f"rank {self.job.rank}: error in {what}: {error}"
        )

    def awaited(self) -> Resumer | None:
        """What this process is yet to be put back to."""
        return None if self._resume is None else self._resume.awaited

    def optimizers_replaced(self) -> None:
        """Lets go of their state; the next snapshot is planned anew."""
        if self.planner is not None:
            self.planner.forget()

    def graph_crosses(self) -> bool:
        """Whether a captured graph was used since the last look at the frames."""
        return self._exact and _continuation.graphs.used() is not None

    def step_crossed(self, instead: int) -> None:
        """If all steps are crossed, the place in the loop is not saved while the graph is known."""
        self._crossing_graph = _continuation.graphs.used()
        if instead >= 0:
            _continuation.graphs.forget()

    def iteration_lengthened(self, crossed: Optimizer, closing: Optimizer) -> None:
        """Reports that steps of `crossed` no longer end iterations."""
        if self._announcer is not None:
            known = self._boundary.optimizers if self._boundary is not None else []
            self._announcer.iteration_lengthened(known, crossed, closing, self._crossing_graph)

    def _record(self, taking_part: drill.Drill, frame: FrameType) -> None:
        assert self.engine is not None and self.planner is not None and self._boundary is not None
        state = self.planner.state or discovery.discover(self._boundary.optimizers)
        uncaptured = self._small_state.uncaptured
        if taking_part.point(frame, self.step, state, self.engine.stats(), uncaptured):
            taking_part.end(lambda: self.stop(at_exit=True))

    # -- snapshot

    def _snapshot(self, frame: FrameType, gated: bool) -> None:
        engine, planner, boundary = self.engine, self.planner, self._boundary
        assert engine is not None and planner is not None and boundary is not None
        assert self._announcer is not None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            engine.leave_out(self.step)  # whatever asks the device would break the capture
            self._not_taken("left out")
            return
        if engine.vault_lost:
            raise _C.Unavailable(
                "the disk under REFT_VAULT_DIR has failed. Training continues without snapshots"
            )
        late = [planner.copy_early(index) for index in engine.take_late_written()]
        self._announcer.written_late([name for name in late if name])
        step, parted = engine.plan_round
        if step >= 0:
            planner.plan_together(boundary.optimizers, step, parted)
            planned = True
        else:
            planned = planner.refresh(boundary.optimizers)
        if planner.waiting:
            self._wait_for_plan()
            return
        state = planner.state
        assert state is not None
        if planned:
            self._planned(planner, boundary)
        waiting = gradients.of_process.waiting(self.optimizers_now())
        small = self._small_state.capture(frame, self.step, boundary, state, waiting)
        self._announcer.uncaptured(self.step, self._small_state.uncaptured)
        self._announcer.unprotected(self.step, self._small_state.unsaved)
        # At first nobody knows on which streams optimizers step, and without "exact" nobody has
        # looked for those of the script.
        unknown = not self._streams_known and not self._exact
        if unknown:
            state.wait_for_devices()
        result = self._capture(state, small, gated)
        if result == "no_table":  # a tensor has another layout, or shares memory with another one
            planner.plan(boundary.optimizers)
            if planner.waiting:
                self._wait_for_plan()
                return
            self._planned(planner, boundary)
            state = planner.state
            assert state is not None
            small = self._small_state.capture(frame, self.step, boundary, state, waiting)
            result = self._capture(state, small, gated)
        if unknown:
            state.wait_for_devices()
        self._announcer.under_way(self.step, result == "under_way", engine.stats()["note"])
        if result != "taken":
            self._not_taken(result)
            return
        self._streams_known = True
        self._announcer.protected(
            state, engine.stats(), len(small.pickled), *self._small_state.left_out
        )

    def _planned(self, planner: Planner, boundary: Boundary) -> None:
        assert planner.state is not None and self._announcer is not None
        self._small_state.planned(planner.state, boundary)
        self._announcer.planned()
        if self._copies is not None:
            self._copies.keep(self.engine.stats()["slot_bytes"] if self.engine else 0)
        self._announcer.unprotected(
            self.step, [(what, "", why) for what, why in planner.state.missed]
        )

    def _capture(self, state: discovery.State, small: Captured, gated: bool) -> str:
        assert self.engine is not None
        tensors = [region.current() for region in state.regions]
        return self.engine.capture(
            self.step, tensors, small.pickled, small.parts, small.writers, gated
        )

    def _wait_for_plan(self) -> None:
        """Leaves this step out; the vote asks all ranks to plan together."""
        assert self.engine is not None
        self.engine.pass_over(
            self.step, "state has changed, and all ranks plan anew at a step after this one", True
        )

    def _not_taken(self, result: str) -> None:
        assert self.engine is not None and self._announcer is not None
        note = self.engine.stats()["note"]
        if self.env["strict"]:
            raise _C.Unavailable(f"snapshot of step {self.step}: {result}: {note}")
        self._announcer.trouble(self.step, result, note)

    # -- resume

    def _resume_at(self, resume: VerifiedResume, frame: FrameType) -> None:
        assert self._boundary is not None
        assert self.engine is not None
        self._observe(frame)
        restoring = self._begun.again(resume.newest.plan.step, self._way)
        restoring.keep(self.engine)
        try:
            is_over, resumed = resume.point(frame, self._boundary)
        except Exception as error:
            restoring.failed().keep(self.engine)
            raise RestoreFailed(f"rank {self.job.rank}: restore failed: {error}") from error
        if not is_over:
            self._begun.keep(self.engine)
            return
        Begun().keep(self.engine)
        self._resume = None
        self._mark_recomputing(0)
        if resumed is not None:
            self._comparing = resume if resume.compares_next else None
            self._keep_verdict(resume)
            self._resumed(resumed)
            if self._drill is not None:
                lost = resume.newest.lost
                self._drill.resumed(frame, self.step, resumed.what, resumed.state, lost)

    def _compare_next(self, resume: VerifiedResume, frame: FrameType) -> None:
        assert self._boundary is not None
        self._comparing = None
        try:
            resume.compare_next(frame, self._boundary)
            self._keep_verdict(resume)
        except Exception as error:
            self.failed("verification of the resume", error)

    def _keep_verdict(self, resume: VerifiedResume) -> None:
        assert self.engine is not None
        self.engine.set_resume_verdict(resume.verdict.value)
        if resume.outcome:
            self._at_end = f"this run continued at step {resume.newest.plan.step}: {resume.outcome}"
        if resume.verdict is Verdict.IDENTICAL:
            self._small_state.verified = self._circumstances

    def _resumed(self, resumed: Resumed) -> None:
        assert self._boundary and self._announcer and self.engine and self.planner
        self.step = resumed.step
        _C.log_step(0, self.step)
        self._small_state.uncaptured = resumed.uncaptured
        self._small_state.first_shapes.update(resumed.reshaped)
        self.planner.keep_restored(self._boundary.optimizers, resumed.state)
        self.engine.set_restored(resumed.nanoseconds, *resumed.sources)
        self._announcer.resumed()
        gradients.of_process.resumed(resumed.waiting, self.step)
        gradients.of_process.stepped(self.optimizers_now())

    # -- end

    def stop(self, at_exit: bool) -> None:
        """Settles the last snapshot.

        Args:
            at_exit: the process ends; the agent learns whether it ends cleanly.
        """
        error_file = self._last_words.leave(at_exit) if self._last_words is not None else ""
        at_end = [self._at_end]
        if self._boundary is not None and self._snapshots and self._has_no_point():
            at_end.append(self._boundary.why_no_point())
        self._unhook()
        self._leave_resume()
        if self.engine is not None and self._snapshots:
            self.engine.drain(_DRAIN_MS)
        if at_exit and self.job.rank == 0 and self.env["banner"]:
            for line in filter(None, at_end):
                _voice.say(line)
        if at_exit and self.client is not None:
            self.client.bye_at_exit(error_file)
        self._leave_training()
        self.engine = self.planner = self._memory = self._evidence = self._copies = None
        self._boundary = self._announcer = self._watch = None
        if self.client is not None:
            self.client.close()  # else it would compete for the agent with the next session's
        self.client = None

    def _has_no_point(self) -> bool:
        """Whether no program point of this process was found, and none before it."""
        return not self.step and self.number == 1 and self._resume is None

    def release(self) -> None:
        """Takes no more snapshots, and drops all references to models and optimizers. The rank stays
        connected: its last snapshot counts until the process ends."""
        self._leave_resume()
        if self.engine is not None and self._snapshots:
            self.engine.drain(_DRAIN_MS)
            self.engine.gate()
        self._snapshots = False
        if self._boundary is not None:
            self._boundary.remove()
        if self.planner is not None:
            self.planner.forget()
        self._small_state.forget()
        module_tree.forget()
        self._leave_training()

    def _leave_training(self) -> None:
        """Another training of this process begins with nothing of this one."""
        gradients.of_process.forget()
        _continuation.leave()

    def _leave_resume(self) -> None:
        """The loop is over: a resume that is under way is not waited for."""
        resume = self._resume or self._comparing
        self._resume = self._comparing = None
        if resume is not None:
            try:
                resume.left(self._boundary is not None and self._boundary.sites.count > 0)
            except Exception as error:  # noqa: BLE001  # the store may be gone
                _voice.debug(f"rank {self.job.rank}: cannot leave the resume: {error}")

    def abandon(self) -> None:
        """Takes the hooks out and keeps everything else: for a forked child, which has none of the
        threads that a destructor would join."""
        self._unhook()

    def _unhook(self) -> None:
        if self._boundary is not None:
            self._boundary.remove()
        if self._drill is not None:
            self._drill.remove()
