"""What is left of an epoch, dealt to another number of ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from reft._continuation.dealing import Hand, deal, dealer_of


def loader_of(items: int, batch: int, rank: int, ranks: int, *, cut: bool = False) -> Any:
    sampler: Any = DistributedSampler(range(items), ranks, rank, seed=3, drop_last=cut)
    return DataLoader(range(items), batch, sampler=sampler)  # type: ignore[arg-type]


def dealt(items: int, batch: int, history: list[tuple[int, int]], ranks: int, *, cut: bool = False) -> list[Any]:
    """The batches of each rank now; `history`: (ranks, batches) of earlier ones."""
    found = []
    for rank in range(ranks):
        loader = loader_of(items, batch, 0, history[0][0], cut=cut)
        # As `rebuild` does: the sampler is of then, but for what its rank is now.
        loader.sampler.rank, loader.sampler.num_replicas = rank, ranks
        hands = [Hand(then, rank % then, batches, batch) for then, batches in history]
        found.append(list(deal(loader, hands, batch, lambda: None)[0]))
    return found


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 60), st.integers(1, 5), st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_each_item_comes_once_but_for_what_makes_shares_equal(
    data: st.DataObject, items: int, batch: int, worlds: list[int]
) -> None:
    drawn: list[list[int]] = []
    history: list[tuple[int, int]] = []
    shares = [list(loader_of(items, batch, rank, worlds[0])) for rank in range(worlds[0])]
    own = [[batch.tolist() for batch in share] for share in shares]
    count = 0
    for then, now in zip(worlds, worlds[1:], strict=False):
        more = data.draw(st.integers(0, max(0, len(own[0]) - count)), label=f"batches with {then}")
        drawn += [one for share in own for one in share[count : count + more]]
        count += more
        history.append((then, count))
        own = dealt(items, batch, history, now)
        assert len({len(share) for share in own}) == 1, "all ranks have equally many"
        assert all(len(share) >= count for share in own)
    drawn += [one for share in own for one in share[count:]]
    counts = Counter(index for one in drawn for index in one)
    assert set(counts) == set(range(items))
    # Each dealing may add as many as it takes to have equal shares.
    assert sum(counts.values()) - items < sum(worlds) - len(worlds) + 1


def test_a_rank_takes_the_batches_over_that_its_predecessor_had() -> None:
    before = [list(loader_of(48, 4, rank, 4)) for rank in range(4)]
    for rank, share in enumerate(dealt(48, 4, [(4, 2)], 3)):
        assert share[:2] == [batch.tolist() for batch in before[rank][:2]]


def test_what_is_cut_off_stays_cut_off() -> None:
    own = dealt(50, 4, [(4, 1)], 3, cut=True)  # 48 are dealt, 16 drawn: of 32, three ranks get 10 each
    left = Counter(index for share in own for one in share[1:] for index in one)
    assert sum(left.values()) == 30 and max(left.values()) == 1


def test_the_last_rank_would_have_gone_on_as_it_began() -> None:
    loader = loader_of(48, 4, 0, 4)
    _, before, rest = deal(loader, [Hand(4, 2, 1, 4)], 4, lambda: None)
    assert len(set(rest)) == 32
    assert before == [batch.tolist() for batch in loader_of(48, 4, 2, 4)]


def test_only_a_sampler_that_knows_its_rank_deals() -> None:
    assert dealer_of(loader_of(8, 2, 0, 2)) is not None
    data: Any = range(8)
    assert dealer_of(DataLoader(data, 2)) is None
    assert dealer_of(DataLoader(data, 2, sampler=RandomSampler(data))) is None
    batches = BatchSampler(DistributedSampler(data, 2, 0), 2, drop_last=False)
    assert dealer_of(DataLoader(data, batch_sampler=batches)) is None  # the loader has another one
    with pytest.raises(ValueError, match="no DistributedSampler deals"):
        deal(DataLoader(data, 2), [Hand(2, 0, 1, 2)], 2, lambda: None)


def test_shares_that_are_not_equal_are_not_dealt() -> None:
    loader = loader_of(8, 2, 0, 2)
    loader.sampler.__class__ = type("Uneven", (DistributedSampler,), {"__iter__": lambda self: iter(range(self.rank))})
    with pytest.raises(ValueError, match="its sampler gives ranks"):
        deal(loader, [Hand(2, 0, 1, 2)], 2, lambda: None)


def test_batches_may_have_another_size_from_then_on() -> None:
    loader = loader_of(48, 4, 0, 4)
    loader.sampler.num_replicas = 3
    batches, _, _ = deal(loader, [Hand(4, 0, 1, 4)], 6, lambda: None)
    assert [len(batch) for batch in batches] == [4, 6, 5]  # 32 are left, and one fills the shares up


class Twice(DistributedSampler[int]):
    """Gives each item two times, in blocks."""

    def __iter__(self) -> Any:
        order = [*range(12), *range(12)]
        size = len(order) // self.num_replicas
        return iter(order[self.rank * size : (self.rank + 1) * size])


def test_items_that_come_several_times_are_not_taken_for_what_fills_shares_up() -> None:
    data: Any = range(12)
    loader: Any = DataLoader(data, 2, sampler=Twice(data, 3, 0))
    drawn, rest = [], []
    for rank in range(3):
        _, before, rest = deal(loader, [Hand(3, rank, 1, 2)], 2, lambda: None)
        drawn += before[0]
    assert Counter([*drawn, *rest]) == Counter([*range(12), *range(12)])
