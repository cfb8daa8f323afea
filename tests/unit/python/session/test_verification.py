"""What a verification may excuse, and that its own faults end nothing."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from reft._continuation import comparison
from reft._continuation.comparison import Difference
from reft._link import gather
from reft._resume import restorer
from reft._session import notes, step_comparison, verification
from reft._session.recomputation import Recomputation
from reft._session.resumer import Resumed
from reft._session.step_comparison import Finding, SavedStep, is_part
from reft._session.verification import Verdict, VerifiedResume
from reft._state import discovery
from tests.fakes.native import FakeAgentClient
from tests.support import jobs
from tests.support.jobs import trusted


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
        self.position: dict[str, Any] = {"first": 1}
        self.why_not = "rank 1: elsewhere"
        self._calls, self._fail = calls, fail
        self.pieces: list[Any] = []
        self.problems: list[str] = []  # what `why_not_at` answers next; "" from then on

    def bind(self, job: Any, store: Any) -> None:
        self._job, self._store = job, store

    def why_not_at(self, frame: Any) -> str:
        return self.problems.pop(0) if self.problems else ""

    def prepare(
        self,
        boundary: Any,
        name: str,
        again: bool = False,
        problem: str = "",
        silent: bool = False,
        frame: Any = None,
    ) -> Any:
        gathered = gather.gather(self._job, self._store, name, problem, "".join)
        if gathered.refusals or gathered.text:
            return None
        return SimpleNamespace(missing=SimpleNamespace(unmake=int))

    def write(self, ready: Any, frame: Any) -> Resumed:
        if self._fail is not None:
            raise self._fail
        self._calls.append(f"restored {self.plan.step}")
        return Resumed(self.plan.step, cast(Any, None), [], 0, True, "state", 0)

    def compare(self, state: Any) -> tuple[int, int, list[Any]]:
        return 8, 0, self.pieces

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
        unfinished: Any = None,
        longest_sec: float = 60,
        computes: float = 1003,
    ) -> None:
        self.calls: list[str] = []
        self.marked: list[int] = []
        job = jobs.job(rank, world)
        newest, base = Restores(7, self.calls), Restores(6, self.calls, base_fails)
        self.newest, self.base = newest, base
        # What is computed again: a step is right if it gives 1003.
        newest.saved, base.saved = {"registered": 1003}, {"registered": computes}
        newest.bind(job, store)
        base.bind(job, store)
        self.resume = VerifiedResume(
            job,
            store,
            cast(Any, newest),
            cast(Any, base),
            Recomputation(8 if partly else 7, cast(Any, None), unfinished, not partly),
            "",
            longest_sec,
            lambda *_: cast(Any, {"registered": computes}),
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
    state = SimpleNamespace(regions=[], bytes=8)
    monkeypatch.setattr(discovery, "discover", lambda _: state)
    monkeypatch.setattr(restorer, "compare_unfinished", lambda unfinished, _: unfinished.compared)
    monkeypatch.setattr(verification, "finder_in", lambda _: None)
    monkeypatch.setattr(verification, "opened", lambda saved, _: saved)
    store = trusted()
    store.raw.set_timeout(timedelta(seconds=20))
    return lambda *differ: [Rank(i, len(differ), store, **more) for i, more in enumerate(differ)]


def next_of_all(ranks: list[Rank]) -> list[str]:
    """All ranks have computed the next step: what each of them says about the resume."""
    assert all_at(ranks) == [True] * len(ranks)
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(Rank.next, ranks))
    return [rank.resume.outcome for rank in ranks]


def copied(compared: int, left_out: int, small: bool = True) -> Any:
    """What a rank had copied of the step after the newest one."""
    objects = pickle.dumps({"registered": 1003}) if small else b""
    return SimpleNamespace(compared=(compared, left_out, []), objects=objects)


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
    both[0].resume.left(has_stepped=True)
    assert both[1].point()
    assert both[1].calls == ["restored 6"], "all resume at the newest step or none"
    said = capsys.readouterr().err
    assert "the script left its loop after step 6, before it had computed step 7 again" in said
    assert "what it saves now is step 6, not 7" in said


# -- the steps before and after stand elsewhere in the script

ELSEWHERE = "call path was main > flush, is main"


def test_a_base_that_stands_elsewhere_is_not_put_back(ranks: Callable[..., list[Rank]]) -> None:
    both = ranks({}, {})
    both[1].base.problems = [ELSEWHERE]
    assert all_at(both) == [True, True]
    for rank in both:
        (restored, outcome) = rank.calls
        assert restored == "restored 7", "nothing is written of the step before"
        assert "not verified: step 6 cannot be put back: rank 1: elsewhere" in outcome


def test_a_step_that_could_not_be_put_back_afterwards_is_not_computed_again(
    ranks: Callable[..., list[Rank]],
) -> None:
    both = ranks({}, {})
    both[1].newest.problems = [ELSEWHERE]
    assert all_at(both) == [True, True]
    assert [rank.calls[0] for rank in both] == ["restored 7", "restored 7"]


def test_a_loop_that_goes_elsewhere_is_not_computed_twice(ranks: Callable[..., list[Rank]]) -> None:
    both = ranks({"computes": 0.5}, {})
    both[1].base.problems = ["", ELSEWHERE]
    assert all_at(both) == [False, False]
    assert all_at(both) == [True, True]
    assert [rank.calls[:2] for rank in both] == [["restored 6", "restored 7"]] * 2


def test_tensors_never_go_where_the_loop_does_not(
    ranks: Callable[..., list[Rank]], capsys: pytest.CaptureFixture[str]
) -> None:
    both = ranks({"computes": 1004}, {})
    both[1].newest.problems = ["", ELSEWHERE]
    both[0].base.problems = ["", ELSEWHERE]  # no second computation
    assert all_at(both) == [False, False]
    assert all_at(both) == [True, True]
    assert [rank.calls for rank in both] == [["restored 6"]] * 2
    assert [rank.resume.verdict for rank in both] == [Verdict.DIFFERS] * 2
    said = capsys.readouterr().err
    assert "training continues with the computed one" in said and "rank 1: elsewhere" in said
    assert "variable registered object on rank 0: was 1003, is 1004" in said


# -- what is claimed


def test_all_of_the_next_step_was_copied(ranks: Callable[..., list[Rank]]) -> None:
    both = ranks(*[{"partly": True, "unfinished": copied(8, 0)}] * 2)
    assert next_of_all(both) == ["step 8 was computed from it and is bit-identical"] * 2


def test_a_part_of_the_tensors_is_named_as_such(ranks: Callable[..., list[Rank]]) -> None:
    both = ranks(*[{"partly": True, "unfinished": copied(5000, 1)}] * 2)
    whole = "bit-identical to what had been copied of it, 99% of its bytes"
    assert all(said.endswith(whole) for said in next_of_all(both))


@pytest.mark.parametrize("other", [None, copied(8, 0, small=False)], ids=["nothing", "tensors"])
def test_a_rank_that_has_looked_at_no_variable_claims_nothing_for_all(
    ranks: Callable[..., list[Rank]], other: Any
) -> None:
    first, second = {"unfinished": copied(8, 0)}, {"unfinished": other}
    both = ranks({"partly": True, **first}, {"partly": True, **second})
    assert next_of_all(both) == ["not verified: not every rank had begun to copy step 8"] * 2
    assert [rank.resume.verdict for rank in both] == [Verdict.NONE] * 2


def compare_weight(there: SavedStep) -> Finding:
    """The state has one tensor, of four zeros."""
    frame = inspect.currentframe()
    assert frame is not None
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.zeros(4)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    boundary = cast(Any, SimpleNamespace(optimizers=[optimizer]))
    return step_comparison.compare(there, frame, boundary, lambda *_: cast(Any, {}), [])


def test_bytes_of_a_rank_that_had_copied_nothing_are_left_out() -> None:
    finding = compare_weight(SavedStep(8, None, lambda _: None, partly=True))
    assert (finding.compared, finding.left_out, finding.fault) == (0, 17, "")


@pytest.mark.parametrize(
    ("partly", "certain", "later"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_a_tensor_may_have_changed_before_its_copy_if_that_had_not_ended(
    partly: bool, certain: bool, later: bool
) -> None:
    def compare(state: Any) -> tuple[int, int, list[Any]]:
        ones = torch.ones(4).numpy().tobytes()
        return 16, 0, [(state.regions[0].name, 0, 0, ones, certain)]

    (one,) = compare_weight(SavedStep(8, compare, lambda _: None, partly=partly)).differences
    assert (one.kind, one.may_be_later) == (comparison.TENSOR, later)
    assert one.why == "4 of 4 items differ, max |Δ| 1"


def differing(certain: list[bool]) -> Any:
    """What a rank had copied of the step after the newest one: tensors that all differ."""
    there = copied(16 * len(certain), 0)
    ones = torch.ones(4).numpy().tobytes()
    for i, one in enumerate(certain):
        there.compared[2].append((f"model.w{i}", 0, 0, ones, one))
    return there


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch, ranks: Callable[..., list[Rank]]) -> None:
    """The state has tensors of zeros, and kernels that give the same each time."""
    del ranks  # it has its own state, set before
    weight = torch.zeros(4)
    regions = [
        SimpleNamespace(name=f"model.w{i}", tensor=weight, current=lambda: weight)
        for i in range(3)
    ]
    monkeypatch.setattr(discovery, "discover", lambda _: SimpleNamespace(regions=regions, bytes=48))
    monkeypatch.setattr(verification, "_is_deterministic", lambda: True)


@pytest.mark.usefixtures("tensors")
def test_a_tensor_that_may_have_changed_before_its_copy_proves_nothing(
    ranks: Callable[..., list[Rank]], capsys: pytest.CaptureFixture[str]
) -> None:
    (rank,) = ranks({"partly": True, "unfinished": differing([False, False])})
    (said,) = next_of_all([rank])
    assert said.startswith("not verified: rank 0: tensors differ (model.w0: 4 of 4 items")
    assert "writes of the script between its optimizer step and the copy" in said
    assert rank.resume.verdict is Verdict.NONE
    assert "warning: the resume at step 7: not verified" in capsys.readouterr().err


@pytest.mark.usefixtures("tensors")
@pytest.mark.parametrize("certain", [[[True]], [[False, True]], [[False], [True]]])
def test_one_tensor_that_was_copied_in_time_is_proof(
    ranks: Callable[..., list[Rank]],
    capsys: pytest.CaptureFixture[str],
    certain: list[list[bool]],
) -> None:
    all_ranks = ranks(*({"partly": True, "unfinished": differing(one)} for one in certain))
    said = next_of_all(all_ranks)
    assert said == ["step 8 was computed from it and DIFFERS"] * len(certain)
    assert all(rank.resume.verdict is Verdict.DIFFERS for rank in all_ranks)
    assert "not verified" not in capsys.readouterr().err


def test_what_another_rank_could_not_restore_is_named(ranks: Callable[..., list[Rank]]) -> None:
    both = ranks({}, {})
    both[1].base.lost = [("main:cache", "", "unknown type")]
    both[1].newest.saved["frames"] = {"uncaptured": [("main:model", "", "too large")]}
    assert all_at(both) == [False, False]
    assert all_at(both) == [True, True]
    but = "is bit-identical but for main:cache on rank 1, main:model on rank 1"
    assert all(rank.calls[2].endswith(but) for rank in both)


def test_what_was_not_restored_before_the_next_step_is_named(
    ranks: Callable[..., list[Rank]],
) -> None:
    both = ranks(*[{"partly": True, "unfinished": copied(8, 0)}] * 2)
    both[1].newest.lost = [(f"main:v{i}", "", "unknown type") for i in range(5)]
    but = "but for main:v0 on rank 1, main:v1 on rank 1, main:v2 on rank 1, and more"
    assert all(said.endswith(f"bit-identical {but}") for said in next_of_all(both))


def test_a_comparison_that_fails_elsewhere_leaves_kernels_and_clocks_unproven(
    ranks: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ranks({}, {})
    assert all_at(both) == [False, False]
    compared = step_comparison.compare
    weight = Difference(comparison.TENSOR, "m0.weight", "1 of 3 items differ")
    clock = Difference(comparison.VARIABLE, "main:began", "was 1.5, is 2.5", may_be_time=True)

    def compare(there: Any, frame: Any, *rest: Any) -> Finding:
        finding = compared(there, frame, *rest)
        # The two threads take what is left, one each.
        return findings.pop() if findings else finding

    findings = [Finding(fault="a tensor has gone"), Finding([weight, clock])]
    monkeypatch.setattr(step_comparison, "compare", compare)
    assert all_at(both) == [True, True]
    for rank in both:
        assert "a tensor has gone" in rank.calls[2] and "not verified" in rank.calls[2]
        assert rank.resume.verdict is Verdict.NONE


def test_ranks_with_other_settings_decide_the_same(ranks: Callable[..., list[Rank]]) -> None:
    """Otherwise one would put a step back while the other one tells what it has found."""
    both = ranks({"computes": 1004, "longest_sec": 0}, {"computes": 1004})
    assert all_at(both) == [False, False]
    assert all_at(both) == [True, True]
    assert [rank.calls[:2] for rank in both] == [["restored 6", "restored 7"]] * 2


def test_schedulers_that_are_found_in_another_order_are_the_same() -> None:
    def state(*keys: str) -> Any:
        rows = {"1": ("StepLR", {"last_epoch": 3}), "2": ("StepLR", {"last_epoch": 7})}
        return {"keys": {"schedulers": list(keys)}, "schedulers": [rows[key] for key in keys]}

    assert step_comparison.parts(state("1", "2"), state("2", "1")) == []
    unknown = {**state("2", "1"), "keys": {"schedulers": ["", ""]}}
    assert len(step_comparison.parts(state("1", "2"), unknown)) == 2
