"""The one exchange in which the ranks agree who they are: which of them share a node, where the
agents are, and what the job is called.

Each rank publishes where it runs (`launch.Host`). Rank 0 puts the layout together, names the job
and publishes both, with the number of the attempt. It costs a round of `gather`: about three store
operations per rank.

A job keeps its name over restarts by its launcher, because rank 0 writes the name into the store
that the launcher keeps. In a new store it gets the name back by its command and by where that was
started. A job with another command has another name, so it never meets the first one's snapshots.

Threads: the training thread. Errors: what the store raises; `ValueError` for a value in it that no
rank of this version writes.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from reft import _voice
from reft._link import agent_protocol, gather, launch
from reft._link.job_identity import (
    ID_CHARS,
    Job,
    Layout,
    Origin,
    default_run_dir,
    digest,
    safe_id,
)
from reft._link.launch import Host
from reft._link.trusted_store import NAME, TrustedStore

ROUND = "identity"

_MOST_BYTES = 16 << 10  # of what one rank publishes, and of the agreement per rank
_FEWEST_PER_BLOCK = 8
_MOST_CHARS = 4096  # of one text
_PLACE, _COMMAND = 8, 12  # hexadecimal digits of each in a name
_STATUS_SEC = 5.0


@dataclass(frozen=True)
class Member:
    """What a rank publishes.

    Attributes:
        job_id: value of REFT_JOB_ID, "" if not set.
        protection: value of REFT_SNAPSHOT_PROTECTION.
    """

    host: Host
    pid: int
    job_id: str
    protection: str


@dataclass(frozen=True)
class Agreed:
    """What all ranks have agreed on, as one rank has it.

    Attributes:
        job: identity of the rank.
        incarnation, overhead_percent, protection: see `Agreement`.
    """

    job: Job
    incarnation: int = 1
    overhead_percent: int = 0
    protection: str = "none"


@dataclass(frozen=True)
class Agreement:
    """What rank 0 publishes.

    Attributes:
        job_id, origin, layout: see `Job`.
        run_dirs: of the first rank of each node: path, and device and inode of that directory.
        incarnation: number of this attempt.
        overhead_percent: rank 0's limit. Ranks that did not know that there is one would not take
            part in how often snapshots are taken.
        protection: rank 0's. Ranks that store different parts for each other share nothing.
    """

    job_id: str
    origin: Origin
    layout: Layout
    run_dirs: tuple[tuple[str, str], ...]
    incarnation: int
    overhead_percent: int
    protection: str

    def job(self, rank: int, own: Host, env: Mapping[str, str]) -> Job:
        """Identity of a rank, which is at `own`."""
        path, identity = self.run_dirs[self.layout.node_of[rank]]
        if own.run_dir_id == identity:  # one directory may have two paths
            path = own.run_dir
        return Job(
            self.job_id,
            self.layout,
            rank,
            launch.attempt(env),
            launch.restarts_left(env),
            Path(path),
            self.origin,
        )


def agree(
    store: TrustedStore, rank: int, world: int, settings: Mapping[str, Any]
) -> tuple[Agreed | None, dict[int, str]]:
    """Takes part in the exchange.

    Args:
        store: keys that no other attempt sees.
        settings: as `settings.read()` gives them.

    Returns:
        What was agreed, None if a rank refuses; and the reasons of those that refuse.
    """
    env = os.environ
    run_dir = Path(settings["run_dir"]) if settings["run_dir"] else default_run_dir()
    own = Member(
        launch.host(run_dir, env), os.getpid(), settings["job_id"], settings["snapshot_protection"]
    )

    def conclude(text: str) -> str:
        members = parse_members(text, world)
        layout = layout_of([member.host for member in members])
        name, origin = _name(store, own, members, layout)
        _warn_of_others(own.protection, members)
        hosts = [members[ranks[0]].host for ranks in layout.nodes]
        agreement = Agreement(
            name,
            origin,
            layout,
            tuple((host.run_dir, host.run_dir_id) for host in hosts),
            secrets.randbits(63) or 1,
            settings["snapshot_overhead_percent"],
            own.protection,
        )
        return dump(agreement)

    gathered = gather.gather(
        _member(rank, world),
        store,
        ROUND,
        json.dumps({str(rank): _listed(own)}),
        gather.merge_by_rank,
        conclude,
        _MOST_BYTES,
    )
    if gathered.refusals:
        return None, gathered.refusals
    agreement = parse(gathered.text, world)
    job = agreement.job(rank, own.host, env)
    return (
        Agreed(job, agreement.incarnation, agreement.overhead_percent, agreement.protection),
        {},
    )


def refuse(store: TrustedStore, rank: int, world: int, reason: str) -> None:
    """Tells the others, in place of `agree`, that this rank does not take part."""
    gather.refuse(_member(rank, world), store, ROUND, reason)


def _member(rank: int, world: int) -> gather.Place:
    """Nobody knows yet which ranks share a node, so blocks of ranks are merged."""
    size = max(_FEWEST_PER_BLOCK, math.isqrt(world))
    return gather.Place(rank, Layout.in_blocks(world, size))


def _warn_of_others(protection: str, members: list[Member]) -> None:
    """Says which ranks do not get the protection that their setting asks for."""
    for rank, member in enumerate(members):
        if member.protection != protection:
            _voice.warn(
                f"REFT_SNAPSHOT_PROTECTION differs between ranks ({protection} on rank 0,"
                f" {member.protection} on rank {rank}): reft uses that of rank 0"
            )
            return


# -- the layout


def layout_of(hosts: Sequence[Host]) -> Layout:
    """Which ranks share a node.

    Those on one machine, with one view of processes, of one user, that see the same file systems or
    at least the same run directory. Workers of two launchers on such a host are two nodes, because
    a launcher restarts all its workers together.

    Args:
        hosts: of each rank.
    """
    host_of = _joined(hosts)
    nodes: dict[tuple[int, str], list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault((host_of[rank], host.group), []).append(rank)
    numbers: dict[int, int] = {}
    for first, _ in nodes:
        numbers.setdefault(first, len(numbers))
    return Layout(
        tuple(tuple(ranks) for ranks in nodes.values()),
        tuple(numbers[first] for first, _ in nodes),
    )


def _joined(hosts: Sequence[Host]) -> list[int]:
    """For each rank, the first rank of its host."""
    root = list(range(len(hosts)))

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = root[root[rank]]
            rank = root[rank]
        return rank

    seen: dict[tuple[object, ...], int] = {}
    for rank, host in enumerate(hosts):
        common = (host.boot, host.pids, host.user)
        keys = [(*common, "mounts", host.mounts)] if host.mounts else []
        if host.run_dir_id:
            keys.append((*common, "run dir", host.run_dir_id))
        for key in keys:
            a, b = sorted((find(seen.setdefault(key, rank)), find(rank)))
            root[b] = a
    return [find(rank) for rank in range(len(hosts))]


# -- the name


def _name(
    store: TrustedStore, own: Member, members: list[Member], layout: Layout
) -> tuple[str, Origin]:
    """What rank 0 calls the job."""
    if others := sorted({m.job_id for m in members if m.job_id != own.job_id}):
        _voice.warn(
            f"REFT_JOB_ID differs between ranks ({own.job_id or 'not set'!r} on rank 0,"
            f" {others[0] or 'not set'!r} on another): reft uses that of rank 0"
        )
    if own.job_id:
        return safe_id(own.job_id), Origin.GIVEN
    mine = launch.launch(os.environ)
    record = _Record(store)
    if known := record.read(mine):
        return known, Origin.LAUNCH
    place = digest(mine.place)[:_PLACE]
    label = safe_id(mine.label)[: ID_CHARS - _PLACE - _COMMAND - 2]
    run_dir = Path(own.host.run_dir)
    name, origin = f"{label}-{place}-{secrets.token_hex(_COMMAND // 2)}", Origin.ALONE
    if mine.command is not None:
        usual = f"{label}-{place}-{digest(mine.command)[:_COMMAND]}"
        pids = {members[rank].pid for node in layout.neighbours(0) for rank in layout.nodes[node]}
        if user := _user_of(run_dir / usual, pids):
            _voice.say(
                f"job {usual}, which has the same command, still runs (pid {user}). This one is"
                f" job {name} and starts from its beginning. If the running one is left over"
                " from an earlier start, end it and start again to continue it"
            )
        else:
            name, origin = usual, Origin.COMMAND
    if origin is Origin.ALONE or not _agents(run_dir / name):
        _report_others(run_dir, place, name, mine.command is not None)
    record.write(name, mine)
    return name, origin


class _Record:
    """What an earlier attempt of the same launch has written into the launcher's store."""

    def __init__(self, store: TrustedStore) -> None:
        raw = store.raw
        while hasattr(raw, "underlying_store"):
            raw = raw.underlying_store
        self._store, self._seal = raw, store.lasting
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
        self._key = f"reft/launch/{digest(run_id)[:_PLACE]}"
        self._is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def read(self, mine: launch.Launch) -> str:
        """The job's name, "" if there is none."""
        if self._seal is None or not self._store.check([self._key]):
            return ""
        value = bytes(self._store.get(self._key))
        opened = self._seal.open(NAME, self._key, 0, value)
        if opened is None:
            return ""
        name, _, command = opened[1].decode().partition(" ")
        # A store that is not the launcher's may be a file that an earlier run has left. In a
        # launcher's, an outsider may have put the record of another job with the same secret.
        is_same = self._is_launchers if mine.command is None else command == mine.command
        return name if name == safe_id(name) and is_same else ""

    def write(self, name: str, mine: launch.Launch) -> None:
        if self._seal is not None:
            text = f"{name} {mine.command or '-'}"
            self._store.set(self._key, self._seal.seal(NAME, self._key, 0, text.encode()))


