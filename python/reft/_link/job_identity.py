"""What identifies a rank: its job, the ranks that share its node, and names in the run directory.

All of it is agreed by all ranks at their start (`_link/agreement.py`).

Threads: values. Errors: none.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

from reft._link import folders

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
ID_CHARS = 100  # so that the path of a socket has room for the rest


@dataclass(frozen=True)
class Layout:
    """Which ranks share a node, which is to say: an agent.

    Attributes:
        nodes: ranks of each node, ascending. Nodes are in the order of their first ranks, and may
            differ in size.
        hosts: for each node, a number that it shares with the nodes that can reach its agent. Two
            launchers on one host are two nodes.
    """

    nodes: tuple[tuple[int, ...], ...]
    hosts: tuple[int, ...]

    @classmethod
    def in_blocks(cls, world: int, size: int) -> Layout:
        """Nodes of `size` ranks each (the last may have fewer), each on a host of its own."""
        starts = range(0, world, size)
        nodes = tuple(tuple(range(at, min(at + size, world))) for at in starts)
        return cls(nodes, tuple(range(len(nodes))))

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Node of each rank."""
        found = {rank: node for node, ranks in enumerate(self.nodes) for rank in ranks}
        return tuple(found[rank] for rank in range(len(found)))

    @cached_property
    def domain_of(self) -> tuple[int, ...]:
        """Failure domain of each rank: its host; if all are on one host, its node."""
        if len(set(self.hosts)) == 1:
            return self.node_of
        return tuple(self.hosts[node] for node in self.node_of)

    @property
    def world(self) -> int:
        return len(self.node_of)

    def neighbours(self, node: int) -> list[int]:
        """Nodes of the same host, `node` included."""
        return [other for other, host in enumerate(self.hosts) if host == self.hosts[node]]


class Origin(Enum):
    """How a job got its name."""

    GIVEN = "given"  # by REFT_JOB_ID
    LAUNCH = "launch"  # from an earlier attempt of the same launch
    COMMAND = "command"  # by its command and by where that was started: as an earlier launch of it
    ALONE = "alone"  # it continues nothing


@dataclass(frozen=True)
class Job:
    """Identity of a rank.

    Attributes:
        id: equal on all ranks of the job and in all its restarts, different for two jobs at a time.
        layout: equal on all ranks.
        attempt: how often the launcher has started the ranks before.
        restarts_left: how often it would start them again.
        run_dir: where the agent of the node has its socket, absolute.
        origin: equal on all ranks.
    """

    id: str
    layout: Layout
    rank: int
    attempt: int = 0
    restarts_left: int = 0
    run_dir: Path = Path("/")
    origin: Origin = Origin.GIVEN

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def node(self) -> int:
        return self.layout.node_of[self.rank]

    @property
    def nodes(self) -> int:
        return len(self.layout.nodes)

    @property
    def local_rank(self) -> int:
        """Position among the ranks of the node; the launcher may number them otherwise."""
        return self.layout.nodes[self.node].index(self.rank)

    @property
    def local_world(self) -> int:
        return len(self.layout.nodes[self.node])


def safe_id(text: str) -> str:
    """A job's name as folders and the agent can have it.

    One that has to be changed for that ends with a hash of what it was: two jobs do not become one.
    """
    safe = _UNSAFE.sub("_", text).lstrip(".")[:ID_CHARS] or "job"
    if safe == text:
        return text
    hashed = digest(text)[:8]
    return f"{safe[: ID_CHARS - len(hashed) - 1]}-{hashed}"


def digest(*parts: str) -> str:
    """32 hexadecimal digits that differ if any part does."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape")
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()[:32]


def default_run_dir(env: Mapping[str, str] | None = None) -> Path:
    """Where sockets and reports go without REFT_RUN_DIR."""
    env = os.environ if env is None else env
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        return Path(runtime) / "reft"
    shared = Path(tempfile.gettempdir()) / f"reft-{os.getuid()}"
    own = _own_run_dir(env)
    # Anybody can take a name in /tmp before its user does. All of this user's processes on this
    # host find the other place from then on, until the host is started again.
    taken = os.path.lexists(shared) and not folders.is_of_user(shared)
    return own if own is not None and (taken or folders.is_of_user(own)) else shared


def _own_run_dir(env: Mapping[str, str]) -> Path | None:
    """In the user's home, which other users cannot prepare; hosts may share it."""
    cache = env.get("XDG_CACHE_HOME", "") or os.path.join(env.get("HOME", ""), ".cache")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return Path(cache) / "reft" / f"run-{boot[:13]}" if os.path.isabs(cache) else None
