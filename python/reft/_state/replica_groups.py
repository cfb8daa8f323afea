"""Confirms which ranks hold equal bytes: placements say what should be equal, content hashes say
what is.

Sharding may rely only on what both say. Bytes that a placement calls replicas and that differ are
reported: either they are not replicas (a buffer, an optimizer shard), or memory was corrupted.

Each member of a group writes one digest, and the group's first rank compares them. Only if they
differ, the members write the hash of every tensor. A group of n members makes 2n + 2 operations on
the store, 4n + 4 if they differ.

All members have the same outcome (`_link/common_outcome.py`).

Threads: the training thread. Errors: none; where a member is missing, the ranks save all of it
themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from reft import _C
from reft._link import bounded_json
from reft._link.common_outcome import common_outcome
from reft._link.trusted_store import REPLICAS, TrustedStore
from reft._state.discovery import Region

_WAIT = timedelta(seconds=6)
_MOST_BYTES = 256 << 20
_EQUAL, _DIFFERENT, _NONE = "equal", "different", "none"

Row = list[Any]  # name, dtype, shape, strides, content hash
_HASH = 4  # its place in a row


@dataclass(frozen=True)
class Difference:
    """What a group was expected to share and does not.

    Attributes:
        ranks: members of the group.
        names: of the regions, as this rank has them, that are not equal.
        missed: whether a member did not take part, so that nothing was compared.
        partial: names of regions that this rank has and some member has not: parts of an optimizer
            that is sharded over replicas (ZeroRedundancyOptimizer).
        odd: members, less than half of the group, without which all regions would be equal; empty
            if they are not known, or if more than bytes differ.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    missed: bool
    partial: tuple[str, ...] = ()
    odd: tuple[int, ...] = ()


def confirm(
    regions: list[Region], store: TrustedStore, rank: int, plan: str
) -> tuple[list[tuple[str, tuple[int, ...]]], list[Difference]]:
    """Clears `ranks` of regions that are not the same everywhere.

    Args:
        store: keys that no other attempt sees.
        plan: names this plan, equal on all ranks and used once.

    Returns:
        ((group id, ranks) of every confirmed group, what was expected to be equal and is not).
    """
    by_ranks: dict[tuple[int, ...], list[Region]] = {}
    for region in regions:
        if rank in region.ranks and len(region.ranks) > 1:
            by_ranks.setdefault(region.ranks, []).append(region)
        else:
            region.ranks = ()
    comparisons = [
        (_Comparison(store, rank, plan, ranks, members), members)
        for ranks, members in sorted(by_ranks.items())
    ]
    for comparison, _ in comparisons:  # all before any is waited for: a rank is in several groups
        comparison.write_digest()
    groups = []
    different: list[Difference] = []
    for comparison, members in comparisons:
        equal = comparison.equal_names()
        own = [row[0] for row in comparison.rows if row[0] not in equal]
        if own:
            unequal = tuple(name for name in own if name not in comparison.partial)
            partial = tuple(name for name in own if name in comparison.partial)
            odd = comparison.odd if unequal else ()
            different.append(
                Difference(comparison.ranks, unequal, comparison.missed, partial, odd)
            )
        for region in members:
            if region.name not in equal:
                region.ranks = ()
        if equal:
            ranks = comparison.ranks
            groups.append((group_id(ranks), ranks))
    return groups, different


def group_id(ranks: tuple[int, ...]) -> str:
    """Names the group of some ranks in ascending order: (0, 1, 2, 9) → 'g0-2,9', (0, 8, 16) →
    'g0-16/8'. No two groups share a name, and that of a regular group is short."""
    runs = []
    begin = 0
    while begin < len(ranks):
        step = ranks[begin + 1] - ranks[begin] if begin + 1 < len(ranks) else 1
        end = begin
        while end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == step:
            end += 1
        if end == begin + 1 and step > 1:  # the second may begin a longer run
            end = begin
        run = str(ranks[begin])
        if end > begin:
            run += f"-{ranks[end]}" + (f"/{step}" if step > 1 else "")
        runs.append(run)
        begin = end + 1
    return "g" + ",".join(runs)


