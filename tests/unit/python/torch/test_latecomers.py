"""What ranks that wait in init_process_group say of those that have not come."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from reft._torch import attempt, latecomers
from reft._torch.latecomers import Latecomers, Missing, Seen

SUSPECT = 20.0
AT = "data.py:88 load"


class Wait:
    """One rank's wait, with a clock of its own."""

    def __init__(
        self, here: Mapping[int, Sequence[int]], seen: Mapping[int, Seen], rank: int = 0
    ) -> None:
        self.now = 100.0
        self.said: list[str] = []
        self.watched: list[Mapping[int, Sequence[int]]] = []
        self.missing = Missing([1])
        self.claims = True
        self.claimed: list[tuple[int, bool]] = []
        self.stuck = threading.Event()  # what the thread that looks waits for
        self.stuck.set()
        self._here, self._seen = here, seen
        self.late = Latecomers(
            rank,
            1000,
            SUSPECT,
            clock=lambda: self.now,
            wall=lambda: self.now,
            siblings=self._find,
            watch=self._watch,
            say=self.said.append,
        )

    def _find(self, rank: int, size: int) -> Mapping[int, Sequence[int]]:
        assert size == 1000 and threading.current_thread().name == "reft-late"
        self.stuck.wait()
        return self._here

    def _claim(self, turn: int, renew: bool) -> bool:
        self.claimed.append((turn, renew))
        return self.claims

    def _watch(self, processes: Mapping[int, Sequence[int]], _: float) -> Mapping[int, Seen]:
        self.watched.append(processes)
        self.stuck.wait()
        return self._seen

    def until(self, sec: float) -> list[str]:
        """Waits until then. Returns what was said since the last call."""
        while self.now < 100.0 + sec:
            self.now += 0.25
            self.late.tick(self._of, self._claim)
            for thread in threading.enumerate():
                if thread.name == "reft-late" and self.stuck.is_set():
                    thread.join()
        said, self.said[:] = list(self.said), []
        return said

    def _of(self, ranks: Sequence[int] | None) -> Missing:
        if ranks is None:
            return self.missing
        return Missing(
            [rank for rank in self.missing.unseen if rank in ranks],
            [rank for rank in self.missing.silent if rank in ranks],
        )


def test_a_rank_that_stands_is_slow_until_ten_times_the_suspicion_time() -> None:
    wait = Wait({1: [4711, 4712], 2: [4720]}, {1: Seen(4711, AT, False, False)})
    assert wait.until(SUSPECT - 1) == []
    has = f"rank 1 has not reached init_process_group: its process stands at {AT} (pid 4711)"
    assert wait.until(SUSPECT + 1) == [f"slow: {has}; the others have waited for 20 s"]
    assert wait.until(10 * SUSPECT) == []
    (line,) = wait.until(11.5 * SUSPECT)
    assert line.startswith(f"hang: {has}; the others have waited for 2")
    assert wait.until(30 * SUSPECT) == []
    assert set(map(str, wait.watched)) == {str({1: [4711, 4712]})}


def test_a_rank_at_work_stays_slow_until_it_stands() -> None:
    seen = {1: Seen(4711, AT, True, False)}
    wait = Wait({1: [4711]}, seen)
    (line,) = wait.until(15 * SUSPECT)
    assert line.startswith(f"slow: rank 1 has not reached init_process_group: its process is at work at {AT}")
    seen[1] = Seen(4711, AT, False, False)
    (line,) = wait.until(17 * SUSPECT)
    assert line.startswith("hang: rank 1 ")
    seen[1] = Seen(4711, "data.py:99 load", True, False)
    assert wait.until(30 * SUSPECT) == []


def test_a_rank_of_another_machine_is_named_without_a_line() -> None:
    wait = Wait({2: [4720]}, {})
    wait.missing = Missing([1, 8, 9, 10])
    assert wait.until(SUSPECT + 1) == [
        "ranks 1 8-10 have not reached init_process_group; the others have waited for 20 s"
    ]


def test_a_rank_that_comes_in_time_is_not_spoken_of() -> None:
    wait = Wait({1: [4711]}, {1: Seen(4711, AT, False, False)})
    assert wait.until(SUSPECT - 1) == []
    wait.missing = Missing()  # between the looks
    assert wait.until(3 * SUSPECT) == []


def test_a_rank_that_stands_in_init_process_group_has_come() -> None:
    wait = Wait({1: [4711]}, {1: Seen(4711, "train.py:3 main", False, True)})
    assert wait.until(3 * SUSPECT) == []


