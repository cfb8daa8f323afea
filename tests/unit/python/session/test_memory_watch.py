"""What a vault gives back, and when."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from reft._link import host_memory, vault_place
from reft._session.memory_watch import MemoryWatch
from tests.fakes.native import FakeEngine
from tests.support.jobs import job


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether memory is short, in its one item."""
    answer = [False]
    monkeypatch.setattr(host_memory, "is_short", lambda: answer[0])
    monkeypatch.setattr(host_memory, "is_stalled", lambda: False)
    monkeypatch.setattr(host_memory, "oom_mark", lambda: 5)
    yield answer


def watch(
    engine: FakeEngine, clock: Clock, oom_kills: int = 0, vault_dir: str = "", copies: Any = None
) -> MemoryWatch:
    return MemoryWatch({"vault_dir": vault_dir}, job(), engine, oom_kills, copies, clock)  # type: ignore[arg-type]


def test_one_slot_then_none_while_memory_is_short(
    short: list[bool], capfd: pytest.CaptureFixture[str]
) -> None:
    engine, clock = FakeEngine(), Clock()
    made = watch(engine, clock)
    made.point()
    assert not made.given_up and engine.given_back == [] and engine.marks == (5, False)
    short[0] = True
    made.point()
    assert engine.given_back == [], "it looks once a second"
    clock.now += 1
    made.point()
    assert made.given_up and engine.given_back == [False] and engine.marks == (5, True)
    clock.now += 1
    made.point()
    clock.now += 1
    made.point()
    assert engine.given_back == [False, True]
    said = capfd.readouterr().err
    assert said.count("memory is short") == 2 and "no snapshot of this rank is left" in said


def test_other_nodes_copies_go_last(short: list[bool]) -> None:
    engine, clock, dropped = FakeEngine(), Clock(), []
    copies = SimpleNamespace(drop=lambda: dropped.append(clock.now))
    made = watch(engine, clock, copies=copies)
    made.end("no space left on the disk of the vaults")
    assert engine.given_back == [False] and not dropped, "memory is not the reason"
    short[0] = True
    clock.now += 1
    made.point()
    assert engine.given_back == [False, True] and len(dropped) == 1
    short[0], after_oom = False, watch(FakeEngine(), clock, 1, copies=copies)
    after_oom.point()
    assert len(dropped) == 1
    watch(FakeEngine(), clock, 2, copies=copies).point()
    assert len(dropped) == 2


def test_what_helped_against_waiting_for_memory_shows_only_later(
    short: list[bool], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_memory, "is_stalled", lambda: True)
    engine, clock = FakeEngine(), Clock()
    made = watch(engine, clock)
    made.point()
    assert engine.given_back == [False]
    for _ in range(15):
        clock.now += 1
        made.point()
    assert engine.given_back == [False]
    clock.now += 10
    made.point()
    assert engine.given_back == [False, True]
    assert capfd.readouterr().err.count("processes wait for memory") == 2


def test_after_an_oom_kill_the_attempt_keeps_what_it_was_resumed_from(
    short: list[bool], capfd: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    made = watch(engine, Clock(), oom_kills=1)
    assert made.given_up and engine.marks == (5, True) and engine.given_back == []
    made.point()
    made.point()
    assert engine.given_back == [False]
    assert capfd.readouterr().err.count("WITHOUT snapshots") == 1


def test_after_a_second_one_it_keeps_nothing(short: list[bool]) -> None:
    engine = FakeEngine()
    watch(engine, Clock(), oom_kills=2).point()
    assert engine.given_back == [True]


def test_vaults_on_a_disk_are_left_alone(
    short: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    short[0] = True
    for in_memory, given_back in ((False, []), (True, [False])):
        monkeypatch.setattr(vault_place, "in_memory", lambda folder, is_it=in_memory: is_it)
        engine = FakeEngine()
        made = watch(engine, Clock(), vault_dir="/disk")
        made.point()
        assert engine.given_back == given_back and bool(made.given_up) == in_memory


def test_snapshots_that_have_ended_give_back_what_a_restart_does_not_need(
    short: list[bool],
) -> None:
    engine, clock = FakeEngine(), Clock()
    made = watch(engine, clock)
    made.end("no space left")
    made.end("again")
    assert made.given_up == "no space left" and engine.given_back == [False]
    short[0] = True
    made.point()
    assert engine.given_back == [False, True], "the watch goes on"
