"""Confirms which ranks hold equal bytes: placements say what should be equal, content hashes say
what is.

Sharding may rely only on what both say. Bytes that a placement calls replicas and that differ are
reported: either they are not replicas (a buffer, an optimizer shard), or memory was corrupted.

Each member of a group writes one digest, and the group's first rank compares them. Only if they
differ, the members write the hash of every tensor. A group of n members makes 2n + 2 operations on
the store, 4n + 4 if they differ.

One key holds the outcome, and it is written once, by compare_set: by the first rank, or by a member
that has waited too long, for all. So all members have the same outcome; nobody relies on a member
that has given up waiting.

Threads: the training thread. Errors: none; where a member is missing, the ranks save all of it
themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from reft import _C
from reft._state.discovery import Region

_WAIT = timedelta(seconds=6)
_EQUAL, _DIFFERENT, _NONE = "equal", "different", "none"

# How often a set of parameters was planned: ranks need not have made the same plans before.
_times: dict[str, int] = {}

Row = list[Any]  # name, dtype, shape, content hash


def confirm(
    regions: list[Region], store: Any, rank: int
) -> tuple[list[tuple[str, tuple[int, ...]]], list[str]]:
    """Clears `ranks` of regions that are not the same everywhere.

    Args:
        store: c10d store whose keys no other attempt sees.

    Returns:
        ((group id, ranks) of every confirmed group, names of regions that were expected to be equal
        and are not).
    """
    by_ranks: dict[tuple[int, ...], list[Region]] = {}
    for region in regions:
        if rank in region.ranks and len(region.ranks) > 1:
            by_ranks.setdefault(region.ranks, []).append(region)
        else:
            region.ranks = ()
    comparisons = [
        (_Comparison(store, rank, ranks, members), members)
        for ranks, members in sorted(by_ranks.items())
    ]
    for comparison, _ in comparisons:  # all before any is waited for: a rank is in several groups
        comparison.write_digest()
    groups = []
    different: list[str] = []
    for comparison, members in comparisons:
        equal = comparison.equal_names()
        different += [row[0] for row in comparison.rows if row[0] not in equal]
        for region in members:
            if region.name not in equal:
                region.ranks = ()
        if equal:
            ranks = comparison.ranks
            groups.append(("g" + "-".join(map(str, ranks)), ranks))
    return groups, different


class _Comparison:
    """One group's comparison, as one member takes part in it."""

    def __init__(
        self, store: Any, rank: int, ranks: tuple[int, ...], members: list[Region]
    ) -> None:
        self.ranks = ranks
        self.rows: list[Row] = sorted(
            [r.name, str(r.tensor.dtype), list(r.tensor.shape), list(_C.content_hash(r.tensor))]
            for r in members
        )
        self._store, self._rank = store, rank
        # By the parameters alone: state that only some members have (ZeRO) must not part them.
        names = sorted((r.name, str(r.tensor.shape)) for r in members if r.name.count(".") == 1)
        what = hashlib.sha256(f"{ranks} {names}".encode()).hexdigest()[:16]
        _times[what] = _times.get(what, 0) + 1
        self._key = f"plan/{what}/{_times[what]}"

    def write_digest(self) -> None:
        digest = hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()
        self._store.set(f"{self._key}/digest/{self._rank}", digest)

    def equal_names(self) -> set[str]:
        """Names of the regions that are equal on all members."""
        outcome = self._outcome("digest", _compare_digests)
        if outcome == _EQUAL:
            return {row[0] for row in self.rows}
        if outcome == _DIFFERENT:
            self._store.set(f"{self._key}/rows/{self._rank}", json.dumps(self.rows))
            outcome = self._outcome("rows", _compare_rows)
        return set() if outcome == _NONE else set(json.loads(outcome))

    def _outcome(self, what: str, compare: Callable[[list[str]], str]) -> str:
        store, key = self._store, f"{self._key}/{what}/outcome"
        try:
            if self._rank == self.ranks[0]:
                keys = [f"{self._key}/{what}/{r}" for r in self.ranks]
                store.wait(keys, _WAIT)
                mine = compare([bytes(store.get(k)).decode() for k in keys])
            else:
                store.wait([key], _WAIT)
                return bytes(store.get(key)).decode()
        except RuntimeError:  # a member has another plan, or is gone
            mine = _NONE
        return bytes(store.compare_set(key, "", mine)).decode()


def _compare_digests(digests: list[str]) -> str:
    return _EQUAL if len(set(digests)) == 1 else _DIFFERENT


def _compare_rows(texts: list[str]) -> str:
    tables: list[list[Row]] = [json.loads(text) for text in texts]
    first, *others = ({row[0]: row for row in table} for table in tables)
    return json.dumps(
        [name for name, row in first.items() if all(o.get(name) == row for o in others)]
    )
