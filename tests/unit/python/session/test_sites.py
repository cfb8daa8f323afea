"""At which optimizer step a restarted script is put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from reft import _continuation
from reft._session.sites import Sites


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters stand for frames."""
    monkeypatch.setattr(_continuation, "calls_of", lambda start: [(start, 0)])
    monkeypatch.setattr(_continuation, "note_variables", lambda start: {f"main:{start}"})
    monkeypatch.setattr(_continuation, "lines_of", lambda start: [f"train.py:{ord(start)}"])


def stepped(sites: Sites, order: str, at_end: Callable[[Any], Any]) -> Any:
    """Steps at the places of `order`; what `at_end` gave at the last one."""
    found: Any = None
    for here in cast(list[Any], list(order)):
        sites.note(here)
        found = at_end(here)
    return found


def where(sites: Sites, order: str, first: int = 1) -> dict[str, Any]:
    """What is saved at the end of `order`."""

    def end(here: Any) -> dict[str, Any]:
        if sites.count == first:
            sites.choose(here)
        return sites.saved(here)

    found: dict[str, Any] = stepped(sites, order, end)
    return found


def waited(saved: dict[str, Any], order: str, waits: bool = True) -> list[int]:
    """The steps at which a restarted script could be put back."""
    sites, found = Sites(exact=True), []

    def end(here: Any) -> None:
        if sites.count == saved["first"]:
            sites.choose(here)
        if sites.is_at(here, saved, waits):
            found.append(sites.count)

    stepped(sites, order, end)
    return found


def test_it_is_the_first_step_at_the_place_of_the_snapshot() -> None:
    assert where(Sites(exact=True), "abab")["at"] == 2
    assert where(Sites(exact=True), "aba")["at"] == 1
    assert where(Sites(exact=True), "aba", first=2)["at"] == 3
    assert waited(where(Sites(exact=True), "abab"), "aabab") == [3, 5]


def test_a_script_that_skips_what_it_has_done_is_put_back_sooner() -> None:
    saved = where(Sites(exact=True), "aaaab")
    assert saved["at"] == 5 and waited(saved, "bb") == [1, 2]
    assert waited(saved, "ab", waits=False) == [1, 2]


def test_a_place_that_is_reached_late_is_not_waited_for() -> None:
    sites = Sites(exact=True)
    saved = where(sites, "a" * 70 + "b")
    assert saved["at"] == 0 and waited(saved, "ab") == [1, 2]
    said = stepped(sites, "b", sites.why_never)
    assert said.startswith(
        "this step ends at train.py:98, and none of the first 64 of a restarted script does"
    )
    assert stepped(sites, "a", sites.why_never) == ""


def test_many_optimizers_before_the_first_point_do_not_matter() -> None:
    sites = Sites(exact=True)
    assert where(sites, "a" * 100 + "b", first=100)["at"] == 101
    assert stepped(sites, "b", sites.why_never) == ""


def test_a_script_that_was_edited_does_not_wait() -> None:
    for at in (1, 2):
        saved = {"first": 1, "at": at, "site": "elsewhere", "reached": {"elsewhere": at}}
        assert waited(saved, "ab") == [1, 2]


def test_a_script_that_never_comes_there_waits_for_so_long_only() -> None:
    saved = {**where(Sites(exact=True), "ab"), "site": "elsewhere"}
    assert waited(saved, "a" * 67) == [65, 66, 67]


def test_the_process_after_the_next_knows_the_same_places() -> None:
    saved = where(Sites(exact=True), "abab")
    again = Sites(exact=True)
    again.put_back(saved)
    more: dict[str, Any] = stepped(again, "c" * 100 + "b", again.saved)
    assert (more["at"], more["count"]) == (2, 105)
    assert more["reached"].keys() - saved["reached"].keys(), "c came as step 5"
    assert more["variables"] == ["main:b", "main:c"]
    assert stepped(again, "d", again.why_never) != "", "which came too late"


def test_without_places_all_steps_are_alike() -> None:
    saved = where(Sites(exact=False), "ab", first=2)
    assert (saved["at"], saved["reached"]) == (0, {})
    other = Sites(exact=False)
    assert stepped(other, "a", lambda here: other.is_at(here, saved, True)) is False
    assert stepped(other, "a", lambda here: other.is_at(here, saved, True)) is True
