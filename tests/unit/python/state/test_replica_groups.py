"""Which ranks hold equal bytes: placements promise it, content hashes confirm it."""

from __future__ import annotations

import hashlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from reft._link.trusted_store import REPLICAS, TrustedStore
from reft._state import replica_groups
from reft._state.discovery import Region
from tests.support.jobs import trusted

Outcome = tuple[list[tuple[str, tuple[int, ...]]], list[str]]  # groups, names that differ


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_groups, "_WAIT", timedelta(seconds=2))


def region(name: str, value: float, ranks: tuple[int, ...], size: int = 4) -> Region:
    return Region(name, torch.full((size,), value), ranks)


def confirm(
    ranks: list[list[Region]], store: TrustedStore | None = None, plan: str = "first"
) -> list[Outcome]:
    """All ranks confirm at a time."""
    shared = store or trusted()
    with ThreadPoolExecutor(len(ranks)) as pool:
        calls = [
            pool.submit(replica_groups.confirm, regions, shared, rank, plan)
            for rank, regions in enumerate(ranks)
        ]
        results = [call.result() for call in calls]
    return [
        (groups, [name for found in different for name in found.names])
        for groups, different in results
    ]


def test_equal_bytes_are_a_group() -> None:
    ranks = [[region("o0.p0", 1, (0, 1)), region("o0.p1", 2, (0, 1))] for _ in range(2)]
    outcomes = confirm(ranks)
    assert outcomes == [([("g0-1", (0, 1))], [])] * 2
    assert all(r.ranks == (0, 1) for regions in ranks for r in regions)


