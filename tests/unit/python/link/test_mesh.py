"""Which node keeps copies of which, what its agent proves itself with, and where it listens."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import random
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from reft import _C
from reft._link import mesh
from reft._link.job_identity import Layout
from reft._link.mesh import keepers, key_of, own_address
from reft._link.protection import is_copied, placement

# -- the ring


def test_a_single_node_has_no_keeper() -> None:
    assert keepers(Layout.in_blocks(4, 4)) == []


def test_nodes_form_a_ring() -> None:
    assert keepers(Layout.in_blocks(4, 2)) == [1, 0]
    assert keepers(Layout.in_blocks(8, 2)) == [1, 2, 3, 0]
    assert keepers(Layout.in_blocks(5, 2)) == [1, 2, 0]  # the last has one rank


def test_nodes_of_one_host_keep_for_each_other_only_if_there_is_no_other_host() -> None:
    ranks = ((0,), (1,), (2,), (3,))
    assert keepers(Layout(ranks, (0, 0, 0, 0))) == [1, 2, 3, 0]
    # Nodes 0 and 1 share a host, 2 and 3 another.
    assert keepers(Layout(ranks, (0, 0, 2, 2))) == [2, 3, 0, 1]
    assert keepers(Layout(ranks, (0, 1, 0, 1))) == [1, 0, 3, 2]
    # Three nodes of a host share the one of the other.
    assert keepers(Layout(ranks, (0, 0, 0, 3))) == [3, 3, 3, 0]


def test_a_keeper_is_never_of_the_same_domain() -> None:
    rng = random.Random(5)
    for _ in range(200):
        count = rng.randrange(2, 12)
        hosts = tuple(rng.randrange(count) for _ in range(count))
        layout = Layout(tuple((rank,) for rank in range(count)), hosts)
        found = keepers(layout)
        assert len(found) == count
        for node, keeper in enumerate(found):
            assert layout.domain_of[node] != layout.domain_of[keeper]
        if len(set(hosts)) == count:  # the load is equal
            assert sorted(found) == list(range(count))


# -- the setting


@pytest.mark.parametrize(
    ("setting", "copied", "stored"),
    [
        ("none", False, "none"),
        ("arc:2", False, "arc:2"),
        ("peer", True, "none"),
        ("arc+peer", True, "arc"),
        ("arc:3+peer", True, "arc:3"),
        ("aec+peer", True, "aec"),
        ("aor", False, "arc"),
        ("aor+peer", True, "arc"),
    ],
)
def test_what_a_setting_asks_for(setting: str, copied: bool, stored: str) -> None:
    assert is_copied(setting) is copied
    assert placement(setting) == stored


# -- the key


def test_keys_of_jobs_differ_and_do_not_tell_the_secret() -> None:
    key = key_of(b"k" * 32, "job")
    assert key == hmac.new(b"k" * 32, b"reft mesh job", hashlib.sha256).hexdigest()
    assert len(bytes.fromhex(key)) == 32
    others = [key_of(b"l" * 32, "job"), key_of(b"k" * 32, "job2"), key_of(b"k" * 32, "")]
    assert len({key, *others}) == 4


# -- the address


def test_an_address_that_is_set_is_taken() -> None:
    assert own_address("10.1.2.3") == "10.1.2.3"
    assert own_address("fd00::0001") == "fd00::1"


@pytest.mark.parametrize("wanted", ["node7", "10.1.2", "10.1.2.3:99", "10.0.0.0/8", "none"])
def test_a_name_is_no_address(wanted: str) -> None:
    with pytest.raises(ValueError):
        own_address(wanted)


def towards(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]) -> list[str]:
    """Has this host send from these addresses, by target; others cannot be reached. Who was asked."""
    asked: list[str] = []

    def find(target: str) -> str:
        asked.append(target)
        if target not in answers:
            raise socket.gaierror("no such name")
        return answers[target]

    monkeypatch.setattr(mesh, "_towards", find)
    return asked


def test_the_address_is_that_towards_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "head")
    asked = towards(monkeypatch, {"head": "10.0.0.7", mesh._ANYWHERE[0]: "10.9.9.9"})
    assert own_address("") == "10.0.0.7"
    assert asked == ["head"]


def test_the_node_of_the_store_takes_the_address_of_its_default_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "head")
    for loopback in ("127.0.1.1", "::1"):
        towards(monkeypatch, {"head": loopback, mesh._ANYWHERE[0]: "10.0.0.1"})
        assert own_address("") == "10.0.0.1"


def test_an_unknown_store_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nowhere")
    towards(monkeypatch, {mesh._ANYWHERE[1]: "fd00::5"})
    assert own_address("") == "fd00::5"


def test_without_a_network_the_address_is_of_this_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    asked = towards(monkeypatch, {"localhost": "127.0.0.1"})
    assert own_address("") == "127.0.0.1"
    assert asked == ["localhost", *mesh._ANYWHERE]


def test_no_address_at_all_is_an_error_that_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nowhere")
    towards(monkeypatch, {})
    with pytest.raises(OSError, match="REFT_MESH_ADDRESS"):
        own_address("")


def test_nothing_is_sent_to_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as store:
        store.bind(("127.0.0.1", 0))
        store.setblocking(False)
        monkeypatch.setattr(mesh, "_ANY_PORT", store.getsockname()[1])
        assert mesh._towards("127.0.0.1") == "127.0.0.1"
        with pytest.raises(BlockingIOError):
            store.recv(1)
    assert ipaddress.ip_address(mesh._towards("127.0.0.1")).is_loopback


# -- encryption


class Store:
    """A store in which the other node has said already where it listens."""

    mesh_key = b"k" * 32

    def __init__(self, other: str) -> None:
        self.put_by_us: dict[str, str] = {}
        self._other = other

    def put(self, kind: Any, key: str, rank: int, value: str) -> None:
        self.put_by_us[key] = value

    def wait(self, keys: list[str], timeout: Any) -> None:
        pass

    def read(self, kind: Any, key: str, rank: int, longest: int, was_there: bool) -> bytes:
        return self._other.encode()


class Agent:
    def __init__(self, answer: dict[str, Any]) -> None:
        self.asked: list[Any] = []
        self.kept: list[Any] = []
        self._answer = answer

    def request(self, kind: int, payload: str, wanted: int, ms: int) -> tuple[str, int]:
        self.asked.append(json.loads(payload))
        return json.dumps(self._answer), -1

    def keep_saying(self, kind: int, payload: str) -> None:
        self.kept.append(json.loads(payload))


def copies(
    tls: str, other: str, protection: str = "peer", answers_tls: bool | None = None
) -> tuple[mesh.Copies, Store, Agent, dict[str, Any]]:
    """Those of node 0 of two, whose agent listens at port 77."""
    env = {"snapshot_protection": protection, "mesh_address": "127.0.0.1", "mesh_bytes_per_sec": 5,
           "mesh_tls": tls, "connect_sec": 1, "snapshot_host_bytes": 1 << 20}  # fmt: skip
    job: Any = SimpleNamespace(
        id="job", node=0, rank=0, local_rank=0, local_world=1, layout=Layout(((0,), (1,)), (0, 1))
    )
    store: Any = Store(other)
    said = {} if answers_tls is None else {"tls": answers_tls}
    agent: Any = Agent({"port": 77, **said})
    return mesh.Copies(env, job, store, agent, True), store, agent, env


@pytest.mark.parametrize("tls", ["on", "off"])
def test_the_agent_and_the_other_nodes_learn_whether_to_encrypt(tls: str) -> None:
    ours, store, agent, env = copies(tls, f"78 10.0.0.1 {tls}", answers_tls=tls == "on")
    ours.keep(1000)
    assert agent.asked[0]["tls"] == (tls == "on")
    assert store.put_by_us == {"mesh/0": f"77 127.0.0.1 {tls}"}
    (kept,) = agent.kept
    assert kept["tls"] == (tls == "on") and kept["port"] == 77
    assert kept["sources"] == [{"address": "10.0.0.1", "port": 78, "ranks": [1]}]
    assert ours.why_not == "" and env["snapshot_protection"] == "peer"


@pytest.mark.parametrize(("own", "other"), [("on", "off"), ("off", "on"), ("on", "")])
def test_a_node_that_differs_is_a_warning_that_says_what_to_set(
    capsys: pytest.CaptureFixture[str], own: str, other: str
) -> None:
    ours, _, agent, env = copies(own, f"78 10.0.0.1 {other}".strip(), answers_tls=own == "on")
    said = f"REFT_MESH_TLS differs between the nodes (node 0: {own}, node 1: {other or 'not known'}): set it to"
    assert said in ours.why_not
    ours.keep(1000)
    assert env["snapshot_protection"] == "none" and agent.kept == []
    printed = capsys.readouterr().err
    assert printed.count(said) == 1 and "a lost node is NOT survived" in printed


def test_a_node_that_differs_is_a_warning_too_where_nothing_is_copied_before_a_restart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, _, agent, _ = copies("on", "78 10.0.0.1 off", protection="none", answers_tls=True)
    ours.keep(1000)
    assert "other nodes' vaults stay there: REFT_MESH_TLS differs" in capsys.readouterr().err
    assert agent.kept == []


def test_an_agent_that_does_not_confirm_that_it_encrypts_is_not_relied_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, store, _, env = copies("on", "78 10.0.0.1 on", answers_tls=None)
    assert "a version without REFT_MESH_TLS" in ours.why_not
    assert store.put_by_us["mesh/0"].startswith("0 ")
    assert env["snapshot_protection"] == "none"
    assert "a lost node is NOT survived" in capsys.readouterr().err
    ours, _, _, _ = copies("off", "78 10.0.0.1 off", answers_tls=None)
    assert ours.why_not == ""


# -- vaults of nodes without ranks


def fetched(answer: str | Exception, local_rank: int = 0, missing: tuple[int, ...] = (2, 3)) -> tuple[Any, list[Any]]:
    """What `fetch` makes of an agent's answer, and what the agent was asked for."""
    asked: list[Any] = []

    def request(kind: int, payload: str, wanted: int, ms: int) -> tuple[str, int]:
        asked.append(json.loads(payload))
        if isinstance(answer, Exception):
            raise answer
        return answer, -1

    job: Any = SimpleNamespace(node=1, local_rank=local_rank, local_world=2, world=4)
    client: Any = SimpleNamespace(request=request)
    return mesh.fetch({"snapshot_host_bytes": 1 << 20}, job, client, list(missing), 6), asked


