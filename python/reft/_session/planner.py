"""Lays out the vault: which tensors are saved, which ranks share them, whether they fit the node.

Threads: the training thread. Errors: `_C.Unavailable` if the vaults do not fit the memory of the
node; what the engine raises.
"""

from __future__ import annotations

from typing import Any

import torch

from reft import _C, _voice
from reft._link import host_memory, job_identity
from reft._state import discovery, replica_groups

_MEMORY_SHARE = 0.9  # of the available memory that vaults may take without REFT_SNAPSHOT_HOST_BYTES


class Planner:
    """The plan of one session: the state that its vault has a table for.

    Attributes:
        state: the planned state, None before the first plan.
    """

    def __init__(
        self, env: dict[str, Any], job: job_identity.Job, store: Any, engine: _C.Rank
    ) -> None:
        self._env, self._job, self._store, self._engine = env, job, store, engine
        self._fingerprint: tuple[int, ...] = ()
        self._restored: tuple[tuple[int, ...], discovery.State] | None = None
        self._groups: list[tuple[str, tuple[int, ...]]] = []
        self._early: set[str] = set()  # regions that were caught being written between steps
        self.state: discovery.State | None = None

    def refresh(self, optimizers: list[torch.optim.Optimizer]) -> bool:
        """Plans if there is no plan, or if tensors were replaced, added or removed since.

        Returns:
            Whether it has planned.
        """
        fingerprint = discovery.fingerprint(optimizers)
        if fingerprint == self._fingerprint and self.state is not None:
            return False
        self.plan(optimizers)
        self._fingerprint = fingerprint
        return True

    def plan(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Finds the state anew and lays out the vault. Slow."""
        self._engine.gate()
        before = self.state
        if before is not None:
            # A scheduler that the script has replaced would live on through our references.
            before.schedulers = before.scalers = []
        state = self._find(optimizers)
        for region in state.regions:
            region.early = region.early or region.name in self._early
        if before is not None and _layout(before) == _layout(state):
            # Only flags or identities moved: what was confirmed stays confirmed, and no other rank
            # has to take part.
            for old, new in zip(before.regions, state.regions, strict=True):
                new.ranks = old.ranks
        else:
            self._groups = self._confirm(state)
        self._check_memory(state)
        index_of = {ranks: i for i, (_, ranks) in enumerate(self._groups)}
        self._engine.set_table(
            [(r.name, r.current(), index_of.get(r.ranks, -1), r.early) for r in state.regions],
            [(gid, list(ranks)) for gid, ranks in self._groups],
        )
        self.state = state
        shared = sum(1 for region in state.regions if region.ranks)
        _voice.debug(
            f"rank {self._job.rank} planned {_voice.plural(len(state.regions), 'region')}"
            f" ({shared} shared) in {_voice.plural(len(self._groups), 'group')}"
        )

    def keep_restored(
        self, optimizers: list[torch.optim.Optimizer], state: discovery.State
    ) -> None:
        """Takes over the state that a resume has found, for the next plan."""
        self._restored = discovery.fingerprint(optimizers), state

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
        self._fingerprint = ()
        return name

    def _find(self, optimizers: list[torch.optim.Optimizer]) -> discovery.State:
        restored, self._restored = self._restored, None
        if restored is not None and restored[0] == discovery.fingerprint(optimizers):
            return restored[1]  # what a resume found one step ago is still there
        return discovery.discover(optimizers)

    def _confirm(self, state: discovery.State) -> list[tuple[str, tuple[int, ...]]]:
        groups, different = replica_groups.confirm(state.regions, self._store, self._job.rank)
        if different and self._job.rank == 0:
            _voice.warn_once(
                "different",
                f"{_voice.plural(len(different), 'replicated tensor')} not equal on all ranks"
                f" (first: {different[0]}); each rank saves its own",
            )
        return groups

    def _check_memory(self, state: discovery.State) -> None:
        """Refuses a plan that does not fit the node."""
        env, job = self._env, self._job
        per_rank = 0.0
        for region in state.regions:
            shares = len(region.ranks) or 1
            stored = _C.stored_shards(env["snapshot_protection"], shares)
            per_rank += region.tensor.nbytes * stored / shares
        have = self._engine.stats()["slot_bytes"]
        need = max(0, per_rank * env["snapshot_slots"] - have) * job.local_world
        limit = env["snapshot_host_bytes"]
        if not limit:
            available = host_memory.available_bytes(env["vault_dir"])
            limit = float("inf") if available is None else _MEMORY_SHARE * available
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


def _layout(state: discovery.State) -> list[tuple[str, tuple[int, ...]]]:
    return [(region.name, tuple(region.tensor.shape)) for region in state.regions]
