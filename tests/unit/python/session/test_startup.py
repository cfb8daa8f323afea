"""Ranks find their node's agent together, and all of them learn if one of them cannot."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from reft import _C
from reft._link import folders, gather, job_identity, launch
from reft._link.trusted_store import TrustedStore
from reft._session import startup
from tests.fakes.native import FakeNative
from tests.support import jobs
from tests.support.jobs import trusted

Settings = Callable[..., dict[str, Any]]
RUN_DIR = Path("/run/reft")


def job(rank: int, world: int = 1, local_world: int | None = None) -> job_identity.Job:
    return jobs.job(rank, world, local_world, run_dir=RUN_DIR)


def connect(env: dict[str, Any], one: job_identity.Job, store: TrustedStore) -> Any:
    return startup.connect(env, one, store, '{"role": "rank"}')


def test_the_first_rank_of_each_node_starts_an_agent(
    native: FakeNative, settings: Settings
) -> None:
    env, store = settings(), trusted()
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
    connect(settings(REFT_AGENT_PATH="/opt/agent"), job(0), trusted())
    argv = native.client.agent_argv
    assert argv == ["/opt/agent", "--run-dir", str(RUN_DIR), "--job", "job", "--node", "0"]


@pytest.mark.parametrize(("local_rank", "reports"), [(1, True), (2, False)])
def test_one_rank_of_a_node_without_an_agent_reports_it(
    native: FakeNative, settings: Settings, local_rank: int, reports: bool
) -> None:
    env, store = settings(), trusted()
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
    env, store = settings(), trusted()
    native.fail["AgentClient"] = RuntimeError()
    with pytest.raises(RuntimeError):
        connect(env, job(0, 2), store)
    with pytest.raises(startup.OthersGaveUp, match="RuntimeError"):
        connect(env, job(1, 2), store)


def test_a_rank_that_gives_up_takes_nothing_back(native: FakeNative, settings: Settings) -> None:
    env, store = settings(), trusted()
    connect(env, job(0, 2), store)
    startup.give_up(job(0, 2), store, "no memory")
    connect(env, job(1, 2), store)  # the agent is there all the same
    assert len(native.clients) == 2


def test_a_rank_that_gives_up_refuses_every_round_of_the_start() -> None:
    store = trusted()
    store.raw.set_timeout(timedelta(seconds=2))  # a round that is not refused waits that long
    startup.give_up(job(0, 2), store, "no memory")
    for name in (startup.INVENTORY, startup.VERIFY, startup.MATCH):
        gathered = gather.gather(job(1, 2), store, name, "{}", gather.merge_by_rank)
        assert gathered.refusals == {0: "no memory"}, name


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
    store = trusted()
    assert not startup.said_by_the_first(1, store, startup.INVENTORY, "no memory"), (
        "it says nothing yet"
    )
    startup.give_up(job(0, 2), store, "no  memory\n")
    assert startup.said_by_the_first(1, store, startup.INVENTORY, "no memory")
    assert not startup.said_by_the_first(1, store, startup.INVENTORY, "no agent")
    assert not startup.said_by_the_first(0, store, startup.INVENTORY, "no memory"), (
        "the first is itself"
    )


def test_the_file_of_a_vault_is_the_ranks(settings: Settings, tmp_path: Path) -> None:
    env = settings(REFT_VAULT_DIR=str(tmp_path))
    assert startup.vault_path(env, job(3, 4), 3) == str(tmp_path / "job" / "rank-3.vault")


def test_a_vault_that_goes_on_elsewhere_is_known(settings: Settings, tmp_path: Path) -> None:
    in_memory = os.memfd_create("reft-vault-0")
    file = tmp_path / "job" / "rank-0.vault"
    file.parent.mkdir()
    in_file = os.open(file, os.O_CREAT | os.O_RDWR)
    plain = settings()
    here, other = settings(REFT_VAULT_DIR=str(tmp_path)), settings(REFT_VAULT_DIR="/elsewhere")
    try:
        assert startup.vault_elsewhere(plain, job(0), -1) == ""
        assert startup.vault_elsewhere(plain, job(0), in_memory) == ""
        assert startup.vault_elsewhere(here, job(0), in_file) == ""
        held = "host memory held by reft-agent"
        assert startup.vault_elsewhere(here, job(0), in_memory) == held
        assert startup.vault_elsewhere(plain, job(0), in_file) == f"files in {tmp_path}"
        assert startup.vault_elsewhere(other, job(0), in_file) == f"files like {file}"
    finally:
        os.close(in_memory)
        os.close(in_file)


def test_a_vault_directory_where_writes_can_fail_is_refused(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the other ranks count on its vault."""
    asked = []

    def problem(path: str) -> str:
        asked.append(path)
        return "is on nfs, where a write can fail"

    monkeypatch.setattr(_C, "vault_place_problem", problem)
    with pytest.raises(
        _C.Unavailable, match=r"is on nfs, .*; set REFT_VAULT_DIR to .* or unset it"
    ):
        start(REFT_VAULT_DIR=str(tmp_path))
    assert asked == [str(tmp_path / "job")]


