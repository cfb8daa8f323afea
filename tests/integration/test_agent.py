"""The real agent over its socket: who may speak, what is kept, what is decided, and how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reft._link import agent_protocol as protocol
from reft._link import launch
from tests.support.launchers import free_port

ROOT = Path(__file__).resolve().parents[2]


def _binary() -> Path | None:
    candidates = [Path(os.environ.get("REFT_AGENT_PATH", "")), ROOT / "python/reft/bin/reft-agent"]
    candidates += sorted(ROOT.glob("build*/**/agent/reft-agent"))
    return next((path for path in candidates if path.is_file() and os.access(path, os.X_OK)), None)


BINARY = _binary()
pytestmark = pytest.mark.skipif(BINARY is None, reason="needs reft-agent: build it, or set REFT_AGENT_PATH")
INCARNATION = 0xABC
VAULT_VERSION = 15  # as snapshot/vault/FORMAT.md has it
RESTORE_NS = 29  # position of the counter in snapshot/vault/rank_stats.h


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
    return value


def xxh3(data: bytes) -> int:
    name = ctypes.util.find_library("xxhash")
    if name is None:
        pytest.skip("needs libxxhash")
    function = ctypes.CDLL(name).XXH3_64bits
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return int(function(data, len(data)))


def vault_bytes(
    rank: int, job: str = "demo", world: int = 2, pending_op_age_ns: int | None = None, restore_ns: int = 0
) -> bytes:
    """A vault without slots, as snapshot/vault/FORMAT.md describes it; optionally with one op that never ends.

    `restore_ns`: how long its rank took to resume, 0: it has not.
    """
    capacity = 256
    records = 64 + 1024 * 96 + 1024 * 128  # behind header, groups and call sites
    log = bytearray(-(-(records + capacity * 96) // 4096) * 4096)
    spans = bytes(266_240)
    heartbeat = time.monotonic_ns() - (pending_op_age_ns or 0)
    ops = 0 if pending_op_age_ns is None else 1
    struct.pack_into("<QIIQIIQ", log, 0, 0x31474F4C54464552, 3, capacity, ops, 1, os.getpid(), heartbeat if ops else 0)
    struct.pack_into("<88sii", log, 64, b"default_pg", rank, world)
    if ops:
        # ticket, begin, enqueued, wait_begin, wait_end, done, bytes, signature, group, seq, peer,
        # call_site, kind, …
        record = struct.pack(
            "<8QIIiIBBBBIQ", 1, heartbeat, heartbeat, heartbeat, 0, 0, 4, 0, 0, 1, -1, 0, 2, 255, 255, 0, 0, 0
        )
        log[records : records + len(record)] = record
    places = (4096, 8192, len(log), 8192 + len(log), len(spans))
    block = struct.pack("<QIIii5Q128s", 0x31544C5654464552, VAULT_VERSION, 2, rank, world, *places, job.encode())
    block += struct.pack("<Q", xxh3(block))
    stats = bytearray(4096)
    struct.pack_into("<Q", stats, 8 * RESTORE_NS, restore_ns)
    return block.ljust(4096, b"\0") + bytes(stats) + bytes(log) + spans


def memfd(data: bytes, sealed: bool = True) -> int:
    fd = os.memfd_create("vault", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    if sealed:
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class TestClock:
    """The clock of an agent that is started with `--test-clock`: real time, and what advance() adds."""

    __test__ = False

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 8)

    def advance(self, seconds: float) -> None:
        (ahead_ns,) = struct.unpack("<q", self._page[:])
        self._page[:] = struct.pack("<q", ahead_ns + int(seconds * 1e9))


class Node:
    """One started agent."""

    def __init__(self, root: Path, *, job: str = "demo", linger: float = 60, node: int = 0, **settings: str) -> None:
        self.root, self.job = root, job
        self.directory = root / "run" / job / f"node-{node}"
        self.socket = self.directory / "agent.sock"
        self.clock = TestClock(root / f"clock-{node}")
        self.arguments = [str(BINARY), "--run-dir", str(root / "run"), "--job", job, "--node", str(node)]
        self.arguments += ["--test-clock", str(self.clock.path)]
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("REFT_")}
        self.environment |= {"REFT_AGENT_LINGER_SEC": str(linger), **settings}
        self.pid = 0

    def start(self) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.arguments, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode == 0:
            with self.tool() as tool:
                self.pid = int(tool.welcome["agent_pid"])
        return done

    def tool(self) -> protocol.AgentConnection:
        return protocol.AgentConnection(self.socket, timeout_sec=30)

    def rank(self, rank: int, world: int = 2, **fields: Any) -> protocol.AgentConnection:
        hello = {"role": "rank", "rank": rank, "local_rank": rank, "world": world, "local_world": world}
        hello |= {"incarnation": f"{INCARNATION:016x}", "attempt": 0}
        return protocol.AgentConnection(self.socket, {**hello, **fields}, timeout_sec=30)

    def status(self) -> dict[str, Any]:
        with self.tool() as tool:
            return tool.request(protocol.STATUS_REQUEST)[1]

    def settle(self) -> None:
        """Returns when the agent has acted on all that it was sent before: it has checked since whether to end."""
        self.status()

    def wait_ticks(self, count: int) -> None:
        """Returns when the agent's own timer has run so many times more (four times a second), however slow it is."""
        end = self.status()["agent"]["ticks"] + count
        wait_for(lambda: self.status()["agent"]["ticks"] >= end, 60)

    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"

    def claim(self) -> bytes:
        """The abstract address by which the agent claims its job on this host; empty if none."""
        own = set()
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed in between
                own.add(os.readlink(link))
        for line in Path("/proc/net/unix").read_text().splitlines():
            *_, inode, path = line.split()
            if path.startswith("@reft-agent-") and f"socket:[{inode}]" in own:
                return b"\0" + path[1:].encode()
        return b""

    def log(self) -> str:
        path = self.directory / "agent.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(**settings: Any) -> Node:
        node = Node(tmp_path, **settings)
        done = node.start()
        assert done.returncode == 0, done.stderr + node.log()
        nodes.append(node)
        return node

    yield start
    for node in nodes:
        text = node.log()
        assert "Sanitizer" not in text and "runtime error" not in text, text
        if node.pid and node.alive():
            os.kill(node.pid, 15)
            wait_for(lambda node=node: not node.alive())


