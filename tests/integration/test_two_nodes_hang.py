"""A hang of a job over two nodes, both on this machine: the first node's agent gathers what all
know, and names who it is.

What the agents do when the other side does not go along is in test_agent_nodes.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reft._link import agent_protocol as protocol
from tests.support.launchers import (
    agent_pids,
    free_port,
    job_environment,
    kill_all,
    node_launchers,
    rank_pids,
)

torch = pytest.importorskip("torch")
pytest.importorskip("reft._C", reason="needs the native module")

ROOT = Path(__file__).resolve().parents[2]


WORKER = Path(__file__).with_name("two_nodes_worker.py")
SUSPECT_SEC = 3
CULPRIT_LINE = next(n for n, line in enumerate(WORKER.read_text().splitlines(), 1) if "the culprit's line" in line)

pytestmark = pytest.mark.slow


class Job:
    """Two launchers and what they start."""

    def __init__(self, root: Path, *arguments: str, ranks: int = 2) -> None:
        self.root, self.id = root, f"hang-{free_port()}"
        self.out = root / "out"
        self.out.mkdir()
        self.outputs = [root / f"node{node}.txt" for node in (0, 1)]
        environment = job_environment(
            root, REFT_JOB_ID=self.id, REFT_HANG_SUSPECT_SEC=str(SUSPECT_SEC), OMP_NUM_THREADS="1"
        )
        arguments = ("--out", str(self.out), *arguments)
        self.launchers = node_launchers(
            WORKER, *arguments, ranks=ranks, job=self.id, env=environment, outputs=self.outputs
        )

    def pid(self, rank: int) -> int:
        return int((self.out / f"pid.{rank}").read_text())

    def until_reached(self, rank: int) -> None:
        self._until(lambda: (self.out / f"reached.{rank}").exists(), f"rank {rank} did not come to its fault")

    def folder(self, node: int) -> Path:
        return self.root / "run" / self.id / f"node-{node}"

    def verdicts(self, node: int) -> list[dict[str, Any]]:
        """Oldest first. The text of each is written after its JSON."""
        texts = sorted((self.folder(node) / "verdicts").glob("*.txt"))
        return [json.loads(path.with_suffix(".json").read_bytes()) for path in texts]

    def verdict(self, node: int = 0, named: bool = True) -> dict[str, Any]:
        """The first that names somebody; else the first. (On a machine with much to do, a node may be too late for one look.)"""

        def found() -> list[dict[str, Any]]:
            return [verdict for verdict in self.verdicts(node) if verdict["culprits"] or not named]

        self._until(lambda: bool(found()), "no verdict")
        return found()[0]

    def until_ticks(self, node: int, count: int) -> None:
        """Returns when the timer of the node's agent has run so many times more (four times a second)."""

        def ticks() -> int:
            with protocol.AgentConnection(self.folder(node) / "agent.sock", timeout_sec=30) as tool:
                return int(tool.request(protocol.STATUS_REQUEST)[1]["agent"]["ticks"])

        end = ticks() + count
        self._until(lambda: ticks() >= end, f"the agent of node {node} stands still")

    def _until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + 180
        while not condition():
            over = [launcher.poll() for launcher in self.launchers]
            assert time.monotonic() < deadline and over == [None, None], f"{what}; launchers {over}\n{self.said}"
            time.sleep(0.05)

    @property
    def said(self) -> str:
        logs = [*self.outputs, *(self.folder(node) / "agent.log" for node in (0, 1))]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-6000:]}" for path in logs if path.exists())

    def end(self) -> None:
        kill_all([launcher.pid for launcher in self.launchers])
        kill_all(rank_pids(self.id) + agent_pids(self.root / "run"))
        for launcher in self.launchers:
            launcher.wait()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.end()