def test_a_vault_directory_that_a_rank_makes_is_safe_for_the_next(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    before = os.umask(0o002)
    try:
        start(REFT_VAULT_DIR=str(tmp_path / "v" / "vaults"))
    finally:
        os.umask(before)
    made = tmp_path / "v" / "vaults" / "job"
    assert made.is_dir() and folders.problem(made) == ""


@pytest.mark.parametrize(("resume", "kept"), [("exact", True), ("off", False)])
def test_without_snapshots_nothing_is_resumed_and_the_vault_is_kept(
    start: Callable[..., Any],
    native: FakeNative,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    resume: str,
    kept: bool,
) -> None:
    class Plan:
        step = 9

        def takes_own(self, rank: int) -> bool:
            return True

    vault = os.open("/dev/null", os.O_RDONLY)
    monkeypatch.setattr(startup, "_inventory", lambda *job: ("{}", vault))
    monkeypatch.setattr(_C, "plan_restore", lambda *inventory: (Plan(), [], True))
    monkeypatch.setattr(_C, "merge_inventories", "".join)
    session = start(REFT_SNAPSHOT="0", REFT_RESUME=resume)
    assert session.resuming_at is None
    assert native.engine.options["adopt_fd"] == (vault if kept else -1)
    assert native.engine.options["plan"] is None
    said = [line for line in capsys.readouterr().err.splitlines() if "step 9" in line]
    assert [line.startswith("reft: job job has a snapshot of step 9, but") for line in said] == (
        [True] * kept
    )


# -- which agent serves a node


def serving(
    monkeypatch: pytest.MonkeyPatch,
    run_dir: Path,
    hosts: tuple[int, ...],
    there: set[int],
    node: int,
    elsewhere: set[int] | None = None,
) -> int:
    """The directory that `node` finds or makes its agent in; `there`: where agents of its host
    listen, `elsewhere`: those of another one that shares the run directory and the machine."""
    for number in range(4):  # that of a dead agent, too
        (run_dir / "job" / f"node-{number}").mkdir(parents=True)
        (run_dir / "job" / f"node-{number}" / "agent.sock").touch()
    names = dict.fromkeys(there, launch.host_of_agents()) | dict.fromkeys(elsewhere or set(), "another")
    monkeypatch.setattr(
        startup,
        "_host_of_agent",
        lambda socket: names.get(int(socket.parent.name.removeprefix("node-"))),
    )
    layout = job_identity.Layout(tuple((rank,) for rank in range(len(hosts))), hosts)
    return startup._agent_of(job_identity.Job("job", layout, node, run_dir=run_dir))


@pytest.mark.parametrize(
    ("hosts", "there", "found"),
    [
        ((0, 1), set(), [0, 1]),
        ((0, 1), {0, 1}, [0, 1]),
        ((0, 0), {0}, [0, 1]),  # the other one's agent was killed
        ((0, 0), {1}, [0, 1]),
        ((0, 0), {0, 3}, [0, 3]),  # renumbered
        ((0, 0), {2, 3}, [2, 3]),
        ((0, 0), {3}, [3, 1]),
    ],
)
def test_a_node_finds_the_agent_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    hosts: tuple[int, ...],
    there: set[int],
    found: list[int],
) -> None:
    made = [
        serving(monkeypatch, tmp_path / str(node), hosts, there, node) for node in range(len(hosts))
    ]
    assert made == found


@pytest.mark.parametrize("there", [{1}, {3}])
def test_a_node_with_another_number_finds_the_agent_that_it_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: set[int]
) -> None:
    """On its own machine: the agent of the other host is not there."""
    assert {serving(monkeypatch, tmp_path, (0, 1), there, 0)} == there


@pytest.mark.parametrize(
    ("there", "elsewhere", "node", "found"),
    [
        (set(), {1}, 0, 0),  # that of node 1, which was quicker
        ({1}, {0}, 0, 1),  # both nodes have changed their numbers
        (set(), {0}, 0, 2),  # its number is in use
        (set(), {0, 2}, 0, 4),
        (set(), {0, 1}, 1, 3),
    ],
)
def test_an_agent_of_another_host_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    there: set[int],
    elsewhere: set[int],
    node: int,
    found: int,
) -> None:
    """Containers of a machine that share the run directory: each can connect to all sockets."""
    assert serving(monkeypatch, tmp_path, (0, 1), there, node, elsewhere) == found


def test_ranks_of_a_renumbered_node_go_where_its_first_rank_has_found_the_agent(
    native: FakeNative, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, store = settings(), trusted()
    monkeypatch.setattr(startup, "_agent_of", lambda job: 5)
    for rank in range(2):
        connect(env, job(rank, 2), store)
    assert {client.socket_path for client in native.clients} == {"/run/reft/job/node-5/agent.sock"}
    assert native.clients[0].agent_argv[-2:] == ["--node", "5"]


def test_a_strange_place_of_an_agent_is_no_path(native: FakeNative, settings: Settings) -> None:
    store = trusted()
    store.put("agent", "agent/0", 0, "node-0/../../x")
    with pytest.raises(startup.OthersGaveUp, match="no agent on this node"):
        connect(settings(), job(1, 2), store)