def test_who_is_silent_may_wait_for_who_has_not_come() -> None:
    both = {0: Seen(4710, "train.py:3 main", False, False), 1: Seen(4711, AT, False, False)}
    wait = Wait({0: [4710], 1: [4711]}, both, rank=2)
    wait.missing = Missing([1], [0])
    (line,) = wait.until(SUSPECT + 1)
    assert "rank 1 has not reached" in line
    wait.missing = Missing([], [0])
    (line,) = wait.until(3 * SUSPECT)
    assert line.startswith("slow: rank 0 has not reached init_process_group: its process stands at train.py:3")


def test_a_silent_rank_without_a_stack_may_stand_in_init_process_group() -> None:
    wait = Wait({1: [4711]}, {1: Seen(4711, "", False, False)})
    wait.missing = Missing([], [1])
    (line,) = wait.until(SUSPECT + 1)
    assert line.startswith("rank 1 has not reached init_process_group, or stands still in it;")


def test_many_missing_ranks_are_said_again_only_when_half_of_them_have_come() -> None:
    wait = Wait({}, {})
    wait.missing = Missing(range(1, 200))
    (line,) = wait.until(SUSPECT + 1)
    assert line.startswith("ranks 1-64 and 135 more have not reached init_process_group;")
    wait.missing = Missing(range(1, 101))
    assert wait.until(5 * SUSPECT) == []
    wait.missing = Missing(range(1, 100), cut=True)
    (line,) = wait.until(9 * SUSPECT)
    assert line.startswith("ranks 1-64 and at least 35 more have")
    assert wait.until(40 * SUSPECT) == []
    wait.missing = Missing([], [7])  # another thing to say
    assert len(wait.until(45 * SUSPECT)) == 1


def test_one_of_those_that_wait_speaks() -> None:
    store = dist.PrefixStore("reft/agree", dist.HashStore())

    def claims(*turns: int) -> list[bool]:
        return [attempt._claim(store, turn, False) for turn in turns]

    assert claims(7, 7, 8, 9) == [True, False, False, False]
    assert claims(10)  # who spoke is gone, and those that asked meanwhile have left no mark
    assert attempt._claim(store, 12, True)
    assert claims(13, 14, 15) == [False, False, True]


def test_another_rank_takes_over_from_one_that_does_not_speak_any_more() -> None:
    wait = Wait({0: [4710]}, {0: Seen(4710, AT, False, False)}, rank=2)
    wait.missing, wait.claims = Missing([], [0]), False
    assert wait.until(5 * SUSPECT) == []
    wait.claims = True
    assert len(wait.until(9 * SUSPECT)) == 1


def test_who_speaks_renews_its_claim_in_each_turn_and_claims_anew_when_it_was_away() -> None:
    wait = Wait({}, {})
    wait.until(5.5 * SUSPECT)
    assert wait.claimed == [(6, False), *((turn, True) for turn in (7, 8, 9, 10))]
    wait.now += 3 * SUSPECT
    wait.claimed.clear()
    wait.until(10 * SUSPECT)
    assert wait.claimed[0][1] is False


@pytest.mark.parametrize("where", ["siblings", "watch"])
def test_a_thread_that_does_not_come_back_is_left_alone(where: str) -> None:
    wait = Wait({1: [4711]}, {1: Seen(4711, AT, False, False)})
    if where == "watch":
        wait.until(0.75 * SUSPECT)
    wait.stuck.clear()
    before = threading.active_count()
    try:
        assert wait.until(3.5 * SUSPECT) == []
        (line,) = wait.until(5 * SUSPECT)
        assert line.startswith("rank 1 has not reached init_process_group;")
        assert wait.until(30 * SUSPECT) == []
        assert threading.active_count() == before + 1
    finally:
        wait.stuck.set()


@pytest.mark.parametrize("name", ["_watch", "_siblings"])
def test_a_look_that_fails_says_what_is_known_without_it(name: str) -> None:
    wait = Wait({1: [4711]}, {})

    def fail(*_: object) -> Mapping[int, Seen]:
        raise OSError(24, "Too many open files")

    setattr(wait.late, name, fail)
    (line,) = wait.until(1.5 * SUSPECT)
    assert line.startswith("rank 1 has not reached init_process_group;")