def agent_of(job: Job, node: int) -> int:
    (pid,) = [
        pid
        for pid in agent_pids(job.root / "run")
        if b"--node\0%d\0" % node in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


def test_a_rank_of_the_other_node_that_sleeps_is_named_with_host_pid_and_line(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(tmp_path, "--steps", "100000", "--fault", "sleep", "--rank", "3"))
    job.until_reached(3)
    verdict = job.verdict()
    (culprit,) = verdict["culprits"]
    assert (culprit["rank"], culprit["pid"], culprit["host"]) == (3, job.pid(3), socket.gethostname()), job.said
    assert Path(culprit["frame"]["file"]).name == WORKER.name and culprit["frame"]["line"] == CULPRIT_LINE
    assert verdict["state"] == "hang" and verdict["victims"] == [0, 1, 2]
    assert [entry["node"] for entry in verdict["ranks"]] == [0, 0, 1, 1] and verdict["silent_nodes"] == []
    # Without the first agent's announcements the other one would investigate within this time.
    job.until_ticks(1, 4 * 2 * SUSPECT_SEC)
    assert not job.verdicts(1) and len(job.verdicts(0)) == 1, job.said


def test_a_stopped_first_rank_of_the_other_node_is_named(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(tmp_path, "--steps", "100000"))
    job.until_reached(2)
    os.kill(job.pid(2), signal.SIGSTOP)
    verdict = job.verdict()
    assert [(c["rank"], c["pid"], c["reason"]) for c in verdict["culprits"]] == [(2, job.pid(2), "stopped")], job.said
    assert verdict["class"] == "stopped" and f"kill -CONT {job.pid(2)}, on " in verdict["advice"]


def test_another_collective_on_the_other_node_is_named(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(tmp_path, "--steps", "100000", "--fault", "barrier", "--rank", "3"))
    verdict = job.verdict()
    assert [culprit["rank"] for culprit in verdict["culprits"]] == [3], job.said
    assert verdict["class"] == "op_mismatch"
    assert verdict["disagreements"][0]["minority"] == [3]


def test_a_node_of_which_nothing_answers_is_listed_and_nobody_named(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(tmp_path, "--steps", "100000"))
    for rank in (2, 3):
        job.until_reached(rank)
    for pid in (agent_of(job, 1), job.pid(2), job.pid(3)):
        os.kill(pid, signal.SIGSTOP)
    verdict = job.verdict(named=False)
    assert verdict["silent_nodes"] == [1], job.said
    assert verdict["confidence"] == "undecidable" and verdict["culprits"] == [] and verdict["candidates"] == []
    assert "node 1 does not answer" in verdict["screen"] and "check node 1" in verdict["screen"]


def test_the_first_node_looks_when_its_own_rank_is_waited_for(tmp_path: Path, jobs: list[Job]) -> None:
    """Its agent sees nobody wait, so the other asks it to."""
    jobs.append(job := Job(tmp_path, "--steps", "100000", "--fault", "sleep", "--rank", "0", ranks=1))
    verdict = job.verdict()
    assert [(c["rank"], c["pid"]) for c in verdict["culprits"]] == [(0, job.pid(0))], job.said
    assert verdict["culprits"][0]["frame"]["line"] == CULPRIT_LINE
    assert not job.verdicts(1), job.said


ABORTED = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist

hung = Path(sys.argv[1])
dist.init_process_group("reft")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(16):
    if rank == 1 and step == 10 and not hung.exists():
        hung.touch()
        time.sleep(600)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(f"ended {sum(p.double().sum().item() for p in model.parameters())!r}", flush=True)
dist.destroy_process_group()
"""


def test_ranks_of_both_nodes_are_started_again_from_memory_when_one_hangs(tmp_path: Path) -> None:
    """REFT_HANG_ACTION=abort ends the ranks of the node that reports; the launchers then restart those of both."""
    script, job = tmp_path / "train.py", f"hang-{free_port()}"
    script.write_text(ABORTED)
    outputs = [tmp_path / f"node{node}.txt" for node in (0, 1)]
    environment = job_environment(
        tmp_path, REFT_JOB_ID=job, REFT_HANG_SUSPECT_SEC=str(SUSPECT_SEC), REFT_HANG_ACTION="abort",
        REFT_AGENT_LINGER_SEC="60", OMP_NUM_THREADS="1",
    )  # fmt: skip
    launchers = node_launchers(
        script, str(tmp_path / "hung"), ranks=1, job=job, env=environment, outputs=outputs, max_restarts=1
    )
    try:
        codes = [launcher.wait(180) for launcher in launchers]
    finally:
        kill_all([launcher.pid for launcher in launchers])
        kill_all(rank_pids(job) + agent_pids(tmp_path / "run"))
    texts = [output.read_text(errors="replace") for output in outputs]
    assert codes == [0, 0], "\n".join(texts)
    assert "culprit: rank 1 is outside any op, at train.py:" in texts[0] and "the ranks end now" in texts[0], texts[0]
    assert "exitcode: 75" in texts[0] and "resumed at step" in texts[0], texts[0]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(16):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    # The gradients of both ranks are equal, and so is their mean.
    ended = f"ended {sum(p.double().sum().item() for p in model.parameters())!r}"
    assert all(ended in text for text in texts), (ended, texts)


def test_a_healthy_job_ends_without_a_verdict(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(tmp_path, "--steps", "150"))
    assert [launcher.wait(180) for launcher in job.launchers] == [0, 0], job.said
    assert not job.verdicts(0) and not job.verdicts(1), job.said
