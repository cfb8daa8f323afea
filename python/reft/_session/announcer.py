"""What a session reports on the terminal, and when: two lines at start, one after the first
snapshot, one once the overhead is measured, and what changes later.

Threads: the training thread. Errors: none.
"""

from __future__ import annotations

from typing import Any

from reft import _C, _voice
from reft._link import job_identity
from reft._link.protection import is_copied
from reft._link.trusted_store import ROUND, TrustedStore, Untrusted
from reft._session import notes
from reft._state import discovery, node_loss, registry

_LATE_LINES = 5  # about values that turn up after the first snapshot
_WRITTEN_LATE_LINES = 3
_WRITTEN_LATE = (
    "{0} written between optimizer steps, or {1} memory moved, before the copy. reft dropped that"
    " snapshot; from now on, it copies {2} before the optimizer step returns"
)
_UNDER_WAY = 8  # snapshots in a row, after which ops under way are no accident


class Announcer:
    """Reports for one rank. Only rank 0 writes lines about what is equal on all ranks.

    Args:
        env: settings.
        job: identity of the rank.
        found: collects notes for the agent.
        store: keys that no other attempt sees, through which one rank speaks for all.
    """

    def __init__(
        self,
        env: dict[str, Any],
        job: job_identity.Job,
        found: notes.Notes,
        store: TrustedStore,
    ) -> None:
        self._env, self._job, self._notes, self._store = env, job, found, store
        self._first = job.rank == 0
        self._node_loss_known = False
        self._noted = False  # what is not protected, for the agent
        self._reported = False  # what is protected, on the terminal
        self._uncaptured: list[notes.Note] = []
        self._unsaved: list[notes.Note] = []  # until the first snapshot is reported
        self._late_lines = 0
        self._every, self._cost_reported = int(env["snapshot_every"]), False
        self._under_way = 0
        self._written_late: set[str] = set()
        self._compiled_reported = False
        self._knows_refused = False  # that values of the store were ignored

    def started(self, resuming_at: int | None, elsewhere: str = "", after: int = 1) -> None:
        """The two lines at start.

        Args:
            elsewhere: where vaults are, if not where the settings want them.
            after: the optimizer step of this process at which it resumes.
        """
        if not self._first or not self._env["banner"]:
            return
        env = self._env
        head = f"job {self._job.id}: {_voice.plural(self._job.world, 'rank')}"
        if not env["snapshot"]:
            _voice.say(f"{head}; snapshots are off (REFT_SNAPSHOT=0), collectives are logged")
            return
        rhythm = _voice.rhythm(env["snapshot_every"])
        if env["snapshot_overhead_percent"]:
            limit = env["snapshot_overhead_percent"]
            rhythm += f" (less often if the overhead exceeds {limit} %)"
        place = "host memory held by reft-agent"
        if env["vault_dir"]:
            place = f"files in {env['vault_dir']}"
        if elsewhere:
            wanted, place = place, elsewhere
            _voice.warn(
                f"snapshots go on in {elsewhere}, not in {wanted}: the agent of an earlier start"
                " of this job still runs and keeps them there. A changed REFT_VAULT_DIR takes"
                " effect once that agent has ended"
            )
        _voice.say(
            f"{head}, snapshot {rhythm} into {place}; survives killed processes"
            f" (REFT_SNAPSHOT_PROTECTION={env['snapshot_protection']})"
        )
        if resuming_at is None:
            _voice.say(
                "protection summary follows the first step; overhead once measured;"
                " `reft top` shows both live"
            )
        else:
            which = "the first optimizer step" if after <= 1 else f"optimizer step {after}"
            _voice.say(
                f"resuming at step {resuming_at} when {which} returns; files that the script writes"
                " until then are those of its start"
            )

    def protected(
        self,
        state: discovery.State,
        stats: dict[str, Any],
        small_bytes: int,
        uncaptured: list[notes.Note],
        assumed: list[notes.Note],
    ) -> None:
        """After the first snapshot: what is protected and what is not. Later calls report a lost
        node alone, after `planned`."""
        speaks = not self._reported and self._first and self._env["banner"]
        if not self._noted:
            self._noted = self._reported = True
            if speaks:
                self._summarize(state, stats, small_bytes, uncaptured, assumed)
            self._notes.add(notes.ASSUMED, assumed)
        if not self._node_loss_known:
            self._node_loss_known = True
            self._node_loss(state, speaks)

    def _summarize(
        self,
        state: discovery.State,
        stats: dict[str, Any],
        small_bytes: int,
        uncaptured: list[notes.Note],
        assumed: list[notes.Note],
    ) -> None:
        shared = sum(1 for region in state.regions if region.ranks)
        parts = [
            f"{_voice.plural(len(state.regions), 'tensor')} ({shared} shared with replicas)",
            _voice.plural(len(state.optimizers), "optimizer"),
        ]
        if state.schedulers:
            parts.append(_voice.plural(len(state.schedulers), "scheduler"))
        if registry.objects:
            parts.append(_voice.plural(len(registry.objects), "registered object"))
        _voice.say(
            f"protected: {_voice.size(state.bytes)} of state in {', '.join(parts)}; each step this"
            f" rank copies {_voice.size(stats['payload_bytes'])} and pickles"
            f" {_voice.size(small_bytes)}; its vault takes {_voice.size(stats['vault_bytes'])} of"
            " host memory"
        )
        if len({r.tensor.get_device() for r in state.regions if r.tensor.is_cuda}) > 1:
            line = "overhead is not measured for a rank with state on several devices"
            if self._env["snapshot_overhead_percent"]:
                line += ", so REFT_SNAPSHOT_OVERHEAD_PERCENT has no effect"
            _voice.say(line)
        if self._unsaved:
            _voice.say(f"NOT protected: {notes.line(self._unsaved)}")
        if uncaptured:
            _voice.say(f"not restorable: {notes.line(uncaptured)}")
        if assumed:
            _voice.say(f"{notes.ASSUMED} {notes.line(assumed)}")

    def planned(self) -> None:
        """There is another plan: what is stored for a lost node may be enough no longer."""
        self._node_loss_known = False

    def _is_first_to_report(self, what: str) -> bool:
        """Whether no other rank of the attempt has reported `what`."""
        rank = str(self._job.rank)
        try:
            first = self._store.first_of(ROUND, f"said/{what}", self._job.rank, rank)
        except (RuntimeError, Untrusted):  # rather twice than not at all
            return True
        return first == rank.encode()

    def _node_loss(self, state: discovery.State, speaks: bool) -> None:
        """Whether what ranks store for a lost node is enough for the state of this one. A warning
        comes from one rank for all, also after a resume: the layout may have changed.

        Args:
            speaks: whether this rank reports how many lost nodes are survived. A rank with other
                state may warn.
        """
        protection = self._env["snapshot_protection"]
        if protection == "none":
            return
        layout, setting = self._job.layout, f"REFT_SNAPSHOT_PROTECTION={protection}"
        survival = node_loss.survival(state, layout, protection)
        if survival.why:
            if self._is_first_to_report(f"node loss/{protection}"):
                whose = "" if self._first else f" (rank {self._job.rank})"
                _voice.warn(f"a lost node is NOT survived ({setting}): {survival.why}{whose}")
            return
        if not speaks:
            return
        several = survival.nodes > 1
        any_of = f"any {survival.nodes} nodes" if several else "any node"
        line = f"for a lost node: each shard of rank 0's state survives the loss of {any_of}"
        # Copies may need longer than a step; the agent of a node says so.
        _voice.say(line + ", from the first committed step on" * is_copied(protection))
        if survival.nodes < (wanted := node_loss.wanted(layout, protection)):
            _voice.warn(
                f"{setting} asks for {wanted + 1} nodes, but the replicas of some shard are on"
                f" too few: the loss of {survival.nodes + 1} nodes is not survived"
            )

    def uncaptured(self, step: int, found: list[notes.Note]) -> None:
        """Values that the snapshot of `step` leaves out. The first snapshot's own are reported by
        `protected`."""
        if found == self._uncaptured:
            return
        self._uncaptured = found
        new = self._notes.add(notes.NOT_RESTORABLE, found)
        if new and self._reported and self._first and self._late_lines < _LATE_LINES:
            self._late_lines += 1
            _voice.say(f"not restorable from step {step} on: {notes.line(new)}")

    def unprotected(self, step: int, found: list[notes.Note]) -> None:
        """State that the snapshot of `step` has not. The first snapshot's own is reported by
        `protected`."""
        new = self._notes.add(notes.NOT_PROTECTED, found) if found else []
        if not self._noted:
            self._unsaved += new
        elif new and self._first and self._late_lines < _LATE_LINES:
            self._late_lines += 1
            _voice.say(f"NOT protected from step {step} on: {notes.line(new)}")

    def gradients_outlive(self, step: int) -> None:
        """Gradients are added to those of an earlier step: snapshots have them from now on."""
        if self._first:
            _voice.say(
                f"gradients of step {step} were not zeroed before the next backward pass: snapshots"
                f" save gradients from step {step + 1} on"
            )

    def gradients_read(self, where: str) -> None:
        """The script reads gradients after the optimizer step: snapshots have them."""
        if self._first:
            _voice.say(
                f"{where} reads gradients after the optimizer step: snapshots save gradients, too"
            )

    def other_backends(self, groups: dict[str, str]) -> None:
        """Process groups, by name, that have another backend than reft."""
        why = (
            "its ops are not seen: a parameter that one still writes when the optimizer step returns"
            " is copied as it is then, and a hang in one is not explained"
        )
        found = [(f"process group {name}", backend, why) for name, backend in groups.items()]
        new = self._notes.add(notes.NOT_PROTECTED, found)
        if new and self._first:
            _voice.say(f"{notes.line(new)}")

    def compiled_step(self, is_seen: bool) -> None:
        """An optimizer steps inside a function that was given to torch.compile."""
        if not self._first or self._compiled_reported:
            return
        self._compiled_reported = True
        if is_seen:
            _voice.say(
                "an optimizer steps inside a function given to torch.compile: an iteration ends when"
                " that function returns, and its next call waits for the copy of the snapshot. Call"
                " optimizer.step() outside of it to overlap the two",
            )
            return
        why = (
            "an optimizer steps inside a function given to torch.compile, where it is not seen: call"
            " optimizer.step() outside of that function, or reft.step() after each of its calls"
        )
        self._notes.add(notes.NOT_PROTECTED, [("training", "", why)])
        _voice.warn(f"training is NOT protected: {why}")

    def resumed_without_gradients(self, step: int, how: str) -> None:
        """The script uses gradients that the snapshot of a resume does not have."""
        why = f"the snapshot of step {step} has no gradients, and {how}"
        self._notes.add(notes.NOT_RESTORED, [("gradients", "", why)])
        _voice.warn(f"rank {self._job.rank}: the resume is not exact: {why}")

    def stepped(self, step: int, every: int, overhead_ppm: int, noise_ppm: int) -> None:
        """A step is over; see `cadence`."""
        self.cadence(step, every, overhead_ppm, noise_ppm)
        if not self._knows_refused and _C.ValueSeal.refused():  # the log has named the first
            self._knows_refused = True
            why = "some are not of this attempt's ranks, and are ignored: SECURITY.md"
            self._notes.add(notes.IGNORED, [("values in the job's store", "", why)])

    def cadence(self, step: int, every: int, overhead_ppm: int, noise_ppm: int) -> None:
        """What snapshots cost, once it is measured, and again whenever their rhythm changes."""
        if not self._first or not every:  # 0: the disk under the vault has failed
            return
        if every == self._every and (self._cost_reported or noise_ppm < 0):
            return
        overhead = _voice.overhead(every, overhead_ppm, noise_ppm)
        if every != self._every:
            _voice.say(f"from step {step} on: {overhead}")
        elif self._env["banner"]:
            _voice.say(overhead)
        self._every, self._cost_reported = every, noise_ppm >= 0

    def written_late(self, names: list[str]) -> None:
        """Regions were written or moved between steps, and the snapshot dropped for it. The first
        few have a line each; later ones have one together, and are named in the log."""
        new = [name for name in dict.fromkeys(names) if name not in self._written_late]
        room = max(0, _WRITTEN_LATE_LINES - len(self._written_late))
        self._written_late.update(new)
        for name in new[:room]:
            _voice.warn(_WRITTEN_LATE.format(f"{name} was", "its", name))
        if more := new[room:]:
            others = f"{_voice.plural(len(more), 'more tensor')} ({', '.join(more[:3])})"
            if len(more) > 3:
                others = f"{others[:-1]}, …)"
            _voice.warn_once(
                "written late",
                _WRITTEN_LATE.format(f"{others} {'was' if len(more) == 1 else 'were'}", "their", "each")
                + ". Others that follow are named in the log",
            )
            _voice.debug(f"written between optimizer steps: {' '.join(more)}")
    def iteration_lengthened(
        self, optimizers: list[Any], crossed: Any, closing: Any, graph: str | None
    ) -> None:
        """Steps of `closing` now end an iteration, those of `crossed` do not."""
        if not self._first:
            return
        one, other = (
            f"optimizer {optimizers.index(o)} ({type(o).__name__})" for o in (crossed, closing)
        )
        why = f"gradients of {other} are computed before a step of {one} and used after it"
        if graph:
            why = f"{graph} is computed before a step of {one} and differentiated after it"
        _voice.say(f"an iteration now ends when {other} steps, not at each step of {one}: {why}")

    def under_way(self, step: int, is_under_way: bool, note: str) -> None:
        """Whether an op was writing state at the program point of `step`, as `note` says."""
        self._under_way = self._under_way + 1 if is_under_way else 0
        if self._under_way == _UNDER_WAY:
            self._notes.add(notes.NOT_PROTECTED, [("state", "", note)])
            _voice.warn_once(
                "under way",
                f"rank {self._job.rank}: training is NOT protected: no snapshot of the last"
                f" {_UNDER_WAY} steps up to step {step} was taken ({note})",
            )

    def resumed(self) -> None:
        """The process before this one has reported what is protected."""
        self._reported = True

    def trouble(self, step: int, result: str, note: str) -> None:
        """A snapshot was not taken."""
        rank = self._job.rank
        _voice.warn_once(
            f"capture {result}",
            f"rank {rank}: snapshot of step {step} was not taken ({note or result})",
        )
