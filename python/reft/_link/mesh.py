"""Copies of snapshots on another node (REFT_SNAPSHOT_PROTECTION=peer): which node keeps those of
which, and how its agent finds the other one.

The nodes' failure domains form a ring, and the copies of a node's ranks go to a node of the next
domain. The first rank of each node has its agent listen, publishes where, and tells it of which
nodes it is to keep copies; what agents say to each other, and what they prove to each other first,
is in `agent/mesh/`.

Threads: the training thread. Errors: none: `Copies` warns, and training has snapshots then that a
lost node does not survive.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import socket
from datetime import timedelta
from typing import Any

from reft import _C, _voice
from reft._link import agent_protocol, host_memory
from reft._link.job_identity import Job, Layout
from reft._link.protection import is_copied, placement
from reft._link.trusted_store import AGENT, TrustedStore

_ROOM_SHARE = 0.9  # of what vaults could take now
_LONGEST_ANSWER = 128
_ANY_PORT = 9
_ANYWHERE = ("192.0.2.1", "2001:db8::1")  # reserved for documentation: no host has them
_ANSWER_MS = 10000


def keepers(layout: Layout) -> list[int]:
    """For each node, the node that keeps copies of its ranks; none if all share a failure domain."""
    domains: dict[int, list[int]] = {}
    for node, ranks in enumerate(layout.nodes):
        domains.setdefault(layout.domain_of[ranks[0]], []).append(node)
    order = list(domains)
    if len(order) < 2:
        return []
    kept = [0] * len(layout.nodes)
    for at, domain in enumerate(order):
        others = domains[order[(at + 1) % len(order)]]
        for i, node in enumerate(domains[domain]):
            kept[node] = others[i % len(others)]
    return kept


def key_of(job_key: bytes, job: str) -> str:
    """What agents of a job authenticate each other with, as hexadecimal digits."""
    return hmac.new(job_key, f"reft mesh {job}".encode(), hashlib.sha256).hexdigest()


def own_address(wanted: str) -> str:
    """The numeric address at which the other nodes reach this one: by default, the one from which
    this node reaches the job's store. Where that is of this host alone, as on the node of the store
    if its name stands for 127.0.1.1, it is the one of the default route.

    Raises:
        ValueError: `wanted` is no numeric address.
        OSError: none is known.
    """
    if wanted:
        return str(ipaddress.ip_address(wanted))
    found = ""
    for target in (os.environ.get("MASTER_ADDR") or "localhost", *_ANYWHERE):
        try:
            address = _towards(target)
        except OSError:  # an unknown name, or no route
            continue
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return address
        found = found or address
    if not found:
        raise OSError("this node's address is not known: set REFT_MESH_ADDRESS")
    return found


def _towards(target: str) -> str:
    """The address from which this host would send to another one. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        target, _ANY_PORT, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class Copies:
    """This node's part, for its first rank; of other ranks, and without `peer`, there is nothing to
    do.

    Args:
        wanted: whether this job takes snapshots.
    """

    def __init__(
        self,
        env: dict[str, Any],
        job: Job,
        store: TrustedStore,
        client: _C.AgentClient,
        wanted: bool,
    ) -> None:
        self._env, self._job, self._store, self._client = env, job, store, client
        self._keep: dict[str, Any] | None = None
        self._kept = False
        keeper_of = keepers(job.layout)
        wanted = wanted and is_copied(env["snapshot_protection"])
        if not wanted or job.local_rank != 0 or not keeper_of:
            return
        try:
            self._keep = self._open(keeper_of)
        except Exception as error:  # noqa: BLE001  # all else of reft works
            _voice.warn(
                f"node {job.node}: a lost node is NOT survived: copies of snapshots cannot go to"
                f" another node: {error or type(error).__name__}"
            )
            # What is said about a lost node from here on is about what the ranks store.
            env["snapshot_protection"] = placement(env["snapshot_protection"])

    def _open(self, keeper_of: list[int]) -> dict[str, Any]:
        """Has the agent listen; returns what it is to be told once there is room for copies."""
        job, port, address = self._job, 0, ""
        try:
            here = "127.0.0.1" if len(set(job.layout.hosts)) == 1 else ""
            address = own_address(self._env["mesh_address"] or here)
            wanted = {"key": key_of(self._store.mesh_key, job.id), "address": address, "port": 0}
            answer, _ = self._client.request(
                agent_protocol.MESH_OPEN, json.dumps(wanted), agent_protocol.MESH_AT, _ANSWER_MS
            )
            port = int(json.loads(answer)["port"])
        finally:  # the node that is to keep copies of this one's ranks waits for it
            self._store.put(AGENT, f"mesh/{job.node}", job.rank, f"{port} {address}")
        sources = [self._source(node) for node, at in enumerate(keeper_of) if at == job.node]
        return {
            **wanted,
            "port": port,
            "copied": job.layout.nodes[job.node],
            "sources": [source for source in sources if source is not None],
            "rate": self._env["mesh_bytes_per_sec"],
        }

    def _source(self, node: int) -> dict[str, Any] | None:
        """Where the agent of a node listens; None if it does not."""
        ranks, key = self._job.layout.nodes[node], f"mesh/{node}"
        self._store.wait([key], timedelta(seconds=float(self._env["connect_sec"])))
        said = self._store.read(AGENT, key, ranks[0], _LONGEST_ANSWER, was_there=True).decode()
        port, _, address = said.partition(" ")
        if port == "0":
            return None
        return {"address": str(ipaddress.ip_address(address)), "port": int(port), "ranks": ranks}

    def keep(self, own_bytes: int) -> None:
        """Tells the agent to begin, once this rank's own vault has its memory.

        Args:
            own_bytes: that a vault of this node takes.
        """
        if self._keep is None or self._kept:
            return
        self._kept = True
        limit = self._env["snapshot_host_bytes"]
        left = limit - own_bytes * self._job.local_world if limit else None
        if left is None:
            room = host_memory.tightest()
            left = (1 << 62) if room is None else int(_ROOM_SHARE * room.usable)
            left -= own_bytes * (self._job.local_world - 1)  # of which some may be yet to come
        self._say(self._keep, max(0, left))

    def drop(self) -> None:
        """Memory is short: what this node keeps for others goes."""
        if self._keep is not None:
            self._say({**self._keep, "sources": [], "copied": []}, 0)
            self._keep = None

    def _say(self, what: dict[str, Any], room: int) -> None:
        self._client.keep_saying(agent_protocol.MESH_KEEP, json.dumps({**what, "room": room}))
