"""Confirms which ranks hold equal bytes: placements say what should be equal, content hashes say
what is.

Sharding may only rely on what both say. Bytes that a placement calls replicas and that differ are
reported: either they are not replicas (a buffer, an optimizer shard), or memory was corrupted.
"""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from typing import Any

from reft import _C
from reft._state.discovery import Region

_WAIT = timedelta(seconds=6)
_times: dict[str, int] = {}  # how often a set of parameters was planned: ranks need not have made the same plans before


def confirm(regions: list[Region], store: Any, rank: int) -> tuple[list[tuple[str, tuple[int, ...]]], list[str]]:
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
    different: list[str] = []
    keyed = []
    for ranks, members in sorted(by_ranks.items()):
        rows: list[list[Any]] = [
            [r.name, str(r.tensor.dtype), list(r.tensor.shape), list(_C.content_hash(r.tensor))] for r in members
        ]
        rows.sort()
        text = json.dumps(rows, separators=(",", ":"))
        # By the parameters alone: state that only some members have (ZeRO) must not part them.
        names = sorted((r.name, str(r.tensor.shape)) for r in members if r.name.count(".") == 1)
        what = hashlib.sha256(f"{ranks} {names}".encode()).hexdigest()[:16]
        _times[what] = _times.get(what, 0) + 1
        key = f"plan/{what}/{_times[what]}"
        # The details go first: whoever sees the digest can read them.
        store.set(f"{key}/rows/{rank}", text)
        store.set(f"{key}/digest/{rank}", hashlib.sha256(text.encode()).hexdigest())
        keyed.append((ranks, members, key, rows))
    groups = []
    for ranks, members, key, rows in keyed:
        try:
            store.wait([f"{key}/digest/{r}" for r in ranks], _WAIT)
            digests = {bytes(store.get(f"{key}/digest/{r}")) for r in ranks}
            equal = {row[0] for row in rows}
            if len(digests) > 1:
                for other in ranks:
                    theirs = {row[0]: row for row in json.loads(store.get(f"{key}/rows/{other}"))}
                    equal &= {row[0] for row in rows if theirs.get(row[0]) == row}
                different += [row[0] for row in rows if row[0] not in equal]
            # Nobody relies on a member that has given up waiting: it saves everything itself and
            # holds no shard.
            store.set(f"{key}/seen/{rank}", "1")
            store.wait([f"{key}/seen/{r}" for r in ranks], _WAIT)
            if any(bytes(store.get(f"{key}/seen/{r}")) != b"1" for r in ranks):
                raise RuntimeError("a member has given up waiting")
        except RuntimeError:  # a member has another plan, or is gone: every rank then saves all of it
            store.set(f"{key}/seen/{rank}", "0")
            equal = set()
            different += [row[0] for row in rows]
        for region in members:
            if region.name not in equal:
                region.ranks = ()
        if equal:
            groups.append(("g" + "-".join(map(str, ranks)), ranks))
    return groups, different