def put(connection: protocol.AgentConnection, rank: int, data: bytes, resumes_world: int = 0) -> None:
    fd = memfd(data)
    message = {"rank": rank, "bytes": len(data), "resumes_world": resumes_world}
    connection.send(protocol.VAULT_PUT, message, fd)
    os.close(fd)
    assert connection.receive()[0] == protocol.VAULT_ACK


# -- start
# ---------------------------------------------------------------------------------------------------------------


def test_start_returns_when_it_listens_and_leaves_a_session_of_its_own(make: Callable[..., Node]) -> None:
    node = make()
    fields = Path(f"/proc/{node.pid}/stat").read_text().rsplit(")", 1)[1].split()
    assert int(fields[3]) != os.getsid(0)
    assert os.readlink(f"/proc/{node.pid}/cwd") == "/"
    assert (node.directory.stat().st_mode & 0o777) == 0o700
    assert (node.socket.stat().st_mode & 0o077) == 0


def test_closes_what_it_inherited(tmp_path: Path, make: Callable[..., Node]) -> None:
    node = Node(tmp_path)
    read_end, write_end = os.pipe()
    subprocess.run(node.arguments, env=node.environment, pass_fds=[write_end], stdout=subprocess.DEVNULL, timeout=60, check=True)
    os.close(write_end)
    assert os.read(read_end, 1) == b""  # nobody holds the other end
    os.close(read_end)
    with node.tool() as tool:
        os.kill(int(tool.welcome["agent_pid"]), 15)


