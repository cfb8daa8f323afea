"""Deals the items that are left of an epoch to another number of ranks.

A `DistributedSampler`, or one like it, gives rank r of N the items r, r+N, r+2N … of an order on
which all ranks agree, filled up from its beginning so that all get equally many. So the shares of
all ranks, taken in turns, are that order again. What the ranks have drawn of it is left out, what
it was filled up with too, and the rest is dealt in the same way.

An epoch may be dealt several times; `Hand` is what a rank had of it once.

Threads: the training thread. Errors: `ValueError` if shares are not such ones.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_MOST_RANKS = 1 << 20


class Hand(NamedTuple):
    """What one rank had of an epoch before other ones went on with it."""

    ranks: int
    """How many ranks the data were dealt to."""
    rank: int
    """Which one of them it was."""
    batches: int
    """How many each of them had drawn in this epoch, those of earlier hands included."""
    size: int
    """Items of a batch."""


@dataclass(frozen=True, slots=True)
class Resized:
    """That another number of ranks goes on with a step than those that saved it."""

    ranks: int
    """How many saved it."""
    rank: int
    """The one of them whose place is taken."""
    first: dict[str, Any]
    """Numbers and strings as they were at its first program point, by place: what has not changed
    since then may follow from the number of ranks, and keeps its live value."""
    parts: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    """Types and shapes of what that rank had of tensors of which this one has another part."""
    dealt: list[int] = field(default_factory=list)
    """A hash of what is left of each epoch, and how many batches were drawn: equal on all ranks."""


def dealer_of(loader: Any) -> Any:
    """The sampler that deals a loader's items to the ranks; None if it is not known to."""
    data: Any = sys.modules["torch.utils.data"]
    batches, sampler = loader.batch_sampler, loader.sampler
    if type(batches) is not data.BatchSampler or batches.sampler is not sampler:
        return None
    held = getattr(sampler, "__dict__", {})
    numbers = (held.get("rank"), held.get("num_replicas"))
    return sampler if all(type(number) is int for number in numbers) else None


class Dealt:
    """The batches of one rank in an epoch that has been dealt more than once; stands in for the
    loader's batch sampler.

    Args:
        batches: lists of indices.
    """

    def __init__(self, batches: list[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def deal(
    loader: Any, hands: list[Hand], size: int, begin: Callable[[], None]
) -> tuple[Dealt, list[list[int]], list[int]]:
    """Deals what is left after the last of some hands to the ranks that the loader's sampler knows.

    Args:
        loader: its sampler is as it was when the epoch began, but for the numbers of its rank.
        hands: oldest first.
        size: items of a batch from now on.
        begin: puts random state back to where the sampler drew its first index.

    Returns:
        All batches of this rank, those included that it took over; those that the rank of the last
        hand would have had; and the items that are dealt now, to all ranks.

    Raises:
        ValueError: nothing deals the items, or the shares do not fit together.
    """
    sampler = dealer_of(loader)
    if sampler is None:
        raise ValueError("no DistributedSampler deals the items of its DataLoader to the ranks")
    drop_last = bool(loader.batch_sampler.drop_last)
    shares = _shares_of(sampler, hands[0].ranks, begin)
    order = _in_turns(shares)
    left_out = max(0, len(order) - len(loader.dataset))
    if left_out >= hands[0].ranks or order[len(order) - left_out :] != order[:left_out]:
        left_out = 0  # no items that fill the shares up, but a sampler that gives some several times
    rest: list[int] = []
    is_cut = bool(getattr(sampler, "drop_last", False))
    taken: list[list[int]] = []
    before: list[list[int]] = []
    for hand, following in itertools.pairwise([*hands, None]):
        assert hand is not None
        count = hand.batches - len(taken)
        own = _batches(shares[hand.rank], hand.size, drop_last)
        before, taken = taken + own, taken + own[:count]
        rest = _in_turns([share[count * hand.size :] for share in shares])
        rest = rest[: max(0, len(rest) - left_out)]
        ranks = sampler.num_replicas if following is None else following.ranks
        shares, left_out = _dealt(rest, ranks, is_cut)
    own = _batches(shares[sampler.rank], size, drop_last)
    return Dealt([*taken, *own]), before, rest


def _shares_of(sampler: Any, ranks: int, begin: Callable[[], None]) -> list[list[int]]:
    """What a sampler gives each of so many ranks."""
    held = sampler.__dict__
    kept = {name: held[name] for name in ("rank", "num_replicas")}
    if not 0 < ranks <= _MOST_RANKS:
        raise ValueError(f"its data were dealt to {ranks} ranks")
    try:
        shares = []
        for rank in range(ranks):
            held.update(rank=rank, num_replicas=ranks)
            begin()
            shares.append(list(iter(sampler)))
    finally:
        held.update(kept)
    lengths = {len(share) for share in shares}
    if len(lengths) != 1 or any(type(index) is not int for share in shares for index in share):
        raise ValueError(f"its sampler gives ranks {sorted(lengths)} items, or others than numbers")
    return shares


def _in_turns(shares: list[list[int]]) -> list[int]:
    return [index for turn in zip(*shares, strict=True) for index in turn]


def _dealt(items: list[int], ranks: int, is_cut: bool) -> tuple[list[list[int]], int]:
    """Shares of equal length, and how many items were added to fill them up."""
    missing = -len(items) % ranks
    if is_cut and missing:
        items, missing = items[: len(items) - len(items) % ranks], 0
    elif missing and items:
        items = items + list(itertools.islice(itertools.cycle(items), missing))
    return [items[rank::ranks] for rank in range(ranks)], missing if items else 0


def _batches(items: list[int], size: int, drop_last: bool) -> list[list[int]]:
    batches = [items[at : at + size] for at in range(0, len(items), size)]
    return batches[:-1] if drop_last and batches and len(batches[-1]) < size else batches
