"""How a rank starts: it finds or starts its node's agent, and all ranks agree on what to resume
from.

Each rank checks its own vault; the inventories are merged per node, then for the job
(`_link/gather.py`), and every rank computes the same plan from that one inventory.

Threads: the training thread, before training. Errors: `_C.Unavailable` without an agent; a damaged
vault is reported and another source used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from reft import _C, __version__, _voice
from reft._continuation import plain
from reft._link import (
    agent_protocol,
    agreement,
    bounded_json,
    folders,
    gather,
    host_memory,
    job_identity,
    launch,
    mesh,
    vault_place,
)
from reft._link.trusted_store import AGENT, OBJECTS, ROUND, TABLE, TrustedStore
from reft._session import restore_ways
from reft._session.restore_ways import Begun, Way
from reft._session.saved import FORMAT

INVENTORY = "inventory"  # the rounds in which all ranks take part
FETCHED = "fetched"
MATCH = "match"
VERIFY = "verify"
WAIT = "wait"
_OOM = "oom"
_REASON_CHARS = 300
_NO_AGENT = "none: "
_LONGEST_ANSWER = 2000
_ANSWER_SEC = 2.0
_NODE_DIRECTORY = re.compile(r"node-(\d{1,7})")
_FIRST_SEC = 5.0  # how long a rank that gave up waits for what the first one says


class OthersGaveUp(_C.Unavailable):
    """Other ranks train without snapshots, so this one does too.

    Attributes:
        to_say: whether it is for this rank to say so: the lowest of those that could have had
            snapshots.
    """

    def __init__(self, text: str, to_say: bool) -> None:
        super().__init__(text)
        self.to_say = to_say


@dataclass(frozen=True)
class Source:
    """One step that this rank can be restored from.

    Attributes:
        plan: which vaults it comes from.
        restorer: carries out the plan on this rank.
        saved: the rank's small state.
    """

    plan: _C.RestorePlan
    restorer: _C.Restorer
    saved: dict[str, Any]


@dataclass
class Agreed:
    """What all ranks agreed to resume from.

    Attributes:
        own_fd: descriptor of this rank's vault, which the caller closes; -1 if there is none to go
            on with. Without a `newest`, the vault is only kept.
        newest: None: training starts from its beginning.
        inventory: of all vaults, as all ranks know it.
        oom_kills: 1: the kernel has ended a process of a rank's control group for want of memory
            since the attempt before began; 2: although that attempt took no snapshots.
        way: how `newest` is restored.
        begun: the restore that an attempt before this one has not ended.
    """

    own_fd: int = -1
    newest: Source | None = None
    inventory: str = ""
    oom_kills: int = 0
    way: Way = Way.NEWEST
    begun: Begun = Begun()


def give_up(job: job_identity.Job, store: TrustedStore, reason: str) -> None:
    """Tells the ranks that wait for this one that it trains without snapshots, so that all do;
    never raises.

    Without it they would wait as long as the process group allows, and then end. What this rank has
    written already stays: some may have read it.
    """
    reason = _shortened(reason)

    answers: list[Callable[[], None]] = [lambda: gather.refuse(job, store, INVENTORY, reason)]
    # For those that have read the inventories: a step that they agreed on is resumed by all or by
    # none.
    rounds = (FETCHED, VERIFY, WAIT, MATCH)
    answers += [partial(gather.refuse, job, store, name, reason) for name in rounds]
    if job.local_rank == 0:
        answer = f"{_NO_AGENT}rank {job.rank}: {reason}"
        key = f"agent/{job.node}"
        answers.append(lambda: store.put_new(AGENT, key, job.rank, answer))
    _answer_all(job.rank, answers)


def give_up_early(rank: int, world: int, store: TrustedStore, reason: str) -> None:
    """As `give_up`, for a rank that does not know its job yet."""
    _answer_all(rank, [lambda: agreement.refuse(store, rank, world, _shortened(reason))])


def _answer_all(rank: int, answers: list[Callable[[], None]]) -> None:
    for answer in answers:
        try:
            answer()
        except Exception as error:  # noqa: BLE001  # training must go on
            _voice.warn_once(
                "give up",
                f"rank {rank}: cannot inform the other ranks that it trains without snapshots:"
                f" {error}",
            )


def said_by_the_first(rank: int, store: TrustedStore, name: str, reason: str) -> bool:
    """Whether rank 0 refused round `name` for the same reason, which it reports: settings are the
    same on all ranks, most of the time."""
    if rank == 0:
        return False
    try:
        store.wait([gather.first_key(name)], timedelta(seconds=_FIRST_SEC))
        return gather.refusal_of_the_first(store, name) == _shortened(reason)
    except Exception:  # noqa: BLE001  # it writes nothing at all: reft is disabled there
        return False


def _shortened(reason: str) -> str:
    return " ".join(reason.split())[:_REASON_CHARS]


def all_take_part(rank: int, world: int, refusals: dict[int, str]) -> None:
    """Raises OthersGaveUp if a rank has refused."""
    if not refusals:
        return
    first = min(refusals)
    others = f", nor can {len(refusals) - 1} more" if len(refusals) > 1 else ""
    taking_part = [other for other in range(world) if other not in refusals]
    raise OthersGaveUp(
        f"rank {first} cannot take part ({refusals[first]}){others}",
        rank == min(taking_part, default=rank),
    )


def hello(job: job_identity.Job, incarnation: int, secret: str) -> str:
    """How this rank introduces itself to the agent.

    Args:
        secret: name of the file of the job's secret, which goes when the agent does; "" if it is
            not reft's to remove.
    """
    return json.dumps(
        {
            "role": "rank",
            "protocol": agent_protocol.VERSION,
            "version": __version__,
            "job": job.id,
            "node": job.node,
            "rank": job.rank,
            "local_rank": job.local_rank,
            "world": job.world,
            "local_world": job.local_world,
            "nodes": job.nodes,
            "pid": os.getpid(),
            "started": launch.start_ticks(),
            "attempt": job.attempt,
            "restarts_left": job.restarts_left,
            "incarnation": f"{incarnation:016x}",
            "secret": secret,
        }
    )


def connect(env: dict[str, Any], job: job_identity.Job, store: TrustedStore, hello: str) -> Any:
    """The first rank of a node finds the agent that serves it, starts one if there is none, and
    tells the others where it is, or that it failed."""
    timeout = float(env["connect_sec"])
    key = f"agent/{job.node}"
    folder = job.run_dir / job.id
    if job.local_rank != 0:
        store.wait([key], timedelta(seconds=timeout))
        first = job.layout.nodes[job.node][0]
        sent = store.read(AGENT, key, first, _LONGEST_ANSWER, was_there=True)
        answer = sent.decode(errors="replace")
        if not _NODE_DIRECTORY.fullmatch(answer):
            problem = answer.removeprefix(_NO_AGENT)
            raise OthersGaveUp(f"no agent on this node: {problem}", job.local_rank == 1)
        return _C.AgentClient(str(folder / answer / "agent.sock"), hello, int(timeout * 1000), [])
    try:
        number = _agent_of(job)
        argv = _agent_argv(env, job, number)
        socket = str(folder / f"node-{number}" / "agent.sock")
        client = _C.AgentClient(socket, hello, int(timeout * 1000), argv)
    except Exception as error:
        reason = _shortened(str(error) or type(error).__name__)
        store.put(AGENT, key, job.rank, _NO_AGENT + reason)
        raise
    store.put(AGENT, key, job.rank, f"node-{number}")
    return client


def _agent_of(job: job_identity.Job) -> int:
    """The number in the name of the directory of this node's agent.

    An agent keeps the number of its node when it started, and nodes are numbered anew at each start
    of the ranks. So an agent of this host that no node of that number is here for serves another
    node of the host: what it holds is not lost.
    """
    answering, elsewhere, this_host = [], set(), launch.host_of_agents()
    for socket in (job.run_dir / job.id).glob("node-*/agent.sock"):
        matched = _NODE_DIRECTORY.fullmatch(socket.parent.name)
        host = _host_of_agent(socket) if matched else None
        if matched and host == this_host:
            answering.append(int(matched[1]))
        elif matched and host is not None:
            elsewhere.add(int(matched[1]))
    here = job.layout.neighbours(job.node)
    if job.node in answering:
        return job.node
    without = [node for node in here if node not in answering]
    free = sorted(number for number in answering if number not in here)
    place = without.index(job.node)
    if place < len(free):
        return free[place]
    number = job.node
    while number in elsewhere:
        number += job.nodes  # no other node takes it, either
    return number


def _host_of_agent(socket: Path) -> str | None:
    """The host of the agent that listens there; None: none does.

    It may be another one: containers of a machine can share the run directory. What listens on
    another machine that shares the file system cannot be reached from here.
    """
    try:
        with agent_protocol.AgentConnection(socket, timeout_sec=_ANSWER_SEC) as connection:
            return str(connection.welcome.get("host", ""))
    except (OSError, ValueError):
        return None


def _agent_argv(env: dict[str, Any], job: job_identity.Job, number: int) -> list[str]:
    binary = env["agent_path"] or str(Path(_C.__file__).parent / "bin" / "reft-agent")
    # Its settings are in the environment that it inherits.
    return [binary, "--run-dir", str(job.run_dir), "--job", job.id, "--node", str(number)]


def vault_of(client: _C.AgentClient, rank: int, world: int, *, is_copy: bool = False) -> int:
    """A descriptor of the vault that a rank of `world` has left, or of the agent's copy of one of
    another node, which the caller closes.

    Raises:
        PeerFailure: the agent has none.
    """
    wanted = json.dumps({"rank": rank, "world": world, "copy": int(is_copy)})
    return client.request(agent_protocol.VAULT_GET, wanted, agent_protocol.VAULT_FD)[1]


def vault_elsewhere(env: dict[str, Any], job: job_identity.Job, adopted_fd: int) -> str:
    """Where the vault of this rank is, if it goes on in one that an earlier start has put elsewhere
    than the settings want; "" if not."""
    if adopted_fd < 0:
        return ""
    is_there = os.readlink(f"/proc/self/fd/{adopted_fd}")
    in_memory = is_there.startswith("/memfd:")
    if not env["vault_dir"]:
        return "" if in_memory else f"files in {Path(is_there).parent.parent}"
    try:
        wanted = os.stat(vault_path(env, job, job.rank))
        if os.path.samestat(wanted, os.fstat(adopted_fd)):
            return ""
    except OSError:
        pass  # no file is there
    return "host memory held by reft-agent" if in_memory else f"files like {is_there}"


def vault_path(env: dict[str, Any], job: job_identity.Job, rank: int) -> str:
    """The file of a rank's vault under REFT_VAULT_DIR."""
    return str(Path(env["vault_dir"]) / job.id / f"rank-{rank}.vault")