def test_second_starter_finds_the_first(make: Callable[..., Node]) -> None:
    node = make()
    first = node.pid
    done = node.start()
    assert done.returncode == 0 and "already listening" in done.stdout
    assert node.pid == first


def test_race_of_starters_leaves_one_agent(tmp_path: Path, make: Callable[..., Node]) -> None:
    node = Node(tmp_path)
    starters = [subprocess.Popen(node.arguments, env=node.environment, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    outputs = [starter.communicate(timeout=120)[0] for starter in starters]
    assert [starter.returncode for starter in starters] == [0] * 6
    assert sum(text.startswith("listening") for text in outputs) == 1
    with node.tool() as tool:
        assert tool.welcome["host"] == launch.host_of_agents()
        os.kill(int(tool.welcome["agent_pid"]), 15)


def test_stale_socket_of_a_killed_agent_is_replaced(make: Callable[..., Node]) -> None:
    node = make()
    os.kill(node.pid, 9)
    wait_for(lambda: not node.alive())
    assert node.socket.exists()
    before = node.pid
    assert node.start().returncode == 0
    assert node.pid != before


def test_open_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    (tmp_path / "run").chmod(0o755)
    done = Node(tmp_path).start()
    assert done.returncode == 1
    assert done.stdout.startswith("failed: ") and "0700" in done.stdout  # for who started it; nothing else says it
    assert done.stderr == ""


@pytest.mark.parametrize(
    "arguments", [["--job", "../x"], ["--node", "soon"], ["--nonsense", "1"], ["--run-dir", "relative"]]
)
def test_wrong_options_are_usage_errors(tmp_path: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [*Node(tmp_path).arguments, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert arguments[0] in done.stderr or arguments[0] == "--nonsense"


# -- peers
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<IHHII", protocol.MAGIC, 9, 1, 0, 0),
        struct.pack("<IHHII", protocol.MAGIC, protocol.VERSION, 1, 0xFFFFFFFF, 0),
        struct.pack("<IHHII", protocol.MAGIC, protocol.VERSION, 1, 3, 0) + b"{{{",
        struct.pack("<IHHII", protocol.MAGIC, protocol.VERSION, 12, 2, 0) + b"{}",
        struct.pack("<IHHII", protocol.MAGIC, protocol.VERSION, 777, 0, 0),
        struct.pack("<IHHII", protocol.MAGIC, protocol.VERSION, 1, 20000, 0) + b"[" * 20000,
    ],
)
def test_malformed_frame_gets_one_error_and_a_close(make: Callable[..., Node], garbage: bytes) -> None:
    node = make()
    with node.tool() as bystander:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(20)
            peer.connect(str(node.socket))
            peer.sendall(garbage)
            answer = b""
            while chunk := peer.recv(65536):
                answer += chunk
        assert protocol.HEADER.unpack(answer[:16])[2] == protocol.ERROR
        assert protocol.HEADER.unpack(answer[:16])[3] == len(answer) - 16  # one frame
        assert bystander.request(protocol.STATUS_REQUEST)[0] == protocol.STATUS
    assert "refused" in node.log()


@pytest.mark.parametrize(
    "fields", [{"job": "other"}, {"protocol": protocol.VERSION + 1}, {"role": "king"}]
)
def test_hello_of_somebody_else_is_refused(make: Callable[..., Node], fields: dict[str, Any]) -> None:
    node = make()
    with pytest.raises(ValueError, match="refuses"):
        protocol.AgentConnection(node.socket, fields)


def test_an_agent_takes_the_number_of_its_node_from_its_ranks(make: Callable[..., Node]) -> None:
    node = make()
    assert node.status()["node"] == 0
    with node.rank(1, local_rank=0, world=3, local_world=1, nodes=2, node=3):
        assert node.status()["node"] == 3


def test_two_live_jobs_with_one_id_are_told_apart(make: Callable[..., Node]) -> None:
    node = make()
    script = (
        "import sys, time; from reft._link import agent_protocol as p\n"
        "c = p.AgentConnection(sys.argv[1], {'role': 'rank', 'rank': 0, 'local_rank': 0, 'world': 1, 'local_world': 1, "
        "'incarnation': '77', 'attempt': 0})\nprint('in', flush=True)\ntime.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(node.socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "in\n"
        with pytest.raises(ValueError, match=f"already used by a live job.*{other.pid}.*REFT_JOB_ID"):
            node.rank(0, world=1)
        other.kill()
        other.wait()
        with node.rank(0, world=1):  # the same name is free at once when the process is dead
            pass


# -- vaults
# --------------------------------------------------------------------------------------------------------------


def test_vault_outlives_its_rank(make: Callable[..., Node]) -> None:
    node = make()
    data = vault_bytes(0)
    with node.rank(0) as rank:
        put(rank, 0, data)
    with node.tool() as tool:
        inventory = tool.request(protocol.VAULT_LIST)[1]
        assert [(v["rank"], v["bytes"], v["slots"]) for v in inventory["vaults"]] == [(0, len(data), [])]
        kind, answer, fd = tool.request(protocol.VAULT_GET, {"rank": 0})
        assert kind == protocol.VAULT_FD and answer["bytes"] == len(data) and fd is not None
        assert os.pread(fd, len(data), 0) == data
        os.close(fd)
        assert tool.request(protocol.VAULT_GET, {"rank": 1})[0] == protocol.ERROR
        assert tool.request(protocol.VAULT_LIST)[0] == protocol.VAULT_INVENTORY  # a miss is no offence


def worlds(node: Node, world: int = 0) -> dict[int, list[int]]:
    """Of each rank: how many ranks the jobs had whose vaults the agent lists."""
    found: dict[int, list[int]] = {}
    with node.tool() as tool:
        for vault in tool.request(protocol.VAULT_LIST, {"world": world})[1]["vaults"]:
            wanted = {"rank": vault["rank"], "world": vault["world"]}
            fd = tool.request(protocol.VAULT_GET, wanted)[2]
            assert fd is not None
            assert struct.unpack_from("<i", os.pread(fd, 24, 0), 20)[0] == vault["world"]
            os.close(fd)
            found.setdefault(vault["rank"], []).append(vault["world"])
    return {rank: sorted(worlds) for rank, worlds in found.items()}


def test_vaults_of_another_number_of_ranks_are_set_aside(make: Callable[..., Node]) -> None:
    node = make()
    for number in (0, 1):
        with node.rank(number, world=4) as rank:
            put(rank, number, vault_bytes(number, world=4))
    with node.rank(0, incarnation="2") as rank:
        put(rank, 0, vault_bytes(0, world=2))
    assert worlds(node) == {0: [2], 1: [4]}, "those that are not set aside"
    assert worlds(node, 2) == worlds(node, 4) == {0: [2, 4], 1: [4]}
    with node.tool() as tool:
        assert tool.request(protocol.VAULT_GET, {"rank": 1, "world": 2})[0] == protocol.ERROR
    with node.rank(0, world=4, local_world=1, incarnation="3") as rank:
        put(rank, 0, vault_bytes(0, world=4))
    assert worlds(node) == {0: [4], 1: [4]} and worlds(node, 4) == {0: [2, 4], 1: [4]}


def test_a_larger_job_that_has_resumed_and_committed_drops_what_a_smaller_one_left(
    make: Callable[..., Node],
) -> None:
    node = make()
    large = memfd(vault_bytes(0, world=4, restore_ns=7))
    for incarnation, world, own in (("1", 4, True), ("2", 2, False), ("3", 4, True)):
        fd = large if own else memfd(vault_bytes(0, world=world))
        with node.rank(0, world=world, local_world=1, nodes=1, incarnation=incarnation) as rank:
            rank.send(protocol.VAULT_PUT, {"rank": 0, "bytes": 0}, fd)
            assert rank.receive()[0] == protocol.VAULT_ACK
    assert worlds(node, 4) == {0: [2, 4]}
    hello = {"local_rank": 0, "world": 4, "local_world": 4, "incarnation": "4"}
    ranks = [node.rank(number, **{**hello, "local_rank": number}) for number in range(4)]
    ranks[0].send(protocol.VAULT_PUT, {"rank": 0, "bytes": 0}, large)
    assert ranks[0].receive()[0] == protocol.VAULT_ACK
    assert worlds(node, 4) == {0: [2, 4]}, "nothing is committed yet"
    for rank in ranks:
        rank.vote(7, 4, True)
    wait_for(lambda: worlds(node, 4) == {0: [4]})
    for rank in ranks:
        rank.close()
    os.close(large)


def leave_two(node: Node) -> None:
    """Two ranks leave their vaults."""
    for number in (0, 1):
        with node.rank(number, world=2, local_world=2, nodes=1) as rank:
            put(rank, number, vault_bytes(number, world=2))


def test_what_a_job_has_resumed_from_goes_when_it_has_committed(make: Callable[..., Node]) -> None:
    node = make()
    leave_two(node)
    with node.rank(0, world=1, local_world=1, nodes=1, incarnation="2") as rank:
        put(rank, 0, vault_bytes(0, world=1, restore_ns=9), resumes_world=2)
        assert worlds(node, 1) == {0: [1, 2], 1: [2]}, "nothing is committed yet"
        rank.vote(7, 2, True)
        wait_for(lambda: worlds(node, 1) == {0: [1]})


def test_what_a_job_could_not_resume_from_stays(make: Callable[..., Node]) -> None:
    node = make()
    leave_two(node)
    with node.rank(0, world=1, local_world=1, nodes=1, incarnation="2") as rank:
        put(rank, 0, vault_bytes(0, world=1), resumes_world=2)
        rank.vote(7, 2, True)
        assert rank.receive()[0] == protocol.OUTCOME
        assert worlds(node, 1) == {0: [1]}, "as many ranks could not resume from it again"
        assert worlds(node, 2) == {0: [2], 1: [2]}, "nor the other way round"


@pytest.mark.parametrize("kind", ["none", "unsealed", "garbage", "short", "pipe", "foreign rank", "foreign job"])
def test_bad_vault_is_refused(make: Callable[..., Node], kind: str) -> None:
    node = make()
    data = vault_bytes(1 if kind == "foreign rank" else 0, "other" if kind == "foreign job" else "demo")
    fd: int | None = None
    if kind == "pipe":
        fd, other = os.pipe()
        os.close(other)
    elif kind != "none":
        data = {"garbage": os.urandom(len(data)), "short": data[:100]}.get(kind, data)
        fd = memfd(data, sealed=kind != "unsealed")
    with node.rank(0) as rank:
        rank.send(protocol.VAULT_PUT, {"rank": 0, "bytes": len(data)}, fd)
        assert rank.receive()[0] == protocol.ERROR
    if fd is not None:
        os.close(fd)
    with node.tool() as tool:
        assert tool.request(protocol.VAULT_LIST)[1]["vaults"] == []


def test_vault_files_are_found_again_and_deleted_on_a_clean_end(tmp_path: Path, make: Callable[..., Node]) -> None:
    folder = tmp_path / "vaults" / "demo"
    folder.mkdir(parents=True)
    (folder / "rank-0.vault").write_bytes(vault_bytes(0))
    (folder / "rank-1.vault").write_bytes(vault_bytes(1)[:5000])
    (folder / "rank-5.vault").write_bytes(vault_bytes(2, world=8))
    (folder / "notes.txt").write_text("mine")
    for path in folder.iterdir():
        path.chmod(0o600)
    node = make(REFT_VAULT_DIR=str(tmp_path / "vaults"))
    with node.tool() as tool:
        vaults = tool.request(protocol.VAULT_LIST)[1]["vaults"]
        assert [(v["rank"], v["path"], v["live"]) for v in vaults] == [(0, str(folder / "rank-0.vault"), False)]
    assert node.log().count("is left alone") == 2
    with node.rank(0, world=1) as rank:
        rank.send(protocol.BYE, {})
        wait_for(lambda: not node.alive())
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "rank-1.vault", "rank-5.vault"]
    assert not node.directory.exists()


# -- commit
# --------------------------------------------------------------------------------------------------------------


def test_commits_when_all_sealed_and_aborts_when_one_dropped(make: Callable[..., Node]) -> None:
    node = make()
    with node.rank(0) as first, node.rank(1) as second:
        first.vote(5, INCARNATION, True)
        second.vote(5, INCARNATION, True)
        for rank in (first, second):
            kind, outcome, _ = rank.receive()
            assert (kind, outcome["step"], outcome["yes"]) == (protocol.OUTCOME, 5, True)
        second.vote(6, INCARNATION, False)
        for rank in (first, second):
            assert rank.receive()[1] == {"step": 6, "incarnation": INCARNATION, "digest": 0, "yes": False, "proposal": 0}
        assert node.status()["newest_committed"]["step"] == 5


def test_what_one_rank_proposes_comes_back_with_the_commit_alone(make: Callable[..., Node]) -> None:
    node = make()
    with node.rank(0) as first, node.rank(1) as second:
        for step, sealed in ((5, True), (6, False)):
            first.vote(step, INCARNATION, True, proposal=3)
            second.vote(step, INCARNATION, sealed)
            for rank in (first, second):
                _, outcome, _ = rank.receive()
                assert (outcome["step"], outcome["yes"], outcome["proposal"]) == (step, sealed, 3 if sealed else 0)
        first.vote(7, INCARNATION, True, proposal=8)  # no such interval
        kind, answer, _ = first.receive()
        while (
            kind == protocol.OUTCOME and answer["step"] == 6
        ):  # once more: its vote came behind the one that ended the step
            kind, answer, _ = first.receive()
        assert kind == protocol.ERROR


def test_repeated_vote_after_a_reconnect_gets_the_same_outcome(make: Callable[..., Node]) -> None:
    node = make()
    with node.rank(1) as second:
        with node.rank(0) as first:
            first.vote(5, INCARNATION, True)
            second.vote(5, INCARNATION, True)
            assert second.receive()[1]["yes"] is True
        with node.rank(0) as again:
            again.vote(5, INCARNATION, True)
            assert again.receive()[1]["yes"] is True
        again_seen = node.status()["agent"]["repeated_votes"]
        assert again_seen == 1


def test_new_agent_decides_from_votes_sent_again(make: Callable[..., Node]) -> None:
    node = make()
    with node.rank(0) as first:
        first.vote(5, INCARNATION, True)
        wait_for(lambda: node.status()["open_votes"])
    os.kill(node.pid, 9)
    wait_for(lambda: not node.alive())
    assert node.start().returncode == 0
    with node.rank(0) as first, node.rank(1) as second:
        first.vote(5, INCARNATION, True)
        second.vote(5, INCARNATION, True)
        assert first.receive()[1]["yes"] is True


def test_several_nodes_ask_local_rank_0_first(make: Callable[..., Node]) -> None:
    node = make()
    with node.rank(0, world=4, local_world=2) as first, node.rank(1, world=4, local_world=2) as second:
        first.vote(5, INCARNATION, True, digest=9, proposal=2)
        second.vote(5, INCARNATION, True, digest=8)
        kind, vote, _ = first.receive()
        assert (kind, vote["yes"], vote["proposal"]) == (protocol.NODE_VOTE, True, 2)
        first.send(protocol.JOB_OUTCOME, protocol.BALLOT.pack(5, INCARNATION, 0, 0, 1, 2, 0))
        for rank in (first, second):
            kind, outcome, _ = rank.receive()
            assert (kind, outcome["yes"], outcome["proposal"]) == (protocol.OUTCOME, True, 2)
        second.send(protocol.JOB_OUTCOME, protocol.BALLOT.pack(6, INCARNATION, 0, 0, 1, 0, 0))
        assert second.receive()[0] == protocol.ERROR  # not its business


# -- end
# -----------------------------------------------------------------------------------------------------------------


def test_ends_at_once_when_all_ranks_said_bye(make: Callable[..., Node]) -> None:
    node = make()
    with node.rank(0) as first, node.rank(1) as second:
        first.send(protocol.BYE, {})
        node.settle()
        assert node.alive()
        second.send(protocol.BYE, {})
        wait_for(lambda: not node.alive())
    assert not node.directory.exists()


def test_waits_after_good_bye_where_ranks_may_be_started_again(make: Callable[..., Node]) -> None:
    node = make()
    with node.rank(0, world=1, restarts_left=1) as rank:
        rank.send(protocol.BYE, {})
    with node.rank(0, world=1, attempt=1, incarnation="99") as rank:  # a crash on the way out, and the last restart
        assert node.status()["ranks"][0]["attempt"] == 1
        rank.send(protocol.BYE, {})
    wait_for(lambda: not node.alive())


def test_waits_after_good_bye_no_longer_than_it_lingers(make: Callable[..., Node]) -> None:
    node = make(linger=20)
    with node.rank(0, world=1, restarts_left=1) as rank:
        rank.send(protocol.BYE, {})
    wait_for(lambda: not node.status()["ranks"][0]["connected"])
    node.wait_ticks(2)  # its time to linger runs
    assert node.alive()
    node.clock.advance(21)
    wait_for(lambda: not node.alive())
    assert not node.directory.exists()


def dead_rank(node: Node, rank: int, restarts_left: int = 0, launcher_ends: bool = False) -> None:
    """A rank whose process is killed; returns when the agent knows. Its launcher is this process, or one that has
    ended."""
    script = (
        "import os, sys; from reft._link import agent_protocol as p\n"
        f"p.AgentConnection(sys.argv[1], {{'role': 'rank', 'rank': {rank}, 'local_rank': {rank}, 'world': 2, "
        f"'local_world': 2, 'incarnation': '77', 'attempt': 0, 'restarts_left': {restarts_left}}})\n"
        "os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", script, str(node.socket)]
    if launcher_ends:
        command = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *command]
    subprocess.run(command, timeout=60, check=False)
    wait_for(lambda: [entry["alive"] for entry in node.status()["ranks"] if entry["rank"] == rank] == [False])


def test_waits_longer_for_ranks_that_a_living_launcher_may_start_again(make: Callable[..., Node]) -> None:
    node = make(linger=20)
    dead_rank(node, 0, restarts_left=1)
    for _ in range(2):
        node.wait_ticks(2)
        node.clock.advance(1000)
    node.wait_ticks(2)
    assert node.alive(), "what a script does before it connects may take that long"
    node.clock.advance(1700)
    wait_for(lambda: not node.alive())


def test_does_not_wait_for_a_launcher_that_has_ended(make: Callable[..., Node]) -> None:
    node = make(linger=20)
    dead_rank(node, 0, restarts_left=1, launcher_ends=True)
    node.wait_ticks(2)
    node.clock.advance(21)
    wait_for(lambda: not node.alive())


def test_lingers_for_killed_ranks_and_then_ends(make: Callable[..., Node]) -> None:
    node = make(linger=3600)
    dead_rank(node, 0)
    node.clock.advance(1800)
    node.wait_ticks(2)
    assert node.alive()
    node.clock.advance(1801)
    wait_for(lambda: not node.alive())
    assert not node.socket.exists()


def test_restarted_rank_stops_the_linger_clock(make: Callable[..., Node]) -> None:
    node = make(linger=3600)
    dead_rank(node, 0)
    with node.rank(0):
        node.clock.advance(2 * 3600)
        node.wait_ticks(2)
        assert node.alive()
        entry = node.status()["ranks"][0]
        assert entry["alive"] and entry["pid"] == os.getpid()


# -- looking in
# ----------------------------------------------------------------------------------------------------------


def test_status_and_metrics_show_every_rank(make: Callable[..., Node]) -> None:
    port = free_port()
    node = make(REFT_METRICS_PORT=str(port))
    with node.rank(0) as rank:
        data = bytearray(vault_bytes(0))
        struct.pack_into("<4Q", data, 4096, os.getpid(), INCARNATION, 0, 412)  # pid incarnation attempt steps
        struct.pack_into("<QqQ", data, 4096 + 36 * 8, 4, -500, (1 << 64) - 1)  # every overhead_ppm overhead_noise_ppm
        put(rank, 0, bytes(data))
        status = node.status()
        assert status["job"] == "demo" and status["ranks"][0]["stats"]["steps"] == 412
        with node.tool() as tool:
            text = tool.request(protocol.METRICS_REQUEST)[1]["text"]
        assert 'reft_rank_steps_total{job="demo",node="0",rank="0"} 412' in text
        assert 'reft_rank_every{job="demo",node="0",rank="0"} 4' in text
        assert 'reft_rank_overhead_ppm{job="demo",node="0",rank="0"} -500' in text
        assert "reft_rank_overhead_noise_ppm{" not in text, "not known"
        for name in {line.split("{")[0] for line in text.splitlines() if line and line[0] != "#"}:
            assert f"# TYPE {name} " in text and f"# HELP {name} " in text
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            assert b"reft_rank_alive" in answer.read()


def test_stacks_on_request_name_ranks_that_do_not_answer(make: Callable[..., Node]) -> None:
    node = make()
    with node.rank(0) as first, node.rank(1), node.tool() as tool:
        tool.send(protocol.STACKS_REQUEST, {})
        kind, request, _ = first.receive()
        assert kind == protocol.STACK_REQUEST
        reply = {"id": request["id"], "rank": 0, "pid": os.getpid(), "text": "", "error": ""}
        first.send(protocol.STACK_REPLY, reply)
        kind, report, _ = tool.receive()
        assert kind == protocol.STACKS
        assert "did not answer" in json.dumps(report)
        if (3, 11) <= sys.version_info[:2] <= (3, 13) and sys.implementation.name == "cpython":
            # Its stacks are read from its memory. It is this very process.
            assert "they were read from its memory" in report["ranks"][1]["error"]
            functions = [frame["function"] for thread in report["ranks"][1]["threads"] for frame in thread["frames"]]
            assert "test_stacks_on_request_name_ranks_that_do_not_answer" in functions
        assert not (node.directory / "verdicts").exists()


def test_hang_is_reported_once_an_episode(make: Callable[..., Node]) -> None:
    node = make(REFT_HANG_SUSPECT_SEC="1")
    with node.rank(0) as rank:
        put(rank, 0, vault_bytes(0, pending_op_age_ns=2_000_000_000))
        assert rank.receive()[0] == protocol.STACK_REQUEST
        found = wait_for(lambda: list((node.directory / "verdicts").glob("*.txt")))
        assert "all_reduce" in found[0].read_text()
        json.loads(found[0].with_suffix(".json").read_text())
        node.wait_ticks(12)  # three times what makes it suspicious
        assert len(list((node.directory / "verdicts").glob("*.txt"))) == 1
        assert node.status()["agent"]["hang_reports"] == 1
