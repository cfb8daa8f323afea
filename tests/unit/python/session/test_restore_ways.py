"""Which way a restore takes after attempts that ended in it."""

from __future__ import annotations

import pytest

from reft import _C
from reft._session import restore_ways, startup
from reft._session.restore_ways import Begun, Way
from tests.support.jobs import job, trusted


def test_a_rank_that_was_killed_once_tries_again() -> None:
    begun = Begun().again(7, Way.NEWEST)
    assert begun == Begun(7, Way.NEWEST, 1) and begun.next_way() is Way.NEWEST
    begun = begun.again(7, Way.NEWEST)
    assert begun.tries == 2 and begun.next_way() is Way.OLDER


def test_an_error_counts_at_once_and_every_way_is_tried_once() -> None:
    begun, ways = Begun(7, Way.NEWEST, 1), []
    for _ in range(4):
        begun = begun.failed()
        way = begun.next_way()
        ways.append(way)
        begun = begun.again(7, way)
    assert ways == [Way.OLDER, Way.STATE, Way.NONE, Way.NONE]
    assert Begun().failed().next_way() is Way.NEWEST, "nothing has begun"


def test_one_failed_rank_decides_for_all() -> None:
    store = trusted()
    restore_ways.report(store, 0, Begun())
    assert restore_ways.reported(store) == Begun()
    restore_ways.report(store, 0, Begun(7, Way.NEWEST, 1).failed())
    restore_ways.report(store, 1, Begun(7, Way.NEWEST, 1))
    assert restore_ways.reported(store).next_way() is Way.OLDER


@pytest.mark.parametrize("nonsense", ["", "x", "1 2", "1 9 1", "1 1 1 1", "7 0 255 " * 40])
def test_nonsense_and_what_an_outsider_says_decide_nothing(nonsense: str) -> None:
    store = trusted()
    store.put("round", "restoring/ended", 0, nonsense)
    assert restore_ways.reported(store) == Begun()
    store.raw.set("restoring/ended", "7 0 255")
    assert restore_ways.reported(store) == Begun()


class Plan:
    def __init__(self, step: int) -> None:
        self.step = step


@pytest.mark.parametrize(
    ("steps", "begun", "step", "way"),
    [
        ([4, 5], Begun(), 5, Way.NEWEST),
        ([4, 5], Begun(5, Way.NEWEST, 1), 5, Way.NEWEST),
        ([4, 5], Begun(5, Way.NEWEST, 2), 4, Way.OLDER),
        ([4, 5], Begun(4, Way.OLDER, 1), 4, Way.OLDER),
        ([4, 5], Begun(4, Way.OLDER, 255), 5, Way.STATE),
        ([5], Begun(5, Way.NEWEST, 255), 5, Way.STATE),
        ([5], Begun(5, Way.STATE, 255), None, Way.NONE),
        ([5], Begun(5, Way.NONE, 255), None, Way.NONE),
    ],
)
def test_what_is_planned(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    steps: list[int],
    begun: Begun,
    step: int | None,
    way: Way,
) -> None:
    def plan(inventory: str, node_of: list[int], below: int = 1 << 62) -> tuple[Plan | None, list[str], bool]:
        fitting = [one for one in steps if one < below]
        return Plan(max(fitting)) if fitting else None, [], True

    monkeypatch.setattr(_C, "plan_restore", plan)
    found, taken = startup._plan_after(begun, {"resume": "exact"}, job(), "")
    assert (found and found.step, taken) == (step, way)
    assert ("an attempt ended" in capfd.readouterr().err) == (way is not Way.NEWEST)
