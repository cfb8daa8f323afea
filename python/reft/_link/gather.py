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
from typing import Any, Protocol

from reft._link import bounded_json
from reft._link.job_identity import Layout
from reft._link.trusted_store import ROUND, TrustedStore

Merge = Callable[[list[str]], str]

MOST_BYTES = 1 << 30  # of all ranks' texts
_MOST_BYTES = 16 << 20  # of one rank's text, if a round does not say otherwise
_REASON_CHARS = 1000


class Member(Protocol):
    """A rank, and the ranks whose texts are merged before all are: those of its node, in general."""

    @property
    def rank(self) -> int: ...
    @property
    def layout(self) -> Layout: ...


@dataclass(frozen=True)
class Place:
    """A member that is nothing else."""

    rank: int
    layout: Layout


@dataclass(frozen=True)
class Gathered:
    """What all ranks wrote.

    Attributes:
        text: the merged texts of the ranks that take part.
        refusals: reasons by rank.
    """

    text: str
    refusals: dict[int, str]


def gather(
    member: Member,
    store: TrustedStore,
    name: str,
    text: str,
    merge: Merge,
    conclude: Callable[[str], str] | None = None,
    most_bytes: int = _MOST_BYTES,
) -> Gathered:
    """Takes part in a round.

    Args:
        store: keys that no other attempt sees.
        name: of the round, used once in an attempt.
        text: of this rank.
        merge: joins texts of ranks, and texts that it returned.
        conclude: what rank 0 makes of all texts, if no rank refuses; all ranks get that instead.
        most_bytes: of a rank's text. Merged texts of n ranks have at most n times as many.

    Raises:
        ValueError: a value in the store is not of that rank (`Untrusted`), is too long, or not of
            the form that this writes.
    """
    rank, layout = member.rank, member.layout
    read = _Reader(store, most_bytes)
    store.put(ROUND, _rank_key(name, rank), rank, _pack(Gathered(text, {})))
    node = layout.node_of[rank]
    ranks = layout.nodes[node]
    if rank == ranks[0]:
        parts = [read(_rank_key(name, other), other, 1) for other in ranks]
        store.put(ROUND, _node_key(name, node), rank, _pack(_merged(parts, merge)))
    if rank == 0:
        parts = [
            read(_node_key(name, n), ranks[0], len(ranks)) for n, ranks in enumerate(layout.nodes)
        ]
        merged = _merged(parts, merge)
        if conclude is not None and not merged.refusals:
            merged = Gathered(conclude(merged.text), {})
        store.put(ROUND, _job_key(name), rank, _pack(merged))
    return read(_job_key(name), 0, layout.world)


def merge_by_rank(texts: list[str], most: int | None = None) -> str:
    """Merges JSON objects whose keys are ranks.

    Args:
        most: keeps the answers of the lowest ranks alone, so many; None keeps all.
    """
    merged: dict[str, Any] = {}
    for text in texts:
        merged |= parsed(text)
    return json.dumps({rank: merged[rank] for rank in sorted(merged, key=int)[:most]})


def parsed(text: str) -> Any:
    """The value of a text of a round, which is JSON.

    Raises:
        ValueError: it is not.
    """
    return bounded_json.loads(text.encode(), limit=MOST_BYTES)


def refuse(member: Member, store: TrustedStore, name: str, reason: str) -> None:
    """Answers a round, past or to come, in place of `gather`. What this rank has written stays."""
    rank, layout = member.rank, member.layout
    refusal = _pack(Gathered("", {rank: reason[:_REASON_CHARS]}))
    node = layout.node_of[rank]
    keys = [_rank_key(name, rank)]
    if rank == layout.nodes[node][0]:
        keys.append(_node_key(name, node))
    if rank == 0:
        keys.append(_job_key(name))
    for key in keys:
        store.put_new(ROUND, key, rank, refusal)


def refusal_of_the_first(store: TrustedStore, name: str) -> str | None:
    """Why rank 0 refused; None if it takes part. Waits for it as long as the store does."""
    return _Reader(store, _MOST_BYTES)(_rank_key(name, 0), 0, 1).refusals.get(0)


def first_key(name: str) -> str:
    """The key by which rank 0 answers, to wait for."""
    return _rank_key(name, 0)


def _rank_key(name: str, rank: int) -> str:
    return f"{name}/{rank}"


def _node_key(name: str, node: int) -> str:
    return f"{name}/node/{node}"


def _job_key(name: str) -> str:
    return f"{name}/job"


def _merged(parts: list[Gathered], merge: Merge) -> Gathered:
    refusals = {rank: reason for part in parts for rank, reason in part.refusals.items()}
    return Gathered(merge([part.text for part in parts if part.text]), refusals)


def _pack(gathered: Gathered) -> str:
    return json.dumps([gathered.text, gathered.refusals], separators=(",", ":"))


class _Reader:
    """Reads answers."""

    def __init__(self, store: TrustedStore, most_bytes: int) -> None:
        self._store, self._most_bytes = store, most_bytes

    def __call__(self, key: str, publisher: int, ranks: int) -> Gathered:
        """The answer of so many ranks, which `publisher` has written."""
        # JSON writes a character in up to six bytes.
        longest = 6 * (self._most_bytes + _REASON_CHARS) * ranks
        answer = bounded_json.loads(
            self._store.read(ROUND, key, publisher, longest), limit=longest
        )
        if not isinstance(answer, list) or len(answer) != 2:
            raise ValueError(f"{key}: not an answer of a rank")
        text, refusals = answer
        if not isinstance(text, str) or not isinstance(refusals, dict):
            raise ValueError(f"{key}: not an answer of a rank")
        for rank, reason in refusals.items():
            is_rank = rank.isascii() and rank.isdigit() and len(rank) <= 9
            if not is_rank or not isinstance(reason, str):
                raise ValueError(f"{key}: not a refusal of a rank")
        return Gathered(text, {int(rank): reason for rank, reason in refusals.items()})
