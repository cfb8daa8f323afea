"""The port on which an agent takes connections of other nodes: whoever connects and has not the
job's key costs a few descriptors for seconds, and no vote."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration import test_agent
from tests.integration.test_agent import Node, protocol, wait_for
from tests.security.test_agent_peers import closed, commits, rss_bytes

pytestmark = test_agent.pytestmark
OPEN = {"key": "ab" * 32, "address": "127.0.0.1", "port": 0}
KEEP = {**OPEN, "port": 1, "sources": [], "copied": [], "room": 0, "rate": 0, "on_demand": 0}


def mesh_port(node: Node) -> int:
    with node.rank(0) as rank:
        kind, answer, _ = rank.request(protocol.MESH_OPEN, OPEN)
        assert kind == protocol.MESH_AT, answer
        return int(answer["port"])


def descriptors(node: Node) -> int:
    return len(os.listdir(f"/proc/{node.pid}/fd"))


def test_ten_thousand_strangers_take_a_few_places_and_no_vote(make: Callable[..., Node]) -> None:
    node = make()
    port = mesh_port(node)
    fds, bytes_before = descriptors(node), rss_bytes(node.pid)
    kept = []
    for i in range(10_000):
        stranger = socket.create_connection(("127.0.0.1", port), timeout=20)
        if i % 3 == 0:
            stranger.sendall(b"RFTMESH1" + bytes(40))
        elif i % 3 == 1:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        if i % 50 == 0:
            kept.append(stranger)
        else:
            stranger.close()
        if i % 2500 == 0:
            assert commits(node, 5 + i)
    wait_for(lambda: descriptors(node) <= fds + 40, 60)
    assert commits(node, 20_000)
    assert rss_bytes(node.pid) - bytes_before < 32 << 20
    assert node.log().count("mesh: a connection") <= 60
    mesh = node.status()["mesh"]
    assert mesh["keepers"] == 0 and mesh["sent_bytes"] == 0 and mesh["refused"] > 1000
    for stranger in kept:
        assert closed(stranger)
        stranger.close()


def test_who_drips_is_dropped_after_five_seconds(make: Callable[..., Node]) -> None:
    node = make()
    stranger = socket.create_connection(("127.0.0.1", mesh_port(node)), timeout=30)
    stranger.sendall(b"RFTM")
    assert closed(stranger)
    assert "did not show who it is within 5 s" in node.log()
    stranger.close()


@pytest.mark.parametrize(
    "change",
    [{"key": "ab"}, {"key": "x" * 64}, {"key": 3}, {"port": 65536}, {"port": -1}, {"address": "a" * 65}, {"address": "no.such.host"}],
)
def test_an_opening_that_cannot_be_is_refused(make: Callable[..., Node], change: dict[str, Any]) -> None:
    node = make()
    with node.rank(0) as rank:
        kind, answer, _ = rank.request(protocol.MESH_OPEN, {**OPEN, **change})
        assert kind == protocol.ERROR and answer["what"], answer
    assert node.status()["mesh"] is None
    assert commits(node, 5)


@pytest.mark.parametrize(
    "change",
    [{"sources": [3]}, {"sources": [{"address": "127.0.0.1", "port": 0, "ranks": []}]}, {"copied": [-1]}, {"copied": "x"}, {"room": -1}, {"on_demand": 2},
     {"sources": [{"address": "127.0.0.1", "port": 5, "ranks": [1 << 40]}]}],
)  # fmt: skip
def test_a_plan_that_cannot_be_is_refused(make: Callable[..., Node], change: dict[str, Any]) -> None:
    node = make()
    with node.rank(0) as rank:
        kind, answer, _ = rank.request(protocol.MESH_KEEP, {**KEEP, **change})
        assert kind == protocol.ERROR and answer["what"], answer
    assert commits(node, 5)


@pytest.mark.parametrize("change", [{"world": 0}, {"ranks": [-1]}, {"ranks": 1}, {"room": -1}, {"ranks": [0] * 4097}])
def test_a_fetch_that_cannot_be_is_refused(make: Callable[..., Node], change: dict[str, Any]) -> None:
    node = make()
    with node.rank(0) as rank:
        wanted = {"world": 4, "ranks": [2, 3], "room": 1 << 20}
        assert rank.request(protocol.MESH_FETCH, wanted)[:2] == (protocol.MESH_FETCHED, {"ranks": [], "problem": ""})
        kind, answer, _ = rank.request(protocol.MESH_FETCH, {**wanted, **change})
        assert kind == protocol.ERROR and answer["what"], answer
    assert commits(node, 5)


def test_an_address_that_is_not_here_costs_a_rank_no_vote(make: Callable[..., Node]) -> None:
    """The rank says it again at each reconnect: to refuse it would cut the rank off for good."""
    node = make()
    with node.rank(0, 1) as rank:
        rank.send(protocol.MESH_KEEP, {**KEEP, "address": "192.0.2.77"})
        kind, answer, _ = rank.receive()
        assert kind == protocol.VERDICT and "would NOT be survived" in answer["text"], answer
        rank.vote(5, test_agent.INCARNATION, True)
        assert rank.receive()[1]["yes"]


def test_tools_open_nothing(make: Callable[..., Node]) -> None:
    node = make()
    with node.tool() as tool:
        kind, _, _ = tool.request(protocol.MESH_OPEN, OPEN)
        assert kind == protocol.ERROR
    assert node.status()["mesh"] is None