def _agents(folder: Path) -> list[Path]:
    """Sockets of a job's agents; some may be dead."""
    return sorted(folder.glob("node-*/agent.sock"))


def _status(socket: Path) -> dict[str, Any]:
    """Status of an agent, {} if it does not answer."""
    try:
        with agent_protocol.AgentConnection(socket, timeout_sec=_STATUS_SEC) as connection:
            kind, answer, _ = connection.request(agent_protocol.STATUS_REQUEST)
            return answer if kind == agent_protocol.STATUS else {}
    except (OSError, ValueError):
        return {}


def _live_pid(status: dict[str, Any], own: set[int]) -> int:
    """A process of a job that still runs, other than our own; 0 if there is none."""
    for rank in status.get("ranks", []):
        if rank["alive"] and not rank["said_bye"] and rank["pid"] not in own:
            return int(rank["pid"])
    return 0


def _user_of(folder: Path, own: set[int]) -> int:
    """A process that uses a job's name, 0 if there is none."""
    return next(filter(None, (_live_pid(_status(s), own) for s in _agents(folder))), 0)


def _report_others(run_dir: Path, place: str, name: str, comparable: bool) -> None:
    """Says that another job's snapshots wait here and are not for this one.

    Args:
        comparable: whether this job's command can be compared with another.
    """
    why, todo = "its command differs", "run its command again"
    if not comparable:
        why, todo = "its program cannot be compared with this one", "give both one REFT_JOB_ID"
    pattern = re.compile(rf".*-{place}-[0-9a-f]{{{_COMMAND}}}")
    for folder in sorted(run_dir.glob(f"*-{place}-*")):
        if folder.name == name or not pattern.fullmatch(folder.name):
            continue
        status = next(filter(None, map(_status, _agents(folder))), {})
        if status.get("newest_committed") and not _live_pid(status, set()):
            step = status["newest_committed"]["step"]
            _voice.say(
                f"step {step} of job {folder.name} is kept for that job ({why}). This one, {name},"
                f" starts from its beginning. To continue the other, {todo}"
            )
            return


