"""A restarted script resumes on all ranks or on none; what is not restored is named."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from reft import _C, _continuation
from reft._link import gather
from reft._resume import arrangement, restorer
from reft._session import notes, startup
from reft._session.boundary import Boundary
from reft._session.resumer import Resumed, Resumer, _check_donor, _NotOfThisRank, _same_or_none
from reft._session.session import Session
from reft._session.verification import VerifiedResume
from reft._state import discovery, object_pickles, optimizers, registry
from tests.fakes.native import FakeAgentClient, answer_for_all
from tests.support import jobs
from tests.support.jobs import trusted


def here() -> FrameType:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("reft: ")]


NO_PROBLEM = json.dumps({"problems": {}, "parts": [0]})
ONE_SCHEDULER = {"optimizers": [""], "schedulers": ["2"], "scalers": []}


BEGINS = ". Training starts from its beginning"
POSITION = {
    "closing": 0,
    "last": 0,
    "steps": [0],
    "round": [],
    "crossed": [],
    "waited": 0,
    "lengthened": False,
    "early": 1,
    "complete": 1,
    "count": 1,
    "first": 1,
    "at": 1,
    "site": "",
    "reached": {},
    "variables": [],
}


def saved_of(optimizer: torch.optim.Optimizer, **changes: Any) -> dict[str, Any]:
    """Small state as a snapshot of step 7 would have it."""
    state = {
        "step": 7,
        "session": 1,
        "boundary": POSITION,
        "optimizers": [optimizers.signature(optimizer)],
        "keys": {"optimizers": [""], "schedulers": [], "scalers": []},
        "waiting": [],
        "counts": {"optimizer 0": 7.0},
        "groups": [[{"lr": 0.25}]],
        "plain_state": [("dict", [])],
        "aliases": [],
        "empty": [],
        "replaced": [],
        "reshaped": {},
        "schedulers": [],
        "scalers": [],
        "strided": {},
        "registered": {},
        "rng": _continuation.capture_rng(),
        "role": ("", ""),
        "missed": [],
        "room": b"",
    }
    return state | changes


class Restart:
    """A rank whose tensors are restored by a stand-in.

    Attributes:
        restored: states whose regions were written.
        unmade: how often what was made for the restore was taken back.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        world: int = 1,
        rank: int = 0,
        exact: bool = False,
        donor: dict[int, int] | None = None,
        **changes: Any,
    ) -> None:
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.ones(3)
        self.optimizer = torch.optim.Adam([parameter], lr=0.5)
        self.optimizer.step()
        self.store = trusted()
        self.restored: list[discovery.State] = []
        self.unmade = 0
        self.client = FakeAgentClient("", "{}", 1)
        source = startup.Source(
            SimpleNamespace(step=7, donor=donor or {}, replaced=sorted(donor or {}), saved_by=world),  # type: ignore[arg-type]
            SimpleNamespace(  # type: ignore[arg-type]
                regions=[], splits=[], sources=(0, 0, 0), other_parts=[]
            ),
            saved_of(self.optimizer, **changes),  # type: ignore[arg-type]
        )
        job = jobs.job(rank, world)
        found = notes.Notes(self.client)
        self.resumer = Resumer(job, self.store, source, exact, found)
        self.whole = VerifiedResume(
            job,
            self.store,
            self.resumer,
            None,
            None,
            "",
            60,
            lambda *_: {},  # type: ignore[arg-type,return-value]
            lambda step: None,
            found,
        )
        self.boundary = SimpleNamespace(
            optimizers=[self.optimizer], know=lambda others: None, put_back=lambda *_: None, steps_waited=0
        )
        monkeypatch.setattr(restorer, "check", lambda *_: None)
        monkeypatch.setattr(restorer, "restore", self._restore)
        unmake = arrangement.Arrangement.unmake

        def unmake_counted(made: arrangement.Arrangement) -> None:
            self.unmade += 1
            unmake(made)

        monkeypatch.setattr(arrangement.Arrangement, "unmake", unmake_counted)
        # Schedulers of other tests may be alive.
        monkeypatch.setattr(
            discovery,
            "discover",
            lambda optimizers, before=None: discovery.State(optimizers=list(optimizers)),
        )

    def _restore(self, native: Any, state: discovery.State, nodes: int) -> int:
        self.restored.append(state)
        return 1536

    def resume(self) -> Resumed | None:
        is_over, resumed = self.whole.point(here(), self.boundary)  # type: ignore[arg-type]
        assert is_over
        return resumed


