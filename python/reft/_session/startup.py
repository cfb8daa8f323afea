"""How a rank begins: it finds or starts its node's agent, and decides with all other ranks what to
resume from.

Threads: the training thread, before training. Errors: `_C.Unavailable` without an agent; what is
wrong with a vault is said and another source used.
"""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from reft import _C, _voice
from reft._link import agent_protocol, job_identity
from reft._resume import restorer

_REASON_CHARS = 300
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


@dataclass
class Agreed:
    """What all ranks agreed to resume from.

    Attributes:
        own_fd: descriptor of this rank's vault, which the caller closes; -1 if there is none to go
            on with.
        point: None: training starts from its beginning, and there are neither `sources` nor
            `saved`.
        saved: the rank's small state.
    """

    own_fd: int = -1
    point: restorer.RestorePoint | None = None
    sources: restorer.Sources | None = None
    saved: dict[str, Any] | None = None


def give_up(job: job_identity.Job, store: Any, reason: str) -> None:
    """Tells the ranks that wait for this one that it trains without snapshots, so that all do;
    never raises.

    Without it they would wait as long as the process group allows, and then end. What this rank has
    said already stays: some may have read it.
    """
    refusal = _refusal(reason)
    reason = refusal[1:]
    # The second one for those that have read an inventory: a step that they agreed on is resumed by
    # all or by none.
    answers = {f"inventory/{job.rank}": refusal, f"match/{job.rank}": refusal}
    if job.rank == 0:
        answers["incarnation"] = "1 0"  # as Session.start publishes it: the incarnation, and the limit of the overhead
    if job.local_rank == 0:
        answers[f"agent/{job.node}"] = f"rank {job.rank}: {reason}"
    for key, answer in answers.items():
        try:
            if not store.check([key]):
                store.set(key, answer)
        except Exception as error:  # noqa: BLE001  # training must go on
            _voice.warn_once(
                "give up", f"rank {job.rank}: other ranks cannot be told that it has no snapshots: {error}"
            )


def said_by_the_first(job: job_identity.Job, store: Any, reason: str) -> bool:
    """Whether rank 0 gave up for the same reason, which it says: settings are the same on all ranks, most of the time."""
    if job.rank == 0:
        return False
    try:
        store.wait(["inventory/0"], timedelta(seconds=_FIRST_SEC))
        return bool(bytes(store.get("inventory/0")).decode() == _refusal(reason))
    except Exception:  # noqa: BLE001  # it says nothing at all: reft is disabled there
        return False


def _refusal(reason: str) -> str:
    return "!" + " ".join(reason.split())[:_REASON_CHARS]


def _all_take_part(inventories: list[str], rank: int) -> None:
    """Raises OthersGaveUp if a rank has published that it gave up."""
    refusals = {other: text[1:] for other, text in enumerate(inventories) if text.startswith("!")}
    if not refusals:
        return
    first = min(refusals)
    others = f", and so {len(refusals) - 1} more" if len(refusals) > 1 else ""
    taking_part = [other for other in range(len(inventories)) if other not in refusals]
    raise OthersGaveUp(
        f"rank {first} cannot take part ({refusals[first]}){others}", rank == min(taking_part, default=rank)
    )


def connect(env: dict[str, Any], job: job_identity.Job, store: Any, run_dir: Path, hello: str) -> Any:
    """The first rank of a node starts the agent if there is none, and tells the others at once if that failed."""
    socket = str(run_dir / job.id / f"node-{job.node}" / "agent.sock")
    timeout = float(env["connect_sec"])
    key = f"agent/{job.node}"
    if job.local_rank != 0:
        store.wait([key], timedelta(seconds=timeout))
        if problem := bytes(store.get(key)).decode():
            raise OthersGaveUp(f"no agent on this node: {problem}", job.local_rank == 1)
        return _C.AgentClient(socket, hello, int(timeout * 1000), [])
    try:
        client = _C.AgentClient(socket, hello, int(timeout * 1000), _agent_argv(env, job, run_dir))
    except Exception as error:
        store.set(key, str(error) or type(error).__name__)
        raise
    store.set(key, "")
    return client


def _agent_argv(env: dict[str, Any], job: job_identity.Job, run_dir: Path) -> list[str]:
    binary = env["agent_path"] or str(Path(_C.__file__).parent / "bin" / "reft-agent")
    # Its settings are in the environment that it inherits.
    return [binary, "--run-dir", str(run_dir), "--job", job.id, "--node", str(job.node)]


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
        return "no regular file"
    try:
        with open(path, "rb") as file:
            listing = _C.list_vault(file.fileno())
    except (_C.Error, OSError) as error:
        return str(error).removeprefix("vault: ")
    if (listing["job"], listing["rank"]) != (job.id, job.rank):
        return f"the vault of rank {listing['rank']} of job {listing['job']}"
    return "a vault that the agent of this node does not have"


