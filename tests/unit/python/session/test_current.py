"""The one session of a process: who starts it, what happens if it cannot start, forks."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

import reft
from reft import _C
from reft._link import agreement
from reft._link.trusted_store import TrustedStore
from reft._session import current, startup
from reft._session.session import Session
from tests.fakes.native import FakeNative
from tests.support import jobs
from tests.support.jobs import agreed, trusted

Train = Callable[..., torch.optim.Optimizer]


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("reft: ")]


def others_learn(store: TrustedStore, reason: str) -> None:
    """The second rank of the node does not start, for the reason of the first."""
    session = Session(_C.environment(), agreed(1, 2), store, 1)
    with pytest.raises(startup.OthersGaveUp, match=reason):
        session.start()
    session.stop(at_exit=False)


@pytest.fixture
def agreed_at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ranks do not wait for each other to agree on their nodes, of so many ranks each."""

    def install(local_world: int) -> None:
        def agree(store: object, rank: int, world: int, settings: object) -> object:
            return agreement.Agreed(jobs.job(rank, world, local_world)), {}

        monkeypatch.setattr(agreement, "agree", agree)

    return install


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_FIRST_SEC", 0.05)


def test_without_a_group_the_package_does_nothing() -> None:
    assert current.session() is None
    assert reft.snapshot_now() == -1 and reft.status() == {}
    reft.step()
    current.set_enabled(False)
    assert reft.resume(epoch=3).epoch == 3


def test_a_default_group_starts_a_session(native: FakeNative) -> None:
    current.on_default_group(trusted(), 0, 1)
    session = current.session()
    assert session is not None and session.number == 1
    native.engine.newest = 12
    assert reft.snapshot_now(0.5) == 12 and native.engine.calls == ["drain"]
    assert reft.status() == native.engine.counters