def test_a_resume_restores_tensors_hyperparameters_and_the_number_of_the_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restart = Restart(monkeypatch)
    resumed = restart.resume()
    assert resumed is not None and resumed.step == 7 and resumed.nanoseconds > 0
    assert restart.restored == [resumed.state]
    assert restart.optimizer.param_groups[0]["lr"] == 0.25
    (line,) = lines(capsys)
    assert line.startswith("reft: resumed at step 7: state, 1.5 KiB per rank in ")


def test_tensors_that_do_not_match_leave_everything_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restart = Restart(monkeypatch)

    def check(*_: Any) -> None:
        raise restorer.Mismatch("o0.p0 was Float [2] and is Float [3] now")

    monkeypatch.setattr(restorer, "check", check)
    assert restart.resume() is None
    assert restart.restored == [] and restart.unmade == 1
    assert restart.optimizer.param_groups[0]["lr"] == 0.5
    assert lines(capsys) == [
        "reft: rank 0: step 7 is not resumed, the script has changed: o0.p0 was Float"
        " [2] and is Float [3] now. Training starts from its beginning"
    ]


def test_an_optimizer_with_other_parameter_groups_does_not_match(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restart = Restart(monkeypatch, groups=[[{"lr": 1.0}, {"lr": 2.0}]])
    assert restart.resume() is None and restart.restored == []
    assert "optimizers had [2] parameter groups and have [1] now" in lines(capsys)[0]


@pytest.mark.parametrize(("rank", "reports"), [(0, True), (2, False)])
def test_a_mismatch_on_one_rank_stops_the_resume_on_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, reports: bool
) -> None:
    restart = Restart(monkeypatch, world=3, rank=rank)
    if rank == 0:  # which merges
        second = jobs.job(1, 3)  # it gave up and reports nothing
        gather.refuse(second, restart.store, startup.MATCH, "cannot take part")
        restart.store.put("round", "match/2", 2, gather._pack(gather.Gathered(NO_PROBLEM, {})))
    else:
        answer_for_all(restart.store, startup.MATCH, NO_PROBLEM, {1: "cannot take part"})
    assert restart.resume() is None and restart.restored == []
    wanted = ["reft: rank 1: step 7 is not resumed, cannot take part" + BEGINS] if reports else []
    assert lines(capsys) == wanted


def test_each_rank_publishes_whether_it_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    restart = Restart(monkeypatch, world=2, rank=1)
    answer_for_all(restart.store, startup.MATCH, NO_PROBLEM)
    assert restart.resume() is not None
    assert gather._Reader(restart.store, 1 << 20)("match/1", 1, 1) == gather.Gathered(NO_PROBLEM, {})


def test_a_newer_checkpoint_of_the_script_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restart = Restart(monkeypatch)
    parameter = restart.optimizer.param_groups[0]["params"][0]
    restart.optimizer.state[parameter]["step"] = torch.tensor(40.0)
    assert restart.resume() is None and restart.restored == []
    assert "has loaded a newer checkpoint of its own, which is kept" in lines(capsys)[0]


def test_a_lost_vault_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restart = Restart(monkeypatch, donor={1: 0, 2: 0})
    assert restart.resume() is not None
    assert lines(capsys)[0].endswith(
        "; without the vaults of ranks 1 2, whose small state is that of replicas"
    )


def planned(write: Callable[[], object], problems: Sequence[Any] = ()) -> Any:
    """What `_continuation.plan` returns."""

    def write_all() -> Any:
        write()
        return SimpleNamespace(problems=[*problems])

    return SimpleNamespace(write=write_all)


def test_the_place_in_the_loop_is_restored_with_exact_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places: list[Any] = []

    def plan(frame: Any, frames: Any, *_: Any) -> Any:
        return planned(lambda: places.append(frames))

    monkeypatch.setattr(_continuation, "plan", plan)
    frames = {"uncaptured": []}
    Restart(monkeypatch, frames=frames).resume()
    assert places == [] and "step 7: state, " in lines(capsys)[0]
    Restart(monkeypatch, exact=True, frames=frames).resume()
    assert places == [frames] and "step 7: state and place in the loop, " in lines(capsys)[0]


def test_a_place_that_another_rank_cannot_restore_is_written_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[bool] = []
    monkeypatch.setattr(
        _continuation, "plan", lambda *_: planned(lambda: written.append(True))
    )
    restart = Restart(monkeypatch, world=2, rank=1, exact=True, frames={"uncaptured": []})
    answer_for_all(restart.store, startup.MATCH, NO_PROBLEM)
    answer_for_all(restart.store, "place/7/1", json.dumps({"problems": {0: "the code has changed"}, "parts": []}))
    resumed = restart.resume()
    assert resumed is not None and not resumed.has_place and written == []