# -- as text


def _listed(member: Member) -> list[Any]:
    host = {field: value[:_MOST_CHARS] if isinstance(value, str) else value
            for field, value in asdict(member.host).items()}  # fmt: skip
    return [*host.values(), member.pid, member.job_id[:_MOST_CHARS], member.protection]


def parse_members(text: str, world: int) -> list[Member]:
    """What all ranks have published, by rank.

    Raises:
        ValueError: it is not that.
    """
    found = gather.parsed(text)
    if not isinstance(found, dict) or set(found) != {str(rank) for rank in range(world)}:
        raise ValueError("identities: not those of all ranks")
    return [_member_of(found[str(rank)]) for rank in range(world)]


def _member_of(values: Any) -> Member:
    kinds = [int if field.type == "int" else str for field in fields(Host)] + [int, str, str]
    if not isinstance(values, list) or [type(value) for value in values] != kinds:
        raise ValueError("identities: not that of a rank")
    if any(isinstance(value, str) and len(value) > _MOST_CHARS for value in values):
        raise ValueError("identities: a text is too long")
    _protection(values[-1])
    return Member(Host(*values[:-3]), *values[-3:])


def dump(agreement: Agreement) -> str:
    """For `parse`. Ranks that follow each other at one distance take three numbers."""
    return json.dumps(
        [
            agreement.job_id,
            agreement.origin.value,
            [[list(run) for run in _runs(ranks)] for ranks in agreement.layout.nodes],
            agreement.layout.hosts,
            agreement.run_dirs,
            agreement.incarnation,
            agreement.overhead_percent,
            agreement.protection,
        ],
        separators=(",", ":"),
    )