class _Comparison:
    """One group's comparison, as one member takes part in it.

    Attributes:
        ranks: members of the group.
        rows: what this member holds.
        missed: whether a member did not take part.
        partial: names that some member has and another has not.
        odd: as in `Difference`.
    """

    def __init__(
        self,
        store: TrustedStore,
        rank: int,
        plan: str,
        ranks: tuple[int, ...],
        members: list[Region],
    ) -> None:
        self.ranks, self.missed = ranks, False
        self.partial: set[str] = set()
        self.odd: tuple[int, ...] = ()
        self.rows: list[Row] = sorted(
            [
                r.name,
                str(r.tensor.dtype),
                list(r.tensor.shape),
                list(r.tensor.stride()),
                list(_C.content_hash(r.tensor)),
            ]
            for r in members
        )
        self._store, self._rank = store, rank
        self._key = f"plan/{plan}/{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"

    def write_digest(self) -> None:
        digest = hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()
        self._store.put(REPLICAS, f"{self._key}/digest/{self._rank}", self._rank, digest)

    def equal_names(self) -> set[str]:
        """Names of the regions that are equal on all members."""
        outcome = self._outcome("digest", _compare_digests)
        if outcome == _EQUAL:
            return {row[0] for row in self.rows}
        if outcome == _DIFFERENT:
            rows = json.dumps(self.rows)
            self._store.put(REPLICAS, f"{self._key}/rows/{self._rank}", self._rank, rows)
            outcome = self._outcome("rows", _compare_rows)
        self.missed = outcome == _NONE
        if self.missed:
            return set()
        try:
            equal, partial, odd = map(set, _parsed(outcome))
        except (ValueError, TypeError):
            self.missed = True
            return set()
        self.partial = partial
        self.odd = tuple(rank for rank in self.ranks if rank in odd)
        return equal

    def _outcome(self, what: str, compare: Callable[[tuple[int, ...], list[str]], str]) -> str:
        return common_outcome(
            self._store,
            REPLICAS,
            f"{self._key}/{what}",
            self._rank,
            self.ranks,
            partial(compare, self.ranks),
            _NONE,
            _WAIT,
        )


def _parsed(text: str) -> Any:
    return bounded_json.loads(text.encode(), limit=_MOST_BYTES)


def _compare_digests(ranks: tuple[int, ...], digests: list[str]) -> str:
    return _EQUAL if len(set(digests)) == 1 else _DIFFERENT


def _compare_rows(ranks: tuple[int, ...], texts: list[str]) -> str:
    """The names of rows that all have alike, and of those that only some have; the odd ranks."""
    tables: list[dict[str, Row]] = [{row[0]: row for row in _parsed(text)} for text in texts]
    first, *others = tables
    equal = [name for name, row in first.items() if all(o.get(name) == row for o in others)]
    shared = set.intersection(*map(set, tables))
    unequal = sorted(shared - set(equal))
    odd = _odd([table[name] for table in tables] for name in unequal)
    return json.dumps(
        [equal, sorted(set().union(*tables) - shared), [ranks[member] for member in odd]]
    )


def _odd(columns: Iterable[list[Row]]) -> list[int]:
    """Members without which all columns, which have a row of each member, would be equal: less than
    half of them; none if there are more, or if more than the contents differ."""
    odd: set[int] = set()
    for column in columns:
        contents = [tuple(row[_HASH]) for row in column]
        usual, _ = Counter(contents).most_common(1)[0]
        odd.update(i for i, content in enumerate(contents) if content != usual)
        if 2 * len(odd) >= len(column) or any(row[:_HASH] != column[0][:_HASH] for row in column):
            return []
    return sorted(odd)
