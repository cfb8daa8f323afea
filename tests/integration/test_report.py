"""`reft report` on a real job: while it runs, and what it left when it was killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from reft._cli.main import cli
from tests.support.launchers import agent_pids, job_environment, kill_all, torchrun

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path

dist.init_process_group("reft")
Path(sys.argv[1], f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1_000_000):
    optimizer.zero_grad()
    model(torch.ones(8, 256)).sum().backward()
    optimizer.step()
    if step == 20:
        Path(sys.argv[1], f"ready-{dist.get_rank()}").touch()
"""


def reft(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def end(scratch: Path, process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to torchrun, to the ranks, which are in sessions of their own, and to the agent."""
    process.kill()
    process.wait()
    for path in scratch.glob("pid-*"):
        kill_all([int(path.read_text())])
        path.unlink()
    kill_all(agent_pids(scratch / "run"))


@pytest.fixture(scope="module")
def job() -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    scratch = Path(tempfile.mkdtemp(prefix="reft-report-"))
    (scratch / "train.py").write_text(SCRIPT)
    environment = job_environment(scratch, REFT_JOB_ID="report", REFT_VAULT_DIR=str(scratch / "vaults"))
    with (scratch / "output").open("wb") as sink:
        command = torchrun(scratch / "train.py", str(scratch), ranks=2, options=("--standalone",))
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink)
    try:
        limit = time.monotonic() + 120
        while not all((scratch / f"ready-{rank}").exists() for rank in range(2)):
            assert process.poll() is None and time.monotonic() < limit, (scratch / "output").read_text()
            time.sleep(0.05)
        yield scratch, process
    finally:
        end(scratch, process)
        shutil.rmtree(scratch, ignore_errors=True)


def check(done: Result, ranks: int = 2) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    said: dict[str, Any] = json.loads(done.stdout)
    assert (
        said["job"] == "report"
        and said["problems"] == []
        and [rank["rank"] for rank in said["ranks"]] == list(range(ranks))
    )
    for rank in said["ranks"]:
        numbers = [step["step"] for step in rank["steps"]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and len(numbers) >= 4
        for step in rank["steps"]:
            assert step["end_ns"] > step["begin_ns"]
            # A quarter of a MiB of weights, twice that of the optimizer; half of it each rank's. A
            # newer snapshot may be under way.
            assert sum(step["copied_bytes"].values()) in range(300_000, 600_000), step
            assert 0 < step["capture_ns"] < step["end_ns"] - step["begin_ns"], step
    return said


def test_a_live_job(job: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    scratch, _ = job
    check(reft("report", "--json", "--steps", "4", "--run-dir", scratch / "run"))
    page, trace = tmp_path / "timeline.html", tmp_path / "trace.json"
    done = reft("report", "--run-dir", scratch / "run", "--html", page, "--trace", trace)
    assert done.exit_code == 0, done.output
    assert "job report" in done.stdout and "of the bytes were copied" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()[:4]) <= 80, done.stdout
    assert "<svg" in page.read_text() and "rank 1" in page.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"all_reduce", "capture"} <= {event["name"] for event in events}
    done = reft("report", "--run-dir", scratch / "run", "--html", tmp_path / "absent" / "timeline.html")
    assert done.exit_code == 1 and "cannot write" in done.stderr


def test_what_a_killed_job_left(job: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    scratch, process = job
    end(scratch, process)
    check(reft("report", "--json", "--steps", "4", "--vault-dir", scratch / "vaults"))
    # One of the vaults is broken: the other one is shown, and the exit code says it.
    broken = tmp_path / "vaults"
    shutil.copytree(scratch / "vaults", broken)
    first = sorted(broken.rglob("*.vault"))[0]
    first.write_bytes(first.read_bytes()[:5000])
    done = reft("report", "--vault-dir", broken)
    assert done.exit_code == 1 and str(first) in done.stderr and "job report" in done.stdout


def test_nothing_to_look_at(tmp_path: Path) -> None:
    done = reft("report", "--run-dir", tmp_path)
    assert done.exit_code == 3 and "no agent runs here" in done.stderr
    done = reft("report", "--vault-dir", tmp_path)
    assert done.exit_code == 3 and "no *.vault" in done.stderr
