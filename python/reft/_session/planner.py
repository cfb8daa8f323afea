"""Lays out the vault: which tensors are saved, which ranks share them, whether they fit the node.

Threads: the training thread. Errors: `_C.Unavailable` if the vaults do not fit the memory of the
node; what the engine raises.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from reft import _C, _voice
from reft._link import host_memory, job_identity, vault_place
from reft._link.mesh import Copies
from reft._link.protection import AUTO, is_copied, is_recomputed, placement
from reft._link.trusted_store import TrustedStore
from reft._session.protection_choice import Facts, ProtectionChoice
from reft._state import discovery, node_loss, recomputed, replica_groups
from reft._state.optimizers import identities, structure

_MEMORY_SHARE = 0.9  # of the available memory that vaults may take without REFT_SNAPSHOT_HOST_BYTES
_TIGHT_SHARE = 0.7  # of that, from which on the numbers are reported
_FIXED_BYTES = 4 << 20  # of a vault, besides its slots, at most
_SMALL_STATE_GROWTH = 2  # a slot that is too small gets so many times the size
_FIRST = "first"  # names the plan that all ranks make when they take their first snapshot
# A plan that this rank makes alone saves what is new as its own. That much is let through: the rest
# waits for the next plan of all ranks, because slots that have grown keep their memory.
_ALONE_SHARE, _ALONE_BYTES = 1.25, 16 << 20
# Plans of all ranks, without a commit between, that found nothing different although votes did not
# fit together. Replicas that are equal at some steps only are not replicas.
_MOST_VAIN = 3

Identity = tuple[tuple[int, ...], torch.dtype, torch.Size, tuple[int, ...]]


class Planner:
    """The plan of one session: the state that its vault has a table for.

    All ranks make the first plan together: they compare what they expect to share
    (`replica_groups`). Later, tensors may be replaced, added or removed, on one rank alone. Then
    this rank plans alone: what it shared it shares still, anything else is its own, and its votes
    ask for a new plan of all ranks, if there is something else to share. The votes also show if
    the ranks no longer agree. Then, too, all ranks plan together, at a point that the engine names
    (snapshot/commit/plan_rounds.h).

    Attributes:
        state: the planned state, None before the first plan.
        waiting: whether there is no table for the state until all ranks plan together.
    """

    def __init__(
        self,
        env: dict[str, Any],
        job: job_identity.Job,
        store: TrustedStore,
        engine: _C.Rank,
        copies: Copies | None = None,
    ) -> None:
        self._env, self._job, self._store, self._engine = env, job, store, engine
        self._copies = copies
        self._identities: tuple[int, ...] = ()
        self._structure: list[Any] = []
        self._restored: tuple[Any, discovery.State] | None = None
        self._groups: list[tuple[str, tuple[int, ...]]] = []
        # Of the newest plan of all ranks, by name: what it looked at, and what of that is shared.
        self._expected: dict[str, Identity] | None = None
        self._shared: dict[str, Identity] = {}
        self._own: set[str] = set()  # expected to be shared, found to differ
        self._vain, self._committed = 0, -1  # at the newest of them
        self._early: set[str] = set()  # regions that were caught being written between steps
        self.state: discovery.State | None = None
        self.waiting = False
        self._choice: ProtectionChoice | None = None
        if env["snapshot_protection"] == AUTO:
            self._choice = ProtectionChoice(env, job, store)
        self._is_recomputed = is_recomputed(env["snapshot_protection"])
        self._not_recomputed = ""
        # What is resumed may have been saved with it.
        if self._is_recomputed or self._choice is not None:
            recomputed.of_process.watch(job.layout.domain_of)

    def refresh(self, optimizers: list[torch.optim.Optimizer]) -> bool:
        """Plans if there is no plan, or if tensors were added, removed or tied since.

        Other tensors in the places of planned ones are no new plan, if they look like them.

        Returns:
            Whether it has planned.
        """
        state = self.state
        if (
            state is not None
            and self._choice is not None
            and self._choice.gives_up(self._engine)
        ):
            self._lay_out(state, asks=True)
        if (
            state is not None
            and not self.waiting
            and self._identities == identities(optimizers)
            and self._structure == structure(optimizers)
            and state.follow()
            and state.has_same_modules()
            and state.stands()
        ):
            return False
        self.plan(optimizers)
        return True

    def plan(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Finds the state anew and lays out the vault, without other ranks but for the first time.
        Slow."""
        state = self._take(optimizers)
        if self._expected is None:
            self._warn(self._agree(state, _FIRST), "")
            state = self._choose(state, _FIRST, optimizers)
            self._lay_out(state, asks=self._chooses_again)
            return
        asks = any(self._expected.get(name) != found for name, found in self._claims(state).items())
        for region in state.regions:
            if self._shared.get(region.name) != _identity(region):
                region.ranks = ()
        have = self._engine.stats()["payload_bytes"]
        self.waiting = asks and self._per_rank(state) > have * _ALONE_SHARE + _ALONE_BYTES
        if not self.waiting:
            self._lay_out(state, asks)

    def plan_together(
        self, optimizers: list[torch.optim.Optimizer], step: int, parted: bool
    ) -> None:
        """Plans with all other ranks, which call this at the same program point. Slow.

        Args:
            step: the step whose votes led to it.
            parted: whether that step was aborted because ranks that share state do not hold the
                same.
        """
        state = self._take(optimizers)
        equal_before = self._shared.keys()
        different = self._agree(state, str(step))
        if parted and not different:
            committed = self._engine.committed_step
            self._vain = self._vain + 1 if committed == self._committed else 1
            self._committed = committed
            if self._vain >= _MOST_VAIN:
                self._share_nothing(state)
        self.waiting = False
        state = self._choose(state, str(step), optimizers)
        self._lay_out(state, asks=self._chooses_again)
        if parted:
            self._warn(different, f"step {step} was not committed: ", equal_before)
            if not different and self._job.rank == 0:
                _voice.say(
                    f"step {step} was not committed: the ranks had different layouts of the state"
                    " that they share; all ranks have planned again"
                )
        else:
            self._warn(different, "")

    def _take(self, optimizers: list[torch.optim.Optimizer]) -> discovery.State:
        self._engine.gate()
        before = self.state
        now = identities(optimizers)
        is_known = (
            now == self._identities and before is not None and before.has_same_modules()
        )
        if before is not None and not is_known:
            # A scheduler that the script has replaced would live on through our references.
            before.schedulers = before.scalers = []
        state = self._find(optimizers, before if is_known else None)
        self._identities, self._structure = now, structure(optimizers)
        for region in state.regions:
            region.early = region.early or region.name in self._early
        return state

    def _lay_out(self, state: discovery.State, asks: bool) -> None:
        """Args:
        asks: whether the votes ask all ranks to plan together.
        """
        self._check_memory(state)
        self._warn_of_recomputation()
        used = {region.ranks for region in state.regions}
        groups = [(gid, ranks) for gid, ranks in self._groups if ranks in used]
        index_of = {ranks: i for i, (_, ranks) in enumerate(groups)}
        self._engine.set_table(
            [
                (r.name, r.current(), index_of.get(r.ranks, -1), r.early, r.is_replaceable)
                for r in state.regions
            ],
            [(gid, list(ranks)) for gid, ranks in groups],
            asks,
            [(name, *split) for name, split in state.splits.items()],
        )
        self.state = state
        shared = sum(1 for region in state.regions if region.ranks)
        _voice.debug(
            f"rank {self._job.rank} planned {_voice.plural(len(state.regions), 'region')}"
            f" ({shared} shared) in {_voice.plural(len(groups), 'group')}"
        )

    def keep_restored(
        self, optimizers: list[torch.optim.Optimizer], state: discovery.State
    ) -> None:
        """Takes over the state that a resume has found, for the next plan."""
        self._restored = self._key(optimizers), state

    def forget(self) -> None:
        """Drops all references to the state; the next `refresh` plans."""
        self.state = self._restored = None

    def copy_early(self, index: int) -> str | None:
        """Has a region copied before the step returns from the next plan on, which `refresh` makes.

        Returns:
            Its name; None if the plan has no such region.
        """
        if self.state is None or index >= len(self.state.regions):
            return None
        name = self.state.regions[index].name
        self._early.add(name)
        self._structure = []
        return name

    @staticmethod
    def _key(optimizers: list[torch.optim.Optimizer]) -> Any:
        return identities(optimizers), structure(optimizers)

    def _find(
        self, optimizers: list[torch.optim.Optimizer], before: discovery.State | None
    ) -> discovery.State:
        restored, self._restored = self._restored, None
        if restored is not None and restored[0] == self._key(optimizers):
            found = restored[1]
            if found.has_same_modules() and found.stands():
                return found  # what a resume found one step ago is still there
        return discovery.discover(optimizers, before=before)

    def _claims(self, state: discovery.State) -> dict[str, Identity]:
        """What this rank expects to share."""
        return {
            region.name: _identity(region)
            for region in state.regions
            if len(region.ranks) > 1
            and self._job.rank in region.ranks
            and region.name not in self._own
        }

    def _agree(self, state: discovery.State, plan: str) -> list[replica_groups.Difference]:
        """Compares with the other ranks what they expect to share; clears `ranks` of the rest."""
        self._expected = self._claims(state)
        for region in state.regions:
            if region.name not in self._expected:
                region.ranks = ()
        self._groups, different = replica_groups.confirm(
            state.regions, self._store, self._job.rank, plan
        )
        self._own.update(name for one in different for name in (*one.names, *one.partial))
        self._shared = {r.name: _identity(r) for r in state.regions if r.ranks}
        return different

    @property
    def _chooses_again(self) -> bool:
        return self._choice is not None and self._choice.is_open

    def _choose(
        self, state: discovery.State, plan: str, optimizers: list[torch.optim.Optimizer]
    ) -> discovery.State:
        """Chooses the protection with the other ranks, if the setting leaves that to them.

        Returns:
            The state, without what is not computed a second time any more.
        """
        if self._choice is None:
            return state
        for problem in recomputed.of_process.take_problems():
            self._not_recomputed = self._not_recomputed or problem
        facts = Facts(
            state,
            recomputed.of_process.found,
            self._not_recomputed,
            "" if self._copies is None else self._copies.why_not,
            lambda protection: self._per_rank(state, protection),
            lambda protection: self._no_room(state, protection),
        )
        chosen = self._choice.choose(facts, plan)
        if chosen != self._env["snapshot_protection"]:
            self._env["snapshot_protection"] = chosen
            self._engine.protect(chosen)
        if self._choice.is_sharded and not is_recomputed(chosen):
            self._not_recomputed = self._not_recomputed or "another protection was chosen"
            recomputed.of_process.forget()
            state = self._take(optimizers)
            self._agree(state, f"{plan}/{chosen}")
        return state

    def _share_nothing(self, state: discovery.State) -> None:
        if self._job.rank == 0:
            _voice.warn(
                f"no step was committed after {_MOST_VAIN} plans in which replicas looked equal:"
                " from now on, each rank saves all of its state itself, which takes more memory"
            )
        self._own |= self._shared.keys()
        self._shared, self._groups = {}, []
        for region in state.regions:
            region.ranks = ()

    def _warn(
        self,
        different: list[replica_groups.Difference],
        why: str,
        equal_before: Collection[str] = (),
    ) -> None:
        """Reports what differs in groups whose first rank this is.

        Args:
            equal_before: names of what was equal at the plan before.
        """
        for found in different:
            if self._job.rank != found.ranks[0] or not found.names:
                continue
            tensors = _voice.plural(len(found.names), "replicated tensor")
            what = "not compared by all of" if found.missed else "not equal on"
            odd = ""
            if found.odd:
                have = "has" if len(found.odd) == 1 else "have"
                odd = f". {_voice.ranks(found.odd).capitalize()} {have} other bytes than the rest"
                if all(name in equal_before for name in found.names):
                    odd += ": unless the script means that, check the memory there"
            _voice.warn_once(
                f"different {found.ranks}{' after ' if why else ''}{found.odd or ''}",
                f"{why}{tensors} {what} {_voice.ranks(found.ranks)}"
                f" (first: {found.names[0]}); each rank saves its own{odd}",
            )

    def _per_rank(self, state: discovery.State, setting: str = "") -> float:
        """Bytes of one snapshot of this rank, by default with the protection as it is."""
        domains = self._job.layout.domain_of
        protection = placement(setting or self._env["snapshot_protection"])
        if node_loss.parity_hindrance(state, protection):
            protection = "none"
        shares: dict[tuple[int, ...], float] = {}
        per_rank = 0.0
        for region in state.regions:
            ranks = region.ranks
            if ranks not in shares:
                nodes = [domains[rank] for rank in ranks] or [0]  # or it has no replica
                shares[ranks] = _C.stored_shards(protection, nodes) / len(nodes)
            per_rank += region.tensor.nbytes * shares[ranks]
        return per_rank

    def _warn_of_recomputation(self) -> None:
        """Says if no optimizer is computed a second time although the setting asks for it."""
        if not self._is_recomputed:
            return
        problems = recomputed.of_process.take_problems()
        for why in problems:
            _voice.warn_once(
                f"recomputation {why}",
                f"rank {self._job.rank} does not compute an optimizer a second time"
                f" (REFT_SNAPSHOT_PROTECTION={self._env['snapshot_protection']}): {why}. What ranks"
                " keep of it is NOT survived if their node is lost;"
                " REFT_SNAPSHOT_PROTECTION=peer is for such state",
            )
        if not recomputed.of_process.found and self._job.rank == 0:
            _voice.warn_once(
                "no sharded optimizer",
                "no ZeroRedundancyOptimizer was found, so REFT_SNAPSHOT_PROTECTION=aor does what"
                " arc does"
            )

    def _need(self, state: discovery.State, setting: str) -> tuple[float, float]:
        """Bytes of one snapshot of this rank, and those that the vaults of this node are yet to
        take."""
        stats = self._engine.stats()
        per_rank = self._per_rank(state, setting)
        per_rank += _SMALL_STATE_GROWTH * stats.get("object_bytes", 0)
        slots = per_rank * self._env["snapshot_slots"]
        # A vault of the attempt before has its memory, though this one has no slots in it yet.
        there = max(stats["slot_bytes"], stats["vault_bytes"] - _FIXED_BYTES)
        need = max(0, slots - there) * self._job.local_world
        # Another node's ranks store as much, unless copies of it are there since the choice before,
        # or since the attempt before.
        has_copies = is_copied(self._env["snapshot_protection"]) or self._job.attempt > 0
        if is_copied(setting) and not has_copies:
            need += slots * self._job.local_world
        return per_rank, need

    def _no_room(self, state: discovery.State, setting: str) -> str:
        """Why there is no memory for what a protection needs on this node; "" if there is."""
        _, need = self._need(state, setting)
        limit = self._env["snapshot_host_bytes"] or self._limit()[0]
        if need <= limit:
            return ""
        return f"it needs {_voice.size(need)} on this node, where {_voice.size(limit)} are left"

    def _check_memory(self, state: discovery.State) -> None:
        """Refuses a plan that does not fit the node."""
        env, job = self._env, self._job
        per_rank, need = self._need(state, placement(env["snapshot_protection"]))
        limit = env["snapshot_host_bytes"]
        if not limit:
            limit, tight = self._limit()
            if need > _TIGHT_SHARE * limit and need <= limit:
                self._announce_tight(need, limit, tight)
        if need > limit:
            raise _C.Unavailable(
                f"snapshots need {_voice.size(need)} of host memory on this node"
                f" ({_voice.size(per_rank)} per rank, {env['snapshot_slots']} slots,"
                f" {_voice.plural(job.local_world, 'rank')}),"
                f" but the limit is {_voice.size(limit)}. Training continues without snapshots."
                " To make them fit, use more data-parallel"
                " ranks (smaller shares), set REFT_VAULT_DIR (vaults on a disk), or raise"
                " REFT_SNAPSHOT_HOST_BYTES"
            )


    def _limit(self) -> tuple[float, str]:
        """Bytes that all vaults of this node may take now, and what bounds them."""
        folder = self._env["vault_dir"]
        disk = [host_memory.of_disk(folder)] if folder else []
        bounds = [(_MEMORY_SHARE * room.left, room.what) for room in disk]
        room = host_memory.tightest() if vault_place.in_memory(folder) else None
        if room is not None:
            growth = host_memory.growth_bytes() * self._job.local_world
            bounds.append((_MEMORY_SHARE * max(0, room.usable - growth), room.what))
        return min(bounds, default=(float("inf"), ""))

    def _announce_tight(self, need: float, limit: float, what: str) -> None:
        if self._job.local_rank == 0:
            _voice.warn_once(
                "tight memory",
                f"snapshots take {_voice.size(need)} of the {_voice.size(limit)} that the {what}"
                f" leaves for them on node {self._job.node}",
            )


def _identity(region: discovery.Region) -> Identity:
    tensor = region.tensor
    return region.ranks, tensor.dtype, tensor.shape, tensor.stride()