def test_the_first_rank_of_a_node_has_vaults_fetched() -> None:
    found, asked = fetched('{"ranks": [3], "problem": "10.0.0.1: Connection refused"}')
    assert found == [3]
    assert asked == [{"world": 6, "ranks": [2, 3], "room": 1 << 19}]


@pytest.mark.parametrize("answer", [_C.PeerFailure("no such request"), "[]", "{}", '{"ranks": ["x"], "problem": ""}'])
def test_a_restart_goes_on_if_the_agent_fetches_nothing(answer: str | Exception) -> None:
    assert fetched(answer)[0] == []


def test_a_restart_that_waits_for_another_node_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoke = threading.Event()
    monkeypatch.setattr(mesh, "_PATIENCE_SEC", 0.0)
    say = mesh._voice.say
    monkeypatch.setattr(mesh._voice, "say", lambda text: (say(text), spoke.set()))

    def request(*_: Any) -> tuple[str, int]:
        assert spoke.wait(30)
        return '{"ranks": [2, 3], "problem": ""}', -1

    job: Any = SimpleNamespace(node=1, local_rank=0, local_world=2, world=4)
    client: Any = SimpleNamespace(request=request)
    assert mesh.fetch({"snapshot_host_bytes": 1 << 20}, job, client, [2, 3], 6) == [2, 3]
    assert (
        "node 1 fetches what ranks 2 3 of the attempt before left on another node; training waits"
        " for it, 5 minutes at most" in capsys.readouterr().err
    )


def test_nothing_is_asked_for_that_is_there_or_that_another_rank_asks_for() -> None:
    assert fetched("", local_rank=1) == ([], [])
    assert fetched("", missing=()) == ([], [])
