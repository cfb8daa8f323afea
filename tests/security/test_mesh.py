"""The port on which an agent takes connections of other nodes: whoever connects and has not the
job's key costs a few descriptors for seconds, and no vote. With and without TLS."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration import test_agent
from tests.integration.test_agent import Node, protocol, wait_for
from tests.security.test_agent_peers import closed, commits, rss_bytes

pytestmark = test_agent.pytestmark
OPEN = {"key": "ab" * 32, "address": "127.0.0.1", "port": 0, "tls": 0}
GREETING = b"RFTMESH1" + (2).to_bytes(4, "little") + bytes(4) + bytes(range(32))
DIFFERS = "mesh: a connection: REFT_MESH_TLS differs between the nodes: set it to the same value on all"
either = pytest.mark.parametrize("tls", [0, 1], ids=["plain", "tls"])
KEEP = {**OPEN, "port": 1, "sources": [], "copied": [], "room": 0, "rate": 0, "on_demand": 0}


def mesh_port(node: Node, tls: int = 0) -> int:
    with node.rank(0) as rank:
        kind, answer, _ = rank.request(protocol.MESH_OPEN, {**OPEN, "tls": tls})
        assert kind == protocol.MESH_AT and answer["tls"] is bool(tls), answer
        return int(answer["port"])


def stranger_to(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def hello_without_key() -> bytes:
    """With which a client of TLS 1.3 begins that has no pre-shared key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


def recorded_hello(make: Callable[..., Node]) -> bytes:
    """With which the agent of another node of this job, which has the key, begins."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        node = make(node=1)
        mesh_port(node, 1)
        source = {"address": "127.0.0.1", "port": listener.getsockname()[1], "ranks": [1]}
        with node.rank(0) as rank:
            rank.send(protocol.MESH_KEEP, {**KEEP, "tls": 1, "sources": [source]})
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(30)
                return connection.recv(4096)


def descriptors(node: Node) -> int:
    return len(os.listdir(f"/proc/{node.pid}/fd"))


@either
def test_ten_thousand_strangers_take_a_few_places_and_no_vote(make: Callable[..., Node], tls: int) -> None:
    node = make()
    port = mesh_port(node, tls)
    said = [b"RFTMESH1" + bytes(40), b"GET / HTTP/1.1\r\n\r\n" + bytes(64), b""]
    if tls:
        said = [*said, hello_without_key(), hello_without_key()[:100], recorded_hello(make)]
    fds, bytes_before = descriptors(node), rss_bytes(node.pid)
    kept = []
    for i in range(10_000):
        stranger = stranger_to(port)
        stranger.sendall(said[i % len(said)])
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


@either
def test_who_drips_is_dropped_after_five_seconds(make: Callable[..., Node], tls: int) -> None:
    node = make()
    port = mesh_port(node, tls)
    hello = hello_without_key()
    strangers = [stranger_to(port) for _ in range(3)]
    with contextlib.suppress(OSError):  # until it is dropped
        for i in range(80):
            strangers[0].sendall(hello[i : i + 1] if tls else GREETING[i : i + 1])
            strangers[1].sendall(b"RFTM"[i : i + 1])
            time.sleep(0.1)
    for stranger in strangers:
        assert closed(stranger)
        stranger.close()
    assert "did not show who it is within 5 s" in node.log()
    assert node.status()["mesh"]["refused"] == 3
    assert commits(node, 5)


def test_an_agent_without_tls_and_one_with_it_refuse_each_other_and_say_what_to_do(make: Callable[..., Node]) -> None:
    for node, tls, said in [(make(), 1, GREETING), (make(job="plain"), 0, hello_without_key())]:
        with stranger_to(mesh_port(node, tls)) as stranger:
            stranger.sendall(said)
            assert closed(stranger)
        wait_for(lambda node=node: DIFFERS in node.log())
        assert commits(node, 5)


def test_a_client_of_tls_without_the_key_is_refused_at_once(make: Callable[..., Node]) -> None:
    node = make()
    port = mesh_port(node, 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with stranger_to(port) as stranger, pytest.raises(ssl.SSLError, match="(?i)alert"):
        context.wrap_socket(stranger)
    wait_for(lambda: "mesh: a connection: TLS: " in node.log())
    assert commits(node, 5)


def test_a_recorded_begin_that_is_played_back_is_worth_nothing(make: Callable[..., Node]) -> None:
    node = make()
    port = mesh_port(node, 1)
    hello = recorded_hello(make)
    assert hello[0] == 22 and b"reft mesh" in hello  # the name of the key, not the key
    with stranger_to(port) as stranger:
        stranger.sendall(hello)
        answer = stranger.recv(4096)
        assert answer[0] == 22, "the key is right"
        stranger.sendall(hello)  # and the next message has to be made with it
        assert closed(stranger)
    with stranger_to(port) as stranger:
        stranger.sendall(hello)
        assert closed(stranger)
    assert "did not show who it is within 5 s" in node.log()
    mesh = node.status()["mesh"]
    assert mesh["keepers"] == 0 and mesh["refused"] == 2 and mesh["sent_bytes"] == 0
    assert commits(node, 5)


def test_a_server_without_the_key_gets_nothing_of_a_keeper(make: Callable[..., Node]) -> None:
    """Who takes the address of a node that is gone, and answers with whatever it likes."""
    node = make()
    mesh_port(node, 1)
    with socket.create_server(("127.0.0.1", 0)) as listener, node.rank(0) as rank:
        listener.settimeout(30)
        source = {"address": "127.0.0.1", "port": listener.getsockname()[1], "ranks": [1]}
        rank.send(protocol.MESH_KEEP, {**KEEP, "tls": 1, "sources": [source]})
        for answer in (b"", bytes(100), GREETING, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x03\x00\x02\x02\x28"):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(30)
                heard = connection.recv(4096)
                with contextlib.suppress(OSError):  # refused at once
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while more := connection.recv(4096):
                        heard += more
            assert b"RFTMESH" not in heard
    assert node.status()["mesh"]["connected"] == 0
    assert commits(node, 5)


@pytest.mark.parametrize(
    "change",
    [{"key": "ab"}, {"key": "x" * 64}, {"key": 3}, {"port": 65536}, {"port": -1}, {"address": "a" * 65}, {"address": "no.such.host"},
     {"tls": 2}, {"tls": "on"}],
)  # fmt: skip
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