def parse(text: str, world: int) -> Agreement:
    """What rank 0 has published.

    Raises:
        ValueError: it is not that.
    """
    wrong = ValueError("identity of the job: not what rank 0 writes")
    values = gather.parsed(text)
    if not isinstance(values, list) or len(values) != 8:
        raise wrong
    name, origin, nodes, hosts, run_dirs, incarnation, percent, protection = values
    if not isinstance(name, str) or safe_id(name) != name:
        raise wrong
    if not _is_number(incarnation, 1, 2**63) or not _is_number(percent, 0, 101):
        raise wrong
    layout = Layout(_nodes(nodes, world), _hosts(hosts))
    if len(layout.hosts) != len(layout.nodes):
        raise wrong
    if not isinstance(run_dirs, list) or len(run_dirs) != len(layout.nodes):
        raise wrong
    for pair in run_dirs:
        if not isinstance(pair, list) or [type(part) for part in pair] != [str, str]:
            raise wrong
    return Agreement(
        name,
        Origin(origin),
        layout,
        tuple((path[:_MOST_CHARS], identity) for path, identity in run_dirs),
        incarnation,
        percent,
        _protection(protection),
    )


def _protection(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z0-9+:]{1,64}", value):
        raise ValueError("identities: no protection")
    return value


def _is_number(value: Any, low: int, end: int) -> bool:
    return type(value) is int and low <= value < end


def _runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first, count, distance) of ascending ranks."""
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        runs.append((ranks[at], end - at, step))
        at = end
    return runs


def _nodes(nodes: Any, world: int) -> tuple[tuple[int, ...], ...]:
    wrong = ValueError("identity of the job: not a layout of its ranks")
    if not isinstance(nodes, list) or len(nodes) > world:
        raise wrong
    seen = [False] * world
    found = []
    for node in nodes:
        ranks: list[int] = []
        for run in node if isinstance(node, list) else [None]:
            if not isinstance(run, list) or len(run) != 3:
                raise wrong
            if not all(_is_number(number, 0, world + 1) for number in run) or run[2] < 1:
                raise wrong
            ranks += range(run[0], run[0] + run[1] * run[2], run[2])
            if len(ranks) > world or not ranks or ranks[-1] >= world:
                raise wrong
        for rank in ranks:
            if seen[rank]:
                raise wrong
            seen[rank] = True
        if not ranks or ranks != sorted(ranks):
            raise wrong
        found.append(tuple(ranks))
    if not all(seen) or [ranks[0] for ranks in found] != sorted(ranks[0] for ranks in found):
        raise wrong
    return tuple(found)


def _hosts(hosts: Any) -> tuple[int, ...]:
    if not isinstance(hosts, list) or not all(_is_number(h, 0, len(hosts)) for h in hosts):
        raise ValueError("identity of the job: not the hosts of its nodes")
    return tuple(hosts)