def _damaged_headers(fd: int, rank: int) -> list[str]:
    """Sealed slots that do not read as such. A kill leaves none: a header is whole before its slot is sealed."""
    try:
        listing = _C.list_vault(fd)
    except _C.Corruption:
        return []  # a table, of which the inventory tells
    sealed = sum(state == "sealed" for state, _, _ in listing["raw_slots"])
    return [f"rank {rank}: checksum of a header does not match"] * (sealed - len(listing["slots"]))


def _free_name(path: str) -> str:
    """Where a file can be moved that is in the way of a vault."""
    name, number = f"{path}.unusable", 1
    while os.path.lexists(name):
        number += 1
        name = f"{path}.unusable-{number}"
    return name


def _found_at(path: str, job: job_identity.Job) -> str:
    """What the agent did not take for the vault of this rank."""
    if os.path.islink(path):
        return "a symbolic link"
    if os.path.isdir(path):
        return "a directory"
    if not os.path.isfile(path):
        return "not a regular file"
    try:
        with open(path, "rb") as file:
            listing = _C.list_vault(file.fileno())
    except (_C.Error, OSError) as error:
        return str(error).removeprefix("vault: ")
    if (listing["job"], listing["rank"]) != (job.id, job.rank):
        return f"the vault of rank {listing['rank']} of job {listing['job']}"
    return "a vault that the agent of this node does not have"


