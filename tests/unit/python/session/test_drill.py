"""The rank's part in a drill: what it records, how it dies and how it ends."""

from __future__ import annotations

import csv
import hashlib
import inspect
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from reft._continuation import comparison
from reft._session import drill
from reft._session.drill import Plan, Record
from reft._session.session import Session
from tests.fakes.native import FakeNative

Start = Callable[..., Session]
Train = Callable[..., torch.optim.Optimizer]


class Ended(Exception):
    """Stands for the end of the process."""


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = (folder / "rank-0.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if not kinds or e["event"] in kinds]


@pytest.fixture
def begin(
    tmp_path: Path, start: Start, native: FakeNative, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Session]:
    """Starts a session that takes part in a drill: `begin(Plan(4))`."""

    def end(status: int) -> None:
        raise Ended(status)

    def die(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGKILL)
        raise Ended(number)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(os, "kill", die)

    def run(plan: Plan) -> Session:
        plan.write(tmp_path)
        session = start(REFT_DRILL=str(tmp_path), REFT_STRICT="1")
        session.engine.counters.update(gate_ns=3, capture_ns=4, payload_bytes=5)  # type: ignore[union-attr]
        return session

    return run


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = Plan(7, 2, ((0, 1, 4), (1, 0, 6)), "/reference")
    plan.write(tmp_path)
    assert Plan.read(tmp_path) == plan


def test_each_step_is_recorded_and_the_job_ends_after_the_last(
    begin: Callable[..., Session], train: Train, tmp_path: Path
) -> None:
    begin(Plan(2, timed=1))
    optimizer = train()
    train(1, optimizer)
    with pytest.raises(Ended, match="0"):
        train(1, optimizer)
    told = [(e["event"], e.get("step")) for e in events(tmp_path)]
    assert told == [("started", None), ("step", 1), ("step", 2), ("timed", 3), ("ended", None)]
    step = events(tmp_path, "step")[1]
    assert step["tensors"] == 8 and step["spent_ns"] == 7 and step["bytes"] == 5
    assert step["sec"] > 0 and "differences" not in step
    assert (tmp_path / "rank-0" / "step-2.attempt-0").exists()


def test_a_rank_dies_in_its_step_before_the_optimizer_writes(
    begin: Callable[..., Session], train: Train, tmp_path: Path
) -> None:
    begin(Plan(9, kills=((0, 1, 2), (0, 0, 3), (1, 0, 1))))
    optimizer = train(2)
    before = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    with pytest.raises(Ended, match="9"):
        train(1, optimizer)
    after = [p for g in optimizer.param_groups for p in g["params"]]
    assert all(map(torch.equal, before, after))
    assert [e["step"] for e in events(tmp_path, "kill")] == [3]


def test_a_step_is_compared_with_that_of_the_reference(
    begin: Callable[..., Session], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begin(Plan(5))
    torch.manual_seed(1)
    optimizer = train(2)
    session.stop(at_exit=False)
    (tmp_path / "rank-0").rename(tmp_path / "kept")
    (tmp_path / "reference").mkdir()
    (tmp_path / "kept").rename(tmp_path / "reference" / "rank-0")
    (tmp_path / "rank-0.jsonl").unlink()
    begin(Plan(5, reference=str(tmp_path / "reference")))
    torch.manual_seed(1)
    optimizer = train(1)
    with torch.no_grad():
        optimizer.param_groups[0]["params"][1].add_(1.0)
    train(1, optimizer)
    train(1, optimizer)
    first, second, third = (e["differences"] for e in events(tmp_path, "step"))
    assert [row for row in first if row[0] == comparison.TENSOR] == []
    (tensor,) = [row for row in second if row[0] == comparison.TENSOR]
    assert tensor[1] == "o0.p1" and tensor[2].startswith("2 of 2 items differ, max |Δ| 1")
    assert third is None, "the reference has no such step"


def test_an_error_of_the_recording_is_told_and_training_goes_on(
    begin: Callable[..., Session], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(frame: FrameType) -> dict[str, Any]:
        raise ValueError("no")

    begin(Plan(5))
    monkeypatch.setattr(drill, "opaque_states", fail)
    train(2)
    assert [e["what"] for e in events(tmp_path, "error")] == ["ValueError: no"] * 2


def test_a_folder_of_no_drill_leaves_training_alone(
    start: Start, train: Train, tmp_path: Path, native: FakeNative,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    start(REFT_DRILL=str(tmp_path / "missing"))
    train(2)
    assert len(native.engine.captures) == 2
    assert "missing is not the folder of a drill" in capsys.readouterr().err


# -- what models are fed


@pytest.fixture
def fed() -> Iterator[drill._Fed]:
    watch = drill._Fed()
    yield watch
    watch.remove()


def test_outermost_calls_of_modules_with_parameters_are_noted(fed: drill._Fed) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    torch.nn.MSELoss()(model(torch.ones(3, 2)), torch.ones(3, 2))
    ((name, shapes, digest),) = fed.take()
    assert (name, shapes) == ("Sequential", "float32 [3, 2]")
    model(torch.ones(3, 2))
    model(torch.zeros(3, 2))
    assert [call[2] == digest for call in fed.take()] == [True, False]
    assert fed.take() == []


def test_keyword_arguments_are_inputs_too(fed: drill._Fed) -> None:
    class Net(torch.nn.Linear):
        def forward(self, input: torch.Tensor, scale: int = 1) -> torch.Tensor:
            return super().forward(input) * scale

    net = Net(2, 2)
    for scale in (1, 2):
        net(input=torch.ones(1, 2), scale=scale)
    first, second = fed.take()
    assert first[1] == second[1] == "float32 [1, 2]" and first[2] != second[2]


def test_a_call_that_raises_hides_no_later_one(fed: drill._Fed) -> None:
    net = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError):
        net(torch.ones(1, 3))
    net(torch.ones(1, 2))
    assert [call[1] for call in fed.take()] == ["float32 [1, 3]", "float32 [1, 2]"]


def test_a_call_that_a_resume_stands_in_is_not_compared(fed: drill._Fed) -> None:
    """Lightning's training step, and with it the resume, runs inside of a call of the model."""

    class Net(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            inner(input)
            fed.discard()
            inner(input)
            return super().forward(input)

    inner, net = torch.nn.Linear(2, 2), Net(2, 2)
    net(torch.ones(1, 2))
    inner(torch.ones(1, 2))
    calls = fed.take()
    assert [name for name, *_ in calls] == ["Linear", "Net", "Linear"]
    assert [bool(digest) for *_, digest in calls] == [True, False, True]


# -- comparison


def record(value: float = 1.0, **opaque: Any) -> Record:
    tensor = torch.full((4,), value)
    tensors = {"o0.p0": ("Float [4]", (int(value), 0), tensor)}
    return Record(tensors, {"groups": [[{"lr": 0.1}]], "rng": {"python": 1}}, opaque)


def here() -> FrameType:
    frame = inspect.currentframe()
    assert frame is not None
    return frame


def test_equal_records_do_not_differ() -> None:
    assert drill.compare(here(), record(seen="a"), record(seen="a")) == []


def test_each_value_that_differs_is_named() -> None:
    other = record(3.0, seen="b")
    other.saved["groups"] = [[{"lr": 0.2}]]
    other.saved["rng"] = {"python": 2}
    found = drill.compare(here(), record(1.0, seen="a"), other)
    assert [(one.kind, one.where, one.why) for one in found] == [
        (comparison.VARIABLE, "seen", "was a, is b"),
        (comparison.RANDOM, "global['python']", "was 1, is 2"),
        (comparison.VARIABLE, "optimizer settings[0][0]['lr']", "was 0.1, is 0.2"),
        (comparison.TENSOR, "o0.p0", "4 of 4 items differ, max |Δ| 2"),
    ]


def test_tensors_of_another_shape_or_name_differ() -> None:
    old, new = record(), record()
    new.tensors = {"o0.p0": ("Float [5]", (1, 0), torch.ones(5)), "o0.p1": new.tensors["o0.p0"]}
    found = drill.compare(here(), old, new)
    assert [(one.where, one.why) for one in found] == [
        ("o0.p0", "was Float [4], is Float [5]"),
        ("o0.p1", "is new"),
    ]


def test_a_difference_outside_of_the_sample_is_one() -> None:
    old, new = record(), record()
    what, _, items = new.tensors["o0.p0"]
    new.tensors["o0.p0"] = (what, (7, 7), items)
    (one,) = drill.compare(here(), old, new)
    assert one.why == "differs outside of the items compared"


def test_a_sample_is_spread_over_the_tensor() -> None:
    whole = torch.arange(10).reshape(2, 5)
    assert drill._sample(whole, 100).tolist() == list(range(10))
    assert drill._sample(whole, 4).tolist() == [0, 3, 6, 9]


class Source:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256(b"1")


def test_states_that_no_snapshot_has_are_found_in_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drill, "is_own", lambda name: name == __name__)
    reader, source, number = csv.reader(["a", "b"]), Source(), 3
    next(reader)
    found = drill.opaque_states(here_and_up())
    own = {place.rpartition(":")[2]: state for place, state in found.items()}
    assert own["reader (_csv.reader)"] == 1
    assert own["source.digest (_hashlib.HASH)"] == hashlib.sha256(b"1").hexdigest()
    assert not any("number" in place for place in own) and source and number == 3


def here_and_up() -> FrameType:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back
