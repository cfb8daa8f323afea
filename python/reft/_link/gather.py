"""Collects a text from every rank through the store, and gives every rank all of them merged.

The ranks of a node write one key each; the first of them merges these into the node's key, rank 0
merges the nodes' keys into the job's key, and every rank reads that one. A job of `world` ranks on
`nodes` nodes makes at most 3 · world + 2 · nodes + 1 operations on the store, and no rank reads more
than its node's ranks, the nodes, and one key. All ranks get the same result, because one rank
writes it.

A rank that cannot take part refuses with a reason; the others get the refusals beside the texts. If
it is a rank that merges, the ranks that it would have merged count as silent.

Threads: the training thread. Errors: what the store raises, also when its timeout passes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reft._link.job_identity import Job

Merge = Callable[[list[str]], str]


@dataclass(frozen=True)
class Gathered:
    """What all ranks wrote.

    Attributes:
        text: the merged texts of the ranks that take part.
        refusals: reasons by rank.
    """

    text: str
    refusals: dict[int, str]


def gather(job: Job, store: Any, name: str, text: str, merge: Merge) -> Gathered:
    """Takes part in a round.

    Args:
        store: keys that no other attempt sees.
        name: of the round, used once in an attempt.
        text: of this rank.
        merge: joins texts of ranks, and texts that it returned.
    """
    store.set(_rank_key(name, job.rank), _pack(Gathered(text, {})))
    node, first = divmod(job.rank, job.local_world)
    if first == 0:
        last = min(job.rank + job.local_world, job.world)
        ranks = [_rank_key(name, rank) for rank in range(job.rank, last)]
        store.set(_node_key(name, node), _pack(_merged(store, ranks, merge)))
    if job.rank == 0:
        nodes = [_node_key(name, node) for node in range(job.nodes)]
        store.set(_job_key(name), _pack(_merged(store, nodes, merge)))
    return _read(store, _job_key(name))


def merge_by_rank(texts: list[str], most: int | None = None) -> str:
    """Merges JSON objects whose keys are ranks.

    Args:
        most: keeps the answers of the lowest ranks alone, so many; None keeps all.
    """
    merged: dict[str, Any] = {}
    for text in texts:
        merged |= json.loads(text)
    return json.dumps({rank: merged[rank] for rank in sorted(merged, key=int)[:most]})


def refuse(job: Job, store: Any, name: str, reason: str) -> None:
    """Answers a round, past or to come, in place of `gather`. What this rank has written stays."""
    refusal = _pack(Gathered("", {job.rank: reason}))
    node, first = divmod(job.rank, job.local_world)
    keys = [_rank_key(name, job.rank)]
    if first == 0:
        keys.append(_node_key(name, node))
    if job.rank == 0:
        keys.append(_job_key(name))
    for key in keys:
        if not store.check([key]):
            store.set(key, refusal)


def refusal_of_the_first(store: Any, name: str) -> str | None:
    """Why rank 0 refused; None if it takes part. Waits for it as long as the store does."""
    return _read(store, _rank_key(name, 0)).refusals.get(0)


def first_key(name: str) -> str:
    """The key by which rank 0 answers, to wait for."""
    return _rank_key(name, 0)


def _rank_key(name: str, rank: int) -> str:
    return f"{name}/{rank}"


def _node_key(name: str, node: int) -> str:
    return f"{name}/node/{node}"


def _job_key(name: str) -> str:
    return f"{name}/job"


def _merged(store: Any, keys: list[str], merge: Merge) -> Gathered:
    parts = [_read(store, key) for key in keys]
    refusals = {rank: reason for part in parts for rank, reason in part.refusals.items()}
    return Gathered(merge([part.text for part in parts if part.text]), refusals)


def _pack(gathered: Gathered) -> str:
    return json.dumps([gathered.text, gathered.refusals], separators=(",", ":"))


def _read(store: Any, key: str) -> Gathered:
    text, refusals = json.loads(bytes(store.get(key)))
    return Gathered(text, {int(rank): reason for rank, reason in refusals.items()})