@pytest.mark.parametrize("what", ["thread", "missing", "claim"])
def test_whatever_fails_turns_the_reports_off_and_nothing_else(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Wait({1: [4711]}, {})
    failed: list[object] = []

    def fail(*given: object) -> Any:
        failed.append(given)
        raise RuntimeError("can't start new thread")

    if what == "thread":
        monkeypatch.setattr(threading.Thread, "start", fail)
    else:
        monkeypatch.setattr(wait, {"missing": "_of", "claim": "_claim"}[what], fail)
    assert wait.until(9 * SUSPECT) == []
    assert len(failed) == 1


class Requests:
    """A store with questions of some ranks, which counts."""

    def __init__(self, world: int, absent: set[int]) -> None:
        self.made = 0
        self._there = {f"ask/{rank}" for rank in range(world) if rank not in absent}

    def check(self, keys: list[str]) -> bool:
        self.made += 1
        assert keys
        return self._there.issuperset(keys)


def test_absent_ranks_of_many_are_found_with_few_requests() -> None:
    for absent in ([], [1], [9_999], [3, 4, 7_000]):
        store = Requests(10_000, set(absent))
        assert attempt._absent(store, range(1, 10_000)) == absent
        assert store.made <= 1 + 2 * 14 * len(absent)
    store = Requests(10_000, set(range(10_000)))
    assert attempt._absent(store, range(1, 10_000)) == list(range(1, 257))
    assert store.made < 600
    assert attempt._absent(store, []) == []


def test_the_pause_between_questions_grows_with_large_jobs_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert attempt._longest_pause(2) == attempt._longest_pause(500) == 0.05
    assert attempt._longest_pause(10_000) == pytest.approx(1.0)
    slept: list[float] = []
    monkeypatch.setattr(attempt.time, "sleep", slept.append)
    for _ in range(50):
        attempt._pause(attempt.time.monotonic() + 60, 1.0, "")
    assert 0.5 <= min(slept) < max(slept) <= 1.0


def test_ranks_know_who_has_not_asked_and_who_has_not_taken_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt, "_TAKING_SEC", 0.1)
    store = dist.HashStore()
    dist.PrefixStore("reft/agree", store).set("ask/2", "0123456789abcdef")
    known: list[Missing] = []

    class Spy(Latecomers):
        def tick(self, missing: object, claim: object) -> None:
            known.append(missing(None))  # type: ignore[operator]

    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not join"):
        attempt.agree(store, 0, 3, attempt.timedelta(seconds=0.5), Spy(0, 3, 1))
    assert (list(known[-1].unseen), list(known[-1].silent)) == ([1], [2])
    with pytest.raises(RuntimeError, match="rank 0 does not answer"):
        attempt.agree(store, 3, 4, attempt.timedelta(seconds=0.1), Spy(3, 4, 1))
    assert (list(known[-1].unseen), list(known[-1].silent)) == ([1], [0])


def look(
    line: int = 88, cpu: float = 0, io: int | None = 0, running: bool = False, faults: int = 0
) -> latecomers._Look:
    use = latecomers.other_process.Use(cpu, io, faults, running)
    return latecomers._Look(1, AT, (("data.py", line, "load"),), {1: use})


def test_a_process_that_goes_on_computes_or_reads_has_moved() -> None:
    assert not latecomers._moved(look(), look(cpu=0.1, io=1000), 5.0)
    assert not latecomers._moved(look(), look(running=True), 5.0)
    assert not latecomers._moved(look(io=None), look(io=1 << 20), 5.0)
    assert latecomers._moved(look(), look(line=89), 5.0)
    assert latecomers._moved(look(), look(cpu=1.0), 5.0)
    assert latecomers._moved(look(), look(io=1 << 20), 5.0)
    assert latecomers._moved(look(), look(faults=1 << 20), 5.0)
    assert latecomers._moved(look(running=True), look(running=True), 5.0)


def test_a_process_that_only_one_look_has_read_has_no_place() -> None:
    nowhere = dataclasses.replace(look(), frames=())
    other = dataclasses.replace(look(), pid=2)
    for then, now in ((None, look()), (other, look()), (nowhere, look()), (look(), nowhere)):
        assert latecomers._compare(then, now, 5.0) == Seen(1, "", False, False)
    assert latecomers._compare(look(), look(), 5.0) == Seen(1, AT, False, False)
    came = dataclasses.replace(look(), frames=(("distributed_c10d.py", 1, "init_process_group"),))
    assert latecomers._compare(None, came, 5.0).inside
    assert latecomers.sort_out(Missing([1]), {1: Seen(1, "", False, True)}) == ([], [])