def _agent_has(client: Any, path: str, job: job_identity.Job) -> bool:
    """Whether the vault that the agent keeps for this rank is the file at `path`, and not memory or
    another file."""
    fd = vault_of(client, job.rank, job.world)
    try:
        return os.path.lexists(path) and os.path.samestat(os.fstat(fd), os.lstat(path))
    finally:
        os.close(fd)


def _exchange_files(path: str, job: job_identity.Job) -> None:
    """Puts this rank's vault of a job of as many ranks in its place, and one of more or fewer ranks
    beside it. The agent knows both names (`agent/peers/rank_table.h`)."""
    there = _world_of(path, job)
    if there in (None, job.world):
        return
    os.rename(path, _path_aside(path, there))
    fitting = _path_aside(path, job.world)
    if _world_of(fitting, job) == job.world:
        os.rename(fitting, path)


def _path_aside(path: str, world: int | None) -> str:
    return f"{path.removesuffix('.vault')}-of-{world}.vault"


def _world_of(path: str, job: job_identity.Job) -> int | None:
    """How many ranks the job had that made this rank's vault; None if `path` is no such vault."""
    try:
        if os.path.islink(path) or not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            listing = _C.list_vault(file.fileno())
    except (_C.Error, OSError):
        return None
    if (listing["job"], listing["rank"]) != (job.id, job.rank):
        return None
    return int(listing["world"])


