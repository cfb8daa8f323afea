"""However a job ends: beyond the announced linger no process, memfd, socket, directory or file of
it remains.

But for vaults in REFT_VAULT_DIR of a job that did not end cleanly, and the report on a crash: to be
found again later is what they are for.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from reft._link import agent_protocol as protocol
from tests.integration.test_agent import BINARY, TestClock, wait_for
from tests.support.launchers import Forkrun, Torchrun, TrainJob, agent_pids, kill_all, rank_pids

HERE = Path(__file__).resolve().parent


LINGER_SEC = 2
SLACK_SEC = 3


def vault_holders(job: str) -> list[str]:
    """Processes that hold a memfd with a vault of this job; other jobs of the machine are none of ours."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for fd in (process / "fd").iterdir():
                if "memfd:reft-vault" in os.readlink(fd):
                    with open(fd, "rb") as vault:
                        if b"\0" + job.encode() + b"\0" in vault.read(512):
                            found.append(process.name)
        except OSError:
            continue
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone by now"


def report_of(job: TrainJob) -> set[Path]:
    """The report on a crash, if there is one, and what is beside it."""
    node = job.run / job.job / "node-0"
    files = set(node.glob("verdicts/*-*.json")) | set(node.glob("verdicts/*-*.txt"))
    return files | {node.parent, node, node / "agent.log", node / "verdicts"} if files else set()