def test_disabled_starts_nothing(native: FakeNative, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFT_DISABLE", "1")
    current.on_default_group(trusted(), 0, 1)
    assert current.session() is None and native.clients == []


def test_a_second_group_ends_the_first_session(native: FakeNative) -> None:
    current.on_default_group(trusted(), 0, 1)
    first = current.session()
    current.on_default_group(trusted(), 0, 1)
    second = current.session()
    assert first is not None and second is not None and first is not second
    assert second.number == 2
    assert native.engines[0].calls == ["drain"] and first.client is None


def test_an_explicit_step_is_gated_and_captured(native: FakeNative, train: Train) -> None:
    current.on_default_group(trusted(), 0, 1)
    train(1)
    before = len(native.engine.calls)
    reft.step()
    assert native.engine.calls[before:][:2] == ["gate", "begin_point"]
    assert [one.gated for one in native.engine.captures] == [True, False]


def test_an_error_in_an_explicit_step_is_reported(
    native: FakeNative, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    current.on_default_group(trusted(), 0, 1)
    train(1)
    native.engine.errors["begin_point"] = ValueError("odd")
    reft.step()
    assert "reft: warning: rank 0: error in step: odd" in lines(capsys)


def test_a_typing_error_in_a_setting_gets_a_hint(
    native: FakeNative, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFT_SNAPSHOT_EVRY", "2")
    current.on_default_group(trusted(), 0, 1)
    wanted = "REFT_SNAPSHOT_EVRY is not a setting of reft; did you mean REFT_SNAPSHOT_EVERY?"
    assert f"reft: warning: {wanted}" in lines(capsys)


def test_a_value_that_is_not_allowed_stops_reft_and_not_training(
    native: FakeNative, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFT_SNAPSHOT_EVERY", "often")
    store = trusted()
    current.on_default_group(store, 0, 2)
    assert current.session() is None and native.clients == []
    said = lines(capsys)
    assert len(said) == 1 and "REFT_SNAPSHOT_EVERY" in said[0]
    assert said[0].endswith("Training continues without snapshots and hang detection")
    monkeypatch.delenv("REFT_SNAPSHOT_EVERY")
    current.on_default_group(store, 1, 2)
    (line,) = lines(capsys)
    assert current.session() is None
    assert "rank 0 cannot take part (" in line and "REFT_SNAPSHOT_EVERY" in line


@pytest.mark.parametrize("name", ["REFT_JOB_ID", "REFT_VAULT_DIR", "REFT_SNAPSHOT_EVERY"])
def test_a_value_that_is_not_utf8_stops_reft_and_not_training(
    native: FakeNative,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setenv(name, "caf\udce9")
    monkeypatch.setenv("REFT_\udce9", "\udce9")  # no setting
    current.on_default_group(trusted(), 0, 2)
    assert current.session() is None and native.clients == []
    (line,) = lines(capsys)
    assert line == (
        f"reft: error: {name} is 'caf\\xe9'; allowed: text in UTF-8. Training continues without"
        " snapshots and hang detection"
    )


def test_a_name_that_is_not_utf8_is_no_setting(
    native: FakeNative, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFT_\udce9", "1")
    current.on_default_group(trusted(), 0, 1)
    assert current.session() is not None
    assert any("REFT_\\xe9 is not a setting of reft" in line for line in lines(capsys))


def test_strict_raises_for_a_value_that_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFT_SNAPSHOT_EVERY", "often")
    monkeypatch.setenv("REFT_STRICT", "1")
    with pytest.raises(_C.InvalidArgument, match="REFT_SNAPSHOT_EVERY"):
        current.on_default_group(trusted(), 0, 1)


def test_a_session_that_cannot_start_is_given_up_on_all_ranks(
    native: FakeNative,
    agreed_at_once: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    agreed_at_once(2)
    native.fail["AgentClient"] = _C.Unavailable("no agent answers")
    store = trusted()
    current.on_default_group(store, 0, 2)
    assert current.session() is None
    assert lines(capsys) == [
        "reft: rank 0: training continues without snapshots and hang detection: no agent answers"
    ]
    others_learn(store, "no agent on this node: no agent answers")


def test_a_restarted_script_that_goes_without_is_told_where_it_begins(
    native: FakeNative, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    native.fail["AgentClient"] = _C.Unavailable("no agent answers")
    current.on_default_group(trusted(), 0, 1)
    assert ", from its beginning: no agent answers" in lines(capsys)[0]


def test_strict_raises_what_keeps_a_session_from_starting(
    native: FakeNative,
    agreed_at_once: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed_at_once(2)
    monkeypatch.setenv("REFT_STRICT", "1")
    native.fail["AgentClient"] = _C.Unavailable("no agent answers")
    store = trusted()
    with pytest.raises(_C.Unavailable, match="no agent answers"):
        current.on_default_group(store, 0, 2)
    others_learn(store, "no agent answers")


def test_an_engine_that_cannot_be_made_leaves_no_connection(native: FakeNative) -> None:
    native.fail["Rank"] = _C.SystemError("no memory")
    current.on_default_group(trusted(), 0, 1)
    assert current.session() is None and len(native.clients) == 1 and not native.client.left


def test_what_the_first_rank_reports_is_not_repeated_by_others(
    native: FakeNative,
    agreed_at_once: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    agreed_at_once(1)  # each rank starts an agent of its own
    store = trusted()
    native.fail["AgentClient"] = _C.Unavailable("no agent answers")
    current.on_default_group(store, 0, 2)
    capsys.readouterr()
    current.on_default_group(store, 1, 2)
    assert current.session() is None and lines(capsys) == []
    native.fail["AgentClient"] = _C.Unavailable("the folder is not ours")
    current.on_default_group(store, 1, 2)
    assert len(lines(capsys)) == 1, "another reason is news"


def test_a_forked_child_has_no_session(native: FakeNative, train: Train) -> None:
    current.on_default_group(trusted(), 0, 1)
    optimizer = train(1)
    calls = len(native.engine.calls)
    child = os.fork()
    if child == 0:
        try:
            train(1, optimizer)
            left = current.session() is None and reft.status() == {}
            os._exit(0 if left and len(native.engine.calls) == calls else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert current.session() is not None
    train(1, optimizer)
    assert len(native.engine.captures) == 2, "the parent goes on"
