"""Simulates the start and the restore of a whole job of many ranks on one store that counts.

Every rank is a thread that runs the product's own steps: it takes the incarnation, connects to the
agent of its node, publishes what its vault holds, plans, compares its state and confirms its
replica groups. Agents, vaults and tensors are stand-ins; what is counted is the traffic to the
store.

Threads: one a rank, on small stacks. Errors: those of a rank are raised when all have ended.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from reft import _C
from reft._link import agreement, gather, secret
from reft._link.job_identity import Job
from reft._link.secret import Attempt, Secret
from reft._link.trusted_store import TrustedStore
from reft._session import startup
from reft._state import replica_groups
from reft._state.discovery import Region
from tests.support.jobs import job

_PATIENCE_SEC = 3600.0  # of a rank that waits for others: threads take turns
_LARGE_BYTES = 64 << 10


class CountingStore:
    """A c10d store in memory, shared by the threads of all ranks.

    The memory of all ranks is that of one process here: one rank at a time has a large value, from
    `get` to `done`.

    Attributes:
        operations: calls by rank; a call with n keys counts n times.
        bytes_read: in all.
    """

    def __init__(self) -> None:
        self.operations: Counter[int] = Counter()
        self.bytes_read = 0
        self._values: dict[str, bytes] = {}
        self._there: dict[str, threading.Event] = {}  # by key: one that waits wakes for its own
        self._lock = threading.Lock()
        self._rank = threading.local()
        self._large = threading.Lock()

    def act_as(self, rank: int) -> None:
        """Counts what this thread does from now on for `rank`."""
        self._rank.number, self._rank.has_large = rank, False

    def done(self) -> None:
        """This thread keeps nothing that it has read."""
        if self._rank.has_large:
            self._rank.has_large = False
            self._large.release()

    def set(self, key: str, value: str | bytes) -> None:
        with self._lock:
            self._count()
            self._put(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        self._await(key, _PATIENCE_SEC)
        with self._lock:
            self._count()
            value = self._values[key]
            self.bytes_read += len(value)
        if len(value) > _LARGE_BYTES and not self._rank.has_large:
            self._large.acquire()
            self._rank.has_large = True
        return value

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            self._count(len(keys))
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._lock:
            self._count(len(keys))
        for key in keys:
            self._await(key, _PATIENCE_SEC if timeout is None else timeout.total_seconds())

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self._count()
            total = int(self._values.get(key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: str, desired: bytes) -> bytes:
        with self._lock:
            self._count()
            if self._values.get(key, b"") == expected.encode():
                self._put(key, desired)
            return self._values[key]

    def _count(self, keys: int = 1) -> None:
        self.operations[self._rank.number] += keys

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._there.setdefault(key, threading.Event()).set()

    def _await(self, key: str, seconds: float) -> None:
        with self._lock:
            there = self._there.setdefault(key, threading.Event())
        if not there.wait(seconds):
            raise RuntimeError(f"store: {key} did not come")


class OneVaultAgent:
    """A client of an agent that has one vault of each rank of its node."""

    def __init__(self, *_: Any) -> None:
        pass


@dataclass(frozen=True)
class Traffic:
    """What one phase took.

    Attributes:
        total: operations in the whole job.
        busiest: most operations of a rank.
        busiest_rank: which one.
        bytes_read: from the store, in the whole job.
    """

    total: int
    busiest: int
    busiest_rank: int
    bytes_read: int


def inventory(job: Job) -> str:
    """What a rank publishes that was killed at step 41: two steps of one group of all ranks."""
    held = [[0, [job.rank], 7, 5, []]]  # group, shards, digests of contents and layout, parity set
    slots = [[slot, 40 + slot, 9, 0, "none", held, "", "", 0] for slot in (0, 1)]
    vault = {"rank": job.rank, "node": job.node, "writer": 1, "resumed": -1, "copy": False, "world": job.world, "since": 7, "slots": slots}
    group = ["g", [[0, job.world - 1, 1]], []]  # ranks; empty shards
    return json.dumps({"groups": [group], "vaults": [vault]})


def simulate(nodes: int, local_world: int) -> dict[str, Traffic]:
    """Runs the phases of a start with a restore. Returns the traffic of each."""
    world = nodes * local_world
    store = CountingStore()
    trusted = _SECRET.store(store, "0", world)
    jobs = [job(rank, world, local_world, attempt=1) for rank in range(world)]
    real_client, real_wait = _C.AgentClient, replica_groups._WAIT
    stack_bytes = threading.stack_size(256 << 10)
    traffic: dict[str, Traffic] = {}
    real_found = secret._found
    secret._found = lambda *_: _SECRET  # as in a file
    _C.AgentClient = OneVaultAgent  # type: ignore[assignment,misc]
    replica_groups._WAIT = timedelta(seconds=_PATIENCE_SEC)  # threads take turns
    try:
        with ThreadPoolExecutor(world) as pool:
            for name, phase in PHASES.items():
                store.operations.clear()
                store.bytes_read = 0

                def run(job: Job, phase: Any = phase) -> None:
                    store.act_as(job.rank)
                    try:
                        phase(job, trusted)
                    finally:
                        store.done()

                for done in [pool.submit(run, job) for job in jobs]:
                    done.result()
                rank, most = store.operations.most_common(1)[0]
                traffic[name] = Traffic(
                    sum(store.operations.values()), most, rank, store.bytes_read
                )
    finally:
        secret._found = real_found
        _C.AgentClient = real_client  # type: ignore[misc]
        replica_groups._WAIT = real_wait
        threading.stack_size(stack_bytes)
    return traffic


_SECRET = Secret(bytes(32), "0" * 32)
_ONE_HOST = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "REFT_RUN_DIR": "/nowhere"}


def _share(job: Job, store: TrustedStore) -> None:
    asked = f"{job.rank:016x}"
    entered = Attempt("0", asked, _SECRET.proof(job.rank, asked, "0"), _SECRET)
    secret.share(store.raw, job.rank, job.world, entered, _ONE_HOST)


def _identify(job: Job, store: TrustedStore) -> None:
    settings = {"run_dir": "/run/reft", "job_id": "job", "snapshot_overhead_percent": 0, "snapshot_protection": "none"}
    agreed, refusals = agreement.agree(store, job.rank, job.world, settings)
    # All threads are on one host: one node.
    assert agreed is not None and not refusals and agreed.job.local_world == job.world


def _connect(job: Job, store: TrustedStore) -> None:
    env = {"connect_sec": 60, "agent_path": "reft-agent", "agent_linger_sec": 60}
    env |= {"hang_suspect_sec": 60, "hang_action": "report", "vault_dir": "", "metrics_port": 0}
    startup.connect(env, job, store, "{}")


def _agree(job: Job, store: TrustedStore) -> None:
    gathered = gather.gather(job, store, startup.INVENTORY, inventory(job), _C.merge_inventories)
    plan, rejected, _ = _C.plan_restore(gathered.text, job.layout.node_of)
    assert plan is not None and plan.step == 41, rejected


def _match(job: Job, store: TrustedStore) -> None:
    gathered = gather.gather(job, store, startup.MATCH, "{}", gather.merge_by_rank)
    assert gathered == gather.Gathered("{}", {})


def _confirm(job: Job, store: TrustedStore) -> None:
    ranks = tuple(range(job.world))
    pair = (job.rank // 2 * 2, job.rank // 2 * 2 + 1)
    regions = [Region("o0.p0", torch.ones(4), ranks), Region("o0.p1", torch.ones(4), pair)]
    groups, different = replica_groups.confirm(regions, store, job.rank, "first")
    assert not different and [members for _, members in groups] == sorted([ranks, pair])


PHASES = {
    "secret": _share,
    "identity": _identify,
    "agents": _connect,
    "inventories and plan": _agree,
    "do the states match": _match,
    "replica groups": _confirm,
}
