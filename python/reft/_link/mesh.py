"""Snapshots on other nodes: which node keeps copies of which one's (REFT_SNAPSHOT_PROTECTION=peer),
how its agent finds the other one, and how a restart gets at what the agent of a node has on which
no rank runs any more.

The nodes' failure domains form a ring, and a node of the next domain is a node's keeper. The first
rank of each node has its agent listen, publishes where, and tells it of which nodes it is the
keeper. With `peer`, an agent has copies of these all the time. Without, it only remembers where
they are, and fetches what is there when a restart lacks it: an accelerator fails, the job goes on
elsewhere, and the host with its agent and the vaults lives. What agents say to each other, what
they prove to each other first, and what encrypts it (REFT_MESH_TLS, the same on all nodes), is in
`agent/mesh/`.

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
from collections.abc import Sequence
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
_FETCH_MS = 300_000  # of what moves: an agent that is silent is given up within 10 s
_PATIENCE_SEC = 5.0
_PUBLISHED_SEC = 5.0
_NOWHERE = "none"  # as REFT_MESH_ADDRESS
_MOST_FETCHED = 4096  # ranks, which an agent takes at once


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
    if wanted == _NOWHERE:
        raise ValueError("REFT_MESH_ADDRESS is none")
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


def _room(env: dict[str, Any], own_bytes: int, own_yet: int, local_world: int) -> int:
    """Bytes that copies of other nodes' vaults may take here.

    Args:
        own_bytes: that a vault of this node takes.
        own_yet: how many of them are yet to come.
    """
    if limit := env["snapshot_host_bytes"]:
        return max(0, int(limit) - own_bytes * local_world)
    if (room := host_memory.tightest()) is None:
        return 1 << 62
    return max(0, int(_ROOM_SHARE * room.usable) - own_bytes * own_yet)


def fetch(
    env: dict[str, Any], job: Job, client: _C.AgentClient, ranks: list[int], world: int
) -> list[int]:
    """Has this node's agent copy the vaults of ranks from agents of nodes of the attempt before of
    which it is the keeper.

    Args:
        ranks: of that attempt.
        world: how many it had.

    Returns:
        The ranks of which it has a copy now.
    """
    if job.local_rank != 0 or not ranks:
        return []
    room = _room(env, 0, 0, job.local_world) // 2  # this node's own vaults are yet to come
    wanted = {"world": world, "ranks": ranks[:_MOST_FETCHED], "room": room}
    what = f"what {_voice.ranks(ranks)} of the attempt before left on another node"
    waiting = (
        f"node {job.node} fetches {what}; training waits for it, {_FETCH_MS // 60_000} minutes at most"
    )
    try:
        with _voice.said_after(_PATIENCE_SEC, waiting):
            answer, _ = client.request(
                agent_protocol.MESH_FETCH, json.dumps(wanted), agent_protocol.MESH_FETCHED, _FETCH_MS
            )
        said = json.loads(answer)
        found, problem = [int(rank) for rank in said["ranks"]], str(said["problem"])
    except Exception as error:  # noqa: BLE001  # the restart goes on with what there is
        found, problem = [], str(error) or type(error).__name__
    if problem:
        _voice.warn(f"node {job.node} cannot fetch {what}: {problem}")
    return found


class TlsDiffers(ValueError):
    """Another node has another REFT_MESH_TLS: their agents would refuse each other."""


class Copies:
    """This node's part, for its first rank; of other ranks there is nothing to do.

    Args:
        wanted: whether this job takes snapshots.

    Attributes:
        why_not: why other nodes cannot keep copies of this one's snapshots; "" if they can, or if
            this is not the first rank.
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
        self._tls: str = env["mesh_tls"]  # "on" or "off"
        self.why_not = ""
        self._opened: dict[str, Any] | None = None  # where this node's agent listens
        self._sources_found: list[dict[str, Any]] | None = None
        self._copied: bool | None = None  # what the agent was asked for; None: nothing yet
        self._keeper_of = keepers(job.layout)
        if not wanted or job.local_rank != 0 or not self._keeper_of:
            return
        promised = is_copied(env["snapshot_protection"])
        if not promised and env["mesh_address"] == _NOWHERE:
            self.why_not = "REFT_MESH_ADDRESS is none"
            store.put(AGENT, f"mesh/{job.node}", job.rank, "0 ")
            return
        try:
            self._opened = self._open()
            if promised:  # else it can wait until the others have said where they listen
                self._sources_found = self._sources(env["connect_sec"])
        except Exception as error:  # noqa: BLE001  # all else of reft works
            self.why_not = f"other nodes cannot reach its agent: {error or type(error).__name__}"
            if not promised:
                _voice.debug(f"node {job.node}: vaults stay on their node: {error}")
                return
            _voice.warn(
                f"node {job.node}: a lost node is NOT survived: copies of snapshots cannot go to"
                f" another node: {error or type(error).__name__}"
            )
            # What is said about a lost node from here on is about what the ranks store.
            env["snapshot_protection"] = placement(env["snapshot_protection"])

    def _open(self) -> dict[str, Any]:
        """Has the agent listen; returns what it is to be told once there is room for copies."""
        job, port, address = self._job, 0, ""
        try:
            here = "127.0.0.1" if len(set(job.layout.hosts)) == 1 else ""
            address = own_address(self._env["mesh_address"] or here)
            wanted = {
                "key": key_of(self._store.mesh_key, job.id),
                "address": address,
                "port": 0,
                "tls": int(self._tls == "on"),
            }
            answer, _ = self._client.request(
                agent_protocol.MESH_OPEN, json.dumps(wanted), agent_protocol.MESH_AT, _ANSWER_MS
            )
            said = json.loads(answer)
            if bool(said.get("tls")) != (self._tls == "on"):
                raise RuntimeError("the running agent is of a version without REFT_MESH_TLS")
            port = int(said["port"])
        finally:  # the node that is to keep copies of this one's ranks waits for it
            self._store.put(AGENT, f"mesh/{job.node}", job.rank, f"{port} {address} {self._tls}")
        return {**wanted, "port": port, "rate": self._env["mesh_bytes_per_sec"]}

    def _sources(self, seconds: float) -> list[dict[str, Any]]:
        nodes = [node for node, at in enumerate(self._keeper_of) if at == self._job.node]
        sources = [self._source(node, seconds) for node in nodes]
        return [source for source in sources if source is not None]

    def _source(self, node: int, seconds: float) -> dict[str, Any] | None:
        """Where the agent of a node listens; None if it does not.

        Raises:
            TlsDiffers: that node encrypts and this one does not, or the other way round.
        """
        ranks, key = self._job.layout.nodes[node], f"mesh/{node}"
        self._store.wait([key], timedelta(seconds=float(seconds)))
        said = self._store.read(AGENT, key, ranks[0], _LONGEST_ANSWER, was_there=True).decode()
        port, _, rest = said.partition(" ")
        if port == "0":
            return None
        address, _, tls = rest.partition(" ")
        if tls != self._tls:
            raise TlsDiffers(
                f"REFT_MESH_TLS differs between the nodes (node {self._job.node}: {self._tls},"
                f" node {node}: {tls or 'not known'}): set it to the same value on all of them"
            )
        return {"address": str(ipaddress.ip_address(address)), "port": int(port), "ranks": ranks}

    def keep(self, own_bytes: int) -> None:
        """Asks the agent for what the protection in force needs, once this rank's own vault has its
        memory.

        Args:
            own_bytes: that a vault of this node takes.
        """
        copied = is_copied(self._env["snapshot_protection"])
        if self._opened is None or self._copied == copied:
            return
        self._copied = copied
        job = self._job
        try:
            if self._sources_found is None:
                self._sources_found = self._sources(_PUBLISHED_SEC)
        except Exception as error:  # noqa: BLE001  # this node keeps nothing for others
            differs = isinstance(error, TlsDiffers) and not self.why_not
            say = _voice.warn if copied or differs else _voice.debug
            say(f"node {job.node}: other nodes' vaults stay there: {error or type(error).__name__}")
            if not copied:
                return
        sources, local = self._sources_found or [], job.local_world
        if copied:
            room = _room(self._env, own_bytes, local - 1, local)
            self._say(sources, job.layout.nodes[job.node], 0, room)
        else:
            self._say(sources, [], 1, 0)

    def drop(self) -> None:
        """Memory is short: what this node keeps for others goes."""
        if self._opened is None:
            return
        self._say([], [], 0, 0)
        self._opened = None
        others = [rank for source in self._sources_found or [] for rank in source["ranks"]]
        if others and self._copied:
            _voice.warn(
                f"node {self._job.node}: memory is short: dropped its copies of snapshots of"
                f" {_voice.ranks(others)}. If their node is lost, these copies cannot restore it"
            )

    def _say(
        self, sources: list[dict[str, Any]], copied: Sequence[int], on_demand: int, room: int
    ) -> None:
        assert self._opened is not None
        wanted = {"sources": sources, "copied": list(copied), "on_demand": on_demand, "room": room}
        self._client.keep_saying(agent_protocol.MESH_KEEP, json.dumps({**self._opened, **wanted}))
