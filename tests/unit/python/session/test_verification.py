"""What a verification may excuse, and that its own faults end nothing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from reft._link import gather
from reft._session import notes
from reft._session.recomputation import Recomputation
from reft._session.resumer import Resumed
from reft._session.step_comparison import is_part
from reft._session.verification import Verdict, VerifiedResume
from reft._state import discovery
from tests.fakes.native import FakeAgentClient
from tests.support import jobs


def test_a_value_that_is_named_as_lost_excuses_what_it_holds_and_what_holds_it() -> None:
    lost = ["main:model.cache"]
    assert is_part("main:model.cache", lost)
    assert is_part("main:model.cache[3]", lost)
    assert is_part("main:model.cache.size", lost)
    assert is_part("main:model", lost)


def test_it_excuses_no_other_value_whose_name_begins_alike() -> None:
    assert not is_part("main:loss_total", ["main:loss"])
    assert not is_part("main:loss", ["main:loss_total"])
    assert not is_part("o0.p1", ["o0.p10"])


# -- a fault of the verification costs the verification alone


class Restores:
    """A `Resumer` of a step, without tensors."""

    def __init__(self, step: int, calls: list[str], fail: Exception | None = None) -> None:
        self.plan = SimpleNamespace(step=step, incarnation=1)
        self.saved: Any = {}
        self.lost: list[Any] = []
        self._calls, self._fail = calls, fail

    def bind(self, job: Any, store: Any) -> None:
        self._job, self._store = job, store

    def prepare(self, boundary: Any, name: str, again: bool = False) -> Any:
        gathered = gather.gather(self._job, self._store, name, "", "".join)
        return None if gathered.refusals else SimpleNamespace(missing=SimpleNamespace(unmake=int))

    def write(self, ready: Any, frame: Any, again: bool = False) -> Resumed:
        if self._fail is not None:
            raise self._fail
        self._calls.append(f"restored {self.plan.step}")
        return Resumed(self.plan.step, cast(Any, None), [], 0, True, "state", 0)

    def compare(self, state: Any) -> tuple[int, int, list[Any]]:
        return 8, 0, []

    def saved_anew(self, state: Any) -> Any:
        return self.saved

    def report(self, resumed: Resumed, verified: str) -> None:
        self._calls.append(verified)


class Rank:
    """One rank of a job whose resume at step 7 is verified from step 6, or by a part of step 8."""

    def __init__(
        self,
        rank: int,
        world: int,
        store: Any,
        base_fails: Exception | None = None,
        partly: bool = False,
    ) -> None:
        self.calls: list[str] = []
        self.marked: list[int] = []
        job = jobs.job(rank, world)
        newest, base = Restores(7, self.calls), Restores(6, self.calls, base_fails)
        newest.bind(job, store)
        base.bind(job, store)
        self.resume = VerifiedResume(
            job,
            store,
            cast(Any, newest),
            cast(Any, base),
            Recomputation(8 if partly else 7, cast(Any, None), None, not partly),
            "",
            60,
            lambda *_: cast(Any, {}),
            self.marked.append,
            notes.Notes(FakeAgentClient("", "{}", 0, [])),
        )

    def point(self) -> bool:
        frame = inspect.currentframe()
        assert frame is not None
        is_over, _ = self.resume.point(frame, cast(Any, SimpleNamespace(optimizers=[])))
        return is_over


    def next(self) -> None:
        frame = inspect.currentframe()
        assert frame is not None and self.resume.compares_next
        self.resume.compare_next(frame, cast(Any, SimpleNamespace(optimizers=[])))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Rank]]:
    """Makes the ranks of a job; each argument holds what one of them differs in."""
    monkeypatch.setattr(discovery, "discover", lambda _: SimpleNamespace(regions=[]))
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    return lambda *differ: [Rank(i, len(differ), store, **more) for i, more in enumerate(differ)]


def all_at(ranks: list[Rank]) -> list[bool]:
    """All ranks at one program point: whether their resume is over."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(Rank.point, ranks))


def test_two_points_verify_and_restore_the_newest_step(ranks: Callable[..., list[Rank]]) -> None:
    both = ranks({}, {})
    assert all_at(both) == [False, False]
    assert all_at(both) == [True, True]
    for rank in both:
        assert rank.calls[:2] == ["restored 6", "restored 7"] and rank.marked == [7]
        assert rank.calls[2] == "step 7 was computed again from step 6 and is bit-identical"
        assert rank.resume.verdict is Verdict.IDENTICAL


def test_a_rank_that_cannot_put_the_base_back_is_not_waited_for(
    ranks: Callable[..., list[Rank]],
) -> None:
    both = ranks({}, {"base_fails": RuntimeError("no such tensor")})
    with ThreadPoolExecutor(2) as pool:
        points = [pool.submit(rank.point) for rank in both]
        raised = [point.exception(20) for point in points]
    for rank, error in zip(both, raised, strict=True):
        assert "rank 1: step 6 could not be put back: no such tensor" in str(error)
        assert rank.marked == [7], "the next attempt resumes without"


def test_a_comparison_that_fails_claims_nothing(
    ranks: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ranks({}, {})
    assert all_at(both) == [False, False]

    def fail(_: Any) -> Any:
        raise RuntimeError("a tensor has gone")

    monkeypatch.setattr(discovery, "discover", fail)
    assert all_at(both) == [True, True]
    for rank in both:
        assert rank.calls[1] == "restored 7"
        assert re.match(
            r"not verified: rank [01]: the comparison failed: RuntimeError: a tensor", rank.calls[2]
        )


def test_a_part_of_the_next_step_is_compared_while_training_goes_on(
    ranks: Callable[..., list[Rank]],
) -> None:
    both = ranks({"partly": True}, {"partly": True})
    assert all_at(both) == [True, True]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Rank.next, both))
    for rank in both:
        assert rank.calls == ["restored 7", "step 8 will be compared with what had been copied of it"]
        assert rank.marked == [], "no step is computed twice"
        assert not rank.resume.compares_next
        assert rank.resume.outcome == "not verified: nothing of step 8 had been copied"


def test_a_rank_that_has_left_the_loop_is_not_waited_for(
    ranks: Callable[..., list[Rank]], capsys: pytest.CaptureFixture[str]
) -> None:
    both = ranks({}, {})
    assert all_at(both) == [False, False]
    both[0].resume.left()
    assert both[1].point()
    assert both[1].calls == ["restored 6"], "all resume at the newest step or none"
    said = capsys.readouterr().err
    assert "the script left its loop after step 6, before it had computed step 7 again" in said
    assert "what it saves now is step 6, not 7" in said