@pytest.mark.parametrize(
    ("agreed", "mine", "problem"),
    [
        ([[0, 4]], [[0, 4]], ""),
        ([[0, 4]], [[0, 5]], "the ranks do not agree on what is left of the epoch"),
        ({}, [[0, 4]], "the ranks do not agree on what is left of the epoch"),  # others differ
        ({}, None, ""),  # this rank has a problem of its own, which it reports itself
    ],
)
def test_ranks_that_would_deal_other_items_do_not_restore_the_place(
    monkeypatch: pytest.MonkeyPatch, agreed: Any, mine: Any, problem: str
) -> None:
    restart = Restart(monkeypatch, world=2, rank=1, exact=True)
    answer_for_all(restart.store, "place/7/1/dealt", json.dumps(agreed))
    planned = None if mine is None else SimpleNamespace(dealt=mine)
    found = restart.resumer._dealt_unlike(planned, "place/7/1")
    assert found.startswith(problem) and bool(found) == bool(problem)


def test_what_ranks_would_deal_is_equal_or_nothing() -> None:
    assert _same_or_none(["[1]", "[1]"]) == "[1]"
    assert _same_or_none(["[1]", "[2]"]) == "{}"


def test_values_that_are_not_restored_are_counted_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [("main:a", "int", "other code")]
    monkeypatch.setattr(_continuation, "plan", lambda *_: planned(lambda: None, problems))
    uncaptured = [("main:a", "x", "too deep"), ("main:b", "queue", "not empty")]
    restart = Restart(monkeypatch, exact=True, frames={"uncaptured": uncaptured})
    resumed = restart.resume()
    assert resumed is not None and resumed.uncaptured == uncaptured
    said = lines(capsys)
    assert said[0] == (
        "reft: not restored: main:a (int): other code (and 1 more, which `reft doctor` lists)"
    )
    assert "state and place in the loop except 2 values, " in said[1]
    sent = restart.client.notes()
    assert ["not restored:", "main:b", "queue", "not empty"] in sent
    assert ["not restorable:", "main:a", "x", "too deep"] in sent


def test_a_place_that_cannot_be_restored_leaves_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(*_: Any) -> None:
        raise _continuation.FrameMismatch("the code has changed")

    monkeypatch.setattr(_continuation, "plan", plan)
    restart = Restart(monkeypatch, exact=True, frames={"uncaptured": []})
    assert restart.resume() is not None and len(restart.restored) == 1
    said = lines(capsys)
    assert said[0].startswith(
        "reft: rank 0: place in the loop not restored (the code has changed); tensors, optimizer,"
    )
    assert "resumed at step 7: state, " in said[1]


def test_schedulers_that_do_not_exist_yet_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Restart(monkeypatch, schedulers=[("StepLR", {})], keys=ONE_SCHEDULER).resume()
    assert "reft: schedulers: saved 1, found 0; the rest is not restored" in lines(capsys)


def test_only_the_first_rank_reports_what_is_equal_on_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restart = Restart(
        monkeypatch, world=2, rank=1, schedulers=[("StepLR", {})], keys=ONE_SCHEDULER
    )
    answer_for_all(restart.store, startup.MATCH, NO_PROBLEM)
    assert restart.resume() is not None
    assert lines(capsys) == []


def test_the_random_state_is_restored_last(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    rng = _continuation.capture_rng()
    wanted = torch.rand(3)

    class Draws:
        def load_state_dict(self, values: Any) -> None:
            torch.rand(7)

    registry.objects["draws"] = Draws()
    Restart(monkeypatch, rng=rng, registered={"draws": {}}).resume()
    assert torch.equal(torch.rand(3), wanted)


# -- the session around it


@pytest.fixture
def resuming(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Session, Restart]]:
    def make() -> tuple[Session, Restart]:
        restart = Restart(monkeypatch)  # before the session's hooks see its first step
        session = start(REFT_RESUME="state")
        session._resume = restart.whole
        return session, restart

    return make


