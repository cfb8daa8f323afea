"""What ranks that wait in init_process_group say of those that have not come."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

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
        self._here, self._seen = here, seen
        self.late = Latecomers(
            rank,
            SUSPECT,
            clock=lambda: self.now,
            wall=lambda: self.now,
            siblings=lambda _: self._here,
            watch=self._watch,
            say=self.said.append,
        )

    def _watch(self, processes: Mapping[int, Sequence[int]], _: float) -> Mapping[int, Seen]:
        self.watched.append(processes)
        return self._seen

    def until(self, sec: float) -> list[str]:
        """Waits until then. Returns what was said since the last call."""
        while self.now < 100.0 + sec:
            self.now += 0.25
            self.late.tick(self._of, lambda _: self.claims)
            for thread in threading.enumerate():
                if thread.name == "reft-late":
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


def test_the_line_of_a_missing_rank_is_said_once_when_the_time_is_over() -> None:
    wait = Wait({1: [4711, 4712], 2: [4720]}, {1: Seen(4711, AT, False, False)})
    assert wait.until(SUSPECT - 1) == []
    assert wait.until(SUSPECT + 1) == [
        f"hang: rank 1 has not reached init_process_group: its process stands at {AT} (pid 4711);"
        " the others have waited for 20 s"
    ]
    assert wait.until(10 * SUSPECT) == []
    assert set(map(str, wait.watched)) == {str({1: [4711, 4712]})}


def test_a_rank_at_work_is_slow_until_it_stands() -> None:
    seen = {1: Seen(4711, AT, True, False)}
    wait = Wait({1: [4711]}, seen)
    (line,) = wait.until(3 * SUSPECT)
    assert line.startswith(f"slow: rank 1 has not reached init_process_group: its process is at work at {AT}")
    seen[1] = Seen(4711, AT, False, False)
    (line,) = wait.until(5 * SUSPECT)
    assert line.startswith("hang: rank 1 ")


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
    assert line.startswith("hang: rank 0 has not reached init_process_group: its process stands at train.py:3")


def test_a_silent_rank_without_a_stack_may_stand_in_init_process_group() -> None:
    wait = Wait({1: [4711]}, {1: Seen(4711, "", False, False)})
    wait.missing = Missing([], [1])
    (line,) = wait.until(SUSPECT + 1)
    assert line.startswith("rank 1 has not reached init_process_group, or stands still in it;")


def test_one_of_those_that_wait_speaks() -> None:
    store = dist.PrefixStore("reft/agree", dist.HashStore())
    assert [attempt._claim(store, turn) for turn in (7, 7, 8, 8)] == [True, False, False, False]
    assert attempt._claim(store, 20)
    wait = Wait({0: [4710]}, {0: Seen(4710, AT, False, False)}, rank=2)
    wait.missing, wait.claims = Missing([], [0]), False
    assert wait.until(5 * SUSPECT) == []
    wait.claims = True  # whoever spoke is gone
    assert len(wait.until(9 * SUSPECT)) == 1


def test_a_look_that_fails_says_what_is_known_without_it() -> None:
    wait = Wait({1: [4711]}, {})

    def fail(_: object, __: float) -> Mapping[int, Seen]:
        raise OSError

    wait.late._watch = fail
    (line,) = wait.until(SUSPECT + 1)
    assert line.startswith("rank 1 has not reached init_process_group;")


def test_ranks_know_who_has_not_asked_and_who_has_not_taken_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt, "_TAKING_SEC", 0.1)
    store = dist.HashStore()
    dist.PrefixStore("reft/agree", store).set("ask/2", "of a dead rank")
    known: list[Missing] = []

    class Spy(Latecomers):
        def tick(self, missing: object, claim: object) -> None:
            known.append(missing(None))  # type: ignore[operator]

    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not join"):
        attempt.agree_on_prefix(store, 0, 3, attempt.timedelta(seconds=0.5), Spy(0, 1))
    assert (list(known[-1].unseen), list(known[-1].silent)) == ([1], [2])
    with pytest.raises(RuntimeError, match="rank 0 does not answer"):
        attempt.agree_on_prefix(store, 3, 4, attempt.timedelta(seconds=0.1), Spy(3, 1))
    assert (list(known[-1].unseen), list(known[-1].silent)) == ([1], [0])


def test_a_process_that_goes_on_computes_or_reads_has_moved() -> None:
    use = latecomers.other_process.Use

    def look(line: int = 88, cpu: float = 0, moved: int = 0, running: bool = False) -> latecomers._Look:
        return latecomers._Look(1, AT, (("data.py", line, "load"),), use(cpu, moved, running))

    assert not latecomers._moved(look(), look(cpu=0.1, moved=1000), 5.0)
    assert not latecomers._moved(look(), look(running=True), 5.0)
    assert latecomers._moved(look(), look(line=89), 5.0)
    assert latecomers._moved(look(), look(cpu=1.0), 5.0)
    assert latecomers._moved(look(), look(moved=1 << 20), 5.0)
    assert latecomers._moved(look(running=True), look(running=True), 5.0)