def _keep_what_is_no_vault(path: str, job: job_identity.Job) -> None:
    """Moves away what lies where this rank's vault will be made: it may be all that is left of a
    training.

    Raises:
        Unavailable: it cannot be moved, so there is no place for a vault.
    """
    if not os.path.lexists(path):
        return
    found, kept = _found_at(path, job), _free_name(path)
    try:
        os.rename(path, kept)
    except OSError as error:
        raise _C.Unavailable(
            f"cannot make the vault: {path} exists ({found}) and cannot be moved: {error}"
        ) from error
    _voice.say(
        f"rank {job.rank}: {path} is not usable ({found}) and is kept as {Path(kept).name}; training starts from its"
        " beginning unless another source has the state"
    )


def agree(
    env: dict[str, Any],
    job: job_identity.Job,
    store: TrustedStore,
    client: _C.AgentClient,
    session: int,
) -> Agreed:
    """Publishes what this node has of this rank, and decides with all others.

    Args:
        session: how many default process groups this process has made: a snapshot belongs to one of
            them.

    Raises:
        OthersGaveUp: a rank cannot take part.
    """
    inventory, own_fd = _inventory(env, job, client)
    agreed = Agreed()
    try:
        _C.fault_point("restore_agree", 0)
        _report_oom_kills(env, store, job.rank, own_fd)  # before the others can go on
        restore_ways.report(store, job.rank, restore_ways.found_in(own_fd))
        gathered = gather.gather(job, store, INVENTORY, inventory, _C.merge_inventories)
        all_take_part(job.rank, job.world, gathered.refusals)
        begun = Begun()
        if gathered.text != _C.merge_inventories([]):
            agreed.oom_kills = _oom_kills(store)
            begun = restore_ways.reported(store)
        if not env["snapshot"]:
            unused = _plan_unused(env, job, gathered.text)
            if unused is not None and unused.takes_own(job.rank):
                agreed.own_fd, agreed.begun = own_fd, begun
            return agreed
        inventory = _with_fetched(env, job, store, client, gathered.text)
        plan, agreed.way = _plan_after(begun, env, job, inventory)
        if plan is not None:
            restorer = _C.Restorer(client, plan, job.rank)
            saved = plain.loads(_small_state(job, store, plan, restorer))
            if saved.get("format") != FORMAT:
                raise _C.Unavailable(
                    f"the snapshot of step {plan.step} is of another version of reft. Resume with"
                    " that version, or set REFT_RESUME=off for one start"
                )
            if _is_of(session, saved, plan, job):
                goes_on = plan.saved_by != job.world or plan.is_near(job.rank, job.rank)
                own = own_fd if goes_on else -1
                agreed.own_fd, agreed.newest = own, Source(plan, restorer, saved)
                agreed.inventory, agreed.begun = inventory, begun
        return agreed
    finally:
        if own_fd >= 0 and agreed.own_fd < 0:
            os.close(own_fd)