def below(folder: Path) -> set[Path]:
    """What is in a folder that others delete meanwhile."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return set(folder.rglob("*"))


def leftovers(job: TrainJob, vaults: Path | None, clean: bool) -> list[str]:
    found = [f"agent {pid}" for pid in job.agents]
    found += [f"rank {pid}: {command_of(pid)}" for pid in rank_pids(job.job)]
    found += [f"memfd in process {pid}" for pid in vault_holders(job.job)]
    found += [str(path) for path in below(job.run) - report_of(job)]
    kept = (
        set()
        if clean or not vaults
        else {vaults / job.job, *(vaults / job.job / f"rank-{r}.vault" for r in range(job.nproc))}
    )
    found += [str(path) for path in vaults.rglob("*") if path not in kept] if vaults else []
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ending", "files"),
    [
        ("normal", False),
        ("normal", True),
        ("crash", True),
        ("ctrl_c", False),
        ("sigterm", False),
        ("kill9_torchrun", False),
        ("kill9_all", True),
        *(
            pytest.param(*case, marks=pytest.mark.more)
            for case in [("crash", False), ("ctrl_c", True), ("sigterm", True), ("kill9_torchrun", True), ("kill9_all", False)]
        ),
    ],
)
def test_nothing_remains(folder: Path, ending: str, files: bool) -> None:
    vaults = folder / "vaults" if files else None
    env = {"REFT_AGENT_LINGER_SEC": str(LINGER_SEC)}
    if vaults:
        vaults.mkdir()
        env["REFT_VAULT_DIR"] = str(vaults)
    clean = ending in ("normal", "kill9_torchrun")  # ranks of a torchrun that is gone come to their end
    job = TrainJob(Torchrun(), folder, f"cleanup-{ending}-{os.getpid()}")
    try:
        if ending == "normal":
            job.start(**env).wait()
        elif ending == "crash":
            assert job.start("--crash-at", "8", **env).wait() != 0
        else:
            # Ranks of a torchrun that was killed go on to the end of their training: it is made
            # short.
            job.start("--steps", "200", "--delay", "0.02", **env).until_step(6)
            assert len(job.agents) == 1
            number = {"ctrl_c": signal.SIGINT, "sigterm": signal.SIGTERM}.get(ending, signal.SIGKILL)
            os.kill(job.launcher.pid, number)
            if ending == "kill9_all":
                job.kill_ranks()
            job.launcher._process.wait(40)
            end = time.monotonic() + 30
            while rank_pids(job.job) and time.monotonic() < end:
                time.sleep(0.05)
        end = time.monotonic() + LINGER_SEC + SLACK_SEC
        while leftovers(job, vaults, clean) and time.monotonic() < end:
            time.sleep(0.05)
        assert leftovers(job, vaults, clean) == []
        if ending in ("ctrl_c", "sigterm"):
            # On a busy machine a rank may fail of its peer's end before its own signal comes: that
            # is a crash. There is no report where all ranks got it.
            for path in report_of(job):
                if path.suffix == ".json":
                    report = json.loads(path.read_text())
                    assert not report["outside"] and report["victims"], report["screen"]
        else:
            crashed = ending in ("crash", "kill9_all")
            assert sorted({path.suffix for path in report_of(job)}) == (
                ["", ".json", ".log", ".txt"] if crashed else []
            )
    finally:
        kill_all(rank_pids(job.job) + job.agents)


@pytest.mark.timeout(120)
@pytest.mark.skipif(BINARY is None, reason="needs reft-agent")
def test_snapshots_outlive_a_crash_for_the_linger(folder: Path) -> None:
    """The agent does not leave at once when ranks fail: a launcher may start them again."""
    clock = TestClock(folder / "clock")
    agent = folder / "reft-agent"
    agent.write_text(f'#!/bin/sh\nexec "{BINARY}" "$@" --test-clock "{clock.path}"\n')
    agent.chmod(0o755)
    job = TrainJob(Torchrun(), folder, "cleanup-linger")

    def status() -> dict[str, Any]:
        socket = job.run / job.job / "node-0" / "agent.sock"
        with protocol.AgentConnection(socket, timeout_sec=30) as tool:
            return tool.request(protocol.STATUS_REQUEST)[1]

    try:
        environment = {"REFT_AGENT_PATH": str(agent), "REFT_AGENT_LINGER_SEC": "3600"}
        assert job.start("--crash-at", "8", **environment).wait() != 0
        wait_for(lambda: not any(rank["alive"] for rank in status()["ranks"]))
        clock.advance(1800)
        ticks = status()["agent"]["ticks"]
        wait_for(lambda: status()["agent"]["ticks"] >= ticks + 2)
        assert len(job.agents) == 1
        clock.advance(1801)
        wait_for(lambda: not job.agents)
    finally:
        kill_all(job.agents)


@pytest.mark.timeout(180)
def test_memory_is_flat_and_as_planned(folder: Path) -> None:
    """2,000 snapshots: ranks and agent do not grow; the vault has the size of its plan."""
    launcher = Forkrun()
    try:
        folder.joinpath("run").mkdir(mode=0o700)
        environment = {"REFT_JOB_ID": "cleanup-rss", "REFT_RUN_DIR": str(folder / "run"), "REFT_AGENT_LINGER_SEC": "1"}
        out = folder / "rss.json"
        launcher.start([str(HERE / "rss_worker.py"), str(out)], environment, folder / "log", 2, 0)
        end = time.monotonic() + 150
        while (code := launcher.poll()) is None and time.monotonic() < end:
            time.sleep(0.05)
        assert code == 0, (folder / "log").read_text()[-3000:]
    finally:
        launcher.close()
    rows = json.loads(out.read_text())
    assert rows["captured"] >= 2000 and rows["dropped"] == rows["skipped"] == 0, rows
    assert rows["rank_rss_end"] - rows["rank_rss_early"] < 4 << 20, rows
    assert rows["agent_rss_end"] - rows["agent_rss_early"] < 1 << 20, rows
    assert rows["fds_end"] == rows["fds_early"], rows
    # Two ranks share the state; two slots. Beside the payload: tables, checksums, the object area,
    # counters and the op log.
    assert rows["payload_bytes"] == pytest.approx(rows["state_bytes"] / 2, rel=0.02), rows
    beside = rows["vault_bytes"] - 2 * rows["payload_bytes"]
    assert 0 < beside <= rows["op_log_bytes"] + 2 * (2 << 20), rows


ENDING = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("reft", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
exec(sys.argv[1])
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        ("sys.exit()", 0),
        ("raise SystemExit(3)", 3),
        ("exit(4)", 4),
        ("sys.exit('no')", 1),
        ("raise ValueError", 1),
    ],
)
def test_only_exit_status_zero_lets_snapshots_go(folder: Path, ending: str, code: int) -> None:
    script = folder / "script.py"
    script.write_text(ENDING)
    environment = os.environ | {
        "REFT_JOB_ID": "ending",
        "REFT_RUN_DIR": str(folder / "run"),
        "REFT_VAULT_DIR": str(folder / "vaults"),
        "REFT_AGENT_LINGER_SEC": "1",
    }
    (folder / "vaults").mkdir()
    done = subprocess.run(
        [sys.executable, str(script), ending], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    deadline = time.monotonic() + 20
    while agent_pids(folder / "run") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not agent_pids(folder / "run")
    assert (folder / "vaults" / "ending" / "rank-0.vault").exists() == (code != 0), done.stderr
