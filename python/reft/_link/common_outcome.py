"""One outcome of a comparison for all of some ranks, by the job's store.

Each member writes its part, and the first one compares the parts. One key holds the outcome, and it
is written once, by compare_set: by the first rank, or by a member that has waited too long, for
all. So all members have the same outcome, and a member that has given up waiting holds up no other.
A round of all ranks (`gather.py`) reads less, but waits as long as the store does.

Threads: any. Errors: none; an outcome without some member is what `otherwise` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from reft._link.trusted_store import ANY_LENGTH, TrustedStore, Untrusted


def common_outcome(
    store: TrustedStore,
    kind: str,
    key: str,
    rank: int,
    ranks: Sequence[int],
    compare: Callable[[list[str]], str],
    otherwise: str,
    longest_wait: timedelta,
    longest: int = ANY_LENGTH,
) -> str:
    """Waits for the outcome; this rank has written its part to `key`/`rank`.

    Args:
        store: keys that no other attempt sees.
        kind: of the values in the store.
        key: of this comparison alone.
        rank: this one.
        ranks: the members.
        compare: makes the outcome of the parts, in the order of `ranks`. May raise ValueError.
        otherwise: the outcome if a part is missing or no part.
        longest_wait: for the others.
        longest: most bytes of a part.
    """
    place = f"{key}/outcome"
    try:
        if rank == ranks[0]:
            keys = {member: f"{key}/{member}" for member in ranks}
            store.wait(list(keys.values()), longest_wait)
            parts = [store.read(kind, k, r, longest, was_there=True) for r, k in keys.items()]
            mine = compare([part.decode() for part in parts])
        else:
            store.wait([place], longest_wait)
            return store.read(kind, place, None, was_there=True).decode()
    except (RuntimeError, Untrusted, ValueError):  # a member takes no part, or is gone
        mine = otherwise
    try:
        return store.first_of(kind, place, rank, mine).decode()
    except Untrusted:
        return otherwise