def _report_oom_kills(
    env: dict[str, Any], store: TrustedStore, rank: int, own_fd: int
) -> None:
    """Reports to the other ranks if vaults may have made the kernel end a process. Not with limits
    that the user has set."""
    if own_fd < 0 or env["snapshot_host_bytes"]:
        return
    if not vault_place.in_memory(env["vault_dir"]):
        return
    try:
        listing = _C.list_vault(own_fd)
        if host_memory.oom_killed_since(listing["oom_mark"]):
            store.put(ROUND, _OOM, rank, "2" if listing["given_up"] else "1")
    except _C.Error:
        return


def _oom_kills(store: TrustedStore) -> int:
    said = store.found(ROUND, _OOM, 1)
    if said is None:
        return 0
    return 2 if said == b"2" else 1


def _inventory(
    env: dict[str, Any], job: job_identity.Job, client: _C.AgentClient
) -> tuple[str, int]:
    """What the vaults offer that this rank answers for, and the descriptor of its own, -1 if it has
    none."""
    wanted_world = json.dumps({"world": job.world})
    payload, _ = client.request(
        agent_protocol.VAULT_LIST, wanted_world, agent_protocol.VAULT_INVENTORY
    )
    listed = bounded_json.loads(payload.encode(), limit=agent_protocol.MAX_PAYLOAD)
    here = {
        (int(vault["rank"]), int(vault["world"]), bool(vault["copy"]))
        for vault in listed["vaults"]
    }
    if env["vault_dir"]:  # before anything is published: then the others count on this rank
        own_path = vault_path(env, job, job.rank)
        folders.make_private(Path(own_path).parent)  # then it stays the one that is checked
        if problem := folders.problem(Path(own_path).parent):
            raise _C.Unavailable(
                f"vault directory {env['vault_dir']} is not safe: {problem};"
                " mend that, or set REFT_VAULT_DIR to another place"
            )
        if problem := _C.vault_place_problem(str(Path(own_path).parent)):
            raise _C.Unavailable(
                f"vault directory {env['vault_dir']} {problem};"
                " set REFT_VAULT_DIR to a directory on tmpfs, ext4 or xfs, or unset it"
            )
        _exchange_files(own_path, job)
        if (job.rank, job.world, False) not in here or not _agent_has(client, own_path, job):
            _keep_what_is_no_vault(own_path, job)
    neighbours = set(job.layout.nodes[job.node])
    own_fd = -1
    texts = []
    for rank, world, is_copy in sorted(here):
        # The first one answers for vaults of ranks that are on other nodes now, or not any more.
        if rank != job.rank and (job.local_rank != 0 or rank in neighbours):
            continue
        fd = vault_of(client, rank, world, is_copy=is_copy)
        try:
            texts += _offer_of(fd, env, job, rank, is_copy)
        finally:
            if (rank, world, is_copy) == (job.rank, job.world, False):
                own_fd = fd
            else:
                os.close(fd)
    return _C.merge_inventories(texts), own_fd


def _offer_of(
    fd: int, env: dict[str, Any], job: job_identity.Job, rank: int, is_copy: bool
) -> list[str]:
    """The inventory of one vault of this node; none if it is not usable. Says what is damaged."""
    try:
        text, faults = _C.inventory_of(fd, job.node, is_copy)
        for fault in [*faults, *_damaged_headers(fd, rank)]:
            _voice.say(f"damaged snapshot: {fault}; reft uses another source, if any")
    except _C.Corruption as error:
        place = f" ({vault_path(env, job, rank)})" if env["vault_dir"] else ""
        _voice.say(
            f"vault of rank {rank}{place} is not usable: {error}; reft uses another source, if any"
        )
        return []
    return [text]


def _with_fetched(
    env: dict[str, Any],
    job: job_identity.Job,
    store: TrustedStore,
    client: _C.AgentClient,
    inventory: str,
) -> str:
    """The inventory of all vaults, those included that are on nodes without ranks. Such a node may
    have run the ranks of which there is no vault here."""
    missing, world = _C.ranks_without_vault(inventory, job.world)
    if not missing:
        return inventory
    texts = []
    fetched = [] if env["resume"] == "off" else mesh.fetch(env, job, client, missing, world)
    for rank in fetched:
        try:
            fd = vault_of(client, rank, world, is_copy=True)
        except _C.Error:
            continue
        try:
            texts += _offer_of(fd, env, job, rank, is_copy=True)
        finally:
            os.close(fd)
    if fetched:
        _voice.say(
            f"vaults of {_voice.ranks(fetched)} came from the agent of a node that has no rank any"
            " more"
        )
    merged = _C.merge_inventories(texts)
    gathered = gather.gather(job, store, FETCHED, merged, _C.merge_inventories)
    all_take_part(job.rank, job.world, gathered.refusals)
    return _C.merge_inventories([inventory, gathered.text])