def test_a_tensor_that_differs_is_private_and_named_on_every_rank() -> None:
    ranks = [
        [region("o0.p0", 1, (0, 1, 2)), region("o0.p1", rank // 2, (0, 1, 2))] for rank in range(3)
    ]
    outcomes = confirm(ranks)
    assert outcomes == [([("g0-2", (0, 1, 2))], ["o0.p1"])] * 3
    for regions in ranks:
        assert [r.ranks for r in regions] == [(0, 1, 2), ()]


def test_state_that_only_one_member_has_is_private() -> None:
    ranks = [[region("o0.p0", 1, (0, 1))], [region("o0.p0", 1, (0, 1))]]
    ranks[0].append(region("o0.p0.exp_avg", 0, (0, 1)))
    outcomes = confirm(ranks)
    assert outcomes[0] == ([("g0-1", (0, 1))], [])  # no difference: an optimizer may be sharded
    assert ranks[0][1].ranks == () and ranks[0][0].ranks == (0, 1)


def test_what_some_have_and_what_differs_are_told_apart() -> None:
    shared, store = (0, 1), trusted()
    ranks = [
        [region("m0.w", rank, shared), region("o0.p0", 1, shared), region(f"o1.p{rank}", 1, shared)]
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(replica_groups.confirm, regions, store, rank, "first")
            for rank, regions in enumerate(ranks)
        ]
    for rank, call in enumerate(calls):
        assert call.result() == (
            [("g0-1", shared)],
            [replica_groups.Difference(shared, ("m0.w",), False, (f"o1.p{rank}",))],
        )


@pytest.mark.parametrize(
    ("columns", "odd"),
    [
        ({"a": [0, 0, 1, 0], "b": [5, 5, 5, 5]}, (6,)),  # one member's memory was corrupted
        ({"a": [0, 0, 1, 0, 0], "b": [5, 5, 5, 6, 5]}, (6, 7)),
        ({"a": [0, 0, 1, 0], "b": [5, 5, 5, 6]}, ()),  # half of them
        ({"a": [0, 0, 1, 1]}, ()),  # either half may be right
        ({"a": [0, 1, 2, 3]}, ()),  # state of each rank's own
        ({"a": [1, 0, 0], "b": [0, 1, 0], "c": [0, 0, 1]}, ()),  # each updates its own part
    ],
)
def test_the_odd_ones_out_are_named(columns: dict[str, list[int]], odd: tuple[int, ...]) -> None:
    shared = tuple(range(4, 4 + len(columns["a"])))
    assert odd_of(
        shared, [[region(n, v[i], shared) for n, v in columns.items()] for i in range(len(shared))]
    ) == {odd}


def test_another_shape_is_no_corruption() -> None:
    shared = (0, 1, 2)
    ranks = [[region("o0.p0", 1, shared, size=4 + (rank == 1))] for rank in shared]
    assert odd_of(shared, ranks) == {()}


def odd_of(shared: tuple[int, ...], regions: list[list[Region]]) -> set[tuple[int, ...]]:
    """What the members name as odd."""
    store = trusted()
    with ThreadPoolExecutor(len(shared)) as pool:
        calls = [
            pool.submit(replica_groups.confirm, regions[i], store, rank, "first")
            for i, rank in enumerate(shared)
        ]
    return {one.odd for call in calls for one in call.result()[1]}


@pytest.mark.parametrize("outcome", ["[", "[[], []]", "3", '[["o0.p0"], [], 1]'])
def test_an_outcome_that_is_none_shares_nothing(outcome: str) -> None:
    store = trusted()
    key = f"plan/first/{hashlib.sha256(b'(0, 1)').hexdigest()[:16]}"
    store.first_of(REPLICAS, f"{key}/digest/outcome", 0, "different")
    store.first_of(REPLICAS, f"{key}/rows/outcome", 0, outcome)
    one = region("o0.p0", 1, (0, 1))
    groups, different = replica_groups.confirm([one], store, 1, "first")
    assert (groups, one.ranks, different[0].missed) == ([], (), True)


def test_two_groups_of_a_rank_are_confirmed_apart() -> None:
    first = [region("o0.p0", 1, (0, 1)), region("o0.p1", 2, (0, 2))]
    outcomes = confirm([first, [region("o0.p0", 1, (0, 1))], [region("o0.p1", 3, (0, 2))]])
    assert outcomes == [
        ([("g0-1", (0, 1))], ["o0.p1"]),
        ([("g0-1", (0, 1))], []),
        ([], ["o0.p1"]),
    ]
    assert [r.ranks for r in first] == [(0, 1), ()]


def test_a_placement_that_names_other_ranks_only_is_not_a_promise() -> None:
    alone = [region("o0.p0", 1, (1, 2)), region("o0.p1", 1, (0,))]
    groups, different = replica_groups.confirm(alone, trusted(), 0, "first")
    assert (groups, different) == ([], []) and [r.ranks for r in alone] == [(), ()]


def test_nobody_relies_on_a_member_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_groups, "_WAIT", timedelta(seconds=0.2))
    ranks = [[region("o0.p0", 1, (0, 1, 2))] for _ in range(2)]  # rank 2 is missing
    outcomes = confirm(ranks)
    assert outcomes == [([], ["o0.p0"])] * 2
    assert [r.ranks for regions in ranks for r in regions] == [(), ()]


def test_another_shape_is_a_difference_and_nobody_waits() -> None:
    ranks = [[region("o0.p0", 1, (0, 1), size=4)], [region("o0.p0", 1, (0, 1), size=6)]]
    assert confirm(ranks) == [([], ["o0.p0"])] * 2


def test_a_difference_names_the_group_and_who_missed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_groups, "_WAIT", timedelta(seconds=0.2))
    alone = [region("o0.p0", 1, (0, 1))]
    _, different = replica_groups.confirm(alone, trusted(), 0, "first")
    assert different == [replica_groups.Difference((0, 1), ("o0.p0",), missed=True)]


def test_a_second_plan_is_compared_anew() -> None:
    store = trusted()

    def plan(name: str, values: list[float]) -> list[Outcome]:
        return confirm([[region("o0.p0", value, (0, 1))] for value in values], store, name)

    assert [different for _, different in plan("first", [1, 1])] == [[], []]
    assert [different for _, different in plan("4", [1, 2])] == [["o0.p0"], ["o0.p0"]]


def test_who_comes_late_to_a_plan_takes_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_groups, "_WAIT", timedelta(seconds=0.2))
    store = trusted()
    for rank in range(2):
        groups, different = replica_groups.confirm([region("o0.p0", 1, (0, 1))], store, rank, "4")
        assert groups == [] and different[0].missed


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ((0, 1), "g0-1"),
        ((0, 8), "g0,8"),
        ((0, 1, 2, 9), "g0-2,9"),
        ((0, 3, 4, 5), "g0,3-5"),
        ((0, 8, 16), "g0-16/8"),
        ((5, 6, 8, 10, 12), "g5-6,8-12/2"),
        (tuple(range(10_000)), "g0-9999"),
    ],
)
def test_a_regular_group_has_a_short_name(ranks: tuple[int, ...], name: str) -> None:
    assert replica_groups.group_id(ranks) == name


def test_no_two_groups_share_a_name() -> None:
    groups = [
        ranks for size in range(1, 8) for ranks in itertools.combinations(range(7), size)
    ]
    assert len({replica_groups.group_id(ranks) for ranks in groups}) == len(groups)