def _agent_has(client: Any, path: str, rank: int) -> bool:
    """Whether the vault that the agent keeps for a rank is the file at `path`, and not memory or another file."""
    _, fd = restorer.vault_of(client, rank)
    if fd < 0:
        return False
    try:
        return os.path.lexists(path) and os.path.samestat(os.fstat(fd), os.lstat(path))
    finally:
        os.close(fd)


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
        raise _C.Unavailable(f"{path} is in the way ({found}) and cannot be moved: {error}") from error
    _voice.say(
        f"rank {job.rank}: {path} is not usable ({found}) and is kept as {Path(kept).name}; training starts from its"
        " beginning unless another source has the state"
    )


def agree(env: dict[str, Any], job: job_identity.Job, store: Any, client: Any, session: int) -> Agreed:
    """Publishes what this node has of this rank, and decides with all others.

    Args:
        session: how many default process groups this process has made: a snapshot belongs to one of
            them.

    Raises:
        OthersGaveUp: a rank cannot take part.
    """
    own_fd = -1
    payload, _ = client.request(agent_protocol.VAULT_LIST, "{}", agent_protocol.VAULT_INVENTORY)
    ranks_here = {int(v["rank"]) for v in json.loads(payload)["vaults"]}
    if env["vault_dir"]:  # before anything is published: once a rank has done so, the others count on it
        own_path = vault_path(env, job, job.rank)
        Path(own_path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if job.rank not in ranks_here or not _agent_has(client, own_path, job.rank):
            _keep_what_is_no_vault(own_path, job)
    wanted = {job.rank}
    if job.local_rank == 0:  # vaults of ranks that live on other nodes now
        wanted |= {r for r in ranks_here if r // job.local_world != job.node}
    texts = []
    for rank in sorted(wanted & ranks_here):
        _, fd = restorer.vault_of(client, rank)
        if fd < 0:
            continue
        try:
            text, faults = _C.inventory_of(fd, job.node)
            texts += json.loads(text)
            for fault in [*faults, *_damaged_headers(fd, rank)]:
                _voice.say(f"damaged snapshot: {fault}; another source is used if there is one")
        except _C.Corruption as error:
            place = f" ({vault_path(env, job, rank)})" if env["vault_dir"] else ""
            _voice.say(f"vault of rank {rank}{place} is not usable: {error}; another source is used if there is one")
        finally:
            if rank == job.rank:
                own_fd = fd
            else:
                os.close(fd)
    inventory = json.dumps(texts)
    _C.fault_point("restore_agree", 0)
    store.set(f"inventory/{job.rank}", inventory)
    keys = [f"inventory/{r}" for r in range(job.world)]
    inventories = [bytes(store.get(key)).decode() for key in keys]
    try:
        _all_take_part(inventories, job.rank)
    except OthersGaveUp:
        if own_fd >= 0:
            os.close(own_fd)
        raise
    agreement: dict[str, Any] = {"step": None, "vaults": 0}
    if env["resume"] != "off":
        agreement = _C.agree(inventories, job.world)
    if agreement["step"] is None:
        if agreement["vaults"] and job.rank == 0:
            reasons = "; ".join(agreement["rejected"]) or "nothing is sealed by all ranks yet"
            _voice.say(f"no step can be resumed ({reasons}); training starts from its beginning")
        elif job.attempt > 0 and job.rank == 0 and env["resume"] != "off" and env["snapshot"]:
            _voice.say(
                "nothing that earlier attempts saved is left: the agents that kept it are gone too; training starts from its"
                " beginning. Snapshots in REFT_VAULT_DIR outlive the agent"
            )
        if own_fd >= 0:
            os.close(own_fd)
        return Agreed()
    point = restorer.RestorePoint.from_agreement(agreement)
    sources = restorer.Sources(client, point, job.rank, job.node)
    saved = pickle.loads(_saved_objects(job, store, point, sources))
    if saved["session"] != session:
        if job.rank == 0 and saved["session"] > session:
            _voice.say(
                f"step {point.step} of the script's process group number {saved['session']} is not resumed in number {session},"
                " which starts from its beginning"
            )
        if own_fd >= 0:
            os.close(own_fd)
        return Agreed()
    if point.node_of_rank[job.rank] != job.node and own_fd >= 0:
        os.close(own_fd)
        own_fd = -1
    return Agreed(own_fd, point, sources, saved)


def _saved_objects(job: job_identity.Job, store: Any, point: restorer.RestorePoint, sources: restorer.Sources) -> bytes:
    """Own small state from the own node, else through the store from whoever has it."""
    needed = {}
    for rank in range(job.world):
        owner = point.donor.get(rank, rank)
        if point.node_of_rank[owner] != rank // job.local_world:
            needed[rank] = owner
    for owner in sorted(set(needed.values())):
        if job.rank == point.sender(owner, job.local_world):
            slot = sources.slot(owner)
            store.set(f"table/{owner}", json.dumps([slot.regions, slot.groups, slot.pieces]))
            store.set(f"objects/{owner}", bytes(slot.objects))
    if job.rank in needed:
        owner = needed[job.rank]
        sources.tables[owner] = restorer.Table(*json.loads(bytes(store.get(f"table/{owner}"))))
        return bytes(store.get(f"objects/{owner}"))
    return restorer.saved_objects(sources, point, job.rank)
