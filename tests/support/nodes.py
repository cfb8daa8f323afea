"""Nodes of a job on one machine: each with a launcher, a network and a host name of its own.

With namespaces (root is needed), the nodes' networks are joined by a bridge in a namespace of its
own, so this machine's network is left alone. Without, all nodes share it and differ in their
launchers.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tests.support.launchers import agent_pids, kill_all

HERE = Path(__file__).resolve().parent
_PREFIX = 24


def why_no_namespaces() -> str:
    """Why network namespaces cannot be made here; "" if they can."""
    missing = [program for program in ("ip", "unshare") if shutil.which(program) is None]
    if missing:
        return f"network namespaces need {' and '.join(missing)} (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"reft-try-{os.getpid()}"
    tries = [["ip", "netns", "add", name], ["ip", "-n", name, "link", "add", "name", "bridge0", "type", "bridge"],
             ["ip", "-n", name, "link", "add", "name", "a0", "type", "veth", "peer", "name", "z0"],
             ["unshare", "--uts", "true"]]  # fmt: skip
    try:
        for words in tries:
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                return f"network namespaces cannot be made: {' '.join(words)}: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


class Network:
    """Addresses of nodes, with namespaces or without.

    Attributes:
        isolated: whether nodes have namespaces.
    """

    def __init__(self, nodes: int, isolated: bool) -> None:
        self.isolated = isolated
        self._name, self._made = f"reft-{os.getpid()}", [False] * nodes
        if not isolated:
            return
        try:
            _ip("netns", "add", f"{self._name}-sw")
            self._switch("link", "add", "name", "bridge0", "type", "bridge")
            self._switch("link", "set", "dev", "bridge0", "up")
            for node in range(nodes):
                self.plug(node)
        except Exception:
            self.close()
            raise

    def address(self, node: int) -> str:
        return f"10.231.7.{node + 1}" if self.isolated else f"127.0.0.{node + 1}"

    def namespace(self, node: int) -> str:
        """Its path; "" without namespaces."""
        return f"/run/netns/{self._name}-n{node}" if self.isolated else ""

    def plug(self, node: int) -> None:
        """Gives a node a new network."""
        name, port = f"{self._name}-n{node}", f"n{node}"
        _ip("netns", "add", name)
        self._made[node] = True
        _ip("-n", name, "link", "add", "name", "eth0", "type", "veth", "peer", "name", port,
            "netns", f"{self._name}-sw")  # fmt: skip
        self._switch("link", "set", "dev", port, "master", "bridge0", "up")
        _ip("-n", name, "addr", "add", f"{self.address(node)}/{_PREFIX}", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", name, "link", "set", "dev", link, "up")

    def cut(self, node: int, down: bool) -> None:
        """Takes the cable out of a node, or puts it back."""
        self._switch("link", "set", "dev", f"n{node}", "down" if down else "up")

    def part(self, *nodes: int) -> None:
        """Lets nothing pass between any two of these nodes, and hears nothing of it: what they send
        each other is dropped."""
        for node in nodes:
            self._switch("link", "set", "dev", f"n{node}", "type", "bridge_slave", "isolated", "on")

    def unplug_cable(self, node: int) -> None:
        """Takes a node's cable out for good."""
        self._switch("link", "del", "dev", f"n{node}")

    def replace(self, node: int) -> None:
        """A new network, of the same address, for a node on which nothing runs any more. What its
        connections would still have said is never sent."""
        _ip("netns", "del", f"{self._name}-n{node}")
        self._made[node] = False
        self.plug(node)

    def processes(self, node: int) -> list[int]:
        """All that are in a node's namespace."""
        wanted, found = os.stat(self.namespace(node)).st_ino, []
        for entry in Path("/proc").glob("[0-9]*/ns/net"):
            with contextlib.suppress(OSError):
                if entry.stat().st_ino == wanted:
                    found.append(int(entry.parts[2]))
        return found

    def _switch(self, *words: str) -> None:
        _ip("-n", f"{self._name}-sw", *words)

    def close(self) -> None:
        for node, made in enumerate(self._made):
            if made:
                subprocess.run(["ip", "netns", "del", f"{self._name}-n{node}"], capture_output=True)
        if self.isolated:
            subprocess.run(["ip", "netns", "del", f"{self._name}-sw"], capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Server:
    """`forknodes.py`: starts launchers that need not import torch."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["env", "-u", "PYTHONUNBUFFERED", sys.executable, str(HERE / "forknodes.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("forknodes ended")
        return dict(json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class NodesJob:
    """One job: a launcher for each node.

    Args:
        script: and its arguments.
        env: of all nodes. Each has a REFT_RUN_DIR of its own besides.
        fewest: nodes with which it goes on without the others; by default, all.
    """

    def __init__(
        self,
        server: Server,
        network: Network,
        folder: Path,
        script: list[str],
        env: dict[str, str],
        nodes: int,
        local_ranks: int,
        port: int,
        max_restarts: int,
        fewest: int | None = None,
    ) -> None:
        self._server, self.network, self.folder, self._script = server, network, folder, script
        self._env, self.nodes, self.local_ranks = env, nodes, local_ranks
        self._port, self._max_restarts = port, max_restarts
        self._fewest = fewest or nodes
        self._launchers: list[int] = [0] * nodes
        self.codes: list[int | None] = [None] * nodes
        self._moves = [0] * nodes
        self._round = self._host = 0

    def start(self, without: Collection[int] = ()) -> None:
        """Starts all launchers, or all but some; again, if they have ended. The first has the
        store."""
        self._round += 1
        started = [node for node in range(self.nodes) if node not in without]
        self._host = started[0]
        for node in started:
            self.start_node(node)

    def start_node(self, node: int) -> None:
        """Starts the launcher of a node."""
        network = self.network
        self.codes[node] = None
        options = [f"--nnodes={self._fewest}:{self.nodes}", f"--nproc-per-node={self.local_ranks}",
                   f"--max-restarts={self._max_restarts}", "--monitor-interval=0.1",
                   f"--local-addr={network.address(node)}", "--rdzv-backend=c10d",
                   f"--rdzv-endpoint={network.address(self._host)}:{self._port + self._round}",
                   f"--rdzv-id={self._env['REFT_JOB_ID']}",
                   f"--rdzv-conf=is_host={int(node == self._host)},join_timeout=60,last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=4",
                   ]  # fmt: skip
        env = self._env | {"REFT_RUN_DIR": str(self.run_dir(node))}
        env["GLOO_SOCKET_IFNAME"] = "eth0" if network.isolated else "lo"
        self._launchers[node] = self._server.ask(
            run=[*options, *self._script], env=env, log=str(self.log(node)),
            netns=network.namespace(node), host=f"node{node}" if network.isolated else "",
        )["pid"]  # fmt: skip

    def run_dir(self, node: int) -> Path:
        return self.folder / f"run{node}{'-moved' * self._moves[node]}"

    def log(self, node: int) -> Path:
        return self.folder / f"node{node}.log"

    @property
    def said(self) -> str:
        """All that the nodes have said, one after the other."""
        logs = [self.log(node) for node in range(self.nodes)]
        return "\n".join(log.read_text(errors="replace") for log in logs if log.exists())

    def poll(self) -> bool:
        """Whether all launchers have ended; `codes` has their exit status."""
        for node, pid in enumerate(self._launchers):
            if self.codes[node] is None and state_of(pid) == "Z":
                self._reap(node)
        return all(code is not None for code in self.codes)

    def _reap(self, node: int) -> None:
        self.codes[node] = int(self._server.ask(reap=self._launchers[node])["exit"])

    def rank_pids(self, node: int) -> list[int]:
        """Ranks that a node's launcher has adopted."""
        found = children(self._launchers[node])
        return [pid for pid in found if not is_agent(pid) and not is_helper(pid)]

    def kill_ranks(self, node: int) -> int:
        return kill_all(self.rank_pids(node))

    def kill_agent(self, node: int) -> int:
        return kill_all(agent_pids(self.run_dir(node)))

    def kill_node(self, node: int, launcher: bool = False) -> int:
        """All that runs on a node, but not its launcher unless that is wanted."""
        kept = set() if launcher else self._kept(node)
        if self.network.isolated:
            found = self.network.processes(node)
        else:
            found = [*self.rank_pids(node), *agent_pids(self.run_dir(node)), *self._kept(node)]
        count = kill_all([pid for pid in found if pid not in kept])
        if launcher and self.codes[node] is None:
            self._reap(node)
        return count

    def leave(self, node: int) -> None:
        """Ends what runs on a node but its agent."""
        kill_all([*self.rank_pids(node), *self._kept(node)])
        if self.codes[node] is None:
            self._reap(node)

    def move(self, node: int) -> None:
        """As `leave`; what is started there next does not know the agent."""
        self.leave(node)
        self._moves[node] += 1

    def _kept(self, node: int) -> set[int]:
        """A launcher and the helper with which it starts ranks."""
        launcher = self._launchers[node]
        return {launcher, *filter(is_helper, children(launcher))}

    def end(self) -> None:
        """Whatever is left."""
        for node in range(self.nodes):
            if self._launchers[node]:
                self.kill_node(node, launcher=True)


def children(pid: int) -> list[int]:
    """Child processes."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(entry.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(entry.parts[2]))
    return found


def is_helper(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip() == "node-helper"
    return False


def is_agent(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"reft-agent" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    return False


def state_of(pid: int) -> str:
    """Letter of a process's state; Z for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return "Z"


@contextlib.contextmanager
def network_of(nodes: int, isolated: bool) -> Iterator[Network]:
    """A network that is gone at the end, also after SIGTERM."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    network = Network(nodes, isolated)
    try:
        yield network
    finally:
        network.close()
        signal.signal(signal.SIGTERM, before)


def wait_for(happened: Any, seconds: float, step: float = 0.005) -> bool:
    """Whether something happens in time."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(step)
    return True
