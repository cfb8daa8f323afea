"""Puts the parts of one rank together: agent, vault, engine, boundary, restore.

Threads: everything here runs on the training thread. Errors: nothing raises into training; a
failure is said once, counted, and training goes on without snapshots, unless REFT_STRICT=1.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import pickle
import shutil
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from reft import _C, __version__, _continuation, _voice
from reft._link import agent_protocol, job_identity
from reft._resume import own_checkpoints, restorer
from reft._session import notes, startup
from reft._session.boundary import Boundary
from reft._state import discovery, registry, replica_groups

_session: Session | None = None
_sessions_made = 0
_registered = False
_LATE_LINES = 5  # about values that turn up after the first snapshot


class RestoreFailed(RuntimeError):
    """A snapshot could not be put back after all ranks had agreed on it: this rank must end, and be started again."""


class Session:
    """One rank under one default process group.

    Attributes:
        number: how many default process groups this process has made, this one included: a script
            may train one model after the other, and a snapshot belongs to one of them.
    """

    def __init__(self, env: dict[str, Any], job: job_identity.Job, store: Any, number: int) -> None:
        self.env, self.job, self.store, self.number = env, job, store, number
        self.step = 0
        self.state: discovery.State | None = None
        self.point: restorer.RestorePoint | None = None
        self.saved: dict[str, Any] | None = None
        self.sources: restorer.Sources | None = None
        self.early: set[str] = set()
        self._fingerprint: tuple[int, ...] = ()
        self._restored: tuple[tuple[int, ...], discovery.State] | None = None
        self._gates_seen = False  # the engine has been told on which streams optimizers step
        self._group_list: list[tuple[str, tuple[int, ...]]] = []
        self._said_first = False
        self._crossing_graph: str | None = None
        self._notes: notes.Notes | None = None
        self._uncaptured: list[notes.Note] = []
        self._said_late = 0
        self._said_every, self._said_cost = int(env["snapshot_every"]), False
        self._owned: set[int] = set()
        self._owned_storages: frozenset[int] = frozenset()
        self._signatures: list[str] = []
        self._state_keys: list[list[tuple[str, ...]]] = []
        self._with_plain: set[int] = set()
        self._disabled = not env["snapshot"]
        self.enabled = True
        self.client: Any = None
        self.engine: Any = None
        self._evidence: Any = None
        self.boundary: Boundary | None = None

    # -- start
    # ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connects, agrees on what to resume from, and hooks the optimizers."""
        job, env = self.job, self.env
        run_dir = Path(env["run_dir"]) if env["run_dir"] else job_identity.default_run_dir()
        attempt_salt = int.from_bytes(os.urandom(8), "little") >> 1
        if job.rank == 0:
            # The limit too: ranks that did not know that there is one would not take part in how
            # often snapshots are taken.
            self.store.set("incarnation", f"{attempt_salt or 1} {env['snapshot_overhead_percent']}")
        hello = {
            "role": "rank",
            "protocol": agent_protocol.VERSION,
            "version": __version__,
            "job": job.id,
            "node": job.node,
            "rank": job.rank,
            "local_rank": job.local_rank,
            "world": job.world,
            "local_world": job.local_world,
            "pid": os.getpid(),
            "attempt": job.attempt,
            "restarts_left": job.restarts_left,
        }
        incarnation, overhead_percent = map(int, bytes(self.store.get("incarnation")).split())
        hello["incarnation"] = f"{incarnation:016x}"
        self.client = startup.connect(env, job, self.store, run_dir, json.dumps(hello))
        self._notes = notes.Notes(self.client)
        agreed = startup.agree(env, job, self.store, self.client, self.number)
        self.point, self.sources, self.saved, own_fd = agreed.point, agreed.sources, agreed.saved, agreed.own_fd
        try:
            path = ""
            if env["vault_dir"]:
                path = startup.vault_path(env, job, job.rank)
                Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.engine = _C.SnapshotEngine(
                client=self.client,
                job=job.id,
                rank=job.rank,
                world=job.world,
                slots=env["snapshot_slots"],
                op_log_records=env["op_log_records"],
                path=path,
                adopt_fd=own_fd,
                incarnation=incarnation,
                attempt=job.attempt,
                store=self.store,
                nodes=job.nodes,
                threads=env["snapshot_threads"],
                verify_full=env["snapshot_verify"] == "full",
                slot_wait_sec=env["snapshot_wait_sec"],
                alarm_sec=0.0 if self._disabled else env["snapshot_alarm_sec"],
                chunk_bytes=env["snapshot_chunk_bytes"],
                policy=env["snapshot_policy"],
                every=env["snapshot_every"],
                overhead_percent=overhead_percent,
                control_every=env["snapshot_control_every"],
            )
        finally:
            if own_fd >= 0:
                os.close(own_fd)
        if self.point is not None and own_fd >= 0:
            self.engine.adopt(self.point.slot_of_rank[job.rank], self.point.step, self.point.incarnation)
        self._install_hang(incarnation)
        if not self._disabled:
            discovery.install()
            self._install_continuation()
            self.boundary = Boundary(
                self.gate,
                self.program_point,
                self.failed,
                self._expected_closing,
                self._replaced,
                self._unsettled,
                self._crossing,
                self._crossed,
                self._rarer,
            )
        if job.rank == 0 and env["banner"]:
            self._banner()

    def _install_hang(self, incarnation: int) -> None:
        job = self.job
        try:
            from reft._link import hang_replies

            hang_replies.install(self.client, job.rank)
        except Exception as error:
            self.failed("stack dumps", error)
        if job.nodes > 1 and job.local_rank < _C.evidence_carriers:
            try:
                self._evidence = _C.EvidenceExchange(self.client, self.store, job.node, job.nodes, incarnation)
            except Exception as error:
                self.failed("evidence of hangs for other nodes", error)

    def _install_continuation(self) -> None:
        if self.env["resume"] == "exact":
            try:
                _continuation.install()
            except Exception as error:
                self.failed("data loaders", error)

    def _replaced(self) -> None:
        """An optimizer may be gone: nothing of it is held, and the next snapshot is planned anew."""
        self.state = self._restored = None

    def _unsettled(self, frame: FrameType) -> None:
        """This step may turn out to be the first of those that end iterations: a restarted script is put back at that one."""
        if self.env["resume"] == "exact":
            _continuation.observe(frame, anew=True)

    def _crossing(self) -> bool:
        return self.env["resume"] == "exact" and _continuation.graphs.used() is not None

    def _crossed(self, instead: int) -> None:
        """A graph crosses the steps at which snapshots were taken. If no others can be, the place in the loop is not saved."""
        self._crossing_graph = _continuation.graphs.used()
        if instead >= 0:
            _continuation.graphs.forget()

    def _rarer(self, crossed: torch.optim.Optimizer, closing: torch.optim.Optimizer) -> None:
        if self.job.rank == 0:
            known = self.boundary.optimizers if self.boundary is not None else []
            one, other = (f"optimizer {known.index(o)} ({type(o).__name__})" for o in (crossed, closing))
            graph = self._crossing_graph
            why = (
                f"{graph} is computed before that step and differentiated after it"
                if graph
                else "gradients are from before it"
            )
            _voice.say(f"from now on a step of reft ends when {other} steps, not at each step of {one}: {why}")

    def _expected_closing(self) -> int | None:
        return None if self.saved is None else self.saved["closing"]

    def _banner(self) -> None:
        job, env = self.job, self.env
        ranks = "1 rank" if job.world == 1 else f"{job.world} ranks"
        where = f"files in {env['vault_dir']}" if env["vault_dir"] else "host memory held by reft-agent"
        if self._disabled:
            _voice.say(f"job {job.id}: {ranks}; snapshots are switched off (REFT_SNAPSHOT=0), collectives are logged")
            return
        every = "every step" if env["snapshot_every"] == 1 else f"every {env['snapshot_every']} steps"
        if env["snapshot_overhead_percent"]:
            every += f", rarer when that costs more than {env['snapshot_overhead_percent']} %,"
        _voice.say(
            f"job {job.id}: {ranks}, snapshot {every} into {where}; protection {env['snapshot_protection']}"
            f" (survives {'killed processes' if env['snapshot_protection'] == 'none' else 'killed processes and one lost node'})"
        )
        if self.point is not None:
            _voice.say(f"resuming at step {self.point.step} when the first optimizer step returns")
        else:
            _voice.say(
                "what is protected is said after the first step, what it costs when it was measured; `reft top` shows it live"
            )

    # -- every step
    # ----------------------------------------------------------------------------------------------------

    def gate(self) -> None:
        """Before an optimizer writes: the copy of the last snapshot must be finished."""
        if self.engine is not None:
            self.engine.gate()

    def program_point(self, frame: FrameType, gated: bool = True) -> None:
        """The last optimizer step of an iteration has returned.

        Args:
            gated: `gate` is called before the state is written again.
        """
        if self.point is not None:
            try:
                self._restore(frame)
            except Exception as error:
                raise RestoreFailed(f"rank {self.job.rank}: putting the snapshot back failed: {error}") from error
            return
        self.step += 1
        _C.log_step(0, self.step)
        due = self.engine.begin_point(self.step)
        try:
            if due and self.enabled and not self._disabled:
                self._snapshot(frame, gated)
            elif self.step == 1 and self.env["resume"] == "exact":
                _continuation.observe(frame)
        finally:
            self.engine.end_point()
        if self.job.rank == 0:
            self._say_cost()

    def _snapshot(self, frame: FrameType, gated: bool) -> None:
        assert self.boundary is not None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.engine.leave_out(self.step)  # whatever asks the device would break the capture
            self._trouble("left out")
            return
        for index in self.engine.take_late_written():
            if self.state is not None and index < len(self.state.regions):
                name = self.state.regions[index].name
                self.early.add(name)
                self._fingerprint = ()
                _voice.warn_once(
                    f"late {name}",
                    f"{name} is written between optimizer steps; that snapshot was dropped, from now on it is copied before the"
                    " step returns",
                )
        fingerprint = discovery.fingerprint(self.boundary.optimizers)
        if fingerprint != self._fingerprint or self.state is None:
            self._plan()
            self._fingerprint = fingerprint
        assert self.state is not None
        tensors = [region.current() for region in self.state.regions]
        objects, parts, writers = self._objects(frame)
        # Nobody knows yet on which streams optimizers step, and nobody has looked for those of the
        # script.
        unknown = not self._gates_seen and self.env["resume"] != "exact"
        if unknown:
            _wait_for_devices(self.state)
        result = self.engine.capture(self.step, tensors, objects, parts, writers, gated)
        if result == "no_table":  # a tensor changed its size in place
            self._plan()
            tensors = [region.current() for region in self.state.regions]
            result = self.engine.capture(self.step, tensors, objects, parts, writers, gated)
        if unknown:
            _wait_for_devices(self.state)
        self._gates_seen = self._gates_seen or result == "taken"
        if result != "taken":
            self._trouble(result)
        elif not self._said_first:
            self._said_first = True
            self._say_first(len(objects))

    def _plan(self) -> None:
        """Finds the state anew and lays out the vault. Slow; at the first step and when tensors were replaced."""
        assert self.boundary is not None
        self.engine.gate()
        before = None if self.state is None else [(r.name, tuple(r.tensor.shape)) for r in self.state.regions]
        if self.state is not None:
            self.state.schedulers = self.state.scalers = []  # one that was replaced is alive only for us
        # What a resume found one step ago is still there, unless the optimizers hold other tensors
        # now.
        restored, self._restored = self._restored, None
        if restored is not None and restored[0] == discovery.fingerprint(self.boundary.optimizers):
            state = restored[1]
        else:
            state = discovery.discover(self.boundary.optimizers)
        for region in state.regions:
            region.early = region.early or region.name in self.early
        same = before == [(r.name, tuple(r.tensor.shape)) for r in state.regions]
        if same and self.state is not None:
            # Only the flags or identities moved: what was confirmed stays confirmed, and no other
            # rank has to take part.
            for old, new in zip(self.state.regions, state.regions, strict=True):
                new.ranks = old.ranks
            groups = self._group_list
        else:
            groups, different = replica_groups.confirm(state.regions, self.store, self.job.rank)
            if different and self.job.rank == 0:
                _voice.warn_once(
                    "different",
                    f"{len(different)} tensors differ between ranks that should hold replicas (first: {different[0]});"
                    " each rank saves its own",
                )
        self._group_list = groups
        index_of = {ranks: i for i, (_, ranks) in enumerate(groups)}
        rows = [(r.name, r.current(), index_of.get(r.ranks, -1), r.early) for r in state.regions]
        self._check_memory(state, groups)
        copies = 1 if self.env["snapshot_protection"] == "arc" else 0
        self.engine.set_table(
            rows,
            [(gid, list(ranks)) for gid, ranks in groups],
            self.job.rank,
            self.job.world,
            self.env["snapshot_protection"],
            copies,
        )
        self.state = state
        # Derived once, because every step needs them.
        self._signatures = [discovery.signature(o) for o in self.boundary.optimizers]
        self._state_keys = [discovery.state_keys(o) for o in state.optimizers]
        self._owned, self._owned_storages = _owned_by(state)
        self._with_plain = {
            index for index, o in enumerate(state.optimizers) if any(entries for entries in _plain_state(o))
        }

    def _check_memory(self, state: discovery.State, groups: list[tuple[str, tuple[int, ...]]]) -> None:
        """Refuses a plan that would not fit the node."""
        per_rank = 0.0
        for region in state.regions:
            shares = len(region.ranks) or 1
            copies = min(shares, 2 if self.env["snapshot_protection"] == "arc" else 1)
            per_rank += region.tensor.nbytes * copies / shares
        have = self.engine.stats()["slot_bytes"]
        need = max(0, per_rank * self.env["snapshot_slots"] - have) * self.job.local_world
        limit = self.env["snapshot_host_bytes"] or 0.9 * _available_bytes(self.env["vault_dir"])
        if need > limit:
            raise _C.Unavailable(
                f"snapshots need {_voice.size(need)} of host memory on this node ({_voice.size(per_rank)} per rank,"
                f" {self.env['snapshot_slots']} slots, {self.job.local_world} ranks) and {_voice.size(limit)} may be taken;"
                " training goes on without snapshots. More data-parallel ranks make the shares smaller, REFT_VAULT_DIR puts the"
                " vaults on a disk, REFT_SNAPSHOT_HOST_BYTES says how much may be taken"
            )

    def _objects(self, frame: FrameType) -> tuple[bytes, list[tuple[torch.Tensor, int]], list[tuple[int, int]]]:
        """Small state of this rank at the program point; only this rank ever reads it again.

        Returns:
            The pickle; the tensors whose contents the engine puts into it, with their place; the
            streams that may write them, or the regions.
        """
        assert self.state is not None and self.boundary is not None
        state = self.state
        parts = _continuation.DeviceParts({r.tensor.get_device() for r in state.regions if r.tensor.is_cuda})
        saved: dict[str, Any] = {
            "step": self.step,
            "session": self.number,
            "closing": self.boundary.closing_position,
            "optimizers": self._signatures,
            "state_keys": self._state_keys,
            "counts": own_checkpoints.counts(state.optimizers, state.schedulers, parts),
            "groups": [
                [{k: v for k, v in g.items() if k != "params" and _plain(v)} for g in o.param_groups]
                for o in state.optimizers
            ],
            "plain_state": [
                _plain_state(o) if index in self._with_plain else [] for index, o in enumerate(state.optimizers)
            ],
            "schedulers": [(type(s).__name__, _own_state_dict(s)) for s in state.schedulers],
            "scalers": [(type(s).__name__, s.state_dict()) for s in state.scalers],
            "strided": {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.strided.items()},
            "registered": {
                name: obj.state_dict()
                for name, obj in registry.objects.items()
                if hasattr(obj, "state_dict") and not isinstance(obj, torch.nn.Module)
            },
        }
        saved["rng"] = _continuation.capture_rng()
        if self.env["resume"] == "exact":
            try:
                limit = int(self.env["resume_frame_bytes"])
                captured = _continuation.capture(frame, limit, self._owned, self._owned_storages, parts)
                saved["frames"] = captured
                if captured["uncaptured"] != self._uncaptured:
                    self._uncaptured = captured["uncaptured"]
                    self._note_uncaptured()
            except Exception as error:
                self.failed("loop state", error)
        saved["room"] = parts.room()
        try:
            pickled = pickle.dumps(saved, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            self.failed("small state", error)
            saved.pop("frames", None)
            pickled = pickle.dumps(saved, protocol=pickle.HIGHEST_PROTOCOL)
        return pickled, parts.placed(pickled), parts.writers()

    # -- resume
    # --------------------------------------------------------------------------------------------------------

    def _restore(self, frame: FrameType) -> None:
        assert (
            self.point is not None and self.saved is not None and self.boundary is not None and self.sources is not None
        )
        assert self._notes is not None
        point, saved, job = self.point, self.saved, self.job
        began = time.monotonic_ns()
        known = self.boundary.optimizers
        self.boundary.know(discovery.not_yet_stepped(known, saved["optimizers"][len(known) :]))
        state = discovery.discover(self.boundary.optimizers)
        missing = restorer.MissingState(saved["state_keys"])
        if missing.make(self.sources, point, state, job.rank, saved["strided"]):
            state = discovery.discover(self.boundary.optimizers)
        if not self._all_match(state):
            missing.unmake()
            self.point, self.saved, self.sources = None, None, None
            return
        # From here on a failure ends this rank: others have resumed, and a rank that has not would
        # train something else.
        _wait_for_devices(state)  # streams of other optimizers may still write
        written = restorer.restore_regions(self.sources, point, state, job.rank, job.local_world)
        _C.fault_point("restore_copy", point.step)
        for optimizer, groups, plain in zip(state.optimizers, saved["groups"], saved["plain_state"], strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
            _put_plain_state(optimizer, plain)
        with torch.no_grad():
            for name, tensor in state.strided.items():
                if name in saved["strided"]:
                    tensor.copy_(saved["strided"][name])
        self._put_state_dicts("scheduler", state.schedulers, saved["schedulers"])
        self._put_state_dicts("gradient scaler", state.scalers, saved["scalers"])
        for name, values in saved["registered"].items():
            if name in registry.objects:
                registry.objects[name].load_state_dict(values)
        said = "state"
        if self.env["resume"] == "exact" and "frames" in saved:
            try:
                self._uncaptured = saved["frames"]["uncaptured"]  # said before the restart
                self._notes.add(notes.WILL_NOT_COME_BACK, self._uncaptured)
                storages = _owned_by(state)[1]
                done = _continuation.restore(frame, saved["frames"], job.rank in point.donor, storages, saved["room"])
                said = "state and place in the loop"
                there = {where for where, _, _ in done.problems}
                lost = [note for note in self._uncaptured if note[0] not in there]
                if problems := [*done.problems, *lost]:
                    said += f" but for {len(problems)} value{'s' if len(problems) > 1 else ''}"
                    self._lose(problems)
            except Exception as error:
                _voice.say(
                    f"rank {job.rank}: the place in the loop is not put back ({error}); tensors, optimizer, schedulers and random"
                    " state are. Loop counters start again"
                )
        gc.collect()  # what the discarded iteration leaves runs its `finally` now, and not in the middle of training
        _wait_for_devices(state)  # and other streams may read before this one has written
        _continuation.restore_rng(saved["rng"])
        self.step = int(saved["step"])
        self.point, self.saved, self.sources = None, None, None
        self._restored = discovery.fingerprint(self.boundary.optimizers), state
        self._said_first = True
        spent = time.monotonic_ns() - began
        self.engine.set_restore_ns(spent)
        _C.fault_point("restore_done", point.step)
        if job.rank == 0:
            exact = (
                f"; ranks {sorted(point.donor)} lost their vaults and took small state from others"
                if point.donor
                else ""
            )
            _voice.say(
                f"resumed at step {point.step}: {said}, {_voice.size(written)} per rank in {spent / 1e6:.0f} ms{exact}"
            )

    def _check_optimizers(self, state: discovery.State) -> None:
        assert self.saved is not None
        there = [len(groups) for groups in self.saved["groups"]]
        here = [len(o.param_groups) for o in state.optimizers]
        if there != here:
            raise restorer.Mismatch(f"optimizers had {there} parameter groups and have {here} now")

    def _put_state_dicts(self, kind: str, objects: list[Any], saved: list[tuple[str, dict[str, Any]]]) -> None:
        """Objects made later in the script than its first step do not exist yet: said, because they start anew."""
        if len(objects) != len(saved) and self.job.rank == 0:
            _voice.say(f"{len(saved)} {kind}(s) were saved and {len(objects)} exist now: the others are not put back")
        for obj, (name, values) in zip(objects, saved, strict=False):
            if type(obj).__name__ != name:
                self._lose(
                    [(f"{kind} {name}", "", f"it was made after the first step, where there is a {type(obj).__name__}")]
                )
                continue
            try:
                obj.load_state_dict(values)
            except Exception as error:
                self._lose([(f"{kind} {type(obj).__name__}", "", f"{type(error).__name__}: {error}")])

    def _lose(self, found: list[notes.Note]) -> None:
        """Tells what a resume did not put back."""
        assert self._notes is not None
        self._notes.add(notes.NOT_PUT_BACK, found)
        if self.job.rank == 0:
            _voice.say(f"not put back: {notes.line(found)}")

    def _all_match(self, state: discovery.State) -> bool:
        """Whether every rank can put its snapshot back: all ranks resume or none."""
        assert self.point is not None and self.sources is not None
        job, point = self.job, self.point
        problem = ""
        try:
            restorer.check(self.sources, point, state, job.rank)
            self._check_optimizers(state)
        except Exception as error:
            problem = f"what the script builds has changed: {str(error) or type(error).__name__}. Training starts from its beginning"
        if not problem and self.saved is not None:
            live = own_checkpoints.counts(state.optimizers, state.schedulers)
            newer = own_checkpoints.newer(
                own_checkpoints.arrived(live, b""), own_checkpoints.arrived(self.saved["counts"], self.saved["room"])
            )
            problem = f"the script has loaded a newer checkpoint of its own, which is kept: {newer}" if newer else ""
        self.store.set(f"match/{job.rank}", problem)
        problems = [(r, bytes(self.store.get(f"match/{r}")).decode()) for r in range(job.world)]
        found = [(r, text) for r, text in problems if text]
        # A rank that gave up before this says nothing here.
        present = [r for r, text in problems if not text.startswith("!")]
        if found and job.rank == (found[0][0] if found[0][0] in present else present[0]):
            why = found[0][1].removeprefix("!")
            _voice.say(f"rank {found[0][0]}: step {point.step} is not resumed, {why}")
        return not found

    # -- telling
    # -------------------------------------------------------------------------------------------------------

    def _note_uncaptured(self) -> None:
        """What is new among the values that a resume would not put back: told, and said unless the first snapshot's line says it."""
        assert self._notes is not None
        new = self._notes.add(notes.WILL_NOT_COME_BACK, self._uncaptured)
        if new and self._said_first and self.job.rank == 0 and self._said_late < _LATE_LINES:
            self._said_late += 1
            _voice.say(f"from step {self.step} on a resume will not put back {notes.line(new)}")

    def _say_first(self, object_bytes: int) -> None:
        assert self.state is not None and self._notes is not None
        self._notes.add(notes.NOT_PROTECTED, [(what, "", why) for what, why in self.state.missed])
        if self.job.rank != 0 or not self.env["banner"]:
            return
        state, stats = self.state, self.engine.stats()
        shared = sum(1 for r in state.regions if r.ranks)
        parts = f"{len(state.regions)} tensors ({shared} shared with replicas), {len(state.optimizers)} optimizer(s)"
        parts += f", {len(state.schedulers)} scheduler(s)" if state.schedulers else ""
        parts += f", {len(registry.objects)} registered object(s)" if registry.objects else ""
        _voice.say(
            f"protected: {_voice.size(state.bytes)} of state in {parts}; this rank copies {_voice.size(stats['payload_bytes'])}"
            f" and {_voice.size(object_bytes)} of small state a step and its vault takes {_voice.size(stats['vault_bytes'])} of host memory"
        )
        if len({region.tensor.get_device() for region in state.regions if region.tensor.is_cuda}) > 1:
            no_limit = (
                ", so REFT_SNAPSHOT_OVERHEAD_PERCENT has no effect" if self.env["snapshot_overhead_percent"] else ""
            )
            _voice.say(f"what snapshots cost is not measured where state of a rank lies on several devices{no_limit}")
        if state.missed:
            _voice.say(f"NOT protected: {notes.line([(what, '', why) for what, why in state.missed])}")
        if self._uncaptured:
            _voice.say(f"a resume will not put back {notes.line(self._uncaptured)}")

    def _say_cost(self) -> None:
        """Says once what snapshots cost, and each time that they become rarer or more frequent."""
        every, overhead_ppm, noise_ppm = self.engine.cadence
        if every == self._said_every and (self._said_cost or noise_ppm < 0):
            return
        known = "measured" if overhead_ppm > noise_ppm else "measured: no more than noise"
        cost = f"{overhead_ppm / 1e4:.2f} % ± {noise_ppm / 1e4:.2f} of the mean step ({known})"
        if every != self._said_every:
            rhythm = "at every step" if every == 1 else f"every {every} steps"
            _voice.say(f"from step {self.step} on a snapshot {rhythm}, for about {cost}")
        elif self.env["banner"]:
            _voice.say(f"snapshots cost {cost}")
        self._said_every, self._said_cost = every, noise_ppm >= 0

    def _trouble(self, result: str) -> None:
        note = self.engine.stats()["note"]
        if self.env["strict"]:
            raise _C.Unavailable(f"snapshot of step {self.step}: {result}: {note}")
        _voice.warn_once(
            f"capture {result}", f"rank {self.job.rank}: snapshot of step {self.step} was not taken ({note or result})"
        )

    def failed(self, what: str, error: Exception) -> None:
        """A part of reft failed; training goes on."""
        if self.env["strict"] or isinstance(error, RestoreFailed):
            raise error
        if isinstance(error, (_C.Unavailable, _C.SystemError)) and what == "step":
            self._disabled = True
        _voice.warn_once(f"{what} {type(error).__name__}", f"rank {self.job.rank}: {what}: {error}")

    def stop(self, at_exit: bool) -> None:
        """The last snapshot is settled. At exit, the agent learns whether this was a clean end."""
        if self.boundary is not None:
            self.boundary.remove()
        if self.engine is not None and not self._disabled:
            self.engine.drain(2000)
        if at_exit and self.client is not None:
            self.client.bye_at_exit()
        # Whoever holds on to the client keeps it connected, and the next session of this process
        # would fight with it for the agent.
        self.engine = None
        self._evidence = None
        self._notes = None
        self.client = None


def _wait_for_devices(state: discovery.State) -> None:
    for index in sorted({region.tensor.get_device() for region in state.regions if region.tensor.is_cuda}):
        torch.cuda.synchronize(index)


def _owned_by(state: discovery.State) -> tuple[set[int], frozenset[int]]:
    """Ids of the tensors that are saved as regions and of their optimizers, and where the tensors' memory lies."""
    parameters = [p for o in state.optimizers for g in o.param_groups for p in g["params"]]
    ids = {id(o) for o in (*(region.tensor for region in state.regions), *parameters, *state.optimizers)}
    return ids, frozenset(region.tensor.untyped_storage().data_ptr() for region in state.regions)


def _own_state_dict(scheduler: Any) -> dict[str, Any]:
    """A scheduler's state without optimizers and schedulers that it holds: those are saved as what they are."""
    others = (torch.optim.Optimizer, *discovery.SCHEDULERS)

    def holds_others(value: Any) -> bool:
        return isinstance(value, others) or (isinstance(value, (list, tuple)) and any(map(holds_others, value)))

    return {key: value for key, value in scheduler.state_dict().items() if not holds_others(value)}


def _plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) or (
        isinstance(value, (list, tuple)) and all(_plain(v) for v in value)
    )


def _plain_state(optimizer: torch.optim.Optimizer) -> list[dict[Any, Any]]:
    """Entries of the optimizer's state that are not tensors (step counts, LBFGS history), by parameter position."""
    result = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entries = discovery._state_of(optimizer, parameter)
            result.append({k: v for k, v in entries.items() if not isinstance(v, torch.Tensor)})
    return result


def _put_plain_state(optimizer: torch.optim.Optimizer, saved: list[dict[Any, Any]]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, values in zip(parameters, saved, strict=False):
        if values:
            optimizer.state[parameter].update(values)


def _available_bytes(vault_dir: str) -> float:
    if vault_dir:
        return float(shutil.disk_usage(vault_dir).free)
    available = float("inf")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = 1024.0 * int(line.split()[1])
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit.isdigit():
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            available = min(available, float(int(limit) - used))
    except (OSError, ValueError):
        pass
    return available


def on_default_group(backend: Any, store: Any, rank: int, world_size: int) -> None:
    """Called by the backend's creator for the default group. `store`: keys that no other attempt sees."""
    global _session, _sessions_made, _registered
    _sessions_made += 1
    if _session is not None:
        _session.stop(at_exit=False)
        _session = None
    try:
        env = _C.environment()
    except _C.InvalidArgument as error:
        job = job_identity.identify(rank, world_size, "")
        startup.give_up(job, store, str(error))
        if os.environ.get("REFT_STRICT") == "1":  # what else is set is not known
            raise
        if not startup.said_by_the_first(job, store, str(error)):
            _voice.say(f"error: {error}. Training goes on without snapshots and hang detection")
        return
    if rank == 0:
        for name, nearest in _C.env_unknown([n for n in os.environ if n.startswith("REFT_")]):
            _voice.say(f"warning: {name} is not a setting of reft" + (f"; did you mean {nearest}?" if nearest else ""))
    if env["disable"]:
        return
    session = Session(env, job_identity.identify(rank, world_size, env["job_id"]), store, _sessions_made)
    try:
        _C.configure_faults(env["fault"], rank)
        session.start()
    except Exception as error:
        reason = str(error) or type(error).__name__
        startup.give_up(session.job, store, reason)
        if env["strict"]:
            raise
        beginning = " and from its beginning" if session.job.attempt > 0 and session.point is None else ""
        said = (
            not error.to_say
            if isinstance(error, startup.OthersGaveUp)
            else startup.said_by_the_first(session.job, store, reason)
        )
        if not said:
            _voice.say(f"rank {rank}: training goes on without snapshots and hang detection{beginning}: {reason}")
        session.stop(at_exit=False)
        return
    _session = session
    if not _registered:
        _registered = True
        atexit.register(_at_exit, os.getpid())


def _at_exit(pid: int) -> None:
    global _session
    if _session is not None and os.getpid() == pid:
        session, _session = _session, None
        try:
            session.stop(at_exit=True)
        except Exception as error:
            _voice.say(f"at exit: {error}")


def explicit_step(frame: FrameType) -> None:
    """See :func:`reft.step`."""
    if _session is not None:
        try:
            _session.gate()
            _session.program_point(frame, gated=False)
        except Exception as error:
            _session.failed("step", error)


def set_enabled(enabled: bool) -> None:
    """Switches snapshots of this rank on or off, for measurements. All ranks do it at the same step."""
    if _session is not None:
        _session.gate()
        _session.enabled = enabled


def snapshot_now(timeout_sec: float) -> int:
    """See :func:`reft.snapshot_now`."""
    if _session is None or _session.engine is None:
        return -1
    _session.engine.drain(int(timeout_sec * 1000))
    return int(_session.engine.committed_step)


def status() -> dict[str, Any]:
    """See :func:`reft.status`."""
    return {} if _session is None or _session.engine is None else dict(_session.engine.stats())
