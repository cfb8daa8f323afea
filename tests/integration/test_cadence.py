"""REFT_SNAPSHOT_OVERHEAD_PERCENT: snapshots become rarer at the same step on all ranks, and what is resumed is the newest of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launchers import agent_pids, free_port, job_environment, kill_all, torchrun

HERE = Path(__file__).resolve().parent


STEPS = 300
LIMITED = {"REFT_SNAPSHOT_OVERHEAD_PERCENT": "10"}
COST_SEC = 0.3


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="reft-cadence-"))
    yield path
    kill_all(agent_pids(path / "run"))
    shutil.rmtree(path, ignore_errors=True)


def train(root: Path, kill: bool, **settings: str) -> tuple[Path, str]:
    """Where the ranks wrote, and what they said."""
    out = root / ("killed-job" if kill else "whole-job")
    out.mkdir()
    if kill:
        (out / "kill").touch()
    options = ("--standalone", f"--max-restarts={int(kill)}", "--monitor-interval=0.1")
    command = torchrun(
        HERE / "cadence_worker.py", str(STEPS), str(out), str(COST_SEC if kill else 0), ranks=2, options=options
    )
    environment = job_environment(
        root, REFT_JOB_ID=out.name, REFT_AGENT_LINGER_SEC="60", OMP_NUM_THREADS="1", **settings
    )
    log = out / "log"
    with log.open("w") as said:
        try:
            code = subprocess.run(
                command, env=environment, stdout=said, stderr=subprocess.STDOUT, timeout=240
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    assert code == 0, f"{code}\n{log.read_text()[-6000:]}"
    return out, log.read_text()


def taken(out: Path, attempt: int, rank: int) -> list[int]:
    return [int(line) for line in (out / f"taken-{attempt}-{rank}").read_text().split()]


def ends(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"end-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(600)
def test_rarer_on_all_ranks_at_the_same_step_and_resumed_from_the_newest(root: Path) -> None:
    out, said = train(root, kill=True, **LIMITED)
    assert (out / "killed").exists(), f"snapshots did not become rare enough\n{said[-4000:]}"
    killed_at, every, committed = map(int, (out / "killed").read_text().split())
    first, second = taken(out, 0, 0), taken(out, 0, 1)
    common = min(first[-1], second[-1])
    assert [s for s in first if s <= common] == [s for s in second if s <= common]
    assert first[:40] == list(range(2, 42)), "at every step while nothing is known"
    assert any(b - a > 1 for a, b in zip(first, first[1:], strict=False)), first
    assert committed == max(s for s in second if s <= killed_at) and committed % every == 0
    resumed = re.findall(r"resumed at step (\d+)", said)
    assert resumed == [str(committed)], said[-4000:]
    # A restart begins with a snapshot at every step again. Its loop's counter is put back too.
    after = taken(out, 1, 0)
    assert after[1:6] == list(range(committed + 1, committed + 6)), after[:10]
    assert re.search(r"from step \d+ on: a snapshot every \d+ steps costs .* \(measured\)", said), said[-4000:]
    for end in ends(out):
        assert end["status"]["errors"] == end["status"]["dropped"] == 0, end["status"]
        assert end["status"]["steps"] == STEPS

    whole, _ = train(root, kill=False, **LIMITED)
    assert [end["exact"] for end in ends(out)] == [end["exact"] for end in ends(whole)]
    assert [end["weights"] for end in ends(out)] == [end["weights"] for end in ends(whole)]


@pytest.mark.timeout(400)
def test_two_nodes_agree_through_the_store(root: Path) -> None:
    steps = 150
    port = free_port()
    environment = job_environment(
        root, REFT_JOB_ID="two-nodes", REFT_SNAPSHOT_SLOTS="3", OMP_NUM_THREADS="1", **LIMITED
    )
    nodes = []
    for node in range(2):
        options = ["--nnodes=2", f"--node-rank={node}", "--max-restarts=0", "--rdzv-backend=c10d"]
        options += [f"--rdzv-endpoint=localhost:{port}", f"--rdzv-id=cadence-{port}"]
        command = torchrun(HERE / "cadence_worker.py", str(steps), str(root), str(COST_SEC), ranks=1, options=options)
        with (root / f"node-{node}.txt").open("w") as said:
            nodes.append(subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT))
    try:
        codes = [node.wait(300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    said_by_all = "".join((root / f"node-{node}.txt").read_text() for node in range(2))
    assert codes == [0, 0], said_by_all[-6000:]
    first, second = taken(root, 0, 0), taken(root, 0, 1)
    assert first == second
    assert any(b - a > 1 for a, b in zip(first, first[1:], strict=False)), first
    for end in ends(root):
        assert end["status"]["committed_step"] >= first[-2], "commits go on after snapshots have become rare"
        assert end["status"]["skipped"] == 0, end["status"]["note"]


@pytest.mark.timeout(300)
def test_without_a_limit_every_step_is_protected_and_the_cost_is_measured(root: Path) -> None:
    out, said = train(root, kill=False, REFT_SNAPSHOT_CONTROL_EVERY="2")
    for rank, end in enumerate(ends(out)):
        assert taken(out, 0, rank) == list(range(2, STEPS + 1))
        status = end["status"]
        assert status["every"] == 1 and status["captured"] == status["sealed"] == STEPS, status
        assert status["overhead_noise_ppm"] >= 0, "known"
        assert status["at_once_copied_bytes"] > 0.4 * status["bytes_copied"], "every second step was a control step"
    cost = r"(-?\d+\.\d+ % ± \d+\.\d+ % of the mean step \(measured|at most \d+\.\d+ % of the mean step \(within noise)"
    assert re.search(rf"a snapshot every step costs {cost}", said), said[-3000:]