def _plan(env: dict[str, Any], job: job_identity.Job, inventory: str) -> _C.RestorePlan | None:
    """The same plan on every rank; None if training starts from its beginning."""
    if env["resume"] == "off":
        return None
    plan, rejected, found = _C.plan_restore(inventory, job.layout.node_of)
    if plan is not None or job.rank != 0:
        return plan
    if found:
        reasons = "; ".join(rejected) or "no step is sealed by all ranks yet"
        _voice.say(f"no step can be resumed ({reasons}); training starts from its beginning")
    elif job.attempt > 0:
        _voice.say(
            "no snapshot of an earlier attempt is left, because the agents that kept them ended"
            " too; training starts from its beginning. Snapshots in REFT_VAULT_DIR survive the"
            " agent"
        )
    return None


def _plan_unused(
    env: dict[str, Any], job: job_identity.Job, inventory: str
) -> _C.RestorePlan | None:
    """Without snapshots nothing is restored. What could have been stays until the agent deletes it
    at a clean end; a start that ends otherwise leaves it to the next one."""
    if env["resume"] == "off":
        return None
    plan, _, _ = _C.plan_restore(inventory, job.layout.node_of)
    if plan is not None and job.rank == 0:
        _voice.say(
            f"job {job.id} has a snapshot of step {plan.step}, but REFT_SNAPSHOT=0: training starts"
            " from its beginning, and the snapshot is deleted when it ends cleanly. To continue at"
            " that step, start without REFT_SNAPSHOT=0; to keep it, set another REFT_JOB_ID"
        )
    return plan


def _plan_after(
    begun: Begun, env: dict[str, Any], job: job_identity.Job, inventory: str
) -> tuple[_C.RestorePlan | None, Way]:
    """The plan of the newest step, or where attempts have ended while they restored it, another."""
    plan, way = _plan(env, job, inventory), begun.next_way()
    if plan is None or way is Way.NEWEST:
        return plan, Way.NEWEST
    if way is Way.OLDER:
        below = begun.step + (begun.way is Way.OLDER)
        older, _, _ = _C.plan_restore(inventory, job.layout.node_of, below)
        plan, way = (plan, Way.STATE) if older is None else (older, way)
    if way is Way.NONE:
        plan = None
    if job.rank == 0:
        _voice.warn(restore_ways.sentence(begun, way, None if plan is None else plan.step))
    return plan, way


def _is_of(
    session: int, saved: dict[str, Any], plan: _C.RestorePlan, job: job_identity.Job
) -> bool:
    """Whether the snapshot is of the process group that this session is for."""
    if saved["session"] > session and job.rank == 0:
        _voice.say(
            f"step {plan.step} is not resumed: it belongs to default process group"
            f" {saved['session']} of the script, but this is group {session}, which starts from its"
            " beginning"
        )
    return bool(saved["session"] == session)


def _small_state(
    job: job_identity.Job, store: TrustedStore, plan: _C.RestorePlan, restorer: _C.Restorer
) -> bytes:
    """The small state that this rank resumes with: from a vault of its node, else through the store
    from the rank that reads that vault."""
    owners = {rank: plan.owner(rank) for rank in range(job.world)}
    away = {owner for rank, owner in owners.items() if not plan.is_near(owner, rank)}
    for owner in sorted(away):
        if job.rank == plan.reader(owner):
            store.put(TABLE, f"table/{owner}", job.rank, restorer.table_of(owner))
            store.put(OBJECTS, f"objects/{owner}", job.rank, restorer.objects_of(owner))
    own = owners[job.rank]
    if plan.is_near(own, job.rank):
        return restorer.objects_of(own)
    reader = plan.reader(own)
    restorer.put_table(store.read(TABLE, f"table/{own}", reader).decode())
    return store.read(OBJECTS, f"objects/{own}", reader)
