"""A session sequences its parts; what one of them reports does not reach training."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest
import torch

from reft import _C, _continuation
from reft._link import agent_protocol
from reft._session.session import RestoreFailed, Session
from reft._state import heap
from tests.fakes.native import FakeNative
from tests.support.jobs import agreed, trusted

Start = Callable[..., Session]
Train = Callable[..., torch.optim.Optimizer]


def here() -> FrameType:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("reft: ")]


# -- start


def test_the_agent_learns_who_connects(start: Start, native: FakeNative) -> None:
    start()
    hello = native.client.hello
    assert hello["role"] == "rank" and hello["protocol"] == agent_protocol.VERSION
    assert (hello["job"], hello["rank"], hello["world"], hello["pid"]) == ("job", 0, 1, os.getpid())
    assert int(hello["incarnation"], 16) == native.engine.options["incarnation"] > 0
    assert native.client.socket_path.endswith("/job/node-0/agent.sock")
    assert native.replies == [native.client]


def test_the_engine_takes_the_incarnation_and_the_limit_that_were_agreed_on(
    native: FakeNative, settings: Callable[..., dict[str, object]]
) -> None:
    store = trusted()
    sessions = [Session(settings(), agreed(rank, 2, 5), store, 1) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Session.start, sessions))
    try:
        first, second = (engine.options for engine in native.engines)
        assert {first["rank"], second["rank"]} == {0, 1}
        assert first["incarnation"] == second["incarnation"]
        assert first["overhead_percent"] == second["overhead_percent"] == 5
        argv = {client.hello["rank"]: client.agent_argv for client in native.clients}
        assert argv[0] and not argv[1], "only the first rank of a node starts an agent"
    finally:
        for session in sessions:
            session.stop(at_exit=False)


def test_an_error_of_stack_dumps_leaves_snapshots_alone(
    start: Start,
    native: FakeNative,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(client: object, rank: int, device_marks: bool) -> None:
        raise _C.Unavailable("no signal is free")

    monkeypatch.setattr(_C, "install_stack_replies", fail)
    start()
    train()
    assert "reft: warning: rank 0: error in stack dumps: no signal is free" in lines(capsys)
    assert len(native.engine.captures) == 1


def test_the_banner_is_two_lines(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start()
    said = lines(capsys)
    assert said == [
        "reft: job job: 1 rank, snapshot every step into host memory held by reft-agent;"
        " survives killed processes (REFT_SNAPSHOT_PROTECTION=none)",
        "reft: protection summary follows the first step; overhead once measured;"
        " `reft top` shows both live",
    ]


def test_no_banner(start: Start, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    start(REFT_BANNER="0")
    train()
    assert lines(capsys) == []


# -- steps


def test_a_step_is_gated_captured_and_counted(
    start: Start, native: FakeNative, train: Train
) -> None:
    session = start()
    optimizer = train(2)
    assert session.step == 2
    first = native.engine.calls[: native.engine.calls.index("end_point") + 1]
    assert first == ["gate", "begin_point", "gate", "set_table", "capture taken", "end_point"]
    assert native.engine.calls.count("set_table") == 1, "the second step has the same plan"
    names = [name for name, *_ in native.engine.tables[0][0]]
    assert names[:3] == ["o0.p0", "o0.p1", "o0[o0.p0].exp_avg"]
    captured = native.engine.captures[1]
    assert captured.gated and captured.step == 2
    assert captured.tensors[0].data_ptr() == optimizer.param_groups[0]["params"][0].data_ptr()
    saved = pickle.loads(captured.objects)
    assert (saved["step"], saved["session"], saved["boundary"]["closing"]) == (2, 1, 0)


@pytest.mark.parametrize(("resume", "saved"), [("state", False), ("exact", True)])
def test_the_place_in_the_loop_is_captured_with_exact_only(
    start: Start, native: FakeNative, train: Train, resume: str, saved: bool
) -> None:
    start(REFT_RESUME=resume)
    train()
    assert ("frames" in pickle.loads(native.engine.captures[0].objects)) == saved


def test_a_step_that_is_not_due_takes_no_snapshot(
    start: Start, native: FakeNative, train: Train
) -> None:
    session = start()
    native.engine.due = False
    train(3)
    assert session.step == 3 and native.engine.captures == []
    assert native.engine.calls.count("end_point") == 3


@pytest.mark.parametrize(("gone", "walks"), [(False, 1), (True, 0)])
def test_compiled_steps_walk_the_heap_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, gone: bool, walks: int
) -> None:
    session, calls = start(), []

    def live(*classes: type) -> list[list[object]]:
        calls.append(classes)
        return [[] for _ in classes]

    monkeypatch.setattr(heap, "live", live)
    if gone:
        session.failed("step", _C.Unavailable("no memory for a snapshot"))
    for _ in range(3):  # there is no plan yet
        session.compiled_step(is_seen=True)
    assert len(calls) == walks


def test_snapshots_off_hooks_nothing(
    start: Start, native: FakeNative, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    session = start(REFT_SNAPSHOT="0")
    train(2)
    assert native.engine.calls == [] and session.step == 0
    assert lines(capsys) == [
        "reft: job job: 1 rank; snapshots are off (REFT_SNAPSHOT=0), collectives are logged"
    ]


def test_snapshots_that_a_measurement_switched_off_are_not_taken(
    start: Start, native: FakeNative, train: Train
) -> None:
    session = start()
    session.enabled = False
    optimizer = train(2)
    session.enabled = True
    train(1, optimizer)
    assert [one.step for one in native.engine.captures] == [3]


def test_a_new_parameter_is_a_new_plan(start: Start, native: FakeNative, train: Train) -> None:
    start()
    optimizer = train(1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(5))]})
    train(1, optimizer)
    assert len(native.engine.tables) == 2
    assert "o0.p2" in [name for name, *_ in native.engine.tables[1][0]]


def test_a_tensor_that_changed_its_size_is_planned_again_in_the_same_step(
    start: Start, native: FakeNative, train: Train
) -> None:
    start()
    optimizer = train(1)
    native.engine.results = ["no_table"]
    train(1, optimizer)
    calls = native.engine.calls[-6:]
    assert calls == [
        "begin_point",
        "capture no_table",
        "gate",
        "set_table",
        "capture taken",
        "end_point",
    ]


def test_a_region_written_between_steps_is_copied_early_from_then_on(
    start: Start, native: FakeNative, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    optimizer = train(1)
    native.engine.late = [1, 4711]  # the second one is of a plan that is gone
    train(2, optimizer)
    early = {name for name, _, _, early, _ in native.engine.tables[-1][0] if early}
    assert early == {"o0.p1"}
    assert len(native.engine.tables) == 2, "one new plan"
    said = [line for line in lines(capsys) if "written between" in line]
    assert len(said) == 1 and "o0.p1 was written between optimizer steps" in said[0]


# -- what goes wrong


def test_a_snapshot_that_is_not_taken_is_reported_once(
    start: Start, native: FakeNative, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    native.engine.counters["note"] = "no free slot"
    native.engine.results = ["no_slot", "no_slot"]
    train(3)
    said = [line for line in lines(capsys) if "not taken" in line]
    assert said == ["reft: warning: rank 0: snapshot of step 1 was not taken (no free slot)"]
    assert [one.step for one in native.engine.captures] == [1, 2, 3]


def test_strict_raises_what_is_only_reported_otherwise(
    start: Start, native: FakeNative, train: Train
) -> None:
    start(REFT_STRICT="1")
    native.engine.results = ["no_slot"]
    with pytest.raises(_C.Unavailable, match="snapshot of step 1: no_slot"):
        train()
    assert native.engine.calls[-1] == "end_point", "the point has ended all the same"


def test_snapshots_end_for_good_where_they_are_unavailable(
    start: Start, native: FakeNative, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    session = start(REFT_SNAPSHOT_HOST_BYTES="1")
    train(3)
    assert native.engine.captures == [] and "set_table" not in native.engine.calls
    said = [line for line in lines(capsys) if "host memory" in line and "warning" in line]
    assert len(said) == 1
    assert "but the limit is 1 B. Training continues without snapshots" in said[0]
    assert session.step == 3 and native.engine.calls.count("end_point") == 3
    assert native.engine.given_back == [False]
    assert native.engine.calls.count("pass_over") == 3, "the other ranks do not wait for its votes"


def test_another_error_costs_one_snapshot(
    start: Start, native: FakeNative, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    native.engine.errors["capture"] = ValueError("odd")
    optimizer = train(2)
    native.engine.errors.clear()
    train(1, optimizer)
    assert [one.step for one in native.engine.captures] == [3]
    assert lines(capsys).count("reft: warning: rank 0: error in step: odd") == 1


def test_an_error_in_the_gate_does_not_reach_training(
    start: Start, native: FakeNative, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    native.engine.errors["gate"] = _C.Timeout("copy takes too long")
    train()
    assert "reft: warning: rank 0: error in gate: copy takes too long" in lines(capsys)


def test_a_failed_restore_is_never_swallowed(start: Start) -> None:
    session = start()
    with pytest.raises(RestoreFailed):
        session.failed("step", RestoreFailed("half restored"))


def test_loop_state_that_cannot_be_captured_costs_the_place_in_the_loop_only(
    start: Start,
    native: FakeNative,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("frame of unknown kind")

    monkeypatch.setattr(_continuation, "capture", fail)
    start()
    train()
    assert "frames" not in pickle.loads(native.engine.captures[0].objects)
    assert "reft: warning: rank 0: error in loop state: frame of unknown kind" in lines(capsys)


# -- explicit steps


def test_an_explicit_step_tells_the_engine_that_no_gate_follows(
    start: Start, native: FakeNative, train: Train
) -> None:
    session = start()
    optimizer = train(1)
    session.program_point(here(), gated=False)
    assert [one.gated for one in native.engine.captures] == [True, False]
    del optimizer


# -- end


def test_the_end_settles_the_last_snapshot_and_lets_go_of_everything(
    start: Start, native: FakeNative, train: Train
) -> None:
    session = start()
    optimizer = train(1)
    session.stop(at_exit=False)
    assert native.engine.calls[-1] == "drain"
    assert not native.client.left, "only a process that ends says bye"
    assert session.engine is None and session.client is None and session.planner is None
    train(1, optimizer)
    assert native.engine.calls[-1] == "drain", "the hooks are gone"


def test_a_process_that_ends_says_bye(start: Start, native: FakeNative) -> None:
    session = start()
    session.stop(at_exit=True)
    assert native.client.left