def test_the_session_goes_on_behind_the_restored_step(
    resuming: Callable[..., tuple[Session, Restart]],
    native: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session, restart = resuming()
    assert (session.resuming_at, session.awaited()) == (7, restart.resumer)
    restart.optimizer.step()
    assert session.step == 7 and session.resuming_at is None
    assert native.engine.captures == [] and native.engine.restore_ns > 0
    restart.optimizer.step()
    assert session.step == 8 and [one.step for one in native.engine.captures] == [8]
    assert not [line for line in lines(capsys) if "protected: " in line], "reported before"


def test_registered_values_are_known_before_the_resume(
    resuming: Callable[..., tuple[Session, Restart]],
) -> None:
    session, restart = resuming()
    packed = object_pickles.dumps({"epoch": 4}, {})
    restart.resumer.saved["registered"] = {"reft.resume": packed}
    assert session.registered == {"reft.resume": {"epoch": 4}}
    restart.optimizer.step()
    assert session.registered == {}


def test_a_refused_resume_starts_training_from_its_beginning(
    resuming: Callable[..., tuple[Session, Restart]], native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, restart = resuming()

    def check(*_: Any) -> None:
        raise restorer.Mismatch("other")

    monkeypatch.setattr(restorer, "check", check)
    restart.optimizer.step()
    assert session.step == 0 and session.resuming_at is None
    restart.optimizer.step()
    assert [one.step for one in native.engine.captures] == [1]


def test_a_restore_that_fails_halfway_ends_the_rank(
    resuming: Callable[..., tuple[Session, Restart]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, restart = resuming()

    def fail(*_: Any) -> int:
        raise _C.Corruption("chunk 3 of rank 0")

    monkeypatch.setattr(restorer, "restore", fail)
    with pytest.raises(RuntimeError, match="rank 0: restore failed: chunk 3 of rank 0"):
        restart.optimizer.step()


def test_the_boundary_learns_of_optimizers_that_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    late = torch.optim.SGD([torch.nn.Parameter(torch.zeros(11, 13))], lr=0.1)
    restart = Restart(monkeypatch)
    restart.resumer.saved["optimizers"].append(optimizers.signature(late))
    restart.resumer.saved["keys"]["optimizers"].append("")
    restart.resumer.saved["groups"].append([{"lr": 3.0}])
    restart.resumer.saved["plain_state"].append(("dict", []))
    boundary = Boundary(MagicMock())
    boundary.remove()
    boundary.know([restart.optimizer])
    assert restart.whole.point(here(), boundary)[1] is not None
    assert boundary.optimizers == [restart.optimizer, late]
    assert late.param_groups[0]["lr"] == 3.0


def test_a_lost_rank_takes_no_snapshot_that_lacks_what_it_has() -> None:
    mine = discovery.Region("o0[m0.w].exp_avg", torch.ones(3), (0, 1))
    buffer = discovery.Region("m0.mean", torch.ones(3), is_replaceable=True)
    row = (mine.name, "float32", [3], [1])
    saved: Any = {"aliases": [], "strided": {}}
    state = discovery.State(regions=[mine, buffer], replaceable={"m0.mean", "m0.mask"})
    _check_donor(state, "rank 4", [row], saved)
    with pytest.raises(_NotOfThisRank, match=r"^rank 4 has not saved o0\[m0\.w\]"):
        _check_donor(state, "rank 4", [], saved)
    _check_donor(state, "rank 4", [], saved | {"aliases": [[mine.name]]})
    _check_donor(state, "rank 4", [row], saved | {"strided": {"m0.mask": torch.ones(2)}})
    with pytest.raises(_NotOfThisRank, match="^rank 4 saved m0.v for itself alone, because it has gaps"):
        _check_donor(state, "rank 4", [row], saved | {"strided": {"m0.v": torch.ones(2)}})


def test_all_ranks_start_over_if_a_lost_one_cannot_come_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restart = Restart(monkeypatch, donor={0: 1}, strided={"m0.v": object_pickles.dumps(1, {})})
    assert restart.resume() is None and restart.restored == []
    said = lines(capsys)[0]
    assert "saved m0.v for itself alone" in said and said.endswith("Training starts from its beginning")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (_continuation.OtherCode("train.py:4: the code has changed"), "the script has changed: train.py:4"),
        (_continuation.FrameMismatch("main:net: other parts"), "the place in the loop cannot be put back: main:net"),
        (TypeError(), "the place in the loop cannot be put back: TypeError"),
    ],
)
def test_the_script_has_changed_only_if_its_code_has(
    monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    restart = Restart(monkeypatch, exact=True)
    monkeypatch.setattr(restart.resumer, "_planned", MagicMock(side_effect=error))
    ready = restart.resumer.prepare(restart.boundary, "round", silent=True, frame=here())  # type: ignore[arg-type]
    assert ready is None and restart.resumer.why_not.startswith(f"rank 0: {why}"), restart.resumer.why_not
