"""Trains while a peer moves memory, forks, floods sockets, kills agents and takes away
directories, disk and memory, and checks that training does not notice.

    chaos_campaign.py [--steps 2000] [--seed N] [--only KIND …] [--vaults memory|files]
    [--json FILE]

Two ranks train `chaos_worker.py`, first under gloo, then under reft. Acts are drawn from the seed
and named by rank and step: a rank's own thread commits some of them, this process the others, when
the rank announces the step. The run under gloo has all acts but those on reft's agent, vaults and
store, so that a machine or an act that harms plain training shows there.

Passes if both runs end with the same bits, no rank died and none was started again, no agent ended
by itself, each kind of act that the machine allows has happened, reft's output has no traceback and
no assertion, and snapshots went on: an agent that is killed costs some steps, never hundreds. Needs
root for the file system that it fills and the control group that it narrows; without, these kinds
are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from reft._link import agent_protocol as protocol
from tests.fault.chaos_worker import Skipped, agent_socket
from tests.support import report
from tests.support.launchers import Torchrun, TrainJob, kill_all

WORLD = 2
FIRST_STEP = 6  # of an act: the first plan and the optimizer's state are there
LAST_STEPS = 12  # without acts but the last one
STEPS_PER_ACT = 4
DISK_BYTES = 192 << 20
STALL_SEC = 240  # without a step of any rank, a run is ended
# Memory that is freed goes back to the kernel at once, and a late reader of it gets SIGSEGV. What
# does not is overwritten.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_PERTURB_": "165"}
MOST_STEPS_WITHOUT = 300  # steps in a row without a commit; a step takes some 50 ms
ALARMING = [
    "Traceback (most recent call last)",
    "terminate called",
    "Assertion",
    "ASSERT",
    "Sanitizer",
    "runtime error",
    "Segmentation fault",
    "Fatal Python error",
    "double free",
    "free():",
    "malloc():",
    "corrupted",
]


@dataclass(frozen=True)
class Kind:
    """One kind of act.

    Attributes:
        what: for the table.
        place: see chaos_worker.py; `outside`: this process.
        of_reft: it has nothing to act on under gloo.
        hold: steps from its beginning to its end, 0 if it ends by itself.
    """

    what: str
    place: str
    of_reft: bool = False
    hold: int = 0


KINDS = {
    "data_clone": Kind("tensors get other memory by .data", "between"),
    "set_storage": Kind("tensors get other memory by set_()", "between"),
    "resize_storage": Kind("storages resized to nothing and back", "between"),
    "share_memory": Kind("tensors move into shared memory", "between"),
    "move_state": Kind("optimizer state moves between steps", "between"),
    "move_state_in_step": Kind("optimizer state moves in backward", "state"),
    "churn": Kind("tensors allocated and freed", "during"),
    "malloc": Kind("malloc pressure and malloc_trim", "during"),
    "fork_exit": Kind("a child that ends at once", "during"),
    "fork_stay": Kind("a child that holds all descriptors", "during"),
    "signals": Kind("a storm of signals", "during"),
    "descriptors": Kind("descriptors opened and closed", "during"),
    "all_descriptors": Kind("no descriptor left for two steps", "during"),
    "send_descriptors": Kind("descriptors sent to the agent", "during", of_reft=True),
    "store_garbage": Kind("foreign values in the job's store", "during", of_reft=True),
    "connect_flood": Kind("silent connections to the agent", "outside", of_reft=True),
    "frame_flood": Kind("broken and oversize frames", "outside", of_reft=True),
    "claim_flood": Kind("knocks on the agent's claim", "outside", of_reft=True),
    "stacks": Kind("stacks of all ranks requested", "outside", of_reft=True),
    "agent_kill": Kind("the agent killed", "outside", of_reft=True),
    "agent_stop": Kind("the agent stopped for a while", "outside", of_reft=True),
    "run_dir": Kind("the run directory removed", "outside", of_reft=True),
    "vault_dir": Kind("the vault files removed", "outside", of_reft=True),
    "disk_full": Kind("the file system filled", "outside", hold=3),
    "cgroup_narrow": Kind("memory limit narrowed", "outside", hold=3),
    "cgroup_tight": Kind("memory limit near the usage, at the end", "outside", hold=6),
}
TIGHT = "cgroup_tight"
TIGHT_PAUSE_SEC = 0.25  # reft looks once a second


@dataclass(frozen=True)
class Act:
    step: int
    rank: int
    kind: str
    seed: int

    @property
    def end(self) -> int:
        return self.step + KINDS[self.kind].hold


def draw(seed: int, steps: int, kinds: Iterable[str]) -> list[Act]:
    """Acts of a run: rounds of all kinds in random order, at random steps and ranks. The tight
    limit comes once and last, as snapshots may end there for good.

    Raises:
        ValueError: there are fewer steps than kinds.
    """
    rng = random.Random(seed)
    names = [name for name in kinds if name != TIGHT]
    free = range(FIRST_STEP, steps - LAST_STEPS)
    rounds = max(1, len(free) // (STEPS_PER_ACT * max(1, len(names))))
    if rounds * len(names) > len(free):
        raise ValueError(f"{steps} steps are too few for {len(names)} kinds of acts")
    order = [name for _ in range(rounds) for name in rng.sample(names, len(names))]
    places = sorted(rng.sample(free, len(order)))
    acts = [
        Act(step, rng.randrange(WORLD), name, rng.randrange(1 << 30))
        for step, name in zip(places, order, strict=True)
    ]
    if TIGHT in kinds:
        acts.append(Act(steps - LAST_STEPS + 2, rng.randrange(WORLD), TIGHT, 0))
    return acts


# -- what the machine lends


class Disk:
    """A small file system of its own, with run directory and vaults.

    Attributes:
        why_not: why it cannot be filled; "": it can.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        options = f"size={DISK_BYTES},mode=700"
        command = ["mount", "-t", "tmpfs", "-o", options, "reft-chaos", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
            self.why_not = "" if done.returncode == 0 else f"no tmpfs: {done.stderr.strip()}"
        except OSError as error:
            self.why_not = f"no tmpfs: {error}"

    def fill(self) -> None:
        if self.why_not:
            raise Skipped(self.why_not)
        with (self.path / "filler").open("ab", buffering=0) as file:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
        if os.statvfs(self.path).f_bavail:
            raise RuntimeError("the file system is not full")

    def free(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        if not self.why_not:
            subprocess.run(["umount", "-l", self.path], check=False)


class Version(NamedTuple):
    """The names that one version of control groups has for the same things."""

    folder: str
    usage: str
    cache: str
    limits: tuple[str, ...]
    unlimited: str


VERSIONS = (
    Version(
        "memory/",
        "memory.usage_in_bytes",
        "total_inactive_file",
        ("memory.limit_in_bytes",),
        "-1",
    ),
    Version("", "memory.current", "inactive_file", ("memory.high", "memory.max"), "max"),
)


class Group:
    """A control group for the job's memory, of either version.

    Attributes:
        why_not: why there cannot be one; "" if there is one.
    """

    def __init__(self, name: str) -> None:
        self.why_not = "no control group with a memory limit can be made"
        for version in VERSIONS:
            self._files, self.path = version, Path(f"/sys/fs/cgroup/{version.folder}{name}")
            with contextlib.suppress(OSError):
                self.path.mkdir()
                if all((self.path / limit).exists() for limit in version.limits):
                    self.why_not = ""
                    return
                self.path.rmdir()

    def add(self, pid: int) -> None:
        if not self.why_not:
            (self.path / "cgroup.procs").write_text(str(pid))

    def narrow(self, share: float, least: int) -> None:
        """Leaves so much of what is in use, and the page cache that can go goes."""
        if self.why_not:
            raise Skipped(self.why_not)
        for _ in range(20):
            rows = (self.path / "memory.stat").read_text().splitlines()
            cache = int(dict(row.split() for row in rows)[self._files.cache])
            used = int((self.path / self._files.usage).read_text()) - cache
            with contextlib.suppress(OSError):  # what cannot be freed at once
                for limit in self._files.limits:
                    (self.path / limit).write_text(str(used + max(least, int(share * used))))
                return
            time.sleep(0.02)
        raise RuntimeError("the limit cannot be set")

    def widen(self) -> None:
        for limit in self._files.limits:
            with contextlib.suppress(OSError):
                (self.path / limit).write_text(self._files.unlimited)

    def oom_kills(self) -> int:
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                found = re.search(r"^oom_kill (\d+)$", (self.path / name).read_text(), re.M)
                if found:
                    return int(found[1])
        return 0

    def close(self) -> None:
        deadline = time.monotonic() + 10
        while not self.why_not and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.05)


# -- acts of this process


class Outside:
    """Commits acts when ranks announce their steps.

    Attributes:
        record: what happened, as the ranks' own records have it.
        lost: agents that served the job and ended without being killed here.
    """

    def __init__(
        self, acts: list[Act], job: TrainJob, disk: Disk, group: Group, vaults: Path | None
    ) -> None:
        self.job, self.disk, self.group, self.vaults = job, disk, group, vaults
        self.record: list[dict[str, Any]] = []
        self.lost: set[int] = set()
        self._begins = {(a.rank, a.step): a for a in acts if KINDS[a.kind].place == "outside"}
        self._ends = {(a.rank, a.end): a for a in self._begins.values() if KINDS[a.kind].hold}
        self._lock = threading.Lock()
        self._serving: set[int] = set()
        self._killed: set[int] = set()
        self._held: dict[str, list[socket.socket]] = {}
        self._threads: list[threading.Thread] = []
        self._logs: dict[str, str] = {}  # of agents, by their first line
        self._listener = socket.socket(socket.AF_UNIX)
        self.path = job.out / "steps.sock"
        self._listener.bind(str(self.path))
        self._listener.listen()
        for _ in range(WORLD):
            threading.Thread(target=self._serve, daemon=True).start()

    @property
    def announced(self) -> list[tuple[int, int]]:
        return sorted({*self._begins, *self._ends})

    def close(self) -> None:
        self._listener.close()
        for thread in self._threads:
            thread.join(30)
        for pid in self.job.agents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for peers in self._held.values():
            for peer in peers:
                peer.close()
        self.disk.free()
        self.group.widen()

    def look(self) -> None:
        """Keeps what agents have logged, and which of them has the place now."""
        found_now: list[tuple[Path, str]] = []
        with contextlib.suppress(OSError):  # the directory may go meanwhile
            for path in self.job.run.glob("*/node-*/agent.l*"):
                found_now.append((path, path.read_text(errors="replace")))
        for path, text in found_now:
            with self._lock:
                if path.name == "agent.lock" and (found := re.match(r"fence \d+ pid (\d+)", text)):
                    self._serving.add(int(found[1]))
                elif ".log" in path.name:
                    self._logs[text.partition("\n")[0]] = text

    def look_for_lost(self) -> None:
        """While the job runs, so that all agents should."""
        with self._lock:
            for pid in self._serving - self._killed:
                if not Path(f"/proc/{pid}/exe").exists():
                    self.lost.add(pid)

    @property
    def logs(self) -> str:
        return "\n".join(self._logs.values())

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            with connection, connection.makefile("r") as lines:
                for line in lines:
                    rank, step = map(int, line.split())
                    self._reached(rank, step, lambda: connection.sendall(b"."))

    def _reached(self, rank: int, step: int, go_on: Callable[[], None]) -> None:
        self.look()
        if (act := self._ends.get((rank, step))) is not None:
            getattr(self, f"end_{act.kind}")()
        act = self._begins.get((rank, step))
        if act is None:
            go_on()
        elif KINDS[act.kind].hold:  # in force when the next step begins
            self._commit(act)
            go_on()
        else:
            go_on()
            thread = threading.Thread(target=self._commit, args=(act,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _commit(self, act: Act) -> None:
        try:
            getattr(self, act.kind)(random.Random(act.seed))
            result = "done"
        except Skipped as error:
            result = f"skipped: {error}"
        except Exception as error:
            result = f"failed: {type(error).__name__}: {error}"
        with self._lock:
            self.record.append(
                {"rank": act.rank, "step": act.step, "kind": act.kind, "result": result}
            )

    def _socket(self) -> Path:
        return agent_socket(self.job.run, self.job.job, 10)

    def _agents(self) -> list[int]:
        self._socket()
        if not (pids := self.job.agents):
            raise Skipped("no agent ran")
        return pids

    def agent_kill(self, rng: random.Random) -> None:
        pids = self._agents()
        self.look()
        with self._lock:
            self._killed.update(pids)
        if not kill_all(pids):
            raise Skipped("the agent was gone")

    def agent_stop(self, rng: random.Random) -> None:
        pids = self._agents()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(rng.uniform(0.1, 1.2))

    def run_dir(self, rng: random.Random) -> None:
        self._socket()
        self.look()
        shutil.rmtree(self.job.run, ignore_errors=True)

    def vault_dir(self, rng: random.Random) -> None:
        if self.vaults is None:
            raise Skipped("vaults are in memory")
        shutil.rmtree(self.vaults / self.job.job, ignore_errors=True)

    def disk_full(self, rng: random.Random) -> None:
        self.disk.fill()

    def end_disk_full(self) -> None:
        self.disk.free()

    def cgroup_narrow(self, rng: random.Random) -> None:
        self.group.narrow(rng.uniform(0.2, 0.4), 64 << 20)

    def cgroup_tight(self, rng: random.Random) -> None:
        self.group.narrow(0.015, 1 << 20)

    def end_cgroup_narrow(self) -> None:
        self.group.widen()

    end_cgroup_tight = end_cgroup_narrow

    def _hold(self, kind: str, address: Path | bytes, count: int) -> list[socket.socket]:
        """Connections that stay until the next flood of this kind.

        Raises:
            Skipped: none could be made.
        """
        peers: list[socket.socket] = []
        for _ in range(count):
            peer = socket.socket(socket.AF_UNIX)
            peer.settimeout(0.5)
            try:
                peer.connect(address if isinstance(address, bytes) else str(address))
            except OSError:  # the agent is stopped or gone
                peer.close()
                break
            peers.append(peer)
        with self._lock:
            before, self._held[kind] = self._held.get(kind, []), peers
        for peer in before:
            peer.close()
        if not peers:
            raise Skipped("the agent took no connection")
        return peers

    def connect_flood(self, rng: random.Random) -> None:
        self._hold("connect_flood", self._socket(), rng.randrange(100, 200))

    def frame_flood(self, rng: random.Random) -> None:
        head, magic, version = protocol.HEADER, protocol.MAGIC, protocol.VERSION
        frames = [
            b"RF",
            head.pack(magic, version, protocol.HELLO, 400, 0) + b"{",
            head.pack(magic, version, protocol.HELLO, (1 << 32) - 1, 0) + bytes(1 << 16),
            head.pack(magic, version, protocol.HELLO, 60 << 20, 0) + bytes(1 << 20),
            head.pack(magic, version + 1, protocol.HELLO, 2, 0) + b"{}",
            head.pack(magic, version, protocol.VOTE, 40, 0) + bytes(40),
            head.pack(magic, version, protocol.HELLO, 200, 0) + b"[" * 200,
            b"GET / HTTP/1.1\r\n\r\n",
            rng.randbytes(4096),
        ]
        for peer in self._hold("frame_flood", self._socket(), 60):
            with contextlib.suppress(OSError):  # refused
                peer.sendall(rng.choice(frames))
        # A tool that asks and does not read.
        request = head.pack(magic, version, protocol.STATUS_REQUEST, 2, 0) + b"{}"
        with contextlib.suppress(OSError, ValueError):
            with protocol.AgentConnection(self._socket(), timeout_sec=2) as tool:
                tool._socket.settimeout(0.2)
                for _ in range(50):
                    tool._socket.sendall(request * 500)

    def claim_flood(self, rng: random.Random) -> None:
        for pid in self._agents():
            if claim := claim_of(pid):
                self._hold("claim_flood", claim, 60)
                return
        raise Skipped("the agent has no claim now")

    def stacks(self, rng: random.Random) -> None:
        asked = False
        with contextlib.suppress(OSError, ValueError):  # the agent may be killed meanwhile
            with protocol.AgentConnection(self._socket(), timeout_sec=10) as tool:
                asked = True
                tool.request(protocol.STACKS_REQUEST, {})
                tool.request(
                    protocol.STACKS_REQUEST, {"ranks": [rng.randrange(WORLD)], "native": True}
                )
        if not asked:
            raise Skipped("the agent did not answer")


def claim_of(pid: int) -> bytes:
    """The abstract address of this agent's claim; empty if it has none."""
    own = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                own.add(os.readlink(link))
    for line in Path("/proc/net/unix").read_text().splitlines():
        *_, inode, path = line.split()
        if path.startswith("@reft-agent-") and f"socket:[{inode}]" in own:
            return b"\0" + path[1:].encode()
    return b""


# -- runs and their judge


@dataclass
class Run:
    """What is left of one run.

    Attributes:
        code: exit status of the launcher; None if it hung and was ended.
        finals: hash of parameters, optimizer state and losses, of each rank that came to its end.
        attempts: how often the launcher started the ranks.
        record: acts, as ranks and this process recorded them.
        lost: agents that ended by themselves.
        status: of snapshots, by rank.
    """

    code: int | None = 0
    finals: dict[int, str] = field(default_factory=dict)
    attempts: int = 1
    record: list[dict[str, Any]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    status: dict[int, dict[str, Any]] = field(default_factory=dict)
    said: str = ""
    agents_said: str = ""
    sec: float = 0.0
    oom_kills: int = 0

    @property
    def deaths(self) -> int:
        """Ranks that did not come to their end, and starts after the first."""
        return WORLD - len(self.finals) + WORLD * (self.attempts - 1)

    def count(self, kind: str) -> Counter[str]:
        """How many acts of a kind were done, skipped, failed."""
        results = (entry["result"] for entry in self.record if entry["kind"] == kind)
        return Counter(result.partition(":")[0] for result in results)


def same_bits(one: Run, other: Run) -> bool:
    return len(one.finals) == WORLD and one.finals == other.finals


def problems(gloo: Run, reft: Run, kinds: Iterable[str], impossible: Iterable[str]) -> list[str]:
    """Why a campaign fails; none if it passes.

    Args:
        kinds: those that were drawn.
        impossible: those of them that this machine, or this run, does not allow.
    """
    found = []
    for name, run in (("gloo", gloo), ("reft", reft)):
        if run.code is None:
            found.append(f"{name}: hung, ended after {run.sec:.0f} s")
        elif run.code != 0:
            found.append(f"{name}: exit status {run.code}")
        if run.deaths:
            found.append(f"{name}: {run.deaths} deaths, {run.attempts} attempts")
        if run.oom_kills:
            found.append(f"{name}: the kernel's OOM killer ended {run.oom_kills} processes")
        found += [
            f"{name}: rank {entry['rank']} step {entry['step']} {entry['kind']} {entry['result']}"
            for entry in run.record
            if entry["result"].startswith("failed")
        ]
    if not same_bits(gloo, reft):
        found.append("the results differ")
    if reft.lost:
        found.append(f"agents that ended by themselves: {sorted(reft.lost)}")
    for where, text in (("the job", reft.said), ("an agent", reft.agents_said)):
        found += [f"{where} printed {words!r}" for words in ALARMING if words in text]
    found += [
        f"rank {rank}: {gap} steps without a commit"
        for rank, status in sorted(reft.status.items())
        if (gap := status.get("longest_gap", 0)) > MOST_STEPS_WITHOUT
    ]
    missing = [k for k in kinds if k not in set(impossible) and not reft.count(k)["done"]]
    if missing:
        found.append(f"never happened: {' '.join(missing)}")
    return found


def read_run(job: TrainJob, out: Path) -> Run:
    """What the files of a job that is over say."""
    run = Run(said=job.said)
    run.attempts = 1 + max((int(p.stem.split(".a")[1]) for p in out.glob("r*.a*.pid")), default=0)
    for rank in range(WORLD):
        with contextlib.suppress(OSError):
            run.finals[rank] = (out / f"r{rank}.final").read_text()
        with contextlib.suppress(OSError):
            run.status[rank] = json.loads((out / f"r{rank}.status").read_text())
        with contextlib.suppress(OSError):
            lines = (out / f"r{rank}.acts").read_text().splitlines()
            run.record += [json.loads(line) for line in lines]
    return run


class Campaign:
    def __init__(self, scratch: Path, files: bool) -> None:
        self.scratch, self.files = scratch, files
        self.disk = Disk(scratch / "disk")
        self.group = Group(f"reft-chaos-{os.getpid()}")

    def close(self) -> None:
        self.group.close()
        self.disk.close()

    @property
    def impossible(self) -> dict[str, str]:
        """Kinds that cannot happen here, and why."""
        why = {"disk_full": self.disk.why_not}
        why["vault_dir"] = "" if self.files else "vaults are in memory"
        why |= dict.fromkeys(("cgroup_narrow", TIGHT), self.group.why_not)
        return {kind: reason for kind, reason in why.items() if reason}

    def run(self, backend: str, acts: list[Act], steps: int) -> Run:
        out = self.scratch / backend
        out.mkdir()
        vaults = self.disk.path / "vaults" if self.files else None
        env = MALLOC | {
            "REFT_SNAPSHOT_ALARM_SEC": "10",
            "REFT_SNAPSHOT_CHUNK_BYTES": "64K",
            "REFT_AGENT_LINGER_SEC": "20",
        }
        if vaults is not None:
            vaults.mkdir(exist_ok=True)
            env["REFT_VAULT_DIR"] = str(vaults)
        folder, name = self.disk.path / backend, f"chaos-{os.getpid()}"
        job = TrainJob(Torchrun(), folder, name, WORLD, 0, out, "chaos_worker.py")
        mine = [a for a in acts if backend == "reft" or not KINDS[a.kind].of_reft]
        outside = Outside(mine, job, self.disk, self.group, vaults)
        tight = [a.step for a in mine if a.kind == TIGHT]
        plan = {
            "acts": [asdict(a) | {"place": KINDS[a.kind].place} for a in mine],
            "announce": outside.announced,
            "pauses": [(s + i, TIGHT_PAUSE_SEC) for s in tight for i in range(KINDS[TIGHT].hold)],
            "socket": str(outside.path),
        }
        (out / "plan.json").write_text(json.dumps(plan))
        began = time.monotonic()
        try:
            words = ["--steps", str(steps), "--plan", str(out / "plan.json")]
            job.start(*words, backend=backend, **env)
            self.group.add(job.launcher.pid)
            code = self._until_end(job, outside, out)
        finally:
            outside.close()
            job.end()
        run = read_run(job, out)
        run.code, run.sec = code, time.monotonic() - began
        run.record = sorted(run.record + outside.record, key=lambda entry: entry["step"])
        run.lost, run.agents_said = outside.lost, outside.logs
        run.oom_kills = self.group.oom_kills()
        return run

    @staticmethod
    def _until_end(job: TrainJob, outside: Outside, out: Path) -> int | None:
        """Exit status; None if the job made no progress for too long."""
        known, moved_at = 0, time.monotonic()
        while job.launcher.poll() is None:
            outside.look()
            if len(list(out.glob("r*.final"))) < WORLD:
                outside.look_for_lost()
            if (now := sum(path.stat().st_size for path in out.glob("r*.log"))) != known:
                known, moved_at = now, time.monotonic()
            elif time.monotonic() > moved_at + STALL_SEC:
                return None
            time.sleep(0.1)
        return job.wait(1)


def table(run: Run, kinds: Iterable[str], impossible: dict[str, str]) -> list[str]:
    lines = [f"{'kind':20} {'times':>5}  result"]
    for kind in kinds:
        counts = run.count(kind)
        words = [impossible[kind]] if kind in impossible else []
        words += [f"{counts[name]} {name}" for name in ("skipped", "failed") if counts[name]]
        result = "not possible: " if kind in impossible else "ok" if not words else ""
        result += ", ".join(words)
        lines.append(f"{kind:20} {counts['done']:5}  {result} ({KINDS[kind].what})")
    return lines


def warnings(said: str) -> list[str]:
    """What reft warned of, each sentence once, with the names and numbers of its first time."""
    first: dict[str, str] = {}
    times = Counter[str]()
    for line in said.splitlines():
        if re.match(r"reft(\.\w+)?[: ]", line) and re.search(r"warn|error|UNPROTECTED|NOT ", line):
            key = re.sub(r"\S*[.\d]\S+", "#", line)
            first.setdefault(key, line[:300])
            times[key] += 1
    return [f"{times[key]:4} x {line}" for key, line in first.items()]


def show(gloo: Run, reft: Run, kinds: list[str], impossible: dict[str, str], steps: int) -> None:
    print("\n".join(table(reft, kinds, impossible)))
    print(f"bit-equal to gloo: {'yes' if same_bits(gloo, reft) else 'no'}")
    print(f"deaths: {reft.deaths}")
    print(f"attempts: {reft.attempts}")
    print(f"agents that ended by themselves: {len(reft.lost)}")
    for rank, status in sorted(reft.status.items()):
        print(
            f"snapshots of rank {rank}: {status.get('seen', 0)} commits seen in {steps} steps,"
            f" {status.get('longest_gap', 0)} steps without one at most, newest"
            f" {status.get('final', -1)}; dropped {status.get('dropped', 0)}, skipped"
            f" {status.get('skipped', 0)}, errors {status.get('errors', 0)}"
        )
    for line in warnings(reft.said):
        print(f"reft said {line}")
    print(f"gloo {gloo.sec:.0f} s, reft {reft.sec:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), metavar="KIND")
    parser.add_argument("--vaults", choices=["memory", "files"], default="memory")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    kinds = args.only or list(KINDS)
    scratch = Path(tempfile.mkdtemp(prefix="reft-chaos-"))
    campaign = Campaign(scratch, args.vaults == "files")
    impossible = {k: why for k, why in campaign.impossible.items() if k in kinds}
    acts = draw(args.seed, args.steps, [kind for kind in kinds if kind not in impossible])
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was lent goes back
    try:
        gloo = campaign.run("gloo", acts, args.steps)
        reft = campaign.run("reft", acts, args.steps)
    finally:
        campaign.close()
    found = problems(gloo, reft, kinds, impossible)
    show(gloo, reft, kinds, impossible, args.steps)
    for problem in found:
        print(f"FAILED: {problem}")
    if found:
        (scratch / "agents.log").write_text(reft.agents_said)
        print(f"files: {scratch}; again: tools/dev fault chaos {' '.join(sys.argv[1:])}")
    else:
        shutil.rmtree(scratch, ignore_errors=True)
    done = sum(reft.count(kind)["done"] for kind in kinds)
    seen = min((status.get("seen", 0) for status in reft.status.values()), default=0)
    metrics = {
        "acts": report.metric(done, "acts"),
        "deaths": report.metric(reft.deaths, "ranks", None, "0", reft.deaths == 0),
        "bit_equal": report.metric(same_bits(gloo, reft), "", None, "True", same_bits(gloo, reft)),
        "agents_lost": report.metric(len(reft.lost), "agents", None, "0", not reft.lost),
        "commits_seen": report.metric(seen, "steps"),
        "duration_sec": report.metric(time.monotonic() - began, "s"),
    }
    report.write(
        args.json,
        "fault chaos",
        metrics,
        run=len(acts),
        failed=len(found),
        skipped=len(acts) - done,
        notes=[f"seed {args.seed}", f"vaults in {args.vaults}", *found],
        more={"kinds": {k: reft.count(k)["done"] for k in kinds}, "impossible": impossible},
        quiet=True,
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
