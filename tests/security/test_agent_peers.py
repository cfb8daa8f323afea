"""Peers of the agent that are silent, slow, many, or flood it: ranks and votes go on as if they were
not there."""

from __future__ import annotations

import http.client
import os
import resource
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration import test_agent
from tests.integration.test_agent import INCARNATION, Node, protocol, wait_for
from tests.support.launchers import free_port

pytestmark = test_agent.pytestmark
HELLO = protocol.HELLO


def silent(node: Node, count: int) -> list[socket.socket]:
    peers = [socket.socket(socket.AF_UNIX) for _ in range(count)]
    for peer in peers:
        peer.settimeout(20)
        peer.connect(str(node.socket))
    return peers


def connections(node: Node) -> int:
    return int(node.status()["agent"]["connections"])


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def sleeps(pid: int) -> int:
    """How often the process has waited for something."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def closed(peer: socket.socket) -> bool:
    """Whether the agent has ended the connection; reads what it said before."""
    try:
        while peer.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def commits(node: Node, step: int) -> bool:
    with node.rank(0) as first, node.rank(1) as second:
        first.vote(step, INCARNATION, True)
        second.vote(step, INCARNATION, True)
        return first.receive()[1]["yes"] and second.receive()[1]["yes"]


def test_silent_peers_take_sixteen_places_and_ranks_find_theirs(make: Callable[..., Node]) -> None:
    node = make()
    peers = silent(node, 200)
    wait_for(lambda: connections(node) <= 17)
    assert commits(node, 5)
    for peer in peers:
        peer.close()


def test_a_silent_peer_is_dropped_after_three_seconds(make: Callable[..., Node]) -> None:
    node = make()
    (peer,) = silent(node, 1)
    peer.send(b"RF")  # the beginning of a frame is no hello
    node.clock.advance(3.1)
    assert closed(peer)
    peer.close()


def test_a_stranger_sends_no_more_than_a_hello(make: Callable[..., Node]) -> None:
    node = make()
    before = rss_bytes(node.pid)
    (peer,) = silent(node, 1)
    peer.send(struct.pack("<IHHII", protocol.MAGIC, protocol.VERSION, HELLO, 60 << 20, 0))
    try:
        for _ in range(59):  # the end never comes
            peer.sendall(bytes(1 << 20))
    except OSError:
        pass
    assert rss_bytes(node.pid) - before < 16 << 20
    assert closed(peer)
    peer.close()


def test_descriptors_of_strangers_and_tools_are_not_kept(make: Callable[..., Node]) -> None:
    node = make()
    with node.tool() as tool:
        before = len(os.listdir(f"/proc/{node.pid}/fd"))
        (stranger,) = silent(node, 1)
        null = os.open("/dev/null", os.O_RDONLY)
        begun = struct.pack("<IHHII", protocol.MAGIC, protocol.VERSION, HELLO, 400, 0)
        for sender, data in ((stranger, begun), (tool._socket, begun)):
            for at in range(4):
                socket.send_fds(sender, [data[at * 4 : at * 4 + 4]], [null] * 4)
        node.settle()
        assert len(os.listdir(f"/proc/{node.pid}/fd")) <= before + 6  # not 32 more
        os.close(null)
        stranger.close()


def test_a_flood_of_tools_leaves_ranks_alone(make: Callable[..., Node]) -> None:
    node = make()
    tools = [node.tool() for _ in range(150)]
    assert connections(node) <= 65
    assert commits(node, 5)
    for tool in tools:
        tool.close()


def test_a_tool_that_does_not_read_costs_little_memory_and_no_vote(make: Callable[..., Node]) -> None:
    node = make()
    tool = node.tool()
    before = rss_bytes(node.pid)
    request = struct.pack("<IHHII", protocol.MAGIC, protocol.VERSION, protocol.STATUS_REQUEST, 2, 0) + b"{}"
    tool._socket.settimeout(1)
    try:
        for _ in range(200):
            tool._socket.sendall(request * 2000)
    except TimeoutError:
        pass  # the agent reads no more before its answers are taken
    assert commits(node, 5)
    assert rss_bytes(node.pid) - before < 32 << 20
    tool.close()


def test_refused_peers_cause_few_lines(make: Callable[..., Node]) -> None:
    node = make()
    for _ in range(600):
        (peer,) = silent(node, 1)
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert closed(peer)
        peer.close()
    assert node.log().count("refused") <= 150
    assert node.status()["agent"]["refused_peers"] >= 600


def test_a_long_log_begins_anew(make: Callable[..., Node]) -> None:
    node = make()
    log = node.directory / "agent.log"
    with log.open("ab") as file:
        file.write(b"x" * (5 << 20))
    wait_for(lambda: log.stat().st_size < 1 << 20)
    assert (node.directory / "agent.log.1").stat().st_size > 4 << 20
    os.kill(node.pid, 15)
    wait_for(lambda: not node.directory.exists())  # both logs are removed with the rest


def test_silent_clients_of_the_metrics_port_keep_nobody_out_for_long(make: Callable[..., Node]) -> None:
    port = free_port()
    node = make(REFT_METRICS_PORT=str(port))
    quiet = [socket.create_connection(("127.0.0.1", port)) for _ in range(25)]
    answers: list[int] = []

    def ask() -> None:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        client.request("GET", "/metrics")
        answers.append(client.getresponse().status)

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive():
        node.clock.advance(5.1)
        asking.join(0.3)
    assert answers == [200]
    for client in quiet:
        client.close()


def knock(claim: bytes) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(20)
    peer.connect(claim)
    return peer


def test_knocks_are_answered_once_a_tick(make: Callable[..., Node]) -> None:
    """Any user may knock on the claim, and in a loop would otherwise keep the agent busy."""
    node = make()
    claim = node.claim()
    begun = node.status()["agent"]["ticks"]

    def knock_often(_: int) -> None:
        for _ in range(6):
            with knock(claim) as peer:
                assert closed(peer)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(knock_often, range(8)))
    assert node.status()["agent"]["ticks"] - begun >= 2  # 16 at most are answered at a time


@pytest.mark.parametrize("place", ["metrics", "socket", "claim"])
def test_no_spin_without_descriptors(make: Callable[..., Node], place: str) -> None:
    port = free_port()
    node = make(REFT_METRICS_PORT=str(port))
    claim = node.claim()
    with node.tool() as tool:
        used = {int(fd) for fd in os.listdir(f"/proc/{node.pid}/fd")}
        first_free = min(set(range(len(used) + 1)) - used)
        limits = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (first_free, limits[1]))
        waiting: list[socket.socket] = []
        for _ in range(8):
            if place == "metrics":
                waiting.append(socket.create_connection(("127.0.0.1", port)))
            elif place == "claim":
                waiting.append(knock(claim))
            else:
                waiting += silent(node, 1)

        def ticks() -> int:
            return int(tool.request(protocol.STATUS_REQUEST)[1]["agent"]["ticks"])

        before, begun, slept = cpu_ticks(node.pid), ticks(), sleeps(node.pid)
        wait_for(lambda: ticks() >= begun + 8)
        assert sleeps(node.pid) - slept >= 4  # a spinning process does not wait, however slow it is
        spent = (cpu_ticks(node.pid) - before) / os.sysconf("SC_CLK_TCK")
        assert spent < 1, f"{spent} s of 2 s"
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, limits)
        for peer in waiting:
            peer.close()
    assert commits(node, 5)
