"""Ranks find their node's agent together, and all of them learn if one of them cannot."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from reft import _C
from reft._link import job_identity
from reft._session import startup
from tests.fakes.native import FakeNative

Settings = Callable[..., dict[str, Any]]
RUN_DIR = Path("/run/reft")


def job(rank: int, world: int = 1, local_world: int | None = None) -> job_identity.Job:
    env = {} if local_world is None else {"LOCAL_WORLD_SIZE": str(local_world)}
    return job_identity.identify(rank, world, "job", env)


def connect(env: dict[str, Any], one: job_identity.Job, store: dist.Store) -> Any:
    return startup.connect(env, one, store, RUN_DIR, '{"role": "rank"}')


def test_the_first_rank_of_each_node_starts_an_agent(
    native: FakeNative, settings: Settings
) -> None:
    env, store = settings(), dist.HashStore()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda rank: connect(env, job(rank, 4, 2), store), range(4)))
    starters = [client for client in native.clients if client.agent_argv]
    assert sorted(client.socket_path for client in starters) == [
        "/run/reft/job/node-0/agent.sock",
        "/run/reft/job/node-1/agent.sock",
    ]
    assert len(native.clients) == 4


def test_the_agent_is_told_who_it_is_and_reads_settings_itself(
    native: FakeNative, settings: Settings
) -> None:
    connect(settings(REFT_AGENT_PATH="/opt/agent"), job(0), dist.HashStore())
    argv = native.client.agent_argv
    assert argv == ["/opt/agent", "--run-dir", str(RUN_DIR), "--job", "job", "--node", "0"]


@pytest.mark.parametrize(("local_rank", "reports"), [(1, True), (2, False)])
def test_one_rank_of_a_node_without_an_agent_reports_it(
    native: FakeNative, settings: Settings, local_rank: int, reports: bool
) -> None:
    env, store = settings(), dist.HashStore()
    native.fail["AgentClient"] = _C.Unavailable("the socket is taken")
    with pytest.raises(_C.Unavailable, match="the socket is taken"):
        connect(env, job(0, 3), store)
    with pytest.raises(
        startup.OthersGaveUp, match="no agent on this node: the socket is taken"
    ) as e:
        connect(env, job(local_rank, 3), store)
    assert e.value.to_say == reports


def test_an_error_without_a_text_is_named_by_its_class(
    native: FakeNative, settings: Settings
) -> None:
    env, store = settings(), dist.HashStore()
    native.fail["AgentClient"] = RuntimeError()
    with pytest.raises(RuntimeError):
        connect(env, job(0, 2), store)
    with pytest.raises(startup.OthersGaveUp, match="RuntimeError"):
        connect(env, job(1, 2), store)


def test_a_rank_that_gives_up_takes_nothing_back(native: FakeNative, settings: Settings) -> None:
    env, store = settings(), dist.HashStore()
    connect(env, job(0, 2), store)
    startup.give_up(job(0, 2), store, "no memory")
    connect(env, job(1, 2), store)  # the agent is there all the same
    assert len(native.clients) == 2


def test_a_rank_gives_up_whatever_the_store_does(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("connection reset")

    startup.give_up(job(0, 2), Broken(), "no memory")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("reft: warning: rank 0: ") and line.endswith("connection reset")


def test_the_first_rank_reports_for_those_with_the_same_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(startup, "_FIRST_SEC", 0.05)
    store = dist.HashStore()
    assert not startup.said_by_the_first(job(1, 2), store, "no memory"), "it says nothing yet"
    startup.give_up(job(0, 2), store, "no  memory\n")
    assert startup.said_by_the_first(job(1, 2), store, "no memory")
    assert not startup.said_by_the_first(job(1, 2), store, "no agent")
    assert not startup.said_by_the_first(job(0, 2), store, "no memory"), "the first is itself"


def test_the_file_of_a_vault_is_the_ranks(settings: Settings, tmp_path: Path) -> None:
    env = settings(REFT_VAULT_DIR=str(tmp_path))
    assert startup.vault_path(env, job(3, 4), 3) == str(tmp_path / "job" / "rank-3.vault")
